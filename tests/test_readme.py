"""The README says what is true: its snippet runs, its commands work, and its table is what `zjax compare` finds."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zjax.cli import audit_run, load_config, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_python_snippets_shard_over_8_devices_audit_themselves_and_save(tmp_path):
    """The second goes on where the first ends."""
    first, second = blocks("python")
    (tmp_path / "snippet.py").write_text(first + second)
    run = subprocess.run([sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "stage 3 (ZeRO-3, FULL_SHARD) on fsdp 8" in run.stdout and "(-, fsdp)" in run.stdout
    assert "on cpu:8" in run.stdout and "findings: none" in run.stdout
    assert [path.name for path in (tmp_path / "runs" / "ckpt").iterdir()] == ["1"]


def commands():
    lines = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("zjax ")]


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in commands()
        if line.split()[1] in ("plan", "doctor", "advise", "compare") and "--target" not in line and "--verify" not in line
    ],
)
def test_a_command_that_needs_no_compiler_works(line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("line", [line for line in commands() if line.split()[1] in ("train", "audit")])
def test_a_command_names_a_config_that_exists_and_fields_it_has(line):
    arguments = shlex.split(line)[2:]
    (config,) = [a.removeprefix("--config=") for a in arguments if a.startswith("--config=")]
    load_config(str(ROOT / config), [a for a in arguments if a.startswith("--config.")])


def test_a_row_of_the_table_is_what_the_compiled_program_says():
    """Stage 3 on 8 H100: state, peak, wire and minimum in GiB, exposed in percent, and the number of findings."""
    row = next(line for line in README.splitlines() if line.startswith("| 8 H100 | stage 3 |"))
    state, peak, wire, least, exposed, findings = (cell.strip() for cell in row.split("|")[3:9])
    config = load_config(str(ROOT / "configs/llama2_7b.py"), ["--config.data.global_batch=8"])
    audit = audit_run(config, "gpu:h100:1x8").to_json()
    gib = lambda name: f"{audit[name] / 2**30:.2f}"  # noqa: E731
    assert (state, wire, least) == (gib("state_bytes"), gib("wire_bytes"), gib("ideal_wire_bytes"))
    assert (exposed, findings) == (f"{audit['exposed_fraction']:.1%}", str(len(audit["findings"])))
    assert float(peak) == pytest.approx(audit["peak_bytes"] / 2**30, rel=0.01)
