"""The command `outrider serve`: serves the models over HTTP, to OpenAI clients and to browsers.

Nothing goes to stdout. Nothing here imports mlx, or packages of the extra `serve`, before the arguments are checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import re
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from protocol.errors import OutriderError, SettingsError
from protocol.reprs import shown
from protocol.settings import MAX_BATCH
from protocol.validation import check_integer
from runtime.cli.model_arguments import Models
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.server.connections.file_limit import keeping_file_limit, make_room_for_connections
from runtime.terminal.display import CommandOutcome, Display, print_message, print_stderr
from runtime.terminal.signals import SignalScope, exit_on_signal

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

# A variable for the API key: other users of a machine can read its command lines.
KEY_VARIABLE = "OUTRIDER_API_KEY"

# Names of this machine, which a page of another host cannot have.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")

# An origin exactly as browsers send it; anything else would never match.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")

# Maximum number of connections that wait to be accepted.
_BACKLOG = 128

_REQUIRED_PACKAGES = ("h11", "prometheus_client", "pydantic", "starlette")


class ServerError(OutriderError):
    """The address cannot be used, or the target model has failed."""


@attrs.frozen
class LimitOption:
    """A limit of the server: an option whose value is a whole number.

    Attributes:
        name: its name, with underscores.
        low: its smallest value.
        default: its default; None for no limit.
        help: its help text.
    """

    name: str
    low: int
    default: int | None
    help: str

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return f"--{self.name.replace('_', '-')}"


_LIMITS = (
    LimitOption("max_streams", 1, 4, "most requests that generate at once"),
    LimitOption("max_batch", 1, MAX_BATCH, "most requests that share one forward pass of the target"),
    LimitOption("max_waiting", 0, 256, "most requests that wait beside those; further ones get status 429"),
    LimitOption("max_tokens", 1, 512, "most tokens of an answer if the request does not set them"),
    LimitOption("max_tokens_limit", 1, None, "most tokens that a request may set (default: the model's context)"),
    LimitOption("max_prompt_tokens", 1, None, "most tokens of a prompt (default: the model's context)"),
    LimitOption(
        "prefill_step_size",
        1,
        None,
        "prompt tokens per prefill pass, during which all other answers wait (default: as many as are cheap, in 0.2 s "
        "at most)",
    ),
    LimitOption("max_body_bytes", 1, 2 * 2**20, "most bytes of a request body"),
    LimitOption(
        "max_connections",
        1,
        None,
        "most connections at once; for a further one, the longest idle one is closed (default: 1000, or as many as the "
        "limit of open files allows)",
    ),
    LimitOption("stalled_seconds", 1, 60, "seconds that a client may leave 64 KiB of a response unread"),
    LimitOption("grace_seconds", 0, 5, "seconds that current answers have to end when the server is stopped"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`, other than the models and the BLAS."""
    group = parser.add_argument_group("address")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; other than a loopback address, it needs an API key (default: %(default)s)",
    )
    group.add_argument("--port", type=int, default=8000, help="port; 0 picks a free one (default: %(default)s)")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"API key that requests must send (default: {KEY_VARIABLE}, else none)"
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help='further host name that requests may carry, or "*" for any (default: names of this machine; with an '
        "API key, any)",
    )
    group.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help='origin whose pages may use the server, such as https://example.org (no path, no "/" at the end), or "*" '
        "for any",
    )
    group.add_argument(
        "--model-name", metavar="NAME", help="name of the target in the API (default: the end of its path or id)"
    )
    parser.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="do not log each request on stderr (the log has no prompts and no keys)",
    )
    limits = parser.add_argument_group("limits")
    for option in _LIMITS:
        default = "" if option.default is None else " (default: %(default)s)"
        limits.add_argument(option.flag, metavar="N", type=int, default=option.default, help=option.help + default)


def serve(arguments: argparse.Namespace, models: Models) -> CommandOutcome:
    """Serve until a signal stops the server.

    Args:
        arguments: the parsed arguments.
        models: the models to serve.

    Returns: the outcome. A signal while the models load is an interruption; one that stops the running server is not.

    Raises: OutriderError: an argument is invalid, or the address cannot be used. Later errors are in the outcome.
    """
    if missing := [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]:
        raise SettingsError(f"serve needs {', '.join(missing)}; pip install 'outrider[serve]'")
    for option in _LIMITS:
        value = getattr(arguments, option.name)
        if value is not None:
            check_integer(option.flag, value, option.low)
    for origin in arguments.allow_origin:
        _check_origin(origin)
    # Before mlx-lm is imported, which lowers the hard limit.
    arguments.max_connections = make_room_for_connections(arguments.max_connections)
    key = _key(arguments)
    bound = _bind(arguments.host, arguments.port, has_key=key is not None)
    outcome = CommandOutcome()
    with bound, Display() as display, exit_on_signal(display):
        display.show_loading(models.loaded)
        with keeping_file_limit():
            import runtime.engine.opening
            import runtime.server.app  # noqa: F401  imported here, where Ctrl-C ends it at once

        server = _Server(arguments, models, key, bound, display)
        trio.run(_ServerSignals(outcome, display, server).run, partial(_open_and_serve, server))
    return outcome


@attrs.define
class _Server:
    """A server, from its arguments to its end.

    Attributes:
        arguments: the parsed arguments.
        models: the models to serve.
        key: the API key that requests must send, or None.
        bound: a socket bound to the address, not listening yet.
        display: shows the loading of the models.
        is_serving: whether requests are accepted.
        is_broken: whether the target has failed.
        stopping: set to stop the server.
    """

    arguments: argparse.Namespace
    models: Models
    key: str | None
    bound: socket.socket
    display: Display
    is_serving: bool = False
    is_broken: bool = False
    stopping: trio.Event = attrs.field(factory=trio.Event)


