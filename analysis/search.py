"""Where to measure next: the adaptive search for the knee, as a function of what was measured.

Input: the finished stages (`Probe`), the limits, what was spent. Output: `Step`: measure a rate for so
long, hold the watermark, or stop, with the reason in words; `estimate`: the knee with its interval.
Does not: send load, wait, or keep state; `shapes/knee_search.py` walks the search.

1. A rate is `under` or `over` when the 99 % interval of its attainment lies on one side of the target
   (the size of the sample shrunk to what dependent arrivals are worth), or when it is UNSTABLE.
   Otherwise it is open. Only a rate that is not open moves a bound.
2. Bracket from both sides: double while all is under, halve while all is over. An open rate is
   measured again, twice as long, unless it leans one way (no miss, or a miss in every part) and the bound
   on that side is there to be found first; if it stays open, it lies near the knee, and the bounds are
   looked for a quarter above and below it.
3. Then measure where the crossing is expected, in turns a little above and below the estimate.
4. The knee is where the fitted curve of misses passes the allowed share: quasi-binomial regression
   of misses on the logarithm of the rate, stages weighted by how near their fitted share is to the
   allowed one. A share is unbiased whatever the length of a stage; a quantile of a short stage is
   not: it misses the long excursions. The interval is Fieller's, with the variance inflated to what
   stages and batches show. A curve that jumps has no slope to fit: then the knee is the bracket.
5. Stop when the interval, before WIDER, is narrow enough after at least MIN_NEAR informative stages, or when the
   next stage, with its drain at the limit, and the hold would not fit the budget; never later.
6. The last stage is a hold at the watermark, which proves it.

Coverage of the interval over whole searches: docs/evidence/knee_search.md.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.intervals import t_quantile, wilson
from analysis.knee import WATERMARK, Crossing

GROWTH = 2.0
NEAR_GROWTH = 1.25  # beside a rate that stays open: the knee is close
INNER = 0.2  # a new rate stays this share of the bracket away from both of its ends
WIDE = 1.5  # a bracket wider than this ratio is divided before anything is fitted
SURE = 0.99  # level at which one rate is decided: with about ten looks, one search in ten has a wrong bound
BATCHES = 10  # parts of a window whose misses tell how dependent neighbours are
USUAL_DISPERSION = 10.0  # of misses in a queue near its knee; replaced by what the stages show
SEEN_STATES = 0.4  # over the allowed share of misses: 40 independent states at .99, 4 at .9
CLUSTERS_PER_STATE = 3.0  # misses forget faster than the number in flight; by simulation, 2.5 (mm1) to 4 (batching)
MIN_SURE = 50  # arrivals below which no rate is decided
# Of the deadline: every part of the stage below it decides for `under`. A limit of .8 lets rates above the knee
# through, .4 leaves too few rates decided; docs/evidence/knee_search.md.
FAR_INSIDE = 0.6
STEADY = 3.0  # standard deviations between the logarithms of the parts and the deadline: such a score has no tail
TRIES = 2  # measurements of one rate before it counts as near the knee
MIN_NEAR = 3.0  # stages' worth of weight near the crossing before the interval may end the search
KERNEL = 1.5  # sd of the weight in logits of the miss share: 0.01 counts fully, 0.001 and 0.1 a third
STOPPING = 2.5  # set by simulation, docs/evidence/knee_search.md
# Factor on the standard error of the fit, set by the same simulations. The search stops by the width without it:
# 1.2 in the stop rule too costs a fifth more time, up to the whole budget.
WIDER = 1.2
MAX_DEGREES = 30
NEAREST, FARTHEST = 0.02, 0.08  # distance of a refining rate from the estimate, relative
HOLD_SHARE = sum(WATERMARK) / 2
LAST_INVALID = 3  # stages in a row that may be INVALID
METHOD = "adaptive search"
FIT = "quasi-binomial fit"


@dataclass(frozen=True)
class Probe:
    """One finished stage of the search."""

    qps: float
    window_s: float
    batch_arrivals: tuple[int, ...]  # arrivals of the window, in BATCHES parts, oldest first
    batch_misses: tuple[int, ...]
    score: float  # target quantile of the SLO score, inf possible
    batch_scores: tuple[float, ...]
    stable: bool  # not UNSTABLE
    states: float = math.inf  # independent states of the number in flight, see intervals.independent_states
    valid: bool = True
    hold: bool = False
    reason: str = ""  # why it is INVALID

    @property
    def arrivals(self) -> int:
        """All arrivals of the window."""
        return sum(self.batch_arrivals)

    @property
    def misses(self) -> int:
        """Those that missed the SLO."""
        return sum(self.batch_misses)


@dataclass(frozen=True)
class Limits:
    """What the search may spend, and when it is content. Seconds, requests, 1/s."""

    start_qps: float
    lowest_qps: float
    highest_qps: float
    stage_s: float  # warm-up included
    max_time_s: float
    max_requests: float = math.inf
    width_ratio: float = 0.10  # (high - low)/knee at which to stop
    width_qps: float = 0.0  # or high - low, whichever is reached first
    hold_s: float = 0.0  # 0: no hold
    overhead_s: float = 0.0  # of one stage beyond its arrivals: the drain at its limit, and the start


@dataclass(frozen=True)
class Spent:
    """Seconds and requests used so far."""

    time_s: float = 0.0
    requests: int = 0


@dataclass(frozen=True)
class Step:
    """What to do next. `kind`: "measure" | "hold" | "stop"."""

    kind: str
    qps: float | None
    duration_s: float
    reason: str


def probe(
    qps: float, window_s: float, scores: np.ndarray, quantile: float, batch_scores: Sequence[float], *, stable: bool,
    states: float = math.inf,
) -> Probe:  # fmt: skip
    """The probe of one window. `scores`: (n,) SLO scores in order of arrival, inf = failed; a miss is above 1."""
    parts = np.array_split(np.asarray(scores) > 1, BATCHES)
    return Probe(
        qps, window_s, tuple(len(p) for p in parts), tuple(int(p.sum()) for p in parts), quantile,
        tuple(batch_scores), stable, states,
    )  # fmt: skip


# ---------------------------------------------------------------- one rate


def decide(probes: Sequence[Probe], target: float, usual: float = USUAL_DISPERSION) -> str:
    """ "under" (the rate holds the SLO), "over" or "open": what the probes of one rate decide.

    `usual`: dispersion of the misses of this service near its knee. Misses come in clusters: a stage that saw
    none of them does not know how large they are.
    """
    if any(not p.stable for p in probes):
        return "over"
    n, k = sum(p.arrivals for p in probes), sum(p.misses for p in probes)
    if n < MIN_SURE:
        return "open"
    scores = [s for p in probes for s in p.batch_scores]
    if k > n / 2:  # no cluster: most of all arrivals missed
        return "over"
    states = sum(p.states for p in probes)
    seen = k == 0 and states >= SEEN_STATES / (1 - target)
    if seen and scores and (max(scores) <= FAR_INSIDE or steady(scores)):
        return "under"
    shrink = max(dispersion([(p.batch_arrivals, p.batch_misses) for p in probes]), usual, clusters(probes))
    low, high = wilson((n - k) / shrink, n / shrink, SURE)
    if low >= target:
        return "under"
    return "over" if high < target else "open"


def steady(scores: Sequence[float]) -> bool:
    """Whether the parts differ so little that the deadline lies STEADY standard deviations of their logarithm away.

    A score that follows the batch, such as the time per token, has no rare excursions: it may lie above FAR_INSIDE at
    any load, and such a rate would stay open for ever.
    """
    if len(scores) < 5 or min(scores) <= 0 or max(scores) >= 1:
        return False
    logs = np.log(scores)
    return bool(-logs.max() >= STEADY * logs.std(ddof=1))


def clusters(probes: Sequence[Probe]) -> float:
    """Arrivals per independent cluster of misses that the memory of the service allows; 0 when it is not known."""
    known = [p for p in probes if math.isfinite(p.states) and p.states > 0]
    return sum(p.arrivals for p in known) / (CLUSTERS_PER_STATE * sum(p.states for p in known)) if known else 0.0


def usual_dispersion(probes: Sequence[Probe]) -> float:
    """The dispersion that stages with some misses, not mostly misses, show together; USUAL_DISPERSION without any."""
    some = [p for p in probes if p.valid and 0 < p.misses < 0.3 * p.arrivals]
    seen = dispersion([(p.batch_arrivals, p.batch_misses) for p in some])
    weight = len(some) / (len(some) + 2)  # one stage says little about it
    return USUAL_DISPERSION ** (1 - weight) * seen**weight


def dispersion(stages: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Variance of the batch misses over that of independent arrivals, at least 1; (arrivals, misses) per batch.

    Batches that lean the same way as their neighbour are too short: their correlation r adds (1 + r)/(1 - r).
    """
    square, freedom, lag, scale = 0.0, 0, 0.0, 0.0
    for arrivals, misses in stages:
        n, k = np.array(arrivals, dtype=float), np.array(misses, dtype=float)
        n, k = n[n > 0], k[n > 0]
        total = k.sum()
        if len(n) < 2 or total == 0 or total == n.sum():
            continue
        share = total / n.sum()
        z = (k - n * share) / np.sqrt(n * share * (1 - share))
        square, freedom = square + float(z @ z), freedom + len(n) - 1
        lag, scale = lag + float(z[1:] @ z[:-1]), scale + float(z @ z)
    if not freedom:
        return 1.0
    r = min(max(lag / scale, 0.0), 0.8) if scale > 0 else 0.0
    return max(1.0, square / freedom * (1 + r) / (1 - r))


