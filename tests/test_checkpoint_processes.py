"""Checkpoints between processes: killed at any instant, and saved by some processes and restored by others."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from checkpoint_process import STEPS, batch_of, sums_of, train_pieces
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small import compiled_fast, environment, shared_folder
from test_checkpoint import filled, plan_on
from test_processes import free_port

from zjax.checkpoint import Checkpointer
from zjax.checkpoint.reading import spread
from zjax.config import MeshConfig
from zjax.mesh import make_mesh
from zjax.state import init_state

pytestmark = pytest.mark.slow

WORKER = str(Path(__file__).parent / "checkpoint_process.py")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


# --- killed -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def never_killed():
    """The sums of every state of the run that nobody kills, which saves nothing: step -> sums."""
    plan, step = train_pieces()
    state = init_state(plan, jax.random.key(0))
    sums = {0: sums_of(state)}
    for index in range(STEPS):
        state, _ = step(state, batch_of(index))
        sums[index + 1] = sums_of(state)
    return sums


def check_kills(never_killed, folder, cache, kills, seed):
    """Kills a run so often at random instants of its saves; each time the next begins with the state of the run that is never killed."""
    drawn, begun = random.Random(seed), []
    for kill in range(kills):
        command = [sys.executable, WORKER, json.dumps({"mode": "train", "folder": str(folder)})]
        with subprocess.Popen(command, env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            try:
                line = child.stdout.readline()
                assert line, child.stderr.read()
                first = json.loads(line)
                assert first["sums"] == never_killed[first["step"]]
                begun.append(first["step"])
                for _ in range(3 if kill % 4 else 0):  # one in four in its first step
                    assert child.stdout.readline() == "saving\n", child.stderr.read()
                time.sleep(drawn.uniform(0, 0.3))
            finally:
                child.send_signal(signal.SIGKILL)
    plan, _ = train_pieces()
    opened = Checkpointer(folder)
    if begun[-1]:
        assert sums_of(opened.restore(plan)) == never_killed[opened.latest_step()]
        assert opened.latest_step() >= begun[-1]
    assert begun == sorted(begun)
    assert begun[-1] > 5, begun
    steps = [path.name for path in folder.iterdir() if path.name.isdigit()]
    assert len(steps) <= 4 + STEPS // 100  # what is left of killed runs does not pile up
    assert not [path for path in folder.iterdir() if "damaged" in path.name]


def test_a_run_killed_at_random_instants_goes_on_bit_for_bit(never_killed, tmp_path, cache):
    check_kills(never_killed, tmp_path, cache, 10, 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_run_killed_at_forty_random_instants_goes_on_bit_for_bit(never_killed, tmp_path, cache, seed):
    check_kills(never_killed, tmp_path, cache, 10, seed)


def test_what_is_replicated_is_read_once():
    """Split over the axes that hold replicas, on the dims that are left: no process reads what another reads."""
    mesh = make_mesh(MeshConfig(replica=2, fsdp=4))
    for spec, shape, expected in [
        (P(), (16, 6), P(("replica", "fsdp"))),
        (P(None, "fsdp"), (6, 16), P("replica", "fsdp")),
        (P("fsdp"), (4, 3), P("fsdp")),
        (P("fsdp"), (8, 3), P(("fsdp", "replica"))),
        (P(), (3, 2), P(None, "replica")),
        (P(), (), P()),
    ]:
        found = spread(NamedSharding(mesh, spec), shape)
        assert found.is_equivalent_to(NamedSharding(mesh, expected), len(shape)), (spec, shape, found.spec)


# --- processes ----------------------------------------------------------------------------------------------------------


def exchange(cache, processes, mesh, stage, source, target):
    """The sums that every process printed."""
    port = free_port()
    options = {"mode": "exchange", "processes": processes, "devices": 8 // processes, "port": port, "mesh": mesh, "stage": stage}
    options |= {"source": source and str(source), "target": target and str(target)}
    with contextlib.ExitStack() as stack:
        children = []
        for process in range(processes):
            command = [sys.executable, WORKER, json.dumps({**options, "process": process})]
            child = subprocess.Popen(command, env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(child.kill)
            children.append(child)
        outputs = [child.communicate(timeout=120) for child in children]
    for child, (_, err) in zip(children, outputs, strict=True):
        assert child.returncode == 0, err[-3000:]
    return [json.loads(line)["sums"] for out, _ in outputs for line in out.splitlines() if line.startswith("{")]


def test_two_processes_save_four_restore_and_save_and_two_restore(tmp_path, cache):
    """2 processes x 4 devices, 4 x 2 on another mesh and stage, and back; each writes its shards, and one manifest."""
    expected = sums_of(filled(plan_on("8", 3)))
    assert exchange(cache, 2, "8", 3, None, tmp_path / "a") == [expected] * 2
    assert exchange(cache, 4, "2x4", 1, tmp_path / "a", tmp_path / "b") == [expected] * 4
    assert exchange(cache, 2, "8", 2, tmp_path / "b", None) == [expected] * 2
    for name, count in (("a", 2), ("b", 4)):
        opened = Checkpointer(tmp_path / name)
        assert opened.meta(7) == {"processes": count}
        assert {path: leaf.checksum for path, leaf in opened.manifest(7).leaves.items() if leaf.checksum} == expected
        assert sums_of(opened.restore(plan_on("4x2", 0))) == expected
        assert len([path for path in (tmp_path / name / "7").iterdir() if path.name.startswith("ocdbt.process_")]) == count
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file()) for name in "ab"]
    assert max(sizes) < 1.5 * min(sizes)  # replicas are written once
