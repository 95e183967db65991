"""The loss without gradients, over a whole set of batches, with the parameters gathered unit by unit as in training."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.collectives import LocalParam, data_index, gather, manual_axes, manual_spec, sum_rows
from zjax.config import AccumulationConfig
from zjax.flags import xla_flags
from zjax.gradients import LossFn, MeanLoss, Sums, check_sums
from zjax.plan import Plan, require_devices
from zjax.state import TrainState
from zjax.step import batch_sharding, check_batch
from zjax.tree import PyTree
from zjax.units import Tracing, counting_turns, owners, plan_context, recorded_marks


@dataclass(frozen=True)
class EvalStep:
    """A compiled-on-first-use evaluation step: `step(state, batch) -> (loss_sum, weight, metrics)`, sums over the global batch.

    The sums are float32 scalars and metrics are `{name: (sum, weight)}`, as the loss contract has them (`zjax.step`).
    Nothing is donated. Batches of one shape compile once.
    """

    plan: Plan
    loss_fn: LossFn
    jitted: Any

    def __call__(self, state: TrainState | PyTree, batch: PyTree) -> Sums:
        """The sums of one batch, from a train state or from its parameters alone.

        Raises:
          ValueError: rows that do not divide over the data devices.
        """
        check_batch(self.plan, batch)
        return self.jitted(state.params if isinstance(state, TrainState) else state, batch)


def make_eval_step(plan: Plan, loss_fn: LossFn) -> EvalStep:
    """The evaluation step of a plan: its parameters at rest as in training, gathered for each unit's forward.

    Args:
      plan: that of the train step. A batch may have any number of rows that divides over the data devices: it is not
        split into micro-batches, so give it those of one micro-batch where memory is short.
      loss_fn: as in `make_train_step`, without dropout or other randomness; its `rng` is the same for every batch.

    Raises:
      ValueError: an abstract mesh; a `mean_loss`, since a mean of batches' means is not the mean of the set.
      TypeError (when first traced): a loss that does not keep the contract.
    """
    mesh = require_devices(plan)
    if isinstance(loss_fn, MeanLoss):
        raise ValueError(
            "make_eval_step: mean_loss: a mean of batches' means is not the mean of the set; return (loss_sum, weight) instead"
        )
    plan = dataclasses.replace(plan, accumulation=AccumulationConfig())
    jitted = jax.jit(
        functools.partial(_sums, plan, loss_fn),
        in_shardings=(plan.params_tree("rest"), batch_sharding(plan)),
        out_shardings=NamedSharding(mesh, P()),
        compiler_options=xla_flags(mesh.devices.flat[0].platform, plan),
    )
    return EvalStep(plan, loss_fn, jitted)


def evaluate(step: EvalStep, state: TrainState | PyTree, batches: Iterable[PyTree]) -> dict[str, float]:
    """Weighted means over all batches: `loss`, and the loss's own metrics; and `weight`, the sum of weights.

    The same numbers as from all rows at once: what does not fill the last batch is filled up with rows that weigh nothing,
    by a mask of zeros for instance (`zjax.data.EvalBatches` does it).

    Raises:
      ValueError: no batch, or nothing in them that weighs.
    """
    total: Any = None
    pending: Sums | None = None
    for batch in batches:
        sums = step(state, batch)
        # One batch behind, so that the host adds while the devices work, and no more than two batches are on them.
        total, pending = _added(total, pending), sums
    total = _added(total, pending)
    if total is None or not float(total[1]) > 0:
        raise ValueError("evaluate: no batch, or nothing in the batches that weighs: there is no mean")
    loss, weight, metrics = total
    means = {name: value / weighed if weighed else math.nan for name, (value, weighed) in metrics.items()}
    return {"loss": loss / weight, "weight": weight, **means}


def _added(total: Any, sums: Sums | None) -> Any:
    """Sums on the host, in float64: a set may weigh more than float32 can count."""
    if sums is None:
        return total
    fetched = jax.tree.map(float, jax.device_get(sums))
    return fetched if total is None else jax.tree.map(lambda a, b: a + b, total, fetched)


def _sums(plan: Plan, loss_fn: LossFn, params: PyTree, batch: PyTree) -> Sums:
    rng, mesh, leaves = jax.random.key(0), plan.mesh, plan.part("params")
    local = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // plan.data_degree, *x.shape[1:]), x.dtype), batch)
    marked = recorded_marks(plan, lambda: jax.eval_shape(loss_fn, params, local, rng))
    tracing = Tracing(plan, owners(marked))
    owned = {name for name, _ in tracing.owners}

    def summed(params: list[Any], batch: PyTree, rng: jax.Array) -> Sums:
        # As in `zjax.gradients`: what no unit or several units have, the root unit gathers; the partitioner leaves the
        # former to XLA.
        root = {leaf.name for leaf in leaves} - owned if plan.engine == "explicit" else marked.keys() - owned
        given = [gather(plan, leaf, x) if leaf.name in root else x for leaf, x in zip(leaves, params, strict=True)]
        with plan_context(tracing), counting_turns():
            return check_sums(loss_fn(jax.tree.unflatten(plan.params_treedef, given), batch, rng))

    if plan.engine == "partitioner":
        return summed(jax.tree.leaves(params), batch, jax.random.fold_in(rng, 0))

    def on_device(params: list[jax.Array], batch: PyTree, rng: jax.Array) -> Sums:
        # Without a derivative nothing asks for the gradient's shape.
        pieces = [LocalParam(x, x) for x in params]
        return jax.tree.map(functools.partial(sum_rows, plan), summed(pieces, batch, jax.random.fold_in(rng, data_index(mesh))))

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=([manual_spec(mesh, leaf.rest.spec) for leaf in leaves], manual_spec(mesh, plan.batch_spec), P()),
        out_specs=P(),
        axis_names=manual_axes(mesh),
        check_vma=False,
    )(jax.tree.leaves(params), batch, rng)


@dataclass(frozen=True)
class Watch:
    """The lowest evaluation loss so far: for early stopping, and for which checkpoint is the best."""

    best_loss: float | None = None
    best_step: int | None = None
    since: int = 0
    """Evaluations after the best one."""

    def seen(self, step: int, loss: float) -> Watch:
        """After the evaluation of a step. A loss that is not a number, or equal to the lowest, is no new lowest."""
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            return Watch(loss, step)
        return dataclasses.replace(self, since=self.since + 1)
