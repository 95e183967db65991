"""Plans: rules, the specs of every role, bytes, and the optimizers whose state they must place."""

import functools
import math
import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import zjax
from zjax import rules
from zjax.models import llama
from zjax.state import state_struct, unplanned
from zjax.tree import named_leaves

STAGES = (0, 1, 2, 3)
SGD = optax.sgd(0.1)
GOLDEN = Path(__file__).parent / "golden" / "plan_llama_tiny_stage3_replica2_fsdp4.txt"


@functools.cache
def abstract(n=8, **degrees):
    return zjax.abstract_mesh(zjax.MeshConfig(**degrees), n)


@functools.cache
def mesh(n=8, **degrees):
    return zjax.make_mesh(zjax.MeshConfig(**degrees), jax.devices()[:n])


def ones(shapes):
    """An init_fn of leaves with these shapes; tuples are shapes, dictionaries subtrees."""
    return lambda key: jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))


def plan_of(shapes, *, stage=3, tx=SGD, on=None, compute="float32", micro=1, zero=None, **knobs):
    return zjax.build_plan(
        zjax.ZeroConfig(stage=stage, **(zero or {})),
        shapes if callable(shapes) else ones(shapes),
        tx,
        on or abstract(),
        precision=zjax.PrecisionConfig(compute=compute),
        accumulation=zjax.AccumulationConfig(micro_batches=micro),
        **knobs,
    )


def leaf(shape, **knobs):
    """The plan of a single parameter at path `layers/w`."""
    return plan_of({"layers": {"w": shape}}, **knobs).params["layers/w"]


# --- rules ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 128), P(None, "fsdp")),
        ((128, 64), P("fsdp")),
        ((64, 64), P("fsdp")),  # a tie goes to the first
        ((8, 64, 64), P(None, "fsdp")),
        ((100, 24), P(None, "fsdp")),  # the largest does not divide
        ((8,), P("fsdp")),
        ((7, 9), P()),
        ((), P()),
        ((1,), P()),
    ],
)
def test_zero_shards_the_largest_dim_that_divides_and_the_first_of_equals(shape, spec):
    assert leaf(shape).rest.spec == spec


@pytest.mark.parametrize(
    ("shape", "spec"), [((64, 16, 8), P(None, "fsdp")), ((8, 3), P()), ((64, 3, 8), P(None, None, "fsdp")), ((16, 8, 8), P(None, "fsdp"))]
)
def test_zero_never_shards_the_dim_that_counts_layers(shape, spec):
    planned = leaf(shape, units=("layers[*]",))
    assert planned.stacked and planned.rest.spec == spec


def test_a_rule_that_shards_the_dim_that_counts_layers_raises():
    with pytest.raises(ValueError, match=r"layers/w.*dim 0.*\(8, 64\).*layers"):
        leaf((8, 64), units=("layers[*]",), shard_placement=lambda path, shape: 0)


def test_zero_shards_over_fsdp_and_expert_together_and_never_over_replica():
    assert leaf((64, 32), on=abstract(16, replica=2, expert=2)).rest.spec == P(("fsdp", "expert"))
    assert leaf((6, 4), on=abstract(replica=2)).rest.spec == P(None, "fsdp")
    # 12 divides by fsdp 4 but not by fsdp 4 x expert 2: one dim takes all ZeRO axes, or none does.
    assert leaf((12, 3), on=abstract(expert=2)).rest.spec == P()


def test_zero_takes_a_dim_that_the_tensor_axis_left_free():
    on = abstract(tensor=2)
    columns = [rules.tensor_parallel({"layers/w": 1})]
    rows = [rules.tensor_parallel({"layers/w": -2})]
    assert leaf((64, 128), on=on, rules=columns).rest.spec == P("fsdp", "tensor")
    assert leaf((128, 64), on=on, rules=rows).rest.spec == P("tensor", "fsdp")
    # Nothing is left where the only other dim does not divide, and the reason counts free dims only.
    planned = leaf((6, 128), on=on, rules=columns)
    assert planned.rest.spec == P(None, "tensor") and planned.reason == "no dim divides: 6 % 4 = 2"


def test_what_the_unit_computes_with_keeps_the_tensor_axis():
    planned = leaf((64, 128), on=abstract(tensor=2), rules=[rules.tensor_parallel({"layers/w": 1})])
    assert planned.forward.spec == P(None, "tensor")
    assert planned.backward.spec == planned.accumulator.spec == planned.optimizer.spec == P("fsdp", "tensor")


