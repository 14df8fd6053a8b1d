"""Metrics for Prometheus."""

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

# Upper bounds of the histograms' buckets, in seconds: roughly the differences that a person notices.
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


def service_status(health: Health) -> Literal["ok", "degraded", "broken"]:
    """The status: "broken" if the target has failed, "degraded" if it decodes alone because the drafter fails."""
    if not health.target:
        return "broken"
    return "degraded" if health.draft is False else "ok"


class Metrics:
    """The metrics of a server: those of its requests, and the runtime's statistics.

    Attributes:
        registry: has all of them.
    """

    def __init__(self, runtime: Runtime) -> None:
        """All at zero.

        Args:
            runtime: its statistics are read when the metrics are requested.
        """
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_RuntimeCollector(runtime))
        self._requests = Counter("outrider_requests", "Requests by outcome", ["outcome"], registry=self.registry)
        self._error_responses = Counter(
            "outrider_refusals", "Error responses by HTTP status", ["status"], registry=self.registry
        )
        self._first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "Seconds from the call to the first token, including waiting and prefill",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._duration = Histogram(
            "outrider_answer_seconds",
            "Seconds from the call to the last token",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        for outcome in ("finished", "cancelled", "failed", "refused"):
            self._requests.labels(outcome)

    def count(self, stream: TokenStream | None, failure: Exception | None, status: int | None) -> None:
        """Count a request that has ended.

        Args:
            stream: its generation; None if it did not begin.
            failure: the error of the generation or the server; None if neither failed.
            status: the HTTP status of an error response; None if there was none.
        """
        if stream is not None:
            statistics = stream.statistics()
            if statistics.time_to_first_token is not None:
                self._first_token.observe(statistics.time_to_first_token)
            if stream.finish_reason is not None:
                self._duration.observe(statistics.elapsed)
        if status is not None:
            self._error_responses.labels(str(status)).inc()
        if failure is not None:
            outcome = "failed"
        elif status is not None:
            outcome = "refused"
        elif stream is not None and stream.finish_reason is not None:
            outcome = "finished"
        else:
            outcome = "cancelled"
        self._requests.labels(outcome).inc()


class _RuntimeCollector(Collector):
    """Metrics of a runtime, read when they are requested."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        runtime, statistics = self._runtime, self._runtime.statistics()
        status = service_status(runtime.health())
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens", statistics.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that were still cached", statistics.cached_tokens),
            ("generated_tokens", "Tokens given to clients", statistics.generated_tokens),
            ("proposed_tokens", "Drafted tokens that were judged", statistics.proposed),
            ("accepted_tokens", "Drafted tokens that were accepted", statistics.accepted),
            ("rounds", "Verify passes that gave a token", statistics.rounds),
            ("lookahead_hits", "Verdicts whose text had been drafted for", statistics.lookahead_hits),
            ("lookahead_misses", "Verdicts whose text had not", statistics.lookahead_misses),
            ("draft_failures", "Drafters that failed", statistics.draft_failures),
            ("draft_timeouts", "Times that the target stopped waiting for a late drafter", statistics.draft_timeouts),
            ("target_passes", "The target's passes that verify or decode", statistics.passes),
            ("target_pass_rows", "Rounds in these passes, of one stream each", statistics.pass_rows),
            ("pass_wait_seconds", "Seconds that rounds were ready and waited for a pass", statistics.wait_seconds),
        ):
            yield CounterMetricFamily(f"outrider_{name}", text, value=count)
        busy = CounterMetricFamily("outrider_busy_seconds", "Seconds in which the model had a job", labels=["model"])
        # Not computed from the busy fractions: rounding could make the value fall, and Prometheus takes a counter that
        # falls for one that was reset.
        for model, seconds in zip(("target", "draft"), runtime.busy_seconds, strict=True):
            busy.add_metric([model], seconds)
        yield busy
        acceptance_rate = math.nan if statistics.acceptance_rate is None else statistics.acceptance_rate
        for name, text, value in (
            ("streams", "Streams that run", runtime.num_streams),
            ("waiting", "Streams that wait for the models", runtime.num_waiting),
            ("acceptance_rate", "Accepted tokens over proposed tokens; NaN if there are none", acceptance_rate),
            (
                "longest_pass_wait_seconds",
                "Maximum of the seconds that a round was ready and waited for a pass",
                statistics.longest_wait_seconds,
            ),
            ("peak_memory_bytes", "Maximum of the memory that MLX has held at once", statistics.peak_memory),
            ("healthy", "1 while the target works", float(status != "broken")),
            (
                "degraded",
                "1 while the target decodes alone because the drafter has ended, hangs or is late",
                float(status == "degraded"),
            ),
        ):
            yield GaugeMetricFamily(f"outrider_{name}", text, value=value)
