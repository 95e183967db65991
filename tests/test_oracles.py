"""Trajectories of plain PyTorch, FSDP2, HSDP and DeepSpeed ZeRO (tests/data/make_oracle.py), step by step."""

import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from zjax.models.llama import UNITS, LlamaConfig, LlamaFunctions, rotary_table

CONFIG = LlamaConfig(vocab_size=256, d_model=64, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=176, max_sequence=32)
FP32_PEERS = (
    *("reference_fp64", "single_fp32", "fsdp2_w4", "fsdp2_w4_gas4", "hsdp_2x2"),
    *(f"ds{stage}_w4_gas{k}" for stage in (1, 2, 3) for k in (1, 4)),
    "ds3_w2_gas4",
)
VARLEN_PEERS = ("varlen_reference_fp64", "varlen_fsdp2_w4_gas4", "varlen_ds2_w4_gas4", "varlen_ds3_w4_gas4")
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")

MESHES = {"1": (1, 1), "8": (1, 8), "2x4": (2, 4), "4x2": (4, 2)}
MODES = {"0": (0, True), "1": (1, True), "2": (2, True), "3": (3, True), "3-keep": (3, False)}
ACCUMULATION = {"1": (1, "sharded"), "4": (4, "sharded"), "4-local": (4, "local")}
LOOPS = ("python", "plain", "prefetch0", "prefetch1")
"""A Python loop over marked blocks; `scan_layers` without remat, with remat, and with its own derivative rule, a layer ahead."""
ENGINES = ("partitioner", "explicit")
FULL = [
    (list(MESHES)[index % 4], mode, accumulation, loop, engine)
    for index, (mode, accumulation, loop, engine) in enumerate(itertools.product(MODES, ACCUMULATION, LOOPS, ENGINES))
    if accumulation != "4-local" or (mode in ("2", "3", "3-keep") and engine == "explicit")
]


def covering(cases):
    """Cases, the ones that add most first, in which every pair of values of two columns occurs that occurs at all."""
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


COVERING = covering(FULL)
CASES = [pytest.param(*case, marks=[] if case in COVERING else pytest.mark.full) for case in FULL]


@functools.cache
def oracle():
    return dict(np.load(Path(__file__).parent / "data" / "oracle_a.npz"))


def params_from(prefix):
    """The oracle's [out, in] weights as zjax's [in, out] ones, layers stacked."""
    data = oracle()

    def stacked(name):
        layers = np.stack([data[f"{prefix}/layers.{i}.{name}"] for i in range(CONFIG.n_layers)])
        return layers.swapaxes(1, 2) if name in MATRICES else layers

    return {
        "embed": {"table": data[f"{prefix}/embed"]},
        "layers": {name: stacked(name) for name in (*MATRICES, "attn_norm", "mlp_norm")},
        "head": {"norm": data[f"{prefix}/final_norm"], "kernel": data[f"{prefix}/head"].T},
    }


def batch_at(step, masked, rows):
    """The step's 16 rows, and rows of no weight up to `rows`, for more devices x micro-batches than there are rows."""
    tokens = oracle()["tokens"][step].astype(np.int32)
    mask = oracle()["mask"][step].astype(np.float32) if masked else np.ones((16, 32), np.float32)
    pad = ((0, rows - 16), (0, 0))
    return {"inputs": np.pad(tokens[:, :-1], pad), "targets": np.pad(tokens[:, 1:], pad), "mask": np.pad(mask, pad)}


def python_loop(params, batch, rng):
    """`LlamaFunctions(CONFIG, "full").loss` without `scan_layers`: one marked block after the other."""
    embed, block, head = LlamaFunctions(CONFIG).functions()
    x = zjax.fully_shard(embed, at="embed")(params["embed"], batch["inputs"])
    layer, rotary = zjax.fully_shard(block, at="layers", remat="full"), rotary_table(CONFIG, 32)
    for i in range(CONFIG.n_layers):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), x, rotary)
    logits = zjax.fully_shard(head, at="head")(params["head"], x, None).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - picked) * batch["mask"]), jnp.sum(batch["mask"])


