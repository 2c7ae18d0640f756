"""The simulator against closed forms: deterministic step counts, M/D/1, M/M/1, M/G/1 (P-K), M/M/c (Erlang C).

The queues are built from the engine's own parts: one slot (max_num_seqs 1), no cost per cached token, a service time
that the output length sets. Expected values are textbook formulas written here, never the analysis package's.
"""
from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from engine.profiles import PROFILES, Profile
from engine.request import Request
from engine.scheduler import EngineConfig
from engine.virtual import OK, drive

SHAPE = EngineConfig(profile=PROFILES["reference-shape"], max_num_seqs=32, max_num_batched_tokens=4096)
# One slot; a step costs 10 ms whatever is in it, so a request of n output tokens is served in n x 10 ms
# (its prompt of one token shares the step of the first output token).
SLOT_S = 0.01
SLOT = EngineConfig(
    profile=Profile("slot", "test", SLOT_S, 0.0, 0.0, 0.0, 0.0, 1, 10**7, overhead_s=0.0, kind="synthetic"),
    max_num_seqs=1, max_model_len=10**6, noise_cv=0.0,
)


def simulate(config, times, prompts, outputs, **more):
    times = list(map(float, times))
    return drive(config, times, lambda i: Request(str(i), times[i], int(prompts[i]), int(outputs[i]), int(outputs[i]),
                                                  index=i), seed=1, **more)


@pytest.mark.parametrize("jump", [False, True])
def test_one_request_of_the_reference_shape(jump):
    out = simulate(SHAPE, [0.0], [1000], [10], jump=jump)
    # 0.6 ms + 1000 x 8 us = 8.6 ms; then 9 steps of 0.6 + 0.04 = 0.64 ms: 8.6 + 5.76 = 14.36 ms
    assert out.first_s[0] == pytest.approx(0.0086, abs=1e-12)
    assert out.done_s[0] == pytest.approx(0.01436, abs=1e-12)
    assert out.counters[0].steps == 10


@pytest.mark.parametrize("jump", [False, True])
def test_33_requests_at_once(jump):
    out = simulate(SHAPE, [0.0] * 33, [100] * 33, [101] * 33, jump=jump)
    # 32 prompts in one step: 0.6 + 3200 x 0.008 = 26.2 ms; 100 steps of 0.6 + 32 x 0.04 = 1.88 ms: 214.2 ms
    assert out.first_s[:32].tolist() == pytest.approx([0.0262] * 32, abs=1e-12)
    assert out.done_s[:32].tolist() == pytest.approx([0.2142] * 32, abs=1e-12)
    # the last one starts then: 0.6 + 0.8 = 1.4 ms; 100 steps of 0.64 ms
    assert out.first_s[32] == pytest.approx(0.2156, abs=1e-12)
    assert out.done_s[32] == pytest.approx(0.2796, abs=1e-12)


def test_a_long_prompt_is_cut_into_chunks_beside_decodes():
    """Budget 64, A decodes; B of 150 tokens: chunks 63, 63, 24 beside A's token; B's first token ends the third."""
    config = SHAPE.with_(max_num_batched_tokens=64)
    out = simulate(config, [0.0, 0.0009], [1, 150], [20, 2])
    # A alone: 0.6 + 1 x 8 us = 0.608 ms (prefill, token 1), then 0.64 ms steps; B arrives inside the second step,
    # which ends at 1.248 ms. Steps with A decoding (8 + 32 us) and n prompt tokens: 0.64 + n x 8 us.
    ends = np.cumsum([0.000608, 0.00064, 0.00064 + 63 * 8e-6, 0.00064 + 63 * 8e-6, 0.00064 + 24 * 8e-6])
    assert out.first_s[1] == pytest.approx(ends[-1], abs=1e-12)


def test_without_chunking_a_prompt_waits_for_room():
    config = SHAPE.with_(max_num_batched_tokens=200, max_model_len=200, enable_chunked_prefill=False)
    out = simulate(config, [0.0, 0.0], [150, 100], [3, 1])
    # 150 + 100 > 200: the second prompt waits one step, then runs beside a decode:
    # 0.6 + 1.2 = 1.8 ms; then 0.64 + 0.8 = 1.44 ms
    assert out.first_s.tolist() == pytest.approx([0.0018, 0.00324], abs=1e-12)


