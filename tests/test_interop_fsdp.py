"""FSDP's arguments as zjax's configs, and the table of the vocabularies, which is made of the importers."""

import dataclasses
import enum
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from small import REPO

import zjax
from zjax.config import AccumulationConfig, MeshConfig, PrecisionConfig, Unit, ZeroConfig
from zjax.ds_config import KEYS
from zjax.fields import ConfigError, NotAvailableError
from zjax.interop import FSDPConfig, from_fsdp1, from_fsdp2
from zjax.interop.fsdp import FSDP1_NO_MEANING, FULLY_SHARD, PREFETCH, STRATEGIES
from zjax.interop.table import EXAMPLES, NOT_AVAILABLE, Example, vocabulary_markdown, zjax_of

SIGNATURE_OF_FSDP1 = {
    "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy", "backward_prefetch", "mixed_precision", "ignored_modules",
    "param_init_fn", "device_id", "sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params", "ignored_states", "device_mesh",
}  # fmt: skip
"""The constructor of torch.distributed.fsdp.FullyShardedDataParallel in its stable documentation, without the module."""


def told(call, **arguments):
    with pytest.raises(ConfigError) as error:
        call(**arguments)
    return str(error.value)


# --- FSDP1 ---------------------------------------------------------------------------------------------------------------------


def test_the_arguments_are_those_of_the_constructor():
    ours = set(from_fsdp1.__kwdefaults__) - {"micro_batches", "no_sync"}
    assert ours == SIGNATURE_OF_FSDP1
    with pytest.raises(TypeError, match="sharding_stratgy"):
        from_fsdp1(sharding_stratgy="FULL_SHARD")


@pytest.mark.parametrize(
    ("strategy", "shape", "zero", "mesh"),
    [
        (None, None, ZeroConfig(stage=3), MeshConfig()),
        ("FULL_SHARD", (8,), ZeroConfig(stage=3), MeshConfig(fsdp=8)),
        ("SHARD_GRAD_OP", None, ZeroConfig(stage=3, reshard_after_forward=False), MeshConfig()),
        ("NO_SHARD", None, ZeroConfig(stage=0), MeshConfig()),
        ("HYBRID_SHARD", (2, 4), ZeroConfig(stage=3), MeshConfig(replica=2, fsdp=4)),
        ("_HYBRID_SHARD_ZERO2", (4, 2), ZeroConfig(stage=3, reshard_after_forward=False), MeshConfig(replica=4, fsdp=2)),
        ("ShardingStrategy.FULL_SHARD", None, ZeroConfig(stage=3), MeshConfig()),
    ],
)
def test_sharding_strategies(strategy, shape, zero, mesh):
    made = from_fsdp1(sharding_strategy=strategy, device_mesh=shape)
    assert (made.zero, made.mesh) == (zero, mesh)
    assert made.precision == PrecisionConfig(compute="float32")  # without a MixedPrecision everything keeps its dtype


