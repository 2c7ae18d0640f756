"""One safe line of text from whatever a server or the network said.

Input: text or bytes, and the secrets of this run. Output: one line of at most 200 characters.
Does not: know where the text goes; every text that leaves `bench/client` passes here.

1. No secret, and no run of four or more characters of it, comes out; nor six or more characters of it written in
   base64 (at any of the three alignments, either alphabet), in hex, percent-quoted or backwards.
2. No control character comes out (a terminal or a CSV must not be steered by a server).
3. The result is never longer than the limit.
"""
from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import quote

LIMIT = 200
HIDDEN = "[hidden]"
# What is read of the input at most: patterns below are linear, but an error body can be megabytes.
SCANNED = 20_000

_BEARER = re.compile(r"(?i)\b(bearer|basic|token)\s+(?=[^\s,;\"']*[\d_.\-*])[^\s,;\"']{6,}")
# `key_error` and `pk-fields` are words; with a digit in them they are keys.
_KEY_SHAPED = re.compile(
    r"\b(?:(?:sk|hf|gsk|xai|nvapi|tgp|pplx)[-_][\w\-*.]{3,}|(?:pk|rk|ak|key)[-_](?=[\w\-*.]*\d)[\w\-*.]{6,})", re.I
)
_JWT = re.compile(r"\beyJ[\w-]{6,}(?:\.[\w-]+)*")
_ASSIGNED = re.compile(
    r"(?i)((?:api[_-]?key|apikey|access[_-]?token|secret|password|authorization)[\"']?\s*[=:]\s*[\"']?)"
    r"(?!bearer\b|basic\b|\[)[^\s\"'&,;}]{4,}"
)
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]+@")
_RUN = re.compile(r"[A-Za-z0-9_+/=.\-]{4,}")
_CODED = re.compile(r"[A-Za-z0-9_+/=.%\-]{6,}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]+")
_STEERS = re.compile(r"[\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_SPACES = re.compile(r"\s{2,}")


def json_text(document: Any, indent: int | None = None) -> str:
    """Return `document` as JSON for a terminal: control characters that JSON lets pass are written as escapes."""
    text = json.dumps(document, ensure_ascii=False, indent=indent)
    return _STEERS.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def redact(text: str | bytes, secrets: Iterable[str] = (), limit: int = LIMIT) -> str:
    """Return `text` as one line without secrets or control characters, cut to `limit` characters."""
    if isinstance(text, bytes):
        text = text[:SCANNED].decode("utf-8", "replace")
    text = text[:SCANNED]
    for secret in secrets:
        if len(secret) >= 4:
            text = _hide(text, secret)
    text = _CONTROL.sub(" ", text)
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    text = _KEY_SHAPED.sub(HIDDEN, text)
    text = _JWT.sub(HIDDEN, text)
    text = _SPACES.sub(" ", text).strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


# So many characters of another form of the secret in one place are hidden.
_GRAM = 6


def _hide(text: str, secret: str) -> str:
    """Replace the secret and every run of characters that is a part of it (servers echo `abcd***wxyz`)."""
    text = text.replace(secret, HIDDEN)
    grams, coded, hexed = _grams(secret)

    def swap(match: re.Match[str]) -> str:
        run = match.group()
        core = run.strip(".-=/")
        part = len(core) >= 4 and core in secret
        holds = any(run[i : i + 8] in grams for i in range(len(run) - 7))
        return HIDDEN if part or holds else run

    def swap_coded(match: re.Match[str]) -> str:
        run = match.group()
        small = run.lower()
        spots = range(len(run) - _GRAM + 1)
        holds = any(run[i : i + _GRAM] in coded or small[i : i + _GRAM] in hexed for i in spots)
        return HIDDEN if holds else run

    return _RUN.sub(swap, _CODED.sub(swap_coded, text))


@lru_cache(maxsize=64)
def _grams(secret: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the pieces by which a secret is known: of itself, of forms that keep case, of forms that do not."""
    raw = secret.encode("utf-8", "replace")
    exact = [secret[::-1]]
    for before in range(3):
        # The first characters of a later alignment hold bits of what stands before it, the last of what follows.
        whole = base64.b64encode(b"\0" * before + raw).decode("ascii")
        form = whole[(0, 2, 3)[before] : (before + len(raw)) * 8 // 6]
        exact += [form, form.replace("+", "-").replace("/", "_")]
    small = [raw.hex(), "".join(f"%{byte:02x}" for byte in raw), quote(secret, safe="", errors="replace").lower()]
    # What quoting leaves as it was is the secret itself: its case counts, and the rule for its own pieces holds.
    plain = secret.lower()
    return (
        frozenset(_pieces(secret, 8)),
        frozenset(piece for form in exact for piece in _pieces(form, _GRAM)),
        frozenset(piece for form in small for piece in _pieces(form, _GRAM) if piece not in plain),
    )


def _pieces(text: str, length: int) -> set[str]:
    return {text[i : i + length] for i in range(len(text) - length + 1)}
