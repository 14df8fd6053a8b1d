"""The runtime over a scripted pair of models in simulated time.

What a draft model would buy on a machine follows from a few numbers: what its step costs beside the target's, how
often and how knowingly it is right, how the price of a pass grows with its width, and how much the two get in each
other's way. A `Scenario` names them. The actors, the tree and the rules that then run are the real ones, so what
they do with those numbers is what they would do on that machine, but for its noise.

The unit of time is what the target takes to decode one token, T_v(1).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, Literal, cast

import attrs
import mlx.core as mx
import trio
import trio.testing

from actors.drafters.drafter import MakePolicy, policy_by_settings
from actors.model import RewindMode
from actors.warm_up import warm_up
from actors.workers.simulated_worker import Contention, SimulatedWorker
from actors.workers.worker import Job
from protocol.errors import RewindError, SettingsError
from protocol.prices import Prices
from protocol.reprs import shown
from protocol.settings import MAX_SEED
from protocol.statistics import Statistics
from protocol.validation import check_integer, check_number, is_integer, validator
from runtime.engine.events import Events
from runtime.engine.running import running
from runtime.engine.runtime import Runtime

VOCAB_SIZE = 64

# One token, so that no prefill comes before the first round.
PROMPT = (0,)

# Simulated seconds after which a run that hangs is given up; without it, the clock would have nothing to jump to.
_TOO_LONG = 1e12

# Of several tasks that could go on at the same moment, trio picks any. So no draft step ends just when a verify pass
# does: that would make what comes of a scenario a matter of luck.
_NEVER_AT_ONCE = 1.0 + 2.0**-30


# --- what is simulated ----------------------------------------------------------------------------


def _changes(_: Any, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    before = 0
    for change in value:
        if not isinstance(change, tuple) or len(change) != 2 or not is_integer(change[0]) or change[0] <= before:
            raise SettingsError(
                f"{attribute.name} must be pairs of a token from which on it holds, from 1 and rising, and an "
                f"acceptance, got {shown(change)}"
            )
        before = change[0]
        check_number(f"an acceptance in {attribute.name}", change[1], 0, 1)


@attrs.frozen
class Scenario:
    """A machine and a pair of models.

    Attributes:
        acceptance: how often the draft's first choice is the target's, in [0, 1].
        cost_ratio: what a draft step takes, > 0, in units of T_v(1).
        contention: the part of a draft step's time that it costs the target when both run, in [0, 1]; 0 for
            separate hardware.
        verify_slope: a verify pass over m tokens takes T_v(1)·(1 + verify_slope·(m − 1)); >= 0.
        draft_slope: likewise a draft pass, in units of its own; None for the same slope.
        overhead: time that every forward pass takes on top, >= 0, in units of T_v(1).
        second_choice: where the draft's first choice is wrong, how often its second is right, in [0, 1]. No second
            choice is likelier than the first, so where the first is most unlikely, it is rarer.
        spread: how much the draft's confidence says, > 0: its first choice is right with a probability that
            is drawn for each position from the Beta distribution with mean `acceptance` and concentration
            `spread`. Small: it is sure of being right or of being wrong; large: nothing sets one position apart
            from another.
        overconfidence: by how much the draft overstates what it knows, >= 0: its logits are multiplied by
            1 + overconfidence. With 0 its confidence is calibrated.
        acceptance_changes: pairs of a token of the generated text, >= 1 and rising, and the acceptance from it on.
        seed: of the text and of everything that is drawn, in [0, 2**64).

    Raises: SettingsError: a value is out of its range.
    """

    acceptance: float = attrs.field(validator=validator(check_number, 0, 1))
    cost_ratio: float = attrs.field(validator=validator(check_number, above=0))
    contention: float = attrs.field(default=0.0, validator=validator(check_number, 0, 1))
    verify_slope: float = attrs.field(default=0.06, validator=validator(check_number, 0))
    draft_slope: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(validator(check_number, 0))
    )
    overhead: float = attrs.field(default=0.0, validator=validator(check_number, 0))
    second_choice: float = attrs.field(default=0.45, validator=validator(check_number, 0, 1))
    spread: float = attrs.field(default=1.3, validator=validator(check_number, above=0))
    overconfidence: float = attrs.field(default=0.0, validator=validator(check_number, 0))
    acceptance_changes: tuple[tuple[int, float], ...] = attrs.field(default=(), validator=_changes)
    seed: int = attrs.field(default=0, validator=validator(check_integer, 0, MAX_SEED))

    def verify_seconds(self, num_tokens: int) -> float:
        """What a pass of the target over so many tokens takes, in units of T_v(1)."""
        return self.overhead + 1.0 + self.verify_slope * (num_tokens - 1)

    def draft_seconds(self, num_tokens: int) -> float:
        """What a pass of the draft over so many tokens takes, in units of T_v(1)."""
        slope = self.verify_slope if self.draft_slope is None else self.draft_slope
        return self.overhead + self.cost_ratio * (1.0 + slope * (num_tokens - 1))


# --- the text, and what the draft thinks of it ----------------------------------------------------

_MASK = (1 << 64) - 1
# Odd multipliers of the SplitMix64 and MurmurHash3 finalisers; they spread near values over all bits.
_SPREAD, _TEXT, _LUCK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xC4CEB9FE1A85EC53

_NUM_CHANCES = 1 << 14
# What a logit says of a token that has no chance.
_NO_CHANCE = 1e-9


def _after(history: int, token: int) -> int:
    """The number that stands for a history with one more token: it hangs on every token, and costs one step."""
    mixed = ((history ^ (token + 1)) * _SPREAD) & _MASK
    return mixed ^ (mixed >> 29)


def _draw(history: int, purpose: int) -> int:
    """A number in [0, 2**64) for one purpose, that hangs on the whole history."""
    mixed = ((history ^ (history >> 32)) * purpose) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _SPREAD) & _MASK
    return mixed ^ (mixed >> 31)


def _truth(history: int) -> int:
    """The token that the target puts after a history."""
    return _draw(history, _TEXT) % VOCAB_SIZE


@lru_cache(maxsize=32)
def _chances(mean: float, spread: float) -> tuple[float, ...]:
    """A stock of draws from a Beta distribution; means of 0 and 1 are exact."""
    if mean in (0.0, 1.0):
        return (float(mean),) * _NUM_CHANCES
    draws = random.Random(0)
    return tuple(draws.betavariate(mean * spread, (1.0 - mean) * spread) for _ in range(_NUM_CHANCES))


class _ScriptedLine:
    """One text in a scripted model: a number for each length that it has had."""

    def __init__(self, rows: Callable[[list[int], int], mx.array], history: int) -> None:
        self._rows = rows
        self._histories = [history]  # after so many tokens as the index says

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """See `CachedSequence.feed`."""
        histories = self._histories
        history = histories[-1]
        for token in tokens:
            history = _after(history, token)
            histories.append(history)
        return self._rows(histories, num_logits) if num_logits else None

    def feed_lazy(self, token: mx.array) -> mx.array:
        """See `CachedSequence.feed_lazy`."""
        self._histories.append(_after(self._histories[-1], cast(int, token.item())))
        return self._rows(self._histories, 1)

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        """See `CachedSequence.prepare`."""
        return RewindMode.TRIM

    def rewind(self, length: int) -> int:
        """See `CachedSequence.rewind`."""
        if length >= len(self._histories):
            raise RewindError(f"asked to rewind to {length} tokens a script that holds {len(self._histories) - 1}")
        del self._histories[length + 1 :]
        return length

    def check(self, length: int) -> None:
        """See `CachedSequence.check`."""
        if length != len(self._histories) - 1:
            raise RewindError(f"the script should hold {length} tokens, it holds {len(self._histories) - 1}")

    def close(self) -> None:
        """See `CachedSequence.close`."""
        self._histories.clear()

    num_bytes = 0  # to speak of
    needs_prefix_checkpoints = False  # it can always go back
    depends_on_passes = False

    def add_prefix_checkpoint(self) -> None:
        """See `CachedSequence.add_prefix_checkpoint`."""

    def reusable_length(self, num_common: int, num_read: int) -> int:
        """See `CachedSequence.reusable_length`."""
        return min(num_common, len(self._histories) - 1)

    def reuse(self, length: int) -> None:
        """See `CachedSequence.reuse`."""
        self.rewind(length)


class ScriptedTarget:
    """A target that knows the text: its logits are all for the one true token."""

    vocab_size = VOCAB_SIZE
    context_length = None

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed

    def open_sequence(self, *, beside_another: bool) -> _ScriptedLine:
        """See `Model.open_sequence`."""
        return _ScriptedLine(self._rows, _after(0, self._seed))

    def _rows(self, histories: list[int], num_logits: int) -> mx.array:
        rows = []
        for history in histories[-num_logits:]:
            row = [0.0] * VOCAB_SIZE
            row[_truth(history)] = 1.0
            rows.append(row)
        return mx.array(rows)


class ScriptedDraft:
    """A draft that is right as often as it says, unless it is to overstate itself."""

    vocab_size = VOCAB_SIZE
    context_length = None

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._second_choice = scenario.second_choice
        self._sharpness = 1.0 + scenario.overconfidence
        self._changes_at = [len(PROMPT) + token for token, _ in scenario.acceptance_changes]
        means = (scenario.acceptance, *(acceptance for _, acceptance in scenario.acceptance_changes))
        self._chances = [_chances(mean, scenario.spread) for mean in means]

    def open_sequence(self, *, beside_another: bool) -> _ScriptedLine:
        """See `Model.open_sequence`."""
        return _ScriptedLine(self._rows, _after(0, self._seed))

    def _rows(self, histories: list[int], num_logits: int) -> mx.array:
        first = len(histories) - num_logits
        return mx.array([self._row(histories[length], length) for length in range(first, len(histories))])

    def _row(self, history: int, length: int) -> list[float]:
        """The logits after a history of so many tokens."""
        luck = _draw(history, _LUCK)
        chance = self._chances[bisect_right(self._changes_at, length)][luck % _NUM_CHANCES]
        # Never likelier than the first choice, which would not be the first then.
        chance_of_second = min((1.0 - chance) * self._second_choice, chance)
        first, second = self._choices(history, luck, chance, chance_of_second)
        row = [self._logit((1.0 - chance - chance_of_second) / (VOCAB_SIZE - 2))] * VOCAB_SIZE
        # The first choice is the argmax also where it has as little chance as any.
        row[second] = min(self._logit(chance_of_second), self._logit(chance))
        row[first] = max(self._logit(chance), *row) + 1e-3
        return row

    def _choices(self, history: int, luck: int, chance: float, chance_of_second: float) -> tuple[int, int]:
        """The draft's first and second choice: two tokens, of which one may be the true one."""
        text = _draw(history, _TEXT)
        truth = text % VOCAB_SIZE
        # Two more tokens, all three different: steps around the circle of ids.
        step = 1 + (text >> 16) % (VOCAB_SIZE - 1)
        other = (truth + step) % VOCAB_SIZE
        another = (truth + 1 + (step + (text >> 32) % (VOCAB_SIZE - 2)) % (VOCAB_SIZE - 1)) % VOCAB_SIZE
        drawn = (luck >> 24) / (1 << 40)
        if drawn < chance:
            return truth, other
        return (other, truth) if drawn < chance + chance_of_second else (other, another)

    def _logit(self, chance: float) -> float:
        return self._sharpness * math.log(max(chance, _NO_CHANCE))


