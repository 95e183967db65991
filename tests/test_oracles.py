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
from zjax.models.llama import UNITS, LlamaConfig, LlamaFunctions

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
ENGINES = ("partitioner", "explicit")
FULL = list(itertools.product(MESHES, MODES, (1, 4), ("none", "full"), ENGINES))


def covers_pairs(mesh, mode, k, remat, engine):
    """Every pair of (mesh, mode), and every mesh and every mode with both k, both remat and both engines, in 20 runs.

    With remat `full` the layer loop is `scan_layers` with its own derivative rule, gathering a layer ahead.
    """
    i, j = list(MESHES).index(mesh), list(MODES).index(mode)
    return (k, remat, engine) == ((1, 4)[(i + j) % 2], ("none", "full")[(i + j // 2) % 2], ENGINES[(i // 2 + j) % 2])


CASES = [pytest.param(*case, marks=[] if covers_pairs(*case) else pytest.mark.full) for case in FULL]


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


def run(mesh, mode, k, remat="none", engine="auto", *, masked=False, compute="float32"):
    """20 steps; returns losses, pre-clip norms and final parameters."""
    (replica, fsdp), (stage, reshard) = MESHES[mesh], MODES[mode]
    plan = zjax.build_plan(
        zjax.ZeroConfig(stage=stage, reshard_after_forward=reshard, engine=engine),
        lambda key: jax.tree.map(jnp.asarray, params_from("init")),
        optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
        zjax.make_mesh(zjax.MeshConfig(replica=replica, fsdp=fsdp), jax.devices()[: replica * fsdp]),
        precision=zjax.PrecisionConfig(compute=compute),
        accumulation=zjax.AccumulationConfig(micro_batches=k),
        units=UNITS,
    )
    step = zjax.make_train_step(plan, LlamaFunctions(CONFIG, remat).loss, clip=1.0)
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
@pytest.mark.parametrize(("mesh", "mode", "k", "remat", "engine"), CASES)
def test_losses_norms_and_weights_are_those_of_torch_and_deepspeed(mesh, mode, k, remat, engine):
    losses, norms, params = run(mesh, mode, k, remat, engine)
    for peer in FP32_PEERS:
        np.testing.assert_allclose(losses, oracle()[f"loss/{peer}"], rtol=1e-5, err_msg=peer)
        np.testing.assert_allclose(norms, oracle()[f"grad_norm/{peer}"], rtol=1e-5, err_msg=peer)
    assert relative_l2(params, params_from("final")) < 1e-5


@pytest.mark.parametrize(
    ("mesh", "mode", "k", "engine"),
    [
        ("2x4", "3", 4, "partitioner"),
        ("8", "3-keep", 1, "explicit"),
        ("4x2", "2", 4, "explicit"),
        ("8", "1", 4, "partitioner"),
        ("2x4", "0", 1, "explicit"),
    ],
)
def test_uneven_masks_weigh_every_token_the_same(mesh, mode, k, engine):
    losses, norms, _ = run(mesh, mode, k, engine=engine, masked=True)
    for peer in VARLEN_PEERS:
        np.testing.assert_allclose(losses, oracle()[f"loss/{peer}"], rtol=1e-5, err_msg=peer)
        np.testing.assert_allclose(norms, oracle()[f"grad_norm/{peer}"], rtol=1e-5, err_msg=peer)
    # The oracle can tell: means of micro-batch means are far off.
    for wrong in ("varlen_wrong_4_means_fp64", "varlen_wrong_16_means_fp64"):
        assert np.max(np.abs(losses / oracle()[f"loss/{wrong}"] - 1)) > 0.1


@pytest.mark.parametrize(("mesh", "mode", "k", "engine"), [("2x4", "3", 1, "partitioner"), ("8", "2", 4, "explicit")])
def test_bf16_compute_with_fp32_master_follows_the_loss_curve(mesh, mode, k, engine):
    losses, _, _ = run(mesh, mode, k, engine=engine, compute="bfloat16")
    np.testing.assert_allclose(losses, oracle()["loss/reference_fp64"], rtol=1e-3)


def test_first_logits_are_those_of_torch():
    params = jax.tree.map(jnp.asarray, params_from("init"))
    logits = LlamaFunctions(CONFIG).logits(params, oracle()["tokens"][0, :2, :-1].astype(np.int32))
    np.testing.assert_allclose(logits, oracle()["logits0"], atol=2e-6)
