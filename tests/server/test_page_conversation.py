"""Conversations on the page of `outrider serve`: turns, reasoning, Markdown, calls, and several models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import expect
from scripted_server import Exchange, ScriptedServer
from visitors import Tab

pytestmark = pytest.mark.browser


@pytest.fixture(autouse=True)
def chats(server: ScriptedServer) -> None:
    server.model["has_chat_template"] = True


def answered(tab: Tab, server: ScriptedServer, question: str, *words: Any) -> Exchange:
    """An answer that is over."""
    tab.ask(question)
    exchange = server.next()
    answer(tab, exchange, *words)
    return exchange


def answer(tab: Tab, exchange: Exchange, *words: Any) -> None:
    exchange.write(*words)
    exchange.finish()
    tab.expect_state("done")


def test_the_text_grows_and_shows_what_was_drafted(tab: Tab, server: ScriptedServer) -> None:
    server.model["has_chat_template"] = False
    tab.load()
    tab.ask("Once")
    exchange = server.next()
    exchange.write((" upon", "drafted"), (" a", "drafted"), " time")
    tab.expect_text("Once upon a time")
    exchange.write(" there", (" was", "drafted"), (" a", "drafted"), " king")
    tab.expect_text("Once upon a time there was a king")
    assert tab.runs == [
        ["prompt", "Once"],
        ["drafted", " upon a"],
        ["", " time there"],
        ["drafted", " was a"],
        ["", " king"],
    ]
    style = "span => [getComputedStyle(span).textDecorationLine, getComputedStyle(span).backgroundColor]"
    drafted, own = (tab.page.locator("#text span").nth(i).evaluate(style) for i in (1, 2))
    assert (drafted[0], own[0]) == ("underline", "none")
    assert drafted[1] != own[1]
    exchange.finish()
    tab.expect_state("done")


def test_a_question_goes_on_with_what_was_said(tab: Tab, server: ScriptedServer) -> None:
    first = answered(tab, server, "How many?", ("Let me count.", "thought"), "Four ", ("legs", "drafted"))
    expect(tab["question"]).to_have_text("How many?")
    second = answered(tab, server, "Of what?", "Of a dog")
    assert (first.path, "prompt" in first.body) == ("/v1/chat/completions", False)
    assert first.body["messages"] == [{"role": "user", "content": "How many?"}]
    said = [*first.body["messages"], {"role": "assistant", "content": "Four legs"}]
    assert second.body["messages"] == [*said, {"role": "user", "content": "Of what?"}]
    turn = tab.page.locator("#past .turn")
    expect(turn.locator(".question")).to_have_text("How many?")
    expect(turn.locator("details")).not_to_have_attribute("open", "")
    turn.locator("summary").click()
    expect(turn.locator("details div")).to_have_text("Let me count.")
    tab.load()  # both are kept
    expect(tab.page.locator("#past .turn")).to_have_count(1)
    third = answered(tab, server, "Sure?", "Yes")
    assert [message["content"] for message in third.body["messages"]] == [
        "How many?", "Four legs", "Of what?", "Of a dog", "Sure?",
    ]  # fmt: skip
    tab["anew"].click()
    expect(tab["welcome"]).to_be_visible()
    assert len(answered(tab, server, "Again?", "Yes").body["messages"]) == 1


@pytest.mark.slow
def test_a_system_message_and_tools_are_sent_and_calls_are_shown(tab: Tab, server: ScriptedServer) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    tab["settings-button"].click()
    tab["tools"].fill("{}")
    tab["system"].fill("You are brief.")
    tab.ask("Where?")
    assert not server.was_asked
    tab["tools"].fill(json.dumps(tools))
    tab.ask("Where?")
    exchange = server.next()
    assert exchange.body["tools"] == tools
    assert exchange.body["messages"][0] == {"role": "system", "content": "You are brief."}
    for piece in ({"name": "look", "arguments": ""}, {"arguments": '{"in": "<b>'}, {"arguments": '</b>"}'}):
        delta = {"tool_calls": [{"index": 0, "function": piece}]}
        exchange.event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    exchange.finish("tool_calls")
    tab.expect_state("done")
    expect(tab.page.locator("#calls li b")).to_have_text("look")
    expect(tab.page.locator("#calls li pre")).to_have_text('{"in": "<b></b>"}')


# --- formatted text -------------------------------------------------------------------------------

MARKDOWN = """# One *two*

