"""What the two sides of a step benchmark share: sizes, batches, and processes that take a step when they are told to.

No jax and no torch in here: each side may have an environment of its own.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = {
    "small": {
        "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "d_ff": 176, "vocab_size": 512, "sequence": 64, "batch": 8,
    },
    "peer": {
        "d_model": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "d_ff": 1408, "vocab_size": 8192, "sequence": 256, "batch": 8,
    },
}  # fmt: skip
"""`peer` has 34,087,424 parameters."""
ADAMW = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PJRT_NPROC": "1"}
"""Environment of a process, torch's or jax's, that computes in one thread."""
USED_TOKENS = 128
"""So few of the vocabulary's tokens occur that the loss falls from the first step."""


def tokens_of(sizes: dict[str, int], step: int) -> np.ndarray:
    """The global batch of a step, int32 [batch, sequence + 1]: inputs, and one token later the targets."""
    drawn = np.random.default_rng(1000 + step).integers(0, USED_TOKENS, (sizes["batch"], sizes["sequence"] + 1))
    return (drawn * (sizes["vocab_size"] // USED_TOKENS)).astype(np.int32)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def serve(build) -> None:
    """A process's side: `build() -> (prepare, run, about)`, then one step, `run(prepare(index)) -> loss`, a line of stdin.

    `run` is what is timed; it must return when the step's work is done.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries greet on stdout
    prepare, run, about = build()
    print(json.dumps(about), file=replies, flush=True)
    index = 0
    for line in sys.stdin:
        if line == "reset\n":
            reply = {"reset": reset_peak_rss()}
        else:
            batch = prepare(index)
            wall, cpu = time.perf_counter(), time.process_time()
            loss = run(batch)
            reply = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu, "loss": loss}
            index += 1
        print(json.dumps(reply | {"peak_rss": peak_rss()}), file=replies, flush=True)


def reset_peak_rss() -> bool:
    """Starts the peak anew at what is held now, so that it leaves out imports, compilation and initialisation."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss() -> int | None:
    """Bytes: the kernel's VmHWM. Not `ru_maxrss`, which a process starts with its parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


class Group:
    """The processes of one variant, seen from their parent. Close it, or use it in a `with`."""

    def __init__(self, name: str, command: list[str], specs: list[dict], environment: dict[str, str]):
        self.name = name
        self.steps: list[dict] = []
        """What each step took: the slowest process's seconds, all processes' CPU seconds, their mean loss."""
        self.steps_peak_rss: int | None = None
        """Bytes: the highest of a process since `reset`; None where the kernel does not tell."""
        self.about: dict = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the group)
        self._processes = [
            subprocess.Popen(
                [*command, json.dumps(spec)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
            )
            for spec in specs
        ]

    def __enter__(self) -> "Group":
        try:
            self.about = self._replies()[0]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def step(self) -> None:
        """One step in all processes at once, on the batch of its number."""
        replies = self._ask("step")
        self.steps.append(
            {
                "seconds": max(reply["seconds"] for reply in replies),
                "cpu_seconds": sum(reply["cpu_seconds"] for reply in replies),
                "loss": sum(reply["loss"] for reply in replies) / len(replies),
            }
        )
        if self.steps_peak_rss is not None:
            self.steps_peak_rss = max(reply["peak_rss"] for reply in replies)

    def reset(self) -> None:
        """Ends the warm-up: the peak memory is counted from here."""
        replies = self._ask("reset")
        self.steps_peak_rss = max(reply["peak_rss"] for reply in replies) if all(reply["reset"] for reply in replies) else None

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.stdin.close()  # the end of its commands
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._errors.close()

    def _ask(self, command: str) -> list[dict]:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has died: `_replies` says so
                process.stdin.write(f"{command}\n".encode())
        return self._replies()

    def _replies(self) -> list[dict]:
        return [json.loads(self._line(process)) for process in self._processes]

    def _line(self, process) -> bytes:
        # While one is waited for, another may have died.
        while not select.select([process.stdout], [], [], 1)[0]:
            if any(each.poll() is not None for each in self._processes):
                break
        line = b"" if not select.select([process.stdout], [], [], 0)[0] else process.stdout.readline()
        if not line.endswith(b"\n"):
            self._errors.seek(0)
            raise RuntimeError(f"{self.name}: a process ended early:\n{self._errors.read().decode(errors='replace')[-5000:]}")
        return line
