"""The timeline page: its data, that text stays text, and that it works in a real browser."""

import html.parser
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import browser
import pytest
import trio
from playwright.sync_api import Browser
from sample_tokenizers import demo
from scripted import Price, ScriptedModel, Simulation, agreeing, never, priced, run, simulated, truthful
from sweeps import sweep
from visitors import chromium

import runtime
from protocol.session_state import Commit
from protocol.trace import Event, Instant, Span
from runtime.tracing.timeline import DATA_PLACEHOLDER, TOKENS_PER_CHECKPOINT, data_of, render, texts_of

# A browser takes a second to start.
in_a_browser = pytest.mark.browser

PRICE = priced(prefill=0.25, draft=0.03125, verify=0.125, decode=0.125)
LONG = 500
BREAKOUT = "a</script><script>document.title = 'broken'</script><!-- <b>bold</b> & \u2028 \"quoted\" 'so'"


class Words:
    """A tokenizer whose token n is the n-th of a list of words, and w0, w1, … beyond them."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] if i < len(self.words) else f" w{i}" for i in ids)


def data_for(events: Sequence[Event], tokenizer: Any = None) -> dict[str, Any]:
    data: dict[str, Any] = data_of(events, trio.run(texts_of, events, tokenizer))
    return data


def page_for(events: Sequence[Event], tokenizer: Any = None, **more: Any) -> str:
    return render(events, trio.run(texts_of, events, tokenizer), **more)


Use = Callable[[Simulation], Awaitable[Any]]


def simulate(
    *uses: Use, target: ScriptedModel | None = None, draft: ScriptedModel | None = None, price: Price = PRICE
) -> tuple[list[Event], list[Any]]:
    """The events and outcomes of streams that run at once and begin in this order."""

    async def main() -> tuple[list[Event], list[Any]]:
        came: list[Any] = [None] * len(uses)

        async def wait_for(i: int, outcome: Awaitable[Any]) -> None:
            came[i] = await outcome

        models = target or ScriptedModel(truthful), draft or ScriptedModel(agreeing(0.75))
        async with simulated(*models, price=price) as simulation, trio.open_nursery() as nursery:
            for i, use in enumerate(uses):
                nursery.start_soon(wait_for, i, use(simulation))
        return simulation.events, came

    happened: tuple[list[Event], list[Any]] = run(main)
    return happened


def generated(prompt: Sequence[int], **settings: Any) -> Use:
    """A use that reads a whole stream; its outcome is a completion."""

    async def read(stream: runtime.TokenStream) -> runtime.Completion:
        tokens = tuple([token async for token in stream])
        assert stream.finish_reason is not None
        return runtime.Completion("", tokens, stream.finish_reason, stream.statistics())

    return lambda simulation: read(simulation.runtime.stream(prompt, **settings))


def broken_off(prompt: Sequence[int], after: int) -> Use:
    """A use that cancels a stream after some tokens."""

    async def read(stream: runtime.TokenStream) -> None:
        async with stream:
            async for token in stream:
                if token.index == after:
                    break

    return lambda simulation: read(simulation.runtime.stream(prompt, max_tokens=None, lookahead=4))


@pytest.fixture(scope="module")
def several() -> list[Event]:
    """A stream, a concurrent one that is cancelled, and one without drafts."""
    drafted, plain = generated([5, 6, 7], max_tokens=60, lookahead=4), generated([1, 2], max_tokens=9, lookahead=0)
    return simulate(drafted, broken_off([9, 8, 7], 12), plain)[0]


@pytest.fixture(scope="module")
def long() -> list[Event]:
    """A stream of `LONG` tokens."""
    return simulate(generated([5, 6, 7], max_tokens=LONG, lookahead=4))[0]


# --- the page's data ------------------------------------------------------------------------------


@sweep(
    ("settings", "target", "draft"),
    [
        ({}, {}, agreeing(0.75)),
        ({"lookahead": 5}, {}, truthful),
        ({"lookahead": 4}, {}, agreeing(0.0)),
        ({"lookahead": 4}, {"undo": never}, agreeing(0.75)),
        ({"lookahead": 4}, {"undo": never, "keeps_states": True}, agreeing(0.75)),
        ({"lookahead": 0}, {}, truthful),
        ({"max_tokens": 1}, {}, truthful),
        ({"stop_tokens": range(8)}, {}, agreeing(0.75)),
    ],
)
def test_figures_are_those_of_the_statistics(settings, target, draft):
    settings = {"max_tokens": 50} | settings
    models = {"target": ScriptedModel(truthful, **target), "draft": ScriptedModel(draft)}
    events, (completion,) = simulate(generated([5, 6, 7], **settings), **models)
    (session,) = data_for(events)["sessions"]
    statistics, summary = completion.statistics, session["summary"]
    assert summary["promptTokens"] == statistics.prompt_tokens
    assert summary["tokens"] == statistics.generated_tokens
    assert summary["rounds"] == statistics.rounds
    assert (summary["proposed"], summary["accepted"]) == (statistics.proposed, statistics.accepted)
    assert (summary["hits"], summary["misses"]) == (statistics.lookahead_hits, statistics.lookahead_misses)
    assert summary["tokensPerSecond"] == pytest.approx(statistics.generation_tps)
    assert summary["firstToken"] == pytest.approx(statistics.time_to_first_token)
    assert summary["targetBusy"] == pytest.approx(statistics.target_busy)
    assert 0 <= summary["draftBusy"] <= 1
    assert session["end"] == completion.finish_reason


def test_every_token_is_there_once_with_whom_it_is_from():
    events, (completion,) = simulate(generated([5, 6, 7], max_tokens=60, lookahead=4))
    (session,) = data_for(events, Words())["sessions"]
    tokens = [token for round in session["rounds"] for token in round["tokens"]]
    assert [alone for _, _, alone in tokens] == [f" w{token.id}" for token in completion.tokens]
    from_draft = [token.from_draft for token in completion.tokens]
    assert [whose in ("accepted", "copied") for _, whose, _ in tokens] == from_draft
    whose = [whose for _, whose, _ in tokens]
    assert whose.count("bonus") == completion.statistics.bonus > 0
    assert {"accepted", "recovered", "bonus"} <= set(whose) <= {"accepted", "recovered", "bonus", "plain"}


def test_a_round_lists_its_events_in_order():
    events, _ = simulate(generated([5, 6, 7], max_tokens=60, lookahead=4))
    (session,) = data_for(events)["sessions"]
    assert [round["round"] for round in session["rounds"]] == list(range(len(session["rounds"])))
    for round in session["rounds"][:-1]:
        kind, began, ended, others = round["work"]
        assert (kind, others) == ("verify", [])
        assert round["proposedAt"] <= began < ended <= round["committedAt"] <= round["answeredAt"]
        assert isinstance(round["hit"], bool)
    assert "hit" not in session["rounds"][-1]


def test_pieces_add_up_to_the_text_also_where_a_character_is_spread_over_tokens(tmp_path):
    tokenizer = demo()
    text = "a = 'äöü €…'  # 日本語\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    commits = [Commit(0, i, i, (id,), 0) for i, id in enumerate(ids)]
    events: list[Event] = [Instant("target", "open", 0, 0.0, tokens=(1,))]
    events += [Instant("target", "verdict", 0, 1.0 + c.round, c.round, commit=c) for c in commits]
    (session,) = data_for(events, tokenizer)["sessions"]
    pieces = [piece for round in session["rounds"] for piece, _, _ in round["tokens"]]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "" in pieces  # some character took more than one token


@pytest.mark.parametrize(("stop_reason", "last"), [("the end", " w4"), (4, ""), (None, "")])
def test_a_stop_strings_last_token_is_text_a_stop_token_none(stop_reason, last):
    commit = Commit(0, 0, 1, (3, 4), 1, finish_reason="stop", stop_reason=stop_reason)
    events = [Instant("target", "open", 0, 0.0, tokens=(1,)), Instant("target", "verdict", 0, 1.0, 0, commit=commit)]
    (session,) = data_for(events, Words())["sessions"]
    assert [piece for round in session["rounds"] for piece, _, _ in round["tokens"]] == [" w3", last]


def test_busy_is_what_was_worked_until_the_text_was_there():
    events = [
        Instant("target", "open", 0, 0.0),
        Span("target", "verify", 0, 1.0, 3.0, round=0),
        Instant("target", "verdict", 0, 3.0, commit=Commit(0, 0, 1, (7,), 0)),
        Span("target", "verify", 0, 3.0, 9.0, round=1),  # the stream was cancelled meanwhile
        Span("draft", "draft", 0, 2.0, 4.0),
    ]
    (session,) = data_for(events)["sessions"]
    assert session["summary"]["targetBusy"] == pytest.approx(2 / 3)
    assert session["summary"]["draftBusy"] == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def shared() -> tuple[list[Event], list[runtime.Completion]]:
    """Three streams that share passes."""
    uses = [generated(prompt, max_tokens=30, lookahead=3) for prompt in ([5, 6, 7], [9, 8], [1, 2, 3, 4])]
    return simulate(*uses, price=priced(prefill=0.25, draft=0.03125, verify=0.5, decode=0.5))


def test_a_pass_that_streams_share_is_one_span_with_the_part_of_each(shared):
    events, _ = shared
    passes = [event for event in events if isinstance(event, Span) and event.shares and event.kind != "prefill"]
    spans = [span for span in data_for(events)["spans"] if span[1] != "prefill"]
    # A span of the drafter has one more item before its parts.
    for actor, name, kind, num_items in ((0, "target", "verify", 7), (1, "draft", "draft", 8)):
        found = [span for span in spans if span[0] == actor and len(span) > num_items]
        expected = [span for span in passes if span.actor == name]
        assert len(found) == len(expected) > 3
        for [_, *facts, parts], span in zip(found, expected, strict=True):
            assert (facts[0], facts[1], facts[4], facts[5]) == (kind, None, span.num_tokens, None)
            assert parts == [[share.session, share.round, share.num_tokens] for share in span.shares]


def test_each_stream_has_the_passes_that_it_shared_among_its_own(shared):
    events, completions = shared
    for session, completion in zip(data_for(events)["sessions"], completions, strict=True):
        statistics, summary = completion.statistics, session["summary"]
        assert all("work" in round for round in session["rounds"])
        assert len(session["rounds"]) == statistics.rounds == statistics.pass_rows
        assert summary["rowsPerPass"] == pytest.approx(statistics.rows_per_pass)
        assert summary["rowsPerPass"] > 1
        assert summary["targetBusy"] == pytest.approx(statistics.target_busy)
        beside = {other for round in session["rounds"] for other in round["work"][3]}
        assert beside
        assert beside <= {0, 1, 2} - {session["id"]}


def test_a_draft_says_how_much_of_it_cost_nothing():
    events = [
        Instant("target", "open", 0, 0.0),
        Span("target", "verify", 0, 1.0, 3.0),
        Span("target", "verify", 1, 3.0, 4.0),
        *[Span("draft", "draft", 0, *when) for when in [(0.0, 1.0), (1.5, 2.0), (2.5, 3.5), (3.5, 4.5), (5.0, 6.0)]],
    ]
    data = data_for(events)
    assert [span[7] for span in data["spans"] if span[0] == 1] == [0, 1, 1, 0.5, 0]


def test_a_round_in_which_the_drafter_was_idle_is_no_miss():
    events: list[Event] = [Instant("target", "open", 0, 0.0), Instant("draft", "open", 0, 0.0)]
    for round, (proposed, drafts) in enumerate([((5,), True), ((), True), ((), False), ((5,), False), ((), False)]):
        events.append(Instant("draft", "proposal", 0, round + 0.1, round, len(proposed), proposed))
        if drafts:
            events.append(Span("draft", "draft", 0, round + 0.2, round + 0.3, 1, round))
        events.append(Span("target", "verify", 0, round + 0.2, round + 0.5, 1, round))
        events.append(Instant("target", "verdict", 0, round + 0.5, round, commit=Commit(0, round, round, (7,), 0)))
        events.append(Instant("draft", "hit" if round == 4 else "miss", 0, round + 0.6, round))
    data = data_for(events)
    (session,) = data["sessions"]
    assert [round.get("hit") for round in session["rounds"]] == [False, False, None, False, True]
    assert (session["summary"]["hits"], session["summary"]["misses"]) == (1, 3)
    assert [instant[4] for instant in data["instants"] if instant[1] == "miss"] == [0, 1, 3]


def test_the_times_in_which_the_drafter_was_away_are_told_with_why():
    def verdict(at: float, round: int, *, resting: bool = False) -> Instant:
        return Instant("target", "verdict", 0, at, round, commit=Commit(0, round, round, (7,), 0, resting=resting))

    until_it_rests = [
        Instant("target", "open", 0, 0.0),
        Instant("draft", "open", 0, 0.0),
        Instant("draft", "proposal", 0, 2.0, 0, 1, (9,)),
        verdict(3.0, 0),
        Instant("draft", "rest", 0, 3.0, 1),
    ]
    events = [
        *until_it_rests,
        Span("target", "decode", 0, 3.0, 4.0, 1, 1),
        verdict(4.0, 1, resting=True),
        Instant("draft", "proposal", 0, 4.0, 2, 1, (9,)),
        verdict(5.0, 2),
        Instant("target", "overdue", 0, 5.5, 3),
        Instant("target", "constructor", 0, 5.75, 3),  # of an unknown kind
        Span("target", "decode", 0, 5.5, 6.5, 1, 3),
        verdict(6.5, 3),
        Instant("target", "rejoin", 0, 6.5, 4),
        verdict(8.0, 4),
    ]
    (session,) = data_for(events)["sessions"]
    assert session["away"] == [[3_000_000, 4_000_000, "resting"], [5_500_000, 6_500_000, "overdue"]]
    assert [round["resting"] for round in session["rounds"]] == [False, True, False, False, False]
    assert session["summary"]["alone"] == 2
    (session,) = data_for([*until_it_rests, Instant("draft", "withdraw", 0, 3.5, 1)])["sessions"]
    assert session["away"] == [[3_000_000, 3_500_000, "resting"], [3_500_000, 3_500_000, "left"]]


def test_a_stream_that_nobody_drafts_for_says_so(several):
    drafted, _, plain = data_for(several)["sessions"]
    assert "none" not in [why for *_, why in drafted["away"]]
    assert plain["away"] == [[plain["began"], plain["ended"], "none"]]


def test_a_cancelled_stream_says_so_and_keeps_its_tokens(several):
    cancelled = data_for(several)["sessions"][1]
    assert cancelled["end"] == "cancel"
    assert len([token for round in cancelled["rounds"] for token in round.get("tokens", ())]) >= 13


def test_a_tokenizer_that_fails_costs_the_texts_only(caplog):
    class Broken:
        def decode(self, ids: Sequence[int]) -> str:
            raise RuntimeError("no such word")

    events, _ = simulate(generated([5, 6], max_tokens=5))
    assert data_for(events, Broken()) == data_for(events)
    assert "no such word" in caplog.text


@pytest.mark.slow
async def test_while_texts_are_made_other_tasks_have_their_turn(long):
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        await texts_of(long, Words())
        nursery.cancel_scope.cancel()
    assert turns >= 2 * LONG // TOKENS_PER_CHECKPOINT


# --- text stays text ------------------------------------------------------------------------------


class Scripts(html.parser.HTMLParser):
    """The scripts of a page, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self._is_inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self._is_inside = True
            self.found.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = self._is_inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            attributes, before = self.found[-1]
            self.found[-1] = attributes, before + data


