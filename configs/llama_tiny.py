"""The main job: a 3.0M-parameter Llama with ZeRO-3 on the Python standard library's own sources, byte by byte.

    zjax train --config=configs/llama_tiny.py

Hardware: any CPU (8 simulated devices); about two minutes on 2 cores. Bytes a device: 16/8 per parameter in float32
(parameters, gradients and two moments, 4 each): 5.8 MiB of model state. The final loss is well over 0.5 nat below the
corpus's unigram entropy (about 3.2 nats); both are printed.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 200,
            "seed": 0,
            "clip": 1.0,
            "model": {"preset": "tiny"},
            "mesh": {"replica": 1, "fsdp": -1},
            "zero": {"stage": 3},
            "precision": {"compute": "float32"},
            "optimizer": {
                "name": "adamw",
                "learning_rate": 2e-3,
                "b2": 0.95,
                "weight_decay": 0.1,
                "schedule": "cosine",
                "warmup_steps": 20,
                "min_ratio": 0.1,
            },
            "data": {"path": "stdlib", "global_batch": 16, "sequence_length": 128},
            "accumulation": {"micro_batches": 1},
            "checkpoint": {"every": 100, "keep": 2},
        }
    )
