"""Starting a run of several processes, the same way everywhere: one process, SLURM, Open MPI, TPU pods, JobSets, by hand.

Before jax connects, the processes meet at the coordinator's address: who is missing is said by name, where jax would end
every process with a C++ stack trace. Afterwards jax's coordination service watches them by heartbeats.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from zjax.fields import ConfigError

TIMEOUT = 300
"""Seconds to wait for the other processes."""
HEARTBEAT = 60
"""Seconds without a sign of life after which a process counts as lost, and the others end with an error."""
PATIENCE = 5
"""Seconds to wait for what a connection says: one that says nothing must not hold up the others."""
FIRST_PORT = 61440
"""Of the ports from which a SLURM or Open MPI job takes one by its number, as jax does."""
PORTS = 4096


class DistributedError(RuntimeError):
    """Processes that did not come up or do not belong together; the message names them."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where the processes of a run meet, and which of them this is."""

    coordinator: str
    """`host:port` of process 0."""
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None
    """GPUs of the host that this process has; None for all."""
    found_by: str = "arguments"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float = TIMEOUT,
    heartbeat: int = HEARTBEAT,
) -> Peers | None:
    """Joins this process to its run, before any other use of jax; calling it again changes nothing.

    What is not given is taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from SLURM or Open
    MPI; on TPU pods jax finds it. Where nothing tells of other processes this one is alone.

    Args:
      coordinator: `host:port` at which process 0 can be reached.
      processes: how many there are.
      process: which of them this is, from 0.
      timeout: seconds to wait for the others.
      heartbeat: seconds after which a process that went silent is given up and all others end with an error.

    Returns:
      Who the processes are; None for a single one, and where jax found them by itself (TPU pods).

    Raises:
      ConfigError: arguments or variables that do not say all that is needed, or contradict each other.
      DistributedError: processes that did not come up in time, or were started as part of another run.
    """
    if jax.distributed.is_initialized():
        return None
    peers = find_peers(os.environ, coordinator, processes, process)
    if peers is None:
        if _on_tpu_pod():
            jax.distributed.initialize(initialization_timeout=int(timeout), heartbeat_timeout_seconds=heartbeat)
        return None
    if peers.processes == 1:
        return None
    meet(peers, timeout)
    jax.distributed.initialize(
        peers.coordinator,
        peers.processes,
        peers.process,
        local_device_ids=peers.local_devices,
        initialization_timeout=int(timeout),
        heartbeat_timeout_seconds=heartbeat,
    )
    return peers


def find_peers(
    environment: Mapping[str, str], coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> Peers | None:
    """The peers that arguments, jax's variables or a launcher's tell of; None where nothing does. Raises as `initialize`."""
    given = {
        "coordinator": coordinator or environment.get("JAX_COORDINATOR_ADDRESS"),
        "processes": _number(environment, "JAX_NUM_PROCESSES") if processes is None else processes,
        "process": _number(environment, "JAX_PROCESS_ID") if process is None else process,
    }
    launched = _slurm(environment) or _open_mpi(environment)
    values = {name: getattr(launched, name) if value is None and launched else value for name, value in given.items()}
    if all(value is None for value in values.values()):
        return None
    missing = [name for name, value in values.items() if value in (None, "")]
    if missing:
        variables = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}
        raise ConfigError(
            f"distributed: {', '.join(f'{name}={value!r}' for name, value in values.items())}: "
            f"{' and '.join(missing)} must be said too; pass it, or set {', '.join(variables[name] for name in missing)}"
        )
    address, count, index = str(values["coordinator"]), int(values["processes"] or 0), int(values["process"] or 0)
    if not re.fullmatch(r".+:\d+", address):
        raise ConfigError(f"distributed: coordinator={address!r}: write it as host:port")
    if not 0 <= index < count:
        raise ConfigError(f"distributed: process={index}: must lie in [0, {count}), as there are processes={count}")
    return Peers(
        coordinator=address,
        processes=count,
        process=index,
        local_devices=launched.local_devices if launched else None,
        found_by="arguments" if launched is None or None not in given.values() else launched.found_by,
    )


def meet(peers: Peers, timeout: float) -> None:
    """Returns when every process of the run has come to the coordinator's address. Raises DistributedError if one does not."""
    until = time.monotonic() + timeout
    if peers.process == 0:
        _receive(peers, until, timeout)
    else:
        _report(peers, until, timeout)


