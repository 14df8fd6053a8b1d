"""The timeline page: one HTML file in which a person sees what a trace says.

The page is `timeline.html`, which draws whatever data it is given; what the data are is decided here. It asks
nothing of any network, and whatever text a prompt or a model has in it stays text.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.trace import Event, Instant, Span
from runtime.tracing.drafter_states import spells_away

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.session_state import Commit

logger = logging.getLogger("outrider")

# Where the data go in the page.
PLACE = "__TIMELINE_DATA__"

# Texts that are made between two turns of the event loop's other tasks: a millisecond or so.
TEXTS_A_TURN = 32


@attrs.define
class Texts:
    """What tokens say.

    Attributes:
        prompts: by session.
        committed: by session, a piece for each committed token, maybe empty; they add up to the text.
        alone: of tokens by themselves, by id.
    """

    prompts: dict[int, str] = attrs.field(factory=dict)
    committed: dict[int, list[str]] = attrs.field(factory=dict)
    alone: dict[int, str] = attrs.field(factory=dict)


async def texts_of(events: Sequence[Event], tokenizer: TokenizerWrapper | None) -> Texts:
    """The texts of all tokens in a trace; ids in brackets where there is no tokenizer, or it fails.

    Cancellation: never strikes here; other tasks have their turn.
    """
    if tokenizer is None:
        return await _texts(events, _Ids())
    try:
        return await _texts(events, tokenizer)
    except Exception:
        # Somebody else's code, for a page that is of use without it too.
        logger.exception("the tokenizer failed, and the timeline shows the ids of tokens")
        return await _texts(events, _Ids())


class _Ids:
    """What there is to show where there is no tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"⟨{token}⟩" for token in ids)


async def _texts(events: Sequence[Event], tokenizer: Any) -> Texts:
    # Not before it is needed: it brings in the tokenizers' libraries.
    from runtime.generation.text import Detokenizer

    texts = Texts()
    detokenizers: dict[int, Detokenizer] = {}
    num_made = 0
    for event in events:
        if not isinstance(event, Instant):
            continue
        if event.kind == "open" and event.session not in texts.prompts:
            texts.prompts[event.session] = tokenizer.decode(list(event.tokens))
            texts.committed[event.session] = []
            detokenizers[event.session] = Detokenizer(tokenizer)
        elif event.commit is not None and event.session in detokenizers:
            commit, pieces = event.commit, texts.committed[event.session]
            for i, token in enumerate(commit.tokens):
                # The last token of a stop string is text as any other.
                is_stop_token = commit.finish_reason == "stop" and not isinstance(commit.stop_reason, str)
                ends = is_stop_token and i + 1 == len(commit.tokens)
                pieces.append("" if ends else detokenizers[event.session].add(token))
            if commit.finish_reason is not None:
                pieces[-1] += detokenizers[event.session].finish()
        for token in event.tokens if event.kind == "proposal" else event.commit.tokens if event.commit else ():
            if token not in texts.alone:
                texts.alone[token] = tokenizer.decode([token])
            num_made += 1
            if num_made % TEXTS_A_TURN == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
    return texts


def render(events: Sequence[Event], texts: Texts, *, num_lost: int = 0) -> str:
    """The page.

    Args:
        events: as they came.
        texts: what their tokens say.
        num_lost: how many events more there were.
    """
    page = resources.files("runtime.tracing").joinpath("timeline.html").read_text(encoding="utf-8")
    before, _, after = page.partition(PLACE)
    return before + _harmless(json.dumps(data_of(events, texts, num_lost=num_lost), separators=(",", ":"))) + after


