"""The memory budget of a runtime: what its models take, what streams have reserved for their caches, and the limit."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count

import attrs

from actors.model import Model
from protocol.cache_size import TextSize
from protocol.errors import PromptTooLongError
from protocol.messages import Open
from protocol.prefill_chunks import MAX_CHUNK_TOKENS
from protocol.reprs import size_in_words
from protocol.settings import MAX_LOOKAHEAD, Settings
from protocol.trace import ActorName
from runtime.persistence.prompt_cache_file import read_header

# Tokens after the prompt that a stream reserves memory for, and by which its reservation grows once these are nearly
# used up. Few answers are as long as their `max_tokens`.
GROWTH_TOKENS = 2048

# Tokens of a text without a bound.
_UNBOUNDED = 2**31
# A last part of a prompt is read with the pass before it; see `PrefillChunkSize.most_tokens`.
_WIDEST_PASS = int(math.sqrt(2) * MAX_CHUNK_TOKENS)
# States that a text keeps from before the last rounds, to go back to.
_ROUND_CHECKPOINTS = 2
# Tokens that a drafter of a recurrent model is ahead at most with lookahead="auto", each with a checkpoint of its own.
_AHEAD_BY_AUTO = 32

# A stream of nothing special, for which `longest_text` is.
_PLAIN = Open(session=0, prompt=(0,), settings=Settings(), seed=0, stop_tokens=frozenset())

# All budgets of this process: they share the device.
_budgets: list[MemoryBudget] = []
_lock = threading.Lock()
_turns = count()


@attrs.define
class _Reservation:
    """The memory that is reserved for one text: until it has `num_tokens`, of at most `most_tokens`."""

    opened: Open
    num_before: int  # tokens of a prompt cache file
    num_tokens: int
    most_tokens: int
    has_given_way: bool = False  # nothing is reserved at the target until it grows again

    @staticmethod
    def of(opened: Open) -> _Reservation:
        """What a session reserves when it begins."""
        settings, num_prompt = opened.settings, len(opened.prompt)
        file = settings.prompt_cache_file
        num_before = 0 if file is None else read_header(file).num_tokens
        most = _UNBOUNDED if opened.context_length is None else opened.context_length
        if opened.num_scored > 0:
            most = num_prompt
        elif settings.max_tokens is not None:
            most = min(most, num_prompt + settings.max_tokens)
        return _Reservation(opened, num_before, min(most, num_prompt + GROWTH_TOKENS), most)

    def is_at(self, actor: ActorName) -> bool:
        """Whether the text is in the caches of a model."""
        return self.opened.drafted if actor == "draft" else not self.has_given_way

    def size(self, actor: ActorName) -> TextSize:
        """The size of the text in the caches of a model."""
        settings = self.opened.settings
        step = settings.prefill_step_size
        ahead = 0
        if actor == "draft":
            ahead = _AHEAD_BY_AUTO if settings.lookahead == "auto" else 2 * int(settings.lookahead) + 1
        return TextSize(
            self.num_before + self.num_tokens + (2 * MAX_LOOKAHEAD if ahead else 0),
            min(self.num_tokens, _WIDEST_PASS if step == "auto" else step),
            _ROUND_CHECKPOINTS + ahead,
            settings.reuse_prefix,
        )


@attrs.define(eq=False)
class MemoryBudget:
    """The memory that one runtime takes, until `close`, within a limit for all runtimes of the process.

    A stream reserves what the caches of its text take at most until it has `GROWTH_TOKENS` tokens after the prompt, and
    then as much again. The models' prefix caches have what is left. A drafter in another process is not counted.

    To be used in trio's thread; its numbers may be read in any thread.
    """

    limit: float  # bytes that models and caches may take together, in this process; infinite for no limit
    _target: Model
    _drafter: Callable[[], Model | None]  # the draft model that works in this process now, if there is one
    _on_change: Callable[[], None]  # called in any thread once another runtime has taken or released memory
    reserved_bytes: int = attrs.field(init=False, default=0)  # of the streams that have begun
    # Whether all of these have waited for memory since some was last taken or released.
    is_stuck: bool = attrs.field(init=False, default=False)
    # The turn of the first stream that waits to begin, among all runtimes.
    _waits_since: float = attrs.field(init=False, default=math.inf)
    _texts: dict[int, _Reservation] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        with _lock:
            _budgets.append(self)
        self._notify()

    @property
    def is_open(self) -> bool:
        """Whether it takes part in the limit."""
        return self in _all_budgets()

    def note_models(self) -> None:
        """Note that there are other models now."""
        self._hold(self._texts)

    def close(self) -> None:
        """Release everything."""
        with _lock:
            _budgets.remove(self)
        self._hold({})

    @property
    def model_bytes(self) -> int:
        """Memory of the models' weights."""
        return weights_of([model for _, model in self._models()])

    @property
    def cache_bytes(self) -> float:
        """Bytes that all caches of this runtime may take, beside the models of the process."""
        return max(0, self.limit - sum(budget.model_bytes for budget in _all_budgets()))

    @property
    def longest_text(self) -> int | None:
        """Most tokens of a text that has the memory for caches to itself; None if there is no bound."""
        most = self._most_tokens(_Reservation(_PLAIN, 0, 0, _UNBOUNDED))
        return None if most == _UNBOUNDED else most

    def prefix_room(self, actor: ActorName) -> float:
        """Bytes that the streams leave to a model's prefix cache. Both cache the same texts, and share what is left."""
        if math.isinf(self.limit):
            return math.inf
        sizes = {name: model.cache_size.of([TextSize(MAX_CHUNK_TOKENS)]) for name, model in self._models()}
        part = sizes.get(actor, 0) / total if (total := sum(sizes.values())) else 1.0
        return part * max(0.0, self._room()) / len(_all_budgets())

    # --- streams ----------------------------------------------------------------------------------

    def bounded(self, opened: Open) -> Open:
        """A session that ends where the memory does, as where the target's context does.

        Raises: PromptTooLongError: there is no memory for its prompt and one token more.
        """
        text, most = self._checked(opened)
        return opened if most == text.most_tokens else attrs.evolve(opened, context_length=most)

    def reserve(self, opened: Open) -> float | None:
        """Reserve memory for a session that begins.

        Returns: the tokens that it is for, infinite if the text never has more; None if there is not enough now, or if
            a stream of another runtime has waited longer.

        Raises: PromptTooLongError: as `bounded`.
        """
        text, most = self._checked(opened)
        since, self._waits_since = self._waits_since, math.inf
        num_tokens: float | None = None
        if all(since <= other._waits_since for other in self._others()):
            num_tokens = self._reserve(attrs.evolve(text, num_tokens=min(text.num_tokens, most)))
        if num_tokens is None:
            self._waits_since = min(since, next(_turns))
        return num_tokens

    def end_waiting(self) -> None:
        """Note that no stream waits to begin."""
        if self._waits_since < math.inf:
            self._waits_since = math.inf
            self._notify()

    def grow(self, session: int) -> float | None:
        """Reserve memory for more tokens of a session. Returns: as `reserve`."""
        text = self._texts[session]
        num_tokens = min(text.most_tokens, text.num_tokens + GROWTH_TOKENS)
        return self._reserve(attrs.evolve(text, num_tokens=num_tokens, has_given_way=False))

    def release(self, session: int) -> None:
        """Release what a session has reserved."""
        if self._texts.pop(session, None) is not None:
            self._hold(self._texts)

    def _reserve(self, text: _Reservation) -> float | None:
        texts = {**self._texts, text.opened.session: text}
        num_bytes = self._num_bytes(texts.values())
        if num_bytes - self.reserved_bytes > self._room():
            return None
        self._hold(texts, num_bytes)
        return math.inf if text.num_tokens == text.most_tokens else text.num_tokens

    def _hold(self, texts: dict[int, _Reservation], num_bytes: int | None = None) -> None:
        self._texts, self.is_stuck = texts, False
        self.reserved_bytes = self._num_bytes(texts.values()) if num_bytes is None else num_bytes
        self._notify()

    def may_give_way(self, session: int) -> bool:
        """Whether a text has memory to give, and can be read again: the start of one in a file cannot."""
        text = self._texts[session]
        return not text.has_given_way and text.num_before == 0

    def give_way(self, session: int) -> None:
        """Release what a session has reserved at the target, until it grows again."""
        if (text := self._texts.get(session)) is not None:
            self._hold({**self._texts, session: attrs.evolve(text, has_given_way=True)})

    def rivals(self) -> list[MemoryBudget]:
        """The other budgets of which streams have begun."""
        return [other for other in self._others() if other._texts]

    def shortage(self, session: int) -> str:
        """Why a session that has begun cannot grow, as a sentence for an error."""
        num_tokens, num_others = self._texts[session].num_tokens, len(self._texts) - 1
        return (
            f"memory is short for more than {num_tokens} tokens of this text beside {num_others} other streams that "
            f"need more, too: {self._described()}; raise it, or run fewer streams at a time"
        )

    # --- arithmetic -------------------------------------------------------------------------------

    def _models(self) -> Iterator[tuple[ActorName, Model]]:
        yield "target", self._target
        if (draft := self._drafter()) is not None:
            yield "draft", draft

    def _num_bytes(self, texts: Collection[_Reservation]) -> int:
        return sum(
            model.cache_size.of([text.size(name) for text in texts if text.is_at(name)])
            for name, model in self._models()
        )

    def _room(self) -> float:
        """Bytes that nothing in the process takes or has reserved, prefixes apart."""
        budgets = _all_budgets()
        return self.limit - sum(budget.model_bytes + budget.reserved_bytes for budget in budgets)

    def _most_tokens(self, text: _Reservation) -> int:
        """The tokens that a text can have, at most `most_tokens`, if no other is there."""
        if math.isinf(room := self.cache_bytes):
            return text.most_tokens
        if self._num_bytes([attrs.evolve(text, num_tokens=text.most_tokens)]) <= room:
            return text.most_tokens
        lengths = range(text.most_tokens)
        return bisect_right(lengths, room, key=lambda num: self._num_bytes([attrs.evolve(text, num_tokens=num)])) - 1

    def _checked(self, opened: Open) -> tuple[_Reservation, int]:
        """What a session reserves, and its `_most_tokens`. Raises: PromptTooLongError: as `bounded`."""
        text = _Reservation.of(opened)
        most, num_prompt = self._most_tokens(text), len(opened.prompt)
        num_after = 1 if opened.num_scored == 0 else 0
        if most < num_prompt + num_after:
            raise PromptTooLongError.by(num_prompt, max(0, most - num_after), self._described())
        return text, most

    def _described(self) -> str:
        slot_bytes = sum(model.cache_size.slot_bytes for _, model in self._models())
        models = self.limit - self.cache_bytes
        return (
            f"memory_limit is {size_in_words(self.limit)}, models take {size_in_words(models)} of it, and each token "
            f"takes {size_in_words(slot_bytes)}"
        )

    def _others(self) -> list[MemoryBudget]:
        return [budget for budget in _all_budgets() if budget is not self]

    def _notify(self) -> None:
        for other in self._others():
            other.is_stuck = False
            other._on_change()


def weights_of(models: Iterable[Model]) -> int:
    """Memory of the weights of models. One module may be target and draft model."""
    return sum({id(getattr(model, "module", model)): model.num_bytes for model in models}.values())


def _all_budgets() -> list[MemoryBudget]:
    with _lock:
        return list(_budgets)
