"""What a loss needs to know of the rows on other devices; the same numbers in both engines and on every mesh.

In the partitioner engine a loss sees all rows of a micro-batch, in the explicit engine those of one device. Sums need no
care: zjax adds them. These two are for what is no sum of rows: random draws, and means that enter the loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zjax.collectives import data_index, first_device, sum_rows
from zjax.plan import Plan
from zjax.units import current_plan


def row_keys(rng: jax.Array, rows: int) -> jax.Array:
    """A PRNG key for each of the batch's rows, [rows]: dropout drawn with them does not depend on the devices.

    Row i of the global micro-batch gets `fold_in(key, i)`. Draw with `jax.vmap`, for instance
    `jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, x.shape[1:]))(zjax.row_keys(rng, x.shape[0]))`. Drawn with `rng`
    itself, the explicit engine's numbers are independent between devices, but others on another mesh.

    Args:
      rng: the loss's key, or any key derived from it.
      rows: rows of the arrays the loss was given.
    """
    plan, first = current_plan(), jnp.zeros((), jnp.int32)
    if plan is not None and plan.engine == "explicit":
        first = data_index(plan.mesh) * rows
        # Each device was given a key of its own; that of the first is as good as any for all.
        rng = jax.random.wrap_key_data(first_device(plan, jax.random.key_data(rng)), impl=jax.random.key_impl(rng))
    return jax.vmap(lambda row: jax.random.fold_in(rng, row))(first + jnp.arange(rows))


def global_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    """sum(x * weight) / sum(weight) over all rows of the micro-batch, wherever they are; a scalar, differentiable.

    For statistics that are not additive (a mean that the loss then squares, a router's load). 0 where nothing weighs.

    Args:
      x: any shape, of this device's rows.
      weight: broadcasts against x.
    """
    plan: Plan | None = current_plan()
    weight = jnp.broadcast_to(weight, x.shape).astype(jnp.float32)
    total, weighed = jnp.sum(x.astype(jnp.float32) * weight), jnp.sum(weight)
    if plan is not None and plan.engine == "explicit":
        total, weighed = sum_rows(plan, total), sum_rows(plan, weighed)
    return jnp.where(weighed > 0, total / jnp.where(weighed > 0, weighed, 1), 0)