def _receive(peers: Peers, until: float, timeout: float) -> None:
    """Process 0: waits for the others, then tells all of them to go on, or who is missing."""
    port = int(peers.coordinator.rsplit(":", 1)[1])
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(_listen(port))
        except OSError as error:
            raise DistributedError(
                f"process 0 cannot listen at port {port} of {peers.coordinator}: {error.strerror}; use another"
            ) from error
        complaint = ""
        while len(came) < peers.processes - 1 and not complaint:
            listening.settimeout(max(0.01, until - time.monotonic()))
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                missing = [str(index) for index in range(1, peers.processes) if index not in came]
                complaint = (
                    f"{len(missing)} of {peers.processes} processes did not come to {peers.coordinator} within {timeout:g} s: "
                    f"{_listed(missing)}; see that they are started, and reach that address"
                )
                break
            stack.enter_context(connection)
            hello = _read(connection, min(until, time.monotonic() + PATIENCE))
            if not {"process", "processes"} <= hello.keys():
                continue  # something else knocked
            index = hello["process"]
            if hello["processes"] != peers.processes or not 0 < index < peers.processes or index in came:
                complaint = (
                    f"process {index} of {hello['processes']} came to {peers.coordinator}, where process 0 of {peers.processes} waits"
                    + (": it is there twice" if index in came else "")
                    + "; give every process the same count, and an index of its own"
                )
            came[index] = connection
        for connection in came.values():
            _send(connection, {"error": complaint})
    if complaint:
        raise DistributedError(complaint)


def _report(peers: Peers, until: float, timeout: float) -> None:
    """Every other process: says that it is there, and waits for the word to go on."""
    host, port = peers.coordinator.rsplit(":", 1)
    failure: OSError | None = None
    while time.monotonic() < until:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.1, until - time.monotonic())) as connection:
                _send(connection, {"process": peers.process, "processes": peers.processes})
                answer = _read(connection, until + PATIENCE)  # what process 0 says when its own time is over
            if "error" in answer:
                if answer["error"]:
                    raise DistributedError(str(answer["error"]))
                return
            failure = OSError("it closed the connection")
        except OSError as error:
            failure = error
        time.sleep(0.2)
    raise DistributedError(
        f"process {peers.process} of {peers.processes}: process 0 did not answer at {peers.coordinator} within {timeout:g} s"
        f" ({failure}); see that it is started, and that no firewall is between"
    )


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, until: float) -> dict[str, int]:
    """One message; empty if none came in time or it is not one."""
    connection.settimeout(max(0.1, until - time.monotonic()))
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < 10_000 and (part := connection.recv(4096)):
            text += part
        message = json.loads(text)
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r}: must be a number")
    return int(text)


def _slurm(environment: Mapping[str, str]) -> Peers | None:
    """A job step of several tasks (`srun`). With one task a host that task has all its GPUs, else each has one."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in environment for name in needed):
        return None
    job, nodes, tasks, process, local = (environment[name] for name in needed)
    alone = set(re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", "")).split(",")) == {"1"}
    return Peers(
        coordinator=f"{_first_host(nodes)}:{FIRST_PORT + int(job) % PORTS}",
        processes=int(tasks),
        process=int(process),
        local_devices=None if alone else (int(local),),
        found_by="SLURM",
    )


def _first_host(nodes: str) -> str:
    """`gpu07` of `gpu[07-10,12],cpu1`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    assert found is not None
    return found.group(1) + (found.group(2) or "")


def _open_mpi(environment: Mapping[str, str]) -> Peers | None:
    """`mpirun` of Open MPI; version 5 tells no address any more, so JAX_COORDINATOR_ADDRESS must."""
    if not {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= environment.keys():
        return None
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    job = re.match(r"\d+", uri)
    address = f"{host.group(1) or host.group(2)}:{FIRST_PORT + int(job.group()) // PORTS % PORTS}" if host and job else ""
    local = environment.get("OMPI_COMM_WORLD_LOCAL_RANK")
    several = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != "1"
    return Peers(
        coordinator=address,
        processes=int(environment["OMPI_COMM_WORLD_SIZE"]),
        process=int(environment["OMPI_COMM_WORLD_RANK"]),
        local_devices=(int(local),) if local is not None and several else None,
        found_by="Open MPI",
    )


def _on_tpu_pod() -> bool:
    """Whether this is a host with TPU chips: on one alone jax finds one process."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")) and os.environ.get("JAX_PLATFORMS", "tpu") != "cpu"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return f"process{'es' if len(names) > 1 else ''} {shown}" + (", ..." if len(names) > 10 else "")
