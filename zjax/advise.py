"""`zjax advise`: which mode to run a model with on some hardware, why, and what would change the answer."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import pprint
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from zjax import train
from zjax.audit import Audit
from zjax.config import TrainConfig
from zjax.console import output
from zjax.estimate.advice import TIE, Advice, Candidate, Question, advise, parameters_of, report
from zjax.estimate.cluster import Cluster, cluster_of
from zjax.estimate.decoder import Decoder
from zjax.estimate.explain import changes, reasons
from zjax.estimate.memory import memory_of
from zjax.estimate.timing import step_time
from zjax.estimate.traffic import traffic_per_step
from zjax.fields import ConfigError, from_dict, nearest
from zjax.mesh import abstract_mesh
from zjax.models import llama

EFFICIENCY = 0.5
"""Share of the peak that matrix products reach, by default; published training runs report 0.35 to 0.65 MFU."""
DEFAULT_SEQUENCE = 8192
GIB = 2**30


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `zjax advise`, but for `--config` and `--json`."""
    command.add_argument(
        "--model",
        metavar="M",
        help=f"a preset ({', '.join(llama.PRESETS)}) or a number of parameters (13e9, 13B: a decoder of about that size)",
    )
    command.add_argument(
        "--hardware", required=True, metavar="CHIP", help="h100, h100-80g, v5p, ...; several, with commas between, are compared"
    )
    command.add_argument("--devices", required=True, type=int, metavar="N", help="GPUs or TPU chips")
    command.add_argument("--hosts", type=int, metavar="N", help="hosts of GPUs, or TPU slices (default: hosts of 8 GPUs, one slice)")
    command.add_argument(
        "--sequence", type=int, metavar="T", help=f"tokens a sequence (default: the model's longest, at most {DEFAULT_SEQUENCE})"
    )
    command.add_argument("--global-batch", type=int, metavar="B", help="sequences a step (default: one a device)")
    command.add_argument(
        "--link-inside", metavar="SPEED", help="of NVLink or one ICI link, one direction: 450GB or 3600Gb (bytes or bits a second)"
    )
    command.add_argument("--link-between", metavar="SPEED", help="a device's share of the network between hosts or slices, likewise: 200Gb")
    command.add_argument(
        "--efficiency",
        type=float,
        default=EFFICIENCY,
        metavar="E",
        help="share of the peak that matrix products reach (default %(default)s)",
    )
    command.add_argument(
        "--price", metavar="P", help="dollars a device and hour, one for each --hardware: prints the cost a million tokens"
    )
    command.add_argument("--verify", type=int, default=0, metavar="N", help="audit the best N and print prediction beside compiled truth")
    command.add_argument("--write", metavar="FILE", help="write the config to run")


def run(
    arguments: argparse.Namespace, load: Callable[[], TrainConfig | None], with_overrides: Callable[[TrainConfig], TrainConfig], audit_run: Callable[..., Audit]
) -> int:  # fmt: skip
    """Answers; the exit status is 0 if something fits.

    Args:
      arguments: those of the command line.
      load: the config of `--config`, or None.
      with_overrides: applies `--config.a.b=V`.
      audit_run: audits a config on a target (`zjax.cli.audit_run`).
    """
    chips = arguments.hardware.split(",")
    prices = _prices(arguments.price, len(chips))
    config = load()
    if (config is None) == (arguments.model is None):
        raise ConfigError("advise: name a model, --model=llama3_70b or --model=13e9, or a config to start from, --config=FILE")
    config = with_overrides(_asked(config or model_config(arguments.model), arguments))
    clusters = [_cluster(chip, arguments) for chip in chips]
    answers = [advise(question_of(config, cluster)) for cluster in clusters]
    best = min(
        (index for index, advice in enumerate(answers) if advice.first),
        key=lambda index: _cost(answers[index], prices[index] if prices else None),
        default=None,
    )
    verified = verify(answers[best], arguments.verify, audit_run) if arguments.verify and best is not None else []
    if arguments.json:
        reports = [report(advice, prices[index] if prices else None) for index, advice in enumerate(answers)]
        for each, advice in zip(reports, answers, strict=True):
            each |= {"reasons": reasons(advice), "changes": changes(advice)}
        agreement = dict(zip(("alike", "pairs"), rank_agreement(verified), strict=True)) if verified else None
        print(json.dumps({"hardware": reports, "best": best, "verified": [row.to_json() for row in verified], "rank_agreement": agreement}))
    else:
        console = output(180)
        for index, advice in enumerate(answers):
            _show(console, advice, prices[index] if prices else None)
        if len(answers) > 1:
            _show_chips(console, answers, prices)
        if verified:
            _show_verified(console, verified)
    if best is None:
        return 1
    if arguments.write:
        first = answers[best].first
        assert first is not None
        _write(Path(arguments.write), first, answers[best])
        print(f"wrote {arguments.write}", file=sys.stderr)
    return 0


