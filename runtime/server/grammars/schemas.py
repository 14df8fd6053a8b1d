"""Compiles JSON schemas and other constraints to grammars, with a limit on the cost of each; clients take turns."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import attrs
import trio

from protocol.errors import OutriderError, SettingsError
from runtime.generation.grammar import Grammar, grammar_of_choices, grammar_of_gbnf, grammar_of_regex
from runtime.generation.json_schema import check_is_schema, grammar_of_schema, schema_name
from runtime.server.errors import ConstraintError, ErrorResponse
from runtime.server.fair_threads import Background
from runtime.server.grammars.checker import GrammarCheck, Outcome

T = TypeVar("T")

# Most schemas that are compiled at once: of all clients, and of one. `grammar_checker` limits the cost of each.
_MAX_COMPILING = 4
_MAX_COMPILING_PER_CLIENT = 2

# How many checked schemas have their outcome kept, and how many schemas of tools.
_MAX_OUTCOMES = 1024
_MAX_FOLLOWED = 2**14

_PROBLEMS: dict[Outcome, str] = {
    "time": "takes too long to compile",
    "memory": "takes too much memory to compile",
    "crash": "cannot be compiled: llguidance fails on it",
}


# --- constraints ----------------------------------------------------------------------------------

# The schema of any JSON object. All requests share its grammar, which does not grow: its lexer has few states.
ANY_OBJECT: dict[str, Any] = {"type": "object"}

ConstraintKind = Literal["json", "regex", "choice", "grammar"]


@attrs.frozen
class Constraint:
    """A constraint on an answer, in a `field` of a request.

    Its value is a JSON schema, or one as JSON; a regular expression; texts, of which the answer is one; or a grammar,
    in llama.cpp's GBNF or in Lark's syntax.
    """

    kind: ConstraintKind
    value: Any
    field: str

    @property
    def name(self) -> str:
        """Its name in messages."""
        return schema_name(self.value) if self.kind == "json" else self.field

    @property
    def schema(self) -> Mapping[str, Any] | bool:
        """The JSON schema, for the kind "json". Raises: ConstraintError: it is not JSON, or no schema."""
        value = self.value
        try:
            schema: Mapping[str, Any] | bool = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"{self.name} is not JSON: {error}", self.field) from error
        try:
            check_is_schema(schema, self.name)
        except SettingsError as error:
            raise ConstraintError(str(error), self.field) from error
        return schema

    def write(self) -> str:
        """The grammar in llguidance's own format. Raises: SettingsError: invalid, or llguidance is not installed."""
        write: dict[ConstraintKind, Callable[[Any], str]] = {
            "json": partial(grammar_of_schema, is_closed=True),
            "regex": grammar_of_regex,
            "choice": grammar_of_choices,
            "grammar": grammar_of_gbnf,
        }
        return write[self.kind](self.value)


# --- compiling ------------------------------------------------------------------------------------


@contextmanager
def _errors_of(field: str) -> Iterator[None]:
    """Turn the errors of a request's field, and of a check that fails, into error responses."""
    try:
        yield
    except SettingsError as error:
        param = error.field if isinstance(error, ConstraintError) else field
        raise ErrorResponse(400, str(error), param=param) from error
    except OutriderError as error:  # the server's fault, not the request's
        raise ErrorResponse(503, str(error), code="schemas_unavailable") from error


