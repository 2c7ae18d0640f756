"""One line of a file of prompts: what it holds, where its text lies in it, and what is wrong with it.

Input: the bytes of a line, and what the run's endpoint can send. Output: `PromptRow`, or `PromptError`.
Does not: keep the text (a worker reads it again when its arrival is near), or know other lines.

1. The prompt's JSON is sent as the author wrote it, byte for byte; so a row says where it begins and ends.
2. A complaint never quotes a prompt: it is the user's data. It names keys, and values of keys that hold numbers.
3. Tokens are estimated as UTF-8 bytes / 4, rounded up: about right for English (4 letters a token) and for Chinese
   (3 bytes a character, 0.75 tokens); a template of the service and parts that are no text are not counted.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from json.decoder import scanstring
from typing import Any, NamedTuple

from bench.config.checks_target import PLANNED_FIELDS
from bench.config.json_body import ALLOWED, body_fault, shown_place
from bench.config.schema import MAX_TOKENS
from bench.workload.labels import refuse_key
from bench.workload.trace_rows import TraceError

KEYS = (
    "prompt", "messages", "max_tokens", "output_tokens", "input_tokens", "tenant", "request_class", "id", "extra_body",
)  # fmt: skip
MAX_NAME = 100  # characters of a tenant or a class
MAX_ID = 200
BYTES_PER_TOKEN = 4  # of the estimate
ECHO = 12  # characters in a row that are no chance
SYSTEM_ROLES = ("system", "developer")
ANTHROPIC_ROLES = ("user", "assistant")


class PromptError(ValueError):
    """The file of prompts cannot be used; the message names file and line."""


class PromptRow(NamedTuple):
    """One line. Spans are (first byte, number of bytes) within the line; (0, 0) when there is none."""

    messages: bool  # the span holds a list of messages, not one text
    span: tuple[int, int]
    extra: tuple[int, int]
    content: bytes  # 8 bytes that stand for the prompt
    text_bytes: int
    input_tokens: int | None
    max_tokens: int | None
    tenant: str
    request_class: str
    id: str


def estimate_tokens(text_bytes: int) -> int:
    """Tokens of a text of so many UTF-8 bytes, at least one."""
    return max(1, -(-text_bytes // BYTES_PER_TOKEN))


def prompt_text(value: Any) -> tuple[str, bool]:
    """(all text of a prompt or of its messages, joined by newlines; whether there is nothing but text)."""
    if isinstance(value, str):
        return value, True
    parts: list[str] = []
    whole = True
    for message in value:
        content = message.get("content")
        if isinstance(content, str):
            parts.append(content)
            continue
        whole = whole and isinstance(content, list)
        for part in content or ():
            text = part.get("text")
            if isinstance(text, str):
                parts.append(text)
            else:
                whole = False
    return "\n".join(parts), whole


def echoes(detail: str, raw: bytes) -> bool:
    """Whether a message of a service holds a part of the prompt whose JSON is `raw`: services show what they refuse."""
    value = json.loads(raw)
    words = " ".join(prompt_text(value)[0].split())
    if len(words) < ECHO:
        return words in " ".join(detail.split())
    sources = (words, raw.decode("utf-8"), json.dumps(value), json.dumps(value, ensure_ascii=False))
    message = " ".join(detail.split())
    return any(message[i : i + ECHO] in source for i in range(len(message) - ECHO + 1) for source in sources)


def read_row(
    line: bytes, *, endpoint: str = "chat", text_only: bool = False, keys: frozenset[str] = frozenset()
) -> PromptRow:
    """The row of a line without its line break. Raises PromptError (what is wrong, what is allowed; no place).

    `endpoint` as `target.endpoint`; `text_only`: parts that are no text cannot be sent; `keys` as in `refuse_key`.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"holds bytes that are no UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None
    found = _members(text)
    unknown = [key for key in found if key not in KEYS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], KEYS, 1)
        raise PromptError(
            f"has the key {_shown(unknown[0])}{f' ({near[0]}?)' if near else ''}; allowed are {', '.join(KEYS)}; other "
            "fields of the request body go into extra_body"
        )
    kinds = [key for key in ("prompt", "messages") if found.get(key, (None,))[0] is not None]
    if len(kinds) != 1:
        what = "has prompt and messages" if kinds else "has neither prompt nor messages"
        raise PromptError(f"{what}; exactly one of them stands in a line")
    value, start, end = found[kinds[0]]
    _check_prompt(value) if kinds == ["prompt"] else _check_messages(value, endpoint)
    if endpoint == "messages" and kinds == ["messages"]:  # written anew without the messages of the system
        _check_sendable(value, "messages")
    plain, whole = prompt_text(value)
    if text_only and not whole:
        raise PromptError("has a content that is not text; the embedded engine takes text only")
    try:
        text_bytes = len(plain.encode("utf-8"))
    except UnicodeEncodeError:
        raise PromptError("holds half of a surrogate pair (a \\ud8.. escape alone), which is no text") from None
    if not plain.strip() and whole:
        raise PromptError("has no text in its prompt; a service refuses that")
    span = _bytes_of(text, start, end)
    return PromptRow(
        messages=kinds == ["messages"],
        span=span,
        extra=_extra(found, text),
        content=hashlib.blake2b(line[span[0] : sum(span)], digest_size=8).digest(),
        text_bytes=text_bytes,
        input_tokens=_count(found, "input_tokens"),
        max_tokens=_limit(found),
        tenant=_without_key(_name(found, "tenant"), "tenant", keys),
        request_class=_without_key(_name(found, "request_class"), "request_class", keys),
        id=_without_key(_id(found), "id", keys),
    )