def test_vllm_preempts_the_last_and_recomputes_it():
    """3 blocks of 4: A and B (4 tokens each) take one block each; at token 5 both want a second one, A gets it."""
    config = SHAPE.with_(block_size=4, num_blocks=4, max_model_len=12)
    made = [Request("A", 0.0, 4, 5, 5, index=0), Request("B", 0.0, 4, 5, 5, index=1)]
    out = drive(config, [0.0, 0.0], made.__getitem__, seed=1)
    assert made[0].preemptions == 0 and made[1].preemptions == 1
    # Step 1: both prompts (0.6 + 8 x 8 us = 0.664), both emit. Step 2: A takes block 3, B is preempted; 4 steps of
    # A alone (0.64): A is done with 5 tokens at 0.664 + 2.56 = 3.224 ms. B then recomputes 4 + 1 tokens in one step
    # (0.6 + 5 x 8 us = 0.64), emits token 2, and needs 3 more steps.
    assert out.done_s[0] == pytest.approx(0.003224, abs=1e-12)
    assert out.done_s[1] == pytest.approx(0.003224 + 4 * 0.00064, abs=1e-12)
    assert out.first_s[1] == pytest.approx(0.000664, abs=1e-12)


def test_swap_brings_the_victim_back_without_recomputing():
    profile = PROFILES["reference-shape"]
    config = SHAPE.with_(block_size=4, num_blocks=4, max_model_len=12, preemption_mode="swap", swap_space_gb=1.0)
    made = [Request("A", 0.0, 4, 5, 5, index=0), Request("B", 0.0, 4, 5, 5, index=1)]
    out = drive(config, [0.0, 0.0], made.__getitem__, seed=1)
    copy_s = profile.transfer_fixed_s + 4 * profile.kv_bytes_per_token / (profile.pcie_gb_s * 1e9)
    # As above, but A's first step pays the copy out and B's first step back the copy in, and B decodes at once.
    assert out.done_s[0] == pytest.approx(0.003224 + copy_s, abs=1e-12)
    assert out.done_s[1] == pytest.approx(0.003224 + 2 * copy_s + 4 * 0.00064, abs=1e-12)
    full = config.with_(swap_space_gb=0.0)  # no room in host memory: falls back to recomputing
    out = drive(full, [0.0, 0.0], [Request("A", 0.0, 4, 5, 5, index=0), Request("B", 0.0, 4, 5, 5, index=1)].__getitem__,
                seed=1)
    assert out.done_s[1] == pytest.approx(0.003224 + 4 * 0.00064, abs=1e-12)


