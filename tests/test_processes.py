"""One process equals many: 2 processes x 4 devices over jax.distributed take the trajectory of 1 process x 8."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small import compiled_fast, environment, leaves, run_quietly, shared_folder, small_config, write_corpus

from zjax import train
from zjax.checkpoint import Checkpointer
from zjax.mesh import make_mesh

WORKER = Path(__file__).parent / "train_process.py"
PROCESSES = 2
RUNS = {
    "stage 3, hybrid": {"zero": {"stage": 3}, "mesh": {"replica": 2, "fsdp": 4}},
    "stage 2, 2 micro-batches": {
        "zero": {"stage": 2},
        "accumulation": {"micro_batches": 2},
        "evaluation": {"every": 2, "fraction": 0.3},
    },
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", 16 * 40 + 6)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def started(runs):
    """The processes of these runs; none of them outlives the block."""
    port = free_port()
    children = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(process), str(PROCESSES), str(8 // PROCESSES), str(port), json.dumps(runs)],
            env=environment(JAX_DISABLE_MOST_OPTIMIZATIONS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(PROCESSES)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def finish(children, status=0, timeout=150):
    """What each process printed, a dictionary a run."""
    until = time.monotonic() + timeout
    outputs = [child.communicate(timeout=max(1, until - time.monotonic())) for child in children]
    for child, (_, err) in zip(children, outputs, strict=True):
        assert child.returncode == status, err[-5000:]
        assert "Traceback" not in err
    # gloo greets on stdout, too.
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def in_two(corpus, tmp_path_factory):
    """Every run of `RUNS` in two processes: name -> workdir, and what each process said."""
    workdirs = {name: tmp_path_factory.mktemp("two") / "run" for name in RUNS}
    sections = {name: {**RUNS[name], "checkpoint": {"every": 2}} for name in RUNS}
    with started([{"corpus": str(corpus), "workdir": str(workdirs[name]), "sections": sections[name]} for name in RUNS]) as children:
        said = finish(children)
    return {name: (workdirs[name], [process[i] for process in said]) for i, name in enumerate(RUNS)}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_take_the_trajectory_of_one(in_two, corpus, tmp_path, name):
    workdir, said = in_two[name]
    alone = run_quietly(small_config(corpus, **RUNS[name]), tmp_path)
    assert [(line["process"], line["devices"], line["shards"], line["step"]) for line in said] == [(0, 8, 4, 5), (1, 8, 4, 5)]
    np.testing.assert_allclose(said[0]["losses"], alone.losses, rtol=1e-6)
    lines, expected = metrics(workdir), metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]  # written by one of them, once
    for metric in ("loss", "grad_norm", "grad_norm_clipped", "tokens", "learning_rate"):
        np.testing.assert_allclose([line[metric] for line in lines], [line[metric] for line in expected], rtol=1e-6, err_msg=metric)
    evaluated = [{line["step"]: line["eval_loss"] for line in each if "eval_loss" in line} for each in (lines, expected)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6) and list(evaluated[0]) == ([2, 4] if "evaluation" in RUNS[name] else [])
    assert expected[0]["loss"] - expected[-1]["loss"] > 0.1


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_two_processes_is_resumed_in_one(in_two, corpus, tmp_path, name):
    """Restored in one process the state is the one that one process comes to, and its next step is the same."""
    workdir, _ = in_two[name]
    config = small_config(corpus, **RUNS[name])
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["4", "5"]
    restored = leaves(Checkpointer(workdir / "checkpoints").restore(train.plan_run(config, make_mesh(config.mesh))))
    alone = leaves(run_quietly(config, tmp_path).state)
    assert restored.keys() == alone.keys()
    for path, value in alone.items():
        if value.dtype == np.float32:  # Adam's first steps divide by roots of tiny second moments
            np.testing.assert_allclose(restored[path], value, rtol=2e-3, atol=1e-6, err_msg=path)
        else:
            np.testing.assert_array_equal(restored[path], value, err_msg=path)
    longer = small_config(corpus, **RUNS[name], steps=6)
    resumed, straight = run_quietly(longer, workdir), run_quietly(longer, tmp_path)
    np.testing.assert_allclose(resumed.losses, straight.losses, rtol=1e-6)


def test_a_signal_to_one_process_stops_both_at_the_same_step(corpus, tmp_path):
    """The scheduler may tell only one of them: both save the same step, and exit as told; one process goes on."""
    sections = {"steps": 2000, "mesh": {"replica": 2, "fsdp": 4}}
    with started([{"corpus": str(corpus), "workdir": str(tmp_path), "sections": sections}]) as children:
        until = time.monotonic() + 90
        while not (tmp_path / "metrics.jsonl").exists() or len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) < 3:
            assert all(child.poll() is None for child in children) and time.monotonic() < until
            time.sleep(0.01)
        children[1].send_signal(signal.SIGTERM)
        said = finish(children, status=128 + signal.SIGTERM, timeout=60)
    step = said[0][0]["step"]
    assert 3 <= step < 2000
    assert [(line["step"], line["stopped_by"]) for (line,) in said] == [(step, signal.SIGTERM)] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, step + 1))
    config = small_config(tmp_path)
    saved = Checkpointer(tmp_path / "checkpoints").restore(train.plan_run(config, make_mesh(config.mesh)))
    assert int(saved.step) == step
