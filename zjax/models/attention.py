"""Causal attention by the kernel that suits the device: splash attention on a TPU, cuDNN's on a GPU, XLA's elsewhere.

Written plainly, attention holds the T x T scores of every head, forward and backward: the largest arrays of a step. The
library kernels hold a tile of them; the chunked form holds those of a block of queries.

Shape suffixes: B rows, T positions, N query heads, K key/value heads, G = N / K query heads of one of them, H head width,
L blocks of queries, C positions of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec as P

from zjax.mesh import data_axes, degree, physical_axes
from zjax.units import current_plan

Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

QUERIES = 256
"""Queries of a block of the chunked form, at most."""
SPLASH_BLOCKS = (512, 384, 256, 128)
"""Tile sizes of splash attention, best first: multiples of a TPU's 128 lanes. The first that divides T is taken."""
SPLASH_WIDEST_HEAD = 256
"""Tiles of 512 wide float32 heads do not fit the vector memory of a v4."""
NAME = "attention"
"""Name (`checkpoint_name`) of what attention leaves for its backward beside its inputs: its output, and splash's normaliser."""
BACKENDS = {"splash": "tpu", "cudnn": "gpu"}
"""What each library kernel runs on, as `jax.default_backend()` names it."""


def attention(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, kernel: str = "auto") -> jax.Array:
    """Causal grouped-query attention, softmax(q k^T / sqrt(H)) v; query head i reads key/value head i // (N / K).

    Args:
      q_BTNH: queries, of any float dtype.
      k_BTKH: keys, of the same dtype, rows, positions and head width; K divides N.
      v_BTKH: values, as the keys.
      kernel: `plain` (XLA, scores of all queries at once), `chunked` (XLA, a block of queries at a time), `splash`
        (Pallas, TPU: bf16 and float32, T a multiple of 128, H up to 256), `cudnn` (GPU: bf16 and fp16, T even, H a
        multiple of 8 up to 128), or `auto`: the backend's library kernel where it can compute these arrays, else `chunked`.

    Returns:
      Array [B, T, N, H] of q's dtype; the softmax is taken in float32.

    Raises:
      ValueError: arrays that do not fit each other, an unknown kernel, or one chosen by hand that cannot compute them.
    """
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"model.attention={kernel!r}: must be one of 'auto', {', '.join(map(repr, KERNELS))}")
    rows, length, heads, width = q_BTNH.shape
    if k_BTKH.shape != v_BTKH.shape or k_BTKH.shape != (rows, length, k_BTKH.shape[2], width) or heads % k_BTKH.shape[2]:
        raise ValueError(
            f"attention: q {q_BTNH.shape} needs k and v of shape ({rows}, {length}, a divisor of {heads}, {width}); "
            f"got {k_BTKH.shape} and {v_BTKH.shape}"
        )
    if kernel == "auto":
        kernel = _best(q_BTNH, k_BTKH)
    elif refusal := _refusal(kernel, q_BTNH, k_BTKH):
        raise ValueError(f"model.attention={kernel!r}: {refusal} (q {q_BTNH.shape}, k {k_BTKH.shape}, {q_BTNH.dtype}); use 'chunked'")
    run = KERNELS[kernel]
    o_BTNH = _per_device(run, q_BTNH, k_BTKH, v_BTKH) if kernel in BACKENDS else run(q_BTNH, k_BTKH, v_BTKH)
    return o_BTNH if kernel == "splash" else checkpoint_name(o_BTNH, NAME)  # splash names its own


def _best(q_BTNH: jax.Array, k_BTKH: jax.Array) -> str:
    """The backend's library kernel if it can compute these arrays, else `chunked`."""
    library = next((kernel for kernel, backend in BACKENDS.items() if backend == jax.default_backend()), None)
    # Outside a step nothing says how arrays lie over devices, and XLA cannot partition a Pallas kernel.
    if library is None or (current_plan() is None and jax.device_count() > 1):
        return "chunked"
    return "chunked" if _refusal(library, q_BTNH, k_BTKH) else library


