"""What an audit says: figures of one device and one optimizer step, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from zjax.audit.findings import Finding, peak_bytes
from zjax.audit.schedule import Run, Timeline
from zjax.audit.targets import Target
from zjax.console import TextConsole
from zjax.describe import mode_name
from zjax.estimate import minimum_wire_bytes
from zjax.plan import Plan


@dataclass(frozen=True)
class Audit:
    """An audited program: the plan it was made for, the compiled figures, and what contradicts the plan."""

    target: Target
    plan: Plan
    memory: dict[str, int]
    timeline: Timeline
    findings: tuple[Finding, ...]
    compile_seconds: float
    tokens: int | None
    """Tokens of the global batch, for the model's FLOP utilisation; None where the batch does not tell."""
    compiler_options: Mapping[str, str]
    """XLA's settings that the program was compiled with."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(leaf.shape) for leaf in self.plan.part("params"))

    @property
    def state_bytes(self) -> int:
        """The program's state arguments: what it is given, less its share of the batch."""
        return self.memory["argument"] + self.memory["host_argument"] - self.memory["batch"]

    @property
    def peak_bytes(self) -> int:
        """The most a device holds at once."""
        return peak_bytes(self.memory)

    @property
    def wire_bytes(self) -> float:
        """What a device sends, all collectives together."""
        return sum(run.wire_bytes for run in self.timeline.runs)

    @property
    def exposed_fraction(self) -> float:
        """Share of the wire bytes with no matrix product between start and end."""
        exposed = sum(run.wire_bytes for run in self.timeline.runs if not run.covered)
        return exposed / self.wire_bytes if self.wire_bytes else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Time spent waiting for transfers, by the time model."""
        return sum(run.exposed_seconds for run in self.timeline.runs)

    @property
    def mfu(self) -> float | None:
        """Predicted model FLOP utilisation: 6 operations a parameter and token (embedding included) over the chips' peak."""
        if self.tokens is None or not self.timeline.seconds:
            return None
        return 6 * self.parameters * self.tokens / (self.target.devices * self.target.chip.flops * self.timeline.seconds)

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form of `zjax audit --json`."""
        kinds: dict[str, dict[str, Any]] = {}
        for run in self.timeline.runs:
            kind = kinds.setdefault(run.collective.kind, {"count": 0, "bytes": 0, "exposed_bytes": 0, "async_bytes": 0, "by_axis": {}})
            kind["count"] += run.times
            kind["bytes"] += round(run.wire_bytes)
            kind["exposed_bytes"] += 0 if run.covered else round(run.wire_bytes)
            kind["async_bytes"] += round(run.wire_bytes) if run.is_async else 0
            axis = "+".join(run.collective.axes) or "none"
            kind["by_axis"][axis] = kind["by_axis"].get(axis, 0) + round(run.wire_bytes)
        return {
            "target": self.target.text,
            "devices": self.target.devices,
            "parameters": self.parameters,
            "engine": self.plan.engine,
            "state_bytes": self.state_bytes,
            "peak_bytes": self.peak_bytes,
            "temp_bytes": self.memory["temp"],
            "host_bytes": self.memory["host_argument"] + self.memory["host_temp"],
            "collectives": kinds,
            "wire_bytes": round(self.wire_bytes),
            "wire_bytes_by_link": {link: round(self._wire(between)) for link, between in (("inside", False), ("between", True))},
            "ideal_wire_bytes": minimum_wire_bytes(self.plan),
            "exposed_fraction": round(self.exposed_fraction, 6),
            "exposed_seconds": self.exposed_seconds,
            "predicted_step_seconds": self.timeline.seconds,
            "kernels": [{"name": name, "count": count, "cost": "unknown"} for name, count in sorted(self.timeline.unknown_kernels.items())],
            "findings": [finding.to_json() for finding in self.findings],
            "compile_seconds": self.compile_seconds,
        }

    def _wire(self, between: bool) -> float:
        return sum(run.wire_bytes for run in self.timeline.runs if run.collective.between == between)

    def __str__(self) -> str:
        """The audit for people: the program's figures, its collectives, its findings."""
        console = TextConsole(160)
        batch = f", {self.tokens:,} tokens a step" if self.tokens else ""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.plan.mesh.shape.items() if size > 1) or "1 device"
        say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
        say(
            f"{mode_name(self.plan.zero, self.plan.mesh)} on {self.target.text} ({mesh}), {self.parameters:,} parameters{batch}, compiled in {self.compile_seconds:.1f} s"
        )
        say(f"engine {self.plan.engine} ({self.plan.engine_reason})")
        if self.compiler_options:
            say("XLA options: " + ", ".join(f"{name}={value}" for name, value in self.compiler_options.items()))
        say(
            f"a device holds: state {_gib(self.state_bytes)}, peak {_gib(self.peak_bytes)} of {_gib(self.target.chip.memory)}, temporary {_gib(self.memory['temp'])}"
        )
        console.print(self._table())
        ideal = minimum_wire_bytes(self.plan)
        ratio = f", {self.wire_bytes / ideal:.3f} x the mode's minimum {_gib(ideal)}" if ideal else ""
        say(f"wire: {_gib(self.wire_bytes)} a device and step{ratio}; between hosts or slices {_gib(self._wire(True))}")
        share = f", {self.exposed_seconds / self.timeline.seconds:.1%} of the step" if self.timeline.seconds else ""
        say(
            f"exposed: {self.exposed_fraction:.1%} of the bytes have no matrix product beside them; the time model waits {self.exposed_seconds * 1e3:.2f} ms{share}"
        )
        if self.target.platform == "cpu":
            say("prediction: none, simulated devices share the cores of one machine")
        else:
            mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
            say(
                f"prediction (roofline, not a measurement): {self.timeline.seconds * 1e3:.2f} ms a step, {self.timeline.compute_seconds * 1e3:.2f} ms of it compute{mfu}"
            )
        for name, count in sorted(self.timeline.unknown_kernels.items()):
            say(f"kernel of unknown cost: {name}, {count} times; predictions leave it out")
        for loop in self.timeline.unknown_loops:
            say(f"loop of unknown length: {loop}; counted once")
        say(f"findings: {len(self.findings) or 'none'}")
        for finding in self.findings:
            say(f"  {finding}")
        return str(console)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("collective", "axes", "form", "dtype", "runs", "wire", "exposed bytes", "exposed ms"):
            table.add_column(column, justify="left" if column in ("collective", "axes", "form", "dtype") else "right")
        rows: dict[tuple[str, ...], list[Run]] = {}
        for run in self.timeline.runs:
            c = run.collective
            form = ", ".join(filter(None, ["async" if run.is_async else "sync", c.note, f"stands for {c.emulates}" if c.emulates else ""]))
            rows.setdefault((c.kind, "+".join(c.axes) or "none", form, "+".join(c.dtypes)), []).append(run)
        for key, runs in sorted(rows.items(), key=lambda item: -sum(run.wire_bytes for run in item[1])):
            exposed = sum(run.wire_bytes for run in runs if not run.covered)
            waits = sum(run.exposed_seconds for run in runs) * 1e3
            table.add_row(
                *key, str(sum(run.times for run in runs)), _gib(sum(run.wire_bytes for run in runs)), _gib(exposed), f"{waits:.2f}"
            )
        return table


def _gib(count: float) -> str:
    if math.isinf(count):
        return "unbounded"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
