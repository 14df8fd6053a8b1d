"""The command `serve`: the models behind an address, for OpenAI's clients and for a browser.

Nothing goes to stdout. Nothing here imports mlx, or what the extra `serve` brings, before the arguments are checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import re
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from protocol.errors import OutriderError, SettingsError
from protocol.reprs import shown
from runtime.cli.model_arguments import Models
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.terminal.display import Display, Outcome, say, show
from runtime.terminal.signals import quitting, until_signal

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

# Where the key is looked for: other users of a machine can read a command line.
KEY_VARIABLE = "OUTRIDER_API_KEY"

# Names of this machine; a page of another host cannot have them.
_OURSELVES = ("localhost", "127.0.0.1", "[::1]")

# As a browser sends it, to the letter; what differs from that would never be found to be the same.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_USUAL_PORT = re.compile(r"http://.*:80|https://.*:443")

# Connections that may wait to be accepted.
_BACKLOG = 128

_NEEDED = ("hypercorn", "prometheus_client", "pydantic", "starlette")


class ServerError(OutriderError):
    """The address cannot be had, or the models are not there any more."""


@attrs.frozen
class Option:
    """An option that is a whole number.

    Attributes:
        name: as attributes have it.
        low: the least that it may be.
        default: None for no bound.
        help: what it is for.
    """

    name: str
    low: int
    default: int | None
    help: str

    @property
    def flag(self) -> str:
        """As it is typed."""
        return f"--{self.name.replace('_', '-')}"


_LIMITS = (
    Option("max_streams", 1, 4, "requests that the models work on at once"),
    Option("max_waiting", 0, 32, "requests that may wait beside those; what comes then is told to try again (429)"),
    Option("max_tokens", 1, 512, "tokens of an answer where a request does not say how many"),
    Option("max_tokens_limit", 1, None, "most tokens that a request may ask for (default: what the context holds)"),
    Option("max_prompt_tokens", 1, None, "most tokens of a prompt (default: what the model's context holds)"),
    Option(
        "prefill_step_size",
        1,
        None,
        "tokens of a prompt that are read in one pass, for which all other answers wait (default: as many as are "
        "cheap, in 0.2 s at most)",
    ),
    Option("max_body_bytes", 1, 2 * 2**20, "longest body of a request"),
    Option("max_connections", 1, 1000, "connections at a time; others wait"),
    Option("stalled_seconds", 1, 60, "how long a client may leave what it is sent unread; of a long body, each 64 KiB"),
    Option("grace_seconds", 0, 5, "how long answers may take to come to their end when the server is stopped"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked of `serve`, beside the models and the BLAS."""
    group = parser.add_argument_group("address")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="to listen at; any but this machine's own needs an API key (default: %(default)s)",
    )
    group.add_argument("--port", type=int, default=8000, help="0 takes one that is free (default: %(default)s)")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"what requests must bring (default: what {KEY_VARIABLE} says, else none)"
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help='another name that the server may be asked for by, or "*"; without an API key it goes by none but this '
        "machine's own",
    )
    group.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help='let pages of another origin use the server, such as https://example.org (no path, no "/" at the end), or '
        'those of any: "*"',
    )
    group.add_argument(
        "--model-name", metavar="NAME", help="what the target is called (default: the end of its path or id)"
    )
    parser.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="do not write a line on stderr for each request (prompts and keys are never in it)",
    )
    limits = parser.add_argument_group("limits")
    for option in _LIMITS:
        default = "" if option.default is None else " (default: %(default)s)"
        limits.add_argument(option.flag, metavar="N", type=int, default=option.default, help=option.help + default)


