"""A trace of some steps of a run, which XProf, TensorBoard and Perfetto open."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from zjax.fields import ConfigError


def parse_steps(text: str) -> tuple[int, int]:
    """The first and last step of `5` or `10:12`. ConfigError for anything else."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (0, 0)
    if not 0 < first <= last:
        raise ConfigError(f"--profile={text}: write the steps to trace, counted from 1, as 10 or 10:12")
    return first, last


class Profile:
    """Traces steps `first` to `last` into a folder; a context manager, which ends a trace that is under way."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        """Args: the steps, or None to trace none; the folder, which jax makes."""
        self._steps, self._folder, self._tracing = steps, folder, False

    def before(self, step: int) -> None:
        """Starts the trace at the first step, or at the first that a resumed run still has."""
        if self._steps and not self._tracing and self._steps[0] <= step <= self._steps[1]:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def after(self, step: int, outputs: Any) -> bool:
        """Ends the trace when the last step's outputs are there; returns whether it did."""
        if not self._tracing or self._steps is None or step < self._steps[1]:
            return False
        jax.block_until_ready(outputs)
        return self._stop()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> bool:
        if self._tracing:
            jax.profiler.stop_trace()
        self._tracing, self._steps = False, None
        return True
