"""The server's application without sockets: scripted clients, and a tokenizer for scripted models."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import attrs
import outcome
import trio
from prometheus_client.parser import text_string_to_metric_families
from scripted import Script, ScriptedModel, Simulation, hashed, run, simulated, spike

from protocol.settings import Settings, settings_from
from runtime.server.app import Service, application
from runtime.server.grammars.checker import Cost, Outcome
from runtime.server.timelines import Timelines

T = TypeVar("T")
Message = dict[str, Any]

MODEL = "scripted"
JSON = {"content-type": "application/json"}


# --- a client -------------------------------------------------------------------------------------


@attrs.define(slots=False)
class Exchange:
    """A request and what has come back by now.

    Attributes:
        sent: what the application has sent.
        times: when.
        over_at: when the application was done with it; None before.
    """

    scope: dict[str, Any]
    sent: list[Message] = attrs.Factory(list)
    times: list[float] = attrs.Factory(list)
    over_at: float | None = None
    is_stalled: bool = False
    error: Exception | None = None
    _coming: tuple[Any, Any] = attrs.Factory(lambda: trio.open_memory_channel(1000))
    _changed: trio.Event = attrs.Factory(trio.Event)

    def give(self, body: bytes, *, more: bool = False) -> None:
        """Send a part of the body."""
        self._coming[0].send_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        """Hang up."""
        self._coming[0].send_nowait({"type": "http.disconnect"})

    async def until(self, is_so: Callable[[Exchange], bool]) -> None:
        """Wait until something holds of what has come back."""
        while not is_so(self):
            await self._changed.wait()

    async def run(self, app: Any) -> None:
        """Have the application answer; as an HTTP server has it, its errors go no further."""
        try:
            await app(self.scope, self._receive, self._send)
        except Exception as error:
            self.error = error
        self.over_at = trio.current_time()
        self._change()

    async def _receive(self) -> Message:
        message: Message = await self._coming[1].receive()
        return message

    async def _send(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_stalled:
            await trio.sleep_forever()
        self.sent.append(message)
        self.times.append(trio.current_time())
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # What has come back.

    @property
    def status(self) -> int:
        assert self.error is None or self.sent, f"nothing was sent: {self.error!r}"
        assert self.sent[0]["type"] == "http.response.start"
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        """Whether the answer has come to its end."""
        return bool(self.sent[1:]) and not self.sent[-1].get("more_body", False)

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def fault(self) -> dict[str, Any]:
        """What an error says; asserts that it is one, and as OpenAI's clients read it."""
        assert self.status >= 400
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Data of the server-sent events so far, [DONE] left out; asserts that nothing else was sent but comments."""
        assert self.status == 200
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = self.body.decode()
        assert re.fullmatch(r"(data: [^\n]+\n\n|: keep-alive\n\n)*", text)
        return [
            json.loads(part.removeprefix("data: "))
            for part in text.split("\n\n")
            if part.startswith("data: ") and part != "data: [DONE]"
        ]

    @property
    def is_done(self) -> bool:
        """Whether [DONE] has come, in the end."""
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def text(self) -> str:
        """What the answer says, whole or of chunks."""
        return self._joined("text", "content")

    @property
    def thought(self) -> str:
        """Likewise, what it thinks."""
        return self._joined("reasoning_content", "reasoning_content")

    def _joined(self, of_completion: str, of_chat: str) -> str:
        parts = []
        for answer in self.events if self.headers["content-type"].startswith("text/event") else [self.json]:
            for choice in answer.get("choices", []):
                said = choice.get("message", choice.get("delta"))
                parts.append(choice.get(of_completion, "") if said is None else said.get(of_chat, ""))
        return "".join(parts)


@asynccontextmanager
async def exchange(
    app: Any,
    path: str,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    body: Any = None,
    address: str = "127.0.0.1",
) -> AsyncIterator[Exchange]:
    """An exchange with an application, which is over when the block is left.

    Args:
        app: the application.
        path: and query.
        method: if None, POST where something is to be completed, else GET.
        headers: beside the host; those of a JSON body if None and there is one.
        body: what is made JSON of; bytes are sent as they are; None is left to be given, but for GET.
        address: of the client.
    """
    method = method or ("POST" if path.endswith("completions") else "GET")
    given = {"host": "localhost:8000", **(JSON if headers is None and method == "POST" else headers or {})}
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in given.items()],
        "client": (address, 50000),
        "server": ("127.0.0.1", 8000),
        "extensions": {},
        "state": {},
    }
    one = Exchange(scope)
    if body is not None or method != "POST":
        one.give(body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run, app)
        yield one


async def ask(app: Any, path: str, body: Any = None, **more: Any) -> Exchange:
    """A whole exchange."""
    async with exchange(app, path, body=body, **more) as one:
        pass
    return one


async def figures(app: Any) -> dict[tuple[str, str], float]:
    """What `/metrics` says, by name and the value of the one label, if there is one."""
    answer = await ask(app, "/metrics")
    assert answer.status == 200
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


# --- a server in simulated time -------------------------------------------------------------------


class Letters:
    """A tokenizer for scripted models: a character for each of 64 ids; the last ends the text.

    Its chat template says each message's role and content in letters, and a full stop.
    """

    ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123 \n.,:</>"
    END = 63  # is ">" where it does not end the text

    bos_token = None
    has_tool_calling = False

    def __init__(self, *, template: str | None = "chat", thinks: bool = False, ends: bool = True) -> None:
        assert len(self.ALPHABET) == 64
        self.eos_token_ids = {self.ALPHABET.index("\n")} if ends else set()
        self.template = template
        self.has_thinking = thinks
        self.has_chat_template = template is not None
        # Of several tokens each.
        self.think_start, self.think_end = ("<t>", "</t>")
        self.think_start_tokens = tuple(self.encode(self.think_start))
        self.think_end_tokens = tuple(self.encode(self.think_end))
        self.seen: list[Any] = []  # messages that the template was given

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.ALPHABET.find(character) % 64 for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.ALPHABET[token] for token in tokens)

    def apply_chat_template(
        self, messages: Sequence[Any], *, add_generation_prompt: bool, tokenize: bool = True, **_: Any
    ) -> Any:
        self.seen.append([dict(message) for message in messages])
        said = "".join(f"{message['role']}:{message['content']}." for message in messages)
        text = said + ("assistant:" + (self.template or "").removeprefix("chat"))
        return self.encode(text) if tokenize else text

    def rfind_think_start(self, tokens: Sequence[int]) -> int:
        return self.decode(tokens).rfind(self.think_start)

    def rfind_think_end(self, tokens: Sequence[int]) -> int:
        return self.decode(tokens).rfind(self.think_end)


class Aside:
    """What takes the place of threads in simulated time."""

    def __init__(self, seconds: float = 0.0) -> None:
        """Takes so long for each."""
        self.seconds = seconds

    async def __call__(self, do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
        async with limiter:
            # As a thread that has begun, whether or not somebody waits for it to the end.
            done = outcome.capture(do)
            await trio.sleep(self.seconds)
            return done.unwrap()


class ScriptedCheck:
    """What takes the place of the process that tries out grammars."""

    def __init__(self, seconds: float = 0.0, outcome: Outcome = "done") -> None:
        """Takes so long for each, and finds this."""
        self.seconds = seconds
        self.outcome = outcome
        self.num_at_once = 0
        self.asked: list[str] = []

    async def __call__(self, grammar: str, /) -> Cost:
        self.asked.append(grammar)
        self.num_at_once += 1
        try:
            await trio.sleep(self.seconds)
        finally:
            self.num_at_once -= 1
        return Cost(self.outcome, self.seconds)


@attrs.define
class Served:
    """A server in simulated time.

    Attributes:
        app: the application.
        simulation: what is behind it.
        tokenizer: the target's.
        timelines: what it remembers.
    """

    app: Any
    simulation: Simulation
    tokenizer: Letters
    timelines: Timelines

    async def ask(self, path: str, body: Any = None, **more: Any) -> Exchange:
        """See `ask`."""
        return await ask(self.app, path, body, **more)

    def exchange(self, path: str, body: Any = None, **more: Any) -> Any:
        """See `exchange`."""
        return exchange(self.app, path, body=body, **more)

    async def outcomes(self) -> dict[str, float]:
        """How many requests have come to which end."""
        found = await figures(self.app)
        return {label: n for (name, label), n in found.items() if name == "outrider_requests_total" and n}


@asynccontextmanager
async def served(
    target: ScriptedModel,
    draft: ScriptedModel | None = None,
    *,
    tokenizer: Letters | None = None,
    tokenising_s: float = 0.0,
    max_streams: int = 4,
    max_waiting: int = 32,
    price: Any = None,
    schedule: int = 0,
    small: str | None = None,
    check: ScriptedCheck | None = None,
    **service: Any,
) -> AsyncIterator[Served]:
    """A server over scripted models; needs an autojumping clock.

    Leaving it asserts what leaving `simulated` does.

    Args:
        target, draft, max_streams, price, schedule: see `simulated`.
        tokenizer: the target's.
        tokenising_s: seconds that it takes to get a prompt ready.
        max_waiting, **service: see `Service`.
        small: what the drafter is called.
        check: tries out grammars.
    """
    tokenizer, timelines = tokenizer or Letters(), Timelines()
    async with simulated(
        target, draft, tokenizer=tokenizer, listener=timelines, max_streams=max_streams, price=price, schedule=schedule
    ) as simulation:
        offered = Service(MODEL, small, max_streams=max_streams, max_waiting=max_waiting, **service)
        app = application(
            simulation.runtime, offered, timelines, check or ScriptedCheck(), background=Aside(tokenising_s)
        )
        yield Served(app, simulation, tokenizer, timelines)


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """A text, cut at places that may lie beyond its end."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


