"""`zjax compare`: grids of configs with and without a target, cells that fail, and what it writes."""

import csv
import html
import io
import json
import re
from html.parser import HTMLParser

import pytest
from audited import TINY, audited, overrides

from zjax.audit import compare
from zjax.audit.compare import COLUMNS, Cell
from zjax.audit.html import report_html
from zjax.cli import main

pytestmark = pytest.mark.slow

GPU = "gpu:h100:1x8"
LLAMA = overrides(size="smaller")


def compared(capsys, *arguments):
    """Exit status, standard output, standard error."""
    status = main(["compare", f"--config={TINY}", *LLAMA, *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def cells(capsys, *arguments):
    """The cells of a comparison that succeeds."""
    status, out, err = compared(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


# --- plans only ---------------------------------------------------------------------------------------------------------


def test_one_field(capsys):
    grid = cells(capsys, "--vary=zero.stage=0,1,2,3")
    assert [cell["varied"] for cell in grid] == [{"zero.stage": stage} for stage in range(4)]
    assert all(cell.keys() == {"varied", "target", "plan", "audit", "error"} for cell in grid)
    assert all(cell["target"] is cell["audit"] is cell["error"] is None for cell in grid)
    held = [cell["plan"]["per_device"]["model_state"] / cell["plan"]["parameters"] for cell in grid]
    assert held == pytest.approx([16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8], rel=0.001)


def test_two_fields_make_every_combination(capsys):
    grid = cells(capsys, "--vary=mesh.replica=1,2", "--vary=zero.stage=2,3")
    assert [tuple(cell["varied"].values()) for cell in grid] == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert [cell["plan"]["mesh"]["fsdp"] for cell in grid] == [8, 8, 4, 4]


def test_nothing_varied_is_one_cell(capsys):
    (cell,) = cells(capsys)
    assert cell["varied"] == {} and cell["plan"]["devices"] == 8
    assert cells(capsys, "--devices=4")[0]["plan"]["devices"] == 4


def test_values_of_every_type(capsys):
    grid = cells(capsys, "--vary=zero.reshard_after_forward=true,False", "--vary=optimizer.learning_rate=1e-3,1")
    assert [tuple(cell["varied"].values()) for cell in grid] == [(True, 0.001), (True, 1), (False, 0.001), (False, 1)]
    grid = cells(capsys, "--vary=optimizer.name=adamw,adafactor", "--vary=clip=None")
    assert [tuple(cell["varied"].values()) for cell in grid] == [("adamw", None), ("adafactor", None)]


def test_the_table(capsys):
    status, out, err = compared(capsys, "--vary=zero.stage=0,3")
    assert status == 0 and "failed" not in err
    header, *rows = [line for line in out.splitlines() if line.strip() and "─" not in line]
    assert header.split() == ["zero.stage", "model", "state", "planned", "wire"]
    assert [row.split()[0] for row in rows] == ["0", "3"]


# --- with targets -------------------------------------------------------------------------------------------------------

STAGES = ["--vary=zero.stage=0,3", f"--target={GPU}"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What a comparison of two stages and one mesh that does not fit, on a GPU target, writes."""
    out = tmp_path_factory.mktemp("compare")
    assert main(["compare", f"--config={TINY}", *LLAMA, *STAGES, "--vary=mesh.replica=1,3", f"--out={out}"]) == 0
    return out


def test_audited_cells(capsys):
    grid = cells(capsys, *STAGES)
    assert [(cell["varied"]["zero.stage"], cell["target"], cell["error"]) for cell in grid] == [(0, GPU, None), (3, GPU, None)]
    for cell in grid:
        assert cell["audit"] == audited(GPU, stage=cell["varied"]["zero.stage"], keep=False, replica=1, size="smaller").to_json()
        assert cell["plan"]["devices"] == cell["audit"]["devices"] == 8


def test_several_targets(capsys):
    grid = cells(capsys, "--vary=zero.stage=0,3", f"--target={GPU}", "--target=cpu:8")
    assert [(cell["target"], cell["varied"]["zero.stage"]) for cell in grid] == [(GPU, 0), (GPU, 3), ("cpu:8", 0), ("cpu:8", 3)]
    assert [cell["target"] for cell in grid] == [cell["audit"]["target"] for cell in grid]


def test_a_failed_cell_is_a_row(capsys, written):
    grid = json.loads((written / "compare.json").read_text())
    failed = [cell for cell in grid if cell["error"]]
    assert [tuple(cell["varied"].values()) for cell in failed] == [(0, 3), (3, 3)]
    assert all("8 % 3 = 2" in cell["error"] and cell["plan"] is cell["audit"] is None for cell in failed)
    status, out, err = compared(capsys, "--vary=mesh.replica=1,3")
    assert status == 0
    assert re.search(r"^ +3 +failed", out, re.MULTILINE)
    assert re.search(r"^failed: mesh.replica=3: mesh: .*8 % 3 = 2", err, re.MULTILINE)


def test_a_failed_target_is_a_row(capsys):
    status, _, err = compared(capsys, "--target=cpu:8", "--target=gpu:h1000:1x8", "--vary=zero.stage=0")
    assert status == 0
    assert "failed: zero.stage=0 on gpu:h1000:1x8: unknown chip 'h1000'" in err


def test_all_cells_failed(capsys):
    status, out, err = compared(capsys, "--vary=mesh.replica=3,5")
    assert status == 1
    assert out.count("failed") == 2 and err.count("failed:") == 2


def test_csv_has_the_figures_of_the_json(written):
    grid = json.loads((written / "compare.json").read_text())
    rows = list(csv.DictReader(io.StringIO((written / "compare.csv").read_text(), newline="")))
    assert list(rows[0]) == ["zero.stage", "mesh.replica", "target", *COLUMNS, "error"]
    assert len(rows) == len(grid) == 4
    for row, cell in zip(rows, grid, strict=True):
        assert {name: row[name] for name in cell["varied"]} == {name: str(value) for name, value in cell["varied"].items()}
        assert (row["target"], row["error"]) == (GPU, cell["error"] or "")
        if cell["error"]:
            assert {row[name] for name in COLUMNS} == {""}
            continue
        plan, audit = cell["plan"], cell["audit"]
        figures = {
            "model state": plan["per_device"]["model_state"],
            "planned wire": plan["traffic_per_step"]["total"],
            "state": audit["state_bytes"],
            "peak": audit["peak_bytes"],
            "wire": audit["wire_bytes"],
            "between": audit["wire_bytes_by_link"]["between"],
            "minimum": audit["ideal_wire_bytes"],
            "exposed": audit["exposed_fraction"],
            "exposed seconds": audit["exposed_seconds"],
            "predicted seconds": audit["predicted_step_seconds"],
            "findings": len(audit["findings"]),
        }
        assert {name: float(row[name]) for name in COLUMNS} == figures


# --- the report ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags that are open, those seen, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.links, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href") and not value.startswith("#")]
        if tag not in ("meta", "br", "link", "img", "use"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_is_one_file_that_needs_no_other(written):
    text = (written / "report.html").read_text()
    page = Page(text)
    assert page.open == [] and page.links == []
    assert "script" not in page.seen and "@import" not in text and "url(http" not in text
    assert page.seen.count("svg") == 3
    assert {"Memory", "Traffic", "Waiting for transfers", "Findings", "Placement, leaf by leaf"} <= set(re.findall(r"<h2>(.*?)</h2>", text))


def test_the_report_names_every_config_figure_and_leaf(written):
    page = Page((written / "report.html").read_text())
    for label in ("zero.stage=0, mesh.replica=1", "zero.stage=3, mesh.replica=1"):
        assert f"{label} on {GPU}" in page.text
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>(.*?)</tr>", (written / "report.html").read_text())[:4]
    assert [row[:3] for row in rows] == [(stage, replica, GPU) for stage in "03" for replica in "13"]
    assert ["8 % 3 = 2" in row[3] for row in rows] == [False, True, False, True]
    for leaf in audited(GPU, stage=3, keep=False, replica=1, size="smaller").plan.leaves:
        assert leaf.path in page.text
    for name in compare.columns_of([Cell({}, "", *figures(written))]):
        assert name in page.text


def figures(folder):
    """Plan and audit of the first cell."""
    cell = json.loads((folder / "compare.json").read_text())[0]
    return cell["plan"], cell["audit"]


def test_the_report_shows_every_finding_and_escapes_it(written):
    plan, audit = figures(written)
    nasty = "<script>alert('x')</script> & \"quotes\""
    findings = [
        {"kind": "wrong-axis", "op": f"op-{number} {nasty}", "bytes": 3 * 2**20, "text": f"text-{number} {nasty}"} for number in range(3)
    ]
    leaves = ({"path": f"params/{nasty}", "shape": "2x2", "spec": "R", "bytes": 8, "reason": nasty},)
    good = Cell({"model.preset": nasty}, GPU, plan, audit | {"findings": findings}, leaves)
    bad = Cell({"model.preset": "other"}, GPU, error=f"broken: {nasty}")
    text = report_html(nasty, [good, bad])
    page = Page(text)
    assert page.open == [] and "script" not in page.seen and "<script" not in text
    for number in range(3):
        assert f"op-{number} {nasty}" in page.text and f"text-{number} {nasty}" in page.text
    assert page.text.count("wrong-axis") >= 3
    assert html.escape(f"broken: {nasty}") in text and f"params/{nasty}" in page.text


def test_a_report_without_an_audit_and_one_without_a_cell_that_works(capsys, tmp_path):
    assert compared(capsys, "--vary=zero.stage=0,3", f"--out={tmp_path / 'plans'}")[0] == 0
    page = Page((tmp_path / "plans" / "report.html").read_text())
    assert page.open == [] and page.seen.count("svg") == 2
    assert compared(capsys, "--vary=mesh.replica=3", f"--out={tmp_path / 'new' / 'failed'}")[0] == 1
    page = Page((tmp_path / "new" / "failed" / "report.html").read_text())
    assert page.open == [] and page.seen.count("svg") == 0 and "8 % 3 = 2" in page.text


# --- mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("zero.stage", "--vary=zero.stage: write it as --vary=zero.stage=0,1,2"),
        ("zero.stage=", "write it as --vary=zero.stage=0,1,2"),
        ("zero.stage=0,,2", "write it as --vary=zero.stage=0,1,2"),
        ("zero.stage=0,", "write it as --vary=zero.stage=0,1,2"),
        ("=0,1", "write it as --vary=zero.stage=0,1,2"),
    ],
)
def test_a_mistake_in_vary(capsys, option, message):
    status, out, err = compared(capsys, f"--vary={option}")
    assert status == 2 and not out
    assert err.startswith("zjax compare: error: ") and message in err and err.count("\n") == 1


def test_a_field_varied_twice(capsys):
    status, out, err = compared(capsys, "--vary=zero.stage=0,1", "--vary=zero.stage=2,3")
    assert (status, out) == (2, "")
    assert err == "zjax compare: error: --vary: zero.stage is given twice\n"


@pytest.mark.parametrize(("field", "near"), [("zero.stag", "zero.stage"), ("mesh.replicas", "mesh.replica"), ("zeros.stage", "zero")])
def test_an_unknown_field(capsys, field, near):
    status, out, err = compared(capsys, f"--vary={field}=1,2")
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"zjax compare: error: unknown config key '.*': did you mean '{near}'\? known: .*\n", err)


def test_a_mistake_in_the_config_itself(capsys):
    status, out, err = compared(capsys, "--vary=zero.stage=0,1", "--config.mesh.replicas=2")
    assert (status, out) == (2, "")
    assert err.startswith("zjax compare: error: unknown config key 'mesh.replicas': did you mean 'mesh.replica'?") and err.count("\n") == 1
