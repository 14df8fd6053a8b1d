"""Structured output: text that follows a JSON schema, a regular expression or a grammar.

`Grammar` is a logits processor that keeps a state and can go back to an earlier one, so it can be speculated with. What
may come next is worked out by llguidance, which is an extra and imported when a grammar is made.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from copy import copy
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import attrs
import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import SettingsError
from protocol.reprs import shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between tokens of JSON: a blank, or a new line and its indentation, as JSON is usually written. With all the white
# space that the standard allows, a weak model writes newlines until it is cut off.
_WHITE_SPACE = r"[ ]|\n[ \t]{0,32}"

# Of a schema or the like, in messages.
_SHOWN = 80

# Tokens after which a state has a matcher of its own again.
_MOST_BEHIND = 16

# Bounds of llguidance's while a text is written, where they are not its own. A state of its lexer takes some 400 bytes,
# and a grammar keeps those of all its texts; with fewer, patterns that count to hundreds would not get far.
_LEXER_STATES = 100_000

# Most remainders of division that llguidance has to tell apart, a state of its lexer for each: 0.2 s, 20 MB. Time grows
# with the square of them, and it can neither be told to stop nor be bounded by its own limits.
_REMAINDERS = 100_000
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")

# Whole numbers down to here are those that JSON has to tell apart.
_LOWEST = -(2**53)
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")


@attrs.frozen
class _State:
    """Where a text stands.

    To go on from a state is to copy its matcher, and leaves the state as it was. (llguidance can also roll a matcher
    back. But then version 1.9 allows, now and then, what the grammar does not; and one that a forbidden token has led
    astray can go nowhere any more.) A copy takes microseconds; but it takes some hundred kilobytes for a long text,
    though the grammar itself is shared. So states share matchers, and add the few tokens that are missing.

    Attributes:
        size: of the text, in tokens, prompt included.
        matcher: after the text, but for its last few tokens; None where the grammar does not allow the text.
        behind: those tokens.
    """

    size: int
    matcher: LLMatcher | None
    behind: tuple[int, ...] = ()


class _Here(threading.local):
    """What has become of the calls on one thread."""

    state: _State | None = None  # after the last one; None before the first
    is_saved = False


class Grammar:
    """A logits processor that leaves a model only the tokens with which its text can still be completed as asked.

        schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        grammar = runtime.Grammar.from_json_schema(schema, rt.tokenizer)
        answer = await rt.generate(prompt, logits_processors=[grammar])

    The text begins right after the prompt, so a model cannot think first; have its chat template tell it not to. It
    ends with an end-of-text token, which is allowed where the text is complete, and is all that is allowed where
    nothing more can come; or it is cut off by `max_tokens` or a stop. Rows that pad an embedding, of which the
    tokenizer knows nothing, are never allowed. `ignore_eos` makes no sense beside it: after the end comes the end.

    An object will do for any number of streams, one after the other or at once, as in `generate_many`. To make one
    takes a few milliseconds, but for the first one of a tokenizer, for which a large vocabulary is indexed: a second
    or so, while nothing else runs on the thread.
    """

    def __init__(self, grammar: str, tokenizer: Any, *, what: str = "the grammar") -> None:
        """From llguidance's own format; see the class methods for the rest.

        Args:
            grammar: as `llguidance.LLMatcher.grammar_from_json_schema` and the like return it.
            tokenizer: `Runtime.tokenizer`, or a fast tokenizer of Hugging Face.
            what: it is called so in error messages.

        Raises: SettingsError: llguidance does not take the grammar or the tokenizer, or is not installed.
        """
        self._what = what
        limits = _library().LLParserLimits(max_lexer_states=_LEXER_STATES)
        self._start = _library().LLMatcher(_indexed(tokenizer), grammar, log_level=0, limits=limits)
        self._allowed(self._start)
        # To each thread its own, since it is restored, called and saved in one go: so streams may share an object.
        self._here = _Here()

    @classmethod
    def from_json_schema(
        cls, schema: Mapping[str, Any] | str | bool, tokenizer: Any, *, compact: bool = False
    ) -> Grammar:
        """JSON that a schema describes.

        Args:
            schema: as an object, such as pydantic's `model_json_schema()` gives, or as JSON; True for any JSON. Object
                keys come in the schema's order, and others than those only where `additionalProperties` is not false.
            tokenizer: see `Grammar`.
            compact: nothing between tokens of the JSON; else there may be a blank, or a new line and its indentation.

        Raises: SettingsError: see `Grammar`; among them a schema with a keyword that cannot be kept to, or one that
            nothing satisfies.
        """
        return cls(grammar_of_schema(schema, compact=compact), tokenizer, what=schema_name(schema))

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Any) -> Grammar:
        """Text that matches a regular expression as a whole.

        Args:
            pattern: in the syntax of Rust's regex crate: Python's but for looking around and back.
            tokenizer: see `Grammar`.

        Raises: SettingsError: see `Grammar`.
        """
        what = f"the regular expression {_short(pattern)}"
        return cls(_library().LLMatcher.grammar_from_regex(_text(pattern, what)), tokenizer, what=what)

    @classmethod
    def from_lark(cls, grammar: str, tokenizer: Any) -> Grammar:
        """Text that a context-free grammar describes.

        Args:
            grammar: in Lark's syntax, as llguidance extends it
                (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md); its rule `start` is the text.
            tokenizer: see `Grammar`.

        Raises: SettingsError: see `Grammar`.
        """
        what = f"the grammar {_short(grammar)}"
        return cls(_library().LLMatcher.grammar_from_lark(_text(grammar, what)), tokenizer, what=what)

    def __repr__(self) -> str:
        return f"<Grammar: {self._what}>"

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Forbid what cannot come next.

        Args:
            tokens: (n,) ids of the text so far. One token more than in the call before, or than in the one of which
                the state was restored; else this is the prompt of a new text.
            logits: (1, V).

        Returns: (1, V) logits, -inf for what is forbidden; after a text that the grammar does not allow, as they are.
        Raises: SettingsError: the grammar is too complex to go on with, or asks for what the model has no token for.
        """
        here = self._here
        # Of an error nothing is kept.
        state, here.state, here.is_saved = here.state, None, False
        if state is None or tokens.size != state.size + 1:
            # A copy, since working out what is allowed is not for two threads at a time.
            matcher: LLMatcher | None = self._start.deep_copy()
            reached = _State(tokens.size, self._start)
        else:
            # Read in place: indexing the array would be a computation, on a GPU perhaps.
            matcher, reached = _after(state, memoryview(cast(Any, tokens))[-1])
        if matcher is not None:
            logits = self._masked(matcher, logits)
        here.state = reached
        return logits

    def save(self) -> _State | None:
        """The state after the last call; what a new text begins with where there was none since the last `save`."""
        # A call comes before each but the first of a stream. So each stream begins anew.
        here = self._here
        state = None if here.is_saved else here.state
        here.is_saved = True
        return state

    def restore(self, state: _State | None) -> None:
        """Go back, or over, to a state that was saved."""
        self._here.state, self._here.is_saved = state, False

    def _masked(self, matcher: LLMatcher, logits: mx.array) -> mx.array:
        width = logits.shape[-1]
        # The model may know more tokens than the tokenizer, which mean nothing, or fewer.
        allowed = self._allowed(matcher)[:width].ljust(width, b"\0")
        if allowed.count(0) == width:
            raise SettingsError(self._no_token())
        return mx.where(mx.array(cast(Any, memoryview(allowed))), logits, -mx.inf)

    def _allowed(self, matcher: LLMatcher) -> bytes:
        """A byte for each of the tokenizer's tokens, 0 where it is forbidden."""
        # Of a matcher in error, all that this allows is the end.
        allowed: bytes = matcher.compute_logit_bias()
        if matcher.is_error():
            # What comes after it is a dump of llguidance's state.
            error = matcher.get_error().partition("\n<state>")[0].rstrip()
            if error == "NoExtensionBias":
                raise SettingsError(self._no_token())
            raise SettingsError(f"{self._what} cannot be followed: {error}")
        return allowed

    def _no_token(self) -> str:
        return f"{self._what} asks for text that no token stands for; allow other text, or take another model"


