"""Random draws and means over rows on other devices: the same on every mesh and in both engines."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax

WIDTH, ROWS = 16, 16
MESHES = [("partitioner", {"fsdp": 1}, 1), ("partitioner", {"fsdp": -1}, 8), ("explicit", {"fsdp": -1}, 8)]
MESHES += [
    ("explicit", {"replica": 2, "fsdp": 4}, 8),
    ("explicit", {"replica": 4, "fsdp": 2}, 8),
    ("explicit", {"fsdp": 4, "tensor": 2}, 8),
]


def batch():
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")


def one_step(loss_fn, engine, degrees, devices, micro=1):
    plan = zjax.build_plan(
        zjax.ZeroConfig(engine=engine),
        lambda key: {"unit": {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 4}},
        optax.sgd(1.0),
        zjax.make_mesh(zjax.MeshConfig(**degrees), jax.devices()[:devices]),
        units=("unit",),
        accumulation=zjax.AccumulationConfig(micro_batches=micro),
    )
    state, metrics = zjax.make_train_step(plan, loss_fn)(zjax.init_state(plan, jax.random.key(0)), batch())
    return float(metrics["loss"]), jax.device_get(state.params), {name: float(value) for name, value in metrics.items()}


def dropout_loss(params, x, rng):
    """Dropout in and after a unit, with keys split from the loss's."""
    first, second = jax.random.split(rng)
    drop = lambda key, x: x * jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDTH,)))(zjax.row_keys(key, len(x)))  # noqa: E731
    x = zjax.fully_shard(lambda p, x: drop(first, x @ p["w"]), at="unit", remat="full")(params["unit"], jnp.asarray(x))
    return jnp.sum(drop(second, x) ** 2), jnp.float32(len(x)), {"kept": (jnp.sum(drop(second, x) != 0.0), jnp.float32(x.size))}


@pytest.mark.filterwarnings("ignore:zero.stage")
@pytest.mark.parametrize("micro", [1, 2])
def test_dropout_by_row_keys_is_the_same_on_every_mesh_and_in_both_engines(micro):
    runs = [one_step(dropout_loss, *mesh, micro=micro) for mesh in MESHES]
    assert 0.15 < runs[0][2]["kept"] < 0.35
    for loss, params, _ in runs[1:]:
        np.testing.assert_allclose(loss, runs[0][0], rtol=1e-5)
        np.testing.assert_allclose(params["unit"]["w"], runs[0][1]["unit"]["w"], rtol=1e-4, atol=1e-5)


def dropout_in_layers(params, x, rng):
    """Dropout inside layers whose backward computes them again, by the loop's own rule."""

    def layer(p, x, key):
        kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDTH,)))(zjax.row_keys(key, len(x)))
        return x + kept * jnp.tanh(x @ p["w"])

    x = zjax.scan_layers(layer, params["layers"], jnp.asarray(x), at="layers", per_layer=jax.random.split(rng, 3))
    return jnp.sum(x**2), jnp.float32(len(x))


@pytest.mark.filterwarnings("ignore:zero.stage")
def test_what_a_layer_draws_is_drawn_again_in_the_backward():
    runs = []
    for engine, degrees, devices in MESHES:
        plan = zjax.build_plan(
            zjax.ZeroConfig(engine=engine),
            lambda key: {"layers": {"w": jax.random.normal(key, (3, WIDTH, WIDTH)) / 4}},
            optax.sgd(1.0),
            zjax.make_mesh(zjax.MeshConfig(**degrees), jax.devices()[:devices]),
            units=("layers[*]",),
        )
        state, metrics = zjax.make_train_step(plan, dropout_in_layers)(zjax.init_state(plan, jax.random.key(0)), batch())
        runs.append((float(metrics["loss"]), jax.device_get(state.params["layers"]["w"])))
    for loss, weights in runs[1:]:
        np.testing.assert_allclose(loss, runs[0][0], rtol=1e-5)
        np.testing.assert_allclose(weights, runs[0][1], rtol=1e-4, atol=1e-5)


def test_every_row_draws_its_own_and_outside_a_step_too():
    keys = zjax.row_keys(jax.random.key(3), 5)
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 5
    np.testing.assert_array_equal(jax.random.key_data(keys[2]), jax.random.key_data(jax.random.fold_in(jax.random.key(3), 2)))


