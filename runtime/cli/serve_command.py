"""The command `outrider serve`: serves the models over HTTP, to OpenAI clients and to browsers.

Nothing goes to stdout. Nothing here imports mlx, or packages of the extra `serve`, before the arguments are checked.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import ModelError, RuntimeBrokenError, SettingsError
from protocol.open_options import MAX_BATCH, OpenOptions
from protocol.options import options_of
from runtime.cli.arguments.models import Models, add_models, models_of
from runtime.cli.arguments.settings import add_defaults, add_flags, add_option, add_options, defaults_of
from runtime.cli.command import Command, follow_target
from runtime.cli.flags import flag
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.loading.gguf.names import is_gguf, stem_of
from runtime.loading.model_spec import ModelSpec
from runtime.server.connections import address
from runtime.server.limits import Limits
from runtime.terminal.display import CommandOutcome, Display, print_message, print_stderr
from runtime.terminal.signals import SignalScope, exit_on_signal

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from runtime.server.context import RequestAdmission
    from runtime.server.models.pool import ModelPool
    from runtime.server.models.served_model import ServedModel

# Host names of this machine. Pages of other hosts cannot have them.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")

# Maximum number of connections that wait to be accepted, as far as the system allows it. Any client beyond them tries
# again after 1 s, 3 s and 7 s, whoever filled the queue.
_BACKLOG = 1024

# Options of `open` that are limits of a server, with their defaults here.
_STREAM_LIMITS = {"max_streams": "auto", "max_batch": MAX_BATCH}

_REQUIRED_PACKAGES = ("h11", "prometheus_client", "pydantic", "starlette")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser, samples=True)
    add_flags(
        parser.add_argument_group("address"),
        (
            "--host HOST",
            "address to listen on; any but a loopback address needs an API key (default: %(default)s)",
            {"default": "127.0.0.1"},
        ),
        ("--port PORT", "port; 0 picks a free one (default: %(default)s)", {"type": int, "default": 8000}),
        ("--api-key KEY", f"API key that requests must send (default: {address.KEY_VARIABLE}, else none)"),
        (
            "--allow-host NAME ...",
            'further name to accept in Host headers, or "*" for any; may be repeated (default: names of this machine; '
            "with an API key, any)",
        ),
        (
            "--allow-origin ORIGIN ...",
            'origin whose pages may use the server, such as https://example.org (no path, no "/" at the end), or "*" '
            "for any",
        ),
        (
            "--trusted-proxy ADDRESS ...",
            "address of a proxy, or a network of proxies such as 10.0.0.0/8, whose X-Forwarded-For is trusted",
        ),
    )
    add_flags(
        parser.add_argument_group("names and several models"),
        ("--model-name NAME", "name of the target in the API (default: the last part of its path, or its hub id)"),
        (
            "--config FILE",
            "TOML file with several models, each loaded at its first request; replaces --target and --draft; cache "
            "options and settings given here are for models that do not set them in the file",
        ),
    )
    add_defaults(parser)
    add_flags(
        parser,
        (
            "--strict",
            "refuse requests with unknown fields, unknown model names or a max_tokens above --max-tokens-limit, "
            "instead of ignoring or lowering these",
        ),
        ("--no-access-log", "do not log each request on stderr (the log has no prompts and no keys)"),
    )
    group = parser.add_argument_group("limits")
    for name, default in _STREAM_LIMITS.items():
        add_option(group, name, options_of(OpenOptions)[name], default)
    add_options(group, Limits)


def serve(arguments: argparse.Namespace) -> CommandOutcome:
    """Serve until a signal stops the server. Only a signal while the models load counts as an interruption."""
    models = models_of(arguments)
    if missing := [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]:
        raise SettingsError(f"serve needs {', '.join(missing)}; pip install 'outrider[serve]'")
    given = vars(arguments)
    limits = Limits(**{name: given[name] for name in options_of(Limits) if name in given})
    options = {name: given.get(name, default) for name, default in _STREAM_LIMITS.items()} | models.options
    OpenOptions(**options)
    for origin in arguments.allow_origin:
        address.check_origin(origin)
    proxies = [address.network(proxy) for proxy in arguments.trusted_proxy]
    limits = attrs.evolve(limits, max_connections=address.make_room_for_connections(limits.max_connections))
    _check_no_model(arguments, models)
    key = address.api_key(arguments.api_key)
    bound = address.bind(arguments.host, arguments.port, has_key=key is not None)
    outcome = CommandOutcome()
    with bound, Display() as display, exit_on_signal(display):
        if arguments.config is None:
            display.show_loading(models.loaded)
        import runtime.engine.opening
        import runtime.server.app  # noqa: F401  imported here, where Ctrl-C ends it at once

        served = _served(arguments, models, options)
        server = _Server(
            outcome=outcome,
            display=display,
            arguments=arguments,
            models=models,
            served=served,
            limits=limits,
            key=key,
            proxies=proxies,
            bound=bound,
        )
        trio.run(server.run, server.open_and_serve)
    return outcome


@attrs.define(eq=False, slots=False, kw_only=True)
class _Server(SignalScope):
    """A server, from its arguments to its end. The first signal lets current answers end, or cancels the load."""

    _arguments: argparse.Namespace
    _models: Models
    _served: Sequence[ServedModel]
    _limits: Limits
    _key: str | None
    _proxies: list[address.IpNetwork]
    _bound: socket.socket  # not listening yet
    _is_serving: bool = False
    _failure: RuntimeBrokenError | None = None  # of all streams, if the target has failed
    _stopping: trio.Event = attrs.field(factory=trio.Event)

    def end_gently(self) -> bool:
        self._stopping.set()
        return self._is_serving

    async def open_and_serve(self) -> None:
        arguments, limits = self._arguments, self._limits
        import mlx.core as mx

        from runtime.server.app import Service, application
        from runtime.server.connections.connection import serve
        from runtime.server.middleware import AccessLog, ForwardedClients
        from runtime.server.models.loaded_model import free_memory, open_model
        from runtime.server.models.pool import model_pool

        service = Service(
            limits=limits,
            api_key=self._key,
            hosts=["*"] if self._key is not None else [*_LOCAL_HOSTS, arguments.host, *arguments.allow_host],
            origins=arguments.allow_origin,
            is_strict=arguments.strict,
        )
        if arguments.config is None:
            self._models.print_default()
        self._models.use_device()
        pool = model_pool(
            self._served,
            partial(open_model, schema_s=limits.schema_s),
            memory_limit=limit if isinstance(limit := self._models.options.get("memory_limit"), int) else None,
            used_bytes=mx.get_active_memory,
            free_memory=free_memory,
            # The display has already shown the loading of a single model.
            announce=print_message if arguments.config is not None else lambda _: None,
        )
        async with pool as models:
            if arguments.config is None:
                await _load_now(models)
            self.display.clear()
            if arguments.draft != "none":
                for spec in models.specs:
                    await trio.to_thread.run_sync(_name_drafter, spec)
            # Imported objects stay: half a million that each garbage collection would otherwise traverse.
            gc.freeze()
            # Not earlier: a client that can connect must be able to get answers.
            self._bound.listen(_BACKLOG)
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._bound))
            app = application(models, service)
            names = [spec.name for spec in models.specs]
            what = f"{names[0]} is" if len(names) == 1 else f"{', '.join(names)} are"
            print_message(f"{what} served at {address.url(self._bound)} (OpenAI's interface at /v1); Ctrl-C stops it")
            self._is_serving = True
            outer: ASGIApp = app if arguments.no_access_log else AccessLog(app, print_stderr)
            if self._proxies:
                outer = ForwardedClients(outer, self._proxies)
            until_over, drain = partial(self._until_over, models), partial(self._drain, app.admission)
            await serve(outer, [listener], until_over, limits, drain)
        if self._failure is not None:
            raise address.ServerError(f"the server has ended, start it again: {self._failure}")
        print_message("the server has ended")

    async def _until_over(self, models: ModelPool) -> None:
        """Wait for a signal, or for the target of a single model to fail: a supervisor can restart the server then."""

        async def stop_if_broken() -> None:
            self._failure = await models.wait_broken()
            self._stopping.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_if_broken)
            await self._stopping.wait()
            nursery.cancel_scope.cancel()

    async def _drain(self, admission: RequestAdmission) -> None:
        admission.drain()
        # If the target has failed, clients only have to be told so.
        if (num := admission.num_admitted) and self._failure is None:
            print_message(
                f"stopping: finishing {num} request{'' if num == 1 else 's'} (at most {self._limits.grace_s:g} s, "
                "--grace-seconds); new ones are refused; another signal ends the server at once"
            )
        await admission.wait_drained()


async def _load_now(models: ModelPool) -> None:
    from runtime.loading.model_files import defaults_message
    from runtime.server.errors import ModelLoadError

    try:
        async with models.use(models.specs[0].name) as model:
            if message := defaults_message(model.name, model.runtime.model_defaults, model.spec.settings):
                print_message(message)
    except ModelLoadError as error:
        raise (error.__cause__ or error) from None


def _name_drafter(spec: ServedModel) -> None:
    """Print which drafter could be given to a model that has none, if one is known. Nothing is downloaded."""
    from runtime.loading.drafters import suggest_draft

    if spec.draft is not None:
        return
    with suppress(ModelError):  # the target is not on this disk yet
        for best in suggest_draft(spec.target.path if isinstance(spec.target, ModelSpec) else spec.target)[:1]:
            print_message(f"{spec.name} decodes without a drafter; {best.described} could draft for it")


def _served(arguments: argparse.Namespace, models: Models, options: Mapping[str, Any]) -> Sequence[ServedModel]:
    from runtime.server.models.served_model import ServedModel, read_models

    defaults = defaults_of(arguments)
    if arguments.config is not None:
        return read_models(arguments.config, options, defaults)
    name = arguments.model_name or _name(models.target)
    draft_name = None if models.draft is None else _name(models.draft)
    return [ServedModel(name, models.target, models.draft, draft_name, options, defaults, is_pinned=True)]


def _check_no_model(arguments: argparse.Namespace, models: Models) -> None:
    if arguments.config is None:
        return
    if given := [flag(name) for name in ("target", "draft", "model_name") if getattr(arguments, name) is not None]:
        raise SettingsError(f"--config names the models; leave out {', '.join(given)}")
    if isinstance(models.target, ModelSpec) or isinstance(models.draft, ModelSpec):
        raise SettingsError("--config says how each model is loaded; leave out adapters, quantisation and the like")


def _name(source: str | Path | ModelSpec) -> str:
    model = source.path if isinstance(source, ModelSpec) else source
    if model in (DEMO_TARGET, DEMO_DRAFT):
        return f"outrider-demo-{Path(model).name}"
    if is_gguf(model):
        return stem_of(str(model))
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else str(model)


def _check_for_ranks(arguments: argparse.Namespace) -> None:
    if arguments.config is not None:
        raise SettingsError("--config names several models, and ranks share one target; give it by --target")


COMMAND = Command(
    name="serve",
    usage="[options]",
    help="serve an OpenAI-compatible HTTP API and a web page",
    description="Serve models over HTTP: an OpenAI-compatible API at /v1, a web page at /, /health, /metrics for "
    "Prometheus, /openapi.json and /docs. A client that disconnects cancels its request. Needs the extra serve.",
    epilog="""examples:
  outrider serve --target org/model --draft org/small --port 8080
  OUTRIDER_API_KEY=... outrider serve --host 0.0.0.0 --max-streams 8
  outrider serve --config models.toml --memory-limit 24GB

Ctrl-C or SIGTERM stops the server; current answers have some seconds to end. A second one exits at once. If the \
target model fails, the server exits with status 1, so that a supervisor can restart it. With --config, a model \
that fails is loaded again at its next request instead.""",
    common="--target --draft --host --port --api-key --config --memory-limit --max-streams --max-tokens --lookahead",
    add_arguments=_add_arguments,
    run=serve,
    follow=follow_target,
    check_for_ranks=_check_for_ranks,
)
