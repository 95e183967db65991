"""What an instruction costs: floating-point operations of matrix products, bytes to and from memory, or unknown.

Shapes decide. A kernel that is only a name in the text (a custom call, a Pallas kernel) has no known cost and is
reported as such, never as zero.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from zjax.audit.hlo import Computation, Instruction, Module

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier",
    "iota", "copy-start", "copy-done", "slice-start", "slice-done", "async-start", "async-update", "async-done", "domain", "add-dependency",
}  # fmt: skip
"""Instructions that move nothing, or that a copy engine does beside the arithmetic."""

BOOKKEEPING_CALLS = {
    "AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "PrepareAsyncCallStart", "PrepareAsyncCallDone", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape",
    "SPMDShardToFullShape", "LayoutConstraint", "annotate_device_placement", "MoveToHost", "MoveToDevice", "PinToDevice", "xla.sdy.FuncResultSharding",
    "GetCurrentCoreId", "AssumeInBounds", "ConcatBitcast", "SliceBitcast", "CreateBuffer", "Pin", "Unpin",
}  # fmt: skip
"""Custom calls that are no kernels: the compiler's own notes, which cost nothing."""

SPEED = {"f64": 0.25, "f32": 0.5, "s8": 2.0, "f8e4m3fn": 2.0, "f8e5m2": 2.0}
"""Matrix-product speed of an operand dtype, relative to bf16 (f32 as TF32)."""

TPU_PASSES = {"default": 1.0, "high": 3.0, "highest": 6.0}
"""Runs of a TPU's bf16 matrix unit for one product of f32 operands: rounded by default, else as sums of bf16 numbers."""


@dataclass(frozen=True)
class Cost:
    """Matrix-product operations (weighted to bf16 speed), bytes moved, and kernels of unknown cost."""

    flops: float = 0.0
    bytes: float = 0.0
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.unknown + other.unknown)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The larger of the time to compute and the time to move."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def cost_of(module: Module, computation: Computation, x: Instruction) -> Cost:
    """The cost of one instruction without what loops and calls it makes (those run on their own schedule)."""
    if x.opcode in FREE or x.opcode in ("while", "call", "conditional"):
        return Cost()
    if x.opcode == "custom-call":
        return _custom_call(computation, x)
    flops, unknown = _arithmetic(module, computation, x)
    return Cost(flops, _moved_bytes(module, computation, x), unknown)


def _arithmetic(module: Module, computation: Computation, x: Instruction) -> tuple[float, tuple[str, ...]]:
    if x.opcode == "dot":
        return _dot_flops(computation, x), ()
    if x.opcode == "convolution":
        return _convolution_flops(computation, x), ()
    if x.opcode != "fusion":
        return 0.0, ()
    flops = 0.0
    unknown: tuple[str, ...] = ()
    inner = module.computations[dict(x.called)["calls"]]
    for each in inner.schedule:
        if each.opcode == "custom-call":
            inside = _custom_call(inner, each)
            more, kernels = inside.flops, inside.unknown
        else:
            more, kernels = _arithmetic(module, inner, each)
        flops, unknown = flops + more, unknown + kernels
    return flops, unknown


def _dot_flops(computation: Computation, x: Instruction) -> float:
    lhs = computation.instructions[x.operands[0]].shape
    contracted = math.prod(lhs.dims[int(dim)] for dim in re.findall(r"\d+", x.attributes.get("lhs_contracting_dims", "")))
    return 2.0 * x.shape.size * contracted / SPEED.get(lhs.dtype, 1.0)


def _convolution_flops(computation: Computation, x: Instruction) -> float:
    """Multiply-adds of real elements: TPU prints matrix products as convolutions, batch dims as padded or dilated windows."""
    lhs, kernel = (computation.instructions[name].shape for name in x.operands[:2])
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", x.attributes["dim_labels"])
    if labels is None:
        return 0.0
    lhs_labels, kernel_labels, out_labels = labels.groups()
    out = x.shape.arrays[0]
    window = {key: value for key, value in re.findall(r"(\w+)=([\w\-]+)", x.attributes.get("window", ""))}
    spatial = sorted(label for label in out_labels if label.isdigit())
    pairs = 1.0
    for index, label in enumerate(spatial):
        numbers = lambda key, default, i=index: _window_numbers(window, key, default, i)  # noqa: E731
        size, stride = numbers("size", "1")[0], numbers("stride", "1")[0]
        low, dilate_lhs, dilate_rhs = numbers("pad", "0_0")[0], numbers("lhs_dilate", "1")[0], numbers("rhs_dilate", "1")[0]
        place = np.arange(out.dims[out_labels.index(label)])[:, None] * stride + np.arange(size)[None, :] * dilate_rhs - low
        last = (lhs.dims[lhs_labels.index(label)] - 1) * dilate_lhs
        pairs *= int(((place >= 0) & (place <= last) & (place % dilate_lhs == 0)).sum())
    per_pair = out.dims[out_labels.index("b")] * out.dims[out_labels.index("f")] * kernel.dims[kernel_labels.index("i")]
    return 2.0 * pairs * per_pair * _tpu_passes(lhs.dtype, x)