def test_a_users_pattern_comes_before_zeros_own_choice():
    assert leaf((64, 128), rules=[rules.pattern({"layers": P("fsdp")})]).rest.spec == P("fsdp")
    columns = [rules.pattern({"layers/*": P(None, "tensor")})]
    assert leaf((64, 128, 32), on=abstract(tensor=2), rules=columns).rest.spec == P("fsdp", "tensor")
    # In stage 1 the pattern decides where the optimizer state is cut.
    planned = leaf((64, 128), stage=1, rules=[rules.pattern({"layers": P("fsdp")})])
    assert (planned.rest.spec, planned.optimizer.spec) == (P(), P("fsdp"))


def test_the_first_pattern_that_names_a_leaf_wins():
    first_matters = {"layers/w": P("fsdp"), "layers*": P(None, "fsdp")}
    plan = plan_of({"layers": {"w": (64, 64), "v": (64, 64)}}, rules=[rules.pattern(first_matters)])
    assert (plan.params["layers/w"].rest.spec, plan.params["layers/v"].rest.spec) == (P("fsdp"), P(None, "fsdp"))


def test_axes_of_one_device_drop_out_of_a_pattern():
    assert leaf((64, 128), rules=[rules.pattern({"layers": P("tensor", "fsdp")})]).rest.spec == P(None, "fsdp")


def test_a_pattern_may_lay_a_dim_over_two_axes():
    assert leaf((64, 3), on=abstract(tensor=2), rules=[rules.pattern({"layers": P(("fsdp", "tensor"))})]).rest.spec == P(("fsdp", "tensor"))


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"rules": [rules.pattern({"layers": P("fsdp")})]}, ("layers/w", "(17, 9)", "fsdp", "size 8", "17 % 8 = 1")),
        ({"rules": [rules.pattern({"layers": P(None, "fsdp")})]}, ("layers/w", "(17, 9)", "fsdp", "size 8", "9 % 8 = 1")),
        ({"on": "tensor", "rules": [rules.tensor_parallel({"layers": 0})]}, ("layers/w", "(17, 9)", "tensor", "size 2", "17 % 2 = 1")),
        ({"shard_placement": lambda path, shape: 1}, ("layers/w", "(17, 9)", "fsdp", "size 8", "9 % 8 = 1")),
        ({"rules": [rules.tensor_parallel({"layers": 2})], "on": "tensor"}, ("layers/w", "dim 2", "(17, 9)", "2 dims")),
        ({"shard_placement": lambda path, shape: -3}, ("layers/w", "dim -3", "(17, 9)", "2 dims")),
        ({"rules": [rules.pattern({"layers": P(None, None, "fsdp")})]}, ("layers/w", "'layers'", "(17, 9)", "2 dims")),
    ],
)
def test_a_rule_that_cannot_be_followed_raises_with_path_shape_and_reason(knobs, told):
    on = abstract(tensor=2) if knobs.get("on") == "tensor" else abstract()
    with pytest.raises(ValueError) as error:
        leaf((17, 9), **{**knobs, "on": on})
    for part in told:
        assert part in str(error.value)


def test_two_rules_for_one_dim_or_one_axis_raise():
    on = abstract(tensor=2)
    with pytest.raises(ValueError, match=r"layers/w: dim 0 .*fsdp.*already.*tensor"):
        leaf((64, 64), on=on, rules=[rules.tensor_parallel({"layers": 0}), rules.pattern({"layers": P("fsdp")})])
    with pytest.raises(ValueError, match=r"layers/w: dim 1 .*fsdp.*already.*fsdp"):
        leaf((64, 64), on=on, rules=[rules.pattern({"layers": P("fsdp")}), rules.pattern({"layers": P(None, "fsdp")})])


def test_shard_placement_chooses_the_dim_or_leaves_it_to_zero():
    seen = []

    def choose(path, shape):
        seen.append((path, shape))
        return {"layers/w": 0, "layers/v": -1}.get(path)

    plan = plan_of({"layers": {"w": (8, 64), "v": (64, 8), "u": (8, 64)}}, shard_placement=choose)
    assert {name: planned.rest.spec for name, planned in plan.params.items()} == {
        "layers/w": P("fsdp"),
        "layers/v": P(None, "fsdp"),
        "layers/u": P(None, "fsdp"),
    }
    assert sorted(seen) == [("layers/u", (8, 64)), ("layers/v", (64, 8)), ("layers/w", (8, 64))]