def model_config(model: str) -> TrainConfig:
    """A bf16 AdamW run of a preset, or of a Llama-2-shaped decoder of about so many parameters (`13e9`, `13B`)."""
    if model in llama.PRESETS:
        return from_dict(TrainConfig, {"steps": 10_000, "model": {"preset": model}})
    number = re.fullmatch(r"([\d.]+(?:e\d+)?)([mMbBtT]?)", model)
    if not number:
        raise ConfigError(
            f"--model={model}: {nearest(model, llama.PRESETS)}must be one of {', '.join(llama.PRESETS)}, or a number of parameters (13e9, 13B)"
        )
    count = float(number.group(1)) * {"": 1, "m": 1e6, "b": 1e9, "t": 1e12}[number.group(2).lower()]
    return from_dict(TrainConfig, {"steps": 10_000, "model": {"preset": "llama2_7b", **_sizes_of(model, count)}})


def _sizes_of(model: str, count: float) -> dict[str, int]:
    """Sizes of a decoder of about `count` parameters: heads of 128, as many layers as heads where they come to it, F = 8/3 D."""
    vocabulary = llama.PRESETS["llama2_7b"].vocab_size

    def sized(heads: int) -> tuple[int, int, int]:
        width = 128 * heads
        hidden = 256 * round(8 * width / 3 / 256)
        layer = 4 * width * width + 3 * width * hidden
        return width, hidden, max(1, round((count - 2 * vocabulary * width) / layer))

    heads = next((heads for heads in range(1, 1000) if sized(heads)[2] <= heads), None)
    if heads is None or count < 1e7:
        meant = f"; did you mean {model}B?" if model.isdecimal() and count < 1e4 else ""
        raise ConfigError(
            f"--model={model}: decoders of 1e7 to 1e14 parameters can be made up{meant}; name a preset, or a config with --config=FILE"
        )
    width, hidden, layers = sized(heads)
    return {"d_model": width, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads, "d_ff": hidden, "max_sequence": 2**20}


