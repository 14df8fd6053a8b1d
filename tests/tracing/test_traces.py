"""Traces in files: Chrome trace JSON that is complete however the runtime ends, and recorders that delay nothing."""

import contextlib
import functools
import itertools
import json
import re
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from command_line import ran
from completions import open_and_close
from greedy_pair import drafter, target
from models import greedy, prompt_of
from scripted import ScriptedModel, Simulation, agreeing, priced, run, simulated, text_of, truthful
from sweeps import sweep

import runtime
import runtime.tracing.trace_files
from protocol.session_state import Commit
from protocol.trace import Event, Instant, Span
from runtime.cli import generate_command
from runtime.cli import main as cli
from runtime.tracing.trace_files import ChromeFile, ChromeTrace, TimelineFile

needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="macOS has no disk that is always full")

Entry = dict[str, Any]
TARGET, DRAFT, FIRST_STREAM = 1, 2, 16


def written(events: Iterable[Event]) -> str:
    """The whole text of a trace of these events."""
    trace = ChromeTrace()
    return "".join([trace.add(event) for event in events]) + trace.end()


def of(entries: Sequence[Entry], phase: str, name: str | None = None) -> list[Entry]:
    return [entry for entry in entries if entry["ph"] == phase and name in (None, entry["name"])]


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def assert_in_order(entries: Sequence[Entry]) -> None:
    """Assert that every entry has the fields of the format, and that entries of a lane do not overlap."""
    lanes = defaultdict(list)
    for entry in entries:
        assert {"name", "ph", "ts", "pid", "tid"} <= set(entry)
        assert isinstance(entry["ts"], (int, float))
        if entry["ph"] == "X":
            assert entry["dur"] >= 0
            begins = nanoseconds(entry["ts"])
            lanes[entry["pid"], entry["tid"]].append((begins, begins + nanoseconds(entry["dur"])))
    for spans in lanes.values():
        spans.sort()
        for (_, ended), (began, _) in itertools.pairwise(spans):
            assert ended <= began
    named = {entry["tid"] for entry in of(entries, "M", "thread_name")}
    assert {lane for _, lane in lanes} <= named


def assert_flows_pair_up(entries: Sequence[Entry]) -> None:
    """Assert that each flow leads from a proposal to the verify of the same round and session."""
    begins = {flow["id"]: flow for flow in of(entries, "s")}
    ends = {flow["id"]: flow for flow in of(entries, "f")}
    assert begins.keys() == ends.keys()
    assert len(begins) == len(of(entries, "s")) == len(of(entries, "f"))
    proposals, verifies = of(entries, "X", "proposal"), of(entries, "X", "verify")
    assert len(begins) == len(proposals)
    for id, begin in begins.items():
        end = ends[id]
        (proposal,) = [p for p in proposals if (p["tid"], p["ts"]) == (begin["tid"], begin["ts"])]
        (verify,) = [v for v in verifies if (v["tid"], v["ts"]) == (end["tid"], end["ts"])]
        assert end["bp"] == "e"
        facts, session = verify["args"], proposal["args"]["session"]
        rounds = {facts["session"]: facts["round"]} if "session" in facts else {}
        rounds |= {int(name.split()[1]): share["round"] for name, share in facts.get("shares", {}).items()}
        assert rounds[session] == proposal["args"]["round"]


async def a_bit_of_everything(simulation: Simulation) -> None:
    """Concurrent streams, one that is cancelled, one without drafts, and one after the others."""

    async def cancelled() -> None:
        stream = simulation.runtime.stream([9, 8, 7], max_tokens=200, lookahead=4)
        async for token in stream:
            if token.index == 9:
                break
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(text_of, simulation, [5, 6, 7], max_tokens=40, lookahead=4))
        nursery.start_soon(cancelled)
        nursery.start_soon(functools.partial(text_of, simulation, [1, 2], max_tokens=8, lookahead=0))
    await text_of(simulation, [3, 4], max_tokens=12, lookahead=3)


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """The events of `a_bit_of_everything`, with a drafter that is right three times in four."""

    async def main() -> list[Event]:
        price = priced(prefill=0.25, draft=0.03125, verify=0.125, decode=0.125)
        async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.75)), price=price) as simulation:
            await a_bit_of_everything(simulation)
        return simulation.events

    happened: list[Event] = run(main)
    return happened