@pytest.mark.parametrize(
    ("knobs", "pattern"),
    [
        ({"zero": {"ignored": ("lyers",)}}, "lyers"),
        ({"units": ("lyers[*]",)}, "lyers"),
        ({"rules": [rules.pattern({"lyers/w": P("fsdp")})]}, "lyers/w"),
        ({"rules": [rules.tensor_parallel({"lyers/w": 0})]}, "lyers/w"),
        ({"rules": [rules.pattern({"layers": P("fsdp"), "lyers/w": P("fsdp")})]}, "lyers/w"),
    ],
    ids=["ignored", "units", "pattern", "tensor_parallel", "one of two patterns"],
)
def test_a_pattern_that_names_no_leaf_raises_with_the_leaves_there_are(knobs, pattern):
    with pytest.raises(ValueError) as error:
        plan_of({"layers": {"w": (64, 64)}}, on=abstract(tensor=2), **knobs)
    assert repr(pattern) in str(error.value) and "layers/w" in str(error.value)


def test_a_pattern_with_an_axis_that_does_not_exist_raises():
    with pytest.raises(ValueError, match="fdsp"):
        leaf((64, 64), rules=[rules.pattern({"layers": P("fdsp")})])


def test_a_parameter_that_is_not_floating_raises():
    with pytest.raises(ValueError, match=r"params/layers/w is int32\[8\].*floating"):
        plan_of(lambda key: {"layers": {"w": jnp.zeros(8, jnp.int32)}})


# --- roles, and what leaves a leaf out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "keep", "rest", "backward", "accumulator", "optimizer"),
    [
        (0, True, "whole", "whole", "whole", "whole"),
        (1, True, "whole", "whole", "whole", "cut"),
        (2, True, "whole", "whole", "cut", "cut"),
        (3, True, "cut", "cut", "cut", "cut"),
        (3, False, "cut", "whole", "cut", "cut"),
    ],
)
def test_a_stage_shards_the_roles_of_the_papers_table(stage, keep, rest, backward, accumulator, optimizer):
    spec = {"whole": P(), "cut": P(None, "fsdp")}
    planned = leaf((64, 128), stage=stage, zero={"reshard_after_forward": keep})
    assert planned.forward.spec == P()
    assert [planned.rest.spec, planned.backward.spec] == [spec[rest], spec[backward]]
    assert [planned.accumulator.spec, planned.optimizer.spec] == [spec[accumulator], spec[optimizer]]


@pytest.mark.parametrize(
    ("compute", "micro", "rest", "accumulator"),
    [("bfloat16", 1, "bfloat16", "bfloat16"), ("bfloat16", 4, "bfloat16", "float32"), ("float32", 1, "float32", "float32")],
)
def test_dtypes_follow_the_roles(compute, micro, rest, accumulator):
    plan = plan_of({"w": (64, 128)}, compute=compute, micro=micro, tx=optax.adam(0.1))
    w = plan.params["w"]
    assert [str(placed.dtype) for placed in (w.rest, w.forward, w.accumulator, w.optimizer)] == [rest, rest, accumulator, "float32"]
    assert [str(x.rest.dtype) for x in plan.part("master")] == (["float32"] if compute == "bfloat16" else [])


def test_ignored_leaves_are_whole_in_every_role_and_still_trained():
    shapes = {"layers": {"w": (64, 16), "b": (16,)}}
    plan = plan_of(shapes, zero={"ignored": ("*/b",)}, on=mesh(), tx=optax.adam(0.1))
    b = plan.params["layers/b"]
    assert {placed.spec for placed in (b.rest, b.forward, b.backward, b.accumulator, b.optimizer)} == {P()} and b.reason == "ignored"
    assert {x.rest.spec for x in plan.part("optimizer") if x.path.endswith("/b")} == {P()}
    assert plan.params["layers/w"].rest.spec == P("fsdp")
    state, _ = trained(plan, plan_batches())
    close(state.params, dense(optax.adam(0.1), ones(shapes)(None), plan_batches()))


def test_leaves_below_the_persistence_threshold_keep_only_the_parameter_whole():
    shapes = {"layers": {"w": (4, 16, 16), "b": (4, 16)}, "embed": (16, 16), "small": (255, 1), "head": (8, 32)}
    plan = plan_of(shapes, zero={"persistence_threshold": 256}, units=("layers[*]",), tx=optax.adam(0.1))
    # 4 x 16 = 64 elements, but 16 a layer; layers of 256 and the embedding are not below 256.
    whole = {name for name, planned in plan.params.items() if planned.rest.spec == P()}
    assert whole == {"layers/b", "small"}
    b = plan.params["layers/b"]
    assert b.backward.spec == P() and b.accumulator.spec == b.optimizer.spec == P(None, "fsdp")
    assert "16 < persistence_threshold 256" in b.reason
    moments = {x.path: x.rest.spec for x in plan.part("optimizer")}
    assert moments["opt_state/inner/0/mu/layers/b"] == moments["opt_state/inner/0/nu/layers/b"] == P(None, "fsdp")


