"""Activation checkpointing by name: the same gradients whatever is recomputed, and what is saved instead."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import zjax

LAYERS, WIDTH, HIDDEN, ROWS = 4, 16, 48, 16
NAMES = ("input", "hidden")
POLICIES = {
    "none": None,
    "full": "full",
    "dots": "dots",
    "names": zjax.save_names("hidden"),
    "offload": zjax.offload_names(*NAMES),
}


def init(key):
    keys = jax.random.split(key, 2)
    return {
        "layers": {
            "w1": 0.2 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
            "w2": 0.2 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
        }
    }


def block(params, x, scale):
    x = checkpoint_name(x, "input")
    return x + scale * jnp.sin(checkpoint_name(x @ params["w1"], "hidden")) @ params["w2"]


def loss_of(remat, *, prefetch=1, every=1, marked=False):
    """A loop over layers: `scan_layers`, or a plain scan over a marked block."""

    def loss_fn(params, x, rng):
        x, scale = jnp.asarray(x), jnp.float32(0.7)
        if marked:
            unit = zjax.fully_shard(block, at="layers", remat=remat)
            x, _ = jax.lax.scan(lambda x, p: (unit(p, x, scale), None), x, params["layers"])
        else:
            x = zjax.scan_layers(block, params["layers"], x, scale, at="layers", remat=remat, prefetch=prefetch, every=every)
        return jnp.sum(x**2), jnp.float32(len(x))

    return loss_fn


def plan_of(stage, engine, keep=False):
    zero = zjax.ZeroConfig(stage=stage, engine=engine, reshard_after_forward=not keep)
    return zjax.build_plan(zero, init, optax.sgd(0.01), zjax.make_mesh(zjax.MeshConfig(replica=2)), units=("layers[*]",))


def batch():
    return np.asarray(jax.random.normal(jax.random.key(1), (ROWS, WIDTH)))


def params_after_a_step(plan, loss_fn):
    state, metrics = zjax.make_train_step(plan, loss_fn)(zjax.init_state(plan, jax.random.key(0)), batch())
    return jax.device_get(state.params), float(metrics["loss"])


@functools.cache
def dense():
    """Plain jax on one device, nothing recomputed."""
    params = init(jax.random.split(jax.random.key(0))[0])

    def loss(params):
        x = jnp.asarray(batch())
        for i in range(LAYERS):
            x = block(jax.tree.map(lambda p, i=i: p[i], params["layers"]), x, 0.7)
        return jnp.sum(x**2) / ROWS

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: np.asarray(p - 0.01 * g), params, grads), float(value)


LOOPS = {
    "ahead": {"prefetch": 1},
    "plain": {"prefetch": 0},
    "ahead, every 2": {"every": 2},
    "plain, every 2": {"prefetch": 0, "every": 2},
    "marked": {"marked": True},
}
CASES = [
    (remat, loop, stage, engine) for remat, loop, stage, engine in itertools.product(POLICIES, LOOPS, range(4), ("explicit", "partitioner"))
]


def in_default(index):
    """A share of the product in which every value of each dimension appears with every engine."""
    return index % 7 == 3


@pytest.mark.parametrize(
    ("remat", "loop", "stage", "engine"),
    [pytest.param(*case, marks=[] if in_default(i) else pytest.mark.full) for i, case in enumerate(CASES)],
)
def test_whatever_is_recomputed_the_gradients_are_those_of_one_device(remat, loop, stage, engine):
    params, loss = params_after_a_step(plan_of(stage, engine), loss_of(POLICIES[remat], **LOOPS[loop]))
    expected, expected_loss = dense()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, expected)
