"""What the HTTP server reports of its calls: Prometheus metrics, and one line of the log for each.

Latencies count from a request's arrival, so time in the queue is in them. The state of the engine
is that after its last step; with replicas (replicated_engine.py) it is their sum.

Needs: prometheus_client.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import math
from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.async_engine import Stats, Stream
from serving.openai_api import Call


class Metrics:
    """Prometheus metrics, with vLLM's names after `sheaf:`."""

    def __init__(self):
        self.registry = CollectorRegistry()
        to = dict(registry=self.registry)
        buckets = [0.001 * 2**i for i in range(17)]  # 1 ms to 65 s
        gauge = lambda name, text: Gauge(f"sheaf:{name}", text, **to)
        counter = lambda name, text, *labels: Counter(f"sheaf:{name}", text, labels, **to)
        histogram = lambda name, text: Histogram(f"sheaf:{name}", text, buckets=buckets, **to)
        self.gauges = {
            "running": gauge("num_requests_running", "sequences in the batch"),
            "waiting": gauge("num_requests_waiting", "sequences in the queue"),
            "kv_usage": gauge("kv_cache_usage_perc", "fraction of KV blocks in use"),
        }
        self.totals = {
            "preemptions": counter("num_preemptions", "preempted sequences"),
            "prefix_queries": counter("prefix_cache_queries", "tokens looked up"),
            "prefix_hits": counter("prefix_cache_hits", "tokens found cached"),
            "kv_store_host_tokens": counter("kv_store_host_hits", "tokens loaded from host memory"),
            "kv_store_disk_tokens": counter("kv_store_disk_hits", "tokens loaded from disk"),
        }
        self.last_totals = Counts[str]()  # the values of totals
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens")
        self.new_tokens = counter("generation_tokens", "generated tokens")
        self.finished = counter("request_success", "finished requests", "finished_reason")
        self.ttft = histogram("time_to_first_token_seconds", "arrival to first token")
        self.itl = histogram("inter_token_latency_seconds", "time between tokens")
        self.e2e = histogram("e2e_request_latency_seconds", "arrival to last token")

    def update(self, stats: Stats) -> None:
        """The state of the engine after a step."""
        for name, gauge in self.gauges.items():
            gauge.set(stats[name])
        for name, counter in self.totals.items():
            counter.inc(max(0, stats[name] - self.last_totals[name]))
            self.last_totals[name] = stats[name]

    def count_ends(self, stream: Stream) -> None:
        """Count the requests of a stream that nobody continues."""
        for progress in stream.progress:
            self.finished.labels(progress.finish_reason or "abort").inc()

    def observe(self, stream: Stream, new_tokens: int, continued: bool = False) -> None:
        """Count the tokens and the time of a stream that has finished. continued: another stream's
        prompts and arrival were counted."""
        self.new_tokens.inc(new_tokens)
        for choice in range(0 if continued else len(stream.progress)):
            request, output, sample = stream.sample(choice)
            times = output.timestamps[1:]
            if sample == 0:
                self.prompt_tokens.inc(len(request.ids))
            if sample == 0 and times:
                self.ttft.observe(times[0] - output.arrival_time)
                self.e2e.observe(times[-1] - output.arrival_time)
                for a, b in zip(times, times[1:]):
                    self.itl.observe(b - a)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def log_line(call: Call, stream: Stream, usage: dict[str, int], key: str, seconds: float) -> str:
    """Of a call that has finished. usage: as in its response. key: the number of its API key."""
    output, reasons = stream.outputs[0], {p.finish_reason or "abort" for p in stream.progress}
    waits = [t - output.arrival_time for t in output.timestamps[:2]] + [math.nan] * 2
    user = f" user {call.user[:64]!r}" if call.user else ""
    return (
        f"{call.id} key {key}{user}: {usage['prompt_tokens']}+{usage['completion_tokens']} tokens, "
        f"queue {waits[0]:.3f} s, TTFT {waits[1]:.3f} s, total {seconds:.3f} s, "
        f"{stream.error or '/'.join(sorted(reasons))}"
    )
