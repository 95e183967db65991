"""ZeRO-3 (FSDP FULL_SHARD): everything is sharded, a unit is gathered when it computes.

    zjax train --config=configs/zero3.py

The tiny Llama of llama_tiny.py in float32, 60 steps; any CPU (8 simulated devices), under a minute on 2 cores.
Bytes a device: 16/8 bytes a parameter: 5.8 MiB of model state.
A step sends two all-gathers of the parameters and a reduce-scatter of the gradients: 3 x 7/8 x 4 bytes a parameter, 30.4 MiB.
"""

from llama_tiny import get_config as llama_tiny
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = llama_tiny()
    config.steps = 60
    config.zero.stage = 3
    return config
