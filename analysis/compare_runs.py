"""A run against a baseline: per rate, what became worse, better, or did not clearly change.

Input: two run folders with their ledgers and analyses. Output: `Comparison`.
Does not: write files, print, or compare loads that differ (unless forced).

1. Rates that both runs measured are compared; repeats of a rate are pooled, arrival order kept.
2. Attainment is over all arrivals: Newcombe's interval for the difference of two shares, each Wilson interval widened
   for dependence. A latency percentile: bootstrap over batches of neighbouring arrivals, on the logarithm of the
   ratio new/base; when both runs sent the same schedule, the same batches are drawn from both.
3. All intervals hold together with 95 % (Bonferroni over the comparisons made): two runs of one thing give a false
   alarm in at most one of twenty comparisons of runs, not in one of twenty rows.
4. "worse" or "better" needs three things: the interval excludes no change, the effect is larger than the tolerance,
   and larger than the noise floor: the spread of the same number over repeats of one run.

Source: Newcombe, Statistics in Medicine 17, 1998, method 10; Efron & Tibshirani 1993, ch. 8 (blocks) and 13.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis import load
from analysis.again import analyse_again
from analysis.attainment import meets_tpot
from analysis.intervals import t_quantile, variance_inflation, wilson
from analysis.percentiles import nearest_rank
from analysis.row_checks import Checked, check_rows, unmeasured_tpot
from analysis.run_files import read_stages
from bench.records.analysis import Analysis, StageAnalysis
from bench.records.sentences import plural

SCHEMA_VERSION = 1
LEVEL = 0.95
TOLERANCE = 0.10  # of a latency; attainment may move by a tenth of it
DRAWS = 2000
BATCH_ARRIVALS = 25  # fewest of a batch: a p95 of fewer is its maximum
BATCHES = 20  # of one repeat at most: batches must outlast the memory of the queue
MIN_BATCHES = 5
GRID = 4096  # points of a sample that the bootstrap keeps; a rank is off by 1/4096 at most
SAME_RATE = 1e-6
# Smaller differences are the clock's and the network's, whatever their ratio.
SMALLEST_S = {"ttft_s": 1e-3, "e2e_s": 1e-3, "tpot_s": 1e-4}
PERCENTILES = (("p50", 0.50), ("p95", 0.95))
WORSE, BETTER, SAME, NOT_COMPARED = "worse", "better", "no clear change", "not compared"
COUNTED = {"worse": WORSE, "better": BETTER, "no_clear_change": SAME, "not_compared": NOT_COMPARED}


class CompareError(ValueError):
    """The runs cannot be compared; `invalid` when a run is INVALID, else the loads differ or a file is missing.

    `code` is `differs`, `invalid` or `no_rate`; `details`: the differences, or the run that is INVALID, or the rates.
    """

    def __init__(
        self, text: str, *, invalid: bool = False, code: str = "", details: Sequence[str] = ()
    ) -> None:
        super().__init__(text)
        self.invalid, self.code, self.details = invalid, code, list(details)


@dataclass
class Repeat:
    """The window of one stage in arrival order; inf = did not finish, NaN = has no such latency."""

    hits: np.ndarray
    latency: dict[str, np.ndarray]  # ttft_s, tpot_s, e2e_s


@dataclass
class Rate:
    """One offered rate of one run."""

    offered_qps: float
    repeats: list[Repeat] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    unstable: bool = False

    @property
    def arrivals(self) -> int:
        """Planned arrivals of the windows."""
        return sum(len(r.hits) for r in self.repeats)


@dataclass
class Side:
    """One run as far as it is compared."""

    path: Path
    analysis: Analysis
    rates: list[Rate]
    left_out: list[str]


@dataclass
class Change:
    """One number of one rate in both runs. `effect`: new - base of a share, new/base - 1 of a latency."""

    offered_qps: float | None
    metric: str  # attainment, ttft, tpot, e2e, knee
    statistic: str  # value, p50, p95
    unit: str  # "1", "s", "1/s"
    base: float | None
    new: float | None
    effect: float | None
    low: float | None
    high: float | None
    noise_floor: float | None
    outcome: str
    base_n: int = 0
    new_n: int = 0
    method: str = ""
    note: str = ""


@dataclass
class Comparison:
    """The whole of compare.json."""

    schema_version: int
    base: dict[str, Any]
    new: dict[str, Any]
    outcome: str  # worse, better, no clear change
    exit_code: int  # 5 on a regression, else 0
    sentence: str
    tolerance: float
    level: float  # of all intervals together
    level_each: float
    changes: list[Change]
    counts: dict[str, int]  # of `counts`: what every page and sentence counts
    not_compared: list[dict[str, Any]]  # of `not_compared`: which rates and numbers, and why
    differences: list[str]  # what differs between the loads; only when forced
    left_out: list[str]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an endless value is "inf"."""
        return _plain(asdict(self))


