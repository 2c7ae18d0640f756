"""Prompts of an asked length, made of common words without a tokenizer.

Input: a prompt seed (uint64) and a length in tokens; for a trace with prefix blocks the names of its blocks.
Output: text of round(tokens / tokens_per_word) words.
Does not: count tokens. The service's own count (`prompt_tokens` in the ledger) says how close it came.

1. A prompt is a head of 8 words that spells the seed (8 bits a word), then a slice of one fixed text. Equal
   seeds give equal prompts; unequal seeds differ within the first 8 words, so no cache of prefixes can help.
2. Common English words are one token each in the usual tokenizers; `target.tokens_per_word` corrects the rest.
3. Cutting a slice costs microseconds whatever the length: nothing is joined word by word.
4. Prompts whose leading blocks have equal names have equal text there, and part within the next 8 words. What lies
   beyond the named blocks comes from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# 256 common words: one byte of the seed picks one.
WORDS = """
able about above across action active actual add after again age ago air all allow almost alone along also
always among amount and animal answer any appear apple area arm around art ask away baby back bad bag ball bank
base basic bath bear beat bed before begin behind below best better big bird bit black blue board boat body book
both bottom box boy bread break bridge bright bring broad brown build burn bus busy but buy cake call came camp
can car card care carry case cat catch cause center chair change cheap check cheese child choice city class
clean clear climb clock close cloth cloud coat coffee cold color come common cook cool copy corn corner cost
could count country course cover cow cross cry cup cut daily dance dark day dead deal dear decide deep degree
desk detail dinner direct dirt discuss doctor dog dollar door double doubt down draw dream dress drink drive
drop dry during dust duty each ear early earth east easy eat edge effect egg eight either else empty end enemy
engine enjoy enough enter equal even event ever every exact expect eye face fact fair fall family far farm fast
father fear feed feel few field fight figure fill film final find fine finger finish fire first fish fit five
floor flow flower fly follow food foot force foreign forest forget form forward four free fresh friend from
front fruit full game garden gas gather gentle get gift girl give glad glass goal gold good grass great
""".split()  # noqa: SIM905
HEAD_WORDS = 8
BODY_WORDS = 1 << 16  # of the fixed text; longer prompts repeat it
_BODY_SEED = 20260101  # of the fixed text; changing it changes every prompt


class PromptMaker:
    """Makes prompts; build one per process (some 10 ms), then call `text`."""

    def __init__(self, tokens_per_word: float = 1.0, unique: bool = True) -> None:
        if not tokens_per_word > 0:
            raise ValueError(f"tokens_per_word is {tokens_per_word}; it must be above 0")
        self.tokens_per_word = tokens_per_word
        self.unique = unique
        picks = np.random.Generator(np.random.Philox(_BODY_SEED)).integers(0, 256, BODY_WORDS)
        lengths = np.array([len(word) + 1 for word in WORDS])[picks]
        self._body = " ".join(WORDS[pick] for pick in picks.tolist()) + " "
        self._starts = np.concatenate(([0], np.cumsum(lengths))).tolist()  # character where word i starts

    def words(self, tokens: int) -> int:
        """Words of a prompt of `tokens` tokens; at least one."""
        return max(1, round(tokens / self.tokens_per_word))

    def text(self, prompt_seed: int, input_tokens: int, blocks: Sequence[int] = (), block_tokens: int = 0) -> str:
        """The prompt of a seed, about `input_tokens` tokens long.

        `blocks` names its leading blocks of `block_tokens` tokens each (`SharedStarts.names`), the last one maybe cut.
        Prompts of fewer than 8 words spell only the lowest bytes of the seed, so they can repeat.
        """
        count = self.words(int(input_tokens))
        seed = int(prompt_seed) & 0xFFFFFFFFFFFFFFFF if self.unique or len(blocks) else 0
        parts, done = [], 0
        for place, name in enumerate(blocks, 1):
            end = min(round(place * block_tokens / self.tokens_per_word), count)
            if end > done:
                parts.append(self._slice(int(name), end - done))
                done = end
        if done < count:
            parts.append(self._slice(seed, count - done))
        return " ".join(parts)

    def _slice(self, seed: int, count: int) -> str:
        """`count` words: a head that spells the seed, then a slice of the fixed text."""
        head = [WORDS[byte] for byte in seed.to_bytes(HEAD_WORDS, "little")]
        if count <= HEAD_WORDS:
            return " ".join(head[:count])
        rest = count - HEAD_WORDS
        # A cheap mix of the seed chooses where the slice starts; the head alone makes it unique.
        offset = ((seed * 0x9E3779B97F4A7C15) >> 40) % BODY_WORDS
        parts = [" ".join(head), " "]
        while rest > 0:
            take = min(rest, BODY_WORDS - offset)
            parts.append(self._body[self._starts[offset] : self._starts[offset + take]])
            rest -= take
            offset = 0
        return "".join(parts).rstrip()
