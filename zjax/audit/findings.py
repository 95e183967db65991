"""What in a compiled program contradicts the plan, each with the op it comes from, its bytes, and what to do.

XLA's CPU compiler never emits a reduce-scatter and moves float32 where bf16 was asked: on a `cpu` target those two are
how the backend is, not findings.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zjax.audit.collectives import Collective
from zjax.audit.hlo import Instruction, Module
from zjax.audit.schedule import Run, Timeline
from zjax.audit.targets import Target
from zjax.estimate.traffic import transfers
from zjax.mesh import physical_axes, shard_shape, spec_axes
from zjax.plan import LeafPlan, Placement, Plan
from zjax.tree import leaf_bytes

SMALL = 4096
"""Arrays of fewer bytes (norms, counters, losses) are not worth a finding."""
EMULATED = 65536
"""Arrays of fewer bytes (norms) XLA:TPU moves by all-reduce on purpose: there the number of hops counts, not the bytes."""
SMALLEST_SHARD = 32
"""Elements: a shard of a gathered leaf below this is overhead rather than sharding."""
LARGEST_UNIT = 0.5
"""Share of all parameters that one unit may gather at once."""


@dataclass(frozen=True)
class Finding:
    """One contradiction."""

    kind: str
    op: str
    """The op or leaf it concerns."""
    bytes: int
    text: str
    """What is wrong and what to do."""

    def to_json(self) -> dict[str, Any]:
        """As in `audit --json`."""
        return {"kind": self.kind, "op": self.op, "bytes": self.bytes, "text": self.text}

    def __str__(self) -> str:
        return f"[{self.kind}] {self.text} ({self.op})"


@dataclass(frozen=True)
class Evidence:
    """All that findings are drawn from."""

    plan: Plan
    module: Module
    timeline: Timeline
    memory: dict[str, int]
    target: Target
    marked: frozenset[str]
    kernels: tuple[str, ...] = ()


def peak_bytes(memory: dict[str, int]) -> int:
    """The most a device holds at once: the compiler's own figure, or what arguments, temporaries and new outputs add up to."""
    return memory["peak"] or memory["argument"] + memory["temp"] + max(0, memory["output"] - memory["alias"])


def find(evidence: Evidence) -> list[Finding]:
    """Every contradiction between the program and the plan, the largest first."""
    found = [finding for check in _CHECKS for finding in check(evidence)]
    return sorted(found, key=lambda finding: -finding.bytes)


def _does_not_fit(e: Evidence) -> Iterator[Finding]:
    peak = peak_bytes(e.memory)
    if peak <= e.target.chip.memory:
        return
    largest = ", ".join(f"{_short(x)} {x.shape.bytes / 2**30:.2f} GiB" for x in _largest(e.module))
    yield Finding(
        "does-not-fit", "program", int(peak - e.target.chip.memory),
        f"a device would hold {peak / 2**30:.1f} GiB, but has {e.target.chip.memory / 2**30:.1f}: raise the stage, the devices or the "
        f"micro-batches, or set remat='full'. Largest buffers: {largest}",
    )  # fmt: skip


def _state_above_plan(e: Evidence) -> Iterator[Finding]:
    planned = sum(leaf.bytes_on(e.plan.mesh) for leaf in e.plan.leaves)
    held = e.memory["argument"] + e.memory["host_argument"] - e.memory["batch"]
    if held > 1.01 * planned + SMALL:
        yield Finding(
            "state-above-plan",
            "arguments",
            held - planned,
            f"the program takes {held:,} bytes of state, the plan has {planned:,}: is an array passed in that is not in the plan?",
        )


def _not_donated(e: Evidence) -> Iterator[Finding]:
    planned = sum(leaf.bytes_on(e.plan.mesh) for leaf in e.plan.leaves)
    reused = e.memory["alias"]
    if reused < 0.99 * planned - SMALL:
        yield Finding(
            "not-donated",
            "outputs",
            planned - reused,
            f"only {reused:,} of {planned:,} bytes of the state are reused for the new state: donate it (make_train_step does)",
        )


