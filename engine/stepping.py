"""How long steps take: one step, or a stretch of steps in which every sequence decodes.

Input: a profile, the counts of a step (tokens T, decoding n, cached tokens read K), and a seed.
Output: seconds; and the number of steps that end before a moment.
Does not: know about requests.

In a stretch of pure decode with n sequences, T = n stays and K grows by n each step, so step j takes
(d + j e) z_j with d = t(n, n, K), e = g n and z_j the noise of that step. With prefix sums of z_j and j z_j the time
of k steps is exact in O(1): sum z (d + j e) = d Sz + e (Sjz - i Sz). Noise is a gamma variable of mean 1; step i of a
replica has the same noise however the steps before it were grouped.
"""
from __future__ import annotations

import math

import numpy as np

from engine.settings import EngineConfig

_BLOCK = 1024  # steps of noise drawn at once; a stretch ends at a block's end
NOISE_STREAM = 0x4E4F4953


class StepTimes:
    """Durations of the steps of one replica, in order."""

    __slots__ = ("a0", "b0", "a1", "b1", "decode_s", "kv_s", "overhead_s", "index", "_cv", "_rng", "_noise", "_sum",
                 "_moment", "_at")

    def __init__(self, config: EngineConfig, seed: int) -> None:
        scale, profile = config.time_scale, config.profile
        self.a0, self.b0 = profile.a0_s * scale, profile.b0_s * scale
        self.a1, self.b1 = profile.a1_s * scale, profile.b1_s * scale
        self.decode_s, self.kv_s = profile.decode_s * scale, profile.kv_s * scale
        overhead = profile.overhead_s if config.overhead_s is None else config.overhead_s
        self.overhead_s = overhead * scale
        self.index = 0  # steps done
        self._cv = config.noise_cv
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([NOISE_STREAM, seed])))
        self._noise: list[float] = []
        self._sum: list[float] = []
        self._moment: list[float] = []
        self._at = 0
        if self._cv > 0:
            self._draw()

    def _draw(self) -> None:
        shape = 1.0 / (self._cv * self._cv)
        noise = self._rng.standard_gamma(shape, _BLOCK) / shape
        self._noise = noise.tolist()
        self._sum = [0.0, *np.cumsum(noise).tolist()]
        self._moment = [0.0, *np.cumsum(noise * np.arange(_BLOCK)).tolist()]
        self._at = 0

    def base_s(self, tokens: int, decoding: int, kv_tokens: int) -> float:
        """Seconds of a step with these counts, without noise."""
        small = self.a0 + self.b0 * tokens
        large = self.a1 + self.b1 * tokens
        return ((small if small > large else large) + self.decode_s * decoding + self.kv_s * kv_tokens
                + self.overhead_s)

    def step_s(self, tokens: int, decoding: int, kv_tokens: int) -> float:
        """Seconds of the next step, with its noise."""
        base = self.base_s(tokens, decoding, kv_tokens)
        return base * self._noise[self._at] if self._cv > 0 else base

    def longest(self) -> int:
        """Steps that a stretch may have: to the end of the drawn noise."""
        return _BLOCK - self._at if self._cv > 0 else 1 << 40

    def stretch_s(self, steps: int, base: float, growth: float) -> float:
        """Seconds of the next `steps` steps, the first taking `base` and each `growth` more, noise included."""
        if self._cv > 0:
            i = self._at
            weight = self._sum[i + steps] - self._sum[i]
            return base * weight + growth * (self._moment[i + steps] - self._moment[i] - i * weight)
        return steps * base + growth * (steps * (steps - 1) // 2)

    def steps_until(self, span_s: float, limit: int, base: float, growth: float) -> int:
        """The smallest number of steps that last at least `span_s`, between 1 and `limit`."""
        if span_s <= base * 0.5 or limit <= 1:
            return 1 if limit <= 1 or self.stretch_s(1, base, growth) >= span_s else self._search(
                span_s, 1, limit, base, growth)
        if growth > 0:
            middle = base - 0.5 * growth
            guess = (math.sqrt(middle * middle + 2.0 * growth * span_s) - middle) / growth
        else:
            guess = span_s / base if base > 0 else limit
        return self._search(span_s, int(min(max(guess, 1.0), limit)), limit, base, growth)

    def _search(self, span_s: float, guess: int, limit: int, base: float, growth: float) -> int:
        """Bracket the answer around a guess, then bisect."""
        reach = self.stretch_s(guess, base, growth) >= span_s
        width = 1
        if reach:
            high, low = guess, guess - width
            while low > 0 and self.stretch_s(low, base, growth) >= span_s:
                high, width = low, width * 2
                low -= width
            low = max(low, 0)
        else:
            low, high = guess, guess + width
            while high < limit and self.stretch_s(high, base, growth) < span_s:
                low, width = high, width * 2
                high += width
            if high >= limit:
                high = limit
                if self.stretch_s(limit, base, growth) < span_s:
                    return limit
        while high - low > 1:
            middle = (low + high) // 2
            if self.stretch_s(middle, base, growth) >= span_s:
                high = middle
            else:
                low = middle
        return max(high, 1)

    def advance(self, steps: int) -> None:
        """Note that `steps` steps were done."""
        self.index += steps
        if self._cv > 0:
            self._at += steps
            if self._at >= _BLOCK:
                self._draw()
