"""DeepSpeed configs: every key has a fate, and files as users write them give the right run or the right error."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import REPO

from zjax import cli
from zjax.config import (
    SCHEDULES,
    DataConfig,
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)
from zjax.ds_config import KEYS, Fate, read
from zjax.ds_config.keys import ALIASES
from zjax.ds_config.read import SECTIONS
from zjax.fields import ConfigError, NotAvailableError
from zjax.interop import from_deepspeed
from zjax.interop.deepspeed import batch_triangle

SHARED = next((folder / "shared" for folder in (REPO, REPO.parent) if (folder / "shared").is_dir()), None)
needs_shared = pytest.mark.skipif(SHARED is None, reason="the reference documents are not beside the repository")
BASE = TrainConfig(steps=200, model=ModelConfig(d_model=64), data=DataConfig(global_batch=32))
pytestmark = pytest.mark.filterwarnings("ignore:DeepSpeed config")


def run_of(keys, base=BASE, devices=8, **sizes):
    return from_deepspeed(keys, base, devices=devices, **sizes)


def knob(config, name):
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def nested(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def merged(*sections):
    """Nested dictionaries as one."""
    result = {}
    for section in sections:
        for key, value in section.items():
            result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def told(keys, base=BASE, devices=8):
    """The message of the error that a file gives."""
    with pytest.raises(ConfigError) as error:
        run_of(keys, base, devices)
    return str(error.value)


# --- the table of fates -------------------------------------------------------------------------------------------------------

FP16, STAGE3 = {"fp16": {"enabled": True}}, {"zero_optimization": {"stage": 3}}
ADAMW = {"optimizer": {"type": "AdamW"}}
ONE_CYCLE = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}}
WARMUP_COSINE = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}}
RANGE_TEST = {"scheduler": {"type": "LRRangeTest"}}
MAPPED = {
    "train_batch_size": (48, {}, "data.global_batch", 48),
    "train_micro_batch_size_per_gpu": (3, {}, "data.global_batch", 24),
    "gradient_accumulation_steps": (2, {}, "accumulation.micro_batches", 2),
    "gradient_clipping": (0.5, {}, "clip", 0.5),
    "communication_data_type": ("fp32", {"bf16": {"enabled": True}}, "precision.reduce", "float32"),
    "data_types.grad_accum_dtype": ("bf16", {}, "precision.accumulate", "bfloat16"),
    "data_types.param_dtype": ("fp16", FP16, "precision.compute", "float16"),
    "zero_optimization.stage": (2, {}, "zero.stage", 2),
    "zero_optimization.stage3_prefetch_bucket_size": (0, STAGE3, "zero.prefetch", 0),
    "zero_optimization.stage3_param_persistence_threshold": (1e4, STAGE3, "zero.persistence_threshold", 10_000),
    "zero_optimization.stage3_max_live_parameters": (0, STAGE3, "zero.max_gathered_units", 1),
    "zero_optimization.mics_shard_size": (4, STAGE3, "mesh.replica", 2),
    "fp16.enabled": (True, {}, "precision.compute", "float16"),
    "fp16.loss_scale": (128, FP16, "precision.loss_scale.static", 128.0),
    "fp16.initial_scale_power": (8, FP16, "precision.loss_scale.initial_power", 8),
    "fp16.loss_scale_window": (500, FP16, "precision.loss_scale.window", 500),
    "fp16.hysteresis": (4, FP16, "precision.loss_scale.hysteresis", 4),
    "fp16.consecutive_hysteresis": (True, FP16, "precision.loss_scale.consecutive_hysteresis", True),
    "fp16.min_loss_scale": (0.25, FP16, "precision.loss_scale.minimum", 0.25),
    "bf16.enabled": (True, {}, "precision.compute", "bfloat16"),
    "optimizer.type": ("Lion", {}, "optimizer.name", "lion"),
    "optimizer.params.lr": (0.25, ADAMW, "optimizer.learning_rate", 0.25),
    "optimizer.params.betas": ([0.8, 0.95], ADAMW, "optimizer.b2", 0.95),
    "optimizer.params.eps": (1e-6, ADAMW, "optimizer.eps", 1e-6),
    "optimizer.params.weight_decay": (0.3, ADAMW, "optimizer.weight_decay", 0.3),
    "optimizer.params.momentum": (0.7, {"optimizer": {"type": "SGD"}}, "optimizer.momentum", 0.7),
    "optimizer.params.nesterov": (True, {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, "optimizer.nesterov", True),
    "optimizer.params.torch_adam": (True, ADAMW, "optimizer.weight_decay", 0.01),  # torch.optim.AdamW's default
    "optimizer.params.adam_w_mode": (False, {"optimizer": {"type": "Adam"}}, "optimizer.name", "adam"),
    "optimizer.params.muon_lr": (0.02, {"optimizer": {"type": "Muon"}}, "optimizer.learning_rate", 0.02),
    "optimizer.params.adam_lr": (0.003, {"optimizer": {"type": "Muon"}}, "optimizer.adam_learning_rate", 0.003),
    "scheduler.type": ("WarmupLR", {}, "optimizer.schedule", "WarmupLR"),
    "tensor_parallel.autotp_size": (2, {}, "mesh.tensor", 2),
    "tensor_parallel.tp.tp_size": (2, {}, "mesh.tensor", 2),
    **{
        f"scheduler.params.{name}": (value, beside, f"optimizer.schedule_arguments.{name}", value)
        for beside, values in (
            ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}}, {
                "warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_num_steps": 5, "warmup_type": "linear", "total_num_steps": 7}),
            (WARMUP_COSINE, {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}),
            (RANGE_TEST, {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": True}),
            (ONE_CYCLE, {
                "cycle_min_lr": 0.05, "cycle_max_lr": 0.3, "decay_lr_rate": 0.1, "cycle_first_step_size": 5, "cycle_second_step_size": 6,
                "cycle_first_stair_count": 1, "cycle_second_stair_count": 2, "decay_step_size": 3, "cycle_momentum": False,
                "cycle_min_mom": 0.7, "cycle_max_mom": 0.8, "decay_mom_rate": 0.1}),
        )
        for name, value in values.items()
    },
}  # fmt: skip
"""Key -> (its value, what else the file needs, the knob, its value)."""


def test_every_mapped_key_is_tested():
    assert set(MAPPED) == {path for path, key in KEYS.items() if key.fate is Fate.MAPPED}


@pytest.mark.parametrize("path", MAPPED)
def test_a_mapped_key_sets_its_knob(path):
    value, beside, name, expected = MAPPED[path]
    assert name in KEYS[path].becomes
    assert knob(run_of(merged(beside, nested(path, value))), name) == expected
    # The key is what does it: without it the knob has another value, or none. (param_dtype only has to agree.)
    if path != "data_types.param_dtype":
        try:
            assert knob(run_of(beside), name) != expected
        except KeyError:
            assert name.startswith("optimizer.schedule_arguments.")


def test_the_knobs_of_mapped_keys_exist():
    for path, key in KEYS.items():
        if key.fate is Fate.MAPPED:
            for name in key.becomes:
                knob(TrainConfig(), name if "schedule_arguments" not in name else "optimizer.schedule_arguments")
        elif key.fate is Fate.DEPRECATED:
            assert all(new in {*KEYS, *SECTIONS} for new in key.becomes) and (key.becomes or key.text), path
        else:
            assert key.text, path


def test_every_argument_of_every_schedule_is_a_key():
    known = {path.removeprefix("scheduler.params.") for path in KEYS if path.startswith("scheduler.params.")}
    assert known - {"last_batch_iteration"} == {name for arguments in SCHEDULES.values() for name in arguments}


def wrong_value(key):
    """A value of the key's kind that is not harmless."""
    values = {
        "bool": [True, False],
        "int": [7],
        "size": [7],
        "number": [7],
        "text": ["x"],
        "list": [["x"]],
        "any": ["x"],
        "section": [{"enabled": True}],
    }
    return next(value for value in values[key.kind] if value not in key.harmless)


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.fate in (Fate.REJECTED, Fate.NOT_YET)])
def test_a_key_that_cannot_be_honoured_raises_and_says_why_but_not_at_its_default(path):
    key = KEYS[path]
    switched_on = [nested("zero_optimization.stage", 3)]
    for section in SECTIONS:
        switch = f"{section}.{'device' if 'offload_' in section else 'enabled'}"
        if path.startswith(section + ".") and switch in KEYS:
            switched_on.append(nested(switch, "cpu" if "offload_" in section else True))
    message = told(merged(*switched_on, nested(path, wrong_value(key))))
    assert key.text.split(";")[0] in message or any(
        KEYS[p].text in message for p in KEYS if path.startswith(p.rpartition(".")[0] + ".") and p in message
    )
    if key.fate is Fate.NOT_YET:
        with pytest.raises(NotImplementedError, match="is not available yet"):
            run_of(merged(*switched_on, nested(path, wrong_value(key))))
    typed = {"optimizer": {"type": "SGD"}, "scheduler": {"type": "WarmupLR"}}
    beside = {section: typed[section] for section in typed if path.startswith(section + ".")}
    for harmless in key.harmless:
        assert run_of(merged(beside, nested(path, harmless))) == run_of(beside)


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.fate is Fate.NO_MEANING])
def test_a_key_without_meaning_changes_nothing_and_is_told_with_its_reason(path):
    key = KEYS[path]
    value = {"bool": True, "int": 2, "size": 2, "number": 2, "text": "x", "list": ["x"], "any": "x", "section": {"enabled": True}}[key.kind]
    beside = merged(
        FP16 if path.startswith("fp16") else {"bf16": {"enabled": True}} if path.startswith("bf16") else {},
        {"optimizer": {"type": "Muon"}} if path.startswith("optimizer") else {},
        STAGE3 if path.endswith("pipeline_loading_checkpoint") else {},
        *(nested(f"{section}.enabled", True) for section in ("flops_profiler", "comms_logger") if path.startswith(section)),
    )
    if path.startswith("data_efficiency."):
        return  # only beside what is rejected
    with pytest.warns(UserWarning, match=re.escape(key.text)) as caught:
        made = run_of(merged(beside, nested(path, value)))
    assert made == run_of(beside)
    assert len([each for each in caught if path in str(each.message) and each.category is UserWarning]) == 1


