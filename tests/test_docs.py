"""Every command and snippet of the README and the docs is run, or checked as far as it can be without a cluster; the docs build.

A line of a ```bash block belongs to one of `CLASSES`; one that does not fails. A line that stands on several pages is run on
the first that has it, the docs' pages before the README.
"""

import functools
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from small import MODEL, compiled_fast, environment, shared_folder, write_corpus

import zjax
from zjax.audit import Audit, findings
from zjax.audit.compare import cells_of, parse_vary
from zjax.audit.schedule import Timeline
from zjax.audit.targets import parse_target
from zjax.cli import _parser, audit_run, load_config, main, parse_value, planned, read_deepspeed, with_deepspeed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATED = ("_build", "_generated", "notebooks")
PAGES = [
    *(path for path in sorted(DOCS.rglob("*.md")) if path.relative_to(DOCS).parts[0] not in GENERATED),
    ROOT / "README.md",
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


def blocks(page, language):
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


@functools.cache
def lines(page):
    """The commands of a page's blocks, without their comments, and those with a config in its prose."""
    shown = [line for block in blocks(page, "bash") for line in block.splitlines()]
    prose = re.findall(r"`(zjax [^`]*--config=[^`]*)`", FENCE.sub("", page.read_text()))
    words = [shlex.split(line, comments=True) for line in [*shown, *prose]]
    return [shlex.join(line) for line in words if line]


@functools.cache
def first_page():
    """The page on which each line is run."""
    found = {}
    for page in PAGES:
        for line in lines(page):
            found.setdefault(line, page)
    return found


# --- what becomes of a line ---------------------------------------------------------------------------------------------------------

LAUNCHERS = {
    "scripts/slurm.sbatch": "sbatch",
    "scripts/tpu_pod.sh": "bash",
    "scripts/gke_jobset.yaml": "kubectl",
    "scripts/launch_local.py": "python",
}
"""What starts them; tests/test_distributed.py runs or checks them one by one."""
BUILD = "python -m sphinx -W -b html docs docs/_build/html"
SMALL_CONFIGS = ("llama_tiny", "ddp", "zero1", "zero2", "zero3", "shard_grad_op", "hybrid")


def config_of(words):
    return next((word.removeprefix("--config=") for word in words if word.startswith("--config=")), "")


def is_run(words):
    return words[:1] == ["zjax"] and words[1] in ("plan", "advise", "doctor", "checkpoint", "export", "compare") and not is_compiled(words)


def is_trained(words):
    """A config of the tiny model, which is made tinier; not those that need peers."""
    small = Path(config_of(words)).stem in SMALL_CONFIGS
    return words[:1] == ["zjax"] and words[1] in ("train", "import") and small and not any("--coordinator" in word for word in words)


def is_loaded(words):
    """Not run at all: a model or a cluster that is not here."""
    return words[:1] == ["zjax"] and words[1] in ("train", "import") and not is_trained(words)


def is_compiled(words):
    options = ("--target", "--verify")
    return words[:1] == ["zjax"] and (words[1] == "audit" or any(word.startswith(options) for word in words))


def is_launched(words):
    return any(word in LAUNCHERS for word in words)


def is_installed(words):
    return words[:2] == ["pip", "install"]


def is_entry(words):
    return words[0] == "bash" and words[1] in ("scripts/quickstart.sh", "scripts/test.sh")


def is_built(words):
    return words == shlex.split(BUILD)


CLASSES = (is_run, is_trained, is_loaded, is_compiled, is_launched, is_installed, is_entry, is_built)


@pytest.mark.parametrize("name", NAMES)
def test_no_block_escapes(name):
    page = ROOT / name
    for line in lines(page):
        found = [kind.__name__ for kind in CLASSES if kind(shlex.split(line))]
        assert len(found) == 1, f"{line}: {found or 'of no class'}"
    kinds = {kind.split(" ")[0] for kind, _ in FENCE.findall(page.read_text())}
    assert kinds <= {"bash", "python", "", "{toctree}", "{image}", "{include}", "{eval-rst}"}
    for text in blocks(page, ""):
        assert "zjax " not in text, "a command in a block that says no language"


# --- running them -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with compiled_fast(shared_folder(tmp_path_factory, "compiled")) as folder:
        yield folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the repository's configs and scripts, in which a page's lines run."""
    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tiny(words, corpus):
    """The line's arguments with a tiny model, a short run and a small corpus in place of the config's."""
    steps = next((int(word.split("=")[1]) for word in words if word.startswith("--config.steps=")), 0)
    steps = steps if 0 < steps <= 30 else max(steps // 10, 4)
    small = {f"model.{name}": value for name, value in MODEL.items()} | {
        "steps": steps, "optimizer.warmup_steps": 0, "sample_tokens": 0, "data.path": corpus, "data.sequence_length": 16,
    }  # fmt: skip
    return [word for word in words if not word.startswith("--config.steps=")] + [
        f"--config.{name}={value}" for name, value in small.items()
    ]


TRAINED = "zjax train --config=configs/llama_tiny.py --workdir=runs/llama_tiny"
"""The one run whose checkpoints the other lines need; the others train in the slow test."""


def own_lines(name):
    """The words of what is run on a page, and of what the lines in it need."""
    words = [shlex.split(line) for line in lines(ROOT / name) if first_page()[line] == ROOT / name]
    return [each for each in words if is_run(each) or is_trained(each)]


def is_quick(words):
    return is_run(words) or words[1] == "import" or shlex.join(words) == TRAINED


def run_lines(all_words, place, cache, capsys):
    corpus = write_corpus(place / "corpus.txt", 20_000)
    for words in all_words:
        arguments = tiny(words[1:], corpus) if is_trained(words) else words[1:]
        if "--devices=4" in arguments:  # another number of devices than this process has takes a process of its own
            command = [sys.executable, "-m", "zjax.cli", *arguments]
            run = subprocess.run(command, env=environment(cache, PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300)
            assert run.returncode == 0, f"{words}\n{run.stderr}"
            continue
        status = main(arguments)
        out, err = capsys.readouterr()
        assert status == 0, f"{words}\n{out}\n{err}"
        assert out or err


@pytest.mark.parametrize("name", [name for name in NAMES if any(map(is_quick, own_lines(name)))])
def test_the_commands_of_a_page_work(name, place, cache, capsys):
    """In order, in one folder: what one makes the next may read."""
    run_lines(filter(is_quick, own_lines(name)), place, cache, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not all(map(is_quick, own_lines(name)))])
def test_the_trainings_of_a_page_work(name, place, cache, capsys):
    run_lines([words for words in own_lines(name) if words[1] == "train"], place, cache, capsys)


ALL = sorted({line for page in PAGES for line in lines(page)})


@pytest.mark.parametrize("line", [line for line in ALL if not is_run(line.split()) and line.startswith("zjax ")])
def test_a_command_that_takes_hardware_or_hours_is_understood(line):
    """Its arguments parse, its config exists and has the fields it sets, its DeepSpeed file is honoured, its target is known."""
    arguments, rest = _parser().parse_known_args(shlex.split(line)[1:])
    if arguments.command == "advise":
        assert not rest and arguments.verify > 0
        return
    grid = cells_of(parse_vary(getattr(arguments, "vary", []), parse_value), [])
    for varied, _ in grid:
        config = load_config(str(ROOT / arguments.config), [*rest, *(f"--config.{name}={value}" for name, value in varied.items())])
        if getattr(arguments, "deepspeed", None):
            with_deepspeed(config, read_deepspeed(str(ROOT / arguments.deepspeed)), rest, 8)
    targets = getattr(arguments, "target", None) or []
    for target in [targets] if isinstance(targets, str) else targets:
        assert parse_target(target).devices > 1


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in ALL if line.startswith("zjax audit") and "--target=tpu" not in line])
def test_an_audit_works(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line)[1:]) == 0
    assert "findings: none" in capsys.readouterr().out


@pytest.mark.parametrize("line", [line for line in ALL if is_launched(shlex.split(line))])
def test_a_launcher_is_there_and_is_given_a_command_that_is_understood(line):
    words = shlex.split(line)
    script = next(word for word in words if word in LAUNCHERS)
    assert words[0] == LAUNCHERS[script] and (ROOT / script).is_file()
    text = (ROOT / script).read_text()
    shown = re.sub(r"\\\n\s*", "", text)
    assert re.sub(r"\s+", " ", line.split(" --config")[0]) in re.sub(r"[\s#]+", " ", shown), "the script's own head shows another form"
    options = [word for word in words[words.index(script) + 1 :] if word.startswith("--config")]
    if options:
        load_config(str(ROOT / config_of(options)), [word for word in options if word.startswith("--config.")])


@pytest.mark.parametrize("line", [line for line in ALL if is_installed(shlex.split(line))])
def test_an_extra_that_is_installed_exists(line):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.search(r"\[(.*)\]", line)
    assert named and set(named.group(1).split(",")) <= extras.keys()


def test_the_entry_scripts_are_there():
    for line in (line for line in ALL if is_entry(shlex.split(line))):
        subprocess.run(["bash", "-n", ROOT / shlex.split(line)[1]], check=True)


# --- python -------------------------------------------------------------------------------------------------------------------------

PRINTED = {
    "README.md": ["stage 3 (ZeRO-3, FULL_SHARD) on fsdp 8", "(-, fsdp)", "on cpu:8", "findings: none"],
    "docs/concepts.md": ["no dim divides: 63 % 64 = 63"],
    "docs/guides/audit.md": ["[outside-units]"],
    "docs/guides/deepspeed.md": ["did you mean 'zero_optimization'?"],
}


@pytest.mark.parametrize("name", [name for name in NAMES if blocks(ROOT / name, "python")])
def test_the_python_of_a_page_runs(name, tmp_path, cache):
    """Its blocks go on where the one before ends, as a script of their own."""
    (tmp_path / "page.py").write_text("\n".join(blocks(ROOT / name, "python")))
    variables = environment(cache, PYTHONPATH=str(ROOT))
    run = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    for text in PRINTED.get(name, []):
        assert text in run.stdout, run.stdout
    if name == "README.md":
        assert [path.name for path in (tmp_path / "runs" / "ckpt").iterdir()] == ["1"]


# --- the pages are complete -----------------------------------------------------------------------------------------------------------


def generate():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_command_and_field_with_what_it_is():
    module = generate()
    commands, configuration = module.commands(), module.configuration()
    for name, about, _ in module.parsers():
        assert f"## zjax {name}\n" in commands and about
    assert {name for name, *_ in module.parsers()} >= {"train", "plan", "audit", "checkpoint verify", "export", "import", "doctor"}
    for name in ("steps", "zero.stage", "optimizer.groups.patterns", "precision.loss_scale.window", "model.preset"):
        assert f"| `{name}` |" in configuration
    empty = [row for row in (commands + configuration).splitlines() if row.startswith("| `") and row.rstrip().endswith("|  |")]
    assert not empty


def test_the_api_reference_has_every_public_name():
    text = (DOCS / "reference" / "api.md").read_text()
    public = {name for name in vars(zjax) if not name.startswith("_") and not inspect.ismodule(getattr(zjax, name))}
    assert not [name for name in sorted(public) if f":: zjax.{name}\n" not in text]
    arithmetic = {name for name in vars(zjax.estimate) if name[0].isalpha() and not inspect.ismodule(getattr(zjax.estimate, name))}
    assert not [name for name in sorted(arithmetic) if f":: {name}\n" not in text]


def test_every_finding_and_every_key_of_an_audit_is_explained():
    text = (DOCS / "guides" / "audit.md").read_text()
    kinds = set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', inspect.getsource(findings))) | {"token-ids-gathered", "activations-gathered"}
    rows = {kind for row in text.splitlines() for kind in re.findall(r"^\| `([a-z0-9]+(?:-[a-z0-9]+)+)` \|", row)}
    assert rows == kinds
    plan = planned(load_config(str(ROOT / "configs/llama_tiny.py")), 8)
    memory = dict.fromkeys(("argument", "host_argument", "batch", "peak", "temp", "host_temp", "output", "alias"), 0)
    keys = Audit(parse_target("cpu:8"), plan, memory, Timeline(), (), 0.0, None, {}).to_json().keys()
    table = text.split("## The JSON")[1].split("## Findings")[0]
    named = {key for row in table.splitlines() if row.startswith("| `") for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == keys


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text())):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_a_row_of_the_readmes_table_and_the_picture_are_of_one_kind():
    """The picture's bars are the plans' bytes and the README's audited figures."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_pictures

    text = make_pictures.PICTURE.read_text()
    for mode, roles in make_pictures.held().items():
        fields = [f"--config.{name}={value}" for name, value in make_pictures.MODES[mode][1].items()]
        plan = planned(load_config(str(ROOT / "configs/llama2_7b.py"), fields), make_pictures.DEVICES)
        assert sum(roles.values()) == zjax.bytes_per_device(plan)["model_state"]
        assert f">{sum(roles.values()) / 2**30:.1f}</text>" in text
    assert make_pictures.sent().keys() == make_pictures.MODES.keys()
    for wire, _ in make_pictures.sent().values():
        assert f">{wire:.1f}</text>" in text


def test_the_picture_is_drawn_the_same_each_time(tmp_path):
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_pictures

    drawn = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in drawn:
        make_pictures.draw(path)
    assert drawn[0].read_bytes() == drawn[1].read_bytes()


@pytest.mark.slow
def test_a_row_of_the_readmes_table_is_what_the_compiled_program_says():
    """Stage 3 on 8 H100: state, peak, wire and minimum in GiB, exposed in percent, and the number of findings."""
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| 8 H100 | stage 3 |"))
    state, peak, wire, least, exposed, found = (cell.strip() for cell in row.split("|")[3:9])
    config = load_config(str(ROOT / "configs/llama2_7b.py"), ["--config.data.global_batch=8"])
    audit = audit_run(config, "gpu:h100:1x8").to_json()
    gib = lambda name: f"{audit[name] / 2**30:.2f}"  # noqa: E731
    assert (state, wire, least) == (gib("state_bytes"), gib("wire_bytes"), gib("ideal_wire_bytes"))
    assert (exposed, found) == (f"{audit['exposed_fraction']:.1%}", str(len(audit["findings"])))
    assert float(peak) == pytest.approx(audit["peak_bytes"] / 2**30, rel=0.01)


# --- the build ------------------------------------------------------------------------------------------------------------------------


def build(folder, **variables):
    """The docs built from a copy, so that nothing is written beside the sources."""
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns(*GENERATED))
    for name in ("colab", "zjax", "configs"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, *shlex.split(BUILD)[1:]]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr[-5000:]
    return folder / "docs" / "_build" / "html"


def test_the_docs_build_without_a_warning(tmp_path):
    html = build(tmp_path, ZJAX_DOCS_NOTEBOOKS="off")
    text = (html / "reference" / "configuration.html").read_text()
    assert "stage3_param_persistence_threshold" in text
    assert "zjax.build_plan" in (html / "reference" / "api.html").read_text()


@pytest.mark.full
def test_the_docs_build_with_their_notebooks_executed(tmp_path):
    """In CI each notebook is run once, by a test of its own."""
    html = build(tmp_path)
    for notebook in (ROOT / "colab").glob("*.ipynb"):
        assert (html / "notebooks" / f"{notebook.stem}.html").is_file()
