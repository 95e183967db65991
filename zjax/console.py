"""Where rich prints: a terminal at its width, anything else at a given one, a notebook like any other output."""

from __future__ import annotations

import io
import sys
from typing import Any

from rich.console import Console


def output(width: int = 200, **options: Any) -> Console:
    """A console on stdout (or, with `stderr=True`, on stderr) that a pipe or a file reads `width` characters wide.

    Inside Jupyter rich would otherwise show each print as a display of its own.
    """
    return Console(width=None if sys.stdout.isatty() else width, force_jupyter=False, **options)


class TextConsole(Console):
    """A console whose output is text: `str(console)`, without what rich pads lines with."""

    def __init__(self, width: int):
        """Args: characters a line."""
        super().__init__(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)

    def __str__(self) -> str:
        assert isinstance(self.file, io.StringIO)
        return "\n".join(line.rstrip() for line in self.file.getvalue().splitlines())