def test_persistent_parameters_train_like_any_other():
    shapes = {"layers": {"w": (64, 16), "b": (16,)}}
    plan = plan_of(shapes, zero={"persistence_threshold": 17}, on=mesh(), tx=optax.adam(0.1))
    assert plan.params["layers/b"].rest.spec == P() and plan.params["layers/b"].optimizer.spec == P("fsdp")
    state, _ = trained(plan, plan_batches())
    close(state.params, dense(optax.adam(0.1), ones(shapes)(None), plan_batches()))
    assert unplanned(plan, state) == []


def test_strict_raises_only_for_leaves_that_should_be_sharded():
    with pytest.raises(ValueError, match=r"params/odd.*\(7,\).*fsdp.*7 % 8 = 7.*ignored"):
        plan_of({"w": (8, 8), "odd": (7,)}, zero={"strict": True})
    shapes = {"w": (8, 8), "odd": (7,), "scale": (), "none": (0, 3)}
    plan_of(shapes, zero={"strict": True, "ignored": ("odd",)})
    plan_of({"w": (256, 128)}, zero={"strict": True}, tx=optax.adafactor(0.1))


def test_every_leaf_that_is_not_sharded_says_why():
    shapes = {"w": (64, 64), "odd": (7,), "scale": (), "none": (0,), "kept": (8,), "out": (64, 8)}
    for stage in STAGES:
        zero = {"ignored": ("out",)} | ({"persistence_threshold": 9} if stage == 3 else {})
        for compute in ("float32", "bfloat16"):
            plan = plan_of(shapes, stage=stage, zero=zero, compute=compute, tx=optax.adafactor(0.1))
            for planned in plan.leaves:
                assert planned.rest.spec != P() or planned.reason or (planned.part == "params" and stage < 3), (stage, planned.path)
            expected = {"odd": "no dim divides: 7 % 8 = 7", "scale": "scalar", "none": "empty", "out": "ignored"}
            for name, reason in expected.items():
                assert plan.params[name].reason == (reason if stage else "stage 0 shards nothing")


def test_an_engine_asked_for_that_cannot_accumulate_without_communication_raises():
    local = zjax.AccumulationConfig(micro_batches=4, mode="local")
    build = lambda engine: zjax.build_plan(zjax.ZeroConfig(engine=engine), ones({"w": (8, 8)}), SGD, abstract(), accumulation=local)  # noqa: E731
    with pytest.raises(ValueError, match=r"accumulation\.mode='local'.*partitioner.*zero\.engine='explicit'.*'sharded'"):
        build("partitioner")
    assert build("auto").engine == build("explicit").engine == "explicit"
    assert "local" not in build("explicit").engine_reason and "in every micro-batch" in build("auto").engine_reason
    # FSDP's no_sync holds whole gradients, still unreduced over the data axes.
    w = build("auto").params["w"]
    assert (w.rest.spec, w.accumulator.spec, w.partial) == (P("fsdp"), P(), ("fsdp",))


# --- optimizers -------------------------------------------------------------------------------------------------------------

SHAPES = {"embed": (256, 128), "layers": {"w": (2, 128, 128), "b": (2, 24)}, "odd": (7,), "scale": ()}
LABELS = {"embed": "a", "layers": {"w": "b", "b": "c"}, "odd": "a", "scale": "c"}


def start(key=None):
    draw = np.random.default_rng(11)
    return jax.tree.map(
        lambda shape: jnp.asarray(draw.normal(0.2, 0.1, shape), jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def loss_sums(params, batch, rng):
    """Every leaf takes part, with positive gradients of its own: Adam would blow up the rounding of those near 0."""
    rows = 1 + jnp.mean(batch**2, axis=1)
    total = sum((i + 1) * jnp.sum(jnp.exp(x)) / max(1, x.size) for i, x in enumerate(jax.tree.leaves(params)))
    return jnp.sum(rows) * total, jnp.float32(batch.shape[0])


def plan_batches(steps=3):
    return list(np.random.default_rng(2).normal(size=(steps, 16, 4)).astype("float32"))


def trained(plan, batches):
    state, step = zjax.init_state(plan, jax.random.key(0)), zjax.make_train_step(plan, loss_sums)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def dense(tx, params, batches):
    """Plain optax on one device."""
    opt_state = tx.init(params)

    @jax.jit
    def update(params, opt_state, batch):
        grads = jax.grad(lambda p: loss_sums(p, batch, None)[0] / batch.shape[0])(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = update(params, opt_state, batch)
    return jax.device_get(params)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), jax.device_get(a), jax.device_get(b))


def adam_and_factors():
    return {"a": optax.adam(1e-2), "b": optax.adafactor(1e-2), "c": optax.set_to_zero()}


def labelled(labels):
    return jax.tree.map(lambda label: label in labels, LABELS)


OPTIMIZERS = {
    # name: (optimizer, how many leaves of its state are sharded)
    "adamw": (lambda: optax.adamw(1e-2), 2 * 3),
    "adafactor": (lambda: optax.adafactor(1e-2), 2 * 2 + 1),
    "lion": (lambda: optax.lion(1e-3), 3),
    "sgd_momentum": (lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True), 3),
    "multi_transform": (lambda: optax.multi_transform(adam_and_factors(), LABELS), 2 + 2),
    "masked": (
        lambda: optax.chain(optax.masked(optax.adam(1e-2), labelled("ab")), optax.masked(optax.set_to_zero(), labelled("c"))),
        2 * 2,
    ),
    "weight_decay_mask": (lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), 2 * 3),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 3)), 2 * 3),
    "multi_steps": (lambda: optax.MultiSteps(optax.adam(1e-2), 2), 3 * 3),
    "schedules": (
        lambda: optax.chain(
            optax.clip_by_global_norm(0.1), optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -1e-2 / (count + 1))
        ),
        2 * 3,
    ),
}


