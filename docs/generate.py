"""What the docs have from elsewhere: the command line from its parser, the configuration from its dataclasses, and notebooks."""

import argparse
import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

from zjax.cli import _parser
from zjax.config import TrainConfig, Unit


def write(folder: Path) -> None:
    """Writes them into a folder; a file that would not change is left alone, so that Sphinx does not read it again."""
    folder.mkdir(exist_ok=True)
    made = {"commands.md": commands(), "configuration.md": configuration(), "toctree.md": toctree(folder.parent)}
    for name, text in made.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def toctree(docs: Path) -> str:
    """The table of contents of what may or may not be there: predictions beside audits, and the notebooks."""
    found = [*docs.glob("predictions.md"), *sorted((docs / "notebooks").glob("*.ipynb"))]
    names = [path.relative_to(docs).with_suffix("").as_posix() for path in found]
    return "\n".join(["```{toctree}", ":hidden:", ":caption: Measured and run", "", *names, "```", ""]) if names else ""


def parsers() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """(name, its line of help, its parser) of every command, `checkpoint list` and the like among them."""
    yield from _below(_parser(), "")


def _below(parser: argparse.ArgumentParser, prefix: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                inner = list(_below(command, f"{prefix}{name} "))
                yield from inner or [(f"{prefix}{name}", about[name], command)]


def commands() -> str:
    """Every command with its options, as markdown."""
    parts = []
    for name, about, parser in parsers():
        rows = []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            shown = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else "")
            option = " ".join([*action.option_strings[-1:], str(shown)]).strip()
            needed = " (required)" if action.option_strings and action.required else ""
            rows.append(f"| `{option}` | {_cell(_help(action))}{needed} |")
        table = ["| option | |", "| --- | --- |", *rows] if rows else []
        parts.append("\n".join([f"## zjax {name}", "", parser.description or about, "", *table, ""]))
    return "\n".join(parts)


def _help(action: argparse.Action) -> str:
    """The option's help, argparse's `%(default)s` filled in."""
    return (action.help or "") % {"default": action.default}


def configuration() -> str:
    """Every section of `TrainConfig` with its fields, types, defaults and docstrings, as markdown."""
    sections = [("", TrainConfig), *((f.name, _dataclass(TrainConfig, f.name)) for f in dataclasses.fields(TrainConfig))]
    parts = []
    for prefix, cls in sections:
        if cls is not None:
            parts += _section(prefix, cls)
    return "\n".join([*parts, *_section("", Unit, title="`zjax.Unit`")])


def _section(prefix: str, cls: type, title: str = "") -> list[str]:
    inner = [f for f in dataclasses.fields(cls) if _dataclass(cls, f.name)]
    parts = [f"## {title or (f'`{prefix}`' if prefix else 'the run')}", ""]
    if prefix or title:
        parts += [_prose(inspect.getdoc(cls) or ""), ""]
    parts += ["| field | type | default | |", "| --- | --- | --- | --- |"]
    docs = field_docs(cls)
    for f in dataclasses.fields(cls):
        if f in inner and not prefix and not title:
            continue
        name = f"{prefix}.{f.name}" if prefix else f.name
        parts.append(f"| `{name}` | {_cell(f'`{f.type}`')} | {_cell(_default(f))} | {_cell(_prose(docs.get(f.name, '')))} |")
    parts.append("")
    if prefix:
        for f in inner:
            nested = _dataclass(cls, f.name)
            assert nested is not None
            parts += _section(f"{prefix}.{f.name}", nested)
    return parts


def field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of a class, by the field's name."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = inspect.cleandoc(text.value.value)
    return found


def _dataclass(cls: type, name: str) -> type | None:
    """The config class that a field holds, or holds a tuple of."""
    hint = typing.get_type_hints(cls)[name]
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default_factory):
        return f"`{dict(made)!r}`" if isinstance(made := field.default_factory(), dict) else f"`{made!r}`"
    return "below" if field.default_factory is not dataclasses.MISSING else "required"


def _prose(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
