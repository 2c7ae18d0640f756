"""What the client adds to TTFT and E2E, and the highest rate that it can send, from runs against the null server.

Input: stage analyses of such runs, their rows, and the null server's own record of every request.
Output: `ClientStage`s, the ceiling, the next rates to measure. Does not: start, send or read anything.

1. Added time of a request = (first token - sent, on the client's clock) - (first token - received, on the server's):
   differences of one clock each, so the two need no common zero. The same to the last token.
2. A rate holds when its stage passes the proof of the stimulus (docs/verdicts.md): rate, gaps, send lag, loop lag,
   CPU, no cap. What fails on the server's side is no ceiling of the client: the server is late when the p99 of its own
   first tokens is more than SERVER_LATE_S behind its setting.
3. The ceiling is the highest rate that holds below the first that does not. One rate that was measured again holds
   when any measurement of it held: a machine that was busy once says nothing about the client.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from analysis.percentiles import nearest_rank
from analysis.stimulus import CPU_LIMIT, IDLE_CPU, LOOP_LAG_LIMIT_S, RATE_LIMIT
from bench.records.analysis import StageAnalysis
from bench.records.clauses import lag_limit_s
from bench.records.sentences import joined, said

CLIENT_REASONS = ("INV-RATE", "INV-GAPS", "INV-LAG", "INV-LOOP", "INV-CPU", "INV-CAP")
SERVER = "server"
SERVER_LATE_S = 0.020  # as much as our own loop may lag
MISSED_SHARE = 0.01  # answers that the null server did not give: it is at its end


@dataclass(frozen=True)
class ClientStage:
    """One rate against the null server; seconds."""

    offered_qps: float
    delivered_qps: float
    rate_error_ratio: float
    requests: int
    answered: int
    send_lag_p50_s: float | None
    send_lag_p99_s: float | None
    loop_lag_p99_s: float | None
    cpu_max_ratio: float | None
    ttft_added_p50_s: float | None
    ttft_added_p99_s: float | None
    e2e_added_p50_s: float | None
    e2e_added_p99_s: float | None
    server_late_p99_s: float | None
    bound_by: tuple[str, ...]  # empty: the rate holds

    @property
    def ok(self) -> bool:
        """Whether the client sent this rate as it should."""
        return not self.bound_by

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "bound_by": list(self.bound_by), "ok": self.ok}


@dataclass(frozen=True)
class Ceiling:
    """The highest rate of the client."""

    kind: str  # "between" | "at_least" | "below" | "none"
    qps: float | None
    first_miss_qps: float | None
    bound_by: tuple[str, ...]
    cpu_max_ratio: float | None = None  # of the workers at the first miss


def added(
    request_id: Sequence[str], sent_s: np.ndarray, first_token_s: np.ndarray, last_token_s: np.ndarray,
    server: Mapping[str, Sequence[float]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(TTFT added, E2E added, server's TTFT), (m,) seconds each, of the requests that both sides know whole.

    `server`: request id -> [received_s, first_s, last_s, tokens] on the server's clock; 0 = did not come to it.
    """  # fmt: skip
    ttft, e2e, own = [], [], []
    for name, sent, first, last in zip(request_id, sent_s, first_token_s, last_token_s, strict=True):
        record = server.get(name)
        if record is None or record[1] <= 0 or record[2] <= 0 or not math.isfinite(sent + first + last):
            continue
        ttft.append((first - sent) - (record[1] - record[0]))
        e2e.append((last - sent) - (record[2] - record[0]))
        own.append(record[1] - record[0])
    return np.array(ttft), np.array(e2e), np.array(own)


def client_stage(
    stage: StageAnalysis, ttft_added_s: np.ndarray, e2e_added_s: np.ndarray, server_ttft_s: np.ndarray,
    server_setting_s: float,
) -> ClientStage:  # fmt: skip
    """What one stage says about the client. Arrays: (m,) from `added`."""
    s = stage.stimulus
    answered = stage.counts.get("ok", 0)
    late = _at(server_ttft_s - server_setting_s, 0.99)
    bound = [r.reason_id for r in stage.reasons if r.severity == "invalid" and r.reason_id in CLIENT_REASONS]
    unanswered = stage.planned - answered - stage.counts.get("unsent", 0)
    if (late is not None and late > SERVER_LATE_S) or unanswered > MISSED_SHARE * max(stage.planned, 1):
        bound = [SERVER]  # a late server fills the machine and the client's sockets: its lag is not the client's
    return ClientStage(
        offered_qps=stage.offered_qps, delivered_qps=s.delivered_qps, rate_error_ratio=s.rate_error_ratio,
        requests=stage.planned, answered=answered, send_lag_p50_s=s.send_lag_p50_s, send_lag_p99_s=s.send_lag_p99_s,
        loop_lag_p99_s=s.loop_lag_p99_s, cpu_max_ratio=s.client_cpu_max_ratio,
        ttft_added_p50_s=_at(ttft_added_s, 0.5), ttft_added_p99_s=_at(ttft_added_s, 0.99),
        e2e_added_p50_s=_at(e2e_added_s, 0.5), e2e_added_p99_s=_at(e2e_added_s, 0.99), server_late_p99_s=late,
        bound_by=tuple(dict.fromkeys(bound)),
    )  # fmt: skip


