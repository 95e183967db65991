"""Writes docs/predictions.md, what `zjax.estimate` predicts beside what compiled programs say: `python scripts/make_predictions.py`.

Every cell is audited for its target (the extra `targets`), 10 to 60 s each. `--audits=FILE` keeps the audited figures as JSON
and audits only the cells that are not in it; `--only=TEXT` those whose name has the text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zjax import advise, train
from zjax.audit import AuditError
from zjax.audit.targets import parse_target
from zjax.cli import audit_run, load_config, without_accelerator
from zjax.config import TrainConfig
from zjax.estimate import Cluster, Memory, StepTime, Work, cluster_of, memory_of, step_time, traffic_per_step
from zjax.fields import ConfigError
from zjax.mesh import abstract_mesh
from zjax.models.llama import DEFAULT_NAMES
from zjax.plan import Plan

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "predictions.md"
GIB = 2**30
BOUNDS = {"state": 0.01, "peak": 0.10, "wire": 0.03}
"""Deviations of a prediction from the compiled program, as shares of that, which no cell may exceed."""
FIGURES = (*BOUNDS, "seconds")

MODELS: Mapping[str, tuple[str, str]] = {
    "1B": (
        "llama2_7b",
        "model.d_model=2048 model.n_layers=22 model.n_heads=16 model.n_kv_heads=4 model.d_ff=5632 model.max_sequence=8192",
    ),
    "7B": ("llama2_7b", ""),
    "8B": ("llama3_8b", ""),
    "13B": ("llama2_7b", "model.d_model=5120 model.n_layers=40 model.n_heads=40 model.n_kv_heads=40 model.d_ff=13824"),
    "70B": ("llama3_70b", "mesh.fsdp=-1"),
    "405B": ("llama3_70b", "mesh.fsdp=-1 model.preset=llama3_405b"),
}
"""The config of each model, and what it sets beside."""


@dataclass(frozen=True)
class Cell:
    """A model on a target in a mode: what one audit compiles."""

    model: str
    """One of `MODELS`."""
    target: str
    length: int
    """Tokens of a sequence."""
    rows: int
    """Sequences of a device and step."""
    settings: str = ""
    """Fields of the config beside those of `MODELS` and the batch, as `a.b=VALUE`, with spaces between."""
    excess: str = ""
    """Why a deviation is beyond its bound, where one is."""

    @property
    def name(self) -> str:
        """Of the cell, and of no other."""
        return " ".join([self.model, self.target, f"{self.rows} x {self.length}", self.settings]).strip()

    @property
    def devices(self) -> int:
        """Of the target."""
        return parse_target(self.target).devices

    @property
    def options(self) -> list[str]:
        """What `zjax audit` takes for the cell."""
        batch = [f"data.global_batch={self.rows * self.devices}", f"data.sequence_length={self.length}"]
        fields = [*MODELS[self.model][1].split(), *batch, *self.settings.split()]
        return [f"--config=configs/{MODELS[self.model][0]}.py", *(f"--config.{each}" for each in fields), f"--target={self.target}"]

    def config(self) -> TrainConfig:
        """The run."""
        file, *fields, _ = self.options
        return load_config(str(ROOT / file.removeprefix("--config=")), fields)


LOGITS = (
    "At the head the estimate counts the logits, their gradient and the layers' gradients, as GPU programs hold them. In this "
    "program the logits end where their gradient begins (0.24 GiB), and the layers' gradients get their room after the head (0.26 GiB)."
)
CELLS = (
    # Stage 0: gradients are reduced once a step, nothing is sharded.
    Cell("1B", "gpu:h100:1x8", 2048, 4, "zero.stage=0 remat=none"),
    Cell("1B", "tpu:v6e:4x4", 2048, 4, "zero.stage=0 remat=names accumulation.micro_batches=4"),
    Cell("7B", "gpu:b200:1x8", 2048, 4, "zero.stage=0 accumulation.micro_batches=4"),
    # Stage 1.
    Cell("7B", "gpu:h100:1x8", 2048, 1, "zero.stage=1"),
    Cell("1B", "tpu:v5e:4x4", 2048, 4, "zero.stage=1 accumulation.micro_batches=4"),
    Cell("7B", "tpu:v5p:4x4x4", 2048, 4, "zero.stage=1 remat=dots accumulation.micro_batches=4"),
    Cell("8B", "gpu:b200:1x8", 8192, 4, "zero.stage=1 remat=names accumulation.micro_batches=4"),
    Cell("13B", "gpu:h200:2x8", 2048, 1, "zero.stage=1 remat=none"),
    # Stage 2.
    Cell("1B", "gpu:h100:2x8", 8192, 1, "zero.stage=2 remat=dots"),
    Cell("7B", "gpu:h100:1x8", 2048, 1, "zero.stage=2 remat=none"),
    Cell("7B", "gpu:a100:2x8", 2048, 4, "zero.stage=2 accumulation.micro_batches=4"),
    Cell("7B", "tpu:v5p:4x4x4", 4096, 1, "zero.stage=2"),
    Cell("13B", "gpu:h200:2x8", 2048, 4, "zero.stage=2 remat=names accumulation.micro_batches=4 accumulation.mode=local"),
    # Stage 3.
    Cell("7B", "gpu:h100:1x8", 2048, 1),
    Cell("7B", "gpu:h100:1x8", 2048, 4, "remat=dots accumulation.micro_batches=4 accumulation.mode=local"),
    Cell("7B", "gpu:a100:1x8", 2048, 2, "remat=names zero.prefetch=0"),
    Cell("7B", "tpu:v5p:4x4x4", 2048, 1, "remat=none"),
    Cell("7B", "tpu:v5e:8x8", 2048, 4, "accumulation.micro_batches=4"),
    Cell("1B", "tpu:v5e:2x4", 2048, 2, "zero.prefetch=0", LOGITS),
    Cell("1B", "gpu:h100:1x8", 2048, 4, "remat=dots precision.compute=float32"),
    Cell("8B", "gpu:h100:1x8", 8192, 1),
    Cell("8B", "tpu:v6e:4x8", 2048, 1, "remat=dots"),
    Cell("13B", "gpu:h100:2x8", 2048, 1, "remat=dots"),
    Cell("13B", "tpu:v6e:8x8", 4096, 1, "remat=names zero.prefetch=0"),
    Cell("70B", "gpu:h100:8x8", 8192, 1),
    Cell("70B", "gpu:b200:4x8", 2048, 1, "remat=dots zero.prefetch=0"),
    Cell("70B", "tpu:v5p:4x4x4", 4096, 1),
    Cell("70B", "tpu:v5p:4x4x8", 8192, 4, "remat=names accumulation.micro_batches=4"),
    Cell("405B", "gpu:h100:64x8", 8192, 1),
    Cell("405B", "gpu:h200:64x8", 2048, 4, "remat=names accumulation.micro_batches=4"),
    Cell("405B", "tpu:v5p:8x8x8", 8192, 1),
    # Stage 3, kept gathered from the forward to the backward, or over all micro-batches.
    Cell("7B", "gpu:h100:2x8", 4096, 1, "zero.reshard_after_forward=False remat=names"),
    Cell("8B", "gpu:h200:1x8", 2048, 1, "zero.reshard_after_forward=False remat=none"),
    Cell("13B", "tpu:v5p:4x4x4", 2048, 4, "zero.reshard_after_forward=False accumulation.micro_batches=4"),
    Cell("8B", "gpu:a100:4x8", 2048, 4, "zero.reshard_after_backward=False accumulation.micro_batches=4"),
    Cell("7B", "tpu:v5p:4x4x4", 4096, 4, "zero.reshard_after_backward=False remat=dots accumulation.micro_batches=4"),
    # Hybrid: sharded inside a group of devices, replicated over the groups.
    Cell("7B", "gpu:h100:2x8", 2048, 4, "mesh.replica=2 accumulation.micro_batches=4"),
    Cell("7B", "tpu:v5p:4x4x4", 2048, 1, "mesh.replica=4 remat=names"),
    Cell("8B", "tpu:v5p:2x4x4", 8192, 1, "mesh.replica=2 remat=dots zero.prefetch=0"),
    Cell("70B", "gpu:h100:8x8", 2048, 4, "mesh.replica=2 remat=names accumulation.micro_batches=4"),
    Cell("13B", "gpu:a100:4x8", 2048, 1, "mesh.replica=4 zero.stage=2"),
)
"""Chosen before any was audited, so that every mode, remat policy, kind of accumulation, prefetch, length of sequence, size of
model and kind of target is met several times, beside different others."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What `zjax.estimate` says of a cell."""

    plan: Plan
    work: Work
    cluster: Cluster
    memory: Memory
    time: StepTime

    @property
    def figures(self) -> dict[str, float]:
        """`FIGURES`: bytes of a device, seconds of a step."""
        sent = traffic_per_step(self.plan)["total"]
        return dict(zip(FIGURES, (self.memory.state, self.memory.peak, sent, self.time.seconds), strict=True))


