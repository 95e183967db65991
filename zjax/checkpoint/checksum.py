"""Checksums of arrays that do not depend on how the arrays are sharded.

The checksum of a leaf is two sums modulo 2**32, written as 16 hexadecimal digits, over its elements: of

    mix(bits of the element XOR key of its position)

with other constants in either sum. `bits` is the element's bit pattern as a 32-bit word (two words for 64-bit elements,
along one more dim). The key is the sum over the dims of (index + 1) times an odd constant of the dim. `mix` is a bijection
of 32-bit words (the finalizer of MurmurHash3). So:

- A sum has no order: devices, processes and readers of pieces add up what they hold, and nothing is gathered.
- Damage inside one word, a flipped bit above all, changes its term and therefore the sum: it is found with certainty.
- Damage of several words, swapped elements, another order of rows or dims is missed with a chance of about 2**-64.

It guards against accidents, not against someone who wants two arrays to have the same checksum.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LANES = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0x7FEB352D, 0x21F0AAAD, 0x735A2D97))
"""Of either sum: what the dims' constants begin with, and the multipliers of `mix`."""

Lanes = tuple[jax.Array, jax.Array]


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """The checksum of every array; waits for the devices. See `sums_on_devices`."""
    return as_text(list(arrays), sums_on_devices(arrays))


def sums_on_devices(arrays: Mapping[str, jax.Array]) -> jax.Array | None:
    """Both sums of every array, uint32 [arrays, 2], computed where the shards lie and the same on every device.

    Returns before it is computed, so that the arrays may be donated; None for no arrays. Every process must call it. The
    arrays have elements, and lie on one mesh.
    """
    if not arrays:
        return None
    first = next(iter(arrays.values())).sharding
    replicated = NamedSharding(first.mesh, P()) if isinstance(first, NamedSharding) else first
    return _jitted(replicated)(list(arrays.values()))


def as_text(names: Sequence[str], sums: Any) -> dict[str, str]:
    """The checksums by name, from uint32 [names, 2]."""
    return {name: text(int(first), int(second)) for name, (first, second) in zip(names, np.asarray(sums) if names else (), strict=True)}


def text(first: int, second: int) -> str:
    """16 hexadecimal digits of the two sums."""
    return f"{first % 2**32:08x}{second % 2**32:08x}"


def sums_of_piece(piece: np.ndarray, start: Sequence[int]) -> tuple[int, int]:
    """Both sums of a part of an array that begins at index `start`; those of the parts add up to those of the array."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        first, second = _jitted_piece(piece, np.asarray(start, np.uint32))
    return int(first), int(second)


@functools.lru_cache(maxsize=8)
def _jitted(replicated: Any) -> Any:
    def sums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.stack(_sums(x, np.zeros(x.ndim, np.uint32))) for x in arrays])

    return jax.jit(sums, out_shardings=replicated)


def _sums(x: jax.Array, start: Any) -> Lanes:
    words = _words(x)
    start = [start[dim] if dim < x.ndim else np.uint32(0) for dim in range(words.ndim)]
    if not words.ndim:
        words, start = words.reshape(1), [np.uint32(0)]
    mixed = tuple(_mix(words ^ _keys(words.shape, start, lane[0]), *lane[1:]) for lane in LANES)
    # One reduction of both: two would read the array twice on the CPU.
    zero = np.uint32(0)
    return lax.reduce(mixed, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(words.ndim)))


_jitted_piece = jax.jit(_sums)


def _words(x: jax.Array) -> jax.Array:
    """The bits of every element as uint32; elements of 64 bits become two, along a last dim."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype in (jnp.bool_, jnp.int4, jnp.uint4):
        return x.astype(jnp.uint32)
    if x.dtype.itemsize > 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)


def _keys(shape: Sequence[int], start: Sequence[Any], constant: int) -> jax.Array:
    keys = jnp.zeros((), jnp.uint32)
    for dim in range(len(shape)):
        # Odd: indices of a dim up to 2**32 have different keys. Powers of a constant have no small relation to each other.
        factor = np.uint32(pow(constant, 2 * dim + 1, 2**32))
        keys = keys + (lax.broadcasted_iota(jnp.uint32, tuple(shape), dim) + (start[dim] + np.uint32(1))) * factor
    return keys


def _mix(x: jax.Array, first: int, second: int) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(first)
    x = (x ^ (x >> 13)) * np.uint32(second)
    return x ^ (x >> 16)
