"""Path names of pytree leaves, selection by pattern, and byte counts."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

PyTree = Any
Shape = tuple[int, ...]


def path_name(key_path: Sequence[Any]) -> str:
    """`layers/wq` for the key path of a leaf, whatever containers it lies in."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator="/")


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """(path name, leaf) of every leaf, in the order of `jax.tree.leaves`."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]]


def matches(pattern: str, path: str) -> bool:
    """Whether a shell-style pattern names a leaf: `*` also crosses `/`, and a pattern names everything below it.

    `layers` and `layers/*` match `layers/wq`; `*norm*` matches `layers/attn_norm`.
    """
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + "/*")


def require_all_used(patterns: Iterable[str], paths: Iterable[str], knob: str) -> None:
    """Raises ValueError if a pattern of `knob` matches none of the paths: a typo would otherwise be ignored."""
    paths = list(paths)
    for pattern in patterns:
        if not any(matches(pattern, path) for path in paths):
            shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
            raise ValueError(f"{knob}: pattern {pattern!r} matches no leaf; leaves are {shown}")


def leaf_bytes(shape: Shape, dtype: Any) -> int:
    """Bytes of an array; a typed PRNG key counts its key data."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return leaf_bytes(data.shape, data.dtype)
    return math.prod(shape) * np.dtype(dtype).itemsize
