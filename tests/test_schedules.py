"""Schedules by name: DeepSpeed's published values, and its formulas in plain Python, step by step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.fields import ConfigError
from zjax.optimizer_config import SCHEDULES, OptimizerConfig
from zjax.schedules import make_momentum, make_schedule


def schedule(name, steps=10, learning_rate=1e-3, **arguments):
    return make_schedule(OptimizerConfig(schedule=name, learning_rate=learning_rate, schedule_arguments=arguments), steps)


def values(rate, counts):
    return [float(rate(jnp.int32(count))) for count in counts]


def test_warmup_lr_has_the_published_values():
    found = values(schedule("WarmupLR", warmup_num_steps=10), range(12))
    assert [f"{x:.6e}" for x in found[:4]] == ["0.000000e+00", "3.010300e-04", "4.771213e-04", "6.020600e-04"]
    assert [f"{x:.6e}" for x in found[8:]] == ["9.542425e-04"] + 3 * ["1.000000e-03"]


def test_warmup_decay_lr_has_the_published_values():
    rate = schedule("WarmupDecayLR", warmup_num_steps=4, total_num_steps=10, warmup_type="linear")
    printed = "0 2.5e-4 5e-4 7.5e-4 1e-3 8.333e-4 6.667e-4 5e-4 3.333e-4 1.667e-4 0 0"
    assert [float(f"{x:.3e}") for x in values(rate, range(12))] == [float(x) for x in printed.split()]


def test_warmup_cosine_lr_has_the_published_values():
    rate = schedule("WarmupCosineLR", learning_rate=1.0, warmup_num_steps=4, total_num_steps=10, warmup_type="linear")
    printed = "0 .25 .5 .75 .933019 .750025 .500050 .250075 .067081 .0001 .0001"
    assert [round(x, 6) for x in values(rate, range(11))] == [float(x) for x in printed.split()]


# --- DeepSpeed's formulas, in plain Python ----------------------------------------------------------------------------------


def warmed(i, n, kind):
    return math.log(i + 1) / math.log(n) if kind == "log" else i / n


def plain_warmup_lr(i, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type):
    n = max(2, warmup_num_steps)
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * (warmed(i, n, warmup_type) if i < n else 1)


def plain_warmup_decay_lr(i, total_num_steps, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type):
    n = max(2, warmup_num_steps)
    gamma = warmed(i, n, warmup_type) if i < n else max(0, (total_num_steps - i) / max(1, total_num_steps - n))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma


def plain_warmup_cosine_lr(i, total_num_steps, warmup_min_ratio, warmup_num_steps, cos_min_ratio, warmup_type):
    n = max(2, warmup_num_steps)
    if i < n:
        return 1e-3 * (warmup_min_ratio + (1 - warmup_min_ratio) * warmed(i, n, warmup_type))
    progress = min(1, (i - n + 1) / max(1, total_num_steps - n))
    return 1e-3 * max(0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def plain_cycle(i, least, most, first, second, stairs, decay_step_size, decay):
    """Where in the cycle (from the fraction of it that is done), or how many decay intervals after it."""
    total = first + second
    if i >= total:
        return least, decay(((i - total + 1) / decay_step_size) if decay_step_size else 0)
    x = (i + 1) / total - math.floor((i + 1) / total)
    up = x / (first / total) if x <= first / total else (x - 1) / (first / total - 1)
    count = stairs[0] if x <= first / total else stairs[1]
    up = math.floor(up * count + 1e-9) / count if count else up
    return least + (most - least) * up, 1


def plain_one_cycle(i, **a):
    second = a["cycle_second_step_size"] or a["cycle_first_step_size"]
    last_stairs = a["cycle_first_stair_count"] if a["cycle_second_stair_count"] is None else a["cycle_second_stair_count"]
    stairs = a["cycle_first_stair_count"], last_stairs
    shape = a["cycle_first_step_size"], second, stairs, a["decay_step_size"]
    rate, factor = plain_cycle(i, a["cycle_min_lr"], a["cycle_max_lr"], *shape, lambda t: 1 / (1 + a["decay_lr_rate"] * t))
    return rate * factor


def plain_lr_range_test(i, lr_range_test_min_lr, lr_range_test_step_size, lr_range_test_step_rate, lr_range_test_staircase):
    interval = (i + 1) / lr_range_test_step_size
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * (math.floor(interval) if lr_range_test_staircase else interval))


PLAIN = {
    "WarmupLR": plain_warmup_lr,
    "WarmupDecayLR": plain_warmup_decay_lr,
    "WarmupCosineLR": plain_warmup_cosine_lr,
    "OneCycle": plain_one_cycle,
    "LRRangeTest": plain_lr_range_test,
}
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3}
CASES = [
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {}),
    ("WarmupDecayLR", {"warmup_num_steps": 7, "warmup_min_lr": 1e-5}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 20}),
    ("WarmupCosineLR", {"warmup_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 5}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 9, "cycle_second_step_size": 6, "cycle_first_stair_count": 3}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 6, "cycle_second_step_size": 10, "cycle_first_stair_count": 2,
                  "cycle_second_stair_count": 5, "decay_step_size": 4, "decay_lr_rate": 0.5}),
    ("LRRangeTest", {"lr_range_test_step_size": 7}),
    ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True, "lr_range_test_step_rate": 2.0}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:WarmupDecayLR")
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_a_schedule_is_deepspeeds_at_every_step(name, arguments):
    steps = 30
    rate = jax.jit(schedule(name, steps=steps, **arguments))
    known = {**SCHEDULES[name], **arguments}
    known |= {
        key: {"total_num_steps": steps, "warmup_max_lr": 1e-3}[key]
        for key in ("total_num_steps", "warmup_max_lr")
        if known.get(key, 0) is None
    }
    known = {key: value for key, value in known.items() if "mom" not in key}
    wanted = [PLAIN[name](i, **known) for i in range(40)]
    np.testing.assert_allclose([rate(jnp.int32(i)) for i in range(40)], wanted, rtol=5e-7, atol=1e-10)
    assert rate(jnp.int32(3)).dtype == jnp.float32


def test_the_default_arguments_are_those_of_deepspeed():
    assert values(schedule("LRRangeTest"), [0, 1999]) == pytest.approx([1e-3 * (1 + 1 / 2000), 2e-3], rel=1e-6)
    assert values(schedule("WarmupLR", learning_rate=0.5), [999, 1000]) == [0.5, 0.5]  # log(1000) / log(1000) = 1
    assert values(schedule("WarmupDecayLR", steps=2000, learning_rate=0.5), [1000, 1500, 2000]) == pytest.approx([1e-3, 5e-4, 0])
    peak, half, end = values(schedule("OneCycle", **CYCLE), [1999, 2999, 3999])
    assert (peak, half, end) == pytest.approx((2e-3, (2e-3 + 1e-4) / 2, 1e-4))


def test_one_cycle_moves_b1_against_the_learning_rate():
    arguments = {**CYCLE, "cycle_first_step_size": 4, "decay_step_size": 10, "decay_mom_rate": 0.1}
    momentum = make_momentum(OptimizerConfig(schedule="OneCycle", schedule_arguments=arguments), 12)
    assert momentum is not None
    falls, rises = [0.875, 0.85, 0.825, 0.8], [0.825, 0.85, 0.875, 0.9]
    assert values(momentum, range(10)) == pytest.approx([*falls, *rises, 0.9 * 1.01, 0.9 * 1.02])
    assert make_momentum(OptimizerConfig(schedule="OneCycle", schedule_arguments=arguments | {"cycle_momentum": False}), 12) is None
    assert make_momentum(OptimizerConfig(schedule="WarmupLR"), 12) is None
    with pytest.raises(ConfigError, match=r"decay_mom_rate=0\.1: b1 grows to 1\.7"):
        make_momentum(OptimizerConfig(schedule="OneCycle", schedule_arguments=arguments), 100)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_optaxs_schedules_warm_up_and_come_down(name):
    rate = make_schedule(OptimizerConfig(schedule=name, learning_rate=0.4, warmup_steps=4, min_ratio=0.1), 14)
    found = values(rate, range(15))
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    middle, last = {"constant": (0.4, 0.4), "linear": (0.22, 0.04), "cosine": (0.22, 0.04)}[name]
    assert (found[9], found[14]) == pytest.approx((middle, last))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("OneCycle", {}, "optimizer.schedule_arguments.cycle_min_lr=None: must be given"),
        ("OneCycle", {**CYCLE, "cycle_momentum": "yes"}, "cycle_momentum='yes': must be true or false"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size=0: must be a whole number, 1 or more"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 2**20, "cycle_first_stair_count": 2**11}, "must stay below 2**31"),
        ("WarmupLR", {"warmup_type": "exponential"}, "warmup_type='exponential': must be 'log' or 'linear'"),
        ("WarmupLR", {"warmup_max_lr": [1e-3, 1e-4]}, "use optimizer.groups"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "warmup_max_lr='auto': must be given, a number"),
        ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps=True: must be a whole number"),
        ("WarmupDecayLR", {"warmup_min_lr": -1.0}, "warmup_min_lr=-1.0"),
        ("LRRangeTest", {"lr_range_test_step_size": 2.5}, "lr_range_test_step_size=2.5: must be a whole number"),
    ],
)
def test_an_argument_that_is_wrong_is_named(name, arguments, message):
    with pytest.raises(ConfigError) as error:
        schedule(name, **arguments)
    assert message in str(error.value)


def test_a_run_shorter_than_its_warm_up_is_told():
    with pytest.warns(UserWarning, match="total_num_steps=10 is less than warmup_num_steps=1000"):
        schedule("WarmupDecayLR", steps=10)
