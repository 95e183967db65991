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
    """Parameters that are whole beside the layer at work, its own among them, and the gradients of a layer that are."""
    activations: int
    """Kept from the forward to the backward, of all layers."""
    working: int
    """Of the layer that is computed again and differentiated."""
    head: int
    """Logits, the head's parameters and gradients while they are whole, and what is whole of the layers meanwhile."""
    margin: int
    not_covered: tuple[str, ...] = ()
    """What is held too, and not counted."""

    @property
    def state(self) -> int:
        """What lies on the device between steps."""
        return self.params + self.master + self.optimizer

    @property
    def peak(self) -> int:
        """The larger of two moments: a layer's backward, and the head's. XLA makes room for the gradients before either."""
        return self.state + self.activations + self.gradients + max(self.gathered + self.working, self.head)

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
    layers, tokens = _stacked_layers(plan), work.tokens if work else 0
    activations = logits = 0
    working = {"mlp": 0, "attention": 0, "gradients": 0}
    missing = ["buffers of libraries and of the compiler beyond the margin"]
    if physical_axes(plan.mesh, "tensor"):
        missing.append("what XLA moves and holds over `tensor` beyond the products' own all-reduces: audit it")
    if work and decoder:
        itemsize = max(leaf.forward.dtype.itemsize for leaf in plan.part("params") if leaf.forward)
        activations = tokens * decoder.saved_bytes(work.remat, work.remat_names, itemsize) * layers
        working = decoder.working_bytes(scores_in_memory=work.scores_in_memory, itemsize=itemsize)
        logits = tokens * decoder.head_bytes(itemsize)
    else:
        missing.append("activations: the model is not of the decoder family" if work else "activations: no batch is given")
    whole = _whole(plan, decoder.mlp_share if decoder else 0.0)
    moment = max(working, key=lambda phase: whole[phase] + tokens * working[phase])
    return Memory(
        params=held["params"],
        master=held["master"],
        optimizer=held["optimizer"],
        gradients=held["gradients"] + _micro_batch_gradients(plan),
        gathered=round(whole[moment]),
        activations=activations,
        working=tokens * working[moment],
        head=logits + round(whole["head"]),
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


def _whole(plan: Plan, mlp_share: float) -> dict[str, float]:
    """Bytes of whole parameters and gradients at the head, and at each phase of a layer's backward.

    While the MLP is differentiated those are the layer's parameters and, where the loop scatters a layer late, the
    gradients of the one after it. The MLP's parameters are not needed while attention is. XLA puts the products that
    give the layer's own gradients last, beside the gathering of the layer before.
    """
    kept, parameters, gradients = 0.0, defaultdict[str, float](float), defaultdict[str, float](float)
    prefetched = set[str]()
    units = unit_leaves(plan)
    stacked = {unit for unit, leaves in units.items() if any(leaf.stacked for leaf in leaves)}
    for unit, leaves in units.items():
        for leaf in leaves:
            one = _layer_bytes(plan, leaf)
            if _moves(leaf) and (not plan.zero.reshard_after_backward or (leaf.kept_gathered and unit in stacked)):
                kept += one * layers_of(leaves)
            elif _moves(leaf):
                parameters[unit] += one
            if _scatters(leaf):
                gradients[unit] += _layer_bytes(plan, leaf, gradient=True)
        if unit in stacked and plan.zero.prefetch and not any(leaf.kept_gathered for leaf in leaves):
            prefetched.add(unit)
    largest = max(stacked or units, key=lambda unit: parameters[unit] + gradients[unit])
    late = gradients[largest] if largest in prefetched else 0.0
    ahead = parameters[largest] if largest in prefetched else 0.0
    single = max((parameters[unit] + gradients[unit] for unit in units if unit not in stacked), default=0.0)
    return {
        "mlp": kept + parameters[largest] + late,
        "attention": kept + parameters[largest] * (1 - mlp_share) + max(late, gradients[largest] * mlp_share),
        "gradients": kept + parameters[largest] + ahead + gradients[largest],
        "head": kept + single + ahead,  # the last layer's parameters stay whole from its forward to its backward
    }


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
