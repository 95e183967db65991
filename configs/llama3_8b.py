"""Llama-3-8B with ZeRO-3 in bf16, every block recomputed in the backward.

    zjax plan  --config=configs/llama3_8b.py --config.mesh.fsdp=8
    zjax train --config=configs/llama3_8b.py --config.data.path=DIR --config.data.tokenizer=tokenizer.json

Hardware: 8 x H100 80 GB, or a TPU v5p-16. 8.03e9 parameters.
Bytes a device over 8 devices: model state 15.0 GiB a device at stage 3 (16/8 bytes a parameter).
A step sends 3 x 7/8 x 2 bytes a parameter: 39.3 GiB a device.
"""

from llama2_7b import get_config as llama2_7b
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = llama2_7b()
    config.model.preset = "llama3_8b"
    config.data.sequence_length = 4096
    return config
