"""Step-time coefficients that config checks need; the engine's own profiles are the source.

`tests/config/test_profiles.py` compares them with the engine's, so the two cannot part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """T = a0 + b0 n + g K + o of a decode step: n sequences, K cached tokens read."""

    a0_s: float  # s per step
    b0_s: float  # s per decoding sequence: per token of the step and per sequence together
    g_s: float  # s per cached token read
    overhead_s: float  # s per step


def _row(a0_ms: float, b0_us: float, g_ns: float, overhead_ms: float = 1.5) -> StepCoefficients:
    return StepCoefficients(a0_ms * 1e-3, b0_us * 1e-6, g_ns * 1e-9, overhead_ms * 1e-3)


STEP_COEFFICIENTS: dict[str, StepCoefficients] = {
    "a100-80-llama2-7b": _row(8.8, 29, 328),
    "a100-80-llama3-8b": _row(9.8, 29, 82),
    "h100-8b": _row(5.6, 10.9, 49),
    "a40-llama2-7b": _row(24.9, 54, 942),
    "l4-8b": _row(63, 20, 546),
    "a100-70b-tp4": _row(30.4, 101, 51),
    "h100-70b-tp4": _row(21.6, 0, 31),
    "h100-70b-tp8": _row(13.4, 25, 15),
    "reference-shape": _row(0.6, 40, 0, overhead_ms=0),
}