def compare_runs(
    base: Path, new: Path, *, force: bool = False, tolerance: float = TOLERANCE, analysed: Analysis | None = None
) -> Comparison:
    """The comparison of two run folders. Raises CompareError, and `load.LedgerError` for a folder without a ledger.

    `analysed`: the analysis of `new` where it was just made of its rows; None: it is made here.
    """
    first = analyse_again(base, models=False)[0]  # models are not compared
    second = analysed or analyse_again(new, models=False)[0]
    differences = load_differences(first, second)
    if _common_stages_agree(base, new):  # one run has more rates than the other: the common ones are the same load
        differences = [text for text in differences if not text.startswith("schedule: ")]
    if differences and not force:
        raise CompareError(
            f"{base} and {new} did not run the same test: " + "; ".join(differences)
            + ". Compare runs of one config and seed, or add --force to compare all the same",
            code="differs", details=differences,
        )  # fmt: skip
    for path, found in ((base, first), (new, second)):
        if found.verdict.status == "INVALID" and not force:
            text = f"{path} is INVALID: {found.verdict.sentence} Run it again, or add --force"
            raise CompareError(text, invalid=True, code="invalid", details=[str(path)])
    sides = Side(base, first, *_rates(base, first, second.slo)), Side(new, second, *_rates(new, second, second.slo))
    return compare_sides(*sides, tolerance=tolerance, differences=differences)


def load_differences(base: Analysis, new: Analysis) -> list[str]:
    """What makes two runs different tests, as `name: base against new`; empty when they are the same one."""
    a, b = base.run, new.run
    found = []

    def differ(name: str, x: Any, y: Any) -> None:
        if x != y:
            found.append(f"{name}: {_said(a, x)} against {_said(b, y)}")

    differ("loop", a.get("loop"), b.get("loop"))
    differ("simulated", bool(a.get("simulated")), bool(b.get("simulated")))
    differ("model", _model(a), _model(b))
    differ("endpoint", _endpoint(a), _endpoint(b))
    for key in sorted(set(base.slo) | set(new.slo)):
        differ(key, base.slo.get(key), new.slo.get(key))
    if a.get("schedule_hash") != b.get("schedule_hash"):
        load_a, load_b = (((r.get("config") or {}).get("loadgen") or {}) for r in (a, b))
        keys = [k for k in sorted(set(load_a) | set(load_b)) if k != "target_qps" and load_a.get(k) != load_b.get(k)]
        why = f" (loadgen.{', loadgen.'.join(keys)} differ)" if keys else ""
        found.append(f"schedule: {_short(a)} against {_short(b)}{why}")
    return found


def _common_stages_agree(base: Path, new: Path) -> bool:
    """Whether every rate that both runs have was sent from the same schedules."""
    tables: list[dict[float, list[str]]] = []
    for run_dir in (base, new):
        hashes: dict[float, list[str]] = {}
        for row in read_stages(run_dir)[0]:
            hashes.setdefault(round(row.offered_qps, 6), []).append(row.schedule_hash)
        tables.append(hashes)
    common = tables[0].keys() & tables[1].keys()
    return bool(common) and all(tables[0][q] == tables[1][q] and all(tables[0][q]) for q in common)


def _model(run: dict[str, Any]) -> str:
    return str((run.get("config") or {}).get("model") or (run.get("target") or {}).get("model") or "")


def _endpoint(run: dict[str, Any]) -> str | None:
    """What was spoken, by the run's target, else by its config; None when the folder records neither.

    A version whose config had a target and no such key could only send chat completions.
    """
    asked = (run.get("config") or {}).get("target")
    said = (run.get("target") or {}).get("endpoint")
    return said or (asked.get("endpoint") or "chat" if isinstance(asked, dict) else None)


