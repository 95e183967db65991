"""Text from a trained model, by plain sampling: for a look at what was learned, not for serving."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def sample_tokens(
    logits_fn: Callable[[Any, jax.Array], jax.Array], params: Any, prompt: list[int], count: int, seed: int, *, window: int, temperature: float = 0.8
) -> list[int]:  # fmt: skip
    """`count` tokens drawn after `prompt`, the model seeing at most the last `window` tokens.

    The whole window is computed anew for every token: one compiled program, no cache. `params` may be sharded, also
    over several processes, which must all call this.
    """
    context = (prompt or [0])[-window:]
    # numpy, not jax, so that with several processes every one of them passes the same whole value.
    tokens_1T = np.zeros((1, window), np.int32)
    tokens_1T[0, : len(context)] = context
    replicated = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, P())
    draw = jax.jit(functools.partial(_draw, logits_fn, count, temperature), out_shardings=replicated)
    return np.asarray(draw(params, tokens_1T, np.int32(len(context)), np.uint32(seed))).tolist()


def _draw(
    logits_fn: Any, count: int, temperature: float, params: Any, tokens_1T: jax.Array, length: jax.Array, seed: jax.Array
) -> jax.Array:
    window = tokens_1T.shape[1]

    def one(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        tokens_1T, length = carry
        logits_V = logits_fn(params, tokens_1T)[0, length - 1].astype(jnp.float32)
        token = jax.random.categorical(key, logits_V / temperature).astype(jnp.int32)
        # A full window slides by one, so that the newest token always has a place.
        full = length == window
        tokens_1T = jnp.where(full, jnp.roll(tokens_1T, -1, axis=1), tokens_1T)
        place = jnp.where(full, window - 1, length)
        return (tokens_1T.at[0, place].set(token), jnp.where(full, length, length + 1)), token

    return jax.lax.scan(one, (tokens_1T, length), jax.random.split(jax.random.key(seed), count))[1]
