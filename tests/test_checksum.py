"""Checksums: the same however an array is sharded or cut, another for any flipped bit, swap or transposition."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.checkpoint import checksum

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "int16", "bool", "float8_e4m3fn", "complex64"]


def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def drawn(shape, dtype="float32", seed=0):
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    return (bits[..., 0] % 2 == 1) if dtype == "bool" else bits.view(jnp.dtype(dtype))[..., 0]


def of(x):
    return checksum.checksums({"x": jnp.asarray(x)})["x"]


def by_hand(x):
    """The module's text, in numpy: the sums of mix(word ^ key)."""
    words = {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    words, found = x.view(words).astype(np.uint64), []
    for constant, first, second in checksum.LANES:
        total = 0
        for index in np.ndindex(*x.shape):
            key = sum((i + 1) * pow(constant, 2 * dim + 1, 2**32) for dim, i in enumerate(index))
            h = int(words[index]) ^ (key % 2**32)
            h = (h ^ (h >> 16)) * first % 2**32
            h = (h ^ (h >> 13)) * second % 2**32
            total += h ^ (h >> 16)
        found.append(total % 2**32)
    return f"{found[0]:08x}{found[1]:08x}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_it_is_what_the_text_says(shape, dtype):
    x = drawn(shape, dtype)
    assert of(x) == by_hand(x)


def test_it_stays_what_it_is():
    """A checkpoint of years ago must verify."""
    assert of(np.arange(12, dtype=np.float32).reshape(3, 4)) == by_hand(np.arange(12, dtype=np.float32).reshape(3, 4)) == "a43cc6077d9a71a8"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_sharding_changes_it(dtype):
    x = drawn((8, 16, 4), dtype)
    with np.errstate(all="ignore"):
        expected = of(x)
    for spec in [P(), P("a"), P("b", "a"), P(None, ("a", "b")), P("a", None, "b"), P(("b", "a"), None, None)]:
        assert of(jax.device_put(x, NamedSharding(mesh(), spec))) == expected, spec


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up(dtype):
    x = drawn((5, 7, 6), dtype)
    first = second = 0
    for rows, columns in itertools.product([(0, 2), (2, 5)], [(0, 3), (3, 4), (4, 7)]):
        more = checksum.sums_of_piece(x[slice(*rows), slice(*columns)], (rows[0], columns[0], 0))
        first, second = first + more[0], second + more[1]
    assert checksum.text(first, second) == of(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("value", ["drawn", "zeros"])
def test_every_single_bit_counts(dtype, value):
    x = drawn((4, 6), dtype) if value == "drawn" else np.zeros((4, 6), jnp.dtype(dtype))
    copies = []
    for bit in range(8 * x.nbytes):
        data = bytearray(x.tobytes())
        data[bit // 8] ^= 1 << bit % 8
        copies.append(np.frombuffer(bytes(data), x.dtype).reshape(x.shape))
    sums = np.asarray(jax.vmap(lambda x: jnp.stack(checksum._sums(x, np.zeros(2, np.uint32))))(jnp.asarray(np.stack(copies))))
    expected = [int(of(x)[:8], 16), int(of(x)[8:], 16)]
    assert (sums != expected).all()  # either sum by itself


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(6)), st.sampled_from([0, 1, 2]), st.booleans())
def test_an_order_counts(order, axis, negated):
    """Also of numbers that differ in one bit only, the sign's."""
    x = np.arange(6**3, dtype=np.float32).reshape(6, 6, 6)
    if negated:
        x = np.where(x % 2 == 0, np.float32(1.5), np.float32(-1.5))
    other = np.take(x, order, axis)
    assert (of(other) == of(x)) == np.array_equal(other, x)


def test_the_shape_counts():
    x = np.arange(24, dtype=np.float32)
    sums = {of(x.reshape(shape)) for shape in [(24,), (4, 6), (6, 4), (2, 12), (2, 3, 4)]} | {of(x.reshape(4, 6).T)}
    assert len(sums) == 6


def test_special_values_and_scalars():
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40], np.float32)
    assert len({of(value) for value in values}) == len({value.tobytes() for value in values})
    assert len({of(np.int32(value)) for value in range(100)}) == 100
    assert of(jnp.zeros(3, ml_dtypes.int4)) == of(np.zeros(3, np.int8))
