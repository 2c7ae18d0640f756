"""Two policies over one load: what each request met under the old and under the new one, block by block.

Input: engine settings of both policies, a schedule with tenants, the tenants that use the new one.
Output: blocks of `control.rollout.Sample`s of both arms, in the order of arrival; what the decisions had in common.
Does not: judge (control/rollout.py), or write anything.

`paired`: both policies see every arrival (replay; shadow: the old one acts, the new one only in virtual time).
`split`: each arrival is served by the policy of its tenant; replicas are divided as the load is (gray).
Full is `paired` again: the new policy acts, the old one is the shadow that it is compared with.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.workload.plan import Plan
from bench.workload.prompt_file import PromptFile
from bench.workload.schedule import Schedule
from control.rollout import Sample, gray_replicas
from engine import virtual
from engine.blocks import prompt_blocks
from engine.lengths import arrival_key
from engine.request import Request, sample_tokens
from engine.settings import EngineConfig
from engine.virtual import Outcomes, Patience, drive

Block = tuple[list[Sample], list[Sample]]  # (new, old)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals of a live service; `tenant[i]` is an index into `names`, `arrival[i]` one into `schedule`."""

    arrival_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    max_tokens: np.ndarray
    tenant: np.ndarray
    names: tuple[str, ...]
    arrival: np.ndarray
    schedule: Schedule  # whole: says which prompts begin alike
    unique: bool  # prompts of one length differ
    lines: PromptFile | None = None  # the user's own prompts

    def take(self, keep: np.ndarray) -> Traffic:
        """The arrivals of a mask."""
        return Traffic(self.arrival_s[keep], self.input_tokens[keep], self.output_tokens[keep], self.max_tokens[keep],
                       self.tenant[keep], self.names, self.arrival[keep], self.schedule, self.unique, self.lines)

    def __len__(self) -> int:
        return len(self.arrival_s)


def traffic_of(plan: Plan, schedule: Schedule, config: Any, names: Sequence[str], seed: int, limit: int) -> Traffic:
    """The first `limit` arrivals of a schedule; tenants are drawn evenly when the plan has none."""
    n = min(limit, len(schedule))
    limits = schedule.max_tokens[:n]
    if config.target.ignore_eos:
        outputs = limits
    else:
        load = config.loadgen
        key = arrival_key(plan, schedule, config.engine.seed)
        outputs = np.array([sample_tokens(key(i), load.output_len_mu, load.output_len_sigma, m)
                            for i, m in enumerate(limits.tolist())])
    tenant = schedule.tenant[:n]
    if n and int(tenant.max()) >= len(names):  # rows of a trace that name nobody, beside declared tenants
        names = (*names, "")
    if len(names) > 1 and not config.tenants:
        tenant = np.random.default_rng([0x54454E, seed]).integers(0, len(names), n)
    return Traffic(schedule.intended_s[:n], schedule.input_tokens[:n], outputs, limits, tenant, tuple(names),
                   np.arange(n), schedule, plan.prompts.unique, plan.lines)


def serve(engine: EngineConfig, traffic: Traffic, seed: int, patience: Patience | None = None) -> list[Sample]:
    """What each arrival met under one policy."""
    times, inputs = traffic.arrival_s.tolist(), traffic.input_tokens.tolist()
    outputs, limits, tenants = traffic.output_tokens.tolist(), traffic.max_tokens.tolist(), traffic.tenant.tolist()
    names, arrival = traffic.names, traffic.arrival.tolist()
    blocks = prompt_blocks(traffic.schedule, engine.block_size, unique=traffic.unique, lines=traffic.lines)

    def make(i: int) -> Request:
        return Request(str(i), times[i], inputs[i], limits[i], outputs[i], tenant=names[tenants[i]], index=i,
                       prefix_hashes=blocks(arrival[i]) if engine.prefix_caching else ())

    return _samples(drive(engine, times, make, seed=seed, patience=patience), traffic, engine)


def _samples(out: Outcomes, traffic: Traffic, engine: EngineConfig) -> list[Sample]:
    spec = engine.default_class
    found = []
    for i, at_s in enumerate(traffic.arrival_s.tolist()):
        first, last, tokens = out.first_s[i], out.last_s[i], out.output_tokens[i]
        ttft = first - at_s if first == first else None
        tpot = (last - first) / (tokens - 1) if ttft is not None and tokens > 1 else 0.0
        met = (out.kind[i] == virtual.OK and ttft is not None and ttft <= spec.ttft_deadline_s
               and tpot <= spec.tpot_deadline_s)
        found.append(Sample(met, ttft, out.kind[i] == virtual.REFUSED, out.preemptions[i]))
    return found


def paired(old: EngineConfig, new: EngineConfig, traffic: Traffic, block: int, seed: int) -> Iterator[Block]:
    """Blocks of the same arrivals under both policies."""
    one, two = serve(old, traffic, seed), serve(new, traffic, seed)
    for at in range(0, len(traffic) - block + 1, block):
        yield two[at:at + block], one[at:at + block]


def split(old: EngineConfig, new: EngineConfig, traffic: Traffic, tenants: Sequence[str], block: int,
          seed: int) -> Iterator[Block]:
    """Blocks of both arms of a gray stage; a block ends when each arm has `block` arrivals more.

    The arms' arrivals of one block fall into the same time, so a rush that hits both is no difference.
    """
    chosen = np.isin(np.array([traffic.names[t] for t in traffic.tenant.tolist()]), list(tenants))
    share = float(chosen.mean()) if len(traffic) else 0.0
    mine = gray_replicas(share, old.replicas)
    a = serve(new.with_(replicas=mine), traffic.take(chosen), seed)
    b = serve(old.with_(replicas=old.replicas - mine), traffic.take(~chosen), seed + 1)
    i = j = i0 = j0 = 0
    for is_new in chosen.tolist():
        if is_new:
            i += 1
        else:
            j += 1
        if i - i0 >= block and j - j0 >= block:
            yield a[i0:i], b[j0:j]
            i0, j0 = i, j


def difference(blocks: Sequence[Block], close_s: float = 1e-9) -> dict[str, int]:
    """What the two policies decided differently about the same arrivals; `close_s`: first tokens no further apart came
    at the same time."""
    counts = {"same": 0, "only_old_refused": 0, "only_new_refused": 0, "both_refused": 0, "only_old_met": 0,
              "only_new_met": 0, "new_first_token_earlier": 0, "new_first_token_later": 0}
    for new, old in blocks:
        for n, o in zip(new, old, strict=True):
            apart = n.ttft_s is not None and o.ttft_s is not None and abs(n.ttft_s - o.ttft_s) > close_s
            counts["same"] += not apart and (n.met, n.refused, n.preemptions, n.ttft_s is None) == (
                o.met, o.refused, o.preemptions, o.ttft_s is None)
            if n.refused and o.refused:
                counts["both_refused"] += 1
            elif n.refused:
                counts["only_new_refused"] += 1
            elif o.refused:
                counts["only_old_refused"] += 1
            if n.met != o.met:
                counts["only_new_met" if n.met else "only_old_met"] += 1
            if apart:
                counts["new_first_token_earlier" if n.ttft_s < o.ttft_s else "new_first_token_later"] += 1
    return counts
