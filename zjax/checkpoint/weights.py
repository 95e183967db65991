"""Weights of a checkpoint to and from safetensors and .npz, in any layout of names; never pickle.

Export streams: it holds one leaf at a time, and of it the pieces that are being read. Import reads memory maps: each process
reads the slices of its own shards.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from etils import epath

from zjax.checkpoint import checksum, sources
from zjax.checkpoint.errors import CheckpointError, DamagedError
from zjax.checkpoint.manifest import Leaf, Manifest
from zjax.checkpoint.reading import open_leaf, pieces
from zjax.checkpoint.safetensors import Spec, Writer, open_tensors
from zjax.plan import Plan
from zjax.tree import PyTree

FORMATS = ("huggingface", "safetensors", "npz")
"""Hugging Face's names and layout; one tensor a leaf under zjax's names, as safetensors or .npz."""
EXPORT_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FILE_BYTES = 5 * 10**9
"""The most a file of several holds; transformers' own default."""
EXPORT_PIECE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Entry:
    """What one leaf is called elsewhere."""

    tensors: tuple[str, ...]
    """One name; or for a leaf that stacks layers, one a layer."""
    stacked: bool = False
    transposed: bool = False
    """Whether the tensor is [out, in] where the leaf is [in, out]."""

    def shape(self, leaf: tuple[int, ...]) -> tuple[int, ...]:
        """Of each tensor."""
        shape = leaf[1:] if self.stacked else leaf
        return shape[::-1] if self.transposed else shape


Layout = Mapping[str, Entry]
"""By parameter name."""


def own_names(names: Any) -> dict[str, Entry]:
    """The layout of zjax's own names."""
    return {name: Entry((name,)) for name in names}


def params_of(manifest: Manifest, dtype: np.dtype) -> dict[str, str]:
    """The saved path of every parameter to export: itself where it has that dtype, else its master, which is more precise."""
    found = {}
    for path, leaf in manifest.leaves.items():
        if path.startswith(sources.PARAMS):
            name = path.removeprefix(sources.PARAMS)
            master = sources.MASTER + name
            found[name] = path if leaf.dtype == str(dtype) or master not in manifest.leaves else master
    return found


def export_safetensors(
    step: epath.Path, manifest: Manifest, layout: Layout, folder: Path, *, dtype: str, file_bytes: int = FILE_BYTES, made_for: str
) -> None:
    """Writes a checkpoint's parameters into a folder that exists.

    Args:
      step: the checkpoint's folder.
      manifest: its manifest.
      layout: the names to write, for every parameter.
      folder: where to.
      dtype: `float32` or `bfloat16`.
      file_bytes: the most one file holds, if no tensor is larger.
      made_for: what the files' metadata say of their format (`pt` for transformers).

    Raises:
      DamagedError: a leaf that cannot be read or is not what was saved.
      CheckpointError: parameters that the layout does not have, or the checkpoint.
    """
    wanted = EXPORT_DTYPES[dtype]
    paths = params_of(manifest, wanted)
    _require_names(layout, paths, str(step))
    specs = {
        tensor: Spec(entry.shape(manifest.leaves[paths[name]].shape), wanted) for name, entry in layout.items() for tensor in entry.tensors
    }
    writer = Writer(folder, specs, file_bytes=file_bytes, metadata={"format": made_for})
    for name, entry in layout.items():
        _write_leaf(writer, entry, read_leaf(step, paths[name], manifest.leaves[paths[name]]))


def _write_leaf(writer: Writer, entry: Entry, leaf: np.ndarray) -> None:
    for index, tensor in enumerate(entry.tensors):
        part = leaf[index] if entry.stacked else leaf
        writer.put(tensor, part.T if entry.transposed else part)


def export_npz(step: epath.Path, manifest: Manifest, file: Path) -> None:
    """Writes a checkpoint's parameters as float32 under their own names into an .npz file, leaf by leaf; raises as `export_safetensors`."""
    with zipfile.ZipFile(file, "x", zipfile.ZIP_STORED) as archive:
        for name, path in params_of(manifest, EXPORT_DTYPES["float32"]).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(
                    entry, read_leaf(step, path, manifest.leaves[path]).astype(np.float32, copy=False), allow_pickle=False
                )


