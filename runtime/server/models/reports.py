"""Reports on a server's models: the list of them, and their health."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from protocol.settings import AUTO_DRAFT
from runtime.engine.runtime import Health
from runtime.server.models.pool import ModelPool, ModelState

ServiceStatus = Literal["ok", "degraded", "broken"]


class ModelDescription(TypedDict):
    """A served model.

    `has_chat_template` and `max_model_len`, the length of its context in tokens, are null until it has been loaded.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    draft: str | None
    has_chat_template: bool | None
    max_model_len: int | None
    state: ModelState


class ModelList(TypedDict):
    """The served models, loaded or not."""

    object: Literal["list"]
    data: list[ModelDescription]


class ModelHealth(TypedDict):
    """Whether a model works, how many of its streams are running and waiting, and the memory for their caches.

    `context_in_memory` is the length in tokens of the longest text that fits into the memory limit if it has that to
    itself; null without a bound, or if the model is not loaded. `reserved_bytes` are those of the running streams.
    """

    state: ModelState
    status: ServiceStatus
    streams: int
    waiting: int
    context_in_memory: int | None
    reserved_bytes: int


class HealthReport(TypedDict):
    """Whether the models work, and how many streams are running and waiting: in all, and for each model.

    A server whose status is "draining" is about to stop: it finishes its current requests and refuses new ones.
    """

    status: Literal["ok", "degraded", "broken", "draining"]
    ok: bool
    target: bool
    draft: bool | None
    streams: int
    waiting: int
    models: dict[str, ModelHealth]


class Version(TypedDict):
    """The server's version."""

    version: str


def describe(models: ModelPool, name: str, started: int) -> ModelDescription:
    """The description of a model."""
    slot = models[name]
    # "auto" may have found no drafter.
    has_none = str(slot.spec.draft) == AUTO_DRAFT and any(
        loaded.runtime.health().draft is None for loaded in models.in_memory(name)
    )
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "outrider",
        "draft": None if has_none else slot.spec.draft_name,
        "has_chat_template": slot.has_chat_template,
        "max_model_len": slot.context_length,
        "state": slot.state,
    }


def health_report(models: ModelPool, *, is_draining: bool) -> HealthReport:
    """The health of all models together, and of each. A model that is not in memory counts as healthy."""
    states = [loaded.runtime.health() for loaded in models.in_memory()]
    status = _worst(states)
    drafts = [state.draft for state in states if state.draft is not None]
    by_name = {spec.name: health_of(models, spec.name) for spec in models.specs}
    return {
        "status": "draining" if is_draining and status != "broken" else status,
        "ok": all(state.ok for state in states),
        "target": all(state.target for state in states),
        "draft": all(drafts) if drafts else None,
        "streams": sum(each["streams"] for each in by_name.values()),
        "waiting": sum(each["waiting"] for each in by_name.values()),
        "models": by_name,
    }


def health_of(models: ModelPool, name: str) -> ModelHealth:
    """The health of a model; of one that is in memory twice, while a load replaces it, the worse status."""
    in_memory = models.in_memory(name)
    return {
        "state": models[name].state,
        "status": _worst([each.runtime.health() for each in in_memory]),
        "streams": sum(each.runtime.num_streams for each in in_memory),
        "waiting": sum(each.runtime.num_waiting for each in in_memory) + models[name].num_waiting,
        "context_in_memory": in_memory[-1].runtime.context_in_memory if in_memory else None,
        "reserved_bytes": sum(each.runtime.memory.reserved for each in in_memory),
    }


def _worst(states: list[Health]) -> ServiceStatus:
    """The worst status: "broken" if a target has failed, "degraded" if one decodes alone because its drafter fails."""
    if not all(state.target for state in states):
        return "broken"
    return "degraded" if any(state.draft is False for state in states) else "ok"