def check_json_schema(schema: Mapping[str, Any] | str | bool) -> None:
    """Check a schema as far as that goes without a tokenizer.

    Raises: SettingsError: see `Grammar.from_json_schema`.
    """
    if error := _library().LLMatcher.validate_grammar(grammar_of_schema(schema)):
        raise SettingsError(f"{schema_name(schema)} cannot be followed: {error}")


def _after(state: _State, token: int) -> tuple[LLMatcher | None, _State]:
    """A matcher for the text that is one token longer, None where the grammar does not allow it; and its state."""
    size = state.size + 1
    if state.matcher is None:
        return None, _State(size, None)
    matcher = state.matcher.deep_copy()
    matcher.consume_tokens(list(state.behind))
    # One that has stopped has only the end before it, or behind it.
    if matcher.is_stopped():
        return matcher, attrs.evolve(state, size=size)
    if not matcher.consume_token(token):
        return None, _State(size, None)
    if len(state.behind) < _MOST_BEHIND:
        return matcher, _State(size, state.matcher, (*state.behind, token))
    return matcher, _State(size, matcher)


# --- what goes in ---------------------------------------------------------------------------------


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise SettingsError(
            "a grammar needs llguidance, which is not installed; pip install 'outrider[grammar]'"
        ) from error
    return llguidance


