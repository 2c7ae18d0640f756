"""Sequences that decode together, advanced as one: a stretch costs O(log n) instead of O(n).

Input: requests that each get one token per step. Output: when the next one ends, how many blocks k steps need.
Does not: choose anything; `engine/styles.py` falls back to its plain loop whenever blocks or budget run short.

All members advance in lockstep, so a member's counters are those at its joining plus the steps since; they are
written back ("settled") when it ends or when somebody needs to look. A member with s free slots in its last block
needs a block at step s + 1 and then every block_size steps: counting members by that step modulo block_size gives
the blocks that any number of steps needs.

1. Between `build` and `settle_all`, members are the first running requests, in order, and all are decoding.
2. After `settle_all` every counter is what the plain loop would have written.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterable

from engine.request import RUNNING, Request


class DecodeGroup:
    """Members, their common step count, and what follows from it."""

    __slots__ = ("active", "members", "tick", "kv", "last_s", "_ends", "_phase", "_size")

    def __init__(self, block_size: int) -> None:
        self.active = False
        self.members: list[Request] = []
        self.tick = 0  # steps done by the group
        self.kv = 0  # cached tokens of all members
        self.last_s = 0.0  # when the last step ended
        self._ends: list[tuple[int, int, Request]] = []  # (tick of its last token, order, member)
        self._phase = [0] * block_size  # members that need a block at steps of this residue
        self._size = block_size

    def build(self, running: Iterable[Request]) -> None:
        """Take in the leading requests that are decoding."""
        self.members, self.kv, self._ends = [], 0, []
        self._phase = [0] * self._size
        self.active = True
        for request in running:
            if request.generated == 0 or request.prompt_tokens + request.generated - request.computed != 1:
                break
            self.join(request)

    def join(self, request: Request) -> None:
        """One more member; it gets its next token with the next step."""
        if request.joined < 0:
            request.joined = self.tick
        self.members = [*self.members, request]  # plans hold the list: never change it in place
        self.kv += request.computed
        self._phase[self._needs(request)] += 1
        heapq.heappush(self._ends, (self.tick + request.target - request.generated, request.order, request))

    def _needs(self, request: Request) -> int:
        """Residue of the step at which the request needs a block; its counters must be those of now."""
        return (self.tick + request.room - request.computed + 1) % self._size

    def next_end(self) -> int:
        """Steps until the first member has all its tokens."""
        return self._ends[0][0] - self.tick

    def blocks(self, steps: int) -> int:
        """Blocks that the next `steps` steps need."""
        if steps == 1:
            return self._phase[(self.tick + 1) % self._size]
        full, rest = divmod(steps, self._size)
        first = self.tick + full * self._size + 1
        phase, size = self._phase, self._size
        return full * len(self.members) + sum([phase[(first + i) % size] for i in range(rest)])

    def advance(self, steps: int, now_s: float) -> list[Request]:
        """Note `steps` steps that end at `now_s`; the members that ended, settled and out, in running order."""
        self.tick += steps
        self.kv += steps * len(self.members)
        self.last_s = now_s
        ends, ended = self._ends, []
        while ends and ends[0][0] <= self.tick:
            request = heapq.heappop(ends)[2]
            self._settle(request)
            self.kv -= request.computed
            self._phase[self._needs(request)] -= 1
            ended.append(request)
        if len(ended) > 1:
            ended.sort(key=lambda r: r.order)
        return ended

    def drop_ended(self) -> None:
        """Forget members that are no longer running."""
        self.members = [r for r in self.members if r.state == RUNNING]

    def settle_all(self) -> None:
        """Write every member's counters and dissolve the group."""
        for request in self.members:
            self._settle(request)
        self.members = []
        self.active = False

    def _settle(self, request: Request) -> None:
        steps = self.tick - request.joined
        request.joined = -1
        if steps:
            request.generated += steps
            request.computed += steps
            request.last_token_s = self.last_s
            request.blocks = -(-request.computed // self._size)
            request.room = request.blocks * self._size
