"""How often a while loop runs: printed by the backend (CPU, GPU), or traced from its condition (TPU prints none)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zjax.audit.hlo import Computation, Instruction, Module

_PASS_THROUGH = ("copy", "bitcast", "convert", "copy-start", "copy-done", "opt-barrier", "reshape", "slice-start", "slice-done")


@dataclass(frozen=True, eq=False)
class Scope:
    """A computation, and what its parameters are bound to where it is called."""

    computation: Computation
    arguments: Mapping[int, tuple[Scope, str]]
    first: bool = False
    """Of a loop: whether this is its first iteration, or any."""


def trip_count(module: Module, scope: Scope, loop: Instruction) -> int | None:
    """Iterations of `loop`, or None where the text does not tell."""
    printed = loop.backend_config.get("known_trip_count")
    if isinstance(printed, dict) and str(printed.get("n", "")).isdigit():
        return int(printed["n"])
    found = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attribute_text)
    if found:
        return int(found.group(1))
    called, given = dict(loop.called), {0: (scope, loop.operands[0])}
    compare = _compare(module, Scope(module.computations[called["condition"]], given, first=True))
    if compare is None:
        return None
    inside, comparison = compare
    body = Scope(module.computations[called["body"]], given, first=True)
    low, high = (_constant(module, inside, name) for name in comparison.operands)
    next_low, next_high = (_in_next_iteration(module, inside, name, body) for name in comparison.operands)
    if low is None or high is None or next_low is None or next_high is None:
        return None
    # Steps are not always of 1: the compiler's own windowed products take two shards an iteration.
    return _iterations(comparison.attributes.get("direction", ""), high - low, (high - low) - (next_high - next_low))


def _iterations(direction: str, gap: int, closed: int) -> int | None:
    """How often a gap of `high - low` is compared and found open, where every iteration closes it by `closed`."""
    if direction in ("GT", "GE"):
        gap, closed = -gap, -closed
    if direction in ("LT", "GT") and closed > 0:
        return max(0, -(-gap // closed))
    if direction in ("LE", "GE") and closed > 0:
        return max(0, gap // closed + 1)
    if direction == "NE" and closed and gap % closed == 0:
        return gap // closed if gap // closed >= 0 else None
    return None


def _in_next_iteration(module: Module, inside: Scope, name: str, body: Scope) -> int | None:
    """The integer that a side of the condition's comparison is after one iteration."""
    slot = _slot(inside, name)
    if slot is None:
        return _constant(module, inside, name)
    root = body.computation.root
    return _constant(module, body, root.operands[slot]) if root.opcode == "tuple" else None


def _slot(inside: Scope, name: str) -> int | None:
    """The element of the loop's tuple that an instruction of its condition is, or None."""
    while True:
        x = inside.computation.instructions[name]
        if x.opcode == "get-tuple-element":
            return int(x.attributes["index"])
        if x.opcode == "parameter" and not inside.first and int(x.operand_text) in inside.arguments:
            inside, name = inside.arguments[int(x.operand_text)]
        elif x.opcode in _PASS_THROUGH:
            name = x.operands[0]
        else:
            return None


def _compare(module: Module, scope: Scope) -> tuple[Scope, Instruction] | None:
    root = scope.computation.root
    while root.opcode in _PASS_THROUGH:
        root = scope.computation.instructions[root.operands[0]]
    if root.opcode == "fusion":
        return _compare(module, inner_scope(module, scope, root, dict(root.called)["calls"]))
    return (scope, root) if root.opcode == "compare" else None


def inner_scope(module: Module, scope: Scope, caller: Instruction, name: str) -> Scope:
    """The scope of a computation that `caller` calls with its operands."""
    return Scope(module.computations[name], {number: (scope, operand) for number, operand in enumerate(caller.operands)})


def _constant(module: Module, scope: Scope, name: str, depth: int = 0) -> int | None:
    """The integer an instruction is known to be, or None."""
    x = scope.computation.instructions.get(name)
    if x is None or depth > 64:
        return None
    if x.opcode == "constant":
        return int(x.operand_text) if re.fullmatch(r"-?\d+", x.operand_text) else None
    if x.opcode in _PASS_THROUGH:
        return _constant(module, scope, x.operands[0], depth + 1)
    if x.opcode == "parameter":
        bound = scope.arguments.get(int(x.operand_text))
        return _constant(module, *bound, depth + 1) if bound else None
    if x.opcode == "get-tuple-element":
        element = _element(module, scope, x.operands[0], int(x.attributes["index"]), depth)
        return _constant(module, *element, depth + 1) if element else None
    if x.opcode == "fusion":
        inside = inner_scope(module, scope, x, dict(x.called)["calls"])
        return _constant(module, inside, inside.computation.root.name, depth + 1)
    if x.opcode in ("add", "subtract", "multiply"):
        a, b = (_constant(module, scope, operand, depth + 1) for operand in x.operands[:2])
        if a is None or b is None:
            return None
        return {"add": a + b, "subtract": a - b, "multiply": a * b}[x.opcode]
    return None


def _element(module: Module, scope: Scope, name: str, index: int, depth: int) -> tuple[Scope, str] | None:
    """Where element `index` of a tuple comes from: through parameters to the tuple that built it."""
    while depth < 64:
        depth += 1
        x = scope.computation.instructions.get(name)
        if x is None:
            return None
        if x.opcode == "tuple":
            return scope, x.operands[index]
        if x.opcode == "parameter":
            bound = scope.arguments.get(int(x.operand_text))
            if bound is None or not (scope.first or _is_kept(module, scope.computation, index)):
                return None
            scope, name = bound
        elif x.opcode == "while":
            if not _is_kept(module, module.computations[dict(x.called)["body"]], index):
                return None
            name = x.operands[0]
        elif x.opcode in ("copy", "opt-barrier"):
            name = x.operands[0]
        else:
            return None
    return None


def _is_kept(module: Module, body: Computation, index: int) -> bool:
    """Whether a loop's body hands on element `index` of its tuple as it came; a computation that returns no tuple is no body."""
    if body.root.shape.elements is None:
        return True
    if body.root.opcode != "tuple" or index >= len(body.root.operands):
        return False
    x = body.instructions[body.root.operands[index]]
    while True:
        if x.opcode in _PASS_THROUGH:
            x = body.instructions[x.operands[0]]
            continue
        if x.opcode != "get-tuple-element":
            return False
        source, number = body.instructions[x.operands[0]], int(x.attributes["index"])
        if source.opcode == "parameter":
            return number == index
        if source.opcode != "while" or not _is_kept(module, module.computations[dict(source.called)["body"]], number):
            return False
        before = body.instructions[source.operands[0]]  # the inner loop kept it: go on before that loop
        if before.opcode != "tuple":
            return False
        x = body.instructions[before.operands[number]]
