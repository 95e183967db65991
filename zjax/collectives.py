"""How a unit's parameters are gathered and its gradients scattered.

In the partitioner engine both are sharding constraints inside a `custom_vjp`: the forward constrains the parameter to
its compute spec, the backward constrains the cotangent to the gradient's spec, and XLA inserts the all-gather and the
reduce-scatter (or all-reduce). State sharding alone does not do it: XLA may then all-reduce and hold full gradients.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.mesh import AnyMesh
from zjax.plan import LeafPlan, Plan

GATHERED = "zjax_gathered"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of gathered parameters, for remat policies."""


def gather(plan: Plan, leaf: LeafPlan, x: jax.Array) -> jax.Array:
    """The parameter as the unit computes with it; its gradient comes back in the accumulator's spec.

    `x` has the leaf's shape, or that of one layer of a stacked leaf.
    """
    assert leaf.forward is not None and leaf.accumulator is not None
    layer = leaf.stacked and x.ndim == len(leaf.shape) - 1
    forward, backward = (_of_layer(placed.spec) if layer else placed.spec for placed in (leaf.forward, leaf.accumulator))
    return checkpoint_name(_constrained_both_ways(plan.mesh, forward, backward)(x), GATHERED)


def constrain(mesh: AnyMesh, x: jax.Array, spec: P) -> jax.Array:
    """`x` with a sharding that every dim divides; XLA moves it there."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def constrain_rows(plan: Plan, tree: Any, rows: int) -> Any:
    """Every array of `tree` with `rows` in dim 0: that dim over the data axes, the others left to XLA."""

    def pin(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not x.ndim or x.shape[0] != rows or rows % plan.data_degree or not len(plan.residual_spec):
            return x
        return constrain(plan.mesh, x, P(plan.residual_spec[0], *(P.UNCONSTRAINED,) * (x.ndim - 1)))

    return jax.tree.map(pin, tree)


def is_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an equation, as a remat policy sees it, is the gathering of a parameter (or a mere constraint)."""
    return primitive.name == "sharding_constraint" or (primitive.name == "name" and params.get("name") == GATHERED)


def _of_layer(spec: P) -> P:
    return P(*spec[1:])


def _constrained_both_ways(mesh: AnyMesh, forward: P, backward: P) -> Any:
    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return constrain(mesh, x, forward)

    identity.defvjp(lambda x: (constrain(mesh, x, forward), None), lambda _, g: (constrain(mesh, g, backward),))
    return identity
