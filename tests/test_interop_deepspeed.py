"""DeepSpeed configs become the same run: batch, auto, precision, optimizer, sharding; and the command that takes them."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from deepspeed_runs import (
    ADAMW,
    BASE,
    FP16,
    ONE_CYCLE,
    RANGE_TEST,
    STAGE3,
    WARMUP_COSINE,
    merged,
    run_of,
    told,
)
from hypothesis import given
from hypothesis import strategies as st
from small import REPO

from zjax import cli
from zjax.config import DataConfig, LossScaleConfig, MeshConfig, PrecisionConfig, TrainConfig, ZeroConfig
from zjax.ds_config import KEYS, read
from zjax.fields import ConfigError
from zjax.interop.deepspeed import OPTIMIZERS, batch_triangle
from zjax.optim import make_optimizer
from zjax.optimizer_config import OptimizerConfig

pytestmark = pytest.mark.filterwarnings("ignore:DeepSpeed config")

# --- the batch triangle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_sizes", "degree", "solved"),
    [
        ((32, None, None), 8, (32, 4, 1)),
        ((32, 2, None), 8, (32, 2, 2)),
        ((32, None, 4), 8, (32, 1, 4)),
        ((None, 3, 5), 8, (120, 3, 5)),
        ((None, 3, None), 8, (24, 3, 1)),
        ((32, 2, 2), 8, (32, 2, 2)),
    ],
)
def test_the_third_batch_size_follows_from_two(given_sizes, degree, solved):
    """The examples of the reference, which follow DeepSpeed's own code."""
    assert batch_triangle(*given_sizes, degree) == solved


@pytest.mark.parametrize(
    ("given_sizes", "degree", "message"),
    [
        (
            (32, 3, None),
            8,
            "train_batch_size=32: is not train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 1 x data degree 8 = 24",
        ),
        ((4, None, None), 8, "train_micro_batch_size_per_gpu 0"),
        ((10, 3, None), 1, "3 x gradient_accumulation_steps 3 x data degree 1 = 9"),
        ((64, 2, 2), 8, "= 32"),
        ((None, None, 4), 8, "either train_batch_size or train_micro_batch_size_per_gpu must be given"),
        ((None, None, None), 8, "either train_batch_size or"),
        ((0, None, None), 8, "train_batch_size=0: must be positive"),
        ((8, 1, -1), 8, "gradient_accumulation_steps=-1: must be positive"),
    ],
)
def test_a_contradictory_triangle_raises_with_all_its_sides(given_sizes, degree, message):
    with pytest.raises(ConfigError) as error:
        batch_triangle(*given_sizes, degree)
    assert message in str(error.value)


@given(
    micro=st.integers(1, 64), steps=st.integers(1, 64), degree=st.integers(1, 64), left_out=st.sampled_from(["", "train", "micro", "steps"])
)
def test_a_consistent_triangle_is_found_from_any_two_sides(micro, steps, degree, left_out):
    train = micro * steps * degree
    sides = {"train": train, "micro": micro, "steps": steps}
    sides |= {left_out: None} if left_out else {}
    assert batch_triangle(sides["train"], sides["micro"], sides["steps"], degree) == (train, micro, steps)


@given(train=st.integers(1, 999), micro=st.integers(1, 9) | st.none(), steps=st.integers(1, 9) | st.none(), degree=st.integers(1, 16))
def test_what_comes_of_a_triangle_is_consistent_or_an_error(train, micro, steps, degree):
    try:
        found = batch_triangle(train, micro, steps, degree)
    except ConfigError:
        return
    assert found[0] == train == found[1] * found[2] * degree
    assert micro in (None, found[1]) and steps in (None, found[2])


def test_the_data_degree_is_without_tensor_parallel_devices():
    made = run_of({"train_micro_batch_size_per_gpu": 3, "tensor_parallel": {"autotp_size": 2}})
    assert (made.data.global_batch, made.mesh) == (3 * 4, MeshConfig(tensor=2))
    assert "is not whole" in told({"tensor_parallel": {"autotp_size": 3}})
    assert "contradict" in told({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}})


