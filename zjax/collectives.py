"""How a unit's parameters are gathered and its gradients scattered, in both engines.

Partitioner engine: sharding constraints inside a `custom_vjp`. The forward constrains the parameter to its compute
spec, the backward constrains the cotangent to the gradient's spec, and XLA inserts the collectives. State sharding
alone does not do it: XLA may then all-reduce and hold full gradients.

Explicit engine: the model runs in `shard_map` on what each device holds, and the collectives are written out. A
parameter travels through the model as a `LocalParam`, whose gradient may have another shape than its value: in stage 2
a whole parameter gets a scattered gradient, and while gradients are accumulated locally a shard gets a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.mesh import AnyMesh, data_axes, physical_axes, shard_shape, spec_axes
from zjax.plan import LeafPlan, Placement, Plan

GATHERED = "zjax_gathered"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of gathered parameters, for remat policies."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalParam:
    """A parameter inside the explicit engine: a pytree node, so that it can be scanned over and sliced like an array."""

    value: jax.Array
    """The piece this device holds between steps."""
    gradient: jax.Array
    """Zeros in the shape of the piece of the gradient this device accumulates. Never read; what is differentiated."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"LocalParam.{name}: a parameter is used outside its unit, where the explicit engine has only this device's piece of it. "
            "Mark the function that uses it with zjax.fully_shard(at=...), or build the plan with ZeroConfig(engine='partitioner')"
        )


def is_local(x: Any) -> bool:
    """Whether a leaf is a `LocalParam` (for `is_leaf`)."""
    return isinstance(x, LocalParam)


def gather(plan: Plan, leaf: LeafPlan, x: jax.Array | LocalParam) -> jax.Array:
    """The parameter as the unit computes with it; its gradient comes back in the accumulator's placement.

    `x` is the whole leaf (of the global array, or this device's `LocalParam`), or one layer of a stacked leaf.
    """
    if isinstance(x, LocalParam):
        return checkpoint_name(_gathered_local(plan, leaf, x), GATHERED)
    assert leaf.forward is not None and leaf.accumulator is not None
    layer = is_layer(leaf, x)
    return checkpoint_name(_constrained_both_ways(plan.mesh, spec_of(leaf.forward, layer), spec_of(leaf.accumulator, layer))(x), GATHERED)


def gather_value(plan: Plan, leaf: LeafPlan, value: jax.Array) -> jax.Array:
    """The forward of `gather` alone, for layer loops with a derivative rule of their own."""
    assert leaf.forward is not None
    if plan.engine == "explicit":
        return _all_gather(plan, leaf, value)
    return constrain(plan.mesh, value, spec_of(leaf.forward, is_layer(leaf, value)))


def reduce_gradient(plan: Plan, leaf: LeafPlan, gradient: jax.Array, *, layer: bool) -> jax.Array:
    """The backward of `gather` alone: a unit's whole gradient as the accumulator holds it."""
    assert leaf.accumulator is not None
    if plan.engine == "explicit":
        return _scatter(plan, leaf, gradient, layer)
    return constrain(plan.mesh, gradient, spec_of(leaf.accumulator, layer))


def finish_gradient(plan: Plan, leaf: LeafPlan, gradient: jax.Array) -> jax.Array:
    """Explicit engine, once a step: what is still partial is reduced into the optimizer's shard."""
    assert leaf.accumulator is not None and leaf.optimizer is not None
    partial = set(leaf.partial)
    gradient = _scatter_dims(plan, gradient, _added_axes(leaf.accumulator.spec, leaf.optimizer.spec, partial))
    left = tuple(axis for axis in leaf.partial if axis not in spec_axes(leaf.optimizer.spec))
    return _psum(plan, gradient, left) if left else gradient


def is_layer(leaf: LeafPlan, x: jax.Array | LocalParam) -> bool:
    """Whether `x` is one layer of a stacked leaf."""
    ndim = x.value.ndim if isinstance(x, LocalParam) else x.ndim
    return leaf.stacked and ndim == len(leaf.shape) - 1


def spec_of(placed: Placement, layer: bool) -> P:
    """The spec of a leaf, or of one of its layers."""
    return P(*placed.spec[1:]) if layer else placed.spec


def local_shape(plan: Plan, leaf: LeafPlan, role: str = "rest") -> tuple[int, ...]:
    """Shape of the piece of a leaf that one device of the explicit engine sees (a `tensor` axis left to XLA is not cut)."""
    placed: Placement = getattr(leaf, role)
    return shard_shape(plan.mesh, manual_spec(plan.mesh, placed.spec), leaf.shape)


def manual_axes(mesh: AnyMesh) -> frozenset[str]:
    """Axes over which the explicit engine is manual: all but a `tensor` axis larger than 1, which stays with XLA."""
    return frozenset(mesh.axis_names) - frozenset(physical_axes(mesh, "tensor"))


def manual_spec(mesh: AnyMesh, spec: P) -> P:
    """The part of a spec that lies on manual axes."""
    manual = manual_axes(mesh)
    entries = []
    for entry in spec:
        kept = tuple(axis for axis in spec_axes(P(entry)) if axis in manual)
        entries.append(kept[0] if len(kept) == 1 else kept or None)
    return P(*entries)


