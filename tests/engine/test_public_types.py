"""The types of the public modules: what type checkers and completion see, and what a user can import."""

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ForwardRef

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
from sweeps import sweep

import runtime
import runtime.aio
import runtime.sync
from protocol.open_options import OpenOptions
from protocol.settings import Settings
from protocol.settings_keywords import SettingsArguments
from runtime.engine.opening import OpenArguments, OpenArgumentsAndSettings
from runtime.loading.model_sources import ModelSource

FACES = (runtime, runtime.aio, runtime.sync)
# Arguments that `Settings` converts have wider types.
WIDER = {"logit_bias": "Mapping[int, float] | None", "stop": "str | Iterable[str] | None"}
# Methods that Python calls implicitly.
CALLED = {"__aenter__", "__aiter__", "__anext__", "__await__", "__call__", "__enter__", "__iter__", "__next__"}


def spelled(annotation: Any) -> str:
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else str(annotation)


def as_given(name: str, type_: str) -> str:
    """The type of a setting's argument, derived from the type of its field."""
    if name in WIDER:
        return WIDER[name]
    if type_.startswith("tuple["):
        return f"Iterable[{type_.removeprefix('tuple[').removesuffix(', ...]')}] | None"
    return type_


def test_a_setting_has_the_same_type_as_an_argument_and_as_a_field() -> None:
    fields = {field.name: as_given(field.name, str(field.type)) for field in attrs.fields(Settings)}
    assert {name: spelled(each) for name, each in SettingsArguments.__annotations__.items()} == fields
    assert SettingsArguments.__required_keys__ == frozenset()


def test_an_option_of_open_has_the_same_type_wherever_it_is_passed_on() -> None:
    arguments = {name: spelled(each) for name, each in OpenArguments.__annotations__.items()}
    declared = {field.name: field.type for field in attrs.fields(OpenOptions)}
    assert ["target", "draft", *arguments] == list(declared)
    # The types of others are those of the runtime, which the declaration does not import.
    assert all(declared[name] in ("Any", type_) for name, type_ in arguments.items())
    assert OpenArguments.__required_keys__ == frozenset()
    assert OpenArgumentsAndSettings.__optional_keys__ == set(arguments) | set(SettingsArguments.__annotations__)


SETTINGS = "Unpack[SettingsArguments]"
WITH_TOOLS = "Unpack[StreamArguments]"
OPTIONS = "Unpack[OpenArguments]"
TYPED: list[tuple[Callable[..., Any], str]] = [
    (runtime.stream, SETTINGS),
    (runtime.keep_open, OPTIONS),
    (runtime.open, OPTIONS),
    (runtime.open_sync, OPTIONS),
    (runtime.aio.open, OPTIONS),
    (runtime.generate_sync, "Unpack[OpenArgumentsAndSettings]"),
    *((getattr(runtime.Conversation, name), SETTINGS) for name in ("stream", "generate")),
    *((getattr(runtime.aio.Conversation, name), SETTINGS) for name in ("stream", "generate")),
    *((getattr(runtime.sync.Conversation, name), SETTINGS) for name in ("stream", "generate")),
    *((getattr(home.Runtime, name), WITH_TOOLS) for home in FACES for name in ("stream", "generate", "generate_many")),
    *((getattr(home.Runtime, name), SETTINGS) for home in FACES for name in ("conversation", "load")),
]


@sweep(("function", "expected"), TYPED)
def test_keywords_are_typed(function: Callable[..., Any], expected: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    (keywords,) = (each for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD)
    assert keywords.annotation == expected


API_PAGES = (Path(__file__).parents[2] / "docs" / "api").glob("*.md")
PATHS = re.findall(r"^::: (.+)\.(\w+)$", "\n".join(page.read_text(encoding="utf-8") for page in API_PAGES), re.M)
DESCRIBED = {name: getattr(import_module(module), name) for module, name in PATHS}
NAMES = {
    **DESCRIBED,
    **{name: getattr(runtime, name) for name in runtime.__all__},
    # Names that modules import for type checkers only.
    **{"mx": mx, "Module": nn.Module, "ModelSource": ModelSource, "OpenArguments": OpenArguments},
}


def classes(annotation: Any) -> Iterator[type]:
    """The classes that an annotation consists of."""
    for part in (annotation, typing.get_origin(annotation)):
        if isinstance(part, type):
            yield part
    for argument in typing.get_args(annotation):
        yield from classes(argument)


def returned(face: Any) -> Iterator[tuple[str, type]]:
    """The classes that a public module's functions, methods, properties and fields return, with their places."""
    for name in face.__all__:
        item = getattr(face, name)
        functions = [(name, item)] if inspect.isfunction(item) else []
        if isinstance(item, type):
            members = [(each, member) for each, member in inspect.getmembers(item) if each[0] != "_" or each in CALLED]
            functions = [
                (f"{name}.{each}", member.fget if isinstance(member, property) else member)
                for each, member in members
                if isinstance(member, property) or inspect.isfunction(member)
            ]
            if attrs.has(item):
                for field, annotation in typing.get_type_hints(item, localns=NAMES).items():
                    yield from ((f"{name}.{field}", found) for found in classes(annotation))
        for where, function in functions:
            # A module's own imports take precedence over those for type checkers.
            names = {**NAMES, **{each: getattr(face, each) for each in face.__all__}, **function.__globals__}
            hints = typing.get_type_hints(function, localns=names)
            yield from ((where, found) for found in classes(hints.get("return")))


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_every_type_that_the_public_face_gives_is_public_or_described_with_its_module(face: Any) -> None:
    # The types of the handles are `runtime.aio.Runtime` and the like.
    public = {getattr(home, name) for home in FACES for name in home.__all__}
    public |= set(DESCRIBED.values())
    missing = {
        f"{where}: {found.__name__}"
        for where, found in returned(face)
        if found.__module__.split(".")[0] in ("runtime", "actors", "protocol") and found not in public
    }
    # The type of a processor's state is private to it.
    assert missing - {"Grammar.save: _State"} == set()
