"""Llama-2-7B with ZeRO-3 in bf16.

    zjax plan  --config=configs/llama2_7b.py --config.mesh.fsdp=8
    zjax train --config=configs/llama2_7b.py --config.data.path=DIR --config.data.tokenizer=tokenizer.json

Hardware: 8 x H100 80 GB, or a TPU v5p-16. 6.74e9 parameters; over 8 devices 16/8 = 2 bytes a parameter of model state,
12.6 GiB a device (stage 2: 25.1 of bf16 parameters and shards 3.75 bytes a parameter; stage 0: 16, 100 GiB). A step
sends 3 x 7/8 x 2 bytes a parameter: 33 GiB a device.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 10_000,
            "remat": "full",
            "model": {"preset": "llama2_7b"},
            "mesh": {"fsdp": -1},
            "zero": {"stage": 3},
            "precision": {"compute": "bfloat16"},
            "optimizer": {"name": "adamw", "learning_rate": 3e-4, "b2": 0.95, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 200, "min_ratio": 0.1},
            "data": {"path": "stdlib", "global_batch": 64, "sequence_length": 2048},
            "checkpoint": {"every": 500, "keep": 3},
        }
    )