def nasty() -> list[Event]:
    """A prompt and a text with markup that would run a script if it were not escaped."""
    commit = Commit(0, 0, 3, (0, 1), 1, finish_reason="length")
    return [
        Instant("target", "open", 0, 0.0, tokens=(0, 1)),
        Instant("draft", "proposal", 0, 1.0, 0, 1, (0,)),
        Span("target", "verify", 0, 1.0, 2.0, 2, 0),
        Instant("target", "verdict", 0, 2.0, 0, 1, commit=commit),
        Instant("draft", "<img src=x onerror=alert(1)>", 0, 2.0),
    ]


def test_no_text_breaks_out_of_the_page():
    page = page_for(nasty(), Words(BREAKOUT, "</SCRIPT >"))
    scripts = Scripts(page)
    assert scripts.tags == Scripts(page_for([])).tags
    (attributes, data), (_, code) = scripts.found
    assert attributes == {"type": "application/json", "id": "data"}
    assert json.loads(data)["sessions"][0]["prompt"] == BREAKOUT + "</SCRIPT >"
    # The data contains no character that can begin a tag or a comment.
    assert not set("<>&") & set(data)
    assert "broken" not in code


def test_the_place_of_the_data_is_not_looked_for_in_the_data():
    events = [Instant("target", "open", 0, 0.0, tokens=(0,))]
    scripts = Scripts(page_for(events, Words(DATA_PLACEHOLDER)))
    assert json.loads(scripts.found[0][1])["sessions"][0]["prompt"] == DATA_PLACEHOLDER


