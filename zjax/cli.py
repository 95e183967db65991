"""The `zjax` command, from train to doctor. Other tools read its options and JSON; keep them stable."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import glob
import json
import math
import os
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import ml_collections

from zjax import advise, distributed, doctor, ds_config, train
from zjax.audit import Audit, AuditError, audit_recipe
from zjax.audit.targets import parse_target
from zjax.checkpoint_cli import add_commands
from zjax.config import TrainConfig, Unit
from zjax.console import output
from zjax.describe import bytes_per_device, spec_text
from zjax.estimate import Chip, traffic_by_link, traffic_per_step
from zjax.fields import ConfigError, from_dict
from zjax.guard import NonFiniteError
from zjax.interop.deepspeed import apply, outcomes
from zjax.mesh import abstract_mesh
from zjax.models.llama import UNITS
from zjax.plan import Plan
from zjax.profile import parse_steps
from zjax.tree import matches, named_leaves
from zjax_command import quiet_stderr

SIMULATED_DEVICES = 8

BATCH_KEYS = {"data.global_batch": "train_batch_size", "accumulation.micro_batches": "gradient_accumulation_steps"}
"""Fields whose override takes the place of a DeepSpeed file's batch size, so that the others follow from it or contradict it."""


OUT_OF_MEMORY = (
    "Shard more (zero.stage=3, a larger mesh.fsdp), compute more again (remat='full'), or give a device fewer sequences at a time "
    "(accumulation.micro_batches); `zjax audit` tells for a target what a step holds"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 only when the work was done."""
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    arguments, rest = parser.parse_known_args(argv)
    try:
        if (count := getattr(arguments, "devices", None)) is not None and count < 1:
            raise ConfigError(f"--devices={count}: must be positive")
        return arguments.run(arguments, rest)
    except (ConfigError, ValueError, AuditError, distributed.DistributedError) as error:
        print(f"zjax {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except NonFiniteError as error:
        print(f"zjax {arguments.command}: stopped, and saved: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"zjax {arguments.command}: error: out of device memory: {str(error).splitlines()[0]}\n{OUT_OF_MEMORY}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` for instance, has gone: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"zjax {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zjax",
        description="ZeRO and FSDP sharding for JAX: plan it, audit it, train with it.",
        epilog="`zjax COMMAND --help` tells a command's options. Exit status: 0 the work was done; 1 it was not, or what was looked for was found "
        "(--strict, checkpoint verify and diff); 2 a wrong option, config, corpus or checkpoint; 128 + N ended by signal N, after a save.",
    )
    parser.add_argument("--version", action="version", version=f"zjax {version('zjax')}, jax {jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = {
        "train": (_train, "train a model from a config", "Train a model from a config; resumes where its workdir left off."),
        "plan": (_plan, "per-leaf placement, bytes per device, traffic per step", "Show what a config places where. Nothing is allocated, no device is needed."),
        "audit": (_audit, "what the compiled program holds, sends and waits for", "Compile the step for a target, which need not be here, and report what each device holds, sends and waits for."),
        "compare": (_compare, "a grid of configs side by side", "Vary fields of a config and show plan figures, and audited ones with --target, side by side."),
        "advise": (_advise, "which mode to run, why, and what would change that", "Plan and estimate every mode of a model on some hardware, rank those that fit by predicted step time, and say why."),
        "doctor": (_doctor, "devices, processes, links, versions, memory", "Print what a run here would have: versions, processes, devices, memory, and the bandwidth of an all-gather on each axis."),
    }  # fmt: skip
    made = {}
    for name, (run, short, long) in about.items():
        command = made[name] = commands.add_parser(name, help=short, description=long)
        command.add_argument(
            "--config",
            required=name not in ("advise", "doctor"),
            metavar="FILE",
            help="a Python file with get_config(); set any field with --config.a.b=VALUE",
        )
        command.epilog = "Override any field of the config with --config.a.b=VALUE, for instance --config.zero.stage=2."
        command.set_defaults(run=run)
        if name != "train":
            command.add_argument("--json", action="store_true", help="print JSON instead of text")
    here = f"devices to use (of each process, if there are several); without an accelerator they are simulated on the CPU (default {SIMULATED_DEVICES})"
    thought = (
        f"devices to plan for, none of which need be here (default: as many as the mesh asks for, {SIMULATED_DEVICES} for a degree of -1)"
    )
    for name, devices in (("train", here), ("doctor", here), ("plan", thought), ("compare", thought)):
        made[name].add_argument("--devices", type=int, metavar="N", help=devices)
    for name in ("train", "plan"):
        made[name].add_argument(
            "--deepspeed",
            metavar="JSON",
            help="a DeepSpeed config, which overrides the config's zero, precision, optimizer, clip and batch",
        )
    add_commands(commands, without_accelerator)
    imported = commands.add_parser(
        "import", help="weights from safetensors or .npz", description="Make a run's first checkpoint, step 0, from weights; `zjax train` goes on from it."
    )  # fmt: skip
    imported.add_argument("source", metavar="SOURCE", help="a folder of LlamaForCausalLM in Hugging Face's layout, or safetensors or .npz in zjax's names")  # fmt: skip
    imported.add_argument("--config", required=True, metavar="FILE", help="the run's config; set any field with --config.a.b=VALUE")
    imported.add_argument("--workdir", metavar="DIR", help="the run's directory (default runs/NAME, after the config)")
    imported.add_argument("--devices", type=int, metavar="N", help="devices to use")
    imported.set_defaults(run=_import)
    for name in ("train", "doctor"):
        made[name].add_argument(
            "--coordinator", metavar="HOST:PORT", help="where process 0 of several can be reached; SLURM, Open MPI and TPU pods tell"
        )
        made[name].add_argument("--processes", type=int, metavar="N", help="how many processes there are")
        made[name].add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")
    made["plan"].add_argument("--explain", action="store_true", help="show what becomes of each key of the --deepspeed file, and no plan")
    made["train"].add_argument("--workdir", metavar="DIR", help="where metrics and checkpoints go (default runs/NAME, after the config)")
    made["train"].add_argument(
        "--profile", metavar="STEPS", help="trace these steps, 10 or 10:12, into DIR/profile (XProf, TensorBoard, Perfetto)"
    )
    targets = "cpu:8, gpu:h100:1x8 (hosts x GPUs a host) or tpu:v5p:4x4x4"
    made["audit"].add_argument("--target", required=True, metavar="T", help=targets)
    for name in ("audit", "compare"):
        made[name].add_argument(
            "--no-xla-flags", action="store_true", help="compile with the compiler's own defaults instead of zjax.xla_flags"
        )
    made["audit"].add_argument("--strict", action="store_true", help="exit with status 1 if there is any finding")
    made["compare"].add_argument(
        "--target", action="append", default=[], metavar="T", help=f"audit every config on this target too; repeatable: {targets}"
    )
    made["compare"].add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="a field and its values, for instance zero.stage=0,1,2,3; repeatable",
    )
    made["compare"].add_argument("--out", metavar="DIR", help="write compare.csv, compare.json and report.html there")
    advise.add_arguments(made["advise"])
    for name in ("audit", "compare"):
        made[name].add_argument("--keep-hlo", metavar="DIR", help="save the compiled programs' text there")
    return parser


def load_config(path: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a file's `get_config()` with `--config.a.b=VALUE` overrides applied; ConfigError for any mistake."""
    if not Path(path).is_file():
        near = difflib.get_close_matches(path, [str(p) for p in Path(path).parent.glob("*.py")] if Path(path).parent.is_dir() else [], n=1)
        raise ConfigError(f"--config={path}: no such file" + (f"; did you mean {near[0]}?" if near else ""))
    sys.path.insert(0, str(Path(path).parent))  # as python does for a script: a config may build on one beside it
    try:
        get_config = runpy.run_path(path).get("get_config")
        if not callable(get_config):
            raise ConfigError(f"--config={path}: the file has no get_config() function")
        values = get_config()
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"--config={path}: {error.msg} ({Path(error.filename or path).name}, line {error.lineno})") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        raise ConfigError(f"--config={path}: {type(error).__name__}: {error} (line {lines[-1] if lines else '?'})") from error
    finally:
        sys.path.pop(0)
    if not isinstance(values, ml_collections.ConfigDict):
        raise ConfigError(f"--config={path}: get_config() must return an ml_collections.ConfigDict, not {type(values).__name__}")
    return from_dict(TrainConfig, _overridden(values.to_dict(), overrides))