@pytest.fixture(scope="module")
def entries(events: list[Event]) -> list[Entry]:
    """Their trace."""
    found: list[Entry] = json.loads(written(events))
    return found


# --- contents -------------------------------------------------------------------------------------


def test_every_entry_has_its_place_and_no_two_spans_of_a_lane_overlap(entries):
    assert_in_order(entries)
    assert {e["tid"]: e["args"]["name"] for e in of(entries, "M", "thread_name") if e["tid"] < FIRST_STREAM} == {
        TARGET: "target",
        DRAFT: "draft",
    }


def test_every_span_and_instant_is_there_with_its_facts(events, entries):
    spans = [event for event in events if isinstance(event, Span)]
    shown = [e for e in of(entries, "X") if e["tid"] < FIRST_STREAM]
    assert [(e["cat"], e["name"], e["args"].get("session"), e["args"].get("tokens", 0)) for e in shown] == [
        (span.actor, span.kind, span.session, span.num_tokens) for span in spans
    ]
    assert [(nanoseconds(e["ts"]), nanoseconds(e["dur"])) for e in shown] == [
        (round(span.began * 1e9), round(span.ended * 1e9) - round(span.began * 1e9)) for span in spans
    ]
    instants = [event for event in events if isinstance(event, Instant)]
    assert [(e["name"], e["args"]["round"], nanoseconds(e["ts"])) for e in of(entries, "i")] == [
        (instant.kind, instant.round, round(instant.at * 1e9)) for instant in instants
    ]


def test_a_verdict_says_what_was_committed_and_how_much_of_it_was_drafted(events, entries):
    verdicts = of(entries, "i", "verdict")
    commits = [event.commit for event in events if isinstance(event, Instant) and event.commit is not None]
    assert len(verdicts) == len(commits) > 10
    for verdict, commit in zip(verdicts, commits, strict=True):
        assert verdict["args"]["committed"] == list(commit.tokens)
        assert verdict["args"]["from_draft"] == commit.num_from_draft
        assert verdict["args"].get("finish_reason") == commit.finish_reason


def test_a_flow_leads_from_each_proposal_to_the_verify_that_judged_it(events, entries):
    assert_flows_pair_up(entries)
    rows = [row for event in events if isinstance(event, Span) and event.kind == "verify" for row in event.sessions]
    # A round without a proposal goes along in a pass of others, and has none.
    proposals = of(entries, "i", "proposal")
    assert 10 < len(of(entries, "s")) <= min(len(rows), len(proposals))


def test_a_pass_that_streams_share_is_one_entry_with_the_part_of_each(events, entries):
    shared = [event for event in events if isinstance(event, Span) and event.shares]
    shown = [e for e in of(entries, "X") if "shares" in e["args"]]
    assert len(shown) == len(shared)
    assert min(Counter(span.actor for span in shared).values()) > 3
    kinds = {(entry["cat"], entry["name"]) for entry in shown}
    assert kinds == {("target", "prefill"), ("target", "verify"), ("draft", "draft")}
    for entry, span in zip(shown, shared, strict=True):
        assert (entry["cat"], entry["tid"]) == (span.actor, {"target": 1, "draft": 2}[span.actor])
        assert "session" not in entry["args"]
        assert entry["args"]["sessions"] == len(span.shares)
        assert entry["args"]["shares"] == {
            f"session {share.session}": {"round": share.round, "tokens": share.num_tokens} for share in span.shares
        }


def test_counters_show_what_came_of_each_round(events, entries):
    counters = of(entries, "C")
    commits = [event.commit for event in events if isinstance(event, Instant) and event.commit is not None]
    assert (
        sum(counter["args"][by_whom] for counter in counters for by_whom in ("accepted", "copied", "forced"))
        == sum(c.num_from_draft for c in commits)
        > 0
    )
    assert sum(counter["args"]["rejected"] for counter in counters) == sum(c.num_rejected for c in commits) > 0


def test_streams_at_once_have_lanes_of_their_own_and_later_ones_take_them_over(entries):
    sessions = defaultdict(set)
    for proposal in of(entries, "X", "proposal"):
        sessions[proposal["tid"]].add(proposal["args"]["session"])
    # Three at once, and then a fourth on the lane of one of them. One of the three has no drafts.
    drafted = {e["args"]["session"] for e in of(entries, "i", "proposal")}
    assert len(drafted) == 3
    assert sorted(session for lane in sessions.values() for session in lane) == sorted(drafted)
    assert set(sessions) <= {FIRST_STREAM, FIRST_STREAM + 1, FIRST_STREAM + 2}
    at_once = [session for session in drafted if session != max(drafted)]
    assert len([lane for lane in sessions.values() if lane & set(at_once)]) == len(at_once)
    names = Counter(entry["tid"] for entry in of(entries, "M", "thread_name"))
    assert set(names.values()) == {1}


