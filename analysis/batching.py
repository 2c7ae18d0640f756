"""Step time, throughput and capacity of a continuously batching service.

Input: the coefficients of the step time and the moments of the lengths.
Output: T(n), X(n), lambda_max, the fixed point rho = lambda E[S(rho)], the USL form.
Does not: queue (`birth_death.py`), fit (`step_clock.py`), replay (`replay.py`).

Symbols: n sequences in a step; alpha s/step; beta s/(sequence-step); gamma s/prompt
token; kappa s/(sequence^2-step); kv s/(context token-step); delta s/step that carries prefill
(negative: the first prompt tokens hide behind the base cost); m = E[output tokens];
P = E[prompt tokens that are computed]; c = mean context tokens of a running sequence; K = max_num_seqs.

1. T = alpha + beta n + kappa n^2 + kv (context tokens in the step) + max(0, delta + gamma p), the last
   part only in steps with p > 0 prompt tokens.
2. Load is u = lambda / lambda_max(K). The seed's rho = lambda E[S(rho)] is a number of
   sequences in service, not a utilisation; it is called `batch_size` here.

Source: `docs/queueing.md` section 3; Gunther's Universal Scalability Law for the last function.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from analysis.computed_tokens import computed


@dataclass(frozen=True, slots=True)
class Lengths:
    """Moments of the request lengths, in tokens."""

    input_mean: float
    output_mean: float
    output_second: float  # E[output^2]
    cached_mean: float = 0.0  # part of the prompt that the service's cache holds: context, but no prefill work

    @property
    def computed_mean(self) -> float:
        """Mean prompt tokens that prefill computes: the P of gamma P."""
        return self.input_mean - self.cached_mean

    @property
    def output_scv(self) -> float:
        """Squared coefficient of variation of the output length."""
        return max(0.0, self.output_second / self.output_mean**2 - 1)

    @property
    def context_mean(self) -> float:
        """Mean context (tokens) of a running sequence seen at a random step.

        Prompt plus what is generated so far: P + E[o^2]/(2 E[o]) when prompt and output are independent.
        """
        return self.input_mean + self.output_second / (2 * self.output_mean)


def lengths_of(
    input_tokens: np.ndarray, output_tokens: np.ndarray, cached_tokens: np.ndarray | None = None
) -> Lengths:
    """Moments of measured or planned lengths; raises ValueError when empty or without output."""
    output = np.asarray(output_tokens, dtype=float)
    if output.size == 0 or output.mean() <= 0:
        raise ValueError("no output tokens to take moments of; pass lengths of requests that produced output")
    prompt = np.asarray(input_tokens, dtype=float)
    cached = 0.0 if cached_tokens is None else float((prompt - computed(prompt, cached_tokens)).mean())
    return Lengths(float(prompt.mean()), float(output.mean()), float(np.mean(output**2)), cached)


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Coefficients of the step time, seconds (see the module's first invariant)."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    kappa_s: float = 0.0
    kv_s: float = 0.0
    prefill_s: float = 0.0  # delta

    def prefill_work_s(self, lengths: Lengths, batch_size: np.ndarray | float) -> np.ndarray | float:
        """Engine seconds of prefill per request at constant batch: max(0, gamma P + delta f(n/m)).

        At batch n, r = n/m requests start per step. If they come as a Poisson stream, a request has
        f(r) = (1 - e^-r)/r steps with prefill: prompts that share a step share its delta.
        """
        if self.prefill_s == 0:
            return self.gamma_s * lengths.computed_mean
        r = np.maximum(np.asarray(batch_size, dtype=float), 1e-9) / lengths.output_mean
        work = np.maximum(0.0, self.gamma_s * lengths.computed_mean - self.prefill_s * np.expm1(-r) / r)
        return float(work) if work.ndim == 0 else work

    def step_s(self, batch_size: np.ndarray | float, context_mean: float = 0.0) -> np.ndarray | float:
        """T(n): seconds of a pure decode step of `batch_size` sequences of mean context `context_mean`."""
        n = batch_size
        return self.alpha_s + (self.beta_s + self.kv_s * context_mean) * n + self.kappa_s * n * n

    def request_work_s(self, lengths: Lengths, batch_size: float) -> float:
        """Engine seconds one request costs at constant batch: m T(n)/n and its prefill."""
        step = self.step_s(batch_size, lengths.context_mean)
        return float(lengths.output_mean * step / batch_size + self.prefill_work_s(lengths, batch_size))


def throughput_qps(law: StepLaw, lengths: Lengths, batch_size: np.ndarray | float) -> np.ndarray:
    """X(n) = n / (m T(n) + n gamma P): completions per second at constant batch n; 0 at n = 0.

    With delta, gamma P is `prefill_work_s(n)`.
    """
    n = np.asarray(batch_size, dtype=float)
    step = law.step_s(n, lengths.context_mean)
    work = lengths.output_mean * step + n * law.prefill_work_s(lengths, n)
    # At n = 0 a law without a base cost (alpha 0) has no work either.
    return np.divide(n, work, out=np.zeros(work.shape), where=n > 0)


def lambda_max_qps(law: StepLaw, lengths: Lengths, max_num_seqs: int | None) -> float:
    """The most requests per second that can be served for ever, X(K).

    1 / (m (alpha/K + beta + kappa K + kv c) + gamma P). Without a known K: the limit K to
    infinity, 1/(m (beta + kv c) + gamma P), an upper bound (0 when kappa > 0, inf when all are 0).
    An overloaded first-come queue keeps n at K, so X(K) counts, not the best X(n) below it.
    """
    if max_num_seqs is not None:
        return 1 / law.request_work_s(lengths, max_num_seqs)
    if law.kappa_s > 0:
        return 0.0
    per_request = lengths.output_mean * (law.beta_s + law.kv_s * lengths.context_mean)
    per_request += law.prefill_work_s(lengths, 0.0)
    return 1 / per_request if per_request > 0 else math.inf


def lambda_max_gradient(law: StepLaw, lengths: Lengths, max_num_seqs: int) -> np.ndarray:
    """Derivatives of lambda_max by (alpha, beta, gamma, kappa, kv, delta), for the delta method.

    lambda_max = 1/w, so d lambda_max = -lambda_max^2 dw with w linear in the coefficients.
    """
    m, k = lengths.output_mean, max_num_seqs
    pays = float(law.prefill_work_s(lengths, k) > 0)
    shared = -math.expm1(-k / m) / (k / m)
    work = np.array([m / k, m, pays * lengths.computed_mean, m * k, m * lengths.context_mean, pays * shared])
    return -work * lambda_max_qps(law, lengths, max_num_seqs) ** 2


def peak_batch_size(law: StepLaw, lengths: Lengths, max_num_seqs: int) -> int:
    """The n <= K of highest X(n); below K means that larger batches lower the throughput."""
    n = np.arange(1, max_num_seqs + 1)
    return int(n[np.argmax(throughput_qps(law, lengths, n))])


def marginal_gain(law: StepLaw, lengths: Lengths, max_num_seqs: int) -> list[dict[str, float]]:
    """The curve X(n) with its gain per added sequence, at 1, 2, 4, ... and K.

    `gain_qps` is X(n) - X(n-1); `gain_ratio` is that over X(1): 1 = perfect scaling, negative = harm.
    """
    points = sorted({min(2**i, max_num_seqs) for i in range(max_num_seqs.bit_length() + 1)})
    first = float(throughput_qps(law, lengths, 1.0))
    curve = []
    for n in points:
        here, before = (float(x) for x in throughput_qps(law, lengths, np.array([n, n - 1.0])))
        gain = here - before
        curve.append({"batch_size": n, "throughput_qps": here, "gain_qps": gain, "gain_ratio": gain / first})
    return curve


def flattening_batch_size(law: StepLaw, lengths: Lengths, max_num_seqs: int, gain_ratio: float = 0.1) -> int:
    """The first n whose added sequence brings less than `gain_ratio` of what the first one brought.

    0.1 is a convention (a tenth of perfect scaling), not a law; K when no n is that flat.
    """
    n = np.arange(0, max_num_seqs + 1, dtype=float)
    gains = np.diff(throughput_qps(law, lengths, n))
    flat = np.nonzero(gains < gain_ratio * gains[0])[0]
    return int(flat[0]) + 1 if flat.size else max_num_seqs


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Solution of n = lambda E[S(n)], the mean-field number of sequences in service."""

    exists: bool
    admissible: bool  # exists and n <= K
    batch_size: float | None  # the stable root
    upper_root: float | None  # the unstable one, for convex T: a burst past it does not come back
    residence_s: float | None  # n / lambda
    load_ratio: float  # u = lambda / lambda_max(K)
    reason: str


