"""Chips and how they stand together: what lies inside a host or slice, what a collective spans, how long it takes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zjax.estimate.hardware import Chip, chip_named
from zjax.fields import ConfigError
from zjax.mesh import AnyMesh

GPUS_A_HOST = 8
SIZE_TOLERANCE = 0.03
"""Between the memory size in a name (`h100-80g`) and the chip's."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`groups` hosts of GPUs, or slices of a TPU, with `inside` devices each. Devices are numbered group by group."""

    chip: Chip
    groups: int
    inside: int
    efficiency: float = 1.0
    """Share of the chip's peak that matrix products reach; 1 is the roofline."""

    @property
    def devices(self) -> int:
        """All of them."""
        return self.groups * self.inside

    @property
    def flops(self) -> float:
        """Matrix-product operations a second of one device."""
        return self.chip.flops * self.efficiency

    @property
    def torus(self) -> tuple[int, ...]:
        """Chips along each dim of a TPU slice: the most cubic box; empty for GPUs."""
        return _box(self.inside, self.chip.torus_dims) if self.chip.torus_dims else ()

    @property
    def target(self) -> str | None:
        """The audit target these chips are (`gpu:h100:8x8`); None for several TPU slices, which an audit does not take."""
        if self.chip.platform == "gpu":
            return f"gpu:{self.chip.name}:{self.groups}x{self.inside}"
        if self.chip.platform == "tpu" and self.groups == 1:
            return f"tpu:{self.chip.name}:{'x'.join(map(str, self.torus))}"
        return f"cpu:{self.devices}" if self.chip.platform == "cpu" else None

    def spans_groups(self, mesh: AnyMesh, axes: Sequence[str]) -> bool:
        """Whether a collective over mesh axes leaves a host or slice; devices lie along the mesh in row-major order."""
        stride, reach = 1, 0
        for name in reversed(mesh.axis_names):
            reach += (mesh.shape[name] - 1) * stride if name in axes else 0
            stride *= mesh.shape[name]
        return reach >= self.inside

    def link(self, mesh: AnyMesh, axes: Sequence[str]) -> str:
        """`inside` or `between`: the link that a collective over mesh axes waits for."""
        return "between" if self.spans_groups(mesh, axes) else "inside"

    def bandwidth(self, mesh: AnyMesh, axes: Sequence[str], kind: str) -> float:
        """Bytes a second one device sends in a collective of `traffic.KINDS`.

        Between groups it is the device's share of the network. On a torus a gather uses both directions of every dim it
        spans, and a reduction goes dim by dim (`zjax.make_mesh`), so that it has those of one.
        """
        if self.spans_groups(mesh, axes):
            return self.chip.link_between
        if self.chip.platform != "tpu":
            return self.chip.link_inside
        dims = _dims_spanned(self.torus, math.prod(mesh.shape[name] for name in axes)) if kind == "all_gather" else 1
        return 2 * dims * self.chip.link_inside


def cluster_of(
    hardware: str,
    devices: int,
    *,
    hosts: int | None = None,
    link_inside: float | None = None,
    link_between: float | None = None,
    efficiency: float = 1.0,
) -> Cluster:
    """The cluster of so many devices of a chip.

    Args:
      hardware: a name of `CHIPS`, with its memory or without: `h100`, `h100-80g`, `v5p`.
      devices: how many.
      hosts: hosts of GPUs, or TPU slices; by default hosts of 8 GPUs, one slice.
      link_inside: bytes a second and direction of NVLink or of one ICI link, instead of the catalogue's.
      link_between: bytes a second and direction, a device's share of the network between hosts or slices, likewise.
      efficiency: share of the peak that matrix products reach.

    Raises:
      ConfigError: an unknown chip, one with another memory, devices that do not divide over the hosts, a figure that is
        not positive.
    """
    chip = _chip(hardware)
    for name, value in (("--devices", devices), ("--hosts", hosts), ("--link-inside", link_inside), ("--link-between", link_between)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}: must be positive")
    if not 0 < efficiency <= 1:
        raise ConfigError(f"--efficiency={efficiency}: must lie in (0, 1]: the share of the peak that matrix products reach")
    if hosts is None:
        hosts = math.ceil(devices / GPUS_A_HOST) if chip.platform == "gpu" else 1
    if devices % hosts:
        raise ConfigError(f"--devices={devices}: does not divide over {hosts} hosts ({devices} % {hosts} = {devices % hosts}); set --hosts")
    chip = dataclasses.replace(chip, link_inside=link_inside or chip.link_inside, link_between=link_between or chip.link_between)
    return Cluster(chip=chip, groups=hosts, inside=devices // hosts, efficiency=efficiency)


def _chip(hardware: str) -> Chip:
    name, dash, size = hardware.lower().partition("-")
    chip = chip_named(name)
    if dash:
        if not size.endswith("g") or not size[:-1].isdigit():
            raise ConfigError(f"--hardware={hardware}: write it as {name} or {name}-80g")
        off = min(abs(int(size[:-1]) * unit / chip.memory - 1) for unit in (1e9, 2**30))
        if off > SIZE_TOLERANCE:
            raise ConfigError(
                f"--hardware={hardware}: of {name}, only the one with {chip.memory / 2**30:.0f} GiB is in the catalogue (--hardware={name})"
            )
    return chip


def _box(count: int, dims: int) -> tuple[int, ...]:
    """`count` as a product of `dims` sizes that differ as little as they can, ascending."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    boxes = (
        (*sizes, count // math.prod(sizes))
        for sizes in itertools.combinations_with_replacement(divisors, dims - 1)
        if count % math.prod(sizes) == 0 and count // math.prod(sizes) >= sizes[-1]
    )
    return min(boxes, key=lambda sizes: sizes[-1] - sizes[0])


def _dims_spanned(torus: Sequence[int], size: int) -> int:
    """Over how many dims of a torus a group of `size` chips lies, if it takes whole dims, the largest first."""
    dims = 0
    for length in sorted(torus, reverse=True):
        if size > 1:
            dims, size = dims + 1, math.ceil(size / length)
    return max(1, dims)
