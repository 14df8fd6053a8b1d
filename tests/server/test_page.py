"""The page of `outrider serve`, in a real browser, before a server that does what a test says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from scripted_server import Exchange, ScriptedServer
from visitors import Open, Tab

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def writing(tab: Tab, server: ScriptedServer, prompt: str = "Once", *words: Any) -> Exchange:
    """An answer that is being written."""
    exchange = begun(tab, server, prompt)
    exchange.write(*(words or (" upon",)))
    tab.expect_state("writing")
    return exchange


def begun(tab: Tab, server: ScriptedServer, prompt: str = "Once") -> Exchange:
    """An answer whose head was sent."""
    tab.ask(prompt)
    exchange = server.next()
    exchange.start()
    return exchange


def written(tab: Tab, server: ScriptedServer, prompt: str = "Once", *words: Any) -> Exchange:
    """An answer that is over."""
    exchange = writing(tab, server, prompt, *words)
    exchange.finish()
    tab.expect_state("done")
    return exchange


# --- the text -------------------------------------------------------------------------------------


def test_what_somebody_wrote_stays_text(opened: Open, server: ScriptedServer) -> None:
    nasty = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>&amp;"
    server.model |= {"id": nasty, "draft": nasty}
    tab = opened()
    exchange = writing(tab, server, nasty, (nasty, "drafted"))
    tab.expect_text(nasty * 2)
    exchange.event({"error": {"message": nasty}})
    tab.expect_failed(f"{nasty}.")
    assert tab.page.locator("b", has_text="bold").count() == 2  # the names of the models, which are bold
    assert tab.page.locator("img").count() == 0
    assert tab.page.title() == "Outrider"


def test_the_answer_is_copied_as_it_is(opened: Open, server: ScriptedServer) -> None:
    tab = opened(permissions=["clipboard-read", "clipboard-write"])
    line = "x" * 1500 + "\n"
    written(tab, server, "Once", ("hm", "thought"), line, line, "\n", line, " end")
    tab["copy"].click()
    expect(tab["copy"]).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == line * 2 + "\n" + line + " end"


# --- how it comes about ---------------------------------------------------------------------------


def test_the_states_of_an_answer(tab: Tab, server: ScriptedServer) -> None:
    tab.ask("Once")
    tab.expect_state("connecting")
    exchange = server.next()
    exchange.start()
    tab.expect_state("waiting")
    exchange.write(prompt_tokens=1234)
    exchange.stream(b": keep-alive\n\n")
    tab.expect_state("waiting")
    exchange.write(spans=[("target", "prefill", 0.0, 0.5)], prompt_tokens=1234)
    tab.expect_state("reading")
    expect(tab["state-more"]).to_contain_text("1,234 tokens")
    exchange.write(" upon")
    tab.expect_state("writing")
    exchange.finish("length")
    tab.expect_state("done")
    expect(tab["state-more"]).to_have_text("token limit reached")
    expect(tab["stop"]).to_be_hidden()
    assert not server.was_asked


def coloured(tab: Tab, lane: int) -> float:
    """The share of a lane of the strip that is covered by bars."""
    share: float = tab["strip"].evaluate(
        """async (canvas, lane) => {
            await new Promise(requestAnimationFrame);  // by then it is drawn
            const from = Math.round(56 * devicePixelRatio), y = Math.round((3 + 9 + lane * 23) * devicePixelRatio);
            const row = canvas.getContext("2d").getImageData(from, y, canvas.width - from, 1).data;
            let covered = 0;
            for (let i = 0; i < row.length; i += 4) {
                const [red, green, blue] = row.slice(i, i + 3);
                covered += Math.max(red, green, blue) - Math.min(red, green, blue) >= 12;  // what is empty is grey
            }
            return covered / (row.length / 4);
        }""",
        lane,
    )
    return share


def test_the_strip_shows_who_worked_when(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server)
    expect(tab["beside"]).to_have_text("100 % of drafting")
    exchange = begun(tab, server, "Again")
    exchange.write(spans=[("target", "verify", 0.0, 1.0), ("draft", "draft", 0.5, 1.5), ("target", "verify", 1.5, 2.0)])
    exchange.finish()
    tab.expect_state("done")
    expect(tab["beside"]).to_have_text("50 % of drafting")
    expect(tab["waiting"]).to_have_text("50 %")
    expect(tab["all"]).to_have_attribute("aria-pressed", "true")
    assert coloured(tab, 0) == pytest.approx(0.75, abs=0.02)
    assert coloured(tab, 1) == pytest.approx(0.5, abs=0.02)
    expect(tab["strip"]).to_have_attribute(
        "aria-label",
        "Timeline of this answer, 2.0 s: target busy 75 %, drafter busy 50 %; "
        "50 % of drafting went on while the target worked",
    )


# --- ending it ------------------------------------------------------------------------------------


def connecting(tab: Tab, server: ScriptedServer) -> Exchange:
    tab.ask("Once")
    tab.expect_state("connecting")
    return server.next()


def waiting(tab: Tab, server: ScriptedServer) -> Exchange:
    exchange = connecting(tab, server)
    exchange.start()
    tab.expect_state("waiting")
    return exchange


def reading(tab: Tab, server: ScriptedServer) -> Exchange:
    exchange = waiting(tab, server)
    exchange.write(spans=[("target", "open", 0.0, 0.001)])
    tab.expect_state("reading")
    return exchange


moments = pytest.mark.parametrize("under_way", [connecting, waiting, reading, writing])
Moment = Callable[[Tab, ScriptedServer], Exchange]


@moments
def test_stop_ends_it_at_once_and_keeps_what_was_written(tab: Tab, server: ScriptedServer, under_way: Moment) -> None:
    exchange = under_way(tab, server)
    tab["stop"].click()
    # The server has not said a word since.
    assert tab["state"].get_attribute("data-state") == "stopped"
    expect(tab["state-word"]).to_have_text("Stopped")
    exchange.wait_gone()
    tab.expect_text("Once upon" if under_way is writing else "Once")
    expect(tab["stop"]).to_be_hidden()
    expect(tab["prompt"]).to_be_focused()
    expect(tab["problem"]).to_be_hidden()


@moments
def test_a_new_prompt_ends_the_old_answer(tab: Tab, server: ScriptedServer, under_way: Moment) -> None:
    old = under_way(tab, server)
    tab.ask("Twice")
    old.wait_gone()
    new = server.next()
    assert new.body["prompt"] == "Twice"
    new.write(" as much")
    tab.expect_text("Twice as much")
    new.finish()
    tab.expect_state("done")
    tab.expect_text("Twice as much")


def test_an_answer_is_there_when_the_page_is_loaded_again(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server, "Once", ("hm", "thought"), (" upon", "drafted"), (" a", "drafted"), " time")
    exchange.write(" there", drafter=[(0.03, "resting")], proposed=184, accepted=123, prompt_tokens=77)
    exchange.finish("length")
    tab.expect_state("done")

    def seen() -> list[Any]:
        names = ("acceptance", "speed", "tokens", "first", "read", "beside", "state-more")
        words = [tab[name].inner_text() for name in names]
        words += [tab["timeline"].get_attribute("href"), tab["strip"].get_attribute("aria-label")]
        return [tab.runs, words, coloured(tab, 0), coloured(tab, 1)]

    before = seen()
    tab.page.reload()
    tab.expect_state("done")
    expect(tab["models"]).to_be_visible()
    assert seen() == before
    assert not server.was_asked
    writing(tab, server, "Twice", " as much")
    tab.expect_text("Twice as much")
    expect(tab["acceptance"]).to_have_text("0 %0 of 3")


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_full_house_says_when_to_try_again(opened: Open, server: ScriptedServer) -> None:
    tab = opened()  # whose clock is set
    tab.page.clock.install()
    tab.ask("Once")
    # When to try again is said once.
    server.next().refuse(429, "36 answers are under way; try again in 30 s", Retry_After="30")
    tab.expect_failed("36 answers are under way.")
    expect(tab["problem-when"]).to_have_text("Try again in 30 s.")
    tab.page.clock.fast_forward(20_000)
    expect(tab["problem-when"]).to_have_text("Try again in 10 s.")
    tab.page.clock.fast_forward(20_000)
    expect(tab["problem-when"]).to_have_text("Try again now.")
    expect(tab["prompt"]).to_have_value("Once")
    tab["retry"].click()
    expect(tab["prompt"]).to_have_value("")
    exchange = server.next()
    assert exchange.body["prompt"] == "Once"
    expect(tab["problem"]).to_be_hidden()
    exchange.write(" upon")
    tab.expect_text("Once upon")


def test_a_refused_prompt_stays_in_the_box_and_its_refusal_until_it_is_changed(
    tab: Tab, server: ScriptedServer
) -> None:
    tab.ask("Once")
    server.next().refuse(400, "the prompt is too long")
    tab.expect_failed("the prompt is too long.")
    expect(tab["prompt"]).to_have_value("Once")
    expect(tab["answer"]).to_be_hidden()  # or the prompt would stand there twice
    tab["prompt"].focus()
    tab.press("End", "Backspace")
    expect(tab["problem"]).to_be_hidden()
    tab.press("Enter")
    server.next().refuse(400, "max_tokens is too high")
    tab.expect_failed("max_tokens is too high.")
    tab["settings-button"].click()
    tab.page.get_by_label("Max tokens").fill("64")
    expect(tab["problem"]).to_be_hidden()


def test_a_connection_lost_and_an_error_in_mid_answer_keep_the_text(tab: Tab, server: ScriptedServer) -> None:
    for lose in (Exchange.cut, lambda exchange: exchange.send(b"0\r\n\r\n")):
        lose(writing(tab, server))
        tab.expect_failed("The connection was lost in the middle of the answer. The text so far is kept.")
        tab.expect_text("Once upon")
    exchange = writing(tab, server)
    exchange.event({"error": {"message": "the target failed", "type": "server_error", "param": None, "code": None}})
    tab.expect_failed("the target failed.")
    tab.expect_text("Once upon")
    exchange.wait_gone()
    for under_way in (waiting, reading):
        under_way(tab, server).cut()
        tab.expect_failed("The connection was lost before the first word.")


# --- keys, settings, what is kept -----------------------------------------------------------------


def test_a_server_with_a_key_is_asked_with_it(opened: Open, server: ScriptedServer) -> None:
    server.key = "right"
    tab = opened(loaded=False)
    tab.page.goto(server.url)
    expect(tab["key"]).to_be_focused()
    tab.type("wrong")
    tab.press("Enter")
    expect(tab.page.get_by_label("This API key was refused")).to_be_focused()
    tab.type("right")  # in place of the wrong one, which is selected
    tab.press("Enter")
    expect(tab["models"]).to_be_visible()
    expect(tab["key-form"]).to_be_hidden()
    exchange = writing(tab, server)
    assert exchange.headers["Authorization"] == "Bearer right"
    tab.load()
    expect(tab["key-form"]).to_be_hidden()
    kept = "[sessionStorage, localStorage].map((storage) => Object.values(storage).includes('right'))"
    assert tab.page.evaluate(kept) == [True, False]


def test_settings_are_sent_and_remembered(tab: Tab, opened: Open, server: ScriptedServer) -> None:
    tab["settings-button"].click()
    for label, value in (("Max tokens", "64"), ("Temperature", "0.8"), ("Top P", "0.95"), ("Seed", "7")):
        tab.page.get_by_label(label).fill(value)
    tab.page.get_by_label("Stop sequences").fill("\\n\\n\nEnd\\t\\\\")
    expected = {"max_tokens": 64, "temperature": 0.8, "top_p": 0.95, "seed": 7, "stop": ["\n\n", "End\t\\"]}
    expect(tab["chosen"]).to_have_text("64 tokens, temperature 0.8, top p 0.95, seed 7, stop sequences")
    other = opened(tab.page.context)
    for one in (tab, other):
        one.ask("Once")
        exchange = server.next()
        assert {name: exchange.body[name] for name in expected} == expected
    other["settings-button"].click()
    other["reset"].click()
    expect(other["chosen"]).to_have_text("")
    other.ask("Once")
    assert not {"temperature", "top_p", "seed", "stop"} & set(server.next().body)


def test_whatever_was_kept_the_page_begins(tab: Tab, server: ScriptedServer) -> None:
    for kept in ("", "{", "null", "[]", "7", '{"temperature": {}, "seed": "x", "no such": 1}'):
        tab.page.evaluate("kept => localStorage.setItem('outrider.settings', kept)", kept)
        tab.load()
        tab.ask("Once")
        assert set(server.next().body) == {"model", "prompt", "stream", "stream_options"}


# --- the prompt -----------------------------------------------------------------------------------


def test_a_prompt_is_not_sent_empty_or_while_composed(tab: Tab, server: ScriptedServer) -> None:
    for prompt in ("", "  ", "\n"):
        tab.ask(prompt)
        tab["send"].click()
    expect(tab["answer"]).to_be_hidden()
    tab["prompt"].fill("か")
    tab["prompt"].dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(tab["prompt"]).to_have_value("か")
    assert not server.was_asked
    prompt = "def f():\n    return \n"
    tab.ask(prompt)
    assert server.next().body["prompt"] == prompt
    expect(tab["prompt"]).to_have_value("")


# --- for everybody --------------------------------------------------------------------------------


def test_everything_can_be_done_by_keyboard(tab: Tab, server: ScriptedServer) -> None:
    expect(tab["prompt"]).to_be_focused()
    tab.type("Once")
    tab.press("Tab", "Enter")  # opens the settings
    expect(tab["settings"]).to_be_visible()
    tab.press("Tab", "Tab")
    expect(tab["max_tokens"]).to_be_focused()
    tab.press("ControlOrMeta+a")
    tab.type("9")
    tab.press("Escape")
    expect(tab["settings"]).to_be_hidden()
    expect(tab["settings-button"]).to_be_focused()
    tab.press("Shift+Tab", "Enter")
    exchange = server.next()
    assert (exchange.body["prompt"], exchange.body["max_tokens"]) == ("Once", 9)
    exchange.write(" upon")
    tab.expect_state("writing")
    tab.press("Tab", "Tab")
    expect(tab["stop"]).to_be_focused()
    tab.press("Enter")
    exchange.wait_gone()
    tab.expect_state("stopped")
    expect(tab["prompt"]).to_be_focused()
    for control in ("copy", "edit", "timeline", "all"):
        tab.press("Shift+Tab")
        expect(tab[control]).to_be_focused()


def test_states_are_read_out_and_tokens_are_not(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server)
    live = "[...document.querySelectorAll('[aria-live], [role=status], [role=alert], [role=log]')].map(e => e.id)"
    assert tab.page.evaluate(live) == ["said"]
    expect(tab["text"]).to_have_attribute("aria-busy", "true")
    expect(tab["said"]).to_have_text("Writing")
    exchange.finish()
    expect(tab["said"]).to_have_text("Done, end of text, 1 token")
    expect(tab["text"]).to_have_attribute("aria-busy", "false")
    tab.ask("Twice")
    server.next().refuse(429, "full")
    expect(tab["said"]).to_have_text("Failed, full")


def test_every_control_has_a_name(tab: Tab, server: ScriptedServer) -> None:
    written(tab, server)
    tab["settings-button"].click()
    for control in tab.page.locator("button:visible, a:visible, input:visible, textarea:visible, canvas:visible").all():
        named = control.evaluate("e => (e.labels?.[0] ?? e).textContent.trim() || e.getAttribute('aria-label')")
        assert named, control.evaluate("e => e.outerHTML")


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.parametrize("touch", [False, True])
def test_a_phone_is_wide_enough(opened: Open, server: ScriptedServer, width: int, touch: bool) -> None:
    server.model |= {
        "id": "a-publisher/with-a-very-long-name-of-a-model-8B-4bit",
        "draft": "one/with-another-long-name",
    }
    tab = opened(viewport={"width": width, "height": 700}, has_touch=touch, is_mobile=touch)
    assert tab.sideways == 0
    exchange = writing(tab, server, "x" * 300, ("y" * 300, "drafted"), *[" word"] * 500)
    exchange.write(proposed=12345, accepted=9999, generated_tokens=123456, prompt_tokens=123456, generation_tps=1234.5)
    expect(tab["tokens"]).to_have_text("123,456")
    assert tab.sideways == 0
    for control in ("stop", "send", "settings-button", "prompt"):
        expect(tab[control]).to_be_in_viewport(ratio=1)
    expect(tab["state"]).to_be_in_viewport(ratio=1)
    exchange.event({"error": {"message": "no" * 300}})
    tab.expect_state("failed")
    tab["settings-button"].click()
    assert tab.sideways == 0
    expect(tab["send"]).to_be_in_viewport(ratio=1)


CONTRAST = """() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const over = ([r, g, b, a = 1], below) => [r, g, b].map((x, i) => x * a + below[i] * (1 - a));
    const light = (c) => {
        const [r, g, b] = c.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (e) => {
        if (e === null) return [255, 255, 255];
        const colour = channels(getComputedStyle(e).backgroundColor);
        return (colour[3] ?? 1) === 1 ? colour : over(colour, behind(e.parentElement));
    };
    const poor = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let seen = 0;
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest(".hidden, .skip, noscript")) continue;
        seen += 1;
        const below = behind(e), above = over(channels(getComputedStyle(e).color), below);
        const [dark, bright] = [light(above), light(below)].sort((x, y) => x - y);
        const contrast = (bright + 0.05) / (dark + 0.05);
        if (contrast < 4.5) poor.push([walker.currentNode.data.trim(), contrast]);
    }
    return { seen, poor };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read(opened: Open, server: ScriptedServer, scheme: str) -> None:
    tab = opened(color_scheme=scheme)
    assert tab.page.evaluate(CONTRAST)["poor"] == []
    exchange = writing(
        tab, server, "Once", ("hm", "thought"), ("so", "thought drafted"), (" upon", "drafted"), " a time"
    )
    tab["settings-button"].click()
    assert tab.page.evaluate(CONTRAST)["poor"] == []
    exchange.event({"error": {"message": "it failed"}})
    tab.expect_state("failed")
    contrast = tab.page.evaluate(CONTRAST)
    assert contrast["poor"] == []
    assert contrast["seen"] > 30


