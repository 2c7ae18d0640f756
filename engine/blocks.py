"""The KV block pool of one replica, with a prefix cache by block hash.

Input: how many blocks a sequence needs, and the hashes of its prompt's full blocks.
Output: counts; a sequence's own bookkeeping is `Request.blocks` and `Request.shared`.
Does not: know about time or policies.

1. plain + idle + in use (shared once each, private) = total, after every call.
2. A cached block that nobody uses is free: it is the first to be taken, oldest first, once plain ones are gone.
3. A block is in the cache index only after its tokens were computed.
Source: vLLM V1 KVCacheManager (hash of a block includes all blocks before it; free queue ordered by last use, the
tail of a prompt evicted before its head). Blocks of generated tokens are not indexed here.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from bench.workload.prefix import SharedStarts, mix
from bench.workload.prompt_file import PromptFile, open_text
from bench.workload.schedule import Schedule
from engine.lengths import text_blocks
from engine.request import Request


def block_names(shared: SharedStarts, arrival: int, prompt_tokens: int, size: int, seed: int) -> tuple[int, ...]:
    """A name for each full block of `size` tokens of an arrival's prompt, as the hash of its text would be.

    A block is shared when the trace's blocks are, up to the one that holds its last token; blocks beyond those that the
    trace names are the arrival's own (`seed`).
    """
    ends = np.arange(size, prompt_tokens + 1, size)
    names = shared.names(arrival)
    named = int(np.searchsorted(ends, len(names) * shared.block_tokens, side="right"))
    own = mix(np.uint64(seed) ^ mix(ends.astype(np.uint64)))
    own[:named] = mix(names[(ends[:named] - 1) // shared.block_tokens] ^ mix(ends[:named].astype(np.uint64)))
    return tuple(own.tolist())


def prompt_blocks(
    schedule: Schedule, size: int, *, unique: bool, lines: PromptFile | None = None
) -> Callable[[int], tuple[int, ...]]:
    """The function that names the full blocks of arrival i's prompt; `unique`: prompts share nothing by themselves.

    With the user's own prompts (`lines`) names come from their text, as over HTTP.
    """
    inputs, shared = schedule.input_tokens.tolist(), schedule.shared
    if lines is not None and schedule.place is not None:
        places = schedule.place.tolist()
        return lambda i: text_blocks(open_text(lines).text(places[i]), inputs[i], size)
    if shared is not None:
        seeds = schedule.prompt_seed.tolist()
        return lambda i: block_names(shared, i, inputs[i], size, seeds[i])
    if unique:
        return lambda i: ()
    # The one prompt of a length: equal prompts share, others do not.
    return lambda i: tuple((inputs[i] << 32) | block for block in range(inputs[i] // size))


class BlockPool:
    """Counts of blocks, and for hashed blocks reference counts and an LRU of unused ones."""

    __slots__ = ("total", "size", "plain", "idle", "refs", "caching", "queries", "hits")

    def __init__(self, total: int, size: int, caching: bool) -> None:
        self.total = total
        self.size = size  # tokens of a block
        self.plain = total  # free, nothing cached in them
        # hash -> free but still holding its tokens; oldest first. A plain dict would search for its first key past all
        # that were deleted there: each eviction would cost more than the one before.
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.refs: dict[int, int] = {}  # hash -> sequences that use the block
        self.caching = caching
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # prompt tokens found

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return self.plain + len(self.idle)

    @property
    def used(self) -> int:
        """Blocks in use by sequences."""
        return self.total - self.plain - len(self.idle)

    def match(self, request: Request, limit: int) -> int:
        """How many leading blocks of the prompt are cached, at most `limit`. Changes nothing."""
        if not self.caching:
            return 0
        found = 0
        refs, idle = self.refs, self.idle
        for name in request.prefix_hashes[:limit]:
            if name not in refs and name not in idle:
                break
            found += 1
        return found

    def idle_among(self, request: Request, matched: int) -> int:
        """How many of the first `matched` blocks would leave the free list when used."""
        return sum(1 for name in request.prefix_hashes[:matched] if name in self.idle)

    def share(self, request: Request, matched: int) -> None:
        """Give the first `matched` cached blocks to the request."""
        for name in request.prefix_hashes[:matched]:
            if name in self.refs:
                self.refs[name] += 1
            else:
                del self.idle[name]
                self.refs[name] = 1
        request.blocks += matched
        request.shared = matched
        request.room = request.blocks * self.size

    def take(self, request: Request, count: int) -> None:
        """Give `count` fresh blocks to the request; the caller has checked `free`."""
        self.take_unnamed(count)
        request.blocks += count
        request.room = request.blocks * self.size

    def take_unnamed(self, count: int) -> None:
        """Take `count` blocks out of the free ones; who holds them is written down elsewhere."""
        if count > self.plain:
            for _ in range(count - self.plain):
                self.idle.popitem(last=False)
                self.plain += 1
        self.plain -= count

    def index(self, request: Request) -> None:
        """Enter computed full prompt blocks into the cache index.

        Stops at a block that another sequence entered meanwhile: the own copy stays private and unindexed, and so
        do the blocks after it, because `shared` counts a prefix.
        """
        names = request.prefix_hashes
        full = min(request.computed // self.size, len(names), request.blocks)
        while request.shared < full:
            name = names[request.shared]
            if name in self.refs or name in self.idle:
                return
            self.refs[name] = 1
            request.shared += 1

    def release(self, request: Request) -> int:
        """Take all blocks back; returns how many the request held."""
        held = request.blocks
        shared = request.shared
        if shared:
            names = request.prefix_hashes
            for name in reversed(names[:shared]):  # the tail becomes the oldest: evicted first
                left = self.refs[name] - 1
                if left:
                    self.refs[name] = left
                else:
                    del self.refs[name]
                    self.idle[name] = None
        self.plain += held - shared
        request.blocks = 0
        request.shared = 0
        request.room = 0
        return held
