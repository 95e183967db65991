"""Llama in flax.nnx: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, a scan over stacked layers.

Shape suffixes: B rows, T positions, D model width, F MLP width, V vocabulary, N query heads, K key/value heads,
H head width. Weights are [in, out] and applied as x @ w. The model makes no sharding decision beyond its unit marks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zjax.config import ModelConfig
from zjax.fields import ConfigError
from zjax.layers import scan_layers
from zjax.models.attention import attention
from zjax.remat import RematPolicy, offload_names, require_named, save_names
from zjax.units import fully_shard

UNITS = ("embed", "layers[*]", "head")
"""What is gathered together: the embedding, each block, the head (with the final norm)."""

EMBEDDINGS = ("embed", "head")
"""Matrices from and to the vocabulary, which muon leaves to adamw."""

TENSOR_DIMS = {
    "layers/wq": 2, "layers/wk": 2, "layers/wv": 2, "layers/wo": 1,
    "layers/w_gate": 2, "layers/w_up": 2, "layers/w_down": 1,
    "embed/table": 1, "head/kernel": 1,
}  # fmt: skip
"""The dim a `tensor` mesh axis shards (Megatron: columns of what fans out, rows of what comes together)."""

NAMES = ("block_input", "query", "key", "value", "attention", "attention_out", "mlp_gate", "mlp_up")
"""The values of a block that a remat policy may save by name, in the order in which they are computed. `block_input` is
saved in any case: it is named to be offloaded. Queries and keys are rotated; `attention` is the kernel's output (that of
cuDNN does not spare the backward the kernel's forward), `attention_out` its projection."""
DEFAULT_NAMES = {"names": ("attention", "attention_out"), "offload": ("block_input",)}
"""What is saved by name where a config names nothing."""


