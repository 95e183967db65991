"""A plan in words: its summary, its table, its bytes a device, and how it differs from another."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec as P
from rich import box
from rich.table import Table

from zjax.config import ZeroConfig
from zjax.console import TextConsole
from zjax.mesh import AnyMesh, data_axes, degree, zero_axes

Plan: TypeAlias = Any
Placement: TypeAlias = Any
"""Those of `zjax.plan`, which stands above this file: a plan prints itself with it."""
ROLES = ("rest", "forward", "backward", "accumulator", "optimizer")


def bytes_per_device(plan: Plan) -> dict[str, int]:
    """Bytes a device holds of parameters, gradients, master, optimizer state, secondary copies and on the host.

    `model_state` is their sum on the device (ZeRO paper, section 3.1: parameters, gradients, optimizer state).
    """
    held = {
        "params": sum(leaf.bytes_on(plan.mesh) for leaf in plan.part("params")),
        "gradients": sum(leaf.bytes_on(plan.mesh, "accumulator") for leaf in plan.part("params")),
        "master": sum(leaf.bytes_on(plan.mesh) for leaf in plan.part("master")),
        "optimizer": sum(leaf.bytes_on(plan.mesh) for leaf in plan.part("optimizer")),
        "secondary": 0,
        "host": sum(leaf.bytes_on(plan.mesh) for leaf in plan.leaves if leaf.rest.memory_kind != "device"),
    }
    return held | {"model_state": sum(held.values()) - held["host"]}


def mode_name(zero: ZeroConfig, mesh: AnyMesh) -> str:
    """The mode in the words of DeepSpeed and FSDP."""
    names = {0: "stage 0 (DDP, NO_SHARD)", 1: "stage 1 (ZeRO-1)", 2: "stage 2 (ZeRO-2)", 3: "stage 3 (ZeRO-3, FULL_SHARD)"}
    name = names[zero.stage] if zero.reshard_after_forward else "stage 3, reshard_after_forward=False (SHARD_GRAD_OP)"
    replicas = degree(mesh, data_axes(mesh)) // degree(mesh, [axis for axis in data_axes(mesh) if axis in zero_axes(mesh)])
    return f"{name}, hybrid over {replicas} replicas (HYBRID_SHARD, MiCS)" if zero.stage and replicas > 1 else name


def summary(plan: Plan) -> str:
    """What the plan is, in a few lines: mode, mesh, engine, precision, accumulation, bytes a device."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1) or "1 device"
    held = bytes_per_device(plan)
    parameters = sum(math.prod(leaf.shape) for leaf in plan.part("params"))
    micro = plan.accumulation.micro_batches
    return "\n".join(
        [
            f"{mode_name(plan.zero, plan.mesh)} on {mesh}; engine {plan.engine} ({plan.engine_reason})",
            f"{parameters:,} parameters, compute {plan.precision.compute}"
            f"{', fp32 master' if plan.part('master') else ''}; {micro} micro-batch{'es' if micro > 1 else ''} a step",
            "MiB a device: " + ", ".join(f"{name} {held[name] / 2**20:.2f}" for name in held if held[name]),
        ]
    )


def table(plan: Plan) -> str:
    """Every leaf: shape, dtype, spec in each role, bytes a device, and why it is not sharded."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("leaf", "shape", "dtype", *ROLES, "bytes/device", "why not sharded"):
        rows.add_column(column, no_wrap=True, justify="right" if column == "bytes/device" else "left")
    for leaf in plan.leaves:
        specs = [spec_text(placed.spec) if placed else "" for placed in (getattr(leaf, role) for role in ROLES)]
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        rows.add_row(leaf.path, shape, str(leaf.rest.dtype), *specs, f"{leaf.bytes_on(plan.mesh):,}", leaf.reason or "")
    # rich pads and wraps to the console; a plan is compared as text, so it gets all the width it wants.
    console = TextConsole(10_000)
    console.print(rows)
    return f"{summary(plan)}\n{console}"


def spec_text(spec: P) -> str:
    """`R` for replicated, else one entry a sharded-up-to dim: `(-, fsdp)`."""
    entries = ["-" if entry is None else "+".join(entry) if isinstance(entry, tuple) else entry for entry in spec]
    return f"({', '.join(entries)})" if entries else "R"


def _placement_text(placed: Placement | None) -> str:
    return f"{spec_text(placed.spec)} {placed.dtype} {placed.memory_kind}" if placed else "absent"


def differences(one: Plan, other: Plan) -> list[str]:
    """A line for each leaf and role in which two plans differ."""
    mine, theirs = {leaf.path: leaf for leaf in one.leaves}, {leaf.path: leaf for leaf in other.leaves}
    lines = []
    for path in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(path), theirs.get(path)
        if a is None or b is None:
            lines.append(f"{path}: only in the {'second' if a is None else 'first'} plan")
            continue
        if a.shape != b.shape:
            lines.append(f"{path}: shape {a.shape} -> {b.shape}")
        if a.reduce != b.reduce and a.reduce and b.reduce:
            lines.append(f"{path}: gradient reduced in {a.reduce} -> {b.reduce}")
        for role in ROLES:
            if getattr(a, role) != getattr(b, role):
                lines.append(f"{path}: {role} {_placement_text(getattr(a, role))} -> {_placement_text(getattr(b, role))}")
            elif a.shape == b.shape and a.bytes_on(one.mesh, role) != b.bytes_on(other.mesh, role):
                what = "" if role == "rest" else f"{role} "
                lines.append(f"{path}: {what}bytes a device {a.bytes_on(one.mesh, role):,} -> {b.bytes_on(other.mesh, role):,}")
    return lines
