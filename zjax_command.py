"""The `zjax` command's entry point, outside the package: importing any of it imports jax.

With the compilers of absent hardware installed (the extra `targets`), jax's import and start write pages of complaints
about missing drivers, from C++ and straight to the file descriptor.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drops what is written to stderr inside, by C++ too; shows it after all if an exception leaves."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


GPU_MEMORY = "0.94"
"""Share of a GPU's memory that XLA takes for itself and plans programs for. JAX's own default, 0.75, leaves room for another
library's arrays on the same GPU, which a training run has none of."""


def main() -> int:
    """Runs the command."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY)  # read when a GPU is first used
    with quiet_stderr():
        from zjax import cli
    warnings.showwarning = lambda message, *where: print(f"zjax: warning: {message}", file=sys.stderr)
    return cli.main()
