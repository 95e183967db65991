"""Configs are checked where they are made; and the floors of the package, which start at this module that imports nothing."""

import ast
import dataclasses
import functools
import sys
import typing
from pathlib import Path

import pytest

from zjax import config as config_module
from zjax import optimizer_config
from zjax.config import (
    AccumulationConfig,
    CheckpointConfig,
    DataConfig,
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)
from zjax.fields import ConfigError, from_dict
from zjax.optimizer_config import OptimizerConfig, ParamGroup

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zjax"

# --- from dictionaries --------------------------------------------------------------------------------------------------------


def test_what_is_left_out_keeps_its_default():
    assert from_dict(TrainConfig, {}) == TrainConfig()
    made = from_dict(TrainConfig, {"zero": {"stage": 2}, "steps": 7})
    assert made == TrainConfig(zero=ZeroConfig(stage=2), steps=7)


@pytest.mark.parametrize(
    ("values", "key", "nearest"),
    [
        ({"zer": {"stage": 3}}, "'zer'", "'zero'"),
        ({"qqq": 1}, "'qqq'", None),
        ({"zero": {"stag": 3}}, "'zero.stag'", "'zero.stage'"),
        ({"zero": {"Stage": 3}}, "'zero.Stage'", "'zero.stage'"),
        ({"zero": {"reshard_after_foward": False}}, "'zero.reshard_after_foward'", "'zero.reshard_after_forward'"),
        ({"accumulation": {"microbatches": 4}}, "'accumulation.microbatches'", "'accumulation.micro_batches'"),
        ({"optimizer": {"lr": 1.0}}, "'optimizer.lr'", None),
        ({"optimizer": {"learn_rate": 1.0}}, "'optimizer.learn_rate'", "'optimizer.learning_rate'"),
    ],
)
def test_an_unknown_key_raises_with_its_dotted_name_the_nearest_and_all_known(values, key, nearest):
    with pytest.raises(ConfigError) as error:
        from_dict(TrainConfig, values)
    told = str(error.value)
    assert f"unknown config key {key}" in told and "known: " in told
    assert (f"did you mean {nearest}?" in told) if nearest else ("did you mean" not in told)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"steps": "2"}, "steps='2': must be int, not str"),
        ({"steps": 2.0}, "steps=2.0: must be int, not float"),
        ({"steps": True}, "steps=True: must be int, not bool"),
        ({"clip": "1"}, "clip='1': must be float or None, not str"),
        ({"clip": False}, "clip=False: must be float or None, not bool"),
        ({"zero": {"strict": 1}}, "zero.strict=1: must be bool, not int"),
        ({"zero": {"stage": None}}, "zero.stage=None: must be int, not NoneType"),
        ({"zero": 3}, "zero=3: must be a section with keys stage, "),
        ({"zero": {"ignored": [1]}}, "zero.ignored=[1]: must be a list of strings, not list"),
        ({"data": {"path": 5}}, "data.path=5: must be str or a list of strings, not int"),
        ({"remat": ["full"]}, "remat=['full']: must be str, not list"),
    ],
)
def test_a_value_of_the_wrong_type_raises_with_the_type_it_must_have(values, told):
    with pytest.raises(ConfigError) as error:
        from_dict(TrainConfig, values)
    assert told in str(error.value)


def test_lists_become_tuples_and_a_single_pattern_a_list_of_one():
    assert from_dict(ZeroConfig, {"ignored": ["a", "b"]}).ignored == ("a", "b")
    assert from_dict(ZeroConfig, {"ignored": "*norm*"}).ignored == ("*norm*",)
    assert from_dict(DataConfig, {"path": ["a.txt", "b.txt"]}).path == ("a.txt", "b.txt")
    assert from_dict(DataConfig, {"path": "a.txt"}).path == "a.txt"


def test_whole_numbers_serve_as_floats():
    made = from_dict(TrainConfig, {"clip": 1, "optimizer": {"learning_rate": 1}})
    assert (made.clip, made.optimizer.learning_rate) == (1.0, 1.0)
    assert type(made.clip) is type(made.optimizer.learning_rate) is float
    assert from_dict(TrainConfig, {"clip": None}).clip is None


# --- rules ------------------------------------------------------------------------------------------------------------------

