"""Fields of frozen dataclasses, checked where one is made: types, and keys of a nested dictionary."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

T = typing.TypeVar("T")


class ConfigError(ValueError):
    """A config that cannot be honoured. The message names the knob, its value and what to do."""


class Arguments(dict[str, Any]):
    """A section whose keys another name decides; hashable, as the config that holds it is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class NotAvailableError(ConfigError, NotImplementedError):
    """A config that asks for a feature that is still to come. The message names the feature."""


def require(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raises ConfigError with the knob's dotted name, its value and the rule it broke."""
    if not condition:
        raise ConfigError(f"{name}={value!r}: {rule}")


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Builds the config dataclass `cls` from nested dictionaries; keys that are left out keep their default.

    Raises `ConfigError` on an unknown key (with the nearest known one), a value of the wrong type, or a broken rule.
    """
    hints = _hints(cls)
    built = {}
    for key, value in values.items():
        name = f"{path}{key}"
        if key not in hints:
            raise ConfigError(
                f"unknown config key {name!r}: {nearest(key, hints, path)}known: {', '.join(path + known for known in hints)}"
            )
        section = _section_of(hints[key])
        if section is not None and isinstance(value, (list, tuple)):
            built[key] = tuple(from_dict(section, each, name + ".") if isinstance(each, Mapping) else each for each in value)
        elif section is not None and isinstance(value, Mapping):
            built[key] = from_dict(section, value, name + ".")
        else:
            built[key] = value
    return cls(**built)


def _section_of(hint: Any) -> type | None:
    """The config dataclass a field holds, or holds a tuple of."""
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Of a config's class; reading them anew was a fifth of the time of `zjax advise`."""


def check_types(config: Any, path: str) -> None:
    """Puts each field in the form its annotation names (an int for a float, a list for a tuple), or raises."""
    for name, hint in _hints(type(config)).items():
        object.__setattr__(config, name, _typed(hint, getattr(config, name), path + name))


def _typed(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, typing.cast(type, hint)):
            raise ConfigError(f"{name}={value!r}: must be a section with keys {', '.join(_hints(hint))}")
        return value
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r}: must be a section, not {type(value).__name__}")
        return Arguments(value)
    section = _section_of(hint)
    if section is not None:
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, section) for each in value):
            raise ConfigError(f"{name}={value!r}: must be a list of sections with keys {', '.join(_hints(section))}")
        return tuple(value)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option in (int, float, str, bool, types.NoneType) and type(value) is option:
            return value
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
            return tuple(value)
    if float in options and type(value) is int:
        return float(value)
    # A single pattern or path is a list of one; anything else, such as "2" for 2, is a mistake that is told.
    if isinstance(value, str) and str not in options and any(typing.get_origin(o) is tuple for o in options):
        return (value,)
    raise ConfigError(f"{name}={value!r}: must be {' or '.join(_type_name(o) for o in options)}, not {type(value).__name__}")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    return "None" if hint is types.NoneType else hint.__name__


def nearest(key: str, known: typing.Iterable[str], path: str = "") -> str:
    """The start of a message that suggests the known name nearest to a mistaken one; empty if none is near."""
    close = difflib.get_close_matches(key.lower(), list(known), n=1, cutoff=0.5)
    return f"did you mean {path + close[0]!r}? " if close else ""
