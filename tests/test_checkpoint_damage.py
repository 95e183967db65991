"""Damaged and unfinished checkpoints: found, named, skipped, never deleted; writers that die, fail or meet."""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small import assert_same_state, leaves, snapshot
from test_checkpoint import filled, plan_on, restore, save

from zjax.checkpoint import Checkpointer, CheckpointError, DamagedError, restoring
from zjax.checkpoint import manifest as manifests
from zjax.checkpoint.lock import LOCK

# A read that fails leaves coroutines of Orbax's that nobody waits for.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def init_larger(key):
    """Enough bytes that most random offsets fall into array data."""
    return {"w": jax.random.normal(key, (256, 64)), "b": jnp.zeros(64), "layers": {"up": jax.random.normal(key, (4, 32, 64))}}


def larger_plan(mesh="8", stage=3):
    return plan_on(mesh, stage, init=init_larger)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 7 and 9."""
    folder = tmp_path_factory.mktemp("two")
    opened = Checkpointer(folder)
    for step in (7, 9):
        opened.save(filled(larger_plan(), step), {"step": step}, loss=float(step))
    opened.close()
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(two_steps, tmp_path / "copy"))


def data_files(step):
    """Everything that holds arrays, or says where they lie."""
    return sorted(path for path in step.rglob("*") if path.is_file() and path.parent.name == "d")


def flip(path, offset, bits=0xFF):
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(bytes(data))


# --- damage is found and named ------------------------------------------------------------------------------------------


def test_a_byte_flipped_anywhere_in_the_data_is_found_and_named(folder):
    """c51. Orbax alone restores most of these without a word."""
    drawn = random.Random(0)
    files = data_files(folder / "9")
    sizes = [path.stat().st_size for path in files]
    names = set(manifests.read(Checkpointer(folder).directory / "9").leaves)
    named_leaves, plan = 0, larger_plan()
    for _ in range(30):
        path = drawn.choices(files, sizes)[0]
        offset, before = drawn.randrange(path.stat().st_size), path.read_bytes()
        flip(path, offset, 1 << drawn.randrange(8))
        with pytest.raises(DamagedError) as error:
            restore(folder, plan, 9)
        mentioned = {line.split(":")[0].strip() for line in str(error.value).splitlines()}
        named_leaves += bool(mentioned & names)
        assert mentioned & names or path.name in str(error.value), (path, offset, str(error.value))
        path.write_bytes(before)
    assert named_leaves >= 25  # the rest fell into the small files that say where arrays lie
    assert_same_state(restore(folder, plan, 9), filled(plan, 9))


@pytest.mark.parametrize("harm", ["deleted", "truncated", "emptied"])
def test_a_data_file_that_is_not_whole_is_named(folder, harm):
    """c51."""
    path = max(data_files(folder / "9"), key=lambda path: path.stat().st_size)
    if harm == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if harm == "truncated" else 0])
    with pytest.raises(DamagedError, match=path.name) as error:
        restore(folder, larger_plan(), 9)
    assert any(f"{leaf}: cannot be read" in str(error.value) for leaf in manifests.read(Checkpointer(folder).directory / "7").leaves)


def test_every_file_is_covered(folder):
    """Whatever file of a step is damaged, the restore says so; but for two of Orbax's, which hold nothing."""
    plan = larger_plan()
    for path in sorted(path for path in (folder / "9").rglob("*") if path.is_file()):
        before = path.read_bytes()
        flip(path, len(before) // 2)
        if path.name in ("commit_success.txt", "_CHECKPOINT_METADATA"):
            assert_same_state(restore(folder, plan, 9), filled(plan, 9))
        else:
            with pytest.raises(DamagedError, match="9"):
                restore(folder, plan, 9)
        path.write_bytes(before)


def test_sampled_verification_checks_every_leaf_in_eight_steps(tmp_path):
    """One leaf in 8, others at every step number."""
    plan = larger_plan()
    checked = []
    for step in range(8):
        save(tmp_path / str(step), filled(plan, step))
        manifest = Checkpointer(tmp_path / str(step)).manifest(step)
        checked += restoring.checked(manifest, manifest.leaves, "sampled")
    assert sorted(checked) == sorted(manifest.leaves)


def test_what_is_not_verified_is_restored_as_it_is(folder):
    """`verify="off"` is for those who check elsewhere: only what cannot be read at all is an error."""
    manifest = json.loads((folder / "9" / "manifest.json").read_text())
    manifest["leaves"]["params/w"]["checksum"] = "0" * 16
    values = {name: value for name, value in manifest.items() if name != "digest"}
    (folder / "9" / "manifest.json").write_text(json.dumps({**values, "digest": manifests._digest(values)}))
    plan = larger_plan()
    with pytest.raises(DamagedError, match="params/w: its checksum is"):
        restore(folder, plan, 9)
    assert_same_state(Checkpointer(folder, verify="off").restore(plan, 9), filled(plan, 9))
    with pytest.raises(CheckpointError, match="must be one of full, sampled, off"):
        Checkpointer(folder, verify="some")


# --- choosing a step ----------------------------------------------------------------------------------------------------


def break_step(step, harm):
    if harm == "no manifest":
        (step / "manifest.json").unlink()
    elif harm == "half a manifest":
        text = (step / "manifest.json").read_text()
        (step / "manifest.json").write_text(text[: len(text) // 2])
    elif harm == "another step's manifest":
        shutil.copy(step.parent / "7" / "manifest.json", step)
    elif harm == "a digit of the manifest":
        text = (step / "manifest.json").read_text()
        (step / "manifest.json").write_text(text.replace('"loss": 9.0', '"loss": 8.0'))
    elif harm == "no data":
        shutil.rmtree(step / "ocdbt.process_0")
    elif harm == "empty":
        shutil.rmtree(step)
        step.mkdir()
    else:
        path = max(data_files(step), key=lambda path: path.stat().st_size)
        flip(path, path.stat().st_size // 2)


HARMS = ["no manifest", "half a manifest", "another step's manifest", "a digit of the manifest", "no data", "empty", "a flipped byte"]


@pytest.mark.parametrize("harm", HARMS)
def test_the_newest_that_verifies_is_taken_and_the_damaged_one_stays(folder, harm):
    break_step(folder / "9", harm)
    before = snapshot(folder)
    plan = larger_plan("4", 1)
    with pytest.warns(UserWarning, match="9"):
        assert_same_state(restore(folder, plan), filled(plan, 7))
    assert snapshot(folder) == before
    with pytest.raises(DamagedError, match="9"):
        restore(folder, plan, 9)


@pytest.mark.parametrize("harm", HARMS)
def test_a_run_that_comes_by_a_damaged_step_again_saves_it_and_keeps_the_damaged_one(folder, harm):
    break_step(folder / "9", harm)
    broken, plan = snapshot(folder / "9"), larger_plan()
    opened = Checkpointer(folder, keep=2)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert int(opened.restore(plan).step) == 7
        for step in (8, 9):
            opened.save(filled(plan, step), loss=1.0)
        opened.close()
    assert sorted(path.name for path in folder.iterdir()) == ["8", "9", "9.damaged-1"]
    assert snapshot(folder / "9.damaged-1") == broken
    assert_same_state(restore(folder, plan), filled(plan, 9))


def test_nothing_whole_is_an_error_that_names_every_step(folder):
    """A run of weeks does not begin anew because its disk is bad."""
    break_step(folder / "9", "a flipped byte")
    break_step(folder / "7", "no manifest")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError) as error:
        restore(folder, larger_plan())
    for text in ("no step in", f"{folder}/7: no manifest.json", f"{folder}/9: damaged"):
        assert text in str(error.value)
    break_step(folder / "9", "no manifest")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="7: no manifest"):
        Checkpointer(folder).resumable_step()
    assert Checkpointer(folder / "none").resumable_step() is None


def test_which_steps_stay(tmp_path):
    """The newest two, those that 4 divides, and the best; damaged ones are not counted and not deleted."""
    plan = larger_plan()
    (tmp_path / "0").mkdir()
    (tmp_path / "3.removed").mkdir()  # of a run that was killed while it removed a step
    opened = Checkpointer(tmp_path, keep=2, keep_every=4, keep_best=True)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for step, loss in [(1, 5.0), (2, 1.0), (3, None), (4, 3.0), (5, 1.0), (6, math.nan), (7, None)]:
            opened.save(filled(plan, step), loss=loss)
        opened.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "4", "6", "7"]
    assert Checkpointer(tmp_path).best_step() == 2
    assert Checkpointer(tmp_path / "none").best_step() is None


def test_the_manifest_says_what_is_there(two_steps):
    manifest = Checkpointer(two_steps).manifest(9)
    plan = larger_plan()
    expected = leaves(filled(plan, 9))
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in manifest.leaves.items()} == {
        path: (x.shape, str(x.dtype)) for path, x in expected.items()
    }
    assert (manifest.step, manifest.loss, manifest.meta) == (9, 9.0, {"step": 9})
    assert manifest.mesh["fsdp"] == 8 and "fsdp" in manifest.leaves["params/w"].spec
    assert manifest.versions["jax"] == jax.__version__
    assert abs(manifest.saved_at - time.time()) < 3600