def _said(run: dict[str, Any], value: Any) -> str:
    """The value, or that this run's folder does not have it."""
    return f"not recorded (version {run.get('tool_version') or 'unknown'})" if value in (None, "") else str(value)


def _short(run: dict[str, Any]) -> str:
    return _said(run, str(run.get("schedule_hash") or "")[:12])


def compare_sides(base: Side, new: Side, *, tolerance: float, differences: list[str]) -> Comparison:
    """The comparison of two runs in memory."""
    pairs = [(a, b) for a in base.rates for b in new.rates if _same(a.offered_qps, b.offered_qps)]
    if not pairs:
        rates = [", ".join(f"{r.offered_qps:g}" for r in side.rates) or "none" for side in (base, new)]
        text = f"no rate was validly measured in both runs (base: {rates[0]}; new: {rates[1]}); run the same rates"
        raise CompareError(text, code="no_rate", details=[f"base: {rates[0]}", f"new: {rates[1]}"])
    compared = [(a, b) for a, b in pairs if not (a.unstable and b.unstable)]
    each = 1 - (1 - LEVEL) / max(1, len(compared) * (1 + len(SMALLEST_S) * len(PERCENTILES)))
    changes: list[Change] = []
    for a, b in pairs:
        changes += _rate_changes(a, b, each, tolerance) if (a, b) in compared else [_beyond(a, b)]
    knee = _knee(base.analysis, new.analysis, tolerance)
    changes += [knee] if knee else []
    worse, better = ([c for c in changes if c.outcome == word] for word in (WORSE, BETTER))
    outcome = WORSE if worse else BETTER if better else SAME
    counted = counts(changes)
    notes = []
    if not any(len(r.repeats) > 1 for side in (base, new) for r in side.rates):
        notes.append("neither run repeats a rate, so the noise between runs is unknown; use --shape repeat --repeats 3")
    if differences:
        notes.append("forced: the runs are different tests; a difference may come from the load itself")
    return Comparison(
        SCHEMA_VERSION, _identity(base), _identity(new), outcome, 5 if worse else 0,
        _sentence(outcome, worse, better, counted), tolerance, LEVEL, each, changes, counted, not_compared(changes),
        differences, _left_out(base, new), notes,
    )  # fmt: skip


def counts(changes: Sequence[Change]) -> dict[str, int]:
    """Of the rates that both runs measured and of their numbers: how many are compared, and with which outcome.

    A rate is compared when one of its numbers is. `numbers` are the compared ones, the knee among them.
    """
    rates = {c.offered_qps for c in changes} - {None}
    compared = [c for c in changes if c.outcome != NOT_COMPARED]
    judged = {c.offered_qps for c in compared} - {None}
    found = {key: sum(c.outcome == word for c in changes) for key, word in COUNTED.items()}
    return {"rates": len(judged), "rates_not_compared": len(rates - judged), "numbers": len(compared), **found}