def in_default(name, stage):
    """A default run has every optimizer at one stage, and Adam and adafactor at all."""
    return name in ("adamw", "adafactor") or stage == 1 + list(OPTIMIZERS).index(name) % 3


@pytest.mark.parametrize(
    ("name", "stage"),
    [pytest.param(name, stage, marks=[] if in_default(name, stage) else pytest.mark.full) for name in OPTIMIZERS for stage in STAGES],
)
def test_an_optimizers_state_is_placed_and_updated_like_on_one_device(name, stage):
    make, sharded = OPTIMIZERS[name]
    tx = make()
    plan = plan_of(start, stage=stage, tx=tx, on=mesh(), units=("layers[*]",))
    assert_covers_the_train_state(plan)
    cut = [planned.path for planned in plan.part("optimizer") if planned.rest.spec != P()]
    assert len(cut) == (sharded if stage else 0), cut

    state, _ = trained(plan, plan_batches())
    assert unplanned(plan, state) == []
    for planned, x in zip(plan.part("optimizer"), jax.tree.leaves(state.opt_state.inner), strict=True):
        assert math.prod(x.sharding.shard_shape(x.shape)) * (1 if planned.rest.spec == P() else 8) == x.size, planned.path
    close(state.params, dense(tx, start(), plan_batches()))


@pytest.mark.parametrize(
    "make",
    [lambda: optax.noisy_sgd(1e-2, key=jax.random.key(3)), lambda: optax.sm3(1e-2)],
    ids=["a random key", "a list for each parameter"],
)
def test_an_optimizer_whose_state_is_not_like_the_parameters_is_planned_and_trained(make):
    without_scalar = lambda key=None: {name: x for name, x in start().items() if name != "scale"}  # noqa: E731  (SM3 takes none)
    plan = plan_of(without_scalar, tx=make(), on=mesh())
    assert_covers_the_train_state(plan)
    state, _ = trained(plan, plan_batches())
    close(state.params, dense(make(), without_scalar(), plan_batches()))


def test_moments_lie_where_a_users_rule_puts_the_parameter():
    plan = plan_of({"w": (64, 128)}, stage=1, tx=optax.adam(0.1), compute="bfloat16", rules=[rules.pattern({"w": P("fsdp")})])
    assert {x.path: x.rest.spec for x in plan.leaves if x.part in ("master", "optimizer") and x.shape} == {
        "opt_state/master/w": P("fsdp"),
        "opt_state/inner/0/mu/w": P("fsdp"),
        "opt_state/inner/0/nu/w": P("fsdp"),
    }


def test_factors_of_stacked_layers_never_shard_the_dim_that_counts_layers():
    plan = plan_of({"layers": (8, 256, 128)}, tx=optax.adafactor(0.1), units=("layers[*]",))
    specs = {x.shape: x.rest.spec for x in plan.part("optimizer")}
    assert specs[(8, 128)] == specs[(8, 256)] == P(None, "fsdp")


# --- coverage, bytes --------------------------------------------------------------------------------------------------------


def assert_covers_the_train_state(plan):
    """Paths, shapes and dtypes of the plan's leaves are those of the state that initialising makes, each once, in order."""
    real = jax.eval_shape(lambda key: zjax.init_state(plan, key), jax.random.key(0))
    expected = [(name, x.shape, x.dtype) for name, x in named_leaves(real)]
    assert [(planned.path, planned.shape, planned.rest.dtype) for planned in plan.leaves] == expected
    assert [(name, x.shape, x.dtype) for name, x in named_leaves(state_struct(plan))] == expected
    assert len({planned.path for planned in plan.leaves}) == len(plan.leaves)


