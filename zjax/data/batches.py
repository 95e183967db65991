"""Rows of a corpus in a shuffled order that is a pure function of (seed, step, row), as sharded global arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

import grain
import jax
import numpy as np

from zjax.data.corpus import Corpus
from zjax.fields import ConfigError

DTYPES = {"inputs": np.int32, "targets": np.int32, "mask": np.float32}
"""What a row and a batch hold."""


@dataclass(frozen=True)
class Rows:
    """A corpus cut into rows of T = `sequence_length` predictions: grain's random-access source.

    Row r has inputs tokens[rT : rT+T] and targets tokens[rT+1 : rT+T+1], so that every token but the first is
    predicted exactly once by the ceil((len - 1) / T) rows. The last row is filled with zeros, where its mask is 0.
    """

    corpus: Corpus
    sequence_length: int

    def __post_init__(self) -> None:
        if len(self.corpus) < 2:
            raise ConfigError(f"data.path: the corpus has {len(self.corpus)} tokens; predicting one takes at least 2")

    def __len__(self) -> int:
        return -(-(len(self.corpus) - 1) // self.sequence_length)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """{"inputs": int32 [T], "targets": int32 [T], "mask": float32 [T], 1 where there is a target}."""
        start = row * self.sequence_length
        tokens = self.corpus.slice(start, min(start + self.sequence_length + 1, len(self.corpus)))
        element = {name: np.zeros(self.sequence_length, dtype) for name, dtype in DTYPES.items()}
        predicted = len(tokens) - 1
        element["inputs"][:predicted] = tokens[:-1]
        element["targets"][:predicted] = tokens[1:]
        element["mask"][:predicted] = 1
        return element


@dataclass(frozen=True)
class Batches:
    """The endless sequence of global batches: row r of step s is element s * global_batch + r of the shuffled epochs.

    That one integer is the whole position of a run, whatever the number of processes and devices. Epochs follow each
    other without a gap, each in its own order. Raises `ConfigError` if the corpus has fewer than 2 tokens.
    """

    corpus: Corpus
    global_batch: int
    """Rows a step."""
    sequence_length: int
    """Tokens a row that are predicted, T below."""
    seed: int
    """Seed of the order, 0 or more."""
    source: Rows = field(init=False, repr=False)
    """One epoch in the corpus' own order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Rows(self.corpus, self.sequence_length))

    @cached_property
    def _epochs(self) -> grain.MapDataset:
        # Shuffle before repeat: grain then permutes each epoch by itself, with a seed of its own (reseed_each_epoch).
        return grain.MapDataset.source(self.source).seed(self.seed).shuffle().repeat(reseed_each_epoch=True)

    def rows(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Rows [start, stop) of the step's batch: inputs and targets int32 [stop - start, T], mask float32 of the same shape.

        Raises IndexError if step is negative or the range is empty or outside [0, global_batch].
        """
        if step < 0 or not 0 <= start < stop <= self.global_batch:
            raise IndexError(f"rows {start} to {stop} of step {step}, whose batch has {self.global_batch} rows")
        first = step * self.global_batch
        elements = [self._epochs[first + row] for row in range(start, stop)]
        return {name: np.stack([element[name] for element in elements]) for name in DTYPES}

    def at(self, step: int, sharding: jax.sharding.NamedSharding) -> dict[str, jax.Array]:
        """The step's batch as global arrays [global_batch, T] placed by `sharding`.

        A process reads the rows that its own devices hold, once each however many of them hold a row. Needs no other
        process. Raises ValueError if the sharding does not divide the batch.
        """
        return _placed(partial(self.rows, step), (self.global_batch, self.sequence_length), sharding)


@dataclass(frozen=True)
class EvalBatches:
    """Every row of a held-out corpus once, in its own order, in batches of one shape.

    The last batch is filled with rows of zeros, where the mask is 0 too: a loss that is weighed by the mask is exact.
    Raises `ConfigError` if the corpus has fewer than 2 tokens.
    """

    corpus: Corpus
    rows: int
    """Rows a batch."""
    sequence_length: int
    """Tokens a row that are predicted, T below."""
    source: Rows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Rows(self.corpus, self.sequence_length))

    def __len__(self) -> int:
        return -(-len(self.source) // self.rows)

    def at(self, index: int, sharding: jax.sharding.NamedSharding) -> dict[str, jax.Array]:
        """Batch `index` as global arrays [rows, T] placed by `sharding`; see `Batches.at`."""

        def read(start: int, stop: int) -> dict[str, np.ndarray]:
            first = index * self.rows
            real = [self.source[row] for row in range(first + start, min(first + stop, len(self.source)))]
            filling = np.zeros((stop - start - len(real), self.sequence_length))
            return {name: np.concatenate([*(row[name][None] for row in real), filling.astype(dtype)]) for name, dtype in DTYPES.items()}

        return _placed(read, (self.rows, self.sequence_length), sharding)


def _placed(
    read: Callable[[int, int], dict[str, np.ndarray]], shape: tuple[int, int], sharding: jax.sharding.NamedSharding
) -> dict[str, jax.Array]:
    """Global arrays of which each process reads the rows [start, stop) of its own devices, once."""
    blocks: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def block(name: str, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        if (start, stop) not in blocks:
            blocks[start, stop] = read(start, stop)
        return blocks[start, stop][name][:, index[1]]

    return {name: jax.make_array_from_callback(shape, sharding, partial(block, name), dtype) for name, dtype in DTYPES.items()}


def prefetch(
    batches: Batches | EvalBatches, sharding: jax.sharding.NamedSharding, start: int, stop: int
) -> Iterator[tuple[int, dict[str, jax.Array]]]:
    """Yields (step, batch) for the steps in [start, stop), each batch prepared on a thread while the caller works on the one before.

    An exception of a step is raised where that step would have been yielded. Closing the generator ends the thread.
    """
    if start >= stop:
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="zjax-data") as thread:
        pending = thread.submit(batches.at, start, sharding)
        for step in range(start, stop):
            batch = pending.result()
            if step + 1 < stop:
                pending = thread.submit(batches.at, step + 1, sharding)
            yield step, batch
