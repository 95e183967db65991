"""What the tests of whole runs share: a tiny config, a corpus, a look at a folder, and `zjax` in a process of its own."""

import contextlib
import os
import random
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from zjax import train
from zjax.config import TrainConfig
from zjax.fields import from_dict
from zjax.tree import named_leaves

REPO = Path(__file__).parent.parent
COMMAND = str(Path(sysconfig.get_path("scripts")) / "zjax")
"""The installed command: what users run."""
MODEL = {"n_layers": 2, "d_model": 32, "n_heads": 2, "n_kv_heads": 2, "d_ff": 64, "max_sequence": 64}
QUIET = Console(quiet=True)
METRICS = {
    "step", "loss", "grad_norm", "grad_norm_clipped", "learning_rate", "tokens", "step_seconds", "tokens_per_second",
    "step_applied", "loss_scale", "skipped_steps", "tflops_per_device",
}  # fmt: skip
"""The keys of a line of metrics.jsonl on a CPU, as published."""


def write_corpus(path: Path, length: int, seed: int = 0) -> Path:
    """A .txt of `length` tokens: words in random order, and the separator that ends the document."""
    words = ["gather", "scatter", "reduce", "shard", "device", "gradient", "weight", "batch"]
    drawn = random.Random(seed)
    text = ""
    while len(text) < length:
        text += drawn.choice(words) + drawn.choice(" \n")
    path.write_text(text[: length - 1])
    return path


def small_config(corpus: Path, **sections) -> TrainConfig:
    """A tiny float32 run of 5 steps; keywords are fields or sections, which are merged into the defaults."""
    values = {
        "steps": 5,
        "sample_tokens": 0,
        "model": MODEL,
        "precision": {"compute": "float32"},
        "optimizer": {"learning_rate": 1e-2},
        "data": {"path": str(corpus), "global_batch": 32, "sequence_length": 16},
    }
    for key, value in sections.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return from_dict(TrainConfig, values)


def small_overrides(corpus: Path, **fields) -> list[str]:
    """The same tiny run as options of the command line; `optimizer__name=...` sets `optimizer.name`."""
    values = {
        "steps": 5, "sample_tokens": 0, "precision.compute": "float32", "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 0,
        "data.path": corpus, "data.global_batch": 32, "data.sequence_length": 16,
    } | {f"model.{name}": value for name, value in MODEL.items()}  # fmt: skip
    values |= {name.replace("__", "."): value for name, value in fields.items()}
    return [f"--config.{name}={value}" for name, value in values.items()]


def run_quietly(config: TrainConfig, workdir: Path, **knobs) -> train.Result:
    """`train.run` without output."""
    return train.run(config, workdir, console=QUIET, **knobs)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the bytes of files, None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def leaves(state) -> dict[str, np.ndarray]:
    """The leaves of a train state on the host; PRNG keys as their words."""
    data = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return {path: np.asarray(data(x)) for path, x in named_leaves(state)}


def assert_same_state(state, other) -> None:
    """Every leaf bit for bit."""
    ours, theirs = leaves(state), leaves(other)
    assert ours.keys() == theirs.keys()
    different = [path for path in ours if ours[path].dtype != theirs[path].dtype or ours[path].tobytes() != theirs[path].tobytes()]
    assert not different


def shared_folder(tmp_path_factory, name: str) -> Path:
    """A folder of this test session that all its workers see."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name


@contextlib.contextmanager
def compiled_fast(cache: Path) -> Iterator[Path]:
    """Programs compile in half the time (without LLVM's optimizations; the partitioned program is the same) and only once."""
    values = compiling_fast(cache)
    before = {name: jax.config.values[name.lower()] for name in values}
    for name, value in values.items():
        jax.config.update(name.lower(), value)
    yield cache
    for name, value in before.items():
        jax.config.update(name.lower(), value)


def compiling_fast(cache: Path) -> dict[str, object]:
    """The environment variables, and in lower case the options of jax, of `compiled_fast`."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.0,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": True,
    }


def environment(cache: Path | None = None, **variables: str) -> dict[str, str]:
    """Of a child process: on the CPU, and with a `cache`, compiling fast, as `compiled_fast` does."""
    compiling = {name: str(value) for name, value in compiling_fast(cache).items()} if cache else {}
    return {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "120", **compiling, **variables}


def zjax(
    *arguments: object, cache: Path | None = None, cwd: Path | None = None, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess:
    """The `zjax` command in a process of its own, with its output."""
    return subprocess.run(
        [COMMAND, *map(str, arguments)], cwd=cwd, env=environment(cache, **variables), timeout=timeout, capture_output=True, text=True
    )