class _ServerSignals(SignalScope):
    """Signals of a server: the first lets the current answers end, or cancels the load of the models."""

    def __init__(self, outcome: CommandOutcome, display: Display, server: _Server) -> None:
        super().__init__(outcome, display)
        self._server = server

    def end_gently(self) -> bool:
        """Stop the server; see `SignalScope.end_gently`."""
        self._server.stopping.set()
        return self._server.is_serving


async def _open_and_serve(server: _Server) -> None:
    """Load the models, and serve until `server.stopping` is set.

    Raises:
        OutriderError: a model cannot be loaded, or has no tokenizer.
        ServerError: the target has failed.
    """
    arguments, models = server.arguments, server.models
    from runtime.engine.opening import open as open_runtime
    from runtime.server.access_log import AccessLog
    from runtime.server.app import Service, application
    from runtime.server.connections.listener import ConnectionLimits, serve
    from runtime.server.generation_endpoints import Limits
    from runtime.server.grammars.checker import grammar_checker
    from runtime.server.grammars.schemas import compile_any_object
    from runtime.server.timelines import Timelines

    name = arguments.model_name or _name(models.target)
    limits = Limits(
        max_body_bytes=arguments.max_body_bytes,
        max_bodies_bytes=max(Limits().max_bodies_bytes, arguments.max_body_bytes),
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_tokens=arguments.max_tokens,
        max_tokens_limit=arguments.max_tokens_limit,
        prefill_step_size=arguments.prefill_step_size or "auto",
        stalled_s=arguments.stalled_seconds,
    )
    service = Service(
        name,
        None if models.draft is None else _name(models.draft),
        max_streams=arguments.max_streams,
        max_waiting=arguments.max_waiting,
        limits=limits,
        api_key=server.key,
        hosts=["*"] if server.key is not None else [*_LOCAL_HOSTS, arguments.host, *arguments.allow_host],
        origins=arguments.allow_origin,
    )
    connection_limits = ConnectionLimits(
        max_connections=arguments.max_connections,
        stalled_s=arguments.stalled_seconds,
        grace_s=arguments.grace_seconds,
    )
    timelines = Timelines()
    models.use_device()
    opening = open_runtime(
        models.target,
        models.draft,
        max_streams=arguments.max_streams,
        max_batch=arguments.max_batch,
        trace=timelines,
        **models.options,
    )
    async with opening as runtime, grammar_checker(partial(_tokenizer_json, runtime)) as check:
        # Now, so that no request for JSON waits for it. What prevents it, the first such request is told.
        any_object = None
        with suppress(SettingsError):
            any_object = await trio.to_thread.run_sync(compile_any_object, runtime.tokenizer)
        server.display.clear()
        # Not earlier: a client that can connect must be able to get answers.
        server.bound.listen(_BACKLOG)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(server.bound))
        app = application(runtime, service, timelines, check, any_object=any_object)
        if arguments.access_log:
            app = AccessLog(app, print_stderr)
        print_message(f"{name} is served at {_url(server.bound)} (OpenAI's interface at /v1); Ctrl-C stops it")
        server.is_serving = True

        async def until_over() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_if_broken, runtime, server)
                await server.stopping.wait()
                nursery.cancel_scope.cancel()

        await serve(app, [listener], until_over, connection_limits)
    if server.is_broken:
        raise ServerError("the target model has failed, and the server has ended; start it again")


async def _stop_if_broken(runtime: Runtime, server: _Server) -> None:
    """Stop the server when the target has failed, so that a supervisor can start it again."""
    await runtime.wait_broken()
    server.is_broken = True
    server.stopping.set()


def _tokenizer_json(runtime: Runtime) -> tuple[str, list[int]]:
    from runtime.generation.grammar_vocabulary import tokenizer_json

    return tokenizer_json(runtime.tokenizer)


# --- the address, and who may use it --------------------------------------------------------------


def _key(arguments: argparse.Namespace) -> str | None:
    """The API key that requests must send, or None.

    Raises: SettingsError: the key cannot be sent in a header.
    """
    key: str | None = arguments.api_key if arguments.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError("the API key must be of printable ASCII characters without blanks, and not empty")
    return key


def _check_origin(origin: str) -> None:
    """Check an origin. Raises: SettingsError: browsers send no such origin, so it would silently allow nothing."""
    if not _ORIGIN.fullmatch(origin) or _DEFAULT_PORT.fullmatch(origin):
        raise SettingsError(
            f"--allow-origin {shown(origin)} is not an origin as browsers send it: give scheme and host in lower case, "
            "and the port if it is not the default one, with nothing behind, such as https://example.org"
        )


def _bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket bound to an address, not listening yet: until the models are loaded, connections are refused.

    Raises:
        SettingsError: the address is invalid, or is not a loopback address and there is no key.
        ServerError: the address cannot be bound.
    """
    check_integer("--port", port, 0, 65535)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host {shown(host)} is not an address: {error}") from error
    family, kind, protocol, _, address = found[0]
    if not has_key and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise SettingsError(
            f"--host {host} lets other machines in, which needs an API key; give one by --api-key or {KEY_VARIABLE}"
        )
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Tokens are small, and must not wait for each other.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ServerError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port") from error
    return bound


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _name(model: str | Path) -> str:
    """The name of a model, from its path or hub id."""
    if model in (DEMO_TARGET, DEMO_DRAFT):
        return f"outrider-demo-{Path(model).name}"
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else str(model)
