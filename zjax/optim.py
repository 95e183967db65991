"""Optimizers and schedules by name, the global gradient norm, and clipping by it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from zjax.config import OPTIMIZER_KNOBS, OptimizerConfig
from zjax.tree import PyTree

_FACTORIES = {
    "adamw": optax.adamw,
    "adam": optax.adam,
    "lion": optax.lion,
    "adafactor": optax.adafactor,
    "sgd": optax.sgd,
}
_OPTAX_NAMES = {("adafactor", "weight_decay"): "weight_decay_rate"}


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the optimizer steps applied so far; the run has `steps` of them."""
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


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optax optimizer that a config names."""
    set_knobs = {knob: getattr(config, knob) for knob in OPTIMIZER_KNOBS[config.name] if getattr(config, knob) is not None}
    arguments = {_OPTAX_NAMES.get((config.name, knob), knob): value for knob, value in set_knobs.items()}
    return _FACTORIES[config.name](make_schedule(config, steps), **arguments)


def global_norm(grads: PyTree) -> jax.Array:
    """Euclidean norm over all leaves, float32 scalar. Squares are taken in float32 (fp16 leaves would overflow)."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def clip_factor(norm: jax.Array, clip: float | None) -> jax.Array:
    """What gradients of global norm `norm` are multiplied with: DeepSpeed's 1 / max(1, (norm + 1e-6) / clip)."""
    if clip is None:
        return jnp.ones((), jnp.float32)
    return 1 / jnp.maximum(1.0, (norm + 1e-6) / clip)
