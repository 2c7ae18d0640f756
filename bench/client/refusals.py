"""What a refusal says: HTTP status, fields and body, or an error object, to a `Fault`.

Input: status, fields (lower-case names), body bytes; or a decoded error object that came with status 200.
Output: `Fault` with code, one redacted line, and the wait that the service asked for.
Does not: read sockets, or believe a body more than its status for 429, 503, 529 and 5xx.

1. A refusal is classed by its body as well as by its status: gateways answer 400 for a wrong key or an unknown model.
2. No body raises, and a hostile one costs milliseconds: only its first 4,000 characters are searched.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from bench.client.codes import Fault
from bench.client.redact import redact

_MODEL_CODES = {"model_not_found", "invalid_model", "unknown_model", "modelnotfound", "model_not_available",
                "deploymentnotfound", "model_not_supported", "unsupported_model"}  # fmt: skip
_KEY_CODES = {"invalid_api_key", "invalid_key", "authentication_error", "invalid_authentication",
              "unauthorized", "missing_api_key", "expired_api_key", "invalid_token"}  # fmt: skip
_QUOTA_CODES = {"insufficient_quota", "quota_exceeded", "insufficient_balance", "billing_hard_limit_reached",
                "insufficient_user_quota", "credit_balance_too_low"}  # fmt: skip
_CONTEXT_CODES = {"context_length_exceeded", "string_above_max_length", "prompt_too_long"}
_PARAM_CODES = {"unknown_parameter", "unsupported_parameter", "extra_forbidden", "unrecognized_parameter"}

_CONTEXT_TEXT = re.compile(
    r"context (?:length|window|size)|maximum (?:model )?(?:context|length)|prompt is too long|too many tokens|"
    r"max(?:imum)?_?(?:model_len|seq_len|tokens|completion_tokens).{0,60}(?:exceed|too large|at most|less than)|"
    r"(?:exceed|too large).{0,60}(?:context|max_model_len|n_ctx)",
    re.I,
)
_PARAM_TEXT = re.compile(
    r"extra inputs are not permitted|extra fields not permitted|unrecognized (?:request )?(?:argument|parameter|field)|"
    r"unknown (?:argument|parameter|field|name)|unexpected (?:keyword|field|property)|unsupported parameter|"
    r"additional properties are not allowed|"
    r"(?:parameter|argument|field|property|option)\b.{0,60}"
    r"(?:not supported|not allowed|not permitted|unsupported|unexpected)",
    re.I,
)
_MODEL_TEXT = re.compile(
    r"\bmodel\b.{0,120}?(?:not found|does ?n.t exist|does not exist|not exist|no such|unknown|not supported|"
    r"not available|unavailable|not served|not loaded|is invalid|not valid)|"
    r"(?:unknown|no such|invalid|unsupported|non-?existent|could not find|cannot find|not a valid)\s+model|"
    r"no (?:available )?channel for .{0,40}model|模型.{0,40}(?:不存在|无可用|未找到|不支持)|"
    r"\Amodel: ?[^\s,;]{1,120}\Z",  # Anthropic's `not_found_error` for a model
    re.I | re.S,
)
_KEY_TEXT = re.compile(
    r"(?:invalid|incorrect|wrong|missing|expired|malformed|unknown|disabled|revoked|no|provide an?|without an?)\s+"
    r"(?:valid\s+)?(?:api[ _-]?keys?|access keys?|auth(?:entication|orization)?|credentials?|bearer)\b|"
    r"api[ _-]?keys?\b.{0,40}(?:invalid|incorrect|not valid|expired|disabled|missing|required|not found|revoked)|"
    r"authentication (?:failed|error|required)|\bunauthori[sz]ed\b|not authenticated|"
    r"无效的令牌|令牌.{0,10}(?:无效|过期|不可用)|密钥.{0,10}(?:无效|错误|过期)",
    re.I,
)
_OAUTH_TEXT = re.compile(r"\boauth|insufficient[_ ]scope|missing scopes?|access token|\bid[_ ]token\b|\bjwt\b", re.I)
_OAUTH_FIELD = re.compile(r"\berror\s*=|\bscope\s*=|authorization_uri|resource_metadata|oauth", re.I)
_QUOTA_TEXT = re.compile(
    r"exceeded your current quota|insufficient (?:quota|balance|credit)|额度(?:不足|已用)|余额不足", re.I
)
_BUSY_TEXT = re.compile(
    r"overload|too many (?:requests|concurrent)|rate.?limit|queue (?:is )?full|capacity|busy|try again later|throttl",
    re.I,
)
# How much of a message is searched for words: the reason stands at its start, the rest is echo.
_MESSAGE_READ = 4_000
_TAGS = re.compile(r"<(?:script|style)\b[^<]{0,5000}</(?:script|style)>|<[^<>]{0,500}>")


def error_parts(body: bytes | Any) -> tuple[str, set[str]]:
    """Return the message of an error body and the set of its machine words (code, type, status), lower case.

    `body`: raw bytes (JSON, HTML or text) or an already decoded JSON value.
    """
    obj: Any = body
    if isinstance(body, (bytes, bytearray, memoryview)):
        try:
            obj = orjson.loads(body)
        except orjson.JSONDecodeError:
            text = bytes(body[:20_000]).decode("utf-8", "replace")
            return (_TAGS.sub(" ", text) if "<" in text else text), set()
    words: set[str] = set()
    message = _message_of(obj, words, 0)
    if not message and obj not in (None, {}, []):
        message = str(obj)[:2000]
    return message, words


def _message_of(obj: Any, words: set[str], depth: int) -> str:
    """Find the human sentence in the many shapes of an error object; collect its codes on the way."""
    if isinstance(obj, str):
        return obj
    if depth > 6:
        return ""
    if isinstance(obj, list):
        return "; ".join(filter(None, (_message_of(item, words, depth + 1) for item in obj[:5])))
    if not isinstance(obj, dict):
        return ""
    for key in ("code", "type", "status", "reason"):
        value = obj.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            words.add(str(value).lower())
    for key in ("error", "message", "detail", "msg", "error_description", "errors", "error_msg", "title"):
        found = _message_of(obj.get(key), words, depth + 1)
        if found:
            return found
    return ""


def classify(
    http_status: int, headers: Mapping[str, str], body: bytes, *, secrets: Iterable[str] = ()
) -> Fault:
    """Return the fault of an answer whose status is not 200..299, by status, fields and body.

    `headers`: lower-case names. `body`: as much of it as was kept (64 KiB is plenty).
    """
    message, words = error_parts(body)
    message = message[:_MESSAGE_READ]
    detail = redact(message or f"HTTP {http_status}", secrets)
    wait = retry_after(headers)
    if 300 <= http_status < 400:
        return Fault("CH-REDIRECT", redact(f"to {_plain_url(headers.get('location', ''))}", secrets), wait)
    return Fault(_code_of(http_status, headers, message, words), detail, wait)


def _code_of(status: int, headers: Mapping[str, str], message: str, words: set[str]) -> str:
    if status in (429, 503, 529):
        if status == 429 and (words & _QUOTA_CODES or _QUOTA_TEXT.search(message)):
            return "SV-QUOTA"
        return f"SV-{status}"
    if status >= 500:
        return {502: "CH-502", 504: "CH-504"}.get(status, "SV-500")
    if status in (401, 403):
        challenge = headers.get("www-authenticate", "")
        if _OAUTH_FIELD.search(challenge) or _OAUTH_TEXT.search(message) or "insufficient_scope" in words:
            return "CH-OAUTH"
        if status == 403 and _model_words(message, words) and not _KEY_TEXT.search(message):
            return "CH-MODEL"
        return f"CH-{status}"
    if status in (402, 407):
        return f"CH-{status}"
    # Order: a context message also names the model, a model message may also name a parameter.
    if words & _CONTEXT_CODES or _CONTEXT_TEXT.search(message):
        return "SC-CONTEXT"
    if words & _KEY_CODES or _KEY_TEXT.search(message):
        return "CH-KEY"
    if words & _PARAM_CODES or _PARAM_TEXT.search(message):
        return "SC-PARAM"
    if _model_words(message, words):
        return "CH-MODEL"
    return "CH-404" if status == 404 else "SC-400"


def _model_words(message: str, words: set[str]) -> bool:
    return bool(words & _MODEL_CODES or _MODEL_TEXT.search(message))


def classify_error_object(error: Any, *, streamed: bool, secrets: Iterable[str] = ()) -> Fault:
    """Return the fault of an error object that came with status 200: as an event, or as the whole body."""
    message, words = error_parts(error)
    message = message[:_MESSAGE_READ]
    detail = redact(message or "an error object without a message", secrets)
    if not streamed:
        return Fault("SC-ERROR-BODY", detail)
    busy = words & {"429", "503", "529", "overloaded_error", "rate_limit_error", "rate_limit_exceeded"}
    return Fault("SV-STREAM-BUSY" if busy or _BUSY_TEXT.search(message) else "SV-STREAM", detail)


def _plain_url(text: str) -> str:
    """A location without its query: queries carry tokens and tracking."""
    return text.partition("?")[0].partition("#")[0] or "nowhere (no Location field)"


_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s|us|µs|d)?")
_SPAN_S = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WAIT_FIELDS = ("retry-after-ms", "retry-after", "x-retry-after-ms", "x-retry-after", "x-ratelimit-retry-after",
                "x-ratelimit-reset-after", "ratelimit-reset", "x-ratelimit-reset-requests",
                "x-ratelimit-reset-tokens", "x-ratelimit-reset")  # fmt: skip
# A wait of more than a day is a date or a mistake, not advice to a load test.
WAIT_MAX_S = 86_400.0


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds the service asked to wait, from Retry-After or a gateway's own field; None when absent.

    Understood: seconds, milliseconds by field name, `1m30s`, an HTTP date or an epoch (both against the Date field).
    """
    names = [name for name in _WAIT_FIELDS if name in headers]
    names += [name for name in headers if name not in names and re.search(r"retry.{0,12}(after|in|ms)", name)]
    for name in names:
        wait = _wait_s(name, headers[name].strip(), headers.get("date", ""))
        if wait is not None and 0.0 <= wait <= WAIT_MAX_S:
            return wait
    return None


def _wait_s(name: str, text: str, date: str) -> float | None:
    if not text or len(text) > 64:
        return None
    if text[:1].isalpha():
        try:
            return (parsedate_to_datetime(text) - parsedate_to_datetime(date)).total_seconds()
        except (TypeError, ValueError, IndexError):
            return None
    pieces = _SPAN.findall(text.replace(" ", ""))
    if not pieces or "".join(number + unit for number, unit in pieces) != text.replace(" ", ""):
        return None
    wait = sum(float(number) * _SPAN_S[unit] for number, unit in pieces)
    if name.endswith("ms") and len(pieces) == 1 and not pieces[0][1]:
        return wait / 1000.0
    if wait > 1e9:
        try:
            wait -= parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError, IndexError):
            return None
    return wait
