"""The simulated service of the studies of docs/evidence/analysis.md: stages of known load.

Input: rate, seed, length of the stage. Output: arrival, first and last token times and lengths, as a client has them.
Does not: measure; the reference's service (alpha 0.6 ms, beta 0.04 ms per sequence, gamma 8 us per prompt token, 32
sequences, lognormal(6, 0.6) answers: capacity 27.21 requests/s), step by step without noise.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.batching import StepLaw
from analysis.intervals import independent_states
from analysis.little import in_flight_at
from analysis.replay import replay

LAW = StepLaw(0.6e-3, 0.04e-3, 8e-6)
SEQS = 32
CAPACITY = 27.21
STAGE_S, WARMUP_S = 300.0, 30.0


@dataclass
class Stage:
    """One simulated stage, seconds from its start."""

    arrival: np.ndarray
    first: np.ndarray
    last: np.ndarray
    tokens: np.ndarray

    @property
    def window(self) -> np.ndarray:
        return self.arrival >= WARMUP_S

    def residence(self) -> np.ndarray:
        return (self.last - self.arrival)[self.window]

    def states(self, duration_s: float = STAGE_S) -> float:
        t = np.linspace(WARMUP_S, duration_s, 600, endpoint=False)
        return independent_states(in_flight_at(t, self.arrival, self.last))


def simulate(qps: float, seed: int, duration_s: float = STAGE_S) -> Stage:
    """Poisson arrivals with the reference's lengths, through the step-synchronous service."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / qps, int(qps * duration_s * 1.2 + 200)))
    arrival = arrival[arrival < duration_s]
    prompt = rng.integers(100, 2001, len(arrival))
    tokens = np.maximum(1, rng.lognormal(6.0, 0.6, len(arrival)).astype(int))
    done = replay(arrival, prompt, tokens, LAW, SEQS)
    return Stage(arrival, done.first_token_s, done.last_token_s, tokens)