def run(mesh, mode, accumulation="1", loop="plain", engine="auto", *, masked=False, compute="float32"):
    """20 steps; returns losses, pre-clip norms and final parameters."""
    (replica, fsdp), (stage, reshard), (k, local) = MESHES[mesh], MODES[mode], ACCUMULATION[accumulation]
    plan = zjax.build_plan(
        zjax.ZeroConfig(stage=stage, reshard_after_forward=reshard, engine=engine, prefetch=int(loop == "prefetch1")),
        lambda key: jax.tree.map(jnp.asarray, params_from("init")),
        optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
        zjax.make_mesh(zjax.MeshConfig(replica=replica, fsdp=fsdp), jax.devices()[: replica * fsdp]),
        precision=zjax.PrecisionConfig(compute=compute),
        accumulation=zjax.AccumulationConfig(micro_batches=k, mode=local),
        units=UNITS,
    )
    loss_fn = python_loop if loop == "python" else LlamaFunctions(CONFIG, "none" if loop == "plain" else "full").loss
    step = zjax.make_train_step(plan, loss_fn, clip=1.0)
    state, rows = zjax.init_state(plan, jax.random.key(0)), max(16, plan.data_degree * k)
    history = []
    for index in range(20):
        state, metrics = step(state, batch_at(index, masked, rows))
        history.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.array(history).T
    return losses, norms, jax.device_get(state.params)


def relative_l2(params, reference):
    flat = [np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (params, reference)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


@pytest.mark.filterwarnings("ignore:zjax|zero.stage")
@pytest.mark.parametrize(("mesh", "mode", "accumulation", "loop", "engine"), CASES)
def test_losses_norms_and_weights_are_those_of_torch_and_deepspeed(mesh, mode, accumulation, loop, engine):
    losses, norms, params = run(mesh, mode, accumulation, loop, engine)
    for peer in FP32_PEERS:
        np.testing.assert_allclose(losses, oracle()[f"loss/{peer}"], rtol=1e-5, err_msg=peer)
        np.testing.assert_allclose(norms, oracle()[f"grad_norm/{peer}"], rtol=1e-5, err_msg=peer)
    assert relative_l2(params, params_from("final")) < 1e-5


@pytest.mark.parametrize(
    ("mesh", "mode", "accumulation", "engine"),
    [
        ("2x4", "3", "4", "partitioner"),
        ("8", "3-keep", "1", "explicit"),
        ("4x2", "2", "4-local", "explicit"),
        ("8", "1", "4", "partitioner"),
        ("2x4", "0", "1", "explicit"),
    ],
)
def test_uneven_masks_weigh_every_token_the_same(mesh, mode, accumulation, engine):
    losses, norms, _ = run(mesh, mode, accumulation, engine=engine, masked=True)
    for peer in VARLEN_PEERS:
        np.testing.assert_allclose(losses, oracle()[f"loss/{peer}"], rtol=1e-5, err_msg=peer)
        np.testing.assert_allclose(norms, oracle()[f"grad_norm/{peer}"], rtol=1e-5, err_msg=peer)
    # The oracle can tell: means of micro-batch means are far off.
    for wrong in ("varlen_wrong_4_means_fp64", "varlen_wrong_16_means_fp64"):
        assert np.max(np.abs(losses / oracle()[f"loss/{wrong}"] - 1)) > 0.1


@pytest.mark.parametrize(("mesh", "mode", "accumulation", "engine"), [("2x4", "3", "1", "partitioner"), ("8", "2", "4", "explicit")])
def test_bf16_compute_with_fp32_master_follows_the_loss_curve(mesh, mode, accumulation, engine):
    losses, _, _ = run(mesh, mode, accumulation, engine=engine, compute="bfloat16")
    np.testing.assert_allclose(losses, oracle()["loss/reference_fp64"], rtol=1e-3)


def test_first_logits_are_those_of_torch():
    params = jax.tree.map(jnp.asarray, params_from("init"))
    logits = LlamaFunctions(CONFIG).logits(params, oracle()["tokens"][0, :2, :-1].astype(np.int32))
    np.testing.assert_allclose(logits, oracle()["logits0"], atol=2e-6)
