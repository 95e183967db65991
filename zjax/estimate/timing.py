"""Seconds of a step: what is computed, what is sent, and what of that no computation hides. Predictions, not measurements.

A unit's gather hides behind the layer before it: T_allgather(l+1) <= T_compute(l) in the forward, and in the backward
T_allgather(l-1) + T_reduce(l+1) <= T_backward(l), each link by itself. Matrix products take their operations over the
chip's speed, all else its bytes over the memory's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zjax.describe import bytes_per_device
from zjax.estimate.cluster import Cluster
from zjax.estimate.memory import Work, layers_of, unit_leaves
from zjax.estimate.traffic import transfers
from zjax.mesh import degree, physical_axes
from zjax.plan import LeafPlan, Plan
from zjax.tree import matches

Links = dict[str, float]
"""Seconds by link: `inside`, `between`. The links work beside each other."""

# Memory traffic of compiled steps (H100 and v5p, 7B to 70B), fitted to their audits; the rest of this file has no such figures.
LAYER_COPIES = {"forward": 3.0, "backward": 8.0}
"""Times a layer's weights pass the memory beside the matrix products: carried by the loop, gathered, as gradients."""
RESIDUAL_PASSES = {"forward": 0.5, "backward": 0.8}
"""Times a layer's residuals do; what is saved of them once more."""
SCORE_BYTES = {"forward": 24.0, "backward": 45.0}
"""Bytes a query, key and head of attention in XLA, which holds scores in memory."""
LOGIT_PASSES = 4.0
"""Times logits and their gradient do."""


@dataclass(frozen=True, kw_only=True)
class UnitTime:
    """Seconds of one layer of a unit, or of a unit that is no layer, in one micro-batch."""

    unit: str
    layers: int
    stacked: bool
    only_read: bool
    forward: float
    """Computing."""
    backward: float
    """Computing, what is computed again included."""
    gather: Links
    """Sending for the forward."""
    gather_again: Links
    """Sending parameters for the backward."""
    reduce: Links
    """Sending gradients."""

    @property
    def sent_backward(self) -> Links:
        """All that is sent beside the backward."""
        return _together([self.gather_again, self.reduce])

    @property
    def hides_forward(self) -> bool:
        """T_allgather(l+1) <= T_compute(l)."""
        return _longest(self.gather) <= self.forward

    @property
    def hides_backward(self) -> bool:
        """The backward's gather and reduction, of the layers beside it, fit in a layer's backward."""
        return _longest(self.sent_backward) <= self.backward


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step."""

    compute: float
    exposed_forward: float
    exposed_backward: float
    exposed_step: float
    """What is sent once a step, after the last backward or before the first forward: nothing is left to hide it."""
    units: tuple[UnitTime, ...]

    @property
    def exposed(self) -> float:
        """Waiting for transfers."""
        return self.exposed_forward + self.exposed_backward + self.exposed_step

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exposed


def step_time(plan: Plan, work: Work, cluster: Cluster) -> StepTime:
    """Predicts a step of a plan, `work` being each micro-batch of one device."""
    micro = plan.accumulation.micro_batches
    sent = _link_seconds(plan, cluster)
    units = _unit_times(plan, work, cluster, sent)
    layer_forward = max((unit.forward for unit in units if unit.stacked), default=0.0)
    layer_backward = max((unit.backward for unit in units if unit.stacked), default=0.0)
    forward = sum(_exposed_forward(plan, unit, layer_forward) for unit in units)
    backward = sum(_exposed_backward(plan, unit, layer_backward) for unit in units)
    tensor = _tensor_seconds(plan, work, cluster)
    return StepTime(
        compute=micro * sum(unit.layers * (unit.forward + unit.backward) for unit in units) + _memory_seconds(plan, cluster),
        exposed_forward=micro * (forward + tensor / 2),
        exposed_backward=micro * (backward + tensor / 2),
        exposed_step=_longest(_together([links for (phase, *_), links in sent.items() if phase == "step"])),
        units=tuple(units),
    )


def unit_times(plan: Plan, work: Work, cluster: Cluster) -> list[UnitTime]:
    """What each unit computes and sends, a layer and micro-batch."""
    return _unit_times(plan, work, cluster, _link_seconds(plan, cluster))


def _unit_times(plan: Plan, work: Work, cluster: Cluster, sent: Mapping[tuple[str, str, bool], Links]) -> list[UnitTime]:
    made = []
    for unit, leaves in unit_leaves(plan).items():
        layers, stacked = layers_of(leaves), any(leaf.stacked for leaf in leaves)
        read = all(any(matches(pattern, leaf.name) for pattern in work.only_read) for leaf in leaves)
        forward, backward = (0.0, 0.0) if read else _compute(plan, leaves, work, cluster, stacked)
        times = layers * plan.accumulation.micro_batches
        part = lambda *key, times=times: {link: all_ / times for link, all_ in sent.get(key, {}).items()}  # noqa: E731
        made.append(
            UnitTime(
                unit=unit,
                layers=layers,
                stacked=stacked,
                only_read=read,
                forward=forward,
                backward=backward,
                gather=part("forward", unit, True),
                gather_again=part("backward", unit, True),
                reduce=part("backward", unit, False),
            )
        )
    return made


def tokens_to_hide(plan: Plan, work: Work, cluster: Cluster) -> float:
    """Tokens of a device and micro-batch from which the layers hide what they send, forward and backward; 0 if they send nothing.

    Computing grows with the tokens, sending does not: the larger of the ratios of the two, times the tokens at hand.
    """
    ratios = [0.0]
    for unit in unit_times(plan, work, cluster):
        if unit.stacked:
            ratios += [_longest(unit.gather) / unit.forward, _longest(unit.sent_backward) / unit.backward]
    return max(ratios) * work.tokens


def _compute(plan: Plan, leaves: list[LeafPlan], work: Work, cluster: Cluster, stacked: bool) -> tuple[float, float]:
    """Seconds of one layer's forward and backward."""
    elements = sum(_elements(plan, leaf) for leaf in leaves if len(leaf.shape) - leaf.stacked >= 2)
    weights = sum(_elements(plan, leaf) * leaf.forward.dtype.itemsize for leaf in leaves if leaf.forward)
    chip, decoder, tokens = cluster.chip, work.decoder, work.tokens
    product = max(2 * elements * tokens / cluster.flops, weights / chip.bandwidth)
    if decoder is None or not stacked:
        logits = decoder.head_bytes() * LOGIT_PASSES * tokens / chip.bandwidth if decoder else 0.0
        recomputed = 0.0 if decoder or not stacked or work.remat in ("none", "dots") else 1.0
        return product + logits / 2, (2 + recomputed) * product + logits / 2
    attention = tokens * decoder.attention_flops(work.length) / cluster.flops
    pairs = tokens * work.length * decoder.n_heads / decoder.tensor if work.scores_in_memory else 0.0

    def moved(phase: str) -> float:
        saved = decoder.saved_bytes(work.remat, work.remat_names)
        passed = tokens * (RESIDUAL_PASSES[phase] * decoder.residual_bytes() + saved) + SCORE_BYTES[phase] * pairs
        return (passed + LAYER_COPIES[phase] * weights) / chip.bandwidth

    again = decoder.recomputed_share(work.remat, work.remat_names)
    attention_again = 0.0 if work.remat == "none" or "attention" in work.remat_names else 1.0
    score_seconds = SCORE_BYTES["forward"] * pairs / chip.bandwidth
    forward = product + attention + moved("forward")
    # The backward of a flash-like or chunked kernel computes the scores once more: 2.5 forwards (FlashAttention-2).
    backward = (2 + again) * product + (2.5 + attention_again) * attention + moved("backward") + attention_again * score_seconds
    return forward, backward


