"""A parser of XLA's scheduled HLO text: computations, instructions, shapes, attributes, and what they refer to.

Every backend prints the same grammar (XLA's HloPrinter): a header line, tables of source positions, and computations
whose instructions are `[ROOT] %name = shape opcode(operands), attribute=value, ...`. Values are scanned with their
brackets and quotes balanced; an instruction may run over several lines (Pallas kernels print their metadata so).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

DTYPE_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4, "f8e5m2": 8, "f8e4m3fn": 8, "f8e4m3": 8, "f8e3m4": 8, "f8e4m3b11fnuz": 8, "f8e5m2fnuz": 8, "f8e4m3fnuz": 8, "f8e8m0fnu": 8,
}  # fmt: skip


class HloParseError(ValueError):
    """Text that is not HLO as XLA prints it; the message shows the place."""


@dataclass(frozen=True)
class Shape:
    """An array (dtype, dims, memory space) or a tuple of shapes."""

    dtype: str = ""
    dims: tuple[int, ...] = ()
    memory_space: int = 0
    """0 is device memory; on TPU 1 is VMEM and 5 is the host."""
    elements: tuple[Shape, ...] | None = None

    @property
    def arrays(self) -> tuple[Shape, ...]:
        """The arrays in it, a tuple's in order."""
        if self.elements is None:
            return (self,)
        return tuple(array for element in self.elements for array in element.arrays)

    @functools.cached_property
    def size(self) -> int:
        """Elements of an array."""
        size = 1
        for dim in self.dims:
            size *= dim
        return size

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of all its arrays, without layout padding."""
        return sum(-(-array.size * DTYPE_BITS[array.dtype] // 8) for array in self.arrays)


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction; attributes are kept as text until asked for."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    operand_text: str
    """What stood between the parentheses: a constant's literal, a parameter's number."""
    attribute_text: str
    is_root: bool
    index: int
    """Position in its computation: the schedule."""

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """`name=value` attributes, values as printed."""
        return dict(_split_attributes(self.attribute_text))

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """`op_name`, `source_file`, `stack_frame_id` and the like."""
        text = self.attributes.get("metadata", "{}")[1:-1]
        return {key: value.strip('"') for key, value in _METADATA.findall(text)}

    @functools.cached_property
    def backend_config(self) -> dict[str, object]:
        """The backend's own JSON, empty where there is none."""
        text = self.attributes.get("backend_config", "")
        try:
            loaded = json.loads(json.loads(text) if text.startswith('"') else text) if text else {}
        except json.JSONDecodeError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(attribute, computation) for every computation it refers to."""
        names = []
        for key in CALLING:
            if key in self.attributes:
                names += [(key, name) for name in _NAME.findall(self.attributes[key])]
        return tuple(names)

    @property
    def target(self) -> str:
        """A custom call's target, else empty."""
        return self.attributes.get("custom_call_target", "").strip('"')