_blanks = re.compile(r"[ \t\n\r]*").match


def _no_constant(name: str) -> Any:
    raise PromptError(f"holds {name}, which is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _members(text: str) -> dict[str, tuple[Any, int, int]]:
    """Key -> (value, where its JSON begins, where it ends) of an object."""
    try:
        return _walk(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"is not JSON ({error.msg}, column {error.pos + 1}); each line is one object") from None
    except RecursionError:
        raise PromptError("is nested too deeply; each line is one object") from None
    except PromptError:
        raise
    except ValueError:  # a number of thousands of digits
        raise PromptError("is not JSON that can be read; each line is one object") from None


def _walk(text: str) -> dict[str, tuple[Any, int, int]]:
    at = _after(text, 0)
    if text[at : at + 1] != "{":
        _DECODER.decode(text)
        raise PromptError('is not a JSON object; each line is one, such as {"prompt": "..."}')
    found: dict[str, tuple[Any, int, int]] = {}
    at = _after(text, at + 1)
    while text[at : at + 1] != "}" or found:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("a key in double quotes is expected", text, at)
        key, at = scanstring(text, at + 1, True)
        at = _after(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("a colon is expected", text, at)
        start = _after(text, at + 1)
        try:
            value, at = _DECODER.scan_once(text, start)  # type: ignore[attr-defined]
        except StopIteration as error:
            raise json.JSONDecodeError("a value is expected", text, error.value) from None
        if key in found:
            raise PromptError(f"has the key {_shown(key)} twice; leave one of them")
        found[key] = (value, start, at)
        at = _after(text, at)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("a comma or the end of the object is expected", text, at)
        at = _after(text, at + 1)
    at = _after(text, at + 1)
    if at != len(text):
        raise json.JSONDecodeError("more than one value", text, at)
    return found


def _after(text: str, at: int) -> int:
    """Where the blanks from `at` on end."""
    found = _blanks(text, at)
    assert found is not None
    return found.end()


def _bytes_of(text: str, start: int, end: int) -> tuple[int, int]:
    if text.isascii():
        return start, end - start
    first = len(text[:start].encode())
    return first, len(text[start:end].encode())


def _check_prompt(value: Any) -> None:
    if not isinstance(value, str):
        raise PromptError(f"prompt is {_kind(value)}; a text stands there")


def _check_messages(value: Any, endpoint: str) -> None:
    if endpoint == "completions":
        raise PromptError(
            "has messages, and target.endpoint is completions, which takes one text; set target.endpoint to chat, or "
            "write the text as prompt"
        )
    if not isinstance(value, list) or not value:
        raise PromptError(f"messages is {_kind(value)}; a list of at least one {{role, content}} stands there")
    for place, message in enumerate(value):
        spot = f"messages[{place}]"
        if not isinstance(message, dict):
            raise PromptError(f"{spot} is {_kind(message)}; an object with role and content stands there")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise PromptError(f"{spot} has no role; a word such as system, user or assistant stands there")
        _check_content(message, spot)
    if endpoint == "messages":
        _check_anthropic(value)


def _check_content(message: dict[str, Any], spot: str) -> None:
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise PromptError(f"{spot}.content is {_kind(content)}; a text or a list of typed parts stands there")
    for place, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PromptError(
                f'{spot}.content[{place}] has no type; a part is an object such as {{"type": "text", "text": "..."}}'
            )


def _check_anthropic(messages: list[dict[str, Any]]) -> None:
    """Leading system messages become the field `system`; whatever else that endpoint has no place for is refused."""
    first = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM_ROLES), len(messages))
    if first == len(messages):
        raise PromptError("has system messages only, and target.endpoint messages needs one of a user")
    for place, message in enumerate(messages):
        if message["role"] in SYSTEM_ROLES and (place < first):
            if message.get("content") is None:
                raise PromptError(f"messages[{place}] of the system has no content")
        elif message["role"] not in ANTHROPIC_ROLES:
            where = "after others" if message["role"] in SYSTEM_ROLES else "which it does not know"
            raise PromptError(
                f"messages[{place}] has role {_shown(message['role'])} {where}; target.endpoint messages takes system "
                "first, then user and assistant: move it, or set target.endpoint to chat"
            )


