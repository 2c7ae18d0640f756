"""Which prompts of a trace begin alike: the block ids of its rows, chained, packed and given a name per stage.

Input: block ids per row (Mooncake's `hash_ids`, one id for each `block_tokens` tokens of the prompt, the last one for
what is left). Output: `Prefixes`, part of a plan; `SharedStarts`, part of a schedule: the names of an arrival's blocks.
Does not: make text (prompts.py) or blocks of an engine's size (engine/blocks.py).

1. A block's name includes all blocks before it, as in the caches of serving systems: equal names mean equal prompts up
   to the block's end. In Mooncake's files ids are chained already; here it holds for any file.
2. Names differ between stages and between turns of a trace that starts again: only what the trace shares is shared.
3. Packed, ids are numbered by first appearance: 288,500 of them take 0.4 MB in a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bench.workload.packed import pack, unpack

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: np.ndarray) -> np.ndarray:
    """A well-mixed 64-bit hash of each uint64 (splitmix64 finaliser); the same on every machine."""
    x = values + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Block ids of the rows of a trace: row r has `ids[starts[r]:starts[r + 1]]`."""

    block_tokens: int
    starts: np.ndarray  # (rows + 1,) int64
    ids: np.ndarray  # (blocks,) int64, numbered by first appearance
    chain: np.ndarray = field(init=False, repr=False)  # (blocks,) uint64: includes all blocks before

    def __post_init__(self) -> None:
        object.__setattr__(self, "chain", _chain(self.starts, self.ids))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def hit_ratio(self) -> float:
        """Share of blocks that an earlier row had too: what a cache without end would find; NaN without blocks."""
        return 1.0 - len(np.unique(self.chain)) / len(self.chain) if len(self.chain) else float("nan")

    def to_dict(self) -> dict[str, object]:
        """JSON-able form."""
        return {
            "block_tokens": self.block_tokens,
            "counts": pack(np.diff(self.starts)),
            "ids": pack(np.diff(self.ids, prepend=0)),
        }

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> Prefixes:
        """The prefixes in a `to_dict` form."""
        return cls(int(data["block_tokens"]), _starts(unpack(data["counts"])), np.cumsum(unpack(data["ids"])))  # type: ignore[call-overload, arg-type]


def make_prefixes(block_tokens: int, counts: np.ndarray, ids: np.ndarray) -> Prefixes:
    """Prefixes of rows with `counts[r]` ids each, `ids` in the order of rows (int64)."""
    _, first, place = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return Prefixes(block_tokens, _starts(counts), rank[place.reshape(-1)])


def take_rows(prefixes: Prefixes, keep: np.ndarray, input_tokens: np.ndarray) -> Prefixes:
    """The rows of a mask, each cut to the blocks of its `input_tokens`."""
    blocks = -(-input_tokens // prefixes.block_tokens)
    counts = np.minimum(np.diff(prefixes.starts)[keep], blocks)
    begin = np.repeat(prefixes.starts[:-1][keep] - _starts(counts)[:-1], counts)
    return make_prefixes(prefixes.block_tokens, counts, prefixes.ids[begin + np.arange(counts.sum())])


@dataclass(frozen=True, eq=False)
class SharedStarts:
    """Names of the prompt blocks of each arrival of a stage; arrival i replays row i modulo the trace's length."""

    prefixes: Prefixes
    seed: int

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.prefixes.block_tokens

    def names(self, arrival: int, again: int = 0) -> np.ndarray:
        """(blocks,) uint64 of one arrival; empty when its row has no ids.

        `again`: how often the whole stage was gone through before (a closed loop may).
        """
        turn, row = divmod(arrival, len(self.prefixes))
        salt = mix(np.array([self.seed], dtype=np.uint64) ^ mix(np.array([turn + (again << 40)], dtype=np.uint64)))
        begin, end = self.prefixes.starts[row : row + 2]
        return mix(self.prefixes.chain[begin:end] ^ salt)

    def digest_bytes(self, arrivals: int) -> bytes:
        """What a hash over a stage of so many arrivals must cover."""
        rows = min(arrivals, len(self.prefixes))
        starts = self.prefixes.starts[: rows + 1]
        head = np.array([self.block_tokens, self.seed], dtype="<i8").tobytes()
        return head + starts.astype("<i8").tobytes() + self.prefixes.chain[: starts[-1]].astype("<u8").tobytes()


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


def _chain(starts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """name of block k = mix(name of block k - 1 ^ mix(id)), all rows at once, block by block."""
    chain = np.empty(len(ids), dtype=np.uint64)
    own = mix(ids.astype(np.uint64))
    counts = np.diff(starts)
    rows = np.flatnonzero(counts > 0)
    names = np.zeros(len(rows), dtype=np.uint64)
    k = 0
    while len(rows):
        at = starts[rows] + k
        names = mix(names ^ own[at])
        chain[at] = names
        k += 1
        going = counts[rows] > k
        rows, names = rows[going], names[going]
    return chain
