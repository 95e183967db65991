"""The command line: what `zjax plan` says, and that a mistake ends in one line and leaves nothing behind."""

import json
import re
import resource
import shlex
import shutil
import subprocess

import jax
import pytest
from small import (
    COMMAND,
    REPO,
    compiled_fast,
    environment,
    run_quietly,
    shared_folder,
    small_config,
    small_overrides,
    snapshot,
    write_corpus,
    zjax,
)

from zjax.checkpoint import Checkpointer
from zjax.cli import main
from zjax.mesh import make_mesh
from zjax.state import init_state
from zjax.train import plan_run

CONFIGS = sorted((REPO / "configs").glob("*.py"))
UNITS = {"MiB": 2**20, "GiB": 2**30, "GB": 10**9}


def planned(capsys, *arguments):
    """What `zjax plan --json` prints, as a dictionary."""
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def config(name):
    return f"--config={REPO / 'configs' / name}.py"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


# --- plan ---------------------------------------------------------------------------------------------------------------


def test_plan_json_has_the_published_keys(capsys):
    report = planned(capsys, config("zero2"))
    assert report.keys() == {"parameters", "devices", "mesh", "engine", "per_device", "traffic_per_step", "traffic_by_link"}
    assert report["per_device"].keys() == {"params", "gradients", "master", "optimizer", "secondary", "host", "model_state"}
    assert report["traffic_per_step"].keys() == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "total"}
    assert report["traffic_by_link"].keys() == {"inside", "between"}
    assert report["mesh"]["fsdp"] == report["devices"] == 8
    sizes = {name: value for section in ("per_device", "traffic_per_step", "traffic_by_link") for name, value in report[section].items()}
    assert {name for name, value in sizes.items() if type(value) is not int} == set()
    held = report["per_device"]
    assert held["model_state"] == sum(held[part] for part in ("params", "gradients", "master", "optimizer", "secondary"))
    assert sum(report["traffic_by_link"].values()) == report["traffic_per_step"]["total"]


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.875)])
def test_figure_1_of_the_zero_paper(capsys, stage, gigabytes):
    report = planned(capsys, config("zero_paper"), f"--config.zero.stage={stage}")
    assert (report["parameters"], report["devices"]) == (7_500_000_000, 64)
    assert report["per_device"]["model_state"] / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("stage", "bytes_a_parameter"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_llama2_7b_holds_the_bytes_of_the_stages_formula(capsys, stage, bytes_a_parameter):
    report = planned(capsys, config("llama2_7b"), "--config.mesh.fsdp=8", f"--config.zero.stage={stage}")
    assert report["per_device"]["model_state"] == pytest.approx(bytes_a_parameter * report["parameters"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama2_7b", 6_738_415_616), ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496)]
)
def test_presets_have_the_released_parameter_counts(capsys, name, parameters):
    assert planned(capsys, config(name))["parameters"] == parameters


def test_planning_a_7b_model_takes_seconds_and_one_line_of_stdout():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = zjax("plan", config("llama2_7b"), "--config.mesh.fsdp=8", "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # The seconds of a processor that nothing else wants; a busy machine takes longer by the clock.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert json.loads(done.stdout)["devices"] == 8
    assert done.stderr == ""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_plans_as_its_docstring_says(capsys, monkeypatch, path):
    """The docstring names its command, and every size in it is what that command plans, to the digit."""
    monkeypatch.chdir(REPO)
    doc = path.read_text().split('"""')[1]
    commands = [shlex.split(line) for line in re.findall(r"^    zjax (.*)$", doc, re.MULTILINE)]
    assert commands and all(f"--config=configs/{path.name}" in command for command in commands)
    plan = next((command for command in commands if command[0] == "plan"), ["plan", *commands[0][1:]])
    shared = [option for option in plan[1:] if option != "--json" and not option.startswith("--config.zero.stage")]

    def model_state(stage=None):
        return planned(capsys, *shared, *([] if stage is None else [f"--config.zero.stage={stage}"]))["per_device"]["model_state"]

    checked = 0
    for figure, unit in re.findall(r"([\d.]+) (MiB|GiB) of model state", doc) + re.findall(r"model state ([\d.]+) (GiB) a device", doc):
        assert shown(model_state(), unit, figure) == figure
        checked += 1
    for figure, stage in re.findall(r"([\d.]+) at stage (\d)", doc):
        assert shown(model_state(stage), "GiB", figure) == figure
        checked += 1
    for figures, unit in re.findall(r"Model state a device: (.*) (GB) at stages 0 to 3", doc):
        for stage, figure in enumerate(re.findall(r"[\d.]+", figures)):
            assert shown(model_state(stage), unit, figure) == figure
            checked += 1
    for sends in re.findall(r"^A step sends.*$", doc, re.MULTILINE):
        report = planned(capsys, *shared)
        figures = re.findall(r"([\d.]+) (MiB|GiB)", sends)
        sent = [report["traffic_per_step"]["total"]] if len(figures) == 1 else report["traffic_by_link"].values()
        for value, (figure, unit) in zip(sent, figures, strict=True):
            assert shown(value, unit, figure) == figure
            checked += 1
    assert checked


def shown(value, unit, figure):
    """`value` in a unit with as many decimals as `figure` has."""
    return f"{value / UNITS[unit]:.{len(figure.partition('.')[2])}f}"


def test_plan_table_names_every_leaf_and_reason(capsys):
    assert main(["plan", config("llama_tiny"), "--config.mesh.fsdp=7"]) == 0
    out = capsys.readouterr().out
    for leaf in ("params/layers/wq", "opt_state/inner/0/mu/embed/table", "step", "skipped_steps"):
        assert re.search(rf"^ *{leaf} ", out, re.MULTILINE), leaf
    assert re.search(r"^ *params/layers/wq .*no dim divides", out, re.MULTILINE)
    assert "MiB a device sends, per step" in out


def test_a_reader_that_leaves_early_is_no_error():
    """`zjax plan | head -1`: the rest is not wanted, and that is all."""
    command = [COMMAND, "plan", config("llama_tiny")]
    child = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0)
    child.stdout.close()  # before anything is written
    assert "Traceback" not in child.communicate(timeout=60)[1]


# --- mistakes -----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown key": (["--config.zero.stag=2"], ["zero.stag", "did you mean 'zero.stage'"]),
    "unknown section": (["--config.optimiser.name=adam"], ["optimiser", "did you mean 'optimizer'"]),
    "value for a section": (["--config.zero=3"], ["zero=3", "section"]),
    "below a value": (["--config.steps.x=3"], ["steps"]),
    "degree that does not divide": (["--config.mesh.tensor=3"], ["tensor 3", "8 % 3 = 2"]),
    "degrees of other devices": (["--config.mesh.fsdp=3"], ["fsdp 3", "8 devices"]),
    "two inferred degrees": (["--config.mesh.replica=-1"], ["mesh.replica and mesh.fsdp"]),
    "batch over devices": (["--config.data.global_batch=12"], ["12 rows", "fsdp 8", "12 % 8 = 4"]),
    "batch over micro-batches": (["--config.accumulation.micro_batches=8"], ["32 rows", "micro_batches=8", "32 % 64 = 32"]),
    "longer than the rotary table": (["--config.data.sequence_length=65"], ["data.sequence_length=65", "model.max_sequence=64"]),
    "missing corpus": (["--config.data.path=nowhere.txt"], ["data.path='nowhere.txt'", "does not exist"]),
    "empty corpus": (["--config.data.path=empty.txt"], ["data.path='empty.txt'", "empty"]),
    "corpus of one token": (["--config.data.path=one.bin"], ["data.path", "1 token", "2"]),
    "unknown suffix": (["--config.data.path=text.md"], ["text.md", ".md", ".txt"]),
    "not utf-8": (["--config.data.path=latin.txt"], ["latin.txt", "utf-8"]),
    "jsonl without text": (["--config.data.path=rows.jsonl"], ["data.text_field='text'", "rows.jsonl:2"]),
    "vocabulary too small": (["--config.model.vocab_size=100"], ["model.vocab_size=100", "256"]),
    "workdir below a file": (["--workdir=text.md/run"], ["workdir text.md/run", "--workdir"]),
    "workdir is a file": (["--workdir=text.md"], ["workdir text.md", "--workdir"]),
    "wrong type": (["--config.steps=ten"], ["steps='ten'", "must be int, not str"]),
    "fraction of a step": (["--config.steps=1.5"], ["steps=1.5", "must be int, not float"]),
    "number in quotes": (["--config.zero.stage='3'"], ["zero.stage='3'", "must be int, not str"]),
    "space for an equals sign": (["--config.steps", "5"], ["--config.steps", "VALUE"]),
    "unknown option": (["--stage=3"], ["'--stage=3'", "--config.a.b=VALUE"]),
    "stray word": (["please"], ["'please'"]),
    "option of another command": (["--json"], ["'--json'"]),
    "no devices": (["--devices=0"], ["--devices=0", "positive"]),
    "fewer than no devices": (["--devices=-2"], ["--devices=-2", "positive"]),
    "unknown preset": (["--config.model.preset=llama2_7B"], ["model.preset='llama2_7B'", "llama2_7b"]),
    "unknown optimizer": (["--config.optimizer.name=adamW"], ["did you mean 'adamw'"]),
    "knob of another optimizer": (["--config.optimizer.momentum=0.9"], ["optimizer.momentum", "adamw"]),
    "warm-up beyond the run": (["--config.optimizer.warmup_steps=6"], ["optimizer.warmup_steps=6", "steps=5"]),
    "pattern of no leaf": (["--config.zero.ignored=norms"], ["zero.ignored", "'norms'"]),
    "what is not there yet": (["--config.mesh.sequence=2"], ["mesh.sequence=2", "sequence parallelism is not available"]),
    "negative seed": (["--config.seed=-1"], ["seed=-1"]),
    "seed beyond 32 bits": (["--config.seed=4294967296"], ["seed=4294967296"]),
    "seed beyond 64 bits": (["--config.seed=99999999999999999999"], ["seed=99999999999999999999"]),
    "infinite learning rate": (["--config.optimizer.learning_rate=1e999"], ["optimizer.learning_rate=inf"]),
    "missing config": (["--config=nope.py"], ["--config=nope.py", "no such file"]),
    "config with a typo": (["--config=goood.py"], ["did you mean good.py"]),
    "config without get_config": (["--config=without.py"], ["--config=without.py", "get_config"]),
    "config of another kind": (["--config=plain.py"], ["--config=plain.py", "ConfigDict", "dict"]),
    "config that is a value": (["--config=value.py"], ["--config=value.py", "get_config"]),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, and the current one: a config, a corpus, and files that are no corpus and no config."""
    write_corpus(tmp_path / "corpus.txt", 500)
    (tmp_path / "good.py").write_text("from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict()\n")
    (tmp_path / "without.py").write_text("get_confg = None\n")
    (tmp_path / "plain.py").write_text("def get_config():\n    return {'steps': 3}\n")
    (tmp_path / "value.py").write_text("get_config = 3\n")
    (tmp_path / "lookup.py").write_text("def get_config():\n    return {}['stage']\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.bin").write_bytes(b"\1\0")
    (tmp_path / "text.md").write_text("text")
    (tmp_path / "latin.txt").write_bytes("née".encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_one_error(status, out, err, *mentioned):
    """A mistake's outcome: status 2, one line on stderr that says it besides warnings, no traceback, nothing on stdout."""
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith(("no accelerator: ", "zjax: warning: "))]
    assert len(lines) == 1 and re.match("zjax (train|plan): error: .", lines[0]), err
    for text in mentioned:
        assert text in lines[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_line_and_leaves_nothing(folder, capsys, mistake):
    options, mentioned = MISTAKES[mistake]
    before = snapshot(folder)
    status = main(["train", "--config=good.py", "--workdir=run", *small_overrides("corpus.txt"), *options])
    assert_one_error(status, *capsys.readouterr(), *mentioned)
    assert snapshot(folder) == before


@pytest.mark.parametrize("devices", [0, -2])
def test_planning_for_no_devices_is_a_mistake(capsys, devices):
    status = main(["plan", config("llama_tiny"), f"--devices={devices}", "--json"])
    assert_one_error(status, *capsys.readouterr(), f"--devices={devices}", "positive")


def test_an_error_inside_get_config_is_not_taken_for_its_absence(folder, capsys):
    assert_one_error(main(["plan", "--config=lookup.py"]), *capsys.readouterr(), "lookup.py", "KeyError: 'stage' (line")


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["plan", "--devices=two", config("zero2")]], ids=" ".join)
def test_usage_errors_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_mistake_in_a_process_of_its_own(folder):
    before = snapshot(folder)
    run = ["train", "--config=good.py", "--workdir=run", *small_overrides("corpus.txt", data__global_batch=16)]
    done = zjax(*run, "--devices=3", cwd=folder)
    assert_one_error(done.returncode, done.stdout, done.stderr, "16 rows", "fsdp 3", "16 % 3 = 1")
    assert "3 simulated CPU devices" in done.stderr
    assert snapshot(folder) == before