# --- models and tests --------------------------------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
DEF: dict[str, Any] = {"prompt": "def f"}


def looping(history: Sequence[int]) -> Sequence[float]:
    """Logits that hang on the last token, so that texts repeat themselves; with no end."""
    logits = list(hashed("loop", 4.0)(history[-1:]))
    logits[Letters.ALPHABET.index("\n")] = -5.0
    return logits


def saying(text: str, start: int) -> Script:
    """A model that says this and ends, after a prompt of so many tokens."""
    said = Letters().encode(text + "\n")

    def script(history: Sequence[int]) -> Sequence[float]:
        at = len(history) - start
        return spike(said[at] if 0 <= at < len(said) else 0)

    return script


def models(script: Script = looping) -> tuple[ScriptedModel, ScriptedModel]:
    """A target, and a drafter that is right some of the time."""
    return ScriptedModel(script), ScriptedModel(hashed("draft", 2.0, script))


def simulated_server(test: Callable[[Served], Awaitable[None]], *pair: ScriptedModel, **options: Any) -> None:
    """Run a test with a server of its own."""

    async def main() -> None:
        async with served(*(pair or models()), **options) as server:
            await test(server)

    run(main)


def watched_streams(server: Served) -> list[tuple[Settings, Any]]:
    """The settings and the stream of each generation from now on."""
    seen: list[tuple[Settings, Any]] = []
    begin = server.simulation.runtime.stream

    def watch(prompt: Any, **keywords: Any) -> Any:
        stream = begin(prompt, **keywords)
        seen.append((settings_from(keywords), stream))
        return stream

    server.simulation.runtime.stream = watch  # type: ignore[method-assign]
    return seen


async def direct(server: Served, body: dict[str, Any], **keywords: Any) -> Any:
    """What the runtime itself says to the prompt of a request."""
    if "messages" in body:
        prompt = server.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
    else:
        prompt = server.tokenizer.encode(body["prompt"])
    return await server.simulation.runtime.generate(prompt, **keywords)
