"""The page of `outrider serve`, in a real browser, before a server that does what a test says."""

from __future__ import annotations

import email.utils
import json
import re
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


def test_drafted_indentation_is_tinted_less_than_words(tab: Tab, server: ScriptedServer) -> None:
    writing(
        tab, server, "def f():", ("\n", "drafted"), ("    ", "drafted"), ("return", "drafted"), (" 1", "drafted"), " "
    )
    tab.expect_text("def f():\n    return 1 ")
    assert tab.runs[1:] == [["drafted", "\n"], ["drafted blank", "    "], ["drafted", "return 1"], ["", " "]]
    style = "span => [getComputedStyle(span).textDecorationLine, getComputedStyle(span).backgroundColor]"
    blank, word = (tab.page.locator("#text span").nth(i).evaluate(style) for i in (2, 3))
    assert (blank[0], word[0]) == ("none", "underline")
    assert blank[1] != word[1]


def test_a_text_that_takes_long_to_lay_out_is_shown_less_often(tab: Tab, server: ScriptedServer) -> None:
    seen = tab.page.evaluate(
        """async () => {
            const { GrowingText } = await import("/page/text.js");
            const place = { thoughts: document.createElement("details"), thinking: document.createElement("div") };
            const element = (place.text = document.createElement("div")), frames = [], timers = [], seen = [];
            let now = 0, cost = 0;
            performance.now = () => now;
            window.requestAnimationFrame = (paint) => frames.push(paint);
            window.setTimeout = (call, wait) => timers.push([call, wait]);
            const frame = () => { frames.splice(0).forEach((paint) => paint()); seen.push(element.textContent); };
            const text = new GrowingText(place, (paint) => { paint(); now += cost; });
            const write = (word) => text.add([{ text: word, isDrafted: false, isThought: false }]);
            text.clear();
            write("quick ");
            frame();
            cost = 50;
            write("slow ");
            frame();
            write("later ");
            write("together");
            frame();
            const [[due, wait]] = timers;
            due();
            frame();
            write(", and the end");
            text.flush();
            return [...seen, element.textContent, wait, timers.length];
        }"""
    )
    together = "quick slow later together"
    assert seen == ["quick ", "quick slow ", "quick slow ", together, f"{together}, and the end", 200, 2]


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


