"""The safetensors format: 8 bytes with the header's length, a JSON header, then the tensors' bytes, little-endian, in C order.

https://github.com/huggingface/safetensors, and for several files an index as transformers writes it. A file is read through a
memory map: only the slices that are asked for are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from zjax.checkpoint.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
"""Names of the format."""


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Writer:
    """A folder of files that holds these tensors, which are written one by one in any order."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], *, file_bytes: int, metadata: Mapping[str, str]):
        """Makes the files with their headers, each of at most `file_bytes` or one tensor, and the index where they are several."""
        self._specs, self._places = dict(specs), dict[str, tuple[Path, int]]()
        groups: list[list[str]] = [[]]
        for name, spec in specs.items():
            if groups[-1] and sum(specs[each].bytes for each in groups[-1]) + spec.bytes > file_bytes:
                groups.append([])
            groups[-1].append(name)
        files = [
            f"model-{i + 1:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors" for i in range(len(groups))
        ]
        for file, names in zip(files, groups, strict=True):
            self._start(folder / file, names, metadata)
        if len(groups) > 1:
            files_of = {name: file for file, names in zip(files, groups, strict=True) for name in names}
            total = sum(spec.bytes for spec in specs.values())
            (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files_of}, indent=2))

    def _start(self, path: Path, names: list[str], metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset, offsets = 0, {}
        codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
        for name in names:
            spec = self._specs[name]
            header[name] = {"dtype": codes[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, offset + spec.bytes]}
            offsets[name], offset = offset, offset + spec.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the format asks
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        self._places |= {name: (path, 8 + len(text) + offsets[name]) for name in names}

    def put(self, name: str, x: np.ndarray) -> None:
        """Writes a tensor of its announced shape, cast to its announced dtype."""
        spec, (path, offset) = self._specs[name], self._places[name]
        assert x.shape == spec.shape, (name, x.shape, spec.shape)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(np.ascontiguousarray(x, spec.dtype).reshape(-1).view(np.uint8).data)


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, or of a folder with an index or `model.safetensors`, as memory maps.

    Raises:
      CheckpointError: no such file; one that is no safetensors file, or is shorter than its header says.
    """
    if path.is_dir():
        if not (path / INDEX).is_file():
            return open_tensors(path / "model.safetensors")
        files = json.loads((path / INDEX).read_text())["weight_map"]
        opened = {file: open_tensors(path / file) for file in sorted(set(files.values()))}
        if lacking := sorted(name for name, file in files.items() if name not in opened[file]):
            raise CheckpointError(f"{path / INDEX} names tensors that are not in their files: {', '.join(lacking[:5])}")
        return {name: opened[file][name] for name, file in files.items()}
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(length)) if length < path.stat().st_size else None
        return {name: _tensor(path, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file ({error})") from error


def _tensor(path: Path, base: int, entry: Mapping[str, Any]) -> np.ndarray:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{path} has a tensor of dtype {entry['dtype']}; known: {', '.join(DTYPES)}")
    dtype, shape, (begin, end) = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"]), entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for {entry['dtype']}{list(shape)}")
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, np.uint8, "r", base + begin, (end - begin,)).view(dtype).reshape(shape)