def test_a_plan_can_be_made_of_it():
    """Shards of 4 of 8 devices: what HYBRID_SHARD holds a device is a quarter of the parameters and of their moments."""
    made = from_fsdp1(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4), auto_wrap_policy=["w"])
    mesh = zjax.abstract_mesh(made.mesh, 8)
    plan = zjax.build_plan(
        made.zero, lambda key: {"w": jnp.zeros((8, 16))}, optax.adam(1e-3), mesh, precision=made.precision, units=made.units
    )
    held = zjax.bytes_per_device(plan)
    assert (held["params"], held["optimizer"]) == (8 * 16 * 4 // 4, pytest.approx(2 * 8 * 16 * 4 // 4, abs=8))


class Strategy(enum.Enum):
    """As torch has it."""

    HYBRID_SHARD = enum.auto()


@dataclasses.dataclass
class MixedPrecision:
    """As torch has it, with its defaults."""

    param_dtype: object = None
    reduce_dtype: object = None
    buffer_dtype: object = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: tuple = (type("_BatchNorm", (), {}),)


class Dtype:
    """A dtype that prints as torch's does."""

    def __str__(self):
        return "torch.bfloat16"


def test_torchs_own_objects_are_taken_as_they_are():
    shaped = type("DeviceMesh", (), {"shape": (2, 4)})()
    made = from_fsdp1(sharding_strategy=Strategy.HYBRID_SHARD, device_mesh=shaped, mixed_precision=MixedPrecision(param_dtype=Dtype()))
    assert (made.mesh, made.precision) == (MeshConfig(replica=2, fsdp=4), PrecisionConfig(compute="bfloat16"))


@pytest.mark.parametrize(
    ("policy", "precision"),
    [
        (None, PrecisionConfig(compute="float32")),
        ({"param_dtype": "bfloat16"}, PrecisionConfig(compute="bfloat16")),  # reduce_dtype is param_dtype
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, PrecisionConfig(compute="bfloat16", reduce="float32")),
        ({"param_dtype": "torch.float16", "buffer_dtype": "float16"}, PrecisionConfig(compute="float16")),
        ({"reduce_dtype": "bfloat16"}, PrecisionConfig(compute="float32", reduce="bfloat16")),
        (
            {"param_dtype": "bfloat16", "_module_classes_to_ignore": ["*norm*"]},
            PrecisionConfig(compute="bfloat16", keep_float32=("*norm*",)),
        ),
    ],
)
def test_mixed_precision(policy, precision):
    assert from_fsdp1(mixed_precision=policy).precision == precision


def test_units_that_cast_their_inputs_name_their_dtype():
    policy = {"param_dtype": "bfloat16", "cast_forward_inputs": True}
    made = from_fsdp1(mixed_precision=policy, auto_wrap_policy=["embed", "layers[*]"])
    assert made.units == (Unit("embed", compute="bfloat16"), Unit("layers[*]", compute="bfloat16"))
    assert "give their paths as auto_wrap_policy" in told(from_fsdp1, mixed_precision=policy)


@pytest.mark.parametrize(
    ("policy", "elements", "units"),
    [
        (None, None, ()),
        ("size_based_auto_wrap_policy", 1_000_000, ()),  # min_num_params is 1e6 there
        ({}, 1_000_000, ()),
        ({"min_num_params": 2e7}, 20_000_000, ()),
        (5000, 5000, ()),
        (["embed", "layers[*]", "head"], None, (Unit("embed"), Unit("layers[*]"), Unit("head"))),
    ],
)
def test_auto_wrap_policies(policy, elements, units):
    made = from_fsdp1(auto_wrap_policy=policy)
    assert (made.wrap_by_size, made.units) == (elements, units)


def test_prefetch_and_the_limit_of_gathers():
    assert from_fsdp1().zero == ZeroConfig(prefetch=1, max_gathered_units=None)
    assert from_fsdp1(backward_prefetch=None).zero.prefetch == 0
    assert from_fsdp1(backward_prefetch="BACKWARD_POST").zero.prefetch == 0
    assert from_fsdp1(backward_prefetch=None, forward_prefetch=True).zero.prefetch == 1
    assert from_fsdp1(limit_all_gathers=False).zero.max_gathered_units == 0
    assert set(PREFETCH) == {"BACKWARD_PRE", "BACKWARD_POST", "NONE"}


def test_ignored_states_and_modules_are_patterns():
    made = from_fsdp1(ignored_states=["*norm*"], ignored_modules="head")
    assert made.zero.ignored == ("head", "*norm*")
    assert "give patterns of parameter paths" in told(from_fsdp1, ignored_modules=[object()])


def test_no_sync_accumulates_locally_and_shard_grad_op_keeps_its_parameters():
    """torch: inside no_sync() gradients are not reduced, and SHARD_GRAD_OP does not reshard after a backward."""
    made = from_fsdp1(no_sync=True, micro_batches=4)
    assert made.accumulation == AccumulationConfig(micro_batches=4, mode="local") and made.zero.reshard_after_backward
    assert not from_fsdp1(sharding_strategy="SHARD_GRAD_OP", no_sync=True, micro_batches=4).zero.reshard_after_backward
    assert from_fsdp1(micro_batches=4).accumulation.mode == "sharded"