def _refusal(kernel: str, q_BTNH: jax.Array, k_BTKH: jax.Array) -> str | None:
    """Why the kernel cannot compute these arrays here, or None."""
    if kernel not in BACKENDS:
        return None
    if jax.default_backend() != BACKENDS[kernel]:
        return f"runs on a {BACKENDS[kernel]}, and this is a {jax.default_backend()}"
    plan = current_plan()
    tensor = degree(plan.mesh, physical_axes(plan.mesh, "tensor")) if plan else 1
    if k_BTKH.shape[2] % tensor:
        return f"{k_BTKH.shape[2]} key/value heads do not divide over mesh.tensor={tensor}"
    return _splash_refusal(q_BTNH) if kernel == "splash" else _cudnn_refusal(q_BTNH, k_BTKH)


def _per_device(run: Kernel, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    """`run` on what each device has: rows over the data axes, heads over `tensor`; XLA cannot partition a kernel.

    Rows that do not divide over the data axes stay whole, and every device computes them all. The explicit engine has
    left at most `tensor` to XLA.
    """
    plan = current_plan()
    heads = physical_axes(plan.mesh, "tensor") if plan else ()
    if plan is None or (plan.engine == "explicit" and not heads):
        return run(q_BTNH, k_BTKH, v_BTKH)
    rows = data_axes(plan.mesh) if plan.engine == "partitioner" and q_BTNH.shape[0] % plan.data_degree == 0 else ()
    spec = P(rows or None, None, heads or None, None)
    return jax.shard_map(
        run,
        mesh=plan.mesh if plan.engine == "partitioner" else None,  # None: the mesh of the `shard_map` around, partly manual
        in_specs=spec,
        out_specs=spec,
        axis_names=frozenset(plan.mesh.axis_names if plan.engine == "partitioner" else heads),
        check_vma=False,
    )(q_BTNH, k_BTKH, v_BTKH)


def _plain(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    dtype = q_BTNH.dtype
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        # XLA's CPU has no product of float16 that adds up in float32.
        q_BTNH, k_BTKH, v_BTKH = (x.astype(jnp.float32) for x in (q_BTNH, k_BTKH, v_BTKH))
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True).astype(dtype)


def _chunked(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    """A loop over blocks of queries, each against all keys; the backward computes each block's scores again."""
    return _plain(q_BTNH, k_BTKH, v_BTKH) if q_BTNH.shape[1] <= QUERIES else _blocks(q_BTNH, k_BTKH, v_BTKH)


@jax.custom_vjp
def _blocks(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    return _blocks_forward(q_BTNH, k_BTKH, v_BTKH)[0]


def _blocks_forward(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    groups = k_BTKH.shape[2]

    def block(first: jax.Array, q_BCKGH: jax.Array) -> jax.Array:
        return jnp.einsum("bkgct,btkh->bckgh", _weights(first, q_BCKGH, k_BTKH).astype(v_BTKH.dtype), v_BTKH)

    o_LBCKGH = jax.lax.map(lambda xs: block(*xs), _cut(groups, q_BTNH))
    return _joined(o_LBCKGH, q_BTNH.shape[1]), (q_BTNH, k_BTKH, v_BTKH)


def _blocks_backward(residuals: tuple[jax.Array, ...], g_BTNH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_BTNH, k_BTKH, v_BTKH = residuals
    float32 = _at_least_float32(k_BTKH.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=float32)

    def block(total: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        first, q_BCKGH, g_BCKGH = xs
        p_BKGCT = _weights(first, q_BCKGH, k_BTKH)
        dp_BKGCT = product("bckgh,btkh->bkgct", g_BCKGH, v_BTKH)
        ds_BKGCT = p_BKGCT * (dp_BKGCT - jnp.sum(p_BKGCT * dp_BKGCT, axis=-1, keepdims=True)) * q_BCKGH.shape[-1] ** -0.5
        p_BKGCT, ds_BKGCT = p_BKGCT.astype(v_BTKH.dtype), ds_BKGCT.astype(k_BTKH.dtype)
        dq_BCKGH = jnp.einsum("bkgct,btkh->bckgh", ds_BKGCT, k_BTKH)
        # As the products over the keys of one block, sums over blocks are taken in float32.
        dk_BTKH = total[0] + product("bkgct,bckgh->btkh", ds_BKGCT, q_BCKGH)
        dv_BTKH = total[1] + product("bkgct,bckgh->btkh", p_BKGCT, g_BCKGH)
        return (dk_BTKH, dv_BTKH), dq_BCKGH

    zeros = jnp.zeros(k_BTKH.shape, float32)
    (dk_BTKH, dv_BTKH), dq_LBCKGH = jax.lax.scan(block, (zeros, zeros), _cut(k_BTKH.shape[2], q_BTNH, g_BTNH))
    return _joined(dq_LBCKGH, q_BTNH.shape[1]), dk_BTKH.astype(k_BTKH.dtype), dv_BTKH.astype(v_BTKH.dtype)


_blocks.defvjp(_blocks_forward, _blocks_backward)


def _weights(first: jax.Array, q_BCKGH: jax.Array, k_BTKH: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(H)) in float32, [B, K, G, C, T], of the queries at positions `first`, `first` + 1, ..."""
    scores_BKGCT = jnp.einsum("bckgh,btkh->bkgct", q_BCKGH, k_BTKH, preferred_element_type=_at_least_float32(k_BTKH.dtype))
    seen_CT = first + jnp.arange(q_BCKGH.shape[1])[:, None] >= jnp.arange(k_BTKH.shape[1])
    return jax.nn.softmax(jnp.where(seen_CT, scores_BKGCT * q_BCKGH.shape[-1] ** -0.5, -jnp.inf), axis=-1)


def _at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _cut(groups: int, *arrays_BTNH: jax.Array) -> tuple[jax.Array, ...]:
    """The first position of each block, [L], and each array in blocks, [L, B, C, K, G, H].

    Zeros fill up the last block; what becomes of them is cut off again.
    """
    rows, length, heads, width = arrays_BTNH[0].shape
    blocks = math.ceil(length / QUERIES)
    size = math.ceil(length / blocks)  # nearly equal blocks: fewer than L zeros to fill up
    pad = ((0, 0), (0, blocks * size - length), (0, 0), (0, 0))
    shape = rows, blocks, size, groups, heads // groups, width
    return jnp.arange(blocks) * size, *(jnp.moveaxis(jnp.pad(x, pad).reshape(shape), 1, 0) for x in arrays_BTNH)


def _joined(x_LBCKGH: jax.Array, length: int) -> jax.Array:
    blocks, rows, size, groups, group, width = x_LBCKGH.shape
    return jnp.moveaxis(x_LBCKGH, 0, 1).reshape(rows, blocks * size, groups * group, width)[:, :length]


def _splash(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    """Splash attention, which reads grouped key/value heads as they are; its inputs have heads before positions."""
    _, length, heads, width = q_BTNH.shape
    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    # The fused backward would hold a partial dq for every block of keys.
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    run = splash_attention_kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, residual_checkpoint_name=NAME)
    heads_first = lambda x: x.swapaxes(1, 2)  # noqa: E731
    scaled_BTNH = (q_BTNH.astype(jnp.float32) * width**-0.5).astype(q_BTNH.dtype)  # the kernel has no scale of its own
    return heads_first(jax.vmap(run)(heads_first(scaled_BTNH), heads_first(k_BTKH), heads_first(v_BTKH)))


def _splash_refusal(q_BTNH: jax.Array) -> str | None:
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
        return "needs bfloat16 or float32"
    if q_BTNH.shape[1] % SPLASH_BLOCKS[-1]:
        return f"needs a multiple of {SPLASH_BLOCKS[-1]} positions"
    return f"needs heads of at most {SPLASH_WIDEST_HEAD}" if q_BTNH.shape[3] > SPLASH_WIDEST_HEAD else None


def _cudnn(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn")


def _cudnn_refusal(q_BTNH: jax.Array, k_BTKH: jax.Array) -> str | None:
    """What jax itself says: its rules go by the version of cuDNN and the GPU, and are stricter where gradients are taken."""
    q, k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BTNH, k_BTKH))
    try:
        jax.eval_shape(lambda q, k, v: jax.vjp(_cudnn, q, k, v)[0], q, k, k)
    except (RuntimeError, NotImplementedError, ValueError) as error:  # no cuDNN; shapes or a dtype that it does not take
        return str(error).rstrip(".")
    return None


KERNELS: dict[str, Kernel] = {"plain": _plain, "chunked": _chunked, "splash": _splash, "cudnn": _cudnn}
"""What `kernel` names, besides `auto`."""
