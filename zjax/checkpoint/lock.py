"""One writer to a folder: a lock file that names its run, and outlives a killed run only for a while."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
import warnings
from typing import Any

from etils import epath

from zjax.checkpoint.errors import CheckpointError

LOCK = ".lock"
BEAT_SECONDS = 20.0
"""How often a run says that it lives."""
STALE_SECONDS = 120.0
"""Silence after which a run on another host counts as dead. On the same host its process is looked for instead."""


class Lock:
    """Held from `acquire` to `release`; a thread rewrites the file's time meanwhile."""

    def __init__(self, directory: epath.Path):
        self._file = directory / LOCK
        self._owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "token": uuid.uuid4().hex}
        self._stop: threading.Event | None = None

    @property
    def held(self) -> bool:
        """Whether it was acquired and not yet released."""
        return self._stop is not None

    def acquire(self) -> None:
        """Raises CheckpointError where another run that may live holds it; a dead one's is taken over, with a warning."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        holder = self._read()
        if holder is not None and holder["token"] != self._owner["token"]:
            who = f"process {holder['pid']} on {holder['host']}"
            if holder["pid"] == os.getpid() and holder["host"] == self._owner["host"]:
                raise CheckpointError(f"{self._file.parent} is being written by another Checkpointer of this process: close() it first")
            if _may_live(holder):
                raise CheckpointError(
                    f"{self._file.parent} is being written by another run, {who}: save into another directory, "
                    f"or end that run, or remove {self._file} if it has ended"
                )
            warnings.warn(f"{self._file}: {who}, which held it, has ended; its lock is taken over", stacklevel=3)
            self._write()
        elif holder is None:
            self._create()
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(self._stop,), name="checkpoint lock", daemon=True).start()

    def check(self) -> None:
        """Raises CheckpointError where another run has taken the lock over since, as after a long stop of this one."""
        holder = self._read()
        if holder is None or holder["token"] != self._owner["token"]:
            now = f"process {holder['pid']} on {holder['host']}" if holder else "nobody"
            raise CheckpointError(f"{self._file.parent}: this run held its lock, now {now} does; nothing more is written there")

    def release(self) -> None:
        """Removes the file, if it is still this run's."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            holder = self._read()
            if holder is not None and holder["token"] == self._owner["token"]:
                self._file.unlink(missing_ok=True)

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(BEAT_SECONDS):
            try:
                holder = self._read()
                if holder is None or holder["token"] != self._owner["token"]:
                    return
                self._write()
            except OSError:  # a file system that comes and goes: `check` tells, before anything is written
                continue

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        except ValueError:  # not whole: its writer died in the midst of it
            return {"host": "an unknown host", "pid": 0, "started": None, "token": "", "beat": 0.0}

    def _create(self) -> None:
        if "://" in str(self._file):  # object stores: the last writer wins, and `check` tells the other
            return self._write()
        try:
            with open(self._file, "x") as file:
                file.write(self._text())
        except FileExistsError:
            raise CheckpointError(f"{self._file.parent} is being written by another run, which started at the same time") from None

    def _text(self) -> str:
        return json.dumps({**self._owner, "beat": time.time()})

    def _write(self) -> None:
        unfinished = self._file.with_name(f"{LOCK}-{self._owner['token']}")
        unfinished.write_text(self._text())
        unfinished.replace(self._file)


def _may_live(holder: dict[str, Any]) -> bool:
    if holder["host"] != socket.gethostname():
        return time.time() - holder["beat"] < STALE_SECONDS
    if holder["started"] is None:
        return _exists(holder["pid"])
    return _started(holder["pid"]) == holder["started"]  # the number may be another process's by now


def _started(pid: int) -> str | None:
    """When a process of this host started, in the kernel's ticks; None where it does not run, or /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