def test_a_kind_that_nobody_has_heard_of_is_written_like_any_other():
    entries = json.loads(written([Instant("draft", "daydream", 3, 1.5, round=7, num_tokens=2)]))
    (shown,) = of(entries, "i")
    assert (shown["name"], shown["tid"], shown["args"]) == ("daydream", DRAFT, {"session": 3, "round": 7, "tokens": 2})


def test_cut_off_after_any_event_it_lacks_nothing_but_its_end(events):
    trace, text = ChromeTrace(), ""
    for event in events:
        text += trace.add(event)
        assert text.count("\n") == text.rstrip("\n").count("\n")
        # A killed process leaves the file like this; readers of the format supply the bracket. A proposal that was not
        # judged until then has no flow.
        assert_flows_pair_up(json.loads(text + "]"))


# --- how a span and an instant come by their facts ------------------------------------------------


async def test_events_name_the_tokens_of_prompt_proposals_and_text(autojump_clock):
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.75))) as simulation:
        text = await text_of(simulation, [5, 6, 7], max_tokens=30, lookahead=4)
    assert {instant.tokens for instant in simulation.instants("open")} == {(5, 6, 7)}
    commits = [instant.commit for instant in simulation.instants("verdict")]
    assert [token for commit in commits if commit is not None for token in commit.tokens] == text
    for proposal, commit in zip(simulation.instants("proposal"), commits, strict=True):
        assert isinstance(commit, Commit)
        assert len(proposal.tokens) == proposal.num_tokens
        assert proposal.tokens[: commit.num_from_draft] == commit.tokens[: commit.num_from_draft]


# --- files ----------------------------------------------------------------------------------------


def whole(path: Path) -> list[Entry]:
    """The entries of a file; asserts that all spans of the workers are there."""
    entries: list[Entry] = json.loads(path.read_text(encoding="utf-8"))
    assert_in_order(entries)
    assert_flows_pair_up(entries)
    opened = Counter((e["tid"], e["args"]["session"]) for e in of(entries, "X", "open"))
    closed = Counter((e["tid"], e["args"]["session"]) for e in of(entries, "X", "close"))
    assert opened == closed
    return entries


async def test_a_path_gets_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    async with runtime.open((target(), None), (drafter(), None), trace=str(path)) as rt:
        completion = await rt.generate(prompt_of(8), max_tokens=30, lookahead=3)
    entries = whole(path)
    verifies = of(entries, "X", "verify")
    assert len(verifies) == len(of(entries, "s")) == completion.statistics.rounds
    committed = [token for verdict in of(entries, "i", "verdict") for token in verdict["args"]["committed"]]
    assert committed == [token.id for token in completion.tokens]