def predict(cell: Cell) -> Prediction:
    """Without compiling; on a GPU with XLA's attention, where cuDNN is not what a program is compiled with here."""
    config, target = cell.config(), parse_target(cell.target)
    cluster = cluster_of(target.chip.name, target.devices, hosts=target.shape[0] if target.platform == "gpu" else None)
    question = advise.question_of(config, cluster)
    plan = train.plan_run(config, abstract_mesh(config.mesh, target.devices))
    work = Work(
        rows=cell.rows // config.accumulation.micro_batches,
        length=cell.length,
        remat=config.remat,
        remat_names=config.remat_names or DEFAULT_NAMES.get(config.remat, ()),
        decoder=question.decoder,
        only_read=question.only_read,
        scores_in_memory=question.scores_in_memory or target.platform == "gpu",
    )
    return Prediction(plan=plan, work=work, cluster=cluster, memory=memory_of(plan, work), time=step_time(plan, work, cluster))


def audit(cell: Cell) -> dict[str, float]:
    """`FIGURES`, read from the compiled program."""
    audited = audit_run(cell.config(), cell.target)
    measured = (audited.state_bytes, audited.peak_bytes, audited.wire_bytes, audited.timeline.seconds)
    return dict(zip(FIGURES, measured, strict=True))


@dataclass(frozen=True)
class Row:
    """A line of the document."""

    cell: Cell
    predicted: Mapping[str, float]
    audited: Mapping[str, float]

    def deviation(self, figure: str) -> float:
        """Of the prediction, as a share of what is audited."""
        return self.predicted[figure] / self.audited[figure] - 1

    def shown_deviation(self, figure: str) -> str:
        """In percent, with its sign; what rounds to nothing has none."""
        text = f"{self.deviation(figure):+.1%}"
        return "+0.0%" if text == "-0.0%" else text

    def beyond(self) -> list[str]:
        """Figures that deviate by more than their bounds."""
        return [figure for figure, bound in BOUNDS.items() if abs(self.deviation(figure)) > bound]


