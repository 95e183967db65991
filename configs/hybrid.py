"""Hybrid (FSDP HYBRID_SHARD, MiCS): ZeRO-3 in groups of 4, the groups replicate each other.

    zjax train --config=configs/hybrid.py

The tiny Llama of llama_tiny.py in float32, 60 steps; any CPU (8 simulated devices), under a minute on 2 cores.
Bytes a device: 16/4 bytes a parameter: 11.6 MiB of model state.
A step sends inside a group 3 x 3/4 x 4 bytes a parameter (26.0 MiB), between groups an all-reduce of the shards, 2 x 1/2 x 4/4 bytes a parameter (2.9 MiB).
"""

from llama_tiny import get_config as llama_tiny
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = llama_tiny()
    config.steps = 60
    config.mesh.replica = 2
    return config
