"""XLA's settings for a step: what each target gets, and that a step and its audit are compiled with the same."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zjax
from zjax.audit import audit_recipe
from zjax.config import MeshConfig

pytestmark = pytest.mark.slow


def init(key):
    return {"layers": {"w": jnp.ones((4, 64, 256))}, "head": jnp.ones((256, 8))}


def plan_of(mesh):
    return zjax.build_plan(zjax.ZeroConfig(), init, optax.sgd(0.1), mesh, units=("layers[*]", "head"), precision=zjax.PrecisionConfig())


def loss_fn(params, x, rng):
    x, _ = jax.lax.scan(lambda x, p: (zjax.fully_shard(lambda p, x: x @ p["w"] @ p["w"].T, at="layers")(p, x), None), x, params["layers"])
    return jnp.sum(x.astype(jnp.float32) ** 2) + jnp.sum(params["head"].astype(jnp.float32)), jnp.float32(len(x))


@pytest.mark.parametrize("target", ["gpu", "gpu:h100:1x8"])
def test_a_gpu_combines_up_to_the_largest_unit_and_hides_latency(target):
    """A layer of 64 x 256 in bf16 is larger than the head of 256 x 8; the stack of 4 is no unit."""
    flags = zjax.xla_flags(target, plan_of(zjax.abstract_mesh(MeshConfig(), 8)))
    assert flags["xla_gpu_enable_latency_hiding_scheduler"] == "True"
    assert {value for name, value in flags.items() if "combine_threshold" in name} == {str(64 * 256 * 2)}


def test_a_tpu_asks_for_its_sparse_cores_and_the_cpu_for_nothing():
    plan = plan_of(zjax.abstract_mesh(MeshConfig(), 8))
    assert all("sparse_core_collective_offload" in name for name in zjax.xla_flags("tpu:v5p:2x2x2", plan))
    assert zjax.xla_flags("tpu:v5p:2x2x2", plan) == zjax.xla_flags("tpu", plan) != {}
    assert zjax.xla_flags("cpu:8", plan) == {}


def test_an_audit_compiles_with_the_flags_and_says_so_or_with_those_that_are_given():
    plan = plan_of(zjax.abstract_mesh(MeshConfig(), 8))
    shape = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)
    audit = lambda options: audit_recipe(plan.recipe, loss_fn, shape, target="gpu:h100:1x8", mesh=MeshConfig(), compiler_options=options)  # noqa: E731
    assert audit(None).compiler_options == zjax.xla_flags("gpu", plan)
    assert "xla_gpu_all_gather_combine_threshold_bytes=32768" in str(audit(None))
    given = {"xla_gpu_enable_latency_hiding_scheduler": "False"}
    assert audit(given).compiler_options == given


def test_a_step_takes_options_and_refuses_one_that_xla_does_not_know():
    mesh = zjax.make_mesh(MeshConfig())
    step = zjax.make_train_step(plan_of(mesh), loss_fn, compiler_options={"xla_cpu_enable_fast_math": "True"})
    _, metrics = step(zjax.init_state(step.plan, jax.random.key(0)), jnp.ones((16, 64), jnp.bfloat16))
    assert jnp.isfinite(metrics["loss"])
    with pytest.raises(Exception, match="xla_no_such_option"):
        zjax.make_train_step(plan_of(mesh), loss_fn, compiler_options={"xla_no_such_option": "1"}).lower(
            jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)
        ).compile()
