"""Activation checkpointing by name: the same gradients whatever is recomputed, and what is saved instead."""

import functools
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from small import REPO, compiled_fast, shared_folder

import zjax
from zjax.config import REMATS, TrainConfig
from zjax.fields import ConfigError, from_dict
from zjax.models import llama
from zjax.remat import names_in
from zjax.state import state_struct
from zjax.train import model_of


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


LAYERS, WIDTH, HIDDEN, ROWS = 4, 16, 48, 16
NAMES = ("input", "hidden")
POLICIES = {
    "none": None,
    "full": "full",
    "dots": "dots",
    "names": zjax.save_names("hidden"),
    "offload": zjax.offload_names(*NAMES),
}


def init(key, layers=LAYERS):
    keys = jax.random.split(key, 2)
    return {
        "layers": {
            "w1": 0.2 * jax.random.normal(keys[0], (layers, WIDTH, HIDDEN)),
            "w2": 0.2 * jax.random.normal(keys[1], (layers, HIDDEN, WIDTH)),
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


def plan_of(stage, engine, keep=False, layers=LAYERS):
    zero = zjax.ZeroConfig(stage=stage, engine=engine, reshard_after_forward=not keep)
    return zjax.build_plan(
        zero, functools.partial(init, layers=layers), optax.sgd(0.01), zjax.make_mesh(zjax.MeshConfig(replica=2)), units=("layers[*]",)
    )


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


def test_gathered_parameters_kept_to_the_backward_stay_kept_where_groups_are_recomputed():
    """reshard_after_forward=False: each layer gathered once, and the same gradients."""
    plan = plan_of(3, "explicit", keep=True)
    params, _ = params_after_a_step(plan, loss_of("full", every=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, dense()[0])
    assert (
        lowered("explicit", "full", keep=True, every=2).as_text().count('"stablehlo.all_gather"') == 2
    )  # of w1 and w2, in the forward's loop


# --- what is saved ------------------------------------------------------------------------------------------------------


def lowered(engine, remat, platform="cpu", *, keep=False, layers=LAYERS, **loop):
    plan = plan_of(3, engine, keep, layers)
    step, x = zjax.make_train_step(plan, loss_of(remat, **loop)), jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
    return step.jitted.trace(state_struct(plan), x).lower(lowering_platforms=(platform,))


PLACED = r'annotate_device_placement.*_xla_buffer_placement = "(\w+)".*-> tensor<(\S+)>'


def temp_bytes(remat, engine="explicit", **loop):
    return lowered(engine, remat, **loop).compile().memory_analysis().temp_size_in_bytes


A_LAYERS_HIDDEN = 1024 // 8 * HIDDEN * 4
A_LAYERS_INPUT = 1024 // 8 * WIDTH * 4


def test_memory_falls_with_what_is_recomputed():
    none, full, names = temp_bytes(None), temp_bytes("full"), temp_bytes(zjax.save_names("hidden"))
    assert none - names > LAYERS * A_LAYERS_HIDDEN / 2  # the cosine, which differentiates the sine
    assert names - full > (LAYERS - 1) * A_LAYERS_HIDDEN / 2


def whole_stacks(remat, **loop):
    """Arrays of several layers of a whole weight, in what a device has."""
    return re.findall(rf"\[\d+,(?:{WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]", lowered("explicit", remat, **loop).compile().as_text())


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("loop", ["ahead", "plain, every 2"])
def test_gathered_parameters_are_never_saved(remat, loop):
    assert whole_stacks(POLICIES[remat], **LOOPS[loop]) == []


def test_gathered_parameters_that_are_saved_would_be_seen():
    assert whole_stacks("full", keep=True)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_name_that_is_saved_is_not_computed_again(prefetch):
    """Matrix products: forward and backward have 2 and 4 a layer; with the loop's own rule the last layer stands by itself."""
    layers = 1 + prefetch
    count = lambda remat: lowered("explicit", remat, prefetch=prefetch).as_text().count("stablehlo.dot_general")  # noqa: E731
    assert count("full") == layers * 7
    assert count("dots") == count(zjax.save_names("hidden")) == count(zjax.offload_names("input", "hidden")) == layers * 6
    assert count(zjax.save_names("input")) == layers * 7


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("engine", ["explicit", "partitioner"])
def test_offloaded_names_go_to_the_hosts_memory_and_come_back_once(engine, prefetch):
    """As a GPU is asked for it: XLA on CPU has one memory only."""
    placed = lambda remat: Counter(re.findall(PLACED, lowered(engine, remat, "cuda", prefetch=prefetch).as_text()))  # noqa: E731
    hidden = f"{1024 if engine == 'partitioner' else 1024 // 8}x{HIDDEN}xf32"
    assert placed(zjax.offload_names("hidden"))["pinned_host", hidden] == 1 + prefetch
    assert placed(zjax.offload_names("hidden"))["device", hidden] == 1 + prefetch
    assert not placed(zjax.save_names("hidden"))


def test_an_input_that_is_offloaded_is_not_kept_on_the_device_too():
    """The stack of layers' inputs is what the host has; nothing of that shape stays with the loop."""
    text = lambda remat: str(jax.make_jaxpr(jax.grad(scanned(remat)))(init(jax.random.key(0)), batch()))  # noqa: E731

    def scanned(remat):
        unit = zjax.fully_shard(block, at="layers", remat=remat)
        return lambda params, x: jnp.sum(jax.lax.scan(lambda x, p: (unit(p, x, 0.7), None), x, params["layers"])[0] ** 2)

    stack = f"f32[{LAYERS},{ROWS},{WIDTH}]"
    assert stack in text("full")
    offloaded = text(zjax.offload_names("input"))
    assert stack not in offloaded and stack.replace("[", "<host>[") in offloaded


@pytest.mark.parametrize("prefetch", [0, 1])
def test_only_every_kth_layers_input_is_held(prefetch):
    """8 more layers cost 8 inputs; in groups of 4, two, beside the gradients and the copies that both have."""
    cost = {}
    for every in (1, 4):
        few, many = (temp_bytes("full", layers=layers, prefetch=prefetch, every=every) for layers in (8, 16))
        cost[every] = many - few
    assert cost[1] - cost[4] == pytest.approx(6 * A_LAYERS_INPUT, rel=0.1)


# --- names and errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["ahead", "marked"])
def test_a_name_that_the_block_gives_to_nothing_raises_with_the_nearest(loop):
    with pytest.raises(ValueError, match=r"at='layers'.*saves 'hiden'.*did you mean 'hidden'.*hidden, input"):
        params_after_a_step(plan_of(3, "explicit"), loss_of(zjax.save_names("hiden"), **LOOPS[loop]))


def test_an_unknown_policy_raises_with_the_nearest():
    with pytest.raises(ValueError, match=r"remat='ful'.*did you mean 'full'"):
        zjax.fully_shard(block, at="layers", remat="ful")


def test_groups_that_do_not_divide_the_layers_raise():
    with pytest.raises(ValueError, match=r"at='layers'.*every=3.*4 layers"):
        params_after_a_step(plan_of(3, "explicit"), loss_of("full", every=3))


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"remat": "nams"}, "remat='nams': did you mean 'names'?"),
        ({"remat": "full", "remat_names": "query"}, "remat_names=('query',): only remat='names' and 'offload'"),
        ({"remat": "names", "remat_names": "atention"}, "'atention', but no value has that name: did you mean 'attention'?"),
        ({"remat": "full", "remat_every": 0}, "remat_every=0: must be a positive"),
        ({"remat": "full", "remat_every": 3}, "remat_every=3: must divide model.n_layers=4"),
    ],
)
def test_a_remat_that_the_model_cannot_honour_raises(knobs, told):
    with pytest.raises(ConfigError) as error:
        model_of(from_dict(TrainConfig, knobs))
    assert told in str(error.value)