# --- playing it -----------------------------------------------------------------------------------


@attrs.frozen
class Played:
    """What came of a scenario.

    Attributes:
        speed: tokens per T_v(1), which is what plain decoding takes for one.
        seconds: simulated, from the call to the last token, in units of T_v(1).
        statistics: of the stream.
    """

    speed: float
    seconds: float
    statistics: Statistics


def played(
    scenario: Scenario,
    *,
    num_tokens: int = 2000,
    lookahead: int | Literal["auto"] = "auto",
    make_policy: MakePolicy = policy_by_settings,
) -> Played:
    """Generate a text in a scenario, in simulated time, in an event loop of its own.

    Args, Raises: as `play`.
    """

    async def main() -> Played:
        return await play(scenario, num_tokens=num_tokens, lookahead=lookahead, make_policy=make_policy)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def play(
    scenario: Scenario,
    *,
    num_tokens: int = 2000,
    lookahead: int | Literal["auto"] = "auto",
    make_policy: MakePolicy = policy_by_settings,
) -> Played:
    """Generate a text in a scenario; needs an event loop with an autojumping clock.

    What comes of it depends on the arguments alone.

    Args:
        scenario: what to simulate.
        num_tokens: length of the text, >= 1.
        lookahead: as in `Settings`; 0 is plain decoding.
        make_policy: decides how far to draft ahead.

    Raises: SettingsError: a setting is out of its range.
    """
    async with _runtime(scenario, make_policy) as runtime:
        return _as_played(await _read(runtime, PROMPT, num_tokens, lookahead))


