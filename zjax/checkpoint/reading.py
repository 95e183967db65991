"""Reading a checkpoint's arrays: whole ones into shards, or pieces of them on one CPU."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.checkpoint import checksum
from zjax.checkpoint.manifest import Manifest
from zjax.mesh import spec_axes
from zjax.tree import Shape

PIECE_BYTES = 64 * 2**20
"""What is read at once on one CPU, unless a stored chunk is larger."""

_FEW = ts.Context({"data_copy_concurrency": {"limit": 2}, "file_io_concurrency": {"limit": 4}})
"""Every thread keeps what it last had of memory; two decode as fast as one reads."""


def read_arrays(folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], concurrent_gb: int) -> dict[str, jax.Array]:
    """Arrays by path, each process reading the chunks of its own shards; raises what Orbax raises.

    Args:
      folder: of a step.
      wanted: shape and dtype as stored, and the sharding that the array shall have.
      concurrent_gb: how much may be in flight at once, in GB.
    """
    if not wanted:
        return {}
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=concurrent_gb)
    arguments = {path: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype) for path, x in wanted.items()}
    with quiet():
        return handler.restore(folder, args=ocp.args.PyTreeRestore(dict(wanted), restore_args=arguments, partial_restore=True))


def spread(sharding: NamedSharding, shape: Shape) -> NamedSharding:
    """The sharding split further over the mesh axes that hold replicas, as far as dims divide.

    Read so, a replicated array is read once by all processes together, and gathered over the network, not by each of them from
    the file system.
    """
    entries = [spec_axes(P(entry)) for entry in (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in entries]
    for axis, size in sharding.mesh.shape.items():
        free = [dim for dim, length in enumerate(shape) if length % (parts[dim] * size) == 0]
        if size > 1 and free and not any(axis in axes for axes in entries):
            dim = max(free, key=lambda dim: shape[dim] // parts[dim])
            entries[dim], parts[dim] = (*entries[dim], axis), parts[dim] * size
    return NamedSharding(sharding.mesh, P(*(axes or None for axes in entries)), memory_kind=sharding.memory_kind)


def open_leaf(folder: epath.Path, path: str) -> ts.TensorStore:
    """The stored array of a leaf; raises what TensorStore raises."""
    base = str(folder) if "://" in str(folder) else f"file://{folder}"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{path}/"}}
    return ts.open(spec, read=True, context=_FEW).result()


def pieces(store: ts.TensorStore, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The array part by part: (index of its first element, elements), every stored chunk read once."""
    for start, stop in blocks(store, piece_bytes):
        yield start, store[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].read().result()


def blocks(store: ts.TensorStore, piece_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First and last index (not included) of parts that are made of whole chunks and hold at most so many bytes, or one chunk."""
    shape, block = store.shape, [int(size or 1) for size in store.chunk_layout.read_chunk.shape or ()]  # None for a scalar
    for dim in reversed(range(len(shape))):
        rest = math.prod(block) // block[dim] * store.dtype.numpy_dtype.itemsize
        chunk = block[dim]
        block[dim] = min(shape[dim], max(1, piece_bytes // (rest * chunk)) * chunk)
    for start in itertools.product(*(range(0, size, step) for size, step in zip(shape, block, strict=True))):
        yield start, tuple(min(a + b, size) for a, b, size in zip(start, block, shape, strict=True))


def damaged_leaves(folder: epath.Path, manifest: Manifest, paths: Iterable[str] | None = None) -> Iterator[tuple[str, str]]:
    """(path, what is wrong) of every leaf that cannot be read or whose checksum differs, streaming, on one CPU."""
    for path, leaf in manifest.leaves.items():
        if (paths is not None and path not in paths) or not leaf.checksum:
            continue
        first = second = 0
        try:
            for start, piece in pieces(open_leaf(folder, path)):
                more = checksum.sums_of_piece(piece, start)
                first, second = first + more[0], second + more[1]
        except Exception as error:  # TensorStore raises ValueError, KeyError, OSError and others
            yield path, f"cannot be read ({first_line(error)})"
        else:
            if (found := checksum.text(first, second)) != leaf.checksum:
                yield path, f"its checksum is {found}, {leaf.checksum} was saved"


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message, cut."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Orbax logs pages of INFO and WARNING through absl; errors still come through as exceptions."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
