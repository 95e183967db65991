"""Learning rates as functions of the optimizer steps applied so far: optax's and DeepSpeed's, by name.

A schedule takes the count of applied steps, an int32 scalar that may be traced, from 0; skipped steps do not count. It
returns a float32 scalar. DeepSpeed's (runtime/lr_schedules.py) have its argument names and defaults (`config.SCHEDULES`),
and the count is its `last_batch_iteration`: step k, from 0, takes the value at k. DeepSpeed's engine steps the schedule
after the optimizer, so that there the first two steps run at the start of the warm-up, and step k at the value of k - 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.fields import ConfigError, require
from zjax.optimizer_config import SCHEDULES, OptimizerConfig

_FOLLOWS_LEARNING_RATE = ("constant", "linear", "cosine", "WarmupLR", "WarmupCosineLR")
"""The schedules that take their peak from `OptimizerConfig.learning_rate`; the others name it in an argument."""


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of a run of `steps` optimizer steps, as a function of those applied so far.

    Raises:
      ConfigError: an argument of a DeepSpeed schedule that is missing, of the wrong type or out of its range.
    """
    if config.schedule not in _MAKERS:
        return _optax_schedule(config, steps)
    return _MAKERS[config.schedule](**schedule_arguments(config, steps))


def schedule_arguments(config: OptimizerConfig, steps: int) -> dict[str, Any]:
    """All arguments of a DeepSpeed schedule, defaults filled in, checked; ConfigError names the one that is wrong."""
    arguments = {**SCHEDULES[config.schedule], **config.schedule_arguments}
    stands_for: dict[str, Any] = {
        "warmup_max_lr": config.learning_rate,
        "total_num_steps": steps,
        "cycle_second_step_size": arguments.get("cycle_first_step_size"),
        "cycle_second_stair_count": arguments.get("cycle_first_stair_count"),
    }
    arguments |= {name: value for name, value in stands_for.items() if name in arguments and arguments[name] is None}
    for name, value in arguments.items():
        _require_valid(name, value)
    if config.schedule == "WarmupCosineLR":
        arguments["learning_rate"] = config.learning_rate
    if "total_num_steps" in arguments and arguments["total_num_steps"] < arguments["warmup_num_steps"]:
        warnings.warn(
            f"{config.schedule}: total_num_steps={arguments['total_num_steps']} is less than "
            f"warmup_num_steps={arguments['warmup_num_steps']}: the warm-up is not finished when the run ends",
            stacklevel=2,
        )
    return arguments


def follows_learning_rate(config: OptimizerConfig) -> bool:
    """Whether `learning_rate` is the schedule's peak; else an argument (warmup_max_lr, cycle_max_lr, ...) is."""
    return config.schedule in _FOLLOWS_LEARNING_RATE and config.schedule_arguments.get("warmup_max_lr") is None


def make_momentum(config: OptimizerConfig, steps: int) -> optax.Schedule | None:
    """The b1 that OneCycle cycles against the learning rate (cycle_momentum), or None where nothing cycles it.

    Raises:
      ConfigError: a momentum that would reach 1 within the run (DeepSpeed's decay_mom_rate makes it grow).
    """
    if config.schedule != "OneCycle":
        return None
    arguments = schedule_arguments(config, steps)
    if not arguments["cycle_momentum"]:
        return None
    momentum = one_cycle_momentum(**arguments)
    last = float(momentum(jnp.int32(max(0, steps - 1))))
    require(
        last < 1, "optimizer.schedule_arguments.decay_mom_rate", arguments["decay_mom_rate"], f"b1 grows to {last:.3g} by the last step"
    )
    return momentum


def _require_valid(name: str, value: Any) -> None:
    """ConfigError unless the value is of the kind that its name ends in."""
    knob = f"optimizer.schedule_arguments.{name}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, (list, tuple)):
        raise ConfigError(f"{knob}={value!r}: one number for all parameters; use optimizer.groups for rates of their own")
    if name in ("cycle_momentum", "lr_range_test_staircase"):
        require(isinstance(value, bool), knob, value, "must be true or false")
    elif name == "warmup_type":
        require(value in ("log", "linear"), knob, value, "must be 'log' or 'linear'")
    elif name.endswith(("_num_steps", "_step_size", "_stair_count")):
        least = 0 if name in ("decay_step_size", "cycle_first_stair_count", "cycle_second_stair_count") else 1
        whole = is_number and float(value).is_integer()
        require(whole and least <= value < 2**31, knob, value, f"must be a whole number, {least} or more")
    else:
        require(is_number and 0 <= value < math.inf, knob, value, "must be given, a number that is finite and not negative")


def _optax_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    peak, last = config.learning_rate, config.learning_rate * config.min_ratio
    decay_steps = max(1, steps - config.warmup_steps)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, last, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=config.min_ratio),
    }[config.schedule]
    if not config.warmup_steps:
        return after
    # Step 0 already moves: a first step with learning rate 0 would be wasted.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def _warmup(warmup_num_steps: int, warmup_type: str, start: float, end: float) -> tuple[int, optax.Schedule]:
    """The steps of the warm-up, at least DeepSpeed's 2, and its values, from `start` at count 0 to `end`."""
    n = max(2, int(warmup_num_steps))
    # Constants are folded in double precision: each float32 operation may cost the last digit.
    if warmup_type == "linear":
        return n, lambda count: start + (end - start) / n * _float(count)
    return n, lambda count: start + (end - start) / math.log(n) * jnp.log1p(_float(count))