dims = st.integers(0, 40) | st.sampled_from([8, 16, 24, 64])
shapes = st.lists(dims, max_size=3).map(tuple)
meshes = st.sampled_from([(8, 1, 8), (8, 2, 4), (8, 4, 2), (8, 8, 1), (1, 1, 1), (2, 1, 2), (4, 2, 2)])


def random_plan(shapes, stacked, on, stage, compute):
    n, replica, fsdp = on
    return plan_of(
        {"layers": dict(enumerate(stacked)), "rest": dict(enumerate(shapes)), "end": ()},
        stage=stage,
        compute=compute,
        tx=optax.adam(0.1),
        on=mesh(n, replica=replica, fsdp=fsdp),
        units=("layers[*]",),
    )


layers = st.tuples(st.sampled_from([1, 2, 8]), dims, dims)
plans = st.builds(
    random_plan,
    st.lists(shapes, max_size=3),
    st.lists(layers, min_size=1, max_size=2),
    meshes,
    st.sampled_from(STAGES),
    st.sampled_from(["float32", "bfloat16"]),
)
thorough = settings(max_examples=60, deadline=None, derandomize=True)


@given(plans)
@thorough
@pytest.mark.filterwarnings("ignore:zero.stage")
def test_every_leaf_of_the_train_state_is_planned_once(plan):
    assert_covers_the_train_state(plan)


@given(plans)
@thorough
@pytest.mark.filterwarnings("ignore:zero.stage")
def test_shards_tile_each_leaf_and_bytes_add_up_over_devices(plan):
    n = plan.mesh.size
    for planned in plan.leaves:
        for role in ("rest", "forward", "backward", "accumulator", "optimizer"):
            placed = getattr(planned, role)
            if placed is None:
                continue
            pieces = plan.sharding(placed).devices_indices_map(planned.shape)
            bounds = [tuple(piece.indices(size)[:2] for piece, size in zip(index, planned.shape, strict=True)) for index in pieces.values()]
            sizes = [math.prod(stop - begin for begin, stop in bound) for bound in bounds]
            # Every device's piece is as large as the plan says; distinct pieces make the leaf, each on as many devices.
            width = 8 if planned.path == "rng" else np.dtype(placed.dtype).itemsize
            assert {size * width for size in sizes} == {planned.bytes_on(plan.mesh, role)}
            distinct = set(bounds)
            assert sum(math.prod(stop - begin for begin, stop in bound) for bound in distinct) == math.prod(planned.shape)
            assert sum(sizes) == math.prod(planned.shape) * n // len(distinct)


@given(plans, st.integers(0, 2**31))
@settings(thorough, max_examples=15)
@pytest.mark.filterwarnings("ignore:zero.stage")
def test_gathering_what_was_sharded_gives_it_back(plan, seed):
    draw = np.random.default_rng(seed)
    for planned in plan.part("params"):
        x = draw.normal(size=planned.shape).astype(planned.rest.dtype)
        for role in ("rest", "accumulator", "optimizer"):
            sharded = jax.device_put(x, plan.sharding(getattr(planned, role)))
            np.testing.assert_array_equal(np.asarray(sharded), x)
            gathered = jax.device_put(sharded, plan.sharding(planned.forward))
            assert all(shard.data.shape == x.shape for shard in gathered.addressable_shards)
            for shard in gathered.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), x)


DEVICES = (1, 4, 16, 64, 256, 1024)
PAPER_GB = {
    # Rajbhandari et al. 2020, figure 1 and table 1, in GB of 1e9 bytes: billions of parameters, stage -> N = 1, 4, 16, 64, 256, 1024
    (7.5, 0): (120,) * 6,
    (7.5, 1): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    (7.5, 2): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    (7.5, 3): (120, 30, 7.5, 1.88, 0.47, 0.12),
    (128, 1): (2048, 896, 608, 536, 518, 513.5),
    (128, 2): (2048, 704, 368, 284, 263, 257.8),
    (128, 3): (2048, 512, 128, 32, 8, 2),
    (1000, 1): (16000, 7000, 4750, 4187.5, 4046.9, 4011.7),
    (1000, 2): (16000, 5500, 2875, 2218.8, 2054.7, 2013.7),
    (1000, 3): (16000, 4000, 1000, 250, 62.5, 15.6),
}
BYTES = {0: lambda n: 16, 1: lambda n: 4 + 12 / n, 2: lambda n: 2 + 14 / n, 3: lambda n: 16 / n}
"""Bytes a parameter on each of n devices: bf16 weight and gradient, fp32 master and two moments."""