# --- writers ------------------------------------------------------------------------------------------------------------


def test_two_writers_to_one_folder_are_an_error(tmp_path):
    plan = larger_plan()
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save(filled(plan, 1))
    with pytest.raises(CheckpointError, match="written by another Checkpointer of this process"):
        second.save(filled(plan, 2))
    first.wait()
    assert Checkpointer(tmp_path).latest_step() == 1  # reading needs no lock
    first.close()
    second.save(filled(plan, 2))
    second.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def holder(**values):
    return json.dumps({"host": os.uname().nodename, "pid": 1, "started": None, "token": "theirs", "beat": time.time(), **values})


@pytest.mark.parametrize(
    ("said", "alive"),
    [
        ({"pid": 2**22 + 1}, False),
        ({"pid": os.getppid(), "started": "1"}, False),
        ({"pid": os.getppid()}, True),
        ({"host": "elsewhere"}, True),
        ({"host": "elsewhere", "silent": 600}, False),
        ({"length": 30}, False),
    ],
    ids=["no such process", "another process of that number", "lives", "another host", "another host, silent", "half written"],
)
def test_the_lock_of_a_dead_run_is_taken_over(tmp_path, said, alive):
    silent, length = said.get("silent", 0), said.get("length")
    told = {name: value for name, value in said.items() if name not in ("silent", "length")}
    text = holder(beat=time.time() - silent, **told)[:length]
    (tmp_path / LOCK).write_text(text)
    opened = Checkpointer(tmp_path)
    if alive:
        with pytest.raises(CheckpointError, match=rf"written by another run, process \d+ on .*remove .*{LOCK}"):
            opened.save(filled(larger_plan(), 1))
        assert (tmp_path / LOCK).read_text() == text
    else:
        with pytest.warns(UserWarning, match="taken over"):
            opened.save(filled(larger_plan(), 1))
        opened.close()
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_run_whose_lock_was_taken_writes_no_more(tmp_path):
    """One that was stopped for an hour, and awakes beside its successor."""
    opened = Checkpointer(tmp_path)
    opened.save(filled(larger_plan(), 1))
    opened.wait()
    (tmp_path / LOCK).write_text(holder(host="elsewhere"))
    with pytest.raises(CheckpointError, match="on elsewhere does; nothing more is written"):
        opened.save(filled(larger_plan(), 2))
    opened.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "1"]