def test_what_changes_nothing_is_told_in_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_of({"steps_per_print": 10, "wall_clock_breakdown": False, "zero_optimization": {"stage": 1, "overlap_comm": True}})
    (one,) = caught
    assert all(key in str(one.message) for key in ("steps_per_print", "wall_clock_breakdown", "zero_optimization.overlap_comm"))


DEPRECATED = {
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (True, "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    "zero_optimization.cpu_offload": (False, "zero_optimization.offload_optimizer"),
    "zero_optimization.cpu_offload_param": (False, "zero_optimization.offload_param"),
    "zero_optimization.cpu_offload_use_pin_memory": (True, None),
    "zero_optimization.elastic_checkpoint": (True, None),
    "allgather_size": (5e8, "zero_optimization.allgather_bucket_size"),
    "bfloat16": ({"enabled": True}, "bf16"),
}


def test_every_deprecated_key_is_tested():
    assert set(DEPRECATED) == {path for path, key in KEYS.items() if key.fate is Fate.DEPRECATED}


@pytest.mark.parametrize("path", DEPRECATED)
def test_a_deprecated_key_is_read_as_the_new_one_with_a_warning(path):
    value, new = DEPRECATED[path]
    with pytest.warns(DeprecationWarning, match=path):
        made = run_of(nested(path, value))
    if new in KEYS or new == "bf16":
        assert made == run_of(nested(new, value))
    if new is not None:
        assert "is given too" in told(merged(nested(path, value), nested(new, {"device": "none"} if "offload" in new else value)))


def test_cpu_offload_is_the_offload_that_is_not_available():
    with pytest.raises(NotAvailableError, match=r"cpu_offload=true: offload of optimizer state .* is not available yet"):
        run_of({"zero_optimization": {"stage": 2, "cpu_offload": True}})


def test_zero_optimization_true_is_stage_1():
    with pytest.warns(DeprecationWarning, match="zero_optimization"):
        assert run_of({"zero_optimization": True}).zero.stage == 1


@pytest.mark.parametrize("alias", ALIASES)
def test_names_without_stage3_mean_the_same_and_both_at_once_raise(alias):
    path = ALIASES[alias]
    value = {"bool": True, "size": 0}[KEYS[path].kind]
    if KEYS[path].fate is not Fate.REJECTED:
        assert run_of(merged(STAGE3, nested(alias, value))) == run_of(merged(STAGE3, nested(path, value)))
    assert "is the same key as" in told(merged(nested(alias, value), nested(path, value)))


# --- the reference's list of keys -------------------------------------------------------------------------------------------------

WORDS = {
    # Values, defaults and prose in the first column of the tables.
    "false", "true", "none", "auto", "docs", "only", "read", "if", "present", "legacy", "stage3_", "null", "must", "be",
    "llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3", "z1", "z3", "autosp", "autotp", "row", "column", "skip", "best",
    "linear", "dataloader", "required", "Warn", "FAST", "PYTHON", "MOCK", "REPLICA", "SOCKET", "MACHINE", "key", "JSON", "alias", "section",
    "None", "after_", "sync_before", "_threshold", "maxsize", "sys", "MiB", "router", "expert", "patterns", "shared", "experts", "pattern",
    # Inside sections whose own keys are not read: features of the model or its data.
    "theta", "gamma", "partition_type", "shape", "partition_dim", "model_types",
}  # fmt: skip


def reference_tables():
    """The tables' first columns in section 1 of the reference, by heading; without the arguments of the MoE layer, which no file holds."""
    text = (SHARED / "reference" / "vocabulary.md").read_text()
    section = text[text.index("# 1. DeepSpeed config keys") : text.index("# 2. FSDP1")]
    cells, heading = {}, ""
    for line in section.splitlines():
        if line.startswith("## "):
            heading = line.split()[1]
        elif line.startswith("| ") and not line.startswith("| MoE layer args"):
            cells.setdefault(heading, []).append(line.split(" | ")[0].removeprefix("| "))
    return cells


@needs_shared
def test_every_key_of_the_reference_has_a_fate():
    cells = reference_tables()
    assert set(cells) == {"1.1", "1.2", "1.3", "1.4", "1.6"}
    known = {part for path in {*KEYS, *ALIASES} for part in path.split(".")}
    words = {word for rows in cells.values() for cell in rows for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", cell)}
    assert len(words & known) > 200
    assert {word for word in words - WORDS - known if len(word) > 2} == set()


@needs_shared
@pytest.mark.parametrize(("heading", "section"), [("1.1", ""), ("1.2", "zero_optimization.")])
def test_every_key_of_the_reference_has_it_where_it_stands(heading, section):
    missing = []
    for cell in reference_tables()[heading][1:]:
        for entry in re.split(r" / |, (?![^{]*})", re.sub(r"\(.*?\)|\{[^}]*…\}", "", cell)):
            head, _, inner = entry.strip(" .}").partition("{")
            head = head.strip(" .")
            names = [f"{head}.{name.split()[0]}" for name in re.split(r", ?", inner) if name.strip()] if inner else [head]
            names = [f"data_types.{name}" if name == "buffer_dtype" else name for name in names]
            missing += [name for name in names if section + name not in {*KEYS, *ALIASES, *SECTIONS}]
    assert missing == []


# --- reading ---------------------------------------------------------------------------------------------------------------------


def test_a_path_and_its_dictionary_are_the_same(tmp_path):
    keys = {"train_batch_size": 16, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(keys))
    assert run_of(tmp_path / "ds.json") == run_of(str(tmp_path / "ds.json")) == run_of(keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"fp16": {"enabled": true, "enabled": false}}', "key 'enabled' is given twice"),
        ('{"train_batch_size": 8, "train_batch_size": 16}', "key 'train_batch_size' is given twice"),
        ('{"train_batch_size": 8,}', "not JSON"),
        ("{train_batch_size: 8}", r"not JSON: .*hjson and comments are not read"),
        ("[1]", "must be a JSON object, not list"),
    ],
)
def test_a_file_that_is_no_such_object_raises(tmp_path, text, message):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path / "ds.json")
    with pytest.raises(ConfigError, match="No such file"):
        run_of(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # c62: deepspeedai/DeepSpeed issues 653, 774 and 1809, where such keys were ignored.
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation={\"stage\": 3}: unknown key; did you mean 'zero_optimization'?"),
        ({"gradient_accumulation_step": 4}, "gradient_accumulation_step=4: unknown key; did you mean 'gradient_accumulation_steps'?"),
        ({"fp16": {"enable": True}}, "fp16.enable=true: unknown key; did you mean 'fp16.enabled'?"),
        ({"overlap_comm": True}, "overlap_comm=true: unknown key; overlap_comm belongs in zero_optimization"),
        ({"zero_optimization": {"train_batch_size": 8}}, "train_batch_size belongs in the top level"),
        ({"qqqq": 1}, "qqqq=1: unknown key; DeepSpeed has none like it"),
        ({"data_efficiency": {"data_sampling": {"num_epoch": 1}}}, "did you mean 'data_efficiency.data_sampling.num_epochs'?"),
        ({"zero_optimization": {"stage": "3"}}, 'zero_optimization.stage="3": must be a whole number'),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage=true: must be a whole number"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "must be a whole number, 0 or more"),
        ({"train_batch_size": 8.5}, "train_batch_size=8.5: must be a whole number"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled=1: must be true or false"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale=true: must be a number"),
        ({"fp16": True}, "fp16=true: must be a section"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.type: is missing"),
        ({"optimizer": {"type": "Adan"}}, "optimizer.type='Adan': did you mean 'adam'?"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm=1.0: use gradient_clipping"),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, "lion does not take it"),
        ({"scheduler": {"type": "WarmupCosine"}}, "did you mean 'WarmupCosineLR'?"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps: WarmupDecayLR needs it"),
        ({"scheduler": {"type": "WarmupLR", "params": {"cycle_min_lr": 1e-3}}}, "(DeepSpeed config: scheduler.params.cycle_min_lr)"),
        ({"gradient_clipping": -1}, "must be positive and finite, or None not to clip (DeepSpeed config: gradient_clipping)"),
        ({"communication_data_type": "fp8"}, "communication_data_type='fp8': must be one of fp16, bf16, fp32"),
    ],
)  # fmt: skip
def test_mistakes_raise_with_the_key_and_what_to_do(keys, message):
    assert message in told(keys)


def test_all_keys_that_cannot_be_honoured_are_told_at_once():
    message = told({"zero_optimisation": {}, "sparse_gradients": True, "fp16": {"enable": True}})
    assert "3 keys" in message and all(key in message for key in ("zero_optimisation", "sparse_gradients", "fp16.enable"))


@pytest.mark.parametrize(
    "off",
    [
        {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 2000}},
        {"progressive_layer_drop": {"enabled": False, "theta": 0.5}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "quantizer_kernel": True}}}},
        {
            "data_efficiency": {
                "enabled": False,
                "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "total_layer_num": 12}},
            }
        },
        {"zero_optimization": {"offload_param": {"device": "none", "pin_memory": True}}},
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},  # DeepSpeed ignores it there
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"zero_optimization": {"offload_optimizer": None}, "train_batch_size": None},
    ],
    ids=json.dumps,
)
def test_what_is_switched_off_asks_for_nothing(off):
    stage = off.get("zero_optimization", {}).get("stage", 0)
    assert run_of(off) == run_of({"zero_optimization": {"stage": stage}})


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


