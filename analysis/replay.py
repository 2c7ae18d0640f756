"""Discrete-event replay of a batching service with fitted coefficients.

Input: arrival times (s), lengths (tokens), a step law, the two scheduler limits.
Output: first-token and last-token time of every request (s, same clock).
Does not: fit, judge, use any measured latency; model preemption, KV limits or rejection.

Step rule: (1) one token for every decoding sequence; (2) the rest of the token budget to
running prefills in order; (3) admit first come first served while fewer than K run and budget
is left. The step lasts T = alpha + beta n + kappa n^2 + kv (context tokens), and max(0, delta + gamma p)
more when it computes p prompt tokens; all its tokens appear at its end; the step that ends a
prefill emits the first token.

1. Stretches of pure decode that no arrival can change are jumped over in closed form, so cost
   is a few operations per request, whatever the output lengths.
2. Arrivals inside a step are seen at its end.
3. Without noise the result is the same, to rounding, as walking every step (tested).

Source: `docs/queueing.md` section 5.
"""
from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from analysis.batching import StepLaw
from analysis.computed_tokens import computed

DEFAULT_BUDGET_TOKENS = 4096  # max_num_batched_tokens when the caller does not know it


@dataclass(frozen=True, slots=True)
class Replayed:
    """Times of the replayed requests, seconds on the clock of the arrivals; arrays of shape (n,)."""

    first_token_s: np.ndarray
    last_token_s: np.ndarray


def replay(
    arrival_s: np.ndarray,
    input_tokens: np.ndarray,
    output_tokens: np.ndarray,
    law: StepLaw,
    max_num_seqs: int,
    max_num_batched_tokens: int = DEFAULT_BUDGET_TOKENS,
    cached_tokens: np.ndarray | None = None,
) -> Replayed:
    """First and last token times (s) of requests that arrive at `arrival_s` (n,), sorted ascending.

    `cached_tokens`: (n,) of the prompt that is in memory at admission: read, but not computed; None = none.
    """
    arrivals = np.asarray(arrival_s, dtype=float)
    if arrivals.size and np.any(np.diff(arrivals) < 0):
        raise ValueError("arrival_s is not sorted; sort the arrivals (and their lengths) first")
    prompt = np.maximum(1, np.asarray(input_tokens, dtype=float)).astype(int).tolist()
    output = np.maximum(1, np.asarray(output_tokens, dtype=float)).astype(int).tolist()
    work = prompt if cached_tokens is None else computed(np.array(prompt), cached_tokens).astype(int).tolist()
    run = _Run(arrivals.tolist(), prompt, work, output, law, int(max_num_seqs), int(max_num_batched_tokens))
    run.drain()
    return Replayed(np.array(run.first), np.array(run.last))


def replay_on_engine(
    arrival_s: np.ndarray,
    input_tokens: np.ndarray,
    output_tokens: np.ndarray,
    law: StepLaw,
    max_num_seqs: int,
    max_num_batched_tokens: int = DEFAULT_BUDGET_TOKENS,
) -> Replayed:
    """The same replay by the embedded engine's own scheduler core and virtual driver.

    Slower (10-30 thousand requests/s), but it is the scheduler that serves HTTP: the check of `replay`,
    and the way to policies, KV limits and preemption. Raises ValueError for kappa or delta, which the
    engine's profiles cannot express exactly. The KV pool is made so large that it never binds.
    """
    from engine.profiles import Profile
    from engine.request import Request
    from engine.settings import EngineConfig
    from engine.virtual import drive

    if law.kappa_s != 0 or law.prefill_s != 0:
        raise ValueError("the engine's profiles have no n^2 term and no cost per prefill step; use `replay`")
    prompt = np.maximum(1, np.asarray(input_tokens, dtype=float)).astype(int).tolist()
    output = np.maximum(1, np.asarray(output_tokens, dtype=float)).astype(int).tolist()
    arrivals = np.asarray(arrival_s, dtype=float).tolist()
    longest = max((p + o for p, o in zip(prompt, output, strict=True)), default=1)
    profile = Profile(
        "fitted", "fitted from client rows", law.alpha_s, law.gamma_s, 0.0, 0.0, law.kv_s, 1,
        kv_tokens=(longest + 16) * (max_num_seqs + 1), overhead_s=0.0,
        # the per-token price counts decoding sequences too, so only the rest is theirs alone
        decode_s=law.beta_s - law.gamma_s, kind="fitted",
    )  # fmt: skip
    config = EngineConfig(
        profile=profile, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=longest + 1,
    )  # fmt: skip

    def request(i: int) -> Request:
        return Request(str(i), arrivals[i], prompt[i], output[i], output[i], index=i)

    out = drive(config, arrivals, request, seed=0)
    return Replayed(np.array(out.first_s), np.array(out.last_s))


