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
    gradient: jax.Array | None
    """Zeros in the shape of the piece of the gradient this device accumulates. Never read; what is differentiated. None if frozen."""

    @property
    def dtype(self) -> Any:
        """That of the whole parameter at rest, for casts to a parameter's dtype outside its unit."""
        return self.value.dtype

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"LocalParam.{name}: a parameter is used outside its unit, where the explicit engine has only this device's piece of it. "
            "Mark the function that uses it with zjax.fully_shard(at=...), or build the plan with ZeroConfig(engine='partitioner')"
        )


def is_local(x: Any) -> bool:
    """Whether a leaf is a `LocalParam` (for `is_leaf`)."""
    return isinstance(x, LocalParam)


def gather(plan: Plan, leaf: LeafPlan, x: jax.Array | LocalParam, wait: jax.Array | None = None) -> jax.Array:
    """The parameter as the unit computes with it; its gradient comes back in the accumulator's placement.

    `x` is the whole leaf (of the global array, or this device's `LocalParam`), or one layer of a stacked leaf. Nothing is
    moved before `wait` is there.
    """
    layer = is_layer(leaf, x)
    local = isinstance(x, LocalParam)
    if not leaf.trained:
        return checkpoint_name(gather_value(plan, leaf, jax.lax.stop_gradient(x.value if isinstance(x, LocalParam) else x), wait), GATHERED)

    @jax.custom_vjp
    def gathered(value: jax.Array, carrier: jax.Array, wait: jax.Array | None) -> jax.Array:
        return gather_value(plan, leaf, value, wait)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array | None, jax.Array | None, None]:
        reduced = reduce_gradient(plan, leaf, g, layer=layer)
        return (None, reduced, None) if local else (reduced, None, None)

    # Not `gathered` itself: a remat policy has to see the collective, not a call that hides it.
    gathered.defvjp(lambda value, carrier, wait: (gather_value(plan, leaf, value, wait), None), backward)
    value, carrier = (x.value, x.gradient) if isinstance(x, LocalParam) else (x, None)
    return checkpoint_name(gathered(value, carrier, wait), GATHERED)


def gather_value(plan: Plan, leaf: LeafPlan, value: jax.Array, wait: jax.Array | None = None) -> jax.Array:
    """The forward of `gather` alone, for layer loops with a derivative rule of their own."""
    assert leaf.forward is not None
    if wait is not None and leaf.rest.spec != leaf.forward.spec:
        value = value + zero_after(wait).astype(value.dtype)
    if plan.engine == "explicit":
        return _all_gather(plan, leaf, value)
    return constrain(plan.mesh, value, spec_of(leaf.forward, is_layer(leaf, value)))


def zero_after(x: jax.Array) -> jax.Array:
    """0, float32, but not before `x` is there: adding it to something makes that wait.

    XLA takes an operand out of an optimization barrier if nothing uses what comes out for it, and a product with 0 would
    pass on infinities. That the second bit of a sign bit is 0, it does not see.
    """
    first = jax.lax.stop_gradient(x[(0,) * x.ndim]).astype(jnp.float32)
    sign = jax.lax.shift_right_logical(jax.lax.bitcast_convert_type(first, jnp.uint32), jnp.uint32(31))
    return (sign & 2).astype(jnp.float32)


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
    gradient = gradient.astype(leaf.reduce)
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


def sum_rows(plan: Plan, x: jax.Array) -> jax.Array:
    """Explicit engine: the sum over every device that holds other rows. Its gradient is summed over them likewise.

    (jax's own rule for `psum` inside a `shard_map` without varying axes would give each device its own part alone.)
    """
    axes = data_axes(plan.mesh)
    if not axes:
        return x
    total = jax.custom_vjp(lambda x: _psum(plan, x, axes))
    total.defvjp(lambda x: (_psum(plan, x, axes), None), lambda _, g: (_psum(plan, g, axes),))
    return total(x)


def first_device(plan: Plan, x: jax.Array) -> jax.Array:
    """Explicit engine: the integers that the first of the data devices has, on all of them."""
    axes = data_axes(plan.mesh)
    return jax.lax.psum(jnp.where(data_index(plan.mesh) == 0, x, jnp.zeros_like(x)), axes) if axes else x


def data_index(mesh: AnyMesh) -> jax.Array:
    """Explicit engine: this device's place among those the batch is split over, int32, in the order of the rows."""
    index = jnp.zeros((), jnp.int32)
    for axis in data_axes(mesh):
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index


def _all_gather(plan: Plan, leaf: LeafPlan, value: jax.Array) -> jax.Array:
    assert leaf.forward is not None
    layer = leaf.stacked and value.ndim == len(leaf.shape) - 1
    for dim, axes in _added_axes(spec_of(leaf.forward, layer), spec_of(leaf.rest, layer), set(leaf.zero_axes)):
        value = jax.lax.all_gather(value, axes, axis=dim, tiled=True)
    return value


def _scatter(plan: Plan, leaf: LeafPlan, gradient: jax.Array, layer: bool) -> jax.Array:
    """A unit's gradient reduced over the axes it does not stay partial over, each device keeping the accumulator's piece."""
    assert leaf.forward is not None and leaf.accumulator is not None
    gradient = gradient.astype(leaf.reduce)
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
    """Reduce-scatters, one mesh axis after the other: over several torus dims at once a TPU makes it an all-reduce."""
    for dim, axes in dims:
        for axis in axes:
            x = jax.lax.psum_scatter(_widened(plan, x), axis, scatter_dimension=dim, tiled=True).astype(x.dtype)
    return x


def _psum(plan: Plan, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(_widened(plan, x), axes).astype(x.dtype)


def _widened(plan: Plan, x: jax.Array) -> jax.Array:
    """float32 where jax on the CPU would abort: a bf16 sum in a `shard_map` that leaves an axis automatic."""
    on_cpu = isinstance(plan.mesh, jax.sharding.Mesh) and plan.mesh.devices.flat[0].platform == "cpu"
    if on_cpu and x.dtype == jnp.bfloat16 and physical_axes(plan.mesh, "tensor"):
        return x.astype(jnp.float32)
    return x
