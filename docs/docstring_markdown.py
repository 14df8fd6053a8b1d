"""Turns the docstrings of Outrider into Markdown for the API pages; an extension of griffe, which reads them.

Sections are written `Args:` with indented entries, or `Returns: …` on one line, and may have names of our own, such as
`Cancellation:`. None of griffe's parsers takes all of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from inspect import cleandoc
from typing import Any

import griffe

NAMES = "Args|Arguments|Attributes|Cancellation|Interrupting|Raises|Returns|Source|Sources|Yields"
SECTION = re.compile(rf"(?P<title>(?:{NAMES})(?:, (?:{NAMES}))*):(?: (?P<text>.*))?")
ENTRY = re.compile(r"    (?P<names>[\w*.]+(?:, [\w*.]+)*): (?P<text>.*)")
CODE = re.compile(r"(?:async )?(?:with|for) .*:")


def as_markdown(docstring: str) -> str:
    """A docstring in Markdown: sections in bold, entries as list items, an example as code."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", cleandoc(docstring)):
        lines = block.split("\n")
        if (match := SECTION.fullmatch(lines[0])) is not None:
            blocks.append(f"**{match['title']}:** {match['text'] or ''}".rstrip())
            blocks.extend(_entries(lines[1:], blocks))
        elif CODE.fullmatch(lines[0]):
            blocks.append(f"```python\n{block}\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def _entries(lines: list[str], blocks: list[str]) -> list[str]:
    """The rest of a section: entries `name: text`, after what goes on from the section's first line."""
    items: list[str] = []
    for line in lines:
        if (match := ENTRY.fullmatch(line)) is not None:
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            items.append(f"- {names}: {match['text']}")
        elif items:
            items[-1] += f"\n  {line.strip()}"
        else:
            blocks[-1] += f"\n{line.strip()}"
    return ["\n".join(items)] if items else []


class DocstringMarkdown(griffe.Extension):
    """Rewrites each docstring as griffe finds it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put the members that classes inherit behind their own, with the types that these classes give them."""
        for cls in _classes(pkg):
            types = _type_arguments(cls, pkg)
            for name, member in cls.inherited_members.items():
                target = member.target
                if isinstance(target, griffe.Function) and str(target.returns) in types:
                    own = copy(target)
                    own.parent, own.returns = cls, types[str(target.returns)]
                    cls.members[name] = own
                else:
                    cls.members[name] = griffe.Alias(name, target, parent=cls)


def _type_arguments(cls: griffe.Class, pkg: griffe.Module) -> dict[str, griffe.Expr | str]:
    """What a class gives for the type variables of its generic bases."""
    types: dict[str, griffe.Expr | str] = {}
    for base in cls.bases:
        if isinstance(base, griffe.ExprSubscript) and base.canonical_path.startswith(f"{pkg.name}."):
            for generic in pkg[base.canonical_path.partition(".")[2]].bases:
                if str(generic).startswith("Generic["):
                    names, given = _elements(generic), _elements(base)
                    types |= {str(name): type_ for name, type_ in zip(names, given, strict=True)}
    return types


def _elements(subscript: griffe.ExprSubscript) -> list[griffe.Expr | str]:
    inner = subscript.slice
    return list(inner.elements) if isinstance(inner, griffe.ExprTuple) else [inner]


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    yield from module.classes.values()
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _classes(inner)