def read_leaf(step: epath.Path, path: str, leaf: Leaf) -> np.ndarray:
    """A leaf of a checkpoint on the host, read in pieces and verified; DamagedError where it is not what was saved."""
    whole: np.ndarray = np.empty(leaf.shape, jax.numpy.dtype(leaf.dtype))
    if not whole.size:
        return whole
    first = second = 0
    try:
        for start, piece in pieces(open_leaf(step, path), EXPORT_PIECE_BYTES):
            more = checksum.sums_of_piece(piece, start)
            first, second = first + more[0], second + more[1]
            whole[tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))] = piece
    except Exception as error:  # TensorStore raises ValueError, KeyError, OSError and others
        raise DamagedError(f"{step}: {path} cannot be read ({error})") from error
    if (found := checksum.text(first, second)) != leaf.checksum:
        raise DamagedError(f"{step}: {path} is damaged: its checksum is {found}, {leaf.checksum} was saved")
    return whole


def open_weights(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file or folder, or of an .npz file, whose arrays are read whole when they are used."""
    if path.suffix != ".npz":
        return dict(open_tensors(path))
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    archive = np.load(path, allow_pickle=False)
    return {name: _Lazy(archive, name) for name in archive.files}


class _Lazy:
    """One array of an .npz file; read at the first use of its shape or elements, and not kept."""

    def __init__(self, archive: Any, name: str):
        self._archive, self._name = archive, name

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._archive[self._name], dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        with self._archive.zip.open(f"{self._name}.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return read(file)[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._archive[self._name][index]


def import_params(plan: Plan, tensors: Mapping[str, Any], layout: Layout, where: str, ignored: Any = ()) -> PyTree:
    """Parameters for `init_state`, read straight into the shards of a plan, in the dtype of the tensors.

    Args:
      plan: whose parameters they are.
      tensors: of `open_weights`.
      layout: the tensors of every parameter.
      where: the source, for errors.
      ignored: names that may be there, and are not read.

    Raises:
      CheckpointError: tensors that are missing, that nothing asks for, or of another shape; it names each.
    """
    _require_names(layout, plan.params, where)
    expected = {tensor: entry.shape(plan.params[name].shape) for name, entry in layout.items() for tensor in entry.tensors}
    problems = [f"{tensor}: missing" for tensor in expected if tensor not in tensors]
    problems += [f"{tensor}: not a parameter of this model" for tensor in tensors if tensor not in expected and tensor not in ignored]
    problems += [
        f"{tensor}: {list(tensors[tensor].shape)}, the model has {list(shape)}"
        for tensor, shape in expected.items()
        if tensor in tensors and tuple(tensors[tensor].shape) != shape
    ]
    if problems:
        raise CheckpointError(f"{where} does not fit the model:\n  {sources.shown(problems)}")
    leaves = [_import_leaf(plan, tensors, layout[leaf.name], leaf) for leaf in plan.part("params")]
    return jax.tree.unflatten(plan.params_treedef, leaves)


def _import_leaf(plan: Plan, tensors: Mapping[str, Any], entry: Entry, leaf: Any) -> jax.Array:
    def part(tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        return tensors[tensor][index[::-1]].T if entry.transposed else tensors[tensor][index]

    def shard(index: Any) -> np.ndarray:
        if not entry.stacked:
            return np.asarray(part(entry.tensors[0], index))
        return np.stack([part(tensor, index[1:]) for tensor in entry.tensors[index[0]]])

    return jax.make_array_from_callback(leaf.shape, plan.sharding(leaf.rest), shard)


def _require_names(layout: Layout, names: Any, where: str) -> None:
    problems = [f"{name}: not in {where}" for name in layout if name not in names]
    problems += [f"{name}: a parameter of {where} that the layout has no name for" for name in names if name not in layout]
    if problems:
        raise CheckpointError(f"the parameters are not those of the model:\n  {sources.shown(problems)}")