BROKEN = [
    (ZeroConfig, {"stage": 4}, "zero.stage=4"),
    (ZeroConfig, {"stage": -1}, "zero.stage=-1"),
    (ZeroConfig, {"stage": 2, "reshard_after_forward": False}, "zero.reshard_after_forward=False: only stage 3"),
    (ZeroConfig, {"reshard_after_forward": 4}, "zero.reshard_after_forward=4"),
    (ZeroConfig, {"stage": 1, "persistence_threshold": 10}, "zero.persistence_threshold=10: only stage 3"),
    (ZeroConfig, {"persistence_threshold": -1}, "zero.persistence_threshold=-1"),
    (ZeroConfig, {"engine": "xla"}, "zero.engine='xla'"),
    (ZeroConfig, {"prefetch": 2}, "zero.prefetch=2"),
    (PrecisionConfig, {"loss_scale": LossScaleConfig(window=5)}, "only float16 is scaled, and precision.compute='bfloat16'"),
    (LossScaleConfig, {"static": 0.0}, "precision.loss_scale.static=0.0"),
    (LossScaleConfig, {"window": 0}, "precision.loss_scale.window=0"),
    (LossScaleConfig, {"initial_power": 3, "minimum": 16.0}, "precision.loss_scale.minimum=16.0"),
    (PrecisionConfig, {"accumulate": "int8"}, "precision.accumulate='int8'"),
    (PrecisionConfig, {"compute": "fp8"}, "precision.compute='fp8'"),
    (OptimizerConfig, {"name": "adamx"}, "optimizer.name='adamx': did you mean 'adam"),
    (OptimizerConfig, {"momentum": 0.9}, "optimizer.momentum=0.9: adamw does not take it"),
    (OptimizerConfig, {"name": "lion", "eps": 1e-6}, "optimizer.eps=1e-06: lion does not take it"),
    (OptimizerConfig, {"name": "adafactor", "b1": 0.1}, "optimizer.b1=0.1: adafactor does not take it; it takes weight_decay"),
    (OptimizerConfig, {"schedule": "WarmupLr"}, "optimizer.schedule='WarmupLr': did you mean 'WarmupLR'?"),
    (OptimizerConfig, {"schedule": "WarmupLR", "schedule_arguments": {"warmup_max": 1}}, "did you mean 'warmup_max_lr'?"),
    (OptimizerConfig, {"schedule": "WarmupLR", "warmup_steps": 3}, "optimizer.warmup_steps=3: WarmupLR has a warm-up of its own"),
    (ParamGroup, {"patterns": ()}, "optimizer.groups.patterns=()"),
    (OptimizerConfig, {"learning_rate": -1.0}, "optimizer.learning_rate=-1.0"),
    (OptimizerConfig, {"schedule": "cos"}, "optimizer.schedule='cos'"),
    (OptimizerConfig, {"min_ratio": 1.5}, "optimizer.min_ratio=1.5"),
    (OptimizerConfig, {"warmup_steps": -1}, "optimizer.warmup_steps=-1"),
    (AccumulationConfig, {"micro_batches": 0}, "accumulation.micro_batches=0"),
    (AccumulationConfig, {"mode": "none"}, "accumulation.mode='none'"),
    (ModelConfig, {"preset": "abstract"}, "model.parameters=None"),
    (ModelConfig, {"parameters": 10}, "model.parameters=10: only model.preset='abstract'"),
    (ModelConfig, {"n_layers": 0}, "model.n_layers=0"),
    (DataConfig, {"global_batch": 0}, "data.global_batch=0"),
    (DataConfig, {"sequence_length": -5}, "data.sequence_length=-5"),
    (DataConfig, {"path": ""}, "data.path=''"),
    (CheckpointConfig, {"every": -1}, "checkpoint.every=-1"),
    (CheckpointConfig, {"keep": 0}, "checkpoint.keep=0"),
    (TrainConfig, {"steps": 0}, "steps=0"),
    (TrainConfig, {"seed": -1}, "seed=-1"),
    (TrainConfig, {"clip": 0.0}, "clip=0.0"),
    (TrainConfig, {"clip": float("nan")}, "clip=nan"),
    (TrainConfig, {"remat": "some"}, "remat='some'"),
    (TrainConfig, {"sample_tokens": -1}, "sample_tokens=-1"),
    (TrainConfig, {"steps": 5, "optimizer": OptimizerConfig(warmup_steps=6)}, "optimizer.warmup_steps=6: the run has only steps=5"),
    (TrainConfig, {"accumulation": AccumulationConfig(micro_batches=3)}, "a multiple of accumulation.micro_batches=3 (16 % 3 = 1)"),
]


