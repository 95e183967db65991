"""Evaluation: the loss of a whole set, exactly; the held-out text; early stop and the best checkpoint."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import compiled_fast, leaves, run_quietly, shared_folder, small_config, write_corpus

import zjax
from zjax import train
from zjax.checkpoint import Checkpointer
from zjax.config import DataConfig, EvaluationConfig
from zjax.data import Batches, EvalBatches, hold_out, load_corpus
from zjax.estimate.hardware import CHIPS, chip_of_kind
from zjax.evaluate import Watch
from zjax.fields import ConfigError
from zjax.mesh import make_mesh
from zjax.metrics import model_flops
from zjax.models import llama
from zjax.step import batch_sharding

LAYERS, WIDTH = 3, 16


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


# --- the step -------------------------------------------------------------------------------------------------------------


def init(key):
    keys = jax.random.split(key, 2)
    return {
        "layers": {"w": 0.4 * jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH))},
        "head": {"kernel": jax.random.normal(keys[1], (WIDTH, 8))},
        "scale": jnp.full((WIDTH,), 0.5),  # of no unit
    }


def loss_of(loop, head):
    def loss_fn(params, batch, rng):
        x = loop(params["layers"], jnp.asarray(batch["x"]), params["scale"])
        error = jnp.sum(head(params["head"], x) ** 2, axis=-1) * batch["mask"]
        return jnp.sum(error), jnp.sum(batch["mask"]), {"largest weight": (jnp.sum(batch["mask"] ** 2), jnp.sum(batch["mask"]))}

    return loss_fn


def layer(params, x, scale):
    return x + jnp.tanh(x @ params["w"]) * scale


MARKED = loss_of(
    lambda layers, x, scale: zjax.scan_layers(layer, layers, x, scale, at="layers"),
    zjax.fully_shard(lambda p, x: x @ p["kernel"], at="head"),
)
PLAIN = loss_of(lambda layers, x, scale: jax.lax.scan(lambda x, p: (layer(p, x, scale), None), x, layers)[0], lambda p, x: x @ p["kernel"])


def plan_of(stage, engine, micro=1, mesh=None):
    return zjax.build_plan(
        zjax.ZeroConfig(stage=stage, engine=engine),
        init,
        optax.sgd(0.1),
        mesh or zjax.make_mesh(zjax.MeshConfig(replica=2)),
        accumulation=zjax.AccumulationConfig(micro_batches=micro),
        units=("layers[*]", "head"),
    )


def rows(count):
    """Rows that weigh differently."""
    draw = np.random.default_rng(3)
    return {"x": draw.normal(size=(count, WIDTH)).astype("float32"), "mask": draw.integers(1, 5, count).astype("float32")}


def in_batches(rows, size):
    """Batches of one shape; what the last one lacks are zeros."""
    count = len(rows["mask"])
    for start in range(0, count, size):
        part = {name: x[start : start + size] for name, x in rows.items()}
        yield {name: np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)]) for name, x in part.items()}


@pytest.mark.parametrize(
    ("stage", "engine", "micro"), [(3, "explicit", 1), (3, "partitioner", 1), (2, "explicit", 2), (1, "partitioner", 2), (0, "explicit", 1)]
)
def test_a_set_with_a_short_last_batch_has_the_loss_of_all_its_rows_at_once_on_one_device(stage, engine, micro):
    plan, data = plan_of(stage, engine, micro), rows(37)
    state = zjax.init_state(plan, jax.random.key(0))
    step = zjax.make_eval_step(plan, MARKED)
    found = zjax.evaluate(step, state, in_batches(data, 16))
    total, weight, metrics = PLAIN(jax.device_get(state.params), data, None)
    assert found["weight"] == weight == data["mask"].sum()
    assert found["loss"] == pytest.approx(float(total / weight), rel=1e-6)
    value, weighed = metrics["largest weight"]
    assert found["largest weight"] == pytest.approx(float(value / weighed), rel=1e-6)
    assert step.jitted._cache_size() == 1  # one program for all batches
    assert zjax.evaluate(step, state.params, in_batches(data, 16)) == found  # nothing was donated


def test_each_unit_is_gathered_once_and_nothing_is_scattered():
    plan = plan_of(3, "explicit")
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in rows(16).items()}
    state = zjax.init_state(plan, jax.random.key(0))
    text = zjax.make_eval_step(plan, MARKED).jitted.lower(state.params, batch).as_text()
    # The first layer, the next one in the loop, the head, the scale.
    assert text.count('"stablehlo.all_gather"') == 4
    assert "reduce_scatter" not in text


def test_the_loss_of_training_is_the_evaluation_of_its_batch():
    plan, batch = plan_of(3, "explicit"), rows(16)
    state = zjax.init_state(plan, jax.random.key(0))
    evaluated = zjax.evaluate(zjax.make_eval_step(plan, MARKED), state, [batch])["loss"]
    _, metrics = zjax.make_train_step(plan, MARKED)(state, batch)
    assert evaluated == pytest.approx(float(metrics["loss"]), rel=1e-6)


def test_what_cannot_be_evaluated_raises():
    plan = plan_of(3, "explicit")
    with pytest.raises(ValueError, match="mean of the set"):
        zjax.make_eval_step(plan, zjax.mean_loss(lambda p, b, r: jnp.mean(b)))
    step, params = zjax.make_eval_step(plan, MARKED), zjax.init_state(plan, jax.random.key(0)).params
    with pytest.raises(ValueError, match=r"12 rows do not divide over 8"):
        step(params, rows(12))
    empty = {name: np.zeros_like(x) for name, x in rows(8).items()}
    for batches in ([], [empty]):
        with pytest.raises(ValueError, match="nothing in the batches that weighs"):
            zjax.evaluate(step, params, batches)
    with pytest.raises(TypeError, match="loss_fn must return"):
        zjax.make_eval_step(plan, lambda p, b, r: jnp.sum(b["x"]))(params, rows(8))


def test_sums_of_large_sets_are_not_rounded_to_float32():
    step = lambda state, batch: (jnp.float32(batch), jnp.float32(1), {})  # noqa: E731
    assert zjax.evaluate(step, None, [2.0**24, *[1.0] * 8])["loss"] == (2**24 + 8) / 9


def test_the_watch_takes_the_first_of_the_lowest_and_no_nan():
    watch = Watch()
    for i, loss in enumerate([math.nan, 3.0, 2.0, 2.0, math.nan, 2.5]):
        watch = watch.seen(i, loss)
    assert watch == Watch(best_loss=2.0, best_step=2, since=3)


# --- the held-out text ------------------------------------------------------------------------------------------------------

LENGTH = 16


def numbers(tmp_path, count):
    """A corpus whose tokens say where they stand."""
    np.arange(count, dtype="<u2").tofile(tmp_path / "numbers.bin")
    return DataConfig(path=str(tmp_path / "numbers.bin"), sequence_length=LENGTH)


def test_the_last_rows_are_held_out_and_never_trained_on(tmp_path):
    data = numbers(tmp_path, 20 * LENGTH + 6)
    corpus = load_corpus(data)
    kept, held = hold_out(corpus, data, EvaluationConfig(every=1, fraction=0.12))
    assert len(held) == math.ceil(0.12 * 20) * LENGTH + 1  # whole rows
    assert [*kept.slice(0, len(kept)), *held.slice(0, len(held))] == list(range(20 * LENGTH + 6))
    again = hold_out(load_corpus(data), data, EvaluationConfig(every=1, fraction=0.12))
    assert [part.fingerprint for part in again] == [kept.fingerprint, held.fingerprint]
    batches = Batches(kept, 8, LENGTH, seed=1)
    seen = [batches.rows(step, 0, 8) for step in range(6)]
    assert max(max(batch[name].max() for name in ("inputs", "targets")) for batch in seen) < held.slice(0, 1)[0]


def test_evaluation_batches_have_every_row_once_and_one_shape(tmp_path):
    corpus = load_corpus(numbers(tmp_path, 10 * LENGTH + 6))
    batches, sharding = EvalBatches(corpus, 8, LENGTH), batch_sharding(plan_of(3, "explicit"))
    found = [jax.device_get(batches.at(i, sharding)) for i in range(len(batches))]
    assert [batch["inputs"].shape for batch in found] == [(8, LENGTH)] * 2
    targets = np.concatenate([batch["targets"][batch["mask"] == 1] for batch in found])
    assert targets.tolist() == list(range(1, 10 * LENGTH + 6))
    assert not found[1]["mask"][3:].any() and not found[1]["inputs"][3:].any()


def test_held_out_text_that_cannot_be_raises(tmp_path):
    data = numbers(tmp_path, 3 * LENGTH)
    with pytest.raises(ConfigError, match=r"evaluation\.fraction=0\.9.*2 whole rows.*nothing would be left"):
        hold_out(load_corpus(data), data, EvaluationConfig(every=1, fraction=0.9))
    text = write_corpus(tmp_path / "text.txt", 100)
    with pytest.raises(ConfigError, match=r"evaluation\.path=.*text\.txt"):
        hold_out(load_corpus(data), data, EvaluationConfig(every=1, path=str(text)))


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"every": 2}, "evaluation.every=2: nothing is held out"),
        ({"every": -1}, "evaluation.every=-1"),
        ({"every": 1, "fraction": 1.0}, "evaluation.fraction=1.0"),
        ({"every": 1, "fraction": 0.1, "path": "x.txt"}, "evaluation.fraction=0.1: evaluation.path names"),
        ({"patience": 3}, "evaluation.patience=3: evaluation.every=0 never evaluates"),
        ({"path": "x.txt"}, "evaluation.path='x.txt': evaluation.every=0 never evaluates"),
    ],
)
def test_an_evaluation_that_cannot_be_raises(knobs, told):
    with pytest.raises(ConfigError) as error:
        EvaluationConfig(**knobs)
    assert told in str(error.value)


# --- runs -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", 16 * 100 + 6)


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def saved_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def evaluated(corpus, **sections):
    evaluation = {"every": 2, "fraction": 0.3, **sections.pop("evaluation", {})}
    return small_config(corpus, **{"steps": 6, "evaluation": evaluation, "checkpoint": {"every": 3, "keep": 2}, **sections})


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    config = evaluated(corpus)
    return run_quietly(config, workdir), workdir, config


def test_a_runs_evaluations_are_those_of_its_checkpoints_on_one_device(straight, corpus):
    result, workdir, config = straight
    lines = metrics(workdir)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6]
    held = hold_out(load_corpus(config.data), config.data, config.evaluation)[1]
    source = EvalBatches(held, 1, config.data.sequence_length).source
    assert len(source) % 32  # the last batch is a short one
    batch = {name: np.stack([source[row][name] for row in range(len(source))]) for name in source[0]}
    plan = train.plan_run(config, make_mesh(config.mesh))
    for step in (4, 6):
        params = jax.device_get(Checkpointer(workdir / "checkpoints").restore(plan, step).params)
        total, weight = train.model_of(config).loss(params, batch, None)
        assert weight == len(held) - 1
        assert lines[step - 1]["eval_loss"] == pytest.approx(float(total / weight), rel=1e-5)
    assert result.watch == Watch(best_loss=lines[5]["eval_loss"], best_step=6)


def test_a_resumed_run_evaluates_as_the_straight_one_does(straight, corpus, tmp_path):
    result, workdir, config = straight
    run_quietly(dataclasses.replace(config, steps=3), tmp_path)
    resumed = run_quietly(config, tmp_path)
    assert resumed.watch == result.watch
    column = lambda path: [line.get("eval_loss") for line in metrics(path)]  # noqa: E731
    assert column(tmp_path) == column(workdir)
    for path, x in leaves(result.state).items():
        np.testing.assert_array_equal(leaves(resumed.state)[path], x)


def test_another_share_held_out_is_another_run(straight, corpus, tmp_path):
    run_quietly(evaluated(corpus, steps=2), tmp_path)
    with pytest.raises(ValueError, match=r"evaluation\.fraction=0\.3, this run has 0\.2"):
        run_quietly(evaluated(corpus, evaluation={"fraction": 0.2}), tmp_path)


STILL = {"optimizer": {"learning_rate": 0.0}, "checkpoint": {"every": 1, "keep": 1}, "steps": 10}
"""Nothing is learned: the first evaluation stays the best."""


def test_a_run_without_a_new_lowest_loss_ends_early_also_over_a_resume_and_keeps_its_best_checkpoint(corpus, tmp_path):
    config = evaluated(corpus, **STILL, evaluation={"every": 1, "patience": 3})
    killed = run_quietly(dataclasses.replace(config, steps=3), tmp_path)
    assert killed.watch.since == 2 and saved_steps(tmp_path) == [1, 3]
    result = run_quietly(config, tmp_path)
    assert int(result.state.step) == 4 and result.stopped_by is None
    assert (result.watch.best_step, result.watch.since) == (1, 3)
    assert saved_steps(tmp_path) == [1, 4]
    assert Checkpointer(tmp_path / "checkpoints").best_step() == 1
    again = run_quietly(config, tmp_path)
    assert int(again.state.step) == 4 and len(metrics(tmp_path)) == 4
    patient = run_quietly(dataclasses.replace(config, steps=6, evaluation=dataclasses.replace(config.evaluation, patience=0)), tmp_path)
    assert int(patient.state.step) == 6 and saved_steps(tmp_path) == [1, 6]


def test_the_best_checkpoint_is_kept_only_where_asked_for(corpus, tmp_path):
    run_quietly(evaluated(corpus, **{**STILL, "steps": 3}, evaluation={"every": 1, "keep_best": False}), tmp_path)
    assert saved_steps(tmp_path) == [3]


# --- FLOPs ------------------------------------------------------------------------------------------------------------------


def test_model_flops_are_those_of_the_palm_paper():
    """6 N + 12 L H Q T of Llama-2-7B: 6,738,415,616 parameters (its paper and release), of which the embedding is only read."""
    model = llama.LlamaFunctions(llama.PRESETS["llama2_7b"])
    assert model.flops_per_token(4096) == 6 * (6_738_415_616 - 32_000 * 4096) + 12 * 32 * 32 * 128 * 4096
    tied = llama.LlamaFunctions(dataclasses.replace(llama.PRESETS["tiny"], tied=True))
    untied = llama.LlamaFunctions(llama.PRESETS["tiny"])
    assert tied.flops_per_token(128) == untied.flops_per_token(128)  # the same products


def test_mfu_is_a_share_of_a_known_chips_peak_and_absent_without_one():
    """PaLM's own figure, appendix B: 46.2% of 6144 TPU v4 at 238.3 thousand tokens a second, 540.35e9 parameters."""
    palm = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    found = model_flops(238_300, palm, 6144, CHIPS["v4"])
    assert found["mfu"] == pytest.approx(0.462, abs=2e-3)
    assert found["tflops_per_device"] == pytest.approx(found["mfu"] * 275)
    assert model_flops(1e3, 1e9, 2, None) == {"tflops_per_device": 0.5}


def test_chips_are_known_by_what_jax_calls_them():
    assert chip_of_kind("NVIDIA H100 80GB HBM3") is CHIPS["h100"] and chip_of_kind("TPU v5 lite") is CHIPS["v5e"]
    assert chip_of_kind("NVIDIA H100 PCIe") is None and chip_of_kind(jax.devices()[0].device_kind) is None