def text_on(page: Path) -> str:
    """The generated text of all streams on a timeline page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    rounds = [round for session in json.loads(found[1])["sessions"] for round in session["rounds"]]
    return "".join(piece for round in rounds for piece, _, _ in round.get("tokens", ()))


@sweep("name", ["page.html", "PAGE.HTM"])
async def test_a_path_of_a_page_gets_the_page(name, tmp_path):
    async with runtime.open(runtime.DEMO_DRAFT, trace=tmp_path / name) as rt:
        completion = await rt.generate("def f(x):", max_tokens=4)
    assert text_on(tmp_path / name) == completion.text


class Striking(Exception):
    pass


async def after(num_tokens: int, rt: runtime.Runtime, do: Callable[[], object]) -> None:
    async for token in rt.stream(prompt_of(8), max_tokens=None, lookahead=3):
        if token.index == num_tokens:
            do()


@sweep(("strikes", "raises"), [("cancellation", None), ("error", Striking), ("interrupt", KeyboardInterrupt)])
def test_however_a_runtime_is_left_its_trace_is_whole(strikes, raises, tmp_path):
    async def main() -> None:
        def strike() -> None:
            if strikes == "cancellation":
                scope.cancel()
            elif strikes == "error":
                raise Striking
            else:
                signal.raise_signal(signal.SIGINT)

        with trio.CancelScope() as scope:
            async with runtime.open((target(), None), (drafter(), None), trace=tmp_path / "trace.json") as rt:
                await after(20, rt, strike)
        assert scope.cancelled_caught

    with pytest.raises(raises) if raises else contextlib.nullcontext():
        trio.run(main)
    assert len(of(whole(tmp_path / "trace.json"), "X", "verify")) > 2


def test_an_interrupt_while_the_end_is_written_waits_for_it(tmp_path):
    """The signal comes from the thread that writes the end, while the main task waits for nothing else."""

    class Interrupted(ChromeFile):
        def _put(self, text: str) -> None:
            if text.endswith("]\n"):
                signal.raise_signal(signal.SIGINT)
            super()._put(text)

    recorder = Interrupted(tmp_path / "trace.json")

    async def main() -> None:
        try:
            async with recorder:
                pass
        finally:
            assert recorder._ended.is_set()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    whole(tmp_path / "trace.json")


async def test_a_model_that_cannot_be_loaded_leaves_a_whole_trace(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(runtime.ModelError):
        await open_and_close(tmp_path / "model", trace=tmp_path / "trace.json")
    assert of(whole(tmp_path / "trace.json"), "X", "load")


@sweep(
    ("path", "reason"),
    [
        ("/no/such/directory/trace.json", "No such file or directory"),
        (Path("/"), "Is a directory"),
        ("", "Is a directory"),
        ("a\0b", "null"),
        ("/no/such/directory/page.html", "No such file or directory"),
    ],
)
async def test_a_path_that_cannot_be_written_is_a_settings_error_before_any_model_work(path, reason, tmp_path):
    # Opening this model would raise a ModelError.
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(runtime.SettingsError, match=reason) as refusal:
        await open_and_close(tmp_path, trace=path)
    assert "directory that exists" in str(refusal.value)


@sweep("trace", [7, b"trace.json", ["trace.json"], True])
async def test_what_is_neither_a_function_nor_a_path_is_a_settings_error(trace):
    with pytest.raises(runtime.SettingsError, match="a function of one event or the path of a file"):
        await open_and_close((target(), None), trace=trace)


# --- recorders ------------------------------------------------------------------------------------


def moments(count: int) -> list[Event]:
    return [Instant("draft", "miss", 0, float(i)) for i in range(count)]


async def test_chunks_make_the_same_text_as_one_go(events, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.tracing.trace_files, "EVENTS_PER_WRITE", 7)
    async with ChromeFile(tmp_path / "trace.json") as recorder:
        for event in events:
            recorder(event)
            await trio.lowlevel.checkpoint()
    assert (tmp_path / "trace.json").read_text() == written(events)


class Held(ChromeFile):
    """A disk that blocks until it is released, or until the recorder exits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.let_go = threading.Event()

    async def __aexit__(self, *error: Any) -> None:
        self.let_go.set()
        await super().__aexit__(*error)

    def _put(self, text: str) -> None:
        self.let_go.wait()
        super()._put(text)


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.tracing.trace_files, "EVENTS_PER_WRITE", 8)
    async with Held(tmp_path / "trace.json") as recorder:
        async with runtime.open((target(), None), (drafter(), None), trace=recorder) as rt:
            completion = await rt.generate(prompt_of(8), max_tokens=60)
        assert len(completion.tokens) == 60
        assert recorder._is_writing
    whole(tmp_path / "trace.json")


