"""What the tests of DeepSpeed configs share: a run to apply them to, pieces of files, and where the public ones lie."""

import pytest
from small import REPO

from zjax.config import DataConfig, ModelConfig, TrainConfig
from zjax.fields import ConfigError
from zjax.interop import from_deepspeed

FP16, STAGE3 = {"fp16": {"enabled": True}}, {"zero_optimization": {"stage": 3}}
ADAMW = {"optimizer": {"type": "AdamW"}}
ONE_CYCLE = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}}
WARMUP_COSINE = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}}}
RANGE_TEST = {"scheduler": {"type": "LRRangeTest"}}

SHARED = next((folder / "shared" for folder in (REPO, REPO.parent) if (folder / "shared").is_dir()), None)
needs_shared = pytest.mark.skipif(SHARED is None, reason="the reference documents are not beside the repository")
BASE = TrainConfig(steps=200, model=ModelConfig(d_model=64), data=DataConfig(global_batch=32))


def run_of(keys, base=BASE, devices=8, **sizes):
    return from_deepspeed(keys, base, devices=devices, **sizes)


def knob(config, name):
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def nested(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def merged(*sections):
    """Nested dictionaries as one."""
    result = {}
    for section in sections:
        for key, value in section.items():
            result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def told(keys, base=BASE, devices=8):
    """The message of the error that a file gives."""
    with pytest.raises(ConfigError) as error:
        run_of(keys, base, devices)
    return str(error.value)


def check_run(keys, devices, expected, base=BASE):
    if isinstance(expected, dict):
        made = run_of(keys, base, devices)
        assert {name: knob(made, name) for name in expected} == expected
    else:
        message = told(keys, base, devices)
        assert [text for text in expected if text not in message] == []