def by_rate(probes: Sequence[Probe]) -> dict[float, list[Probe]]:
    """Valid probes per rate, rates ascending."""
    rates: dict[float, list[Probe]] = {}
    for p in sorted((p for p in probes if p.valid), key=lambda p: p.qps):
        rates.setdefault(p.qps, []).append(p)
    return rates


@dataclass(frozen=True)
class Bracket:
    """The decided rates around the knee; None = none yet."""

    low: float | None
    high: float | None
    open: tuple[float, ...]


def bracket(probes: Sequence[Probe], target: float) -> Bracket:
    """Lowest rate that is over, highest below it that is under, and the open ones."""
    usual = usual_dispersion(probes)
    said = {qps: decide(mine, target, usual) for qps, mine in by_rate(probes).items()}
    high = min((q for q, v in said.items() if v == "over"), default=None)
    low = max((q for q, v in said.items() if v == "under" and (high is None or q < high)), default=None)
    return Bracket(low, high, tuple(q for q, v in said.items() if v == "open"))


# ---------------------------------------------------------------- the knee


@dataclass(frozen=True)
class Curve:
    """A fitted curve logit(miss share) = a + b log(qps/centre_qps) near the knee."""

    centre_qps: float
    a: float
    b: float
    covariance: np.ndarray
    degrees: float
    near: float  # sum of the stages' weights
    inflation: float