class _Run:
    """State of one replay; `steps` counts engine steps, `context` the tokens in running decodes."""

    def __init__(
        self, arrivals: list[float], prompt: list[int], work: list[int], output: list[int], law: StepLaw, seqs: int,
        budget: int,
    ) -> None:
        self.arrivals, self.prompt, self.work, self.output, self.law = arrivals, prompt, work, output, law
        self.seqs, self.budget = max(1, seqs), budget
        self.now, self.steps, self.context, self.next = 0.0, 0, 0, 0
        self.waiting: deque[int] = deque()
        self.prefills: deque[list[int]] = deque()  # [request, prompt tokens left to compute]
        self.decoding: list[tuple[int, int]] = []  # heap of (step of the last token, request)
        self.first = [math.inf] * len(arrivals)
        self.last = [math.inf] * len(arrivals)

    def drain(self) -> None:
        """Run until every request has its last token."""
        count = len(self.arrivals)
        while True:
            while self.next < count and self.arrivals[self.next] <= self.now:
                self.waiting.append(self.next)
                self.next += 1
            running = len(self.decoding) + len(self.prefills)
            if self.prefills or (self.waiting and running < self.seqs):
                self._mixed_step()
            elif self.decoding:
                self._jump()
            elif self.next < count:
                self.now = self.arrivals[self.next]
            else:
                return

    def _mixed_step(self) -> None:
        """One step with prefill work in it."""
        n = len(self.decoding)
        left = budget = max(1, self.budget - n)  # decodes alone must never stop all prefill work
        read = self.context  # tokens in memory before the step: decodes, and prompts begun earlier
        done: list[int] = []
        for item in self.prefills:
            if left <= 0:
                break
            read += self.prompt[item[0]] - item[1]
            take = min(item[1], left)
            item[1] -= take
            left -= take
            if item[1]:
                break
            done.append(item[0])
        for _ in done:
            self.prefills.popleft()
        # an admitted prompt joins behind unfinished prefills; slots of prompts that end here are still taken
        while self.waiting and left > 0 and n + len(done) + len(self.prefills) < self.seqs:
            request = self.waiting.popleft()
            read += self.prompt[request] - self.work[request]  # found in the cache
            take = min(self.work[request], left)
            left -= take
            if take == self.work[request]:
                done.append(request)
            else:
                self.prefills.append([request, self.work[request] - take])
        law = self.law
        self.now += law.alpha_s + law.beta_s * n + law.kappa_s * n * n
        self.now += law.kv_s * read + max(0.0, law.prefill_s + law.gamma_s * (budget - left))
        self.steps += 1
        self.context += n
        self._finish_due()
        for request in done:
            self.first[request] = self.now
            if self.output[request] <= 1:
                self.last[request] = self.now
            else:
                heapq.heappush(self.decoding, (self.steps + self.output[request] - 1, request))
                self.context += self.prompt[request]  # the token of this step is not in memory yet

    def _jump(self) -> None:
        """As many pure decode steps as pass before a sequence ends or an arrival can be admitted."""
        n, law = len(self.decoding), self.law
        count = self.decoding[0][0] - self.steps
        base = law.alpha_s + law.beta_s * n + law.kappa_s * n * n + law.kv_s * self.context
        slope = law.kv_s * n  # each step adds n tokens to the context
        if n < self.seqs and self.next < len(self.arrivals):
            gap = self.arrivals[self.next] - self.now
            if base * count + slope * count * (count - 1) / 2 > gap:
                count = min(count, _steps_until(gap, base, slope))
        self.now += base * count + slope * count * (count - 1) / 2
        self.steps += count
        self.context += n * count
        self._finish_due()

    def _finish_due(self) -> None:
        """Take out the sequences whose last token came at this step."""
        while self.decoding and self.decoding[0][0] <= self.steps:
            request = heapq.heappop(self.decoding)[1]
            self.last[request] = self.now
            self.context -= self.prompt[request] + self.output[request] - 1


def _steps_until(gap_s: float, base_s: float, slope_s: float) -> int:
    """The least k >= 1 with base k + slope k(k-1)/2 >= gap: the first step boundary at or after it."""
    if base_s <= 0:
        return 1
    k = gap_s / base_s
    if slope_s > 0:
        half = base_s - slope_s / 2
        k = (-half + math.sqrt(half * half + 2 * slope_s * gap_s)) / slope_s
    k_int = max(1, math.ceil(k))
    # rounding of the closed form: step back or on by one where needed
    while k_int > 1 and base_s * (k_int - 1) + slope_s * (k_int - 1) * (k_int - 2) / 2 >= gap_s:
        k_int -= 1
    while base_s * k_int + slope_s * k_int * (k_int - 1) / 2 < gap_s:
        k_int += 1
    return k_int