# --- public files ----------------------------------------------------------------------------------------------------------------

ADAM = {"name": "adamw", "b2": 0.999, "eps": 1e-8}
FILES = {
    "BingBertSquad__1-bit_adam__nccl__deepspeed_onebitadam_bsz96_config": (8, [
        'optimizer.type="OnebitAdam": 1-bit optimizers', "use AdamW", "optimizer.params.freeze_step=400", "optimizer.params.bias_correction=false"]),
    "BingBertSquad__deepspeed_bsz24_config": (8, ["optimizer.params.bias_correction=false: optax corrects the bias"]),
    "autotuning__hf__dsconfigs__ds_config_fp16_z3": (8, {
        "zero": ZeroConfig(stage=3, persistence_threshold=100_000), "precision": PrecisionConfig(compute="float16"),
        "data.global_batch": 32, "accumulation.micro_batches": 1, "optimizer": BASE.optimizer, "clip": 1.0}),
    "autotuning__hf__dsconfigs__ds_config_z1": (8, {"zero": ZeroConfig(stage=1), "precision.compute": "float32", "data.global_batch": 32}),
    "bing_bert__deepspeed_bsz4k_progressive_layer_drop_config_seq128": (8, ["progressive_layer_drop=", "optimizer.params.bias_correction=false"]),
    "bing_bert__deepspeed_bsz64k_lamb_config_seq128": (8, [
        "optimizer.params.max_coeff=0.3: optax's lamb does not clamp", "optimizer.params.min_coeff=0.01", "sparse_attention="]),
    "compression__cifar__ds_config": (1, {
        "zero.stage": 0, "precision": PrecisionConfig(compute="float16"), "data.global_batch": 32, "accumulation.micro_batches": 1,
        "optimizer": OptimizerConfig(learning_rate=1e-3, b1=0.8, weight_decay=3e-7, **ADAM)}),
    "data_efficiency__vit_finetuning__ds_config_imagenet_random_ltd": (16, ["data_efficiency.enabled=true", "random-LTD"]),
    "gan__gan_deepspeed_config": (8, {
        "data.global_batch": 64, "accumulation.micro_batches": 1, "zero.stage": 0, "precision.compute": "float32",
        "optimizer": OptimizerConfig(learning_rate=2e-4, b1=0.5, weight_decay=0.0, **ADAM)}),
    "hf_tests_zero2": (8, ['zero_optimization.offload_optimizer.device="cpu": offload of optimizer state', "not available yet"]),
    "imagenet__ds_fp16_z1_config": (8, ["cuda_visible_devices=0: unknown key", "leave it out"]),
    "pipeline_parallelism__ds_config": (8, {"data.global_batch": 256, "accumulation.micro_batches": 4, "optimizer.b1": 0.9, "clip": 1.0}),
    "trlx": (8, ['zero_optimization.offload_optimizer.device="cpu"', "not available yet"]),
}  # fmt: skip
"""File -> (devices, the knobs it gives or what its error says)."""


