"""`zjax checkpoint` and `zjax export`: looking at checkpoints, and taking weights out of them, on one CPU, streaming."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from etils import epath
from rich.table import Table

from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.checkpoint import manifest as manifests
from zjax.checkpoint.manifest import Leaf, Manifest
from zjax.checkpoint.reading import damaged_leaves, quiet
from zjax.checkpoint.weights import EXPORT_DTYPES, FILE_BYTES, FORMATS, export_npz, export_safetensors, own_names, params_of
from zjax.console import output
from zjax.models import huggingface
from zjax.models.llama import LlamaConfig

DIR = "a directory of checkpoints, a run's --workdir, or one step's folder"


def add_commands(commands: Any, prepare: Callable[[], None]) -> None:
    """Adds `checkpoint` and `export` to the parser's commands; `prepare` starts jax for them."""
    checkpoint = commands.add_parser(
        "checkpoint", help="list, show, verify and compare checkpoints", description="Look at checkpoints; nothing is changed."
    )
    verbs = checkpoint.add_subparsers(dest="verb", required=True, metavar="VERB")
    about: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
        "list": (_list, "the steps, and which are whole"),
        "show": (_show, "what a step holds, leaf by leaf; the newest without a step"),
        "verify": (_verify, "read everything and compare with the checksums; exit with status 1 if anything is damaged"),
        "diff": (_diff, "leaves that differ between two steps, told from their manifests; exit with status 1 if any does"),
    }
    for name, (run, text) in about.items():
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("directory", metavar="DIR", help=DIR)
        if name == "diff":
            verb.add_argument("other", metavar="OTHER", help="the same, to compare with")
        verb.add_argument("--json", action="store_true", help="print JSON instead of text")
        verb.set_defaults(run=_without_rest(run, prepare))
    export = commands.add_parser(
        "export", help="weights to safetensors or .npz", description="Write a checkpoint's weights for others to read."
    )
    export.add_argument("directory", metavar="DIR", help=DIR)
    export.add_argument("out", metavar="OUT", help="a folder to make, or with --format=npz a file")
    formats = "huggingface (LlamaForCausalLM's names, with config.json), or zjax's own names as safetensors or npz"
    export.add_argument("--format", choices=FORMATS, default="huggingface", help=f"{formats} (default huggingface)")
    export.add_argument("--dtype", choices=list(EXPORT_DTYPES), default="float32", help="of the tensors (default float32)")
    export.add_argument("--file-bytes", type=int, default=FILE_BYTES, metavar="N", help=f"the most one file holds (default {FILE_BYTES:,})")
    export.set_defaults(run=_without_rest(_export, prepare))


def _without_rest(run: Callable[[argparse.Namespace], int], prepare: Callable[[], None]) -> Callable[[argparse.Namespace, list[str]], int]:
    def checked(arguments: argparse.Namespace, rest: list[str]) -> int:
        if rest:
            raise ValueError(f"unknown option {rest[0]!r}")
        prepare()
        return run(arguments)

    return checked


def find(given: str) -> tuple[Checkpointer, int | None]:
    """The checkpointer of a directory, and the step if it is one step's folder; CheckpointError where there is none."""
    path = epath.Path(given)
    if not path.is_dir():
        raise CheckpointError(f"{given}: no such directory")
    if path.name.isdigit() and not any(each.name.isdigit() for each in path.iterdir()):
        return Checkpointer(path.parent), int(path.name)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    return Checkpointer(path), None


def one_step(given: str) -> tuple[epath.Path, Manifest]:
    """Folder and manifest of the step that is named, or of the newest; CheckpointError where there is none that is whole."""
    checkpointer, step = find(given)
    step = checkpointer.resumable_step() if step is None else step
    if step is None:
        raise CheckpointError(f"no checkpoint in {checkpointer.directory}")
    return checkpointer.directory / str(step), checkpointer.manifest(step)


