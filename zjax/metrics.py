"""What a run writes for people and tools to read: metrics.jsonl, TensorBoard events, the loss curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from zjax.estimate.hardware import Chip


class MetricsWriter:
    """Appends one JSON object a step to `metrics.jsonl`, and the same numbers to TensorBoard.

    On a resume at step s, lines of later steps (a run that went on after its last save) are taken out, so that every
    step stands there once.
    """

    def __init__(self, workdir: Path, resumed_at: int):
        """Args: the directory; the step the run starts after."""
        path = workdir / "metrics.jsonl"
        self.lines = lines_until(path, resumed_at)
        self._file = path.open("a")
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=resumed_at + 1)

    def write(self, line: dict[str, Any]) -> None:
        """One step; flushed, so that a killed run leaves whole lines. JSON has no NaN or infinity: they become null."""
        line = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()}
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in line.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, float(value), line["step"])

    def column(self, name: str) -> list[float]:
        """One metric over all steps so far that have it; NaN where it was not finite."""
        return [math.nan if line[name] is None else line[name] for line in self.lines if name in line]

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        self._board.close()


def model_flops(tokens_per_second: float, flops_per_token: float, devices: int, chip: Chip | None) -> dict[str, float]:
    """`tflops_per_device`: 1e12 model operations a second and device; on a known chip `mfu`, its share of the chip's peak.

    Model FLOPs utilization (PaLM, appendix B) is taken of the dense bfloat16 peak, whatever the compute dtype.
    """
    flops = tokens_per_second * flops_per_token / devices
    return {"tflops_per_device": flops / 1e12} | ({"mfu": flops / chip.flops} if chip else {})


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a file of one JSON object a step, up to a step; the file is left with these alone."""
    lines = [line for line in _read(path) if line["step"] <= step]
    # Replaced whole: a run killed here must not lose the history.
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewritten.replace(path)
    return lines


def _read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of one JSON object a line; none where there is no file, without the half line a killed run leaves."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def draw_loss_curve(losses: list[float], unigram_entropy: float, path: Path) -> None:
    """A PNG of the loss over steps, beside the loss of a model that knows only token frequencies."""
    from matplotlib.figure import Figure  # a slow import that only the end of a run needs

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, label="loss")
    axes.axhline(unigram_entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per token", title="Training loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