def mean_field(law: StepLaw, lengths: Lengths, arrival_qps: float, max_num_seqs: int) -> FixedPoint:
    """The fixed point rho = lambda E[S(rho)], with its existence checked.

    S(n) = m T(n) / (1 - lambda gamma P): prefill takes the share lambda gamma P of the time.
    With T affine in n: n* = lambda' m alpha / (1 - lambda' m beta), lambda' = lambda/(1 - lambda gamma P).
    With kappa > 0, n = lambda' m T(n) is a quadratic: no root, or a stable and an unstable one.
    With delta, gamma P is `prefill_work_s(K)`, so that n* reaches K exactly at lambda_max(K).
    It knows neither fluctuations nor a queue, so it is 5-30 % low near capacity: a lower bound.
    """
    load = arrival_qps / lambda_max_qps(law, lengths, max_num_seqs)
    prefill_share = arrival_qps * law.prefill_work_s(lengths, max_num_seqs)
    if arrival_qps <= 0:
        return FixedPoint(True, True, 0.0, None, None, 0.0, "no arrivals")
    if prefill_share >= 1:
        return FixedPoint(
            False, False, None, None, None, load, f"prefill alone needs {prefill_share:.2f} of the time (limit 1)"
        )
    rate = arrival_qps / (1 - prefill_share) * lengths.output_mean  # token-steps per decode second
    a, b, k = law.alpha_s, law.beta_s + law.kv_s * lengths.context_mean, law.kappa_s
    lower, upper = _roots(rate * k, rate * b - 1, rate * a)
    if lower is None:
        return FixedPoint(
            False, False, None, None, None, load,
            f"n = lambda E[S(n)] has no solution at {arrival_qps:.4g} requests/s: work arrives faster than any batch "
            "size can do it",
        )
    admissible = lower <= max_num_seqs
    reason = "ok" if admissible else f"the fixed point {lower:.1f} is above max_num_seqs {max_num_seqs}: a queue grows"
    return FixedPoint(True, admissible, lower, upper, lower / arrival_qps, load, reason)


