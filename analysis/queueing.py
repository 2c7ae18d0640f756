"""Closed forms of classical queueing theory, as far as the report compares with them.

Input: rates (1/s), mean service times (s), squared variations (1), servers.
Output: waits and residence times in seconds, probabilities, moments.
Does not: model batching (`batching.py`, `birth_death.py`), fit, or judge.

1. A queue without a steady state (rho >= 1) has wait `math.inf`, never a
   negative number.
2. Nothing here computes a factorial or a power that can overflow.
3. Poisson arrivals and first come first served unless the name says otherwise.

Source: Little 1961; Pollaczek 1930 / Khinchine 1932; Erlang 1917; Kingman 1961;
Allen 1990 and Cunneen; Cosmetatos 1976; Kimura 1986. `docs/queueing.md` section 2.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special


@dataclass(frozen=True, slots=True)
class Moments:
    """First moments of a non-negative quantity, in its unit."""

    mean: float
    second: float  # E[X^2], unit squared
    clipped_share: float = 0.0  # P(X > cap)

    @property
    def variance(self) -> float:
        """Variance, unit squared; never below zero."""
        return max(0.0, self.second - self.mean**2)

    @property
    def scv(self) -> float:
        """Squared coefficient of variation, variance / mean^2 (dimensionless)."""
        return self.variance / self.mean**2 if self.mean > 0 else 0.0


def little_in_flight(arrival_qps: float, residence_s: float) -> float:
    """Mean number in the system, L = lambda * W (requests)."""
    return arrival_qps * residence_s


def sample_moments(values: np.ndarray) -> Moments:
    """Moments of a sample; raises ValueError when it is empty."""
    values = np.asarray(values, dtype=float)
    if values.size == 0:
        raise ValueError("moments of an empty sample are not defined; pass at least one value")
    return Moments(float(values.mean()), float(np.mean(values**2)))


# ---- lognormal lengths ------------------------------------------------------


def lognormal_raw_moment(mu: float, sigma: float, k: float) -> float:
    """E[X^k] of exp(N(mu, sigma^2)): exp(k mu + k^2 sigma^2 / 2), in unit^k."""
    return math.exp(k * mu + 0.5 * k * k * sigma * sigma)


def lognormal_moments(mu: float, sigma: float) -> Moments:
    """Mean and second moment of a lognormal; its SCV is exp(sigma^2) - 1 whatever mu."""
    return Moments(lognormal_raw_moment(mu, sigma, 1), lognormal_raw_moment(mu, sigma, 2))


def lognormal_quantile(mu: float, sigma: float, p: float) -> float:
    """The p-quantile exp(mu + sigma z_p)."""
    return math.exp(mu) * math.exp(sigma * float(special.ndtri(p)))


def clipped_lognormal_moments(mu: float, sigma: float, cap: float) -> Moments:
    """Moments of min(X, cap) for lognormal X: what `max_tokens` does to lengths.

    E[min(X,c)^k] = exp(k mu + k^2 s^2/2) Phi(z - k s) + c^k (1 - Phi(z)),  z = (ln c - mu)/s.
    A cap is not a length: it applies only where the service would have gone on.
    """
    if cap <= 0:
        raise ValueError(f"cap is {cap}; a length cap must be above 0")
    z = (math.log(cap) - mu) / sigma
    above = float(special.ndtr(-z))
    raw = [lognormal_raw_moment(mu, sigma, k) * float(special.ndtr(z - k * sigma)) + cap**k * above for k in (1, 2)]
    return Moments(raw[0], raw[1], above)


# ---- one server -------------------------------------------------------------


def pollaczek_khinchine_wait_s(arrival_qps: float, service_s: float, service_scv: float) -> float:
    """Mean wait in queue of M/G/1 FCFS, seconds.

    Wq = lambda E[S^2] / (2 (1 - rho)) = rho/(1-rho) * (1+SCV)/2 * s,  rho = lambda s.
    """
    rho = arrival_qps * service_s
    if rho >= 1:
        return math.inf
    return rho / (1 - rho) * (1 + service_scv) / 2 * service_s


def mm1_wait_s(arrival_qps: float, service_s: float) -> float:
    """Mean wait of M/M/1 (SCV 1): rho/(1-rho) * s, seconds."""
    return pollaczek_khinchine_wait_s(arrival_qps, service_s, 1.0)


def md1_wait_s(arrival_qps: float, service_s: float) -> float:
    """Mean wait of M/D/1 (SCV 0): half of M/M/1, seconds."""
    return pollaczek_khinchine_wait_s(arrival_qps, service_s, 0.0)


def kingman_wait_s(arrival_qps: float, service_s: float, arrival_scv: float, service_scv: float) -> float:
    """Heavy-traffic approximation of the mean wait of G/G/1, seconds.

    Wq ~ rho/(1-rho) * (ca^2 + cs^2)/2 * s. High for ca^2 < 1, low for ca^2 > 1 at moderate rho.
    """
    rho = arrival_qps * service_s
    if rho >= 1:
        return math.inf
    return rho / (1 - rho) * (arrival_scv + service_scv) / 2 * service_s


# ---- processor sharing ------------------------------------------------------


def processor_sharing_residence_s(arrival_qps: float, service_s: float) -> float:
    """Mean residence of M/G/1 processor sharing, s/(1-rho) seconds, whatever the distribution."""
    rho = arrival_qps * service_s
    return service_s / (1 - rho) if rho < 1 else math.inf


def processor_sharing_slowdown(arrival_qps: float, service_s: float) -> float:
    """E[W | size x] / x of M/G/1 processor sharing: 1/(1-rho), the same for every size."""
    rho = arrival_qps * service_s
    return 1 / (1 - rho) if rho < 1 else math.inf


# ---- many servers -----------------------------------------------------------


def erlang_b(servers: int, offered: float) -> float:
    """Blocking probability of M/M/c/c at offered load a = lambda s.

    B_0 = 1, B_k = a B_{k-1} / (k + a B_{k-1}): stays in [0, 1], so it cannot overflow.
    """
    if servers < 0 or offered < 0:
        raise ValueError(f"servers is {servers}, offered load is {offered}; both must be at least 0")
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = offered * blocking / (k + offered * blocking)
    return blocking


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c: C = B / (1 - rho (1 - B)), rho = a/c; 1 when rho >= 1."""
    rho = offered / servers
    if rho >= 1:
        return 1.0
    blocking = erlang_b(servers, offered)
    return blocking / (1 - rho * (1 - blocking))


