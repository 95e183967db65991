"""The same Llama step written twice, compiled for hardware that need not be here, audited side by side.

    python scripts/audit_peers.py                            # Llama-2-7B on 8 H100 and on 64 v5p
    python scripts/audit_peers.py --target=gpu:h100:1x8 --batch=8

(a) zjax, stage 3. (b) a plain step as a competent JAX user writes it: the same sharded state as `NamedSharding`s, one
`jax.jit` with shardings and donation, a scan over layers under `jax.checkpoint`, and one sharding constraint on the
residual stream in the layer. Shapes, batch, dtypes, remat and optimizer are equal.
"""

import argparse
import functools
import json

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax import MeshConfig, PrecisionConfig, ZeroConfig, abstract_mesh, build_plan
from zjax.audit import audit_program, audit_recipe
from zjax.audit.targets import parse_target
from zjax.cli import without_accelerator
from zjax.models import llama
from zjax.optim import clip_factor, global_norm
from zjax.state import state_shardings, state_struct


def plain_loss(config, params, batch, residual):
    """Mean cross-entropy of the plain step; `residual` pins the residual stream to the data axis."""
    tokens = batch["inputs"]
    rotary = llama.rotary_table(config, tokens.shape[1])
    embed, block, head = llama.LlamaFunctions(config).functions()

    @jax.checkpoint
    def layer(x, weights):
        return residual(block(weights, x, rotary)), None

    x, _ = jax.lax.scan(layer, residual(embed(params["embed"], tokens)), params["layers"])
    logits = head(params["head"], x, None).astype(jnp.float32)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(nll * batch["mask"]) / jnp.sum(batch["mask"])


def plain_step(config, tx, clip, residual, state, batch):
    """One step on (params, master, optax state): the arithmetic of zjax's, without its constraints."""
    params, master, inner = state
    loss, grads = jax.value_and_grad(lambda p: plain_loss(config, p, batch, residual))(params)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    norm = global_norm(grads)
    updates, inner = tx.update(jax.tree.map(lambda g: g * clip_factor(norm, clip), grads), inner, master)
    master = optax.apply_updates(master, updates)
    return (jax.tree.map(lambda x: x.astype(jnp.bfloat16), master), master, inner), (loss, norm)


def lower_plain(recipe, config, clip, batch, mesh):
    """The plain step lowered with the plan's own state shardings."""
    plan = recipe.build(mesh)
    struct, shardings = state_struct(plan), state_shardings(plan)
    parts = lambda s: (s.params, s.opt_state.master, s.opt_state.inner)  # noqa: E731
    rows = NamedSharding(mesh, plan.batch_spec)
    residual = lambda x: jax.lax.with_sharding_constraint(x, rows)  # noqa: E731
    step = jax.jit(
        functools.partial(plain_step, config, recipe.tx, clip, residual),
        in_shardings=(parts(shardings), rows),
        out_shardings=(parts(shardings), NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step.lower(parts(struct), batch), frozenset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama2_7b", help="a Llama preset")
    parser.add_argument("--target", action="append", help="repeatable; default gpu:h100:1x8 and tpu:v5p:4x4x4")
    parser.add_argument("--batch", type=int, help="sequences; default one a device")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    without_accelerator()
    config = llama.PRESETS[arguments.preset]
    model = llama.LlamaFunctions(config, remat="full")
    for target in arguments.target or ["gpu:h100:1x8", "tpu:v5p:4x4x4"]:
        mesh, devices = MeshConfig(fsdp=-1), parse_target(target).devices
        plan = build_plan(
            ZeroConfig(stage=3), model.init, optax.adamw(3e-4, b2=0.95), abstract_mesh(mesh, devices),
            precision=PrecisionConfig(compute="bfloat16"), units=llama.UNITS,
        )  # fmt: skip
        shape = (arguments.batch or devices, arguments.sequence)
        batch = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, dtype in (("inputs", jnp.int32), ("targets", jnp.int32), ("mask", jnp.float32))
        }
        audits = {
            "zjax": audit_recipe(plan.recipe, model.loss, batch, target=target, mesh=mesh, clip=1.0),
            "plain jit": audit_program(
                functools.partial(lower_plain, plan.recipe, config, 1.0, batch), plan, batch, target=target, mesh=mesh
            ),
        }
        for name, audit in audits.items():
            print(json.dumps({"step": name, **audit.to_json()}) if arguments.json else f"== {name}\n{audit}\n")


if __name__ == "__main__":
    main()