def _tpu_passes(dtype: str, x: Instruction) -> float:
    """Only TPU programs hold convolutions: GPU programs call cuDNN."""
    if dtype == "s8":
        return 0.5
    precision = re.search(r"\w+", x.attributes.get("operand_precision", "default"))
    return TPU_PASSES.get(precision.group(), 1.0) if dtype == "f32" and precision else 1.0


def _window_numbers(window: dict[str, str], key: str, default: str, index: int) -> list[int]:
    values = window[key].split("x") if key in window else None
    return [int(number) for number in re.findall(r"-?\d+", values[index] if values else default)]


def _custom_call(computation: Computation, x: Instruction) -> Cost:
    target = x.target
    if target in BOOKKEEPING_CALLS:
        return Cost()
    moved = float(x.shape.bytes + sum(operand.shape.bytes for operand in computation.operands(x)))
    if target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        lhs = computation.instructions[x.operands[0]].shape
        config = x.backend_config.get("gemm_backend_config", x.backend_config)
        dims = config.get("dot_dimension_numbers", {}) if isinstance(config, dict) else {}
        contracted = math.prod(lhs.dims[int(dim)] for dim in dims.get("lhs_contracting_dimensions", ()))
        return Cost(2.0 * x.shape.arrays[0].size * contracted / SPEED.get(lhs.dtype, 1.0), moved)
    return Cost(0.0, moved, (target,))


def _moved_bytes(module: Module, computation: Computation, x: Instruction) -> float:
    operands = computation.operands(x)
    if x.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * x.shape.bytes
    if x.opcode == "dynamic-update-slice":
        return 2.0 * operands[1].shape.bytes
    if x.opcode == "scatter":
        return 3.0 * operands[-1].shape.bytes
    if x.opcode != "fusion":
        return float(x.shape.bytes + sum(operand.shape.bytes for operand in operands))
    inner = module.computations[dict(x.called)["calls"]]
    read = sum(_read_bytes(module, inner, number, operand.shape.bytes) for number, operand in enumerate(operands))
    return float(read + _written_bytes(module, inner, inner.root))


def _read_bytes(module: Module, inner: Computation, number: int, whole: int) -> int:
    """A fusion reads only the slices it takes of an operand (a layer of a stacked weight), not all of it."""
    parameter = inner.parameters.get(number)
    return whole if parameter is None else min(whole, _taken_bytes(module, inner, parameter, whole))


def _taken_bytes(module: Module, inner: Computation, value: Instruction, whole: int) -> int:
    """Bytes that the users of a value in a fusion read of it; a TPU's fusions have fusions inside that take the slices."""
    if value.is_root:
        return whole
    taken = 0
    for user in inner.users.get(value.name, ()):
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
            taken += user.shape.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place: what is not overwritten is not read
        elif user.opcode == "bitcast":
            taken += _taken_bytes(module, inner, user, whole)
        elif user.opcode == "fusion":
            nested = module.computations[dict(user.called)["calls"]]
            taken += sum(_read_bytes(module, nested, number, whole) for number, name in enumerate(user.operands) if name == value.name)
        else:
            return whole
    return taken


def _written_bytes(module: Module, inner: Computation, root: Instruction) -> int:
    """What a fusion writes of its result: of an array updated in place, the update."""
    whole = root.shape.bytes
    while root.opcode in ("bitcast", "copy", "convert") and root.operands:
        root = inner.instructions[root.operands[0]]
    if root.opcode == "tuple":
        return sum(_written_bytes(module, inner, element) for element in inner.operands(root))
    if root.opcode == "fusion":
        nested = module.computations[dict(root.called)["calls"]]
        return min(whole, _written_bytes(module, nested, nested.root))
    if root.opcode == "dynamic-update-slice":
        return inner.instructions[root.operands[1]].shape.bytes
    return whole