def warmup_lr(*, warmup_min_lr: float, warmup_max_lr: float, warmup_num_steps: int, warmup_type: str) -> optax.Schedule:
    """DeepSpeed's WarmupLR: up to warmup_max_lr, as log(count + 1) / log(n) or count / n, and constant from count n on."""
    n, up = _warmup(warmup_num_steps, warmup_type, warmup_min_lr, warmup_max_lr)
    return lambda count: jnp.where(count < n, up(count), warmup_max_lr)


def warmup_decay_lr(
    *, total_num_steps: int, warmup_min_lr: float, warmup_max_lr: float, warmup_num_steps: int, warmup_type: str
) -> optax.Schedule:
    """DeepSpeed's WarmupDecayLR: WarmupLR's warm-up, then linearly down to warmup_min_lr at count total_num_steps."""
    n, up = _warmup(warmup_num_steps, warmup_type, warmup_min_lr, warmup_max_lr)
    last, drop = int(total_num_steps), warmup_max_lr - warmup_min_lr
    left = lambda count: _float(jnp.maximum(0, last - count)) / max(1, last - n)  # noqa: E731
    return lambda count: jnp.where(count < n, up(count), warmup_min_lr + drop * left(count))


def warmup_cosine_lr(
    *, learning_rate: float, total_num_steps: int, warmup_min_ratio: float, warmup_num_steps: int, cos_min_ratio: float, warmup_type: str
) -> optax.Schedule:
    """DeepSpeed's WarmupCosineLR: ratios of learning_rate, up from warmup_min_ratio, then a half cosine to cos_min_ratio."""
    n, up = _warmup(warmup_num_steps, warmup_type, learning_rate * warmup_min_ratio, learning_rate)
    least, half = learning_rate * cos_min_ratio, learning_rate * (1 - cos_min_ratio) / 2

    def rate(count: jax.Array) -> jax.Array:
        progress = jnp.minimum(1, _float(count - n + 1) / max(1, int(total_num_steps) - n))
        return jnp.where(count < n, up(count), least + half * (1 + jnp.cos(jnp.pi * progress)))

    return rate


def _cycle(arguments: Mapping[str, Any]) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Of DeepSpeed's OneCycle: the count -> how far up the cycle, in [0, 1], and the decay intervals since its end."""
    first, second = int(arguments["cycle_first_step_size"]), int(arguments["cycle_second_step_size"])
    stairs = int(arguments["cycle_first_stair_count"]), int(arguments["cycle_second_stair_count"])
    total, decay = first + second, int(arguments["decay_step_size"])
    require(
        max(first * stairs[0], second * stairs[1]) < 2**31,
        "optimizer.schedule_arguments.cycle_first_stair_count",
        stairs[0],
        "stairs x steps of a half cycle must stay below 2**31",
    )

    def scale(part: jax.Array, size: int, stairs: int) -> jax.Array:
        # A stair is told in whole steps: a quotient of floats may fall just short of it.
        return _float(part * stairs // size) / stairs if stairs else _float(part) / size

    def at(count: jax.Array) -> tuple[jax.Array, jax.Array]:
        step = jnp.clip(jnp.asarray(count), 0, total - 1) + 1
        up = jnp.where(step <= first, scale(step, first, stairs[0]), scale(total - step, second, stairs[1]))
        after = jnp.maximum(0, count - total + 1)
        return jnp.where(count < total, up, 0), _float(after) / decay if decay else _float(0 * after)

    return at


def one_cycle(**arguments: Any) -> optax.Schedule:
    """DeepSpeed's OneCycle: cycle_min_lr up to cycle_max_lr and back, then cycle_min_lr / (1 + decay_lr_rate x intervals)."""
    cycle, least, most = _cycle(arguments), arguments["cycle_min_lr"], arguments["cycle_max_lr"]

    def rate(count: jax.Array) -> jax.Array:
        up, intervals = cycle(count)
        return (least + (most - least) * up) / (1 + arguments["decay_lr_rate"] * intervals)

    return rate


def one_cycle_momentum(**arguments: Any) -> optax.Schedule:
    """The b1 of DeepSpeed's OneCycle: cycle_max_mom down to cycle_min_mom and back, then x (1 + decay_mom_rate x intervals)."""
    cycle, least, most = _cycle(arguments), arguments["cycle_min_mom"], arguments["cycle_max_mom"]

    def momentum(count: jax.Array) -> jax.Array:
        up, intervals = cycle(count)
        return (most - (most - least) * up) * (1 + arguments["decay_mom_rate"] * intervals)

    return momentum


def lr_range_test(
    *, lr_range_test_min_lr: float, lr_range_test_step_size: int, lr_range_test_step_rate: float, lr_range_test_staircase: bool
) -> optax.Schedule:
    """DeepSpeed's LRRangeTest: min_lr (1 + step_rate (count + 1) / step_size), the quotient rounded down for a staircase."""
    size = int(lr_range_test_step_size)

    def rate(count: jax.Array) -> jax.Array:
        step = jnp.asarray(count) + 1
        intervals = _float(step // size) if lr_range_test_staircase else _float(step) / size
        return lr_range_test_min_lr * (1 + lr_range_test_step_rate * intervals)

    return rate


def _float(count: Any) -> jax.Array:
    return jnp.asarray(count, jnp.float32)


_MAKERS: dict[str, Callable[..., optax.Schedule]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle,
    "LRRangeTest": lr_range_test,
}