def plain_dropout(params, x, rng):
    mask = jax.random.bernoulli(rng, 0.5, x.shape)
    x = zjax.fully_shard(lambda p, x: x @ p["w"], at="unit")(params["unit"], jnp.asarray(x))
    once = jnp.where(mask, 1.0, 0.0)
    # How often a row's mask is that of the row before: rows of one device, and, with one row a device, of two devices.
    same = zjax.global_mean(once, jnp.ones(once.shape))
    return jnp.sum((x * once) ** 2), jnp.float32(len(x)), {"kept": (same * len(x), jnp.float32(len(x)))}


def test_dropout_drawn_with_the_losss_own_key_differs_between_devices():
    """With one mask for all devices 8 x 2 x 16 draws would have the spread of 32: 0.088. They have that of 256: 0.031."""
    init = lambda key: {"unit": {"w": jnp.zeros((WIDTH, WIDTH))}}  # noqa: E731
    plan = zjax.build_plan(zjax.ZeroConfig(engine="explicit"), init, optax.sgd(1.0), zjax.make_mesh(zjax.MeshConfig()), units=("unit",))
    step = zjax.make_train_step(plan, plain_dropout)
    kept = [float(step(zjax.init_state(plan, jax.random.key(seed)), batch())[1]["kept"]) for seed in range(12)]
    assert 0 < np.std(kept) < 0.06


def variance_loss(params, x, rng):
    """No sum of rows: the deviation from the mean of all rows, weighed unevenly over the devices."""
    y = zjax.fully_shard(lambda p, x: jnp.tanh(x @ p["w"]), at="unit")(params["unit"], jnp.asarray(x))
    weight = (x[:, :1] > 0.5).astype(jnp.float32)
    mean = zjax.global_mean(y, weight)
    return jnp.sum((y - mean) ** 2) + len(x) * mean**2, jnp.float32(len(x)), {"mean": (mean * len(x), jnp.float32(len(x)))}


@pytest.mark.filterwarnings("ignore:zero.stage")
def test_a_mean_over_all_rows_has_the_value_and_the_gradient_of_one_device():
    runs = [one_step(variance_loss, *mesh) for mesh in MESHES]
    for loss, params, metrics in runs[1:]:
        np.testing.assert_allclose([loss, metrics["mean"]], [runs[0][0], runs[0][2]["mean"]], rtol=1e-5)
        np.testing.assert_allclose(params["unit"]["w"], runs[0][1]["unit"]["w"], rtol=1e-4, atol=1e-5)
    # It can tell: the mean of a device's own rows is another.
    local = lambda p, x, rng: variance_loss_with(lambda y, w: jnp.sum(y * w) / jnp.maximum(jnp.sum(jnp.broadcast_to(w, y.shape)), 1), p, x)  # noqa: E731
    assert abs(one_step(local, "explicit", {"fsdp": -1}, 8)[0] / runs[0][0] - 1) > 1e-3


def variance_loss_with(mean_of, params, x):
    y = zjax.fully_shard(lambda p, x: jnp.tanh(x @ p["w"]), at="unit")(params["unit"], jnp.asarray(x))
    mean = mean_of(y, (x[:, :1] > 0.5).astype(jnp.float32))
    return jnp.sum((y - mean) ** 2) + len(x) * mean**2, jnp.float32(len(x))


def test_a_mean_of_nothing_is_0():
    assert zjax.global_mean(jnp.ones(3), jnp.zeros(3)) == 0


def test_a_weight_that_does_not_grow_with_the_rows_is_told():
    """Counted once by each device it would be 8 times too large, or 2 times with two micro-batches."""

    def loss_fn(params, x, rng):
        y = zjax.fully_shard(lambda p, x: x @ p["w"], at="unit")(params["unit"], jnp.asarray(x))
        return jnp.mean(y**2), jnp.ones(())

    with pytest.raises(TypeError, match=r"weight 1 for 2 rows and 1 for 16.*sum over the rows.*mean_loss"):
        one_step(loss_fn, "explicit", {"fsdp": -1}, 8)
    with pytest.raises(TypeError, match=r"weight 1 for 8 rows and 1 for 16"):
        one_step(loss_fn, "partitioner", {"fsdp": 1}, 1, micro=2)
    one_step(loss_fn, "partitioner", {"fsdp": -1}, 8)  # sees all rows at once