def estimate(probes: Sequence[Probe], target: float) -> Crossing:
    """The knee over all valid probes, with its 95 % interval; bounds when one side was never found."""
    rates = by_rate(probes)
    if not rates:
        return Crossing("none", None, None, None, f"{METHOD}: no valid stage", None)
    found = bracket(probes, target)
    if found.high is None:
        top = max(found.low or 0.0, 0.0)
        if not top:
            return Crossing("none", None, None, None, f"{METHOD}: no rate was decided", None)
        return Crossing("at_least", top, top, None, f"{METHOD}: no rate was found over", top)
    if found.low is None:
        return Crossing("below", None, None, found.high, f"{METHOD}: no rate was found under", None)
    curve = fit_curve([p for mine in rates.values() for p in mine], target)
    interval = fieller(curve, target) if curve is not None else None
    if curve is None or interval is None:
        value = math.sqrt(found.low * found.high)
        text = f"{METHOD}: between the nearest rates that are decided; the curve between them is not known"
        return Crossing("crossing", value, found.low, found.high, text, found.low)
    text = (
        f"{METHOD}: {FIT} of the misses near the target, {curve.near:.1f} stages' weight, "
        f"variance {curve.inflation:.1f} times that of independent arrivals"
    )
    return Crossing("crossing", interval[1], interval[0], interval[2], text, found.low)


