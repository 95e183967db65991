"""What a chip can do: memory, arithmetic, memory bandwidth and links, each with its source.

Bandwidths are bytes a second in one direction. `link_inside` is NVLink on a GPU and one ICI link of a TPU, where a
collective over k torus dims has 2k links (both directions of each); `link_between` is the network, a chip's share.
"""

from __future__ import annotations

from dataclasses import dataclass

from zjax.fields import ConfigError

GB, GIB = 1e9, 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator chip (a JAX device, megacore for TPU v4 and v5p)."""

    name: str
    platform: str
    """`gpu`, `tpu` or `cpu`."""
    memory: float
    """Bytes a program can use."""
    flops: float
    """Peak dense bf16 floating-point operations a second."""
    bandwidth: float
    """Bytes a second to and from device memory."""
    link_inside: float
    """Bytes a second, one direction: NVLink, or one ICI link."""
    link_between: float
    """Bytes a second, one direction: the network between hosts or slices, this chip's share."""
    torus_dims: int = 0
    """Dims of a TPU's torus."""
    torus_wraps_at: int = 0
    """A slice dim that is a multiple of this closes its torus."""
    source: str = ""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="a100", platform="gpu", memory=85100068864, flops=312e12, bandwidth=2039 * GB, link_inside=300 * GB, link_between=25 * GB,
            source="NVIDIA A100 80GB SXM data sheet (NVLink 600 GB/s both ways); DGX A100: one 200 Gb/s HDR port a GPU",
        ),
        Chip(
            name="h100", platform="gpu", memory=84942979072, flops=989e12, bandwidth=3352 * GB, link_inside=450 * GB, link_between=50 * GB,
            source="NVIDIA H100 SXM data sheet (dense bf16; NVLink 900 GB/s both ways); DGX H100: one 400 Gb/s NDR port a GPU",
        ),
        Chip(
            name="h200", platform="gpu", memory=151397597184, flops=989e12, bandwidth=4800 * GB, link_inside=450 * GB, link_between=50 * GB,
            source="NVIDIA H200 SXM data sheet; DGX H200: one 400 Gb/s NDR port a GPU",
        ),
        Chip(
            name="b200", platform="gpu", memory=191514411008, flops=2250e12, bandwidth=7672 * GB, link_inside=900 * GB, link_between=50 * GB,
            source="NVIDIA DGX B200 data sheet (dense bf16; NVLink 1800 GB/s both ways; one 400 Gb/s port a GPU)",
        ),
        Chip(
            name="v4", platform="tpu", memory=30.75 * GIB, flops=275e12, bandwidth=1228 * GB, link_inside=45 * GB, link_between=6.25 * GB,
            torus_dims=3, torus_wraps_at=4,
            source="Cloud TPU v4 system architecture (32 GiB HBM, part reserved); JAX scaling book, chapter 2 (one-way ICI a link, DCN a chip)",
        ),
        Chip(
            name="v5e", platform="tpu", memory=15.75 * GIB, flops=197e12, bandwidth=819 * GB, link_inside=45 * GB, link_between=3.125 * GB,
            torus_dims=2, torus_wraps_at=16,
            source="Cloud TPU v5e system architecture (16 GB HBM, part reserved); JAX scaling book, chapter 2",
        ),
        Chip(
            name="v5p", platform="tpu", memory=95 * GIB, flops=459e12, bandwidth=2765 * GB, link_inside=90 * GB, link_between=6.25 * GB,
            torus_dims=3, torus_wraps_at=4,
            source="Cloud TPU v5p system architecture (95 GiB HBM, 1200 GB/s ICI a chip, 50 Gb/s DCN); JAX scaling book, chapter 2",
        ),
        Chip(
            name="v6e", platform="tpu", memory=31.25 * GIB, flops=918e12, bandwidth=1640 * GB, link_inside=90 * GB, link_between=12.5 * GB,
            torus_dims=2, torus_wraps_at=16,
            source="Cloud TPU v6e system architecture (32 GB HBM, part reserved; 800 GB/s ICI a chip); JAX scaling book, chapter 2",
        ),
        Chip(
            name="cpu", platform="cpu", memory=float("inf"), flops=50e9, bandwidth=20 * GB, link_inside=5 * GB, link_between=1 * GB,
            source="orders of magnitude for one simulated device; times predicted for cpu targets mean nothing",
        ),
    )
}  # fmt: skip


DEVICE_KINDS = {
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e",
}  # fmt: skip
"""`CHIPS` by what jax calls a device (`device_kind`). PCIe and NVL boards, which are slower, are not among them."""


def chip_of_kind(device_kind: str) -> Chip | None:
    """The accelerator that a jax device is, None for one of which nothing is known (a CPU among them)."""
    name = DEVICE_KINDS.get(device_kind)
    return None if name is None else CHIPS[name]


def chip_named(name: str) -> Chip:
    """The chip of that name; ConfigError, listing the known ones, for another."""
    if name not in CHIPS:
        raise ConfigError(f"unknown chip {name!r}: known: {', '.join(CHIPS)}")
    return CHIPS[name]
