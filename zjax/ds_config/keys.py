"""Every key of a DeepSpeed config file and its one fate, by dotted path.

The keys and their defaults are those of DeepSpeed's config classes and of its page of JSON options. A key has exactly one
fate; an `AUTO` value, an alias and a switched-off section are resolved before it is looked up (`read.py`).
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
"""The value that Hugging Face's integration fills in from the training arguments."""


class Fate(enum.Enum):
    """What becomes of a key."""

    MAPPED = "mapped"
    """It sets knobs of zjax."""
    NO_MEANING = "no meaning"
    """It is accepted and changes nothing, because XLA or zjax does without it."""
    DEPRECATED = "deprecated"
    """It is read as the key that replaced it, with a DeprecationWarning."""
    REJECTED = "rejected"
    """Another value than a harmless one raises, and says what to use instead."""
    NOT_YET = "not available"
    """Another value than a harmless one raises: the feature is still to come."""


@dataclass(frozen=True)
class Key:
    """One key: its fate, the kind of its value, and what a user is told."""

    fate: Fate
    kind: str
    """`bool`, `int` (5e8 is one), `size` (an int of 0 or more), `number`, `text`, `list`, `any`, or `section` (a section whose
    own keys are not read)."""
    text: str = ""
    """Why it has no meaning, what to use instead, or the feature it belongs to."""
    becomes: tuple[str, ...] = ()
    """The knobs a mapped key sets; the one key that replaced a deprecated one."""
    harmless: tuple[Any, ...] = ()
    """Values of a rejected key, or of one of a feature to come, that ask for nothing."""
    auto: bool = False
    """Whether `auto` is filled in from the config."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Values of a mapped key, in lower case, that raise, and what to use instead."""


def mapped(kind: str, *becomes: str, auto: bool = False, refused: Mapping[str, str] = types.MappingProxyType({})) -> Key:
    """A key that sets the knobs `becomes`."""
    return Key(Fate.MAPPED, kind, becomes=becomes, auto=auto, refused=refused)


def no_meaning(kind: str, why: str) -> Key:
    """A key that is reported and changes nothing."""
    return Key(Fate.NO_MEANING, kind, why)


def deprecated(kind: str, new: str = "", why: str = "") -> Key:
    """A key that is read as `new`; without one it has no meaning any more."""
    return Key(Fate.DEPRECATED, kind, why, becomes=(new,) if new else ())


def rejected(kind: str, instead: str, *harmless: Any) -> Key:
    """A key that raises."""
    return Key(Fate.REJECTED, kind, instead, harmless=harmless)


def not_yet(kind: str, feature: str, *harmless: Any) -> Key:
    """A key of a feature to come."""
    return Key(Fate.NOT_YET, kind, feature, harmless=harmless)


# What is said of more than one key.
_COMBINED = "a unit's leaves are gathered and scattered by one combined collective; there are no buckets"
_SCHEDULED = "XLA schedules the collectives of a compiled step beside its computation"
_PREALLOCATED = "XLA assigns every buffer when it compiles the step"
_COMPILED = "the whole step is one compiled program"
_LOGGED = "every step is a line of metrics.jsonl and a TensorBoard event; zjax plan and zjax audit show memory and traffic"
_SCALED = "it keeps float16 sums in range, which the loss's seed does here; bfloat16 and float32 have the range"
_MASTER = "the master weights are float32; leave it false, and set optimizer.moment_dtype='bfloat16' for a bfloat16 first moment"
_ONE_BIT = "belongs to the 1-bit optimizers, which compress gradients; use AdamW or Lamb"
_AUTOCAST = "dtypes are explicit in JAX; enable bf16 or fp16 instead"
_CHECKPOINTS = "a checkpoint is written in shards, in the background, and any plan can read it"
_TP_RULES = "give the dims that a tensor axis shards as build_plan(rules=[zjax.rules.tensor_parallel(...)])"
_RESEARCH = "changes the model or its data, not how they are sharded; do it in the model or the data pipeline"
_REMAT = "what is saved between forward and backward is chosen with remat"
_EXPERT = "expert parallelism (the mesh axis expert)"
_OFFLOAD = "offload to the host (DeepSpeed ZeRO-Offload, ZeRO-Infinity)"
_OFFLOAD_PARAM = "offload of parameters to the host or NVMe (DeepSpeed ZeRO-Infinity)"
_OFFLOAD_OPTIMIZER = "offload of optimizer state to the host or NVMe (DeepSpeed ZeRO-Offload)"
_ZENFLOW = "ZenFlow (offload with selective updates)"
_SEQUENCE = "sequence parallelism (DeepSpeed Ulysses, the mesh axis sequence)"
_PIPELINE = "pipeline parallelism (the mesh axis pipeline)"
_QUANTIZED = "quantized collectives (ZeRO++ qwZ, qgZ, LoCo)"
_LIBAIO = "libaio serves NVMe offload alone"