def test_nothing_moves_for_who_wants_nothing_to(opened: Open, server: ScriptedServer) -> None:
    for motion, moves in (("reduce", False), ("no-preference", True)):
        tab = opened(reduced_motion=motion)
        writing(tab, server)
        assert bool(tab.page.evaluate("document.getAnimations().length")) is moves


# --- the stream -----------------------------------------------------------------------------------

EVENTS = (
    ": a comment\r\n\r\n"
    'data: {"a": "é🎈"}\n\n'
    "event: other\rid: 7\rdata:no blank\r\r"
    "data: two\r\ndata: lines\r\n\r\n"
    "data\n\n"
    "data:  blank\nretry: 3\n\n"
    "\n\n: keep-alive\n\n"
    "database: no\n\n"
    "data: [DONE]\n\ndata: never whole"
).encode()
READ = ['{"a": "é🎈"}', "no blank", "two\nlines", "", " blank", "[DONE]"]


def test_events_are_read_wherever_they_are_cut(tab: Tab) -> None:
    cuts = [[i] for i in range(len(EVENTS))]
    cuts += [[i, i + 1] for i in range(len(EVENTS) - 1)]
    cuts.append(list(range(len(EVENTS))))
    read = tab.page.evaluate(
        """async ([bytes, cuts]) => {
            const { eventData } = await import("/page/sse.js");
            const all = [];
            for (const places of cuts) {
                const parts = [0, ...places].map((from, i) => new Uint8Array(bytes.slice(from, places[i])));
                const body = new ReadableStream({
                    start(controller) {
                        for (const part of parts) controller.enqueue(part);
                        controller.close();
                    },
                });
                const data = [];
                for await (const one of eventData(body)) data.push(one);
                all.push(JSON.stringify(data));
            }
            return all;
        }""",
        [list(EVENTS), cuts],
    )
    assert len(read) == len(cuts)
    assert {tuple(json.loads(one)) for one in read} == {tuple(READ)}