def _overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The nested values, changed in place by `--config.a.b=VALUE`."""
    for override in overrides:
        if not override.startswith("--config.") or "=" not in override:
            raise ConfigError(f"unknown option {override!r}; fields of the config are set with --config.a.b=VALUE")
        name, text = override.removeprefix("--config.").split("=", 1)
        *sections, key = name.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{override!r}: {each} is a value, not a section")
        section[key] = parse_value(text)
    return values


def read_deepspeed(path: str, overrides: Sequence[str] = ()) -> ds_config.DeepSpeedFile:
    """A DeepSpeed file, in which overrides of the batch and of `zero.stage` take the place of what it says of them."""
    values = ds_config.load(path)
    set_fields = dict(override.removeprefix("--config.").split("=", 1) for override in overrides if "=" in override)
    sizes = {*BATCH_KEYS.values(), "train_micro_batch_size_per_gpu"}
    if any(values.get(key) not in (None, ds_config.AUTO) for key in sizes):
        values |= {key: parse_value(set_fields[name]) for name, key in BATCH_KEYS.items() if name in set_fields}
    zero = values.get("zero_optimization")
    if "zero.stage" in set_fields and isinstance(zero, dict):
        values["zero_optimization"] = zero | {"stage": parse_value(set_fields["zero.stage"])}
    return ds_config.read(values)


def with_deepspeed(config: TrainConfig, file: ds_config.DeepSpeedFile, overrides: Sequence[str], devices: int) -> TrainConfig:
    """The config with what a DeepSpeed file says of it, and over both the overrides; ConfigError for any contradiction."""
    file.refuse()
    sizes = {"hidden_size": None, "unit_elements": None} if config.model.preset == "abstract" else _model_sizes(config)
    applied = apply(file, config, devices=devices, **sizes)
    return from_dict(TrainConfig, _overridden(dataclasses.asdict(applied), overrides))


def _model_sizes(config: TrainConfig) -> dict[str, int]:
    """The width of a config's model, and the elements of its largest unit."""
    model = train.model_of(config)
    sizes: Counter[str] = Counter()
    for path, leaf in named_leaves(jax.eval_shape(model.init, jax.random.key(0))):
        unit = next((unit for unit in map(Unit, UNITS) if matches(unit.prefix, path)), Unit(""))
        sizes[unit.path] += math.prod(leaf.shape[int(unit.stacked) :])
    return {"hidden_size": model.config.d_model, "unit_elements": max(sizes.values())}


