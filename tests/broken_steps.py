"""A small stacked MLP, and the ways of writing its loss or its step wrong that an audit must catch.

The child process that compiles imports this module, so it imports no test.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zjax
from zjax.mesh import abstract_mesh
from zjax.models import llama
from zjax.optim import global_norm
from zjax.state import state_shardings, state_struct

LAYERS, WIDTH, HIDDEN, OUT = 8, 256, 512, 384
ROWS, LENGTH = 16, 24
"""No parameter nor its shard has a dim of 24 or 2 = 16 / 8: an array that has them is an activation."""
UNITS = ("layers[*]", "head")
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.bfloat16)}


def init(key):
    del key
    layers = {"norm": jnp.ones((LAYERS, WIDTH)), "w1": jnp.zeros((LAYERS, WIDTH, HIDDEN)), "w2": jnp.zeros((LAYERS, HIDDEN, WIDTH))}
    return {"layers": layers, "head": {"kernel": jnp.zeros((WIDTH, OUT))}}


def narrow_init(key):
    """Norms of 768 elements, as in GPT-2 small."""
    del key
    return {"layers": {"norm": jnp.ones((LAYERS, 768)), "w": jnp.zeros((LAYERS, 768, 128))}, "head": {"kernel": jnp.zeros((768, 128))}}


def huge_init(key):
    """17e9 parameters."""
    del key
    return {"layers": {"w": jnp.zeros((256, 8192, 8192))}}


def block(params, x):
    return x + jnp.tanh((x * params["norm"]) @ params["w1"]) @ params["w2"]


def head(params, x):
    return x @ params["kernel"]


def scan(layer, x, layers):
    return jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, layers)[0]


def loss_of(y):
    return jnp.sum(jnp.square(y.astype(jnp.float32))), jnp.float32(y.shape[0])


marked_block, marked_head = zjax.fully_shard(block, at="layers"), zjax.fully_shard(head, at="head")


def healthy(params, batch, rng):
    return loss_of(marked_head(params["head"], scan(marked_block, batch["x"], params["layers"])))


def unmarked(params, batch, rng):
    return loss_of(head(params["head"], scan(block, batch["x"], params["layers"])))


def marked_outside_the_scan(params, batch, rng):
    """The whole stack is one unit: gathered, and its gradient held, at once."""
    stack = zjax.fully_shard(lambda layers, x: scan(block, x, layers), at="layers")
    return loss_of(marked_head(params["head"], stack(params["layers"], batch["x"])))


def one_unit(params, batch, rng):
    """For a plan without units: the whole model is the root unit."""
    model = zjax.fully_shard(lambda p, x: head(p["head"], scan(block, x, p["layers"])), at="")
    return loss_of(model(params, batch["x"]))


def gathered_in_float32(params, batch, rng):
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    return loss_of(marked_head(wide["head"], scan(marked_block, batch["x"].astype(jnp.float32), wide["layers"])))


def gathered_four_times(params, batch, rng):
    """Four passes over the layers where the plan knows of one."""
    x = batch["x"]
    for _ in range(4):
        x = scan(marked_block, x, params["layers"])
    return loss_of(marked_head(params["head"], x))


def lower_off_the_replicas(recipe, batch, mesh):
    """The activations are spread over `fsdp` alone, and so gathered over `replica`."""
    plan = recipe.build(mesh)
    off = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))  # noqa: E731

    def loss(params, batch, rng):
        return loss_of(off(head(params["head"], off(scan(marked_block, batch["x"], params["layers"])))))

    return zjax.make_train_step(plan, loss).lower(batch), frozenset(plan.params)


def lower_whole_gradients(recipe, batch, mesh):
    """Each layer is gathered as a unit is, but its gradient is clipped whole, and all layers' are only scattered at the end."""
    plan = recipe.build(mesh)
    pin = lambda spec: lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # noqa: E731
    whole, rows = pin(P()), pin(plan.residual_spec)
    gathered, collected = jax.custom_vjp(whole), jax.custom_vjp(lambda x: x)
    gathered.defvjp(lambda x: (whole(x), None), lambda _, g: (whole(g) / (1 + jnp.max(jnp.abs(whole(g)))),))
    collected.defvjp(lambda x: (x, None), lambda _, g: (whole(g),))

    def loss(params, batch, rng):
        layers = jax.tree.map(collected, params["layers"])
        x = scan(lambda weights, x: rows(block(jax.tree.map(gathered, weights), x)), batch["x"], layers)
        return loss_of(marked_head(params["head"], x))

    return zjax.make_train_step(plan, loss).lower(batch), frozenset(plan.params)


