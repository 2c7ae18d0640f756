"""The message catalogue: `Words("en")("key", n=3)` is one text of one language.

Input: `reports/locales/LANG.json`, a flat object. Output: texts.
Does not: guess a language or fall back to another one silently.

1. All catalogues have the same keys with the same placeholders (tested).
2. A text is plain; markup belongs to the template.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

LOCALES = Path(__file__).parent / "locales"
LANGUAGES = ("en", "zh-CN")


@lru_cache(maxsize=4)
def catalogue(lang: str) -> dict[str, str]:
    """All messages of `lang`. Raises ValueError for a language that has no catalogue."""
    if lang not in LANGUAGES:
        raise ValueError(f"no report language {lang!r}; there are {', '.join(LANGUAGES)}")
    return json.loads((LOCALES / f"{lang}.json").read_text(encoding="utf-8"))


class Words:
    """Looks up messages; an unknown key is a bug and raises KeyError."""

    def __init__(self, lang: str = "en") -> None:
        self.lang = lang
        self._messages = catalogue(lang)

    def __call__(self, key: str, **values: object) -> str:
        text = self._messages[key]
        return text.format(**values) if values else text

    def known(self, key: str, fallback: str) -> str:
        """The message of `key`, or `fallback` when the catalogue has none (free-form ids of the analysis)."""
        return self._messages.get(key, fallback)
