"""Step-time coefficients of a batching service from client rows alone.

Input: first-token time, last-token time, token counts of every request of a stage (cached prompt tokens apart).
Output: alpha (s/step), beta (s/(sequence-step)), gamma (s/computed prompt token), optionally kappa
(n^2) or kv (context tokens), with standard errors, R^2 and the reason for the model order.
Does not: see the engine, its steps or its chunks; use the wait before the first token.

Per request i with s_i = n_out - 1 decode steps and D_i = last - first:
    D_i = alpha s_i + beta B_i + gamma G_i (+ kappa C_i) (+ kv V_i) (+ delta J_i)
    B_i decode tokens that all requests emit in (first_i, last_i]
    G_i prompt tokens whose prefill ends in that interval, without those that the service took from its cache
    C_i sum of n^2, V_i sum of the context tokens over those steps
    J_i steps of that interval that end a prefill (first tokens closer than alpha/4 are one step)
exact for an engine that works in steps. B, C and V are counted on a *virtual step clock*:
dN = (dt without prefill stalls) / T(n(t)), rescaled so that request i gets s_i steps. Tokens
spread evenly in wall time put prefill stalls on the wrong steps: gamma comes out 8-9 % too small
and lambda_max 2.6 % too high. With the rescaling alone (where the iteration starts) it is 0.3 %.

1. The clock sees every request with output; the regression uses only rows of the window with at
   least 20 steps, weighted by 1/(step noise * s_i + timestamp noise), both estimated.
2. Coefficients are never negative, except delta: a step bound by memory hides its first prompt
   tokens, which a line can only say with delta < 0. Delta is taken at six standard errors: it moves
   prefill by a bounded amount and extrapolates no further than gamma.
3. A higher order (kappa or kv) is taken only if it cuts the weighted RMSE by more than 10 %, or by
   5 % with a term of ten standard errors (stamp jitter can be most of the RMSE): information
   criteria alone accept terms that then extrapolate wrongly.
4. Standard errors are clustered by blocks of time: neighbours share steps, so their errors do.

Source: `docs/queueing.md` section 3; "trace-only, time-integrated" regression is also published
by the BLIS simulator's authors; the virtual step clock is ours.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import optimize

from analysis.batching import StepLaw
from analysis.computed_tokens import computed

MIN_STEPS = 20  # shorter answers are mostly timestamp error
MIN_ROWS = 40  # ten per coefficient, so that one outlier does not decide
ITERATIONS = 8
ORDER_GAIN = 0.10  # RMSE cut that a higher order must bring
SURE_GAIN, SURE_T = 0.05, 10.0  # or this cut with a term so many standard errors above 0
OUTLIER_MADS = 6.0  # a stall of client or service, not of the step law
DELTA_T = 6.0  # standard errors at which the cost per prefill step is taken
SAME_STEP = 0.25  # of alpha: first tokens closer than this left in one step
TERMS = ("alpha_s", "beta_s", "gamma_s", "kappa_s", "kv_s", "prefill_s")
DELTA = 5  # its place in TERMS
ORDERS = {"affine": (0, 1, 2), "quadratic": (0, 1, 2, 3), "context": (0, 1, 2, 4)}


@dataclass(frozen=True, slots=True)
class Trace:
    """What the clock needs of one stage; arrays of shape (n,), rows with complete output only."""

    first_token_s: np.ndarray
    last_token_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    use: np.ndarray  # bool: rows of the regression; the others only run the clock
    cached_tokens: np.ndarray | None = None  # of the prompt, found in the service's cache; None = none

    @property
    def computed_tokens(self) -> np.ndarray:
        """(n,) prompt tokens that prefill had to compute."""
        return computed(self.input_tokens, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Design:
    """Regressors of the requests of one stage: columns s, B, G, C, V, J."""

    columns: np.ndarray  # (n, 6)
    gap_context: np.ndarray  # context tokens of the running requests, per gap between events


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted step law with what is known about its error."""

    law: StepLaw
    se: dict[str, float]  # term -> standard error, same unit as the term
    covariance: np.ndarray  # (6, 6) in the order of TERMS, zero for absent terms
    order: str  # "affine" | "quadratic" | "context", with "+prefill" when delta is in
    order_note: str
    r2: float  # of the time per step, weighted
    rmse_s: float  # weighted RMSE of the time per step, seconds
    rows: int
    outliers: int
    batch_size_max: float  # largest mean batch a request saw: beyond it the law extrapolates


