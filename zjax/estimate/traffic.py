"""Bytes a device sends in one optimizer step, by ring algorithms, from the plan alone.

An all-gather or reduce-scatter of an array of F bytes over n devices sends (n - 1) / n x F, an all-reduce twice that
(ZeRO paper, section 7: stage 3 moves 3 passes of the parameters, stages 0 and 2 move 2). Scalars are not counted, nor
activations: a plan has none to move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zjax.mesh import SLOW_AXES, data_axes, degree, physical_axes, spec_axes
from zjax.plan import LeafPlan, Placement, Plan

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Transfer:
    """One collective of one leaf: how often a step runs it, and the bytes a device sends for all of them."""

    leaf: str
    kind: str
    axes: tuple[str, ...]
    times: int
    wire_bytes: float
    phase: str
    """`forward` or `backward`: beside the layers of each micro-batch; `step`: once, beside none."""


def transfers(plan: Plan) -> Iterator[Transfer]:
    """Every collective the plan makes necessary in one optimizer step."""
    for leaf in plan.part("params"):
        yield from _parameter_gathers(plan, leaf)
        yield from _gradient_reductions(plan, leaf)


def minimum_wire_bytes(plan: Plan) -> int:
    """The least a step of this mode can send: gradients go where the optimizer needs them, once where they can wait.

    That is the plan's own traffic, but for stages 0 and 1, which need to reduce gradients once a step and not once a
    micro-batch, and for stage 1, whose sharded optimizer needs them scattered, not everywhere.
    """
    gathers = (transfer for leaf in plan.part("params") for transfer in _parameter_gathers(plan, leaf))
    reductions = (transfer for leaf in plan.part("params") for transfer in _gradient_reductions(plan, leaf, least=True))
    return round(sum(transfer.wire_bytes for transfer in [*gathers, *reductions]))


def traffic_per_step(plan: Plan) -> dict[str, int]:
    """Wire bytes a device by kind of collective, and their `total`."""
    sent = {kind: 0.0 for kind in KINDS}
    for transfer in transfers(plan):
        sent[transfer.kind] += transfer.wire_bytes
    return {kind: round(value) for kind, value in sent.items()} | {"total": round(sum(sent.values()))}


def traffic_by_link(plan: Plan) -> dict[str, int]:
    """Wire bytes a device inside a host or slice, and between them: a group that spans `replica` goes between."""
    slow = physical_axes(plan.mesh, *SLOW_AXES)
    sent = {"inside": 0.0, "between": 0.0}
    for transfer in transfers(plan):
        sent["between" if set(transfer.axes) & set(slow) else "inside"] += transfer.wire_bytes
    return {link: round(value) for link, value in sent.items()}


def _parameter_gathers(plan: Plan, leaf: LeafPlan) -> Iterator[Transfer]:
    assert leaf.forward and leaf.backward
    whole = leaf.bytes_on(plan.mesh, "forward")
    axes = _gathered_axes(leaf.rest, leaf.forward)
    if axes and not plan.zero.reshard_after_backward:
        yield _ring(plan, leaf, "all_gather", axes, 1, whole, "step")
    elif axes:
        yield _ring(plan, leaf, "all_gather", axes, plan.accumulation.micro_batches, whole, "forward")
        if _gathered_axes(leaf.backward, leaf.forward):  # the unit was resharded in between
            yield _ring(plan, leaf, "all_gather", axes, plan.accumulation.micro_batches, whole, "backward")
    updated = _gathered_axes(leaf.optimizer, leaf.rest) if leaf.optimizer else ()
    if updated:
        # Stages 1 and 2 (and persistent leaves): each device updated its shard, all need the whole.
        yield _ring(plan, leaf, "all_gather", updated, 1, whole, "step")


def _gradient_reductions(plan: Plan, leaf: LeafPlan, *, least: bool = False) -> Iterator[Transfer]:
    """Into the accumulator with each micro-batch, and from there, where it is still partial, into the optimizer's shard once."""
    if not leaf.accumulator or not leaf.optimizer:
        return  # frozen
    assert leaf.forward
    gradient = leaf.bytes_on(plan.mesh, "forward") / leaf.forward.dtype.itemsize * leaf.reduce.itemsize
    scattered = _gathered_axes(leaf.accumulator, leaf.forward)
    partial = leaf.partial if scattered or not least else data_axes(plan.mesh)
    each = plan.accumulation.micro_batches
    if scattered:
        yield _ring(plan, leaf, "reduce_scatter", scattered, each, gradient, "backward")
    summed = tuple(axis for axis in data_axes(plan.mesh) if axis not in (*scattered, *partial))
    if summed:
        yield _ring(plan, leaf, "all_reduce", summed, each, gradient / degree(plan.mesh, scattered), "backward")
    accumulated = leaf.bytes_on(plan.mesh, "accumulator") / leaf.accumulator.dtype.itemsize * leaf.reduce.itemsize
    last = tuple(axis for axis in _gathered_axes(leaf.optimizer, leaf.accumulator) if axis in partial)
    if last:
        yield _ring(plan, leaf, "reduce_scatter", last, 1, accumulated, "step")
    left = tuple(axis for axis in partial if axis not in spec_axes(leaf.optimizer.spec))
    if left:
        yield _ring(plan, leaf, "all_reduce", left, 1, accumulated / degree(plan.mesh, last), "step")


def _gathered_axes(sharded: Placement, whole: Placement) -> tuple[str, ...]:
    return tuple(axis for axis in spec_axes(sharded.spec) if axis not in spec_axes(whole.spec))


def _ring(plan: Plan, leaf: LeafPlan, kind: str, axes: tuple[str, ...], times: int, array_bytes: float, phase: str) -> Transfer:
    n = degree(plan.mesh, axes)
    once = (n - 1) / n * array_bytes * (2 if kind == "all_reduce" else 1)
    return Transfer(leaf.path, kind, axes, times, times * once, phase)
