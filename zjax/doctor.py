"""`zjax doctor`: what a run on these devices would have, and whether every mesh axis carries data, and how fast."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.config import MeshConfig
from zjax.mesh import make_mesh

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
COMPILERS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda12"}
"""Modules that bring a target's compiler, for audits."""
SHARD_BYTES = {"cpu": 2**20, "gpu": 64 * 2**20, "tpu": 64 * 2**20}
"""What each device gives to a test all-gather."""
RUNS = 5


def examine(config: MeshConfig, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Looks at the installation and the devices, and gathers a small array over each mesh axis.

    In a run of several processes all of them must call it.

    Returns:
      JSON values: `versions`, `processes`, `process`, `devices`, `local_devices`, `platform`, `kind`, `memory` (bytes of a
      device, None where the runtime does not tell), `host_memory`, `compilers`, `mesh`, `axes` (per axis of more than one
      device: `devices`, `link`, `bytes`, `seconds`, `bytes_per_second` that a device sends, `correct`), `healthy`.

    Raises:
      ConfigError: a mesh that these devices cannot make.
    """
    mesh = make_mesh(config, list(devices))
    axes = {name: _gather(mesh, name) for name in mesh.axis_names if mesh.shape[name] > 1}
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "devices": len(devices),
        "local_devices": len(jax.local_devices()),
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "memory": (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
        "host_memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "compilers": [target for target, module in COMPILERS.items() if _is_installed(module)],
        "mesh": {name: size for name, size in mesh.shape.items() if size > 1},
        "axes": axes,
        "healthy": all(axis["correct"] for axis in axes.values()),
    }


def told(found: dict[str, Any]) -> str:
    """What `examine` found, for people."""
    gib = lambda count: "unknown" if count is None else f"{count / 2**30:.1f} GiB"  # noqa: E731
    mesh = " x ".join(f"{name} {size}" for name, size in found["mesh"].items()) or "1 device"
    lines = [
        "versions: " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        f"processes: {found['processes']}, {found['local_devices']} devices in this one",
        f"devices: {found['devices']} {found['platform']} ({found['kind']}), memory {gib(found['memory'])} each; host {gib(found['host_memory'])}",
        "compilers for audits: " + (", ".join(["cpu", *found["compilers"]])),
        f"mesh: {mesh}",
    ]
    for name, axis in found["axes"].items():
        speed = f"{axis['bytes_per_second'] / 1e9:.3g} GB/s a device, {axis['seconds'] * 1e3:.2f} ms for {axis['bytes'] / 2**20:.1f} MiB"
        lines.append(f"all-gather over {name} ({axis['devices']} devices, {axis['link']}): {speed if axis['correct'] else 'WRONG DATA'}")
    return "\n".join([*lines, "healthy" if found["healthy"] else "NOT HEALTHY: an all-gather returned wrong data"])


def _gather(mesh: Mesh, axis: str) -> dict[str, Any]:
    """Gathers rows that say which device they come from, over one axis."""
    size, columns = mesh.shape[axis], SHARD_BYTES[mesh.devices.flat[0].platform] // 4
    rows = NamedSharding(mesh, P(axis))
    make = jax.jit(lambda: jnp.broadcast_to(jnp.arange(size, dtype=jnp.float32)[:, None], (size, columns)), out_shardings=rows)
    gather = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.all_gather(x, axis, axis=0, tiled=True), mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False
        )
    )
    x = make()
    gathered = jax.block_until_ready(gather(x))
    correct = all(
        np.array_equal(np.asarray(shard.data[:, [0, -1]]), np.repeat(np.arange(size)[:, None], 2, axis=1))
        for shard in gathered.addressable_shards
    )
    seconds = min(_timed(gather, x) for _ in range(RUNS))
    sent = (size - 1) * columns * 4
    return {
        "devices": size,
        "link": _link(mesh, axis),
        "bytes": sent,
        "seconds": seconds,
        "bytes_per_second": sent / seconds,
        "correct": bool(correct),
    }


def _timed(run: Any, x: jax.Array) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run(x))
    return time.perf_counter() - started


def _link(mesh: Mesh, axis: str) -> str:
    """Whether devices along an axis are of one process, or of several."""
    along = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)
    several = any(len({device.process_index for device in group}) > 1 for group in along.T)
    return "between processes" if several else "inside a process"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
