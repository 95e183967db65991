"""A DeepSpeed config file as checked values by dotted path, and the fate of each key in it. Nothing here knows zjax's configs."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zjax.ds_config.keys import ALIASES, AUTO, KEYS, SWITCHES, Fate, Key
from zjax.fields import ConfigError, NotAvailableError, nearest

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A file's path, or what it holds as a dictionary."""

SECTIONS = {path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)}
"""The sections by dotted path."""

_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "size": "a whole number, 0 or more",
    "number": "a number",
    "text": "a string",
    "list": "a list",
    "section": "a section",
}


@dataclass(frozen=True)
class Row:
    """One key of a file and what becomes of it."""

    key: str
    """Dotted path, as the file has it."""
    value: Any
    fate: Fate | None
    """None for a key that DeepSpeed does not have."""
    text: str
    """What it becomes, why it has no meaning, what to use instead, or what is wrong."""
    wrong: bool = False
    """Whether the file cannot be honoured because of it."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """What a file says."""

    values: Mapping[str, Any]
    """Value by dotted path, under the names of today; without what is null, and without what a switched-off section holds."""
    rows: tuple[Row, ...]
    """Every key, in the file's order."""

    def refuse(self, below: str = "") -> None:
        """Raises where a key of a section `below` (all by default) cannot be honoured, or any is unknown; all are named at once.

        Raises:
          NotAvailableError: one of them belongs to a feature to come.
          ConfigError: otherwise.
        """
        wrong = [row for row in self.rows if row.wrong and (row.fate is None or row.key.startswith(below))]
        if wrong:
            error = NotAvailableError if any(row.fate is Fate.NOT_YET for row in wrong) else ConfigError
            lines = [f"{row.key}={shown(row.value)}: {row.text}" for row in wrong]
            raise error("DeepSpeed config: " + "\n  ".join(lines if len(lines) == 1 else [f"{len(lines)} keys cannot be honoured", *lines]))

    def notes(self, below: str = "") -> list[tuple[type[Warning], str]]:
        """What to tell of the keys that are deprecated, one by one, and of those that change nothing, all at once."""
        rows = [row for row in self.rows if row.key.startswith(below) and not row.wrong]
        old = [(DeprecationWarning, f"{row.key} is deprecated: {row.text}") for row in rows if row.fate is Fate.DEPRECATED]
        idle = [f"{row.key} ({row.text})" for row in rows if row.fate is Fate.NO_MEANING]
        return [*old, *([(UserWarning, "accepted, and change nothing: " + "; ".join(idle))] if idle else [])]

    def announce(self, below: str = "") -> None:
        """Warns of them."""
        for category, text in self.notes(below):
            warnings.warn(f"DeepSpeed config: {text}", category, stacklevel=3)


