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
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; } th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
th { vertical-align: bottom; } .figure { text-align: right; } td.figure { white-space: nowrap; } .error { color: #a00; } .error pre { white-space: pre-wrap; }
svg { max-width: 100%; height: auto; } details { margin: .5rem 0; } summary { cursor: pointer; }
code { background: #f4f4f4; padding: 0 .2rem; overflow-wrap: anywhere; }
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
    if good:
        parts += ["<h2>Placement, leaf by leaf</h2>", *map(_placement, good)]
    return "\n".join([*parts, "</body></html>"])


def _name(cell: Cell) -> str:
    return f"{cell.label} on {cell.target}" if cell.target else cell.label


def _table(cells: Sequence[Cell]) -> str:
    columns = columns_of(cells)
    varied = list(dict.fromkeys(name for cell in cells for name in cell.varied))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in [*varied, "target"])
    head += "".join(f"<th class='figure'>{html.escape(name)}</th>" for name in columns)
    rows = []
    for cell in cells:
        config = "".join(f"<td>{html.escape(str(text))}</td>" for text in [*(cell.varied.get(name, "") for name in varied), cell.target])
        figures = "".join(f"<td class='figure'>{shown(name, COLUMNS[name](cell))}</td>" for name in columns)
        if cell.error:
            figures = f"<td class='error' colspan='{len(columns) or 1}'>{_error(cell.error)}</td>"
        rows.append(f"<tr>{config}{figures}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _error(error: str) -> str:
    """The first line; a compiler's whole report only if it is asked for."""
    first, _, rest = html.escape(error).partition("\n")
    return f"<details><summary>{first}</summary><pre>{rest}</pre></details>" if rest else first


def _bars(cells: Sequence[Cell], stacks: dict[str, list[float]], label: str) -> Figure:
    figure = Figure(figsize=(10, 1.6 + 0.4 * len(cells)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(cells)
    for name, values in stacks.items():
        if any(values):
            axes.barh(range(len(cells)), values, left=left, label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(cells)), [_name(cell) for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def _legend(figure: Figure) -> Figure:
    """The legend above the bars, where it hides none."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    return figure


def _memory_plot(cells: Sequence[Cell]) -> Figure:
    stacks = {part: [cell.plan["per_device"][part] / 2**30 if cell.plan else 0.0 for cell in cells] for part in _MEMORY}
    stacks["activations and temporaries"] = [
        max(0.0, cell.audit["peak_bytes"] - cell.plan["per_device"]["model_state"]) / 2**30 if cell.audit and cell.plan else 0.0
        for cell in cells
    ]
    figure = _bars(cells, stacks, "GiB a device")
    limits = [(row, parse_target(cell.target).chip.memory / 2**30) for row, cell in enumerate(cells) if cell.target]
    limits = [(row, limit) for row, limit in limits if not math.isinf(limit)]
    if limits:
        rows, places = zip(*limits, strict=True)
        starts, ends = [row - 0.45 for row in rows], [row + 0.45 for row in rows]
        figure.axes[0].vlines(places, starts, ends, color="black", linewidth=2.5, label="memory of the chip")
    return _legend(figure)


def _traffic_plot(cells: Sequence[Cell]) -> Figure:
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

    def sent(cell: Cell, kind: str) -> float:
        if cell.audit:
            return cell.audit["collectives"].get(kind, {"bytes": 0})["bytes"] / 2**30
        return cell.plan["traffic_per_step"].get(kind.replace("-", "_"), 0) / 2**30 if cell.plan else 0.0

    return _legend(_bars(cells, {kind: [sent(cell, kind) for cell in cells] for kind in kinds}, "GiB a device sends in a step"))


def _time_plot(cells: Sequence[Cell]) -> Figure:
    waits = [cell.audit["exposed_seconds"] * 1e3 if cell.audit else 0.0 for cell in cells]
    work = [cell.audit["predicted_step_seconds"] * 1e3 - wait if cell.audit else 0.0 for cell, wait in zip(cells, waits, strict=True)]
    return _legend(_bars(cells, {"computing": work, "waiting for transfers": waits}, "predicted ms a step"))


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _findings(cell: Cell) -> str:
    assert cell.audit is not None
    found = "".join(
        f"<li><b>{html.escape(f['kind'])}</b> ({shown('bytes', f['bytes'])}) {html.escape(f['text'])} <code>{html.escape(f['op'])}</code></li>"
        for f in cell.audit["findings"]
    )
    return f"<h3>{html.escape(_name(cell))}</h3>" + (f"<ul>{found}</ul>" if found else "<p>none</p>")


def _placement(cell: Cell) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(leaf['path'])}</td><td>{html.escape(leaf['shape'])}</td><td>{html.escape(leaf['spec'])}</td>"
        f"<td class='figure'>{leaf['bytes']:,}</td><td>{html.escape(leaf['reason'])}</td></tr>"
        for leaf in cell.leaves
    )
    head = "<tr><th>leaf</th><th>shape</th><th>at rest</th><th class='figure'>bytes a device</th><th>why not sharded</th></tr>"
    return f"<details><summary>{html.escape(_name(cell))}</summary><table>{head}{rows}</table></details>"
