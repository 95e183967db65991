"""The gradient part of a step, in both engines: summed loss and gradients over all micro-batches.

Both return gradients as float32-convertible arrays in the placement the optimizer takes, and the sums of loss, weight
and metrics over the global batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from zjax.collectives import (
    LocalParam,
    constrain,
    data_index,
    finish_gradient,
    gather,
    gather_value,
    local_shape,
    manual_axes,
    manual_spec,
    sum_rows,
)
from zjax.plan import Plan
from zjax.precision import cast
from zjax.tree import PyTree
from zjax.units import Tracing, counting_turns, owners, plan_context, record_gathered, recorded_marks

LossFn = Callable[..., Any]
Sums = tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]


@dataclass(frozen=True)
class MeanLoss:
    """A loss that returns one scalar mean, opted in to by `mean_loss`."""

    fn: LossFn

    def __call__(self, params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mean as a sum of weight 1."""
        return self.fn(params, batch, rng), jnp.ones((), jnp.float32)


def mean_loss(fn: LossFn) -> MeanLoss:
    """Accepts `fn(params, batch, rng) -> mean` as a loss, for one micro-batch only.

    A mean over a micro-batch is not a micro-batch of the mean once rows weigh differently (masks, padding), so
    `make_train_step` raises for it with more than one.
    """
    return MeanLoss(fn)


