"""A server in a thread of this process: it is there sooner than `served_command`, whose process imports everything."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import trio
from asgi import pool_of
from command_line import HANGS_S
from served_command import MODEL

import runtime
from runtime.server.app import Service, application
from runtime.server.connections.connection import serve
from runtime.server.timelines import Timelines


@contextmanager
def serving_in_thread(target: Path, draft: Path, service: Service, **options: Any) -> Iterator[str]:
    """The URL, with a slash at the end, of a server that ends with the block; options as of `runtime.open`."""
    started: Future[tuple[int, Callable[[], None]]] = Future()

    async def main() -> None:
        timelines, stop = Timelines(), trio.Event()
        token = trio.lowlevel.current_trio_token()
        async with (
            runtime.open(target, draft, trace=timelines, **options) as rt,
            pool_of(rt, MODEL, timelines) as models,
        ):
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            started.set_result((listeners[0].socket.getsockname()[1], lambda: token.run_sync_soon(stop.set)))
            await serve(application(models, service), listeners, stop.wait, service.limits)

    with ThreadPoolExecutor(1) as thread:
        over = thread.submit(trio.run, main)
        over.add_done_callback(lambda ended: started.done() or started.set_exception(ended.exception()))
        port, stop = started.result(HANGS_S)
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            stop()
            over.result(HANGS_S)


def num_streams(url: str) -> int:
    """How many streams a server has that run or wait."""
    health = httpx.get(f"{url}health", timeout=HANGS_S).json()
    return int(health["streams"] + health["waiting"])
