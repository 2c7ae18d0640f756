"""How one step is filled: vLLM V1, SGLang, and the two TensorRT-LLM capacity policies.

Input: a core with its queues and pool. Output: the step plan, filled; blocks are allocated here.
Does not: emit tokens or measure time.

vllm           running first, in order; preempt the policy's victim when blocks run out; admit only if nothing was
               preempted; the whole prompt must fit in free blocks; prefill and decode share a step.
sglang         a prefill batch goes before decoding and stalls it; admission reserves a share of the output still to
               come (new_token_ratio, falling while nothing is retracted); out of blocks: retract the shortest.
trt_no_evict   like vllm, but blocks to completion are reserved for every started request; nothing is preempted.
trt_max_util   like vllm, but only this step's blocks are needed to start; the last started is paused.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from engine import preempting
from engine.request import Request

if TYPE_CHECKING:
    from engine.scheduler import Core, StepPlan, StepResult


class MixedStyle:
    """vLLM V1 and TensorRT-LLM: prefill chunks and decodes in one step."""

    def __init__(self, core: Core, *, whole_prompt: bool, to_completion: bool) -> None:
        self.core = core
        self.whole_prompt = whole_prompt
        self.to_completion = to_completion

    def fill(self, plan: StepPlan, now_s: float) -> None:
        """Choose the step: running requests, then swapped, then waiting ones."""
        before = plan.taken_out
        budget = self._run_group(plan)
        if budget < 0:
            budget = self._run(plan, now_s)
        if plan.taken_out > before:
            plan.stop = "preempted"
            if plan.victims:
                self._bring_back(plan, budget, now_s)
        else:
            self._enter(plan, now_s, budget)

    def _enter(self, plan: StepPlan, now_s: float, budget: int) -> None:
        """Let swapped and waiting requests in; swapped ones first, as in vLLM V0.

        Not so under mlfq: a swapped request of a worse level would take back the place that it just gave.
        """
        core = self.core
        if core.swapped and not core.preemptive:
            budget = self._swap_in(plan, now_s, budget)
            if core.swapped:
                plan.stop = "swapped"
                return
        plan.stop = self._admit(plan, now_s, budget)
        if core.swapped:
            used = len(plan.decode) + sum([n for _, n in plan.prefill])
            self._swap_in(plan, now_s, core.config.max_num_batched_tokens - used)
            if core.swapped:
                plan.stop = "swapped"

    def _run_group(self, plan: StepPlan) -> int:
        """Schedule the decode group and the prefills behind it; the budget left, or -1: use the plain loop.

        Only when everything fits: then the order of the plain loop makes no difference.
        """
        core = self.core
        group, running, pool = core.group, core.running, core.pool
        if group is None:
            return -1
        if not group.active and not core.swapped:
            group.build(running)
        decoding = len(group.members)
        budget = core.config.max_num_batched_tokens - decoding
        need = group.blocks(1) if decoding else 0
        chunks = []
        for request in running[decoding:]:
            count = min(request.prompt_tokens + request.generated - request.computed, budget)
            short = request.computed + count - request.room
            extra = -(-short // pool.size) if short > 0 else 0
            need += extra
            budget -= count
            chunks.append((request, count, extra))
            if count <= 0 or (count == 1 and request.generated):
                budget = -1  # a decode that is not of the group, or no room for a chunk
            if budget < 0:
                break
        if budget < 0 or need > pool.free or core.swapped:
            core.settle()
            return -1
        for request, count, extra in chunks:
            if extra:
                pool.take(request, extra)
            plan.prefill.append((request, count))
            need -= extra
        if need:
            pool.take_unnamed(need)
        plan.decode, plan.grouped = group.members, True
        return budget

    def _run(self, plan: StepPlan, now_s: float) -> int:
        """Schedule running requests in order, preempting when blocks run out; the budget left."""
        core = self.core
        config, pool, running = core.config, core.pool, core.running
        size, budget = config.block_size, config.max_num_batched_tokens
        threshold = config.long_prefill_token_threshold
        decode = plan.decode
        i = 0
        while i < len(running):
            # The usual case without preemption is a plain loop; a preemption changes the list and starts it again.
            for request in running[i:] if i else running:
                if budget <= 0:
                    return 0
                computed = request.computed
                count = request.prompt_tokens + request.generated - computed
                if count > 1:
                    if threshold and count > threshold:
                        count = threshold
                    if count > budget:
                        count = budget
                short = computed + count - request.room
                if short > 0:
                    extra = (short + size - 1) // size
                    if extra > pool.free:
                        break
                    pool.take(request, extra)
                if count == 1 and request.generated:
                    decode.append(request)
                else:
                    plan.prefill.append((request, count))
                budget -= count
                i += 1
            else:
                return budget
            victim = self._victim(now_s)
            gone = running[victim]
            budget += preempting.preempt(core, victim, plan, now_s)
            if gone is request:
                plan.asker = gone
                return budget
            if victim < i:
                i -= 1
        return budget

    def _bring_back(self, plan: StepPlan, budget: int, now_s: float) -> None:
        """Revoke the preemptions that turned out to be needless; who comes back takes part in the step if it can."""
        core = self.core
        for request in preempting.revoke_planned(core, plan, now_s):
            count = min(request.num_tokens - request.computed, budget)
            short = request.computed + count - request.room
            extra = -(-short // core.config.block_size) if short > 0 else 0
            if count <= 0 or extra > core.pool.free:
                continue
            core.pool.take(request, extra)
            if count == 1 and request.generated:
                plan.decode.append(request)
            else:
                plan.prefill.append((request, count))
            budget -= count

    def _victim(self, now_s: float) -> int:
        core = self.core
        if core.config.policy == "fcfs" or self.to_completion:
            return len(core.running) - 1
        return core.policy.victim([r.refresh() for r in core.running], now_s)

    def _swap_in(self, plan: StepPlan, now_s: float, budget: int) -> int:
        """Bring swapped requests back in order while they fit; the budget left."""
        core = self.core
        config, pool = core.config, core.pool
        while core.swapped:
            request = core.swapped[0]
            if len(core.running) >= core.cap or budget <= 0 or request.ready_s > now_s:
                break
            left = request.num_tokens - request.computed
            count = min(left, budget)
            blocks = -(-(request.computed + count) // config.block_size)
            if blocks > pool.free - (core._watermark if core.running else 0):
                break
            del core.swapped[0]
            pool.take(request, blocks)
            core.admit(request, plan, now_s)
            if count == 1 and request.generated:
                plan.decode.append(request)
            else:
                plan.prefill.append((request, count))
            budget -= count
        return budget

    def _admit(self, plan: StepPlan, now_s: float, budget: int) -> str:
        """Start waiting requests in the policy's order until one does not fit; why it ended."""
        core = self.core
        config, pool, policy, running = core.config, core.pool, core.policy, core.running
        size = config.block_size
        while True:
            view = policy.peek(now_s)
            if view is None:
                return "empty"
            if len(running) >= core.cap:
                return "full"
            if budget <= 0:
                return "budget"
            request = core.by_id[view.request_id]
            total = request.prompt_tokens + request.generated
            matched = pool.match(request, (total - 1) // size) if pool.caching else 0
            cached = matched * size
            count = left = total - cached
            if count > budget:
                if not config.enable_chunked_prefill:
                    return "budget"
                count = budget
            threshold = config.long_prefill_token_threshold
            if threshold and count > threshold and config.enable_chunked_prefill:
                count = threshold
            now_blocks = -(-(cached + count) // size) - matched
            need = -(-total // size) - matched if self.whole_prompt else now_blocks
            if matched:
                need += pool.idle_among(request, matched)
            if need > pool.free - (core._watermark if running else 0) or not self._fits(request):
                return "blocked"
            policy.pop(now_s)
            if pool.caching:
                pool.queries += total
                pool.hits += cached
                if matched:
                    pool.share(request, matched)
                    request.computed = cached
                    request.cached_tokens = max(request.cached_tokens, cached)
                    core.owe(request, left)
            pool.take(request, now_blocks)
            core.admit(request, plan, now_s)
            plan.prefill.append((request, count))
            budget -= count
            if count < left and budget <= 0:
                return "budget"

    def _fits(self, request: Request) -> bool:
        """The promises that admission to the running set looks at."""
        core = self.core
        if self.to_completion:
            full = sum([-(-(r.prompt_tokens + r.max_tokens) // core.config.block_size) for r in core.running])
            own = -(-(request.prompt_tokens + request.max_tokens) // core.config.block_size)
            if full + own > core.pool.total:
                return False
        if core.door.gates and core.started > 0:
            return core.started + request.promised <= core.door.limit
        return True

    def jump(self, plan: StepPlan, now_s: float) -> int:
        """Steps that can follow without a new decision: 1 = none beyond this one."""
        core = self.core
        if plan.prefill or plan.taken_out or plan.swap_s or plan.admitted or len(plan.decode) != len(core.running):
            return 1
        stop = plan.stop
        if stop == "blocked":
            if core.policy.stable_until(now_s) <= now_s:
                return 1
        elif stop == "swapped":
            if len(core.running) < core.cap and core.swapped[0].ready_s > now_s:
                return 1
        elif stop not in ("empty", "full"):
            return 1
        return self._free_run(plan)

    def _free_run(self, plan: StepPlan) -> int:
        """Steps until a request finishes, sinks a level, or blocks run out."""
        core = self.core
        decode = plan.decode
        group = core.group if plan.grouped else None
        steps = group.next_end() if group is not None else min([r.target - r.generated for r in decode])
        if core.mlfq is not None:
            steps = min(steps, min([_to_quantum(core, r) for r in decode]))
        size, free = core.config.block_size, core.pool.free
        if len(decode) * (steps // size + 1) <= free:
            return steps
        low, high = 1, steps + 1  # low fits: it is allocated; high may not
        taken = group.blocks(1) if group is not None else 0
        while high - low > 1:
            middle = (low + high) // 2
            if group is not None:
                need = group.blocks(middle) - taken
            else:
                need = sum([(r.computed + middle - 1) // size + 1 - r.blocks for r in decode])
            if need <= free:
                low = middle
            else:
                high = middle
        return low

    def after(self, plan: StepPlan, result: StepResult) -> None:
        """Told of each finished step."""


def _to_quantum(core: Core, request: Request) -> int:
    """Steps until an mlfq level is used up."""
    view = request.view
    assert view is not None and core.mlfq is not None
    if view.level == core.mlfq.LEVELS - 1:
        return 1 << 40
    return max(1, core.mlfq.quantum(view.level) - (request.generated - view.level_start))


class SglangStyle(MixedStyle):
    """SGLang: prefill batches stall decoding; output is reserved by a ratio; retraction instead of preemption."""

    START_RATIO, LEAST_RATIO, DECAY_STEPS, CLIP = 0.7, 0.098, 600, 4096

    def __init__(self, core: Core) -> None:
        super().__init__(core, whole_prompt=False, to_completion=False)
        self.ratio = self.START_RATIO

    def fill(self, plan: StepPlan, now_s: float) -> None:
        core = self.core
        size, pool = core.config.block_size, core.pool
        budget = core.config.max_num_batched_tokens
        for request in core.running:  # chunks that were cut go on first
            left = request.num_tokens - request.computed
            if budget <= 0 or (left == 1 and request.generated):
                continue
            count = min(left, budget)
            extra = -(-(request.computed + count) // size) - request.blocks
            if extra > pool.free:
                break
            pool.take(request, extra)
            plan.prefill.append((request, count))
            budget -= count
        self._enter(plan, now_s, budget)
        if plan.prefill:
            plan.decode.clear()
            return
        self._decode(plan, now_s)

    def _fits(self, request: Request) -> bool:
        """Free tokens must cover the prompt, its output, and the reserved part of what runs."""
        core = self.core
        limit = self.CLIP
        reserved = sum([min(r.max_tokens - r.generated, limit) for r in core.running]) * self.ratio
        room = core.pool.free * core.config.block_size - reserved
        own = request.num_tokens + min(request.max_tokens - request.generated, limit)
        if core.running and own > room:
            return False
        return super()._fits(request)

    def _decode(self, plan: StepPlan, now_s: float) -> None:
        """One token for each running request, after retracting what does not fit."""
        core = self.core
        pool = core.pool
        plan.decode.clear()
        retracted = False
        while True:
            needy = [r for r in core.running if r.computed >= r.room]
            if len(needy) <= pool.free or len(core.running) <= 1:
                break
            # Fewest generated tokens first, ties the longest prompt, then the last started.
            order = [(r.generated, -r.prompt_tokens, -i) for i, r in enumerate(core.running)]
            preempting.preempt(core, -min(order)[2], plan, now_s)
            retracted = True
        if retracted:
            done = sum([r.generated for r in core.running])
            asked = sum([r.max_tokens for r in core.running])
            self.ratio = min(1.0, (done + 20 * len(core.running)) / (asked + 1))
        for request in needy:
            if pool.free:
                pool.take(request, 1)
        plan.decode.extend([r for r in core.running if r.computed < r.room])

    def jump(self, plan: StepPlan, now_s: float) -> int:
        if plan.stop == "blocked":
            return 1  # the reserve falls with each token, the free blocks only now and then: the head may fit soon
        return super().jump(plan, now_s)

    def after(self, plan: StepPlan, result: StepResult) -> None:
        if plan.decode:
            fall = (self.START_RATIO - self.LEAST_RATIO) / self.DECAY_STEPS
            self.ratio = max(self.LEAST_RATIO, self.ratio - fall * plan.steps)


def make_style(core: Core) -> MixedStyle:
    """The step rule of the configured engine style."""
    style = core.config.style
    if style == "sglang":
        return SglangStyle(core)
    if style == "trt_no_evict":
        return MixedStyle(core, whole_prompt=False, to_completion=True)
    if style == "trt_max_util":
        return MixedStyle(core, whole_prompt=False, to_completion=False)
    return MixedStyle(core, whole_prompt=core.config.reserve_full_prompt, to_completion=False)
