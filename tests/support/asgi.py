"""The server's application without sockets: scripted clients, and a tokenizer for scripted models."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import attrs
import outcome
import trio
from prometheus_client.parser import text_string_to_metric_families
from scripted import Script, ScriptedModel, Simulation, hashed, run, simulated, spike
from sweeps import sweep

import runtime
from protocol.settings import Settings
from runtime.engine.runtime import Runtime
from runtime.server.app import Service, application
from runtime.server.grammars.checker import Outcome
from runtime.server.grammars.schemas import Schemas
from runtime.server.limits import Limits
from runtime.server.models.loaded_model import LoadedModel
from runtime.server.models.pool import ModelPool, model_pool
from runtime.server.models.served_model import ServedModel
from runtime.server.timelines import Timelines

T = TypeVar("T")
Message = dict[str, Any]

MODEL = "scripted"
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
FIM = "/v1/fim/completions"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
POSTED = ("completions", "responses", "messages", "count_tokens", "tokenize")


# --- a client -------------------------------------------------------------------------------------


@attrs.define(slots=False)
class Exchange:
    """A request, and the response so far: its messages, and the simulated times at which each was sent."""

    scope: dict[str, Any]
    sent: list[Message] = attrs.Factory(list)
    times: list[float] = attrs.Factory(list)
    over_at: float | None = None
    is_stalled: bool = False
    error: Exception | None = None
    _coming: tuple[Any, Any] = attrs.Factory(lambda: trio.open_memory_channel(1000))
    _changed: trio.Event = attrs.Factory(trio.Event)

    def give(self, body: bytes, *, more: bool = False) -> None:
        self._coming[0].send_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._coming[0].send_nowait({"type": "http.disconnect"})

    async def until(self, is_so: Callable[[Exchange], bool]) -> None:
        while not is_so(self):
            await self._changed.wait()

    async def run(self, app: Any) -> None:
        """Run the application on the request; an HTTP server catches its errors, and so does this."""
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

    # The response.

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
        return bool(self.sent[1:]) and not self.sent[-1].get("more_body", False)

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def fault(self) -> dict[str, Any]:
        """The error of an error response; asserts that it has the form that OpenAI's clients read."""
        assert self.status >= 400
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Data of the server-sent events so far, without [DONE]; asserts that nothing else was sent except comments."""
        text = self._stream_of(r"data: [^\n]+\n\n")
        return [
            json.loads(part.removeprefix("data: "))
            for part in text.split("\n\n")
            if part.startswith("data: ") and part != "data: [DONE]"
        ]

    @property
    def named_events(self) -> list[Any]:
        """Data of server-sent events that have names; asserts that each has its type for a name."""
        text = self._stream_of(r"event: [^\n]+\ndata: [^\n]+\n\n")
        found = [(name, json.loads(data)) for name, data in re.findall(r"event: (.+)\ndata: (.+)\n\n", text)]
        assert [name for name, _ in found] == [data["type"] for _, data in found]
        return [data for _, data in found]

    def _stream_of(self, event: str) -> str:
        assert self.status == 200
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = self.body.decode()
        assert re.fullmatch(rf"({event}|: keep-alive\n\n)*", text)
        return text

    @property
    def is_done(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def text(self) -> str:
        return self._joined("text", "content")

    @property
    def thought(self) -> str:
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
    """An exchange with an application; exit waits for its end.

    Args:
        path: path and query.
        method: by default POST for paths that generate or count, else GET.
        headers: headers besides Host; by default those of a JSON body for POST.
        body: serialized as JSON, bytes excepted. With None, a GET has an empty body; a POST's body is left to `give`.
    """
    method = method or ("POST" if path.endswith(POSTED) else "GET")
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
    async with exchange(app, path, body=body, **more) as one:
        pass
    return one


async def figures(app: Any) -> dict[tuple[str, str], float]:
    """The figures of `/metrics`, by name and the value of their label, if they have one."""
    answer = await ask(app, "/metrics")
    assert answer.status == 200
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


# --- a server in simulated time -------------------------------------------------------------------


class Letters:
    """A tokenizer for scripted models: one character for each of 64 ids. A newline ends the text.

    Its chat template writes each message as role, colon, content and full stop, which a message to continue lacks.
    """

    ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123 \n.,:</>"

    bos_token = None
    has_tool_calling = False

    def __init__(self, *, template: str | None = "chat", thinks: bool = False, ends: bool = True) -> None:
        assert len(self.ALPHABET) == 64
        self.eos_token_ids = {self.ALPHABET.index("\n")} if ends else set()
        self.template = template
        self.has_thinking = thinks
        self.has_chat_template = template is not None
        # Tags of several tokens each.
        self.think_start, self.think_end = ("<t>", "</t>")
        self.think_start_tokens = tuple(self.encode(self.think_start))
        self.think_end_tokens = tuple(self.encode(self.think_end))
        self.seen: list[Any] = []  # messages that the template was given

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.ALPHABET.find(character) % 64 for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.ALPHABET[token] for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        """Three letters are called fill-in-the-middle tokens as well."""
        markers = {"<fim_prefix>": "P", "<fim_suffix>": "S", "<fim_middle>": "M"}
        return {name: self.ALPHABET.index(markers.get(name, name)) for name in (*self.ALPHABET, *markers)}

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **_: Any,
    ) -> Any:
        assert not (add_generation_prompt and continue_final_message)
        self.seen.append([dict(message) for message in messages])
        text = "".join(f"{message['role']}:{message['content']}." for message in messages)
        if continue_final_message:
            text = text.removesuffix(".")
        if add_generation_prompt:
            text += "assistant:" + (self.template or "").removeprefix("chat")
        return self.encode(text) if tokenize else text

    def rfind_think_start(self, tokens: Sequence[int]) -> int:
        return self.decode(tokens).rfind(self.think_start)

    def rfind_think_end(self, tokens: Sequence[int]) -> int:
        return self.decode(tokens).rfind(self.think_end)


class Aside:
    """A stand-in for worker threads in simulated time, each of whose calls takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    async def __call__(self, do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
        async with limiter:
            # Run it now: a thread that has begun runs to its end, whether or not anybody waits for it.
            done = outcome.capture(do)
            await trio.sleep(self.seconds)
            return done.unwrap()


class ScriptedCheck:
    """A stand-in for the process that tries out grammars; each check takes `seconds`."""

    def __init__(self, seconds: float = 0.0, outcome: Outcome = "done") -> None:
        self.seconds = seconds
        self.outcome = outcome
        self.num_at_once = 0
        self.asked: list[str] = []

    async def __call__(self, grammar: str, /) -> Outcome:
        self.asked.append(grammar)
        self.num_at_once += 1
        try:
            await trio.sleep(self.seconds)
        finally:
            self.num_at_once -= 1
        return self.outcome


@asynccontextmanager
async def pool_of(
    runtime: Runtime,
    name: str,
    timelines: Timelines,
    *,
    draft_name: str | None = None,
    check: ScriptedCheck | None = None,
    background: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[ModelPool]:
    """The pool of a server of one model: a runtime that is open already, and its trace."""

    @asynccontextmanager
    async def open_model(spec: ServedModel) -> AsyncIterator[LoadedModel]:
        schemas = Schemas(runtime.tokenizer, check or ScriptedCheck(), background, 10.0)
        yield LoadedModel(spec, runtime, timelines, schemas)

    spec = ServedModel(name, "", draft_name=draft_name, settings=settings or {}, is_pinned=True)
    async with model_pool([spec], open_model) as models:
        async with models.use(name):
            pass
        yield models


@asynccontextmanager
async def real_server(*pair: Any, **service: Any) -> AsyncIterator[tuple[Any, Runtime]]:
    """An application over real models, as `runtime.open` takes them, and their runtime."""
    timelines = Timelines()
    async with runtime.open(*pair, trace=timelines) as rt, pool_of(rt, "tiny", timelines) as models:
        yield application(models, Service(**service)), rt


@attrs.define
class Served:
    app: Any
    simulation: Simulation
    tokenizer: Letters
    timelines: Timelines

    async def ask(self, path: str, body: Any = None, **more: Any) -> Exchange:
        return await ask(self.app, path, body, **more)

    def exchange(self, path: str, body: Any = None, **more: Any) -> Any:
        return exchange(self.app, path, body=body, **more)

    async def outcomes(self) -> dict[str, float]:
        found = await figures(self.app)
        return {label: n for (name, label), n in found.items() if name == "outrider_requests_total" and n}


@asynccontextmanager
async def served(
    target: ScriptedModel,
    draft: ScriptedModel | Literal["ngram"] | None = None,
    *,
    tokenizer: Letters | None = None,
    tokenising_s: float = 0.0,
    max_streams: int = 4,
    max_waiting: int = 32,
    limits: Limits | None = None,
    price: Any = None,
    schedule: int = 0,
    small: str | None = None,
    check: ScriptedCheck | None = None,
    settings: Mapping[str, Any] | None = None,
    idle_reading: bool = False,
    memory_limit: int | None = None,
    **service: Any,
) -> AsyncIterator[Served]:
    """A server over scripted models, for simulated time; asserts on exit what `simulated` asserts.

    Args:
        target, draft, max_streams, memory_limit, price, schedule, idle_reading: see `simulated`.
        tokenising_s: seconds that the preparation of a prompt takes.
        max_waiting, limits, **service: see `Limits` and `Service`.
        small: name of the draft model.
        settings: of each request that has no others.
    """
    tokenizer, timelines = tokenizer or Letters(), Timelines()
    async with simulated(
        target,
        draft,
        tokenizer=tokenizer,
        listener=timelines,
        max_streams=max_streams,
        memory_limit=memory_limit,
        price=price,
        schedule=schedule,
        defaults=settings,
        idle_reading=idle_reading,
    ) as simulation:
        background = Aside(tokenising_s)
        options: Any = {"draft_name": small, "check": check, "background": background, "settings": settings}
        async with pool_of(simulation.runtime, MODEL, timelines, **options) as models:
            offered = Service(limits=attrs.evolve(limits or Limits(), max_waiting=max_waiting), **service)
            yield Served(application(models, offered, background=background), simulation, tokenizer, timelines)


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """The parts of a text between cuts; cuts may lie beyond its end."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


# --- models and tests --------------------------------------------------------------------------------

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
DEF: dict[str, Any] = {"prompt": "def f"}
BOTH = sweep(("path", "body"), [(COMPLETIONS, DEF), (CHAT, HELLO)])
STREAMED = sweep("stream", [False, True])


def looping(history: Sequence[int]) -> Sequence[float]:
    """A script that depends on the last token only, so that texts repeat themselves, and that never ends a text."""
    return _after(history[-1])


@functools.cache
def _after(token: int) -> Sequence[float]:
    logits = list(hashed("loop", 4.0)([token]))
    logits[Letters.ALPHABET.index("\n")] = -5.0
    return logits


def saying(text: str, start: int, letters: Letters | None = None) -> Script:
    """A script that says `text` and ends it, after a prompt of `start` tokens."""
    said = (letters or Letters()).encode(text + "\n")

    def script(history: Sequence[int]) -> Sequence[float]:
        at = len(history) - start
        return spike(said[at] if 0 <= at < len(said) else 0)

    return script


def answering(text: str, tokenizer: Letters | None = None) -> ScriptedModel:
    """A model that answers `HELLO` with `text`."""
    start = (tokenizer or Letters()).apply_chat_template(HELLO["messages"], add_generation_prompt=True)
    return ScriptedModel(saying(text, len(start)))


async def at_once(server: Served, asked: Iterable[tuple[str, Any]]) -> list[Exchange]:
    """The answers to some requests that come at once, each a path and a body, in the order of their ends."""
    answers: list[Exchange] = []

    async def visit(path: str, body: Any) -> None:
        answers.append(await server.ask(path, body))

    async with trio.open_nursery() as nursery:
        for each in asked:
            nursery.start_soon(visit, *each)
    return answers


def models(script: Script = looping) -> tuple[ScriptedModel, ScriptedModel]:
    """A target, and a drafter that is right some of the time."""
    return ScriptedModel(script), ScriptedModel(hashed("draft", 2.0, script))


def simulated_server(test: Callable[[Served], Awaitable[None]], *pair: ScriptedModel, **options: Any) -> None:
    async def main() -> None:
        async with served(*(pair or [ScriptedModel(looping)]), **options) as server:
            await test(server)

    run(main)


def on_server(*pair: Script | ScriptedModel, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of an async function whose argument `server` is a server of its own, see `served`.

    Above a `sweep`, all cases share the server; below it, each has its own.

    Args:
        pair: the models, or their scripts; by default a target without a drafter, whose texts take a fourth of the
            time. Each run of the test has models of its own.
        **options: see `served`.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        names = [name for name in inspect.signature(test).parameters if name != "server"]

        def run_with_server(*args: Any, **given: Any) -> None:
            given |= dict(zip(names, args, strict=False))  # Hypothesis gives them by position
            made = [copy.deepcopy(each) if isinstance(each, ScriptedModel) else ScriptedModel(each) for each in pair]
            simulated_server(lambda server: test(server=server, **given), *made, **options)

        return with_parameters_of(test, run_with_server)

    return decorate


def with_parameters_of(test: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that gives a test its server, for pytest: with the test's other parameters."""
    functools.update_wrapper(wrapper, test)
    signature = inspect.signature(test)
    fixtures = [each for name, each in signature.parameters.items() if name != "server"]
    wrapper.__signature__ = signature.replace(parameters=fixtures)
    return wrapper


def watched_streams(server: Served) -> list[tuple[Settings, Any]]:
    """The settings and the stream of each generation from now on."""
    seen: list[tuple[Settings, Any]] = []
    begin = server.simulation.runtime.stream

    def watch(prompt: Any, settings: Settings) -> Any:
        stream = begin(prompt, settings)
        seen.append((settings, stream))
        return stream

    server.simulation.runtime.stream = watch
    return seen


async def direct(server: Served, body: dict[str, Any], **keywords: Any) -> Any:
    """The runtime's own result for the prompt of a request."""
    if "messages" in body:
        prompt = server.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
    else:
        prompt = server.tokenizer.encode(body["prompt"])
    return await server.simulation.runtime.generate(prompt, **keywords)