def _as_played(statistics: Statistics) -> Played:
    return Played(statistics.generated_tokens / statistics.elapsed, statistics.elapsed, statistics)


async def _read(
    runtime: Runtime, prompt: tuple[int, ...], num_tokens: int, lookahead: int | Literal["auto"]
) -> Statistics:
    """Read a text to its end."""
    stream = runtime.stream(prompt, max_tokens=num_tokens, lookahead=lookahead)
    async with stream:
        async for _ in stream:
            pass
    return stream.statistics()


@asynccontextmanager
async def _runtime(scenario: Scenario, make_policy: MakePolicy) -> AsyncIterator[Runtime]:
    contention, events = Contention(scenario.contention), Events()

    def verify_price(job: Job[Any]) -> float:
        return scenario.verify_seconds(job.num_tokens) if job.num_tokens else 0.0

    def draft_price(job: Job[Any]) -> float:
        return _NEVER_AT_ONCE * scenario.draft_seconds(job.num_tokens) if job.num_tokens else 0.0

    target = SimulatedWorker("target", verify_price, events, contention)
    draft = SimulatedWorker("draft", draft_price, events, contention)
    prices = Prices()
    models = ((ScriptedTarget(scenario), target), (ScriptedDraft(scenario), draft))
    with trio.fail_after(_TOO_LONG):
        await warm_up(*models, prices)
        async with running(*models, events=events, prices=prices, make_policy=make_policy) as runtime:
            yield runtime