def parse_value(text: str) -> Any:
    """A Python literal where it is one (2, 1e-3, None, True, a tuple), else a string; true and false in any case."""
    if text.lower() in ("true", "false", "none"):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _train(arguments: argparse.Namespace, rest: list[str]) -> int:
    profile = parse_steps(arguments.profile) if arguments.profile else None
    config = load_config(arguments.config, rest)
    file = read_deepspeed(arguments.deepspeed, rest) if arguments.deepspeed else None
    devices = use_devices(arguments.devices, (arguments.coordinator, arguments.processes, arguments.process))
    if file is not None:
        config = with_deepspeed(config, file, rest, len(devices))
        if jax.process_index() == 0:
            _tell(arguments.deepspeed, file)
    workdir = arguments.workdir or Path("runs") / Path(arguments.config).stem
    result = train.run(config, workdir, devices=devices, profile=profile)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _import(arguments: argparse.Namespace, rest: list[str]) -> int:
    config = load_config(arguments.config, rest)
    devices = use_devices(arguments.devices)
    workdir = Path(arguments.workdir or Path("runs") / Path(arguments.config).stem)
    train.import_weights(config, Path(arguments.source), workdir, devices=devices)
    return 0


def _tell(path: str, file: ds_config.DeepSpeedFile) -> None:
    """Says which keys of a DeepSpeed file are deprecated, and which change nothing and why."""
    for _, text in file.notes():
        print(f"--deepspeed={path}: {text}", file=sys.stderr)