# --- a workdir that has something in it ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A workdir after a run of one step, beside its corpus."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(folder / "corpus.txt", 500)
    run_quietly(small_config(corpus, steps=1), folder / "run")
    return folder


@pytest.fixture
def workdir(trained, folder):
    """A copy of it in the user's folder."""
    shutil.copytree(trained / "run", folder / "run")
    return folder / "run"


def resume(capsys, **fields):
    """`zjax train` in that workdir: status, stdout, stderr."""
    corpus = fields.pop("corpus", "corpus.txt")
    return main(["train", "--config=good.py", "--workdir=run", *small_overrides(corpus, **fields)]), *capsys.readouterr()


@pytest.mark.parametrize(
    ("fields", "mentioned"),
    [
        ({"model__d_ff": 96}, ["checkpoints/1", "model.d_ff=64", "96", "--workdir"]),
        ({"model__tied": True}, ["checkpoints/1", "model.tied=False", "True"]),
        ({"corpus": "other.txt"}, ["checkpoints/1", "corpus", "--workdir"]),
        ({"data__global_batch": 64}, ["data.global_batch=32", "64"]),
        ({"data__sequence_length": 32}, ["data.sequence_length=16", "32"]),
        ({"seed": 1}, ["seed=0", "1"]),
        ({"optimizer__name": "sgd"}, ["checkpoints/1", "opt_state"]),
        ({"precision__compute": "bfloat16"}, ["checkpoints/1", "bfloat16", "float32"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_resuming_as_another_run_is_refused(workdir, folder, capsys, fields, mentioned):
    write_corpus(folder / "other.txt", 500, seed=1)
    before = snapshot(folder)
    status, out, err = resume(capsys, **fields)
    assert (status, out) == (2, "")
    assert "Traceback" not in err and "zjax train: error: " in err
    for text in mentioned:
        assert text in err
    assert snapshot(folder) == before


@pytest.mark.parametrize("harm", ["emptied", "without manifest.json", "without ocdbt.process_0", "not a number"])
def test_a_damaged_checkpoint_is_named(workdir, folder, capsys, harm):
    step = workdir / "checkpoints" / "1"
    if harm == "emptied":
        shutil.rmtree(step)
        step.mkdir()
    elif harm == "not a number":
        (workdir / "checkpoints" / "best").mkdir()
        assert resume(capsys, steps=1)[0] == 0  # a user's own folder is no step
        return
    else:
        gone = step / harm.removeprefix("without ")
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    before = snapshot(folder)
    status, out, err = resume(capsys)
    assert_one_error(status, out, err, "checkpoints/1")
    assert snapshot(folder) == before


def test_a_checkpoint_of_another_program_is_refused(workdir, folder, capsys):
    """One that was saved with `Checkpointer.save(state)` alone, without what `train` needs to know."""
    shutil.rmtree(workdir / "checkpoints")
    config = small_config(folder / "corpus.txt")
    checkpointer = Checkpointer(workdir / "checkpoints")
    checkpointer.save(init_state(plan_run(config, make_mesh(config.mesh)), jax.random.key(0)))
    checkpointer.close()
    before = snapshot(folder)
    assert_one_error(*resume(capsys), "checkpoints/0")
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_a_workdir_that_cannot_hold_the_run_is_refused_before_training(folder, cache, name):
    """`checkpoints` is a file, `metrics.jsonl` a folder: known before the first step, not after the last."""
    (folder / "run").mkdir()
    if name == "checkpoints":
        (folder / "run" / name).write_text("")
    else:
        (folder / "run" / name).mkdir()
    before = snapshot(folder)
    done = zjax(
        "train", "--config=good.py", "--workdir=run", *small_overrides("corpus.txt"), "--devices=2", cwd=folder, cache=cache, timeout=60
    )
    assert_one_error(done.returncode, done.stdout, done.stderr, name)
    assert snapshot(folder) == before


# --- what a run prints --------------------------------------------------------------------------------------------------


def test_a_finished_run_again_says_so_without_a_nan(workdir, capsys):
    status, out, err = resume(capsys, steps=1)
    assert status == 0
    assert "at step 1 of 1" in out
    assert "nan" not in out + err


def test_a_shorter_run_than_was_trained_is_not_resumed_past_its_end(workdir, folder, capsys):
    """steps=1 after 2 steps: whatever is decided, the output must not count '2 of 1'."""
    assert resume(capsys, steps=2)[0] == 0
    _, out, err = resume(capsys, steps=1)
    assert "2 of 1" not in out + err and "2/1" not in out + err


def test_default_workdir_spaces_and_another_directory(folder, capsys, monkeypatch):
    """The workdir is runs/NAME where the command runs; config and corpus may lie elsewhere, with spaces in their names."""
    home, away = folder / "my configs", folder / "away"
    home.mkdir()
    away.mkdir()
    (home / "helper.py").write_text("STEPS = 1\n")
    (home / "my run.py").write_text(
        "from helper import STEPS\nfrom ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({'steps': STEPS})\n"
    )
    monkeypatch.chdir(away)
    options = small_overrides(write_corpus(home / "a corpus.txt", 500))[1:]
    assert main(["train", f"--config={home / 'my run.py'}", *options]) == 0
    assert {path.name for path in (away / "runs" / "my run").iterdir()} >= {"metrics.jsonl", "checkpoints", "tensorboard", "loss.png"}
    assert len((away / "runs" / "my run" / "metrics.jsonl").read_text().splitlines()) == 1
    out, err = capsys.readouterr()
    assert str(away / "runs" / "my run") in out
    assert err == "no accelerator: 8 simulated CPU devices\n"


def test_sampled_text_cannot_drive_the_terminal(folder, capsys):
    """Bytes are sampled, also those that a terminal obeys: none of them is printed as it is."""
    (folder / "control.txt").write_text("\x1b[2J\x07\x00 héllo \x9b31m" * 20)
    assert main(["train", "--config=good.py", "--workdir=run", *small_overrides("control.txt", steps=1, sample_tokens=64)]) == 0
    out = capsys.readouterr().out
    sample = out.partition("sampled text:")[2]
    assert "héllo" in sample
    assert not [character for character in sample if character not in "\n\t" and not character.isprintable()]


def test_a_terminal_without_unicode_gets_the_whole_output(folder, cache):
    """The sample holds what the terminal's encoding lacks; a run that did its work must not fail at its last line."""
    (folder / "unicode.txt").write_text("日本語 héllo 🎉 " * 40)
    options = small_overrides("unicode.txt", steps=1, sample_tokens=8)
    done = zjax("train", "--config=good.py", "--workdir=run", *options, "--devices=1", cwd=folder, cache=cache, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "sampled text:" in done.stdout


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def get_config(:\n", "invalid syntax (config.py, line 1)"),
        ("def get_config():\n    import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' (line 2)"),
        ("x = 1\n\nraise RuntimeError('boom')\n", "RuntimeError: boom (line 3)"),
    ],
)
def test_a_config_that_is_no_program_is_told_with_its_line(tmp_path, capsys, source, told):
    (tmp_path / "config.py").write_text(source)
    assert main(["plan", f"--config={tmp_path / 'config.py'}"]) == 2
    assert capsys.readouterr().err.strip().endswith(told)


def test_no_command_shows_the_help_and_a_version_is_told(capsys):
    assert main([]) == 2
    assert "Exit status" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("zjax ")


def test_running_out_of_device_memory_says_what_to_do(folder, capsys, monkeypatch):
    def too_large(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nmore")

    monkeypatch.setattr("zjax.train.run", too_large)
    assert main(["train", config("llama_tiny")]) == 1
    told = capsys.readouterr().err
    assert "out of device memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes." in told and "remat='full'" in told
