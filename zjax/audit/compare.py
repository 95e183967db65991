"""A grid of configs side by side: plan figures always, audited figures where a target is given."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from zjax.config import TrainConfig
from zjax.fields import ConfigError, from_dict


@dataclass(frozen=True)
class Cell:
    """One config of the grid: what was varied, the figures, or the error that took their place."""

    varied: dict[str, Any]
    target: str
    plan: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    leaves: tuple[dict[str, Any], ...] = ()
    """Path, spec at rest and bytes a device of each leaf, for the report."""
    error: str = ""

    @property
    def label(self) -> str:
        """`zero.stage=3, mesh.replica=2`."""
        return ", ".join(f"{name}={value}" for name, value in self.varied.items()) or "as configured"

    def to_json(self) -> dict[str, Any]:
        """As in `compare --json`."""
        return {"varied": self.varied, "target": self.target or None, "plan": self.plan, "audit": self.audit, "error": self.error or None}


def parse_vary(options: Sequence[str], parse: Callable[[str], Any]) -> list[tuple[str, list[Any]]]:
    """`zero.stage=0,1,2` -> ("zero.stage", [0, 1, 2]); ConfigError for anything else, an unknown field or one named twice."""
    grid = []
    for option in options:
        name, equals, values = option.partition("=")
        if not equals or not name or not values or "" in values.split(","):
            raise ConfigError(f"--vary={option}: write it as --vary=zero.stage=0,1,2")
        _require_field(name)
        # `none` is None to one field and a name to another (remat): it is shown as it was written.
        grid.append((name, [text if text == "none" else parse(text) for text in values.split(",")]))
    names = [name for name, _ in grid]
    if len(set(names)) < len(names):
        raise ConfigError(f"--vary: {', '.join(sorted({name for name in names if names.count(name) > 1}))} is given twice")
    return grid


def _require_field(name: str) -> None:
    """ConfigError, with the nearest known field, for a name that no config has."""
    section: Any = TrainConfig
    path = ""
    for each in name.split("."):
        if not dataclasses.is_dataclass(section):
            return  # below a value: setting it says so
        known = typing.get_type_hints(section)
        if each not in known:
            from_dict(typing.cast(type, section), {each: None}, path)  # raises
        section, path = known[each], f"{path}{each}."


def cells_of(grid: Sequence[tuple[str, list[Any]]], targets: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every combination of the varied values, on every target."""
    for target in targets or [""]:
        for values in itertools.product(*(values for _, values in grid)):
            yield dict(zip((name for name, _ in grid), values, strict=True)), target


COLUMNS: dict[str, Callable[[Cell], float | None]] = {
    "model state": lambda cell: _figure(cell.plan, "per_device", "model_state"),
    "planned wire": lambda cell: _figure(cell.plan, "traffic_per_step", "total"),
    "state": lambda cell: _figure(cell.audit, "state_bytes"),
    "peak": lambda cell: _figure(cell.audit, "peak_bytes"),
    "wire": lambda cell: _figure(cell.audit, "wire_bytes"),
    "between": lambda cell: _figure(cell.audit, "wire_bytes_by_link", "between"),
    "minimum": lambda cell: _figure(cell.audit, "ideal_wire_bytes"),
    "exposed": lambda cell: _figure(cell.audit, "exposed_fraction"),
    "exposed seconds": lambda cell: _figure(cell.audit, "exposed_seconds"),
    "predicted seconds": lambda cell: _figure(cell.audit, "predicted_step_seconds"),
    "findings": lambda cell: float(len(cell.audit["findings"])) if cell.audit else None,
}
"""Figures of a cell by column; bytes are a device's, in one optimizer step."""


def _figure(report: Mapping[str, Any] | None, *path: str) -> float | None:
    for name in path:
        if report is None:
            return None
        report = report[name]
    return float(report) if report is not None else None  # type: ignore[arg-type]


def shown(column: str, value: float | None) -> str:
    """A figure as people read it: GiB, a percentage, milliseconds, a count."""
    if value is None:
        return ""
    if column == "exposed":
        return f"{value:.1%}"
    if column.endswith("seconds"):
        return f"{value * 1e3:.1f} ms"
    if column == "findings":
        return f"{value:.0f}"
    if value < 2**20:
        return f"{value / 2**10:.2f} KiB" if value else "0"
    return f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.2f} MiB"


def columns_of(cells: Sequence[Cell]) -> list[str]:
    """The columns that at least one cell has a figure for."""
    return [name for name, figure in COLUMNS.items() if any(figure(cell) is not None for cell in cells)]


def table_of(cells: Sequence[Cell]) -> Table:
    """The grid for a terminal; a failed cell says so in the place of its figures."""
    table = Table(box=box.SIMPLE_HEAD)
    varied = list(dict.fromkeys(name for cell in cells for name in cell.varied))
    columns = columns_of(cells) or ["result"]  # where all failed
    for name in [*varied, *(["target"] if any(cell.target for cell in cells) else []), *columns]:
        table.add_column(name, justify="right" if name in columns else "left", overflow="fold")
    for cell in cells:
        row = [str(cell.varied.get(name, "")) for name in varied]
        row += [cell.target] if any(each.target for each in cells) else []
        row += ["failed", *[""] * (len(columns) - 1)] if cell.error else [shown(name, COLUMNS[name](cell)) for name in columns]
        table.add_row(*row[: len(table.columns)])
    return table


def errors_of(cells: Sequence[Cell]) -> list[str]:
    """One line for every cell that failed."""
    lines = []
    for cell in cells:
        if cell.error:
            where = cell.label + (f" on {cell.target}" if cell.target else "")
            lines.append(f"{where}: {cell.error.splitlines()[0].removeprefix(f'{where}: ')}")
    return lines


def csv_of(cells: Sequence[Cell]) -> str:
    """The grid as CSV: bytes, seconds and fractions as plain numbers."""
    out = io.StringIO()
    varied = list(dict.fromkeys(name for cell in cells for name in cell.varied))
    writer = csv.writer(out)
    writer.writerow([*varied, "target", *COLUMNS, "error"])
    for cell in cells:
        figures = [COLUMNS[name](cell) for name in COLUMNS]
        writer.writerow(
            [
                *(cell.varied.get(name, "") for name in varied),
                cell.target,
                *("" if f is None else repr(f) if f % 1 else f"{f:.0f}" for f in figures),
                cell.error,
            ]
        )
    return out.getvalue()


def json_of(cells: Sequence[Cell]) -> str:
    """The grid as JSON, with the whole plan and audit of each cell."""
    return json.dumps([cell.to_json() for cell in cells], indent=2)
