"""Writes docs/vocabulary.md from the importers: `.venv/bin/python scripts/make_vocabulary.py`."""

from pathlib import Path

from zjax.interop.table import vocabulary_markdown

if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "vocabulary.md").write_text(vocabulary_markdown())