class Events:
    """The sorted first/last events of one stage, the gaps between them, and sums over gaps."""

    def __init__(self, trace: Trace) -> None:
        first, last = trace.first_token_s, trace.last_token_s
        count = first.size
        times = np.concatenate([first, last])
        order = np.argsort(times, kind="stable")
        place = np.empty(2 * count, dtype=np.int64)
        place[order] = np.arange(2 * count)
        self.start, self.stop = place[:count], place[count:]
        self.sign = np.concatenate([np.ones(count), -np.ones(count)])[order]
        self.owner = np.concatenate([np.arange(count), np.arange(count)])[order]
        self.dt = np.diff(times[order])
        self.running = np.cumsum(self.sign)[:-1]
        self.steps = np.maximum(trace.output_tokens - 1.0, 0.0)
        self.duration = last - first
        self.prompt = trace.input_tokens.astype(float)  # in memory, cached or not: the context of its decode steps
        work = trace.computed_tokens.astype(float)
        # tokens whose prefill ends at the right edge of a gap
        self.prefill_end = np.where(self.sign > 0, work[self.owner], 0.0)[1:]
        self.by_first = np.argsort(first, kind="stable")
        edges = first[self.by_first]
        self.first_gaps = np.diff(edges, prepend=-np.inf)
        self.seen = np.searchsorted(edges, first, side="right"), np.searchsorted(edges, last, side="right")
        self.prefilled = self.of_firsts(work[self.by_first])

    def between(self, per_gap: np.ndarray) -> np.ndarray:
        """Per request: the sum of a per-gap quantity from its first to its last token."""
        total = np.concatenate([[0.0], np.cumsum(per_gap)])
        return total[self.stop] - total[self.start]

    def of_firsts(self, values: np.ndarray) -> np.ndarray:
        """Per request: the sum, over first tokens in (first, last], of values in order of the first tokens."""
        total = np.concatenate([[0.0], np.cumsum(values)])
        return total[self.seen[1]] - total[self.seen[0]]

    def running_sum(self, per_request: np.ndarray) -> np.ndarray:
        """Per gap: the sum of a per-request quantity over the requests that run in it."""
        return np.cumsum(self.sign * per_request[self.owner])[:-1]

    def available_s(self, gamma_s: float, delta_s: float = 0.0, same_step_s: float = 0.0) -> np.ndarray:
        """Per gap: its length without stalls of max(0, delta + gamma p) just before each first token.

        A stall longer than its gap reaches into earlier ones: a Lindley recursion from right to left.
        Of first tokens within `same_step_s` only the earliest pays delta.
        """
        stall = gamma_s * self.prefill_end
        if delta_s:
            leads = np.zeros(self.prompt.size)
            leads[self.by_first] = self.first_gaps > same_step_s
            pays = np.where(self.sign > 0, leads[self.owner], 0.0)[1:]
            stall = np.maximum(0.0, stall + delta_s * pays)
        walk = np.cumsum((stall - self.dt)[::-1])
        left_over = (walk - np.minimum(0.0, np.minimum.accumulate(walk)))[::-1]
        carried = np.concatenate([left_over[1:], [0.0]])
        return np.clip(self.dt - (stall + carried - left_over), 0.0, self.dt)


def wall_clock_design(events: Events) -> Design:
    """Regressors with each request's tokens spread evenly in wall time: the biased first guess."""
    rate = np.divide(events.steps, events.duration, out=np.zeros_like(events.duration), where=events.duration > 0)
    own = events.running_sum(rate)
    mean_rate = np.divide(own, events.running, out=np.zeros_like(own), where=events.running > 0)
    return _design(events, mean_rate * events.dt, 0.0)


def step_clock_design(events: Events, law: StepLaw, previous: Design) -> Design:
    """Regressors on the virtual step clock of `law`; the context per gap comes from `previous`."""
    n = events.running
    step = law.alpha_s + law.beta_s * n + law.kappa_s * n * n + law.kv_s * previous.gap_context
    same_step = SAME_STEP * law.alpha_s
    available = events.available_s(law.gamma_s, law.prefill_s, same_step)
    steps = np.divide(available, step, out=np.zeros_like(step), where=(n > 0) & (step > 0))
    return _design(events, steps, same_step)


def _design(events: Events, steps: np.ndarray, same_step_s: float) -> Design:
    """Columns s, B, G, C, V, J from the steps per gap, rescaled so that every request gets its s."""
    n = events.running
    clock = np.concatenate([[0.0], np.cumsum(steps)])
    got = clock[events.stop] - clock[events.start]
    scale = np.divide(events.steps, got, out=np.ones_like(got), where=got > 0)
    # step k = 0, 1, ... of a request reads prompt + k tokens; as an integral over the clock N that is
    # prompt - 1/2 + (N - N_first), summed here over the running requests at the middle of each gap
    base = events.running_sum(events.prompt - 0.5 - clock[events.start])
    middle = 0.5 * (clock[:-1] + clock[1:])
    context = np.maximum(base + n * middle, 0.0)
    columns = np.column_stack(
        [
            events.steps,
            events.between(n * steps) * scale,
            events.prefilled,
            events.between(n * n * steps) * scale,
            events.between(context * steps) * scale,
            events.of_firsts((events.first_gaps > same_step_s).astype(float)),
        ]
    )
    return Design(columns, context)