@pytest.mark.parametrize(("billions", "stage"), PAPER_GB, ids=str)
@pytest.mark.filterwarnings("ignore:zero.stage")
def test_bytes_a_device_are_those_of_the_zero_paper(billions, stage):
    # 7.5e9 has no divisor 1024: the leaf is rounded up to what divides, 3e-8 more.
    count = math.ceil(billions * 1e9 / 1024) * 1024
    for n, published in zip(DEVICES, PAPER_GB[billions, stage], strict=True):
        held = zjax.bytes_per_device(plan_of({"w": (count,)}, stage=stage, compute="bfloat16", tx=optax.adam(0.1), on=abstract(n)))
        adams_step_count = 4
        assert held["model_state"] == round(count * BYTES[stage](n)) + adams_step_count
        decimals = len(f"{published}".partition(".")[2])
        assert round(held["model_state"] / 1e9, decimals) == pytest.approx(published, abs=10.0**-decimals / 2)


def test_adam_states_of_a_1_5b_model_are_18_gb_and_2_25_gb_over_8_ranks():
    """DeepSpeed's ZeRO tutorial: 12 bytes a parameter, sharded by stage 1."""
    for stage, expected in ((0, 18e9), (1, 2.25e9)):
        held = zjax.bytes_per_device(plan_of({"w": (1_500_000_000,)}, stage=stage, compute="bfloat16", tx=optax.adam(0.1)))
        assert held["master"] + held["optimizer"] == expected + 4


def test_gradients_are_counted_at_their_own_width_and_at_four_bytes_when_accumulated():
    held = lambda **knobs: zjax.bytes_per_device(plan_of({"w": (800,)}, **knobs))["gradients"]  # noqa: E731
    assert held(compute="bfloat16", stage=0) == 1600
    assert held(compute="bfloat16", stage=0, micro=2) == 3200
    assert held(compute="bfloat16", stage=2, micro=2) == 400
    assert held(compute="float32", stage=3) == 400


@pytest.mark.parametrize(("stage", "published"), [(0, 197124), (1, 82436), (2, 82436), (3, 25092)])
def test_the_compiled_steps_arguments_are_the_bytes_measured_without_zjax(stage, published):
    """W (4, 64, 64) in fp32 with Adam and a batch of (16, 64), a device of 8: 3 x 65536, or shards of 8192, + 512 + 4."""

    def loss_fn(params, batch, rng):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["W"])
        return jnp.sum(x**2), jnp.float32(batch.shape[0])

    plan = plan_of({"W": (4, 64, 64)}, stage=stage, tx=optax.adam(1e-3), on=mesh(), units=("W[*]",))
    compiled = zjax.make_train_step(plan, loss_fn).lower(jax.ShapeDtypeStruct((16, 64), jnp.float32)).compile()
    whole, shard, batch, count = 65536, 8192, 16 * 64 * 4 // 8, 4
    assert published == (shard if stage == 3 else whole) + 2 * (shard if stage else whole) + batch + count
    # What the train state has beside parameters and optax's state: step, skipped_steps (int32) and a key of two uint32.
    own = {planned.path: planned.bytes_on(plan.mesh) for planned in plan.part("counter")}
    assert own == {"step": 4, "skipped_steps": 4, "rng": 8}
    assert compiled.memory_analysis().argument_size_in_bytes == published + 4 + 4 + 8


# --- what people read -------------------------------------------------------------------------------------------------------


def llama_plan():
    model = llama.LlamaFunctions(llama.PRESETS["tiny"])
    return plan_of(model.init, tx=optax.adamw(1e-3), on=abstract(replica=2), compute="bfloat16", units=llama.UNITS)


