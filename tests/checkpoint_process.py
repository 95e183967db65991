"""A process that saves or restores, for tests/test_checkpoint_processes.py: `checkpoint_process.py JSON`.

{"mode": "train", "folder"}: trains a small model with a save at every step, resuming, until it is killed or done. Prints
{"step", "sums"} of the state it begins with, and `saving` at every save.
{"mode": "exchange", "process", "processes", "devices", "port", "mesh", "stage", "source", "target"}: restores from `source`, or
without one makes the state, prints its sums, and saves it in `target` if there is one.
"""

import json
import sys

import jax
import jax.numpy as jnp
import optax

STEPS = 400


def train_pieces():
    """Plan and step of the small model that `train` trains, on 4 devices."""
    from zjax.config import AccumulationConfig, MeshConfig, PrecisionConfig, ZeroConfig
    from zjax.mesh import make_mesh
    from zjax.plan import build_plan
    from zjax.step import make_train_step

    def init(key):
        up, down = jax.random.split(key)
        return {"up": 0.3 * jax.random.normal(up, (16, 64)), "down": 0.3 * jax.random.normal(down, (64, 8)), "bias": jnp.zeros(8)}

    def loss(params, batch, rng):
        keep = jax.random.bernoulli(rng, 0.9, (batch["x"].shape[0], 64))  # dropout: the random stream must go on
        hidden = jnp.tanh(batch["x"] @ params["up"]) * keep
        errors = jnp.square(hidden @ params["down"] + params["bias"] - batch["y"])
        return jnp.sum(errors), jnp.float32(batch["x"].shape[0])

    mesh = make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
    plan = build_plan(
        ZeroConfig(stage=3), init, optax.adamw(1e-3), mesh, precision=PrecisionConfig(), accumulation=AccumulationConfig(), units=()
    )
    return plan, make_train_step(plan, loss)


def batch_of(step):
    """The data position is the step number."""
    x, y = jax.random.split(jax.random.fold_in(jax.random.key(1), step))
    return {"x": jax.random.normal(x, (8, 16), jnp.bfloat16), "y": jax.random.normal(y, (8, 8), jnp.bfloat16)}


def sums_of(state):
    """Checksums of all leaves."""
    from zjax.checkpoint.checksum import checksums
    from zjax.tree import named_leaves

    data = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return checksums({path: data(x) for path, x in named_leaves(state) if x.size})


def train(folder):
    """See the module."""
    from zjax.checkpoint import Checkpointer
    from zjax.state import init_state

    plan, step = train_pieces()
    checkpointer = Checkpointer(folder, keep=2, keep_every=100)
    state = init_state(plan, jax.random.key(0)) if checkpointer.resumable_step() is None else checkpointer.restore(plan)
    print(json.dumps({"step": int(state.step), "sums": sums_of(state)}), flush=True)
    for index in range(int(state.step), STEPS):
        state, _ = step(state, batch_of(index))
        checkpointer.check()
        checkpointer.save(state)
        print("saving", flush=True)
    checkpointer.close()


def exchange(options):
    """See the module."""
    jax.distributed.initialize(f"127.0.0.1:{options['port']}", options["processes"], options["process"])
    from test_checkpoint import filled, plan_on

    from zjax.checkpoint import Checkpointer
    from zjax.state import unplanned

    plan = plan_on(options["mesh"], options["stage"])
    if options["source"]:
        opened = Checkpointer(options["source"])
        state = opened.restore(plan)
        opened.close()
        assert unplanned(plan, state) == []
    else:
        state = filled(plan)
    if options["target"]:
        opened = Checkpointer(options["target"])
        opened.save(state, {"processes": options["processes"]})
        opened.close()
    print(json.dumps({"process": options["process"], "sums": sums_of(state)}), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", given.get("devices", 4))
    jax.config.update("jax_platforms", "cpu")
    train(given["folder"]) if given["mode"] == "train" else exchange(given)
