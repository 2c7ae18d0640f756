"""One request inside the engine, and the part of it that a policy may see.

Input: what came over the wire, and the true output length, which only the token counter may read.
Output: `Request` (state and times, seconds on the driver's clock) and its `View`.
Does not: decide anything.

1. `computed` counts tokens whose keys and values are in memory; `generated` counts emitted tokens and never falls.
2. A policy holds Views only: no attribute of a View leads to the true output length.
"""
from __future__ import annotations

import math

WAITING, RUNNING, SWAPPED, FINISHED, REJECTED, ABORTED = (
    "waiting", "running", "swapped", "finished", "rejected", "aborted",
)
STATES = (WAITING, RUNNING, SWAPPED, FINISHED, REJECTED, ABORTED)


class View:
    """What a scheduler knows about a request: everything but how long its answer will be."""

    __slots__ = ("request_id", "arrival_s", "prompt_tokens", "max_tokens", "tenant", "request_class", "priority",
                 "ttft_deadline_s", "tpot_deadline_s", "predicted_tokens", "generated", "computed", "preemptions",
                 "first_token_s", "blocks", "level", "level_start")

    def __init__(self, request_id: str, arrival_s: float, prompt_tokens: int, max_tokens: int, tenant: str,
                 request_class: str, predicted_tokens: int) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.tenant = tenant
        self.request_class = request_class
        self.priority = 0
        self.ttft_deadline_s = math.inf
        self.tpot_deadline_s = math.inf
        self.predicted_tokens = predicted_tokens
        self.generated = 0
        self.computed = 0
        self.preemptions = 0
        self.first_token_s: float | None = None
        self.blocks = 0
        self.level = 0  # mlfq
        self.level_start = 0  # mlfq: tokens generated when the level was entered


class Request:
    """State of one request; written by the core only."""

    __slots__ = ("request_id", "index", "arrival_s", "prompt_tokens", "max_tokens", "output_tokens", "tenant",
                 "request_class", "priority", "ttft_deadline_s", "tpot_deadline_s", "predicted_tokens",
                 "prefix_hashes", "target", "computed", "generated", "blocks", "room", "shared", "state", "scheduled_s",
                 "first_token_s", "last_token_s", "done_s", "ready_s", "preemptions", "cached_tokens",
                 "finish_reason", "reason", "promised", "owed", "order", "joined", "swap_blocks", "view", "user")

    def __init__(
        self, request_id: str, arrival_s: float, prompt_tokens: int, max_tokens: int, output_tokens: int, *,
        tenant: str = "", request_class: str = "", priority: int | None = None,
        ttft_deadline_s: float | None = None, tpot_deadline_s: float | None = None,
        prefix_hashes: tuple[int, ...] = (), predicted_tokens: int | None = None, index: int = 0,
    ) -> None:
        """`output_tokens` is the hidden true length; `prefix_hashes` names the prompt's full blocks in order.

        Deadlines are durations from arrival; None takes the class's. `user` is free for the driver.
        """
        self.request_id = request_id
        self.index = index
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.output_tokens = output_tokens
        self.tenant = tenant
        self.request_class = request_class
        self.priority = priority
        self.ttft_deadline_s = ttft_deadline_s
        self.tpot_deadline_s = tpot_deadline_s
        self.predicted_tokens = max_tokens if predicted_tokens is None else predicted_tokens
        self.prefix_hashes = prefix_hashes
        self.target = max(1, min(output_tokens, max_tokens))
        self.computed = 0
        self.generated = 0
        self.blocks = 0
        self.room = 0  # blocks x block_size: tokens that fit without another block
        self.shared = 0  # how many of `prefix_hashes` this request holds in the cache index
        self.state = WAITING
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.done_s: float | None = None
        self.ready_s = 0.0  # swapped: not before this the copy is over
        self.preemptions = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.reason: str | None = None
        self.promised = 0  # blocks that admission counts for it
        self.owed = 0  # tokens of it in the core's backlog
        self.order = 0  # of admission: running requests stand in this order
        self.joined = -1  # step of a decode group at which the counters were right; -1 = they are right now
        self.swap_blocks = 0  # blocks held in host memory
        self.view: View | None = None
        self.user: object = None

    @property
    def num_tokens(self) -> int:
        """Prompt and emitted tokens: what must be computed before the next one."""
        return self.prompt_tokens + self.generated

    def refresh(self) -> View:
        """The view with the counters of now."""
        view = self.view
        if view is None:
            view = self.view = View(self.request_id, self.arrival_s, self.prompt_tokens, self.max_tokens, self.tenant,
                                    self.request_class, self.predicted_tokens)
            view.priority = self.priority or 0
            view.ttft_deadline_s = math.inf if self.ttft_deadline_s is None else self.ttft_deadline_s
            view.tpot_deadline_s = math.inf if self.tpot_deadline_s is None else self.tpot_deadline_s
        view.generated = self.generated
        view.computed = self.computed
        view.preemptions = self.preemptions
        view.first_token_s = self.first_token_s
        view.blocks = self.blocks
        return view


def mix64(value: int) -> int:
    """A well-mixed 64-bit hash of an integer (splitmix64 finaliser); the same on every machine."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def unit_normal(key: int) -> float:
    """A standard normal number that depends on `key` only (Box-Muller over two hashes)."""
    u = (mix64(key) >> 11) / (1 << 53)
    v = (mix64(key ^ 0x5DEECE66D) >> 11) / (1 << 53)
    return math.sqrt(-2.0 * math.log(1.0 - u)) * math.cos(2.0 * math.pi * v)


def predict_tokens(output_tokens: int, key: int, sigma: float) -> int:
    """A noisy length prediction, true x exp(N(0, sigma)): what policy sjf sees instead of the truth."""
    return max(1, round(output_tokens * math.exp(sigma * unit_normal(key))))


def sample_tokens(key: int, mu: float, sigma: float, limit: int) -> int:
    """A lognormal output length that depends on `key` only (a prompt hash), at most `limit`."""
    return max(1, min(limit, round(math.exp(mu + sigma * unit_normal(key)))))
