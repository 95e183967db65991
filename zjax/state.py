"""The train state, and its birth in shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zjax.plan import COUNTERS, Plan, require_devices
from zjax.precision import LossScale, cast, init_loss_scale
from zjax.tree import PyTree, named_leaves


@functools.partial(jax.tree_util.register_dataclass, data_fields=("master", "inner"), meta_fields=())
@dataclass(frozen=True)
class OptState:
    """Optimizer state: fp32 master weights and the optax state.

    `master` is like the parameters, with None for those that have none (frozen, or float32 themselves); None if none has.
    """

    master: PyTree
    inner: PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "opt_state", "rng", "skipped_steps", "loss_scale"),
    meta_fields=(),
)
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
    loss_scale: LossScale | None = None
    """Of float16 compute, else None."""


def state_struct(plan: Plan) -> TrainState:
    """The train state as `jax.ShapeDtypeStruct`s with shardings: for lowering, restoring and checking."""
    return _assemble(plan, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.rest.dtype, sharding=plan.sharding(leaf.rest)))


def state_shardings(plan: Plan) -> TrainState:
    """The sharding of every leaf of the train state."""
    return _assemble(plan, lambda leaf: plan.sharding(leaf.rest))


def _assemble(plan: Plan, make: Any) -> TrainState:
    made = {part: [make(leaf) for leaf in plan.part(part)] for part in ("params", "master", "optimizer")}
    counters = {leaf.path: make(leaf) for leaf in plan.part("counter")}
    scaling = {path.removeprefix("loss_scale/"): counters.pop(path) for path in list(counters) if path.startswith("loss_scale/")}
    inner = jax.tree.unflatten(plan.inner_treedef, made["optimizer"])
    params = jax.tree.unflatten(plan.params_treedef, made["params"])
    loss_scale = LossScale(**scaling) if scaling else None
    masters = iter(made["master"])
    master = master_tree(plan, [next(masters) if leaf.has_master else None for leaf in plan.trained])
    return TrainState(params=params, opt_state=OptState(master, inner), loss_scale=loss_scale, **counters)


def master_tree(plan: Plan, optimized: Sequence[Any]) -> PyTree:
    """`OptState.master`, from one value for each trained parameter; those without a master are left out."""
    if not any(leaf.has_master for leaf in plan.trained):
        return None
    return plan.trained_tree(x if leaf.has_master else None for leaf, x in zip(plan.trained, optimized, strict=True))


def optimized_params(plan: Plan, state: TrainState) -> PyTree:
    """What the optimizer updates: masters, where there are some, or parameters; None for frozen ones."""
    masters = iter(jax.tree.leaves(state.opt_state.master))
    pairs = zip(plan.part("params"), jax.tree.leaves(state.params), strict=True)
    return plan.trained_tree(next(masters) if leaf.has_master else x for leaf, x in pairs if leaf.trained)


def init_state(plan: Plan, rng: jax.Array, params: PyTree = None) -> TrainState:
    """The initial train state, every array born in its shard (FSDP's deferred init, DeepSpeed's zero.Init).

    Args:
      plan: from `build_plan` on a mesh with devices.
      rng: a typed PRNG key (`jax.random.key(seed)`). The values do not depend on the mesh.
      params: parameters to start from (loaded weights), of the plan's structure and shapes and any float dtype; masters and
        moments begin with them. None draws them with the plan's `init_fn`.

    Raises:
      TypeError: `rng` is not a key of jax's default implementation.
      ValueError: `params` that are not the plan's, naming the first leaf that differs.
    """
    require_devices(plan)
    planned = dict(COUNTERS)["rng"]
    if getattr(rng, "dtype", None) != planned:
        raise TypeError(
            f"init_state: rng must be a key of type {planned} from jax.random.key(seed), not {getattr(rng, 'dtype', type(rng).__name__)}"
        )
    if params is not None:
        _check_params(plan, params)
    return jax.jit(functools.partial(_init, plan), out_shardings=state_shardings(plan))(rng, params)


def init_params(plan: Plan, rng: jax.Array) -> PyTree:
    """The parameters that `init_state` draws with this key, in float32, each where its leaf rests."""
    shardings = jax.tree.unflatten(plan.params_treedef, [plan.sharding(leaf.rest) for leaf in plan.part("params")])
    draw = lambda rng: cast(plan.recipe.init_fn(jax.random.split(rng)[0]), jnp.float32)  # noqa: E731
    return jax.jit(draw, out_shardings=shardings)(rng)


def _check_params(plan: Plan, params: PyTree) -> None:
    given = {name: jnp.shape(x) for name, x in named_leaves(params)}
    for name in dict.fromkeys([*plan.params, *given]):
        if name not in given or name not in plan.params or given[name] != plan.params[name].shape:
            ours = plan.params[name].shape if name in plan.params else "none"
            raise ValueError(f"init_state: params/{name}: the plan has shape {ours}, the parameters given have {given.get(name, 'none')}")


def lower_init(plan: Plan) -> jax.stages.Lowered:
    """`init_state` lowered, not run: what initialising holds can be read from the compiled program."""
    return jax.jit(functools.partial(_init, plan), out_shardings=state_shardings(plan)).lower(jax.eval_shape(jax.random.key, 0))


def _init(plan: Plan, rng: jax.Array, given: PyTree = None) -> TrainState:
    params_key, state_key = jax.random.split(rng)
    leaves = plan.part("params")
    drawn = jax.tree.leaves(cast(plan.recipe.init_fn(params_key) if given is None else given, jnp.float32))
    optimized = [x for leaf, x in zip(leaves, drawn, strict=True) if leaf.trained]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=jax.tree.unflatten(plan.params_treedef, [x.astype(leaf.rest.dtype) for leaf, x in zip(leaves, drawn, strict=True)]),
        opt_state=OptState(master_tree(plan, optimized), plan.recipe.tx.init(plan.trained_tree(optimized))),
        rng=state_key,
        skipped_steps=jnp.zeros((), jnp.int32),
        loss_scale=init_loss_scale(plan.precision.loss_scale) if plan.precision.compute == "float16" else None,
    )


def unplanned(plan: Plan, state: TrainState) -> list[str]:
    """Paths of leaves that do not lie where the plan says; empty when placement has not drifted."""
    planned = jax.tree.leaves(state_shardings(plan))
    return [
        leaf.path
        for leaf, x, sharding in zip(plan.leaves, jax.tree.leaves(state), planned, strict=True)
        if not x.sharding.is_equivalent_to(sharding, x.ndim)
    ]
