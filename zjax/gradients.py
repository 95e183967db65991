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


def gradients(
    plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array, scale: jax.Array | None = None
) -> tuple[PyTree, Sums, jax.Array]:
    """Gradients of the global batch's summed loss, its sums, and what the gradients are to be divided by.

    The gradients are like the parameters, None where frozen. With a loss scale the backward begins with scale / total
    weight, so that float16 holds gradients of a scaled mean, not of a sum: it would overflow.

    Raises:
      TypeError: a loss that does not keep the loss contract; with a loss scale, a weight that depends on the parameters.
    """
    marked, weight_of = _inspect(plan, loss_fn, params, batch, rng, scaled=scale is not None)
    shared = frozenset(path for path, ats in marked.items() if len(ats) > 1)
    record_gathered(sorted(shared), "")  # the root unit gathers what several share
    tracing = Tracing(plan if plan.zero.reshard_after_backward else _gathered_at_rest(plan), owners(marked))
    run = _explicit if plan.engine == "explicit" else _partitioned
    grads, sums, seed = run(plan, tracing, shared, loss_fn, params, batch, rng, functools.partial(_seed, plan, weight_of, scale))
    return plan.trained_tree(grads), sums, seed * sums[1]


Seed = Callable[[PyTree, jax.Array], jax.Array]
"""(this engine's rows by micro-batch, their keys) -> what the loss is multiplied with before it is differentiated."""


def _seed(plan: Plan, weight_of: Callable[..., jax.Array] | None, scale: jax.Array | None, batch: PyTree, rngs: jax.Array) -> jax.Array:
    if scale is None or weight_of is None:
        return jnp.ones((), jnp.float32)
    weight = jnp.sum(jax.lax.map(lambda xs: weight_of(*xs), (batch, rngs))) if rngs.shape else weight_of(batch, rngs)
    if plan.engine == "explicit":
        weight = sum_rows(plan, weight)
    return scale / jnp.where(weight > 0, weight, 1)


