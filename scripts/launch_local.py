"""Starts a run of several processes on this machine, as a cluster would: each with devices of its own, meeting at a free port.

    python scripts/launch_local.py -n 2 --devices-per-process 4 zjax train --config=configs/llama_tiny.py

Each line of output carries the number of its process. When one fails the others are told to end, and are killed after
`--grace` seconds; the exit status is that of the first that failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="P")
    parser.add_argument("--devices-per-process", type=int, default=1, metavar="D", help="simulated CPU devices of each process")
    parser.add_argument("--grace", type=float, default=10, metavar="S", help="seconds from the first failure to the end of the others")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each process runs")
    arguments = parser.parse_args()
    if not arguments.command or arguments.processes < 1 or arguments.devices_per_process < 1:
        parser.error("needs a positive number of processes and of devices, and a command: -n 2 zjax train --config=FILE")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(arguments.processes),
        "JAX_NUM_CPU_DEVICES": str(arguments.devices_per_process),
    }
    children = [
        subprocess.Popen(
            arguments.command,
            env={**os.environ, **shared, "JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for index in range(arguments.processes)
    ]
    readers = [threading.Thread(target=_relay, args=(index, child), daemon=True) for index, child in enumerate(children)]
    for reader in readers:
        reader.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: _tell(children, number))
    status = _wait(children, arguments.grace)
    for reader in readers:
        reader.join(timeout=5)
    return status


def _wait(children: list[subprocess.Popen[str]], grace: float) -> int:
    """Until all have ended; the status of the first that failed, in the shell's form, or 0."""
    status, deadline = 0, None
    while None in [child.poll() for child in children]:
        failed = next((child for child in children if child.returncode), None)
        if failed and deadline is None:
            status, deadline = _shell(failed.returncode), time.monotonic() + grace
            _tell(children, signal.SIGTERM)
        if deadline and time.monotonic() > deadline:
            _tell(children, signal.SIGKILL)
        time.sleep(0.05)
    return status or next((_shell(child.returncode) for child in children if child.returncode), 0)


def _shell(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _tell(children: list[subprocess.Popen[str]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _relay(index: int, child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        sys.stdout.write(f"[{index}] {line}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
