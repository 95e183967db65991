"""Restores that change something on the way: precision, names, a part of the parameters; and runs that go on exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import assert_same_state, compiled_fast, leaves, shared_folder

from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.config import AccumulationConfig, LossScaleConfig, MeshConfig, PrecisionConfig, ZeroConfig
from zjax.mesh import make_mesh
from zjax.plan import build_plan
from zjax.rows import row_keys
from zjax.state import init_params, init_state, unplanned
from zjax.step import make_train_step
from zjax.tree import named_leaves

SCALED = LossScaleConfig(initial_power=6, window=3)
SIZES = {"up": (16, 64), "down": (64, 8), "bias": (8,)}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


def init(key, sizes=SIZES):
    return {name: 0.3 * jax.random.normal(jax.random.fold_in(key, len(name)), shape) for name, shape in sizes.items()}


def loss(params, batch, rng, rate=0.1):
    """Squared error of an MLP with dropout."""
    keys = row_keys(rng, batch["x"].shape[0])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, (64,)))(keys)
    errors = jnp.square((jnp.tanh(batch["x"] @ params["up"]) * keep) @ params["down"] + params["bias"] - batch["y"])
    return jnp.sum(errors), jnp.float32(batch["x"].shape[0])


def batch_of(step, dtype):
    """The data of a step."""
    x, y = jax.random.split(jax.random.fold_in(jax.random.key(1), step))
    return {"x": jax.random.normal(x, (16, 16), dtype), "y": jax.random.normal(y, (16, 8), dtype)}


def plan_of(compute="bfloat16", stage=3, *, init=init, tx=None, frozen=(), micro_batches=1, engine="auto", keep_float32=(), **degrees):
    degrees = degrees or {"fsdp": 8}
    mesh = make_mesh(MeshConfig(**degrees), jax.devices()[: int(np.prod(list(degrees.values())))])
    return build_plan(
        ZeroConfig(stage=stage, engine=engine),
        init,
        tx or optax.adamw(1e-2),
        mesh,
        precision=PrecisionConfig(compute=compute, keep_float32=keep_float32, **({"loss_scale": SCALED} if compute == "float16" else {})),
        accumulation=AccumulationConfig(micro_batches=micro_batches),
        frozen=frozen,
    )


def trained(plan, state, steps, loss=loss):
    """The state after steps, from the one that it has."""
    step = make_train_step(plan, loss)
    for index in range(int(state.step), int(state.step) + steps):
        state, metrics = step(state, batch_of(index, plan.precision.compute))
    return state, float(metrics["loss"])


def save(folder, state):
    opened = Checkpointer(folder)
    opened.save(state)
    opened.close()


@functools.cache
def three_steps(compute, frozen=()):
    """Leaves and state of a run after 3 steps; its arrays are not donated."""
    plan = plan_of(compute, frozen=frozen)
    return trained(plan, init_state(plan, jax.random.key(0)), 3)[0]


# --- exact resume -------------------------------------------------------------------------------------------------------


KNOBS = [{}, {"stage": 1}, {"micro_batches": 2, "stage": 2}]
COMPUTES = ["float32", "bfloat16", "float16"]
EVERY_RUN = [
    pytest.param(compute, knobs, marks=() if i == j else pytest.mark.full, id=f"{compute}, {knobs}")
    for i, compute in enumerate(COMPUTES)
    for j, knobs in enumerate(KNOBS)
]


@pytest.mark.parametrize(("compute", "knobs"), EVERY_RUN)
def test_c47_five_steps_a_resume_and_five_are_ten_steps(tmp_path, compute, knobs):
    """Bit for bit: parameters, masters, moments, counts, loss scale, random stream; dropout and data go on."""
    plan = plan_of(compute, **knobs)
    straight, last = trained(plan, init_state(plan, jax.random.key(0)), 10)
    half, _ = trained(plan, init_state(plan, jax.random.key(0)), 5)
    save(tmp_path, half)
    resumed, again = trained(plan, Checkpointer(tmp_path).restore(plan), 5)
    assert_same_state(resumed, straight)
    assert again == last
    assert (compute == "float16") == any(path.startswith("loss_scale/") for path, _ in named_leaves(straight))


@pytest.mark.parametrize(
    "other",
    [
        {"stage": 1}, {"fsdp": 4}, {"fsdp": 2}, {"fsdp": 1}, {"replica": 2, "fsdp": 4}, {"micro_batches": 2}, {"stage": 2, "engine": "explicit"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*nothing is sharded")
def test_c45_c47_a_run_goes_on_under_another_plan(tmp_path, other):
    """The same state bit for bit, and the next steps to rounding."""
    state = three_steps("float32")
    save(tmp_path, state)
    # Every micro-batch draws its own dropout: with two of them it is another.
    rate = 0.0 if "micro_batches" in other else 0.1
    trains_on = functools.partial(trained, steps=2, loss=functools.partial(loss, rate=rate))
    expected, expected_loss = trains_on(plan_of("float32"), Checkpointer(tmp_path).restore(plan_of("float32")))
    plan = plan_of("float32", **other)
    restored = Checkpointer(tmp_path).restore(plan)
    assert_same_state(restored, state)
    assert unplanned(plan, restored) == []
    found, found_loss = trains_on(plan, restored)
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-5)
    for path, x in leaves(found).items():
        np.testing.assert_allclose(x, leaves(expected)[path], rtol=1e-3, atol=1e-6, err_msg=path)


def test_c43_frozen_parameters_are_saved_and_have_no_moments(tmp_path):
    """DeepSpeed #3090: frozen weights were missing, and random after a resume."""
    state = three_steps("bfloat16", ("up",))
    save(tmp_path, state)
    saved = Checkpointer(tmp_path).manifest(3).leaves
    assert "params/up" in saved
    assert sorted(path for path in saved if path.endswith("/up")) == ["params/up"]
    assert_same_state(Checkpointer(tmp_path).restore(plan_of(stage=1, frozen=("up",), fsdp=4)), state)


