"""Llama-3-8B with ZeRO-3 in bf16, every block recomputed in the backward.

    zjax plan  --config=configs/llama3_8b.py --config.mesh.fsdp=8
    zjax train --config=configs/llama3_8b.py --config.data.path=DIR --config.data.tokenizer=tokenizer.json

Hardware: 8 x H100 80 GB, or a TPU v5p-16. 8.03e9 parameters.
Bytes a device over 8 devices: model state 15.0 GiB a device at stage 3 (16/8 bytes a parameter).
A step sends 3 x 7/8 x 2 bytes a parameter: 39.3 GiB a device.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 10_000,
            "remat": "full",
            "model": {"preset": "llama3_8b"},
            "mesh": {"fsdp": -1},
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
            "data": {"path": "stdlib", "global_batch": 64, "sequence_length": 4096},
            "checkpoint": {"every": 500, "keep": 3},
        }
    )
