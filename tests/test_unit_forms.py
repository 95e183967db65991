"""The forms a unit takes: linen modules, nested and shared units, units by size, a policy of a unit's own, and their bound."""

import re
import warnings

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import zjax
from zjax import rules
from zjax.collectives import zero_after
from zjax.estimate import traffic_per_step
from zjax.fields import ConfigError

WIDTH, ROWS = 32, 16
ENGINES = pytest.mark.parametrize("engine", ["partitioner", "explicit"])


def batch():
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")


def plan_of(init_fn, units, *, engine="explicit", on=None, compute="float32", **zero):
    mesh = zjax.make_mesh(on or zjax.MeshConfig(replica=2))
    precision = zjax.PrecisionConfig(compute=compute)
    return zjax.build_plan(zjax.ZeroConfig(engine=engine, **zero), init_fn, optax.sgd(1.0), mesh, units=units, precision=precision)


def one_step(plan, loss_fn, x):
    state, metrics = zjax.make_train_step(plan, loss_fn)(zjax.init_state(plan, jax.random.key(0)), x)
    return float(metrics["loss"]), jax.device_get(state.params)


def agree(plan, marked, unmarked, x, rtol=1e-5):
    """A step against `jax.grad` of the unmarked loss on one device."""
    start = jax.device_get(zjax.init_state(plan, jax.random.key(0)).params)
    start = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), start)
    loss, grads = jax.value_and_grad(lambda p: unmarked(p, x, jax.random.key(0))[0] / len(x))(start)
    got_loss, got = one_step(plan, marked, x)
    np.testing.assert_allclose(got_loss, loss, rtol=rtol)
    jax.tree.map(lambda a, b, g: np.testing.assert_allclose(a, b - g, rtol=rtol, atol=rtol * np.abs(g).max()), got, start, grads)


def squares(apply):
    """Sum of squares of a model's output as a loss."""
    return lambda params, x, rng: (jnp.sum(apply(params, jnp.asarray(x)) ** 2), jnp.float32(len(x)))


# --- flax.linen -------------------------------------------------------------------------------------------------------------


class Mlp(linen.Module):
    """A block with a submodule, named by linen."""

    hidden: int = 64

    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(WIDTH)(jnp.tanh(linen.Dense(self.hidden)(x)))