def test_accumulation_without_a_batch_takes_the_configs():
    made = run_of({"gradient_accumulation_steps": 4})
    assert (made.data.global_batch, made.accumulation.micro_batches) == (32, 4)
    assert "train_batch_size is data.global_batch=32" in told({"gradient_accumulation_steps": 3})
    accumulating = dataclasses.replace(BASE, accumulation=dataclasses.replace(BASE.accumulation, micro_batches=2))
    assert run_of({}, accumulating).accumulation.micro_batches == 2


# --- auto ----------------------------------------------------------------------------------------------------------------------


def test_auto_is_filled_in_as_hugging_face_does():
    """transformers/integrations/deepspeed.py, trainer_config_process and trainer_config_finalize."""
    optimizer = OptimizerConfig(learning_rate=5e-4, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.2, warmup_steps=20)
    base = dataclasses.replace(BASE, clip=0.7, optimizer=optimizer, precision=PrecisionConfig(compute="bfloat16"))
    everything = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")},
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        },
    }  # fmt: skip
    made = run_of(everything, base)
    arguments = {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-4, "warmup_num_steps": 20, "total_num_steps": 200}
    assert made.optimizer == dataclasses.replace(optimizer, schedule="WarmupDecayLR", schedule_arguments=arguments, warmup_steps=0)
    assert made.zero == ZeroConfig(stage=3, persistence_threshold=10 * 64)
    assert (made.clip, made.precision, made.data, made.accumulation) == (0.7, base.precision, base.data, base.accumulation)


def test_auto_batch_sizes_follow_from_those_that_are_numbers():
    base = dataclasses.replace(BASE, accumulation=dataclasses.replace(BASE.accumulation, micro_batches=2))

    def solved(*sizes):
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        made = run_of(dict(zip(names, sizes, strict=True)), base)
        return made.data.global_batch, made.accumulation.micro_batches

    assert solved("auto", "auto", "auto") == (32, 2)
    assert solved("auto", 3, "auto") == (48, 2)
    assert solved(64, "auto", "auto") == (64, 2)
    assert solved(64, 2, "auto") == (64, 4)
    assert solved("auto", "auto", 4) == (32, 4)


def test_auto_where_nothing_fills_it_in_raises_with_the_key():
    assert 'zero_optimization.stage="auto": auto is not filled in' in told({"zero_optimization": {"stage": "auto"}})
    assert "zero_quantized_weights" in told({"zero_optimization": {"zero_quantized_weights": "auto"}})
    unknown = TrainConfig(data=DataConfig(global_batch=32))
    threshold = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"}}
    assert "10 times the model's hidden size" in told(threshold, unknown)
    assert run_of(threshold, unknown, hidden_size=4096).zero.persistence_threshold == 40960


# --- precision, optimizer, stage 3 -----------------------------------------------------------------------------------------------


def test_what_the_file_leaves_out_is_deepspeeds_default():
    made = run_of({})
    assert (made.zero, made.precision, made.clip) == (ZeroConfig(stage=0), PrecisionConfig(compute="float32"), 1.0)
    assert (made.optimizer, made.model, made.steps) == (BASE.optimizer, BASE.model, BASE.steps)
    assert run_of({"gradient_clipping": 0}).clip is None
    assert run_of(FP16).precision == PrecisionConfig(compute="float16", loss_scale=LossScaleConfig())
    assert run_of(STAGE3).zero == ZeroConfig(stage=3, persistence_threshold=100_000, prefetch=1)
    assert run_of({"zero_optimization": {"stage": 2}}).zero == ZeroConfig(stage=2)