def schema_name(schema: Any) -> str:
    """What a JSON schema is called in messages."""
    return f"the JSON schema {_short(schema)}"


def grammar_of_schema(schema: Any, *, compact: bool = False) -> str:
    """A JSON schema in llguidance's own format, as `Grammar` takes it.

    Args, Raises: see `Grammar.from_json_schema`; here, as far as that goes without compiling it.
    """
    what = schema_name(schema)
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        written = json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{what} is nested too deeply to be followed") from error
    if not isinstance(value, (Mapping, bool)):
        raise SettingsError(f"{what} must be an object, True or False")
    if (number := _too_low(json.loads(written))) is not None:
        raise SettingsError(
            f"{what} has {_short(number)}, which is too low to be followed; numbers must be above {_LOWEST}"
        )
    if (remainders := _remainders(json.loads(written))) > _REMAINDERS:
        raise SettingsError(
            f"{what} has numbers for multipleOf that take too long to be followed: the product of their prime factors "
            f"other than 2 and 5, added up over all values, must be at most {_REMAINDERS}, got {_short(remainders)}; "
            "take rounder ones"
        )
    # Options go into an object, and there is none where True or False is the schema.
    written = "{}" if value is True else written
    spacing = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITE_SPACE}
    options = None if value is False else spacing
    try:
        grammar: str = _library().LLMatcher.grammar_from_json_schema(written, overrides=options)
    except ValueError as error:
        raise SettingsError(f"{what} cannot be followed: {error}") from error
    return grammar


def _too_low(schema: Any) -> float | None:
    """A number that texts would have to have, or to stay below, and of which llguidance would die; None for none.

    Given a range of integers that ends near the least of 64 bits, it recurses until the stack ends, and the process
    with it. A lower bound alone may be as low as it likes: generated schemas have those of 64 bits.
    """
    todo = [(schema, False)]  # its parts, and whether they are of a value that is wanted as it is
    while todo:
        part, is_value = todo.pop()
        if isinstance(part, dict):
            for name, inner in part.items():
                if is_value or name not in _LOWER_BOUNDS or isinstance(inner, (dict, list)):
                    todo.append((inner, is_value or name in ("const", "enum")))
        elif isinstance(part, list):
            todo += [(inner, is_value) for inner in part]
        elif isinstance(part, (int, float)) and part <= _LOWEST:
            return part
    return None