def _elements(plan: Plan, leaf: LeafPlan) -> float:
    """Elements of one layer's parameter on a device, gathered."""
    assert leaf.forward
    return leaf.bytes_on(plan.mesh, "forward") / leaf.forward.dtype.itemsize / (leaf.shape[0] if leaf.stacked else 1)


def _memory_seconds(plan: Plan, cluster: Cluster) -> float:
    """The update, which reads and writes the optimizer's state, and the accumulation of micro-batches."""
    held = bytes_per_device(plan)
    update = 2 * (held["master"] + held["optimizer"]) + held["params"] + held["gradients"]
    micro = plan.accumulation.micro_batches
    added = 2.5 * micro * held["gradients"] if micro > 1 else 0
    return (update + added) / cluster.chip.bandwidth


def _link_seconds(plan: Plan, cluster: Cluster) -> dict[tuple[str, str, bool], Links]:
    """Seconds by link of a whole step's transfers: (phase, unit, whether they gather) -> seconds."""
    unit_of = {leaf.path: leaf.unit for leaf in plan.part("params")}
    seconds: dict[tuple[str, str, bool], Links] = {}
    for transfer in transfers(plan):
        links = seconds.setdefault((transfer.phase, unit_of[transfer.leaf], transfer.kind == "all_gather"), {})
        took = transfer.wire_bytes / cluster.bandwidth(plan.mesh, transfer.axes, transfer.kind)
        link = cluster.link(plan.mesh, transfer.axes)
        links[link] = links.get(link, 0.0) + took
    return seconds


def _exposed_forward(plan: Plan, unit: UnitTime, layer: float) -> float:
    gather = _longest(unit.gather)
    if not unit.stacked:
        return gather if unit.only_read else max(0.0, gather - layer)
    if not _prefetches(plan, unit):
        return unit.layers * gather
    return gather + (unit.layers - 1) * max(0.0, gather - unit.forward)


def _exposed_backward(plan: Plan, unit: UnitTime, layer: float) -> float:
    if not unit.stacked:
        return _longest(unit.reduce) if unit.only_read else max(0.0, _longest(unit.sent_backward) - layer)
    reduce = _longest(unit.reduce)
    if plan.engine == "partitioner":  # its reductions hold the layer up
        return unit.layers * (reduce + max(0.0, _longest(unit.gather_again) - unit.backward))
    if not _prefetches(plan, unit):
        return unit.layers * _longest(unit.gather_again) + (unit.layers - 1) * max(0.0, reduce - unit.backward) + reduce
    return (unit.layers - 1) * max(0.0, _longest(unit.sent_backward) - unit.backward) + reduce


def _prefetches(plan: Plan, unit: UnitTime) -> bool:
    """Whether the layer loop gathers a layer ahead (`zjax.scan_layers`)."""
    kept = any(leaf.kept_gathered for leaf in plan.part("params") if leaf.unit == unit.unit)
    return bool(plan.zero.prefetch) and not kept


def _tensor_seconds(plan: Plan, work: Work, cluster: Cluster) -> float:
    """All-reduces of activations over `tensor`: two a layer in the forward and two in the backward (Megatron)."""
    axes = physical_axes(plan.mesh, "tensor")
    if not axes or work.decoder is None:
        return 0.0
    n = degree(plan.mesh, axes)
    once = 2 * (n - 1) / n * work.tokens * work.decoder.d_model * 2 / cluster.bandwidth(plan.mesh, axes, "all_reduce")
    return 4 * work.decoder.n_layers * once


def _longest(links: Links) -> float:
    return max(links.values(), default=0.0)


def _together(parts: Sequence[Links]) -> Links:
    return {link: sum(part.get(link, 0.0) for part in parts) for link in dict.fromkeys(itertools.chain(*parts))}
