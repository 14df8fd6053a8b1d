"""The timeline page: one HTML file that shows a trace.

This module computes the page's data; `timeline.html` draws them. The page loads nothing from any network.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio

from protocol.trace import Event, Instant, Span

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.session_state import Commit

logger = logging.getLogger("outrider")

# Stands in `timeline.html` for its data.
DATA_PLACEHOLDER = "__TIMELINE_DATA__"

# Where the page says that an accepted token is from, by who drafted it.
_ORIGINS = {"model": "accepted", "copy": "copied", "grammar": "forced"}

# Tokens that are decoded between two checkpoints: about a millisecond.
TOKENS_PER_CHECKPOINT = 32

DrafterState = Literal["drafting", "resting", "overdue", "left"]

# The state of a session's drafter after an instant of each kind; other kinds change nothing. A drafter that was overdue
# with the prompt is back with its first proposal.
DRAFTER_STATES: dict[str, DrafterState] = {
    "proposal": "drafting",
    "rejoin": "drafting",
    "rest": "resting",
    "overdue": "overdue",
    "withdraw": "left",
}


@attrs.define
class Texts:
    """The decoded texts of a trace's tokens."""

    prompts: dict[int, str] = attrs.field(factory=dict)  # by session
    # By session, a piece of the generated text for each committed token, possibly empty.
    committed: dict[int, list[str]] = attrs.field(factory=dict)
    alone: dict[int, str] = attrs.field(factory=dict)  # text of a token decoded by itself, by id


async def texts_of(events: Sequence[Event], tokenizer: TokenizerWrapper | None) -> Texts:
    """The texts of all tokens in a trace; ids in brackets if there is no tokenizer, or if it fails.

    Cancellation: shielded; other tasks run at the checkpoints.
    """
    try:
        return await _texts(events, _Ids() if tokenizer is None else tokenizer)
    except Exception:
        # A tokenizer may raise anything, and the page is useful without it.
        logger.exception("the tokenizer failed; the timeline shows token ids instead of texts")
        return await _texts(events, _Ids())


class _Ids:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"⟨{token}⟩" for token in ids)


async def _texts(events: Sequence[Event], tokenizer: Any) -> Texts:
    # Imported late: it imports the tokenizers' libraries.
    from runtime.generation.text import Detokenizer

    texts = Texts()
    detokenizers: dict[int, Detokenizer] = {}
    num_decoded = 0
    for event in events:
        if not isinstance(event, Instant):
            continue
        if event.kind == "open" and event.session not in texts.prompts:
            texts.prompts[event.session] = tokenizer.decode(list(event.tokens))
            texts.committed[event.session] = []
            detokenizers[event.session] = Detokenizer(tokenizer, event.tokens)
        elif event.commit is not None and event.session in detokenizers:
            commit, pieces = event.commit, texts.committed[event.session]
            for i, token in enumerate(commit.tokens):
                # A stop token has no text; the last token of a stop string has.
                has_stop_token = commit.finish_reason == "stop" and not isinstance(commit.stop_reason, str)
                is_stop_token = has_stop_token and i + 1 == len(commit.tokens)
                pieces.append("" if is_stop_token else detokenizers[event.session].add(token))
            if commit.finish_reason is not None:
                pieces[-1] += detokenizers[event.session].finish()
        for token in event.tokens if event.kind == "proposal" else event.commit.tokens if event.commit else ():
            if token not in texts.alone:
                texts.alone[token] = tokenizer.decode([token])
            num_decoded += 1
            if num_decoded % TOKENS_PER_CHECKPOINT == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
    return texts


def render(events: Sequence[Event], texts: Texts, *, num_lost: int = 0) -> str:
    """The page as HTML. `events` are in the order in which they came; `num_lost` more were not recorded."""
    page = resources.files("runtime.tracing").joinpath("timeline.html").read_text(encoding="utf-8")
    before, _, after = page.partition(DATA_PLACEHOLDER)
    data = json.dumps(data_of(events, texts, num_lost=num_lost), separators=(",", ":"))
    # Text of prompts and models cannot become HTML.
    return before + data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e") + after