_BATCH = ("data.global_batch", "accumulation.micro_batches")
_SCALE = "precision.loss_scale."

TOP: Mapping[str, Any] = {
    "train_batch_size": mapped("int", *_BATCH, auto=True),
    "train_micro_batch_size_per_gpu": mapped("int", *_BATCH, auto=True),
    "gradient_accumulation_steps": mapped("int", *_BATCH, auto=True),
    "managed_gradient_accumulation": rejected("bool", "the step accumulates and updates itself; set gradient_accumulation_steps", True),
    "sequence_parallel_size": not_yet("int", _SEQUENCE, 1),
    "gradient_clipping": mapped("number", "clip", auto=True),
    "prescale_gradients": no_meaning("bool", _SCALED),
    "gradient_predivide_factor": no_meaning("number", _SCALED),
    "gradient_allreduce_op": rejected("text", "the loss is a mean over the weight of the global batch; scale the loss for a sum", "mean"),
    "communication_data_type": mapped("text", "precision.reduce"),
    "seq_parallel_communication_data_type": not_yet("text", _SEQUENCE, "fp32"),
    "seq_parallel_comm_data_type": not_yet("text", _SEQUENCE, "fp32"),
    "sparse_gradients": rejected("bool", "XLA has no sparse all-reduce; an embedding's gradient is dense, so leave it false", False),
    "disable_allgather": no_meaning("bool", _SCHEDULED),
    "data_types": {
        "grad_accum_dtype": mapped("text", "precision.accumulate"),
        "param_dtype": mapped("text", "precision.compute"),
        "buffer_dtype": rejected("text", "buffers keep the dtype the model gives them; cast them there"),
    },
    "zero_allow_untested_optimizer": no_meaning("bool", "any optax optimizer is sharded, by the shapes of its state"),
    "zero_force_ds_cpu_optimizer": no_meaning("bool", "the optimizer runs where its state lies, on the devices"),
    "steps_per_print": no_meaning("number", _LOGGED),
    "wall_clock_breakdown": no_meaning("bool", _LOGGED),
    "memory_breakdown": no_meaning("bool", _LOGGED),
    "dump_state": no_meaning("bool", _LOGGED),
    "log_level": no_meaning("any", _LOGGED),
    "timers": no_meaning("section", _LOGGED),
    "vocabulary_size": no_meaning("int", "zjax plan says of every leaf whether a dim of it divides, and why not"),
    "dataloader_drop_last": no_meaning("bool", "batches are cut from an endless order of the corpus; none is partial"),
    "torch_autocast": {
        "enabled": rejected("bool", _AUTOCAST, False),
        "dtype": rejected("text", _AUTOCAST),
        "lower_precision_safe_modules": rejected("list", _AUTOCAST),
    },
    "amp": rejected("section", "NVIDIA Apex has no counterpart; enable bf16 or fp16 instead"),
    "graph_harvesting": no_meaning("bool", _COMPILED),
    "use_data_before_expert_parallelism": not_yet("bool", _EXPERT, False),
    "aio": {
        name: no_meaning(kind, _LIBAIO)
        for name, kind in {
            "block_size": "int", "queue_depth": "int", "intra_op_parallelism": "int", "thread_count": "int",
            "single_submit": "bool", "overlap_events": "bool", "use_gds": "bool",
        }.items()
    },
    "allgather_size": deprecated("size", "zero_optimization.allgather_bucket_size"),
    "bfloat16": deprecated("section", "bf16"),
}  # fmt: skip