@pytest.fixture
def small_files():
    """Files cannot grow beyond 64 KiB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("surfaces_at", ["check", "wait", "save", "close"])
def test_a_failed_write_surfaces_and_older_steps_stay(tmp_path, request, surfaces_at):
    """c52. A file that may not grow stands for a full disk."""

    def init(key):
        return {"w": jax.random.normal(key, (512, 512))}

    plan = plan_on("8", 3, init=init)
    opened = Checkpointer(tmp_path)
    opened.save(filled(plan, 1))
    opened.wait()
    request.getfixturevalue("small_files")
    opened.save(filled(plan, 2))
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved in .*earlier steps are as they were"):
        if surfaces_at == "check":
            until = time.monotonic() + 30
            while time.monotonic() < until:
                opened.check()
                time.sleep(0.01)
        else:
            {"wait": opened.wait, "save": lambda: opened.save(filled(plan, 3)), "close": opened.close}[surfaces_at]()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    assert_same_state(restore(tmp_path, plan), filled(plan, 1))
    if surfaces_at != "close":
        opened.save(filled(plan, 3))  # the remains of step 2 are in nobody's way
        opened.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert_same_state(restore(tmp_path, plan, 1), filled(plan, 1))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_the_older_steps_are_good(small_disk):
    def init(key):
        return {"w": jax.random.normal(key, (256, 512))}

    plan = plan_on("8", 3, init=init)  # 2 bytes a parameter, and 12 of master and moments: 1.8 MB a step
    opened = Checkpointer(small_disk)
    for step in (1, 2):
        opened.save(filled(plan, step))
        opened.wait()
    opened.save(filled(plan, 3))
    with pytest.raises(CheckpointError, match=r"step 3 could not be saved in .*(No space left|full).*earlier steps are as they were"):
        opened.wait()
    for step in (1, 2):
        assert_same_state(restore(small_disk, plan, step), filled(plan, step))
    (small_disk / "1" / "manifest.json").unlink()
    shutil.rmtree(small_disk / "1")
    opened.save(filled(plan, 3))  # room again: the remains of the failed save are gone
    opened.close()
    assert sorted(path.name for path in small_disk.iterdir()) == ["2", "3"]
    assert_same_state(restore(small_disk, plan), filled(plan, 3))