@pytest.mark.parametrize("blocks", [2500, 1200])
def test_a_starved_pool_steps_and_jumps_alike(blocks):
    """The prototype's case: 64 sequences, few blocks, hundreds of preemptions."""
    rng = np.random.default_rng(5)
    n = 300
    times = np.cumsum(rng.exponential(1 / 8, n))
    prompts, outputs = rng.integers(100, 2001, n), np.maximum(1, rng.lognormal(6, 0.6, n)).astype(int)
    config = EngineConfig(max_num_seqs=64, num_blocks=blocks, noise_cv=0.03)
    step, jump = (simulate(config, times, prompts, outputs, jump=j) for j in (False, True))
    assert sum(step.preemptions) > 20 and step.preemptions == jump.preemptions
    np.testing.assert_allclose(step.done_s, jump.done_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(step.first_s, jump.first_s, rtol=0, atol=1e-9)


# --- queues ---------------------------------------------------------------------------------------------------


def waits(rate, outputs, seed, config=SLOT, **more):
    """Mean wait before service, per batch of arrivals: (n_batches,) seconds; ten batches, the first tenth is cut."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, len(outputs)))
    out = simulate(config, times, np.ones(len(outputs), dtype=int), outputs, **more)
    assert set(out.kind) == {OK}
    wait = np.array(out.done_s) - times - np.array(outputs) * SLOT_S
    return np.array([part.mean() for part in np.array_split(wait[len(wait) // 10 :], 10)])


def assert_within(batches, expected, level=0.999):
    """The closed form lies in the batch-means interval. 99.9 %: a correct program fails once in a thousand seeds,
    and the seeds here are fixed."""
    mean, half = batches.mean(), stats.t.ppf(0.5 + level / 2, 9) * batches.std(ddof=1) / math.sqrt(10)
    assert half < 0.35 * expected, f"interval of {half:.4f} is too wide to say anything about {expected:.4f}"
    assert abs(mean - expected) < half, f"{mean:.4f} +- {half:.4f} s, closed form {expected:.4f} s"


def pollaczek(rate, m1, m2):
    """Mean wait of M/G/1: lambda E[S^2] / (2 (1 - rho))."""
    return rate * m2 / (2 * (1 - rate * m1))


SIZES = [pytest.param(20_000, id="quick"), pytest.param(200_000, id="long", marks=pytest.mark.evidence)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_constant_lengths_make_an_md1_queue(n, rho):
    s = 20 * SLOT_S
    assert_within(waits(rho / s, [20] * n, seed=11), pollaczek(rho / s, s, s * s))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rho", [0.5, 0.7])
def test_geometric_lengths_make_an_mm1_queue(n, rho):
    """Geometric lengths of mean 50 in steps: SCV = 1 - 1/50; the exact second moment goes into P-K, and the result
    is within 1 % of M/M/1 (rho/(1-rho) x s)."""
    mean = 50
    outputs = np.random.default_rng(12).geometric(1 / mean, n)
    s, m2 = mean * SLOT_S, (2 * mean * mean - mean) * SLOT_S**2
    expected = pollaczek(rho / s, s, m2)
    assert expected == pytest.approx(rho / (1 - rho) * s, rel=0.011)
    assert_within(waits(rho / s, outputs, seed=13), expected)


@pytest.mark.parametrize("n", SIZES)
def test_lognormal_lengths_follow_pollaczek_khinchine(n):
    """sigma 0.6 as in the reference config; the sample's own moments, so that rounding to tokens is included."""
    outputs = np.maximum(1, np.random.default_rng(14).lognormal(3.5, 0.6, n)).astype(int)
    m1, m2 = outputs.mean() * SLOT_S, (outputs.astype(float) ** 2).mean() * SLOT_S**2
    rate = 0.7 / m1
    assert_within(waits(rate, outputs, seed=15), pollaczek(rate, m1, m2))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("servers", "rho"), [(2, 0.8), (8, 0.8)])
def test_slots_of_constant_speed_make_an_mmc_queue(n, servers, rho):
    """c sequences run side by side and a step costs the same whatever its batch: c servers, one queue."""
    mean = 50
    outputs = np.random.default_rng(16).geometric(1 / mean, n)
    s = mean * SLOT_S
    a = rho * servers
    blocking = 1.0
    for k in range(1, servers + 1):  # Erlang B recursion
        blocking = a * blocking / (k + a * blocking)
    delayed = blocking / (1 - rho * (1 - blocking))
    expected = delayed * s / (servers - a)
    # An arrival waits for the next step's start before it can be seen while others run: half a step more at most.
    batches = waits(rho * servers / s, outputs, seed=17, config=SLOT.with_(max_num_seqs=servers))
    busy_start = SLOT_S / 2  # mean wait for a boundary of an arrival that finds the engine busy
    mean_wait, half = batches.mean(), stats.t.ppf(0.9995, 9) * batches.std(ddof=1) / math.sqrt(10)
    assert expected - half < mean_wait < expected + busy_start + half


def test_little_links_wait_and_number():
    """L = lambda W for the driver's own gauge: the time integral of the in-flight counter over a drained run."""
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.2, 500))
    out = simulate(EngineConfig(noise_cv=0.03), times, rng.integers(10, 500, 500), rng.integers(5, 200, 500))
    changes = sorted([(t, 1) for t in out.up_s] + [(t, -1) for t in out.down_s])
    area = sum(level * (b[0] - a[0]) for level, a, b in zip(
        np.cumsum([c for _, c in changes]), changes, changes[1:], strict=False))
    assert area == pytest.approx((np.array(out.done_s) - times).sum(), rel=1e-9)
    assert out.in_flight(np.array([-1.0, times[0], 1e9])).tolist() == [0, 1, 0]