def gradients(plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
    """Gradients of the summed loss of the global batch (not yet divided by its weight), and the sums.

    Raises:
      TypeError: a loss that does not keep the loss contract.
    """
    marked = _inspect(plan, loss_fn, params, batch, rng)
    shared = frozenset(path for path, ats in marked.items() if len(ats) > 1)
    record_gathered(sorted(shared), "")  # the root unit gathers what several share
    tracing = Tracing(plan if plan.zero.reshard_after_backward else _gathered_at_rest(plan), owners(marked))
    if plan.engine == "explicit":
        return _explicit(plan, tracing, loss_fn, params, batch, rng)
    return _partitioned(plan, tracing, shared, loss_fn, params, batch, rng)


def _inspect(plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array) -> dict[str, set[str]]:
    """Traces the loss on one device's rows of a micro-batch: which marks use which parameters, and whether rows are weighed."""
    share = plan.data_degree * plan.accumulation.micro_batches

    def weight_of(rows: int) -> Any:
        local = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
        return _constant_weight(lambda params, batch, rng: check_sums(loss_fn(params, batch, rng))[1], params, local, rng)

    rows = jax.tree.leaves(batch)[0].shape[0]
    found: list[Any] = []
    marked = recorded_marks(plan, lambda: found.append(weight_of(rows // share)))
    (local,) = found
    pieces = share if plan.engine == "explicit" else plan.accumulation.micro_batches
    if local is not None and pieces > 1:
        whole = weight_of(rows)
        if abs(whole - share * local) > 1e-3 * abs(whole):
            raise TypeError(
                f"loss_fn returns the weight {local:g} for {rows // share} rows and {whole:g} for {rows}: a weight is a sum over the rows "
                "it is given (their number, or that of their tokens), as the loss is. A loss that returns one mean can be wrapped in zjax.mean_loss"
            )
    return marked


def _constant_weight(weight: Callable[..., jax.Array], *args: Any) -> float | None:
    """The value of `weight(*args)` if it depends on no argument, from shapes alone; else None."""
    traced = jax.make_jaxpr(weight)(*args)
    needed, used = dce_jaxpr(traced.jaxpr, [True])
    if any(used):
        return None
    with jax.ensure_compile_time_eval():
        return float(jax.core.eval_jaxpr(needed, traced.consts)[0])


def _partitioned(
    plan: Plan, tracing: Tracing, shared: frozenset[str], loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array
) -> tuple[PyTree, Sums]:
    """Partitioner engine: gradients of global arrays, in the accumulator's spec."""
    traced, leaves = tracing.plan, tracing.plan.part("params")

    def micro_batch(params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
        def summed(params: PyTree) -> tuple[jax.Array, Sums]:
            # What several units share is gathered once, here; what no unit has is left to XLA.
            given = [gather(traced, leaf, x) if leaf.name in shared else x for leaf, x in zip(leaves, jax.tree.leaves(params), strict=True)]
            with counting_turns():
                sums = check_sums(loss_fn(jax.tree.unflatten(plan.params_treedef, given), batch, rng))
            return sums[0], sums

        with plan_context(tracing):  # around the backward too: rules of derivation trace the model again
            grads, sums = jax.grad(summed, has_aux=True)(params)
        return _constrained(plan, grads, "accumulator"), sums

    if traced is not plan:
        params = _constrained(plan, params, "forward")
    rng = jax.random.fold_in(rng, 0)  # as the first device of the explicit engine
    grads, sums = _accumulate(plan, micro_batch, params, _split_rows(plan, batch), rng, _zeros)
    return _constrained(plan, grads, "optimizer"), sums


def _explicit(plan: Plan, tracing: Tracing, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
    """Explicit engine: the same inside `shard_map`, on what each device holds."""
    mesh, manual = plan.mesh, manual_axes(plan.mesh)
    traced, leaves = tracing.plan, tracing.plan.part("params")
    owned = {name for name, _ in tracing.owners}

    def specs(role: str) -> PyTree:
        return jax.tree.unflatten(plan.params_treedef, [manual_spec(mesh, getattr(leaf, role).spec) for leaf in plan.part("params")])

    micro_batched = plan.accumulation.micro_batches > 1

    def on_device(params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
        if traced is not plan:
            whole = [gather_value(plan, leaf, x) for leaf, x in zip(plan.part("params"), jax.tree.leaves(params), strict=True)]
            params = jax.tree.unflatten(plan.params_treedef, whole)
        rng = jax.random.fold_in(rng, data_index(mesh))  # other rows, other randomness
        grads, sums = _accumulate(plan, micro_batch, params, batch, rng, _local_zeros)
        finished = [finish_gradient(plan, leaf, g) for leaf, g in zip(leaves, jax.tree.leaves(grads), strict=True)]
        return jax.tree.unflatten(plan.params_treedef, finished), jax.tree.map(functools.partial(sum_rows, plan), sums)

    def micro_batch(params: PyTree, batch: PyTree, rng: jax.Array) -> tuple[PyTree, Sums]:
        def summed(carriers: PyTree) -> tuple[jax.Array, Sums]:
            pairs = zip(leaves, jax.tree.leaves(params), jax.tree.leaves(carriers), strict=True)
            local = [LocalParam(value, carrier) for _, value, carrier in pairs]
            # Parameters outside every unit, and those that several units share, belong to the root unit (FSDP): they are
            # gathered once, here.
            given = [x if leaf.name in owned else gather(traced, leaf, x) for leaf, x in zip(leaves, local, strict=True)]
            with counting_turns():
                sums = check_sums(loss_fn(jax.tree.unflatten(plan.params_treedef, given), batch, rng))
            return sums[0], sums

        carriers = [jnp.zeros(local_shape(plan, leaf, "accumulator"), leaf.reduce) for leaf in leaves]
        with plan_context(tracing):  # around the backward too: rules of derivation trace the model again
            return jax.grad(summed, has_aux=True)(jax.tree.unflatten(plan.params_treedef, carriers))

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs("rest"), manual_spec(mesh, P(None, *plan.batch_spec) if micro_batched else plan.batch_spec), P()),
        out_specs=(specs("optimizer"), P()),
        axis_names=manual,
        check_vma=False,
    )(params, _split_rows(plan, batch), rng)


def _gathered_at_rest(plan: Plan) -> Plan:
    """The plan as the marks see it where parameters are gathered once a step, before its micro-batches."""
    leaves = [dataclasses.replace(leaf, rest=leaf.forward, backward=leaf.forward) if leaf.forward else leaf for leaf in plan.leaves]
    return dataclasses.replace(plan, leaves=tuple(leaves))


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
