"""The gradient part of a step, in both engines: summed loss and gradients over all micro-batches.

Both return gradients as float32-convertible arrays in the placement the optimizer takes, and the sums of loss, weight
and metrics over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.collectives import (
    LocalParam,
    constrain,
    finish_gradient,
    gather,
    local_shape,
    manual_axes,
    manual_spec,
    psum_rows,
)
from zjax.mesh import data_axes
from zjax.plan import Plan
from zjax.precision import cast
from zjax.tree import PyTree
from zjax.units import Tracing, plan_context, unit_owners

LossFn = Callable[..., Any]
Sums = tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]


def gradients(plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
    """Gradients of the summed loss of the global batch (not yet divided by its weight), and the sums."""
    if plan.engine == "explicit":
        return _explicit(plan, loss_fn, params, batch, rng)
    grads, sums = _accumulate(plan, _micro_batch(plan, loss_fn), params, _split_rows(plan, batch), rng, _zeros)
    return _constrained(plan, grads, "optimizer"), sums


def _micro_batch(plan: Plan, loss_fn: LossFn) -> Callable[..., tuple[PyTree, Sums]]:
    """Partitioner engine: gradients of one micro-batch of global arrays, in the accumulator's spec."""

    def micro_batch(params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
        def summed(params: PyTree) -> tuple[jax.Array, Sums]:
            sums = check_sums(loss_fn(params, batch, rng))
            return sums[0], sums

        grads, sums = jax.grad(summed, has_aux=True)(params)
        return _constrained(plan, grads, "accumulator"), sums

    return micro_batch


def _explicit(plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
    """Explicit engine: the same inside `shard_map`, on what each device holds."""
    mesh, manual = plan.mesh, manual_axes(plan.mesh)
    leaves = plan.part("params")
    specs = lambda role: jax.tree.unflatten(plan.params_treedef, [manual_spec(mesh, getattr(leaf, role).spec) for leaf in leaves])  # noqa: E731
    owners = _owners(plan, loss_fn, params, batch, rng)
    owned = {name for name, _ in owners}
    micro_batched = plan.accumulation.micro_batches > 1

    def on_device(params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
        for axis in data_axes(mesh):  # other rows, other randomness
            rng = jax.random.fold_in(rng, jax.lax.axis_index(axis))
        grads, sums = _accumulate(plan, micro_batch, params, batch, rng, _local_zeros)
        finished = [finish_gradient(plan, leaf, g) for leaf, g in zip(leaves, jax.tree.leaves(grads), strict=True)]
        return jax.tree.unflatten(plan.params_treedef, finished), psum_rows(plan, sums)

    def micro_batch(params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
        def summed(carriers: PyTree) -> tuple[jax.Array, Sums]:
            pairs = zip(leaves, jax.tree.leaves(params), jax.tree.leaves(carriers), strict=True)
            local = [LocalParam(value, carrier) for _, value, carrier in pairs]
            # Parameters outside every unit, and those that several units share, belong to the root unit (FSDP): they are
            # gathered once, here.
            given = [x if leaf.name in owned else gather(plan, leaf, x) for leaf, x in zip(leaves, local, strict=True)]
            with plan_context(Tracing(plan, owners)):
                sums = check_sums(loss_fn(jax.tree.unflatten(plan.params_treedef, given), batch, rng))
            return sums[0], sums

        carriers = [jnp.zeros(local_shape(plan, leaf, "accumulator"), leaf.rest.dtype) for leaf in leaves]
        return jax.grad(summed, has_aux=True)(jax.tree.unflatten(plan.params_treedef, carriers))

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs("rest"), manual_spec(mesh, P(None, *plan.batch_spec) if micro_batched else plan.batch_spec), P()),
        out_specs=(specs("optimizer"), P()),
        axis_names=manual,
        check_vma=False,
    )(params, _split_rows(plan, batch), rng)


def _owners(plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array) -> frozenset[tuple[str, str]]:
    rows = plan.data_degree * plan.accumulation.micro_batches
    local = jax.tree.map(lambda x: jnp.zeros((x.shape[0] // rows, *x.shape[1:]), x.dtype), batch)
    return unit_owners(plan, lambda: loss_fn(params, local, rng))


def _accumulate(
    plan: Plan, micro_batch: Any, params: PyTree, batch: PyTree, rng: jax.Array, zeros: Callable[[Plan], PyTree]
) -> tuple[PyTree, Sums]:
    n = plan.accumulation.micro_batches
    if n == 1:
        return micro_batch(params, batch, rng)

    def body(carry: tuple[PyTree, Sums], xs: tuple[PyTree, jax.Array]) -> tuple[tuple[PyTree, Sums], None]:
        grads, sums = micro_batch(params, *xs)
        total = jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[0], grads)
        if plan.engine == "partitioner":
            total = _constrained(plan, total, "accumulator")
        return (total, jax.tree.map(jnp.add, carry[1], sums)), None

    rngs = jax.random.split(rng, n)
    first = jax.tree.map(lambda x: x[0], (batch, rngs))
    sums = jax.eval_shape(micro_batch, params, *first)[1]
    start = zeros(plan), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
    return jax.lax.scan(body, start, (batch, rngs))[0]


def _zeros(plan: Plan) -> PyTree:
    zeros = [jnp.zeros(leaf.shape, leaf.accumulator.dtype) for leaf in plan.part("params") if leaf.accumulator]
    return _constrained(plan, jax.tree.unflatten(plan.params_treedef, zeros), "accumulator")


def _local_zeros(plan: Plan) -> PyTree:
    zeros = [jnp.zeros(local_shape(plan, leaf, "accumulator"), leaf.accumulator.dtype) for leaf in plan.part("params") if leaf.accumulator]
    return jax.tree.unflatten(plan.params_treedef, zeros)


def _split_rows(plan: Plan, batch: PyTree) -> PyTree:
    """[rows, ...] -> [micro_batches, rows / micro_batches, ...], each micro-batch over all data devices.

    Micro-batch m has rows m, m + n, m + 2n, ... of the global batch: whatever the mesh, so that what a row draws at random
    does not depend on it, and without moving a row to another device.
    """
    n = plan.accumulation.micro_batches

    def split(x: jax.Array) -> jax.Array:
        rows = x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)
        return constrain(plan.mesh, rows, P(None, *plan.batch_spec))

    return jax.tree.map(split, batch) if n > 1 else batch


def _constrained(plan: Plan, tree: PyTree, role: str) -> PyTree:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, plan.params_tree(role))


def check_sums(result: Any) -> Sums:
    """Checks the loss contract; sums and weights come out as float32 scalars."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise TypeError(
            "loss_fn must return (loss_sum, weight) or (loss_sum, weight, metrics), sums over the rows it is given, not means"
            f"; it returned {type(result).__name__}. A loss that returns one mean can be wrapped in zjax.mean_loss"
        )
    loss_sum, weight, metrics = (*result, {})[:3]
    if jnp.shape(loss_sum) or jnp.shape(weight):
        raise TypeError(f"loss_fn: loss_sum and weight must be scalars; got shapes {jnp.shape(loss_sum)} and {jnp.shape(weight)}")
    for name, pair in metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"loss_fn: metric {name!r} must be a pair (sum, weight), so that it can be averaged; got {type(pair).__name__}")
    return cast(jax.tree.map(jnp.asarray, (loss_sum, weight, metrics)), jnp.float32)
