"""DeepSpeed configs as users write them: each public file gives the right run, or the right error."""

import dataclasses
import json

import pytest
from deepspeed_runs import (
    BASE,
    SHARED,
    check_run,
    needs_shared,
    told,
)

from zjax.config import LossScaleConfig, PrecisionConfig, ZeroConfig
from zjax.optimizer_config import OptimizerConfig

pytestmark = pytest.mark.filterwarnings("ignore:DeepSpeed config")

ADAM = {"name": "adamw", "b2": 0.999, "eps": 1e-8}
FILES = {
    "BingBertSquad__1-bit_adam__nccl__deepspeed_onebitadam_bsz96_config": (8, [
        'optimizer.type="OnebitAdam": 1-bit optimizers', "use AdamW", "optimizer.params.freeze_step=400", 'optimizer.params.comm_backend_name="nccl"']),
    "BingBertSquad__deepspeed_bsz24_config": (8, {
        "data.global_batch": 24, "accumulation.micro_batches": 1, "precision": PrecisionConfig(compute="float16"), "zero.stage": 0, "clip": 1.0,
        "optimizer": OptimizerConfig(learning_rate=3e-5, b1=0.9, weight_decay=0.0, bias_correction=False, **ADAM)}),
    "autotuning__hf__dsconfigs__ds_config_fp16_z3": (8, {
        "zero": ZeroConfig(stage=3, persistence_threshold=100_000), "precision": PrecisionConfig(compute="float16"),
        "data.global_batch": 32, "accumulation.micro_batches": 1, "optimizer": BASE.optimizer, "clip": 1.0}),
    "autotuning__hf__dsconfigs__ds_config_z1": (8, {"zero": ZeroConfig(stage=1), "precision.compute": "float32", "data.global_batch": 32}),
    "bing_bert__deepspeed_bsz4k_progressive_layer_drop_config_seq128": (8, ["progressive_layer_drop=", "do it in the model"]),
    "bing_bert__deepspeed_bsz64k_lamb_config_seq128": (8, ["sparse_attention=", "do it in the model"]),
    "compression__cifar__ds_config": (1, {
        "zero.stage": 0, "precision": PrecisionConfig(compute="float16"), "data.global_batch": 32, "accumulation.micro_batches": 1,
        "optimizer": OptimizerConfig(learning_rate=1e-3, b1=0.8, weight_decay=3e-7, **ADAM)}),
    "data_efficiency__vit_finetuning__ds_config_imagenet_random_ltd": (16, ["data_efficiency.enabled=true", "random-LTD"]),
    "gan__gan_deepspeed_config": (8, {
        "data.global_batch": 64, "accumulation.micro_batches": 1, "zero.stage": 0, "precision.compute": "float32",
        "optimizer": OptimizerConfig(learning_rate=2e-4, b1=0.5, weight_decay=0.0, **ADAM)}),
    "hf_tests_zero2": (8, ['zero_optimization.offload_optimizer.device="cpu": offload of optimizer state', "not available yet"]),
    "imagenet__ds_fp16_z1_config": (8, ["cuda_visible_devices=0: unknown key", "leave it out"]),
    "pipeline_parallelism__ds_config": (8, {"data.global_batch": 256, "accumulation.micro_batches": 4, "optimizer.b1": 0.9, "clip": 1.0}),
    "trlx": (8, ['zero_optimization.offload_optimizer.device="cpu"', "not available yet"]),
}  # fmt: skip
"""File -> (devices, the knobs it gives or what its error says)."""


@needs_shared
def test_every_public_file_is_tested():
    assert set(FILES) == {path.stem for path in (SHARED / "deepspeed_configs").glob("*.json")}


@needs_shared
@pytest.mark.parametrize("name", FILES)
def test_a_public_file_gives_its_run_or_its_error(name):
    devices, expected = FILES[name]
    check_run(SHARED / "deepspeed_configs" / f"{name}.json", devices, expected)


@needs_shared
def test_public_files_without_the_key_in_question_give_their_run():
    folder = SHARED / "deepspeed_configs"
    keys = json.loads((folder / "BingBertSquad__deepspeed_bsz24_config.json").read_text())
    del keys["optimizer"]["params"]["bias_correction"]
    check_run(
        keys, 8, {"data.global_batch": 24, "accumulation.micro_batches": 1, "precision.compute": "float16", "optimizer.learning_rate": 3e-5}
    )
    keys = json.loads((folder / "imagenet__ds_fp16_z1_config.json").read_text())
    del keys["cuda_visible_devices"]
    check_run(keys, 8, {"data.global_batch": 256, "zero": ZeroConfig(stage=1), "clip": None, "precision.compute": "float16"})
    keys = json.loads((folder / "hf_tests_zero2.json").read_text())
    del keys["zero_optimization"]["offload_optimizer"]
    check_run(
        keys, 8, {"zero": ZeroConfig(stage=2), "optimizer.schedule": "WarmupLR", "precision.compute": "bfloat16", "data.global_batch": 32}
    )