def _remainders(schema: Any) -> int:
    """How many remainders of division have to be told apart, at least: the most that one value needs, or all values.

    Those of 2 and 5 can be seen by the last digits. Numbers for one value multiply, as far as they are coprime; those
    for different values add up. References are not followed.
    """
    groups: list[list[int]] = []  # by value, its number
    todo: list[tuple[Any, list[int] | None]] = [(schema, None)]  # parts of the schema, and the value if not a new one
    while todo:
        part, group = todo.pop()
        if isinstance(part, list):
            todo += [(inner, group) for inner in part]
        elif isinstance(part, dict):
            if group is None:
                groups.append(group := [1])
            for name, inner in part.items():
                if name == "multipleOf" and type(inner) in (int, float) and inner > 0:
                    # Once it is too large, it need not grow: of ten thousand numbers, that would take minutes.
                    if group[0] <= _REMAINDERS:
                        group[0] = math.lcm(group[0], _without_2_and_5(inner))
                elif name not in ("const", "enum"):
                    todo.append((inner, group if name in _SAME_VALUE else None))
    return sum({number for (number,) in groups if number > 1})


def _without_2_and_5(number: float) -> int:
    """What is left of a number's digits as a whole number without those prime factors; > 0."""
    digits = int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))
    for factor in (2, 5):
        while digits % factor == 0:
            digits //= factor
    return digits


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise SettingsError(f"{what} must be a text")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{what} is not valid text: {error}; it must be encodable as UTF-8") from error
    return given


def _short(given: Any) -> str:
    try:
        text = given if isinstance(given, str) else repr(given)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        text = f"<{type(given).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


# By Hugging Face tokenizer: its end-of-text ids, and llguidance's index of its vocabulary.
_indices: WeakKeyDictionary[Any, tuple[list[int], LLTokenizer]] = WeakKeyDictionary()


def _indexed(tokenizer: Any) -> LLTokenizer:
    """The index that llguidance makes of a vocabulary, remembered for as long as the tokenizer is there.

    Raises: SettingsError: llguidance cannot read it.
    """
    inner, ends = _of_tokenizer(tokenizer)
    known = _indices.get(inner)
    if known is None or known[0] != ends:
        from llguidance.hf import from_tokenizer

        try:
            known = _indices[inner] = ends, from_tokenizer(inner, eos_token=ends)
        except ValueError as error:
            raise SettingsError(f"llguidance cannot read the tokenizer {type(inner).__name__}: {error}") from error
    return known[1]


def tokenizer_json(tokenizer: Any) -> tuple[str, list[int]]:
    """A tokenizer as `tokenizers` writes it, from which another process can index it, and its end-of-text ids.

    Raises: SettingsError: llguidance could not read it.
    """
    _indexed(tokenizer)  # which is needed as well, and says what is wrong
    inner, ends = _of_tokenizer(tokenizer)
    backend = copy(inner.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str(), ends


def _of_tokenizer(tokenizer: Any) -> tuple[Any, list[int]]:
    """The tokenizer of Hugging Face, and its end-of-text ids."""
    if not hasattr(tokenizer, "eos_token_id"):
        raise SettingsError(
            f"a grammar needs the target's tokenizer, as Runtime.tokenizer has it, got {shown(tokenizer)}"
        )
    _library()
    # To wrap one that is not would take longer than all the rest, once it is known.
    if isinstance(tokenizer, TokenizerWrapper):
        inner, ends = tokenizer._tokenizer, sorted(tokenizer.eos_token_ids)
    else:
        inner, ends = tokenizer, sorted({tokenizer.eos_token_id} - {None})
    if not ends:
        raise SettingsError("a grammar needs a tokenizer with an end-of-text token, and this one has none; set one")
    return inner, ends
