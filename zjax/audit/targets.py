"""Hardware that a program can be compiled for, also where it is not there.

`cpu:8`; `gpu:h100:2x8` (hosts x GPUs a host); `tpu:v5p:4x4x4` (the slice's shape in chips). XLA's real TPU and GPU
compilers come as wheels (the extra `targets`) and need no device.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zjax.audit.collectives import Place
from zjax.estimate.hardware import CHIPS, DEVICE_KINDS, Chip, chip_named, chip_of_kind
from zjax.fields import ConfigError
from zjax.mesh import granule_of


@dataclass(frozen=True)
class Target:
    """A chip and how many of them, as written (`gpu:h100:2x8`)."""

    text: str
    platform: str
    chip: Chip
    shape: tuple[int, ...]
    """(devices,) of a CPU, (hosts, GPUs a host), or a TPU slice's chips along each torus dim."""

    @property
    def devices(self) -> int:
        """JAX devices of the target (v4 and v5p chips are one device each: megacore)."""
        return math.prod(self.shape)


def parse_target(text: str) -> Target:
    """The target a text names; ConfigError, saying what is known, where it names none."""
    forms = "cpu:8, gpu:h100:1x8 (hosts x GPUs a host) or tpu:v5p:4x4x4"
    platform, _, rest = text.partition(":")
    if platform == "cpu":
        return Target(text, "cpu", CHIPS["cpu"], _shape(text, rest, (1,), forms))
    chip_name, _, topology = rest.partition(":")
    if platform not in ("gpu", "tpu") or not topology:
        raise ConfigError(f"target {text!r}: write it as {forms}")
    chip = chip_named(chip_name)
    if chip.platform != platform:
        raise ConfigError(
            f"target {text!r}: {chip_name} is a {chip.platform}; known {platform}s: {', '.join(c.name for c in CHIPS.values() if c.platform == platform)}"
        )
    ranks = (2,) if platform == "gpu" else (chip.torus_dims,)
    return Target(text, platform, chip, _shape(text, topology, ranks, forms))


def _shape(text: str, topology: str, ranks: Sequence[int], forms: str) -> tuple[int, ...]:
    sizes = topology.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes) or len(sizes) not in ranks:
        raise ConfigError(f"target {text!r}: {topology!r} must be {ranks[0]} positive numbers joined by 'x'; write it as {forms}")
    return tuple(int(size) for size in sizes)


def require_compiler(target: Target) -> None:
    """ConfigError with the pip command if the target's compiler is not installed."""
    import jax  # only for its version

    needed = {"tpu": ("libtpu", f"'jax[tpu]=={jax.__version__}'"), "gpu": ("jax_plugins.xla_cuda12", f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}")}  # fmt: skip
    if target.platform in needed:
        module, packages = needed[target.platform]
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(f"target {target.text!r}: its compiler is not installed; run: pip install {packages}")


def child_environment(target: Target) -> dict[str, str]:
    """The environment of the process that compiles: nothing of the caller's XLA settings reaches it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "LIBTPU", "TPU_"))}
    flags = {"gpu": "--xla_gpu_autotune_level=0"}.get(target.platform, "")  # autotuning would need the device
    kept |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": flags}
    return kept | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"} if target.platform == "tpu" else kept


def open_devices(target: Target) -> list[Any]:
    """The target's devices, for compiling only; called in the child process, before jax has started a backend."""
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", target.devices)
        return jax.devices()
    if target.platform == "gpu":
        hosts, gpus = target.shape
        topology = topologies.get_topology_desc("", platform="cuda", target_config=_gpu_config(target.chip), topology=f"1x{hosts}x{gpus}")
        return list(topology.devices)
    options: dict[str, Any] = {}
    if target.chip.torus_dims == 3:
        # Real v4 and v5p slices close their torus along every dim that is a multiple of 4; unsaid, the compiler assumes
        # an open mesh and turns all-gathers into all-reduces.
        wrap = tuple(size % target.chip.torus_wraps_at == 0 for size in target.shape)
        options = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1), "wrap": wrap}
    name = f"{target.chip.name}:{'x'.join(map(str, target.shape))}"
    return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)


def place_of(target: Target, mesh_shape: Mapping[str, int], devices: Sequence[Any]) -> Place:
    """Where each device of a mesh, in row-major order, is."""
    if target.platform == "tpu":
        return Place(dict(mesh_shape), (0,) * len(devices), tuple(tuple(device.coords) for device in devices))
    per_host = target.shape[-1]
    hosts = tuple(device.id // per_host for device in devices)
    return Place(dict(mesh_shape), hosts, ())


def target_here(devices: Sequence[Any]) -> Target:
    """What the devices of a running process, in a mesh's order, are as a target; ConfigError for a kind that is not known."""
    platform, kind = devices[0].platform, devices[0].device_kind
    chip = CHIPS["cpu"] if platform == "cpu" else chip_of_kind(kind)
    if chip is None:
        raise ConfigError(f"{kind}: nothing is known of this device; known: {', '.join(DEVICE_KINDS)}")
    if platform == "cpu":
        return parse_target(f"cpu:{len(devices)}")
    if chip.platform == "gpu":
        hosts = len(set(map(granule_of, devices)))
        return parse_target(f"gpu:{chip.name}:{hosts}x{len(devices) // hosts}")
    spans = [1 + max(along) - min(along) for along in zip(*(device.coords for device in devices), strict=True)]
    shape = spans[: chip.torus_dims]
    if math.prod(shape) != len(devices):
        raise ConfigError(f"{len(devices)} {kind} that are no box of {'x'.join(map(str, spans))}: several slices are no audit target")
    return parse_target(f"tpu:{chip.name}:{'x'.join(map(str, shape))}")


def place_here(mesh_shape: Mapping[str, int], devices: Sequence[Any]) -> Place:
    """Where each device of a running process's mesh is: GPUs between which no network lies share a host."""
    if devices[0].platform == "tpu":
        return Place(dict(mesh_shape), (0,) * len(devices), tuple(tuple(device.coords) for device in devices))
    return Place(dict(mesh_shape), tuple(map(granule_of, devices)), ())


_GPU_FIELDS = {
    # core_count, fpus_per_core, shared memory a core and opt-in, L2 bytes, clock GHz, capability major
    "a100": (108, 64, 167936, 166912, 41943040, 1.41, 8),
    "h100": (132, 128, 233472, 232448, 52428800, 1.98, 9),
    "h200": (132, 128, 233472, 232448, 52428800, 1.98, 9),
    "b200": (148, 128, 233472, 232448, 132644864, 1.965, 10),
}


def _gpu_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto as text: the device facts that its GPU compiler plans with."""
    cores, fpus, shared, optin, l2, clock, major = _GPU_FIELDS[chip.name]
    return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {int(chip.memory)}
      shared_memory_per_block_optin: {optin} cuda_compute_capability {{ major: {major} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
      platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }} runtime_version {{ major: 12 minor: 8 patch: 0 }}
      device_description_str: "NVIDIA {chip.name.upper()}" """