def test_the_page_asks_nothing_of_any_network():
    page = page_for([])
    asking = r"(https?:)?//[a-z]|url\(|@import|\ssrc\s*=|\shref\s*=|fetch\(|XMLHttpRequest|import\("
    assert re.search(asking, page) is None
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy[1].startswith("default-src 'none';")


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(started: Browser, tmp_path: Path) -> Callable[..., Any]:
    """Opens a page, and returns what a script returns in it."""
    return lambda page, script, **options: browser.visit(started, page, script, tmp_path, **options)


@in_a_browser
def test_a_browser_takes_no_text_for_markup(visit):
    words = Words(BREAKOUT, "</SCRIPT >")
    said = visit(
        page_for(nasty(), words),
        """key(lanes, "]"); key(lanes, "ArrowDown"); key(lanes, "ArrowDown"); key(lanes, "]");
        hover(document.querySelector("#text .t"));
        return { title: document.title, prompt: document.querySelector(".prompt").textContent,
                 marked_up: document.querySelectorAll("main b:not(#tip b, .guesses b), main img").length,
                 details: $("details").textContent, legend: $("legend").textContent };""",
    )
    assert said["title"] == "Outrider timeline"
    assert said["prompt"] == words.decode([0, 1])
    assert said["marked_up"] == 0
    assert "</script>" in said["details"]
    # An unknown kind is shown by its name.
    assert "<img src=x onerror=alert(1)>" in said["legend"]


