"""Servers of several scripted models in simulated time: what is loaded when, and what each says."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from asgi import COMPLETIONS, Aside, Exchange, Letters, ScriptedCheck, ask, exchange
from scripted import ComparingWorker, ScriptedModel, Simulation, hashed, priced

from protocol.errors import ModelError
from protocol.trace import Events
from runtime.engine.opening import running
from runtime.server.app import Service, application
from runtime.server.grammars.schemas import Schemas
from runtime.server.models.loaded_model import LoadedModel
from runtime.server.models.pool import ModelPool, model_pool
from runtime.server.models.served_model import ServedModel
from runtime.server.timelines import Timelines

PROMPT = "def f"
LOAD_S = 64.0


def script_of(name: str) -> Callable[[Sequence[int]], Sequence[float]]:
    """The script of a model of this name; its text never ends by itself."""
    said = hashed(name[:16], 4.0)

    def logits(history: Sequence[int]) -> Sequence[float]:
        values = list(said(history))
        values[Letters.ALPHABET.index("\n")] = -5.0
        return values

    return logits


def text_of(name: str, num_tokens: int, prompt: str = PROMPT) -> str:
    letters, script = Letters(), script_of(name)
    text = letters.encode(prompt)
    for _ in range(num_tokens):
        logits = script(text)
        text.append(max(range(len(logits)), key=logits.__getitem__))
    return letters.decode(text[-num_tokens:])


@attrs.define
class ScriptedLoads:
    """Loads scripted models, and remembers it.

    Attributes:
        failing: names of models that cannot be loaded.
        fails: how the next models of a name fail; see `ScriptedModel`. One entry for each load; the others work.
        history: what happened, and to which model, in order.
        in_memory: the specs of the models in memory, also while they are loaded.
        extra_bytes: memory that the models take beyond their files.
    """

    load_s: float = LOAD_S
    failing: set[str] = attrs.Factory(set)
    fails: dict[str, list[Any]] = attrs.Factory(dict)
    history: list[tuple[str, str]] = attrs.Factory(list)
    in_memory: list[ServedModel] = attrs.Factory(list)
    extra_bytes: int = 0

    def used_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.in_memory) + self.extra_bytes

    @asynccontextmanager
    async def open(self, spec: ServedModel) -> AsyncIterator[LoadedModel]:
        self.history.append(("load", spec.name))
        self.in_memory.append(spec)
        try:
            # As a thread does, a load that has begun ends.
            with trio.CancelScope(shield=True):
                await trio.sleep(self.load_s)
            await trio.lowlevel.checkpoint_if_cancelled()
            if spec.name in self.failing:
                raise ModelError(f"{spec.target} is damaged")
            fails = self.fails.get(spec.name)
            model = ScriptedModel(script_of(spec.name), fails=fails.pop(0) if fails else None)
            events, timelines, tokenizer = Events(), Timelines(), Letters()
            worker = ComparingWorker("target", priced(), events)
            events.listen(timelines)
            async with running(
                (model, worker), None, tokenizer=tokenizer, events=events, max_streams=2, defaults=spec.settings
            ) as runtime:
                worker.sessions.watch(runtime._target)
                schemas = Schemas(tokenizer, ScriptedCheck(), Aside(), 10.0)
                yield LoadedModel(spec, runtime, timelines, schemas)
            Simulation(runtime, model, None, worker, None).assert_all_closed()
            self.history.append(("unload", spec.name))
        finally:
            self.in_memory.remove(spec)


@attrs.define
class ServedModels:
    app: Any
    pool: ModelPool
    loads: ScriptedLoads

    async def complete(self, model: str | None, num_tokens: int = 4, **more: Any) -> Exchange:
        return await ask(self.app, COMPLETIONS, self.body(model, num_tokens, **more))

    def completing(self, model: str, num_tokens: int = 4, **more: Any) -> Any:
        return exchange(self.app, COMPLETIONS, body=self.body(model, num_tokens, **more))

    def body(self, model: str | None, num_tokens: int, **more: Any) -> dict[str, Any]:
        return {"prompt": PROMPT, "max_tokens": num_tokens, **({} if model is None else {"model": model}), **more}

    async def states(self) -> dict[str, str]:
        report = (await ask(self.app, "/health")).json
        return {name: each["state"] for name, each in report["models"].items()}

    async def settled(self) -> None:
        """Wait until no load runs or waits, and check that no request is counted any more."""
        for spec in self.pool.specs:
            if self.pool[spec.name].state == "loading":
                async with self.pool.use(spec.name):
                    pass
        assert all(self.pool[spec.name].num_waiting == 0 for spec in self.pool.specs)
        assert all(instance.num_users == 0 for instance in self.pool._instances)


@asynccontextmanager
async def served_models(
    *specs: ServedModel, loads: ScriptedLoads | None = None, memory_limit: int | None = None, **service: Any
) -> AsyncIterator[ServedModels]:
    """A server of scripted models; needs an autojumping clock. Asserts on exit that none is left in memory."""
    loads = loads or ScriptedLoads()
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    async with model_pool(specs, loads.open, memory_limit=memory_limit, used_bytes=loads.used_bytes) as pool:
        yield ServedModels(application(pool, Service(**service), background=Aside()), pool, loads)
    assert loads.in_memory == []
    assert trio.lowlevel.current_statistics().tasks_living <= num_tasks


def spec(name: str, **more: Any) -> ServedModel:
    """A model of 10 bytes."""
    return ServedModel(name, f"path/of/{name}", **{"num_bytes": 10, **more})
