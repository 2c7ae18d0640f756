"""The jump-ahead replay against hand-counted cases and the step-by-step simulator."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.batching import StepLaw
from analysis.replay import replay, replay_on_engine

sys.path.insert(0, str(Path(__file__).parent))
from reference_des import Load, Truth, poisson_load, simulate

LAW = StepLaw(0.6e-3, 0.04e-3, 8e-6)


def _both(load: Load, law: StepLaw, seqs: int, budget: int) -> tuple[np.ndarray, ...]:
    truth = Truth(law.alpha_s, law.beta_s, law.gamma_s, law.kappa_s, law.kv_s, delta=law.prefill_s)
    first, last = simulate(load, truth, seqs, budget)
    got = replay(load.arrival, load.prompt, load.output, law, seqs, budget)
    return first, last, got.first_token_s, got.last_token_s


def test_one_request_by_hand():
    # prefill step .6 + 1000 * 8 us = 8.6 ms; then 9 decode steps of .64 ms = 5.76 ms
    for first, last in (
        simulate(Load(np.zeros(1), np.array([1000]), np.array([10])), Truth()),
        (lambda r: (r.first_token_s, r.last_token_s))(
            replay(np.zeros(1), np.array([1000]), np.array([10]), LAW, 32, 4096)
        ),
    ):
        assert first[0] == pytest.approx(8.6e-3, abs=1e-12)
        assert last[0] == pytest.approx(14.36e-3, abs=1e-12)


def test_thirty_three_requests_by_hand():
    # 32 * 100 tokens in one step: .6 + 25.6 = 26.2 ms; 100 steps of .6 + 32 * .04 = 1.88 ms -> 214.2 ms;
    # request 33: .6 + .8 ms -> 215.6 ms, then 100 steps of .64 ms -> 279.6 ms
    load = Load(np.zeros(33), np.full(33, 100), np.full(33, 101))
    for first, last in (_both(load, LAW, 32, 4096)[:2], _both(load, LAW, 32, 4096)[2:]):
        assert first[:32] == pytest.approx(26.2e-3, abs=1e-12)
        assert last[:32] == pytest.approx(214.2e-3, abs=1e-9)
        assert first[32] == pytest.approx(215.6e-3, abs=1e-9)
        assert last[32] == pytest.approx(279.6e-3, abs=1e-9)


def test_long_prompt_is_chunked_by_hand():
    # budget 100, prompt 250, alone: three steps of .6 ms + 2 ms in all = 3.8 ms
    got = replay(np.zeros(1), np.array([250]), np.array([1]), LAW, 4, 100)
    assert got.first_token_s[0] == pytest.approx(3 * 0.6e-3 + 250 * 8e-6, abs=1e-12)
    assert got.last_token_s[0] == got.first_token_s[0]  # one token: it ends with its prefill


def test_a_prompt_hides_behind_the_base_cost_by_hand():
    # delta -2 ms, gamma 8 us: 200 tokens (1.6 ms) cost nothing more, 1,000 tokens cost 6 ms more than .6 ms
    law = StepLaw(0.6e-3, 0.04e-3, 8e-6, prefill_s=-2e-3)
    for prompt, expected in ((200, 0.6e-3), (1000, 6.6e-3)):
        got = replay(np.zeros(1), np.array([prompt]), np.array([1]), law, 4)
        assert got.first_token_s[0] == pytest.approx(expected, abs=1e-12)


def test_arrival_inside_a_step_waits_for_its_end_by_hand():
    # first request decodes in steps of .64 ms after 8.6 ms; an arrival at 9.0 ms is seen at 9.24 ms
    arrival = np.array([0.0, 9.0e-3])
    got = replay(arrival, np.array([1000, 100]), np.array([100, 2]), LAW, 4, 4096)
    # mixed step: .6 + .04 + .8 ms -> 10.68 ms; then two decode: .68 ms -> 11.36 ms
    assert got.first_token_s[1] == pytest.approx(10.68e-3, abs=1e-12)
    assert got.last_token_s[1] == pytest.approx(11.36e-3, abs=1e-12)


requests = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=25
)


@settings(max_examples=300, deadline=None)
@given(
    requests, st.integers(1, 8), st.integers(10, 600), st.floats(1e-5, 1e-2), st.floats(0, 1e-3), st.floats(0, 1e-4),
    st.floats(0, 1e-4), st.floats(0, 1e-6), st.floats(-1e-2, 1e-2),
)  # fmt: skip
def test_jumping_equals_walking(rows, seqs, budget, alpha, beta, gamma, kappa, kv, delta):
    rows = sorted(rows)
    load = Load(*(np.array(column) for column in zip(*rows, strict=True)))
    first, last, got_first, got_last = _both(load, StepLaw(alpha, beta, gamma, kappa, kv, delta), seqs, budget)
    # arrivals that fall on a step boundary to within rounding may be seen one step apart; hypothesis
    # does not hit that by chance, so equality is asked for
    np.testing.assert_allclose(got_first, first, rtol=0, atol=1e-9)
    np.testing.assert_allclose(got_last, last, rtol=0, atol=1e-9)
    assert (got_first > load.arrival).all() and (got_last >= got_first).all()


@pytest.mark.parametrize("qps", [5.0, 25.0, 40.0])
def test_jumping_equals_walking_on_the_seed_load(qps):
    load = poisson_load(qps, 60.0, int(qps))
    first, last, got_first, got_last = _both(load, StepLaw(0.6e-3, 0.04e-3, 8e-6, 1e-7, 2e-8), 32, 4096)
    np.testing.assert_allclose(got_first, first, rtol=0, atol=1e-8)
    np.testing.assert_allclose(got_last, last, rtol=0, atol=1e-8)


def test_overload_grows_at_lambda_minus_capacity():
    # a share 1 - X/lambda stays behind: at 40/s against 27.2/s a third of the arrivals is still there
    load = poisson_load(40.0, 120.0, 9)
    got = replay(load.arrival, load.prompt, load.output, LAW, 32, 4096)
    done = int((got.last_token_s <= 120.0).sum())
    assert done / 120.0 == pytest.approx(27.2, rel=0.03)  # 3 %: the mean length of 4,800 requests


def test_empty_and_unsorted_input():
    assert replay(np.array([]), np.array([]), np.array([]), LAW, 4).first_token_s.size == 0
    with pytest.raises(ValueError, match="not sorted"):
        replay(np.array([1.0, 0.0]), np.ones(2), np.ones(2), LAW, 4)


def test_a_batch_larger_than_the_budget_still_prefills():
    got = replay(np.zeros(20), np.full(20, 10), np.full(20, 5), LAW, 20, 5)
    assert np.isfinite(got.last_token_s).all()


@pytest.mark.parametrize("kv", [0.0, 2e-8])
@pytest.mark.parametrize("qps", [5.0, 25.0, 40.0])
def test_replay_equals_the_engine_that_serves_http(qps, kv):
    load = poisson_load(qps, 40.0, int(qps) + 1)
    law = StepLaw(0.6e-3, 0.04e-3, 8e-6, 0.0, kv)
    ours = replay(load.arrival, load.prompt, load.output, law, 32, 4096)
    engine = replay_on_engine(load.arrival, load.prompt, load.output, law, 32, 4096)
    np.testing.assert_allclose(ours.first_token_s, engine.first_token_s, rtol=0, atol=1e-8)
    np.testing.assert_allclose(ours.last_token_s, engine.last_token_s, rtol=0, atol=1e-8)


def test_engine_replay_refuses_what_its_profiles_cannot_say():
    with pytest.raises(ValueError, match="no n\\^2 term"):
        replay_on_engine(np.zeros(1), np.ones(1), np.ones(1), StepLaw(1e-3, 0, 0, 1e-6), 4)
    with pytest.raises(ValueError, match="no cost per prefill step"):
        replay_on_engine(np.zeros(1), np.ones(1), np.ones(1), StepLaw(1e-3, 0, 0, 0, 0, 1e-3), 4)