def shown(figure: str, value: float) -> str:
    """As the document has it: bytes in GiB, seconds."""
    return f"{value:#.4g}" if figure == "seconds" else f"{value / GIB:.3f}"


def document(rows: Sequence[Row], missing: Sequence[Cell] = ()) -> str:
    """The markdown file; `missing` are cells that have not been audited."""
    titles = {"state": "state GiB", "peak": "peak GiB", "wire": "wire GiB", "seconds": "seconds"}
    head = ["model", "target", "sequences x tokens", "settings", *(titles[figure] for figure in FIGURES)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    notes: list[str] = []
    for row in rows:
        cells = [
            row.cell.model,
            row.cell.target,
            f"{row.cell.rows} x {row.cell.length}",
            f"`{row.cell.settings}`" if row.cell.settings else "",
        ]
        for figure in FIGURES:
            text = f"{shown(figure, row.predicted[figure])} / {shown(figure, row.audited[figure])} ({row.shown_deviation(figure)})"
            if figure in row.beyond():
                if row.cell.excess not in notes:
                    notes.append(row.cell.excess)
                text += f" [{notes.index(row.cell.excess) + 1}]"
            cells.append(text)
        lines.append(f"| {' | '.join(cells)} |")
    beyond = [f"{number}. {text or 'Not explained.'}" for number, text in enumerate(notes, 1)]
    left = (
        ["Chosen, and not audited yet (compiling takes a minute and more):", "", *(f"- {cell.name}" for cell in missing), ""]
        if missing
        else []
    )
    return HEAD.format(
        cells=len(rows), example="zjax audit " + " ".join(rows[0].cell.options), models=_models(), bounds=_bounds(rows)
    ) + "\n".join([*lines, "", *(["Beyond a bound:", "", *beyond, ""] if beyond else []), *left])  # fmt: skip


def _models() -> str:
    lines = ["| model | config | settings |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {model} | configs/{name}.py | {f'`{settings}`' if settings else ''} |" for model, (name, settings) in MODELS.items())])  # fmt: skip