def _harmless(text: str) -> str:
    """JSON that means the same, in which nothing can end or begin anything of HTML's."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- what the page is given -----------------------------------------------------------------------


def data_of(events: Sequence[Event], texts: Texts, *, num_lost: int = 0) -> dict[str, Any]:
    """What happened, as the page wants it.

    Times are in whole microseconds from the first of all. A span is a list of actor (0 target, 1 draft), kind,
    session or None, begin, end, tokens, round or None, and for one of the drafter's the share of it during which
    the target worked. An instant is a list of actor, kind, session, time, round and tokens.
    """
    spans = sorted((e for e in events if isinstance(e, Span)), key=lambda span: (span.actor != "target", span.began))
    instants = sorted((e for e in events if isinstance(e, Instant)), key=lambda instant: instant.at)
    busy = _busy_rounds(spans, instants)
    # Where the drafter was idle, nothing was guessed, and so nothing missed.
    instants = [i for i in instants if i.kind != "miss" or (i.session, i.round) in busy]
    starts = [span.began for span in spans] + [instant.at for instant in instants[:1]]
    zero = min(starts, default=0.0)

    def us(seconds: float) -> int:
        return round((seconds - zero) * 1e6)

    spans_of: dict[int, list[Span]] = defaultdict(list)
    instants_of: dict[int, list[Instant]] = defaultdict(list)
    for span in spans:
        if span.session is not None:
            spans_of[span.session].append(span)
    for instant in instants:
        instants_of[instant.session].append(instant)
    under = _Under([span for span in spans if span.actor == "target" and span.session is not None])
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
                *([round(under.share(span), 3)] if span.actor == "draft" else []),
            ]
            for span in spans
        ],
        "instants": [
            [0 if i.actor == "target" else 1, i.kind, i.session, us(i.at), i.round, i.num_tokens] for i in instants
        ],
        "sessions": [
            _session(session, spans_of[session], instants_of[session], texts, us, under)
            for session in sorted(instants_of)
            if any(instant.kind == "open" for instant in instants_of[session])
        ],
    }


def _busy_rounds(spans: Sequence[Span], instants: Sequence[Instant]) -> set[tuple[int | None, int | None]]:
    """Sessions and rounds in which the drafter drafted something, or proposed what it had looked up."""
    drafted = {(span.session, span.round) for span in spans if span.kind == "draft"}
    return drafted | {(i.session, i.round) for i in instants if i.kind == "proposal" and i.num_tokens}


class _Under:
    """Which part of a span lies under others that do not overlap each other."""

    def __init__(self, others: Sequence[Span]) -> None:
        self._others = others
        self._ends = [span.ended for span in others]

    def share(self, span: Span) -> float:
        """In [0, 1]; 1 for a span that took no time."""
        if span.ended <= span.began:
            return 1.0
        return self.seconds(span) / (span.ended - span.began)

    def seconds(self, span: Span) -> float:
        covered = 0.0
        for i in range(bisect.bisect_right(self._ends, span.began), len(self._others)):
            if self._others[i].began >= span.ended:
                break
            covered += min(span.ended, self._others[i].ended) - max(span.began, self._others[i].began)
        return covered


def _session(
    session: int,
    work: Sequence[Span],
    ours: Sequence[Instant],
    texts: Texts,
    us: Callable[[float], int],
    under: _Under,
) -> dict[str, Any]:
    commits = [(instant.at, instant.commit) for instant in ours if instant.commit is not None]
    kinds = {instant.kind for instant in ours}
    opened = next(instant for instant in ours if instant.kind == "open")
    finish_reason = commits[-1][1].finish_reason if commits else None
    last = max([instant.at for instant in ours] + [span.ended for span in work if span.kind != "close"])
    has_drafter = any(instant.actor == "draft" for instant in ours)
    return {
        "id": session,
        "prompt": texts.prompts.get(session, ""),
        "began": us(opened.at),
        "ended": us(last),
        "end": finish_reason or ("cancel" if "cancel" in kinds else None),
        "away": [[us(began), us(ended), state] for began, ended, state in spells_away(ours, last)]
        if has_drafter
        else [[us(opened.at), us(last), "none"]],
        "rounds": _rounds(session, work, ours, texts, us),
        "summary": _summary(opened, work, ours, commits, under),
    }


def _rounds(
    session: int, work: Sequence[Span], ours: Sequence[Instant], texts: Texts, us: Callable[[float], int]
) -> list[dict[str, Any]]:
    rounds: dict[int, dict[str, Any]] = {}
    pieces = iter(texts.committed.get(session, ()))
    for instant in ours:
        if instant.kind == "proposal":
            proposed = [texts.alone.get(token, "") for token in instant.tokens]
            rounds.setdefault(instant.round, {}).update(proposedAt=us(instant.at), proposed=proposed)
        elif instant.kind in ("hit", "miss"):
            rounds.setdefault(instant.round, {}).update(hit=instant.kind == "hit", answeredAt=us(instant.at))
        elif (commit := instant.commit) is not None:
            whose = [*["accepted"] * commit.num_from_draft, _last(commit)]
            rounds.setdefault(instant.round, {}).update(
                committedAt=us(instant.at),
                tokens=[
                    # Readable text, who it is from, and what the token says by itself.
                    [next(pieces, ""), whose[i], texts.alone.get(token, "")]
                    for i, token in enumerate(commit.tokens)
                ],
                accepted=commit.num_from_draft,
                rejected=commit.num_rejected,
                resting=commit.resting,
                single=commit.single_step,
                settles=commit.settles,
            )
    for span in work:
        if span.kind in ("verify", "decode") and span.round is not None:
            rounds.setdefault(span.round, {}).update(work=[span.kind, us(span.began), us(span.ended)])
    return [{"round": number, **rounds[number]} for number in sorted(rounds)]


def _last(commit: Commit) -> str:
    """Who a commit's last token is from, unless that was proposed."""
    return "bonus" if commit.bonus else "recovered" if commit.num_rejected else "plain"


def _summary(
    opened: Instant,
    work: Sequence[Span],
    ours: Sequence[Instant],
    commits: Sequence[tuple[float, Commit]],
    under: _Under,
) -> dict[str, Any]:
    """Figures as `protocol.statistics.Statistics` has them, from the moments at which text was committed."""
    accepted = sum(commit.num_from_draft for _, commit in commits)
    rejected = sum(commit.num_rejected for _, commit in commits)
    tokens = sum(len(commit.tokens) for _, commit in commits)
    num_untimed = len(commits[0][1].tokens) if commits else 0  # what comes in one round has taken no time
    first, last = (commits[0][0], commits[-1][0]) if commits else (opened.at, opened.at)
    drafts = [span for span in work if span.kind == "draft" and span.began < last]
    drafting = sum(span.ended - span.began for span in drafts)

    def busy(actor: str) -> float:
        within = sum(max(0.0, min(s.ended, last) - max(s.began, opened.at)) for s in work if s.actor == actor)
        return _ratio(within, last - opened.at)

    return {
        "promptTokens": len(opened.tokens),
        "tokens": tokens,
        "rounds": len(commits),
        "alone": sum(span.kind == "decode" for span in work),
        "proposed": accepted + rejected,
        "accepted": accepted,
        "hits": sum(instant.kind == "hit" for instant in ours),
        "misses": sum(instant.kind == "miss" for instant in ours),
        "tokensPerSecond": _ratio(tokens - num_untimed, last - first) or None,
        "firstToken": first - opened.at if commits else None,
        "targetBusy": busy("target"),
        "draftBusy": busy("draft"),
        # Of the time that drafting took, the part that cost nothing, since the target worked meanwhile.
        "draftUnder": _ratio(sum(under.seconds(span) for span in drafts), drafting),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
