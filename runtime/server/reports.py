"""Reports on a server's models and requests: the list of models, their health, and metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Literal

import attrs
import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import TypedDict

from protocol.settings import AUTO_DRAFT
from runtime.engine.runtime import Health, Runtime
from runtime.generation.token_stream import TokenStream
from runtime.server.models.loaded_model import LoadedModel
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


class VersionBody(TypedDict):
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


# --- metrics --------------------------------------------------------------------------------------

# Upper bounds of the histograms' buckets, in seconds, about as far apart as a person notices.
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# A round waits for the passes of others, which take milliseconds.
_WAIT_BUCKETS_S = (0.001, 0.0025, 0.005, *_BUCKETS_S)

_Counts = dict[tuple[str, ...], float]
"""Counts by metric and labels."""

# Counters of a runtime: name, help, and the field of its statistics. Those by place in a proposal have vLLM's names.
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens", "prompt_tokens"),
    ("cached_prompt_tokens", "Prompt tokens that were still cached", "cached_tokens"),
    (
        "parted_prompt_tokens",
        "Prompt tokens that were read again although cached, since the cache cannot go back to where the prompts part",
        "parted_tokens",
    ),
    (
        "mismatched_prompt_tokens",
        "Prompt tokens that were read again although cached, since the settings of the texts do not allow sharing",
        "mismatched_tokens",
    ),
    (
        "evicted_prompt_tokens",
        "Prompt tokens that were read again because the caches of a text that has them had to go for want of memory",
        "evicted_tokens",
    ),
    ("generated_tokens", "Tokens given to clients", "generated_tokens"),
    ("proposed_tokens", "Drafted tokens that were judged", "proposed"),
    ("accepted_tokens", "Drafted tokens that were accepted", "accepted"),
    (
        "stale_accepted_tokens",
        "Those that a trained drafter had drafted without the newest hidden states",
        "accepted_stale",
    ),
    ("stale_rejected_tokens", "Drafted tokens of that kind that were rejected", "rejected_stale"),
    ("copied_accepted_tokens", "Accepted tokens that were copied from earlier in their text", "accepted_copied"),
    ("copied_rejected_tokens", "Drafted tokens of that kind that were rejected", "rejected_copied"),
    ("grammar_accepted_tokens", "Accepted tokens that a grammar forces", "accepted_grammar"),
    ("grammar_rejected_tokens", "Drafted tokens of that kind that were rejected", "rejected_grammar"),
    ("rounds", "Verify passes that gave a token", "rounds"),
    ("lookahead_hits", "Verdicts whose text had been drafted for", "lookahead_hits"),
    ("lookahead_misses", "Verdicts whose text had not", "lookahead_misses"),
    ("draft_failures", "Drafters that failed", "draft_failures"),
    ("draft_timeouts", "Times that the target stopped waiting for a late drafter", "draft_timeouts"),
    ("target_passes", "The target's passes that verify or decode", "passes"),
    ("target_pass_rows", "Rounds in these passes, of one stream each", "pass_rows"),
    ("pass_wait_seconds", "Seconds that rounds were ready and waited for a pass", "wait_seconds"),
    (
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were accepted, by place in the proposal",
        "accepted_by_position",
    ),
    (
        "spec_decode_num_draft_tokens_per_pos",
        "Drafted tokens that were judged, by place in the proposal",
        "proposed_by_position",
    ),
)
_BUSY_SECONDS = ("busy_seconds", "Seconds in which a model had a job", "busy_seconds")
# Gauges of a model: name, help, and the value that its health stands for.
_GAUGES: tuple[tuple[str, str, Callable[[ModelHealth], float]], ...] = (
    ("model_loaded", "1 while the model is in memory", lambda health: health["state"] == "loaded"),
    ("streams", "Streams that run", lambda health: health["streams"]),
    (
        "waiting",
        "Streams that wait for the models, and requests that wait for one to be loaded",
        lambda health: health["waiting"],
    ),
    ("reserved_bytes", "Memory reserved for the caches of streams", lambda health: health["reserved_bytes"]),
    (
        "context_in_memory_tokens",
        "Tokens of the longest text that fits into the memory limit; 0 without a bound, and while not loaded",
        lambda health: health["context_in_memory"] or 0,
    ),
    ("healthy", "1 while the target works, or is not loaded", lambda health: health["status"] != "broken"),
    (
        "degraded",
        "1 while the target decodes alone because the drafter has ended, hangs or is late",
        lambda health: health["status"] == "degraded",
    ),
)
_ZERO: _Counts = {
    **{(metric,): 0.0 for metric, _, field in _COUNTERS if not field.endswith("_by_position")},
    ("busy_seconds", "target"): 0.0,
    ("busy_seconds", "draft"): 0.0,
}


@attrs.define
class RequestOutcome:
    """How a request has ended, for the metrics and the access log."""

    model: str | None = None  # None if it asked for none that is served, or was rejected before
    streams: list[TokenStream] = attrs.Factory(list)  # its generations that have begun
    num_texts: int = 0  # generations that it asks for; 0 until they are known
    num_prompt_tokens: int = 0  # likewise
    is_sent: bool = False  # whether the whole response was sent
    failure: Exception | None = None  # of the generation or of the server
    status: int | None = None  # of an error response

    @property
    def word(self) -> str:
        """The outcome, as the metrics name it."""
        if self.failure is not None:
            return "failed"
        if self.status is not None:
            return "refused"
        num_finished = sum(stream.finish_reason is not None for stream in self.streams)
        return "finished" if self.is_sent or 0 < num_finished == self.num_texts else "cancelled"


class Metrics(Collector):
    """The metrics of a server: those of its requests, and the statistics of its models when they are asked for.

    All of them can be added up over several servers: none is a ratio, as ratios can be computed from the sums. Counters
    of a model that was unloaded are kept, and those of its next load are added.
    """

    def __init__(self, models: ModelPool, *, is_draining: Callable[[], bool]) -> None:
        self._models = models
        # Counts of runtimes that are gone, by model.
        self._past: dict[str, _Counts] = dict.fromkeys((spec.name for spec in models.specs), _ZERO)
        models.on_unloading = self._keep
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self._requests = Counter("outrider_requests", "Requests by outcome", ["outcome"], registry=self.registry)
        self._error_responses = Counter(
            "outrider_refusals", "Error responses by HTTP status", ["status"], registry=self.registry
        )

        def histogram(name: str, text: str, buckets: Sequence[float] = _BUCKETS_S) -> Histogram:
            made = Histogram(f"outrider_{name}_seconds", text, ["model"], buckets=buckets, registry=self.registry)
            for spec in models.specs:
                made.labels(spec.name)
            return made

        self._first_token = histogram(
            "time_to_first_token", "Seconds from the call to the first token, including waiting and prefill"
        )
        self._duration = histogram("answer", "Seconds from the call to the last token")
        self._longest_wait = histogram(
            "longest_pass_wait",
            "Seconds that a round of an answer was ready and waited for a pass: the longest of each answer",
            _WAIT_BUCKETS_S,
        )
        draining = Gauge(
            "outrider_draining", "1 while the server is about to stop and takes no requests", registry=self.registry
        )
        draining.set_function(is_draining)
        for outcome in ("finished", "cancelled", "failed", "refused"):
            self._requests.labels(outcome)

    def count(self, outcome: RequestOutcome) -> None:
        """Count a request that has ended."""
        for stream in outcome.streams:
            statistics = stream.statistics()
            if statistics.time_to_first_token is not None:
                self._first_token.labels(outcome.model).observe(statistics.time_to_first_token)
                self._longest_wait.labels(outcome.model).observe(statistics.longest_wait_seconds)
            if stream.finish_reason is not None:
                self._duration.labels(outcome.model).observe(statistics.elapsed)
        if outcome.status is not None:
            self._error_responses.labels(str(outcome.status)).inc()
        self._requests.labels(outcome.word).inc()

    # --- the models -------------------------------------------------------------------------------

    def _keep(self, loaded: LoadedModel) -> None:
        self._past[loaded.name] = _added(self._past[loaded.name], _counts(loaded.runtime))

    def collect(self) -> Iterator[Metric]:
        counts = {
            name: reduce(_added, (_counts(each.runtime) for each in self._models.in_memory(name)), past)
            for name, past in self._past.items()
        }
        for metric, text, field in (*_COUNTERS, _BUSY_SECONDS):
            labels = ["position"] if field.endswith("_by_position") else ["actor"] if field == "busy_seconds" else []
            family = CounterMetricFamily(f"outrider_{metric}", text, labels=["model", *labels])
            for name, each in counts.items():
                for (counted, *values), number in each.items():
                    if counted == metric:
                        family.add_metric([name, *values], number)
            yield family
        loads = CounterMetricFamily("outrider_model_loads", "Loads of a model, by outcome", labels=["model", "outcome"])
        for name in counts:
            loads.add_metric([name, "loaded"], self._models[name].num_loads)
            loads.add_metric([name, "failed"], self._models[name].num_failed_loads)
        yield loads
        health = {name: health_of(self._models, name) for name in counts}
        for metric, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"outrider_{metric}", text, labels=["model"])
            for name, state in health.items():
                gauge.add_metric([name], value(state))
            yield gauge
        yield GaugeMetricFamily(
            "outrider_peak_memory_bytes", "Maximum of the memory that MLX has held at once", value=mx.get_peak_memory()
        )
        yield GaugeMetricFamily("outrider_memory_bytes", "Memory that MLX holds", value=mx.get_active_memory())


def _counts(runtime: Runtime) -> _Counts:
    """The counters of a runtime, by metric and labels.

    Busy seconds are not computed from the busy fractions: rounding could make the value fall, and Prometheus takes a
    counter that falls for one that was reset.
    """
    statistics, counts = runtime.statistics(), dict[tuple[str, ...], float]()
    for metric, _, field in _COUNTERS:
        value = getattr(statistics, field)
        if field.endswith("_by_position"):
            counts |= {(metric, str(place)): number for place, number in enumerate(value)}
        else:
            counts[metric,] = value
    counts["busy_seconds", "target"], counts["busy_seconds", "draft"] = runtime.busy_seconds
    return counts


def _added(one: _Counts, other: _Counts) -> _Counts:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
