"""The `zjax` command: train, plan. Other tools read its options and JSON; keep them stable."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from zjax.config import ConfigError, TrainConfig, from_dict

SIMULATED_DEVICES = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 only when the work was done."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    try:
        config = load_config(arguments.config, rest)
        return arguments.run(config, arguments)
    except (ConfigError, ValueError) as error:
        print(f"zjax {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"zjax {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zjax", description="ZeRO and FSDP sharding for JAX: plan it, train with it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a model from a config", description="Train a model from a config; resumes where its workdir left off.")
    plan = commands.add_parser("plan", help="per-leaf placement, bytes per device, traffic per step", description="Show what a config places where. Nothing is allocated, no device is needed.")  # fmt: skip
    for command in (train, plan):
        command.add_argument("--config", required=True, metavar="FILE", help="a Python file with get_config(); any field can be set with --config.a.b=VALUE")
        command.add_argument("--devices", type=int, metavar="N", help=f"devices to use; without an accelerator they are simulated on the CPU (default {SIMULATED_DEVICES})")
        command.epilog = "Override any field of the config with --config.a.b=VALUE, for instance --config.zero.stage=2."
    train.add_argument("--workdir", metavar="DIR", help="where metrics and checkpoints go (default runs/NAME, after the config)")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    train.set_defaults(run=_train)
    plan.set_defaults(run=_plan)
    return parser


def load_config(path: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a file's `get_config()` with `--config.a.b=VALUE` overrides applied; ConfigError for any mistake."""
    if not Path(path).is_file():
        near = difflib.get_close_matches(path, [str(p) for p in Path(path).parent.glob("*.py")] if Path(path).parent.is_dir() else [], n=1)
        raise ConfigError(f"--config={path}: no such file" + (f"; did you mean {near[0]}?" if near else ""))
    sys.path.insert(0, str(Path(path).parent))  # as python does for a script: a config may build on one beside it
    try:
        values = runpy.run_path(path)["get_config"]()
    except KeyError:
        raise ConfigError(f"--config={path}: the file has no get_config() function") from None
    finally:
        sys.path.pop(0)
    if not isinstance(values, ml_collections.ConfigDict):
        raise ConfigError(f"--config={path}: get_config() must return an ml_collections.ConfigDict, not {type(values).__name__}")
    values = values.to_dict()
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
        section[key] = _parse(text)
    return from_dict(TrainConfig, values)


def _parse(text: str) -> Any:
    """A Python literal where it is one (2, 1e-3, None, True, a tuple), else a string; true and false in any case."""
    if text.lower() in ("true", "false", "none"):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _train(config: TrainConfig, arguments: argparse.Namespace) -> int:
    devices = use_devices(arguments.devices)
    from zjax import train  # after the devices are set: it may touch them

    result = train.run(config, arguments.workdir or Path("runs") / Path(arguments.config).stem, devices=devices)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def use_devices(count: int | None) -> list[jax.Device]:
    """The devices of this run: accelerators where there are any, else `count` simulated on the CPU, which is said."""
    if count is not None and count < 1:
        raise ConfigError(f"--devices={count}: must be positive")
    jax.config.update("jax_num_cpu_devices", count or SIMULATED_DEVICES)
    devices = jax.devices()
    if devices[0].platform == "cpu":
        print(f"no accelerator: {len(devices)} simulated CPU devices", file=sys.stderr)
    if count is not None and count > len(devices):
        raise ConfigError(f"--devices={count}: there are {len(devices)} {devices[0].platform} devices")
    return devices[:count]


def _plan(config: TrainConfig, arguments: argparse.Namespace) -> int:
    from zjax.estimate import traffic_by_link, traffic_per_step
    from zjax.mesh import abstract_mesh
    from zjax.plan import bytes_per_device
    from zjax.train import plan_run

    mesh = abstract_mesh(config.mesh, _planned_devices(config, arguments.devices))
    plan = plan_run(config, mesh)
    report = {
        "parameters": sum(math.prod(leaf.shape) for leaf in plan.part("params")),
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "engine": plan.engine,
        "per_device": bytes_per_device(plan),
        "traffic_per_step": traffic_per_step(plan),
        "traffic_by_link": traffic_by_link(plan),
    }
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(plan.table())
    for title in ("traffic_per_step", "traffic_by_link"):
        sent = ", ".join(f"{name} {value / 2**20:.2f}" for name, value in report[title].items())
        print(f"MiB a device sends, {title.removeprefix('traffic_').replace('_', ' ')}: {sent}")
    return 0


def _planned_devices(config: TrainConfig, asked: int | None) -> int:
    """As many devices as asked for; else as many as the mesh names; else, with a -1, the simulated ones."""
    degrees = [getattr(config.mesh, axis) for axis in ("pipeline", "replica", "fsdp", "expert", "sequence", "tensor")]
    return asked or (SIMULATED_DEVICES if -1 in degrees else math.prod(degrees))


if __name__ == "__main__":
    sys.exit(main())