def test_the_command_line_reads_none_as_the_name_it_is():
    assert from_dict(TrainConfig, {"remat": None}).remat == "none"


# --- the Llama ------------------------------------------------------------------------------------------------------------

TINY = {"model": {"n_layers": 2, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "d_ff": 64, "max_sequence": 16}}


def tiny(**knobs):
    return model_of(from_dict(TrainConfig, {**TINY, "data": {"sequence_length": 16}, **knobs}))


@functools.cache
def llama_gradient(**knobs):
    model, tokens = tiny(**knobs), jax.random.randint(jax.random.key(2), (4, 16), 0, 256)
    batch = {"inputs": tokens, "targets": tokens, "mask": jnp.ones(tokens.shape)}
    return jax.grad(lambda params: model.loss(params, batch, None)[0])(model.init(jax.random.key(0)))


def test_the_blocks_values_have_the_names_that_are_documented():
    model = tiny()
    layer = jax.eval_shape(lambda key: jax.tree.map(lambda x: x[0], model.init(key)["layers"]), jax.random.key(0))
    rotary = llama.rotary_table(model.config, 16)
    assert names_in(lambda p, x: model.functions()[1](p, x, rotary), layer, jax.ShapeDtypeStruct((2, 16, 32), jnp.float32)) == set(
        llama.NAMES
    )


@pytest.mark.parametrize(
    "knobs",
    [{"remat": "names"}, {"remat": "offload"}, {"remat": "names", "remat_names": llama.NAMES}, {"remat": "dots", "remat_every": 2}],
    ids=str,
)
def test_a_llamas_gradients_are_the_same_whatever_is_saved(knobs):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max()), llama_gradient(**knobs), llama_gradient()
    )


@pytest.mark.full
def test_an_audit_of_each_shows_what_it_costs():
    """On CPU, where the host's memory is the device's, offloading a block's input is as saving it."""
    from zjax.cli import audit_run, load_config

    config = str(REPO / "configs" / "llama_tiny.py")
    temp = {remat: audit_run(load_config(config, [f"--config.remat={remat}"]), "cpu:8").to_json()["temp_bytes"] for remat in REMATS}
    assert temp["full"] == temp["offload"] < temp["names"] < temp["dots"] < temp["none"]
