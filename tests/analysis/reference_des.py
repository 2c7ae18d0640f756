"""A step-by-step simulator of the batching service: the second path that judges the models.

It walks every engine step and shares no code with `analysis/replay.py`. Step noise and
timestamp jitter are seeded. Rule of a step: decode tokens first, then running prefills, then
admission first come first served; see `docs/queueing.md` section 5.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Truth:
    """Coefficients of the true service, seconds."""

    alpha: float = 0.6e-3
    beta: float = 0.04e-3
    gamma: float = 8e-6
    kappa: float = 0.0  # n^2
    kv: float = 0.0  # context tokens
    noise_cv: float = 0.0
    delta: float = 0.0  # per step with prefill; may be negative


@dataclass
class Load:
    """One simulated stage as a client would have planned it."""

    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray


def poisson_load(qps: float, duration: float, seed: int, mu: float = 6.0, sigma: float = 0.6) -> Load:
    """Poisson arrivals with the seed's length laws (floor of a lognormal, uniform prompts 100..2000)."""
    rng = np.random.default_rng(seed)
    n = int(rng.poisson(qps * duration))
    arrival = np.sort(rng.uniform(0, duration, n))
    return Load(arrival, rng.integers(100, 2001, n), np.maximum(1, rng.lognormal(mu, sigma, n).astype(int)))


def simulate(load: Load, truth: Truth, seqs: int = 32, budget: int = 4096, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(first token, last token) times of every request, seconds."""
    noise = np.random.default_rng(seed)
    arrival, prompt, output = load.arrival.tolist(), load.prompt.tolist(), load.output.tolist()
    total = len(arrival)
    first, last = [0.0] * total, [0.0] * total
    ends: dict[int, list[int]] = {}  # step number -> requests whose last token it carries
    prefilling: list[list[int]] = []
    now, step, seen, head, decoding, context, finished = 0.0, 0, 0, 0, 0, 0, 0
    factors, used = np.ones(1), 1
    while finished < total:
        while seen < total and arrival[seen] <= now:
            seen += 1
        if not decoding and not prefilling and head == seen:
            now = arrival[seen]
            continue
        room, work, ready, read = max(1, budget - decoding), 0, [], context
        for item in prefilling:
            if room <= 0:
                break
            read += prompt[item[0]] - item[1]
            part = min(room, item[1])
            item[1] -= part
            room -= part
            work += part
            if item[1] == 0:
                ready.append(item[0])
        while head < seen and room > 0 and decoding + len(prefilling) < seqs:
            part = min(room, prompt[head])
            prefilling.append([head, prompt[head] - part])
            room -= part
            work += part
            if part == prompt[head]:
                ready.append(head)
            head += 1
        if ready:
            prefilling = [item for item in prefilling if item[1] > 0]
        duration = truth.alpha + truth.beta * decoding + truth.kappa * decoding**2 + truth.kv * read
        if work:
            duration += max(0.0, truth.delta + truth.gamma * work)
        if truth.noise_cv:
            if used >= factors.size:
                factors, used = np.maximum(0.2, 1 + truth.noise_cv * noise.standard_normal(65536)), 0
            duration *= factors[used]
            used += 1
        now += float(duration)
        step += 1
        context += decoding
        for request in ends.pop(step, ()):
            last[request] = now
            finished += 1
            decoding -= 1
            context -= prompt[request] + output[request] - 1
        for request in ready:
            first[request] = now
            if output[request] == 1:
                last[request] = now
                finished += 1
            else:
                ends.setdefault(step + output[request] - 1, []).append(request)
                decoding += 1
                context += prompt[request]
    return np.array(first), np.array(last)
