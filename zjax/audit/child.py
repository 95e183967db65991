"""The process that compiles, with an environment of its own: `main(REQUEST, RESPONSE)`.

It makes the target's mesh, lets the request lower its program on it, looks whether the same program was compiled before,
and writes the compiled program's text and memory figures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from zjax.audit.collectives import Place
from zjax.audit.targets import Target, open_devices, place_of
from zjax.config import MeshConfig

NO_MACHINE_CODE = {"xla_backend_optimization_level": "0"}
"""Machine code, which nothing reads, is not optimized: a quarter of the time. The program and its schedule are the same to the byte."""

Lower = Callable[[Any], tuple[Any, frozenset[str]]]
"""Takes the target's mesh; returns the lowered program and the names of the parameters that unit marks gather in it."""


@dataclass(frozen=True)
class Request:
    """What to compile, and for what."""

    target: Target
    mesh: MeshConfig
    lower: Lower
    compiler_options: dict[str, str] = field(default_factory=dict)
    cache: str = ""
    """Directory of compiled programs; empty for none."""


def main(request_path: str, response_path: str) -> None:
    """Compiles the request; writes `response.json` and `hlo.txt` into the response directory."""
    response = Path(response_path)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        request = cloudpickle.loads(Path(request_path).read_bytes())
        answer = compile_request(request, response)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    (response / "response.json").write_text(json.dumps(answer))


def _end_with_parent() -> None:
    """Waits for the end of stdin, which is the parent's; a compilation nobody waits for would go on for minutes."""
    os.read(0, 1)  # not sys.stdin, whose lock Python would want back when it ends
    os._exit(1)


def compile_request(request: Request, response: Path) -> dict[str, Any]:
    """Compiles, or finds in the cache; returns memory figures and places, and writes the text."""
    devices = open_devices(request.target)

    from zjax.mesh import make_mesh

    mesh = make_mesh(request.mesh, devices)
    with _default_backend(request.target.platform):
        lowered, marked = request.lower(mesh)
    place = place_of(request.target, mesh.shape, mesh.devices.ravel().tolist())
    answer: dict[str, Any] = {"mesh": dict(mesh.shape), "hosts": place.hosts, "coords": place.coords, "marked": sorted(marked)}

    text = lowered.as_text()
    answer["kernels"] = kernels_in(text)
    entry = _cache_entry(request, place, text)
    found = _load(entry)
    if found is None:
        started = time.perf_counter()
        compiled = lowered.compile(compiler_options=NO_MACHINE_CODE | request.compiler_options)
        seconds = time.perf_counter() - started
        hlo, figures = (
            compiled.as_text(),
            memory_figures(compiled.memory_analysis(), request.target.platform) | {"compile_seconds": seconds},
        )
        _store(entry, hlo, figures)
        found = _load(entry) or (hlo, figures)  # of several processes that compile the same, all report the first's
    hlo, figures = found
    (response / "hlo.txt").write_text(hlo)
    return answer | figures


@contextlib.contextmanager
def _default_backend(platform: str) -> Iterator[None]:
    """Lets code that picks a kernel by `jax.default_backend()` pick the target's: this process itself runs on the CPU."""
    import jax

    real = jax.default_backend
    jax.default_backend = lambda: platform
    try:
        yield
    finally:
        jax.default_backend = real


def kernels_in(lowered: str) -> list[str]:
    """Custom-call targets of the library kernels that a lowered program asks for."""
    return sorted(set(re.findall(r"custom_call @((?:__cudnn\$|triton|tpu_custom_call|mosaic)[\w$.]*)", lowered)))


def memory_figures(analysis: Any, platform: str) -> dict[str, int]:
    """Bytes a device by kind, as the compiler counts them; 0 for what it does not tell, as the CPU's the peak with temporaries."""
    names = ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_temp")
    sizes = {name: int(getattr(analysis, f"{name}_size_in_bytes", 0) or 0) for name in names}
    return sizes | {"peak": 0 if platform == "cpu" else int(getattr(analysis, "peak_memory_in_bytes", 0) or 0)}


def _cache_entry(request: Request, place: Place, lowered: str) -> Path | None:
    """The directory of this program in the cache: its name is a hash of all that decides what is compiled."""
    if not request.cache:
        return None
    import jax
    import jaxlib

    versions = [jax.__version__, jaxlib.__version__]
    for compiler in ("libtpu", "jax_cuda12_plugin"):
        try:
            from importlib.metadata import version

            versions.append(version(compiler.replace("_", "-")))
        except ModuleNotFoundError:
            versions.append("none")
    options = repr(sorted(request.compiler_options.items()))
    parts = [lowered, repr(request.target), repr(place), options, os.environ.get("XLA_FLAGS", ""), *versions]
    return Path(request.cache) / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _load(entry: Path | None) -> tuple[str, dict[str, Any]] | None:
    """The text and figures of a whole entry; None where there is none, or a damaged one."""
    if entry is None:
        return None
    try:
        hlo, figures = (entry / "hlo.txt").read_text(), json.loads((entry / "compiled.json").read_text())
    except (OSError, ValueError):
        return None
    return (hlo, figures) if figures.pop("hlo_length", None) == len(hlo) else None


def _store(entry: Path | None, hlo: str, figures: dict[str, Any]) -> None:
    """Puts the compiled program into the cache whole or not at all: several processes may compile the same."""
    if entry is None:
        return
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # without a cache there is still an answer
        temporary.mkdir(parents=True)
        (temporary / "hlo.txt").write_text(hlo)
        (temporary / "compiled.json").write_text(json.dumps(figures | {"hlo_length": len(hlo)}))
        if _load(entry) is None:
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one
            temporary.rename(entry)
    shutil.rmtree(temporary, ignore_errors=True)