def test_adam_is_adamw_unless_it_is_told_not_to_be():
    adam = lambda kind, **params: run_of({"optimizer": {"type": kind, "params": params}}).optimizer  # noqa: E731
    expected = OptimizerConfig(name="adamw", learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0)
    assert adam("Adam") == adam("AdamW") == adam("adam") == expected
    assert adam("Adam", adam_w_mode=False) == dataclasses.replace(expected, name="adam")
    assert adam("Adam", adam_w_mode=False, torch_adam=True) == dataclasses.replace(expected, name="adam")
    assert adam("AdamW", adam_w_mode=False, torch_adam=True).weight_decay == 0.01  # AdamW stays AdamW


def test_one_cycle_cycles_the_betas_of_an_optimizer_that_has_them():
    made = run_of(merged(ADAMW, ONE_CYCLE)).optimizer
    assert (made.b1, made.b2, made.eps) == (None, None, 1e-8) and "cycle_momentum" not in made.schedule_arguments
    assert run_of(merged({"optimizer": {"type": "SGD"}}, ONE_CYCLE)).optimizer.schedule_arguments["cycle_momentum"] is False
    kept = run_of(merged(ADAMW, ONE_CYCLE, {"scheduler": {"params": {"cycle_momentum": False}}})).optimizer
    assert (kept.b1, kept.b2) == (0.9, 0.999)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", [{}, ONE_CYCLE, WARMUP_COSINE, RANGE_TEST], ids=["none", "OneCycle", "WarmupCosineLR", "LRRangeTest"])
def test_what_comes_of_an_optimizer_can_be_built(kind, scheduler):
    made = run_of(merged({"optimizer": {"type": kind}}, scheduler)).optimizer
    make_optimizer(made, steps=20).init({"w": jnp.zeros((4, 4))})


def test_every_optimizer_of_deepspeed_is_known():
    """The list in DeepSpeed's engine; others are torch.optim's by name, of which there is SGD."""
    engine = ["adagrad", "adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd", "lion", "muon"]
    assert set(engine) == ({*OPTIMIZERS} - {"sgd"}) | {*KEYS["optimizer.type"].refused}


def test_adagrads_eps_is_below_the_root():
    """torch divides by sqrt(sum) + eps, optax by sqrt(sum + eps)."""
    made = run_of({"optimizer": {"type": "Adagrad", "params": {"eps": 1e-3}}}).optimizer
    assert (made.eps, made.initial_accumulator_value) == (pytest.approx(1e-6), 0.0)


def test_the_files_schedule_takes_the_place_of_the_configs_and_nothing_else_does():
    base = dataclasses.replace(BASE, optimizer=OptimizerConfig(schedule="cosine", warmup_steps=10, min_ratio=0.1))
    assert run_of(ADAMW, base).optimizer.schedule == "cosine"
    made = run_of({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e3}}}, base).optimizer
    assert (made.schedule, made.schedule_arguments, made.warmup_steps, made.min_ratio) == ("WarmupLR", {"warmup_num_steps": 1000}, 0, 0.0)