# --- several streams ------------------------------------------------------------------------------


@attrs.frozen
class PlayedStreams:
    """What came of several texts in one scenario.

    Attributes:
        speed: tokens of all per T_v(1).
        seconds: simulated, from the call to the last token of all, in units of T_v(1).
        target_busy, draft_busy: fractions of that in which either model was at work.
        statistics: of the streams, in the order of their ends.
    """

    speed: float
    seconds: float
    target_busy: float
    draft_busy: float
    statistics: tuple[Statistics, ...]

    @property
    def proposal(self) -> float:
        """Tokens proposed for a pass of the target, on average."""
        return sum(each.proposed for each in self.statistics) / sum(each.rounds for each in self.statistics)


def played_streams(
    scenario: Scenario,
    num_streams: int,
    *,
    at_once: bool,
    num_tokens: int = 500,
    lookahead: int | Literal["auto"] = "auto",
) -> PlayedStreams:
    """Generate several different texts on one runtime, in simulated time, in an event loop of its own.

    Args:
        scenario: what to simulate.
        num_streams: how many texts, in [1, 64].
        at_once: whether all begin together; else one after another.
        num_tokens: length of each, >= 1.
        lookahead: as in `Settings`; 0 is plain decoding.

    Raises: SettingsError: a setting is out of its range.
    """
    check_integer("num_streams", num_streams, 1, VOCAB_SIZE)

    async def main() -> PlayedStreams:
        done: list[Statistics] = []
        async with _runtime(scenario, policy_by_settings) as runtime:
            began, before = trio.current_time(), runtime.statistics()

            async def read(first_token: int) -> None:
                done.append(await _read(runtime, (first_token,), num_tokens, lookahead))

            async with trio.open_nursery() as nursery:
                for first_token in range(num_streams):
                    if at_once:
                        nursery.start_soon(read, first_token)
                    else:
                        await read(first_token)
            seconds, after = trio.current_time() - began, runtime.statistics()
        target, draft = (
            (getattr(after, name) * after.elapsed - getattr(before, name) * before.elapsed) / seconds
            for name in ("target_busy", "draft_busy")
        )
        return PlayedStreams(num_streams * num_tokens / seconds, seconds, target, draft, tuple(done))

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
