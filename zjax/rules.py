"""Where a parameter is sharded: small rules (spec, path, shape, mesh) -> spec that compose.

The user's rules come first (`pattern`, `tensor_parallel`, `placement`); then `shard_largest`, ZeRO's own, takes the
largest dim that is still free and divides. The first rule that shards a leaf over the ZeRO axes wins.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from zjax.mesh import AXES, AnyMesh, degree, physical_axes, spec_axes, zero_axes
from zjax.tree import Shape, matches

LANES, WIDE = 128, 1024
"""A TPU lays a minor dim out in tiles of 128 lanes. A reduce-scatter of a minor dim of 11008 into 64 pieces of 172 compiles
to an all-reduce there, of twice the traffic; of narrow dims the little there is does not matter."""

Rule = Callable[[P, str, Shape, AnyMesh], P]
"""Takes the spec so far and returns it, or one that shards more. `shape` is the whole leaf, a stacked layer dim included."""


@dataclass(frozen=True)
class pattern:
    """The spec of the first pattern that names the leaf (t5x, EasyLM partition rules).

    Entries are logical axis names (`tensor`, `fsdp`); those of size 1 on this mesh drop out. A pattern that names no leaf
    and an axis that does not exist raise when a plan is built.
    """

    specs: Mapping[str, P]

    @property
    def patterns(self) -> tuple[str, ...]:
        """Every pattern must name a leaf."""
        return tuple(self.specs)

    def __call__(self, spec: P, path: str, shape: Shape, mesh: AnyMesh) -> P:
        """The rule."""
        for name, wanted in self.specs.items():
            if matches(name, path):
                if len(wanted) > len(shape):
                    raise ValueError(f"{path}: rule {name!r} gives {wanted} for shape {shape}, which has {len(shape)} dims")
                return _merge(spec, _physical(wanted, mesh, path), path, shape, mesh)
        return spec


@dataclass(frozen=True)
class tensor_parallel:
    """Shards the named dim (negative counts from the end) over the `tensor` axis: Megatron's column and row parallel."""

    dims: Mapping[str, int]

    @property
    def patterns(self) -> tuple[str, ...]:
        """Every pattern must name a leaf."""
        return tuple(self.dims)

    def __call__(self, spec: P, path: str, shape: Shape, mesh: AnyMesh) -> P:
        """The rule."""
        axes = physical_axes(mesh, "tensor")
        named = next((dim for name, dim in self.dims.items() if matches(name, path)), None)
        if not axes or named is None:
            return spec
        return _merge(spec, at_dim(_dim(named, path, shape), axes), path, shape, mesh)


def placement(shard_placement: Callable[[str, Shape], int | None]) -> Rule:
    """FSDP2's shard_placement_fn: the dim that ZeRO shards, or None for the default. The dim must divide."""

    def rule(spec: P, path: str, shape: Shape, mesh: AnyMesh) -> P:
        dim, axes = shard_placement(path, shape), zero_axes(mesh)
        if dim is None or not axes:
            return spec
        return _merge(spec, at_dim(_dim(dim, path, shape), axes), path, shape, mesh)

    return rule


def shard_largest(spec: P, path: str, shape: Shape, mesh: AnyMesh, *, first_dim: int = 0) -> tuple[P, str | None]:
    """ZeRO's rule: over all ZeRO axes, the largest dim from `first_dim` on that no axis has taken and that divides.

    A wide minor dim whose pieces would cut through a TPU's tiles (`LANES`) is taken only if no other divides.

    Returns the spec and None, or the spec unchanged and the reason why the leaf stays whole.
    """
    axes = zero_axes(mesh)
    n = degree(mesh, axes)
    if not shape[first_dim:]:
        return spec, "scalar"
    if 0 in shape:
        return spec, "empty"
    if n == 1:
        return spec, "one device on the sharding axes of this mesh"
    if set(axes) & set(spec_axes(spec)):
        return spec, None
    free = [dim for dim in range(first_dim, len(shape)) if dim >= len(spec) or spec[dim] is None]
    dividing = [dim for dim in free if shape[dim] % n == 0]
    if not dividing:
        remainders = ", ".join(f"{shape[dim]} % {n} = {shape[dim] % n}" for dim in free) or "every dim is taken"
        return spec, f"no dim divides: {remainders}"
    cut = lambda dim: dim == len(shape) - 1 and shape[dim] >= WIDE and shape[dim] // n % LANES > 0  # noqa: E731
    best = max(dividing, key=lambda dim: (not cut(dim), shape[dim]))
    return _merge(spec, at_dim(best, axes), path, shape, mesh), None


def at_dim(dim: int, axes: Sequence[str]) -> P:
    """The spec that shards one dim over mesh axes."""
    return P(*(None,) * dim, tuple(axes) if len(axes) > 1 else axes[0])


def _dim(dim: int, path: str, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"{path}: a rule shards dim {dim}, but shape {shape} has {len(shape)} dims")
    return dim % len(shape)


def _physical(spec: P, mesh: AnyMesh, path: str) -> P:
    entries = []
    for entry in spec:
        logical = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        for name in logical:
            if name not in AXES:
                near = difflib.get_close_matches(name, AXES, n=1)
                raise ValueError(
                    f"{path}: a rule names the axis {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}axes are {', '.join(AXES)}"
                )
        axes = tuple(axis for name in logical for axis in physical_axes(mesh, name))
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    return P(*entries)


def _merge(spec: P, more: P, path: str, shape: Shape, mesh: AnyMesh) -> P:
    """`spec` with the entries of `more` filled in; raises where a dim or axis is taken or does not divide."""
    rank = len(shape)
    taken, added = [*spec, *(None,) * (rank - len(spec))], [*more, *(None,) * (rank - len(more))]
    for dim, entry in enumerate(added):
        if entry is None:
            continue
        n = degree(mesh, spec_axes(P(entry)))
        if taken[dim] is not None or set(spec_axes(P(entry))) & set(spec_axes(P(*taken))):
            raise ValueError(f"{path}: dim {dim} of shape {shape} cannot be sharded over {entry}: the spec is already {P(*taken)}")
        if shape[dim] % n:
            raise ValueError(
                f"{path}: dim {dim} of shape {shape} cannot be sharded over {entry} of size {n}: {shape[dim]} % {n} = {shape[dim] % n}"
            )
        taken[dim] = entry
    while taken and taken[-1] is None:
        taken.pop()
    return P(*taken)