def check_run(keys, devices, expected, base=BASE):
    if isinstance(expected, dict):
        made = run_of(keys, base, devices)
        assert {name: knob(made, name) for name in expected} == expected
    else:
        message = told(keys, base, devices)
        assert [text for text in expected if text not in message] == []


@needs_shared
def test_every_public_file_is_tested():
    assert set(FILES) == {path.stem for path in (SHARED / "deepspeed_configs").glob("*.json")}


@needs_shared
@pytest.mark.parametrize("name", FILES)
def test_a_public_file_gives_its_run_or_its_error(name):
    devices, expected = FILES[name]
    check_run(SHARED / "deepspeed_configs" / f"{name}.json", devices, expected)


@needs_shared
def test_public_files_without_the_key_in_question_give_their_run():
    folder = SHARED / "deepspeed_configs"
    keys = json.loads((folder / "BingBertSquad__deepspeed_bsz24_config.json").read_text())
    del keys["optimizer"]["params"]["bias_correction"]
    check_run(
        keys, 8, {"data.global_batch": 24, "accumulation.micro_batches": 1, "precision.compute": "float16", "optimizer.learning_rate": 3e-5}
    )
    keys = json.loads((folder / "imagenet__ds_fp16_z1_config.json").read_text())
    del keys["cuda_visible_devices"]
    check_run(keys, 8, {"data.global_batch": 256, "zero": ZeroConfig(stage=1), "clip": None, "precision.compute": "float16"})
    keys = json.loads((folder / "hf_tests_zero2.json").read_text())
    del keys["zero_optimization"]["offload_optimizer"]
    check_run(
        keys, 8, {"zero": ZeroConfig(stage=2), "optimizer.schedule": "WarmupLR", "precision.compute": "bfloat16", "data.global_batch": 32}
    )