def constrain(mesh: AnyMesh, x: jax.Array, spec: P) -> jax.Array:
    """`x` with a sharding that every dim divides; XLA moves it there."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def constrain_rows(plan: Plan, tree: Any, rows: int) -> Any:
    """Every array of `tree` with `rows` in dim 0: that dim over the data axes, the others left to XLA.

    In the explicit engine rows are where they are by construction.
    """
    if plan.engine == "explicit":
        return tree

    def pin(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not x.ndim or x.shape[0] != rows or rows % plan.data_degree or not len(plan.residual_spec):
            return x
        return constrain(plan.mesh, x, P(plan.residual_spec[0], *(P.UNCONSTRAINED,) * (x.ndim - 1)))

    return jax.tree.map(pin, tree)


def is_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an equation, as a remat policy sees it, is the gathering of a parameter (or a mere constraint)."""
    return primitive.name in ("sharding_constraint", "all_gather") or (primitive.name == "name" and params.get("name") == GATHERED)


def psum_rows(plan: Plan, tree: Any) -> Any:
    """Explicit engine: sums over every device that holds other rows."""
    axes = data_axes(plan.mesh)
    return jax.tree.map(lambda x: _psum(plan, x, axes), tree) if axes else tree


def _constrained_both_ways(mesh: AnyMesh, forward: P, backward: P) -> Any:
    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return constrain(mesh, x, forward)

    identity.defvjp(lambda x: (constrain(mesh, x, forward), None), lambda _, g: (constrain(mesh, g, backward),))
    return identity


def _gathered_local(plan: Plan, leaf: LeafPlan, x: LocalParam) -> jax.Array:
    layer = is_layer(leaf, x)

    @jax.custom_vjp
    def gathered(value: jax.Array, gradient: jax.Array) -> jax.Array:
        return _all_gather(plan, leaf, value)

    def backward(_: None, g: jax.Array) -> tuple[None, jax.Array]:
        return None, _scatter(plan, leaf, g, layer)

    gathered.defvjp(lambda value, gradient: (gathered(value, gradient), None), backward)
    return gathered(jax.lax.stop_gradient(x.value), x.gradient)


def _all_gather(plan: Plan, leaf: LeafPlan, value: jax.Array) -> jax.Array:
    assert leaf.forward is not None
    layer = leaf.stacked and value.ndim == len(leaf.shape) - 1
    for dim, axes in _added_axes(spec_of(leaf.forward, layer), spec_of(leaf.rest, layer), set(leaf.zero_axes)):
        value = jax.lax.all_gather(value, axes, axis=dim, tiled=True)
    return value


def _scatter(plan: Plan, leaf: LeafPlan, gradient: jax.Array, layer: bool) -> jax.Array:
    """A unit's gradient reduced over the axes it does not stay partial over, each device keeping the accumulator's piece."""
    assert leaf.forward is not None and leaf.accumulator is not None
    scattered = _added_axes(spec_of(leaf.forward, layer), spec_of(leaf.accumulator, layer), set(leaf.zero_axes))
    gradient = _scatter_dims(plan, gradient, scattered)
    done = {axis for _, axes in scattered for axis in axes} | set(leaf.partial)
    left = tuple(axis for axis in data_axes(plan.mesh) if axis not in done)
    return _psum(plan, gradient, left) if left else gradient


def _added_axes(whole: P, sharded: P, among: set[str]) -> list[tuple[int, tuple[str, ...]]]:
    """(dim, axes) that `sharded` has and `whole` has not, of the given axes."""
    before = spec_axes(whole)
    added = [
        (dim, tuple(axis for axis in spec_axes(P(entry)) if axis in among and axis not in before)) for dim, entry in enumerate(sharded)
    ]
    return [(dim, axes) for dim, axes in added if axes]


def _scatter_dims(plan: Plan, x: jax.Array, dims: Sequence[tuple[int, tuple[str, ...]]]) -> jax.Array:
    """Reduce-scatters, one mesh axis after the other: over several torus dims at once a TPU makes it an all-reduce.

    The scattered dim is moved to the front: a minor dim cut into pieces that are no multiple of a TPU's 128 lanes would
    make it an all-reduce too.
    """
    for dim, axes in dims:
        moved = jnp.moveaxis(x, dim, 0)
        for axis in axes:
            moved = jax.lax.psum_scatter(_widened(plan, moved), axis, scatter_dimension=0, tiled=True).astype(x.dtype)
        x = jnp.moveaxis(moved, 0, dim)
    return x


def _psum(plan: Plan, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(_widened(plan, x), axes).astype(x.dtype)


def _widened(plan: Plan, x: jax.Array) -> jax.Array:
    """float32 where jax on the CPU would abort: a bf16 sum in a `shard_map` that leaves an axis automatic."""
    on_cpu = isinstance(plan.mesh, jax.sharding.Mesh) and plan.mesh.devices.flat[0].platform == "cpu"
    if on_cpu and x.dtype == jnp.bfloat16 and physical_axes(plan.mesh, "tensor"):
        return x.astype(jnp.float32)
    return x