AUTO_BATCH = dict.fromkeys(("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
AXOLOTL_FP16 = {
    "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1,
}  # fmt: skip
USERS = {
    # github.com/shibing624/MedicalGPT, deepspeed_zero_stage3_config.json: ZeRO 3, WarmupDecayLR, every size auto.
    "MedicalGPT": (
        {
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto", "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto",
            },
            "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False, **AUTO_BATCH,
        },
        8,
        {
            "zero": ZeroConfig(stage=3, persistence_threshold=640), "precision": PrecisionConfig(compute="float16"),
            "optimizer": OptimizerConfig(
                b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, schedule="WarmupDecayLR",
                schedule_arguments={"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 2, "total_num_steps": 200},
            ),
        },
    ),
    # axolotl's deepspeed_configs/zero1.json.
    "axolotl zero1": (
        {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": "auto"}, "fp16": AXOLOTL_FP16, "wall_clock_breakdown": False, **AUTO_BATCH},
        8,
        {"zero": ZeroConfig(stage=1), "precision": PrecisionConfig(compute="bfloat16"), "data.global_batch": 32},
    ),
    # axolotl's zero3_bf16.json: as little as can be whole at once.
    "axolotl zero3_bf16": (
        {
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0, "stage3_gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True}, "fp16": AXOLOTL_FP16 | {"enabled": False}, "wall_clock_breakdown": False, **AUTO_BATCH,
        },
        8,
        {"zero": ZeroConfig(stage=3, persistence_threshold=640, prefetch=0, max_gathered_units=1), "precision.compute": "bfloat16"},
    ),
    # The same after axolotl pull request 2956, with the field names of newer DeepSpeed releases.
    "axolotl after 2956": (
        {"zero_optimization": {"stage": 3, "max_live_parameters": 0, "gather_16bit_weights_on_model_save": True}},
        8,
        {"zero": ZeroConfig(stage=3, persistence_threshold=100_000, prefetch=0, max_gathered_units=1)},
    ),
    # huggingface.co, YellowLabsStudio/goodglinda-training-code, ds_config.json: ZeRO 2 in bf16, offloaded.
    "goodglinda": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True, "allgather_bucket_size": 2e8,
                "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
            },
            "gradient_clipping": 1.0, "wall_clock_breakdown": False, **AUTO_BATCH,
        },
        8,
        ['zero_optimization.offload_optimizer.device="cpu"', "not available yet"],
    ),
    # git.gdzx.xyz/hailin/jd_train, ds_config_zero3.json (without its comment): bf16, 64 micro-batches, activation checkpointing.
    "jd_train": (
        {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 64, "steps_per_print": 0, "gradient_clipping": 1.0,
            "fp16": {"enabled": False}, "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 50000000,
                "stage3_prefetch_bucket_size": 50000000, "stage3_param_persistence_threshold": 100000, "stage3_gather_16bit_weights_on_model_save": True,
            },
            "activation_checkpointing": {
                "partition_activations": True, "contiguous_memory_optimization": True, "cpu_checkpointing": False, "number_checkpoints": 36,
                "profile": False, "synchronize_checkpoint_boundary": True,
            },
            "wall_clock_breakdown": False,
        },
        8,
        {"data.global_batch": 512, "accumulation.micro_batches": 64, "zero": ZeroConfig(stage=3, persistence_threshold=100_000), "remat": "none"},
    ),
    # DeepSpeed's own tests/unit/checkpoint, test_save_before_accum_grad_is_done: a deprecated key, accumulation, a small first scale.
    "DeepSpeed's test of accumulation": (
        {
            "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2, "stage3_gather_fp16_weights_on_model_save": True},
            "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 4,
            "fp16": {"enabled": True, "initial_scale_power": 8},
        },
        2,
        {"data.global_batch": 4, "accumulation.micro_batches": 2, "precision.loss_scale": LossScaleConfig(initial_power=8), "zero.stage": 2},
    ),
    # deepspeedai/DeepSpeed issue 1858: a typo inside zero_optimization, a key that offload_param does not have, offload to NVMe.
    "DeepSpeed 1858": (
        {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 1,
            "zero_optimization": {
                "stage": 3, "stage3_max_live_parameters": 1e8, "stage3_param_persitence_threshold": 1e8, "stage3_prefetch_bucket_size": 1e8,
                "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme3", "buffer_count": 5, "max_in_cpu": 1e9, "max_in_nvme": 1e9},
            },
            "activation_checkpointing": {"profile": True, "cpu_checkpointing": True, "partition_activations": True},
            "fp16": {"enabled": True, "loss_scale": 1024, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        },
        8,
        [
            "did you mean 'zero_optimization.stage3_param_persistence_threshold'?", "zero_optimization.offload_param.max_in_nvme=1000000000.0: unknown key",
            'zero_optimization.offload_param.device="nvme"', "activation_checkpointing.cpu_checkpointing=true",
        ],
    ),
    # deepspeedai/DeepSpeed issue 6914: "8 != 2 * 1 * 1", on one device instead of four.
    "DeepSpeed 6914": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
        1,
        ["train_batch_size=8: is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 1 x data degree 1 = 2"],
    ),
    # huggingface.co/spaces/wondervictor/ControlAR, utils/deepspeed.py: adam_w_mode beside type, where DeepSpeed does not look.
    "ControlAR": (
        {
            "steps_per_print": 1000, "train_batch_size": 64, "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-4, "weight_decay": 0.05, "bias_correction": True, "betas": [0.9, 0.95]}},
            "zero_allow_untested_optimizer": True,
        },
        8,
        ["optimizer.adam_w_mode=true: unknown key; adam_w_mode belongs in optimizer.params"],
    ),
    # A tutorial of accelerate: cpu_offload of old, and an argument that WarmupLR does not have.
    "accelerate of old": (
        {
            "train_batch_size": 10, "gradient_accumulation_steps": 1,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"last_batch_iteration": -1, "total_num_steps": 500, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 100},
            },
            "zero_optimization": {
                "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True, "reduce_scatter": True,
                "reduce_bucket_size": 5e8, "contiguous_gradients": True, "cpu_offload": True,
            },
            "fp16": {"enabled": True}, "amp": {"enabled": False},
        },
        1,
        ['zero_optimization.cpu_offload=true: offload of optimizer state'],
    ),
    # transformers' tests/deepspeed/ds_config_zero3.json without its offload: no batch keys, no buckets, WarmupLR.
    "transformers zero3": (
        {
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e14, "reduce_bucket_size": 0,
                "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9, "stage3_gather_fp16_weights_on_model_save": True,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
            "steps_per_print": 2000, "wall_clock_breakdown": False,
        },
        8,
        {
            "zero": ZeroConfig(stage=3, prefetch=0), "data.global_batch": 32,
            "optimizer": OptimizerConfig(
                learning_rate=3e-5, b1=0.8, weight_decay=3e-7, schedule="WarmupLR",
                schedule_arguments={"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}, **ADAM,
            ),
        },
    ),
    # Accumulation over 4 micro-batches but no batch key, every size auto.
    "accumulation alone": (
        {
            "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
            },
        },
        8,
        {"data.global_batch": 32, "accumulation.micro_batches": 4, "zero": ZeroConfig(stage=3, persistence_threshold=640)},
    ),
    # Megatron-DeepSpeed's template, with the hysteresis and first scale of its fp16 runs.
    "Megatron-DeepSpeed": (
        {
            "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
            "zero_optimization": {"stage": 1, "elastic_checkpoint": True}, "gradient_clipping": 1.0, "prescale_gradients": True,
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11},
            "bf16": {"enabled": False}, "wall_clock_breakdown": False,
        },
        8,
        {"accumulation.micro_batches": 8, "precision.loss_scale": LossScaleConfig(initial_power=11, window=500), "zero": ZeroConfig(stage=1)},
    ),
}  # fmt: skip
"""As users write them: the file, devices, the knobs it gives or what its error says."""


@pytest.mark.parametrize("name", USERS)
def test_a_users_file_gives_its_run_or_its_error(name):
    keys, devices, expected = USERS[name]
    base = dataclasses.replace(BASE, precision=PrecisionConfig(compute="bfloat16"))
    check_run(keys, devices, expected, base)


def test_an_argument_its_scheduler_does_not_have_raises():
    keys = json.loads(json.dumps(USERS["accelerate of old"][0]))
    del keys["zero_optimization"]["cpu_offload"]
    assert "WarmupLR takes" in told(keys, devices=1) and "scheduler.params.total_num_steps" in told(keys, devices=1)
