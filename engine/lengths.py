"""How long an answer gets that nobody pinned: drawn from the text of its prompt, so both clocks draw the same.

Input: a prompt's text, or an arrival of a schedule whose prompt the load generator would send; the engine's seed.
Output: a key, from which `engine.request` samples a length and a prediction of it.
Does not: sample, or show the length to a policy.

The HTTP engine has the text; virtual time writes the same text (some 25 microseconds per arrival, where it is
needed: not for pinned answers).
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

from bench.workload.plan import Plan
from bench.workload.prompt_file import open_text
from bench.workload.prompt_rows import BYTES_PER_TOKEN
from bench.workload.prompts import PromptMaker
from bench.workload.schedule import Schedule
from engine.request import mix64


def text_digest(text: str) -> bytes:
    """Eight bytes that stand for a prompt."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def length_key(digest: bytes, seed: int) -> int:
    """What a length is drawn from: the prompt and the engine's seed."""
    return mix64(int.from_bytes(digest, "little") ^ mix64(seed))


def text_blocks(text: str, prompt_tokens: int, block_size: int) -> tuple[int, ...]:
    """A hash for each full block of a prompt whose length is told: equal leading text gives equal leading hashes.

    A block is `block_size` tokens of four bytes, as the estimate of `bench.workload.prompt_rows` has it; a prompt has
    no more of them than its told length has room for.
    """
    raw, piece = text.encode("utf-8", "surrogatepass"), block_size * BYTES_PER_TOKEN
    names, before = [], b""
    for start in range(0, min(len(raw) // piece, prompt_tokens // block_size) * piece, piece):
        before = hashlib.blake2b(before + raw[start : start + piece], digest_size=8).digest()
        names.append(int.from_bytes(before, "little"))
    return tuple(names)


@lru_cache(maxsize=4)
def _maker(tokens_per_word: float, unique: bool) -> PromptMaker:
    return PromptMaker(tokens_per_word, unique)


def arrival_key(plan: Plan, schedule: Schedule, seed: int) -> Callable[[int], int]:
    """The function that gives the key of arrival i of a stage, by the text that would be sent for it."""
    if plan.lines is not None and schedule.place is not None:
        own, places = open_text(plan.lines), schedule.place.tolist()
        return lambda i: length_key(text_digest(own.text(places[i])), seed)
    maker = _maker(plan.prompts.tokens_per_word, plan.prompts.unique)
    seeds, tokens, shared = schedule.prompt_seed.tolist(), schedule.input_tokens.tolist(), schedule.shared

    def key(i: int) -> int:
        if shared is None:
            text = maker.text(seeds[i], tokens[i])
        else:
            text = maker.text(seeds[i], tokens[i], shared.names(i).tolist(), shared.block_tokens)
        return length_key(text_digest(text), seed)

    return key
