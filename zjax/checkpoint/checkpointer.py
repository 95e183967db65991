"""Sharded checkpoints of the train state on Orbax; the plan of the run that restores decides placement.

A step is a folder `DIR/STEP`: one array per leaf in Orbax's OCDBT format, under the leaf's path in the train state, and a
manifest with checksums (see `zjax.checkpoint.manifest`), without which the step does not exist. The folder comes under its
name at once, when all is written. Every process writes its own shards, replicas are written once, nothing is gathered.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

from zjax.checkpoint import checksum, restoring, sources
from zjax.checkpoint import manifest as manifests
from zjax.checkpoint.errors import CheckpointError, DamagedError
from zjax.checkpoint.lock import Lock
from zjax.checkpoint.manifest import Manifest, ManifestError
from zjax.checkpoint.reading import first_line, quiet
from zjax.checkpoint.sources import Source
from zjax.config import VERIFY
from zjax.plan import Plan
from zjax.precision import init_loss_scale
from zjax.state import TrainState, init_params, init_state, state_struct
from zjax.tree import matches, named_leaves, require_all_used


@dataclass(frozen=True)
class _Pending:
    """A save that is being written."""

    step: int
    leaves: dict[str, Any]
    """Arrays' shapes, dtypes and shardings, by path; those without elements too."""
    summed: list[str]
    sums: jax.Array | None
    meta: dict[str, Any]
    loss: float | None