def mmc_wait_s(arrival_qps: float, service_s: float, servers: int) -> float:
    """Mean wait of M/M/c: C(c, a) * s / (c - a), seconds."""
    offered = arrival_qps * service_s
    if offered >= servers:
        return math.inf
    return erlang_c(servers, offered) * service_s / (servers - offered)


def allen_cunneen_wait_s(
    arrival_qps: float, service_s: float, servers: int, service_scv: float, arrival_scv: float = 1.0
) -> float:
    """Mean wait of G/G/c by Allen and Cunneen: Wq(M/M/c) * (ca^2 + cs^2)/2, seconds."""
    return mmc_wait_s(arrival_qps, service_s, servers) * (arrival_scv + service_scv) / 2


def cosmetatos_wait_s(arrival_qps: float, service_s: float, servers: int) -> float:
    """Mean wait of M/D/c by Cosmetatos, seconds.

    0.5 Wq(M/M/c) [1 + (1-rho)(c-1)(sqrt(4+5c)-2) / (16 rho c)].
    """
    rho = arrival_qps * service_s / servers
    if rho >= 1:
        return math.inf
    if rho == 0:
        return 0.0
    factor = (1 - rho) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * rho * servers)
    return 0.5 * mmc_wait_s(arrival_qps, service_s, servers) * (1 + factor)


def kimura_wait_s(arrival_qps: float, service_s: float, servers: int, service_scv: float) -> float:
    """Mean wait of M/G/c by Kimura, seconds: a harmonic mix of M/M/c and M/D/c.

    (1 + cs^2) / (2 cs^2 / Wq_M + (1 - cs^2) / Wq_D). Exact at cs^2 = 1; for large cs^2 at low load
    the denominator loses its meaning and Allen-Cunneen is returned instead.
    """
    wait_m = mmc_wait_s(arrival_qps, service_s, servers)
    if math.isinf(wait_m) or wait_m == 0:
        return wait_m
    wait_d = cosmetatos_wait_s(arrival_qps, service_s, servers)
    denominator = 2 * service_scv / wait_m + (1 - service_scv) / wait_d
    if denominator <= 0:
        return allen_cunneen_wait_s(arrival_qps, service_s, servers, service_scv)
    return (1 + service_scv) / denominator


@dataclass(frozen=True, slots=True)
class QueueWait:
    """The wait in a queue as an atom at zero and an exponential tail."""

    waits_probability: float
    mean_s: float  # over all arrivals, those that do not wait included

    @property
    def tail_mean_s(self) -> float:
        """Mean wait of those that wait, seconds."""
        return self.mean_s / self.waits_probability if self.waits_probability > 0 else 0.0

    def survival(self, x_s: np.ndarray) -> np.ndarray:
        """P(wait > x) for x in seconds (1 below 0). Exact for M/M/c, an approximation otherwise."""
        x_s = np.asarray(x_s, dtype=float)
        theta = self.tail_mean_s
        tail = self.waits_probability * np.exp(-np.maximum(x_s, 0.0) / theta) if theta > 0 else np.zeros_like(x_s)
        return np.where(x_s < 0, 1.0, tail)


def mgc_wait(arrival_qps: float, service_s: float, servers: int, service_scv: float) -> QueueWait | None:
    """The wait of M/G/c: Erlang C for who waits, Kimura for how long; None without a steady state."""
    offered = arrival_qps * service_s
    if offered >= servers:
        return None
    return QueueWait(erlang_c(servers, offered), kimura_wait_s(arrival_qps, service_s, servers, service_scv))