def _replicated_without_reason(e: Evidence) -> Iterator[Finding]:
    for leaf in e.plan.part("params"):
        if e.plan.zero.stage and leaf.reason is None and not spec_axes((leaf.optimizer or leaf.rest).spec):
            yield Finding(
                "replicated-without-reason", leaf.path, leaf.bytes_on(e.plan.mesh), "the leaf is replicated, and the plan does not say why"
            )


def _outside_units(e: Evidence) -> Iterator[Finding]:
    if e.plan.zero.stage < 2:
        return
    unmarked: dict[str, list[LeafPlan]] = {}
    for leaf in e.plan.part("params"):
        if leaf.zero_axes and leaf.name not in e.marked:
            unmarked.setdefault(leaf.unit, []).append(leaf)
    then = "it is gathered whole with the root unit, and kept from the forward to the backward"
    if e.plan.engine == "partitioner":
        then = "where and how often that is gathered is left to XLA"
    for unit, leaves in unmarked.items():
        yield Finding(
            "outside-units", unit or "root unit", sum(leaf_bytes(leaf.shape, leaf.rest.dtype) for leaf in leaves),
            f"no unit gathers {', '.join(leaf.path for leaf in leaves)}: {then}. "
            "Mark the function or module that uses it with zjax.fully_shard",
        )  # fmt: skip


def _unit_sizes(e: Evidence) -> Iterator[Finding]:
    if e.plan.zero.stage < 3:
        return
    leaves = e.plan.part("params")
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    sizes: Counter[str] = Counter()
    for leaf in leaves:
        sizes[leaf.unit] += math.prod(leaf.shape[int(leaf.stacked) :])
        shard = math.prod(shard_shape(e.plan.mesh, leaf.rest.spec, leaf.shape)[int(leaf.stacked) :])
        if spec_axes(leaf.rest.spec) and shard < SMALLEST_SHARD:
            yield Finding(
                "unit-too-small", leaf.path, leaf.bytes_on(e.plan.mesh),
                f"{math.prod(leaf.shape[int(leaf.stacked) :])} elements are split into shards of {shard}: keep the leaf whole with zero.persistence_threshold",
            )  # fmt: skip
    for unit, size in sizes.items():
        if len(leaves) > 1 and size > LARGEST_UNIT * total:
            yield Finding(
                "unit-too-large", unit or "root unit", size * e.plan.part("params")[0].rest.dtype.itemsize,
                f"one unit gathers {size / total:.0%} of all parameters at once: mark smaller units (a block at a time), and stack layers as 'name[*]'",
            )  # fmt: skip


def _stacks_gathered(e: Evidence) -> Iterator[Finding]:
    """All-gathers of a whole stack of layers, where stage 3 gathers one layer at a time."""
    if e.plan.zero.stage < 3 or not e.plan.zero.reshard_after_backward:
        return
    leaves = [leaf for leaf in e.plan.part("params") if spec_axes(leaf.rest.spec)]
    wholes = {_shard_key(e.plan, leaf, per_layer=False): leaf for leaf in leaves if leaf.stacked and leaf.shape[0] > 1}
    layers = {_shard_key(e.plan, leaf, per_layer=True) for leaf in leaves}
    seen: set[str] = set()
    for run in _large(e.timeline, "all-gather"):
        for shape in run.collective.shapes:
            leaf = wholes.get(_key(shape)) if _key(shape) not in layers else None
            if leaf is None or leaf.path in seen:
                continue
            seen.add(leaf.path)
            yield Finding(
                "unit-too-large", leaf.path, leaf_bytes(leaf.shape, leaf.rest.dtype),
                f"all {leaf.shape[0]} layers are gathered at once, where stage {e.plan.zero.stage} gathers them one by one: "
                f"mark the block with zjax.fully_shard, inside the layer loop. From {run.collective.op_name or run.collective.name}",
            )  # fmt: skip


