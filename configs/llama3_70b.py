"""Llama-3-70B with ZeRO-3 in bf16, every block recomputed in the backward.

    zjax plan  --config=configs/llama3_70b.py --config.mesh.fsdp=64
    zjax train --config=configs/llama3_70b.py --config.data.path=DIR --config.data.tokenizer=tokenizer.json

Hardware: 64 x H100 80 GB (8 hosts), or a TPU v5p-128. 70.6e9 parameters.
Bytes a device over 64 devices: model state 16.4 GiB a device at stage 3 (16/64 bytes a parameter).
A step sends 3 x 63/64 x 2 bytes a parameter: 388 GiB a device.
"""

from llama2_7b import get_config as llama2_7b
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = llama2_7b()
    config.model.preset = "llama3_70b"
    config.mesh.fsdp = 64
    config.data.global_batch = 256
    config.data.sequence_length = 4096
    return config