def test_the_table_of_the_tiny_llama_is_the_golden_one():
    """A change here is a change of placement: read it, then rewrite the file with ZJAX_UPDATE_GOLDEN=1."""
    table = llama_plan().table() + "\n"
    if os.environ.get("ZJAX_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(table)
    assert table == GOLDEN.read_text()


def test_the_table_has_a_line_for_every_leaf_and_bytes_that_add_up():
    plan = llama_plan()
    lines = {line.split()[0]: line for line in plan.table().splitlines() if line.strip()}
    assert [path for path in lines if path in {x.path for x in plan.leaves}] == [x.path for x in plan.leaves]
    # 4 layers of 688 x 256 weights in bf16 over 4 shards, and the fp32 master of the same.
    assert " 352,256" in lines["params/layers/w_down"] and " 704,512" in lines["opt_state/master/layers/w_down"]
    for word in ("4x688x256", "bfloat16", "(-, fsdp)"):
        assert word in lines["params/layers/w_down"]
    # 3,033,344 parameters x 16 bytes / 4 shards = 11.57 MiB.
    assert "3,033,344 parameters" in plan.table() and "model_state 11.57" in plan.table()
    assert "replica 2 x fsdp 4" in plan.table() and "HYBRID_SHARD" in plan.table()


@pytest.mark.parametrize(
    ("stage", "keep", "name"),
    [(0, True, "DDP"), (1, True, "ZeRO-1"), (2, True, "ZeRO-2"), (3, True, "ZeRO-3, FULL_SHARD"), (3, False, "SHARD_GRAD_OP")],
)
def test_the_summary_uses_the_names_of_deepspeed_and_fsdp(stage, keep, name):
    assert name in plan_of({"w": (8,)}, stage=stage, zero={"reshard_after_forward": keep}).table().splitlines()[0]


def test_a_plan_does_not_differ_from_itself_built_again():
    assert llama_plan().diff(llama_plan()) == ""
    assert llama_plan() == llama_plan() and hash(llama_plan()) == hash(llama_plan())


@pytest.mark.parametrize(
    ("one", "other", "role"), [(1, 2, "accumulator"), (0, 1, "optimizer"), (2, 3, "rest")], ids=["1 to 2", "0 to 1", "2 to 3"]
)
def test_the_diff_of_two_stages_names_the_role_that_changes_and_how(one, other, role):
    shapes = {"w": (64, 128), "odd": (7,)}
    lines = plan_of(shapes, stage=one).diff(plan_of(shapes, stage=other)).splitlines()
    assert f"params/w: {role} R float32 device -> (-, fsdp) float32 device" in lines
    assert not any("odd" in line for line in lines)
    back = plan_of(shapes, stage=other).diff(plan_of(shapes, stage=one)).splitlines()
    assert f"params/w: {role} (-, fsdp) float32 device -> R float32 device" in back


def test_the_diff_names_leaves_shapes_and_bytes_that_differ():
    one, other = plan_of({"a": (8,), "b": (16,)}), plan_of({"b": (32,), "c": (8,)})
    assert set(one.diff(other).splitlines()) >= {
        "params/a: only in the first plan",
        "params/c: only in the second plan",
        "params/b: shape (16,) -> (32,)",
    }
    assert "params/w: bytes a device 32 -> 64" in plan_of({"w": (64,)}).diff(plan_of({"w": (64,)}, on=abstract(replica=2))).splitlines()


def test_the_diff_tells_of_gradients_that_take_other_bytes_on_another_mesh():
    """Stage 2 on 8 shards or on 4: parameters are the same, a device's gradient is not."""
    assert "accumulator" in plan_of({"w": (64,)}, stage=2).diff(plan_of({"w": (64,)}, stage=2, on=abstract(replica=2)))


def test_a_plan_on_an_abstract_mesh_says_that_it_cannot_run():
    plan = plan_of({"w": (8,)})
    for use in (lambda: zjax.init_state(plan, jax.random.key(0)), lambda: zjax.make_train_step(plan, loss_sums)):
        with pytest.raises(ValueError, match=r"abstract mesh.*make_mesh"):
            use()


def test_a_key_of_another_kind_is_refused_before_anything_is_made():
    plan = plan_of({"w": (8,)}, on=mesh())
    for wrong in (0, jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        with pytest.raises(TypeError, match=r"jax\.random\.key"):
            zjax.init_state(plan, wrong)


def test_one_label_may_stand_for_several_parameters():
    """optax.multi_transform takes labels that are a prefix of the parameters; its state then has no leaf below some of them."""
    init = lambda key: {"embed": {"a": jnp.ones((16, 4)), "b": jnp.ones(8)}, "head": {"w": jnp.ones((8, 4))}}  # noqa: E731
    tx = optax.multi_transform({"still": optax.set_to_zero(), "adam": optax.adam(0.1)}, {"embed": "still", "head": "adam"})
    plan = zjax.build_plan(zjax.ZeroConfig(), init, tx, zjax.abstract_mesh(zjax.MeshConfig(), 8))
    moments = {leaf.path: leaf.rest.spec for leaf in plan.part("optimizer") if leaf.shape}
    assert [path.rpartition("inner_state/")[2] for path in moments] == ["0/mu/head/w", "0/nu/head/w"]
    assert set(moments.values()) == {P("fsdp")}


def test_a_degree_that_divides_next_to_nothing_is_told_and_a_few_odd_leaves_are_not():
    init = lambda key: {"w": jnp.zeros((64, 64)), "odd": jnp.zeros((5, 7))}  # noqa: E731

    def build(fsdp):
        return zjax.build_plan(zjax.ZeroConfig(stage=3), init, optax.sgd(0.1), zjax.abstract_mesh(zjax.MeshConfig(fsdp=fsdp), fsdp))

    with pytest.warns(UserWarning, match=r"zero\.stage=3 over fsdp 3: 2 of 2 leaves, 100% of the parameters, stay whole \(params/odd"):
        build(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(8)
