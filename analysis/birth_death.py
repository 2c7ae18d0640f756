"""Limited processor sharing with a state-dependent rate: the analytic latency predictor.

Input: the step law, the moments (and samples) of the lengths, a rate, K = max_num_seqs.
Output: mean residence and wait, the chance to wait, distributions of W and TTFT, seconds.
Does not: know chunking, the order inside a step, KV limits, preemption or rejection.

At most K requests are served together, the rest wait first come first served. With j
requests present the completion rate is mu(j) = min(j,K) / (m T(min(j,K)) + min(j,K) gamma P),
so the number present is a birth-death chain.

1. The tail j > K is geometric with ratio lambda/mu(K) and summed in closed form: nothing is
   truncated, and products are taken in logarithms.
2. lambda >= mu(K) has no steady state: `limited_ps` returns None.
3. Three exact limits (tested): K = 1 is Pollaczek-Khinchine; T constant and K = c is M/M/c times
   (1+SCV)/2; K infinite with beta only is M/G/1 processor sharing.

Source: `docs/queueing.md` section 4.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from analysis.batching import Lengths, StepLaw
from analysis.queueing import QueueWait

MAX_POINTS = 2000  # of a length sample kept as quantiles: quadrature error far below the model's


@dataclass(frozen=True, slots=True)
class LimitedPs:
    """Steady state of the chain at one arrival rate."""

    arrival_qps: float
    residence_s: float  # W, mean
    wait: QueueWait  # W_q and P(wait)
    service_s: float  # mean time in a batch slot, prefill included
    in_flight_mean: float  # L
    batch_size_mean: float  # E[min(j, K)]
    busy_probability: float  # P(j >= 1)
    token_s: float  # service_s / m: seconds per output token
    load_ratio: float  # lambda / mu(K)


def service_rates_qps(law: StepLaw, lengths: Lengths, max_num_seqs: int) -> np.ndarray:
    """mu(1..K): completions per second with j requests in the batch; shape (K,)."""
    j = np.arange(1, max_num_seqs + 1, dtype=float)
    step = law.step_s(j, lengths.context_mean)
    return j / (lengths.output_mean * step + j * law.prefill_work_s(lengths, j))


def limited_ps(law: StepLaw, lengths: Lengths, arrival_qps: float, max_num_seqs: int) -> LimitedPs | None:
    """Steady state at `arrival_qps`; None when the rate is at or above mu(K)."""
    return chain(service_rates_qps(law, lengths, max_num_seqs), lengths, arrival_qps)


def chain(mu_qps: np.ndarray, lengths: Lengths, arrival_qps: float) -> LimitedPs | None:
    """Steady state of the chain with completion rates `mu_qps` (K,) and mu(j > K) = mu(K).

    p_j ~ prod lambda/mu.  Lq = sum (j-K)+ p_j = p_K r/(1-r)^2, r = lambda/mu(K);
    W_s = (L - Lq)/lambda;  W_q = Lq/lambda * (1+SCV)/2;  W = W_s + W_q.
    """
    k = mu_qps.size
    ratio = arrival_qps / float(mu_qps[-1])
    if ratio >= 1 or arrival_qps <= 0:
        return None
    log_p = np.concatenate([[0.0], np.cumsum(np.log(arrival_qps) - np.log(mu_qps))])
    p = np.exp(log_p - log_p.max())
    at_k = p[-1]
    total = p.sum() + at_k * ratio / (1 - ratio)
    p, at_k = p / total, at_k / total
    waiting = at_k * ratio / (1 - ratio) ** 2
    waits = at_k / (1 - ratio)
    in_service = float(np.dot(np.arange(k + 1), p)) + k * at_k * ratio / (1 - ratio)
    service = in_service / arrival_qps
    wait_mean = waiting / arrival_qps * (1 + lengths.output_scv) / 2
    residence = service + wait_mean
    return LimitedPs(
        arrival_qps=arrival_qps,
        residence_s=residence,
        wait=QueueWait(min(1.0, float(waits)), float(wait_mean)),
        service_s=service,
        in_flight_mean=arrival_qps * residence,
        batch_size_mean=in_service,
        busy_probability=1 - float(p[0]),
        token_s=service / lengths.output_mean,
        load_ratio=ratio,
    )


def thin(values: np.ndarray) -> np.ndarray:
    """At most MAX_POINTS mid-quantiles of a sample, sorted, same unit."""
    values = np.sort(np.asarray(values, dtype=float))
    if values.size <= MAX_POINTS:
        return values
    return np.quantile(values, (np.arange(MAX_POINTS) + 0.5) / MAX_POINTS)


def residence_survival(state: LimitedPs, output_tokens: np.ndarray, x_s: float) -> float:
    """P(W > x): W ~ Q + n_out * token_s, Q the wait, independent of the length."""
    return float(state.wait.survival(x_s - output_tokens * state.token_s).mean())


def ttft_survival(state: LimitedPs, law: StepLaw, lengths: Lengths, input_tokens: np.ndarray, x_s: float) -> float:
    """P(TTFT > x): wait, the rest of the running step, then a step with the own prefill.

    TTFT ~ Q + T(n)(1 + P(busy)/2) + gamma p with n the mean batch. Good above about 90 % load
    only: the chain gives too small a chance to wait below it (service is less variable than its).
    """
    step = float(law.step_s(state.batch_size_mean, lengths.context_mean))
    floor = step * (1 + state.busy_probability / 2) + np.maximum(0.0, law.prefill_s + law.gamma_s * input_tokens)
    return float(state.wait.survival(x_s - floor).mean())


def quantile_of(survival, p: float, start_s: float) -> float:
    """The smallest x (s) with survival(x) <= 1 - p, by bracketing from `start_s` > 0."""
    high = start_s
    for _ in range(200):
        if survival(high) <= 1 - p:
            break
        high *= 2
    else:
        return math.inf
    return float(optimize.bisect(lambda x: survival(x) - (1 - p) - 1e-15, 0.0, high, xtol=1e-9 * high, maxiter=200)) \
        if survival(0.0) > 1 - p else 0.0


def residence_quantile_s(state: LimitedPs, output_tokens: np.ndarray, p: float) -> float:
    """The p-quantile of W in seconds for the given sample of output lengths."""
    sample = thin(output_tokens)
    return quantile_of(lambda x: residence_survival(state, sample, x), p, state.residence_s)


def ttft_quantile_s(state: LimitedPs, law: StepLaw, lengths: Lengths, input_tokens: np.ndarray, p: float) -> float:
    """The p-quantile of TTFT in seconds for the given sample of prompt lengths."""
    sample = thin(input_tokens)
    return quantile_of(lambda x: ttft_survival(state, law, lengths, sample, x), p, max(state.token_s, 1e-6))
