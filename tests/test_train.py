"""Whole runs of a tiny model: what they write, that a resumed run is the same run, and how they are stopped."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from small import (
    COMMAND,
    METRICS,
    REPO,
    assert_same_state,
    compiled_fast,
    environment,
    leaves,
    run_quietly,
    shared_folder,
    small_config,
    small_overrides,
    snapshot,
    write_corpus,
    zjax,
)
from tensorboardX.proto import event_pb2

from zjax import train
from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.cli import audit_run, main
from zjax.config import MeshConfig, ZeroConfig
from zjax.guard import NonFiniteError
from zjax.mesh import make_mesh
from zjax.metrics import MetricsWriter
from zjax.plan import Plan, build_plan
from zjax.state import init_state, unplanned
from zjax.step import make_train_step

CORPUS = 16 * 191 + 6
"""Tokens: 192 rows of 16 predictions, of which the last row has 5: one epoch is 6 steps of 32 rows."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", CORPUS)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """One epoch without a stop, with two checkpoints kept: the run that the others are compared with."""
    workdir = tmp_path_factory.mktemp("straight")
    return run_quietly(six_steps(corpus), workdir), workdir


def six_steps(corpus, **sections):
    return small_config(corpus, **{"steps": 6, "checkpoint": {"every": 2, "keep": 2}, **sections})


