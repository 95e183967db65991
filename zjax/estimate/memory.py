"""Bytes a device holds at once, from a plan and what one device computes, without compiling.

The state is counted leaf by leaf and is exact. What a step holds beside it is arithmetic on the decoder family's sizes;
for another model it is not known, and `Memory.not_covered` says so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from zjax.describe import bytes_per_device
from zjax.estimate.decoder import Decoder
from zjax.mesh import physical_axes, spec_axes
from zjax.plan import LeafPlan, Plan

MARGIN = 0.06
"""Share of a device's memory left free by default: fragmentation, and what libraries hold (NCCL, cuDNN)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one device computes in one micro-batch."""

    rows: int
    """Sequences."""
    length: int
    """Tokens of a sequence."""
    remat: str = "full"
    """As `TrainConfig.remat`."""
    remat_names: tuple[str, ...] = ()
    """The values that `remat="names"` keeps."""
    decoder: Decoder | None = None
    """Sizes of the model on one device, if it is of the decoder family."""
    only_read: tuple[str, ...] = ()
    """Patterns of parameters that are read and not multiplied with: an embedding's table."""
    scores_in_memory: bool = False
    """Whether attention holds scores in device memory (XLA's own, not a flash kernel)."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on the device."""
        return self.rows * self.length


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device. `peak` is the most at once, without `margin`."""

    params: int
    master: int
    optimizer: int
    """Moments, and what else optax keeps."""
    gradients: int
    """The accumulator, and with several micro-batches the gradients of the one at work."""
    gathered: int
    """Units that are whole at once, and the gradients of a layer that are."""
    activations: int
    """Kept from the forward to the backward, of all layers."""
    working: int
    """Of the layer that is computed again and differentiated."""
    head: int
    """Logits, and the head's parameters and gradients while they are whole."""
    margin: int
    not_covered: tuple[str, ...] = ()
    """What is held too, and not counted."""

    @property
    def state(self) -> int:
        """What lies on the device between steps."""
        return self.params + self.master + self.optimizer

    @property
    def peak(self) -> int:
        """The larger of two moments: a layer's backward, when gradients are accumulated, and the head's."""
        at_layer = self.gradients + self.gathered + self.working
        return self.state + self.activations + max(at_layer, self.head)

    def fits(self, memory: float) -> bool:
        """Whether peak and margin lie within a device's memory, in bytes."""
        return self.peak + self.margin <= memory


def memory_of(plan: Plan, work: Work | None, *, memory: float = math.inf, margin: float = MARGIN) -> Memory:
    """What a device holds.

    Args:
      plan: of any model.
      work: the micro-batch of one device; None counts what does not depend on it.
      memory: bytes of a device.
      margin: share of them to leave free.
    """
    held = bytes_per_device(plan)
    decoder = work.decoder if work else None
    layers = _stacked_layers(plan)
    activations = working = logits = 0
    missing = ["buffers of libraries and of the compiler beyond the margin"]
    if physical_axes(plan.mesh, "tensor"):
        missing.append("what XLA moves and holds over `tensor` beyond the products' own all-reduces: audit it")
    if work and decoder:
        itemsize = max(leaf.forward.dtype.itemsize for leaf in plan.part("params") if leaf.forward)
        saved = decoder.saved_bytes(work.remat, work.remat_names, itemsize)
        activations = work.tokens * saved * layers
        again = decoder.working_bytes(scores_in_memory=work.scores_in_memory, itemsize=itemsize)
        inputs = decoder.saved_bytes("full", itemsize=itemsize)
        working = work.tokens * max(again - max(saved - inputs, 0), 0)
        logits = work.tokens * decoder.head_bytes(itemsize)
    else:
        missing.append("activations: the model is not of the decoder family" if work else "activations: no batch is given")
    return Memory(
        params=held["params"],
        master=held["master"],
        optimizer=held["optimizer"],
        gradients=held["gradients"] + _micro_batch_gradients(plan),
        gathered=_gathered(plan),
        activations=activations,
        working=working,
        head=logits + _single_units(plan),
        margin=round(margin * memory) if math.isfinite(memory) else 0,
        not_covered=tuple(missing),
    )


