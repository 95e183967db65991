"""Which saved leaf each leaf of a plan's state is made from: the same one, one of another name, or one of another dtype.

What the model computes with and what the optimizer updates are the same parameter in two leaves with a master
(`params/x` in bfloat16, `opt_state/master/x` in float32) and in one without (`params/x` in float32). Converting takes the
float32 one for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from zjax.checkpoint.errors import CheckpointError
from zjax.checkpoint.manifest import Leaf
from zjax.tree import matches

PARAMS, MASTER, LOSS_SCALE = "params/", "opt_state/master/", "loss_scale/"
SHOWN = 20
"""How many leaves an error names."""


@dataclass(frozen=True)
class Source:
    """Where one leaf comes from."""

    path: str
    """Of the saved leaf."""
    stored: jax.ShapeDtypeStruct
    """Its shape and dtype as stored, with the wanted sharding."""
    wanted: jax.ShapeDtypeStruct


def match(saved: Mapping[str, Leaf], wanted: Mapping[str, jax.ShapeDtypeStruct], *, convert: bool, where: str) -> dict[str, Source | None]:
    """The source of every wanted leaf; None for the loss scale of a run that was saved without one, which begins anew.

    Args:
      saved: the checkpoint's leaves, by the names they have in the plan.
      wanted: shape, dtype and sharding by path in the train state.
      convert: whether dtypes, masters and the loss scale may differ.
      where: the checkpoint, for the error.

    Raises:
      CheckpointError: leaves that are missing, that nothing asks for, or of another shape or dtype; it names each.
    """
    found: dict[str, Source | None] = {}
    problems, used = [], set()
    for path, ours in wanted.items():
        source = _source_of(path, ours, saved, convert)
        if source is None:
            if convert and path.startswith(LOSS_SCALE) and path not in saved:
                found[path] = None
            else:
                problems.append(f"{path}: missing in the checkpoint")
            continue
        leaf = saved[source]
        used.add(source)
        if leaf.shape != ours.shape or not (_same_dtype(leaf, ours) or (convert and _both_floating(leaf, ours))):
            problems.append(f"{path}: {leaf.dtype}{list(leaf.shape)} in the checkpoint, {ours.dtype}{list(ours.shape)} in the plan")
        found[path] = _source(source, leaf, ours)
    for path in saved.keys() - wanted.keys() - used:
        if not convert or not (path.startswith(LOSS_SCALE) or (path.startswith(MASTER) and PARAMS + path.removeprefix(MASTER) in wanted)):
            problems.append(f"{path}: in the checkpoint, but not in the plan")
    if problems:
        hint = "" if convert or not _would_convert(saved, wanted) else "\n  restore(..., convert=True) converts between precisions"
        raise CheckpointError(f"{where} does not fit the plan:\n  {shown(problems)}{hint}")
    return found


def _source(path: str, leaf: Leaf, wanted: jax.ShapeDtypeStruct) -> Source:
    return Source(path, jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=wanted.sharding), wanted)


def _source_of(path: str, ours: jax.ShapeDtypeStruct, saved: Mapping[str, Leaf], convert: bool) -> str | None:
    if path in saved and (not convert or _same_dtype(saved[path], ours)):
        return path
    if convert and path.startswith(PARAMS) and (master := MASTER + path.removeprefix(PARAMS)) in saved:
        return master
    if convert and path.startswith(MASTER) and path not in saved:
        path = PARAMS + path.removeprefix(MASTER)
    return path if path in saved else None


def _same_dtype(leaf: Leaf, ours: jax.ShapeDtypeStruct) -> bool:
    return np.dtype(jnp.dtype(leaf.dtype)) == np.dtype(ours.dtype)


def _both_floating(leaf: Leaf, ours: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating) and jnp.issubdtype(ours.dtype, jnp.floating)


def _would_convert(saved: Mapping[str, Leaf], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    try:
        match(saved, wanted, convert=True, where="")
    except CheckpointError:
        return False
    return True


def params_sources(saved: Mapping[str, Leaf], wanted: Mapping[str, jax.ShapeDtypeStruct], where: str) -> dict[str, Source]:
    """The most precise saved leaf of every parameter: its master, if it has one. `wanted` and the result go by parameter name.

    Raises:
      CheckpointError: parameters that are missing or of another shape; it names each.
    """
    found, problems = {}, []
    for name, ours in wanted.items():
        path = next((path for path in (MASTER + name, PARAMS + name) if path in saved), None)
        if path is None:
            problems.append(f"{PARAMS}{name}: missing in the checkpoint")
        elif saved[path].shape != ours.shape:
            problems.append(f"{PARAMS}{name}: {list(saved[path].shape)} in the checkpoint, {list(ours.shape)} in the plan")
        else:
            found[name] = _source(path, saved[path], ours)
    if problems:
        raise CheckpointError(f"{where} does not fit the plan:\n  {shown(problems)}")
    return found


def renamed(leaves: Mapping[str, Leaf], rename: Mapping[str, str], where: str) -> dict[str, str]:
    """The saved path of every leaf by the path it has in the plan.

    Args:
      leaves: the checkpoint's.
      rename: a parameter's name in the checkpoint, or what many begin with (`blocks`), to its name in the plan (`layers`).
        Masters and moments follow their parameter.
      where: the checkpoint, for the errors.

    Raises:
      CheckpointError: a name that the checkpoint does not have; two leaves that come to one name.
    """
    names = {path.removeprefix(PARAMS): path.removeprefix(PARAMS) for path in leaves if path.startswith(PARAMS)}
    for old, new in rename.items():
        under = [name for name in names if matches(old, name)]
        if not under:
            raise CheckpointError(f"rename: {where} has no parameter {old!r}; it has {', '.join(sorted(names)[:12])}")
        for name in under:
            names[name] = new + name.removeprefix(old)
    paths: dict[str, str] = {}
    for path in leaves:
        # The longest: of `w` and `block/w`, `mu/block/w` belongs to the second.
        owner = max((name for name in names if path.endswith("/" + name)), key=len, default=None)
        ours = path if owner is None else path.removesuffix(owner) + names[owner]
        if ours in paths:
            raise CheckpointError(f"rename: {paths[ours]} and {path} of {where} would both be {ours}")
        paths[ours] = path
    return paths


def shown(problems: list[str]) -> str:
    """The first of many, a line each."""
    problems = sorted(problems)
    return "\n  ".join(problems[:SHOWN]) + (f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else "")
