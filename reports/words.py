"""The message catalogue: `Words("en")("key", n=3)` is one text of one language.

Input: `reports/locales/LANG.json`, a flat object; for the sentences of the analysis its own catalogue
(`bench/records/sentences_en.py`) and `reports/locales/sentences.LANG.json` with the same codes. Output: texts.
Does not: guess a language. A sentence of a newer analysis whose code is not known stays as the analysis wrote it.

1. All catalogues have the same keys with the same placeholders (tested).
2. A text is plain; markup belongs to the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from bench.records.sentences import ENGLISH, render, worded

LOCALES = Path(__file__).parent / "locales"
LANGUAGES = ("en", "zh-CN")


@lru_cache(maxsize=4)
def catalogue(lang: str) -> dict[str, str]:
    """All messages of `lang`. Raises ValueError for a language that has no catalogue."""
    if lang not in LANGUAGES:
        raise ValueError(f"no report language {lang!r}; there are {', '.join(LANGUAGES)}")
    return json.loads((LOCALES / f"{lang}.json").read_text(encoding="utf-8"))


# Remarks of the CSV check and of repeats, which are plain texts in analysis.json, as patterns with their Chinese text.
_CV = r"CV (\S+) from (\d+) runs \(95 % interval (\S+) to (\S+)\)"
_CV_ZH = r"\2 次运行的 CV 为 \1（95 % 区间 \3 至 \4）"
REMARKS = {
    "zh-CN": (
        (r"(.+): no (\S+) row in the CSV, the ledger has (\d+)", r"\1：CSV 中没有 \2 行，账本有 \3 个"),
        (r"(.+): the CSV has (\d+) (\S+) rows of a stage the ledger lacks", r"\1：CSV 有账本中没有的阶段的 \2 个 \3"),
        (r"(.+): the CSV counts (\d+) requests, the ledger (\d+)", r"\1：CSV 计 \2 个请求，账本 \3 个"),
        (r"(.+): the CSV counts (\d+) failures, the ledger (\d+)", r"\1：CSV 计 \2 个失败，账本 \3 个"),
        (r"(.+): the CSV's average is (\S+) ms, the ledger's (\S+) ms", r"\1：CSV 的均值为 \2 ms，账本为 \3 ms"),
        (r"(.+): the CSV's (\S+) is (\S+) ms, the ledger's (\S+) ms", r"\1：CSV 的 \2 为 \3 ms，账本为 \4 ms"),
        (r"(\S+) is not a Locust stats table.*", r"\1 不是 Locust 的统计表"),
        (r"(\S+) cannot be read \((\w+)\)", r"\1 无法读取（\2）"),
        (r"(\S+): unreadable row (.*)", r"\1：无法读取的行 \2"),
        (r"there is no locust_stats.csv in the folder", r"文件夹中没有 locust_stats.csv"),
        (r"beyond capacity: the value grows .*", r"超出容量：该值随阶段时长增长，重复说明不了什么"),
        (r"a repeat is INVALID; see its reasons", r"有一次重复为 INVALID；见其原因"),
        (r"only (\d+) of (\d+) repeats have .*", r"\2 次重复中只有 \1 次有有限且可打印的值"),
        (r"(\d+) of (\d+) repeats are valid; see .*", r"\2 次重复中 \1 次有效；见其余各次的原因"),
        (r"(\d+) of (\d+) repeats are valid and have .*", r"\2 次重复中 \1 次有效且有有限、可打印的值"),
        (_CV + r"; same seed: .*", _CV_ZH + "；种子相同：到达与长度相同"),
        (_CV + r"; 15 % was attainable .*", _CV_ZH + "；在此负载下 15 % 可以达到（需 CV 不超过 4.5 %）"),
        (_CV + r"; 15 % was not attainable .*", _CV_ZH + "；在此负载下 15 % 达不到（需 CV 不超过 4.5 %）"),
    )
}
LISTED = 4  # items of a list inside a sentence; a sweep of 40 rates would fill the page


@lru_cache(maxsize=4)
def sentences(lang: str) -> Mapping[str, str]:
    """The sentences of the analysis in `lang`, by code."""
    if lang == "en":
        return ENGLISH
    return json.loads((LOCALES / f"sentences.{lang}.json").read_text(encoding="utf-8"))


def coded(text: str) -> Markup:
    """The text with what stands between backticks as code; all else is escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick of its own
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )


class Words:
    """Looks up messages; an unknown key is a bug and raises KeyError."""

    def __init__(self, lang: str = "en") -> None:
        self.lang = lang
        self._messages = catalogue(lang)

    def __call__(self, key: str, **values: object) -> str:
        text = self._messages[key]
        return worded(text, values) if values else text

    def known(self, key: str, fallback: str) -> str:
        """The message of `key`, or `fallback` when the catalogue has none (free-form ids of the analysis)."""
        return self._messages.get(key, fallback)

    def said(self, code: str, params: Mapping[str, Any] | None, text: str) -> str:
        """A sentence of the analysis in this language; `text`, the analysis' own, where it has no code."""
        if not code:
            return text
        try:
            return render(code, self._plain(dict(params or {})), sentences(self.lang))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError):  # of a newer analysis, or edited by hand
            return text

    def remark(self, text: str) -> str:
        """A remark of the CSV check in this language; as it is where it is not known."""
        part = re.fullmatch(r"(\d+) of (\d+) repeats are valid; (CV .*)", text)
        if part and self.lang == "zh-CN":
            return f"{part[2]} 次重复中 {part[1]} 次有效；{self.remark(part[3])}"
        for pattern, words in REMARKS.get(self.lang, ()):
            found = re.fullmatch(pattern, text)
            if found:
                return found.expand(words)
        return text

    def _plain(self, value: Any, name: str = "") -> Any:
        """Parameters with long lists cut and names of this language in place of ids."""
        if isinstance(value, Mapping):
            if "items" in value:
                items = [self._plain(item, name) for item in value["items"]]
                if len(items) > LISTED + 1:
                    more = {"code": "text", "params": {"text": f"… (+{len(items) - LISTED})"}}
                    items = [*items[:LISTED], more]
                return {**value, "items": items}
            found = {k: self._plain(v, k) for k, v in value.items()}
            if self.lang != "en" and "problem_id" in found:
                found["message"] = self.known(f"problem_{found['problem_id']}", str(found.get("message", "")))
            return found
        if name == "shape" and self.lang != "en" and isinstance(value, str):
            return self.known(f"shape_{value}", value)
        if name == "listed" and isinstance(value, str):
            return self.remark(value)
        if self.lang != "en" and name == "metric" and isinstance(value, str):
            return self.known(f"metric_{value.removesuffix('_s').removesuffix('_qps')}", value)
        return value
