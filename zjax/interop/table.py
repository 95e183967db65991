"""The table "FSDP1 / FSDP2 / DeepSpeed / zjax" and that of DeepSpeed's keys, as markdown made by the importers themselves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zjax.config import TrainConfig
from zjax.ds_config.keys import ALIASES, KEYS, Fate
from zjax.fields import NotAvailableError
from zjax.interop.deepspeed import CLIP, OPTIMIZERS, from_deepspeed
from zjax.interop.fsdp import FSDP1_NO_MEANING, MIN_NUM_PARAMS, from_fsdp1, from_fsdp2

DEVICES = 8
NOT_AVAILABLE = "not available yet"


@dataclass(frozen=True)
class Example:
    """The same thing in three vocabularies; what zjax calls it is read from what the importers make of them.

    An entry is the importer's input, or text where the vocabulary has no argument for it.
    """

    title: str
    fsdp1: Mapping[str, Any] | str
    fsdp2: Mapping[str, Any] | str
    deepspeed: Mapping[str, Any] | str
    knobs: tuple[str, ...]
    """The knobs whose values the row shows."""
    note: str = ""


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
EXAMPLES = (
    Example("nothing sharded", {"sharding_strategy": "NO_SHARD"}, "DistributedDataParallel", _zero(stage=0), ("zero.stage",)),
    Example("optimizer state sharded", "-", "-", _zero(stage=1), ("zero.stage",)),
    Example("and gradients", "-", "-", _zero(stage=2), ("zero.stage",)),
    Example(
        "and parameters, gathered again in the backward",
        {"sharding_strategy": "FULL_SHARD"},
        {"reshard_after_forward": True},
        _zero(stage=3),
        ("zero.stage", "zero.reshard_after_forward"),
    ),
    Example(
        "parameters gathered at each unit's forward, kept until its backward",
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"reshard_after_forward": False},
        "-",
        ("zero.stage", "zero.reshard_after_forward"),
    ),
    Example(
        "sharded in groups that replicate each other",
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4)},
        {"mesh": (2, 4), "reshard_after_forward": True},
        _zero(stage=3, mics_shard_size=4),
        ("mesh.replica", "mesh.fsdp", "zero.stage"),
    ),
    Example(
        "the same, kept until the backward",
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": (2, 4)},
        {"mesh": (2, 4), "reshard_after_forward": False},
        "-",
        ("mesh.replica", "mesh.fsdp", "zero.reshard_after_forward"),
    ),
    Example("secondary shards inside a host (hpZ)", "-", {"reshard_after_forward": 4}, _zero(stage=3, zero_hpz_partition_size=4), ()),
    Example("quantized collectives (qwZ, qgZ)", "-", "-", _zero(stage=3, zero_quantized_weights=True), ()),
    Example(
        "offload to the host",
        {"cpu_offload": True},
        {"offload_policy": "CPUOffloadPolicy"},
        _zero(stage=3, offload_param={"device": "cpu"}),
        (),
    ),
    Example(
        "parameters too small to shard",
        "-",
        "-",
        _zero(stage=3, stage3_param_persistence_threshold=100_000),
        ("zero.persistence_threshold",),
        "DeepSpeed's default; FSDP's and zjax's is 0",
    ),
    Example(
        "parameters left whole",
        {"ignored_states": ["*norm*"]},
        {"ignored_params": ["*norm*"]},
        "-",
        ("zero.ignored",),
        "gradients are reduced all the same",
    ),
    Example("a unit gathered ahead", {"backward_prefetch": "BACKWARD_PRE"}, "set_modules_to_backward_prefetch", _zero(stage=3), ("zero.prefetch",), "in both directions, with `remat=\"full\"`"),
    Example("none gathered ahead", {"backward_prefetch": None}, "-", _zero(stage=3, stage3_prefetch_bucket_size=0), ("zero.prefetch",)),
    Example("units that are whole at once: bounded", {"limit_all_gathers": True}, "always", "-", ("zero.max_gathered_units",), "None is prefetch + 1, in the explicit engine"),
    Example("unbounded", {"limit_all_gathers": False}, "-", "-", ("zero.max_gathered_units",)),
    Example("as few as can be", "-", "-", _zero(stage=3, stage3_max_live_parameters=0), ("zero.max_gathered_units", "zero.prefetch")),
    Example("micro-batches", {"micro_batches": 2}, "a loop", {"gradient_accumulation_steps": 2}, ("accumulation.micro_batches",)),
    Example(
        "accumulated without communication",
        {"no_sync": True, "micro_batches": 4},
        "set_requires_gradient_sync(False)",
        "no_sync(), stages 0 and 1",
        ("accumulation.mode",),
    ),
    Example(
        "parameters kept over all micro-batches",
        {"no_sync": True, "sharding_strategy": "SHARD_GRAD_OP", "micro_batches": 4},
        "set_reshard_after_backward(False)",
        "-",
        ("zero.reshard_after_backward",),
    ),
    Example(
        "mixed precision",
        {"mixed_precision": _BF16},
        {"mp_policy": _BF16},
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        ("precision.compute", "precision.reduce"),
    ),
    Example(
        "float16 with loss scaling",
        "ShardedGradScaler",
        "GradScaler",
        {"fp16": {"enabled": True, "loss_scale_window": 500}},
        ("precision.compute", "precision.loss_scale.window"),
        "by DeepSpeed's rule",
    ),
    Example("global norm clipping", "clip_grad_norm_()", "torch.nn.utils.clip_grad_norm_", {"gradient_clipping": CLIP}, ("clip",)),
)  # fmt: skip

TEXTS = (
    ("what a shard is", "a slice of a FlatParameter", "a DTensor, dim 0 cut", "a slice of flat partitions", "each leaf keeps its shape; its largest free dim that divides is cut, or it stays whole with a reason"),
    ("what travels together", "one FlatParameter a wrapped module", "one collective a fully_shard call", "reduce_bucket_size, allgather_bucket_size", "one combined collective a unit (`zjax.xla_flags` sets XLA's threshold to the largest unit)"),
    ("wrapping by size", f"size_based_auto_wrap_policy(min_num_params={MIN_NUM_PARAMS:_})", "-", "stage3_module_granularity_threshold", f"`units=zjax.wrap_by_size(model, {MIN_NUM_PARAMS:_})`"),
    ("wrapping by class", "transformer_auto_wrap_policy, ModuleWrapPolicy", "fully_shard(block)", "leaf_module", '`zjax.fully_shard(block, at="layers")`, `units=("layers[*]",)`'),
    ("a unit with a policy of its own", "-", "fully_shard(block, mp_policy=...)", "-", '`zjax.Unit("head", compute=..., reduce=..., output=..., reshard_after_forward=...)`'),
    ("which dim is cut", "-", "shard_placement_fn", "-", "`build_plan(shard_placement=...)`, or rules"),
    ("hybrid: all-reduce on the last micro-batch", "-", "set_requires_all_reduce(False)", "-", "always, in the explicit engine"),
    ("born sharded", "param_init_fn, the meta device", "to_empty, the meta device", "zero.Init", "`init_state(plan, key)`"),
    ("whole weights", "StateDictType.FULL_STATE_DICT, summon_full_params", "full_state_dict=True", "stage3_gather_16bit_weights_on_model_save", "`zjax export`; `state.params` are global arrays"),
    ("checkpoint in shards", "StateDictType.SHARDED_STATE_DICT", "torch.distributed.checkpoint", "universal checkpoints", "`Checkpointer(dir).save(state)`; any plan restores it"),
    ("checkpoint of each rank's own", "StateDictType.LOCAL_STATE_DICT", "-", "save_checkpoint", "none: it would bind a checkpoint to its world size"),
    ("optimizer state by parameter", "optim_state_dict()", "get_optimizer_state_dict", "safe_get_full_optimizer_state", "`state.opt_state` is optax's own, of global arrays"),
    ("communication of one's own", "register_comm_hook", "set_custom_all_gather, set_all_reduce_hook", "-", "none: the plan says what moves"),
)  # fmt: skip
"""Rows that no knob stands for: (what, FSDP1, FSDP2, DeepSpeed, zjax)."""

_TEXT_OF_FATE = {
    Fate.MAPPED: "sets {}",
    Fate.NO_MEANING: "no meaning: {}",
    Fate.DEPRECATED: "deprecated: {}",
    Fate.REJECTED: "rejected: {}",
    Fate.NOT_YET: "not available yet: {}",
}


def vocabulary_markdown() -> str:
    """The text of docs/vocabulary.md.

    Raises:
      AssertionError: two importers disagree about a row.
    """
    parts = [
        "# FSDP1, FSDP2, DeepSpeed and zjax",
        "Made by `scripts/make_vocabulary.py` from what `zjax.interop` does; a test compares the two. What FSDP was told becomes configs with "
        "`zjax.interop.from_fsdp1` and `zjax.interop.from_fsdp2`, a DeepSpeed config with `zjax.interop.from_deepspeed`, `ZeroConfig.from_deepspeed` or "
        "`zjax train --deepspeed=ds.json`. `zjax plan --deepspeed=ds.json --explain` shows what becomes of each key of a file.",
        "## The same things by four names",
        _table(("", "FSDP1", "FSDP2", "DeepSpeed", "zjax"), [*map(_example_row, EXAMPLES), *TEXTS]),
        "These arguments of FSDP1 change nothing:",
        _table(("argument", "why"), [(f"`{name}`", why) for name, why in FSDP1_NO_MEANING.items()]),
        "## DeepSpeed's optimizers",
        _table(("`optimizer.type`", "zjax", "what is not given"), [(f"`{kind}`", f"`{name}`", _code(defaults)) for kind, (name, defaults) in OPTIMIZERS.items()]),
        "`Adam` is AdamW unless `adam_w_mode` is false, as in DeepSpeed; then it is zjax's `adam`. With `torch_adam` AdamW's weight decay is 0.01 where none is given. "
        "Adagrad's eps is squared: torch adds it to the root, optax below it. OneCycle cycles the betas of the first four unless `cycle_momentum` is false, whatever they were.",
        "## DeepSpeed's keys",
        "Unknown keys raise, at every level. Names without `stage3_` mean the same: " + ", ".join(f"`{alias.rpartition('.')[2]}`" for alias in ALIASES) + ".",
        _table(("key", "what becomes of it"), [(f"`{path}`", _fate_text(path)) for path in KEYS]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def zjax_of(example: Example) -> str:
    """The zjax column of a row: the knobs as every importer sets them, or that the feature is not available yet."""
    importers: tuple[tuple[Mapping[str, Any] | str, Callable[[Any], Any]], ...] = (
        (example.fsdp1, lambda arguments: from_fsdp1(**arguments)),
        (example.fsdp2, lambda arguments: from_fsdp2({"": arguments})),
        (example.deepspeed, lambda keys: from_deepspeed(keys, TrainConfig(), devices=DEVICES)),
    )
    found = set()
    for given, importer in importers:
        if isinstance(given, str):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = importer(given)
        except NotAvailableError:
            found.add(NOT_AVAILABLE)
            continue
        found.add(", ".join(f"`{knob}={_value(config, knob)!r}`" for knob in example.knobs))
    assert len(found) == 1, f"{example.title}: the importers disagree: {found}"
    return found.pop()


def _value(config: Any, knob: str) -> Any:
    for part in knob.split("."):
        config = getattr(config, part)
    return config


def _example_row(example: Example) -> tuple[str, ...]:
    zjax = zjax_of(example) + (f" ({example.note})" if example.note else "")
    fsdp = (given if isinstance(given, str) else _code(given) for given in (example.fsdp1, example.fsdp2))
    keys = example.deepspeed
    deepspeed = keys if isinstance(keys, str) else ", ".join(f"`{json.dumps({name: value})[1:-1]}`" for name, value in keys.get("zero_optimization", keys).items())  # fmt: skip
    return (example.title, *fsdp, deepspeed, zjax)


def _code(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in arguments.items())


def _fate_text(path: str) -> str:
    key = KEYS[path]
    told = ", ".join(f"`{name}`" for name in key.becomes) if key.becomes else key.text
    told = f"read as {told}" if key.fate is Fate.DEPRECATED and key.becomes else told
    harmless = [str(value).lower() if isinstance(value, bool) else str(value) for value in key.harmless]
    return _TEXT_OF_FATE[key.fate].format(told) + (f"; {' or '.join(dict.fromkeys(harmless))} is fine" if harmless else "")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