def _at(values: np.ndarray, share: float) -> float | None:
    return nearest_rank(np.sort(values), share) if len(values) else None


def by_rate(stages: Sequence[ClientStage]) -> dict[float, ClientStage]:
    """The best measurement of each rate, rates ascending: one that held, else the last."""
    best: dict[float, ClientStage] = {}
    for stage in stages:
        known = best.get(stage.offered_qps)
        if known is None or not known.ok:
            best[stage.offered_qps] = stage
    return dict(sorted(best.items()))


def ceiling(stages: Sequence[ClientStage]) -> Ceiling:
    """The highest rate that holds below the first that does not."""
    rates = by_rate(stages)
    if not rates:
        return Ceiling("none", None, None, ())
    missed = next((s for s in rates.values() if not s.ok), None)
    held = [q for q, s in rates.items() if s.ok and (missed is None or q < missed.offered_qps)]
    top = max(held, default=None)
    if missed is None:
        return Ceiling("at_least", top, None, ())
    if top is None:
        return Ceiling("below", None, missed.offered_qps, missed.bound_by, missed.cpu_max_ratio)
    # The server gave up first: the client goes higher, nobody knows how far.
    kind = "at_least" if missed.bound_by == (SERVER,) else "between"
    return Ceiling(kind, top, missed.offered_qps, missed.bound_by, missed.cpu_max_ratio)


def refining_rates(found: Ceiling, count: int) -> list[float]:
    """Rates to measure next, ascending: `count` even steps on a logarithm, the first miss itself last."""
    if found.first_miss_qps is None or count < 1:
        return []
    top = found.first_miss_qps
    low = found.qps if found.qps is not None else top / 2 ** (count + 1)
    if top / low < 1.1:
        return []
    steps = [low * (top / low) ** (k / (count + 1)) for k in range(1, count + 1)]
    return sorted({float(f"{q:.3g}") for q in (*steps, top)} - {low})


def limits(ttft_deadline_s: float) -> dict[str, float]:
    """The limits that a rate must keep, for the file."""
    return {"rate_error_ratio": RATE_LIMIT, "send_lag_p99_s": lag_limit_s(ttft_deadline_s),
            "loop_lag_p99_s": LOOP_LAG_LIMIT_S, "cpu_max_ratio": CPU_LIMIT, "server_late_p99_s": SERVER_LATE_S}


def added_by_client(stages: Sequence[ClientStage]) -> dict[str, float | None]:
    """What the client adds at the lowest rate that held: the floor under every figure of a run, seconds."""
    rates = [s for s in by_rate(stages).values() if s.ok]
    if not rates:
        return {}
    low = rates[0]
    return {"offered_qps": low.offered_qps, "ttft_p50_s": low.ttft_added_p50_s, "ttft_p99_s": low.ttft_added_p99_s,
            "e2e_p50_s": low.e2e_added_p50_s, "e2e_p99_s": low.e2e_added_p99_s, "send_lag_p99_s": low.send_lag_p99_s}


def told(found: Ceiling, adds: Mapping[str, float | None], workers: int) -> dict[str, Any]:
    """The one sentence, as code and parameters."""
    extra = said("")
    if adds.get("ttft_p50_s") is not None:
        extra = said("ceiling.adds", **{f"{name}_ms": (adds[f"{name}_s"] or 0.0) * 1e3
                                        for name in ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99")})  # fmt: skip
    idle = found.cpu_max_ratio is not None and found.cpu_max_ratio < IDLE_CPU and SERVER not in found.bound_by
    busy = said("ceiling.busy", cpu_ratio=found.cpu_max_ratio) if idle else said("")
    params = {
        "busy": busy, "workers": workers, "ceiling_qps": found.qps, "first_miss_qps": found.first_miss_qps,
        "adds": extra, "bound_by": joined("comma", list(found.bound_by)),
    }  # fmt: skip
    code = f"ceiling.{found.kind}"
    if found.kind == "at_least" and found.bound_by:
        code = "ceiling.server"
    return said(code, **params)