def shown(value: Any) -> str:
    """A value as JSON has it, cut where it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def load(source: Source) -> dict[str, Any]:
    """The dictionary of a file, or a copy of one.

    Raises:
      ConfigError: no such file, no JSON (DeepSpeed also reads hjson; this does not), a key given twice in one section, or
        something else than a section at the top.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        values = json.loads(path.read_text(), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ConfigError(f"DeepSpeed config {path}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f"DeepSpeed config {path}: {error}") from error
        raise ConfigError(f"DeepSpeed config {path}: not JSON: {error} (hjson and comments are not read)") from error
    if not isinstance(values, dict):
        raise ConfigError(f"DeepSpeed config {path}: must be a JSON object, not {type(values).__name__}")
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"key {name!r} is given twice in one section; keep one")
    return dict(pairs)


def read(source: Source) -> DeepSpeedFile:
    """What a file or dictionary says, and the fate of each key. Nothing is raised for a key here: see `DeepSpeedFile.refuse`."""
    rows: list[Row] = []
    file = load(source)
    found = list(_walk(file, "", rows))
    values: dict[str, Any] = {}
    as_written: dict[str, tuple[str, Any]] = {}
    for path, value, written in found:
        if path in values:
            text = f"is the same key as {as_written[path][0]}, which is given too; keep {path}"
            rows.append(Row(*written, KEYS[path].fate, text, wrong=True))
        elif not _is_kind(value, KEYS[path].kind) and value != AUTO:
            rows.append(Row(*written, KEYS[path].fate, f"must be {_KINDS[KEYS[path].kind]}", wrong=True))
        else:
            values[path] = int(value) if KEYS[path].kind in ("int", "size") and isinstance(value, float) else value
            as_written[path] = written
    rows += [_row(path, as_written[path], values) for path in values]
    order = {written: place for place, written in enumerate(_names(file))}
    active = {path: value for path, value in values.items() if _switched_off(path, values) is None}
    # Below a section of an old name (bfloat16) keys have the names of today: they come last.
    return DeepSpeedFile(active, tuple(sorted(rows, key=lambda row: order.get(row.key, len(order)))))


def _names(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted path of every key and section, as written, in order."""
    for name, value in section.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")


def _walk(section: Mapping[str, Any], prefix: str, rows: list[Row]) -> Iterator[tuple[str, Any, tuple[str, Any]]]:
    """(path and value under the name of today, and both as written) of every known key that is not null; others become rows."""
    for name, value in section.items():
        written = f"{prefix}{name}"
        path = ALIASES.get(written, written)
        key = KEYS.get(path)
        if written == "zero_optimization" and isinstance(value, bool):
            rows.append(Row(written, value, Fate.DEPRECATED, "read as zero_optimization.stage"))
            value = {"stage": int(value)}
        if key is not None and key.fate is Fate.DEPRECATED and value is not None:
            (new,) = key.becomes or ("",)
            rows.append(Row(written, value, Fate.DEPRECATED, f"read as {new}" if new else key.text))
            if not _is_kind(value, key.kind):
                rows.append(Row(written, value, Fate.DEPRECATED, f"must be {_KINDS[key.kind]}", wrong=True))
                continue
            if new.rpartition(".")[2] in section:
                rows.append(Row(written, value, Fate.DEPRECATED, f"{new} is given too; keep that one", wrong=True))
            if not new:
                continue
            if new.startswith("zero_optimization.offload"):  # a switch of old, and a section today
                yield f"{new}.device", "cpu" if value else "none", (written, value)
                continue
            path, key = new, KEYS.get(new)
        if value is None:
            continue
        if key is not None:
            yield path, value, (written, value)
        elif path in SECTIONS and isinstance(value, Mapping):
            yield from _walk(value, path + ".", rows)
        elif path in SECTIONS:
            rows.append(Row(written, value, Fate.REJECTED, "must be a section", wrong=True))
        else:
            rows.append(Row(written, value, None, _unknown(written, name, prefix), wrong=True))


def _unknown(written: str, name: str, prefix: str) -> str:
    """What is said of a key that DeepSpeed does not have."""
    known = {*KEYS, *SECTIONS, *ALIASES}
    siblings = {path.removeprefix(prefix).partition(".")[0] for path in known if path.startswith(prefix)}
    elsewhere = sorted(path for path in known if path.rpartition(".")[2] == name)
    if elsewhere:
        return f"unknown key; {name} belongs in {elsewhere[0].rpartition('.')[0] or 'the top level'}"
    return f"unknown key; {nearest(name, siblings, prefix) or 'DeepSpeed has none like it: leave it out'}".rstrip()


def _is_kind(value: Any, kind: str) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = number and value == value // 1
    return {
        "any": True,
        "bool": isinstance(value, bool),
        "int": whole,
        "size": whole and value >= 0,
        "number": number,
        "text": isinstance(value, str),
        "list": isinstance(value, (list, tuple)),
        "section": isinstance(value, Mapping),
    }[kind]


def _switch_of(path: str) -> str | None:
    """The key that turns on the innermost section of `path` that has one."""
    section = path
    while section := section.rpartition(".")[0]:
        switch = f"{section}.{SWITCHES.get(section, 'enabled')}"
        if switch in KEYS and switch != path:
            return switch
    return None


def _switched_off(path: str, values: Mapping[str, Any]) -> str | None:
    """The switch that is off, of a section that holds `path`."""
    switch = _switch_of(path)
    while switch is not None:
        if values.get(switch, False) in (False, "none"):
            return switch
        switch = _switch_of(switch)
    return None


def _asks(section: Mapping[str, Any]) -> bool:
    """Whether a section that is not read asks for something: an `enabled` in it is true, or it has none."""
    switches = [bool(value) if name == "enabled" else _asks(value) for name, value in section.items() if name == "enabled" or isinstance(value, Mapping)]  # fmt: skip
    return any(switches) if switches else bool(section)


def _row(path: str, written: tuple[str, Any], values: Mapping[str, Any]) -> Row:
    """The fate of a key whose value is of the right kind."""
    key, value = KEYS[path], values[path]
    off, switch = _switched_off(path, values), _switch_of(path)
    if off is not None:
        return Row(*written, Fate.NO_MEANING, f"{off} is off")
    if path.startswith("zero_optimization.offload_param.") and values.get("zero_optimization.stage", 0) != 3:
        return Row(*written, Fate.NO_MEANING, "DeepSpeed offloads parameters at stage 3 only, and ignores this at others")
    if _harmless(key, value):
        return Row(*written, Fate.NO_MEANING, "asks for nothing")
    if value == AUTO and not key.auto and key.fate is not Fate.NO_MEANING:
        return Row(*written, key.fate, "auto is not filled in here, nor by Hugging Face's integration; give a value", wrong=True)
    if isinstance(value, str) and value.lower() in key.refused:
        return Row(*written, Fate.REJECTED, key.refused[value.lower()], wrong=True)
    if key.fate is Fate.MAPPED:
        return Row(*written, key.fate, ", ".join(key.becomes))
    if key.fate is Fate.NO_MEANING:
        return Row(*written, key.fate, key.text)
    text = f"{key.text} is not available yet" if key.fate is Fate.NOT_YET else key.text
    # The switch of its section is refused already; its details would only repeat that.
    detail = switch is not None and KEYS[switch].fate in (Fate.REJECTED, Fate.NOT_YET)
    return Row(*written, key.fate, text, wrong=not detail)


def _harmless(key: Key, value: Any) -> bool:
    return value in key.harmless or (key.fate is Fate.REJECTED and key.kind == "section" and not _asks(value))