def narrow(params, batch, rng):
    layer = zjax.fully_shard(lambda p, x: x + ((x * p["norm"]) @ p["w"]) @ p["w"].T, at="layers")
    return loss_of(marked_head(params["head"], scan(layer, batch["x"], params["layers"])))


def wants_another_batch(params, batch, rng):
    return loss_of(batch["y"])


def huge(params, batch, rng):
    return loss_of(scan(zjax.fully_shard(lambda p, x: x @ p["w"], at="layers"), batch["x"], params["layers"]))


def plan_for(devices, mesh=zjax.MeshConfig(), init=init, units=UNITS, stage=3, **zero):  # noqa: B008  (frozen)
    return zjax.build_plan(
        zjax.ZeroConfig(stage=stage, engine="partitioner", **zero), init, optax.sgd(0.1), abstract_mesh(mesh, devices),
        precision=zjax.PrecisionConfig(compute="bfloat16"), units=units,
    )  # fmt: skip


def lower_update(recipe, extra, donated, mesh):
    """A step that only decays its state: what is passed in and donated is all there is to it."""
    plan = recipe.build(mesh)
    struct, shardings, whole = state_struct(plan), state_shardings(plan), NamedSharding(mesh, P())

    def step(state, extra):
        scale = 0.5 * jnp.max(extra)
        decayed = lambda x: x * scale.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        return jax.tree.map(decayed, state), scale

    jitted = jax.jit(
        step, in_shardings=(shardings, whole), out_shardings=(shardings, whole), donate_argnums=(0,) if donated else ()
    )  # fmt: skip
    return jitted.lower(struct, jax.ShapeDtypeStruct((extra,), jnp.float32)), frozenset(plan.params)


def lower_plain_llama(recipe, config, constrained, batch, mesh):
    """A plain jit step on the plan's shardings, with or without a constraint on the residual stream."""
    plan = recipe.build(mesh)
    rows = NamedSharding(mesh, plan.batch_spec)
    residual = (lambda x: jax.lax.with_sharding_constraint(x, rows)) if constrained else (lambda x: x)
    embed, layer, last = llama.LlamaFunctions(config).functions()

    def loss(params, batch):
        rotary = llama.rotary_table(config, batch["inputs"].shape[1])
        x = scan(
            jax.checkpoint(lambda w, x: residual(layer(w, x, rotary))), residual(embed(params["embed"], batch["inputs"])), params["layers"]
        )
        logits = last(params["head"], x, None).astype(jnp.float32)
        nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.mean(nll)

    def step(state, batch):
        params, master = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        master = jax.tree.map(lambda m, g: m - 0.1 * g, master, grads)
        return (jax.tree.map(lambda m: m.astype(jnp.bfloat16), master), master), (value, global_norm(grads))

    parts = lambda s: (s.params, s.opt_state.master)  # noqa: E731
    shardings = parts(state_shardings(plan))
    jitted = jax.jit(step, in_shardings=(shardings, rows), out_shardings=(shardings, NamedSharding(mesh, P())), donate_argnums=0)
    return jitted.lower(parts(state_struct(plan)), batch), frozenset()


def killed(mesh):
    """What a crash of the compiler looks like from outside."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def for_gpu_only(params, batch, rng):
    """Picks its kernel by the backend, as libraries do; here there is only the one for GPUs."""
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"no kernel for {jax.default_backend()}")
    return healthy(params, batch, rng)