def _keep(kept: OrderedDict[bytes, T], key: bytes, value: T, at_most: int) -> None:
    """Keep a value as the one that was used last."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > at_most:
        kept.popitem(last=False)


@attrs.define(eq=False)
class Schemas:
    """Compiles JSON schemas and other constraints to grammars.

    A schema is first compiled in a process that can be killed, and in this process only if that was cheap. The outcome
    of the check is kept, but not the grammar: grammars grow while they are used.

    Attributes:
        timeout_s: seconds that a schema may wait for its turn, and then again seconds that its check may take.
    """

    _tokenizer: Any  # the target's
    _check: GrammarCheck
    _background: Background
    _timeout_s: float
    _any_object: Grammar | None = attrs.field(init=False, default=None)
    _turns: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(_MAX_COMPILING))
    # Clients that have schemas waiting. A client waits for itself first, so that it takes only some of the turns.
    _turns_of: WeakValueDictionary[str, trio.CapacityLimiter] = attrs.field(factory=WeakValueDictionary)
    _compiling: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(_MAX_COMPILING))
    _compiling_any_object: trio.Lock = attrs.field(factory=trio.Lock)
    # By digest, the one that was used least recently first.
    _outcomes: OrderedDict[bytes, Outcome] = attrs.field(factory=OrderedDict)
    # Whether the schemas of tools can be followed, likewise.
    _followed: OrderedDict[bytes, bool] = attrs.field(factory=OrderedDict)

    async def grammar(self, constraint: Constraint, client: str, around: Callable[[str], str] | None = None) -> Grammar:
        """The logits processor for a constraint; clients, told apart by their addresses, take turns.

        `around` makes the grammar of the whole answer from that of the constraint.

        Raises: ErrorResponse: the constraint is invalid or unsupported, is too expensive, or had to wait too long.

        Cancellation: kills the check at once; a compilation after a successful check finishes first.
        """
        with _errors_of(constraint.field):
            if constraint.kind == "json" and constraint.value == ANY_OBJECT and around is None:
                return await self.any_object()
            write = constraint.write if around is None else lambda: around(constraint.write())
            return await self._grammar_in_turn(write, constraint.name, constraint.field, client)

    async def grammar_of_calls(
        self,
        write: Callable[[Collection[str]], str],
        client: str,
        *,
        may_be_loose: Mapping[str, Any],
        write_one: Callable[[str], str],
    ) -> Grammar:
        """The logits processor that holds a model to its tools. Raises, Cancellation: as `grammar`.

        Args:
            write: writes the grammar, in llguidance's own format, without the schemas of the tools that it is given.
            may_be_loose: by their names, the schemas of tools that are left out if they cannot be followed. All are if
                that is not found out of each within `timeout_s`, or if they cost too much together.
            write_one: writes the grammar of one of these tools alone.
        """

        async def compiled(write: Callable[[], str]) -> Grammar:
            return await self._grammar_in_turn(write, "the grammar of the tools", "tools", client)

        async def is_followed(name: str) -> bool:
            try:
                await compiled(partial(write_one, name))
            except SettingsError:
                return False
            return True

        with _errors_of("tools"):
            if not may_be_loose:
                return await compiled(partial(write, ()))
            texts = {name: json.dumps((name, schema)) for name, schema in may_be_loose.items()}
            keys = {name: hashlib.sha256(text.encode()).digest() for name, text in texts.items()}
            with suppress(SettingsError):
                return await compiled(partial(write, self._not_followed(keys)))
            loosest = await compiled(partial(write, may_be_loose))  # raises if the fault is elsewhere
            unknown = [name for name, key in keys.items() if key not in self._followed]
            with trio.move_on_after(self._timeout_s):
                for name in unknown:
                    _keep(self._followed, keys[name], await is_followed(name), _MAX_FOLLOWED)
                if unknown:
                    with suppress(SettingsError):  # they cost too much together
                        return await compiled(partial(write, self._not_followed(keys)))
            return loosest

    def _not_followed(self, keys: Mapping[str, bytes]) -> list[str]:
        """The names of tools, which have these keys, whose schemas are known not to be followed."""
        for key in keys.values():
            if key in self._followed:
                self._followed.move_to_end(key)
        return [name for name, key in keys.items() if self._followed.get(key) is False]

    async def any_object(self) -> Grammar:
        """The grammar of any JSON object, which all requests share. Raises: SettingsError: llguidance is of no use."""
        async with self._compiling_any_object:
            if self._any_object is None:
                make = partial(Grammar.from_json_schema, ANY_OBJECT, self._tokenizer)
                limiter = trio.CapacityLimiter(1)
                self._any_object = await self._background(make, abandon_on_cancel=True, limiter=limiter)
        assert self._any_object is not None
        return self._any_object

    async def _grammar_in_turn(self, write: Callable[[], str], name: str, field: str, client: str) -> Grammar:
        waiting = trio.CancelScope(deadline=trio.current_time() + self._timeout_s)
        with waiting:
            own = self._turns_of.setdefault(client, trio.CapacityLimiter(_MAX_COMPILING_PER_CLIENT))
            async with own, self._turns:
                waiting.deadline = math.inf
                # Threads are not abandoned, so that they keep their slots: otherwise a client that asks and leaves
                # again and again would occupy any number of threads.
                run = partial(self._background, abandon_on_cancel=False, limiter=self._compiling)
                grammar: str = await run(write)
                await self._check_cost(grammar, name)
                error = partial(ConstraintError, field=field)
                compiled: Grammar = await run(partial(Grammar, grammar, self._tokenizer, what=name, error=error))
                return compiled
        seconds = math.ceil(self._timeout_s)
        raise ErrorResponse(
            429,
            f"the schemas of other requests are being compiled, at most {_MAX_COMPILING} at once and "
            f"{_MAX_COMPILING_PER_CLIENT} of one client, and this one has waited {self._timeout_s:g} s for its turn; "
            f"try again in {seconds} s",
            code="schemas_waiting",
            retry_after_s=seconds,
        )

    async def _check_cost(self, grammar: str, name: str) -> None:
        """Check the cost of a grammar, unless the outcome is known. Raises: SettingsError: it costs too much."""
        key = hashlib.sha256(grammar.encode()).digest()
        outcome = self._outcomes.pop(key, None)
        if outcome is None:
            with trio.move_on_after(self._timeout_s):
                outcome = await self._check(grammar)
        if outcome is None:
            # Not kept: the machine may have been busy.
            raise SettingsError(f"{name} was not compiled within {self._timeout_s:g} s; simplify it")
        _keep(self._outcomes, key, outcome, _MAX_OUTCOMES)
        if outcome != "done":
            raise SettingsError(f"{name} {_PROBLEMS[outcome]}; simplify it")