A **strong** word, `code <b>`, [a link](https://example.org/x), https://example.org/y. and 2 * 3 * 4, snake_case_name

- first
  - inner
- second
3. third

> quoted

| a | b |
|---|---|
| 1 | <i>2</i> |

```python
def f():
    return "<script>"
```"""
HOSTILE = """<img src=x onerror=alert(1)> <script>alert(1)</script>
[x](javascript:alert(1)) [y](data:text/html,x) ![z](https://example.org/z.png)
`<b>` **<i onclick=alert(1)>** <https://example.org>"""


def test_an_answer_is_formatted_while_it_is_written_as_it_would_be_as_a_whole(tab: Tab, server: ScriptedServer) -> None:
    tab.ask("Format?")
    exchange = server.next()
    start = MARKDOWN.index("- second")
    for character in MARKDOWN[:start]:
        exchange.write(character)
    expect(tab["text"].locator("li li")).to_have_text("inner")
    tab.page.evaluate("window.kept = document.querySelectorAll('#text > :is(h3, p)')")
    for character in MARKDOWN[start:]:
        exchange.write(character)
    expect(tab["text"].locator("code").last).to_have_text('def f():\n    return "<script>"')
    shape = """box => {
        const shape = (node) => node.nodeType === 3 ? node.data
            : `<${node.localName}>${[...node.childNodes].map(shape).join("")}</${node.localName}>`;
        return [...box.childNodes].map(shape).join("");
    }"""
    formatted = (
        "<h3>One <em>two</em></h3>"
        "<p>A <strong>strong</strong> word, <code>code <b></code>, <a>a link</a>, <a>https://example.org/y</a>. and "
        "2 * 3 * 4, snake_case_name</p>"
        "<ul><li>first<ul><li>inner</li></ul></li><li>second</li></ul>"
        "<ol><li>third</li></ol>"
        "<blockquote><p>quoted</p></blockquote>"
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1</td><td><i>2</i></td></tr></tbody></table></div>"
        "<div><div><span>python</span><button>Copy</button></div>"
        '<pre><code><div><span>def f():\n    return "<script>"</span></div></code></pre></div>'
    )
    assert tab["text"].evaluate(shape) == formatted
    # What is complete is not made again.
    assert tab.page.evaluate("[...kept].map((element) => element.isConnected)") == [True, True]
    assert tab["text"].locator("b, i, script").count() == 0
    link = tab["text"].get_by_text("a link")
    assert link.evaluate("a => [a.href, a.target, a.rel]") == [
        "https://example.org/x", "_blank", "noopener noreferrer",
    ]  # fmt: skip
    tab["view"].click()
    tab.expect_text(MARKDOWN)
    tab["view"].click()
    assert tab["text"].evaluate(shape) == formatted
    exchange.finish()
    tab.expect_state("done")
    assert tab["text"].evaluate(shape) == formatted


def test_what_a_model_writes_is_never_html(tab: Tab, server: ScriptedServer) -> None:
    answered(tab, server, "Break it", HOSTILE)
    answered(tab, server, "And now?", "Fine")
    turn = tab.page.locator("#past .turn .formatted")
    assert turn.locator("img, script, i, iframe").count() == 0
    assert turn.locator("a").evaluate_all("links => links.map((a) => a.protocol)") == ["https:", "https:"]
    assert "<img src=x onerror=alert(1)>" in turn.inner_text()


@pytest.mark.slow
def test_markdown_of_any_form_is_formatted_as_it_grows_and_loses_no_word(tab: Tab, server: ScriptedServer) -> None:
    seen = tab.page.evaluate(
        """async () => {
            const { Markdown } = await import("/page/markdown.js");
            const { Tinted } = await import("/page/tinted.js");
            const formatted = (...parts) => {
                const box = document.createElement("div"), markdown = new Markdown(box);
                for (const part of parts) markdown.add(new Tinted(part));
                return box.innerHTML.replace(/ class="(end)?"| end(?=")|<span><.span>|\\s/g, "");
            };
            const words = ["*", "**", "_", "`", "```", "~~~", "[", "](", "https://a.b", ")", "#", "# ", "- ", "1. ",
                "> ", "|", "|-|", "\\n", "\\n\\n", "\\n- ", "    ", "word", "\\\\", "~~", "---", "<b>"];
            let seed = 7, lost = [];
            const next = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
            for (let i = 0; i < 1000; i += 1) {
                const text = Array.from({ length: 1 + next(25) }, () => words[next(words.length)]).join("");
                const html = formatted(text);
                const count = (where) => where.split("word").length;
                if (count(html) < count(text) && !/(```|~~~)[^\\n]*word/.test(text)) lost.push(text);
                if (html !== formatted(...text)) lost.push([text, html, formatted(...text)]);
            }
            for (const one of ["*a ", "`a", "[", "> ", "- ", "**", "_x_", "\\n- a\\n  ", "|a", "https://"]) {
                // Ends, and soon: a browser gives up on a page that stands still.
                formatted(one.repeat(40000));
            }
            return lost.slice(0, 3);
        }"""
    )
    assert seen == []


# --- models, and what it looks like ---------------------------------------------------------------


@pytest.mark.slow
def test_one_of_several_models_is_asked_and_remembered(tab: Tab, server: ScriptedServer) -> None:
    expect(tab["model"]).to_be_hidden()
    server.others = [{"id": "tiny/second", "has_chat_template": None, "draft": None}]
    tab.load()
    expect(tab["model"]).to_be_visible()
    answered(tab, server, "Who?", "I")
    tab["model"].select_option("tiny/second")
    expect(tab["models"]).to_contain_text("second")
    expect(tab.page.locator("#answer .by")).to_have_text("tiny/target")
    exchange = answered(tab, server, "Who?", "Me")
    assert (exchange.path, exchange.body["model"]) == ("/v1/chat/completions", "tiny/second")
    tab.load()
    expect(tab["model"]).to_have_value("tiny/second")
    # Each answer says whose it is, also those that were there before.
    expect(tab.page.locator(".by:visible")).to_have_text(["tiny/target", "tiny/second"])
    server.others = []
    tab.load()
    expect(tab.page.locator(".by:visible")).to_have_count(0)
    assert answered(tab, server, "Who?", "Me").body["model"] == "tiny/target"


def test_a_model_that_is_being_loaded_is_waited_for_and_can_be_left(tab: Tab, server: ScriptedServer) -> None:
    server.others = [{"id": "tiny/second", "has_chat_template": True, "draft": None, "state": "unloaded"}]
    server.model["state"] = "loaded"
    tab.load()
    tab["model"].select_option("tiny/second")
    tab.ask("Who?")
    left = server.next()
    assert left.body["model"] == "tiny/second"
    tab.expect_state("loading")
    expect(tab["state-word"]).to_have_text("Loading the model")
    tab["stop"].click()
    left.wait_gone()
    tab.expect_state("stopped")
    tab["model"].select_option("tiny/target")
    answered(tab, server, "Who?", "I")
    tab["model"].select_option("tiny/second")
    tab.ask("And you?")
    exchange = server.next()
    tab.expect_state("loading")
    server.others[0]["state"] = "loaded"
    tab.expect_state("connecting")  # it is loaded, and the prompt is being prepared
    answer(tab, exchange, "Me")
    assert [message["content"] for message in exchange.body["messages"]] == ["Who?", "I", "And you?"]


def test_reasoning_is_folded_once_the_answer_begins(tab: Tab, server: ScriptedServer) -> None:
    tab.ask("How many?")
    exchange = server.next()
    exchange.write(("Let me", "thought drafted"), (" count.", "thought"))
    expect(tab["thinking"]).to_have_text("Let me count.")
    expect(tab["thinking"].locator(".drafted")).to_have_text("Let me")
    expect(tab["thinking"]).to_be_visible()
    exchange.write(("Four", "drafted"), ".")
    tab.expect_text("Four.")
    expect(tab["thinking"]).to_be_hidden()
    expect(tab["text"].locator(".drafted")).to_have_text("Four")
    tab["thoughts"].locator("summary").click()
    exchange.write((" Wait.", "thought"), " Or five.")
    tab.expect_text("Four. Or five.")
    expect(tab["thinking"]).to_be_visible()  # its reader has unfolded it
    expect(tab["thinking"]).to_have_text("Let me count. Wait.")
    exchange.finish()
    tab.expect_state("done")