ZERO: Mapping[str, Any] = {
    "stage": mapped("int", "zero.stage"),
    "contiguous_gradients": no_meaning("bool", _PREALLOCATED),
    "reduce_scatter": no_meaning("bool", "the plan says whether gradients are scattered: from stage 2 on"),
    "reduce_bucket_size": no_meaning("size", _COMBINED),
    "use_multi_rank_bucket_allreduce": no_meaning("bool", _COMBINED),
    "allgather_partitions": no_meaning("bool", _COMBINED),
    "allgather_bucket_size": no_meaning("size", _COMBINED),
    "overlap_comm": no_meaning("bool", _SCHEDULED),
    "load_from_fp32_weights": no_meaning("bool", "a checkpoint holds the float32 master weights, and they are what is restored"),
    "elastic_checkpoint": deprecated("bool", why=_CHECKPOINTS),
    "offload_param": {
        "device": not_yet("text", _OFFLOAD_PARAM, "none"),
        "nvme_path": not_yet("text", _OFFLOAD_PARAM),
        "buffer_count": not_yet("int", _OFFLOAD_PARAM),
        "buffer_size": not_yet("size", _OFFLOAD_PARAM),
        "max_in_cpu": not_yet("size", _OFFLOAD_PARAM),
        "pin_memory": not_yet("bool", _OFFLOAD_PARAM),
    },
    "offload_optimizer": {
        "device": not_yet("text", _OFFLOAD_OPTIMIZER, "none"),
        "nvme_path": not_yet("text", _OFFLOAD_OPTIMIZER),
        "buffer_count": not_yet("int", _OFFLOAD_OPTIMIZER),
        "pin_memory": not_yet("bool", _OFFLOAD_OPTIMIZER),
        "pipeline_read": not_yet("bool", _OFFLOAD_OPTIMIZER),
        "pipeline_write": not_yet("bool", _OFFLOAD_OPTIMIZER),
        "fast_init": not_yet("bool", _OFFLOAD_OPTIMIZER),
        "ratio": not_yet("number", _OFFLOAD_OPTIMIZER),
        "super_offload": not_yet("bool", _OFFLOAD_OPTIMIZER),
        "cpuadam_cores_perc": not_yet("number", _OFFLOAD_OPTIMIZER),
    },
    "zenflow": {
        name: not_yet("any", _ZENFLOW)
        for name in (
            "topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload",
            "auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc",
        )
    },
    "sub_group_size": no_meaning("size", "the optimizer's update is compiled into the step; XLA tiles it"),
    "cpu_offload": deprecated("bool", "zero_optimization.offload_optimizer"),
    "cpu_offload_param": deprecated("bool", "zero_optimization.offload_param"),
    "cpu_offload_use_pin_memory": deprecated("bool", why="offload takes pinned memory always"),
    "stage3_prefetch_bucket_size": mapped("size", "zero.prefetch", auto=True),
    "stage3_param_persistence_threshold": mapped("size", "zero.persistence_threshold", auto=True),
    "stage3_model_persistence_threshold": rejected(
        "size", "persistent parameters have no common cap; lower stage3_param_persistence_threshold", sys.maxsize
    ),
    "stage3_max_live_parameters": mapped("size", "zero.max_gathered_units", "zero.prefetch"),
    "stage3_max_reuse_distance": no_meaning(
        "size", "whether a unit stays gathered until its backward is zero.reshard_after_forward, not a distance"
    ),
    "stage3_gather_16bit_weights_on_model_save": no_meaning("bool", _CHECKPOINTS),
    "stage3_gather_fp16_weights_on_model_save": deprecated("bool", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    "stage3_module_granularity_threshold": no_meaning("size", _COMBINED),
    "stage3_use_all_reduce_for_fetch_params": no_meaning("bool", "parameters are gathered by all-gathers"),
    "stage3_allgather_sequential": no_meaning("bool", _COMBINED),
    "ignore_unused_parameters": rejected("bool", "an unused parameter's gradient is zero and is not looked for; leave it true", True),
    "legacy_stage1": rejected("bool", "DeepSpeed has removed it; leave it out", False),
    "round_robin_gradients": no_meaning("bool", "it spreads copies to the host, and there are none"),
    "zero_hpz_partition_size": not_yet("int", "secondary shards inside a host (ZeRO++ hpZ)", 1),
    "zero_quantized_weights": not_yet("bool", _QUANTIZED, False),
    "zero_quantized_nontrainable_weights": not_yet("bool", _QUANTIZED, False),
    "zero_quantized_gradients": not_yet("bool", _QUANTIZED, False),
    "zeropp_loco_param": {"err_beta": not_yet("number", _QUANTIZED), "reset_T": not_yet("int", _QUANTIZED)},
    "mics_shard_size": mapped("int", "mesh.replica", "mesh.fsdp"),
    "mics_hierarchical_params_gather": no_meaning("bool", "fsdp lies on the fast links, so a gather never leaves them"),
    "memory_efficient_linear": no_meaning("bool", _PREALLOCATED),
    "pipeline_loading_checkpoint": no_meaning("bool", _CHECKPOINTS),
    "override_module_apply": no_meaning("bool", "parameters are born sharded by a function, not by a module's apply"),
    "log_trace_cache_warnings": no_meaning("bool", "the order of units is fixed when the step is compiled"),
    "enable_sanity_checks": no_meaning("bool", "the plan is checked always, and zjax audit checks the compiled program"),
    "save_muon_momentum_buffer_in_memory": no_meaning("bool", "momentum lies in the devices' memory"),
    "leaf_module": {
        name: rejected("list", "mark the module as one unit: zjax.fully_shard(module, at=...)")
        for name in ("classes", "names", "name_suffixes")
    },
    "grad_hooks": no_meaning("bool", "gradients come from jax.grad; there are no hooks"),
}  # fmt: skip

FP16: Mapping[str, Any] = {
    "enabled": mapped("bool", "precision.compute", auto=True),
    "auto_cast": no_meaning("bool", "a unit's inputs are cast where it names its dtype, zjax.Unit(compute=...)"),
    "loss_scale": mapped("number", _SCALE + "static"),
    "initial_scale_power": mapped("int", _SCALE + "initial_power"),
    "loss_scale_window": mapped("int", _SCALE + "window"),
    "hysteresis": mapped("int", _SCALE + "hysteresis"),
    "consecutive_hysteresis": mapped("bool", _SCALE + "consecutive_hysteresis"),
    "min_loss_scale": mapped("number", _SCALE + "minimum"),
    "fused_mode": no_meaning("bool", _COMPILED),
    "fp16_master_weights_and_grads": rejected("bool", _MASTER, False),
}

BF16: Mapping[str, Any] = {
    "enabled": mapped("bool", "precision.compute", auto=True),
    "immediate_grad_update": no_meaning("bool", _COMPILED),
    "check_grad_overflow": no_meaning("bool", "the guard is always on: a step whose gradients are not finite is skipped"),
    "bf16_master_weights_and_grads": rejected("bool", _MASTER, False),
    "bf16_optimizer_states": rejected("bool", _MASTER, False),
}

_NO_ONE_BIT = "1-bit optimizers compress gradients for slow networks, and DeepSpeed refuses them with ZeRO; use {}"
_NO_MU = "its learning rates go by width; use {} with optimizer.groups and their learning_rate_scale"
_NO_OPTIMIZERS = {
    **{name: _NO_ONE_BIT.format("AdamW") for name in ("onebitadam", "zerooneadam")},
    "onebitlamb": _NO_ONE_BIT.format("Lamb"),
    **{f"mu{name.lower()}": _NO_MU.format(name) for name in ("Adam", "AdamW", "SGD")},
}

OPTIMIZER: Mapping[str, Any] = {
    "type": mapped("text", "optimizer.name", refused=_NO_OPTIMIZERS),
    "legacy_fusion": no_meaning("bool", _COMPILED),
    "params": {
        "lr": mapped("number", "optimizer.learning_rate", auto=True),
        "betas": mapped("list", "optimizer.b1", "optimizer.b2", auto=True),
        "eps": mapped("number", "optimizer.eps", auto=True),
        "weight_decay": mapped("number", "optimizer.weight_decay", auto=True),
        "momentum": mapped("number", "optimizer.momentum"),
        "nesterov": mapped("bool", "optimizer.nesterov"),
        "torch_adam": mapped("bool", "optimizer.weight_decay"),
        "adam_w_mode": mapped("bool", "optimizer.name"),
        "muon_lr": mapped("number", "optimizer.learning_rate"),
        "adam_lr": mapped("number", "optimizer.adam_learning_rate"),
        "ns_method": no_meaning("text", "optax's Newton-Schulz iteration is used"),
        "max_grad_norm": rejected("number", "use gradient_clipping", 0, 0.0),
        "bias_correction": mapped("bool", "optimizer.bias_correction"),
        "max_coeff": mapped("number", "optimizer.max_coeff"),
        "min_coeff": mapped("number", "optimizer.min_coeff"),
        "initial_accumulator_value": mapped("number", "optimizer.initial_accumulator_value"),
        "amsgrad": rejected("bool", "DeepSpeed's own Adam does not have it either; leave it false", False),
        "dampening": rejected("number", "optax's sgd has none", 0, 0.0),
        "lr_decay": rejected("number", "use a scheduler", 0, 0.0),
        "fused": no_meaning("bool", _COMPILED),
        "foreach": no_meaning("bool", _COMPILED),
        "set_grad_none": no_meaning("bool", _PREALLOCATED),
        **{
            name: rejected("any", _ONE_BIT)
            for name in (
                "freeze_step", "cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler",
                "local_step_scaler", "local_step_clipper", "coeff_beta", "factor_max", "factor_min", "factor_threshold",
            )
        },
    },
}  # fmt: skip


def _argument(kind: str, name: str, *, auto: bool = False) -> Key:
    return mapped(kind, f"optimizer.schedule_arguments.{name}", auto=auto)


SCHEDULER: Mapping[str, Any] = {
    "type": mapped("text", "optimizer.schedule"),
    "params": {
        **{
            name: _argument("number", name, auto=True)
            for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        },
        **{
            name: _argument("number", name)
            for name in (
                "warmup_min_ratio", "cos_min_ratio",
                "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
                "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
                "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size",
                "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
            )
        },
        "warmup_type": _argument("text", "warmup_type"),
        "lr_range_test_staircase": _argument("bool", "lr_range_test_staircase"),
        "cycle_momentum": _argument("bool", "cycle_momentum"),
        "last_batch_iteration": rejected("int", "a run resumes its schedule from its checkpoint; leave it out", -1),
    },
}  # fmt: skip

OTHER: Mapping[str, Any] = {
    "activation_checkpointing": {
        "partition_activations": no_meaning("bool", f"it partitions over model-parallel ranks what DeepSpeed's checkpoint() saves; {_REMAT}"),
        "cpu_checkpointing": rejected("bool", f"{_REMAT}, and where it is kept too; leave it false", False),
        "contiguous_memory_optimization": no_meaning("bool", _PREALLOCATED),
        "number_checkpoints": no_meaning("int", _REMAT),
        "synchronize_checkpoint_boundary": no_meaning("bool", _COMPILED),
        "profile": no_meaning("bool", _LOGGED),
    },
    "compile": {
        "deepcompile": no_meaning("bool", _COMPILED),
        "passes": no_meaning("list", _COMPILED),
        "offload_activation": rejected("bool", f"{_REMAT}, and where it is kept too; leave it false", False),
        "offload_opt_states": not_yet("bool", _OFFLOAD, False),
        "offload_parameters": not_yet("bool", _OFFLOAD, False),
        **{
            name: no_meaning("bool", _COMPILED)
            for name in (
                "double_buffer", "symmetric_memory", "free_activation", "debug_log", "sync_before_reduce", "sync_after_reduce",
                "sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors",
            )
        },
        "free_activation_threshold": no_meaning("size", _COMPILED),
    },
    "tensor_parallel": {
        "autotp_size": mapped("int", "mesh.tensor"),
        "tp_overlap_comm": no_meaning("bool", _SCHEDULED),
        "tp": {"tp_size": mapped("int", "mesh.tensor"), "tp_grain_size": no_meaning("int", "a dim is sharded where it divides")},
        "partition_config": {
            "layer_specs": rejected("list", _TP_RULES),
            "use_default_specs": rejected("bool", _TP_RULES, True),
        },
        "preset_model": rejected("text", _TP_RULES + "; zjax's Llama has its own"),
        "dtype": rejected("text", "enable bf16 or fp16 instead"),
        "keep_module_on_host": rejected("bool", "parameters are born in their shards; leave it false", False),
        "injection_policy_tuple": rejected("list", _TP_RULES),
        "kernel_inject": rejected("bool", "it is for inference; leave it false", False),
    },
    "expert_parallel": {
        "enabled": not_yet("bool", _EXPERT, False),
        **{
            name: not_yet("any", _EXPERT)
            for name in (
                "autoep_size", "expert_tensor_parallel_size", "preset_model", "moe_layer_pattern", "router_pattern", "expert_pattern",
                "use_grouped_mm", "disable_triton_grouped_mm", "route_norm", "route_scale", "score_func", "score_apply", "combine_impl",
                "row_weighting_impl", "gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank",
                "num_expert_groups", "num_limited_groups", "top_k", "load_balance_coeff", "routed_scaling_factor", "expert_w1", "expert_w2",
                "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern",
                "shared_experts_gate_pattern", "expert_activation", "validate_folding_routing", "async_split_plan",
            )
        },
    },
    "pipeline": {
        "stages": not_yet("any", _PIPELINE, AUTO, 1),
        "partition": not_yet("text", _PIPELINE, "best"),
        "seed_layers": not_yet("bool", _PIPELINE, False),
        "activation_checkpoint_interval": not_yet("int", _PIPELINE, 0),
        "pipe_partitioned": not_yet("bool", _PIPELINE, True),
        "grad_partitioned": not_yet("bool", _PIPELINE, True),
    },
    "checkpoint": {
        "tag_validation": no_meaning("text", "a checkpoint is named after its step"),
        "load_universal": no_meaning("bool", _CHECKPOINTS),
        "use_node_local_storage": rejected("bool", "all processes write to one directory that all can see; leave it false", False),
        "parallel_write": {"pipeline_stage": no_meaning("bool", _CHECKPOINTS)},
        "checkpoint_serialization": no_meaning("bool", _CHECKPOINTS),
        "writer": {
            name: no_meaning("any", _CHECKPOINTS)
            for name in ("type", "io_buffer_size", "io_buffer_double", "io_multiplier", "data_parallel", "decoupled", "show_statistics")
        },
    },
    "data_efficiency": {
        "enabled": rejected("bool", f"its sampling, curriculum or random-LTD {_RESEARCH}", False),
        "seed": no_meaning("int", "the data order comes from the config's seed"),
        "data_sampling": {
            "enabled": rejected("bool", _RESEARCH, False),
            "num_epochs": rejected("int", _RESEARCH),
            "num_workers": rejected("int", _RESEARCH),
            "pin_memory": rejected("bool", _RESEARCH),
            "curriculum_learning": rejected("section", _RESEARCH),
            "dynamic_batching": {
                "enabled": rejected("bool", _RESEARCH, False),
                **{
                    name: rejected("any", _RESEARCH)
                    for name in (
                        "metrics_path", "lr_scaling_method", "min_batch_size", "max_batch_size", "sequence_picking_order",
                        "max_tokens", "verbose",
                    )
                },
            },
        },
        "data_routing": {"enabled": rejected("bool", _RESEARCH, False), "random_ltd": rejected("section", f"random-LTD {_RESEARCH}")},
    },
    **{
        name: rejected("section", _RESEARCH)
        for name in ("curriculum_learning", "progressive_layer_drop", "eigenvalue", "sparse_attention", "compression_training", "hybrid_engine")
    },
    "autotuning": rejected("section", "zjax compare --vary=... shows configs side by side"),
    "nebula": rejected("section", _CHECKPOINTS),
    "datastates": rejected("section", _CHECKPOINTS),
    "weight_quantization": rejected("section", "it is for inference"),
    "elasticity": {
        "enabled": rejected("bool", "a run resumes on any number of devices from its checkpoint; set the batch in train_batch_size", False),
        **{
            name: rejected("any", "belongs to elasticity")
            for name in (
                "max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "min_time", "prefer_larger_batch",
                "ignore_non_elastic_batch_info", "num_gpus_per_node", "model_parallel_size", "version",
            )
        },
    },
    "flops_profiler": {
        name: no_meaning("any", _LOGGED)
        for name in ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file", "recompute_fwd_factor")
    },
    "comms_logger": {name: no_meaning("any", _LOGGED) for name in ("enabled", "verbose", "prof_all", "debug", "prof_ops")},
    **{name: no_meaning("section", _LOGGED) for name in ("tensorboard", "wandb", "comet", "csv_monitor", "monitor_config")},
}  # fmt: skip


def _dotted(section: Mapping[str, Any], path: str = "") -> dict[str, Key]:
    flat: dict[str, Key] = {}
    for name, entry in section.items():
        flat |= {path + name: entry} if isinstance(entry, Key) else _dotted(entry, f"{path}{name}.")
    return flat


KEYS = _dotted({**TOP, "zero_optimization": ZERO, "fp16": FP16, "bf16": BF16, "optimizer": OPTIMIZER, "scheduler": SCHEDULER, **OTHER})
"""Every key by its dotted path."""

ALIASES = {f"zero_optimization.{name.removeprefix('stage3_')}": f"zero_optimization.{name}" for name in ZERO if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"}  # fmt: skip
"""DeepSpeed's field names without `stage3_`, which its newer releases take too."""

SWITCHES = {"zero_optimization.offload_param": "device", "zero_optimization.offload_optimizer": "device"}
"""The key that turns a section on, where it is not `enabled`."""
