"""Prompt tokens that prefill has to compute: those that the service's prefix cache did not hold.

Input: prompt lengths and cached parts, tokens. Output: computed parts. Does not: know how a cache works.
"""
from __future__ import annotations

import numpy as np


def computed(input_tokens: np.ndarray, cached_tokens: np.ndarray | None) -> np.ndarray:
    """(n,) prompt tokens that are computed: prompt less cached ones (nan, None: none), at least one.

    Every engine computes the last prompt token: it makes the first output token.
    """
    prompt = np.asarray(input_tokens, dtype=float)
    if cached_tokens is None:
        return prompt
    return np.maximum(prompt - np.nan_to_num(np.asarray(cached_tokens, dtype=float)), np.minimum(prompt, 1.0))