@pytest.mark.parametrize(("live", "units", "prefetch"), [(1e9, None, 1), (500, None, 1), (400, None, 1), (399, 1, 0), (0, 1, 0)])
def test_max_live_parameters_bounds_what_is_gathered_at_once(live, units, prefetch):
    """A unit has 200 elements; two are whole at once unless the bound lies below them."""
    made = run_of({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": live}}, unit_elements=200)
    assert (made.zero.max_gathered_units, made.zero.prefetch) == (units, prefetch)


def test_mics_is_a_hybrid_mesh():
    made = run_of({"zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    assert made.mesh == MeshConfig(replica=4, fsdp=2)
    assert "must divide the data degree, 8" in told({"zero_optimization": {"stage": 3, "mics_shard_size": 3}})
    assert "it needs zero_optimization.stage=3" in told({"zero_optimization": {"stage": 2, "mics_shard_size": 2}})
    assert run_of({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}).mesh == MeshConfig()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enable one of them"),
        ({"fp16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}, "must be what fp16 and bf16 say, float16"),
        ({"zero_optimization": {"stage": 2}, "prescale_gradients": True}, "prescale_gradients=true: DeepSpeed refuses it"),
        ({"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2}, "gradient_predivide_factor=2: DeepSpeed refuses it"),
        ({"zero_optimization": {"stage": 2, "pipeline_loading_checkpoint": True}}, "only stage 3 has it"),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"legacy_stage1": True}}, "legacy_stage1=true"),
        ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op="sum"'),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "set optimizer.moment_dtype='bfloat16'"),
        ({"fp16": {"enabled": True, "loss_scale": 128}, "optimizer": {"type": "Lamb"}}, "Lamb needs dynamic loss scaling"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "must be a positive number of steps (DeepSpeed config: fp16.loss_scale_window)"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "must be positive and finite"),
        ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1}}, "use AdamW"),
        ({"optimizer": {"type": "MuSGD"}}, "use SGD with optimizer.groups"),
        ({"elasticity": {"enabled": True}, "train_batch_size": 8}, "elasticity.enabled=true"),
    ],
)  # fmt: skip
def test_combinations_that_deepspeed_refuses_raise(keys, message):
    assert message in told(keys)


def test_prescaling_without_a_reduce_scatter_is_taken():
    run_of({"zero_optimization": {"stage": 2, "reduce_scatter": False}, "prescale_gradients": True, "gradient_predivide_factor": 8})


def test_zjaxs_own_knobs_of_zero_stay():
    base = dataclasses.replace(BASE, zero=ZeroConfig(ignored=("*norm*",), strict=True, engine="explicit", reshard_after_forward=False))
    assert run_of(STAGE3, base).zero == ZeroConfig(persistence_threshold=100_000, ignored=("*norm*",), strict=True, engine="explicit")


# --- ZeroConfig.from_deepspeed ---------------------------------------------------------------------------------------------------


def test_the_zero_section_alone(tmp_path):
    keys = {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}
    (tmp_path / "ds.json").write_text(json.dumps(keys))
    assert (
        ZeroConfig.from_deepspeed(keys)
        == ZeroConfig.from_deepspeed(tmp_path / "ds.json")
        == ZeroConfig(persistence_threshold=100_000, prefetch=0)
    )
    assert ZeroConfig.from_deepspeed({}) == ZeroConfig(stage=0)
    auto = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"}}
    assert ZeroConfig.from_deepspeed(auto, hidden_size=100).persistence_threshold == 1000
    with pytest.raises(ConfigError, match="zero_optimisation"):
        ZeroConfig.from_deepspeed({"zero_optimisation": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"use MeshConfig\(replica=-1, fsdp=4\)"):
        ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 3, "mics_shard_size": 4}})
    with pytest.raises(NotImplementedError, match="hpZ"):
        ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})
    with pytest.warns(UserWarning, match="overlap_comm"):
        ZeroConfig.from_deepspeed({"steps_per_print": 1, "zero_optimization": {"overlap_comm": True}})


# --- the command -----------------------------------------------------------------------------------------------------------------


def command(tmp_path, keys, *options, name="plan"):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(keys))
    return cli.main([name, f"--config={REPO / 'configs' / 'llama_tiny.py'}", f"--deepspeed={path}", *options])


KEYS_OF_A_RUN = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 5,
    "zero_optimization": {"stage": 3},
    "fp16": {"enabled": False},
}


def test_explain_shows_each_key_its_fate_and_what_it_became(tmp_path, capsys):
    assert command(tmp_path, KEYS_OF_A_RUN, "--explain", "--json") == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [row.key for row in read(KEYS_OF_A_RUN).rows]
    assert rows["train_batch_size"] == {
        "key": "train_batch_size", "value": 32, "fate": "mapped", "text": "data.global_batch=32, accumulation.micro_batches=2",
    }  # fmt: skip
    assert rows["zero_optimization.stage"]["text"] == "zero.stage=3" and rows["steps_per_print"]["fate"] == "no meaning"
    assert command(tmp_path, KEYS_OF_A_RUN, "--explain") == 0
    table = capsys.readouterr().out
    assert "train_micro_batch_size_per_gpu" in table and "zero.stage=3" in table and "metrics.jsonl" in table


