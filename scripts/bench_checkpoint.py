"""Seconds, bytes and stalls of saving and restoring, beside plain Orbax and torch.distributed.checkpoint.

    python scripts/bench_checkpoint.py                                  # 410 MB of float32 on 8 simulated devices
    python scripts/bench_checkpoint.py --megabytes=40 --rounds=5 --torch-python=/path/to/python --json

zjax and Orbax save the same train state of stage 3 (parameters and two moments), torch as many bytes in one process. They
take turns: a round is one save and one restore of each, in rotating order, into a folder that does not exist, and the ratios
are of the same round. `save` is until all is on disk; `stall` until an asynchronous save returns, when the state may be
donated. `checksums` is the time to compute the checksums alone, with the devices idle, which a save and a verifying restore
each do once; `restore off` does not verify. The files are in the page cache when they are restored.
"""

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from zjax import Checkpointer, MeshConfig, PrecisionConfig, ZeroConfig, build_plan, init_state, make_mesh  # noqa: E402
from zjax.checkpoint import checksum  # noqa: E402
from zjax.state import state_struct  # noqa: E402
from zjax.tree import named_leaves  # noqa: E402

LEAVES = 8
PEER = Path(__file__).parent / "peers" / "dcp.py"


def make_state(megabytes: int):
    """A plan of stage 3 and its state of so many 10**6 bytes, every element random."""
    columns = megabytes * 10**6 // (3 * 4 * LEAVES * 1024)

    def init(key):
        return {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (1024, columns)) for i in range(LEAVES)}

    plan = build_plan(ZeroConfig(stage=3), init, optax.adamw(1e-3), make_mesh(MeshConfig()), precision=PrecisionConfig(compute="float32"))
    state = init_state(plan, jax.random.key(0))
    drawn = jax.jit(
        lambda tree: jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size % 97), x.shape) if x.ndim else x, tree),
        out_shardings=jax.tree.map(lambda x: x.sharding, state.opt_state),
    )(state.opt_state)
    return plan, jax.block_until_ready(type(state)(**{**state.__dict__, "opt_state": drawn}))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Zjax:
    def __init__(self, plan, state):
        self.plan, self.state = plan, state
        self.arrays = {path: x for path, x in named_leaves(state) if x.ndim}

    def round(self, folder: Path) -> dict[str, float]:
        opened, start = Checkpointer(folder), time.perf_counter()
        opened.save(self.state)
        stalled = time.perf_counter() - start
        opened.wait()
        saved = time.perf_counter() - start
        opened.close()
        found = {"save": saved, "stall": stalled, "bytes": bytes_of(folder)}
        for verify in ("full", "off"):
            start = time.perf_counter()
            jax.block_until_ready(Checkpointer(folder, verify=verify).restore(self.plan))
            found["restore" if verify == "full" else "restore off"] = time.perf_counter() - start
        start = time.perf_counter()
        checksum.checksums(self.arrays)
        return found | {"checksums": time.perf_counter() - start}


class Orbax:
    def __init__(self, plan, state):
        self.arrays = {path: x for path, x in named_leaves(state) if path != "rng"}
        self.struct = {path: x for path, x in named_leaves(state_struct(plan)) if path != "rng"}

    def round(self, folder: Path) -> dict[str, float]:
        checkpointer, start = ocp.StandardCheckpointer(), time.perf_counter()
        checkpointer.save(folder, self.arrays)
        stalled = time.perf_counter() - start
        checkpointer.wait_until_finished()
        saved = time.perf_counter() - start
        start = time.perf_counter()
        jax.block_until_ready(checkpointer.restore(folder, self.struct))
        restored = time.perf_counter() - start
        checkpointer.close()
        return {"save": saved, "stall": stalled, "restore": restored, "bytes": bytes_of(folder)}


class Torch:
    def __init__(self, python: str, folder: Path, megabytes: int):
        command = [python, str(PEER), str(folder), str(3 * LEAVES), str(megabytes * 10**6 // (3 * LEAVES * 4))]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if self.child.stdout.readline() != "ready\n":
            raise SystemExit(f"--torch-python: {python} cannot run {PEER.name}; it needs torch")

    def round(self, folder: Path) -> dict[str, float]:
        self.child.stdin.write("go\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())


def measure(arguments, folder: Path):
    """name -> what each round found, the first of them not counted."""
    plan, state = make_state(arguments.megabytes)
    variants = {"zjax": Zjax(plan, state), "orbax": Orbax(plan, state)}
    if arguments.torch_python:
        variants["torch"] = Torch(arguments.torch_python, folder / "torch", arguments.megabytes)
    found = {name: [] for name in variants}
    names = list(variants)
    for index in range(arguments.rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            target = folder / f"{name}-{index}"
            values = variants[name].round(target)
            shutil.rmtree(target, ignore_errors=True)
            if index:
                found[name].append(values)
        print(f"round {index} of {arguments.rounds}", file=sys.stderr)
    if arguments.torch_python:
        variants["torch"].child.kill()
    return found


def summary(found):
    """Medians of each variant, and of the ratios inside a round that the project promises."""
    rows = {name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]} for name, rounds in found.items()}
    pairs = list(zip(found["zjax"], found["orbax"], strict=True))
    ratios = {
        "stall / save": [ours["stall"] / ours["save"] for ours, _ in pairs],
        "checksums / save": [ours["checksums"] / ours["save"] for ours, _ in pairs],
        "save / orbax's": [ours["save"] / theirs["save"] for ours, theirs in pairs],
        "restore / orbax's": [ours["restore"] / theirs["restore"] for ours, theirs in pairs],
        "restore off / orbax's": [ours["restore off"] / theirs["restore"] for ours, theirs in pairs],
    }
    return rows, {name: {"median": statistics.median(values), "min": min(values), "max": max(values)} for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=410, help="of the state, in 10**6 bytes")
    parser.add_argument("--rounds", type=int, default=7, help="measured saves and restores of each; one more goes before")
    parser.add_argument("--folder", type=Path, help="where to write; default a temporary folder")
    parser.add_argument("--torch-python", metavar="PYTHON", help="the interpreter that has torch; default none")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    for name in ("megabytes", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: must be positive")
    logging.getLogger("absl").setLevel(logging.ERROR)
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows, ratios = summary(measure(arguments, Path(folder)))
    if arguments.json:
        here = {"cores": os.cpu_count(), "load_average_before": load, "load_average_after": os.getloadavg()}
        setting = {"megabytes": arguments.megabytes, "rounds": arguments.rounds, "devices": 8}
        return print(json.dumps({"setting": setting, "this_machine": here, "rows": rows, "ratios": ratios}))
    columns = ("save", "stall", "restore", "restore off", "checksums")
    table = Table(
        "",
        *(f"{column} s" for column in columns),
        "MB on disk",
        box=box.SIMPLE,
        title=f"{arguments.megabytes} MB, medians of {arguments.rounds} rounds",
    )
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.3f}" if column in row else "" for column in columns), f"{row['bytes'] / 1e6:.1f}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, values in ratios.items():
        console.print(f"{name}: {values['median']:.3f} ({values['min']:.3f} to {values['max']:.3f})", highlight=False)


if __name__ == "__main__":
    main()
