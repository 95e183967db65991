"""The collectives of a compiled program: kind, bytes, groups, and what the compiler made of them.

Wire bytes a device by ring algorithms, from the operand a device holds: all-gather (n-1) x operand, reduce-scatter and
all-to-all (n-1)/n x operand, all-reduce 2(n-1)/n x operand, collective-permute operand x the share of devices that send.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zjax.audit.groups import Groups, axes_of, parse_groups
from zjax.audit.hlo import Computation, HloParseError, Instruction, Module
from zjax.mesh import logical_axis

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
_MOVES = ("copy", "bitcast", "copy-start", "copy-done", "get-tuple-element", "reshape", "transpose", "convert", "slice-start", "slice-done")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as it runs once on one device."""

    kind: str
    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of its operands on one device."""
    operand_bytes: int
    wire_bytes: float
    group_size: int
    axes: tuple[str, ...]
    """Logical mesh axes it runs over."""
    between: bool
    """Whether a group spans hosts or slices."""
    torus_dims: int
    """On a TPU, dims of the torus a group spans; 1 elsewhere."""
    emulates: str
    """The collective that an all-reduce stands for (`reduce-scatter`, `all-gather`), or empty."""
    note: str
    """The backend's form, where it is not the plain one."""
    op_name: str
    source: str

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole array that is gathered or scattered."""
        return self.operand_bytes * (self.group_size if self.kind == "all-gather" else 1)


@dataclass(frozen=True)
class Place:
    """Where the program's devices are: its mesh, the host or slice of each device, its place on the torus."""

    mesh: Mapping[str, int]
    hosts: tuple[int, ...]
    coords: tuple[tuple[int, ...], ...]


def base_kind(opcode: str) -> str | None:
    """The kind of collective an opcode is or starts, else None."""
    kind = opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def read_collective(module: Module, computation: Computation, x: Instruction, place: Place, *, fusion: str = "") -> Collective:
    """Describes the collective `x`, the opcode of which `base_kind` knows. `fusion` names the computation it is fused in."""
    kind = base_kind(x.opcode)
    assert kind is not None
    operands = [operand.shape for operand in computation.operands(x)]
    if not operands:
        raise HloParseError(f"{x.name} takes no operands: are names printed without their %?")
    operand_bytes = sum(shape.bytes for shape in operands)
    emulates, note = "", ""
    if kind == "collective-permute":
        groups = parse_groups(x.attributes["source_target_pairs"], module.devices)
        size = 2
        wire = operand_bytes * sum(a != b for a, b in groups) / module.devices
    else:
        groups = parse_groups(x.attributes.get("replica_groups", "{}"), module.devices)
        size = max(len(group) for group in groups)
        if kind == "all-reduce" and "all-reduce-scatter" in fusion:
            kind, note = "reduce-scatter", "all-reduce-scatter fusion"
        elif kind == "all-reduce":
            emulates = _emulated(module, computation, x)
        wire = operand_bytes * _factor(kind, size)
    arrays = [array for shape in operands for array in shape.arrays]
    return Collective(
        kind=kind,
        name=x.name,
        dtypes=tuple(dict.fromkeys(array.dtype for array in arrays)),
        shapes=tuple(array.dims for array in arrays),
        operand_bytes=operand_bytes,
        wire_bytes=wire,
        group_size=size,
        axes=tuple(dict.fromkeys(map(logical_axis, axes_of(groups, place.mesh)))),
        between=any(len({place.hosts[device] for device in group}) > 1 for group in groups),
        torus_dims=_torus_dims(groups, place),
        emulates=emulates,
        note=note,
        op_name=x.metadata.get("op_name", ""),
        source=module.source_of(x),
    )


def _factor(kind: str, n: int) -> float:
    """Wire bytes per operand byte in a group of n."""
    return {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-broadcast": 1.0}.get(kind, (n - 1) / n)


def _torus_dims(groups: Groups, place: Place) -> int:
    if not place.coords:
        return 1
    dims = [
        len({coord[dim] for coord in map(place.coords.__getitem__, group)}) > 1
        for group in groups[:1]
        for dim in range(len(place.coords[0]))
    ]
    return max(1, sum(dims))


def _emulated(module: Module, computation: Computation, x: Instruction) -> str:
    """What an all-reduce stands for: a reduce-scatter if only slices of it are used, an all-gather if it adds up shards in zeros."""
    if x.operands and all(_is_shard_in_zeros(module, computation, name) for name in x.operands):
        return "all-gather"
    results = [x.name]
    if x.opcode.endswith("-start"):
        results = [user.name for user in computation.users.get(x.name, ()) if user.opcode.endswith("-done")]
    if len(x.operands) == 1:
        return "reduce-scatter" if results and all(_only_sliced(module, computation, name) for name in results) else ""
    elements = [user for name in results for user in computation.users.get(name, ()) if user.opcode == "get-tuple-element"]
    total = sum(element.shape.bytes for element in elements)
    sliced = sum(element.shape.bytes for element in elements if _only_sliced(module, computation, element.name))
    return "reduce-scatter" if total and sliced > total / 2 else ""


def _only_sliced(module: Module, computation: Computation, name: str, depth: int = 0) -> bool:
    users = computation.users.get(name, ())
    if not users or depth > 8:
        return False
    for user in users:
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            continue
        if user.opcode in _MOVES:
            if not _only_sliced(module, computation, user.name, depth + 1):
                return False
        elif user.opcode == "fusion":
            inner = module.computations[dict(user.called)["calls"]]
            taken = [inner.parameters[number].name for number, operand in enumerate(user.operands) if operand == name]
            # A fusion that only converts or moves passes it on to its own users.
            if all(_only_moved(inner, each) for each in taken):
                if not _only_sliced(module, computation, user.name, depth + 1):
                    return False
            elif not all(_only_sliced(module, inner, each, depth + 1) for each in taken):
                return False
        else:
            return False
    return True


def _only_moved(computation: Computation, name: str) -> bool:
    """Whether a value reaches the computation's root through moves alone."""
    while name != computation.root.name:
        users = computation.users.get(name, ())
        if len(users) != 1 or users[0].opcode not in _MOVES:
            return False
        name = users[0].name
    return True


def _is_shard_in_zeros(module: Module, computation: Computation, name: str, depth: int = 0) -> bool:
    x = computation.instructions.get(name)
    if x is None or depth > 8:
        return False
    if x.opcode in _MOVES:
        return _is_shard_in_zeros(module, computation, x.operands[0], depth + 1)
    if x.opcode == "dynamic-update-slice":
        return _is_zeros(computation, x.operands[0])
    if x.opcode == "fusion":
        inner = module.computations[dict(x.called)["calls"]]
        root = inner.root
        while root.opcode in _MOVES:
            root = inner.instructions[root.operands[0]]
        if root.opcode != "dynamic-update-slice":
            return False
        base = inner.instructions[root.operands[0]]
        if base.opcode == "parameter":
            return _is_zeros(computation, x.operands[int(base.operand_text)])
        return _is_zeros(inner, base.name)
    return False


def _is_zeros(computation: Computation, name: str) -> bool:
    x = computation.instructions.get(name)
    while x is not None and x.opcode in _MOVES:
        x = computation.instructions.get(x.operands[0])
    if x is not None and x.opcode == "broadcast":
        x = computation.instructions.get(x.operands[0])
    return x is not None and x.opcode == "constant" and re.fullmatch(r"-?0(\.0*)?", x.operand_text) is not None