AUTO_BATCH = dict.fromkeys(("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
AXOLOTL_FP16 = {
    "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1,
}  # fmt: skip
USERS = {
    # github.com/shibing624/MedicalGPT, deepspeed_zero_stage3_config.json: ZeRO 3, WarmupDecayLR, every size auto.
    "MedicalGPT": (
        {
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto", "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto",
            },
            "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False, **AUTO_BATCH,
        },
        8,
        {
            "zero": ZeroConfig(stage=3, persistence_threshold=640), "precision": PrecisionConfig(compute="float16"),
            "optimizer": OptimizerConfig(
                b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, schedule="WarmupDecayLR",
                schedule_arguments={"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 0, "total_num_steps": 200},
            ),
        },
    ),
    # axolotl's deepspeed_configs/zero1.json.
    "axolotl zero1": (
        {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": "auto"}, "fp16": AXOLOTL_FP16, "wall_clock_breakdown": False, **AUTO_BATCH},
        8,
        {"zero": ZeroConfig(stage=1), "precision": PrecisionConfig(compute="bfloat16"), "data.global_batch": 32},
    ),
    # axolotl's zero3_bf16.json: as little as can be whole at once.
    "axolotl zero3_bf16": (
        {
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0, "stage3_gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True}, "fp16": AXOLOTL_FP16 | {"enabled": False}, "wall_clock_breakdown": False, **AUTO_BATCH,
        },
        8,
        {"zero": ZeroConfig(stage=3, persistence_threshold=640, prefetch=0, max_gathered_units=1), "precision.compute": "bfloat16"},
    ),
    # The same after axolotl pull request 2956, with the field names of newer DeepSpeed releases.
    "axolotl after 2956": (
        {"zero_optimization": {"stage": 3, "max_live_parameters": 0, "gather_16bit_weights_on_model_save": True}},
        8,
        {"zero": ZeroConfig(stage=3, persistence_threshold=100_000, prefetch=0, max_gathered_units=1)},
    ),
    # huggingface.co, YellowLabsStudio/goodglinda-training-code, ds_config.json: ZeRO 2 in bf16, offloaded.
    "goodglinda": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True, "allgather_bucket_size": 2e8,
                "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
            },
            "gradient_clipping": 1.0, "wall_clock_breakdown": False, **AUTO_BATCH,
        },
        8,
        ['zero_optimization.offload_optimizer.device="cpu"', "not available yet"],
    ),
    # git.gdzx.xyz/hailin/jd_train, ds_config_zero3.json (without its comment): bf16, 64 micro-batches, activation checkpointing.
    "jd_train": (
        {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 64, "steps_per_print": 0, "gradient_clipping": 1.0,
            "fp16": {"enabled": False}, "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 50000000,
                "stage3_prefetch_bucket_size": 50000000, "stage3_param_persistence_threshold": 100000, "stage3_gather_16bit_weights_on_model_save": True,
            },
            "activation_checkpointing": {
                "partition_activations": True, "contiguous_memory_optimization": True, "cpu_checkpointing": False, "number_checkpoints": 36,
                "profile": False, "synchronize_checkpoint_boundary": True,
            },
            "wall_clock_breakdown": False,
        },
        8,
        {"data.global_batch": 512, "accumulation.micro_batches": 64, "zero": ZeroConfig(stage=3, persistence_threshold=100_000), "remat": "none"},
    ),
    # DeepSpeed's own tests/unit/checkpoint, test_save_before_accum_grad_is_done: a deprecated key, accumulation, a small first scale.
    "DeepSpeed's test of accumulation": (
        {
            "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2, "stage3_gather_fp16_weights_on_model_save": True},
            "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 4,
            "fp16": {"enabled": True, "initial_scale_power": 8},
        },
        2,
        {"data.global_batch": 4, "accumulation.micro_batches": 2, "precision.loss_scale": LossScaleConfig(initial_power=8), "zero.stage": 2},
    ),
    # deepspeedai/DeepSpeed issue 1858: a typo inside zero_optimization, a key that offload_param does not have, offload to NVMe.
    "DeepSpeed 1858": (
        {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 1,
            "zero_optimization": {
                "stage": 3, "stage3_max_live_parameters": 1e8, "stage3_param_persitence_threshold": 1e8, "stage3_prefetch_bucket_size": 1e8,
                "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme3", "buffer_count": 5, "max_in_cpu": 1e9, "max_in_nvme": 1e9},
            },
            "activation_checkpointing": {"profile": True, "cpu_checkpointing": True, "partition_activations": True},
            "fp16": {"enabled": True, "loss_scale": 1024, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        },
        8,
        [
            "did you mean 'zero_optimization.stage3_param_persistence_threshold'?", "zero_optimization.offload_param.max_in_nvme=1000000000.0: unknown key",
            'zero_optimization.offload_param.device="nvme"', "activation_checkpointing.cpu_checkpointing=true",
        ],
    ),
    # deepspeedai/DeepSpeed issue 6914: "8 != 2 * 1 * 1", on one device instead of four.
    "DeepSpeed 6914": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
        1,
        ["train_batch_size=8: is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 1 x data degree 1 = 2"],
    ),
    # huggingface.co/spaces/wondervictor/ControlAR, utils/deepspeed.py: adam_w_mode beside type, where DeepSpeed does not look.
    "ControlAR": (
        {
            "steps_per_print": 1000, "train_batch_size": 64, "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-4, "weight_decay": 0.05, "bias_correction": True, "betas": [0.9, 0.95]}},
            "zero_allow_untested_optimizer": True,
        },
        8,
        ["optimizer.adam_w_mode=true: unknown key; adam_w_mode belongs in optimizer.params"],
    ),
    # A tutorial of accelerate: cpu_offload of old, and an argument that WarmupLR does not have.
    "accelerate of old": (
        {
            "train_batch_size": 10, "gradient_accumulation_steps": 1,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"last_batch_iteration": -1, "total_num_steps": 500, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 100},
            },
            "zero_optimization": {
                "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True, "reduce_scatter": True,
                "reduce_bucket_size": 5e8, "contiguous_gradients": True, "cpu_offload": True,
            },
            "fp16": {"enabled": True}, "amp": {"enabled": False},
        },
        1,
        ['zero_optimization.cpu_offload=true: offload of optimizer state'],
    ),
    # transformers' tests/deepspeed/ds_config_zero3.json without its offload: no batch keys, no buckets, WarmupLR.
    "transformers zero3": (
        {
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e14, "reduce_bucket_size": 0,
                "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9, "stage3_gather_fp16_weights_on_model_save": True,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
            "steps_per_print": 2000, "wall_clock_breakdown": False,
        },
        8,
        {
            "zero": ZeroConfig(stage=3, prefetch=0), "data.global_batch": 32,
            "optimizer": OptimizerConfig(
                learning_rate=3e-5, b1=0.8, weight_decay=3e-7, schedule="WarmupLR",
                schedule_arguments={"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}, **ADAM,
            ),
        },
    ),
    # Accumulation over 4 micro-batches but no batch key, every size auto.
    "accumulation alone": (
        {
            "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
            },
        },
        8,
        {"data.global_batch": 32, "accumulation.micro_batches": 4, "zero": ZeroConfig(stage=3, persistence_threshold=640)},
    ),
    # Megatron-DeepSpeed's template, with the hysteresis and first scale of its fp16 runs.
    "Megatron-DeepSpeed": (
        {
            "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
            "zero_optimization": {"stage": 1, "elastic_checkpoint": True}, "gradient_clipping": 1.0, "prescale_gradients": True,
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11},
            "bf16": {"enabled": False}, "wall_clock_breakdown": False,
        },
        8,
        {"accumulation.micro_batches": 8, "precision.loss_scale": LossScaleConfig(initial_power=11, window=500), "zero": ZeroConfig(stage=1)},
    ),
}  # fmt: skip
"""As users write them: the file, devices, the knobs it gives or what its error says."""


@pytest.mark.parametrize("name", USERS)
def test_a_users_file_gives_its_run_or_its_error(name):
    keys, devices, expected = USERS[name]
    base = dataclasses.replace(BASE, precision=PrecisionConfig(compute="bfloat16"))
    check_run(keys, devices, expected, base)


def test_an_argument_its_scheduler_does_not_have_raises():
    keys = json.loads(json.dumps(USERS["accelerate of old"][0]))
    del keys["zero_optimization"]["cpu_offload"]
    assert "WarmupLR takes" in told(keys, devices=1) and "scheduler.params.total_num_steps" in told(keys, devices=1)


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
    assert command(tmp_path, {"zero_optimisation": {}, "train_batch_size": 32, "sparse_gradients": True}, "--explain", "--json") == 2
    out, error = capsys.readouterr()
    assert [row["fate"] for row in json.loads(out)] == ["unknown", "mapped", "rejected"]
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