def metrics(workdir):
    """The lines of metrics.jsonl, read as strictly as JSON is defined."""
    return [json.loads(line, parse_constant=no_json) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def no_json(name):
    raise ValueError(f"{name} is not JSON")


def column(workdir, name):
    return [line[name] for line in metrics(workdir)]


def saved_steps(workdir):
    """Every name in the folder: a number each, and nothing else, such as the half of a save that was killed."""
    return sorted((path.name for path in (workdir / "checkpoints").iterdir()), key=lambda name: (len(name), name))


# --- what a run writes --------------------------------------------------------------------------------------------------


def test_metrics_have_the_published_keys_once_a_step(straight):
    result, workdir = straight
    lines = metrics(workdir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() == METRICS for line in lines)
    assert [line["loss"] for line in lines] == result.losses
    for line in lines:
        assert line["step_applied"] is True and line["skipped_steps"] == 0 and line["loss_scale"] == 1
        assert type(line["tokens"]) is int and line["step_seconds"] > 0
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_seconds"])
        assert line["grad_norm_clipped"] == pytest.approx(min(line["grad_norm"], 1.0), rel=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


def test_tokens_count_the_mask(straight):
    """Every token of the corpus but the first is predicted once an epoch; the filling of the last row is not counted."""
    tokens = column(straight[1], "tokens")
    assert sum(tokens) == CORPUS - 1
    assert sorted(tokens) == [32 * 16 - 11] + [32 * 16] * 5


def test_tensorboard_holds_the_same_numbers(straight):
    lines = metrics(straight[1])
    found: dict[int, dict[str, float]] = {}
    for path in (straight[1] / "tensorboard").iterdir():
        for event in read_events(path):
            for value in event.summary.value:
                found.setdefault(event.step, {})[value.tag] = value.simple_value
    assert found.keys() == {line["step"] for line in lines}
    for line in lines:
        for name in METRICS - {"step"}:
            assert found[line["step"]][name] == pytest.approx(float(line[name]), rel=1e-6), name


def read_events(path):
    """Events of a TensorBoard file: records of an 8-byte length, its checksum, the event, its checksum."""
    data = path.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_loss_curve_is_a_picture(straight):
    data = (straight[1] / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    assert int.from_bytes(data[16:20]) > 400 and int.from_bytes(data[20:24]) > 200
    from matplotlib.image import imread

    picture = imread(straight[1] / "loss.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 10


def test_the_newest_checkpoints_are_kept(straight):
    assert saved_steps(straight[1]) == ["4", "6"]


# --- what a run says of itself ------------------------------------------------------------------------------------------


def test_plan_audit_and_memory_are_in_the_workdir(straight, corpus):
    """The audit is that of the program the steps ran: the same as `zjax audit` gives for this target."""
    (_, workdir), config = straight, six_steps(corpus)
    assert (workdir / "plan.txt").read_text().startswith("stage 3 (ZeRO-3, FULL_SHARD) on fsdp 8")
    here, compiled = json.loads((workdir / "audit.json").read_text()), audit_run(config, "cpu:8").to_json()
    assert here.pop("compile_seconds") > 0 and compiled.pop("compile_seconds") > 0
    assert here == compiled
    lines = [json.loads(line) for line in (workdir / "memory" / "process-0.jsonl").read_text().splitlines()]
    state = here["state_bytes"]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(state <= held["in_use"] for held in lines[-1]["devices"].values()) and len(lines[-1]["devices"]) == 8


def test_what_the_audit_finds_is_told_before_the_first_step(corpus, tmp_path):
    """Norms of 32 elements over 8 devices: one finding each. With a threshold there is none, and that is told too."""
    told = {}
    for threshold in (0, 64):
        out = io.StringIO()
        config = six_steps(corpus, steps=1, zero={"persistence_threshold": threshold})
        train.run(config, tmp_path / str(threshold), console=Console(file=out, width=200))
        told[threshold] = out.getvalue()
        assert told[threshold].index("audit of the compiled step") < told[threshold].index("step 1/1")
    assert "WARNING: audit of the compiled step: 3 findings" in told[0] and "[unit-too-small]" in told[0]
    assert "audit of the compiled step: no finding" in told[64] and "WARNING" not in told[64]


def test_a_program_that_cannot_be_read_is_still_run(corpus, tmp_path, monkeypatch):
    def unreadable(step, batch):
        raise ValueError("what is this?")

    monkeypatch.setattr(train, "audit_here", unreadable)
    out = io.StringIO()
    train.run(six_steps(corpus, steps=1), tmp_path / "run", console=Console(file=out, width=200))
    assert "the compiled step is not audited: ValueError: what is this?" in out.getvalue() and column(tmp_path / "run", "loss")


def test_the_step_is_compiled_once(corpus, tmp_path):
    """Audit, first step and later ones share it, also after a resume: XLA is asked once a run."""
    asked = []
    listen = lambda event, seconds, **about: asked.append(about.get("fun_name")) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for steps in (3, 5):
            run_quietly(six_steps(corpus, steps=steps), tmp_path / "run")
            assert asked.count("jit(train_step)") == 1
            asked.clear()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_batch_of_another_shape_is_told_with_what_changed():
    init = lambda key: {"w": jnp.ones((8, 8))}  # noqa: E731
    plan = build_plan(ZeroConfig(stage=3), init, optax.sgd(0.1), make_mesh(MeshConfig(fsdp=8)))
    step = make_train_step(plan, lambda params, batch, rng: (jnp.sum(batch["x"] @ params["w"]), batch["x"].shape[0]))
    state = init_state(plan, jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in ({"x": np.ones((8, 8), np.float32)}, {"x": jnp.ones((8, 8))}):
            state, _ = step(state, batch)
    with pytest.warns(UserWarning, match=r"compiled again.*x float32\[8, 8\] -> float32\[16, 8\]; pad"):
        state, _ = step(state, {"x": np.ones((16, 8), np.float32)})


def test_a_state_that_was_given_away_is_told_instead_of_read():
    init = lambda key: {"w": jnp.ones((8, 8))}  # noqa: E731
    plan = build_plan(ZeroConfig(stage=3), init, optax.sgd(0.1), make_mesh(MeshConfig(fsdp=8)))
    step = make_train_step(plan, lambda params, batch, rng: (jnp.sum(batch @ params["w"]), batch.shape[0]))
    old, batch = init_state(plan, jax.random.key(0)), np.ones((8, 8), np.float32)
    new, _ = step(old, batch)
    with pytest.raises(ValueError, match=r"donated to an earlier step.*go on with the state that step returned"):
        step(old, batch)
    step(new, batch)


def test_state_lies_where_the_plan_says_after_training(straight, corpus):
    config = six_steps(corpus)
    assert unplanned(train.plan_run(config, make_mesh(config.mesh)), straight[0].state) == []


def test_logged_learning_rate_is_the_one_that_was_applied_also_after_a_resume(corpus, tmp_path):
    """Against the formula of warm-up and cosine, and against how far sgd went: rate x clipped gradient norm."""
    peak, warmup, steps, low = 0.5, 2, 6, 0.1
    optimizer = {"name": "sgd", "learning_rate": peak, "warmup_steps": warmup, "schedule": "cosine", "min_ratio": low}
    config = six_steps(corpus, clip=0.3, optimizer=optimizer, checkpoint={"every": 1, "keep": 10})
    straight = run_quietly(config, tmp_path)
    lines = metrics(tmp_path)
    for i, line in enumerate(lines):
        cosine = (1 + math.cos(math.pi * (i - warmup) / (steps - warmup))) / 2
        expected = peak * (i + 1) / warmup if i < warmup else peak * (low + (1 - low) * cosine)
        assert line["learning_rate"] == pytest.approx(expected, rel=1e-5)
        assert line["grad_norm_clipped"] == pytest.approx(min(0.3, line["grad_norm"]), rel=1e-5)
    plan = train.plan_run(config, make_mesh(config.mesh))
    saved = Checkpointer(tmp_path / "checkpoints")
    params = [np.concatenate([x.ravel() for x in leaves(saved.restore(plan, step).params).values()]) for step in range(1, 7)]
    for line, before, after in zip(lines[1:], params, params[1:], strict=False):
        gone = np.linalg.norm(after.astype(np.float64) - before)
        assert gone == pytest.approx(line["learning_rate"] * line["grad_norm_clipped"], rel=1e-3)

    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    resumed = run_quietly(config, tmp_path)
    assert_same_state(resumed.state, straight.state)
    assert column(tmp_path, "learning_rate") == [line["learning_rate"] for line in lines]


# --- the same run, whatever the mode ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "shard_grad_op", "hybrid"])
def test_every_mode_takes_the_same_trajectory(straight, corpus, tmp_path, name):
    options = small_overrides(corpus, steps=3, optimizer__b2="None", optimizer__weight_decay="None", optimizer__schedule="constant")
    assert main(["train", f"--config={REPO / 'configs' / name}.py", f"--workdir={tmp_path}", *options]) == 0
    for metric in ("loss", "grad_norm"):
        np.testing.assert_allclose(column(tmp_path, metric), column(straight[1], metric)[:3], rtol=1e-5)


@pytest.mark.parametrize("sections", [{"mesh": {"tensor": 2}}, {"remat": "full"}], ids=str)
def test_tensor_parallel_and_remat_change_no_loss(straight, corpus, tmp_path, sections):
    run_quietly(six_steps(corpus, steps=4, **sections), tmp_path)
    for metric in ("loss", "grad_norm"):
        np.testing.assert_allclose(column(tmp_path, metric), column(straight[1], metric)[:4], rtol=1e-5)


def test_accumulation_changes_no_loss(tmp_path):
    """A corpus of three rows, one of which has a single token: micro-batches weigh differently."""
    corpus = write_corpus(tmp_path / "short.txt", 16 * 2 + 2)
    found = {}
    for micro_batches in (1, 2, 4):
        workdir = tmp_path / str(micro_batches)
        run_quietly(small_config(corpus, accumulation={"micro_batches": micro_batches}), workdir)
        found[micro_batches] = metrics(workdir)
    assert len({line["tokens"] for line in found[1]}) > 1
    for metric in ("loss", "grad_norm", "tokens"):
        one = [line[metric] for line in found[1]]
        for micro_batches in (2, 4):
            np.testing.assert_allclose([line[metric] for line in found[micro_batches]], one, rtol=1e-5, err_msg=metric)


def test_bfloat16_trains_beside_a_float32_master(straight, corpus, tmp_path):
    result = run_quietly(six_steps(corpus, precision={"compute": "bfloat16"}), tmp_path)
    state = leaves(result.state)
    params = {path.removeprefix("params/"): x for path, x in state.items() if path.startswith("params/")}
    master = {path.removeprefix("opt_state/master/"): x for path, x in state.items() if path.startswith("opt_state/master/")}
    assert params.keys() == master.keys() and len(params) == 12
    for path, x in params.items():
        assert x.dtype == "bfloat16" and master[path].dtype == "float32"
        np.testing.assert_array_equal(x, master[path].astype(x.dtype))
    np.testing.assert_allclose(result.losses, straight[0].losses, rtol=2e-3)


# --- a step whose numbers are not finite ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diverged(corpus, tmp_path_factory):
    """A learning rate that throws the weights out of float32's range: every step after the first is skipped."""
    workdir, console = tmp_path_factory.mktemp("diverged"), Console(file=io.StringIO(), width=120)
    config = small_config(corpus, steps=3, optimizer={"learning_rate": 1e38}, checkpoint={"every": 1, "keep": 5})
    return train.run(config, workdir, console=console), workdir, console.file.getvalue(), config


def test_a_step_that_is_not_finite_is_skipped_and_reported(diverged):
    result, workdir, output, config = diverged
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step_applied"] for line in lines] == [True, False, False]
    assert [line["skipped_steps"] for line in lines] == [0, 1, 2]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "step 2: the gradient of embed/table has NaN; the step was skipped (1 in a row)" in output
    assert "step 3: the gradient of embed/table has NaN; the step was skipped (2 in a row)" in output
    after_first = Checkpointer(workdir / "checkpoints").restore(train.plan_run(config, make_mesh(config.mesh)), 1)
    assert int(result.state.skipped_steps) == 2 and int(result.state.step) == 3
    assert_same_state((after_first.params, after_first.opt_state), (result.state.params, result.state.opt_state))


def test_a_run_that_makes_no_progress_ends_with_its_last_good_state(corpus, tmp_path, diverged):
    config = small_config(corpus, steps=9, max_consecutive_skips=2, optimizer={"learning_rate": 1e38})
    with pytest.raises(NonFiniteError, match=r"step 3: the gradient of embed/table has NaN.*max_consecutive_skips=2 is reached"):
        run_quietly(config, tmp_path)
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    saved = checkpointer.restore(train.plan_run(config, make_mesh(config.mesh)))
    assert_same_state((saved.params, saved.opt_state), (diverged[0].state.params, diverged[0].state.opt_state))
    assert [line["step_applied"] for line in metrics(tmp_path)] == [True, False, False]


def test_float16_trains_and_logs_its_scale(corpus, tmp_path):
    scaling = {"initial_power": 30, "hysteresis": 1, "window": 2}
    config = small_config(corpus, steps=30, max_consecutive_skips=25, precision={"compute": "float16", "loss_scale": scaling})
    run_quietly(config, tmp_path)
    lines = metrics(tmp_path)
    assert lines[0]["loss_scale"] == 2**30 and not lines[0]["step_applied"]  # far beyond float16
    applied = [line for line in lines if line["step_applied"]]
    assert len(applied) > 5 and applied[-1]["loss"] < applied[0]["loss"] and applied[0]["loss_scale"] < 2**30
    # The schedule counts what was applied.
    assert lines[-1]["skipped_steps"] == len(lines) - len(applied)


def test_metrics_of_a_skipped_step_are_still_json(diverged):
    """NaN is no JSON: a line with it cannot be read by jq, a browser, or a strict parser."""
    assert len(metrics(diverged[1])) == 3


def test_a_run_that_skipped_its_last_steps_does_not_end_as_if_nothing_was(diverged):
    assert "skipped" in diverged[2].rpartition("(2 so far)")[2]


# --- resuming -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_straight_run(straight, corpus, tmp_path):
    assert int(run_quietly(six_steps(corpus, steps=3), tmp_path).state.step) == 3
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.0, "grad_norm": 0.0}\n{"step": 5, "lo')  # it went on after its save, and was killed
    result = run_quietly(six_steps(corpus), tmp_path)
    assert_same_state(result.state, straight[0].state)
    assert result.losses == straight[0].losses
    timing = ("step_seconds", "tokens_per_second", "tflops_per_device")
    untimed = [
        [{name: value for name, value in line.items() if name not in timing} for line in metrics(path)] for path in (tmp_path, straight[1])
    ]
    assert untimed[0] == untimed[1]
    assert saved_steps(tmp_path) == ["4", "6"]


def test_the_half_of_a_killed_save_is_not_taken_for_a_checkpoint_and_does_not_stay(straight, corpus, tmp_path):
    """Orbax writes under another name and renames at the end; a run that is killed every day would fill the disk."""
    shutil.copytree(straight[1], tmp_path, dirs_exist_ok=True)
    half = (tmp_path / "checkpoints" / "6").rename(tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp")
    (half / "commit_success.txt").unlink()
    assert_same_state(run_quietly(six_steps(corpus), tmp_path).state, straight[0].state)
    assert saved_steps(tmp_path) == ["4", "6"]


def test_a_second_run_in_one_workdir_is_refused_before_it_writes(straight, corpus, tmp_path):
    shutil.copytree(straight[1], tmp_path, dirs_exist_ok=True)
    other = Checkpointer(tmp_path / "checkpoints")
    other.claim()
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="being written by another"):
        run_quietly(six_steps(corpus, steps=8), tmp_path)
    assert snapshot(tmp_path) == before
    other.close()
    assert saved_steps(tmp_path) == ["4", "6"]


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(straight, corpus, tmp_path):
    """And comes to the same end; the damaged one stays beside the one that takes its name."""
    shutil.copytree(straight[1], tmp_path, dirs_exist_ok=True)
    data = max(
        (path for path in (tmp_path / "checkpoints" / "6").rglob("*") if path.parent.name == "d"), key=lambda path: path.stat().st_size
    )
    data.write_bytes(data.read_bytes()[:-1000] + bytes(1000))
    with pytest.warns(UserWarning, match="6"):
        result = run_quietly(six_steps(corpus), tmp_path)
    assert_same_state(result.state, straight[0].state)
    assert result.losses == straight[0].losses
    assert column(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    assert saved_steps(tmp_path) == ["4", "6", "6.damaged-1"]


@pytest.mark.parametrize(
    "sections",
    [
        {"zero": {"stage": 1}},
        {"mesh": {"replica": 2}},
        {"accumulation": {"micro_batches": 2}},
        {"mesh": {"tensor": 2}, "zero": {"stage": 2}},
    ],
    ids=str,
)
def test_resuming_in_another_mode_goes_on_with_the_same_run(straight, corpus, tmp_path, sections):
    shutil.copytree(straight[1], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    result = run_quietly(six_steps(corpus, **sections), tmp_path)
    assert column(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(result.losses, straight[0].losses, rtol=1e-5)


def test_running_again_after_the_end_changes_nothing_and_exits_with_0(straight, corpus, tmp_path):
    shutil.copytree(straight[1], tmp_path, dirs_exist_ok=True)
    before = {path: data for path, data in snapshot(tmp_path).items() if not path.startswith(("tensorboard", "loss.png"))}
    result = run_quietly(six_steps(corpus), tmp_path)
    assert result.stopped_by is None and result.losses == straight[0].losses
    assert_same_state(result.state, straight[0].state)
    assert {path: data for path, data in snapshot(tmp_path).items() if not path.startswith(("tensorboard", "loss.png"))} == before


def test_a_kill_right_after_a_resume_loses_no_metrics(tmp_path):
    """The first step of a resumed run may take minutes to compile; the lines of before must be on disk all that time."""
    writer = MetricsWriter(tmp_path, 0)
    for step in (1, 2, 3):
        writer.write({"step": step, "loss": 1.0})
    writer.close()
    resumed = MetricsWriter(tmp_path, 2)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]  # what a process killed here leaves
    resumed.close()
    assert resumed.column("step") == [1, 2]


@pytest.mark.filterwarnings("ignore:.*nothing is sharded")
def test_one_device_two_devices_and_a_corpus_smaller_than_a_batch(tmp_path):
    """The trajectory is that of 8 devices: a row of a batch is a function of seed, step and row alone."""
    corpus = write_corpus(tmp_path / "row.txt", 12)  # one row, not even a full one
    expected = run_quietly(small_config(corpus), tmp_path / "8").losses
    for count in (1, 2):
        losses = run_quietly(small_config(corpus), tmp_path / str(count), devices=jax.devices()[:count]).losses
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert column(tmp_path / "8", "tokens") == [32 * 11] * 5


# --- signals ------------------------------------------------------------------------------------------------------------

LONG = 150


@pytest.fixture(scope="module")
def long_run(corpus, tmp_path_factory, cache):
    """A run of a process of its own that nobody stops, and its options."""
    workdir = tmp_path_factory.mktemp("long") / "run"
    options = ["train", f"--config={REPO}/configs/zero3.py", "--devices=2", *small_overrides(corpus, steps=LONG, checkpoint__every=40)]
    done = zjax(*options, f"--workdir={workdir}", cache=cache)
    assert done.returncode == 0, done.stderr
    return workdir, options


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_and_the_next_run_ends_as_if_there_was_none(long_run, tmp_path, cache, number):
    straight, options = long_run
    command = [COMMAND, *options, f"--workdir={tmp_path}"]
    child = subprocess.Popen(command, env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_lines(tmp_path / "metrics.jsonl", 3, child)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 128 + number, err
    assert "Traceback" not in out + err
    stopped_at = int(re.search(rf"stopped by {number.name}; saved at step (\d+)", out)[1])
    assert 3 <= stopped_at < LONG
    assert saved_steps(tmp_path)[-1] == str(stopped_at)
    assert column(tmp_path, "step") == list(range(1, stopped_at + 1))

    done = zjax(*options, f"--workdir={tmp_path}", cache=cache)
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {stopped_at} of {LONG}" in done.stdout
    assert column(tmp_path, "step") == list(range(1, LONG + 1))
    assert column(tmp_path, "loss") == column(straight, "loss")
    config = small_config(tmp_path, mesh=MeshConfig(fsdp=8).__dict__)
    plan = train.plan_run(config, make_mesh(config.mesh))
    assert_same_state(*(final(plan, workdir) for workdir in (tmp_path, straight)))


def final(plan: Plan, workdir):
    """The state that a run of `LONG` steps saved last."""
    return Checkpointer(workdir / "checkpoints").restore(plan, LONG)


def wait_for_lines(path, count, child, timeout=60.0):
    """Returns when a child has written so many lines; fails if it ends before."""
    until = time.monotonic() + timeout
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_kill_loses_only_the_steps_since_the_last_save(long_run, tmp_path, cache):
    """kill -9 while checkpoints are written: what is there is whole, and the next run goes on from it."""
    straight, options = long_run
    command = [COMMAND, *options, "--config.checkpoint.every=2", f"--workdir={tmp_path}"]
    child = subprocess.Popen(command, env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_lines(tmp_path / "metrics.jsonl", 20, child)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    done = zjax(*options, f"--workdir={tmp_path}", cache=cache)
    assert done.returncode == 0, done.stderr
    assert re.search(r"resuming at step \d+ of", done.stdout)
    assert column(tmp_path, "step") == list(range(1, LONG + 1))
    assert column(tmp_path, "loss") == column(straight, "loss")
    assert [int(name) for name in saved_steps(tmp_path)][-1] == LONG
