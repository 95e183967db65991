"""Llama-3-70B with ZeRO-3 in bf16, every block recomputed in the backward.

    zjax plan  --config=configs/llama3_70b.py --config.mesh.fsdp=64
    zjax train --config=configs/llama3_70b.py --config.data.path=DIR --config.data.tokenizer=tokenizer.json

Hardware: 64 x H100 80 GB (8 hosts), or a TPU v5p-128. 70.6e9 parameters.
Bytes a device over 64 devices: model state 16.4 GiB a device at stage 3 (16/64 bytes a parameter).
A step sends 3 x 63/64 x 2 bytes a parameter: 388 GiB a device.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 10_000,
            "remat": "full",
            "model": {"preset": "llama3_70b"},
            "mesh": {"fsdp": 64},
            "zero": {"stage": 3},
            "precision": {"compute": "bfloat16"},
            "optimizer": {
                "name": "adamw",
                "learning_rate": 3e-4,
                "b2": 0.95,
                "weight_decay": 0.1,
                "schedule": "cosine",
                "warmup_steps": 200,
                "min_ratio": 0.1,
            },
            "data": {"path": "stdlib", "global_batch": 256, "sequence_length": 4096},
            "checkpoint": {"every": 500, "keep": 3},
        }
    )