# --- precision ----------------------------------------------------------------------------------------------------------


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_float32_becomes_a_low_precision_with_master(tmp_path, narrow):
    wide = three_steps("float32")
    save(tmp_path, wide)
    plan = plan_of(narrow, 2, replica=2, fsdp=4)
    with pytest.raises(CheckpointError, match=rf"params/up: float32\[16, 64\] in the checkpoint, {narrow}.*(\n.*)*convert=True"):
        Checkpointer(tmp_path).restore(plan)
    state = Checkpointer(tmp_path).restore(plan, convert=True)
    assert_equal(state.opt_state.master, wide.params)
    assert_equal(state.params, jax.tree.map(lambda x: x.astype(narrow), wide.params))
    assert_equal(state.opt_state.inner, wide.opt_state.inner)
    assert (int(state.step), unplanned(plan, state)) == (3, [])
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, init_state(plan, jax.random.key(0)))
    if narrow == "float16":
        assert float(state.loss_scale.scale) == 2.0**6
    trained(plan, state, 1)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_a_low_precision_with_master_becomes_float32(tmp_path, narrow):
    """From the masters, not from the rounded parameters."""
    low = three_steps(narrow)
    save(tmp_path, low)
    plan = plan_of("float32", 1)
    with pytest.raises(CheckpointError, match="opt_state/master/up: in the checkpoint, but not in the plan"):
        Checkpointer(tmp_path).restore(plan)
    state = Checkpointer(tmp_path).restore(plan, convert=True)
    assert_equal(state.params, low.opt_state.master)
    assert any((np.asarray(x.astype(narrow), np.float32) != np.asarray(x)).any() for x in jax.tree.leaves(state.params))
    assert_equal(state.opt_state.inner, low.opt_state.inner)
    assert state.opt_state.master is None and state.loss_scale is None
    trained(plan, state, 1)


def test_there_and_back_is_where_it_was(tmp_path):
    wide = three_steps("float32")
    save(tmp_path / "a", wide)
    save(tmp_path / "b", Checkpointer(tmp_path / "a").restore(plan_of("bfloat16"), convert=True))
    assert_same_state(Checkpointer(tmp_path / "b").restore(plan_of("float32"), convert=True), wide)


def test_converting_one_parameter_that_stays_float32(tmp_path):
    save(tmp_path, three_steps("bfloat16"))
    state = Checkpointer(tmp_path).restore(plan_of("bfloat16", keep_float32=("bias",)), convert=True)
    low = three_steps("bfloat16")
    assert state.params["bias"].dtype == jnp.float32
    assert_equal(state.params["bias"], low.opt_state.master["bias"])
    assert_equal(state.opt_state.master["up"], low.opt_state.master["up"])


def test_converting_does_not_hide_what_does_not_fit(tmp_path):
    save(tmp_path, three_steps("float32"))
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path).restore(
            plan_of("bfloat16", init=functools.partial(init, sizes=SIZES | {"up": (16, 32), "new": (4,)})), convert=True
        )
    for text in (
        "params/up: float32[16, 64] in the checkpoint, bfloat16[16, 32] in the plan",
        "params/new: missing",
        "opt_state/master/new: missing",
    ):
        assert text in str(error.value)
    with pytest.raises(CheckpointError, match="opt_state/inner/0/nu/up: in the checkpoint, but not in the plan"):
        Checkpointer(tmp_path).restore(plan_of("bfloat16", tx=optax.sgd(1.0)), convert=True)


# --- names --------------------------------------------------------------------------------------------------------------


def nested(key):
    """The parameters of `init` under other names."""
    flat = init(key)
    return {"block": {"in": flat["up"], "out": flat["down"]}, "bias": flat["bias"]}


