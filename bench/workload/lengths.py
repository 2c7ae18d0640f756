"""How long prompts and answers are: laws of whole token counts that know their own moments.

Input: parameters, bounds and a random generator.
Output: int64 arrays of lengths; exact mean, variance and quantile of what is drawn.
Does not: read files (`read_lengths` is the one door for the empirical law), look at a clock.

Every law here draws N = min(max(floor(X), low), high): the draw is floored to whole tokens, then cut to
[low, high]. Its moments are exact sums over its own tail, whatever X is:
    E[N] = sum_{k>=1} P(N >= k),   E[N^2] = sum_{k>=1} (2k - 1) P(N >= k),
    P(N >= k) = 1 for k <= low, P(X >= k) for low < k <= high, 0 above.
Closed forms of the unfloored lognormal are in `lognormal_moment` and `lognormal_clipped_moment`
(Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 1, 1994, chapter 14).
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

_NORMAL = NormalDist()
KINDS = ("uniform", "lognormal", "fixed", "empirical")
MAX_LENGTH = 10_000_000  # tokens; longer values in a file are damage
MAX_FILE_ROWS = 2_000_000
MAX_FILE_LINES = 10_000_000  # comments and blank lines included
MAX_FILE_LINE = 4096  # characters of a line, a comment included
EXACT_UP_TO = 200_000  # terms of the exact sums (about 0.1 s)


def lognormal_moment(mu: float, sigma: float, k: int) -> float:
    """E[X^k] of ln X ~ N(mu, sigma^2): exp(k mu + k^2 sigma^2 / 2), in tokens^k."""
    return math.exp(k * mu + 0.5 * k * k * sigma * sigma)


def lognormal_clipped_moment(mu: float, sigma: float, cap: float, k: int) -> float:
    """E[min(X, c)^k] = exp(k mu + k^2 s^2/2) Phi(z - k s) + c^k (1 - Phi(z)), z = (ln c - mu)/s."""
    if sigma == 0:
        return min(math.exp(mu), cap) ** k
    z = (math.log(cap) - mu) / sigma
    return lognormal_moment(mu, sigma, k) * _NORMAL.cdf(z - k * sigma) + cap**k * (1.0 - _NORMAL.cdf(z))


@dataclass(frozen=True)
class Lengths:
    """One law of lengths in whole tokens.

    uniform: both ends included. lognormal: mu, sigma of ln(tokens). fixed: `low`. empirical: `values`
    with `counts`, drawn with replacement. `low` and `high` cut every law.
    """

    kind: str
    low: int
    high: int
    mu: float = 0.0
    sigma: float = 0.0
    values: tuple[int, ...] = field(default=(), repr=False)
    counts: tuple[int, ...] = field(default=(), repr=False)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """n lengths, int64 tokens."""
        if self.kind == "fixed":
            return np.full(n, self.low, dtype=np.int64)
        if self.kind == "uniform":
            return rng.integers(self.low, self.high, size=n, endpoint=True, dtype=np.int64)
        if self.kind == "lognormal":
            # lognormal() is a scalar C loop over libm's exp; np.exp would pick a SIMD variant by CPU.
            drawn = rng.lognormal(self.mu, self.sigma, size=n)
            return np.clip(np.floor(np.minimum(drawn, self.high)), self.low, self.high).astype(np.int64)
        values = np.asarray(self.values, dtype=np.int64)
        edges = np.cumsum(np.asarray(self.counts, dtype=np.int64))
        place = rng.integers(0, int(edges[-1]), size=n, dtype=np.int64)
        return np.clip(values[np.searchsorted(edges, place, side="right")], self.low, self.high)

    def _tail(self) -> np.ndarray:
        """P(N >= k) for k = 1..high."""
        k = np.arange(1, self.high + 1)
        if self.kind == "fixed":
            return np.ones(self.high)
        if self.kind == "uniform":
            return np.minimum((self.high - k + 1) / (self.high - self.low + 1), 1.0)
        if self.kind == "lognormal":
            if self.sigma == 0:
                tail = (k <= math.exp(self.mu)).astype(float)
            else:
                scale = self.sigma * math.sqrt(2)
                tail = np.array([0.5 * math.erfc((math.log(i) - self.mu) / scale) for i in k.tolist()])
        else:
            values, counts = np.asarray(self.values), np.asarray(self.counts, dtype=float)
            order = np.searchsorted(values, k, side="left")
            above = np.concatenate((np.cumsum(counts[::-1])[::-1], [0.0]))
            tail = above[order] / counts.sum()
        tail[: self.low] = 1.0
        return tail

    def mean(self) -> float:
        """E[N] in tokens, flooring and cutting included."""
        return self.moments()[0]

    def variance(self) -> float:
        """Var[N] in tokens^2, flooring and cutting included."""
        return self.moments()[1]

    def moments(self) -> tuple[float, float]:
        """(mean in tokens, variance in tokens^2) of what is drawn."""
        if self.kind == "fixed":
            return float(self.low), 0.0
        if self.kind == "uniform":  # discrete uniform: (a + b)/2, ((b - a + 1)^2 - 1)/12
            width = self.high - self.low + 1
            return (self.low + self.high) / 2, (width * width - 1) / 12
        if self.kind == "lognormal" and self.high > EXACT_UP_TO:
            # Too many terms to add up; flooring takes half a token off a mean that is that large.
            mean = lognormal_clipped_moment(self.mu, self.sigma, self.high, 1)
            return mean - 0.5, lognormal_clipped_moment(self.mu, self.sigma, self.high, 2) - mean * mean
        tail = self._tail()
        mean = float(tail.sum())
        second = float(((2 * np.arange(1, self.high + 1) - 1) * tail).sum())
        return mean, second - mean * mean

    def quantile(self, p: float) -> int:
        """Smallest length n with P(N <= n) >= p, in tokens; p in (0, 1)."""
        if not 0 < p < 1:
            raise ValueError(f"quantile: p is {p}; it must lie between 0 and 1")
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return min(self.low + math.ceil(p * (self.high - self.low + 1)) - 1, self.high)
        if self.kind == "lognormal":  # floor of a rising map keeps quantiles
            return int(min(max(math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(p)), self.low), self.high))
        edges = np.cumsum(np.asarray(self.counts, dtype=np.int64))
        rank = math.ceil(p * int(edges[-1]) - 1e-9)
        return int(min(max(self.values[int(np.searchsorted(edges, max(rank, 1)))], self.low), self.high))

    def cut_share(self) -> float:
        """Share of draws that `high` cuts (0 for uniform and fixed)."""
        if self.kind == "lognormal":
            if self.sigma == 0:
                return float(math.exp(self.mu) >= self.high + 1)
            return 1.0 - _NORMAL.cdf((math.log(self.high + 1) - self.mu) / self.sigma)
        if self.kind == "empirical":
            over = sum(c for v, c in zip(self.values, self.counts, strict=True) if v > self.high)
            return over / sum(self.counts)
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "kind": self.kind,
            "low": self.low,
            "high": self.high,
            "mu": self.mu,
            "sigma": self.sigma,
            "values": list(self.values),
            "counts": list(self.counts),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Lengths:
        """The law in a `to_dict` form."""
        return cls(**{**data, "values": tuple(data["values"]), "counts": tuple(data["counts"])})


def uniform(low: int, high: int) -> Lengths:
    """Whole numbers from low to high, both included."""
    return Lengths("uniform", low, high)


def lognormal(mu: float, sigma: float, high: int, low: int = 1) -> Lengths:
    """floor(exp(mu + sigma Z)) cut to [low, high]."""
    return Lengths("lognormal", low, high, mu=mu, sigma=sigma)


def fixed(value: int) -> Lengths:
    """Always `value` tokens."""
    return Lengths("fixed", value, value)


def empirical(values: Iterable[int], high: int, low: int = 1) -> Lengths:
    """Draws from observed lengths, with replacement."""
    unique, counts = np.unique(np.fromiter(values, dtype=np.int64), return_counts=True)
    return Lengths("empirical", low, high, values=tuple(unique.tolist()), counts=tuple(counts.tolist()))


def read_lengths(path: Path) -> list[int]:
    """Lengths in a text file: one whole number of tokens a line; blank lines and # comments are skipped.

    Raises ValueError with the line that is wrong, OSError when the file cannot be read. Memory is bounded whatever
    the file is: a device or a pipe is refused before it is opened, an endless line while it is read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: is not a regular file; name a text file with one whole number of tokens a line")
    lengths: list[int] = []
    number = 0
    with open(path, encoding="utf-8-sig", errors="replace") as stream:
        while line := stream.readline(MAX_FILE_LINE + 1):
            number += 1
            if len(line) > MAX_FILE_LINE:
                raise ValueError(f"{path}:{number}: line longer than {MAX_FILE_LINE} characters; no length file")
            if number > MAX_FILE_LINES:
                raise ValueError(f"{path}:{number}: more than {MAX_FILE_LINES} lines; take a sample of the file")
            text = line.partition("#")[0].strip()
            if not text:
                continue
            if not (text.isascii() and text.isdigit()) or len(text) > 18 or not 1 <= int(text) <= MAX_LENGTH:
                raise ValueError(
                    f"{path}:{number}: {text[:40]!r} is not a length; one whole number from 1 to {MAX_LENGTH} a line"
                )
            if len(lengths) >= MAX_FILE_ROWS:
                raise ValueError(f"{path}:{number}: more than {MAX_FILE_ROWS} lengths; take a sample of the file")
            lengths.append(int(text))
    if not lengths:
        raise ValueError(f"{path}: holds no lengths; one whole number of tokens a line")
    return lengths
