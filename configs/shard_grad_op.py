"""FSDP SHARD_GRAD_OP (FSDP2 reshard_after_forward=False): sharded at rest, gathered once a step.

    zjax train --config=configs/shard_grad_op.py

The tiny Llama of llama_tiny.py in float32, 60 steps; any CPU (8 simulated devices), under a minute on 2 cores.
Bytes a device: 16/8 bytes a parameter between steps: 5.8 MiB of model state.
A step sends an all-gather of the parameters and a reduce-scatter of the gradients: 2 x 7/8 x 4 bytes a parameter, 20.2 MiB.
"""

from llama_tiny import get_config as llama_tiny
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = llama_tiny()
    config.steps = 60
    config.zero.reshard_after_forward = False
    return config