def test_parameters_of_other_names_with_their_masters_and_moments(tmp_path):
    state = three_steps("bfloat16")
    save(tmp_path, state)
    plan = plan_of(init=nested, stage=2)
    rename = {"up": "block/in", "down": "block/out"}
    with pytest.raises(CheckpointError, match="params/block/in: missing in the checkpoint"):
        Checkpointer(tmp_path).restore(plan)
    restored = Checkpointer(tmp_path).restore(plan, rename=rename)
    for tree, other in [
        (restored.params, state.params), (restored.opt_state.master, state.opt_state.master),
        (restored.opt_state.inner[0].mu, state.opt_state.inner[0].mu), (restored.opt_state.inner[0].nu, state.opt_state.inner[0].nu),
    ]:  # fmt: skip
        assert_equal(tree, {"block": {"in": other["up"], "out": other["down"]}, "bias": other["bias"]})
    save(tmp_path / "again", restored)
    back = Checkpointer(tmp_path / "again").restore(plan_of(), rename={"block/in": "up", "block/out": "down"})
    assert_same_state(back, state)


def test_a_name_for_all_that_begins_with_it(tmp_path):
    plan = plan_of(init=nested)
    state = init_state(plan, jax.random.key(0))
    save(tmp_path, state)

    def moved(key):
        tree = nested(key)
        return {"model": {"layers": tree.pop("block")}, **tree}

    restored = Checkpointer(tmp_path).restore(plan_of(init=moved), rename={"block": "model/layers"})
    assert_equal(restored.params["model"]["layers"], state.params["block"])
    with pytest.raises(CheckpointError, match=r"rename: .*/0 has no parameter 'blok'; it has bias, block/in, block/out"):
        Checkpointer(tmp_path).restore(plan, rename={"blok": "x"})
    with pytest.raises(CheckpointError, match="would both be params/bias"):
        Checkpointer(tmp_path).restore(plan, rename={"block/in": "bias"})


# --- parameters alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_c44_parameters_alone_are_a_fresh_start_from_them(tmp_path, compute):
    """DeepSpeed #2101: masters stayed those of before. One step equals that of an optimizer that starts from these parameters."""
    old = three_steps("bfloat16")
    save(tmp_path, old)
    plan = plan_of(compute, tx=optax.lion(1e-3), fsdp=4)
    state = Checkpointer(tmp_path).restore_params(plan, jax.random.key(5))
    expected = init_state(plan, jax.random.key(5), jax.tree.map(np.asarray, old.opt_state.master))
    assert_same_state(state, expected)
    assert unplanned(plan, state) == []
    assert_same_state(trained(plan, state, 1)[0], trained(plan, expected, 1)[0])


def test_some_of_the_parameters(tmp_path):
    """As for a model with a new head, or with adapters: the others are drawn, as if nothing had been loaded."""
    old = three_steps("bfloat16")
    save(tmp_path, old)
    plan = plan_of(init=functools.partial(init, sizes=SIZES | {"down": (64, 4), "adapter": (16, 2)}))
    rng = jax.random.key(5)
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path).restore_params(plan, rng)
    for text in ("params/adapter: missing in the checkpoint", "params/down: [64, 8] in the checkpoint, [64, 4] in the plan"):
        assert text in str(error.value)
    state = Checkpointer(tmp_path).restore_params(plan, rng, only=("up", "b*"))
    fresh = init_state(plan, rng)
    for name in ("up", "bias"):
        assert_equal(state.opt_state.master[name], old.opt_state.master[name])
        assert_equal(state.params[name], old.params[name])
    for name in ("down", "adapter"):
        assert_equal(state.opt_state.master[name], fresh.opt_state.master[name])
    assert_equal(state.opt_state.inner, fresh.opt_state.inner)
    assert unplanned(plan, state) == []
    with pytest.raises(ValueError, match="only: pattern 'upp' matches no leaf"):
        Checkpointer(tmp_path).restore_params(plan, rng, only=("upp",))


def test_a_parameter_that_the_plan_does_not_have_is_named(tmp_path):
    save(tmp_path, three_steps("bfloat16"))
    plan = plan_of(init=functools.partial(init, sizes={"up": (16, 64)}))
    with pytest.raises(CheckpointError, match=r"params/bias: in the checkpoint, but not in the plan"):
        Checkpointer(tmp_path).restore_params(plan, jax.random.key(0))
    renamed = plan_of(init=functools.partial(init, sizes={"w": (16, 64), "other": (3,)}))
    state = Checkpointer(tmp_path).restore_params(renamed, jax.random.key(0), only=("w",), rename={"up": "w"})
    assert_equal(state.opt_state.master["w"], three_steps("bfloat16").opt_state.master["up"])


def test_what_is_drawn_alone_is_what_a_state_begins_with():
    plan = plan_of("float32")
    assert_equal(init_params(plan, jax.random.key(3)), init_state(plan, jax.random.key(3)).params)
