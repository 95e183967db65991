"""Dtypes: what parameters are stored and computed in, and when fp32 master weights are kept.

With bf16 compute the optimizer works on fp32 master weights that live in the optimizer state, and the parameters are
`cast(master)` after every step: adding a rounded update would lose it (an update of 1e-4 to a bf16 1.0 is nothing).
"""

from __future__ import annotations

from typing import Any

import jax

from zjax.tree import PyTree


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Every leaf in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)
