"""What each device of a process holds over the steps of a run: `memory/process-P.jsonl` and a picture of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax

from zjax.metrics import lines_until

GIB = 2**30


def held_bytes(devices: Sequence[jax.Device]) -> dict[int, dict[str, int]]:
    """Bytes that this process's devices hold now, by device id: `in_use`, and where the backend tells, `peak` and `limit`.

    XLA's CPU backend tells nothing: there, `in_use` adds up the arrays that are alive.
    """
    told = {device.id: device.memory_stats() for device in devices}
    if all(stats is None for stats in told.values()):
        return {device: {"in_use": held} for device, held in _alive(devices).items()}
    names = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
    return {device: {name: int(stats[key]) for name, key in names.items() if stats and key in stats} for device, stats in told.items()}


def _alive(devices: Sequence[jax.Device]) -> dict[int, int]:
    held = {device.id: 0 for device in devices}
    for array in jax.live_arrays():
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize if _has_bytes(array) else 0
        for device in array.sharding.addressable_devices:
            if device.id in held:
                held[device.id] += size
    return held


def _has_bytes(array: jax.Array) -> bool:
    return not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)  # the words of PRNG keys: a handful


class MemoryLog:
    """Appends `{"step", "devices": {id: {"in_use", "peak", "limit"}}}` a step; lines of steps after `resumed_at` are taken out."""

    def __init__(self, folder: Path, resumed_at: int, devices: Sequence[jax.Device]):
        """Args: a folder of the run, which is made; the step the run starts after; the mesh's devices, of which this process's are logged."""
        self._devices = [device for device in devices if device.process_index == jax.process_index()]
        self._picture = folder / f"process-{jax.process_index()}.png"
        path = self._picture.with_suffix(".jsonl")
        folder.mkdir(parents=True, exist_ok=True)
        self.lines = lines_until(path, resumed_at)
        self._file = path.open("a")

    def write(self, step: int) -> None:
        """What is held now, with the step that was given out last."""
        self.lines.append({"step": step, "devices": {str(device): held for device, held in held_bytes(self._devices).items()}})
        self._file.write(json.dumps(self.lines[-1]) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Draws the steps so far, and closes the file."""
        self._file.close()
        if self.lines:
            self._draw()

    def _draw(self) -> None:
        from matplotlib.figure import Figure  # a slow import that only the end of a run needs

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        steps = [line["step"] for line in self.lines]
        for name, style in (("in_use", "-"), ("peak", "--"), ("limit", ":")):
            for device in self.lines[-1]["devices"]:
                held = [line["devices"].get(device, {}).get(name, math.nan) / GIB for line in self.lines]
                if not all(map(math.isnan, held)):
                    axes.plot(steps, held, style, label=f"device {device}, {name.replace('_', ' ')}")
        axes.set(xlabel="step", ylabel="GiB", title="Memory by device", ylim=(0, None))
        axes.legend(fontsize="x-small", ncols=2)
        axes.grid(alpha=0.3)
        figure.savefig(self._picture, dpi=120)
