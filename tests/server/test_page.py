"""The pages of `outrider serve` in a real browser: what a person sees and does, and what no other test can show.

The server is scripted byte by byte, but for the last two tests, which have the real one and the demo pair.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from command_line import HANGS_S
from playwright.sync_api import expect
from scripted_server import POLICY, Exchange, ScriptedServer
from served_command import KEY, until
from served_thread import num_streams, serving_in_thread
from visitors import Tab

from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.server.app import Service
from runtime.server.limits import Limits

pytestmark = pytest.mark.browser


def connecting(tab: Tab, server: ScriptedServer, prompt: str = "Once") -> Exchange:
    tab.ask(prompt)
    tab.expect_state("connecting")
    return server.next()


def waiting(tab: Tab, server: ScriptedServer, prompt: str = "Once") -> Exchange:
    exchange = connecting(tab, server, prompt)
    exchange.start()
    tab.expect_state("waiting")
    return exchange


def reading(tab: Tab, server: ScriptedServer, prompt: str = "Once") -> Exchange:
    exchange = waiting(tab, server, prompt)
    exchange.write(spans=[("target", "prefill", 0.0, 0.5)], prompt_tokens=1234)
    tab.expect_state("reading")
    return exchange


def writing(tab: Tab, server: ScriptedServer, prompt: str = "Once", *words: Any) -> Exchange:
    tab.ask(prompt)
    exchange = server.next()
    exchange.write(*(words or (" upon",)))
    tab.expect_state("writing")
    return exchange


def answered(tab: Tab, server: ScriptedServer, question: str, *words: Any) -> Exchange:
    """An answer that is over."""
    exchange = writing(tab, server, question, *words)
    exchange.finish()
    tab.expect_state("done")
    return exchange


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


def test_an_answer_is_shown_from_the_connection_to_its_end_and_when_the_page_is_loaded_again(tab, server):
    exchange = reading(tab, server)
    expect(tab["state-more"]).to_contain_text("1,234 tokens")
    exchange.write((" upon", "drafted"), (" a", "drafted"), " time", spans=[("target", "verify", 0.5, 1.0)])
    tab.expect_text("Once upon a time")
    expect(tab["said"]).to_have_text("Writing")  # states are read out, and tokens are not
    exchange.write(" there", spans=[("draft", "draft", 0.5, 1.5), ("target", "verify", 1.5, 2.0)])
    tab.expect_text("Once upon a time there")
    assert tab.runs == [["prompt", "Once"], ["drafted", " upon a"], ["", " time there"]]
    style = "span => [getComputedStyle(span).textDecorationLine, getComputedStyle(span).backgroundColor]"
    drafted, own = (tab.page.locator("#text span").nth(i).evaluate(style) for i in (1, 2))
    assert (drafted[0], own[0]) == ("underline", "none")
    assert drafted[1] != own[1]
    exchange.finish("length")
    tab.expect_state("done")
    expect(tab["state-more"]).to_have_text("token limit reached")
    expect(tab["beside"]).to_have_text("50 % of drafting")
    assert coloured(tab, 0) == pytest.approx(0.75, abs=0.02)
    assert coloured(tab, 1) == pytest.approx(0.5, abs=0.02)

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


Moment = Callable[[Tab, ScriptedServer], Exchange]


def test_stop_or_a_new_prompt_ends_an_answer_at_any_moment(tab, server):
    moments: list[Moment] = [connecting, waiting, reading, writing]
    for under_way in moments:
        exchange = under_way(tab, server)
        tab["stop"].click()
        # The server has not said a word since.
        assert tab["state"].get_attribute("data-state") == "stopped"
        exchange.wait_gone()
        tab.expect_text("Once upon" if under_way is writing else "Once")
        expect(tab["prompt"]).to_be_focused()
        expect(tab["problem"]).to_be_hidden()
        old = under_way(tab, server)
        new = writing(tab, server, "Twice", " as much")
        old.wait_gone()
        assert new.body["prompt"] == "Twice"
        new.finish()
        tab.expect_state("done")
        tab.expect_text("Twice as much")


def test_what_goes_wrong_is_said_and_keeps_the_text(opened, server):
    tab = opened()  # whose clock is set
    for lose in (Exchange.cut, lambda exchange: exchange.send(b"0\r\n\r\n")):
        lose(writing(tab, server))
        tab.expect_failed("The connection was lost in the middle of the answer. The text so far is kept.")
        tab.expect_text("Once upon")
    reading(tab, server).cut()
    tab.expect_failed("The connection was lost before the first word.")
    exchange = writing(tab, server)
    exchange.event({"error": {"message": "the target failed", "type": "server_error", "param": None, "code": None}})
    tab.expect_failed("the target failed.")
    tab.expect_text("Once upon")
    exchange.wait_gone()
    tab.page.clock.install()
    tab.ask("Twice")
    server.next().refuse(429, "36 answers are under way; try again in 30 s", Retry_After="30")
    tab.expect_failed("36 answers are under way.")
    expect(tab["prompt"]).to_have_value("Twice")
    expect(tab["problem-when"]).to_have_text("Try again in 30 s.")
    tab.page.clock.fast_forward(40_000)
    expect(tab["problem-when"]).to_have_text("Try again now.")
    tab["retry"].click()
    exchange = server.next()
    assert exchange.body["prompt"] == "Twice"
    expect(tab["problem"]).to_be_hidden()


def test_the_key_and_the_settings_are_asked_for_sent_and_remembered(opened, server):
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
    tab["settings-button"].click()
    for label, value in (("Max tokens", "64"), ("Temperature", "0.8"), ("Top P", "0.95"), ("Seed", "7")):
        tab.page.get_by_label(label).fill(value)
    tab.page.get_by_label("Stop sequences").fill("\\n\\n\nEnd\\t\\\\")
    expected = {"max_tokens": 64, "temperature": 0.8, "top_p": 0.95, "seed": 7, "stop": ["\n\n", "End\t\\"]}
    for _ in range(2):
        tab.ask("Once")
        exchange = server.next()
        assert exchange.headers["Authorization"] == "Bearer right"
        assert {name: exchange.body[name] for name in expected} == expected
        tab.load()
        expect(tab["key-form"]).to_be_hidden()
    kept = "[sessionStorage, localStorage].map((storage) => Object.values(storage).includes('right'))"
    assert tab.page.evaluate(kept) == [True, False]
    # Whatever is in the storage, the page begins.
    for kept in ("{", "null", "[]", '{"temperature": {}, "seed": "x", "no such": 1}'):
        tab.page.evaluate("kept => localStorage.setItem('outrider.settings', kept)", kept)
        tab.load()
        tab.ask("Once")
        assert set(server.next().body) == {"model", "prompt", "stream", "stream_options"}


# --- conversations --------------------------------------------------------------------------------


def test_a_conversation_has_turns_reasoning_calls_and_several_models(tab, server):
    server.model |= {"has_chat_template": True, "state": "loaded"}
    server.others = [{"id": "tiny/second", "has_chat_template": True, "draft": None, "state": "unloaded"}]
    tab.load()
    tab.ask("How many?")
    first = server.next()
    first.write(("Let me", "thought drafted"), (" count.", "thought"))
    expect(tab["thinking"]).to_have_text("Let me count.")
    expect(tab["thinking"]).to_be_visible()
    first.write("Four ", ("legs", "drafted"))
    tab.expect_text("Four legs")
    expect(tab["thinking"]).to_be_hidden()  # folded once the answer begins
    first.finish()
    tab.expect_state("done")
    assert (first.path, "prompt" in first.body) == ("/v1/chat/completions", False)
    assert first.body["messages"] == [{"role": "user", "content": "How many?"}]

    tab["settings-button"].click()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    tab["tools"].fill(json.dumps(tools))
    tab["system"].fill("You are brief.")
    tab.ask("Of what?")
    second = server.next()
    assert second.body["tools"] == tools
    assert second.body["messages"] == [
        {"role": "system", "content": "You are brief."},
        *first.body["messages"],
        {"role": "assistant", "content": "Four legs"},
        {"role": "user", "content": "Of what?"},
    ]
    for piece in ({"name": "look", "arguments": ""}, {"arguments": '{"in": "<b>'}, {"arguments": '</b>"}'}):
        delta = {"tool_calls": [{"index": 0, "function": piece}]}
        second.event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    second.finish("tool_calls")
    tab.expect_state("done")
    expect(tab.page.locator("#calls li b")).to_have_text("look")
    expect(tab.page.locator("#calls li pre")).to_have_text('{"in": "<b></b>"}')

    tab["model"].select_option("tiny/second")
    tab.ask("And you?")
    left = server.next()
    assert left.body["model"] == "tiny/second"
    tab.expect_state("loading")
    tab["stop"].click()
    left.wait_gone()
    tab.ask("And you?")
    exchange = server.next()
    tab.expect_state("loading")
    server.others[0]["state"] = "loaded"
    tab.expect_state("connecting")
    exchange.write("Me")
    exchange.finish()
    tab.expect_state("done")
    tab.load()  # all is kept
    expect(tab["model"]).to_have_value("tiny/second")
    expect(tab.page.locator("#past .turn")).not_to_have_count(0)
    tab["anew"].click()
    expect(tab["welcome"]).to_be_visible()
    assert [message["content"] for message in answered(tab, server, "Again?", "Yes").body["messages"]][1:] == ["Again?"]


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
FORMATTED = (
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
SHAPE = """box => {
    const shape = (node) => node.nodeType === 3 ? node.data
        : `<${node.localName}>${[...node.childNodes].map(shape).join("")}</${node.localName}>`;
    return [...box.childNodes].map(shape).join("");
}"""
HOSTILE = """<img src=x onerror=alert(1)> <script>alert(1)</script>
[x](javascript:alert(1)) [y](data:text/html,x) ![z](https://example.org/z.png)
`<b>` **<i onclick=alert(1)>** <https://example.org>"""


def test_an_answer_is_formatted_while_it_is_written_and_what_a_model_writes_is_never_html(opened, server):
    nasty = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>&amp;"
    server.model |= {"id": nasty, "draft": nasty, "has_chat_template": True}
    tab = opened()
    tab.ask("Format?")
    exchange = server.next()
    for character in MARKDOWN:
        exchange.write(character)
    expect(tab["text"].locator("code").last).to_have_text('def f():\n    return "<script>"')
    assert tab["text"].evaluate(SHAPE) == FORMATTED
    link = tab["text"].get_by_text("a link")
    assert link.evaluate("a => [a.href, a.target, a.rel]") == ["https://example.org/x", "_blank", "noopener noreferrer"]
    tab["view"].click()
    tab.expect_text(MARKDOWN)
    tab["view"].click()
    exchange.finish()
    tab.expect_state("done")
    assert tab["text"].evaluate(SHAPE) == FORMATTED
    exchange = writing(tab, server, nasty, HOSTILE)
    exchange.event({"error": {"message": nasty}})
    tab.expect_failed(f"{nasty}.")
    assert tab.page.locator("main :is(img, iframe), #text :is(i, script)").count() == 0
    assert tab["text"].locator("a").evaluate_all("all => all.map((a) => a.protocol)") == ["https:", "https:"]
    assert tab.page.title() == "Outrider"


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


def test_events_and_markdown_of_any_form_are_read_wherever_they_are_cut(tab):
    cuts = [*([i] for i in range(len(EVENTS))), *([i, i + 1] for i in range(len(EVENTS) - 1)), [*range(len(EVENTS))]]
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
    wrong = tab.page.evaluate(
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
            for (let i = 0; i < 400; i += 1) {
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
    assert wrong == []


# --- for everybody --------------------------------------------------------------------------------

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
CONTROLS = "button:visible, a:visible, input:visible, textarea:visible, canvas:visible"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_is_wide_enough_and_every_word_can_be_read_and_every_control_has_a_name(opened, server, scheme):
    server.model |= {"id": "a-publisher/with-a-very-long-name-of-a-model-8B-4bit", "draft": "one/with-another-name"}
    options = {"viewport": {"width": 320, "height": 700}, "has_touch": True, "is_mobile": True}
    tab = opened(color_scheme=scheme, reduced_motion="reduce", **options)
    assert (tab.sideways, tab.page.evaluate(CONTRAST)["poor"]) == (0, [])
    exchange = writing(tab, server, "x" * 300, ("hm", "thought"), ("y" * 300, "drafted"), *[" word"] * 500)
    exchange.write(proposed=12345, accepted=9999, generated_tokens=123456, prompt_tokens=123456, generation_tps=1234.5)
    expect(tab["tokens"]).to_have_text("123,456")
    assert tab.page.evaluate("document.getAnimations().length") == 0
    for control in ("stop", "send", "settings-button", "prompt", "state"):
        expect(tab[control]).to_be_in_viewport(ratio=1)
    exchange.event({"error": {"message": "no" * 300}})
    tab.expect_state("failed")
    tab["settings-button"].click()
    contrast = tab.page.evaluate(CONTRAST)
    assert (tab.sideways, contrast["poor"]) == (0, [])
    assert contrast["seen"] > 30
    for control in tab.page.locator(CONTROLS).all():
        named = control.evaluate("e => (e.labels?.[0] ?? e).textContent.trim() || e.getAttribute('aria-label')")
        assert named, control.evaluate("e => e.outerHTML")


def test_everything_can_be_done_by_keyboard(tab, server):
    tab.press("Enter")  # nothing is asked
    tab["prompt"].fill("か")
    tab["prompt"].dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(tab["prompt"]).to_have_value("か")
    assert not server.was_asked
    tab.press("ControlOrMeta+a")
    tab.type("Once\nmore")
    tab.press("Tab", "Enter")  # opens the settings
    tab.press("Tab", "Tab")
    expect(tab["max_tokens"]).to_be_focused()
    tab.press("ControlOrMeta+a")
    tab.type("9")
    tab.press("Escape")
    expect(tab["settings"]).to_be_hidden()
    tab.press("Shift+Tab", "Enter")
    exchange = server.next()
    assert (exchange.body["prompt"], exchange.body["max_tokens"]) == ("Once\nmore", 9)
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


# --- with the real server -------------------------------------------------------------------------

PROMPT = "class Stack:\n    def __init__(self):\n"


def exact_copy(model: Path, where: Path) -> Path:
    """A copy in float32: in bfloat16 on a CPU, a text depends on how many tokens each pass had."""
    shutil.copytree(model, where)
    weights = mx.load(str(model / "model.safetensors"))
    exact = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(where / "model.safetensors"), exact, {"format": "mlx"})
    return where


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that is at work."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = (exact_copy(model, folder / model.name) for model in (DEMO_TARGET, DEMO_DRAFT))
    service = Service(Limits(max_waiting=0, grace_s=0), api_key=KEY)
    with serving_in_thread(target, draft, service, max_streams=2) as url:
        yield url


def text_of(url: str, prompt: str, num_tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": num_tokens}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}v1/completions", json=body, headers=headers, timeout=HANGS_S)
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.slow
def test_the_page_shows_the_text_of_the_real_server_opens_its_timeline_and_ends_what_is_left(served, opened):
    for path in ("", "page/index.html", "page/app.js", "page/style.css"):
        part = httpx.get(served + path)
        assert part.headers.get_list("Content-Security-Policy") == [POLICY]
        assert part.headers.get_list("Cache-Control") == ["no-cache"]
    again = httpx.get(f"{served}page/style.css", headers={"If-None-Match": part.headers["ETag"]})
    assert (again.status_code, again.headers["Cache-Control"]) == (304, "no-cache")
    tab = opened(loaded=False)
    tab.url = served
    tab.page.goto(served)
    expect(tab["key"]).to_be_focused()
    tab.type(KEY)
    tab.press("Enter")
    expect(tab["models"]).to_be_visible()
    # On a busy machine, a lookahead of "auto" may leave the drafter out, and nothing of the text would be drafted.
    length = 40

    def ask_for_length(route: Any, request: Any) -> None:
        route.continue_(post_data=json.dumps({**request.post_data_json, "lookahead": 3, "max_tokens": length}))

    tab.page.route("**/v1/completions", ask_for_length)
    tab.ask(PROMPT)
    tab.expect_state("done")
    assert tab["text"].evaluate("text => text.innerText") == PROMPT + text_of(served, PROMPT, 40)
    assert {kind.removesuffix(" blank") for kind, _ in tab.runs} == {"prompt", "", "drafted"}
    for figure in ("acceptance", "speed", "tokens", "first", "read", "beside"):
        expect(tab[figure]).to_have_text(re.compile(r"^\d"))
    with tab.page.expect_popup() as popup:
        tab["timeline"].click()
    expect(popup.value).to_have_title("Outrider timeline")
    expect(popup.value.locator("#text .t").first).to_be_attached()
    length = 900
    for leave in (tab["stop"].click, tab.page.reload, tab.page.close):
        expect(tab["models"]).to_be_visible()
        tab.ask(PROMPT)
        tab.expect_state("writing")
        leave()
        until(lambda: num_streams(served) == 0)


@pytest.mark.slow
def test_the_description_of_the_api_shows_its_operations_and_sends_requests(served, opened):
    tab = opened(loaded=False, viewport={"width": 320, "height": 800})
    tab.url, page = served, tab.page
    page.goto(f"{served}docs")
    expect(tab["complete"]).to_be_visible()
    described = httpx.get(f"{served}openapi.json").json()["paths"].values()
    ids = page.locator("details").evaluate_all("all => all.map((one) => one.id)")
    assert ids == [each["operationId"] for methods in described for each in methods.values()]
    page.locator("#complete").evaluate("details => { details.open = true }")
    named = page.locator("td code", has_text=re.compile("^top_p$"))
    expect(page.locator("#complete tr", has=named)).to_have_text(re.compile("number"))
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    output, send = page.locator("#complete pre"), page.locator("#complete button")
    send.click()
    expect(output).to_have_text(re.compile("^401 application/json.*API key", re.DOTALL))
    page.get_by_label("API key").fill(KEY)
    send.click()
    expect(output).to_have_text(re.compile(r"^200 text/event-stream.*data: \[DONE\]\s*$", re.DOTALL))
    endless = {"prompt": "x", "stream": True, "max_tokens": 900, "ignore_eos": True}
    page.locator("#complete textarea").fill(json.dumps(endless))
    send.click()
    expect(output).to_have_text(re.compile("data: "))
    send.click()
    expect(output).to_have_text(re.compile(r"\(stopped\)$"))
    until(lambda: num_streams(served) == 0)
