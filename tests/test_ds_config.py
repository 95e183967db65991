"""Every key of a DeepSpeed config has one fate; files are read strictly, and mistakes are told with the key."""

import json
import re
import warnings

import pytest
from deepspeed_runs import (
    ADAMW,
    FP16,
    ONE_CYCLE,
    RANGE_TEST,
    SHARED,
    STAGE3,
    WARMUP_COSINE,
    knob,
    merged,
    needs_shared,
    nested,
    run_of,
    told,
)

from zjax.config import TrainConfig
from zjax.ds_config import KEYS, Fate
from zjax.ds_config.keys import ALIASES
from zjax.ds_config.read import SECTIONS
from zjax.fields import ConfigError, NotAvailableError
from zjax.optimizer_config import SCHEDULES

pytestmark = pytest.mark.filterwarnings("ignore:DeepSpeed config")

# --- the table of fates -------------------------------------------------------------------------------------------------------

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
    "optimizer.params.bias_correction": (False, ADAMW, "optimizer.bias_correction", False),
    "optimizer.params.max_coeff": (0.3, {"optimizer": {"type": "Lamb"}}, "optimizer.max_coeff", 0.3),
    "optimizer.params.min_coeff": (0.05, {"optimizer": {"type": "Lamb"}}, "optimizer.min_coeff", 0.05),
    "optimizer.params.initial_accumulator_value": (0.1, {"optimizer": {"type": "Adagrad"}}, "optimizer.initial_accumulator_value", 0.1),
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
        ({"bfloat16": True}, "bfloat16=true: must be a section"),
        ({"zero_optimization": {"cpu_offload": "no"}}, 'zero_optimization.cpu_offload="no": must be true or false'),
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