def not_compared(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """What is not compared, by reason: {rates, numbers, reason}; no numbers: nothing of these rates is compared."""
    judged = {c.offered_qps for c in changes if c.outcome != NOT_COMPARED}
    groups: dict[str, dict[float, list[str]]] = {}
    for c in changes:
        if c.outcome == NOT_COMPARED and c.offered_qps is not None:
            labels = groups.setdefault(c.note, {}).setdefault(c.offered_qps, [])
            labels += [_label(c)] if c.offered_qps in judged else []
    out: list[dict[str, Any]] = []
    for reason, rates in groups.items():
        for labels in dict.fromkeys(tuple(names) for names in rates.values()):
            mine = [qps for qps, names in rates.items() if tuple(names) == labels]
            out.append({"rates": mine, "numbers": list(labels), "reason": reason})
    return out


def _left_out(base: Side, new: Side) -> list[str]:
    """Stages that may not be read, and rates that only one run has."""
    out = []
    for name, side, other, rest in (("base", base, "new", new), ("new", new, "base", base)):
        there = [*(s.offered_qps for s in rest.analysis.stages), *(r.offered_qps for r in rest.rates)]
        alone = [r.offered_qps for r in side.rates if not any(_same(r.offered_qps, q) for q in there)]
        out += [f"{name}: {text}" for text in side.left_out]
        if alone:
            rates = ", ".join(f"{q:g}" for q in alone)
            out.append(f"{name}: {rates} requests/s; the {other} run has no stage there")
    return out


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= SAME_RATE * max(a, b, 1.0)


def _identity(side: Side) -> dict[str, Any]:
    run, verdict = side.analysis.run, side.analysis.verdict
    return {
        "run_id": str(run.get("run_id") or side.path.name), "path": str(side.path),
        "started_utc": run.get("started_utc"), "tool_version": run.get("tool_version"), "model": _model(run),
        "verdict": verdict.status, "schedule_hash": run.get("schedule_hash"),
        "knee_qps": side.analysis.capacity.knee_qps, "curve": _curve(side.analysis),
    }  # fmt: skip


def _curve(analysis: Analysis) -> list[dict[str, Any]]:
    """Attainment and TTFT p95 with their intervals, for each stage that may be read; an endless one is inf."""
    out = []
    for s in sorted(analysis.stages, key=lambda s: (s.offered_qps, s.repeat)):
        ttft, share = s.latency.get("ttft_s"), s.attainment_joint
        if s.verdict in ("INVALID", "EMPTY") or "ramp" in s.marks:
            continue
        known = ttft is not None and ttft.n > 0 and "p95" not in ttft.withheld
        out.append({
            "offered_qps": s.offered_qps, "repeat": s.repeat, "stable": s.stationarity != "UNSTABLE",
            "attainment": share.value, "attainment_low": share.low, "attainment_high": share.high,
            "ttft_p95_s": ttft.p95 if known and ttft else None,
            "ttft_p95_low_s": ttft.p95_low if known and ttft else None,
            "ttft_p95_high_s": ttft.p95_high if known and ttft else None,
        })  # fmt: skip
    return out


def _sentence(outcome: str, worse: list[Change], better: list[Change], counted: dict[str, int]) -> str:
    rates, missing = counted["rates"], counted["rates_not_compared"]
    where = f"over {rates} {plural(rates, 'rate|rates')}"
    where += f" ({missing} more not compared)" if missing else ""
    if outcome == SAME:
        return f"No clear change in {counted['numbers']} {plural(counted['numbers'], 'number|numbers')} {where}."
    listed = worse or better
    first = max(listed, key=lambda c: (c.metric == "attainment", abs(c.effect or 0.0)))  # the SLO first
    but = f"; {len(better)} better" if worse and better else ""
    numbers = f"{len(listed)} of {counted['numbers']} {plural(counted['numbers'], 'number|numbers')}"
    return f"{outcome.capitalize()} {where}: {numbers}, first {words(first)}{but}."


def _label(c: Change) -> str:
    return c.metric if c.metric in ("attainment", "knee") else f"{c.metric.upper()} {c.statistic}"


def words(c: Change) -> str:
    """`TTFT p95 at 20 requests/s went from 35.1 to 80.2 ms (+128 %)`."""
    label = _label(c)
    at = "" if c.offered_qps is None else f" at {c.offered_qps:g} requests/s"
    if c.unit == "1":
        return f"{label}{at} went from {c.base:.4f} to {c.new:.4f}"
    if c.unit == "1/s":
        return f"{label} went from {_number(c.base)} to {_number(c.new)} requests/s"
    change = f" ({c.effect:+z.0%})" if c.effect is not None and math.isfinite(c.effect) else ""
    return f"{label}{at} went from {_ms(c.base)} to {_ms(c.new)} ms{change}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _ms(value: float | None) -> str:
    return "unknown" if value is None else "endless" if math.isinf(value) else f"{value * 1e3:.4g}"


# ---------------------------------------------------------------- one rate


def _rate_changes(a: Rate, b: Rate, level: float, tolerance: float) -> list[Change]:
    out = [_attainment(a, b, level, tolerance)]
    paired = len(a.repeats) == len(b.repeats) and a.hashes == b.hashes and all(a.hashes) and all(
        len(x.hits) == len(y.hits) for x, y in zip(a.repeats, b.repeats, strict=True))  # fmt: skip
    for metric in SMALLEST_S:
        out += _latency(a, b, metric, level, tolerance, paired)
    if a.unstable or b.unstable:
        run = "base" if a.unstable else "new"
        for change in out:
            change.note = f"beyond capacity in the {run} run: latency grows with the stage's length"
    return out


def _beyond(a: Rate, b: Rate) -> Change:
    note = "beyond capacity in both runs: these numbers depend on the stage's length"
    return Change(a.offered_qps, "attainment", "value", "1", _share(a), _share(b), None, None, None, None,
                  NOT_COMPARED, a.arrivals, b.arrivals, note=note)  # fmt: skip


def _share(rate: Rate) -> float:
    return sum(int(r.hits.sum()) for r in rate.repeats) / max(1, rate.arrivals)


def _score_interval(rate: Rate, level: float) -> tuple[float, float, float]:
    """(share, low, high): Wilson, on the arrivals that dependent neighbours are worth."""
    n = rate.arrivals
    worth = sum(len(r.hits) / variance_inflation(r.hits) for r in rate.repeats)
    share = _share(rate)
    return (share, *wilson(share * worth, worth, level)) if n else (share, 0.0, 1.0)


def share_difference(base: tuple[float, float, float], new: tuple[float, float, float]) -> tuple[float, float, float]:
    """(new - base, low, high) of two shares with their score intervals: Newcombe's method 10.

    low = d - sqrt((p2 - l2)² + (u1 - p1)²), high = d + sqrt((u2 - p2)² + (p1 - l1)²).
    """
    (p1, l1, u1), (p2, l2, u2) = base, new
    d = p2 - p1
    return d, d - math.hypot(p2 - l2, u1 - p1), d + math.hypot(u2 - p2, p1 - l1)


def _attainment(a: Rate, b: Rate, level: float, tolerance: float) -> Change:
    d, low, high = share_difference(_score_interval(a, level), _score_interval(b, level))
    floor = _noise(lambda r: float(r.hits.mean()) if len(r.hits) else None, a, b, relative=False)
    threshold = max(tolerance / 10, floor or 0.0)
    outcome = WORSE if high < 0 and -d > threshold else BETTER if low > 0 and d > threshold else SAME
    return Change(a.offered_qps, "attainment", "value", "1", _share(a), _share(b), d, low, high, floor, outcome,
                  a.arrivals, b.arrivals, "Newcombe, all arrivals")  # fmt: skip


def _noise(read: Any, a: Rate, b: Rate, *, relative: bool) -> float | None:
    """Largest spread of a statistic over the repeats of one run; None when no rate was repeated."""
    spreads = []
    for rate in (a, b):
        values = [v for v in map(read, rate.repeats) if v is not None and math.isfinite(v)]
        if len(values) > 1:
            low = min(values)
            spreads.append((max(values) - low) / (low if relative and low > 0 else 1.0))
    return max(spreads) if spreads else None


def _latency(a: Rate, b: Rate, metric: str, level: float, tolerance: float, paired: bool) -> list[Change]:
    samples = [_batched(rate, metric) for rate in (a, b)]
    draws: dict[float, tuple[np.ndarray, np.ndarray]] = {}
    counts = [0 if s is None else s[1].max() + 1 for s in samples]
    if all(s is not None for s in samples) and min(counts) >= MIN_BATCHES:
        rng = np.random.default_rng(20_260_101)  # fixed: the same two runs give the same answer
        same = paired and counts[0] == counts[1]
        first = rng.multinomial(counts[0], np.full(counts[0], 1 / counts[0]), DRAWS)
        second = first if same else rng.multinomial(counts[1], np.full(counts[1], 1 / counts[1]), DRAWS)
        shares = [share for _, share in PERCENTILES]
        one, two = _quantiles(*samples[0], first, shares), _quantiles(*samples[1], second, shares)  # type: ignore[misc]
        draws = {share: (one[share], two[share]) for share in shares}
    return [_percentile(a, b, metric, name, share, draws.get(share), int(min(counts)), level, tolerance)
            for name, share in PERCENTILES]  # fmt: skip


def _batched(rate: Rate, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Values of all repeats and the batch of each: neighbours in time share a batch."""
    values, batch, first = [], [], 0
    for repeat in rate.repeats:
        x = repeat.latency[metric]
        there = ~np.isnan(x)
        count = min(BATCHES, len(x) // BATCH_ARRIVALS)
        if not count or not there.any():
            continue
        index = first + (np.arange(len(x)) * count) // len(x)  # by arrival, so that paired runs share their batches
        values.append(x[there])
        batch.append(index[there])
        first += count
    return (np.concatenate(values), np.concatenate(batch)) if values else None


def _quantiles(
    values: np.ndarray, batch: np.ndarray, weights: np.ndarray, shares: list[float]
) -> dict[float, np.ndarray]:
    """Percentiles of every bootstrap draw. `weights`: (draws, batches), how often each batch was drawn."""
    order = np.argsort(values, kind="stable")
    grid = np.unique(np.linspace(0, len(values) - 1, min(GRID, len(values))).astype(int))
    seen = np.zeros((len(values), weights.shape[1]), dtype=np.int32)
    seen[np.arange(len(values)), batch[order]] = 1
    below = np.cumsum(seen, axis=0)[grid]  # (grid, batches): values of a batch at or under a grid point
    total = weights @ below[-1]
    out = {}
    for share in shares:
        rank = np.ceil(share * total - 1e-6)
        low, high = np.zeros(len(weights), dtype=int), np.full(len(weights), len(grid) - 1)
        while (low < high).any():  # for every draw: the first grid point with `rank` values at or under it
            middle = (low + high) // 2
            enough = (weights * below[middle]).sum(axis=1) >= rank
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        out[share] = values[order[grid[low]]]
    return out


def _percentile(
    a: Rate, b: Rate, metric: str, name: str, share: float, draws: tuple[np.ndarray, np.ndarray] | None, batches: int,
    level: float, tolerance: float,
) -> Change:  # fmt: skip
    def value(values: list[np.ndarray]) -> float | None:
        whole = np.sort(np.concatenate([v[~np.isnan(v)] for v in values]))
        return nearest_rank(whole, share) if len(whole) else None

    base, new = (value([r.latency[metric] for r in rate.repeats]) for rate in (a, b))
    floor = _noise(lambda r: value([r.latency[metric]]), a, b, relative=True)
    change = Change(a.offered_qps, metric.removesuffix("_s"), name, "s", base, new, None, None, None, floor,
                    NOT_COMPARED, a.arrivals, b.arrivals)  # fmt: skip
    if base is None or new is None:
        change.note = "no answer has this latency"
        return change
    if draws is None:
        change.note = f"too few arrivals for {MIN_BATCHES} batches of {BATCH_ARRIVALS}"
        return change
    change.method = f"bootstrap over {batches} batches"
    if math.isinf(base) and math.isinf(new):
        change.outcome, change.note = SAME, f"more than {1 - share:.0%} of the arrivals did not finish in both runs"
        return change
    ratio, low, high = _ratio_interval(base, new, *draws, batches, level)
    change.effect, change.low, change.high = ratio - 1, low - 1, high - 1
    threshold = max(tolerance, floor or 0.0)
    large = not abs(new - base) <= SMALLEST_S[metric]
    if low > 1 and ratio > 1 + threshold and large:
        change.outcome = WORSE
    elif high < 1 and ratio < 1 / (1 + threshold) and large:
        change.outcome = BETTER
    else:
        change.outcome = SAME
    return change


def _ratio_interval(
    base: float, new: float, first: np.ndarray, second: np.ndarray, batches: int, level: float
) -> tuple[float, float, float]:
    """(new / base, low, high): Student t on the bootstrap spread of the log ratio; its ranks when some are endless."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(second) - np.log(first)
    logs[np.isinf(first) & np.isinf(second)] = 0.0  # both endless: no change
    ratio = math.inf if math.isinf(new) else 0.0 if math.isinf(base) else new / base
    if np.isfinite(logs).all() and math.isfinite(ratio) and ratio > 0:
        half = t_quantile(batches - 1, level) * float(logs.std(ddof=1))
        return ratio, ratio * math.exp(-half), ratio * math.exp(half)
    ordered = np.sort(logs)
    cut = int((1 - level) / 2 * len(ordered))
    low, high = (math.inf if v > 700 else math.exp(v) for v in (float(ordered[cut]), float(ordered[-1 - cut])))
    return ratio, low, high


# ---------------------------------------------------------------- the knee


def _knee(base: Analysis, new: Analysis, tolerance: float) -> Change | None:
    """The knees by their own intervals: a change is clear when the intervals do not meet."""
    sides = []
    for found in (base.capacity, new.capacity):
        low, high = found.knee_low_qps, found.knee_high_qps
        if found.knee_kind == "at_least":
            high = math.inf
        elif found.knee_kind == "below":
            low = 0.0
        elif found.knee_kind != "crossing":
            return None
        if low is None or high is None:
            return None
        middle = found.knee_qps if found.knee_qps is not None else (low if math.isinf(high) else high)
        sides.append((middle, low, high))
    (was, was_low, was_high), (now, now_low, now_high) = sides
    effect = now / was - 1 if was else None
    far = effect is not None and abs(effect) > tolerance
    outcome = WORSE if now_high < was_low and far else BETTER if now_low > was_high and far else SAME
    bounds = f"base {was_low:.4g} to {was_high:.4g}, new {now_low:.4g} to {now_high:.4g} requests/s"
    return Change(None, "knee", "value", "1/s", was, now, effect, None, None, None, outcome,
                  method="own intervals", note=bounds)  # fmt: skip


# ---------------------------------------------------------------- reading


def _rates(run_dir: Path, found: Analysis, slo: dict[str, float]) -> tuple[list[Rate], list[str]]:
    """Rates of a run, rising, from its ledger; and what was left out. `slo`: one yardstick for both runs."""
    checked = check_rows(load.read_ledger(load.requests_path(run_dir)))
    rows = {(r.stage, r.repeat): r for r in read_stages(run_dir)[0]}
    config = found.run.get("config") or {}
    rates: dict[float, Rate] = {}
    left_out = []
    for stage in found.stages:
        key = next((q for q in rates if _same(q, stage.offered_qps)), stage.offered_qps)
        if stage.verdict in ("INVALID", "EMPTY") or "ramp" in stage.marks or stage.window_start_s is None:
            left_out.append(f"{stage.name} is {stage.verdict if stage.verdict in ('INVALID', 'EMPTY') else 'a ramp'}")
            continue
        rate = rates.setdefault(key, Rate(key))
        rate.repeats.append(_repeat(checked, stage, slo, config))
        known = rows.get((stage.stage, stage.repeat))
        rate.hashes.append(known.schedule_hash if known else "")
        rate.names.append(stage.name)
        rate.unstable = rate.unstable or stage.stationarity == "UNSTABLE"
    return [rates[q] for q in sorted(rates)], left_out


def _repeat(checked: Checked, stage: StageAnalysis, slo: dict[str, float], config: dict[str, Any]) -> Repeat:
    ledger = checked.ledger
    mine = np.flatnonzero((ledger["stage"] == stage.stage) & (ledger["repeat"] == stage.repeat))
    at = ledger["intended_s"][mine]
    mine = mine[(at >= stage.window_start_s) & (at < stage.window_end_s)]
    mine = mine[np.argsort(ledger["arrival"][mine], kind="stable")]
    ok = (checked.status[mine] == load.OK) & ~checked.impossible[mine] & np.isfinite(ledger["ttft_s"][mine])
    ttft, tpot, e2e = (ledger[name][mine].astype(np.float64) for name in ("ttft_s", "tpot_s", "e2e_s"))
    limits = [np.full(len(mine), slo[name]) for name in ("ttft_deadline_s", "tpot_deadline_s")]
    names = ledger.names["request_class"]
    for entry in config.get("classes") or []:
        if isinstance(entry, dict) and entry.get("name") in names:
            rows = ledger.codes["request_class"][mine] == names.index(entry["name"])
            for limit, key in zip(limits, ("ttft_deadline_ms", "tpot_deadline_ms"), strict=True):
                if entry.get(key) is not None:
                    limit[rows] = float(entry[key]) / 1e3
    with np.errstate(invalid="ignore"):
        hits = ok & (ttft <= limits[0]) & meets_tpot(tpot, limits[1], unmeasured_tpot(ledger, mine))
    for values in (ttft, e2e, tpot):
        values[~ok] = np.inf  # a failed arrival never finished; an ok one of a single token has no TPOT
    return Repeat(hits, {"ttft_s": ttft, "tpot_s": tpot, "e2e_s": e2e})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
