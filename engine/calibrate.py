"""A profile from the step law that was fitted to a measured run.

Input: the `model.fit` part of analysis.json (coefficients, standard errors, R^2), and a profile for what a client
cannot see (memory, link). Output: `Profile`.
Does not: fit; `analysis/step_clock.py` does, from first and last tokens of the requests alone.

The law is alpha + beta n + gamma P (+ kv K) per step with n decoding sequences and P prompt tokens. The profile's two
lines hold it: gamma below beta: b0 = gamma and c = beta - gamma; else small steps cost b0 = beta and large ones
b1 = gamma, with the cost per prefill step (never positive) in a1. Host overhead is inside alpha: a client cannot part
them.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.profiles import Profile

FROM_FIT = ("a0_s", "b0_s", "a1_s", "b1_s", "decode_s", "kv_s", "overhead_s")


def profile_from_fit(fit: Mapping[str, Any], base: Profile, name: str, source: str) -> Profile:
    """The calibrated profile. Raises ValueError when the fit holds what a profile cannot say (a term in n^2)."""
    if fit.get("kappa_s"):
        raise ValueError(
            f"the fit has a term of {fit['kappa_s']:.3g} s in the square of the batch size, which a profile cannot "
            "hold; calibrate from stages at lower load"
        )
    alpha, beta, gamma = float(fit["alpha_s"]), float(fit["beta_s"]), float(fit["gamma_s"])
    delta = min(0.0, float(fit.get("prefill_s") or 0.0))
    if gamma < beta:
        lines = {"a0_s": alpha, "b0_s": gamma, "a1_s": 0.0, "b1_s": 0.0, "decode_s": beta - gamma}
    else:
        lines = {"a0_s": alpha, "b0_s": beta, "a1_s": max(0.0, alpha + delta), "b1_s": gamma, "decode_s": 0.0}
    errors = fit.get("se") or {}
    told = ", ".join(f"{term} +- {errors[term]:.2g} s" for term in sorted(errors))
    origin = {field: "fitted" for field in FROM_FIT}
    origin.update({field: f"guess: from {base.name}" for field in ("kv_tokens", "pcie_gb_s", "transfer_fixed_s",
                                                                   "attention_s", "kv_bytes_per_token")})
    return Profile(
        name=name, title=f"calibrated from {source}", **lines, kv_s=float(fit.get("kv_s") or 0.0), overhead_s=0.0,
        kv_bytes_per_token=base.kv_bytes_per_token, kv_tokens=base.kv_tokens, attention_s=base.attention_s,
        pcie_gb_s=base.pcie_gb_s, transfer_fixed_s=base.transfer_fixed_s, kind="fitted",
        source=f"{source}: {fit.get('order', 'affine')} fit of {fit.get('rows', 0)} answers, "
               f"R2 {fit.get('r2') or 0.0:.4f}, RMSE {(fit.get('rmse_step_s') or 0.0) * 1e3:.4f} ms per step"
               + (f"; {told}" if told else ""),
        engine_version="as measured", origin=origin,
    )
