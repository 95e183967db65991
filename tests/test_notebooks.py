"""The notebooks of colab/: small files without outputs that say what they show, and that run from top to bottom."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from small import environment

NOTEBOOKS = sorted((Path(__file__).parent.parent / "colab").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
SECONDS_A_CELL = 900
"""A cell that takes longer hangs; none takes a tenth of it on two quiet cores."""


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_of(notebook):
    """The source of each code cell as Python: without the lines that are IPython's."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [re.sub(r"^( *)[%!].*$", r"\1pass", source, flags=re.MULTILINE) for source in cells]


def test_there_are_four():
    assert [path.stem for path in NOTEBOOKS] == ["audit_a_pod_from_a_laptop", "bring_your_own_model", "compare_specs", "zero_stages"]


@EACH
def test_a_notebook_is_valid_small_and_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert path.stat().st_size < 40_000
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}  # Jupyter adds versions, and Colab a dozen keys
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert not cell.metadata
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None), f"{cell.id} has outputs: clear them"


@EACH
def test_a_notebook_says_what_it_shows_and_how_to_install(path):
    first, install, clone, setup = read(path).cells[:4]
    assert first.cell_type == "markdown" and re.match(r"# \S.*\n", first.source)
    assert "will see" in first.source or "looks at" in first.source
    assert re.search(r"minutes? on a free CPU Colab", first.source)
    assert "find_spec" in install.source and '%pip install --quiet "zjax[colab]"' in install.source
    assert "pip install -e '.[colab]'" in clone.source
    assert 'jax.config.update("jax_num_cpu_devices", 8)' in setup.source


@EACH
def test_the_code_of_a_notebook_compiles_and_claims_are_asserted(path):
    trees = [ast.parse(source) for source in code_of(read(path))]
    asserts = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert len(asserts) > 3


@EACH
def test_a_notebook_refers_to_notebooks_that_exist(path):
    text = "".join(cell.source for cell in read(path).cells)
    for name in re.findall(r"(\w+)\.ipynb", text):
        assert name in {each.stem for each in NOTEBOOKS}


@pytest.mark.slow
@EACH
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, audit_cache):
    """In a folder of its own, as on a Colab: nothing of the repository beside it but the installed package."""
    notebook = read(path)
    client = NotebookClient(notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    compiling = environment(tmp_path / "programs", IPYTHONDIR=str(tmp_path / "ipython"), ZJAX_CACHE_DIR=str(audit_cache))
    client.execute(env=compiling)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    written = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "Traceback" not in written and "drivers" not in written  # what installed compilers complain of is kept from the reader