def _inspect(
    plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array, scaled: bool
) -> tuple[dict[str, set[str]], Callable[..., jax.Array] | None]:
    """Traces the loss on one device's rows of a micro-batch: which marks use which parameters, and how rows are weighed.

    The weight is returned as a function of a micro-batch and its key, if it is needed.
    """
    micro, share = plan.accumulation.micro_batches, plan.data_degree * plan.accumulation.micro_batches
    rows = jax.tree.leaves(batch)[0].shape[0]

    def weight(params: PyTree, batch: PyTree, rng: jax.Array) -> jax.Array:
        return check_sums(loss_fn(params, batch, rng))[1]

    def traced(rows: int) -> _Weight:
        local = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
        return _Weight.of(weight, params, local, rng)

    found: list[_Weight] = []
    marked = recorded_marks(plan, lambda: found.append(traced(rows // share)))
    local = found[0].constant()
    pieces = share if plan.engine == "explicit" else micro
    if local is not None and pieces > 1:
        whole = traced(rows).constant()
        if whole is None or abs(whole - share * local) > 1e-3 * abs(whole):
            raise TypeError(
                f"loss_fn returns the weight {local:g} for {rows // share} rows and {whole:g} for {rows}: a weight is a sum over the rows "
                "it is given (their number, or that of their tokens), as the loss is. A loss that returns one mean can be wrapped in zjax.mean_loss"
            )
    if not scaled:
        return marked, None
    seen = found[0] if plan.engine == "explicit" or plan.data_degree == 1 else None
    if seen is None:
        recorded_marks(plan, lambda: found.append(traced(rows // micro)))
        seen = found[-1]
    return marked, seen.function(len(jax.tree.leaves(params)))


@dataclass(frozen=True)
class _Weight:
    """The part of a traced loss that its weight depends on."""

    jaxpr: Any
    consts: Any
    used: tuple[bool, ...]

    @classmethod
    def of(cls, weight: Callable[..., jax.Array], *args: Any) -> _Weight:
        traced = jax.make_jaxpr(weight)(*args)
        needed, used = dce_jaxpr(traced.jaxpr, [True])
        return cls(needed, traced.consts, tuple(used))

    def constant(self) -> float | None:
        """Its value if it depends on no argument, else None."""
        if any(self.used):
            return None
        with jax.ensure_compile_time_eval():
            return float(jax.core.eval_jaxpr(self.jaxpr, self.consts)[0])

    def function(self, n_params: int) -> Callable[..., jax.Array]:
        """The weight of (batch, rng); TypeError where it depends on the parameters, the first `n_params` arguments."""
        if any(self.used[:n_params]):
            raise TypeError(
                "loss_fn: its weight depends on the parameters; with float16 the weight of the whole batch is needed before the "
                "backward, so that the loss can be scaled. Return a weight of the batch alone, or use precision.compute='bfloat16'"
            )

        def weight(batch: PyTree, rng: jax.Array) -> jax.Array:
            given = [x for x, used in zip(jax.tree.leaves((batch, rng)), self.used[n_params:], strict=True) if used]
            return jax.core.eval_jaxpr(self.jaxpr, self.consts, *given)[0]

        return weight


def _partitioned(
    plan: Plan, tracing: Tracing, shared: frozenset[str], loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array, seed_of: Seed
) -> tuple[list[jax.Array], Sums, jax.Array]:
    """Partitioner engine: gradients of global arrays, in the accumulator's spec."""
    traced, leaves = tracing.plan, tracing.plan.part("params")

    def micro_batch(params: list[jax.Array], seed: jax.Array, batch: PyTree, rng: jax.Array) -> tuple[list[jax.Array], Sums]:
        def summed(trained: list[jax.Array]) -> tuple[jax.Array, Sums]:
            supply = iter(trained)
            every = [next(supply) if leaf.trained else x for leaf, x in zip(leaves, params, strict=True)]
            # What several units share is gathered once, here; what no unit has is left to XLA.
            given = [gather(traced, leaf, x) if leaf.name in shared else x for leaf, x in zip(leaves, every, strict=True)]
            with counting_turns():
                sums = check_sums(loss_fn(jax.tree.unflatten(plan.params_treedef, given), batch, rng))
            return sums[0] * seed, sums

        with plan_context(tracing):  # around the backward too: rules of derivation trace the model again
            trained = [x for leaf, x in zip(leaves, params, strict=True) if leaf.trained]
            grads, sums = jax.grad(summed, has_aux=True)(trained)
        return _constrained(plan, grads, "accumulator"), sums

    given = jax.tree.leaves(params)
    if traced is not plan:
        given = [jax.lax.with_sharding_constraint(x, plan.sharding(leaf.rest)) for leaf, x in zip(leaves, given, strict=True)]  # gathered
    rng = jax.random.fold_in(rng, 0)  # as the first device of the explicit engine
    grads, sums, seed = _accumulate(plan, functools.partial(micro_batch, given), _split_rows(plan, batch), rng, _zeros, seed_of)
    return _constrained(plan, grads, "optimizer"), sums, seed


def _explicit(
    plan: Plan, tracing: Tracing, shared: frozenset[str], loss_fn: LossFn, params: PyTree, batch: PyTree, rng: jax.Array, seed_of: Seed
) -> tuple[list[jax.Array], Sums, jax.Array]:
    """Explicit engine: the same inside `shard_map`, on what each device holds."""
    mesh, manual = plan.mesh, manual_axes(plan.mesh)
    traced, leaves = tracing.plan, tracing.plan.part("params")
    owned = {name for name, _ in tracing.owners}
    specs_of = lambda leaves, role: [manual_spec(mesh, getattr(leaf, role).spec) for leaf in leaves]  # noqa: E731
    micro_batched = plan.accumulation.micro_batches > 1

    def on_device(params: list[jax.Array], batch: PyTree, rng: jax.Array) -> tuple[list[jax.Array], Sums, jax.Array]:
        if traced is not plan:
            params = [gather_value(plan, leaf, x) for leaf, x in zip(plan.part("params"), params, strict=True)]
        rng = jax.random.fold_in(rng, data_index(mesh))  # other rows, other randomness
        grads, sums, seed = _accumulate(plan, functools.partial(micro_batch, params), batch, rng, _local_zeros, seed_of)
        finished = [finish_gradient(plan, leaf, g) for leaf, g in zip(plan.trained, grads, strict=True)]
        return finished, jax.tree.map(functools.partial(sum_rows, plan), sums), seed

    def micro_batch(params: list[jax.Array], seed: jax.Array, batch: PyTree, rng: jax.Array) -> tuple[list[jax.Array], Sums]:
        def summed(carriers: list[jax.Array]) -> tuple[jax.Array, Sums]:
            supply = iter(carriers)
            local = [LocalParam(value, next(supply) if leaf.trained else None) for leaf, value in zip(leaves, params, strict=True)]
            # Parameters outside every unit, and those that several units share, belong to the root unit (FSDP): they are
            # gathered once, here.
            given = [x if leaf.name in owned else gather(traced, leaf, x) for leaf, x in zip(leaves, local, strict=True)]
            with counting_turns():
                sums = check_sums(loss_fn(jax.tree.unflatten(plan.params_treedef, given), batch, rng))
            return sums[0] * seed, sums

        carriers = [jnp.zeros(local_shape(plan, leaf, "accumulator"), leaf.reduce) for leaf in plan.trained]
        with plan_context(tracing):  # around the backward too: rules of derivation trace the model again
            return jax.grad(summed, has_aux=True)(carriers)

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            specs_of(plan.part("params"), "rest"),
            manual_spec(mesh, P(None, *plan.batch_spec) if micro_batched else plan.batch_spec),
            P(),
        ),
        out_specs=(specs_of(plan.trained, "optimizer"), P(), P()),
        axis_names=manual,
        check_vma=False,
    )(jax.tree.leaves(params), _split_rows(plan, batch), rng)


def _gathered_at_rest(plan: Plan) -> Plan:
    """The plan as the marks see it where parameters are gathered once a step, before its micro-batches."""
    leaves = [dataclasses.replace(leaf, rest=leaf.forward, backward=leaf.forward) if leaf.forward else leaf for leaf in plan.leaves]
    return dataclasses.replace(plan, leaves=tuple(leaves))


def _accumulate(
    plan: Plan, micro_batch: Any, batch: PyTree, rng: jax.Array, zeros: Callable[[Plan], list[jax.Array]], seed_of: Seed
) -> tuple[list[jax.Array], Sums, jax.Array]:
    n = plan.accumulation.micro_batches
    if n == 1:
        seed = seed_of(batch, rng)
        return *micro_batch(seed, batch, rng), seed
    rngs = jax.random.split(rng, n)
    seed = seed_of(batch, rngs)

    def body(carry: tuple[list[jax.Array], Sums], xs: tuple[PyTree, jax.Array]) -> tuple[tuple[list[jax.Array], Sums], None]:
        grads, sums = micro_batch(seed, *xs)
        total = [a + g.astype(a.dtype) for a, g in zip(carry[0], grads, strict=True)]
        if plan.engine == "partitioner":
            total = _constrained(plan, total, "accumulator")
        return (total, jax.tree.map(jnp.add, carry[1], sums)), None

    first = jax.tree.map(lambda x: x[0], (batch, rngs))
    sums = jax.eval_shape(micro_batch, seed, *first)[1]
    start = zeros(plan), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
    return *jax.lax.scan(body, start, (batch, rngs))[0], seed


def _zeros(plan: Plan) -> list[jax.Array]:
    return _constrained(plan, [jnp.zeros(leaf.shape, leaf.accumulator.dtype) for leaf in plan.trained if leaf.accumulator], "accumulator")


def _local_zeros(plan: Plan) -> list[jax.Array]:
    return [jnp.zeros(local_shape(plan, leaf, "accumulator"), leaf.accumulator.dtype) for leaf in plan.trained if leaf.accumulator]


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


def _constrained(plan: Plan, gradients: list[jax.Array], role: str) -> list[jax.Array]:
    return [
        jax.lax.with_sharding_constraint(g, plan.sharding(getattr(leaf, role))) for leaf, g in zip(plan.trained, gradients, strict=True)
    ]


def check_sums(result: Any) -> Sums:
    """Checks the loss contract; sums and weights come out as float32 scalars."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        returned = f"an array of shape {result.shape}" if isinstance(result, jax.Array) else type(result).__name__
        raise TypeError(
            "loss_fn must return (loss_sum, weight) or (loss_sum, weight, metrics), sums over the rows it is given, not means"
            f"; it returned {returned}. A loss that returns one mean can be wrapped in zjax.mean_loss"
        )
    loss_sum, weight, metrics = (*result, {})[:3]
    if jnp.shape(loss_sum) or jnp.shape(weight):
        raise TypeError(f"loss_fn: loss_sum and weight must be scalars; got shapes {jnp.shape(loss_sum)} and {jnp.shape(weight)}")
    for name, pair in metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"loss_fn: metric {name!r} must be a pair (sum, weight), so that it can be averaged; got {type(pair).__name__}")
    return cast(jax.tree.map(jnp.asarray, (loss_sum, weight, metrics)), jnp.float32)