def leaf_bytes(leaf: Leaf) -> int:
    """Bytes of a leaf's elements."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def _list(arguments: argparse.Namespace) -> int:
    checkpointer, only = find(arguments.directory)
    rows = []
    for step, found in checkpointer.steps().items():
        if only in (None, step):
            row: dict[str, Any] = {"step": step, "whole": isinstance(found, Manifest)}
            if isinstance(found, Manifest):
                size = sum(size for size, _ in found.files.values())
                row |= {"saved_at": found.saved_at, "bytes": size, "leaves": len(found.leaves), "loss": found.loss, "mesh": found.mesh}
            else:
                row["problem"] = found
            rows.append(row)
    if arguments.json:
        print(json.dumps(rows))
        return 0
    table = Table("step", "saved", "MiB", "leaves", "eval loss", "mesh", "state")
    for row in rows:
        if not row["whole"]:
            table.add_row(str(row["step"]), "", "", "", "", "", row["problem"])
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved_at"]))
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        table.add_row(str(row["step"]), saved, f"{row['bytes'] / 2**20:.2f}", str(row["leaves"]), loss, _mesh(row["mesh"]), "whole")
    _print(table)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    folder, manifest = one_step(arguments.directory)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(manifest)))
        return 0
    table = Table("leaf", "dtype", "shape", "MiB", "lay", "checksum")
    for path, leaf in manifest.leaves.items():
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        table.add_row(path, leaf.dtype, shape, f"{leaf_bytes(leaf) / 2**20:.3f}", leaf.spec, leaf.checksum)
    _print(table)
    made_by = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    print(f"{folder}: step {manifest.step}, {len(manifest.leaves)} leaves, saved on {_mesh(manifest.mesh)} by {made_by}")
    if manifest.meta:
        print("of the run: " + json.dumps(manifest.meta))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    checkpointer, only = find(arguments.directory)
    problems: dict[int, list[str]] = {}
    for step, found in checkpointer.steps().items():
        if only not in (None, step):
            continue
        folder = checkpointer.directory / str(step)
        if isinstance(found, Manifest):
            with quiet():
                leaves = [f"{path}: {what}" for path, what in damaged_leaves(folder, found)]
            problems[step] = manifests.damaged_files(folder, found) + leaves
        else:
            problems[step] = [found]
        if not arguments.json:
            for problem in problems[step]:
                print(f"{folder}: {problem}")
            print(f"{folder}: {'DAMAGED' if problems[step] else 'whole, every leaf is what was saved'}", flush=True)
    if arguments.json:
        print(json.dumps({str(step): found for step, found in problems.items()}))
    if not problems:
        raise CheckpointError(f"no checkpoint in {arguments.directory}")
    return 1 if any(problems.values()) else 0


def _diff(arguments: argparse.Namespace) -> int:
    (ours, one), (theirs, other) = one_step(arguments.directory), one_step(arguments.other)
    rows = []
    for path in dict.fromkeys([*one.leaves, *other.leaves]):
        a, b = one.leaves.get(path), other.leaves.get(path)
        if a is None or b is None:
            rows.append((path, f"only in {ours if b is None else theirs}"))
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            rows.append((path, f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"))
        elif a.checksum != b.checksum:
            rows.append((path, "other values"))
    if arguments.json:
        print(json.dumps([{"leaf": path, "difference": what} for path, what in rows]))
    else:
        for path, what in rows:
            print(f"{path}: {what}")
        same = len(one.leaves.keys() & other.leaves.keys()) - sum(not what.startswith("only in") for _, what in rows)
        print(f"{same} leaves are the same, {len(rows)} differ")
    return 1 if rows else 0


def _export(arguments: argparse.Namespace) -> int:
    step, manifest = one_step(arguments.directory)
    out = Path(arguments.out)
    if out.exists():
        raise CheckpointError(f"{out} exists; choose another, or remove it")
    unfinished = out.with_name(f"{out.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with quiet():
        if arguments.format == "npz":
            if arguments.dtype != "float32":
                raise CheckpointError(f"--dtype={arguments.dtype}: .npz knows float32 only; use --format=safetensors")
            export_npz(step, manifest, unfinished)
        else:
            _export_folder(arguments, step, manifest, unfinished)
    unfinished.rename(out)
    print(f"wrote {sum(path.stat().st_size for path in (out.iterdir() if out.is_dir() else [out])):,} bytes to {out}", file=sys.stderr)
    return 0


def _export_folder(arguments: argparse.Namespace, step: epath.Path, manifest: Manifest, folder: Path) -> None:
    folder.mkdir()
    knobs = {"dtype": arguments.dtype, "file_bytes": arguments.file_bytes}
    if arguments.format == "safetensors":
        export_safetensors(step, manifest, own_names(params_of(manifest, EXPORT_DTYPES[arguments.dtype])), folder, made_for="zjax", **knobs)
        return
    if "model" not in manifest.meta:
        raise CheckpointError(f"{step} does not say what model it is of (`zjax train` does); use --format=safetensors")
    config = LlamaConfig(**manifest.meta["model"])
    export_safetensors(step, manifest, huggingface.layout(config), folder, made_for="pt", **knobs)
    (folder / huggingface.CONFIG).write_text(huggingface.to_json(config, arguments.dtype))


def _mesh(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 device"


def _print(table: Table) -> None:
    output().print(table)