def fit(traces: list[Trace], order: str | None = None) -> StepFit:
    """The step law of the stages in `traces`; `order` forces one of ORDERS, None applies the rule.

    Raises ValueError when fewer than MIN_ROWS rows are usable.
    """
    usable = sum(int(_rows(trace).sum()) for trace in traces)
    if usable < MIN_ROWS:
        raise ValueError(
            f"only {usable} answers of at least {MIN_STEPS + 1} tokens lie inside the windows, the fit needs "
            f"{MIN_ROWS}; use longer stages or longer outputs"
        )
    if order:
        base, _, more = order.partition("+")
        terms = ORDERS[base] + ((DELTA,) if more else ())
        return _finish(_fit_order(traces, terms), order, "order given by the caller")
    name, solved, note = _choose(traces)
    with_delta = _fit_order(traces, (*solved.terms, DELTA))
    t_value = _t_value(with_delta, DELTA)
    if abs(t_value) > DELTA_T and with_delta.rmse < solved.rmse:
        note += f"; a cost per prefill step at {t_value:.0f} standard errors (needed: {DELTA_T:.0f})"
        return _finish(with_delta, name + "+prefill", note)
    return _finish(solved, name, note)


def _t_value(solved: _Solved, term: int) -> float:
    """Coefficient over its standard error; 0 when it was not fitted."""
    error = float(np.sqrt(solved.covariance[term, term]))
    return getattr(solved.law, TERMS[term]) / error if error > 0 else 0.0


def _choose(traces: list[Trace]) -> tuple[str, _Solved, str]:
    """The order by the rule of invariant 3, its fit, and the words for it."""
    fits = {name: _fit_order(traces, terms) for name, terms in ORDERS.items()}
    base = fits["affine"]
    best = min(("quadratic", "context"), key=lambda name: fits[name].rmse)
    gain = 1 - fits[best].rmse / base.rmse if base.rmse > 0 else 0.0
    t_value = _t_value(fits[best], ORDERS[best][-1])
    said = f"the {best} term cuts the RMSE by {max(gain, 0.0):.1%} at {t_value:.0f} standard errors"
    rule = f"(needed: {ORDER_GAIN:.0%}, or {SURE_GAIN:.0%} at {SURE_T:.0f})"
    if gain > ORDER_GAIN or (gain > SURE_GAIN and t_value > SURE_T):
        return best, fits[best], f"{said} {rule}"
    return "affine", base, f"affine: {said} {rule}"


@dataclass(slots=True)
class _Solved:
    law: StepLaw
    terms: tuple[int, ...]
    rmse: float
    r2: float
    covariance: np.ndarray
    rows: int
    outliers: int
    batch_size_max: float


def _rows(trace: Trace) -> np.ndarray:
    return trace.use & (trace.output_tokens > MIN_STEPS) & (trace.last_token_s > trace.first_token_s)


def _fit_order(traces: list[Trace], terms: tuple[int, ...]) -> _Solved:
    """Iterate clock and regression for one set of terms, from the wall-clock guess."""
    events = [Events(trace) for trace in traces]
    designs = [wall_clock_design(e) for e in events]
    masks = [_rows(trace) for trace in traces]
    blocks = _blocks(traces, masks)
    keep = np.ones(sum(int(m.sum()) for m in masks), dtype=bool)
    y = np.concatenate([e.duration[m] for e, m in zip(events, masks, strict=True)])
    variance = None
    coefficients = np.zeros(len(TERMS))
    for _ in range(ITERATIONS):
        x = np.concatenate([d.columns[m] for d, m in zip(designs, masks, strict=True)])
        before = coefficients
        variance = x[:, 0] if variance is None else variance
        coefficients = _solve(x[keep], y[keep], variance[keep], terms)
        variance = _variance(x[:, 0], y - x @ coefficients, keep)
        residual = (y - x @ coefficients) / np.sqrt(variance)
        middle = np.median(residual)
        spread = np.median(np.abs(residual - middle))
        keep = np.abs(residual - middle) <= OUTLIER_MADS * 1.4826 * spread + 1e-12
        law = StepLaw(*(float(c) for c in coefficients))
        if np.allclose(before, coefficients, rtol=1e-5, atol=1e-12):
            break
        designs = [step_clock_design(e, law, d) for e, d in zip(events, designs, strict=True)]
    solved = _summary(x[keep], y[keep], variance[keep], coefficients, terms, blocks[keep])
    solved.outliers = int((~keep).sum())
    return solved


