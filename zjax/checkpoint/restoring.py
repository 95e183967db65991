"""Leaves of a checkpoint into the shards of a plan: read, verified as stored, then cast and laid as is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from zjax.checkpoint import checksum, sources
from zjax.checkpoint import manifest as manifests
from zjax.checkpoint.errors import DamagedError
from zjax.checkpoint.manifest import Manifest
from zjax.checkpoint.reading import damaged_leaves, first_line, read_arrays, spread
from zjax.checkpoint.sources import Source

SAMPLED = 8
"""`verify="sampled"` checks one in so many leaves, others at every step number."""


def read(
    folder: epath.Path, manifest: Manifest, found: Mapping[str, Source], names: Mapping[str, str], *, verify: str, concurrent_gb: int
) -> dict[str, jax.Array]:
    """The arrays of these sources, verified as they are stored, in the dtype and sharding that is wanted.

    Args:
      folder: of the step.
      manifest: of the step.
      found: the source of every wanted path.
      names: the saved path by that which a source has after renaming.
      verify: `full`, `sampled` or `off`.
      concurrent_gb: as in `Checkpointer`.

    Raises:
      DamagedError: a leaf that cannot be read, or is not what was saved; in all processes, of which the first names the leaves.
    """
    stored = {names[source.path]: source.stored for source in found.values() if source.stored.size}
    if jax.process_count() > 1:
        stored = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread(x.sharding, x.shape)) for path, x in stored.items()}
    problem, arrays = file_problem(folder, manifest, verify), {}
    if not agree(bool(problem)):
        try:
            arrays = read_arrays(folder, stored, concurrent_gb)
        except Exception as error:
            problem = f"it cannot be read ({first_line(error)})"
    wrong: list[str] = []
    if agree(bool(problem)):
        problem = problem or "another process cannot read it"
        if jax.process_index() == 0:
            wrong = [f"{path}: {what}" for path, what in damaged_leaves(folder, manifest, set(stored))]
    else:
        sums = checksum.checksums({path: arrays[path] for path in checked(manifest, arrays, verify)})
        saved = {path: manifest.leaves[path].checksum for path in sums}
        wrong = [f"{path}: its checksum is {sums[path]}, {saved[path]} was saved" for path in sums if sums[path] != saved[path]]
    if problem or wrong:
        raise DamagedError(f"{folder} is damaged: {problem}" + (f"\n  {sources.shown(wrong)}" if wrong else ""))
    return {
        path: placed(arrays[names[source.path]], source.wanted) if source.stored.size else empty(source.wanted)
        for path, source in found.items()
    }


def file_problem(folder: epath.Path, manifest: Manifest, verify: str) -> str:
    """What is wrong with the step's files, as the first process sees them; empty where nothing is, or nothing is verified."""
    if verify == "off" or jax.process_index():
        return ""
    try:
        return "; ".join(manifests.damaged_files(folder, manifest)[: sources.SHOWN])
    except OSError as error:
        return first_line(error)


def checked(manifest: Manifest, paths: Iterable[str], verify: str) -> list[str]:
    """The leaves whose checksums are compared."""
    every = sorted(paths)
    return {"full": every, "sampled": every[manifest.step % SAMPLED :: SAMPLED], "off": []}[verify]


def agree(problem: bool) -> bool:
    """Whether any process has a problem; the same in all."""
    if jax.process_count() == 1:
        return problem
    return bool(np.max(multihost_utils.process_allgather(np.int32(problem))))


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def storable(x: jax.Array) -> jax.Array:
    """What is stored of an array: of PRNG keys their words."""
    return jax.random.key_data(x) if _is_key(x) else x


def storable_struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """`storable`, of shapes and dtypes."""
    if not _is_key(x):
        return x
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def usable(x: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """What `storable` was of."""
    return jax.random.wrap_key_data(x) if _is_key(struct) else x


def placed(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """In the dtype and sharding that is wanted."""
    if x.dtype == wanted.dtype and x.sharding.is_equivalent_to(wanted.sharding, x.ndim):
        return x
    return jax.jit(lambda x: x.astype(wanted.dtype), out_shardings=wanted.sharding)(x)


def empty(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements, which no file holds."""
    return jax.jit(lambda: jnp.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)()
