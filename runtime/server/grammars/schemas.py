"""JSON schemas to grammars: what a request can have a server spend on one, and how requests share that."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from protocol.errors import OutriderError, SettingsError
from runtime.server.background import Background
from runtime.server.errors import ErrorResponse
from runtime.server.grammars.checker import GrammarCheck, Outcome
from runtime.server.grammars.client_slots import ClientSlots

if TYPE_CHECKING:
    from runtime.generation.grammar import Grammar

# Any one JSON object. This one grammar will do for all texts: its lexer has few states, and stays as it is.
ANY_OBJECT = {"type": "object"}

# Schemas that are compiled at once, and of one client. Each is bounded: see `grammar_checker`.
_AT_ONCE = 4
_OF_ONE_CLIENT = 2

# Schemas of which the outcome is remembered, by a digest.
_REMEMBERED = 1024

_COMPLAINTS: dict[Outcome, str] = {
    "time": "takes too long to compile",
    "memory": "takes too much memory to compile",
    "crash": "cannot be compiled: llguidance fails on it",
}


class Schemas:
    """Makes grammars of JSON schemas.

    A schema is tried out first where that can be stopped, and compiled in this process only where it took little. What
    became of it is remembered; the grammars are not, since they grow with what is written by them.
    """

    def __init__(self, tokenizer: Any, check: GrammarCheck, aside: Background, timeout_s: float) -> None:
        """For a tokenizer.

        Args:
            tokenizer: the target's.
            check: tries out grammars.
            aside: compiles.
            timeout_s: seconds that a schema may wait for its turn, and then may be tried out.
        """
        self._tokenizer = tokenizer
        self._check = check
        self._aside = aside
        self._timeout_s = timeout_s
        self._slots = ClientSlots(_AT_ONCE, _OF_ONE_CLIENT)
        self._compiling = trio.CapacityLimiter(_AT_ONCE)
        self._outcomes: OrderedDict[bytes, Outcome] = OrderedDict()
        self._any_object: Grammar | None = None

    async def grammar(self, schema: Mapping[str, Any] | bool, client: str) -> Grammar:
        """The logits processor that a JSON schema stands for.

        Args:
            schema: the schema.
            client: who asks; clients take turns.

        Raises: Refusal: the schema cannot be kept to, takes too much to compile, or was not compiled in time.

        Cancellation: stops trying it out, at once; where it was found to be cheap, it is compiled to the end.
        """
        try:
            if schema == ANY_OBJECT:
                return await self._grammar_of_any_object()
            return await self._grammar_in_turn(schema, client)
        except SettingsError as error:
            raise ErrorResponse(400, str(error), param="response_format") from error
        except OutriderError as error:  # nothing is wrong with the request
            raise ErrorResponse(503, str(error), type="server_error", code="schemas_unavailable") from error

    async def _grammar_of_any_object(self) -> Grammar:
        if self._any_object is None:
            from runtime.generation.grammar import Grammar

            make = partial(Grammar.from_json_schema, ANY_OBJECT, self._tokenizer)
            self._any_object = await self._aside(make, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
        return self._any_object

    async def _grammar_in_turn(self, schema: Mapping[str, Any] | bool, client: str) -> Grammar:
        from runtime.generation.grammar import Grammar
        from runtime.generation.json_schema import grammar_of_schema, schema_name

        waiting = trio.CancelScope(deadline=trio.current_time() + self._timeout_s)
        with waiting:
            async with self._slots.slot(client):
                waiting.deadline = math.inf
                read = partial(grammar_of_schema, schema)
                # Not abandoned, and its slot with it: who asks and leaves, over and over, would have them all.
                grammar = await self._aside(read, abandon_on_cancel=False, limiter=self._compiling)
                await self._check_cost(grammar, schema_name(schema))
                make = partial(Grammar, grammar, self._tokenizer, what=schema_name(schema))
                return await self._aside(make, abandon_on_cancel=False, limiter=self._compiling)
        seconds = math.ceil(self._timeout_s)
        raise ErrorResponse(
            429,
            f"the schemas of other requests are being compiled, {_AT_ONCE} at once and {_OF_ONE_CLIENT} of one client, "
            f"and this one has waited {self._timeout_s:g} s for its turn; try again in {seconds} s",
            type="rate_limit_error",
            code="schemas_waiting",
            headers={"Retry-After": str(seconds)},
        )

    async def _check_cost(self, grammar: str, name: str) -> None:
        """Try a grammar out, unless it is known what becomes of it.

        Raises:
            SettingsError: it takes too much.
            OutriderError: that could not be found out.
        """
        key = hashlib.sha256(grammar.encode()).digest()
        outcome = self._outcomes.pop(key, None)
        if outcome is None:
            with trio.move_on_after(self._timeout_s):
                outcome = (await self._check(grammar)).outcome
        if outcome is None:
            # Not remembered: it may be that the machine was busy.
            raise SettingsError(f"{name} was not compiled within {self._timeout_s:g} s; simplify it")
        self._outcomes[key] = outcome
        if len(self._outcomes) > _REMEMBERED:
            self._outcomes.popitem(last=False)
        if outcome != "done":
            raise SettingsError(f"{name} {_COMPLAINTS[outcome]}; simplify it")
