"""Text and token files as one long sequence of token ids, read in place."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from zjax.config import DataConfig, EvaluationConfig
from zjax.fields import ConfigError

SUFFIXES = (".txt", ".jsonl", ".bin")
"""The files that can be read."""
SEPARATORS = ("</s>", "<|endoftext|>", "<|end_of_text|>")
"""Names of the token that ends a document, tried in this order in a tokenizer's vocabulary."""
BYTES = 256
"""Vocabulary of text without a tokenizer: utf-8 bytes, of which 0 ends a document."""
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
CHUNK = 1 << 20
"""Tokens held at a time where the whole corpus is read."""
TOKENIZED_TOGETHER = 256
"""Documents handed to the tokenizer at once, for its threads to share."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Documents laid end to end; a position is an index into that sequence of `len(corpus)` tokens."""

    documents: tuple[np.ndarray, ...] = field(repr=False)
    """The token ids of each document, its separator included: one-dimensional arrays of any integer dtype, memory-mapped or not."""
    vocab_size: int
    """Every token id is below it."""
    decoder: Callable[[list[int]], str] = field(repr=False)
    """Token ids to text; see `decode`."""

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [documents + 1]: where each document starts, and the length of the corpus."""
        return np.cumsum([0, *map(len, self.documents)], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokens in order as little-endian int32: the same whatever the documents, dtypes and files they lie in."""
        digest = hashlib.sha256()
        for chunk in self._chunks():
            digest.update(chunk.astype("<i4", copy=False).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def slice(self, start: int, stop: int) -> np.ndarray:
        """int32 [stop - start]: the tokens at those positions, across documents. Raises IndexError outside [0, len]."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of a corpus of {len(self)}")
        tokens = np.empty(stop - start, np.int32)
        document = int(np.searchsorted(self.offsets, start, side="right")) - 1
        filled = 0
        while filled < len(tokens):
            begin = start + filled - int(self.offsets[document])
            part = self.documents[document][begin : begin + len(tokens) - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            document += 1
        return tokens

    def split(self, position: int) -> tuple[Corpus, Corpus]:
        """The tokens before a position, and those from it on; a document that lies on both sides is cut. Nothing is copied.

        Raises IndexError outside [0, len].
        """
        if not 0 <= position <= len(self):
            raise IndexError(f"position {position} of a corpus of {len(self)}")
        cut = [position - int(start) for start in self.offsets[:-1]]
        before = tuple(document[:at] for document, at in zip(self.documents, cut, strict=True) if at > 0)
        after = tuple(document[max(at, 0) :] for document, at in zip(self.documents, cut, strict=True) if at < len(document))
        return dataclasses.replace(self, documents=before), dataclasses.replace(self, documents=after)

    def unigram_entropy(self) -> float:
        """Nats per token of the corpus' own token frequencies: the loss of a model that knows nothing else."""
        counts = np.zeros(self.vocab_size, np.int64)
        for chunk in self._chunks():
            counts += np.bincount(chunk, minlength=self.vocab_size)
        share = counts[counts > 0] / len(self)
        return float(-(share * np.log(share)).sum())

    def decode(self, ids: Any) -> str:
        """Text of token ids (any sequence of integers): bytes that are no utf-8 become U+FFFD; ids of .bin files without
        a tokenizer are written as numbers with spaces between."""
        return self.decoder([int(i) for i in ids])

    def _chunks(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), CHUNK):
            yield self.slice(start, min(start + CHUNK, len(self)))


def load_corpus(config: DataConfig) -> Corpus:
    """Reads the corpus that `data.path` names; text is held as tokens, .bin files stay on disk.

    Documents are the .txt files, the lines of .jsonl files and the .bin files, in the order of `data.path`, and of the
    sorted relative paths in a directory. Text documents are followed by the separator, where there is one; .bin files
    are taken as they are; empty documents are left out.
    Raises `ConfigError` if a path is missing, holds no tokens or something other than its suffix says; the message names the
    knob, the file and the line.
    """
    files = _stdlib_sources() if config.path == "stdlib" else _files(config.path)
    tokenizer = None if config.tokenizer is None else _load_tokenizer(config.tokenizer)
    binaries = [file for file in files if file.suffix == ".bin"]
    if tokenizer is None and binaries and len(binaries) < len(files):
        text = next(file for file in files if file.suffix != ".bin")
        raise ConfigError(
            f"data.path={config.path!r}: {binaries[0]} holds tokens and {text} text, whose bytes are another vocabulary; "
            "name the data.tokenizer that made the tokens, or leave one of them out"
        )
    documents = [document for file in files for document in _documents(file, config, tokenizer) if len(document)]
    if not documents:
        raise ConfigError(f"data.path={config.path!r}: the corpus is empty, there is no token in {len(files)} files")
    if tokenizer is not None:
        # The largest id, not the number of ids: a vocabulary may have holes, and embedding tables are indexed by id.
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        for file in binaries:
            if file.stat().st_size and (largest := _map_tokens(file).max()) >= vocab_size:
                raise ConfigError(f"data.path={config.path!r}: {file} has token {largest}, but data.tokenizer only {vocab_size} tokens")
        return Corpus(documents=tuple(documents), vocab_size=vocab_size, decoder=tokenizer.decode)
    if binaries:
        vocab_size = int(max(document.max() for document in documents)) + 1
        return Corpus(documents=tuple(documents), vocab_size=vocab_size, decoder=_decode_numbers)
    return Corpus(documents=tuple(documents), vocab_size=BYTES, decoder=_decode_bytes)