def fit_curve(probes: Sequence[Probe], target: float) -> Curve | None:
    """The curve around the crossing; None when too few stages near it show misses."""
    n = np.array([p.arrivals for p in probes], dtype=float)
    k = np.array([p.misses for p in probes], dtype=float)
    q = np.array([p.qps for p in probes])
    goal = math.log((1 - target) / target)
    share = (k + 0.5 * (1 - target)) / (n + 0.5)  # a stage without misses is known to 1/n only
    logit = np.log(share / (1 - share))
    near = np.exp(-0.5 * ((logit - goal) / KERNEL) ** 2)
    if near.max(initial=0.0) < 0.1 or k.sum() == 0:
        return None
    centre = float(np.exp(np.average(np.log(q), weights=near * n)))
    x = np.log(q / centre)
    design = np.column_stack([np.ones(len(x)), x])
    theta: np.ndarray | None = None
    for _ in range(50):
        eta = logit if theta is None else np.clip(design @ theta, -14, 14)
        mu = 1 / (1 + np.exp(-eta))
        weight = n * mu * (1 - mu) * near
        z = eta + (k / n - mu) / (mu * (1 - mu)) if theta is not None else eta
        bread = design.T @ (design * weight[:, None])
        if np.linalg.cond(bread) > 1e12:
            return None
        new = np.linalg.solve(bread, design.T @ (weight * z))
        if theta is not None and np.allclose(new, theta, rtol=1e-6, atol=1e-8):
            break
        theta = new if theta is None else 0.5 * (theta + new)  # the kernel follows the fit: half steps settle
        near = np.exp(-0.5 * ((np.clip(design @ theta, -14, 14) - goal) / KERNEL) ** 2)
    assert theta is not None
    if theta[1] <= 0 or not np.isfinite(theta).all():
        return None
    mu = 1 / (1 + np.exp(-np.clip(design @ theta, -14, 14)))
    variance = n * mu * (1 - mu)
    pearson = (k - n * mu) ** 2 / variance
    distinct = len({p.qps for p, w in zip(probes, near, strict=True) if w > 0.05})
    if near.sum() < 2 or distinct < 2 or np.count_nonzero(near[k > 0] > 0.05) < 2:
        return None
    # Stages against the curve, and batches within their stage; the larger speaks for both.
    freedom = max(float(near.sum()) - 2, 0.5)
    stages = float(np.sum(near * pearson)) / freedom
    close = [(p.batch_arrivals, p.batch_misses) for p, w in zip(probes, near, strict=True) if w > 0.2]
    batches = dispersion(close)
    inside = 2.0 * len(close)  # misses come in few clusters: far fewer degrees than batches
    pooled = (freedom * stages + inside * batches) / (freedom + inside)
    # The search tends to stop when the dispersion happens to look small: few stages count less.
    inside_memory = clusters([p for p, w in zip(probes, near, strict=True) if w > 0.2])
    inflation = max(1.0, batches, pooled, inside_memory) * (1 + STOPPING / float(near.sum())) * WIDER**2
    bread = design.T @ (design * (variance * near)[:, None])
    meat = design.T @ (design * (variance * near**2)[:, None])
    inverse = np.linalg.inv(bread)
    return Curve(
        centre, float(theta[0]), float(theta[1]), inverse @ meat @ inverse * inflation,
        min(freedom + inside, MAX_DEGREES), float(near.sum()), inflation,
    )  # fmt: skip


def fieller(curve: Curve, target: float) -> tuple[float, float, float] | None:
    """(low, value, high) in QPS where the curve passes 1 - target; None when its slope is not known to be positive.

    All x with (a + b x - c)^2 <= t^2 (Vaa + 2 x Vab + x^2 Vbb), c = logit(1 - target).
    """
    t = t_quantile(max(curve.degrees, 1))
    d = curve.a - math.log((1 - target) / target)
    vaa, vab, vbb = curve.covariance[0, 0], curve.covariance[0, 1], curve.covariance[1, 1]
    qa, qb, qc = curve.b**2 - t * t * vbb, curve.b * d - t * t * vab, d * d - t * t * vaa
    if qa <= 0 or qb * qb - qa * qc < 0:
        return None
    root = math.sqrt(qb * qb - qa * qc)
    low, value, high = (-qb - root) / qa, -d / curve.b, (-qb + root) / qa
    if not (abs(low) < 5 and abs(high) < 5):
        return None
    return tuple(curve.centre_qps * math.exp(v) for v in (low, value, high))  # type: ignore[return-value]


# ---------------------------------------------------------------- the next step


