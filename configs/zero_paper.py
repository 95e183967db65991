"""Figure 1 of the ZeRO paper (Rajbhandari et al. 2020): 7.5e9 parameters on 64 devices, as one abstract leaf.

    zjax plan --config=configs/zero_paper.py --config.zero.stage=2 --json

Hardware: none, nothing is allocated. Model state a device: 120, 31.4, 16.6 and 1.9 GB at stages 0 to 3.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "model": {"preset": "abstract", "parameters": 7_500_000_000},
            "mesh": {"fsdp": 64},
            "zero": {"stage": 3},
            "precision": {"compute": "bfloat16"},
            "optimizer": {"name": "adam"},
        }
    )
