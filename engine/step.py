"""What goes in and out of the scheduler core: answers to arrivals, step plans and results, counters, snapshots.

Input and output of `engine/scheduler.py`; plain data.
Does not: decide anything.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request


@dataclass(frozen=True, slots=True)
class Admit:
    """The request waits or will run."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request was refused; reasons and statuses are in control.admission.REASONS."""

    reason: str
    http_status: int
    retry_after_s: float | None = None
    text: str = ""  # the numbers: "predicted TTFT 912 ms > 800 ms"


ADMIT = Admit()


@dataclass(slots=True, eq=False)
class Victim:
    """A request that a plan preempts, and what it held: enough to take the decision back (engine/preempting.py)."""

    request: Request
    computed: int
    blocks: int
    shared: int  # of the blocks: those of the prefix cache
    ready_s: float
    copy_s: float = 0.0  # what the step pays for the copy to the host
    intact: int = 0  # of its own blocks: those that nobody wrote into
    swapped: bool = False


class StepPlan:
    """One step, or `steps` equal ones in pure decode: what is computed."""

    __slots__ = ("index", "decode", "prefill", "tokens", "kv_tokens", "swap_s", "preempted", "taken_out", "victims",
                 "asker", "admitted", "steps", "stop", "duration_s", "grouped")

    def __init__(self, index: int) -> None:
        self.index = index
        self.decode: list[Request] = []  # one token each
        self.prefill: list[tuple[Request, int]] = []  # tokens of a prompt (or of a recomputed context)
        self.tokens = 0
        self.kv_tokens = 0
        self.swap_s = 0.0  # synchronous copies that the step waits for
        self.preempted: list[Request] = []
        self.taken_out = 0  # preemptions, also those that were revoked
        self.victims: list[Victim] = []  # preemptions that can still be revoked
        self.asker: Request | None = None  # asked for memory and was the victim itself
        self.admitted: list[Request] = []
        self.steps = 1
        self.stop = ""  # why admission ended: empty | full | blocked | budget | preempted | swapped
        self.duration_s: float | None = None
        self.grouped = False  # decode is the core's group: its counters are written when a member ends


class StepResult:
    """What a step emitted: `tokens` holds each request that got one (or `steps` in a stretch)."""

    __slots__ = ("tokens", "finished", "preempted", "aborted", "first")

    def __init__(self) -> None:
        self.tokens: list[Request] = []
        self.first: list[Request] = []  # subset of tokens: their first one
        self.finished: list[Request] = []
        self.preempted: list[Request] = []
        self.aborted: list[Request] = []


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    submitted: int = 0
    finished: int = 0
    rejected: int = 0
    aborted: int = 0
    preemptions: int = 0  # that stood
    swaps: int = 0
    revoked: int = 0  # preemptions taken back before they cost anything
    prompt_tokens: int = 0  # of requests that emitted their first token
    generated_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    rejections: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a replica at one moment."""

    running: int
    waiting: int
    swapped: int
    kv_blocks_used: int
    kv_blocks_total: int
    backlog_tokens: int
    committed_blocks: int
    prefix_queries: int
    prefix_hits: int
    counters: Counters

    @property
    def kv_usage(self) -> float:
        """Share of usable blocks in use."""
        return self.kv_blocks_used / self.kv_blocks_total

    @property
    def in_flight(self) -> int:
        """Requests inside the replica."""
        return self.running + self.waiting + self.swapped
