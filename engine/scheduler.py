"""The scheduler core of one replica: waiting, running and swapped requests over a block pool, step by step.

Input: requests with their arrival time, and the driver's clock as an argument. Output: step plans, their duration,
and what each step emitted.
Does not: sleep, read a clock, do I/O, or let a policy see the true output length.

Use: `submit` at any time; at a step boundary `plan(now)`, then `duration(plan)`, and at its end `commit(plan, now)`.
`plan` chooses and allocates (as vLLM's schedule() does); tokens appear at `commit`. Requests that arrive while a step
is in flight are seen by the next `plan`. Aborts while a step is in flight take effect at its `commit`.

1. submitted = finished + rejected + aborted + waiting + running + swapped.
2. Blocks held by a running request = ceil(computed / block_size) after each commit; all are free when drained.
3. A step has at most max_num_batched_tokens tokens, and at most active_cap sequences run.
4. A request emits at most min(max_tokens, max_model_len - prompt) tokens, each once, also after preemption.
5. The first sequence in order can always finish: everything behind it can be preempted.
Source: vLLM 0.33 v1/core/sched/scheduler.py; SGLang 0.5.23; TensorRT-LLM capacityScheduler (docs/engine.md).
"""
from __future__ import annotations

import math

from control.admission import Load
from engine import handover, preempting, styles
from engine.admission import Door
from engine.blocks import BlockPool
from engine.group import DecodeGroup
from engine.journal import Journal
from engine.policies import MlfqPolicy, SlackPolicy, make_policy
from engine.request import ABORTED, FINISHED, REJECTED, RUNNING, SWAPPED, WAITING, Request
from engine.settings import EngineConfig
from engine.step import ADMIT, Admit, Counters, Reject, Snapshot, StepPlan, StepResult
from engine.stepping import StepTimes

__all__ = ["Admit", "Core", "EngineConfig", "Reject", "Request", "Snapshot", "StepPlan", "StepResult"]