def use_devices(count: int | None, peers: tuple[str | None, int | None, int | None] = (None, None, None)) -> list[jax.Device]:
    """The devices of this run: accelerators where there are any, else `count` simulated on the CPU, which is said.

    In a run of several processes (`peers` are the first arguments of `zjax.distributed.initialize`) those of all of them;
    `count` is then that of each.
    """
    simulated = jax.config.values["jax_num_cpu_devices"]  # JAX_NUM_CPU_DEVICES
    jax.config.update("jax_num_cpu_devices", count or (simulated if simulated > 0 else SIMULATED_DEVICES))
    if not _accelerator_files() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    distributed.initialize(*peers)
    if not _accelerator_files():
        without_accelerator()
    devices = jax.devices()
    if devices[0].platform == "cpu" and jax.process_index() == 0:
        print(f"no accelerator: {len(devices)} simulated CPU device{'s' if len(devices) > 1 else ''}", file=sys.stderr)
    if jax.process_count() > 1:
        if count is not None and devices[0].platform != "cpu":
            raise ConfigError(f"--devices={count}: a run of several processes uses all their devices; leave it out")
        return devices
    if count is not None and count > len(devices):
        raise ConfigError(f"--devices={count}: there are {len(devices)} {devices[0].platform} devices")
    return devices[:count]


def _plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    config = load_config(arguments.config, rest)
    if arguments.explain and not arguments.deepspeed:
        raise ConfigError("--explain: explains the keys of a DeepSpeed file; name it with --deepspeed=JSON")
    file = read_deepspeed(arguments.deepspeed, rest) if arguments.deepspeed else None
    without_accelerator()
    if file is not None and arguments.explain:
        return _explain(arguments, config, file, rest)
    if file is not None:
        config = with_deepspeed(config, file, rest, _planned_devices(config, arguments.devices))
        _tell(arguments.deepspeed, file)
    plan = planned(config, arguments.devices)
    report = plan_report(plan)
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(plan.table())
    for title in ("traffic_per_step", "traffic_by_link"):
        sent = ", ".join(f"{name} {value / 2**20:.2f}" for name, value in report[title].items())
        print(f"MiB a device sends, {title.removeprefix('traffic_').replace('_', ' ')}: {sent}")
    return 0


def _explain(arguments: argparse.Namespace, config: TrainConfig, file: ds_config.DeepSpeedFile, rest: list[str]) -> int:
    """Prints what becomes of each key of a DeepSpeed file, then raises if the file cannot be honoured."""
    from rich.table import Table

    failure, applied = None, None
    try:
        applied = with_deepspeed(config, file, rest, _planned_devices(config, arguments.devices))
    except ConfigError as error:
        failure = error
    rows = [(row.key, row.value, row.fate.value if row.fate else "unknown", row.text) for row in outcomes(file, applied)]
    if arguments.json:
        print(json.dumps([dict(zip(("key", "value", "fate", "text"), row, strict=True)) for row in rows]))
    else:
        table = Table("key", "value", "fate", "what it becomes, or why not")
        for key, value, fate, text in rows:
            table.add_row(key, ds_config.shown(value), fate, text)
        output().print(table)
    if failure is not None:
        raise failure
    return 0


def _audit(arguments: argparse.Namespace, rest: list[str]) -> int:
    config = load_config(arguments.config, rest)
    without_accelerator()
    result = audit_run(config, arguments.target, **_audit_options(arguments))
    print(json.dumps(result.to_json()) if arguments.json else result)
    return 1 if arguments.strict and result.findings else 0


def _compare(arguments: argparse.Namespace, rest: list[str]) -> int:
    from rich.progress import track

    from zjax.audit import compare
    from zjax.audit.html import report_html

    load_config(arguments.config, rest)  # a mistake in the config itself ends it; one in a cell is a row
    without_accelerator()
    grid = list(compare.cells_of(compare.parse_vary(arguments.vary, parse_value), arguments.target))
    cells = [_cell(arguments, rest, varied, target) for varied, target in track(grid, "comparing", console=output(stderr=True))]
    if arguments.out:
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.csv").write_text(compare.csv_of(cells))
        (out / "compare.json").write_text(compare.json_of(cells))
        (out / "report.html").write_text(report_html(f"zjax compare: {Path(arguments.config).stem}", cells))
        print(f"wrote compare.csv, compare.json and report.html to {out}", file=sys.stderr)
    if arguments.json:
        print(compare.json_of(cells))
    else:
        output().print(compare.table_of(cells))
    for error in compare.errors_of(cells):
        print(f"failed: {error}", file=sys.stderr)
    return 0 if any(not cell.error for cell in cells) else 1


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    config = load_config(arguments.config, rest) if arguments.config else from_dict(TrainConfig, _overridden({}, rest))
    devices = use_devices(arguments.devices, (arguments.coordinator, arguments.processes, arguments.process))
    found = doctor.examine(config.mesh, devices)
    if jax.process_index() == 0:
        print(json.dumps(found) if arguments.json else doctor.told(found))
    return 0 if found["healthy"] else 1