def serve(arguments: argparse.Namespace, models: Models) -> Outcome:
    """Serve until a signal ends it; one that comes while the models load ends that, as an interruption.

    Args:
        arguments: as they were given.
        models: what to serve.

    Returns: how it ended; to be stopped once it serves is no interruption.

    Raises: OutriderError: the arguments make no sense, the address cannot be had, or the target has failed.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SettingsError(f"serve needs {', '.join(missing)}; pip install 'outrider[serve]'")
    for option in _LIMITS:
        value = getattr(arguments, option.name)
        if value is not None and value < option.low:
            raise SettingsError(f"{option.flag} must be at least {option.low}, got {value}")
    for origin in arguments.allow_origin:
        _check_origin(origin)
    key = _key(arguments)
    bound = _bind(arguments.host, arguments.port, has_key=key is not None)
    outcome = Outcome()
    with bound, Display() as display, quitting(display):
        display.loading(models.loaded)
        import runtime.engine.opening
        import runtime.server.app  # noqa: F401  imported here, where Ctrl-C need not wait for it

        server = _Server(arguments, models, key, bound, display)
        work = partial(_open_and_serve, server)
        trio.run(partial(until_signal, work, outcome, display, ends_gently=server.ends_gently))
    return outcome


@attrs.define
class _Server:
    """A server to be.

    Attributes:
        arguments: as they were given.
        models: what to serve.
        key: what requests must bring, or None.
        bound: to the address, not listening yet.
        display: told what goes on.
        is_serving: whether it does already.
        is_broken: whether the target has failed.
        stopping: when it is to end.
    """

    arguments: argparse.Namespace
    models: Models
    key: str | None
    bound: socket.socket
    display: Display
    is_serving: bool = False
    is_broken: bool = False
    stopping: trio.Event = attrs.field(factory=trio.Event)

    def ends_gently(self) -> bool:
        """Have answers come to their end; False where nothing is served yet."""
        self.stopping.set()
        return self.is_serving


async def _open_and_serve(server: _Server) -> None:
    """Load the models, and serve until told to stop.

    Raises:
        OutriderError: a model cannot be loaded, or has no tokenizer.
        ServerError: the target has failed.
    """
    arguments, models = server.arguments, server.models
    from runtime.engine.opening import open as open_runtime
    from runtime.server.access_log import AccessLog
    from runtime.server.app import Service, application
    from runtime.server.connections.listener import ConnectionLimits, serve
    from runtime.server.endpoint import Limits
    from runtime.server.grammars.checker import grammar_checker
    from runtime.server.timelines import Timelines

    name = arguments.model_name or _name(models.target)
    limits = Limits(
        max_body_bytes=arguments.max_body_bytes,
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
        hosts=["*"] if server.key is not None else [*_OURSELVES, arguments.host, *arguments.allow_host],
        origins=arguments.allow_origin,
    )
    patience = ConnectionLimits(
        max_connections=arguments.max_connections,
        stalled_s=arguments.stalled_seconds,
        grace_s=arguments.grace_seconds,
    )
    timelines = Timelines()
    opening = open_runtime(
        models.target, models.draft, max_streams=arguments.max_streams, trace=timelines, **models.options
    )
    async with opening as runtime, grammar_checker(partial(_tokenizer_json, runtime)) as check:
        server.display.clear()
        # Not before: whoever asks whether the server is there is to hear that it can answer.
        server.bound.listen(_BACKLOG)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(server.bound))
        app = application(runtime, service, timelines, check)
        if arguments.access_log:
            app = AccessLog(app, show)
        say(f"{name} is served at {_url(server.bound)} (OpenAI's interface at /v1); Ctrl-C stops it")
        server.is_serving = True

        async def until_over() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_if_broken, runtime, server)
                await server.stopping.wait()
                nursery.cancel_scope.cancel()

        await serve(app, [listener], until_over, patience)
    if server.is_broken:
        raise ServerError("the target model has failed, and the server has ended; start it again")


async def _stop_if_broken(runtime: Runtime, server: _Server) -> None:
    """End the server where it has nothing to answer with any more: whoever supervises it starts another."""
    await runtime.wait_broken()
    server.is_broken = True
    server.stopping.set()


def _tokenizer_json(runtime: Runtime) -> tuple[str, list[int]]:
    from runtime.generation.grammar_vocabulary import tokenizer_json

    return tokenizer_json(runtime.tokenizer)


# --- the address, and who may use it --------------------------------------------------------------


def _key(arguments: argparse.Namespace) -> str | None:
    """The API key that requests must bring, or None.

    Raises: SettingsError: it cannot be sent in a header.
    """
    key: str | None = arguments.api_key if arguments.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError("the API key must be of printable ASCII characters without blanks, and not empty")
    return key


def _check_origin(origin: str) -> None:
    """Raises: SettingsError: no page has such an origin, and it would silently let none in."""
    if not _ORIGIN.fullmatch(origin) or _USUAL_PORT.fullmatch(origin):
        raise SettingsError(
            f"--allow-origin {shown(origin)} is not what a browser calls an origin: give scheme and host in small "
            "letters, and the port where it is not the usual one, with nothing behind, such as https://example.org"
        )


def _bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket at an address, not listening yet: until the models are there, connections are refused.

    Raises:
        SettingsError: the address makes no sense, or is not this machine's own and there is no key.
        ServerError: it cannot be had.
    """
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port must be from 0 to 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host {shown(host)} is no address: {error}") from error
    family, kind, protocol, _, address = found[0]
    if not has_key and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise SettingsError(
            f"--host {host} lets other machines in, and they need a key: give one with --api-key, or in {KEY_VARIABLE}"
        )
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Tokens are small, and are not to wait for each other.
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
    """What a model is called, by its path or hub id."""
    if model in (DEMO_TARGET, DEMO_DRAFT):
        return f"outrider-demo-{Path(model).name}"
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else str(model)