def _bounds(rows: Sequence[Row]) -> str:
    lines = ["| figure | bound | largest deviation | of | median | beyond |", "|---|---|---|---|---|---|"]
    for figure in FIGURES:
        worst = max(rows, key=lambda row: abs(row.deviation(figure)))
        sizes = sorted(abs(row.deviation(figure)) for row in rows)
        beyond = sum(figure in row.beyond() for row in rows)
        bound = f"{BOUNDS[figure]:.0%}" if figure in BOUNDS else "none"
        lines.append(
            f"| {figure} | {bound} | {worst.shown_deviation(figure)} | {worst.cell.name} | {sizes[len(sizes) // 2]:.1%} | {beyond if figure in BOUNDS else ''} |"
        )
    return "\n".join(lines)


HEAD = """# Predictions beside compiled programs

What `zjax.estimate` (and with it `zjax advise`) predicts by arithmetic, beside what `zjax audit` reads from the program that
XLA compiles for the target: {cells} cells of model, mode and target, each predicted / audited (deviation), of one device.

- state: parameters, masters and moments that lie on the device between steps.
- peak: the most bytes at once.
- wire: bytes sent in a step, by ring algorithms.
- seconds: of a step, both by a roofline, matrix products at the chip's peak. No bound is set: the audit's figure is a
  prediction too, of the schedule in the program, without launches, contention, or what a Pallas kernel (splash attention on a
  TPU) computes. Nothing here was run on a chip.

XLA's GPU compiler plans a program for 80% of the memory that the target has. One that would need more by XLA's own count
computes values again that the step meant to keep, and waits where it would not: 405B on 512 H100 takes 1.8 times as long
as predicted, and on B200, which have the memory, 1.15 times. The estimate does not know of it; where a predicted peak comes
near 80% of a GPU's memory, audit it.

The cells were chosen before any was audited, as a spread over models, stages, remat, accumulation, prefetch, lengths and
targets; none is left out because of what it shows. Sequences are those of one device and step, of all micro-batches. What is
not set is as in the model's config: stage 3, `remat=full`, bf16 with float32 masters, AdamW, one micro-batch.

A row is the audit of its model's config, with the fields of both tables and the batch. The first one:

```bash
{example}
```

{models}

`scripts/make_predictions.py` writes this file; a test holds its predictions to what `zjax.estimate` says now, and its
deviations to the bounds.

Not covered: `tensor` axes, the partitioner engine, offloading, `remat_every`, optimizers other than AdamW, models that are no
decoders (their activations are not predicted), several TPU slices, and cuDNN's attention, which was not installed: GPU
programs here, and their predictions, have XLA's, a block of queries at a time. A mode that does not fit a TPU does not compile
and is no cell.

{bounds}

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Audits, and writes the document."""
    parser = argparse.ArgumentParser(description="Write docs/predictions.md.")
    parser.add_argument("--audits", type=Path, metavar="FILE", help="JSON of audited figures, read and added to")
    parser.add_argument("--only", default="", metavar="TEXT", help="audit cells whose name has the text, and write no document")
    parser.add_argument("--no-audits", action="store_true", help="write the document with what is in --audits, and list the other cells")
    arguments = parser.parse_args(argv)
    without_accelerator()
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"):
        parser.error("cuDNN is installed: GPU programs would have its attention, and the document says they have not")
    known = json.loads(arguments.audits.read_text()) if arguments.audits and arguments.audits.exists() else {}
    failed = False
    for cell in CELLS:
        if arguments.only not in cell.name or (arguments.no_audits and cell.name not in known):
            continue
        if cell.name not in known:
            begun = time.monotonic()
            try:
                known[cell.name] = audit(cell)
            except (AuditError, ConfigError, ValueError) as error:
                failed = True
                print(f"{cell.name}: {error}", file=sys.stderr)
                continue
            if arguments.audits:
                arguments.audits.write_text(json.dumps(known, indent=1))
            print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr, end=" ")
        row = Row(cell, predict(cell).figures, known[cell.name])
        print(cell.name, " ".join(f"{figure} {row.deviation(figure):+.1%}" for figure in FIGURES), flush=True)
    if failed or arguments.only:
        return int(failed)
    rows = [Row(cell, predict(cell).figures, known[cell.name]) for cell in CELLS if cell.name in known]
    DOCUMENT.write_text(document(rows, [cell for cell in CELLS if cell.name not in known]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
