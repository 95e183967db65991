"""ZeRO-1: the optimizer state is sharded.

    zjax train --config=configs/zero1.py

The tiny Llama of llama_tiny.py in float32, 60 steps; any CPU (8 simulated devices), under a minute on 2 cores.
Bytes a device: 8 + 8/8 bytes a parameter: 26.0 MiB of model state.
A step sends a reduce-scatter of the gradients and an all-gather of the parameters: 2 x 7/8 x 4 bytes a parameter, 20.2 MiB.
"""

from llama_tiny import get_config as llama_tiny
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = llama_tiny()
    config.steps = 60
    config.zero.stage = 1
    return config