def unit_leaves(plan: Plan) -> dict[str, list[LeafPlan]]:
    """The parameters of each unit, the root unit's under an empty path."""
    units: dict[str, list[LeafPlan]] = {}
    for leaf in plan.part("params"):
        units.setdefault(leaf.unit, []).append(leaf)
    return units


def layers_of(leaves: list[LeafPlan]) -> int:
    """How many layers a unit's leaves are stacked of; 1 for a unit that is not stacked."""
    return next((leaf.shape[0] for leaf in leaves if leaf.stacked), 1)


def _stacked_layers(plan: Plan) -> int:
    return sum(layers_of(leaves) for leaves in unit_leaves(plan).values() if any(leaf.stacked for leaf in leaves)) or 1


def _layer_bytes(plan: Plan, leaf: LeafPlan, *, gradient: bool = False) -> float:
    """Bytes of one layer's parameter as the unit computes with it, or of its gradient before it is scattered."""
    assert leaf.forward
    whole = leaf.bytes_on(plan.mesh, "forward") / (leaf.shape[0] if leaf.stacked else 1)
    return whole / leaf.forward.dtype.itemsize * leaf.reduce.itemsize if gradient else whole


def _moves(leaf: LeafPlan) -> bool:
    """Whether the parameter is gathered for its unit."""
    assert leaf.forward
    return spec_axes(leaf.rest.spec) != spec_axes(leaf.forward.spec)


def _scatters(leaf: LeafPlan) -> bool:
    """Whether the gradient is scattered with its unit."""
    return leaf.accumulator is not None and leaf.forward is not None and spec_axes(leaf.accumulator.spec) != spec_axes(leaf.forward.spec)


def _gathered(plan: Plan) -> int:
    """Whole parameters and gradients at the worst moment of the layer loop."""
    kept, at_work = 0.0, defaultdict[str, float](float)
    for unit, leaves in unit_leaves(plan).items():
        if not any(leaf.stacked for leaf in leaves) and any(leaf.stacked for leaf in plan.part("params")):
            continue  # the embedding and the head are whole at another time
        for leaf in leaves:
            one = _layer_bytes(plan, leaf)
            if not plan.zero.reshard_after_backward or leaf.kept_gathered:
                kept += one * layers_of(leaves) * _moves(leaf)
            elif _moves(leaf):
                at_work[unit] += one * (1 + plan.zero.prefetch if leaf.stacked else 1)
            if _scatters(leaf):
                at_work[unit] += _layer_bytes(plan, leaf, gradient=True)
    return round(kept + max(at_work.values(), default=0.0))


def _single_units(plan: Plan) -> int:
    """The largest unit that is not a layer: its parameters and gradients while they are whole."""
    sizes = defaultdict[str, float](float)
    for unit, leaves in unit_leaves(plan).items():
        for leaf in leaves:
            if not leaf.stacked:
                sizes[unit] += _layer_bytes(plan, leaf) * _moves(leaf)
                sizes[unit] += _layer_bytes(plan, leaf, gradient=True) if leaf.trained else 0
    return round(max(sizes.values(), default=0.0))


def _micro_batch_gradients(plan: Plan) -> int:
    """Beside an accumulator over several micro-batches: the gradients of one, and where they are scattered, what they add to."""
    if plan.accumulation.micro_batches == 1:
        return 0
    total = 0.0
    for leaf in plan.trained:
        assert leaf.accumulator
        one = leaf.bytes_on(plan.mesh, "accumulator") / leaf.accumulator.dtype.itemsize * leaf.reduce.itemsize
        total += one * (2 if _scatters(leaf) else 1)
    return round(total)