def hold_out(corpus: Corpus, data: DataConfig, evaluation: EvaluationConfig) -> tuple[Corpus, Corpus | None]:
    """The corpus to train on, and the held-out one, if any: `evaluation.path`'s, or the last rows of the corpus.

    With a fraction, the last ceil(fraction x rows) rows of T = `data.sequence_length` predictions are held out: which tokens
    they are depends on the corpus, the fraction and T alone.

    Raises:
      ConfigError: too small a corpus to hold out that fraction; text held out of tokens, or tokens of text.
    """
    if evaluation.path is not None:
        held_out = load_corpus(dataclasses.replace(data, path=evaluation.path))
        if data.tokenizer is None and held_out.decoder is not corpus.decoder:
            raise ConfigError(
                f"evaluation.path={evaluation.path!r}: of it and data.path={data.path!r} one is text, whose tokens are bytes, and one holds "
                "tokens; name the data.tokenizer that made them"
            )
        return corpus, held_out
    if not evaluation.fraction:
        return corpus, None
    rows = (len(corpus) - 1) // data.sequence_length
    held = math.ceil(evaluation.fraction * rows)
    if rows - held < 1:
        raise ConfigError(
            f"evaluation.fraction={evaluation.fraction}: the corpus has {rows} whole rows of data.sequence_length={data.sequence_length}, "
            "so nothing would be left to train on; lower it"
        )
    return corpus.split(len(corpus) - 1 - held * data.sequence_length)


def _stdlib_sources() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (file.relative_to(root) for file in root.rglob("*.py") if file.is_file())
    kept = sorted(path.as_posix() for path in relative if STDLIB_SKIPPED.isdisjoint(path.parts[:-1]))
    if not kept:
        raise ConfigError(f"data.path='stdlib': this Python has no sources in {root}; name a file or a directory")
    return [root / path for path in kept]


def _files(paths: str | tuple[str, ...]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, (paths,) if isinstance(paths, str) else paths):
        if path.is_dir():
            found = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not found:
                raise ConfigError(f"data.path={str(path)!r}: no file in the directory ends in {', '.join(SUFFIXES)}")
            files += [path / name for name in found]
        elif not path.exists():
            raise ConfigError(f"data.path={str(path)!r}: does not exist; name a file, a directory, a list of them, or 'stdlib'")
        elif path.suffix not in SUFFIXES:
            raise ConfigError(f"data.path={str(path)!r}: {path.suffix or 'no suffix'} is not supported; use {', '.join(SUFFIXES)}")
        else:
            files.append(path)
    return files


def _load_tokenizer(path: str) -> Tokenizer:
    if not Path(path).is_file():
        raise ConfigError(f"data.tokenizer={path!r}: no such file; name a tokenizer.json, or None for bytes")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # The package raises plain Exception.
        raise ConfigError(f"data.tokenizer={path!r}: not a tokenizer.json of the tokenizers package: {error}") from error
    # A tokenizer.json may carry these for the model it was made for; here they would cut or fill the documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _documents(file: Path, config: DataConfig, tokenizer: Tokenizer | None) -> Iterator[np.ndarray]:
    if file.suffix == ".bin":
        if file.stat().st_size:  # An empty file cannot be mapped.
            yield _map_tokens(file)
        return
    texts = filter(None, _json_texts(file, config.text_field) if file.suffix == ".jsonl" else _whole_text(file))
    if tokenizer is None:
        yield from (np.frombuffer(text.encode() + b"\0", np.uint8) for text in texts)
    else:
        yield from _tokenized(texts, tokenizer)


def _map_tokens(file: Path) -> np.ndarray:
    size = file.stat().st_size
    if size % 2:
        raise ConfigError(f"data.path: {file} has {size} bytes, an odd number, and so is no sequence of uint16 tokens")
    return np.memmap(file, "<u2", mode="r")


def _whole_text(file: Path) -> Iterator[str]:
    try:
        yield file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path: {file} is not utf-8 text: {error}") from error


def _json_texts(file: Path, text_field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
            except ValueError as error:
                raise ConfigError(f"data.path: {file}:{number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ConfigError(f"data.path: {file}:{number} is not a JSON object but {type(record).__name__}")
            if not isinstance(record.get(text_field), str):
                raise ConfigError(f"data.text_field={text_field!r}: {file}:{number} has no text in it; its fields are {', '.join(record)}")
            try:
                record[text_field].encode()  # JSON can spell half a surrogate pair, which has no utf-8.
            except UnicodeEncodeError as error:
                raise ConfigError(f"data.path: {file}:{number} is not valid unicode: {error}") from error
            yield record[text_field]


def _tokenized(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    separators = (tokenizer.token_to_id(name) for name in SEPARATORS)
    ending = list(itertools.islice((i for i in separators if i is not None), 1))
    while together := list(itertools.islice(texts, TOKENIZED_TOGETHER)):
        for encoding in tokenizer.encode_batch_fast(together, add_special_tokens=False):
            if encoding.ids:
                yield np.array(encoding.ids + ending, np.int32)


def _decode_bytes(ids: list[int]) -> str:
    # A model's vocabulary may be padded beyond the bytes: such ids become 0xff, which occurs nowhere in utf-8.
    return bytes(i if i < BYTES else 0xFF for i in ids).decode(errors="replace")


def _decode_numbers(ids: list[int]) -> str:
    return " ".join(map(str, ids))
