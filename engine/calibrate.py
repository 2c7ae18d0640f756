"""A profile from the step law that was fitted to a measured run.

Input: the coefficients and what is known about their error, and a profile for what a client cannot see (memory, link).
Output: `Profile`. Does not: fit; `analysis/step_clock.py` does, from first and last tokens of the requests alone.

The law is alpha + beta n + max(0, delta + gamma p) (+ kv K) per step with n decoding sequences, p prompt tokens and K
cached tokens. A profile is max(a0 + b0 T, a1 + b1 T) + c n + kv K with T = n + p, so

1. gamma <= beta, no delta: one line, b0 = gamma and c = beta - gamma. Exact.
2. otherwise two lines: the first, a0 = alpha, is what decoding pays; the second, b1 = gamma, what prompts pay. The
   second starts at a1 = alpha + delta; without a delta it is put so that the lines meet at the largest batch that the
   run has seen: decoding then costs what was measured, and a prompt that batch times gamma - beta too little. The
   first line's b0 is beta, or 0 when gamma <= beta (then c = beta): a prompt is free up to -delta/gamma tokens.
3. Host overhead is inside alpha: a client cannot part them.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.profiles import Profile

FROM_FIT = ("a0_s", "b0_s", "a1_s", "b1_s", "decode_s", "kv_s", "overhead_s")
UNSEEN = ("kv_tokens", "pcie_gb_s", "transfer_fixed_s", "attention_s", "kv_bytes_per_token")


def lines_of(alpha: float, beta: float, gamma: float, delta: float, batch_size_max: float) -> dict[str, float]:
    """The two lines and the cost per decoding sequence; seconds, see the rules above."""
    delta = min(0.0, delta)
    if gamma <= beta and delta == 0:
        return {"a0_s": alpha, "b0_s": gamma, "a1_s": 0.0, "b1_s": 0.0, "decode_s": beta - gamma}
    slope = beta if gamma > beta else 0.0
    second = alpha + (delta if delta else -(gamma - slope) * batch_size_max)
    return {"a0_s": alpha, "b0_s": slope, "a1_s": max(0.0, second), "b1_s": gamma, "decode_s": beta - slope}


def profile_from_fit(
    fit: Mapping[str, Any], base: Profile, name: str, source: str, *, measured: bool = False,
    calibration: Mapping[str, Any] | None = None,
) -> Profile:
    """The calibrated profile. Raises ValueError when the fit holds what a profile cannot say (a term in n^2).

    `fit`: alpha_s, beta_s, gamma_s, kv_s, prefill_s, se, r2, rmse_step_s, rows, order, batch_size_max.
    """
    if fit.get("kappa_s"):
        raise ValueError(
            f"the fit has a term of {fit['kappa_s']:.3g} s in the square of the batch size, which a profile cannot "
            "hold; calibrate from stages at lower load"
        )
    alpha, beta, gamma = float(fit["alpha_s"]), float(fit["beta_s"]), float(fit["gamma_s"])
    largest = float(fit.get("batch_size_max") or 1.0)
    lines = lines_of(alpha, beta, gamma, float(fit.get("prefill_s") or 0.0), largest)
    errors = fit.get("se") or {}
    told = ", ".join(f"{term} +- {errors[term]:.2g} s" for term in sorted(errors))
    kind = "measured" if measured else "fitted"
    origin = {field: kind for field in FROM_FIT}
    origin.update({field: f"guess: from {base.name}" for field in UNSEEN})
    return Profile(
        name=name, title=f"calibrated from {source}", **lines, kv_s=float(fit.get("kv_s") or 0.0), overhead_s=0.0,
        kv_bytes_per_token=base.kv_bytes_per_token, kv_tokens=base.kv_tokens, attention_s=base.attention_s,
        pcie_gb_s=base.pcie_gb_s, transfer_fixed_s=base.transfer_fixed_s, kind=kind,
        source=f"{source}: {fit.get('order', 'affine')} fit of {fit.get('rows', 0)} answers, "
               f"R2 {fit.get('r2') or 0.0:.4f}, RMSE {(fit.get('rmse_step_s') or 0.0) * 1e3:.4f} ms per step"
               + (f"; {told}" if told else ""),
        engine_version="as measured", origin=origin, calibration=dict(calibration or {}),
    )
