"""Make the prompts that `outrider bench --prompts bundled` measures with.

    python examples/make_bench_prompts.py > runtime/bench/prompts.jsonl

They are made from functions of Python's standard library (PSF licence, version 2): 16 to edit, by renaming a variable,
12 to quote, as they are or out of their class, and 12 to write anew, from the first lines alone. Each line names its
source. The edits and quotes end with the line that the answer would begin with, for models that only continue text.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import platform
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

NUM_CHARACTERS = range(500, 1500)
NUM_PROMPTS = {"edit": 16, "quote": 12, "free": 12}


def functions() -> Iterator[tuple[str, str, str]]:
    """(module, class or "", source) of one function of each module that has one of a good length."""
    for name in sorted(sys.stdlib_module_names):
        spec = None if name.startswith("_") else importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        tree = ast.parse(source := Path(spec.origin).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            for inner in getattr(node, "body", ()) if isinstance(node, ast.Module | ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner) and not inner.decorator_list:
                    text = textwrap.dedent(ast.get_source_segment(source, inner, padded=True) or "")
                    if len(text) in NUM_CHARACTERS:
                        yield name, getattr(node, "name", ""), text
                        break
            else:
                continue
            break


def variable_of(source: str) -> str | None:
    """The most often used of the variables that a function assigns."""
    assigned = {
        node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and "Store" in str(node.ctx)
    }
    counts = {name: len(re.findall(rf"\b{name}\b", source)) for name in sorted(assigned) if len(name) > 2}
    return max(counts, key=lambda name: counts[name], default=None)


def main() -> None:
    kinds = iter([kind for kind, number in NUM_PROMPTS.items() for _ in range(number)])
    kind = next(kinds)
    for module, owner, source in functions():
        first, variable = source.split("\n", 1)[0], variable_of(source)
        where = f"# {module}.py{f', class {owner}' if owner else ''}\n"
        if kind == "edit" and variable is None:
            continue
        if kind == "edit":
            edited = re.sub(rf"\b{variable}\b", f"the_{variable}", first)
            prompt = (
                f"{where}{source}\n\n\n# The same function, with `{variable}` renamed to `the_{variable}`:\n{edited}\n"
            )
        elif kind == "quote":
            prompt = f"{where}{source}\n\n\n# The same function again, as it is:\n{first}\n"
        else:
            prompt = where + "\n".join(source.split("\n")[:3]) + "\n"
        about = f"CPython {platform.python_version()}, Lib/{module}.py, PSF License Version 2"
        print(json.dumps({"category": kind, "prompt": prompt, "source": about}))
        if (kind := next(kinds, "")) == "":
            return
    raise SystemExit("there are too few functions of a good length")


if __name__ == "__main__":
    main()