CALLING = (
    "calls", "to_apply", "body", "condition", "called_computations", "branch_computations",
    "true_computation", "false_computation", "async_computation",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Computation:
    """A scheduled list of instructions."""

    name: str
    instructions: dict[str, Instruction]
    is_entry: bool

    @functools.cached_property
    def schedule(self) -> tuple[Instruction, ...]:
        """The instructions in the order they run."""
        return tuple(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next((i for i in self.schedule if i.is_root), self.schedule[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(i.operand_text): i for i in self.schedule if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """For each instruction, those that take it as an operand, in schedule order."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.schedule:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(found) for name, found in users.items()}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that it takes."""
        try:
            return [self.instructions[name] for name in instruction.operands]
        except KeyError as error:
            raise HloParseError(f"{instruction.name} takes {error}, which is not in {self.name}") from None


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    devices: int
    """Partitions x replicas."""
    header: dict[str, str] = field(default_factory=dict)
    frames: dict[int, str] = field(default_factory=dict)
    """`file:line` of each stack frame id."""

    def source_of(self, instruction: Instruction) -> str:
        """`file:line` that made the instruction, or empty."""
        meta = instruction.metadata
        if "source_file" in meta:
            return f"{meta['source_file']}:{meta.get('source_line', '?')}"
        return self.frames.get(int(meta.get("stack_frame_id", 0)), "")

    @property
    def donated(self) -> int:
        """How many outputs reuse the memory of an input."""
        return len(re.findall(r"\{[^{}]*\}: \(\d+, \{[^{}]*\}, (?:may|must)-alias\)", self.header.get("input_output_alias", "")))


_NAME = re.compile(r"%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_METADATA = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s{}]+)')
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
_BETWEEN = re.compile(r"(?:[, ]|/\*.*?\*/)*")  # of a tuple's elements: `, /*index=5*/`
_SPACE = re.compile(r"S\((\d+)\)")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|["()\[\]{}]', re.S)  # a quoted string is one token
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s+=\s+")
_OPENING = {"(": ")", "[": "]", "{": "}"}


def parse(text: str) -> Module:
    """The module that the text prints; HloParseError where it is not one."""
    if not text.startswith("HloModule"):
        raise HloParseError(f"HLO text starts with 'HloModule'; this starts with {text[:60]!r}")
    first, _, rest = text.partition("\n")
    name, _, attributes = first.removeprefix("HloModule").strip().partition(",")
    header = dict(_split_attributes(attributes))
    lines = rest.splitlines()
    frames = _frames(lines)
    computations: dict[str, Computation] = {}
    entry = None
    for computation in _computations(lines):
        computations[computation.name] = computation
        entry = computation if computation.is_entry else entry
    if entry is None:
        raise HloParseError("no ENTRY computation")
    devices = int(header.get("num_partitions", 1)) * int(header.get("replica_count", 1))
    return Module(name, computations, entry, devices, header, frames)


def _computations(lines: list[str]) -> Iterator[Computation]:
    name, is_entry, pending = "", False, ""
    found: dict[str, Instruction] = {}

    def close() -> None:
        nonlocal pending
        if pending:
            instruction = _instruction(pending, len(found))
            found[instruction.name] = instruction
            pending = ""

    for line in lines:
        if not name:
            head = _COMPUTATION.match(line)
            if head:
                name, is_entry, found, pending = head.group(2), bool(head.group(1)), {}, ""
        elif line.startswith("}") and (line == "}" or line.startswith("}, ") or not line[1:].strip()):
            close()
            yield Computation(name, found, is_entry)
            name = ""
        elif _INSTRUCTION.match(line):
            close()
            pending = line
        elif pending:
            pending += "\n" + line


def _instruction(line: str, index: int) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None
    start = head.end()
    shape, position = parse_shape(line, start)
    parenthesis = line.find("(", position)
    if parenthesis < 0:
        raise HloParseError(f"no operands in {line[:200]!r}")
    opcode = line[position:parenthesis].strip()
    end = _balanced(line, parenthesis)
    inside = line[parenthesis + 1 : end - 1]
    if "/*" in inside:
        inside = _COMMENT.sub("", inside)
    operands = () if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(inside))
    return Instruction(head.group(2), opcode, shape, operands, inside.strip(), line[end:], bool(head.group(1)), index)


def parse_shape(text: str, position: int = 0) -> tuple[Shape, int]:
    """The shape printed at a position, and the position after it."""
    if text.startswith("(", position):
        elements: list[Shape] = []
        position += 1
        while True:
            position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
            if text.startswith(")", position):
                return Shape(elements=tuple(elements)), position + 1
            element, position = parse_shape(text, position)
            elements.append(element)
    found = _ARRAY.match(text, position)
    if not found:
        raise HloParseError(f"no shape at {text[position : position + 60]!r}")
    dtype, dims, layout = found.groups()
    if dtype not in DTYPE_BITS:
        raise HloParseError(f"unknown dtype {dtype!r} at {text[position : position + 60]!r}")
    sizes = tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
    space = _SPACE.search(layout) if layout and "S(" in layout else None
    return Shape(dtype, sizes, int(space.group(1)) if space else 0), found.end()


def _balanced(text: str, position: int) -> int:
    """The position after the bracket that closes the one at `position`; quoted brackets do not count."""
    stack = []
    for found in _STRUCTURE.finditer(text, position):
        char = found.group()
        if len(char) > 1:
            continue
        if char in _OPENING:
            stack.append(_OPENING[char])
        elif stack and char == stack[-1]:
            stack.pop()
            if not stack:
                return found.end()
        else:
            raise HloParseError(f"unbalanced {char!r} in {text[position : position + 120]!r}")
    raise HloParseError(f"no closing bracket for {text[position : position + 120]!r}")


def _split_attributes(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of a comma-separated list, commas inside brackets and quotes not counted."""
    depth, start = 0, 0
    pieces = []
    for found in _SEPARATORS.finditer(text):
        char = found.group()
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start : found.start()])
            start = found.end()
    pieces.append(text[start:])
    for index, piece in enumerate(pieces):
        # `replica_groups=mesh[...], device_ids=(...) {...}` is one value with a comma of its own.
        if piece.startswith(" device_ids="):
            continue
        if index + 1 < len(pieces) and pieces[index + 1].startswith(" device_ids="):
            piece += pieces[index + 1]
        name, equals, value = piece.strip().partition("=")
        if equals:
            yield name, value


_SEPARATORS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]', re.S)


def _frames(lines: list[str]) -> dict[int, str]:
    """`file:line` by stack frame id, from the tables between the header and the first computation."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] | None = None
    for line in lines:
        if _COMPUTATION.match(line):
            break
        if line.strip() in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line.strip(), {})
        elif table is not None and line.strip():
            number, _, value = line.strip().partition(" ")
            if number.isdigit():
                table[int(number)] = value.strip().strip('"')
    places: dict[int, str] = {}
    files = tables.get("FileNames", {})
    for location_id, location in tables.get("FileLocations", {}).items():
        places[location_id] = f"{files.get(_field(location, 'file_name_id'), '')}:{_field(location, 'line')}"
    return {frame_id: places.get(_field(frame, "file_location_id"), "") for frame_id, frame in tables.get("StackFrames", {}).items()}


def _field(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found.group(1)) if found else 0
