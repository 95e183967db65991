"""The manifest of a checkpoint: what it holds, with checksums. A step without a valid manifest does not exist.

`DIR/STEP/manifest.json` stands beside what Orbax writes, is written when all arrays are on disk, and comes under its name at
once. Its keys:

    format     1
    step       the step number
    saved_at   seconds since 1970
    loss       of an evaluation, or null
    meta       what the run said of itself: model, data, config
    mesh       degree of every mesh axis
    versions   of zjax, jax, orbax-checkpoint and Python
    leaves     path in the train state -> {shape, dtype, spec, checksum}; PRNG keys are their uint32 words
    files      path in the folder -> [bytes, CRC-32, or null above 1 MiB], but for those that Orbax writes when it renames the folder
    digest     SHA-256 of all this as JSON with sorted keys and no spaces

Checksums are those of `zjax.checkpoint.checksum`. Leaves without elements are listed, and are nowhere else: Orbax stores none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

MANIFEST = "manifest.json"
FORMAT = 1
DIGESTED_BYTES = 2**20
"""Files up to this size have a CRC: those of Orbax and TensorStore. Larger ones hold array data, which the leaves' checksums cover."""
_ORBAX_COMMIT = ("commit_success.txt", "_CHECKPOINT_METADATA")
"""Written after the manifest, when Orbax renames the folder; they hold nothing that a restore needs."""


class ManifestError(ValueError):
    """A manifest that is missing or not as it was written. The message says which."""


@dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    spec: str
    """How it lay on the mesh that saved it."""
    checksum: str
    """Of `zjax.checkpoint.checksum`; empty for an array without elements."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds; the keys of the file are told in the module's text."""

    step: int
    saved_at: float
    loss: float | None
    meta: dict[str, Any]
    mesh: dict[str, int]
    versions: dict[str, str]
    leaves: dict[str, Leaf]
    files: dict[str, tuple[int, int | None]]

    def to_text(self) -> str:
        """The file's text."""
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps({**values, "digest": _digest(values)}, indent=1)


def versions() -> dict[str, str]:
    """Of what writes the checkpoint."""
    return {name: importlib.metadata.version(name) for name in ("zjax", "jax", "orbax-checkpoint")} | {"python": platform.python_version()}


def parse(text: str) -> Manifest:
    """The manifest of a file's text; ManifestError where it is not exactly what was written."""
    try:
        values = json.loads(text)
        digest, made_by = values.pop("digest"), values.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ManifestError(f"{MANIFEST} is damaged: {error}") from error
    if digest != _digest({"format": made_by, **values}):
        raise ManifestError(f"{MANIFEST} is damaged: its digest is not that of its content")
    if made_by != FORMAT:
        raise ManifestError(f"{MANIFEST} has format {made_by}, this version of zjax reads {FORMAT}")
    leaves = {path: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for path, leaf in values.pop("leaves").items()}
    files = {path: (size, crc) for path, (size, crc) in values.pop("files").items()}
    return Manifest(**values, leaves=leaves, files=files)


def read(folder: epath.Path) -> Manifest:
    """The manifest of a step's folder; ManifestError where there is none, or none that is whole."""
    try:
        return parse((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise ManifestError(f"no {MANIFEST}: the save was not finished") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{MANIFEST} is damaged: {error}") from error


def written(folder: epath.Path) -> Any:
    """What tells one manifest of a folder from another without reading it; None where there is none."""
    try:
        found = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return found.mtime, found.length


def write(folder: epath.Path, manifest: Manifest) -> None:
    """Writes the manifest under another name, then renames it."""
    unfinished = folder / f"{MANIFEST}.unfinished"
    unfinished.write_text(manifest.to_text())
    unfinished.replace(folder / MANIFEST)


def files_of(folder: epath.Path) -> dict[str, tuple[int, int | None]]:
    """Size and CRC of every file below a step's folder that a manifest lists."""
    return {str(path.relative_to(folder)): _measure(path) for path in _files(folder)}


def damaged_files(folder: epath.Path, manifest: Manifest) -> list[str]:
    """What is missing or has another size or content, in words; large files are told by size alone."""
    problems = []
    for name, expected in manifest.files.items():
        path = folder / name
        found = _measure(path) if path.exists() else None
        if found is None:
            problems.append(f"{name}: missing")
        elif found[0] != expected[0]:
            problems.append(f"{name}: {found[0]} bytes, {expected[0]} were written")
        elif found != expected:
            problems.append(f"{name}: its content has changed")
    return problems


def _measure(path: epath.Path) -> tuple[int, int | None]:
    size = path.stat().length
    return size, zlib.crc32(path.read_bytes()) if size <= DIGESTED_BYTES else None


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        elif path.name not in _ORBAX_COMMIT and not path.name.startswith(MANIFEST):
            yield path


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def leaf_of(x: jax.Array, checksum: str) -> Leaf:
    """The entry of an array."""
    return Leaf(tuple(x.shape), str(x.dtype), str(getattr(x.sharding, "spec", "")), checksum)
