"""Every decision of a core with the numbers that led to it, as plain dicts.

Input: calls of the core at the moment of a decision. Output: `Entry` dicts through `write`.
Does not: decide, or cost anything when no journal is attached (`Core.journal` is None).

An entry has `at_s` (the driver's clock), `replica`, `request_id`, `event`, `rule` (which rule decided), `text` (one
line with the numbers) and `numbers`. Events: accepted, refused, revoked, scheduled, swapped_in, preempted,
preemption_revoked, first_token, finished, aborted. `revoked`: an acceptance taken back while nothing had been computed
for the request; `preemption_revoked`: a preemption taken back while its tokens were still in memory.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from control import preemption as costs
from control.admission import Load, Refusal, predicted_ttft_s
from engine.request import FINISHED, SWAPPED, Request

if TYPE_CHECKING:
    from engine.scheduler import Core

Entry = dict[str, Any]


class Journal:
    """Turns the core's calls into entries."""

    def __init__(self, write: Callable[[Entry], None], replica: int = 0) -> None:
        self._write = write
        self._replica = replica

    def _note(self, now_s: float, request: Request, event: str, rule: str, text: str, **numbers: Any) -> None:
        self._write({"at_s": now_s, "replica": self._replica, "request_id": request.request_id, "event": event,
                     "rule": rule, "text": text, "numbers": numbers})

    def refused(self, core: Core, request: Request, refusal: Refusal, now_s: float) -> None:
        """The door said no."""
        self._note(now_s, request, "refused", refusal.reason, refusal.text, measured=refusal.measured,
                   limit=refusal.limit, http_status=refusal.http_status, retry_after_s=refusal.retry_after_s,
                   running=len(core.running), waiting=len(core.policy) + len(core.swapped))

    def accepted(self, core: Core, request: Request, load: Load, now_s: float) -> None:
        """The door said yes."""
        wait_s, limit_s = predicted_ttft_s(load, request.prompt_tokens), request.ttft_deadline_s
        promise = core.door.promise(request)
        deadline = "" if limit_s is None or limit_s == float("inf") else f", deadline {limit_s * 1e3:.0f} ms"
        self._note(now_s, request, "accepted", "budgets" if core.door.rejects else "no budget is enforced",
                   f"predicted TTFT {wait_s * 1e3:.0f} ms{deadline}; {load.running} of {load.active_cap} slots run, "
                   f"{load.waiting} wait, {load.backlog_tokens} prompt tokens ahead; {promise} KV blocks promised, "
                   f"{load.committed_blocks} before" + (f" of {core.door.limit}" if core.door.limit else ""),
                   predicted_ttft_s=wait_s, ttft_deadline_s=limit_s, prompt_tokens=request.prompt_tokens,
                   max_tokens=request.max_tokens, promise_blocks=promise, running=load.running, waiting=load.waiting,
                   backlog_tokens=load.backlog_tokens, committed_blocks=load.committed_blocks,
                   commit_limit_blocks=core.door.limit, relief=core.door.relief, tenant=request.tenant,
                   request_class=request.request_class)

    def revoked(self, core: Core, request: Request, now_s: float) -> None:
        """A waiting request was given up: no first token in time was possible any more, and nothing was lost."""
        waited_s, limit_s = now_s - request.arrival_s, request.ttft_deadline_s or 0.0
        own_s = request.prompt_tokens / core.config.profile.prefill_tps * core.config.time_scale
        self._note(now_s, request, "revoked", "hopeless",
                   f"waited {waited_s * 1e3:.0f} ms + own prefill {own_s * 1e3:.0f} ms > {limit_s * 1e3:.0f} ms",
                   waited_s=waited_s, own_prefill_s=own_s, ttft_deadline_s=limit_s)

    def scheduled(self, core: Core, request: Request, now_s: float) -> None:
        """The request got a slot (again)."""
        back = request.state == SWAPPED
        waited_s = now_s - request.arrival_s
        what = "copied back from the host" if back else f"{request.num_tokens - request.computed} tokens to compute"
        self._note(now_s, request, "swapped_in" if back else "scheduled", core.config.policy,
                   f"slot {len(core.running) + 1} of {core.cap}, {waited_s * 1e3:.0f} ms after its arrival; {what}, "
                   f"{core.pool.free} KV blocks free, {len(core.policy)} still wait",
                   waited_s=waited_s, running=len(core.running) + 1, active_cap=core.cap, free_blocks=core.pool.free,
                   waiting=len(core.policy), cached_tokens=request.cached_tokens)

    def preempted(self, core: Core, request: Request, index: int, mode: str, swaps: bool, now_s: float) -> None:
        """The request gave way; `core.running` no longer holds it."""
        profile, scale = core.config.profile, core.config.time_scale
        context = request.computed
        again_s = scale * costs.recompute_s(context, 0, 1.0 / profile.prefill_tps, profile.attention_s)
        copy_s = scale * costs.swap_s(context, profile.kv_bytes_per_token, profile.pcie_gb_s * 1e9,
                                      profile.transfer_fixed_s)
        done = request.generated / request.max_tokens if request.max_tokens else 0.0
        chosen = "least harm" if core.config.policy == "slack_aware" else "last in order"
        how = "swap" if swaps else "recompute"
        note = "" if how == mode else f" (host memory has {core.swap_free} blocks, {request.blocks} are needed)"
        self._note(now_s, request, "preempted", chosen,
                   f"{how}{note}: recompute {again_s * 1e3:.1f} ms, swap {copy_s * 1e3:.1f} ms for {context} tokens; "
                   f"{done:.0%} of max_tokens done, preempted {request.preemptions} times before; frees "
                   f"{request.blocks} KV blocks",
                   mode=how, configured_mode=core.config.preemption_mode, recompute_s=again_s, swap_s=copy_s,
                   context_tokens=context, generated=request.generated, max_tokens=request.max_tokens,
                   blocks=request.blocks, preemptions_before=request.preemptions, place=index + 1,
                   running=len(core.running) + 1)

    def preemption_revoked(self, core: Core, request: Request, lost: int, why: str, now_s: float) -> None:
        """A preemption was taken back; `core.running` holds the request again."""
        left = f"{lost} of its tokens were overwritten and are computed again" if lost else "none of its tokens is lost"
        self._note(now_s, request, "preemption_revoked", "costs nothing yet",
                   f"{why}: {request.blocks} KV blocks are its own again, {left}; {core.pool.free} stay free",
                   why=why, blocks=request.blocks, lost_tokens=lost, context_tokens=request.computed + lost,
                   free_blocks=core.pool.free, running=len(core.running))

    def first_token(self, core: Core, request: Request, now_s: float) -> None:
        """Its first token came."""
        ttft_s, limit_s = now_s - request.arrival_s, request.ttft_deadline_s
        known = limit_s is not None and limit_s < float("inf")
        verdict = f" {'<=' if ttft_s <= limit_s else '>'} {limit_s * 1e3:.0f} ms" if known else ""  # type: ignore[operator]
        self._note(now_s, request, "first_token", "prefill done", f"TTFT {ttft_s * 1e3:.0f} ms{verdict}", ttft_s=ttft_s,
                   ttft_deadline_s=limit_s)

    def ended(self, core: Core, request: Request, state: str, now_s: float) -> None:
        """It left, finished or aborted."""
        first_s, tokens = request.first_token_s, request.generated
        total_s = now_s - request.arrival_s
        text = f"{tokens} tokens in {total_s * 1e3:.0f} ms, preempted {request.preemptions} times"
        tpot_s = None
        if state == FINISHED and first_s is not None and tokens > 1:
            tpot_s = (now_s - first_s) / (tokens - 1)
            text += f", TPOT {tpot_s * 1e3:.1f} ms"
        self._note(now_s, request, "finished" if state == FINISHED else "aborted",
                   request.finish_reason or ("client gave up" if state != FINISHED else "stop"), text,
                   output_tokens=tokens, e2e_s=total_s, tpot_s=tpot_s, preemptions=request.preemptions)