def _advise(arguments: argparse.Namespace, rest: list[str]) -> int:
    without_accelerator()
    return advise.run(
        arguments,
        load=lambda: load_config(arguments.config) if arguments.config else None,
        with_overrides=lambda config: from_dict(TrainConfig, _overridden(dataclasses.asdict(config), rest)),
        audit_run=audit_run,
    )


def _cell(arguments: argparse.Namespace, rest: list[str], varied: dict[str, Any], target: str) -> Any:
    from zjax.audit.compare import Cell

    overrides = [*rest, *(f"--config.{name}={value}" for name, value in varied.items())]
    try:
        config = load_config(arguments.config, overrides)
        result = audit_run(config, target, **_audit_options(arguments)) if target else None
        plan = result.plan if result else planned(config, parse_target(target).devices if target else arguments.devices)
    except (ConfigError, ValueError, AuditError, distributed.DistributedError) as error:
        return Cell(varied, target, error=str(error))
    leaves = tuple(
        {"path": leaf.path, "shape": "x".join(map(str, leaf.shape)), "spec": spec_text(leaf.rest.spec), "bytes": leaf.bytes_on(plan.mesh), "reason": leaf.reason or ""}
        for leaf in plan.leaves
    )  # fmt: skip
    return Cell(varied, target, plan_report(plan), result.to_json() if result else None, leaves)


def _audit_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"keep_hlo": arguments.keep_hlo, "compiler_options": {} if arguments.no_xla_flags else None}


def audit_run(
    config: TrainConfig,
    target: str,
    *,
    keep_hlo: str | None = None,
    compiler_options: dict[str, str] | None = None,
    chip: Chip | None = None,
) -> Audit:
    """Audits a configured run's step as it compiles for a target, with `zjax.xla_flags` where no options are given.

    `chip` is as in `zjax.audit.run.audit_program`.
    """
    devices = parse_target(target).devices
    recipe = train.plan_run(config, abstract_mesh(config.mesh, devices)).recipe
    model, batch = train.model_of(config), train.abstract_batch(config)
    return audit_recipe(
        recipe,
        model.loss,
        batch,
        target=target,
        mesh=config.mesh,
        **train.step_knobs(config),
        compiler_options=compiler_options,
        keep_hlo=keep_hlo,
        chip=chip,
    )


def planned(config: TrainConfig, devices: int | None) -> Plan:
    """The plan of a configured run on as many abstract devices as asked for, or as its mesh names."""
    return train.plan_run(config, abstract_mesh(config.mesh, _planned_devices(config, devices)))


def plan_report(plan: Plan) -> dict[str, Any]:
    """The stable JSON form of `zjax plan --json`."""
    return {
        "parameters": sum(math.prod(leaf.shape) for leaf in plan.part("params")),
        "devices": plan.mesh.size,
        "mesh": dict(plan.mesh.shape),
        "engine": plan.engine,
        "per_device": bytes_per_device(plan),
        "traffic_per_step": traffic_per_step(plan),
        "traffic_by_link": traffic_by_link(plan),
    }


def without_accelerator() -> None:
    """Starts jax on the CPU, without the complaints of installed GPU and TPU compilers that find no device."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    with quiet_stderr():
        jax.devices()


def _accelerator_files() -> list[str]:
    patterns = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")
    return [path for pattern in patterns for path in glob.glob(pattern)]


def _planned_devices(config: TrainConfig, asked: int | None) -> int:
    """As many devices as asked for; else as many as the mesh names; else, with a -1, the simulated ones."""
    degrees = [getattr(config.mesh, axis) for axis in ("pipeline", "replica", "fsdp", "expert", "sequence", "tensor")]
    return asked or (SIMULATED_DEVICES if -1 in degrees else math.prod(degrees))


if __name__ == "__main__":
    sys.exit(main())
