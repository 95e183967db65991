"""`scan_layers`: the loop with its own derivative rule against the plain one, in both engines."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax

LAYERS, WIDTH, ROWS = 5, 16, 16


def init(key):
    return {
        "layers": {
            "w": 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH)),
            "b": jnp.zeros((LAYERS, WIDTH)),
            "odd": jnp.ones((LAYERS, 3)),
        },
        "scale": jnp.full((WIDTH,), 0.5),  # of no unit
    }


def block(params, x, scale, mode, extra):
    """Shared float and static arguments, an input of each layer's own, an auxiliary output, a pytree carry."""
    assert mode == "tanh"
    h, count = x
    out = jnp.tanh(h @ params["w"] + params["b"]) * scale + extra["shift"] * params["odd"].sum()
    noise = jax.random.uniform(extra["key"], (WIDTH,))
    return (h + out * noise, count + 1), jnp.sum(out**2)


def inputs():
    keys = jax.random.split(jax.random.key(7), LAYERS)
    return {"shift": jnp.linspace(0.1, 0.5, LAYERS), "key": keys}


def loss_with(prefetch):
    def loss_fn(params, batch, rng):
        (h, count), aux = zjax.scan_layers(
            block, params["layers"], (batch, 0), params["scale"], "tanh", at="layers", per_layer=inputs(), has_aux=True, prefetch=prefetch
        )
        return (
            jnp.sum(h**2) + 0.01 * jnp.sum(aux),
            jnp.float32(batch.shape[0]),
            {"layers": (jnp.float32(count) * len(batch), jnp.float32(len(batch)))},
        )

    return loss_fn


def plan_of(stage, engine, *, micro=1, replica=2):
    return zjax.build_plan(
        zjax.ZeroConfig(stage=stage, engine=engine),
        init,
        optax.sgd(0.001),
        zjax.make_mesh(zjax.MeshConfig(replica=replica)),
        accumulation=zjax.AccumulationConfig(micro_batches=micro),
        units=("layers[*]",),
    )


def batch():
    return np.asarray(jax.random.normal(jax.random.key(1), (ROWS, WIDTH)))


def dense(steps):
    """Plain jax on one device: a Python loop over layers, no zjax."""
    params = init(jax.random.split(jax.random.key(0))[0])

    def loss(params):
        x, aux, extra = (jnp.asarray(batch()), 0), 0.0, inputs()
        scale = params["scale"]
        for i in range(LAYERS):
            x, a = block(jax.tree.map(lambda p, i=i: p[i], params["layers"]), x, scale, "tanh", jax.tree.map(lambda p, i=i: p[i], extra))
            aux += a
        return (jnp.sum(x[0] ** 2) + 0.01 * aux) / ROWS

    losses = []
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        losses.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.001 * g, params, grads)
    return losses, params


@pytest.mark.parametrize(
    ("stage", "engine", "prefetch", "replica"),
    [
        (3, "explicit", 1, 1),
        (3, "partitioner", 1, 2),
        (3, "explicit", 0, 2),
        (2, "explicit", 1, 4),
        (1, "explicit", 1, 2),
        (0, "partitioner", 1, 1),
    ],
)
def test_the_loop_with_its_own_rule_trains_like_a_loop_over_layers(stage, engine, prefetch, replica):
    plan = plan_of(stage, engine, replica=replica)
    step, state = zjax.make_train_step(plan, loss_with(prefetch)), zjax.init_state(plan, jax.random.key(0))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
        assert float(metrics["layers"]) == LAYERS
    expected, params = dense(3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), jax.device_get(state.params), params)


def test_outside_a_step_it_is_a_plain_scan_with_gradients_for_everything():
    params, x = init(jax.random.key(0))["layers"], jnp.asarray(batch())

    def run(loop):
        return jax.grad(lambda p, x, s: jnp.sum(loop(p, x, s)[0][0] ** 2), argnums=(0, 1, 2))(params, x, jnp.float32(0.5))

    def by_hand(p, x, s):
        carry, aux = (x, 0), []
        for i in range(LAYERS):
            take = lambda leaf, i=i: leaf[i]  # noqa: E731
            carry, a = block(jax.tree.map(take, p), carry, s, "tanh", jax.tree.map(take, inputs()))
            aux.append(a)
        return carry, jnp.stack(aux)

    scanned = lambda p, x, s: zjax.scan_layers(block, p, (x, 0), s, "tanh", at="layers", per_layer=inputs(), has_aux=True)  # noqa: E731
    # Gradients are of the order of 10: float32 sums of them differ by some 1e-7 of that.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max()), run(scanned), run(by_hand))


