"""Draws docs/images/stages.svg: what a device holds in each mode, from the plans, and what it sends, from the README's audited table.

python scripts/make_pictures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from zjax import bytes_per_device  # noqa: E402
from zjax.cli import load_config, planned, without_accelerator  # noqa: E402
from zjax.estimate import chip_named  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "stages.svg"
DEVICES = 8
GIB = 2**30
MODES = {
    "stage 0": ("DDP", {"zero.stage": 0}),
    "stage 1": ("ZeRO-1", {"zero.stage": 1}),
    "stage 2": ("ZeRO-2", {"zero.stage": 2}),
    "stage 3": ("ZeRO-3\nFSDP", {"zero.stage": 3}),
    "stage 3, hybrid 2 x 4": ("hybrid\n2 x 4", {"zero.stage": 3, "mesh.replica": 2}),
}
"""By the names of the README's table: what the picture calls them, and the fields that make them."""
ROLES = {"params": "parameters", "gradients": "gradients", "master": "fp32 master", "optimizer": "moments"}
COLORS = ("#4878a8", "#e49444", "#6a9f58", "#b8b0ac")
SENT, EXPOSED = "#a7c9e0", "#d1605e"


def held() -> dict[str, dict[str, int]]:
    """Bytes a device holds by role, of Llama-2-7B on 8 devices, by mode."""
    found = {}
    for mode, (_, fields) in MODES.items():
        config = load_config(str(ROOT / "configs/llama2_7b.py"), [f"--config.{name}={value}" for name, value in fields.items()])
        of = bytes_per_device(planned(config, DEVICES))
        found[mode] = {role: of[role] for role in ROLES}
    return found


def sent() -> dict[str, tuple[float, float]]:
    """(GiB a device sends in a step, the share that is exposed) on 8 H100, by mode: the README's table."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")
    ]
    return {row[1]: (float(row[4]), float(row[6].rstrip("%")) / 100) for row in rows if row[0] == "8 H100" and row[1] in MODES}


def draw(path: Path) -> None:
    """Writes the picture; the same bytes each time."""
    matplotlib.rcParams.update({"svg.hashsalt": "zjax", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9})
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    names = [name for name, _ in MODES.values()]

    by_mode = held()
    below = [0.0] * len(MODES)
    for (role, label), color in zip(ROLES.items(), COLORS, strict=True):
        sizes = [by_mode[mode][role] / GIB for mode in MODES]
        left.bar(names, sizes, bottom=below, label=label, color=color, width=0.65)
        below = [b + s for b, s in zip(below, sizes, strict=True)]
    for x, total in enumerate(below):
        left.text(x, total + 1.5, f"{total:.1f}", ha="center")
    memory = chip_named("h100").memory / GIB
    left.axhline(memory, color="black", linewidth=0.8, linestyle=":")
    left.text(len(MODES) - 0.55, memory + 1.5, "H100", ha="right")
    left.set(ylabel="GiB a device", title="held: model state", ylim=(0, 112))
    left.legend(frameon=False)

    traffic = sent()
    for x, mode in enumerate(MODES):
        wire, exposed = traffic[mode]
        right.bar(x, wire * exposed, color=EXPOSED, width=0.65, label="exposed" if x == 0 else None)
        right.bar(
            x, wire * (1 - exposed), bottom=wire * exposed, color=SENT, width=0.65, label="beside matrix products" if x == 0 else None
        )
        right.text(x, wire + 0.5, f"{wire:.1f}", ha="center")
    right.set_xticks(range(len(MODES)), names)
    right.set(ylabel="GiB a device and step", title="sent, in the program compiled for 8 H100", ylim=(0, 43))
    right.legend(frameon=False, loc="upper left", ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    figure.suptitle("Llama-2-7B in bf16 with AdamW on 8 devices", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


if __name__ == "__main__":
    without_accelerator()
    draw(PICTURE)