def data_of(events: Sequence[Event], texts: Texts, *, num_lost: int = 0) -> dict[str, Any]:
    """The page's data, for JSON.

    Times are in whole microseconds since the first event. A span is a list of actor (0 target, 1 draft), kind, session
    or None, begin, end, number of tokens, round or None. A span of the drafter has one more item, the fraction of it in
    which the target worked. A span that several sessions share has one more item, a list of session, round and number
    of tokens for each. An instant is a list of actor, kind, session, time, round and number of tokens.
    """
    spans = sorted((e for e in events if isinstance(e, Span)), key=lambda span: (span.actor != "target", span.began))
    instants = sorted((e for e in events if isinstance(e, Instant)), key=lambda instant: instant.at)
    busy = _busy_rounds(spans, instants)
    # An idle drafter guessed nothing, so it missed nothing.
    instants = [i for i in instants if i.kind != "miss" or (i.session, i.round) in busy]
    starts = [span.began for span in spans] + [instant.at for instant in instants[:1]]
    zero = min(starts, default=0.0)

    def us(seconds: float) -> int:
        return round((seconds - zero) * 1e6)

    spans_of: dict[int, list[Span]] = defaultdict(list)
    instants_of: dict[int, list[Instant]] = defaultdict(list)
    for span in spans:
        for session in span.sessions:
            spans_of[session].append(span)
    for instant in instants:
        instants_of[instant.session].append(instant)
    target_work = _Overlap([span for span in spans if span.actor == "target" and span.sessions])
    ends = [us(span.ended) for span in spans] + [us(instant.at) for instant in instants[-1:]]
    return {
        "ended": max(ends, default=0),
        "lost": num_lost,
        "spans": [
            [
                0 if span.actor == "target" else 1,
                span.kind,
                span.session,
                us(span.began),
                us(span.ended),
                span.num_tokens,
                span.round,
                *([round(target_work.fraction(span), 3)] if span.actor == "draft" else []),
                *([[[s.session, s.round, s.num_tokens] for s in span.shares]] if span.shares else []),
            ]
            for span in spans
        ],
        "instants": [
            [0 if i.actor == "target" else 1, i.kind, i.session, us(i.at), i.round, i.num_tokens] for i in instants
        ],
        "sessions": [
            _Session(session, spans_of[session], instants_of[session], texts, us, target_work).data()
            for session in sorted(instants_of)
            if any(instant.kind == "open" for instant in instants_of[session])
        ],
    }


def _busy_rounds(spans: Sequence[Span], instants: Sequence[Instant]) -> set[tuple[int, int | None]]:
    """(session, round) in which the drafter drafted, or proposed tokens that it had looked up."""
    drafted = {(session, span.round_of(session)) for span in spans if span.kind == "draft" for session in span.sessions}
    return drafted | {(i.session, i.round) for i in instants if i.kind == "proposal" and i.num_tokens}


class _Overlap:
    """How much of a span overlaps other spans, of which no two overlap each other."""

    def __init__(self, others: Sequence[Span]) -> None:
        self._others = others
        self._ends = [span.ended for span in others]

    def fraction(self, span: Span) -> float:
        return 1.0 if span.ended <= span.began else self.seconds(span) / (span.ended - span.began)

    def seconds(self, span: Span) -> float:
        overlap_s = 0.0
        for i in range(bisect.bisect_right(self._ends, span.began), len(self._others)):
            if self._others[i].began >= span.ended:
                break
            overlap_s += min(span.ended, self._others[i].ended) - max(span.began, self._others[i].began)
        return overlap_s


def _periods_away(instants: Sequence[Instant], ended: float) -> list[tuple[float, float, DrafterState]]:
    """The periods in which the drafter left a session to the target: begin, end, and the drafter's state."""
    changes: list[tuple[float, DrafterState | None]] = []
    for instant in instants:
        state = DRAFTER_STATES.get(instant.kind)
        if state is not None and (not changes or state != changes[-1][1]):
            changes.append((instant.at, state))
    return [
        (began, end, state)
        for (began, state), (end, _) in pairwise([*changes, (ended, None)])
        if state is not None and state != "drafting"
    ]