def next_step(probes: Sequence[Probe], target: float, limits: Limits, spent: Spent) -> Step:
    """The next step of the search after these stages, in the order they were run."""
    if probes and probes[-1].hold:
        return Step("stop", None, 0.0, "the watermark was held for its time")
    if probes and not probes[-1].valid:
        return _after_invalid(probes, limits, spent)
    found = estimate(probes, target)
    wish = _wish(probes, found, target, limits)
    if wish.kind == "stop":
        return _hold(found, limits, spent, wish.reason)
    assert wish.qps is not None
    hold = _hold_rate(found)
    reserve = Spent(0.0, 0) if hold is None else _cost(hold, limits.hold_s, limits)
    for duration_s in sorted({wish.duration_s, limits.stage_s}, reverse=True):
        if duration_s <= wish.duration_s and _fits(wish.qps, duration_s, limits, spent, reserve):
            return Step("measure", wish.qps, duration_s, wish.reason)
    return _hold(found, limits, spent, "the budget is used up")


def narrow(found: Crossing, limits: Limits) -> bool:
    """Whether the interval of a crossing is as narrow as asked; that of a fit before WIDER."""
    if found.kind != "crossing" or found.value is None or found.low is None or found.high is None:
        return False
    width = found.high - found.low
    return width <= _wider(found) * max(limits.width_qps, limits.width_ratio * found.value)


def _wider(found: Crossing) -> float:
    return WIDER if FIT in found.method else 1.0


def _wish(probes: Sequence[Probe], found: Crossing, target: float, limits: Limits) -> Step:
    """The next step if there were no budget."""
    rates = by_rate(probes)
    if not rates:
        return Step("measure", _round(limits.start_qps), limits.stage_s, "the first rate")
    around = bracket(probes, target)
    if around.high is None:
        top = max(rates)
        if top in around.open and _lean(rates[top]) != "under" and len(rates[top]) <= TRIES:
            return _longer(top, rates, limits)
        if top >= limits.highest_qps:
            return Step("stop", None, 0.0, f"no rate up to the highest allowed, {top:g} requests/s, is over")
        factor = NEAR_GROWTH if top in around.open and _lean(rates[top]) != "under" else GROWTH
        rate = _round(min(top * factor, limits.highest_qps))
        return Step("measure", rate, limits.stage_s, "no rate is over so far: go up")
    if around.low is None:
        promising = [q for q in around.open if q < around.high and _lean(rates[q]) != "over"]
        if promising and len(rates[max(promising)]) <= TRIES:
            return _longer(max(promising), rates, limits)
        bottom = min(rates)
        if bottom <= limits.lowest_qps:
            return Step("stop", None, 0.0, f"no rate down to the lowest allowed, {bottom:g} requests/s, is under")
        factor = NEAR_GROWTH if bottom in around.open and _lean(rates[bottom]) != "over" else GROWTH
        rate = _round(max(bottom / factor, limits.lowest_qps))
        return Step("measure", rate, limits.stage_s, "no rate is under so far: go down")
    return _refine(probes, rates, around, found, target, limits)


def _lean(probes: Sequence[Probe]) -> str:
    """Which way an open rate leans; enough to look further away, not enough for a bound."""
    if not any(p.misses for p in probes):
        return "under"
    scores = [s for p in probes for s in p.batch_scores]
    return "over" if scores and min(scores) > 1 else "near"


def _longer(qps: float, rates: dict[float, list[Probe]], limits: Limits) -> Step:
    text = f"{qps:g} requests/s is not decided: measure it longer"
    return Step("measure", qps, limits.stage_s * 2 ** len(rates[qps]), text)


