"""Attention: every kernel against a dense reference, in both engines, and as compiled for TPU and GPU."""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from audited import kinds
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from small import compiled_fast, run_quietly, shared_folder, small_config, write_corpus

import zjax
from zjax import rules
from zjax.audit.run import audit_recipe
from zjax.config import ModelConfig
from zjax.models import llama
from zjax.models.attention import QUERIES, attention
from zjax.units import Tracing, plan_context

LENGTHS = (1, QUERIES, QUERIES + 1, 2 * QUERIES, 601)
"""One block of queries, two just so, two in full, three with rows to spare."""


def arrays(length, *, heads=4, kv_heads=2, width=8, rows=2, dtype=jnp.float32):
    """q, k, v and a cotangent of the output."""
    draw = np.random.default_rng(length).standard_normal
    return [jnp.asarray(draw((rows, length, n, width)), dtype) for n in (heads, kv_heads, kv_heads, heads)]


def dense(q, k, v, g):
    """Output, dq, dk, dv in float64 numpy, derivatives by hand."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    repeated_k, repeated_v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = scale * np.einsum("btnh,bsnh->bnts", q, repeated_k)
    scores = np.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = np.einsum("btnh,bsnh->bnts", g, repeated_v)
    ds = scale * p * (dp - np.sum(dp * p, axis=-1, keepdims=True))
    dk, dv = np.einsum("bnts,btnh->bsnh", ds, q), np.einsum("bnts,btnh->bsnh", p, g)
    dk, dv = (x.reshape(*x.shape[:2], k.shape[2], group, -1).sum(axis=3) for x in (dk, dv))
    return np.einsum("bnts,bsnh->btnh", p, repeated_v), np.einsum("bnts,bsnh->btnh", ds, repeated_k), dk, dv


def computed(kernel, q, k, v, g, around=lambda f: f):
    """Output, dq, dk, dv under jit."""

    def both(q, k, v, g):
        out, vjp = jax.vjp(around(functools.partial(attention, kernel=kernel)), q, k, v)
        return out, *vjp(g)

    return jax.jit(both)(q, k, v, g)


def assert_agree(results, reference):
    for name, ours, theirs in zip(("o", "dq", "dk", "dv"), results, reference, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module", autouse=True)
def _compiled_fast(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")):
        yield


@pytest.fixture
def splash_anywhere(monkeypatch):
    """The CPU passes for one TPU, on which Pallas kernels are interpreted."""
    interpreted = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", interpreted)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_value_and_gradients_are_the_dense_ones(length):
    inputs = arrays(length)
    assert_agree(computed("chunked", *inputs), dense(*inputs))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_query_heads_read_their_group(heads, kv_heads):
    inputs = arrays(QUERIES + 44, heads=heads, kv_heads=kv_heads)
    reference = dense(*inputs)
    for kernel in ("plain", "chunked"):
        assert_agree(computed(kernel, *inputs), reference)


@pytest.mark.parametrize(("length", "width", "kv_heads"), [(128, 8, 2), (640, 32, 1)])
def test_splash_attention_is_the_dense_one(splash_anywhere, length, width, kv_heads):
    inputs = arrays(length, width=width, kv_heads=kv_heads, rows=1)
    assert_agree(computed("splash", *inputs), dense(*inputs))


@pytest.mark.parametrize("kernel", ["chunked", "splash"])
def test_gradients_pass_through_checkpoint_and_scan(splash_anywhere, kernel):
    inputs = arrays(384, rows=1)

    def repeated(f):
        body = jax.checkpoint(lambda q, k, v: f(q, k, v), policy=jax.checkpoint_policies.nothing_saveable)
        return lambda q, k, v: jax.lax.scan(lambda q, _: (body(q, k, v), None), q, length=2)[0]

    reference = computed("plain", *inputs, around=repeated)
    assert_agree(computed(kernel, *inputs, around=repeated), reference)


def test_chunked_gradients_in_bf16_are_as_good_as_plain_ones():
    """Sums over the blocks are taken in float32: in bf16 the first keys, which every block sees, would lose theirs."""
    inputs = arrays(2048, heads=1, kv_heads=1, rows=1, dtype=jnp.bfloat16)
    reference = dense(*inputs)[2:]
    off = {
        kernel: [np.linalg.norm(np.asarray(x, np.float64) - y) for x, y in zip(computed(kernel, *inputs)[2:], reference, strict=True)]
        for kernel in ("plain", "chunked")
    }
    assert np.all(np.array(off["chunked"]) < 1.5 * np.array(off["plain"])), off


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable], ids=["none", "everything"])
def test_chunked_attention_never_holds_the_scores_of_all_queries(policy):
    shapes = [jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)] * 3

    def temporaries(kernel):
        f = functools.partial(attention, kernel=kernel)
        f = jax.checkpoint(f, policy=policy) if policy else f
        gradient = jax.grad(lambda q, k, v: jnp.sum(f(q, k, v) ** 2), argnums=(0, 1, 2))
        return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("plain") > 2 * 4096 * 4096 * 4  # float32 scores of two heads
    assert temporaries("chunked") < temporaries("plain") / 8  # of 16 blocks


# In a step.

SIZES = llama.LlamaConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32, max_sequence=384)
ROWS, LENGTH = 8, 384
MESHES = {"2x4": {"replica": 2}, "4 tensor 2": {"tensor": 2}}


def batch():
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((ROWS, LENGTH), np.float32)}


def model_with(kernel, remat="none"):
    return llama.LlamaFunctions(dataclasses.replace(SIZES, attention=kernel), remat)


def plan_of(engine, mesh, *, compute="float32", sizes=SIZES):
    model = llama.LlamaFunctions(sizes)
    return zjax.build_plan(
        zjax.ZeroConfig(engine=engine),
        model.init,
        optax.sgd(1.0),
        mesh,
        precision=zjax.PrecisionConfig(compute=compute),
        units=llama.UNITS,
        rules=[rules.tensor_parallel(llama.tensor_dims(sizes))],
    )


@functools.cache
def reference_step():
    """The same by plain attention outside any step: mean loss, parameters minus gradients, and the largest gradient."""
    params = jax.device_get(zjax.init_state(plan_of("partitioner", zjax.make_mesh(zjax.MeshConfig())), jax.random.key(0)).params)

    def mean(params):
        total, weight = model_with("plain").loss(params, batch(), jax.random.key(0))
        return total / weight

    loss, gradient = jax.jit(jax.value_and_grad(mean))(params)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    return float(loss), jax.tree.map(lambda p, g: p - np.asarray(g), params, gradient), largest


@pytest.mark.parametrize(
    ("mesh", "engine", "kernel"),
    [
        ("2x4", "partitioner", "chunked"),
        pytest.param("2x4", "explicit", "splash", marks=pytest.mark.full),
        pytest.param("4 tensor 2", "partitioner", "splash", marks=pytest.mark.full),
        pytest.param("4 tensor 2", "explicit", "chunked", marks=pytest.mark.full),
        ("4 tensor 2", "explicit", "splash"),  # a `shard_map` inside another
        pytest.param("2x4", "partitioner", "splash", marks=pytest.mark.full),
        pytest.param("2x4", "explicit", "chunked", marks=pytest.mark.full),
        pytest.param("4 tensor 2", "partitioner", "chunked", marks=pytest.mark.full),
    ],
)
def test_a_step_is_the_same_in_both_engines(splash_anywhere, mesh, engine, kernel):
    plan = plan_of(engine, zjax.make_mesh(zjax.MeshConfig(**MESHES[mesh])))
    assert plan.engine == engine
    step = zjax.make_train_step(plan, model_with(kernel, "full" if engine == "explicit" else "none").loss)
    state, metrics = step(zjax.init_state(plan, jax.random.key(0)), batch())
    loss, params, largest = reference_step()
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * largest)


# As compiled for hardware that is not here.


def audited_step(loss, engine, target, **degrees):
    plan = plan_of(engine, zjax.make_mesh(zjax.MeshConfig()), compute="bfloat16")
    shapes = {name: jax.ShapeDtypeStruct((8, 384), x.dtype) for name, x in batch().items()}
    return audit_recipe(plan.recipe, loss, shapes, target=target, mesh=zjax.MeshConfig(**degrees))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "degrees"), [("partitioner", {"tensor": 2}), ("explicit", {})], ids=str)
def test_a_tpu_runs_splash_attention(engine, degrees):
    audit = audited_step(model_with("auto").loss, engine, "tpu:v5e:2x4", **degrees)
    assert audit.timeline.unknown_kernels["tpu_custom_call"] == 3 * SIZES.n_layers  # forward, dq, dk and dv
    assert not kinds(audit) & {"kernel-replaced", "activations-gathered"}


def loss_with_cudnn(loss, params, batch, rng):
    """The version is all that jax asks of cuDNN before a GPU is there: the wheel of 700 MB can be left out."""
    with unittest.mock.patch("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000):
        return loss(params, batch, rng)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "degrees"), [("explicit", {"tensor": 2}), pytest.param("partitioner", {}, marks=pytest.mark.full)], ids=str
)
def test_a_gpu_runs_cudnn_attention(engine, degrees):
    loss = functools.partial(loss_with_cudnn, model_with("auto").loss)
    audit = audited_step(loss, engine, "gpu:h100:1x8", **degrees)
    calls = {name: count for name, count in audit.timeline.unknown_kernels.items() if "fmha" in name}
    assert calls == {"__cudnn$fmhaSoftmax": SIZES.n_layers, "__cudnn$fmhaSoftmaxBackward": SIZES.n_layers}
    assert not kinds(audit) & {"kernel-replaced"}


# What is chosen, and what cannot be.


def program(kernel, q, k, v):
    return str(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, kernel=kernel))(q, k, v))


@pytest.mark.parametrize(
    ("backend", "devices", "length", "dtype", "inside"),
    [
        ("tpu", 1, 384, jnp.bfloat16, "splash"),
        ("tpu", 1, 400, jnp.bfloat16, "while|scan"),
        ("tpu", 1, 384, jnp.float16, "while|scan"),
        ("tpu", 8, 384, jnp.bfloat16, "while|scan"),  # outside a step: XLA cannot partition the kernel
        ("gpu", 1, 384, jnp.bfloat16, "dot_product_attention_fwd"),
        ("gpu", 1, 384, jnp.float32, "while|scan"),
        ("gpu", 1, 385, jnp.bfloat16, "while|scan"),
        ("cpu", 1, 384, jnp.bfloat16, "while|scan"),
    ],
)
def test_auto_takes_the_library_kernel_where_it_can(monkeypatch, backend, devices, length, dtype, inside):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    text = program("auto", *arrays(length, dtype=dtype)[:3])
    assert any(each in text for each in inside.split("|"))
    assert ("splash" in text) == (inside == "splash") and ("dot_product_attention_fwd" in text) == (backend == "gpu" and "dot" in inside)


def test_auto_without_cudnn_is_chunked(monkeypatch):
    def missing():
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", missing)
    inputs = arrays(384, dtype=jnp.bfloat16)[:3]
    assert "scan" in program("auto", *inputs)
    with pytest.raises(ValueError, match=r"model\.attention='cudnn': cuDNN not found \(q \(2, 384, 4, 8\).*bfloat16\); use 'chunked'"):
        program("cudnn", *inputs)


@pytest.mark.parametrize(
    ("backend", "kernel", "changes", "message"),
    [
        ("cpu", "splash", {}, r"model\.attention='splash': runs on a tpu, and this is a cpu .*use 'chunked'"),
        ("tpu", "cudnn", {}, r"model\.attention='cudnn': runs on a gpu, and this is a tpu"),
        ("tpu", "splash", {"length": 100}, r"model\.attention='splash': needs a multiple of 128 positions \(q \(2, 100, 4, 8\)"),
        ("tpu", "splash", {"dtype": jnp.float16}, r"model\.attention='splash': needs bfloat16 or float32 .*float16"),
        ("tpu", "splash", {"width": 264}, r"model\.attention='splash': needs heads of at most 256"),
        ("gpu", "cudnn", {}, r"model\.attention='cudnn': Q must be fp16/bf16.*float32.*use 'chunked'"),
        ("gpu", "cudnn", {"dtype": jnp.bfloat16, "width": 4}, r"model\.attention='cudnn': The head dim must be .* multiple of 8"),
        ("cpu", "flash", {}, r"model\.attention='flash': must be one of 'auto', 'plain', 'chunked', 'splash', 'cudnn'"),
        ("cpu", "plain", {"kv_heads": 3}, r"attention: q \(2, 128, 4, 8\) needs k and v of shape"),
    ],
)
def test_a_kernel_that_cannot_be_honoured_raises(monkeypatch, backend, kernel, changes, message):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    with pytest.raises(ValueError, match=message):
        program(kernel, *arrays(**({"length": 128} | changes))[:3])


def test_rows_that_do_not_divide_over_the_data_axes_stay_whole(splash_anywhere):
    plan = plan_of("partitioner", zjax.make_mesh(zjax.MeshConfig(tensor=2)))
    inputs = arrays(128, rows=2)  # over 4 devices
    with plan_context(Tracing(plan)):
        assert_agree(computed("splash", *inputs), dense(*inputs))


def test_heads_that_do_not_divide_over_the_tensor_axis(splash_anywhere):
    plan = plan_of("partitioner", zjax.make_mesh(zjax.MeshConfig(tensor=4)))
    with pytest.raises(ValueError, match=r"model\.attention='splash': 2 key/value heads do not divide over mesh\.tensor=4"):
        zjax.make_train_step(plan, model_with("splash").loss).lower(batch())
    assert "splash" not in zjax.make_train_step(plan, model_with("auto").loss).lower(batch()).as_text()


def test_the_config_knows_the_kernels():
    with pytest.raises(zjax.ConfigError, match=r"model\.attention='flash': must be 'auto', 'plain', 'chunked', 'splash' or 'cudnn'"):
        ModelConfig(attention="flash")
    assert llama.from_config(ModelConfig()).attention == "auto"
    assert llama.from_config(ModelConfig(attention="chunked")).attention == "chunked"


def test_a_run_resumes_with_another_kernel_and_refuses_one_it_cannot_have(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt", 4000)
    for kernel in ("plain", "chunked"):
        assert len(run_quietly(small_config(corpus, steps=1, model={"attention": kernel}), tmp_path / "run").losses) == 1
    with pytest.raises(ValueError, match=r"model\.attention='splash': runs on a tpu"):
        run_quietly(small_config(corpus, model={"attention": "splash"}), tmp_path / "other")
    assert not (tmp_path / "other").exists()
