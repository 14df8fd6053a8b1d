"""What is known of a tokenizer's chat template: found out once, and again if the tokenizer gets another template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")


def once_per_template(find: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A function of a tokenizer that keeps what it has found out about the tokenizer's present template."""
    known: WeakKeyDictionary[Any, tuple[Any, dict[Any, T]]] = WeakKeyDictionary()

    @wraps(find)
    def found(tokenizer: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        template = getattr(tokenizer, "chat_template", None)
        if tokenizer not in known or known[tokenizer][0] != template:
            known[tokenizer] = template, {}
        answers, question = known[tokenizer][1], (*args, *kwargs.items())
        if question not in answers:
            answers[question] = find(tokenizer, *args, **kwargs)
        return answers[question]

    return found


def source_of(tokenizer: Any) -> str:
    """The source of a tokenizer's template, or of all its templates; "" for a renderer in Python."""
    template = getattr(tokenizer, "chat_template", None)
    sources = template.values() if isinstance(template, Mapping) else [template]
    return "\n".join(source for source in sources if isinstance(source, str))
