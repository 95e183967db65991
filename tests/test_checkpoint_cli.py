"""`zjax checkpoint list | show | verify | diff`: what they say of whole and of damaged checkpoints, on one device."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from small import snapshot, zjax
from test_checkpoint import filled, plan_on

from zjax import cli
from zjax.checkpoint import Checkpointer


def init(key):
    return {"w": jnp.zeros((512, 64)), "b": jnp.zeros(24)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A workdir whose checkpoints of steps 3 and 4 were saved on 8 devices."""
    workdir = tmp_path_factory.mktemp("run")
    plan = plan_on("2x4", 3, init=init)
    opened = Checkpointer(workdir / "checkpoints")
    opened.save(filled(plan, 3), {"seed": 1}, loss=2.5)
    state = filled(plan, 3)
    moved = type(state)(**{**state.__dict__, "step": filled(plan, 4).step, "params": {**state.params, "b": state.params["b"] + 1}})
    opened.save(moved)
    opened.close()
    return workdir


@pytest.fixture
def workdir(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


def run(capsys, *arguments):
    """Exit status, output, errors; nothing is changed."""
    status = cli.main(["checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_list(workdir, capsys):
    (workdir / "checkpoints" / "9").mkdir()
    before = snapshot(workdir)
    for given in (workdir, workdir / "checkpoints"):
        status, out, err = run(capsys, "list", given, "--json")
        rows = json.loads(out)
        assert (status, err) == (0, "")
        assert [(row["step"], row["whole"]) for row in rows] == [(3, True), (4, True), (9, False)]
        assert rows[0]["mesh"] == {"pipeline": 1, "replica": 2, "fsdp": 4, "expert": 1, "sequence": 1, "tensor": 1}
        assert (rows[0]["loss"], rows[1]["loss"]) == (2.5, None)
        assert rows[0]["leaves"] == len(Checkpointer(workdir / "checkpoints").manifest(3).leaves)
        files = [path for path in (workdir / "checkpoints" / "3").rglob("*") if path.is_file()]
        assert 0.5 * sum(path.stat().st_size for path in files) < rows[0]["bytes"] <= sum(path.stat().st_size for path in files)
        assert "no manifest.json" in rows[2]["problem"]
    status, out, _ = run(capsys, "list", workdir)
    for text in ("replica 2 x fsdp 4", "2.5000", "whole", "no manifest.json: the save was not finished"):
        assert text in out
    assert snapshot(workdir) == before


def test_c49_a_checkpoint_of_eight_devices_is_read_with_one(made):
    """Orbax's metadata needed the devices that had saved. In a process of its own, as users run it."""
    for verb, expected in [("list", "replica 2 x fsdp 4"), ("verify", "whole, every leaf is what was saved")]:
        done = zjax("checkpoint", verb, made, cwd=made)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert done.stderr == ""


def test_show(made, capsys):
    manifest = Checkpointer(made / "checkpoints").manifest(3)
    status, out, _ = run(capsys, "show", made / "checkpoints" / "3")
    assert status == 0
    for path, leaf in manifest.leaves.items():
        line = next(line for line in out.splitlines() if line.split("│")[1:2] and line.split("│")[1].strip() == path)
        assert leaf.checksum in line and leaf.dtype in line
    assert "512x64" in out and '{"seed": 1}' in out and "step 3" in out
    assert json.loads(run(capsys, "show", made, "--json")[1])["step"] == 4  # the newest


def test_verify_names_what_is_damaged(workdir, capsys):
    assert run(capsys, "verify", workdir)[0] == 0
    step = workdir / "checkpoints" / "4"
    path = max((path for path in step.rglob("*") if path.parent.name == "d"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    (workdir / "checkpoints" / "3" / "manifest.json").unlink()
    before = snapshot(workdir)
    status, out, _ = run(capsys, "verify", workdir)
    assert status == 1
    assert f"{workdir}/checkpoints/3: no manifest.json" in out
    leaves = Checkpointer(workdir / "checkpoints").manifest(4).leaves
    damaged = [line for line in out.splitlines() if line.startswith(f"{step}: ") and line.split(": ")[1] in leaves]
    assert damaged and len(damaged) < len(leaves) // 2, out  # not the others
    assert f"{step}: DAMAGED" in out
    found = json.loads(run(capsys, "verify", step, "--json")[1])
    assert list(found) == ["4"] and found["4"]
    assert snapshot(workdir) == before


def test_diff(made, tmp_path, capsys):
    three, four = made / "checkpoints" / "3", made / "checkpoints" / "4"
    status, out, _ = run(capsys, "diff", three, four)
    assert status == 1
    assert out.splitlines()[:-1] == ["step: other values", "params/b: other values"]
    assert out.splitlines()[-1].endswith("leaves are the same, 2 differ")
    assert run(capsys, "diff", three, three)[0] == 0
    opened = Checkpointer(tmp_path)
    opened.save(filled(plan_on("8", 1, init=lambda key: {"w": jnp.zeros((64, 512))}, compute="float32", tx=optax.sgd(1.0)), 3))
    opened.close()
    rows = {row["leaf"]: row["difference"] for row in json.loads(run(capsys, "diff", three, tmp_path, "--json")[1])}
    assert rows["params/w"] == "bfloat16[512, 64] and float32[64, 512]"
    assert rows["params/b"] == f"only in {three}"


def test_the_checksum_of_a_leaf_does_not_depend_on_how_it_was_saved(tmp_path, capsys):
    for index, (mesh, stage) in enumerate([("8", 3), ("2", 1), ("4x2", 2)]):
        opened = Checkpointer(tmp_path / str(index) / "run", chunk_bytes=2**20 if index else 256)
        opened.save(filled(plan_on(mesh, stage), 3))
        opened.close()
    for index in (1, 2):
        status, out, _ = run(capsys, "diff", tmp_path / "0" / "run", tmp_path / str(index) / "run")
        assert status == 0 and "0 differ" in out
    assert run(capsys, "verify", tmp_path / "0" / "run")[0] == 0


@pytest.mark.parametrize("verb", ["list", "show", "verify"])
def test_mistakes_are_told(tmp_path, capsys, verb):
    status, out, err = run(capsys, verb, tmp_path / "no")
    assert (status, out) == (2, "") and f"{tmp_path}/no: no such directory" in err
    status, _, err = run(capsys, verb, tmp_path)
    assert (status, "no checkpoint in" in err) == ((0, False) if verb == "list" else (2, True))
    assert run(capsys, verb, tmp_path, "--config.a=1")[0] == 2