def _extra(found: dict[str, tuple[Any, int, int]], text: str) -> tuple[int, int]:
    value, start, end = found.get("extra_body", (None, 0, 0))
    if value is None:
        return 0, 0
    if not isinstance(value, dict):
        raise PromptError(f"extra_body is {_kind(value)}; an object of body fields stands there")
    for key in value:
        if key in PLANNED_FIELDS:
            raise PromptError(
                f"extra_body sets {key}, which the plan sets; take it out (max_tokens is a key of the line)"
            )
    _check_sendable(value, "extra_body")
    return _bytes_of(text, start, end) if value else (0, 0)


def _check_sendable(value: Any, root: str) -> None:
    fault = body_fault(value)
    if fault is not None:
        raise PromptError(f"{shown_place(root, fault[0])} {fault[1]}; allowed are {ALLOWED}")


def _limit(found: dict[str, tuple[Any, int, int]]) -> int | None:
    both = [key for key in ("max_tokens", "output_tokens") if found.get(key, (None,))[0] is not None]
    if len(both) == 2:
        raise PromptError("has max_tokens and output_tokens, which mean the same; leave one of them")
    return _count(found, both[0]) if both else None


def _count(found: dict[str, tuple[Any, int, int]], key: str) -> int | None:
    value = found.get(key, (None,))[0]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise PromptError(f"{key} is {_kind(value)}; a whole number of tokens stands there")
    if not 1 <= value <= MAX_TOKENS:
        raise PromptError(f"{key} is {str(value)[:40]}; it lies between 1 and {MAX_TOKENS}")
    return value


def _name(found: dict[str, tuple[Any, int, int]], key: str) -> str:
    value = found.get(key, (None,))[0]
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME or not (value == "" or value.isprintable()):
        raise PromptError(f"{key} is no printable name of at most {MAX_NAME} characters")
    return value


def _without_key(value: str, what: str, keys: frozenset[str]) -> str:
    try:
        refuse_key(value, what, keys)
    except TraceError as error:
        raise PromptError(str(error)) from None
    return value


def _id(found: dict[str, tuple[Any, int, int]]) -> str:
    value = found.get("id", (None,))[0]
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PromptError(f"id is {_kind(value)}; a text or a whole number stands there")
    value = str(value)
    if not value or len(value) > MAX_ID or not value.isprintable():
        raise PromptError(f"id is no printable text of 1 to {MAX_ID} characters")
    return value


def _kind(value: Any) -> str:
    """What a value is, without showing it; numbers are shown."""
    if value is None:
        return "missing"
    if isinstance(value, (int, float)):  # true and false too
        return json.dumps(value)[:40]
    if isinstance(value, str):
        return "a text" if value else "an empty text"
    return ("a list" if value else "an empty list") if isinstance(value, list) else "an object"


def _shown(name: str) -> str:
    return json.dumps(name[:40])
