"""Optimizers by name: their rules against numpy, stacked layers against single ones, eight devices against one."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small import compiled_fast, shared_folder

import zjax
from zjax.config import ModelConfig, TrainConfig
from zjax.fields import ConfigError
from zjax.optim import global_norm, make_optimizer, schedule_free_eval_params
from zjax.optimizer_config import OPTIMIZER_KNOBS, OptimizerConfig, ParamGroup
from zjax.state import unplanned
from zjax.train import plan_run
from zjax.tree import named_leaves

UNITS = ("embed", "layers[*]", "head")
EMBEDDINGS = ("embed", "head")
STAGES = (0, 1, 2, 3)
ENGINES = ("partitioner", "explicit")


@functools.cache
def mesh():
    return zjax.make_mesh(zjax.MeshConfig(), jax.devices())


def optimizer(name, steps=5, *, units=UNITS, embeddings=EMBEDDINGS, **knobs):
    return make_optimizer(OptimizerConfig(**{"name": name, "learning_rate": 1e-2} | knobs), steps, units=units, embeddings=embeddings)


def run(tx, params, gradients):
    """The parameters after one update for each gradient, on one device, and the last state."""
    update, state = jax.jit(tx.update), tx.init(params)
    for grads in gradients:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params), state


def draw(seed, times=1.0, **shapes):
    rng = np.random.default_rng(seed)
    return {name: (times * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module", autouse=True)
def _fast(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "optim_programs")):
        yield


# --- the rules, from the papers and torch, in numpy -------------------------------------------------------------------------

B1, B2, EPS, WD, LR = 0.8, 0.95, 1e-6, 0.1, 1e-2


def adam_moments(g, m, v, t, correct=True):
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
    c1, c2 = (1 - B1**t, 1 - B2**t) if correct else (1, 1)
    return m, v, m / c1 / (np.sqrt(v / c2) + EPS)


def adamw(p, g, s, t, correct=True):
    m, v, u = adam_moments(g, *(s or (0, 0)), t, correct)
    return p - LR * (u + WD * p), (m, v)


def adam(p, g, s, t):
    m, v, u = adam_moments(g + WD * p, *(s or (0, 0)), t)
    return p - LR * u, (m, v)


def lamb(p, g, s, t, least=0, most=np.inf):
    m, v, u = adam_moments(g, *(s or (0, 0)), t)
    u = u + WD * p
    return p - LR * np.clip(np.linalg.norm(p) / np.linalg.norm(u), least, most) * u, (m, v)


def lion(p, g, s, t):
    m = 0 if s is None else s
    return p - LR * (np.sign(B1 * m + (1 - B1) * g) + WD * p), B2 * m + (1 - B2) * g


def adagrad(p, g, s, t):
    g = g + WD * p
    s = (0 if s is None else s) + g**2
    return p - LR * g / (np.sqrt(s) + 1e-10), s


def sgd(p, g, s, t, nesterov=False):
    g = g + WD * p
    s = g if s is None else 0.9 * s + g
    return p - LR * (g + 0.9 * s if nesterov else s), s


def newton_schulz(x):
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon(p, g, s, t):
    """Without Nesterov, where neither bias correction nor the scale of the momentum shows."""
    s = 0.1 * g + 0.9 * (0 if s is None else s)
    u = newton_schulz(s) * np.sqrt(max(1, s.shape[1] / s.shape[0]))
    return p - LR * (u + WD * p), s


ADAM = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": WD}
RULES = {
    "adamw": (adamw, {"name": "adamw", **ADAM}),
    "adamw uncorrected": (functools.partial(adamw, correct=False), {"name": "adamw", **ADAM, "bias_correction": False}),
    "adam": (adam, {"name": "adam", **ADAM}),
    "lamb": (lamb, {"name": "lamb", **ADAM}),
    "lamb bounded": (functools.partial(lamb, least=0.3, most=0.5), {"name": "lamb", **ADAM, "min_coeff": 0.3, "max_coeff": 0.5}),
    "lion": (lion, {"name": "lion", "b1": B1, "b2": B2, "weight_decay": WD}),
    "adagrad": (adagrad, {"name": "adagrad", "initial_accumulator_value": 0.0, "eps": 1e-20, "weight_decay": WD}),
    "sgd": (sgd, {"name": "sgd", "momentum": 0.9, "weight_decay": WD}),
    "nesterov": (functools.partial(sgd, nesterov=True), {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": WD}),
    "muon": (muon, {"name": "muon", "momentum": 0.9, "nesterov": False, "weight_decay": WD}),
}


@pytest.mark.parametrize("rule", RULES)
def test_an_optimizer_follows_its_rule(rule):
    step, knobs = RULES[rule]
    params = draw(0, a=(6, 10), b=(12, 5))
    gradients = [draw(seed, 0.3, a=(6, 10), b=(12, 5)) for seed in range(1, 5)]
    found, _ = run(optimizer(**knobs), params, gradients)
    for name, p in params.items():
        p, state = p.astype(np.float64), None
        for t, grads in enumerate(gradients, 1):
            p, state = step(p, grads[name].astype(np.float64), state, t)
        np.testing.assert_allclose(found[name], p, rtol=2e-5, atol=2e-6, err_msg=name)


def test_schedule_free_adamw_averages_as_its_paper_says():
    """Defazio et al. 2024, algorithm 1: gradients at y, steps of z, and x, their mean weighted by squared learning rates."""
    rates = [0.01, 0.02, 0.03, 0.04]
    p0, gradients = draw(0, w=(4, 3)), [draw(seed, w=(4, 3)) for seed in range(1, 5)]
    tx = optimizer("schedule_free_adamw", b1=0.9, b2=0.95, eps=EPS, weight_decay=WD, learning_rate=0.04, warmup_steps=4)
    trained, state = run(tx, p0, gradients)
    x = y = z = p0["w"].astype(np.float64)
    v, total = 0.0, 0.0
    for t, (rate, grads) in enumerate(zip(rates, gradients, strict=True), 1):
        v = 0.95 * v + 0.05 * grads["w"].astype(np.float64) ** 2
        z = z - rate * (grads["w"] / (np.sqrt(v / (1 - 0.95**t)) + EPS) + WD * y)
        total += rate**2
        x = x + rate**2 / total * (z - x)
        y = 0.9 * x + 0.1 * z
    np.testing.assert_allclose(trained["w"], y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(schedule_free_eval_params(state, trained)["w"], x, rtol=1e-5, atol=1e-5)


def test_schedule_free_evaluates_every_group_and_no_other_optimizer():
    params = draw(0, w=(4, 3), norm=(3,))
    groups = (ParamGroup(patterns=("norm",), weight_decay=0.0, learning_rate_scale=0.5),)
    tx = optimizer("schedule_free_adamw", groups=groups)
    trained, state = run(tx, params, [draw(1, w=(4, 3), norm=(3,))])
    # After one step x is z: params = z + b1 (x - z) too, whichever the group.
    evaluated = schedule_free_eval_params(state, trained)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), evaluated, trained)
    trained, state = run(tx, params, [draw(seed, w=(4, 3), norm=(3,)) for seed in (1, 2, 3)])
    evaluated = schedule_free_eval_params(state, trained)
    assert all(np.max(np.abs(evaluated[name] - trained[name])) > 1e-4 for name in trained)
    with pytest.raises(ValueError, match="not one of schedule_free_adamw"):
        schedule_free_eval_params(optimizer("adamw").init(params), params)


@pytest.mark.parametrize("name", ["adamw", "adam", "lamb", "lion"])
def test_one_cycle_changes_b1_step_by_step_and_b2_to_deepspeeds(name):
    arguments = {"cycle_min_lr": 1e-2, "cycle_max_lr": 2e-2, "cycle_first_step_size": 2}
    params, gradients = draw(0, w=(4, 3)), [draw(seed, w=(4, 3)) for seed in (1, 2, 3)]
    found, _ = run(optimizer(name, schedule="OneCycle", schedule_arguments=arguments, units=()), params, gradients)
    state = None
    for g, b1, rate in zip(gradients, (0.85, 0.8, 0.85), (0.015, 0.02, 0.015), strict=True):
        tx = optimizer(name, b1=b1, b2=0.99, learning_rate=rate, units=())
        state = tx.init(params) if state is None else state
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(found["w"], params["w"], rtol=1e-5)


CYCLE = {"schedule": "OneCycle", "schedule_arguments": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("sgd", CYCLE, "optimizer.name='sgd': OneCycle cycles the b1 of"),
        ("muon", CYCLE, "optimizer.name='muon': OneCycle cycles the b1 of"),
        ("adamw", {**CYCLE, "b1": 0.9}, "optimizer.b1=0.9: OneCycle cycles b1"),
        ("adamw", {**CYCLE, "b2": 0.9}, "optimizer.b2=0.9: OneCycle cycles b1"),
        ("muon", {"schedule": "LRRangeTest", "adam_learning_rate": 1e-3}, "optimizer.adam_learning_rate=0.001: LRRangeTest"),
        ("schedule_free_adamw", {"b1": 0.0}, "optimizer.b1=0.0: schedule_free_adamw divides by it"),
        ("lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "optimizer.min_coeff=2.0: must not be above optimizer.max_coeff=1.0"),
        ("sgd", {"nesterov": True}, "optimizer.nesterov=True: needs optimizer.momentum"),
        ("adamw", {"weight_decay": -0.1}, "optimizer.weight_decay=-0.1: must be finite and not negative"),
    ],
)
def test_a_knob_that_cannot_be_honoured_raises(name, knobs, message):
    with pytest.raises(ConfigError) as error:
        optimizer(name, **knobs)
    assert message in str(error.value)
    if name in ("sgd", "muon") and "schedule" in knobs and knobs["schedule"] == "OneCycle":
        optimizer(name, schedule="OneCycle", schedule_arguments=CYCLE["schedule_arguments"] | {"cycle_momentum": False})


# --- stacked layers ---------------------------------------------------------------------------------------------------------

SHAPES = {"wide": (136, 144), "tall": (144, 128), "scale": (144,)}
LAYERS = 150
"""More layers than dims of a matrix: nothing may tell a layer dim by its size."""


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb", "muon"])
def test_a_stacked_layer_is_updated_as_if_it_were_alone(name):
    """adafactor factors both matrices (128 or more rows and columns), clips and scales each by its own."""
    # Layers of very different sizes: a norm over all of them would be far off.
    sizes = {key: np.geomspace(1e-3, 10, LAYERS, dtype=np.float32).reshape(-1, *(1,) * len(shape)) for key, shape in SHAPES.items()}
    stacked, *gradients = ({"layers": draw(seed, **{key: (LAYERS, *shape) for key, shape in SHAPES.items()})} for seed in range(3))
    gradients = [{"layers": {key: x * sizes[key] for key, x in grads["layers"].items()}} for grads in gradients]
    found, _ = run(optimizer(name, units=("layers[*]",), embeddings=()), stacked, gradients)
    alone = optimizer(name, units=(), embeddings=())
    for layer in (0, 1, 70, 149):
        params, *grads = ({key: x[layer] for key, x in tree["layers"].items()} for tree in (stacked, *gradients))
        wanted, _ = run(alone, params, grads)
        for key, x in wanted.items():
            np.testing.assert_allclose(found["layers"][key][layer], x, rtol=1e-5, atol=1e-6, err_msg=f"{key} of layer {layer}")


@pytest.mark.parametrize("nesterov", [True, False])
def test_muons_matrices_are_updated_as_optax_does(nesterov):
    shapes = {"wide": (3, 8, 12), "tall": (3, 12, 8), "one": (6, 6)}
    params, gradients = draw(0, **shapes), [draw(seed, **shapes) for seed in (1, 2, 3)]
    dims = {key: optax.contrib.MuonDimensionNumbers(-2, -1) for key in shapes}
    theirs = optax.contrib.muon(1e-2, nesterov=nesterov, weight_decay=0.1, muon_weight_dimension_numbers=dims)
    wanted, _ = run(theirs, params, gradients)
    nest = lambda tree: {key: {"layers": x} if x.ndim == 3 else x for key, x in tree.items()}  # noqa: E731
    ours = optimizer("muon", nesterov=nesterov, weight_decay=0.1, units=("*layers[*]",), embeddings=())
    found, _ = run(ours, nest(params), [nest(grads) for grads in gradients])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, nest(wanted))


def test_muon_on_sharded_layers_holds_one_layers_products_at_a_time():
    """X X^T of all 16 layers would be 16 MiB on each device."""
    layers, cut = 16, NamedSharding(mesh(), P(None, None, "fsdp"))
    tx = optimizer("muon", units=("layers[*]",), embeddings=())
    params = {"layers": jax.ShapeDtypeStruct((layers, 512, 2048), jnp.float32, sharding=cut)}
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut if x.ndim == 3 else None), jax.eval_shape(tx.init, params)
    )
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    shard, product = layers * 512 * 2048 * 4 // 8, 512 * 512 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * shard + 6 * product


def test_muon_leaves_to_adamw_what_is_no_hidden_matrix():
    params = {"embed": draw(0, table=(8, 6)), "layers": draw(1, w=(3, 6, 6), norm=(3, 6)), "head": draw(2, kernel=(6, 8), norm=(6,))}
    grads = jax.tree.map(lambda x: (x * 0.1 + 0.01).astype(np.float32), params)
    found, _ = run(optimizer("muon", adam_learning_rate=1e-3), params, [grads])
    others, _ = run(optimizer("adamw", learning_rate=1e-3, weight_decay=0.0), params, [grads])
    for (name, x), (_, y) in zip(named_leaves(found), named_leaves(others), strict=True):
        assert (name == "layers/w") != np.array_equal(x, y), name
    moved = (params["layers"]["w"] - found["layers"]["w"]) / 1e-2
    # Newton-Schulz leaves singular values in about [0.7, 1.2] (Jordan et al. 2024).
    assert np.all(np.abs(np.linalg.svd(moved, compute_uv=False) - 0.95) < 0.35)
    with pytest.raises(ValueError, match=r"muon.*no parameter is a matrix.*embed/table"):
        optimizer("muon").init({"embed": draw(0, table=(8, 6))})


def test_a_configured_run_names_its_layers_and_embeddings():
    model = ModelConfig(n_layers=2, d_model=32, n_heads=2, n_kv_heads=2, d_ff=64)
    config = TrainConfig(model=model, optimizer=OptimizerConfig(name="muon"))
    paths = [leaf.path for leaf in plan_run(config, zjax.abstract_mesh(zjax.MeshConfig(), 8)).part("optimizer")]
    orthogonalised = {path.rpartition("/mu/")[2] for path in paths if "/muon/" in path and "/mu/" in path}
    assert orthogonalised == {f"layers/{name}" for name in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")}
    by_adamw = {path.rpartition("/nu/")[2] for path in paths if "/nu/" in path}
    assert by_adamw == {"embed/table", "head/kernel", "head/norm", "layers/attn_norm", "layers/mlp_norm"}
    config = TrainConfig(model=model, optimizer=OptimizerConfig(name="lamb"))
    paths = [leaf.path for leaf in plan_run(config, zjax.abstract_mesh(zjax.MeshConfig(), 8)).part("optimizer")]
    assert all(("/lamb_layers/" in path) == ("/mu/layers/" in path) for path in paths if "/mu/" in path)


# --- groups -----------------------------------------------------------------------------------------------------------------

NO_DECAY = (ParamGroup(patterns=("*norm*", "*bias"), weight_decay=0.0),)


def test_groups_have_decay_and_learning_rate_of_their_own():
    params, zero = draw(0, w=(4, 3), bias=(3,), attn_norm=(4,)), {}
    zero = jax.tree.map(np.zeros_like, params)
    groups = (ParamGroup(patterns=("attn_norm",), learning_rate_scale=0.5, weight_decay=0.2), *NO_DECAY)
    found, _ = run(optimizer("adamw", weight_decay=0.1, learning_rate=0.1, groups=groups), params, [zero])
    # With gradients of 0 only the decay moves: p (1 - rate x decay).
    for name, factor in {"w": 1 - 0.1 * 0.1, "bias": 1.0, "attn_norm": 1 - 0.05 * 0.2}.items():
        np.testing.assert_allclose(found[name], factor * params[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZER_KNOBS)
def test_no_decay_is_no_decay_in_any_optimizer(name):
    params = draw(0, w=(4, 3), bias=(3,))
    found, _ = run(
        optimizer(name, weight_decay=0.1, groups=(ParamGroup(patterns=("bias",), weight_decay=0.0),), units=()),
        params,
        [jax.tree.map(np.zeros_like, params)],
    )
    np.testing.assert_array_equal(found["bias"], params["bias"])
    assert np.max(np.abs(found["w"] - params["w"])) > 1e-4


def test_a_pattern_that_names_no_parameter_raises_and_one_of_a_frozen_parameter_does_not():
    tx = optimizer("adamw", groups=(ParamGroup(patterns=("layres",)),))
    with pytest.raises(ValueError, match=r"optimizer\.groups: pattern 'layres' matches no leaf; leaves are bias, w"):
        tx.init(draw(0, w=(4, 3), bias=(3,)))
    optimizer("adamw", groups=(ParamGroup(patterns=("bias",)),)).init({"w": np.ones(3, np.float32), "bias": None})


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_the_state_of_groups_is_planned_and_sharded_like_the_parameters(name):
    tx = optimizer(name, groups=NO_DECAY)
    plan = plan_of(tx, stage=1)
    shaped = {leaf.shape: leaf.optimizer.spec for leaf in plan.part("params")}
    like = [leaf for leaf in plan.part("optimizer") if leaf.shape in shaped]
    assert len(like) >= len(plan.part("params")) and all(leaf.rest.spec == shaped[leaf.shape] != P() for leaf in like)
    assert sum(leaf.bytes_on(plan.mesh) for leaf in plan.part("optimizer")) < sum(leaf.bytes_on(plan.mesh) for leaf in plan.part("params"))
    state, _ = trained(plan, 1)
    assert unplanned(plan, state) == []


# --- eight devices and one --------------------------------------------------------------------------------------------------

VOCAB, WIDTH, DEPTH = 64, 32, 2


def init(key):
    """An embedding, two stacked residual MLPs with a norm scale and a bias, and a head."""
    keys = iter(jax.random.split(key, 4))
    normal = lambda *shape: shape[-2] ** -0.5 * jax.random.normal(next(keys), shape)  # noqa: E731
    layers = {"up": normal(DEPTH, WIDTH, 2 * WIDTH), "down": normal(DEPTH, 2 * WIDTH, WIDTH)}
    layers |= {"norm": jnp.ones((DEPTH, WIDTH)), "bias": jnp.full((DEPTH, 2 * WIDTH), 0.01)}
    return {"embed": {"table": normal(VOCAB, WIDTH)}, "layers": layers, "head": {"kernel": normal(WIDTH, VOCAB)}}


def block(p, x):
    h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * p["norm"]
    return x + jax.nn.silu(h @ p["up"] + p["bias"]) @ p["down"]


def loss(params, batch, rng):
    x = zjax.fully_shard(lambda p, tokens: p["table"][tokens], at="embed")(params["embed"], batch["inputs"])
    x = zjax.scan_layers(block, params["layers"], x, at="layers")
    logits = zjax.fully_shard(lambda p, x: x @ p["kernel"], at="head")(params["head"], x).astype(jnp.float32)
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])), jnp.float32(batch["inputs"].shape[0])


def batch(seed):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (2, 32)).astype(np.int32)
    return {"inputs": tokens[0], "targets": tokens[1]}


def plan_of(tx, *, stage=3, engine="auto", compute="float32"):
    precision = zjax.PrecisionConfig(compute=compute)
    return zjax.build_plan(zjax.ZeroConfig(stage=stage, engine=engine), init, tx, mesh(), units=UNITS, precision=precision)


def trained(plan, steps):
    state, step = zjax.init_state(plan, jax.random.key(0)), zjax.make_train_step(plan, loss)
    for index in range(steps):
        state, _ = step(state, batch(index))
    return state, step


def with_a_frozen_group():
    layers = {"up": "adamw", "down": "lion", "norm": "adamw", "bias": "frozen"}
    labels = {"embed": {"table": "frozen"}, "layers": layers, "head": {"kernel": "adamw"}}
    return optax.multi_transform({"adamw": optax.adamw(1e-3), "lion": optax.lion(1e-3), "frozen": optax.set_to_zero()}, labels)


SHARDED = {
    **{name: functools.partial(optimizer, name, learning_rate=1e-3) for name in ("adamw", "adafactor", "lion", "muon")},
    "frozen group": with_a_frozen_group,
}


@functools.cache
def on_one_device(name):
    """Parameters before and after 5 steps of plain optax."""
    tx, first = SHARDED[name](), jax.device_get(zjax.init_state(plan_of(SHARDED[name]()), jax.random.key(0)).params)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda p: jnp.divide(*loss(p, batch, None)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = first, tx.init(first)
    for index in range(5):
        params, state = step(params, state, batch(index))
    return first, jax.device_get(params)


def difference(a, b):
    """The largest relative L2 difference of two leaves; leaves of 0 must be equal."""
    norms = [(np.linalg.norm(x.astype(np.float64) - y), np.linalg.norm(y)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    return max(error / norm if norm else error for error, norm in norms)


@pytest.mark.parametrize(
    ("name", "stage", "engine"),
    # By default every pair of optimizer, stage and engine that there is, once at least.
    [
        pytest.param(name, stage, engine, marks=[] if (i + stage + k) % 2 == 0 else pytest.mark.full)
        for i, name in enumerate(SHARDED)
        for stage in STAGES
        for k, engine in enumerate(ENGINES)
    ],
)
def test_five_steps_on_eight_devices_equal_those_on_one(name, stage, engine):
    first, wanted = on_one_device(name)
    state, _ = trained(plan_of(SHARDED[name](), stage=stage, engine=engine), 5)
    found = jax.device_get(state.params)
    assert difference(found, wanted) < 1e-6
    # What the steps moved is smaller than the parameters by the learning rate, and so is the precision it is known to.
    moved = lambda params: jax.tree.map(np.subtract, params, first)  # noqa: E731
    assert difference(moved(found), moved(wanted)) < 3e-5


@pytest.mark.parametrize("name", ["muon", "lamb", "adafactor"])
def test_an_update_over_whole_matrices_is_exact_when_they_are_sharded(name):
    """In float64, where rounding cannot hide an error: each device has a piece of every matrix, or of its state."""
    with jax.enable_x64(True):
        wide = lambda seed: {"layers": {k: x.astype(np.float64) for k, x in draw(seed, w=(2, 128, 256), v=(2, 256, 128)).items()}}  # noqa: E731
        params, gradients = wide(0), [wide(seed) for seed in (1, 2)]
        tx = optimizer(name, learning_rate=1.0, embeddings=())
        wanted, _ = run(tx, params, gradients)
        cut = {"w": NamedSharding(mesh(), P(None, None, "fsdp")), "v": NamedSharding(mesh(), P(None, "fsdp"))}
        place = lambda tree: jax.device_put(tree, {"layers": cut})  # noqa: E731
        found, _ = run(tx, place(params), [place(g) for g in gradients])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, wanted)


# --- dtypes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("adamw", "mu", "nu"),
        ("adam", "mu", "nu"),
        ("lion", "mu", None),
        ("sgd", "trace", None),
        ("muon", "mu", "nu"),
        ("lamb", None, "nu"),
        ("adagrad", None, "sum_of_squares"),
        ("adafactor", None, "v"),
        ("schedule_free_adamw", None, "z"),
    ],
)
def test_c40_moments_are_float32_whatever_the_parameters_are_and_the_first_bfloat16_where_asked_for(name, first, others):
    def dtypes(moment, **knobs):
        plan = plan_of(optimizer(name, **({"momentum": 0.9} if name == "sgd" else {}), **knobs), compute="bfloat16")
        assert {leaf.rest.dtype for leaf in plan.part("params")} == {jnp.dtype("bfloat16")}
        found = {str(leaf.rest.dtype) for leaf in plan.part("optimizer") if f"/{moment}/" in leaf.path}
        assert found, moment
        return found

    for moment in {first, others} - {None}:
        assert dtypes(moment) == {"float32"}
    if first:
        assert dtypes(first, moment_dtype="bfloat16") == {"bfloat16"}
        assert not others or dtypes(others, moment_dtype="bfloat16") == {"float32"}


RATES = {
    "float": lambda: 0.01,
    "int": lambda: 1,
    "float64": lambda: np.float64(0.01),
    "float32": lambda: jnp.float32(0.01),
    "bfloat16": lambda: jnp.bfloat16(0.01),
    "schedule": lambda: optax.linear_schedule(0.01, 0.001, 3),
    "numpy schedule": lambda: lambda count: np.float64(0.01),
}


@pytest.mark.parametrize(
    ("kind", "compute"), [*((kind, "bfloat16") for kind in RATES), *((kind, "float32") for kind in ("float64", "bfloat16"))]
)
def test_a_learning_rate_of_any_kind_changes_no_dtype_and_compiles_once(kind, compute):
    assert_types_stay(small_plan(optax.adamw(RATES[kind]()), compute))


@pytest.mark.parametrize("name", OPTIMIZER_KNOBS)
def test_an_optimizers_state_keeps_its_dtypes_and_compiles_once(name):
    knobs = {"momentum": 0.9} if name == "sgd" else {}
    knobs |= {"moment_dtype": "bfloat16"} if "moment_dtype" in OPTIMIZER_KNOBS[name] else {}
    assert_types_stay(small_plan(optimizer(name, groups=(ParamGroup(patterns=("b",), learning_rate_scale=0.1),), **knobs), "bfloat16"))


def small_plan(tx, compute):
    start = lambda key: {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}  # noqa: E731
    return zjax.build_plan(zjax.ZeroConfig(stage=3), start, tx, mesh(), precision=zjax.PrecisionConfig(compute=compute))


def assert_types_stay(plan):
    """No leaf of the state changes its dtype, and only the first of four steps is traced and compiled."""

    def squares(params, x, rng):
        return jnp.sum(jnp.square(x.astype(params["w"].dtype) @ params["w"] + params["b"]).astype(jnp.float32)), jnp.float32(x.shape[0])

    state, step = zjax.init_state(plan, jax.random.key(0)), zjax.make_train_step(plan, squares)
    before = {path: x.aval for path, x in named_leaves(state)}
    with compilations() as events:
        state, _ = step(state, np.ones((8, 16), np.float32))
    assert events
    with compilations() as events:
        for seed in range(3):
            state, _ = step(state, draw(seed, x=(8, 16))["x"])
    assert not events
    assert {path: x.aval for path, x in named_leaves(state)} == before


@contextlib.contextmanager
def compilations():
    """Traces and compilations within, as jax counts them (`_cache_size` also counts the same program's second fast path)."""
    events = []
    listen = lambda event, seconds, **_: events.append(event) if event.startswith("/jax/core/compile/") else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


# --- norms ------------------------------------------------------------------------------------------------------------------


def test_the_norm_of_float16_gradients_does_not_overflow():
    grads = jnp.full((300, 1024), 300, jnp.float16)  # 300 squared is above 65504
    assert float(global_norm({"w": grads[:1]})) == 9600.0  # 300 sqrt(1024)
    assert float(global_norm({"w": grads})) == pytest.approx(300 * (300 * 1024) ** 0.5)


@pytest.mark.parametrize("spec", [P(), P("replica"), P("fsdp"), P(("replica", "fsdp")), P("fsdp", "replica")])
def test_the_global_norm_is_over_every_axis(spec):
    on = zjax.make_mesh(zjax.MeshConfig(replica=2, fsdp=4), jax.devices())
    grads = {"a": jnp.arange(64.0).reshape(8, 8), "b": jnp.float32(3)}
    wanted = float(np.sqrt(sum(i**2 for i in range(64)) + 9))
    placed = {"a": jax.device_put(grads["a"], NamedSharding(on, spec)), "b": grads["b"]}
    assert float(jax.jit(global_norm)(placed)) == pytest.approx(wanted, rel=1e-6)