def tensor_dims(config: LlamaConfig) -> dict[str, int]:
    """`TENSOR_DIMS` without the head's kernel where the embedding serves as head."""
    return {name: dim for name, dim in TENSOR_DIMS.items() if not (config.tied and name == "head/kernel")}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_sequence: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    attention: str = "auto"
    """The kernel, as in `zjax.models.attention`; it changes no parameter."""

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ConfigError(f"model.d_model={self.d_model}: must be an even number of times model.n_heads={self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"model.n_heads={self.n_heads}: must be a multiple of model.n_kv_heads={self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads


PRESETS = {
    "tiny": LlamaConfig(vocab_size=256, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=688, max_sequence=512),
    # Touvron et al. 2023 (Llama 2), table 1 and the released params.json.
    "llama2_7b": LlamaConfig(
        vocab_size=32000, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, d_ff=11008, max_sequence=4096
    ),
    # Dubey et al. 2024 (The Llama 3 Herd of Models), table 3 and the released params.json.
    "llama3_8b": LlamaConfig(
        vocab_size=128256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=14336, max_sequence=8192, rope_theta=500_000.0
    ),
    "llama3_70b": LlamaConfig(
        vocab_size=128256, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, d_ff=28672, max_sequence=8192, rope_theta=500_000.0
    ),
    "llama3_405b": LlamaConfig(
        vocab_size=128256, d_model=16384, n_layers=126, n_heads=128, n_kv_heads=8, d_ff=53248, max_sequence=8192, rope_theta=500_000.0
    ),
}  # fmt: skip


def from_config(config: ModelConfig) -> LlamaConfig:
    """The preset's sizes, with those the config sets; ConfigError for an unknown preset or sizes that do not fit."""
    if config.preset not in PRESETS:
        raise ConfigError(f"model.preset={config.preset!r}: known: {', '.join(PRESETS)}")
    sizes = {name: value for name, value in dataclasses.asdict(config).items() if name not in ("preset", "parameters")}
    return dataclasses.replace(PRESETS[config.preset], **{name: value for name, value in sizes.items() if value is not None})


def remat_of(remat: str, names: tuple[str, ...]) -> str | RematPolicy:
    """The `remat` argument of `scan_layers` for a config's `remat` and `remat_names`; ConfigError for a name no block has."""
    if remat not in DEFAULT_NAMES:
        return remat
    make = save_names if remat == "names" else offload_names
    policy = make(*(names or DEFAULT_NAMES[remat]))
    try:
        require_named(policy, NAMES, "remat_names")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return policy


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """RMSNorm; the statistics are taken in float32."""
    h = x_BTD.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + eps)
    return (h.astype(x_BTD.dtype) * scale_D).astype(x_BTD.dtype)  # a scale kept in float32 does not widen the stream


def rotary_table(config: LlamaConfig, length: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position x frequency, float32 [length, head_dim / 2]; positions from 0."""
    frequency = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding on half-split pairs (Hugging Face's layout), in float32."""
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


class Embedding(nnx.Module):
    """Token embedding."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.table = nnx.Param(_normal(rngs, (config.vocab_size, config.d_model)))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """The rows of the table, [B, T, D]."""
        return self.table[...][tokens_BT]


class Block(nnx.Module):
    """One transformer block."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, f, kv = config.d_model, config.d_ff, config.n_kv_heads * config.head_dim
        self.attn_norm = nnx.Param(jnp.ones(d))
        self.wq = nnx.Param(_normal(rngs, (d, d)))
        self.wk = nnx.Param(_normal(rngs, (d, kv)))
        self.wv = nnx.Param(_normal(rngs, (d, kv)))
        self.wo = nnx.Param(_normal(rngs, (d, d), config.n_layers))
        self.mlp_norm = nnx.Param(jnp.ones(d))
        self.w_gate = nnx.Param(_normal(rngs, (d, f)))
        self.w_up = nnx.Param(_normal(rngs, (d, f)))
        self.w_down = nnx.Param(_normal(rngs, (f, d), config.n_layers))

    def __call__(self, x_BTD: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Attention, then the MLP, each on its normalised input and added to the residual stream."""
        x_BTD = checkpoint_name(x_BTD, "block_input")
        x_BTD = x_BTD + self.attention(rms_norm(x_BTD, self.attn_norm[...], self.config.norm_eps), rotary)
        h_BTD = rms_norm(x_BTD, self.mlp_norm[...], self.config.norm_eps)
        gate_BTF, up_BTF = checkpoint_name(h_BTD @ self.w_gate[...], "mlp_gate"), checkpoint_name(h_BTD @ self.w_up[...], "mlp_up")
        return x_BTD + (jax.nn.silu(gate_BTF) * up_BTF) @ self.w_down[...]

    def attention(self, h_BTD: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Causal grouped-query attention; query head i reads key/value head i // (N / K)."""
        rows, length, _ = h_BTD.shape
        heads = lambda w: (h_BTD @ w[...]).reshape(rows, length, -1, self.config.head_dim)  # noqa: E731
        q_BTNH = checkpoint_name(rotate(heads(self.wq), *rotary), "query")
        k_BTKH, v_BTKH = checkpoint_name(rotate(heads(self.wk), *rotary), "key"), checkpoint_name(heads(self.wv), "value")
        o_BTNH = attention(q_BTNH, k_BTKH, v_BTKH, kernel=self.config.attention)  # named "attention" there
        return checkpoint_name(o_BTNH.reshape(rows, length, -1) @ self.wo[...], "attention_out")


class Head(nnx.Module):
    """Final norm and the projection to logits; without a kernel where it is tied to the embedding."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.norm = nnx.Param(jnp.ones(config.d_model))
        self.kernel = None if config.tied else nnx.Param(_normal(rngs, (config.d_model, config.vocab_size)))

    def __call__(self, x_BTD: jax.Array, table_VD: jax.Array | None) -> jax.Array:
        """Logits, [B, T, V] in the compute dtype."""
        kernel_DV = table_VD.T if self.kernel is None else self.kernel[...]  # type: ignore[union-attr]
        return rms_norm(x_BTD, self.norm[...], self.config.norm_eps) @ kernel_DV


class Llama(nnx.Module):
    """The decoder; `layers` holds every block's weights stacked along dim 0."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: Block(config, rngs=rngs))(rngs.split(config.n_layers))
        self.head = Head(config, rngs=rngs)


@dataclass(frozen=True)
class LlamaFunctions:
    """A Llama as functions on a params pytree, with its units marked; hashable and picklable."""

    config: LlamaConfig
    remat: str | RematPolicy = "none"
    """Of each block, as in `scan_layers`."""
    remat_every: int = 1
    """As `scan_layers` has `every`."""

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters in float32: matrices normal with deviation 0.02 (0.02 / sqrt(2 L) into the stream), norms 1."""
        return nnx.to_pure_dict(nnx.state(Llama(self.config, rngs=nnx.Rngs(params=key)), nnx.Param))

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of forward and backward for one token in a sequence of `length`, by the model's own sizes.

        6 N + 12 L H Q T (PaLM, Chowdhery et al. 2022, appendix B): N parameters that are multiplied (all but an embedding
        table that is only read), L layers, H heads of width Q, T = `length`. As there, the masked half of the scores
        counts, and what remat computes again does not.
        """
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        multiplied = shapes if self.config.tied else {name: part for name, part in shapes.items() if name != "embed"}
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(multiplied))
        return 6 * count + 12 * self.config.n_layers * self.config.n_heads * self.config.head_dim * length

    def functions(self) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array], Callable[..., jax.Array]]:
        """Embedding, block and head, unmarked, as functions of their parameters: see the modules' `__call__`."""
        abstract = nnx.eval_shape(lambda: Llama(self.config, rngs=nnx.Rngs(0)))
        embed, block, head = (_function_of(module) for module in (abstract.embed, abstract.layers, abstract.head))
        return embed, block, head

    def logits(self, params: dict[str, Any], tokens_BT: jax.Array) -> jax.Array:
        """Next-token logits, [B, T, V] in the compute dtype; ValueError for sequences beyond the rotary table."""
        length = tokens_BT.shape[1]
        if length > self.config.max_sequence:
            raise ValueError(f"sequence of {length} tokens is longer than the rotary table: model.max_sequence={self.config.max_sequence}")
        embed, block, head = self.functions()
        x_BTD = fully_shard(embed, at="embed")(params["embed"], tokens_BT)
        rotary = rotary_table(self.config, length)
        x_BTD = scan_layers(block, params["layers"], x_BTD, rotary, at="layers", remat=self.remat, every=self.remat_every)
        if not self.config.tied:
            return fully_shard(head, at="head")(params["head"], x_BTD, None)
        tied = {"embed": params["embed"], "head": params["head"]}
        return fully_shard(lambda p, x: head(p["head"], x, p["embed"]["table"]), at="")(tied, x_BTD)

    def loss(self, params: dict[str, Any], batch: dict[str, jax.Array], rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Summed cross-entropy (nats) of `targets` where `mask` is 1, and the number of such tokens."""
        del rng  # no dropout
        logits_BTV = self.logits(params, batch["inputs"]).astype(jnp.float32)
        log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        # A comparison fuses with the sums; the gradient of an indexed read would be a scatter into logits of its own.
        is_target_BTV = batch["targets"][..., None] == jnp.arange(logits_BTV.shape[-1])
        nll_BT = log_z_BT - jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), axis=-1)
        return jnp.sum(nll_BT * batch["mask"]), jnp.sum(batch["mask"])


def _function_of(module: nnx.Module) -> Any:
    graphdef = nnx.graphdef(module)
    return lambda params, *args: nnx.merge(graphdef, params)(*args)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], residual_layers: int = 0) -> jax.Array:
    deviation = 0.02 / (2 * residual_layers) ** 0.5 if residual_layers else 0.02
    return deviation * jax.random.normal(rngs.params(), shape)
