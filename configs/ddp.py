"""No sharding: every device holds the whole state (DDP, FSDP NO_SHARD, ZeRO-0).

    zjax train --config=configs/ddp.py

The tiny Llama of llama_tiny.py in float32, 60 steps; any CPU (8 simulated devices), under a minute on 2 cores.
Bytes a device: 16 bytes a parameter: 46.3 MiB of model state.
A step sends one all-reduce of the gradients: 2 x 7/8 x 4 bytes a parameter, 20.2 MiB.
"""

from llama_tiny import get_config as llama_tiny
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = llama_tiny()
    config.steps = 60
    config.zero.stage = 0
    return config
