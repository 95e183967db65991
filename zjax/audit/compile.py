"""Compiling in a child process: the caller's jax stays as it is, and a compiler crash becomes an error message."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
        command = [sys.executable, "-m", "zjax.audit.child", str(path / "request"), folder]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        if not (path / "response.json").exists():
            tail = "\n".join(child.stderr.strip().splitlines()[-15:])
            raise AuditError(f"{request.target.text}: the compiler's process ended with status {child.returncode}:\n{tail}")
        answer = json.loads((path / "response.json").read_text())
        if "error" in answer:
            raise AuditError(f"{request.target.text}: {_readable(answer['error'])}")
        memory = {key: answer[key] for key in ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_temp", "peak")}
        place = Place(answer["mesh"], tuple(answer["hosts"]), tuple(tuple(coord) for coord in answer["coords"]))
        return Compiled((path / "hlo.txt").read_text(), memory, answer["compile_seconds"], place, frozenset(answer["marked"]))


def _readable(error: str) -> str:
    """The part of a compiler's message that a person can act on."""
    oom = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", error)
    if oom:
        return (
            f"the program does not fit the chip: it needs {oom.group(1)} of {oom.group(2)} memory. "
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


def _closed_over(name: str, value: Any) -> str:
    function: Callable[..., Any] | None = getattr(value, "__func__", value) if callable(value) else None
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{name} cannot be pickled"
    variables = dict(zip(code.co_freevars, (cell.cell_contents for cell in getattr(function, "__closure__", None) or ()), strict=False))
    scope = getattr(function, "__globals__", {})
    variables |= {each: scope[each] for each in code.co_names if each in scope}
    for variable, held in variables.items():
        if not _can_pickle(held):
            return f"{name} uses {variable!r}, a {type(held).__module__}.{type(held).__qualname__}, which cannot be pickled"
    return f"{name} cannot be pickled"


def _can_pickle(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