def test_what_changes_nothing_is_told_in_one_warning():
    given = {"param_init_fn": print, "device_id": 0, "sync_module_states": True, "use_orig_params": True}
    assert set(given) == set(FSDP1_NO_MEANING)
    with pytest.warns(UserWarning) as caught:
        assert from_fsdp1(**given) == FSDPConfig()
    (one,) = caught
    assert all(f"{name} ({why})" in str(one.message) for name, why in FSDP1_NO_MEANING.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_fsdp1()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_strategy": "FULL_SHRAD"}, "did you mean 'full_shard'?"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "a hybrid strategy needs (replicas, shards)"),
        ({"device_mesh": (2, 4)}, "use HYBRID_SHARD"),
        ({"process_group": "group"}, "give device_mesh="),
        ({"backward_prefetch": "BACKWARD"}, "must be BACKWARD_PRE, BACKWARD_POST, NONE"),
        ({"mixed_precision": {"param_dtyp": "bfloat16"}}, "did you mean 'mixed_precision.param_dtype'?"),
        ({"mixed_precision": {"param_dtype": "int8"}}, "mixed_precision.param_dtype='int8': must be one of"),
        ({"mixed_precision": {"param_dtype": "bfloat16", "buffer_dtype": "float32"}}, "mixed_precision.buffer_dtype='float32'"),
        ({"mixed_precision": {"keep_low_precision_grads": True}}, "leave it False"),
        ({"mixed_precision": {"_module_classes_to_ignore": [int]}}, "give patterns"),
        ({"auto_wrap_policy": print}, "mark each block with zjax.fully_shard"),
        ({"auto_wrap_policy": {"min_num_param": 1}}, "did you mean 'auto_wrap_policy.min_num_params'?"),
        ({"cpu_offload": {"offload_params": True}}, "offload of parameters and optimizer state to the host is not available yet"),
    ],
)
def test_what_cannot_be_honoured_raises(arguments, message):
    assert message in told(from_fsdp1, **arguments)


def test_cpu_offload_is_a_feature_to_come():
    for asked in (True, {"offload_params": True}):
        with pytest.raises(NotImplementedError):
            from_fsdp1(cpu_offload=asked)
    assert from_fsdp1(cpu_offload=False) == from_fsdp1(cpu_offload={"offload_params": False}) == from_fsdp1()


# --- FSDP2 ---------------------------------------------------------------------------------------------------------------------

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def test_reshard_after_forward_none_is_true_but_for_the_root():
    made = from_fsdp2({"layers[*]": {}, "": {}})
    assert not made.zero.reshard_after_forward
    assert made.units == (Unit("layers[*]", reshard_after_forward=True),)
    made = from_fsdp2({"layers[*]": {}, "head": {"reshard_after_forward": False}, "": {"reshard_after_forward": True}})
    assert made.zero == ZeroConfig(stage=3)
    assert made.units == (Unit("layers[*]"), Unit("head", reshard_after_forward=False))


def test_a_mesh_of_two_dims_is_hybrid():
    assert from_fsdp2({"layers[*]": {"mesh": (2, 4)}, "": {"mesh": (2, 4)}}).mesh == MeshConfig(replica=2, fsdp=4)
    assert from_fsdp2({"": {"mesh": (8,)}}).mesh == MeshConfig(fsdp=8)
    assert "one plan has one mesh" in told(lambda: from_fsdp2({"a": {"mesh": (8,)}, "": {"mesh": (2, 4)}}))


def test_mixed_precision_policies():
    made = from_fsdp2(
        {
            "layers[*]": {"mp_policy": BF16},
            "head": {"mp_policy": BF16 | {"param_dtype": "float32", "output_dtype": "float32"}},
            "": {"mp_policy": BF16},
        }
    )
    assert made.precision == PrecisionConfig(compute="bfloat16", reduce="float32")
    layers, head = made.units
    assert (layers.compute, layers.reduce, layers.output) == ("bfloat16", None, None)  # it casts its inputs, as FSDP2 does by default
    assert (head.compute, head.reduce, head.output) == ("float32", None, "float32")
    assert from_fsdp2({"": {}}).precision == PrecisionConfig(compute="float32")


