"""The train step: micro-batch accumulation, clipping, skipping of non-finite steps, and the sharded update.

Loss contract: `loss_fn(params, batch, rng) -> (loss_sum, weight)` or `(loss_sum, weight, metrics)`: sums over the rows
it is given, not means. The step divides by the weight of the whole global batch, over micro-batches and devices, so
that a token counts the same wherever it lands. Metrics are `{name: (sum, weight)}` and are divided likewise.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.collectives import constrain, spec_of
from zjax.flags import xla_flags
from zjax.gradients import LossFn, MeanLoss, gradients
from zjax.mesh import data_axes, degree, spec_axes
from zjax.optim import clip_factor
from zjax.plan import Plan, require_devices
from zjax.precision import update_loss_scale
from zjax.state import OptState, TrainState, master_tree, optimized_params, state_shardings, state_struct
from zjax.tree import PyTree, matches, named_leaves, require_all_used


@dataclass(frozen=True)
class TrainStep:
    """A compiled-on-first-use train step, and the recipe it was made from.

    `step(state, batch) -> (state, metrics)`. The given state is donated: use the returned one. Metrics are float32
    scalars: `loss`, `weight`, `grad_norm` (before clipping), `grad_norm_clipped`, `step_applied` (1 or 0),
    `nonfinite_leaf` and `nonfinite_is_nan` (see `zjax.NonFiniteGuard`), with float16 `loss_scale` and `loss_scale_stuck`,
    and the loss's own.
    """

    plan: Plan
    loss_fn: LossFn
    clip: float | None
    clip_value: float | None
    norm_groups: tuple[str, ...]
    compiler_options: Mapping[str, str] | None
    """As given; None for those of `xla_flags`."""
    jitted: Any
    _compiled: list[dict[str, str]] = field(default_factory=list, repr=False, compare=False)
    """Shapes and dtypes of the batches it was compiled for."""

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; warns where it has to compile again.

        Raises:
          ValueError: a batch that does not divide by data devices x micro-batches; a state that an earlier step was given.
        """
        check_batch(self.plan, batch)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):  # XLA's CPU runtime would crash
            raise ValueError("state: it was donated to an earlier step and its memory is gone; go on with the state that step returned")
        self._note_compilation({name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(batch)})
        return self.jitted(state, batch)

    def _note_compilation(self, shapes: dict[str, str]) -> None:
        if shapes in self._compiled:
            return
        if self._compiled:
            before = self._compiled[-1]
            changed = ", ".join(
                f"{name} {before.get(name, 'absent')} -> {shape}" for name, shape in shapes.items() if shape != before.get(name)
            )
            warnings.warn(
                f"the train step is compiled again, for batches of shape number {len(self._compiled) + 1}: {changed or 'a leaf less'}; "
                "pad batches to one shape",
                stacklevel=3,
            )
        self._compiled.append(shapes)

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """The step lowered for batches of these shapes (arrays or `jax.ShapeDtypeStruct`s), without running it."""
        check_batch(self.plan, batch)
        sharding = batch_sharding(self.plan)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
        return self.jitted.lower(state_struct(self.plan), shapes)


def make_train_step(
    plan: Plan,
    loss_fn: LossFn,
    *,
    clip: float | None = None,
    clip_value: float | None = None,
    norm_groups: Sequence[str] = (),
    compiler_options: Mapping[str, str] | None = None,
) -> TrainStep:
    """The train step of a plan: jitted, the state donated, every output pinned to the plan.

    Args:
      plan: from `build_plan` on a mesh with devices.
      loss_fn: see the loss contract above; its parameters come in the compute dtype. `rng` differs by step and
        micro-batch.
      clip: largest global gradient norm, by DeepSpeed's factor max(1, (norm + 1e-6) / clip); None does not clip.
      clip_value: largest absolute value of any gradient's element, cut before the norm is (torch clip_grad_value_); None
        does not.
      norm_groups: patterns of parameters whose gradients' norm is a metric of its own, `grad_norm/PATTERN`, before clipping.
      compiler_options: XLA's settings for this program, by name; by default those of `zjax.xla_flags`.

    Raises:
      ValueError: an abstract mesh, a pattern of `norm_groups` that names no trained parameter, or `mean_loss` with more than one micro-batch.
      TypeError (when first traced): a loss that does not keep the contract.
    """
    mesh = require_devices(plan)
    if isinstance(loss_fn, MeanLoss) and plan.accumulation.micro_batches > 1:
        raise ValueError(
            f"mean_loss with accumulation.micro_batches={plan.accumulation.micro_batches}: the mean of micro-batch means is not the "
            "mean of the batch; return (loss_sum, weight) instead"
        )
    if isinstance(loss_fn, MeanLoss) and plan.engine == "explicit":
        raise ValueError(
            "mean_loss in the explicit engine: the mean over one device's rows is not a share of the mean; return (loss_sum, weight), "
            "or build the plan with ZeroConfig(engine='partitioner')"
        )
    require_all_used(norm_groups, [leaf.name for leaf in plan.trained], "norm_groups")
    jitted = jax.jit(
        functools.partial(train_step, plan, loss_fn, clip, clip_value, tuple(norm_groups)),
        in_shardings=(state_shardings(plan), batch_sharding(plan)),
        out_shardings=(state_shardings(plan), NamedSharding(mesh, P())),
        donate_argnums=0,
        compiler_options=xla_flags(mesh.devices.flat[0].platform, plan) if compiler_options is None else dict(compiler_options),
    )
    return TrainStep(plan, loss_fn, clip, clip_value, tuple(norm_groups), compiler_options, jitted)


