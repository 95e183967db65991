"""The train state, and its birth in shards."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zjax.plan import COUNTERS, Plan, require_devices
from zjax.precision import cast
from zjax.tree import PyTree


@functools.partial(jax.tree_util.register_dataclass, data_fields=("master", "inner"), meta_fields=())
@dataclass(frozen=True)
class OptState:
    """Optimizer state: fp32 master weights (None where parameters are float32 themselves) and the optax state."""

    master: PyTree
    inner: PyTree


@functools.partial(jax.tree_util.register_dataclass, data_fields=("step", "params", "opt_state", "rng", "skipped_steps"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes. A pytree; each leaf lies where the plan says."""

    step: Any
    """int32 scalar: steps taken, skipped ones included."""
    params: PyTree
    """What the model computes with, in the compute dtype; `cast(master)` where there is a master."""
    opt_state: OptState
    rng: Any
    """Typed PRNG key; step s uses `fold_in(rng, s)`."""
    skipped_steps: Any
    """int32 scalar: steps whose gradients were not finite and which changed nothing."""


def state_struct(plan: Plan) -> TrainState:
    """The train state as `jax.ShapeDtypeStruct`s with shardings: for lowering, restoring and checking."""
    return _assemble(plan, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.rest.dtype, sharding=plan.sharding(leaf.rest)))


def state_shardings(plan: Plan) -> TrainState:
    """The sharding of every leaf of the train state."""
    return _assemble(plan, lambda leaf: plan.sharding(leaf.rest))


def _assemble(plan: Plan, make: Any) -> TrainState:
    made = {part: [make(leaf) for leaf in plan.part(part)] for part in ("params", "master", "optimizer")}
    counters = {leaf.path: make(leaf) for leaf in plan.part("counter")}
    master = jax.tree.unflatten(plan.params_treedef, made["master"]) if made["master"] else None
    inner = jax.tree.unflatten(plan.inner_treedef, made["optimizer"])
    params = jax.tree.unflatten(plan.params_treedef, made["params"])
    return TrainState(params=params, opt_state=OptState(master, inner), **counters)


def init_state(plan: Plan, rng: jax.Array) -> TrainState:
    """The initial train state, every array born in its shard (FSDP's deferred init, DeepSpeed's zero.Init).

    Args:
      plan: from `build_plan` on a mesh with devices.
      rng: a typed PRNG key (`jax.random.key(seed)`). The values do not depend on the mesh.

    Raises:
      TypeError: `rng` is not a key of jax's default implementation.
    """
    require_devices(plan)
    planned = dict(COUNTERS)["rng"]
    if getattr(rng, "dtype", None) != planned:
        raise TypeError(
            f"init_state: rng must be a key of type {planned} from jax.random.key(seed), not {getattr(rng, 'dtype', type(rng).__name__)}"
        )
    return jax.jit(functools.partial(_init, plan), out_shardings=state_shardings(plan))(rng)


def lower_init(plan: Plan) -> jax.stages.Lowered:
    """`init_state` lowered, not run: what initialising holds can be read from the compiled program."""
    return jax.jit(functools.partial(_init, plan), out_shardings=state_shardings(plan)).lower(jax.eval_shape(jax.random.key, 0))


def _init(plan: Plan, rng: jax.Array) -> TrainState:
    params_key, state_key = jax.random.split(rng)
    optimized = cast(plan.recipe.init_fn(params_key), jnp.float32)
    dtypes = jax.tree.unflatten(plan.params_treedef, [leaf.rest.dtype for leaf in plan.part("params")])
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=jax.tree.map(lambda x, dtype: x.astype(dtype), optimized, dtypes),
        opt_state=OptState(optimized if plan.part("master") else None, plan.recipe.tx.init(optimized)),
        rng=state_key,
        skipped_steps=jnp.zeros((), jnp.int32),
    )


def unplanned(plan: Plan, state: TrainState) -> list[str]:
    """Paths of leaves that do not lie where the plan says; empty when placement has not drifted."""
    planned = jax.tree.leaves(state_shardings(plan))
    return [
        leaf.path
        for leaf, x, sharding in zip(plan.leaves, jax.tree.leaves(state), planned, strict=True)
        if not x.sharding.is_equivalent_to(sharding, x.ndim)
    ]
