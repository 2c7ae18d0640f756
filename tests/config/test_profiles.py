"""The coefficients of the config checks are those of the engine's profiles."""

from __future__ import annotations

import pytest

from bench.config.profiles import STEP_COEFFICIENTS
from engine.profiles import PROFILES


def test_the_same_profiles_and_coefficients():
    assert set(STEP_COEFFICIENTS) == set(PROFILES)
    for name, mine in STEP_COEFFICIENTS.items():
        theirs = PROFILES[name]
        assert mine.a0_s == pytest.approx(theirs.a0_s)
        assert mine.b0_s == pytest.approx(theirs.b0_s + theirs.decode_s)  # per decoding sequence
        assert mine.g_s == pytest.approx(theirs.kv_s)
        assert mine.overhead_s == pytest.approx(theirs.overhead_s)
