"""Sphinx's configuration; builds with `python -m sphinx -W -b html docs docs/_build/html`, after `pip install -e '.[docs,colab]'`.

The notebooks of `colab/` are copied to `docs/notebooks/` and executed, an error in one failing the build.
`ZJAX_DOCS_NOTEBOOKS=off` shows them as they are, which takes seconds. The command line and the configuration are written to
`docs/_generated/` from the parser and the dataclasses.
"""

import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
sys.path.insert(0, str(DOCS))

import generate  # noqa: E402

project = "zjax"
release = version = importlib.metadata.version("zjax")
copyright = "the zjax authors"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated", "**.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"zjax {release}"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nb_execution_mode = "off" if os.environ.get("ZJAX_DOCS_NOTEBOOKS") == "off" else "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_merge_streams = True

shutil.rmtree(DOCS / "notebooks", ignore_errors=True)
if (DOCS.parent / "colab").is_dir():
    (DOCS / "notebooks").mkdir()
    for notebook in sorted((DOCS.parent / "colab").glob("*.ipynb")):
        shutil.copy2(notebook, DOCS / "notebooks")

generate.write(DOCS / "_generated")


def setup(app):
    """Called by Sphinx. Docstrings quote names as markdown does, in single backticks; napoleon and docutils want two."""
    app.connect("autodoc-process-docstring", _from_markdown, priority=400)


def _from_markdown(app, what, name, obj, options, lines):
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)(?=(\w?))", lambda found: f"``{found[1]}``" + ("\\ " if found[2] else ""), "\n".join(lines))
    text = re.sub(r"(?<=\w)_(?=[\s),.;:]|$)(?![^`\n]*``)", r"\\_", text)  # `clip_grad_value_` is no reference
    lines[:] = text.split("\n")