def _full_gradients(e: Evidence) -> Iterator[Finding]:
    """A loop of the backward that carries a stacked gradient whole."""
    if e.plan.zero.stage < 2:
        return
    whole = {_local(e.plan, leaf, leaf.forward): leaf for leaf in e.plan.part("params") if leaf.stacked and _scattered(leaf)}
    seen: set[str] = set()
    for computation in e.module.computations.values():
        for x in computation.schedule:
            leaf = whole.get(x.shape.dims) if x.opcode == "dynamic-update-slice" else None
            if leaf is None or leaf.path in seen or "transpose(" not in x.metadata.get("op_name", ""):
                continue
            seen.add(leaf.path)
            yield Finding(
                "full-gradient", leaf.path, x.shape.bytes,
                f"the backward holds this leaf's whole gradient {list(x.shape.dims)}, where stage {e.plan.zero.stage} scatters it layer by layer: "
                f"mark the block that uses it with zjax.fully_shard, inside the layer loop. From {_short(x)}",
            )  # fmt: skip


def _gradient_all_reduce(e: Evidence) -> Iterator[Finding]:
    """All-reduces of what should have been scattered, whether only slices of the result are used or not."""
    if e.target.platform == "cpu":
        return
    scattered = [leaf for leaf in e.plan.part("params") if _scattered(leaf)]
    sharded = {axis for leaf in scattered for axis in leaf.zero_axes}
    whole = [_local(e.plan, leaf, leaf.forward) for leaf in scattered]
    layers = [shape[int(leaf.stacked) :] for leaf, shape in zip(scattered, whole, strict=True)]
    keys = {_key(shape) for shape in (*whole, *layers)}
    keys |= {(math.prod(key),) for key in keys}  # flattened, where XLA:GPU combines several
    # Stage 1 in the partitioner all-reduces whole gradients; that each device then uses its slice is what the plan says.
    sliced_by_plan = e.plan.engine == "partitioner" and e.plan.zero.stage == 1
    for run in _large(e.timeline, "all-reduce"):
        c = run.collective
        if c.emulates and (c.full_bytes < EMULATED or (c.emulates == "reduce-scatter" and sliced_by_plan)):
            continue
        if c.emulates:
            yield Finding(
                "emulated-collective", c.op_name or c.name, round(run.wire_bytes),
                f"an all-reduce over {'+'.join(c.axes)} stands for {_article(c.emulates)}: twice the wire of one. On a TPU torus lay the shard axis over one mesh axis per torus dim",
            )  # fmt: skip
        elif set(c.axes) & sharded and any(_key(shape) in keys for shape in _operand_shapes(e.module, run)):
            yield Finding(
                "all-reduce-for-reduce-scatter", c.op_name or c.name, round(run.wire_bytes),
                f"whole gradients {_shapes(c)} are all-reduced over {'+'.join(c.axes)}, where stage {e.plan.zero.stage} scatters them: twice the wire, and whole gradients are held. "
                "Mark the unit with zjax.fully_shard",
            )  # fmt: skip