@attrs.frozen
class _Session:
    """What a trace has of a session."""

    id: int
    spans: Sequence[Span]
    instants: Sequence[Instant]
    texts: Texts
    us: Callable[[float], int]
    target_work: _Overlap

    def data(self) -> dict[str, Any]:
        """The session for the page."""
        us, opened = self.us, next(instant for instant in self.instants if instant.kind == "open")
        last_s = max([i.at for i in self.instants] + [span.ended for span in self.spans if span.kind != "close"])
        commits = [(instant.at, instant.commit) for instant in self.instants if instant.commit is not None]
        finish_reason = commits[-1][1].finish_reason if commits else None
        is_cancelled = any(instant.kind == "cancel" for instant in self.instants)
        away = [[us(began), us(ended), state] for began, ended, state in _periods_away(self.instants, last_s)]
        has_drafter = any(instant.actor == "draft" for instant in self.instants)
        return {
            "id": self.id,
            "prompt": self.texts.prompts.get(self.id, ""),
            "began": us(opened.at),
            "ended": us(last_s),
            "end": finish_reason or ("cancel" if is_cancelled else None),
            "away": away if has_drafter else [[us(opened.at), us(last_s), "none"]],
            "rounds": self._rounds(),
            "summary": self._summary(opened, commits),
        }

    def _rounds(self) -> list[dict[str, Any]]:
        rounds: dict[int, dict[str, Any]] = defaultdict(dict)
        pieces = iter(self.texts.committed.get(self.id, ()))
        for instant in self.instants:
            if instant.kind == "proposal":
                proposed = [self.texts.alone.get(token, "") for token in instant.tokens]
                rounds[instant.round].update(proposedAt=self.us(instant.at), proposed=proposed)
            elif instant.kind in ("hit", "miss"):
                rounds[instant.round].update(hit=instant.kind == "hit", answeredAt=self.us(instant.at))
            elif (commit := instant.commit) is not None:
                by_whom = [commit.drafted_by(index) for index in range(commit.num_from_draft)]
                last = "bonus" if commit.bonus else "recovered" if commit.num_rejected else "plain"
                origins = [*(_ORIGINS[each] for each in by_whom if each is not None), last]
                rounds[instant.round].update(
                    committedAt=self.us(instant.at),
                    tokens=[
                        # The text that the token makes readable, its origin, and its text alone.
                        [next(pieces, ""), origins[i], self.texts.alone.get(token, "")]
                        for i, token in enumerate(commit.tokens)
                    ],
                    accepted=commit.num_from_draft,
                    rejected=commit.num_rejected,
                    resting=commit.resting,
                    single=commit.single_step,
                    settles=commit.settles,
                )
        for span in self.spans:
            if span.gives_tokens and (number := span.round_of(self.id)) is not None:
                others = [other for other in span.sessions if other != self.id]
                rounds[number].update(work=[span.kind, self.us(span.began), self.us(span.ended), others])
        return [{"round": number, **rounds[number]} for number in sorted(rounds)]

    def _summary(self, opened: Instant, commits: Sequence[tuple[float, Commit]]) -> dict[str, Any]:
        """The figures. Times end with the last commit: the trace does not say when the consumer took a token."""
        # Imported late: both import mlx, and the command line imports this module at its top.
        from protocol.prices import Prices
        from protocol.statistics import Counts

        first_s, last_s = (commits[0][0], commits[-1][0]) if commits else (opened.at, opened.at)

        def busy_s(actor: str) -> float:
            worked = [span for span in self.spans if span.actor == actor]
            return sum(s.fractions[self.id] * max(0.0, min(s.ended, last_s) - max(s.began, opened.at)) for s in worked)

        counts = Counts(
            prompt_tokens=len(opened.tokens),
            lookahead_hits=sum(instant.kind == "hit" for instant in self.instants),
            lookahead_misses=sum(instant.kind == "miss" for instant in self.instants),
            target_seconds=busy_s("target"),
            draft_seconds=busy_s("draft"),
        )
        for _, commit in commits:
            for index in range(len(commit.tokens)):
                counts.give(commit, index)
        for span in self.spans:
            if span.gives_tokens:
                counts.take_part(len(span.sessions), is_first=span.sessions[0] == self.id)
        statistics = counts.snapshot(
            elapsed=last_s - opened.at,
            generation_seconds=last_s - first_s,
            num_untimed=len(commits[0][1].tokens) if commits else 0,
            time_to_first_token=first_s - opened.at if commits else None,
            # Not in a trace, and the page does not show it.
            estimates=Prices().estimates(),
        )
        drafts = [span for span in self.spans if span.kind == "draft" and span.began < last_s]
        drafting_s = sum(span.ended - span.began for span in drafts)
        shared_s = sum(self.target_work.seconds(span) for span in drafts)
        return {
            "promptTokens": statistics.prompt_tokens,
            "tokens": statistics.generated_tokens,
            "rounds": statistics.rounds,
            "rowsPerPass": statistics.rows_per_pass,
            "alone": sum(span.kind == "decode" for span in self.spans),
            "proposed": statistics.proposed,
            "accepted": statistics.accepted,
            "copied": statistics.accepted_copied + statistics.rejected_copied,
            "acceptedCopied": statistics.accepted_copied,
            "forced": statistics.accepted_grammar + statistics.rejected_grammar,
            "acceptedForced": statistics.accepted_grammar,
            "hits": statistics.lookahead_hits,
            "misses": statistics.lookahead_misses,
            "tokensPerSecond": statistics.generation_tps,
            "firstToken": statistics.time_to_first_token,
            "targetBusy": statistics.target_busy,
            "draftBusy": statistics.draft_busy,
            # The fraction of the drafting time that cost nothing, since the target worked meanwhile.
            "draftUnder": shared_s / drafting_s if drafting_s > 0 else 0.0,
        }
