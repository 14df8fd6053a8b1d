"""What is counted and timed, for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from runtime.engine.health import Health
    from runtime.engine.runtime import Runtime
    from runtime.generation.token_stream import TokenStream

# Seconds, as far apart as a person can tell.
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


def service_status(health: Health) -> Literal["ok", "degraded", "broken"]:
    """Whether texts come: as they should, undrafted though there is a drafter, or not at all."""
    if not health.target:
        return "broken"
    return "degraded" if health.draft is False else "ok"


class Metrics:
    """What a server counts of its requests, beside what the runtime counts of its models.

    Attributes:
        registry: all of it.
    """

    def __init__(self, runtime: Runtime) -> None:
        """All at zero."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_OfRuntime(runtime))
        self._requests = Counter(
            "outrider_requests", "Requests, by what became of them", ["outcome"], registry=self.registry
        )
        self._refusals = Counter(
            "outrider_refusals", "Requests that got an error, by HTTP status", ["status"], registry=self.registry
        )
        self._first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "From the call to the first token, waiting and prefill included",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._duration = Histogram(
            "outrider_answer_seconds", "From the call to the last token", buckets=_BUCKETS_S, registry=self.registry
        )
        for outcome in ("finished", "cancelled", "failed", "refused"):
            self._requests.labels(outcome)

    def count(self, stream: TokenStream | None, failure: Exception | None, status: int | None) -> None:
        """Count a request that is over, one way or another.

        Args:
            stream: its answer, or None if that never began.
            failure: what the answer failed with, if it did.
            status: with which the request was refused, or None.
        """
        if stream is not None:
            statistics = stream.statistics()
            if statistics.time_to_first_token is not None:
                self._first_token.observe(statistics.time_to_first_token)
            if stream.finish_reason is not None:
                self._duration.observe(statistics.elapsed)
        if status is not None:
            self._refusals.labels(str(status)).inc()
        if failure is not None:
            outcome = "failed"
        elif status is not None:
            outcome = "refused"
        elif stream is not None and stream.finish_reason is not None:
            outcome = "finished"
        else:
            outcome = "cancelled"
        self._requests.labels(outcome).inc()


class _OfRuntime(Collector):
    """What the runtime counts, read when somebody asks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        runtime, statistics = self._runtime, self._runtime.statistics()
        status = service_status(runtime.health())
        for name, text, count in (
            ("prompt_tokens", "Tokens of prompts", statistics.prompt_tokens),
            ("cached_prompt_tokens", "Tokens of prompts that were not read again", statistics.cached_tokens),
            ("generated_tokens", "Tokens given to clients", statistics.generated_tokens),
            ("proposed_tokens", "Drafted tokens that were judged", statistics.proposed),
            ("accepted_tokens", "Drafted tokens that stood", statistics.accepted),
            ("rounds", "Passes of the target that gave a token", statistics.rounds),
            ("lookahead_hits", "Verdicts whose text had been drafted for", statistics.lookahead_hits),
            ("lookahead_misses", "Verdicts whose text had not", statistics.lookahead_misses),
            ("draft_failures", "Drafters that failed and were left behind", statistics.draft_failures),
            ("draft_timeouts", "Times that the target went on without a late drafter", statistics.draft_timeouts),
        ):
            yield CounterMetricFamily(f"outrider_{name}", text, value=count)
        busy = CounterMetricFamily("outrider_busy_seconds", "Time at work", labels=["model"])
        # Not from the fractions: what is rounded may fall, and a counter that falls is taken for one begun anew.
        for model, seconds in zip(("target", "draft"), runtime.busy_seconds, strict=True):
            busy.add_metric([model], seconds)
        yield busy
        acceptance_rate = math.nan if statistics.acceptance_rate is None else statistics.acceptance_rate
        for name, text, value in (
            ("streams", "Answers under way", runtime.num_streams),
            ("waiting", "Answers that wait for the models", runtime.num_waiting),
            ("acceptance_rate", "Drafted tokens that stood, of those judged; NaN before any was", acceptance_rate),
            ("peak_memory_bytes", "Most memory that MLX has held at once", statistics.peak_memory),
            ("healthy", "1 while the target is at work, and texts come", float(status != "broken")),
            (
                "degraded",
                "1 while texts come undrafted: the drafter has ended, hangs or is late",
                float(status == "degraded"),
            ),
        ):
            yield GaugeMetricFamily(f"outrider_{name}", text, value=value)