def question_of(config: TrainConfig, cluster: Cluster) -> Question:
    """The question of a config on a cluster. Attention is taken to be the library's kernel, unless the config names XLA's."""
    sizes, mesh = llama.from_config(config.model), dataclasses.replace(config.mesh, replica=1, fsdp=-1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*one device to shard over")  # only its recipe is used
        recipe = train.plan_run(dataclasses.replace(config, mesh=mesh), abstract_mesh(mesh, cluster.devices)).recipe
    shared = {field.name for field in dataclasses.fields(Decoder)} & {field.name for field in dataclasses.fields(sizes)}
    return Question(
        config=config,
        recipe=recipe,
        cluster=cluster,
        decoder=Decoder(tensor=config.mesh.tensor, **{name: getattr(sizes, name) for name in shared}),
        only_read=() if sizes.tied else ("embed",),
        scores_in_memory=sizes.attention in ("plain", "chunked"),
    )


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Prediction beside compiled truth: (predicted, audited), bytes of a device, seconds of a step."""

    mode: str
    state: tuple[float, float]
    peak: tuple[float, float]
    wire: tuple[float, float]
    seconds: tuple[float, float]
    fits: bool
    """Whether the compiled program does."""
    findings: int

    def to_json(self) -> dict[str, Any]:
        """As in `advise --json`."""
        pairs = {
            name: dict(zip(("predicted", "audited"), getattr(self, name), strict=True)) for name in ("state", "peak", "wire", "seconds")
        }
        return {"mode": self.mode, **pairs, "fits": self.fits, "findings": self.findings}


def verify(advice: Advice, count: int, audit_run: Callable[..., Audit]) -> list[Verified]:
    """Audits the best candidates, by the time model's own chip: the catalogue's with the links and efficiency asked for."""
    cluster = advice.question.cluster
    if cluster.target is None:
        raise ConfigError(f"--verify: several slices of {cluster.chip.name} are no audit target; leave --hosts out, or --verify")
    chip = dataclasses.replace(cluster.chip, flops=cluster.flops)
    rows = []
    for candidate in advice.ranked[:count]:
        # Where cuDNN is not installed a GPU program is compiled with XLA's attention: that is what is predicted here, too.
        scores = advice.question.scores_in_memory or (cluster.chip.platform == "gpu" and not _cudnn_is_here())
        work = dataclasses.replace(candidate.work, scores_in_memory=scores)
        audited = audit_run(candidate.config, cluster.target, chip=chip)
        rows.append(
            Verified(
                mode=candidate.mode,
                state=(candidate.memory.state, audited.state_bytes),
                peak=(memory_of(candidate.plan, work).peak, audited.peak_bytes),
                wire=(traffic_per_step(candidate.plan)["total"], audited.wire_bytes),
                seconds=(step_time(candidate.plan, work, cluster).seconds, audited.timeline.seconds),
                fits=audited.peak_bytes <= cluster.chip.memory,
                findings=len(audited.findings),
            )
        )
    return rows


def rank_agreement(rows: Sequence[Verified]) -> tuple[int, int]:
    """(pairs that prediction and audit order alike, pairs); a pair whose predictions tie counts where the audits do, too."""
    alike = 0
    pairs = list(itertools.combinations(rows, 2))
    for one, other in pairs:
        predicted, audited = (_order(one.seconds[i], other.seconds[i]) for i in (0, 1))
        alike += predicted == audited
    return alike, len(pairs)


def _order(one: float, other: float) -> int:
    return 0 if abs(one / other - 1) < TIE else 1 if one > other else -1


def _cudnn_is_here() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False


def _asked(config: TrainConfig, arguments: argparse.Namespace) -> TrainConfig:
    """The config with the batch that is asked for."""
    started = arguments.model is None
    sequence = arguments.sequence or (
        config.data.sequence_length if started else min(llama.from_config(config.model).max_sequence, DEFAULT_SEQUENCE)
    )
    batch = arguments.global_batch or (config.data.global_batch if started else max(arguments.devices, 1))
    for name, value in (("--devices", arguments.devices), ("--sequence", arguments.sequence), ("--global-batch", arguments.global_batch)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be positive")
    data = dataclasses.replace(config.data, sequence_length=sequence, global_batch=batch)
    return dataclasses.replace(config, data=data)


def _cluster(chip: str, arguments: argparse.Namespace) -> Cluster:
    return cluster_of(
        chip.strip(),
        arguments.devices,
        hosts=arguments.hosts,
        link_inside=_speed("--link-inside", arguments.link_inside),
        link_between=_speed("--link-between", arguments.link_between),
        efficiency=arguments.efficiency,
    )


def _speed(option: str, text: str | None) -> float | None:
    """Bytes a second of `200Gb` (bits) or `25GB` (bytes)."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*)\s*([MGT])([bB])(?:/?p?s)?", text.strip())
    if not found:
        raise ConfigError(f"{option}={text}: write it as 25GB or 200Gb (bytes or bits a second and device)")
    number, size, unit = found.groups()
    return float(number) * {"M": 1e6, "G": 1e9, "T": 1e12}[size] / (8 if unit == "b" else 1)


def _prices(text: str | None, count: int) -> list[float] | None:
    if text is None:
        return None
    try:
        prices = [float(each) for each in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) != count or not all(price > 0 for price in prices):
        raise ConfigError(f"--price={text}: needs a positive number of dollars a device and hour for each of the {count} --hardware")
    return prices


def _cost(advice: Advice, price: float | None) -> float:
    assert advice.first is not None
    return advice.dollars_per_million_tokens(advice.first, price) if price else advice.first.time.seconds