def test_other_arguments_of_fully_shard():
    placement = lambda path, shape: 0  # noqa: E731
    made = from_fsdp2(
        {"layers[*]": {"ignored_params": "*norm*"}, "": {"shard_placement_fn": placement, "offload_policy": "OffloadPolicy"}},
        micro_batches=4,
        gradient_sync=False,
    )
    assert (made.zero.ignored, made.shard_placement) == (("*norm*",), placement)
    assert made.accumulation == AccumulationConfig(micro_batches=4, mode="local")
    assert set(FULLY_SHARD) == {"mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params"}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({"layers[*]": {}}, "the call on the root is missing"),
        ({"": {"reshard_after": True}}, "did you mean 'reshard_after_forward'?"),
        ({"": {"reshard_after_forward": 1, "mesh": (8,)}}, "a divisor of the 8 shards that is neither 1 nor all of them"),
        ({"": {"reshard_after_forward": 8, "mesh": (8,)}}, "neither 1 nor all of them"),
        ({"": {"reshard_after_forward": 3, "mesh": (8,)}}, "a divisor of the 8 shards"),
        ({"": {"mp_policy": {"param_dtypes": "bfloat16"}}}, "did you mean"),
        ({"": {"mp_policy": {"output_dtype": "float32"}}}, "the loss is float32"),
        ({"a": {"mp_policy": BF16 | {"cast_forward_inputs": False}}, "": {}}, "cast_forward_inputs=False"),
        ({"": {"mesh": (2, 2, 2)}}, "must be (shards,) or (replicas, shards)"),
    ],
)
def test_calls_that_cannot_be_honoured_raise(calls, message):
    assert message in told(lambda: from_fsdp2(calls))


def test_features_to_come_raise_as_such():
    for arguments in ({"reshard_after_forward": 4, "mesh": (8,)}, {"offload_policy": "CPUOffloadPolicy"}):
        with pytest.raises(NotAvailableError, match="is not available yet"):
            from_fsdp2({"": arguments})


def test_torchs_offload_policies_are_told_apart():
    policy_of = lambda name: {"": {"offload_policy": type(name, (), {})()}}  # noqa: E731
    assert from_fsdp2(policy_of("OffloadPolicy")) == from_fsdp2({"": {}})
    with pytest.raises(NotAvailableError):
        from_fsdp2(policy_of("CPUOffloadPolicy"))


def test_the_same_job_in_fsdp1_and_fsdp2():
    one = from_fsdp1(sharding_strategy="SHARD_GRAD_OP", mixed_precision=BF16, ignored_states="*norm*")
    two = from_fsdp2({"": {"reshard_after_forward": False, "mp_policy": BF16, "ignored_params": "*norm*"}})
    assert one == two


# --- the table -----------------------------------------------------------------------------------------------------------------


def test_the_committed_table_is_what_the_importers_make():
    committed = (REPO / "docs" / "vocabulary.md").read_text()
    assert committed == vocabulary_markdown(), "run scripts/make_vocabulary.py"


def test_the_table_has_every_strategy_key_and_row():
    text = vocabulary_markdown()
    rows = (
        "FlatParameter",
        "reduce_bucket_size",
        "LOCAL_STATE_DICT",
        "SHARDED_STATE_DICT",
        "FULL_STATE_DICT",
        "limit_all_gathers",
        "BACKWARD_PRE",
    )
    for name in (*STRATEGIES, *rows, "min_num_params=1_000_000", "zjax.wrap_by_size(model, 1_000_000)"):
        assert name in text, name
    assert all(f"| `{path}` |" in text for path in KEYS)


def test_a_row_on_which_importers_disagree_is_an_error():
    wrong = Example("wrong", {"sharding_strategy": "FULL_SHARD"}, "-", {"zero_optimization": {"stage": 2}}, ("zero.stage",))
    with pytest.raises(AssertionError, match="disagree"):
        zjax_of(wrong)
    hpz = next(example for example in EXAMPLES if "hpZ" in example.title)
    assert zjax_of(hpz) == NOT_AVAILABLE


def test_jax_is_not_needed_to_read_either_vocabulary():
    """The importers are arithmetic on dictionaries: nothing is placed on a device."""
    before = jax.live_arrays()
    vocabulary_markdown()
    assert len(jax.live_arrays()) == len(before)