def _roots(square: float, linear: float, constant: float) -> tuple[float | None, float | None]:
    """Non-negative roots (lower, upper) of square n^2 + linear n + constant = 0 with constant >= 0."""
    if square == 0:
        return (-constant / linear, None) if linear < 0 else (None, None)
    disc = linear * linear - 4 * square * constant
    if linear >= 0 or disc < 0:
        return None, None
    # the numerically stable pair for linear < 0
    q = (-linear + math.sqrt(disc)) / 2
    return constant / q, q / square


def mean_field_numeric(
    law: StepLaw, lengths: Lengths, arrival_qps: float, max_num_seqs: int, limit: float = 1e7
) -> float | None:
    """The lowest root of n - lambda' m T(n) by bracketing: a second path that does not use the algebra."""
    prefill_share = arrival_qps * law.prefill_work_s(lengths, max_num_seqs)
    if prefill_share >= 1:
        return None
    rate = arrival_qps / (1 - prefill_share) * lengths.output_mean

    def excess(n: float) -> float:
        return n - rate * float(law.step_s(n, lengths.context_mean))

    grid = np.concatenate([[0.0], np.geomspace(1e-6, limit, 4000)])
    above = np.nonzero([excess(n) >= 0 for n in grid])[0]
    if not above.size:
        return None
    if above[0] == 0:
        return 0.0
    return float(optimize.brentq(excess, grid[above[0] - 1], grid[above[0]], xtol=1e-12))


@dataclass(frozen=True, slots=True)
class UslForm:
    """X(n) = X1 n / (1 + sigma (n-1) + kappa n (n-1)), the Universal Scalability Law."""

    first_qps: float
    sigma: float  # contention
    kappa: float  # coherency; > 0 means a peak

    def throughput_qps(self, n: float) -> float:
        """Completions per second at n sequences."""
        return self.first_qps * n / (1 + self.sigma * (n - 1) + self.kappa * n * (n - 1))


def usl_form(law: StepLaw, lengths: Lengths) -> UslForm:
    """The same X(n) in the words of the USL; exact for delta = 0, as m T(n) + n gamma P is quadratic in n.

    With A = m alpha, B = m (beta + kv c) + gamma P, C = m kappa:  A + B n + C n^2
    = (A + B + C) [1 + (B + C)/(A+B+C) (n-1) + C/(A+B+C) n (n-1)].
    """
    a = lengths.output_mean * law.alpha_s
    b = lengths.output_mean * (law.beta_s + law.kv_s * lengths.context_mean) + law.prefill_work_s(lengths, 1.0)
    c = lengths.output_mean * law.kappa_s
    total = a + b + c
    return UslForm(1 / total, (b + c) / total, c / total)