def _show(console: Console, advice: Advice, price: float | None) -> None:
    question = advice.question
    chip, cluster, data = question.cluster.chip, question.cluster, question.config.data
    one = advice.first or advice.too_large[0]
    say = lambda text: console.print(text, highlight=False, markup=False)  # noqa: E731
    where = f"{cluster.groups} x {cluster.inside} {chip.name}" if cluster.groups > 1 else f"{cluster.devices} {chip.name}"
    say(
        f"{parameters_of(one.plan):,} parameters on {where}, {data.global_batch} sequence{'s' if data.global_batch > 1 else ''} of {data.sequence_length} a step; "
        f"links {chip.link_inside / 1e9:g} GB/s inside, {chip.link_between / 1e9:g} GB/s between; matrix products at {cluster.efficiency:.0%} of the peak"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("mode", "peak GiB", "state", "s a step", "exposed", "MFU"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for candidate in advice.families()[:12]:
        memory = candidate.memory
        figures = ["does not fit", "", ""]
        if candidate in advice.ranked:
            figures = [f"{candidate.time.seconds:.3g}", f"{candidate.time.exposed:.3g}", f"{advice.mfu(candidate):.1%}"]
        table.add_row(candidate.mode, f"{memory.peak / GIB:.1f}", f"{memory.state / GIB:.1f}", *figures)
    console.print(table)
    for text in reasons(advice):
        say(text)
    if price and advice.first:
        say(f"Cost: ${advice.dollars_per_million_tokens(advice.first, price):.3g} a million tokens at ${price:g} a device and hour.")
    say("What would change the answer:")
    for text in changes(advice):
        say(f"- {text}")
    say("Not counted: " + "; ".join(one.memory.not_covered) + ". Times are predictions, not measurements.\n")


def _show_chips(console: Console, answers: Sequence[Advice], prices: Sequence[float] | None) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("hardware", "devices", "mode", "s a step", "$ a million tokens"):
        table.add_column(column)
    for index, advice in enumerate(answers):
        first = advice.first
        cells = [advice.question.cluster.chip.name, str(advice.question.cluster.devices)]
        cost = f"{advice.dollars_per_million_tokens(first, prices[index]):.3g}" if prices and first else ""
        table.add_row(*cells, first.mode if first else "nothing fits", f"{first.time.seconds:.3g}" if first else "", cost)
    console.print(table)


def _show_verified(console: Console, rows: Sequence[Verified]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="predicted / audited", title_justify="left")
    for column in ("mode", "state GiB", "peak GiB", "wire GiB", "s a step", "fits", "findings"):
        table.add_column(column)
    for row in rows:
        sizes = [f"{predicted / GIB:.2f} / {audited / GIB:.2f}" for predicted, audited in (row.state, row.peak, row.wire)]
        seconds = f"{row.seconds[0]:.3g} / {row.seconds[1]:.3g}"
        table.add_row(row.mode, *sizes, seconds, "yes" if row.fits else "no", str(row.findings))
    console.print(table)
    alike, pairs = rank_agreement(rows)
    if pairs:
        console.print(f"rank agreement: {alike} of {pairs} pairs of modes are ordered alike", highlight=False)
    if not _cudnn_is_here() and any(row for row in rows):
        console.print(
            "Audits of GPUs are compiled with XLA's attention where cuDNN is not installed; both columns are of that.", highlight=False
        )


def _write(path: Path, candidate: Candidate, advice: Advice) -> None:
    """A config file that runs the candidate: what differs from the defaults."""
    cluster = advice.question.cluster
    defaults, values = dataclasses.asdict(TrainConfig()), dataclasses.asdict(candidate.config)
    kept = _differing(values, defaults)
    body = pprint.pformat(kept, width=100, sort_dicts=False)
    audit = f"\n    zjax audit --config={path} --target={cluster.target}" if cluster.target else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'''"""{candidate.mode}.

    zjax plan  --config={path}{audit}
    zjax train --config={path} --config.data.path=DIR

Advised by `zjax advise` for {cluster.groups} x {cluster.inside} {cluster.chip.name}: {parameters_of(candidate.plan):,} parameters, a predicted
{candidate.time.seconds:.3g} s a step and {candidate.memory.peak / GIB:.1f} GiB a device at its peak.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
{_indented(body, 8)}
    )
'''
    )


def _differing(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(defaults.get(name), dict) and name != "schedule_arguments":
            inner = _differing(value, defaults[name])
            kept |= {name: inner} if inner else {}
        elif value != defaults.get(name):
            kept[name] = value
    return kept


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())