def _variance(steps: np.ndarray, residual: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Var(D_i) = step noise * s_i + timestamp noise, both >= 0, from the residuals (s^2, shape (n,)).

    With 10 ms of timestamp jitter the second part is all that matters; weighting by 1/s alone
    would then drown long answers, which carry the information, in the error of short ones.
    """
    square = residual[keep] ** 2
    square = np.minimum(square, 16 * np.median(square) + 1e-18)  # stalls must not set the weights
    a = np.column_stack([steps[keep], np.ones(square.size)])
    scale = a.mean(axis=0)
    unit = max(float(square.mean()), 1e-18)
    parts, _ = optimize.nnls(a / scale, square / unit)
    variance = (np.column_stack([steps, np.ones(steps.size)]) / scale) @ parts
    return variance * unit if variance.min() > 0 else steps.astype(float)


def _solve(x: np.ndarray, y: np.ndarray, variance: np.ndarray, terms: tuple[int, ...]) -> np.ndarray:
    """Weighted least squares, non-negative but for delta; columns scaled to unit norm for conditioning."""
    weight = 1 / np.sqrt(variance)
    a = x[:, terms] * weight[:, None]
    if DELTA in terms:
        a = np.column_stack([a, -x[:, DELTA] * weight])  # the negative part of delta
    norm = np.linalg.norm(a, axis=0)
    norm[norm == 0] = 1.0
    solution, _ = optimize.nnls(a / norm, y * weight)
    coefficients = np.zeros(len(TERMS))
    solution = solution / norm
    coefficients[list(terms)] = solution[: len(terms)]
    if DELTA in terms:
        coefficients[DELTA] -= solution[-1]
    return coefficients


def _blocks(traces: list[Trace], masks: list[np.ndarray], per_stage: int = 10) -> np.ndarray:
    """Cluster number of each regression row: equal stretches of time within a stage."""
    labels = []
    for index, (trace, mask) in enumerate(zip(traces, masks, strict=True)):
        times = trace.first_token_s[mask]
        if times.size:
            span = max(float(np.ptp(times)), 1e-9)
            labels.append(index * per_stage + np.minimum((times - times.min()) / span * per_stage, per_stage - 1) // 1)
    return np.concatenate(labels)


def _summary(
    x: np.ndarray, y: np.ndarray, variance: np.ndarray, coefficients: np.ndarray, terms: tuple[int, ...],
    blocks: np.ndarray,
) -> _Solved:
    """Fit quality on the rows kept, and the clustered covariance of the non-zero coefficients."""
    steps = x[:, 0]
    weight = steps**2 / variance  # of the time per step
    weight = weight / weight.sum()
    residual = y - x @ coefficients
    per_step, total = residual / steps, y / steps
    rmse = float(np.sqrt(np.sum(weight * per_step**2)))
    spread = float(np.sum(weight * (total - np.sum(weight * total)) ** 2))
    active = [t for t in terms if coefficients[t] != 0]
    covariance = np.zeros((len(TERMS), len(TERMS)))
    if active:
        a = x[:, active] / np.sqrt(variance)[:, None]
        scale = np.linalg.norm(a, axis=0)
        a = a / scale
        scores = a * (residual / np.sqrt(variance))[:, None]
        labels, index = np.unique(blocks, return_inverse=True)
        summed = np.zeros((labels.size, len(active)))
        np.add.at(summed, index, scores)
        bread = np.linalg.pinv(a.T @ a)
        correction = labels.size / max(labels.size - 1, 1)
        inner = bread @ (summed.T @ summed) @ bread * correction
        covariance[np.ix_(active, active)] = inner / np.outer(scale, scale)
    return _Solved(
        law=StepLaw(*(float(c) for c in coefficients)),
        terms=terms,
        rmse=rmse,
        r2=1 - rmse**2 / spread if spread > 0 else 0.0,
        covariance=covariance,
        rows=int(steps.size),
        outliers=0,
        batch_size_max=float(np.quantile(x[:, 1] / steps, 0.99)),
    )


def _finish(solved: _Solved, order: str, note: str) -> StepFit:
    errors = np.sqrt(np.maximum(np.diag(solved.covariance), 0.0))
    return StepFit(
        law=solved.law,
        se={TERMS[t]: float(errors[t]) for t in solved.terms},
        covariance=solved.covariance,
        order=order,
        order_note=note,
        r2=solved.r2,
        rmse_s=solved.rmse,
        rows=solved.rows,
        outliers=solved.outliers,
        batch_size_max=solved.batch_size_max,
    )
