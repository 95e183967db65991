"""Compiling in a child process: the caller's jax stays as it is, and a compiler crash becomes an error message."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from zjax.audit.child import Request
from zjax.audit.collectives import Place
from zjax.audit.targets import child_environment, require_compiler


class AuditError(RuntimeError):
    """A program that could not be compiled for its target; the message says why and what to do."""


@dataclass(frozen=True)
class Compiled:
    """A compiled program: its scheduled HLO, its memory figures (bytes a device), and where its devices are."""

    hlo: str
    memory: dict[str, int]
    compile_seconds: float
    place: Place
    marked: frozenset[str]
    """Parameters that unit marks gathered when the step was traced."""
    kernels: tuple[str, ...] = ()
    """Library kernels (cuDNN attention, Pallas, Triton) that the step asks for, as custom-call targets."""


def cache_directory() -> str:
    """Where compiled programs are kept: $ZJAX_CACHE_DIR, or zjax/audit under the user's cache; empty turns it off."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zjax" / "audit"
    return os.environ.get("ZJAX_CACHE_DIR", str(default))


def compile_for_target(request: Request) -> Compiled:
    """Compiles in a child process.

    Raises:
      ConfigError: the target's compiler is not installed.
      AuditError: something cannot be pickled (named), the program cannot be built or compiled for the target, or the
        compiler died.
    """
    require_compiler(request.target)
    request = dataclasses.replace(request, cache=request.cache or cache_directory())
    with tempfile.TemporaryDirectory(prefix="zjax-audit-") as folder:
        path = Path(folder)
        (path / "request").write_bytes(_pickled(request))
        environment = child_environment(request.target) | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        command = [
            sys.executable,
            "-c",
            "import sys; from zjax.audit.child import main; main(*sys.argv[1:])",
            str(path / "request"),
            folder,
        ]
        # The child ends when its stdin does: with this process, however that ends.
        reading, writing = os.pipe()
        try:
            child = subprocess.run(command, env=environment, stdin=reading, capture_output=True, text=True, errors="replace")
        finally:
            os.close(reading)
            os.close(writing)
        if not (path / "response.json").exists():
            raise AuditError(f"{request.target.text}: {_crash(child.returncode, child.stderr)}")
        answer = json.loads((path / "response.json").read_text())
        if "error" in answer:
            raise AuditError(f"{request.target.text}: {_readable(answer['error'])}")
        memory = {key: answer[key] for key in ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_temp", "peak")}
        place = Place(answer["mesh"], tuple(answer["hosts"]), tuple(tuple(coord) for coord in answer["coords"]))
        return Compiled(
            (path / "hlo.txt").read_text(), memory, answer["compile_seconds"], place, frozenset(answer["marked"]), tuple(answer["kernels"])
        )


def _crash(status: int, stderr: str) -> str:
    """What is known of a compiler that died without an answer."""
    end = f"ended with status {status}"
    if status < 0:
        end = f"was ended by {signal.Signals(-status).name}" + (" (is this machine out of memory?)" if status == -signal.SIGKILL else "")
    tail = stderr.strip().splitlines()[-15:]
    return "\n".join([f"the compiler's process {end}" + (":" if tail else ""), *tail])


_OUT_OF_MEMORY = (
    re.compile(r"Used (?P<needed>[\d.]+\w) of (?P<there>[\d.]+\w) hbm"),
    re.compile(r"Ran out of memory.*\((?P<needed>[\d.]+\w)\) exceeds available HBM \((?P<there>[\d.]+\w)\)"),
)


def _readable(error: str) -> str:
    """The part of a compiler's message that a person can act on."""
    for found in filter(None, (pattern.search(error) for pattern in _OUT_OF_MEMORY)):
        return (
            f"the program does not fit the chip: it needs {found['needed']} of {found['there']} memory. "
            "Raise the stage, the number of devices or the micro-batches, or set remat='full'\n" + "\n".join(error.splitlines()[:30])
        )
    return "\n".join(error.splitlines()[:40])


def _pickled(request: Request) -> bytes:
    try:
        return cloudpickle.dumps(request)
    except Exception as error:
        raise AuditError(
            f"the step cannot be sent to the process that compiles: {_culprit(request.lower)} ({error}). Make it inside the function that uses it, or pass it as part of the batch"
        ) from error


def _culprit(lower: Any) -> str:
    """Names the part of the step, and the variable it closes over, that cannot be pickled."""
    parts: dict[str, Any] = {}
    for value in (*getattr(lower, "args", ()), *getattr(lower, "keywords", {}).values()):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts |= {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        else:
            parts[getattr(value, "__name__", type(value).__name__)] = value
    for name, value in parts.items():
        if not _can_pickle(value):
            return _closed_over(name, value)
    return _closed_over("it", lower)


def _closed_over(name: str, value: Any, depth: int = 8) -> str:
    for variable, held in _used_by(value).items():
        if not _can_pickle(held):
            if depth and _used_by(held):
                return _closed_over(f"{name} uses {variable!r}, which", held, depth - 1)
            return f"{name} uses {variable!r}, a {type(held).__module__}.{type(held).__qualname__}, which cannot be pickled"
    return f"{name} cannot be pickled"


def _used_by(value: Any) -> dict[str, Any]:
    """What pickling a function takes along: the variables it closes over, the globals it names, the object it is a method of."""
    if isinstance(value, functools.partial):
        return {getattr(each, "__name__", type(each).__name__): each for each in (value.func, *value.args)} | value.keywords
    function: Any = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    used = {} if function is value else dict(getattr(value.__self__, "__dict__", {}))
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            used[variable] = cell.cell_contents
    return used | {each: function.__globals__[each] for each in code.co_names if each in function.__globals__}


def _can_pickle(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