def _refine(
    probes: Sequence[Probe], rates: dict[float, list[Probe]], around: Bracket, found: Crossing, target: float,
    limits: Limits,
) -> Step:  # fmt: skip
    assert around.low is not None and around.high is not None and found.value is not None
    low, high = around.low, around.high
    curve = fit_curve([p for mine in rates.values() for p in mine], target)
    interval = fieller(curve, target) if curve is not None else None
    ends_known = min(len(rates[low]), len(rates[high])) >= TRIES
    if narrow(found, limits) and (ends_known if interval is None else curve is not None and curve.near >= MIN_NEAR):
        width = (found.high or high) - (found.low or low)
        wider = _wider(found)
        text = f", before it is widened by {wider:g}" if wider > 1 else ""
        text = f"the interval of the knee is {width / wider:.3g} requests/s wide{text}, as asked"
        return Step("stop", None, 0.0, text)
    if interval is None and narrow(found, limits):
        rate = min((low, high), key=lambda q: sum(p.window_s for p in rates[q]))
        text = "the bounds are close: measure the one that is known less again"
        return Step("measure", rate, 2 * limits.stage_s, text)
    if interval is None or high / low > WIDE:
        rate = _divide(rates, low, high)
        beside = [rate, _round(math.sqrt(rate * high)), _round(math.sqrt(rate * low))]  # for a rate that stays open
        tries = [len(rates.get(q, [])) for q in beside]
        if interval is None or min(tries) <= TRIES:
            at = next((i for i, n in enumerate(tries) if n <= TRIES), tries.index(min(tries)))
            longer = limits.stage_s * 2 ** min(tries[at], TRIES)
            text = f"the knee lies between {low:g} and {high:g} requests/s: divide"
            return Step("measure", beside[at], longer, text)
    assert interval is not None
    value, assumed = interval[1], found.value
    half = (interval[2] - interval[0]) / 2 / value
    offset = min(max(0.5 * half, NEAREST), FARTHEST)
    below = sum(p.window_s for p in probes if p.valid and value * (1 - 2 * FARTHEST) <= p.qps < value)
    above = sum(p.window_s for p in probes if p.valid and value <= p.qps <= value * (1 + 2 * FARTHEST))
    rate = value * (1 + offset) if above <= below else value * (1 - offset)
    rate = _round(min(max(rate, low * (1 - FARTHEST)), high * (1 + FARTHEST)))
    return Step("measure", rate, 2 * limits.stage_s, f"the knee is near {assumed:.4g} requests/s: narrow it from "
                f"{'above' if above <= below else 'below'}")  # fmt: skip


def _divide(rates: dict[float, list[Probe]], low: float, high: float) -> float:
    """A rate between the bounds: where the logarithm of the score passes 0, kept off both ends."""
    ends = [np.log(np.median([p.score for p in rates[q]])) for q in (low, high)]
    share = 0.5
    if np.isfinite(ends).all() and ends[0] < 0 < ends[1]:
        share = float(-ends[0] / (ends[1] - ends[0]))
    share = min(max(share, INNER), 1 - INNER)
    return _round(math.exp(math.log(low) + share * math.log(high / low)))


def _after_invalid(probes: Sequence[Probe], limits: Limits, spent: Spent) -> Step:
    last = probes[-1]
    bad = next((i for i, p in enumerate(reversed(probes)) if p.valid), len(probes))
    if bad >= LAST_INVALID:
        return Step("stop", None, 0.0, f"{bad} stages in a row are INVALID: {last.reason}")
    if not _fits(last.qps, limits.stage_s, limits, spent, Spent()):
        return Step("stop", None, 0.0, f"the budget is used up, and the last stage is INVALID: {last.reason}")
    return Step("measure", last.qps, limits.stage_s, f"the stage is INVALID ({last.reason}): measure it again")


def _cost(qps: float, duration_s: float, limits: Limits) -> Spent:
    """The most a stage will take: 4 standard deviations more arrivals than expected."""
    if duration_s <= 0:
        return Spent()
    expected = qps * duration_s
    return Spent(duration_s + limits.overhead_s, math.ceil(expected + 4 * math.sqrt(expected)))


def _fits(qps: float, duration_s: float, limits: Limits, spent: Spent, reserve: Spent) -> bool:
    cost = _cost(qps, duration_s, limits)
    return (
        spent.time_s + cost.time_s + reserve.time_s <= limits.max_time_s
        and spent.requests + cost.requests + reserve.requests <= limits.max_requests
    )


def _hold_rate(found: Crossing) -> float | None:
    return _round(HOLD_SHARE * found.low) if found.low is not None and found.low > 0 else None


def _hold(found: Crossing, limits: Limits, spent: Spent, why: str) -> Step:
    """Hold the watermark when there is one and the budget allows, otherwise stop."""
    rate = _hold_rate(found)
    if rate is None or limits.hold_s <= 0:
        return Step("stop", None, 0.0, why)
    if not _fits(rate, limits.hold_s, limits, spent, Spent()):
        return Step("stop", None, 0.0, why + "; no budget is left to hold the watermark")
    return Step("hold", rate, limits.hold_s, why + "; hold the watermark")


def _round(qps: float) -> float:
    """Four digits: what a stage's name shows is what is sent."""
    return float(f"{qps:.4g}")
