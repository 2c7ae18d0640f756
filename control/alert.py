"""What a service's own counters say over time: rates, percentiles, attainment in windows, and alerts.

Input: `Look`s at a metrics page, in order of time; None for a look that failed. Output: `View` with `Alert`s; arrivals
for a trace. Does not: fetch pages, draw, or act on the service.

Alerts
 queue   waiting x mean service time / running slots against the P95 target: a request that arrives now waits about
         that long. Near from NEAR of the target on, over from the target on. (The reference method's "queue depth x
         mean service time" counts one slot; a batching server has many.)
 burn    share of misses / allowed share, in a long and a short window at once (Google SRE workbook): the long one
         says that it matters, the short one that it still goes on. Misses are certain ones only: refused, failed, and
         first tokens in buckets that begin at or above the deadline.
 page    the page is away, or has stood still while requests run, or says what cannot be.

1. A counter that fell was reset: what it shows now is what came since (Prometheus' rule). The look is marked. Counters
   that fall FALLS times within a minute belong to several processes behind one address: such looks change no window.
2. A look with impossible values (negative, more than full, faster than MAX_TPS or MAX_QPS) changes no window.
3. What the page does not tell is None, never 0: a system without a counter of answers has no rate of them, one without
   a histogram of first tokens no attainment.
4. Memory and work are bounded however long and often one looks: older steps are joined, arrivals end at MAX_ARRIVALS.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from control.buckets import (
    Buckets,
    add_buckets,
    delta,
    delta_buckets,
    lengths,
    quantile_bucket,
    share_within,
)

NEAR = 0.7
MAX_TPS = 1e8  # no service makes more tokens a second
MAX_QPS = 1e5  # nor ends or takes in more requests
MAX_ARRIVALS = 1_000_000  # as many as a trace may have
# Steps shorter than 1 s are joined, and to 15 s where only windows of half an hour and more look. All three scale.
FINE_S, FINE_BIN_S, COARSE_BIN_S = 300.0, 1.0, 15.0
STILL_S = 15.0  # counters that do not move for so long while requests run: the exporter is stuck
AWAY_LOOKS = 3
FALLS = 3
# (name, long window, short window, burn rate): 14.4 spends 2 % of a 30-day budget in an hour; the first is for tests of
# minutes, where an hour never comes
BURN = (("minutes", 300.0, 30.0, 20.0), ("hour", 3600.0, 300.0, 14.4), ("day", 21_600.0, 1800.0, 6.0))
SHOWN_S = 60.0  # window of the rates and percentiles that are shown
MIN_REQUESTS = 10  # fewer in the short window burn nothing
# Totals of a `Look` whose increase a `_Step` holds under the same name.
COUNTERS = ("finished", "refused", "failed", "prompt_tokens", "output_tokens", "service_sum_s", "service_count")


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of the page; counters are totals since the service's start, None = not told."""

    at_s: float
    running: float
    waiting: float
    kv_usage: float | None = None
    finished: float | None = None
    refused: float = 0.0
    failed: float = 0.0
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    preemptions: float | None = None
    service_sum_s: float | None = None  # time in running state
    service_count: float | None = None
    ttft: Buckets = ()
    tpot: Buckets = ()
    input_lengths: Buckets = ()
    output_lengths: Buckets = ()
    gpu_ratio: float | None = None  # DCGM or step utilisation
    scrape_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What the service promises, seconds and shares."""

    ttft_s: float
    tpot_s: float
    p95_s: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Alert:
    """Something to look at: kind, near | over, one line with the numbers."""

    kind: str
    level: str
    text: str
    value: float | None = None
    limit: float | None = None


@dataclass(slots=True)
class View:
    """What is known after a look."""

    at_s: float
    readable: bool
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    gpu_ratio: float | None = None
    arrival_qps: float | None = None
    completed_qps: float | None = None
    output_tps: float | None = None
    ttft_p95_s: tuple[float, float] | None = None  # bucket that holds it
    tpot_p95_s: tuple[float, float] | None = None
    attainment_ttft: tuple[float, float] | None = None  # between these shares
    expected_wait_s: float | None = None
    service_mean_s: float | None = None
    alerts: list[Alert] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Step:
    """What happened between two looks; `running` is the mean over the span."""

    at_s: float
    span_s: float
    arrivals: float
    finished: float
    refused: float
    failed: float
    prompt_tokens: float
    output_tokens: float
    service_sum_s: float
    service_count: float
    ttft: Buckets
    tpot: Buckets
    running: float


def _join(a: _Step, b: _Step) -> _Step:
    """Two neighbours as one."""
    span = a.span_s + b.span_s
    counts = {name: getattr(a, name) + getattr(b, name) for name in ("arrivals", *COUNTERS)}
    return _Step(
        b.at_s,
        span,
        **counts,
        ttft=add_buckets([a.ttft, b.ttft]),
        tpot=add_buckets([a.tpot, b.tpot]),
        running=(a.running * a.span_s + b.running * b.span_s) / span,
    )


def implausible(look: Look) -> str:
    """What cannot be on a page; empty when all can."""
    for name in (
        "running",
        "waiting",
        "kv_usage",
        "finished",
        "refused",
        "failed",
        "prompt_tokens",
        "output_tokens",
        "service_sum_s",
        "gpu_ratio",
    ):
        value = getattr(look, name)
        if value is not None and (not math.isfinite(value) or value < 0):
            return f"{name} is {value:g}"
    if max(look.running, look.waiting) > MAX_QPS * 3600:
        return f"{max(look.running, look.waiting):.3g} requests are inside"
    if look.kv_usage is not None and look.kv_usage > 1.01:
        return f"kv_usage is {look.kv_usage:g}, more than all of it"
    for name in ("ttft", "tpot"):
        counts = [c for _, c in getattr(look, name)]
        if any(b < a for a, b in zip(counts, counts[1:], strict=False)):
            return f"the buckets of {name} fall"
    return ""


class Watch:
    """Windows over looks. `scale` shortens the windows of the burn alerts (0.01: an hour becomes 36 s)."""

    def __init__(self, slo: Slo, *, scale: float = 1.0) -> None:
        self.slo = slo
        self.burn = [(name, long * scale, short * scale, rate) for name, long, short, rate in BURN]
        self.keep_s = max(long for _, long, _, _ in self.burn)
        self._last: Look | None = None
        self._steps: deque[_Step] = deque()  # of the last FINE_S
        self._older: deque[_Step] = deque()  # before these, joined to COARSE_BIN_S
        self._fine_s = max(FINE_S * scale, SHOWN_S)
        self._fine_bin_s, self._coarse_s = FINE_BIN_S * scale, COARSE_BIN_S * scale
        self._misses = 0
        self._moved_s: float | None = None
        self._falls: deque[float] = deque(maxlen=FALLS)  # when counters fell last
        self._owed = 0.0  # arrivals that a later look must make good
        self.arrivals: list[tuple[float, int, int]] = []  # (s, prompt tokens, output tokens) of all looks
        self.left_out = 0  # arrivals beyond MAX_ARRIVALS
        self._carry = 0.0

    def look(self, look: Look | None, at_s: float) -> View:
        """What is known after this look; None = the page could not be read."""
        if look is None:
            self._misses += 1
            alerts = (
                [
                    Alert(
                        "page",
                        "over",
                        f"the page could not be read {self._misses} times in a row",
                        float(self._misses),
                        float(AWAY_LOOKS),
                    )
                ]
                if self._misses >= AWAY_LOOKS
                else []
            )
            return View(at_s, False, alerts=alerts, marks=["away"])
        view = View(at_s, True, look.running, look.waiting, look.kv_usage, look.gpu_ratio)
        if self._misses:
            view.marks.append(f"back after {self._misses} misses")
        self._misses = 0
        wrong = implausible(look)
        if not wrong and self._last is not None:
            wrong = self._step(self._last, look, view)
        if wrong:
            view.marks.append("implausible")
            view.alerts.append(Alert("page", "over", f"the page cannot be right: {wrong}; this look is left out"))
        else:
            if self._last is None:
                self._moved_s = look.at_s
            self._last = look
        self._fill(view)
        return view

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, before: Look, now: Look, view: View) -> str:
        span = now.at_s - before.at_s
        if span <= 0:
            return f"time went back by {-span:g} s"
        d: dict[str, float] = {}
        reset = False
        for name in COUNTERS:
            d[name], fell = delta(getattr(now, name), getattr(before, name))
            reset |= fell
        if max(d["output_tokens"], d["prompt_tokens"]) / span > MAX_TPS:
            return f"{max(d['output_tokens'], d['prompt_tokens']) / span:.3g} tokens in a second"
        if reset:
            self._falls.append(now.at_s)
            if len(self._falls) == FALLS and now.at_s - self._falls[0] < SHOWN_S:
                return (
                    f"its counters fell {FALLS} times in {now.at_s - self._falls[0]:.0f} s, as if several processes "
                    "answered behind one address; watch each by its own"
                )
        ended = d["finished"] + d["refused"] + d["failed"]
        # Two looks may lie close together: a short span must not make ten requests a flood.
        if max(ended, now.running, now.waiting) > MAX_QPS * max(span, 1.0) + before.running + before.waiting:
            return f"{max(ended, now.running, now.waiting):.3g} requests in {span:.3g} s"
        inside = now.running + now.waiting - (0.0 if reset else before.running + before.waiting)
        came = ended + inside + self._owed
        self._owed = min(0.0, came)
        step = _Step(
            now.at_s,
            span,
            max(0.0, came),
            **d,
            ttft=delta_buckets(now.ttft, before.ttft),
            tpot=delta_buckets(now.tpot, before.tpot),
            running=now.running,
        )
        if reset:
            view.marks.append("reset")
        if any(d.values()) or not now.running:
            self._moved_s = now.at_s
        self._keep(step)
        self._trace(before, now, step)
        return ""

    def _keep(self, step: _Step) -> None:
        """Add a step; join what is close together, and what is old to longer ones."""
        fine, older = self._steps, self._older
        if fine and fine[-1].span_s + step.span_s <= self._fine_bin_s + 1e-9:
            step = _join(fine.pop(), step)
        fine.append(step)
        while fine[0].at_s < step.at_s - self._fine_s:
            old = fine.popleft()
            if older and older[-1].span_s + old.span_s <= self._coarse_s + 1e-9:
                old = _join(older.pop(), old)
            older.append(old)
        while older and older[0].at_s < step.at_s - self.keep_s:
            older.popleft()

    def _trace(self, before: Look, now: Look, step: _Step) -> None:
        """Arrivals of this step, evenly spread; lengths from the length histograms, else the means of what ended."""
        self._carry += step.arrivals
        n = int(self._carry + 1e-9)
        self._carry -= n
        if n <= 0 or now.finished is None:
            return
        if len(self.arrivals) + n > MAX_ARRIVALS:
            self.left_out += n
            return
        ended = max(1.0, step.finished)
        inputs = lengths(delta_buckets(now.input_lengths, before.input_lengths), n, step.prompt_tokens / ended)
        outputs = lengths(delta_buckets(now.output_lengths, before.output_lengths), n, step.output_tokens / ended)
        for i in range(n):
            self.arrivals.append((before.at_s + step.span_s * (i + 0.5) / n, inputs[i], outputs[i]))

    # -- windows -----------------------------------------------------------------------------------------------------

    def _window(self, at_s: float, length_s: float) -> list[_Step]:
        begin_s = at_s - length_s + 1e-9
        old = [s for s in self._older if s.at_s > begin_s] if length_s > self._fine_s else []
        return old + [s for s in self._steps if s.at_s > begin_s]

    def _fill(self, view: View) -> None:
        steps = self._window(view.at_s, SHOWN_S)
        span = sum(s.span_s for s in steps)
        if span > 0:
            told = self._last
            if told is not None and told.finished is not None:
                view.arrival_qps = sum(s.arrivals for s in steps) / span
                view.completed_qps = sum(s.finished for s in steps) / span
            if told is not None and told.output_tokens is not None:
                view.output_tps = sum(s.output_tokens for s in steps) / span
            ttft = add_buckets([s.ttft for s in steps])
            view.ttft_p95_s = quantile_bucket(ttft, 0.95)
            view.tpot_p95_s = quantile_bucket(add_buckets([s.tpot for s in steps]), 0.95)
            view.attainment_ttft = _attainment(steps, self.slo.ttft_s)
            view.service_mean_s = _service_s(steps, span)
        if view.running is not None and view.waiting is not None and view.service_mean_s is not None:
            view.expected_wait_s = view.waiting * view.service_mean_s / max(1.0, view.running)
            self._queue_alert(view)
        for alert in (self._burn_alert(view.at_s, *spec) for spec in self.burn):
            if alert is not None:
                view.alerts.append(alert)
        if (
            self._moved_s is not None
            and view.running
            and view.at_s - self._moved_s >= STILL_S
            and "implausible" not in view.marks
        ):
            view.alerts.append(
                Alert(
                    "page",
                    "over",
                    f"no counter moved for {view.at_s - self._moved_s:.0f} s while "
                    f"{view.running:.0f} requests run: the page or the service is stuck",
                )
            )

    def _queue_alert(self, view: View) -> None:
        wait, limit = view.expected_wait_s, self.slo.p95_s
        assert wait is not None
        if wait >= NEAR * limit:
            level = "over" if wait >= limit else "near"
            view.alerts.append(
                Alert(
                    "queue",
                    level,
                    f"{view.waiting:.0f} wait x {view.service_mean_s:.2f} s / {max(1.0, view.running or 0):.0f} "
                    f"running = {wait:.2f} s, {wait / limit:.0%} of the P95 target {limit:g} s",
                    wait,
                    limit,
                )
            )

    def _burn_alert(self, at_s: float, name: str, long_s: float, short_s: float, rate: float) -> Alert | None:
        short = self._window(at_s, short_s)
        if sum(s.finished + s.refused + s.failed for s in short) < MIN_REQUESTS:
            return None
        short_burn = self._burn(short)  # the short window first: it is quick, and mostly says no
        if short_burn is None or short_burn < rate:
            return None
        long = self._window(at_s, long_s)
        long_burn, span_s = self._burn(long), sum(s.span_s for s in long)
        if long_burn is None or long_burn < rate or span_s < short_s:
            return None
        return Alert(
            "burn",
            "over",
            f"attainment budget burns {long_burn:.1f}x in {span_s:.0f} s and {short_burn:.1f}x in {short_s:.0f} s "
            f"(alert {name} at {rate:g}x of {1.0 - self.slo.attainment:.2%})",
            min(long_burn, short_burn),
            rate,
        )

    def _burn(self, steps: Sequence[_Step]) -> float | None:
        """Share of misses / allowed share."""
        share = _attainment(steps, self.slo.ttft_s)
        # the upper bound: certain misses only
        return None if share is None else (1.0 - share[1]) / (1.0 - self.slo.attainment)


def _attainment(steps: Sequence[_Step], limit_s: float) -> tuple[float, float] | None:
    """Bounds of the share of ended requests that had their first token in time; refused and failed ones had not."""
    buckets = add_buckets([s.ttft for s in steps])
    lost = sum(s.refused + s.failed for s in steps)
    seen = buckets[-1][1] if buckets else 0.0
    if not buckets or seen + lost <= 0:
        return None
    low, high = share_within(buckets, limit_s) or (0.0, 0.0)
    return low * seen / (seen + lost), high * seen / (seen + lost)


def _service_s(steps: Sequence[_Step], span_s: float) -> float | None:
    """Mean time in a slot: told by the service, else by Little's law, running / completed per second."""
    count = sum(s.service_count for s in steps)
    if count > 0:
        return sum(s.service_sum_s for s in steps) / count
    done = sum(s.finished for s in steps)
    return sum(s.running * s.span_s for s in steps) / done if done > 0 and span_s > 0 else None