class Core:
    """One replica. See the module text for the order of calls."""

    def __init__(self, config: EngineConfig, seed: int | None = None, *, grouped: bool = False) -> None:
        """`grouped`: advance decoding requests as one (faster; their counters are right only when they end)."""
        self.pool = BlockPool(config.usable_blocks, config.block_size, config.prefix_caching)
        self.times = StepTimes(config, config.seed if seed is None else seed)
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.by_id: dict[str, Request] = {}  # every live request
        self.swap_free = config.swap_blocks
        self.backlog = 0  # uncomputed tokens of requests that are waiting or in prefill
        self.started = 0  # promised blocks of running and swapped requests
        self.service_s = 0.0  # moving mean of done - scheduled
        self.counters = Counters()
        self.dropped: list[Request] = []  # given up by the policy; the driver empties it after each plan()
        self.journal: Journal | None = None  # told every decision with its numbers, when somebody listens
        self.group: DecodeGroup | None = None
        self._orders = 0
        self._plan: StepPlan | None = None
        self.plan_end_s = 0.0
        self._aborting: list[Request] = []
        self._next_config: EngineConfig | None = None
        self._grouped = grouped
        self.set_rules(config)
        self.style = styles.make_style(self)

    def set_rules(self, config: EngineConfig) -> None:
        """An empty queue, a door and the flags of a config; what is inside is moved by engine/handover.py."""
        self.config = config
        self.policy = make_policy(config)
        self.door = Door(config)
        self.cap = config.active_cap
        self.limited = config.admission is not None or bool(self.door.buckets)  # decisions depend on the moment
        self.fifo = config.policy == "fcfs"
        self._charges = config.policy == "fair"
        self.mlfq = self.policy if isinstance(self.policy, MlfqPolicy) else None
        self.preemptive = self.policy.preemptive
        self.revokes = config.revokes
        self.sheds = isinstance(self.policy, SlackPolicy) and config.hopeless == "shed"
        self._watermark = int(config.watermark * config.usable_blocks)
        simple = config.style != "sglang" and config.policy not in ("mlfq", "fair")
        self.group = DecodeGroup(config.block_size) if (
            self._grouped and simple and not config.long_prefill_token_threshold) else None

    @property
    def rules(self) -> EngineConfig:
        """The settings in force, or those that will be with the next step."""
        return self._next_config or self.config

    def adopt(self, config: EngineConfig, now_s: float) -> None:
        """Go on under other rules (scheduler and admission settings), from the next step on at the latest."""
        handover.check(self.config, config)
        if self._plan is not None:
            self._next_config = config
        else:
            handover.adopt(self, config, now_s)

    # -- arrivals and departures -------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> Admit | Reject:
        """Enter a request, or refuse it with a reason and an HTTP status."""
        if request.request_id in self.by_id:
            raise ValueError(f"request id {request.request_id!r} is already in the engine; ids must be unique")
        config, door = self.config, self.door
        spec = config.spec(request.request_class)
        if request.priority is None:
            request.priority = spec.priority
        if request.ttft_deadline_s is None:
            request.ttft_deadline_s = spec.ttft_deadline_s
        if request.tpot_deadline_s is None:
            request.tpot_deadline_s = spec.tpot_deadline_s
        self.counters.submitted += 1
        refusal = door.impossible(request)
        if refusal is None and door.buckets:
            refusal = door.quota(request, now_s)
        if refusal is None and door.rejects:
            refusal = door.budgets(request, self._load(now_s))
        if refusal is not None:
            self._refuse(request, refusal.reason, now_s)
            if self.journal is not None:
                self.journal.refused(self, request, refusal, now_s)
            return Reject(refusal.reason, refusal.http_status, refusal.retry_after_s, refusal.text)
        if self.journal is not None:
            self.journal.accepted(self, request, self._load(now_s), now_s)
        request.state = WAITING
        self.by_id[request.request_id] = request
        self.owe(request, request.prompt_tokens)
        door.enter(request)
        self.policy.push(request.refresh(), now_s)
        return ADMIT

    def _refuse(self, request: Request, reason: str, now_s: float) -> None:
        request.state, request.reason, request.done_s = REJECTED, reason, now_s
        self.counters.rejected += 1
        self.counters.rejections[reason] = self.counters.rejections.get(reason, 0) + 1

    def abort(self, request_id: str, now_s: float) -> bool:
        """Take a request out (client gone, timeout). False when it is not here (any more).

        One that is part of the step in flight leaves at that step's commit, without that step's token.
        """
        request = self.by_id.get(request_id)
        if request is None:
            return False
        if request.state == RUNNING:
            if self._plan is not None:
                if request not in self._aborting:
                    self._aborting.append(request)
                return True
            self.settle()
            self.running.remove(request)
        elif request.state == SWAPPED:
            self.swapped.remove(request)
        else:
            assert request.view is not None
            self.policy.remove(request.view)
        self._leave(request, ABORTED, now_s)
        self.counters.aborted += 1
        return True

    def settle(self) -> None:
        """Make every request's counters right."""
        if self.group is not None and self.group.active:
            self.group.settle_all()

    def _leave(self, request: Request, state: str, now_s: float) -> None:
        """Forget a live request that is in no queue any more."""
        if self.journal is not None and state != REJECTED:
            self.journal.ended(self, request, state, now_s)
        if request.state in (RUNNING, SWAPPED):
            self.started -= request.promised
        if request.state == SWAPPED:
            self.swap_free += request.swap_blocks
            request.swap_blocks = 0
        self.owe(request, 0)
        if request.blocks:
            self.pool.release(request)
        self.door.leave(request)
        request.state, request.done_s = state, now_s
        del self.by_id[request.request_id]

    def owe(self, request: Request, tokens: int) -> None:
        """Note how many tokens must be computed before the request can emit; 0 for one that is decoding."""
        self.backlog += tokens - request.owed
        request.owed = tokens

    def _load(self, now_s: float) -> Load:
        """What admission looks at, as of now."""
        config, running = self.config, len(self.running)
        budget = config.max_num_batched_tokens
        full_s = self.times.base_s(budget, running, 0)
        service_s = self.service_s or self.door.mean_output * self.times.base_s(self.cap, self.cap, 0)
        residual_s = max(0.0, self.plan_end_s - now_s) if self._plan is not None else 0.0
        tps = max(1, budget - running) / full_s if full_s > 0 else math.inf
        return Load(running, len(self.policy) + len(self.swapped), self.cap, self.backlog, self.door.committed,
                    self.pool.total, tps, residual_s, service_s)

    # -- steps ---------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. Requests given up are put in `dropped`."""
        if self._plan is not None:
            raise RuntimeError("plan() was called while a step is in flight; commit() it first")
        if self._next_config is not None:
            config, self._next_config = self._next_config, None
            handover.adopt(self, config, now_s)
        plan = StepPlan(self.times.index)
        while self.by_id:
            if self.mlfq is not None:
                preempting.give_way(self, plan, now_s)
            before = plan.taken_out
            self.style.fill(plan, now_s)
            if self.sheds:
                self._drop(now_s)
            if plan.decode or plan.prefill or plan.taken_out == before:
                break
            # A step that only preempted takes no time: the next one follows at once, over fewer sequences.
        if not plan.decode and not plan.prefill:
            preempting.settle(self, plan)
            return None
        plan.tokens = len(plan.decode)
        plan.kv_tokens = self.group.kv if plan.grouped else sum([r.computed for r in plan.decode])  # type: ignore[union-attr]
        for request, count in plan.prefill:
            plan.tokens += count
            plan.kv_tokens += request.computed
        self._plan = plan
        self.plan_end_s = now_s + self.duration(plan)
        return plan

    def duration(self, plan: StepPlan) -> float:
        """Seconds that the step (or stretch) takes, with noise and time_scale; the same however often asked."""
        if plan.duration_s is None:
            plan.duration_s = plan.swap_s + self.times.step_s(plan.tokens, len(plan.decode), plan.kv_tokens)
        return plan.duration_s

    def wake_s(self, now_s: float) -> float:
        """When `plan` returned None: the moment at which it may not, inf = only an arrival can change that."""
        return min((r.ready_s for r in self.swapped if r.ready_s > now_s), default=math.inf)

    def _drop(self, now_s: float) -> None:
        for view in self.policy.take_hopeless():
            request = self.by_id[view.request_id]
            self._leave(request, REJECTED, now_s)
            self._refuse(request, "hopeless", now_s)
            self.dropped.append(request)
            if self.journal is not None:
                self.journal.revoked(self, request, now_s)

    def admit(self, request: Request, plan: StepPlan, now_s: float) -> None:
        """Note that a request joins the running ones with this step."""
        if self.journal is not None:
            self.journal.scheduled(self, request, now_s)
        if request.state == SWAPPED:
            self.swap_free += request.swap_blocks
            request.swap_blocks = 0
            request.state = RUNNING
            if not self.config.profile.swap_async:
                preempting.copy(self, request, plan, now_s)
        else:
            request.state = RUNNING
            self.started += request.promised
        if request.scheduled_s is None:
            request.scheduled_s = now_s
        self._orders += 1
        request.order = self._orders
        self.running.append(request)
        plan.admitted.append(request)

    def commit(self, plan: StepPlan, now_s: float) -> StepResult:
        """End the step in flight at `now_s`: its tokens, finished, preempted and aborted requests."""
        if plan is not self._plan:
            raise RuntimeError("commit() needs the plan that plan() returned last")
        self._plan = None
        self.times.advance(plan.steps)
        result = StepResult()
        result.preempted = plan.preempted
        if plan.victims:
            preempting.intact(self, plan)
        if self._aborting:
            self._commit_aborts(plan, result, now_s)
        finished, steps = result.finished, plan.steps
        if plan.grouped:
            finished += self.group.advance(steps, now_s)  # type: ignore[union-attr]
        for request in () if plan.grouped else plan.decode:
            request.computed += steps
            request.generated = generated = request.generated + steps
            request.last_token_s = now_s
            if generated >= request.target:
                finished.append(request)
        result.tokens = plan.decode.copy() if plan.prefill else plan.decode
        for request, count in plan.prefill:
            request.computed += count
            if request.prefix_hashes and self.pool.caching:
                self.pool.index(request)
            left = request.prompt_tokens + request.generated - request.computed
            self.owe(request, 0 if left == 1 and request.generated else left)  # a single last token is a decode
            if left == 0:
                self._emit_prefilled(request, result, now_s)
            if plan.grouped and left + (request.generated < request.target) == 1 and request.generated:
                self.group.join(request)  # type: ignore[union-attr]
        counters = self.counters
        counters.steps += steps
        counters.computed_tokens += plan.tokens * steps
        counters.generated_tokens += len(plan.decode) * steps
        if self._charges:
            for request in plan.decode:
                self.policy.served(request.view, 0, steps)  # type: ignore[arg-type]
        if finished:
            for request in finished:
                self._finish(request, now_s)
            self.running = [r for r in self.running if r.state == RUNNING]
            if plan.grouped:
                self.group.drop_ended()  # type: ignore[union-attr]
        if plan.victims:
            preempting.revoke_after(self, plan, now_s)
        self.style.after(plan, result)
        return result

    def _emit_prefilled(self, request: Request, result: StepResult, now_s: float) -> None:
        """The token that comes with the end of a prefill (also of a recomputed one)."""
        request.generated += 1
        request.last_token_s = now_s
        result.tokens.append(request)
        self.counters.generated_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now_s
            self.counters.prompt_tokens += request.prompt_tokens
            result.first.append(request)
            if self.journal is not None:
                self.journal.first_token(self, request, now_s)
        if self._charges:
            self.policy.served(request.view, request.prompt_tokens, 1)  # type: ignore[arg-type]
        if request.generated >= request.target:
            result.finished.append(request)

    def _commit_aborts(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        if plan.grouped:
            self.settle()
            plan.grouped, plan.decode = False, list(plan.decode)
            size = self.config.block_size
            for request in plan.decode:  # the blocks of this step were taken without a name
                request.blocks = max(request.blocks, -(-(request.computed + plan.steps) // size))
                request.room = request.blocks * size
        for request in self._aborting:
            if request.state != RUNNING:
                continue
            preempting.unschedule(plan, request)
            self.running.remove(request)
            self._leave(request, ABORTED, now_s)
            self.counters.aborted += 1
            result.aborted.append(request)
        self._aborting = []

    def _finish(self, request: Request, now_s: float) -> None:
        limit = min(request.max_tokens, self.config.max_model_len - request.prompt_tokens)
        request.finish_reason = "length" if request.generated >= limit and request.output_tokens >= limit else "stop"
        held_s = now_s - (request.scheduled_s or 0.0)
        self.service_s += (held_s - self.service_s) * (1.0 / 64 if self.service_s else 1.0)
        self.door.finished(request)
        self._leave(request, FINISHED, now_s)
        self.counters.finished += 1

    def snapshot(self) -> Snapshot:
        """State of now, for routers, /metrics and /debug/state."""
        return Snapshot(len(self.running), len(self.policy), len(self.swapped), self.pool.used, self.pool.total,
                        self.backlog, self.door.committed, self.pool.queries, self.pool.hits, self.counters)
