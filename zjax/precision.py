"""Dtypes: what parameters are stored and computed in, fp32 master weights, and the loss scale of fp16.

With bf16 or fp16 compute the optimizer works on fp32 master weights that live in the optimizer state, and the parameters
are `cast(master)` after every step: adding a rounded update would lose it (an update of 1e-4 to a bf16 1.0 is nothing).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zjax.config import LossScaleConfig, PrecisionConfig
from zjax.tree import PyTree, matches


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Every leaf in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def compute_dtype(precision: PrecisionConfig, unit_compute: str | None, path: str) -> Any:
    """The dtype a parameter of that path is stored and computed in; `unit_compute` is its unit's own, or None."""
    kept = any(matches(pattern, path) for pattern in precision.keep_float32)
    return jnp.dtype("float32" if kept else unit_compute or precision.compute)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("scale", "hysteresis", "iteration", "last_overflow"), meta_fields=())
@dataclass(frozen=True)
class LossScale:
    """State of fp16 loss scaling (DeepSpeed DynamicLossScaler: cur_scale, cur_hysteresis, cur_iter, last_overflow_iter)."""

    scale: Any
    """float32 scalar: what the loss is multiplied with before it is differentiated."""
    hysteresis: Any
    """int32 scalar: overflows left until the scale halves."""
    iteration: Any
    """int32 scalar: steps taken."""
    last_overflow: Any
    """int32 scalar: the iteration of the last overflow, -1 before the first."""


LOSS_SCALE_DTYPES = {"scale": "float32", "hysteresis": "int32", "iteration": "int32", "last_overflow": "int32"}


def init_loss_scale(config: LossScaleConfig) -> LossScale:
    """The state before the first step."""
    first = 2.0**config.initial_power if config.static is None else config.static
    return LossScale(jnp.float32(first), jnp.int32(config.hysteresis), jnp.int32(0), jnp.int32(-1))


def update_loss_scale(config: LossScaleConfig, state: LossScale, overflow: jax.Array) -> tuple[LossScale, jax.Array]:
    """The state after a step, and whether the scale is stuck: an overflow that came at the minimum.

    DeepSpeed's DynamicLossScaler.update_scale, which grows `window` steps after the last overflow or, at the start, after
    window + 1. A static scale never changes and is never stuck.
    """
    if config.static is not None:
        moved = jnp.where(overflow, state.iteration, state.last_overflow)
        return LossScale(state.scale, state.hysteresis, state.iteration + 1, moved), jnp.zeros((), bool)
    spent = state.hysteresis <= 1
    stuck = overflow & spent & (state.scale <= config.minimum)
    halved = jnp.where(spent, jnp.maximum(state.scale / 2, config.minimum), state.scale)
    fewer = jnp.where(spent, state.hysteresis, state.hysteresis - 1)

    stable = state.iteration - state.last_overflow - 1
    grows = (stable > 0) & (stable % config.window == 0)
    grown = jnp.where(grows, state.scale * 2, state.scale)
    refilled = jnp.int32(config.hysteresis)
    kept = refilled if config.consecutive_hysteresis else jnp.where(grows, refilled, state.hysteresis)
    new = LossScale(
        scale=jnp.where(overflow, halved, grown),
        hysteresis=jnp.where(overflow, fewer, kept),
        iteration=state.iteration + 1,
        last_overflow=jnp.where(overflow, state.iteration, state.last_overflow),
    )
    return new, stuck