@pytest.mark.parametrize(("cls", "knobs", "told"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_a_knob_that_cannot_be_honoured_raises_with_its_name_value_and_rule(cls, knobs, told):
    with pytest.raises(ConfigError) as error:
        cls(**knobs)
    assert told in str(error.value)


def test_rules_hold_for_dictionaries_too():
    with pytest.raises(ConfigError, match=r"zero\.stage=7"):
        from_dict(TrainConfig, {"zero": {"stage": 7}})
    with pytest.raises(ConfigError, match=r"mesh\.fsdp=0"):
        from_dict(TrainConfig, {"mesh": {"fsdp": 0}})


@pytest.mark.parametrize(
    ("cls", "knobs", "name"),
    [
        (MeshConfig, {"fsdp": "8"}, "mesh.fsdp='8'"),
        (TrainConfig, {"steps": "2"}, "steps='2'"),
        (ZeroConfig, {"stage": True}, "zero.stage=True"),
        (ZeroConfig, {"stage": 2.0}, "zero.stage=2.0"),
        (AccumulationConfig, {"micro_batches": 2.0}, "accumulation.micro_batches=2.0"),
        (TrainConfig, {"zero": {"stage": 3}}, "zero="),
    ],
)
def test_wrong_types_raise_where_a_config_is_made_by_hand_too(cls, knobs, name):
    with pytest.raises(ConfigError) as error:
        cls(**knobs)
    assert name in str(error.value)


@pytest.mark.parametrize("ignored", ["*norm*", ["*norm*"]], ids=["a string", "a list"])
def test_one_pattern_made_by_hand_is_not_read_letter_by_letter(ignored):
    """As letters, "*norm*" starts with the pattern "*", which would leave every parameter replicated; a list has no hash."""
    try:
        made = ZeroConfig(ignored=ignored).ignored
    except ConfigError as error:
        assert "zero.ignored" in str(error)
    else:
        assert made == ("*norm*",)


def configs():
    """The sections of a config file; a `Unit` is an argument of `build_plan`."""
    found = {
        x: None
        for module in (config_module, optimizer_config)
        for x in vars(module).values()
        if isinstance(x, type) and dataclasses.is_dataclass(x)
    }
    return [x for x in found if x is not config_module.Unit]


@pytest.mark.parametrize("cls", configs(), ids=lambda cls: cls.__name__)
def test_configs_are_frozen_hashable_and_take_names_only(cls):
    needed = {"patterns": ("norm",)} if cls is ParamGroup else {}
    made = cls(**needed)
    assert hash(made) == hash(cls(**needed)) and made == cls(**needed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(cls)[0].name, None)
    with pytest.raises(TypeError):
        cls(1)


def test_every_knob_says_what_it_is():
    """A string below each field; sections speak for themselves."""
    undocumented = []
    texts = [(PACKAGE / name).read_text() for name in ("config.py", "optimizer_config.py")]
    for node in [node for text in texts for node in ast.parse(text).body]:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
            continue
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            section = isinstance(field, ast.AnnAssign) and ast.unparse(field.annotation).endswith("Config")
            documented = isinstance(below, ast.Expr) and isinstance(getattr(below.value, "value", None), str)
            if isinstance(field, ast.AnnAssign) and not section and not documented:
                undocumented.append(f"{node.name}.{ast.unparse(field.target)}")
    assert undocumented == []


def test_every_section_of_a_run_is_a_config_of_its_own():
    sections = {name: hint for name, hint in typing.get_type_hints(TrainConfig).items() if dataclasses.is_dataclass(hint)}
    assert set(sections.values()) == set(configs()) - {TrainConfig, LossScaleConfig, ParamGroup}  # those are sections of sections
    # The names that other tools rely on.
    assert set(sections) == {"model", "mesh", "zero", "precision", "optimizer", "accumulation", "data", "checkpoint", "evaluation"}


# --- the floors of the package ------------------------------------------------------------------------------------------------

FLOORS = (
    {"fields", "tree", "console"},
    {"ds_config"},
    {"optimizer_config"},
    {"config"},
    {"schedules"},
    {"mesh", "precision", "optim", "interop", "distributed"},
    {"rules", "describe"},
    {"plan"},
    {"collectives", "state", "data", "estimate", "flags"},
    {"remat", "checkpoint"},
    {"units"},
    {"gradients", "layers", "rows"},
    {"models", "step", "metrics", "guard", "profile"},
    {"evaluate", "memory_log"},
    {"audit", "checkpoint_cli"},
    {"train"},
    {"advise", "doctor"},
    {"cli"},
)
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
PUBLIC = "the public names"
"""`import zjax` itself: it brings the audit with it."""


def imported(source, modules):
    """Top-level packages that a source imports, anywhere in it; those of zjax as `zjax.MODULE`, or `zjax` for the public names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import: {ast.unparse(node)}"
            names = [f"zjax.{alias.name}" for alias in node.names] if node.module == "zjax" else [node.module]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            module = rest.partition(".")[0]
            found.add(f"zjax.{module}" if first == "zjax" and module in modules else first)
    return found


@functools.cache
def imports_of_files():
    """(module, file) -> what it imports, for every file of the package but its list of public names."""
    files = [file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py"]
    module_of = {file: file.relative_to(PACKAGE).with_suffix("").parts[0] for file in files}
    modules = set(module_of.values())
    return {(module, str(file.relative_to(ROOT))): imported(file.read_text(), modules) for file, module in module_of.items()}


def too_high(module, imports):
    """What a module may not import: its own floor (itself excepted) and those above, and the public names unless it is the command."""
    wrong = []
    for name in sorted(imports):
        if name == "zjax":
            wrong += [PUBLIC] if FLOOR[module] <= FLOOR["audit"] else []
        elif name.startswith("zjax."):
            other = name.removeprefix("zjax.")
            wrong += [other] if other != module and FLOOR[other] >= FLOOR[module] else []
    return wrong


def test_every_module_has_a_floor():
    assert {module for module, _ in imports_of_files()} <= FLOOR.keys()


def test_imports_point_down_floor_by_floor():
    wrong = {file: too_high(module, imports) for (module, file), imports in imports_of_files().items()}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_the_reader_of_imports_finds_those_that_point_up():
    modules = set(FLOOR)
    source = "import jax\nfrom zjax import rules as r, Plan\ndef late():\n    import zjax.train\n    from zjax.checkpoint.x import y\n"
    found = imported(source, modules)
    assert found == {"jax", "zjax.rules", "zjax", "zjax.train", "zjax.checkpoint"}
    assert too_high("plan", found) == [PUBLIC, "checkpoint", "train"]
    assert too_high("cli", found) == []
    assert too_high("mesh", {"zjax.optim"}) == ["optim"]


def importers_of(name):
    return {module for (module, _), imports in imports_of_files().items() if name in imports}


def test_the_library_never_imports_models_or_train():
    assert {"train"} <= importers_of("zjax.models") <= {"models", "train", "checkpoint_cli", "advise", "cli"}
    assert importers_of("zjax.train") == {"advise", "cli"}
    public = imported((PACKAGE / "__init__.py").read_text(), set(FLOOR))
    assert "zjax.step" in public and not public & {"zjax.models", "zjax.train", "zjax.checkpoint_cli", "zjax.cli"}


def test_config_imports_neither_jax_nor_ml_collections_nor_anything_that_does():
    below = {"config", "optimizer_config", "ds_config", "fields"}
    imports = set().union(*(found for (module, _), found in imports_of_files().items() if module in below))
    assert imports <= sys.stdlib_module_names | {f"zjax.{module}" for module in below}


def test_only_the_command_the_loop_and_the_configs_know_ml_collections():
    assert {"cli"} <= importers_of("ml_collections") <= {"cli", "train"}
    for file in (ROOT / "configs").glob("*.py"):
        assert "ml_collections" in imported(file.read_text(), set(FLOOR)), file.name
