"""Replica groups in every form XLA prints, and the mesh axes they run over.

A list `{{0,1},{2,3}}`; an iota tile `[2,4]<=[4,2]T(1,0)`; a mesh with axes `mesh['a'=2,'b'=4] {'b'}`, which may name
part of an axis (`'b':(2)2`, the factor 2 after the first 2) and an order of its own for the devices. Ids count the
devices of the program's mesh in row-major order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from zjax.audit.hlo import HloParseError

Groups = tuple[tuple[int, ...], ...]


def parse_groups(text: str, devices: int) -> Groups:
    """The groups of device ids that a `replica_groups` or `source_target_pairs` attribute prints; {} is one group of all."""
    text = text.strip()
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if text.startswith("["):
        found = re.fullmatch(r"\[(\d+),(\d+)\](<=.*)", text, re.S)
        ids = _iota(found.group(3)) if found else None
        if found is None or ids is None or ids.size != int(found.group(1)) * int(found.group(2)):
            raise HloParseError(f"replica groups of an unknown form: {text[:120]!r}")
        return _rows(ids.reshape(int(found.group(1)), int(found.group(2))))
    if re.fullmatch(r"\{[\d,\s{}]*\}", text):
        groups = tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,\s]*)\}", text[1:-1]))
        return tuple(group for group in groups if group) or (tuple(range(devices)),)
    raise HloParseError(f"replica groups of an unknown form: {text[:120]!r}")


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ, in mesh order."""
    shape = tuple(mesh.values())
    if math.prod(shape) <= max(max(group) for group in groups):
        raise HloParseError(f"device {max(max(group) for group in groups)} in a program for mesh {dict(mesh)}")
    varying: set[int] = set()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group), shape), axis=-1)
        varying |= set(np.flatnonzero((coordinates != coordinates[0]).any(axis=0)).tolist())
    return tuple(name for index, name in enumerate(mesh) if index in varying)


def _mesh_groups(text: str) -> Groups:
    found = re.match(r"mesh\[([^\]]*)\](?:,?\s*device_ids=\((.*?)\))?\s*\{([^{}]*)\}\s*$", text, re.S)
    if not found:
        raise HloParseError(f"replica groups of an unknown form: {text[:120]!r}")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
    order = found.group(2)
    total = math.prod(sizes.values())
    if not order:
        ids = np.arange(total)
    elif order.startswith("["):  # `[2,4]T(1,0)`: the counting array in that shape, transposed
        ids = _iota("<=" + order).ravel()
    else:
        ids = np.array(_ints(order))
    if ids.size != total:
        raise HloParseError(f"replica groups name {ids.size} devices for {total} mesh positions: {text[:120]!r}")
    # Axes are cut where a group uses only a factor of one, so that every used piece is a dim of its own.
    pieces: list[tuple[int, bool]] = []
    used = {
        name: (int(before or 1), int(size or sizes.get(name, 1)))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found.group(3))
    }
    for name, (before, part) in used.items():
        if name not in sizes or sizes[name] % (before * part):
            raise HloParseError(f"replica groups over an axis that the mesh has not: {text[:120]!r}")
    for name, size in sizes.items():
        if name not in used:
            pieces.append((size, False))
            continue
        before, part = used[name]
        pieces += [(before, False), (part, True), (size // (before * part), False)]
    array = ids.reshape([size for size, _ in pieces])
    inside = [dim for dim, (_, is_used) in enumerate(pieces) if is_used]
    outside = [dim for dim, (_, is_used) in enumerate(pieces) if not is_used]
    size = math.prod(pieces[dim][0] for dim in inside)
    return _rows(array.transpose(outside + inside).reshape(-1, size))


def _iota(text: str) -> np.ndarray:
    """`<=[4,2]T(1,0)` or `<=[8]`: the counting array in that shape, transposed."""
    found = re.fullmatch(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text.strip())
    shape = _ints(found.group(1)) if found else []
    order = _ints(found.group(2)) if found and found.group(2) else list(range(len(shape)))
    if not found or sorted(order) != list(range(len(shape))):
        raise HloParseError(f"iota of an unknown form: {text[:120]!r}")
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())