@in_a_browser
def test_a_browser_shows_the_text_the_round_of_a_token_and_the_tokens_of_a_round(several, visit):
    said = visit(
        page_for(several, Words()),
        """const words = { text: $("text").textContent, of: $("of").textContent,
                           classes: [...document.querySelectorAll("#text .t")].map((t) => t.classList[1]) };
        const lit = () => [...document.querySelectorAll(".t.round")].map((t) => Number(t.dataset.i)), out = { words };
        const token = document.querySelectorAll("#text .t")[20];
        hover(token);
        out.token = { round: view().round, lit: lit(), tip: $("tip").textContent, details: $("details").textContent };
        send($("text"), new MouseEvent("mouseleave"));
        out.left = { round: view().round, lit: lit(), hidden: $("tip").hidden };
        const r = data.sessions[0].rounds[5];
        $("rounds").click(); key(lanes, "0");
        const x = place((r.work[1] + r.work[2]) / 2);
        pointer("pointermove", x, 70);
        out.verify = { round: view().round, lit: lit(), tip: $("tip").textContent };
        pointer("pointerdown", x, 70); pointer("pointerup", x, 70); pointer("pointerleave", x, 70);
        out.kept = { round: view().round };
        key(lanes, "Escape");
        out.let_go = { round: view().round };
        return out;""",
    )
    session = data_for(several, Words())["sessions"][0]
    rounds = session["rounds"]
    tokens = [token for round in rounds for token in round["tokens"]]
    assert said["words"]["text"] == session["prompt"] + "".join(piece for piece, _, _ in tokens)
    assert said["words"]["classes"] == [whose for _, whose, _ in tokens]
    assert said["words"]["of"].startswith("60 tokens after a prompt of 3")
    ends = list(itertools.accumulate(len(round["tokens"]) for round in rounds))
    of_token = next(i for i, end in enumerate(ends) if end > 20)
    assert said["token"]["round"] == str(of_token)
    assert said["token"]["lit"] == list(range(ends[of_token - 1], ends[of_token]))
    assert f"round {of_token}" in said["token"]["tip"]
    assert f"Round {of_token}" in said["token"]["details"]
    assert said["left"] == {"round": "", "lit": [], "hidden": True}
    assert said["verify"]["round"] == "5"
    assert said["verify"]["lit"] == list(range(ends[4], ends[5]))
    assert "verify of round 5" in said["verify"]["tip"]
    assert said["kept"]["round"] == "5"
    assert said["let_go"]["round"] == ""


@in_a_browser
def test_a_browser_draws_of_a_long_text_only_what_is_in_view(long, visit):
    script = "const all = view().drawn; $('rounds').click(); frame(); return [all, view().drawn];"
    drawn, in_view = visit(page_for(long), script)
    assert drawn > 1.5 * LONG
    assert 12 < in_view < 200
