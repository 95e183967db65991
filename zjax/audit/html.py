"""`report.html` of a comparison: one file with its plots inside, to be read without the code."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from zjax.audit.compare import COLUMNS, Cell, columns_of, shown
from zjax.audit.targets import parse_target

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; } th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } .error { color: #a00; text-align: left; } svg { max-width: 100%; height: auto; }
details { margin: .5rem 0; } summary { cursor: pointer; } code { background: #f4f4f4; padding: 0 .2rem; }
"""

_MEMORY = ("params", "gradients", "master", "optimizer", "secondary")


def report_html(title: str, cells: Sequence[Cell]) -> str:
    """The report: the table, memory against the chip's limit, traffic by collective, exposed time, findings, placement."""
    good = [cell for cell in cells if not cell.error]
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        "<p>Every figure is for one device and one optimizer step. <b>model state</b> and <b>planned wire</b> are arithmetic on the plan; the "
        "others are read from the program that XLA compiled for the target. Times are predictions from a roofline, not measurements.</p>",
        _table(cells),
    ]
    if good:
        parts += ["<h2>Memory</h2>", _svg(_memory_plot(good)), "<h2>Traffic</h2>", _svg(_traffic_plot(good))]
    audited = [cell for cell in good if cell.audit]
    if audited:
        parts += ["<h2>Waiting for transfers</h2>", _svg(_time_plot(audited)), "<h2>Findings</h2>", *map(_findings, audited)]
    parts += ["<h2>Placement, leaf by leaf</h2>", *map(_placement, good), "</body></html>"]
    return "\n".join(parts)


def _name(cell: Cell) -> str:
    return f"{cell.label} on {cell.target}" if cell.target else cell.label


def _table(cells: Sequence[Cell]) -> str:
    columns = columns_of(cells)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["config", *columns])
    rows = []
    for cell in cells:
        figures = "".join(f"<td>{shown(name, COLUMNS[name](cell))}</td>" for name in columns)
        if cell.error:
            figures = f"<td class='error' colspan='{len(columns) or 1}'>{html.escape(cell.error)}</td>"
        rows.append(f"<tr><td>{html.escape(_name(cell))}</td>{figures}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _bars(cells: Sequence[Cell], stacks: dict[str, list[float]], label: str) -> Figure:
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(cells)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(cells)
    for name, values in stacks.items():
        if any(values):
            axes.barh([_name(cell) for cell in cells], values, left=left, label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def _memory_plot(cells: Sequence[Cell]) -> Figure:
    stacks = {part: [cell.plan["per_device"][part] / 2**30 if cell.plan else 0.0 for cell in cells] for part in _MEMORY}
    stacks["activations and temporaries"] = [
        max(0.0, cell.audit["peak_bytes"] - cell.plan["per_device"]["model_state"]) / 2**30 if cell.audit and cell.plan else 0.0
        for cell in cells
    ]
    figure = _bars(cells, stacks, "GiB a device")
    axes = figure.axes[0]
    for name, limit in {cell.target: parse_target(cell.target).chip.memory for cell in cells if cell.target}.items():
        if not math.isinf(limit):
            axes.axvline(limit / 2**30, color="black", linestyle="--", label=f"memory of {name}")
    axes.legend(loc="best", fontsize=8)
    return figure


def _traffic_plot(cells: Sequence[Cell]) -> Figure:
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

    def sent(cell: Cell, kind: str) -> float:
        if cell.audit:
            return cell.audit["collectives"].get(kind, {"bytes": 0})["bytes"] / 2**30
        return cell.plan["traffic_per_step"].get(kind.replace("-", "_"), 0) / 2**30 if cell.plan else 0.0

    figure = _bars(cells, {kind: [sent(cell, kind) for cell in cells] for kind in kinds}, "GiB a device sends in a step")
    if figure.axes[0].patches:
        figure.axes[0].legend(loc="best", fontsize=8)
    return figure


def _time_plot(cells: Sequence[Cell]) -> Figure:
    waits = [cell.audit["exposed_seconds"] * 1e3 if cell.audit else 0.0 for cell in cells]
    work = [cell.audit["predicted_step_seconds"] * 1e3 - wait if cell.audit else 0.0 for cell, wait in zip(cells, waits, strict=True)]
    figure = _bars(cells, {"computing": work, "waiting for transfers": waits}, "predicted ms a step")
    figure.axes[0].legend(loc="best", fontsize=8)
    return figure


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _findings(cell: Cell) -> str:
    assert cell.audit is not None
    found = "".join(
        f"<li><b>{html.escape(f['kind'])}</b> {html.escape(f['text'])} <code>{html.escape(f['op'])}</code></li>"
        for f in cell.audit["findings"]
    )
    return f"<p>{html.escape(_name(cell))}: {'none' if not found else ''}</p>" + (f"<ul>{found}</ul>" if found else "")


def _placement(cell: Cell) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(leaf['path'])}</td><td>{html.escape(leaf['shape'])}</td><td>{html.escape(leaf['spec'])}</td>"
        f"<td>{leaf['bytes']:,}</td><td>{html.escape(leaf['reason'])}</td></tr>"
        for leaf in cell.leaves
    )
    head = "<tr><th>leaf</th><th>shape</th><th>at rest</th><th>bytes a device</th><th>why not sharded</th></tr>"
    return f"<details><summary>{html.escape(_name(cell))}</summary><table>{head}{rows}</table></details>"