def _gathered_too_often(e: Evidence) -> Iterator[Finding]:
    """Parameters gathered more often than the plan says, counted by the shape of their shards."""
    planned: Counter[tuple[int, ...]] = Counter()
    leaves: dict[tuple[int, ...], LeafPlan] = {}
    for transfer in transfers(e.plan):
        if transfer.kind != "all_gather":
            continue
        leaf = e.plan.params[transfer.leaf.removeprefix("params/")]
        layers = leaf.shape[0] if leaf.stacked else 1
        key = _shard_key(e.plan, leaf, per_layer=True)
        planned[key] += transfer.times * layers
        leaves[key] = leaf
    compiled: Counter[tuple[int, ...]] = Counter()
    sent: Counter[tuple[int, ...]] = Counter()
    for run in _of_kind(e.timeline, "all-gather"):
        for shape in run.collective.shapes:
            compiled[_key(shape)] += run.times
            sent[_key(shape)] += round(run.wire_bytes / len(run.collective.shapes))
    for key, times in planned.items():
        # A gather may be split or repeated once at a loop's edge (a peeled or prefetched layer); more is a fault.
        slack = max(2, times // 16)
        if compiled[key] > times + slack and sent[key] > SMALL:
            yield Finding(
                "gathered-too-often",
                leaves[key].path,
                sent[key],
                f"shards {list(key)} are gathered {compiled[key]} times a step, the plan says {times}",
            )


def _activations_gathered(e: Evidence) -> Iterator[Finding]:
    params = set()
    for leaf in e.plan.part("params"):
        params |= {_shard_key(e.plan, leaf, per_layer=per_layer) for per_layer in (True, False)}
    for run in _large(e.timeline, "all-gather"):
        c = run.collective
        if not set(c.axes) & set(physical_axes(e.plan.mesh, "replica", "fsdp", "expert")):
            continue
        strange = [shape for shape in c.shapes if _key(shape) not in params]
        if not strange:
            continue
        if all(dtype.startswith(("s", "u")) for dtype in c.dtypes):
            kind, what = "token-ids-gathered", "token ids"
        else:
            kind, what = "activations-gathered", "activations"
        yield Finding(
            kind, c.op_name or c.name, round(run.wire_bytes),
            f"an all-gather over {'+'.join(c.axes)} of {_shapes(c)}, which is no parameter's shard: {what} are gathered. Keep rows on the data axes: "
            "mark the unit with zjax.fully_shard, or constrain its input to plan.residual_spec",
        )  # fmt: skip


def _wrong_axis(e: Evidence) -> Iterator[Finding]:
    """Gathers and scatters over axes that no leaf of the plan is sharded over, such as `replica`."""
    used = {axis for leaf in e.plan.part("params") for axis in (*leaf.zero_axes, *spec_axes(leaf.rest.spec))}
    for run in _large(e.timeline, "all-gather", "reduce-scatter"):
        strange = [axis for axis in run.collective.axes if axis not in used]
        if strange:
            c = run.collective
            yield Finding(
                "wrong-axis",
                c.op_name or c.name,
                round(run.wire_bytes),
                f"{_article(c.kind)} of {_shapes(c)} runs over {'+'.join(strange)}, over which the plan shards nothing",
            )


def _wide_on_the_wire(e: Evidence) -> Iterator[Finding]:
    if e.plan.precision.compute == "float32" or e.target.platform == "cpu":
        return
    params = e.plan.part("params")
    wide = {"all-gather"} if any(leaf.rest.dtype == "float32" for leaf in params) else set()
    wide |= {"reduce-scatter", "all-reduce"} if any(leaf.reduce == "float32" for leaf in params) else set()
    for run in _large(e.timeline, *sorted({"all-gather", "reduce-scatter", "all-reduce"} - wide)):
        c = run.collective
        if "f32" in c.dtypes:
            yield Finding(
                "float32-on-the-wire", c.op_name or c.name, round(run.wire_bytes),
                f"{_article(c.kind)} of {_shapes(c)} moves float32, where precision.compute is {e.plan.precision.compute}: cast before the gather, or return gradients in the parameter's dtype",
            )  # fmt: skip


def _not_followed(e: Evidence) -> Iterator[Finding]:
    if e.timeline.unfollowed:
        yield Finding(
            "collective-not-counted", e.timeline.unfollowed[0], 0,
            f"{len(e.timeline.unfollowed)} collectives are called in a way this audit does not know, and are missing from its figures",
        )  # fmt: skip


def _kernels_replaced(e: Evidence) -> Iterator[Finding]:
    """Library kernels, attention above all, that the step asks for and the compiled program does not have."""
    compiled = {x.target for computation in e.module.computations.values() for x in computation.schedule if x.opcode == "custom-call"}
    for kernel in e.kernels:
        if kernel not in compiled:
            yield Finding(
                "kernel-replaced", kernel, 0,
                f"the step asks for {kernel}, but the compiled program has {', '.join(sorted(compiled)) or 'no kernel'}: on the device another one would run. "
                "Choose the kernel by jax.default_backend() or jax.lax.platform_dependent, which an audit answers for its target",
            )  # fmt: skip


_CHECKS = (
    _not_followed,
    _kernels_replaced,
    _does_not_fit,
    _state_above_plan,
    _not_donated,
    _replicated_without_reason,
    _outside_units,
    _unit_sizes,
    _stacks_gathered,
    _full_gradients,
    _gradient_all_reduce,
    _gathered_too_often,
    _activations_gathered,
    _wrong_axis,
    _wide_on_the_wire,
)


def _of_kind(timeline: Timeline, *kinds: str) -> Iterator[Run]:
    return (run for run in timeline.runs if run.collective.kind in kinds)


def _large(timeline: Timeline, *kinds: str) -> Iterator[Run]:
    return (run for run in _of_kind(timeline, *kinds) if run.collective.full_bytes >= SMALL)


def _operand_shapes(module: Module, run: Run) -> list[tuple[int, ...]]:
    """Of a collective; XLA:GPU combines all-reduces by laying their operands end to end, which is taken apart here."""
    computation = module.computations[run.computation]
    shapes = []
    for operand in computation.operands(computation.instructions[run.collective.name]):
        inside, root = computation, operand
        if operand.opcode == "fusion":
            inside = module.computations[dict(operand.called)["calls"]]
            root = inside.root
        joined = inside.operands(root) if root.opcode == "concatenate" else [operand]
        shapes += [array.dims for x in joined for array in x.shape.arrays]
    return shapes


def _scattered(leaf: LeafPlan) -> bool:
    assert leaf.forward
    return leaf.accumulator is not None and bool(set(spec_axes(leaf.accumulator.spec)) - set(spec_axes(leaf.forward.spec)))


def _local(plan: Plan, leaf: LeafPlan, placed: Placement | None) -> tuple[int, ...]:
    assert placed
    return shard_shape(plan.mesh, placed.spec, leaf.shape)


def _key(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape up to what layouts change: order of dims, and dims of 1."""
    return tuple(sorted(dim for dim in shape if dim != 1))


def _shard_key(plan: Plan, leaf: LeafPlan, *, per_layer: bool) -> tuple[int, ...]:
    """The key of the piece of a parameter that a device gathers from."""
    placed = leaf.rest if spec_axes(leaf.rest.spec) else leaf.optimizer or leaf.rest
    return _key(_local(plan, leaf, placed)[int(leaf.stacked and per_layer) :])


def _largest(module: Module, count: int = 5) -> list[Instruction]:
    """The largest arrays that scheduled instructions make."""
    fused = {name for c in module.computations.values() for x in c.schedule if x.opcode == "fusion" for _, name in x.called}
    made = [
        x
        for computation in module.computations.values()
        if computation.name not in fused
        for x in computation.schedule
        if x.shape.elements is None and x.opcode not in ("parameter", "get-tuple-element", "bitcast")
    ]
    return sorted(made, key=lambda x: -x.shape.bytes)[:count]


def _short(x: Instruction) -> str:
    return re.sub(r"jit\(\w+\)/", "", x.metadata.get("op_name", "")) or x.name


def _shapes(c: Collective) -> str:
    shown = ", ".join(f"{'/'.join(c.dtypes)}{list(shape)}" for shape in c.shapes[:3])
    return shown + (f" and {len(c.shapes) - 3} more" if len(c.shapes) > 3 else "")


def _article(kind: str) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"