def test_explain_also_shows_a_file_that_cannot_be_honoured_and_fails(tmp_path, capsys):
    assert command(tmp_path, {"train_batch_size": 32, "zero_optimisation": {}, "sparse_gradients": True}, "--explain", "--json") == 2
    out, error = capsys.readouterr()
    assert [row["fate"] for row in json.loads(out)] == ["mapped", "unknown", "rejected"]
    assert "zero_optimisation" in error and "sparse_gradients" in error


def test_plan_takes_the_file_and_says_what_changes_nothing(tmp_path, capsys):
    assert command(tmp_path, KEYS_OF_A_RUN | {"zero_optimization": {"stage": 1}}, "--json") == 0
    out, error = capsys.readouterr()
    parameters, held = json.loads(out)["parameters"], json.loads(out)["per_device"]
    assert held["params"] == 4 * parameters and held["optimizer"] == pytest.approx(8 * parameters / 8, rel=0.01)
    assert error.count("steps_per_print") == 1


def test_explain_without_a_file_raises(capsys):
    assert cli.main(["plan", f"--config={REPO / 'configs' / 'llama_tiny.py'}", "--explain"]) == 2
    assert "--deepspeed" in capsys.readouterr().err


def trained(tmp_path, monkeypatch, keys, *options):
    """The config that `zjax train` would run."""
    runs = []
    monkeypatch.setattr(cli.train, "run", lambda config, workdir, **_: runs.append(config) or cli.train.Result(None, [], None))
    status = command(tmp_path, keys, *options, name="train")
    return runs[0] if status == 0 else status


def test_train_takes_the_file_and_overrides_win(tmp_path, monkeypatch, capsys):
    made = trained(tmp_path, monkeypatch, KEYS_OF_A_RUN | ADAMW, "--config.optimizer.learning_rate=0.5", "--config.steps=70")
    assert (made.zero.stage, made.zero.persistence_threshold, made.data.global_batch, made.accumulation.micro_batches) == (
        3,
        100_000,
        32,
        2,
    )
    assert (made.optimizer.learning_rate, made.optimizer.name, made.steps, made.model.preset) == (0.5, "adamw", 70, "tiny")
    assert "steps_per_print" in capsys.readouterr().err
    made = trained(tmp_path, monkeypatch, KEYS_OF_A_RUN, "--config.zero.stage=1", "--config.data.global_batch=64")
    assert (made.zero, made.data.global_batch, made.accumulation.micro_batches) == (ZeroConfig(stage=1), 64, 4)
    auto = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e5}}
    made = trained(tmp_path, monkeypatch, auto)
    # The tiny Llama is 256 wide, and two of its blocks are more than 100000 parameters.
    assert (made.zero.persistence_threshold, made.zero.max_gathered_units, made.zero.prefetch) == (2560, 1, 0)


def test_an_override_that_contradicts_the_triangle_raises(tmp_path, monkeypatch, capsys):
    assert trained(tmp_path, monkeypatch, KEYS_OF_A_RUN, "--config.accumulation.micro_batches=4") == 2
    assert (
        "train_batch_size=32: is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 4 x data degree 8 = 64"
        in capsys.readouterr().err
    )


def test_the_example_in_configs_is_a_run():
    made = run_of(Path(REPO / "configs" / "ds_zero3.json"))
    assert (made.data.global_batch, made.accumulation.micro_batches, made.zero.stage, made.optimizer.schedule) == (
        64,
        4,
        3,
        "WarmupDecayLR",
    )
