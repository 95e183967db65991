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


def trip_count(module: Module, scope: Scope, loop: Instruction) -> int | None:
    """Iterations of `loop`, or None where the text does not tell."""
    printed = loop.backend_config.get("known_trip_count")
    if isinstance(printed, dict) and str(printed.get("n", "")).isdigit():
        return int(printed["n"])
    found = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attribute_text)
    if found:
        return int(found.group(1))
    condition = module.computations[dict(loop.called)["condition"]]
    compare = _compare(module, Scope(condition, {0: (scope, loop.operands[0])}))
    if compare is None:
        return None
    inside, comparison = compare
    # The induction variable resolves to its value before the loop, the bound to itself; steps are of 1 in jax's loops.
    low, high = (_constant(module, inside, name) for name in comparison.operands)
    if low is None or high is None:
        return None
    count = {"LT": high - low, "LE": high - low + 1, "GT": low - high, "GE": low - high + 1, "NE": abs(high - low)}
    return max(0, count[comparison.attributes["direction"]]) if comparison.attributes.get("direction") in count else None


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
        element = _element(scope, x.operands[0], int(x.attributes["index"]), depth)
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


def _element(scope: Scope, name: str, index: int, depth: int) -> tuple[Scope, str] | None:
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
            if bound is None:
                return None
            scope, name = bound
        elif x.opcode in ("while", "copy", "opt-barrier"):  # a loop-invariant slot is what the loop was given
            name = x.operands[0]
        else:
            return None
    return None