def batch_sharding(plan: Plan) -> NamedSharding:
    """Sharding of every leaf of the global batch: dim 0 over the data axes."""
    return NamedSharding(plan.mesh, plan.batch_spec)


def check_batch(plan: Plan, batch: PyTree) -> None:
    """Raises ValueError unless every leaf has the same rows, a multiple of data devices x micro-batches."""
    micro, devices = plan.accumulation.micro_batches, plan.data_degree
    rows = {name: x.shape[0] if x.ndim else None for name, x in named_leaves(batch)}
    if len(set(rows.values())) != 1 or None in rows.values():
        raise ValueError(f"batch: every leaf needs the same number of rows in dim 0; got {rows}")
    n = next(iter(rows.values()))
    assert n is not None
    if n % (micro * devices):
        axes = " x ".join(f"{axis} {plan.mesh.shape[axis]}" for axis in data_axes(plan.mesh)) or "1 device"
        raise ValueError(
            f"batch: {n} rows do not divide over {devices} data devices ({axes}) x accumulation.micro_batches={micro}: "
            f"{n} % {micro * devices} = {n % (micro * devices)}"
        )


def train_step(
    plan: Plan,
    loss_fn: LossFn,
    clip: float | None,
    clip_value: float | None,
    norm_groups: tuple[str, ...],
    state: TrainState,
    batch: PyTree,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """What `TrainStep.jitted` runs; its name is the program's, in traces and logs."""
    rng = jax.random.fold_in(state.rng, state.step)
    scale = None if state.loss_scale is None else state.loss_scale.scale
    grads, (loss_sum, weight, metrics), divisor = gradients(plan, loss_fn, state.params, batch, rng, scale)

    grads = jax.tree.map(lambda g: _over(g.astype(jnp.float32), divisor), grads)
    squares = _leaf_squares(plan, grads)
    norm = jnp.sqrt(jnp.sum(squares))
    clipped = norm
    if clip_value is not None:
        grads = jax.tree.map(lambda g: jnp.clip(g, -clip_value, clip_value), grads)
        clipped = jnp.sqrt(jnp.sum(_leaf_squares(plan, grads)))
    factor = clip_factor(clipped, clip)
    loss = _over(loss_sum, weight)
    # The weight too: a NaN is not > 0, and would pass for a batch that is masked out.
    applied = jnp.isfinite(norm) & jnp.isfinite(loss) & jnp.isfinite(weight)

    params, opt_state = _update(plan, state, jax.tree.map(lambda g: g * factor, grads), applied)
    scalars = {
        "loss": loss,
        "weight": weight,
        "grad_norm": norm,
        "grad_norm_clipped": clipped * factor,
        **{f"grad_norm/{group}": _norm_of(plan, squares, group) for group in norm_groups},
        "step_applied": applied.astype(jnp.float32),
        **_first_nonfinite(squares),
    }
    loss_scale = state.loss_scale
    if loss_scale is not None:
        # What this step ran with, as DeepSpeed logs it; the state has what the next one will.
        scalars["loss_scale"] = loss_scale.scale
        loss_scale, stuck = update_loss_scale(plan.precision.loss_scale, loss_scale, ~applied)
        scalars["loss_scale_stuck"] = stuck.astype(jnp.float32)
    new_state = TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        rng=state.rng,
        skipped_steps=state.skipped_steps + (1 - applied.astype(jnp.int32)),
        loss_scale=loss_scale,
    )
    return new_state, scalars | {name: _over(*pair) for name, pair in metrics.items()}


