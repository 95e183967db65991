"""Mesh axes, and how devices lie on them. Every error about degrees is raised here.

Axes, outermost first: `pipeline, replica, fsdp, expert, sequence, tensor`. Inner axes lie on the fast links (NVLink,
ICI), outer ones on the slow (between hosts or slices). The batch is split over `DATA_AXES`; ZeRO shards state over
`ZERO_AXES`. A logical axis may lie over several mesh axes, named `fsdp_0, fsdp_1, ...`: ask `physical_axes`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from zjax.config import MeshConfig
from zjax.fields import ConfigError

AXES = ("pipeline", "replica", "fsdp", "expert", "sequence", "tensor")
DATA_AXES = ("replica", "fsdp", "expert")
ZERO_AXES = ("fsdp", "expert", "sequence")
SLOW_AXES = ("pipeline", "replica")
"""Axes that are laid between hosts or slices where there are several."""

AnyMesh = Mesh | AbstractMesh


def resolve_degrees(config: MeshConfig, n_devices: int) -> dict[str, int]:
    """The degree of every axis, the -1 inferred; their product is `n_devices`.

    Raises ConfigError, naming all factors and the device count, where they do not multiply to it.
    """
    degrees = dataclasses.asdict(config)
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    if -1 in degrees.values():
        if n_devices % known:
            raise ConfigError(
                f"mesh: {shown} on {n_devices} devices: {n_devices} % {known} = {n_devices % known}, so -1 cannot be inferred"
            )
        return {name: n_devices // known if degree == -1 else degree for name, degree in degrees.items()}
    if known != n_devices:
        raise ConfigError(f"mesh: {shown} = {known}, but there are {n_devices} devices; set one axis to -1, or the device count to {known}")
    return degrees


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `devices` (all by default) with automatic axes.

    Where the runtime tells slices (TPU) or hosts apart, the outermost axes (`replica`) are laid between them and the
    others inside (jax's hybrid mesh). On a TPU torus `fsdp` is laid over one mesh axis
    per torus dim it spans: a reduce-scatter over several dims at once compiles to an all-reduce of twice the traffic.
    """
    devices = jax.devices() if devices is None else list(devices)
    degrees = resolve_degrees(config, len(devices))
    parts = _torus_parts(devices, degrees)
    if parts is None:
        return Mesh(_lay_out(devices, degrees), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    split = {name: size for axis in AXES for name, size in (parts if axis == "fsdp" else {axis: degrees[axis]}).items()}
    array = mesh_utils.create_device_mesh(tuple(split.values()), devices)
    return Mesh(array, tuple(split), axis_types=(AxisType.Auto,) * len(split))


def abstract_mesh(config: MeshConfig, n_devices: int) -> AbstractMesh:
    """The same mesh without devices: plans and arithmetic need no more. Nothing can be placed on it."""
    degrees = resolve_degrees(config, n_devices)
    return AbstractMesh(tuple(degrees[name] for name in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def granule_of(device: Any) -> int:
    """The slice of a device, or where the runtime knows none, its process: what the slow network lies between."""
    return getattr(device, "slice_index", device.process_index)


def _lay_out(devices: Sequence[Any], degrees: dict[str, int]) -> np.ndarray:
    """Devices as an array of the degrees' shape, those of one slice (or host) next to each other."""
    shape = tuple(degrees[name] for name in AXES)
    has_slices = hasattr(devices[0], "slice_index")
    granules = Counter(map(granule_of, devices))
    if len(granules) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    # The outermost axes go between granules, as much of each as is needed.
    between, left = {}, len(granules)
    for name in AXES:
        between[name] = math.gcd(degrees[name], left)
        left //= between[name]
    if left > 1 or len(set(granules.values())) > 1:
        if has_slices:
            shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
            sizes = ", ".join(str(size) for size in granules.values())
            raise ConfigError(
                f"mesh: {shown} cannot be laid over {len(granules)} slices of {sizes} devices: every slice must hold an equal, whole part of the mesh"
            )
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    inner = tuple(degrees[name] // between[name] for name in AXES)
    return mesh_utils.create_hybrid_device_mesh(
        inner, tuple(between.values()), devices, process_is_granule=not has_slices, allow_split_physical_axes=True
    )


def _torus_parts(devices: Sequence[Any], degrees: dict[str, int]) -> dict[str, int] | None:
    """`fsdp` as one axis per torus dim, if whole dims of one slice make it up and it spans more than one; else None."""
    coords = [device.coords for device in devices if hasattr(device, "coords")]
    if len(coords) < len(devices) or len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        return None
    torus = [len({coord[dim] for coord in coords}) for dim in range(len(coords[0]))]
    if math.prod(torus) != len(devices):  # several cores a chip, or not a whole box
        return None
    sizes = [size for size in torus if size > 1]
    for count in range(len(sizes), 1, -1):
        for chosen in itertools.combinations(range(len(sizes)), count):
            left = [sizes[dim] for dim in range(len(sizes)) if dim not in chosen]
            others = [size for name, size in degrees.items() if name != "fsdp" and size > 1]
            if math.prod(sizes[dim] for dim in chosen) == degrees["fsdp"] and sorted(others) == sorted(left):
                return {f"fsdp_{index}": sizes[dim] for index, dim in enumerate(chosen)}
    return None


def logical_axis(name: str) -> str:
    """The logical axis a mesh axis is part of: `fsdp` for `fsdp_1`."""
    return name.split("_")[0]


def physical_axes(mesh: AnyMesh, *logical: str) -> tuple[str, ...]:
    """The mesh axes with more than one device that the logical axes lie over, outermost first."""
    return tuple(name for name in mesh.axis_names if logical_axis(name) in logical and mesh.shape[name] > 1)


def degree(mesh: AnyMesh, axes: Iterable[str]) -> int:
    """Product of the sizes of mesh axes."""
    return math.prod(mesh.shape[name] for name in axes)


def data_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Mesh axes that carry the batch."""
    return physical_axes(mesh, *DATA_AXES)


def zero_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Mesh axes over which ZeRO shards the state of dense leaves."""
    return physical_axes(mesh, *ZERO_AXES)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Every mesh axis a spec uses, in order."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return tuple(axis for entry in entries for axis in entry if isinstance(axis, str))


def shard_shape(mesh: AnyMesh, spec: PartitionSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the piece one device holds; every sharded dim divides (plans guarantee it)."""
    return tuple(size // degree(mesh, spec_axes(PartitionSpec(spec[dim]))) if dim < len(spec) else size for dim, size in enumerate(shape))
