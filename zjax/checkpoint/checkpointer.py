"""Sharded checkpoints of the train state on Orbax; the plan of the run that restores decides placement.

A checkpoint holds one array per leaf, under the leaf's path in the train state, and a JSON of what made it. Arrays of
no elements are not written (Orbax refuses them) but made again from the plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from zjax.plan import Plan
from zjax.state import TrainState, state_struct
from zjax.tree import named_leaves


class CheckpointError(ValueError):
    """A checkpoint that cannot be restored into a plan. The message names the leaves and what differs."""


LOSS = "loss"


def _loss_of(metrics: Any) -> float:
    return metrics[LOSS]


@dataclass(frozen=True)
class _Kept:
    """Which checkpoints stay, for Orbax: the newest so many, and the first of the lowest loss beside them."""

    newest: int | None
    best: bool

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        if self.newest is None:
            return [True] * len(checkpoints)
        steps = [info.step for info in sorted(checkpoints, key=lambda info: info.step)]
        kept = set(steps[-self.newest :])
        rated = [(_loss_of(info.metrics), info.step) for info in checkpoints if info.metrics]
        if self.best and rated:
            kept.add(min(rated)[1])
        return [info.step in kept for info in checkpoints]


class Checkpointer:
    """Saves and restores train states in one directory, a subdirectory a step.

    Saving is asynchronous: arrays are copied before `save` returns (donating the state afterwards is safe) and
    written in the background; a failed write raises at the next `save`, `wait` or `close`.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = None, keep_best: bool = False):
        """Args: the directory, made on the first save; `keep`, how many of the newest steps stay (all by default);
        `keep_best`, whether that with the lowest `loss` (see `save`) stays beside them."""
        self.directory = Path(directory).absolute()
        self._kept = _Kept(keep, keep_best)
        self._opened: ocp.CheckpointManager | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            # A killed process leaves a half-written step under a temporary name, as large as a checkpoint.
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._kept,
                best_fn=_loss_of,  # without it Orbax does not write a checkpoint's loss beside it
                create=True,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            )
            handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
            self._opened = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)
        return self._opened

    def save(self, state: TrainState, meta: Mapping[str, Any] | None = None, *, loss: float | None = None) -> None:
        """Saves the state under its step number, with a JSON-able description of the run, and its evaluation loss if it has one.

        Raises:
          CheckpointError: the directory has this step or a later one, so that the new one would not be the newest.
        """
        step, latest = int(state.step), self.latest_step()
        if latest is not None and latest >= step:
            raise CheckpointError(
                f"step {step} cannot be saved: {self.directory} has step {latest}; save into another directory, or remove it"
            )
        arrays = {path: _storable(x) for path, x in named_leaves(state) if x.size}
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(dict(meta or {})))
        with _quiet():
            self._manager.save(step, args=items, metrics=None if loss is None else {LOSS: loss})

    def latest_step(self) -> int | None:
        """The newest saved step, or None where there is none (nothing is created)."""
        if not self.directory.is_dir():
            return None
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The saved step with the lowest loss, the first of several; None where none was saved with one."""
        if not self.directory.is_dir():
            return None
        with _quiet():
            losses = {step: self._manager.metrics(step) for step in self._manager.all_steps()}
        return min((step for step, metrics in losses.items() if metrics), key=lambda step: (_loss_of(losses[step]), step), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """The description saved with a step."""
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, plan: Plan, step: int | None = None) -> TrainState:
        """The state of a step (the newest by default), every leaf read straight into the shard the plan gives it.

        Raises:
          CheckpointError: no checkpoint, one that is damaged, or leaves whose path, shape or dtype differ from the plan's.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        struct = state_struct(plan)
        wanted = {path: _storable_struct(x) for path, x in named_leaves(struct) if x.size}
        with self._reading(step):
            saved = self._manager.item_metadata(step)["state"].tree
            _require_same_leaves(saved, wanted, self.directory / str(step))
            arrays = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]
        leaves = [_usable(arrays[path], x) if x.size else _empty(x) for path, x in named_leaves(struct)]
        return jax.tree.unflatten(jax.tree.structure(struct), leaves)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns whatever Orbax raises for a step that is not there, or not whole, into a CheckpointError that names it."""
        where = self.directory / str(step)
        if not where.is_dir():
            raise CheckpointError(f"{self.directory} has no step {step}; it has {', '.join(map(str, self._manager.all_steps())) or 'none'}")
        try:
            with _quiet():
                yield
        except CheckpointError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:200]
            raise CheckpointError(
                f"{where} cannot be read, it is damaged or was not written by zjax ({type(error).__name__}: {first})"
            ) from error

    def wait(self) -> None:
        """Returns when every save is on disk; raises what a background write raised."""
        if self._opened is not None:
            self._opened.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees the threads."""
        if self._opened is not None:
            self.wait()
            self._opened.close()
            self._opened = None


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _storable(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x) else x


def _storable_struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not _is_key(x):
        return x
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def _usable(x: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.random.wrap_key_data(x) if _is_key(struct) else x


def _empty(struct: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)()


def _require_same_leaves(saved: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct], where: Path) -> None:
    problems = [f"{path}: missing in the checkpoint" for path in wanted if path not in saved]
    problems += [f"{path}: in the checkpoint, but not in the plan" for path in saved if path not in wanted]
    for path in wanted.keys() & saved.keys():
        ours, theirs = wanted[path], saved[path]
        # Orbax casts another dtype without a word, so it is compared here.
        if tuple(theirs.shape) != ours.shape or np.dtype(theirs.dtype) != np.dtype(ours.dtype):
            problems.append(f"{path}: {theirs.dtype}{list(theirs.shape)} in the checkpoint, {ours.dtype}{list(ours.shape)} in the plan")
    if problems:
        shown = "\n  ".join(sorted(problems)[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise CheckpointError(f"{where} does not fit the plan:\n  {shown}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs pages of INFO and WARNING through absl; errors still come through as exceptions."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