async def test_a_hanging_disk_bounds_what_waits_and_says_what_is_lost(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(runtime.tracing.trace_files, "EVENTS_PER_WRITE", 8)
    monkeypatch.setattr(ChromeFile, "max_events", 20)
    async with Held(tmp_path / "trace.json") as recorder:
        for event in moments(8):
            recorder(event)
        await trio.testing.wait_all_tasks_blocked()
        for event in moments(50):
            recorder(event)
        assert len(recorder._events) == 20
    assert len(of(json.loads((tmp_path / "trace.json").read_text()), "i")) == 28
    assert [record.getMessage() for record in caplog.records] == [
        f"the trace in {tmp_path / 'trace.json'} lacks 30 events, which were too many for it"
    ]


@pytest.mark.slow
@sweep("kind", [ChromeFile, TimelineFile])
@sweep(
    ("call", "at", "error", "reason"),
    [
        ("write", 1, OSError(28, "No space left on device"), "No space left on device"),
        ("write", 2, OSError("gone"), "gone"),
        ("close", 1, OSError("gone"), "gone"),
    ],
)
async def test_a_disk_that_fails_at_any_moment_costs_the_trace_alone(
    kind: Any, call: str, at: int, error: OSError, reason: str, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(runtime.tracing.trace_files, "EVENTS_PER_WRITE", 8)

    class Failing(kind):
        num_writes = 0

        def _put(self, text: str) -> None:
            self.num_writes += 1
            if call == "write" and self.num_writes >= at:
                raise error
            super()._put(text)

        async def _close(self) -> None:
            await super()._close()
            if call == "close":
                raise error

    models = target(), drafter()
    async with Failing(tmp_path / "trace") as recorder:
        async with runtime.open((models[0], None), (models[1], None), trace=recorder) as rt:
            completion = await rt.generate(prompt_of(8), max_tokens=30)
        assert [token.id for token in completion.tokens] == greedy(models[0], prompt_of(8), 30)
    # A page is written in one go.
    is_met = at == 1 or kind is ChromeFile
    expected = [f"the trace in {tmp_path / 'trace'} is not whole: {reason}"] if is_met else []
    assert [record.getMessage() for record in caplog.records] == expected
    assert recorder._file.closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outrider")]


async def test_a_recorder_ends_though_all_of_trios_threads_are_taken(tmp_path):
    limiter = trio.to_thread.current_default_thread_limiter()
    tokens, limiter.total_tokens = limiter.total_tokens, 1
    await limiter.acquire_on_behalf_of("somebody")
    try:
        with trio.fail_after(60):
            async with ChromeFile(tmp_path / "trace.json"):
                pass
    finally:
        limiter.release_on_behalf_of("somebody")
        limiter.total_tokens = tokens
    whole(tmp_path / "trace.json")


async def test_a_page_goes_only_so_far(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TimelineFile, "max_events", 10)
    async with TimelineFile(tmp_path / "page.html") as recorder:
        for event in [Instant("target", "open", 0, 0.0, tokens=(1,)), *moments(12)]:
            recorder(event)
    assert '"lost":3' in (tmp_path / "page.html").read_text()
    assert "lacks 3 events" in caplog.text


# --- the command line -----------------------------------------------------------------------------


def test_the_command_line_writes_both_files(endless, tmp_path, capfd):
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    written = ["--trace", str(trace), "--timeline", str(page)]
    out, err = ran(capfd, "generate", "w1 w2", "--target", endless, "--max-tokens", "6", *written)
    assert err == "outrider: the text was cut off after 6 tokens; raise --max-tokens for more\n"
    verdicts = of(whole(trace), "i", "verdict")
    assert sum(len(verdict["args"]["committed"]) for verdict in verdicts) == 6
    assert text_on(page) == out


@pytest.mark.parametrize("option", ["--trace", "--timeline"])
def test_an_unwritable_file_is_refused_before_any_model_is_looked_for(option, capfd):
    arguments = ["generate", "a", "--target", "/no/such/model", option, "/no/such/directory/file"]
    assert ran(capfd, *arguments, status=2) == (
        "",
        "outrider: error: the trace cannot be written to '/no/such/directory/file': No such file or directory; name a "
        "file in a directory that exists and can be written\n",
    )


def test_a_signal_leaves_whole_files(endless, tmp_path, monkeypatch, capfd):
    class Interrupted(runtime.terminal.display.Display):
        def on_event(self, event: Event) -> None:
            if isinstance(event, Instant) and event.kind == "verdict" and event.round == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate_command, "Display", Interrupted)
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    models = ["--target", endless, "--draft", endless, "--lookahead", "3"]
    assert cli.main(["generate", "w1 w2", *models, "--trace", str(trace), "--timeline", str(page)]) == 130
    entries = whole(trace)
    assert len(of(entries, "X", "verify")) >= 4
    assert of(entries, "i", "cancel")
    assert page.read_text(encoding="utf-8").endswith("</html>\n")


@needs_dev_full
def test_a_full_disk_is_a_warning_after_the_text(endless, capfd):
    out, err = ran(capfd, "generate", "w1 w2", "--target", endless, "--max-tokens", "3", "--trace", "/dev/full")
    assert out
    assert err == (
        "outrider: warning: the trace in /dev/full is not whole: No space left on device\n"
        "outrider: the text was cut off after 3 tokens; raise --max-tokens for more\n"
    )