def test_layers_of_different_number_and_an_odd_prefetch_raise():
    with pytest.raises(ValueError, match=r"at='layers'.*\[2, 3\]"):
        zjax.scan_layers(lambda p, x: x, {"a": jnp.ones((2, 4)), "b": jnp.ones((3, 4))}, jnp.ones(4), at="layers")
    with pytest.raises(ValueError, match="prefetch=2"):
        zjax.scan_layers(lambda p, x: x, {"a": jnp.ones((2, 4))}, jnp.ones(4), at="layers", prefetch=2)


def test_the_explicit_engine_gathers_each_layer_twice_and_scatters_it_once():
    """The compiled program's own count: no gather for a layer that is not there, one scatter a layer."""
    from zjax.audit.collectives import Place
    from zjax.audit.hlo import parse
    from zjax.audit.schedule import follow
    from zjax.estimate.hardware import CHIPS

    plan = plan_of(3, "explicit", replica=1)
    text = zjax.make_train_step(plan, loss_with(1)).lower(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)).compile().as_text()
    runs = follow(parse(text), Place(dict(plan.mesh.shape), (0,) * 8, ()), CHIPS["cpu"]).runs
    shard = WIDTH * WIDTH // 8 * 4
    gathers = sum(run.times for run in runs if run.collective.kind == "all-gather" and run.collective.operand_bytes >= shard)
    scatters = sum(run.times for run in runs if run.collective.kind == "reduce-scatter" and run.collective.operand_bytes >= 8 * shard)
    # Two a layer; the backward's last prefetch has nothing to fetch and takes layer 0 again; the last layer's is kept.
    assert gathers == 2 * LAYERS
    assert scatters == LAYERS


def test_a_parameter_of_a_unit_used_outside_it_is_told_in_the_explicit_engine():
    def loss_fn(params, batch, rng):
        x = zjax.scan_layers(lambda p, x: x @ p["w"], params["layers"], batch, at="layers")
        return jnp.sum(x * params["layers"]["b"].sum()), jnp.float32(len(batch))

    step = zjax.make_train_step(plan_of(3, "explicit"), loss_fn)
    with pytest.raises(AttributeError, match=r"outside its unit.*fully_shard"):
        step.lower(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


def test_mean_loss_is_refused_by_the_explicit_engine():
    with pytest.raises(ValueError, match="explicit engine"):
        zjax.make_train_step(plan_of(3, "explicit"), zjax.mean_loss(lambda p, b, r: jnp.mean(b)))


@pytest.mark.parametrize("engine", ["partitioner", "explicit"])
def test_two_loops_over_the_same_layers_one_of_them_recomputed_give_the_gradients_of_both(engine):
    """A loss that uses the loop twice, once under `jax.checkpoint`, traced again for another batch size."""

    def loss_with(loop):
        def loss_fn(params, x, rng):
            first = jax.checkpoint(lambda layers, x: loop(layers, x))(params["layers"], jnp.asarray(x))
            return jnp.sum(loop(params["layers"], first + x) ** 2), jnp.float32(len(x))

        return loss_fn

    layer = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) + p["odd"].sum()  # noqa: E731
    marked = loss_with(lambda layers, x: zjax.scan_layers(layer, layers, x, at="layers"))
    plain = loss_with(lambda layers, x: jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0])
    plan = plan_of(3, engine)
    step, start = zjax.make_train_step(plan, marked), jax.device_get(zjax.init_state(plan, jax.random.key(0)).params)
    for x in (batch(), batch()[:8]):
        state, metrics = step(zjax.init_state(plan, jax.random.key(0)), x)
        loss, grads = jax.value_and_grad(lambda p, x=x: plain(p, x, None)[0] / len(x))(start)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        expected = jax.tree.map(lambda p, g: p - 0.001 * g, start, grads)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), jax.device_get(state.params), expected)


def test_forward_mode_through_the_loops_own_rule_is_a_clear_error():
    def loss_fn(params, x, rng):
        run = lambda x: jnp.sum(zjax.scan_layers(lambda p, x: jnp.tanh(x @ p["w"]), params["layers"], x, at="layers"))  # noqa: E731
        return jax.jvp(run, (jnp.asarray(x),), (jnp.ones_like(x),))[1], jnp.float32(len(x))

    with pytest.raises(TypeError, match=r"scan_layers.*forward-mode"):
        zjax.make_train_step(plan_of(3, "explicit"), loss_fn).lower(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


@pytest.mark.parametrize("stage", [0, 1])
def test_where_nothing_moves_by_layer_the_loop_is_the_plain_one(stage):
    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    text = lambda prefetch: zjax.make_train_step(plan_of(stage, "explicit"), loss_with(prefetch)).lower(shape).as_text()  # noqa: E731
    assert text(1) == text(0)