def decoder(block):
    class Decoder(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(3):
                x = block()(x)
            return linen.Dense(8, name="out")(x)

    return Decoder()


@ENGINES
@pytest.mark.parametrize(("remat", "keep"), [(None, False), ("full", False), ("full", True), ("dots", False)])
def test_a_marked_linen_class_knows_its_paths_and_gives_the_values_of_one_device(engine, remat, keep):
    plain, marked = decoder(Mlp), decoder(zjax.fully_shard(Mlp, remat=remat))
    init = lambda model: lambda key: model.init(key, jnp.ones((1, WIDTH)))["params"]  # noqa: E731
    structure = lambda model: jax.tree.structure(jax.eval_shape(init(model), jax.random.key(0)))  # noqa: E731
    assert structure(plain) == structure(marked)  # auto-names count classes, and the marked one has its class's name
    plan = plan_of(init(plain), ("Mlp_0", "Mlp_1", "Mlp_2", "out"), engine=engine, reshard_after_forward=not keep)
    apply = lambda model: squares(lambda p, x: model.apply({"params": p}, x))  # noqa: E731
    agree(plan, apply(marked), apply(plain), batch())


@ENGINES
def test_a_marked_linen_instance_in_a_scan_over_stacked_layers(engine):
    """Initialised by vmap, applied in `jax.lax.scan`: the path is given, since the module is the root of its own tree."""
    block = Mlp()
    assert zjax.fully_shard(block, at="layers", remat="full") is block and isinstance(block, Mlp)
    init = lambda key: {"layers": jax.vmap(lambda k: Mlp().init(k, jnp.ones((1, WIDTH)))["params"])(jax.random.split(key, 4))}  # noqa: E731

    def loss_with(block):
        return squares(lambda p, x: jax.lax.scan(lambda x, layer: (block.apply({"params": layer}, x), None), x, p["layers"])[0])

    agree(plan_of(init, ("layers[*]",), engine=engine), loss_with(block), loss_with(Mlp()), batch())


def test_without_a_step_a_marked_linen_module_is_itself():
    x, marked = jnp.ones((2, WIDTH)), zjax.fully_shard(Mlp, remat="full")()
    variables = marked.init(jax.random.key(0), x)
    np.testing.assert_allclose(marked.apply(variables, x), Mlp().apply(variables, x), rtol=1e-6)


def test_a_path_is_asked_for_where_it_cannot_be_known():
    with pytest.raises(ValueError, match=r"at=.*missing"):
        zjax.fully_shard(lambda p, x: x)


# --- nested, shared, and by size --------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("stage", [1, 3])
def test_nested_units_each_gather_their_own(engine, stage):
    def init(key):
        a, b, c = jax.random.split(key, 3)
        return {"outer": {"w": jax.random.normal(a, (WIDTH, WIDTH)) / 8, "inner": {"w": jax.random.normal(b, (WIDTH, WIDTH)) / 8}}, "root": jax.random.normal(c, (WIDTH,))}  # fmt: skip

    def loss_with(mark):
        inner = mark(lambda p, x: jnp.tanh(x @ p["w"]), at="outer/inner")
        outer = mark(lambda p, x: x + inner(p["inner"], x @ p["w"]), at="outer")
        return squares(lambda p, x: outer(p["outer"], x) * p["root"])

    plan = plan_of(init, ("outer", "outer/inner"), engine=engine, stage=stage)
    agree(plan, loss_with(zjax.fully_shard), loss_with(lambda f, at: f), batch())
    assert {name: leaf.unit for name, leaf in plan.params.items()} == {"outer/w": "outer", "outer/inner/w": "outer/inner", "root": ""}


@ENGINES
def test_what_two_units_share_is_gathered_once_and_its_gradients_are_summed_before_they_are_scattered(engine):
    init = lambda key: {"embed": {"table": jax.random.normal(key, (64, WIDTH)) / 8}}  # noqa: E731
    first = zjax.fully_shard(lambda p, t: p["table"][t], at="embed")
    last = zjax.fully_shard(lambda p, x: x @ p["embed"]["table"].T, at="")

    def loss_fn(params, tokens, rng):
        x = first(params["embed"], tokens)
        return jnp.sum(jax.nn.logsumexp(last(params, x), -1)), jnp.float32(tokens.shape[0])

    plan = plan_of(init, ("embed",), engine=engine, on=zjax.MeshConfig())
    text = zjax.make_train_step(plan, loss_fn).lower(jax.ShapeDtypeStruct((ROWS, 4), jnp.int32)).compile().as_text()
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    if engine == "explicit":  # XLA's partitioner sums them after it has reduced each
        assert len(re.findall(r"= f32\[8,32\]\S* reduce-scatter(?:-start)?\(", text)) == 1
        assert not re.findall(r"f32\[64,32\]\S* all-reduce", text)


class Stack(nnx.Module):
    def __init__(self, *, rngs):
        self.small = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.large = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        for layer in self.small:
            x = jnp.tanh(layer(x))
        return self.out(jnp.tanh(self.large(x)))


class Two(nnx.Module):
    def __init__(self, *, rngs):
        self.a, self.b = Stack(rngs=rngs), Stack(rngs=rngs)

    def __call__(self, x):
        return self.b(self.a(x))


@ENGINES
def test_wrap_by_size_makes_units_of_what_is_large_enough_and_joins_the_small(engine):
    """3 x 1056 parameters are left over in each stack, and make it a unit of its own; 4224 and 4128 are units."""
    model, plain = Two(rngs=nnx.Rngs(0)), Two(rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    units = zjax.wrap_by_size(model, 3000)
    assert set(units) == {f"{name}{part}" for name in "ab" for part in ("", "/large", "/out")}
    plan = plan_of(lambda key: before, units, engine=engine)
    assert plan.params["a/small/1/kernel"].unit == "a" and plan.params["a/out/kernel"].unit == "a/out"
    loss_of = lambda graphdef: squares(lambda p, x: nnx.merge(graphdef, p)(x))  # noqa: E731
    agree(plan, loss_of(nnx.graphdef(model)), loss_of(nnx.graphdef(plain)), batch())
    assert zjax.wrap_by_size(Two(rngs=nnx.Rngs(0)), 10**6) == ()  # all is left to the root unit


# --- a policy of a unit's own -----------------------------------------------------------------------------------------------


def two_units(key):
    a, b = jax.random.split(key)
    return {"one": {"w": jax.random.normal(a, (WIDTH, WIDTH)) / 6}, "two": {"w": jax.random.normal(b, (WIDTH, WIDTH)) / 6}}


def two_loss(mark, seen=None):
    def layer(p, x):
        if seen is not None:
            seen.append((x.dtype, p["w"].dtype))
        return jnp.tanh(x @ p["w"])

    one, two = mark(layer, at="one"), mark(layer, at="two")
    return squares(lambda p, x: two(p["two"], one(p["one"], x)).astype(jnp.float32))


@ENGINES
def test_a_unit_may_keep_its_parameters_where_others_gather_again(engine):
    units = (zjax.Unit("one"), zjax.Unit("two", reshard_after_forward=False))
    plan = plan_of(two_units, units, engine=engine)
    assert [plan.params[f"{name}/w"].kept_gathered for name in ("one", "two")] == [False, True]
    agree(plan, two_loss(zjax.fully_shard), two_loss(lambda f, at: f), batch())
    passes = traffic_per_step(plan)["all_gather"] / (3 / 4 * 4 * WIDTH * WIDTH)
    assert passes == 2 + 1


@ENGINES
def test_a_unit_may_compute_in_a_dtype_of_its_own_and_gets_its_input_in_it(engine):
    seen = []
    plan = plan_of(two_units, ("one", zjax.Unit("two", compute="float32")), engine=engine, compute="bfloat16")
    state = zjax.init_state(plan, jax.random.key(0))
    assert [state.params[name]["w"].dtype for name in ("one", "two")] == [jnp.bfloat16, jnp.float32]
    step = zjax.make_train_step(plan, two_loss(zjax.fully_shard, seen))
    state, metrics = step(state, batch().astype(jnp.bfloat16))
    assert set(seen[-2:]) == {(jnp.dtype("bfloat16"),) * 2, (jnp.dtype("float32"),) * 2}
    assert np.isfinite(metrics["loss"]) and state.params["two"]["w"].dtype == jnp.float32
    assert state.opt_state.master["two"]["w"] is None and state.opt_state.master["one"]["w"].dtype == jnp.float32
    assert plan.params["two/w"].accumulator.dtype == jnp.float32 and plan.params["one/w"].accumulator.dtype == jnp.bfloat16


def test_gradients_travel_in_the_dtype_that_is_asked_for():
    """FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)."""
    mesh = zjax.make_mesh(zjax.MeshConfig())
    x, texts = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16), {}
    for reduce in (None, "float32"):
        plan = zjax.build_plan(zjax.ZeroConfig(stage=2), two_units, optax.sgd(1.0), mesh, units=("one", "two"), precision=zjax.PrecisionConfig(reduce=reduce))  # fmt: skip
        assert plan.engine == "explicit"
        texts[reduce] = zjax.make_train_step(plan, two_loss(zjax.fully_shard)).lower(x).as_text()
        scattered = traffic_per_step(plan)["reduce_scatter"]
        assert scattered == round(7 / 8 * (4 if reduce else 2) * 2 * WIDTH * WIDTH)
    dtypes = {reduce: set(re.findall(r"reduce_scatter.*?-> tensor<4x32x(\w+)>", text, re.S)) for reduce, text in texts.items()}
    assert dtypes == {None: {"bf16"}, "float32": {"f32"}}


@pytest.mark.parametrize("degrees", [{"fsdp": 4, "tensor": 2}, {"fsdp": 8}], ids=["4x2", "8x1"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_in_the_explicit_engine_is_the_partitioners_with_and_without_a_tensor_axis(degrees, stage):
    """With an axis left to XLA, jax on the CPU aborts on a bf16 sum over devices; those are taken in float32 there."""
    x, runs = batch().astype(jnp.bfloat16), {}
    for engine in ("partitioner", "explicit"):
        mesh, tensor = zjax.make_mesh(zjax.MeshConfig(**degrees)), [rules.tensor_parallel({"one/w": 1, "two/w": 0})]
        plan = zjax.build_plan(zjax.ZeroConfig(stage=stage, engine=engine), two_units, optax.sgd(1.0), mesh, units=("one", "two"), rules=tensor, precision=zjax.PrecisionConfig())  # fmt: skip
        state, metrics = zjax.make_train_step(plan, two_loss(zjax.fully_shard))(zjax.init_state(plan, jax.random.key(0)), x)
        runs[engine] = float(metrics["loss"]), float(metrics["grad_norm"]), jax.device_get(state.opt_state.master)
    np.testing.assert_allclose(runs["explicit"][:2], runs["partitioner"][:2], rtol=1e-2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-2), runs["explicit"][2], runs["partitioner"][2])


def test_a_policy_that_cannot_be_honoured_raises():
    with pytest.raises(ConfigError, match=r"Unit\('one'\)\.reshard_after_forward.*stage 3.*zero\.stage=2"):
        plan_of(two_units, (zjax.Unit("one", reshard_after_forward=False),), stage=2)
    with pytest.raises(ConfigError, match=r"Unit\('one'\)\.compute='float8'"):
        zjax.Unit("one", compute="float8")
    for knob in ("compute", "reduce"):
        with pytest.raises(ConfigError, match=rf"Unit\('one'\)\.{knob}='float16'.*precision\.compute='float16'"):
            plan_of(two_units, (zjax.Unit("one", **{knob: "float16"}),))
    with pytest.raises(ConfigError, match=r"precision\.reduce.*zero\.engine='explicit'"):
        plan_of(two_units, (zjax.Unit("one", reduce="bfloat16"),), engine="partitioner")
    with pytest.raises(ConfigError, match=r"reshard_after_backward=False.*micro_batches is 1"):
        plan_of(two_units, ("one",), reshard_after_backward=False)
    with pytest.raises(ConfigError, match=r"zero\.reshard_after_backward=False.*stage 3"):
        zjax.ZeroConfig(stage=2, reshard_after_backward=False)
    with pytest.raises(ConfigError, match=r"max_gathered_units=1.*prefetch=1.*prefetch=0"):
        zjax.ZeroConfig(max_gathered_units=1)
    with pytest.raises(ConfigError, match=r"max_gathered_units.*partitioner.*zero\.engine='explicit'"):
        plan_of(two_units, ("one",), engine="partitioner", max_gathered_units=2)
    with pytest.raises(ConfigError, match=r"max_gathered_units=2.*mesh\.tensor"):
        plan_of(two_units, ("one",), on=zjax.MeshConfig(tensor=2), max_gathered_units=2)


# --- how many are gathered at once ------------------------------------------------------------------------------------------

DEEP = 12


def deep(key):
    return {f"layer{i:02}": {"w": jax.random.normal(key, (256, 256)) / 16} for i in range(DEEP)}


def deep_loss(params, x, rng):
    h = jnp.asarray(x)
    for i in range(DEEP):
        name = f"layer{i:02}"
        h = zjax.fully_shard(lambda p, h: h + jnp.tanh(h @ p["w"]), at=name, remat="full")(params[name], h)
    return jnp.sum(h**2), jnp.float32(len(x))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bound_on_units_that_are_whole_changes_no_value(stage):
    """What it changes is in test_engines.py, in peak bytes; the scalars that make units wait are exact zeros."""
    x = np.random.default_rng(0).normal(size=(ROWS, 256)).astype("float32")
    x[3, 5], runs = -0.0, {}
    for limit in (0, 1, 2, 3):
        plan = plan_of(deep, tuple(deep(jax.random.key(0))), stage=stage, max_gathered_units=limit, prefetch=0)
        runs[limit] = one_step(plan, deep_loss, x)
    for limit in (1, 2, 3):
        np.testing.assert_allclose(runs[limit][0], runs[0][0], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), runs[limit][1], runs[0][1])


@pytest.mark.parametrize("x", [1.5, -1.5, 0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan])
def test_the_zero_that_waits_is_0_whatever_it_waits_for(x):
    assert zero_after(jnp.full((2, 3), x)) == 0
    assert zero_after(jnp.full((2,), -7)) == 0


# --- sent to the process that audits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["nnx instance", "nnx class", "linen instance", "linen class"])
def test_a_marked_module_outside_the_loss_can_be_pickled(form):
    """Its class is made at run time, so it is pickled by value, with every global it names."""
    if form.startswith("nnx"):
        cls = zjax.fully_shard(nnx.Linear, at="block") if form == "nnx class" else nnx.Linear
        model = cls(4, 4, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model if form == "nnx class" else zjax.fully_shard(model, at="block"))
        loss = lambda x: jnp.sum(nnx.merge(graphdef, params)(x))  # noqa: E731
    else:
        model = zjax.fully_shard(linen.Dense)(4) if form == "linen class" else zjax.fully_shard(linen.Dense(4))
        variables = model.init(jax.random.key(0), jnp.ones((2, 4)))
        loss = lambda x: jnp.sum(model.apply(variables, x))  # noqa: E731
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(cloudpickle.loads(cloudpickle.dumps(loss))(x), loss(x), rtol=1e-6)


def test_a_parameters_dtype_is_known_outside_its_unit():
    """`x.astype(params["w"].dtype)` is no use of its value; anything else is an error that says what to do."""
    init = lambda key: {"block": {"w": jax.random.normal(key, (WIDTH, WIDTH))}}  # noqa: E731
    unit = zjax.fully_shard(lambda p, x: x @ p["w"], at="block")
    seen = lambda p, x: unit(p["block"], x.astype(p["block"]["w"].dtype))  # noqa: E731
    agree(plan_of(init, ("block",)), squares(seen), squares(lambda p, x: x @ p["block"]["w"]), batch())
    with pytest.raises(AttributeError, match=r"LocalParam\.shape: a parameter is used outside its unit"):
        one_step(plan_of(init, ("block",)), squares(lambda p, x: unit(p["block"], x) * p["block"]["w"].shape[0]), batch())


def test_marks_that_the_plan_does_not_declare_are_told():
    init = lambda key: {"block": {"w": jax.random.normal(key, (WIDTH, WIDTH))}}  # noqa: E731
    loss = squares(lambda p, x: zjax.fully_shard(lambda p, x: x @ p["w"], at="block")(p["block"], x))
    with pytest.warns(UserWarning, match=r"marks a unit at 'block', and the plan declares none: without build_plan\(units="):
        one_step(plan_of(init, (), engine="auto"), loss, batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(plan_of(init, ("block",), engine="auto"), loss, batch())