class Checkpointer:
    """Saves and restores train states in one directory, a subdirectory a step.

    Saving is asynchronous: arrays are copied before `save` returns (donating the state afterwards is safe) and written in
    the background. A failed write raises at the next `check`, `save`, `wait` or `close`, and the older steps stay.
    Reading changes nothing. In a run of several processes each calls every method, with the same arguments.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = None,
        keep_every: int = 0,
        keep_best: bool = False,
        verify: str = "full",
        chunk_bytes: int = 64 * 2**20,
        concurrent_gb: int = 32,
    ):
        """Nothing is made before the first save.

        Args:
          directory: a path, local or one that Orbax and etils know (gs://).
          keep: how many of the newest steps stay; all by default.
          keep_every: steps that this divides stay too; 0 for none.
          keep_best: whether the step with the lowest `loss` (see `save`), the first of several, stays too.
          verify: what a restore checks against the checksums: `full`; `sampled`, one leaf in 8; `off`.
          chunk_bytes: the most that is stored as one piece, which is read as a whole whoever wants a part of it.
          concurrent_gb: how much may be written or read at once, in GB of host memory.
        """
        if verify not in VERIFY:
            raise CheckpointError(f"verify={verify!r}: must be one of {', '.join(VERIFY)}")
        self.directory = epath.Path(directory if "://" in str(directory) else Path(directory).absolute())
        self._keep, self._keep_every, self._keep_best, self._verify = keep, keep_every, keep_best, verify
        self._chunk_bytes, self._concurrent_gb = chunk_bytes, concurrent_gb
        self._lock = Lock(self.directory)
        self._opened: ocp.AsyncCheckpointer | None = None
        self._pending: _Pending | None = None
        self._damaged: set[int] = set()
        self._manifests: dict[int, tuple[Any, Manifest]] = {}
        """What was read, and when the file had been written: large models' manifests take a while to read."""

    # --- saving ---------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState, meta: Mapping[str, Any] | None = None, *, loss: float | None = None) -> None:
        """Saves the state under its step number, with a JSON-able description of the run, and its evaluation loss if it has one.

        Raises:
          CheckpointError: the directory has this step or a later one, so that the new one would not be the newest; another
            run writes there; the save before this one failed.
        """
        described = json.loads(json.dumps(dict(meta or {})))  # what cannot be written raises here, not in the background
        self.wait()
        step, latest = int(state.step), self.latest_step()
        if latest is not None and latest >= step:
            raise CheckpointError(
                f"step {step} cannot be saved: {self.directory} has step {latest}; save into another directory, or remove it"
            )
        self._on_first_process(lambda: self._make_room(step))
        self._damaged.discard(step)
        leaves = {path: restoring.storable(x) for path, x in named_leaves(state)}
        arrays = {path: x for path, x in leaves.items() if x.size}
        sums = checksum.sums_on_devices(arrays)
        structs = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for path, x in leaves.items()}
        self._pending = _Pending(step, structs, list(arrays), sums, described, loss)
        arguments = {path: ocp.SaveArgs(chunk_byte_size=self._chunk_bytes) for path in arrays}
        try:
            with quiet(), self._saving(step):
                self._writer.save(self.directory / str(step), args=ocp.args.PyTreeSave(arrays, save_args=arguments))
        except CheckpointError:
            self._pending = None
            raise

    def claim(self) -> None:
        """Takes the directory for this object's saves, as the first save would; CheckpointError where another run writes there."""
        self._on_first_process(self._take_lock)

    def check(self) -> None:
        """Raises what a background write raised since the last call; waits for nothing."""
        if self._opened is not None:
            try:
                with self._saving(self._pending.step if self._pending else None):
                    self._opened.check_for_errors()
            except CheckpointError:
                self._pending = None  # it is no saved step, nor will it be
                raise

    def wait(self) -> None:
        """Returns when every save is on disk and what need not stay is removed; raises what a background write raised."""
        if self._pending is None or self._opened is None:
            return
        try:
            with quiet(), self._saving(self._pending.step):
                self._opened.wait_until_finished()
        finally:
            self._pending = None
        if jax.process_index() == 0:
            self._remove_old()

    def close(self) -> None:
        """Waits, then frees the threads and the directory."""
        try:
            self.wait()
        finally:
            if self._opened is not None:
                with quiet(), contextlib.suppress(Exception):  # its own wait: what it could raise, ours has raised
                    self._opened.close()
                self._opened = None
            self._lock.release()

    @property
    def _writer(self) -> ocp.AsyncCheckpointer:
        if self._opened is None:
            options = ocp.AsyncOptions(post_finalization_callback=self._write_manifest)
            handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=self._concurrent_gb)
            self._opened = ocp.AsyncCheckpointer(handler, async_options=options)
        return self._opened

    def _write_manifest(self) -> None:
        """Called by Orbax in the first process's background thread: all arrays are written, the folder is not yet renamed."""
        assert self._pending is not None
        self._lock.check()
        pending, final = self._pending, self.directory / str(self._pending.step)
        folder = next(iter(self._named(rf"{pending.step}\.orbax-checkpoint-tmp.*")), final)
        found = checksum.as_text(pending.summed, pending.sums)
        sharding = next(iter(pending.leaves.values())).sharding
        manifests.write(
            folder,
            Manifest(
                step=pending.step,
                saved_at=time.time(),
                loss=pending.loss,
                meta=pending.meta,
                mesh=dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {},
                versions=manifests.versions(),
                leaves={path: manifests.leaf_of(x, found.get(path, "")) for path, x in pending.leaves.items()},
                files=manifests.files_of(folder),
            ),
        )

    def _take_lock(self) -> None:
        if not self._lock.held:
            self._lock.acquire()
        self._lock.check()

    def _make_room(self, step: int) -> None:
        """Takes the lock, removes what killed runs left under temporary names, and puts aside what has the step's name."""
        self._take_lock()
        for folder in self._named(r"\d+\.(orbax-checkpoint-tmp.*|removed)"):
            folder.rmtree()
        folder = self.directory / str(step)
        if folder.exists():
            aside = next(name for i in range(1, 10**6) if not (name := folder.with_name(f"{step}.damaged-{i}")).exists())
            warnings.warn(f"{folder} is damaged or unfinished; it is now {aside.name}, and step {step} is saved anew", stacklevel=3)
            folder.rename(aside)

    def _named(self, pattern: str) -> list[epath.Path]:
        return [path for path in self.directory.iterdir() if re.fullmatch(pattern, path.name)]

    def _remove_old(self) -> None:
        if self._keep is None:
            return
        whole = self._whole()
        kept = set(sorted(whole)[-self._keep :])
        if self._keep_every:
            kept |= {step for step in whole if step % self._keep_every == 0}
        if self._keep_best and (best := _best(whole)) is not None:
            kept.add(best)
        for step in whole.keys() - kept:
            folder = self.directory / str(step)
            if "://" in str(self.directory):  # object stores copy what they rename
                (folder / manifests.MANIFEST).unlink()  # from now on it does not exist, whenever the rest goes
            else:
                folder = folder.rename(folder.with_name(f"{step}.removed"))  # a run that is killed here leaves no half step
            folder.rmtree()

    @contextlib.contextmanager
    def _saving(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"step {step} could not be saved in {self.directory} ({first_line(error)}); earlier steps are as they were"
            ) from error

    # --- which steps there are ------------------------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """The newest step that was wholly saved, or that this object is saving; None where there is none (nothing is created).

        Others are skipped with a warning. Whether its arrays are still what was saved shows when they are restored.
        """
        saving = [self._pending.step] if self._pending else []
        return max([*self._whole(warn=True), *saving], default=None)

    def best_step(self) -> int | None:
        """The saved step with the lowest loss, the first of several; None where none was saved with one."""
        return _best(self._whole())

    def steps(self) -> dict[int, Manifest | str]:
        """Every step's manifest, or why it does not count, oldest first."""
        found: dict[int, Manifest | str] = {}
        if self.directory.is_dir():
            for step in sorted(int(path.name) for path in self.directory.iterdir() if re.fullmatch(r"\d+", path.name) and path.is_dir()):
                try:
                    found[step] = self._manifest(step)
                except ManifestError as error:
                    found[step] = str(error)
        return found

    def resumable_step(self) -> int | None:
        """The newest step to go on from; None for a directory without steps.

        Raises:
          CheckpointError: there are steps, but none of them is whole: beginning anew is not for a run to decide.
        """
        step = self.latest_step()
        if step is None and (broken := self.steps()):
            raise CheckpointError(_none_is_whole(self.directory, broken))
        return step

    def meta(self, step: int) -> dict[str, Any]:
        """The description saved with a step."""
        return self._required(step).meta

    def manifest(self, step: int) -> Manifest:
        """What a step holds. CheckpointError where it is not there; DamagedError where its manifest is not whole."""
        return self._required(step)

    def _whole(self, warn: bool = False) -> dict[int, Manifest]:
        whole = {}
        for step, found in self.steps().items():
            if step in self._damaged:
                continue
            if isinstance(found, Manifest):
                whole[step] = found
            elif warn:
                warnings.warn(f"{self.directory / str(step)} is skipped: {found}", stacklevel=3)
        return whole

    def _manifest(self, step: int) -> Manifest:
        folder = self.directory / str(step)
        written = manifests.written(folder)
        if written is None or self._manifests.get(step, (None,))[0] != written:
            found = manifests.read(folder)
            if found.step != step:
                raise ManifestError(f"{manifests.MANIFEST} is that of step {found.step}")
            self._manifests[step] = written, found
        return self._manifests[step][1]

    def _required(self, step: int) -> Manifest:
        where = self.directory / str(step)
        if not where.is_dir():
            raise CheckpointError(f"{self.directory} has no step {step}; it has {', '.join(map(str, self.steps())) or 'none'}")
        try:
            return self._manifest(step)
        except ManifestError as error:
            raise DamagedError(f"{where} cannot be restored: {error}") from error

    # --- restoring ------------------------------------------------------------------------------------------------------

    def restore(self, plan: Plan, step: int | None = None, *, convert: bool = False, rename: Mapping[str, str] | None = None) -> TrainState:
        """The state of a step, every leaf read straight into the shard the plan gives it.

        Args:
          plan: on any mesh, of any stage and engine.
          step: which one. None takes the newest that verifies; damaged ones are skipped with a warning.
          convert: whether to go between float32 and a low precision with master, or between dtypes of moments. Parameters
            and masters come from the saved masters where there are some; a loss scale begins anew where none was saved.
          rename: names in the checkpoint to names in the plan, of parameters or of what many begin with.

        Raises:
          CheckpointError: no checkpoint, or leaves whose path, shape or dtype differ from the plan's.
          DamagedError: the step's files are not what was saved; it names the leaves.
        """
        struct = state_struct(plan)
        wanted = {path: restoring.storable_struct(x) for path, x in named_leaves(struct)}

        def restored(step: int) -> TrainState:
            manifest, where = self._required(step), str(self.directory / str(step))
            names = sources.renamed(manifest.leaves, rename, where) if rename else {path: path for path in manifest.leaves}
            saved = {ours: manifest.leaves[theirs] for ours, theirs in names.items()}
            found = sources.match(saved, wanted, convert=convert, where=where)
            arrays = self._read(manifest, {path: source for path, source in found.items() if source is not None}, names)
            fresh = (
                {f"loss_scale/{k}": v for k, v in named_leaves(init_loss_scale(plan.precision.loss_scale))}
                if None in found.values()
                else {}
            )
            leaves = [
                restoring.usable(arrays[path] if path in arrays else jax.device_put(fresh[path], x.sharding), x)
                for path, x in named_leaves(struct)
            ]
            return jax.tree.unflatten(jax.tree.structure(struct), leaves)

        return self._first_that_verifies(restored, step)

    def restore_params(
        self,
        plan: Plan,
        rng: jax.Array,
        step: int | None = None,
        *,
        only: Sequence[str] = ("*",),
        rename: Mapping[str, str] | None = None,
    ) -> TrainState:
        """A state at step 0 whose parameters are those of a checkpoint; masters and moments begin with them.

        Args:
          plan: of any optimizer and precision.
          rng: as in `init_state`.
          step: as in `restore`.
          only: patterns of the parameters to take, by their names in the plan; the others are drawn.
          rename: as in `restore`.

        Raises:
          CheckpointError: a parameter that is missing or of another shape; with all taken, one that the plan does not have.
          DamagedError: as in `restore`.
          ValueError: a pattern that names no parameter.
        """
        require_all_used(only, plan.params, "only")
        chosen = {leaf.name: leaf for leaf in plan.part("params") if any(matches(pattern, leaf.name) for pattern in only)}
        wanted = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=plan.sharding(leaf.rest)) for name, leaf in chosen.items()}

        def restored(step: int) -> dict[str, jax.Array]:
            manifest, where = self._required(step), str(self.directory / str(step))
            names = sources.renamed(manifest.leaves, rename, where) if rename else {path: path for path in manifest.leaves}
            saved = {ours: manifest.leaves[theirs] for ours, theirs in names.items()}
            found = sources.params_sources(saved, wanted, where)
            extra = [path for path in saved if path.startswith(sources.PARAMS) and path.removeprefix(sources.PARAMS) not in plan.params]
            if extra and len(chosen) == len(plan.params):
                raise CheckpointError(
                    f"{where} does not fit the plan:\n  {sources.shown([f'{path}: in the checkpoint, but not in the plan' for path in extra])}"
                    "\n  only=[...] takes some of the parameters"
                )
            return self._read(manifest, found, names)

        taken = self._first_that_verifies(restored, step)
        if len(chosen) < len(plan.params):
            taken = {name: taken.get(name, x) for name, x in named_leaves(init_params(plan, rng))}
        return init_state(plan, rng, jax.tree.unflatten(plan.params_treedef, [taken[leaf.name] for leaf in plan.part("params")]))

    def _first_that_verifies(self, restored: Any, step: int | None) -> Any:
        if step is not None:
            return restored(step)
        while (newest := self.latest_step()) is not None:
            try:
                return restored(newest)
            except DamagedError as error:
                warnings.warn(f"{error}\nThe step before it is taken.", stacklevel=3)
                self._damaged.add(newest)
        if broken := self.steps():
            raise CheckpointError(
                _none_is_whole(self.directory, {step: "damaged" if step in self._damaged else why for step, why in broken.items()})
            )
        raise CheckpointError(f"no checkpoint in {self.directory}")

    def _read(self, manifest: Manifest, found: Mapping[str, Source], names: Mapping[str, str]) -> dict[str, jax.Array]:
        folder = self.directory / str(manifest.step)
        return restoring.read(folder, manifest, found, names, verify=self._verify, concurrent_gb=self._concurrent_gb)

    def _on_first_process(self, action: Any) -> None:
        """Runs it in one process; all raise where it raises."""
        error: Exception | None = None
        if jax.process_index() == 0:
            try:
                action()
            except Exception as caught:
                error = caught
        if restoring.agree(error is not None):
            raise error or CheckpointError(f"{self.directory}: the first process cannot write there; its own error says why")


def _none_is_whole(directory: epath.Path, broken: Mapping[int, Any]) -> str:
    why = "; ".join(f"{directory / str(step)}: {found}" for step, found in broken.items())
    return f"no step in {directory} is whole ({why}); remove it, or choose another, to begin anew"


def _best(whole: Mapping[int, Manifest]) -> int | None:
    losses = {step: manifest.loss for step, manifest in whole.items() if manifest.loss is not None and not math.isnan(manifest.loss)}
    return min(losses, key=lambda step: (losses[step], step), default=None)
