"""All replicas of one engine process: routes requests to real-time drivers and their tokens to streams.

Input: accepted `Stream`s; step results of the cores. Output: tokens on streams; ended records through `on_end`.
Does not: know HTTP, or decide scheduling.
"""
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from engine.decision_log import DecisionLog
from engine.http_api import Call
from engine.http_driver import Lateness, RealTimeDriver
from engine.http_stream import Stream
from engine.journal import Journal
from engine.lengths import length_key, text_blocks
from engine.live import Live
from engine.metrics import EngineMetrics
from engine.request import Request, predict_tokens, sample_tokens
from engine.router import Router
from engine.scheduler import Core, Reject
from engine.settings import EngineConfig
from engine.virtual import lane_seed


class Fleet:
    """The replicas behind one address."""

    def __init__(self, config: EngineConfig, *, output_mu: float, output_sigma: float,
                 resolve: Callable[[Mapping[str, Any]], EngineConfig] | None = None) -> None:
        """`resolve`: the settings of the engine's config with some keys changed, for a rollout."""
        self.config = config
        self.on_end: Callable[[Stream, dict[str, Any]], None] = lambda stream, record: None
        self._mu, self._sigma = output_mu, output_sigma
        self.metrics = [EngineMetrics(config.max_model_len) for _ in range(config.replicas)]
        self.drivers = [RealTimeDriver(Core(config, lane_seed(config.seed, index)), self._sink, self._dropped)
                        for index in range(config.replicas)]
        self._cores = [driver.core for driver in self.drivers]
        self.decisions = DecisionLog()
        for index, core in enumerate(self._cores):
            core.journal = Journal(self.decisions.add, index)
        self.live = Live(config, self.drivers, resolve, decision_s=lambda: self.lateness()["decision_mean_s"] or 0.0)
        self._router = Router(config)
        self._index = {id(driver): index for index, driver in enumerate(self.drivers)}
        self._doubles = 0

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(self, stream: Stream) -> Reject | None:
        """Give a request to a replica; None, or why it was refused."""
        now_s = stream.received_s
        request = self._request(stream)
        for driver in self.drivers:  # the router must see all replicas as of now
            driver.advance(now_s)
        live = self.live
        index = live.choose(request) if live.splits else self._router.choose(request, self._cores)
        driver, metrics = self.drivers[index], self.metrics[index]
        stream.attach(driver, metrics, index)
        stream.core_request = request
        request.user = stream
        answer = driver.submit(request, now_s)
        if live.watching:
            live.arrived(request, index)
        if isinstance(answer, Reject):
            metrics.rejections[answer.reason] += 1
            request.user = stream.core_request = None
            return answer
        if stream.closed:  # accepted and given up at once
            return None
        stream.queued_s = now_s
        stream.on_release = self._complete
        stream.open()
        return None

    def _request(self, stream: Stream) -> Request:
        """The core's view of a call."""
        call = stream.call
        key = length_key(call.digest, self.config.seed)
        if call.ignore_eos:
            output = stream.max_tokens
        else:
            sampled = sample_tokens(key, self._mu, self._sigma, stream.max_tokens)
            output = min(stream.max_tokens, max(sampled, call.min_tokens))
        core_id = stream.request_id
        while any(core_id in core.by_id for core in self._cores):  # a client may send an id twice
            self._doubles += 1
            core_id = f"{stream.request_id}#{self._doubles}"
        return Request(
            core_id, stream.received_s, call.prompt_tokens, stream.max_tokens, output,
            tenant=call.tenant or "", request_class=call.request_class or "", priority=call.priority,
            prefix_hashes=prompt_hashes(call, self.config.block_size) if self.config.prefix_caching else (),
            predicted_tokens=predict_tokens(output, key, self.config.prediction_sigma))

    def leave(self, stream: Stream) -> None:
        """The client of a stream is gone: abort its request."""
        if stream.closed:
            return
        now_s = time.monotonic()
        if stream.pending is None:
            name = stream.core_request.request_id
            stream.driver.abort(name, now_s)
            self.live.left(name, now_s)
        if not stream.closed:  # the abort may have run the step that ended it
            self._end(stream, "aborted", "abort", now_s, "abort")

    # --- steps -------------------------------------------------------------------------------------------------

    def _sink(self, driver: RealTimeDriver, plan: Any, result: Any, end_s: float) -> None:
        """Send the tokens of one step."""
        emitted = 0
        for request in result.tokens:
            emitted += 1
            stream = request.user
            reason = request.finish_reason
            stream.tokens(1, reason)
            if reason is not None:
                stream.pending = reason
                if stream.held is None:
                    self._complete(stream, reason)
            if stream.broken and not stream.closed:
                if reason is None:
                    driver.core.abort(request.request_id, end_s)
                stream.end_broken()
                self._end(stream, "fault", stream.fault.kind, time.monotonic(), "error")
        self.metrics[self._index[id(driver)]].step(plan.tokens, emitted)

    def _dropped(self, request: Request, now_s: float) -> None:
        """The policy gave a waiting request up: 503, or an error event when the stream is open."""
        stream: Stream = request.user  # type: ignore[assignment]
        if stream.queued_s is None:  # dropped by the very step that its arrival started
            stream.queued_s = now_s
        reason = request.reason or "hopeless"
        stream.metrics.rejections[reason] += 1
        stream.fail(503, f"given up by the scheduler: {reason}")
        self._end(stream, "rejected", reason, time.monotonic(), None)

    def _complete(self, stream: Stream, reason: str) -> None:
        """The answer is whole: end it."""
        if stream.broken or stream.closed:
            return
        stream.finish(reason)
        self._end(stream, "ok", reason, time.monotonic(), reason)

    def _end(self, stream: Stream, outcome: str, reason: str, done_s: float, finished: str | None) -> None:
        stream.closed = True
        request = stream.core_request
        stream.scheduled_s = request.scheduled_s
        status = 503 if outcome == "rejected" and not stream.opened else 200
        record = stream.record(outcome, reason, status, done_s, request.preemptions)
        if finished is not None:
            stream.metrics.request(record, finished, stream.max_tokens)
        request.user = stream.core_request = None
        self.on_end(stream, record)

    # --- figures -----------------------------------------------------------------------------------------------

    def metric_rows(self) -> list[tuple[EngineMetrics, dict[str, float]]]:
        """Metrics and gauges of each replica."""
        rows = []
        for core, metrics in zip(self._cores, self.metrics, strict=True):
            state = core.snapshot()
            metrics.preemptions = state.counters.preemptions
            metrics.prefix_queries, metrics.prefix_hits = state.prefix_queries, state.prefix_hits
            rows.append((metrics, {"running": state.running, "waiting": state.waiting + state.swapped,
                                   "capacity": state.waiting, "deferred": state.swapped, "kv_usage": state.kv_usage}))
        return rows

    def snapshots(self) -> list[dict[str, Any]]:
        """The core's own view of each replica."""
        states = [core.snapshot() for core in self._cores]
        return [{**asdict(state), "kv_usage": state.kv_usage, "busy": driver.busy}
                for state, driver in zip(states, self.drivers, strict=True)]

    def lateness(self) -> dict[str, Any]:
        """Lateness over all replicas."""
        whole = Lateness()
        for driver in self.drivers:
            whole.merge(driver.lateness)
        return whole.stats()

    def reset_lateness(self) -> None:
        """Start judging anew."""
        for driver in self.drivers:
            driver.lateness.reset()

    def steps(self) -> int:
        """Steps of all replicas since the start."""
        return sum(driver.steps for driver in self.drivers)

    def decision_total_s(self) -> float:
        """Scheduler CPU seconds since the start."""
        return sum(driver.decision_total_s for driver in self.drivers)


def prompt_hashes(call: Call, block_size: int) -> tuple[int, ...]:
    """A hash for each full block of the prompt that includes all words before it."""
    if call.told:
        return text_blocks(call.text, call.prompt_tokens, block_size)
    words = call.text.split()
    hashes = []
    previous = b""
    for start in range(0, len(words) - block_size + 1, block_size):
        text = " ".join(words[start: start + block_size]).encode()
        previous = hashlib.blake2b(previous + text, digest_size=8).digest()
        hashes.append(int.from_bytes(previous, "little"))
    return tuple(hashes)