def test_a_long_text_is_shown_whole_in_few_pieces(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server, "Count:", "\n")
    words = [f" {i}" + ("\n\n" if i % 97 == 0 else "\n" if i % 11 == 0 else "") for i in range(20_000)]
    for i in range(0, len(words), 100):
        exchange.write(*((word, "drafted" if i // 500 % 2 else "") for word in words[i : i + 100]))
    exchange.finish()
    tab.expect_state("done")
    tab.expect_text("Count:\n" + "".join(words))
    assert tab["text"].evaluate("text => text.children.length") > 10
    assert len(tab.runs) < 200


def test_the_answer_is_copied_as_it_is(opened: Open, server: ScriptedServer) -> None:
    tab = opened(permissions=["clipboard-read", "clipboard-write"])
    line = "x" * 1500 + "\n"
    written(tab, server, "Once", ("hm", "thought"), line, line, "\n", line, " end")
    tab["copy"].click()
    expect(tab["copy"]).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == line * 2 + "\n" + line + " end"


def test_the_page_follows_the_text_unless_its_reader_went_up(opened: Open, server: ScriptedServer) -> None:
    tab = opened(viewport={"width": 800, "height": 700})
    exchange = writing(tab, server, "Once", *["\nline"] * 80)
    at_end = "scrollY + innerHeight >= document.documentElement.scrollHeight - 4"
    expect(tab["text"]).to_contain_text("line")
    assert tab.page.evaluate(at_end)
    expect(tab["follow"]).to_be_hidden()
    tab.page.mouse.move(400, 400)
    tab.page.mouse.wheel(0, -300)
    expect(tab["follow"]).to_be_visible()
    up = tab.page.evaluate("scrollY")
    exchange.write(*["\nmore"] * 80)
    expect(tab["text"]).to_contain_text("more")
    assert tab.page.evaluate("scrollY") <= up  # a wheel turns on for a while
    tab["follow"].click()
    assert tab.page.evaluate(at_end)
    exchange.write(*["\nyet more"] * 80)
    expect(tab["text"]).to_contain_text("yet more")
    assert tab.page.evaluate(at_end)


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


def test_how_far_a_long_prompt_was_read_is_said(tab: Tab, server: ScriptedServer) -> None:
    exchange = waiting(tab, server)
    for read in (0, 500, 1000):
        span = ("target", "prefill", read / 1000, read / 1000 + 0.5)
        exchange.write(spans=[span], prompt_tokens=6000, cached_tokens=24, prefilled_tokens=read)
        expect(tab["state-more"]).to_contain_text(f"{24 + read:,} of 6,000 tokens")
    expect(tab["state-word"]).to_have_text("Reading the prompt")
    exchange.write(" upon", prompt_tokens=6000, cached_tokens=24, prefilled_tokens=5975)
    tab.expect_state("writing")
    expect(tab["state-more"]).to_have_text("")


def test_a_drafter_that_rests_is_said_to(tab: Tab, server: ScriptedServer) -> None:
    exchange = waiting(tab, server)
    exchange.write(" upon", spans=[("target", "decode", 0.0, 1.0)], proposed=0, accepted=0)
    expect(tab["acceptance"]).to_have_text("–")
    tab["all"].click()
    assert coloured(tab, 1) == 0
    exchange.write(" a", spans=[("target", "decode", 1.0, 2.0)], drafter=[(1.0, "resting")], proposed=0, accepted=0)
    expect(tab["acceptance"]).to_have_text("resting")
    assert 0 < coloured(tab, 1) < 0.5  # a dashed line and words, in the half in which it rests
    exchange.write(
        " time",
        spans=[("target", "verify", 2.0, 4.0)],
        drafter=[(2.0, "drafting"), (3.0, "overdue")],
        proposed=3,
        accepted=2,
    )
    expect(tab["acceptance"]).to_have_text("67 %2 of 3")
    exchange.finish()
    tab.expect_state("done")
    expect(tab["strip"]).to_have_attribute("aria-label", re.compile("the drafter rested 25 % of the time"))


def test_the_figures(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server)
    exchange.write(generation_tps=63.4, proposed=184, accepted=123, generated_tokens=1200, prompt_tokens=77)
    expect(tab["acceptance"]).to_have_text("67 %123 of 184")
    expect(tab["speed"]).to_have_text("63")
    expect(tab["tokens"]).to_have_text("1,200")
    expect(tab["first"]).to_have_text("125 ms")
    expect(tab["read"]).to_have_text("77")
    exchange.write(prompt_tokens=66, cached_tokens=52)
    expect(tab["read"]).to_have_text("66, of which 52 cached")
    exchange.write(proposed=184, accepted=123, accepted_copied=23, rejected_copied=1)
    expect(tab["acceptance"]).to_have_text("63 %100 of 160, 23 copied")
    exchange.write(proposed=24, accepted=23, accepted_copied=23, rejected_copied=1)
    expect(tab["acceptance"]).to_have_text("96 %23 of 24")
    exchange.write(accepted_copied=0, rejected_copied=0, proposed=0, accepted=0)
    exchange.write(proposed=0, accepted=0, time_to_first_token=2.5, generation_tps=4.25)
    expect(tab["acceptance"]).to_have_text("–")
    expect(tab["first"]).to_have_text("2.50 s")
    expect(tab["speed"]).to_have_text("4.3")
    exchange.write(generation_tps=4.25, rows_per_pass=1.0)
    expect(tab["speed"]).to_have_text("4.3")
    exchange.write(generation_tps=4.25, rows_per_pass=2.46)
    expect(tab["speed"]).to_have_text("4.32.5 streams a pass")
    tab.ask("Twice")
    server.next()
    expect(tab["tokens"]).to_have_text("–")


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


def test_the_strip_shows_the_latest_or_all(tab: Tab, server: ScriptedServer) -> None:
    exchange = waiting(tab, server)
    exchange.write(spans=[("target", "verify", i / 10, i / 10 + (0.01 if i < 100 else 0.1)) for i in range(200)])
    exchange.write(" upon", spans=[("draft", "draft", 20.0, 20.0)])
    tab.expect_text("Once upon")
    assert coloured(tab, 0) > 0.85
    tab["all"].click()
    expect(tab["latest"]).to_have_attribute("aria-pressed", "false")
    assert 0.5 < coloured(tab, 0) < 0.8
    tab["latest"].click()
    assert coloured(tab, 0) > 0.85


def test_an_answer_that_is_over_has_its_timeline(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server)
    expect(tab["timeline"]).to_be_hidden()
    exchange.finish()
    with tab.page.expect_popup() as popup:
        tab["timeline"].click()
    assert popup.value.url == f"{server.url}timelines/{exchange.id}"


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


def test_escape_ends_it_wherever_the_focus_is(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server)
    tab["prompt"].focus()
    tab.type("a new prompt")
    tab.press("Escape")
    exchange.wait_gone()
    tab.expect_state("stopped")
    expect(tab["prompt"]).to_have_value("a new prompt")
    exchange = writing(tab, server)
    tab["latest"].focus()
    tab.press("Escape")
    exchange.wait_gone()
    tab.expect_state("stopped")


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


def test_words_that_were_under_way_do_not_get_into_the_next_answer(tab: Tab, server: ScriptedServer) -> None:
    old = writing(tab, server)
    tab["prompt"].focus()
    tab.type("Twice")
    old.write(*[" late"] * 5000)  # which take longer to be read than a key to be pressed
    tab.press("Enter")
    old.wait_gone()
    new = server.next()
    new.write(" as much")
    new.finish()
    tab.expect_state("done")
    tab.expect_text("Twice as much")
    expect(tab["tokens"]).to_have_text("1")


@moments
def test_loading_the_page_again_keeps_the_prompt_and_what_was_written(
    tab: Tab, server: ScriptedServer, under_way: Moment
) -> None:
    exchange = under_way(tab, server)
    tab.page.reload()
    exchange.wait_gone()
    if under_way is writing:
        tab.expect_state("stopped")
        tab.expect_text("Once upon")
    else:
        expect(tab["welcome"]).to_be_visible()
    expect(tab["prompt"]).to_have_value("Once")
    expect(tab["prompt"]).to_be_focused()
    expect(tab["models"]).to_be_visible()
    assert not server.was_asked
    tab.press("Enter")
    assert server.next().body["prompt"] == "Once"


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


def test_an_answer_that_failed_says_so_when_the_page_is_loaded_again(tab: Tab, server: ScriptedServer) -> None:
    writing(tab, server).cut()
    tab.expect_state("failed")
    tab.page.reload()
    tab.expect_state("failed")
    tab.expect_failed("The connection was lost in the middle of the answer. The text so far is kept.")
    tab.expect_text("Once upon")
    tab["retry"].click()
    assert server.next().body["prompt"] == "Once"
    expect(tab["prompt"]).to_have_value("")


def test_an_answer_too_long_to_keep_is_dropped_with_the_one_before(tab: Tab, server: ScriptedServer) -> None:
    written(tab, server)
    kept = "sessionStorage.getItem('outrider.answer')"
    assert tab.page.evaluate(kept)
    written(tab, server, "Twice", *["long " * 50_000] * 9)
    assert tab.page.evaluate(kept) is None
    for unreadable in ("{", "7", "null", '{"version": 0}'):
        tab.page.evaluate("text => sessionStorage.setItem('outrider.answer', text)", unreadable)
        tab.load()
        expect(tab["welcome"]).to_be_visible()


def test_two_tabs_do_not_know_of_each_other(tab: Tab, opened: Open, server: ScriptedServer) -> None:
    other = opened(tab.page.context)
    exchange = writing(tab, server)
    others = writing(other, server, "Twice", " as much")
    tab.press("Escape")
    exchange.wait_gone()
    tab.expect_state("stopped")
    others.write(" again")
    other.expect_text("Twice as much again")
    others.finish()
    other.expect_state("done")
    tab.expect_text("Once upon")
    tab.page.reload()
    expect(tab["prompt"]).to_have_value("Once")


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


def test_retry_is_offered_where_it_can_help(tab: Tab, server: ScriptedServer) -> None:
    for status, helps in {400: False, 413: False, 404: True, 429: True, 500: True, 503: True}.items():
        tab.ask("Once")
        server.next().refuse(status, f"refused with {status}")
        tab.expect_failed(f"refused with {status}.")
        assert tab["retry"].is_visible() is helps
    for kind, helps in {"invalid_request_error": False, "server_error": True}.items():
        exchange = writing(tab, server)
        exchange.event({"error": {"message": kind, "type": kind}})
        tab.expect_failed(f"{kind}.")
        assert tab["retry"].is_visible() is helps


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


def test_retry_sends_the_refused_prompt_as_edited_not_the_next(tab: Tab, server: ScriptedServer) -> None:
    tab.ask("Once")
    exchange = server.next()
    tab.type("Twice")
    exchange.refuse(429, "full")
    tab.expect_failed("full.")
    expect(tab["prompt"]).to_have_value("Twice")
    tab["retry"].click()
    exchange = server.next()
    assert exchange.body["prompt"] == "Once"
    expect(tab["prompt"]).to_have_value("Twice")
    tab["prompt"].fill("")
    exchange.refuse(503, "the models are not there")
    tab.expect_failed("the models are not there.")
    tab["prompt"].focus()
    tab.press("End")
    tab.type(" more")
    tab["retry"].click()
    assert server.next().body["prompt"] == "Once more"


def test_a_server_that_is_there_again_is_no_longer_said_not_to_be(opened: Open, server: ScriptedServer) -> None:
    tab = opened()  # whose clock is set
    tab.page.clock.install()
    for path in ("**/v1/models", "**/v1/completions"):
        tab.page.route(path, lambda route: route.abort("connectionrefused"))
    tab.ask("Once")
    tab.expect_failed("The server cannot be reached. Is it still running?")
    expect(tab["retry"]).to_be_visible()
    with tab.page.expect_request("**/v1/models"):
        tab.page.clock.fast_forward(5_000)
    expect(tab["problem"]).to_be_visible()
    tab.page.unroute("**/v1/models")
    tab.page.clock.fast_forward(5_000)
    expect(tab["problem"]).to_be_hidden()
    expect(tab["prompt"]).to_have_value("Once")


def test_when_to_try_again_may_be_a_date_or_not_be_known(opened: Open, server: ScriptedServer) -> None:
    tab = opened()  # whose clock is set
    tab.ask("Once")
    server.next().refuse(400, "max_tokens is 0, and must be at least 1")
    tab.expect_failed("max_tokens is 0, and must be at least 1.")
    expect(tab["problem-when"]).to_have_text("")
    assert len(tab.failed_requests) == 1
    tab.page.clock.install(time=1_800_000_000)
    tab.page.clock.pause_at(1_800_000_001)
    tab.ask("Once")
    date = email.utils.formatdate(1_800_000_091, usegmt=True)
    server.next().refuse(429, "full.", Retry_After=date)
    tab.expect_failed("full.")
    expect(tab["problem-when"]).to_have_text("Try again in 90 s.")


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


def test_an_event_that_makes_no_sense_ends_the_answer(tab: Tab, server: ScriptedServer) -> None:
    for data in ("{", "[]", "null", "3", '"text"', "<html>"):
        exchange = writing(tab, server)
        exchange.event(data)
        tab.expect_failed("The server sent a response that this page cannot read.")
        tab.expect_text("Once upon")
        exchange.wait_gone()


def test_an_answer_that_is_no_stream_is_not_shown(tab: Tab, server: ScriptedServer) -> None:
    tab.ask("Once")
    exchange = server.next()
    exchange.start("text/html")
    exchange.stream(b"<b>hello</b>")
    tab.expect_failed("The server sent a response that this page cannot read.")
    tab.expect_text("")
    exchange.wait_gone()


def test_an_error_without_a_message_has_its_number(tab: Tab, server: ScriptedServer) -> None:
    bodies = "<html>Bad gateway</html>", "{}", "[]", '{"error": "x"}', '{"error": {"message": 3}}'
    for status, body in enumerate(bodies, start=500):
        tab.ask("Once")
        server.next().answer(status, body)
        tab.expect_failed(f"The server answered {status} Whatever.")


def test_chunks_that_lack_everything_are_nothing(tab: Tab, server: ScriptedServer) -> None:
    exchange = writing(tab, server)
    lacking = [
        {},
        {"choices": []},
        {"choices": [{}]},
        {"speculation": {}},
        {"choices": [{"delta": {}}], "speculation": None},
    ]
    for chunk in lacking:
        exchange.event(chunk)
    exchange.event({"choices": [{"text": " a", "finish_reason": None}]})
    tab.expect_text("Once upon a")
    exchange.finish()
    tab.expect_state("done")


def test_a_server_without_speculation_will_do(tab: Tab, server: ScriptedServer) -> None:
    exchange = begun(tab, server)
    exchange.event({"id": "x", "choices": [{"text": " upon", "finish_reason": None}]})
    exchange.event({"id": "x", "choices": [{"text": "", "finish_reason": "stop"}]})
    exchange.event({"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
    exchange.event("[DONE]")
    tab.expect_state("done")
    tab.expect_text("Once upon")
    expect(tab["tokens"]).to_have_text("1")
    expect(tab["acceptance"]).to_have_text("–")


def test_the_page_says_what_is_true_of_the_drafter(tab: Tab, server: ScriptedServer) -> None:
    for draft, title, named, legend in (
        ("tiny/draft", "One model drafts ahead, the other decides.", "drafted by tiny/draft", 3),
        ("ngram", "Earlier words are proposed again, the model decides.", "drafted by prompt lookup", 2),
        (None, "One model writes, without a drafter.", "without a drafter", 0),
    ):
        server.model["draft"] = draft
        tab.load()
        expect(tab["welcome-title"]).to_have_text(title)
        expect(tab["models"]).to_have_text(f"tiny/target {named}")
        written(tab, server)
        expect(tab.page.locator("#answer .keys li:visible")).to_have_count(legend)
        tab.page.evaluate("sessionStorage.clear()")


@moments
def test_silence_is_said_to_be(opened: Open, server: ScriptedServer, under_way: Moment) -> None:
    tab = opened()  # whose clock is set
    tab.page.clock.install()
    exchange = under_way(tab, server)
    if under_way is connecting:
        tab.page.clock.fast_forward(7_000)
        expect(tab["state-more"]).to_contain_text("7 s")
        return
    tab.page.clock.fast_forward(7_000)
    expect(tab["state-more"]).to_contain_text("nothing heard for 7 s")
    exchange.write(" a")
    tab.page.clock.fast_forward(1_000)
    expect(tab["state-more"]).not_to_contain_text("nothing heard")


def test_a_server_that_was_not_there_can_be_met_later(opened: Open, server: ScriptedServer) -> None:
    tab = opened(loaded=False)
    tab.page.add_init_script("setInterval = () => 0")  # or the page would look for it by itself, and maybe be first
    tab.page.route("**/v1/models", lambda route: route.abort())
    tab.page.goto(server.url)
    expect(tab["problem-text"]).to_have_text("The server cannot be reached. Is it still running?")
    tab.ask("Once")
    tab.expect_failed("The server cannot be reached. Is it still running?")
    tab.page.unroute("**/v1/models")
    tab["retry"].click()
    exchange = server.next()
    exchange.write(" upon")
    tab.expect_text("Once upon")


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


def test_a_key_that_is_wanted_in_between_goes_on_with_the_prompt(tab: Tab, server: ScriptedServer) -> None:
    server.key = "new"
    tab.ask("Once")
    expect(tab["key"]).to_be_focused()
    tab.type("new")
    tab.press("Enter")
    exchange = server.next()
    assert exchange.body["prompt"] == "Once"
    exchange.write(" upon")
    tab.expect_text("Once upon")


def test_a_key_that_cannot_be_sent_is_not_taken(tab: Tab, server: ScriptedServer) -> None:
    server.key = "right"
    tab.ask("Once")
    expect(tab["key"]).to_be_focused()
    wrong = "A key has only letters without accents, digits and signs. Is the keyboard set to another language?"
    for key in ("ключ", "clé", "key\u200b"):
        tab["key"].fill(key)
        tab.press("Enter")
        expect(tab["key"]).to_have_js_property("validationMessage", wrong)
        expect(tab["key-form"]).to_be_visible()
        expect(tab["problem"]).to_be_hidden()
    tab["key"].fill("right")
    tab.press("Enter")
    assert server.next().headers["Authorization"] == "Bearer right"


def test_a_key_that_cannot_be_sent_and_was_kept_is_asked_for_anew(tab: Tab, server: ScriptedServer) -> None:
    server.key = "right"
    tab.page.evaluate("sessionStorage.setItem('outrider.key', 'ключ')")
    tab.page.reload()
    expect(tab.page.get_by_label("This server requires an API key")).to_be_focused()
    expect(tab["problem"]).to_be_hidden()


def test_a_request_without_settings_leaves_them_to_the_server(tab: Tab, server: ScriptedServer) -> None:
    tab.ask("Once")
    assert server.next().body == {
        "model": "tiny/target",
        "prompt": "Once",
        "stream": True,
        "stream_options": {"include_usage": True, "include_speculation": True},
    }


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


def test_a_setting_out_of_range_is_not_sent(tab: Tab, server: ScriptedServer) -> None:
    for label, value in (("Max tokens", "0"), ("Temperature", "-1"), ("Top P", "1.5"), ("Seed", "0.5")):
        tab["settings-button"].click()
        tab["reset"].click()
        tab.page.get_by_label(label).fill(value)
        tab["settings-button"].click()
        tab.ask("Once")
        expect(tab.page.get_by_label(label)).to_be_focused()
        expect(tab["prompt"]).to_have_value("Once")
        assert not server.was_asked
        tab["settings-button"].click()


def test_whatever_was_kept_the_page_begins(tab: Tab, server: ScriptedServer) -> None:
    for kept in ("", "{", "null", "[]", "7", '{"temperature": {}, "seed": "x", "no such": 1}'):
        tab.page.evaluate("kept => localStorage.setItem('outrider.settings', kept)", kept)
        tab.load()
        tab.ask("Once")
        assert set(server.next().body) == {"model", "prompt", "stream", "stream_options"}


def test_a_browser_that_keeps_nothing_will_do(opened: Open, server: ScriptedServer) -> None:
    tab = opened(loaded=False)
    refuse = "{ get() { throw new DOMException('denied', 'SecurityError'); } }"
    tab.page.add_init_script(
        f"for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, {refuse})"
    )
    tab.load()
    written(tab, server)


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


def test_the_last_prompt_can_be_had_again(tab: Tab, server: ScriptedServer) -> None:
    written(tab, server)
    expect(tab["prompt"]).to_be_focused()
    tab.press("ArrowUp")
    expect(tab["prompt"]).to_have_value("Once")
    tab["prompt"].fill("")
    tab["edit"].click()
    expect(tab["prompt"]).to_have_value("Once")
    expect(tab["prompt"]).to_be_focused()


def test_the_prompt_is_set_in_the_typeface_of_the_page(tab: Tab, server: ScriptedServer) -> None:
    family = "element => getComputedStyle(element).fontFamily"
    assert tab["prompt"].evaluate(family) == tab.page.locator("body").evaluate(family)


def test_an_example_is_put_into_the_box(tab: Tab) -> None:
    tab.page.get_by_role("button", name="def quicksort(items):").click()
    expect(tab["prompt"]).to_have_value("def quicksort(items):")
    expect(tab["prompt"]).to_be_focused()


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


def test_the_focus_can_be_seen(tab: Tab) -> None:
    for element in ("prompt", "settings-button", "send"):
        tab[element].focus()
        ring = "element => getComputedStyle(element.id === 'prompt' ? element.form : element).outlineStyle"
        tab.press("Shift")  # from here on the keyboard is used
        assert tab[element].evaluate(ring) == "solid"


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


def test_on_a_phone_send_closes_the_settings_and_nothing_hides_an_error(opened: Open, server: ScriptedServer) -> None:
    tab = opened(viewport={"width": 360, "height": 480}, has_touch=True, is_mobile=True)
    tab["settings-button"].click()
    exchange = writing(tab, server, "Once", *["\nline"] * 80)
    expect(tab["settings"]).to_be_hidden()
    exchange.event({"error": {"message": "no " * 150}})
    tab.expect_state("failed")
    tab["settings-button"].click()
    tab["prompt"].fill("\n" * 20)
    for place in (0, 9999):
        tab.page.evaluate("place => scrollTo(0, place)", place)
        for element in ("problem", "retry", "send"):
            expect(tab[element]).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("width", [320, 400])
def test_a_phone_shows_who_drafts(opened: Open, server: ScriptedServer, width: int) -> None:
    server.model |= {"id": "mlx-community/Qwen3-8B-4bit", "draft": "mlx-community/Qwen3-0.6B-4bit"}
    tab = opened(viewport={"width": width, "height": 700})
    expect(tab["models"]).to_have_text("mlx-community/Qwen3-8B-4bit drafted by mlx-community/Qwen3-0.6B-4bit")
    for name in ("Qwen3-8B-4bit", "Qwen3-0.6B-4bit"):
        words = tab.page.locator("#models b", has_text=name)
        expect(words).to_be_in_viewport(ratio=1)
        assert words.evaluate(
            """words => {
                const { right, top } = words.getBoundingClientRect();
                return words.contains(document.elementFromPoint(right - 2, top + 5));
            }"""
        )
    assert tab["models"].evaluate("models => models.scrollWidth <= models.clientWidth")
    assert tab.sideways == 0


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


def test_an_answer_is_read_as_its_bytes_come(tab: Tab, server: ScriptedServer) -> None:
    exchange = begun(tab, server)
    for word in (" é", " 🎈", " ő"):
        for byte in f"data: {json.dumps(exchange.chunk(word), ensure_ascii=False)}\r\n\r\n".encode():
            exchange.stream(bytes([byte]))
    exchange.finish()
    tab.expect_state("done")
    tab.expect_text("Once é 🎈 ő")