def _leaf_squares(plan: Plan, grads: PyTree) -> jax.Array:
    """Each trained parameter's sum of squared gradients, float32 [leaves], by one all-reduce of them all.

    A sum of its own for each leaf would be a collective for each, in any order: XLA's CPU runtime can wait for ever there.
    """
    specs = [leaf.optimizer.spec for leaf in plan.trained if leaf.optimizer]
    axes = tuple(axis for axis, size in plan.mesh.shape.items() if size > 1)
    copies = [degree(plan.mesh, [axis for axis in axes if axis not in spec_axes(spec)]) for spec in specs]

    def on_device(grads: list[jax.Array]) -> jax.Array:
        squares = jnp.stack([jnp.sum(jnp.square(g)) / n for g, n in zip(grads, copies, strict=True)])
        return jax.lax.psum(squares, axes) if axes else squares

    return jax.shard_map(on_device, mesh=plan.mesh, in_specs=(specs,), out_specs=P(), check_vma=False)(jax.tree.leaves(grads))


def _norm_of(plan: Plan, squares: jax.Array, group: str) -> jax.Array:
    """The norm of the gradients a pattern names."""
    return jnp.sqrt(sum(squares[i] for i, leaf in enumerate(plan.trained) if matches(group, leaf.name)))


def _first_nonfinite(squares: jax.Array) -> dict[str, jax.Array]:
    """The place among the trained parameters of the first whose gradient is not finite, or -1, and whether it has a NaN."""
    bad = ~jnp.isfinite(squares)
    first = jnp.argmax(bad)
    return {
        "nonfinite_leaf": jnp.where(jnp.any(bad), first, -1).astype(jnp.float32),
        "nonfinite_is_nan": jnp.isnan(squares[first]).astype(jnp.float32),
    }


def _update(plan: Plan, state: TrainState, grads: PyTree, applied: jax.Array) -> tuple[PyTree, OptState]:
    """New parameters and optimizer state; each device updates the shard it holds the optimizer state of."""
    sharded = plan.params_tree("optimizer")
    old = _pin(optimized_params(plan, state), sharded), state.opt_state.inner
    updates, inner = plan.recipe.tx.update(grads, old[1], old[0])
    new = _pin(optax.apply_updates(old[0], updates), sharded), inner
    # Select, not branch: the choice fuses into the update, and a skipped step leaves every bit as it was.
    optimized, inner = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)
    # Cast in shards, so that what stage 1 and 2 gather afterwards is the compute dtype.
    dtypes = plan.trained_tree(leaf.rest.dtype for leaf in plan.trained)
    shards = _pin(jax.tree.map(lambda new, dtype: new.astype(dtype), optimized, dtypes), sharded)
    return _at_rest(plan, state.params, shards), OptState(master_tree(plan, jax.tree.leaves(optimized)), inner)


def _at_rest(plan: Plan, old: PyTree, shards: PyTree) -> PyTree:
    """The updated parameters as they lie between steps; where that is whole (stages 1 and 2), they are gathered.

    Stacked layers one by one, each into its place in the old parameters' buffer: gathered at once, all would be held twice.
    """
    leaves, whole, supply = plan.part("params"), jax.tree.leaves(old), iter(jax.tree.leaves(shards))
    new = {i: next(supply) for i, leaf in enumerate(leaves) if leaf.trained}  # a frozen parameter stays what it is
    units: dict[str, list[int]] = {}
    for i, x in new.items():
        placed = leaves[i].optimizer
        if leaves[i].stacked and placed and placed.spec != leaves[i].rest.spec:
            units.setdefault(leaves[i].unit, []).append(i)
        else:
            whole[i] = x
    for mine in units.values():

        def put(layer: Any, into: list[jax.Array], mine: list[int] = mine) -> list[jax.Array]:
            at = lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)  # noqa: E731
            gathered = [constrain(plan.mesh, at(new[i]), spec_of(leaves[i].rest, layer=True)) for i in mine]
            return [jax.lax.dynamic_update_index_in_dim(x, g, layer, 0) for x, g in zip(into, gathered, strict=True)]

        filled = jax.lax.fori_loop(0, leaves[mine[0]].shape[0], put, [whole[i] for i in mine])
        for i, x in zip(mine, filled, strict=True):
            whole[i] = x
    return jax.tree.unflatten(plan.params_treedef, whole)


def _over(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight, and 0 where nothing was weighed (a batch that is masked out whole)."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)


def _pin(tree: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)
