"""Faults that the engine plays on purpose, so that clients can be tested against a server whose truth is known.

Input: rules (JSON objects of `POST /debug/faults`). Output: the rule that applies to a request, or None.
Does not: touch sockets; `engine.http_stream` plays the rule.

Kinds and what the client sees:
- `status`: an error status at once (`status`, `retry_after_s`, `html: true` for a proxy's page); nothing is scheduled.
- `disconnect`: the connection closes (`reset: true`: by RST) before any byte of the answer.
- `slow_first_byte`: the header block comes `delay_s` late; the engine works meanwhile.
- `stall`: after `after_tokens` tokens nothing is written for `duration_s` (absent: until the client leaves), then
  all held bytes come at once.
- `cut`: after `after_tokens` tokens the connection ends inside the chunked answer (`reset: true`: by RST).
- `malformed`: after `after_tokens` tokens one event's JSON is broken; the stream goes on.
- `error_event`: after `after_tokens` tokens an error object comes as an event inside the 200 answer, then the end.
- `no_done`: the stream ends well, but without `[DONE]`.

Every rule has `probability` (default 1), `count` (how often at most; absent: no limit) and `seed` (default 0).
"""
from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

KINDS = ("status", "disconnect", "slow_first_byte", "stall", "cut", "malformed", "error_event", "no_done")
IN_STREAM = ("stall", "cut", "malformed", "error_event", "no_done")


@dataclass(slots=True)
class Fault:
    """One rule."""

    kind: str
    probability: float = 1.0
    count: int | None = None
    status: int = 503
    retry_after_s: float | None = None
    html: bool = False
    reset: bool = False
    delay_s: float = 1.0
    duration_s: float | None = None
    after_tokens: int = 1
    seed: int = 0
    fired: int = 0
    _random: random.Random = field(default_factory=random.Random, repr=False)


_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,), "probability": (int, float), "count": (int,), "status": (int,), "retry_after_s": (int, float),
    "html": (bool,), "reset": (bool,), "delay_s": (int, float), "duration_s": (int, float), "after_tokens": (int,),
    "seed": (int,),
}


def parse_fault(data: Any) -> Fault:
    """The rule in a JSON object; raises ValueError with what was found and what is allowed."""
    if not isinstance(data, dict):
        raise ValueError(f"a fault is an object, found {type(data).__name__}")
    for name, value in data.items():
        if name not in _TYPES:
            raise ValueError(f"fault key {name!r} is unknown; known keys: {', '.join(_TYPES)}")
        optional = name in ("count", "retry_after_s", "duration_s")
        if not (value is None and optional) and (
            not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name])
        ):
            raise ValueError(f"fault key {name} is {value!r}, not of type {_TYPES[name][-1].__name__}")
    fault = Fault(**data) if "kind" in data else Fault("")
    if fault.kind not in KINDS:
        raise ValueError(f"fault kind {fault.kind!r} is unknown; kinds: {', '.join(KINDS)}")
    if not 0 <= fault.probability <= 1:
        raise ValueError(f"probability is {fault.probability}; it must be between 0 and 1")
    if not 400 <= fault.status <= 599:
        raise ValueError(f"status is {fault.status}; it must be between 400 and 599")
    for name in ("count", "retry_after_s", "delay_s", "duration_s", "after_tokens"):
        value = getattr(fault, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}; it must not be negative")
    fault._random = random.Random(fault.seed)
    return fault


class Faults:
    """The active rules; the first that applies to a request is played."""

    def __init__(self) -> None:
        self._rules: list[Fault] = []

    def replace(self, data: Any) -> None:
        """Put the rules of `data` (an object, a list, or {"faults": list}) in place of the active ones."""
        if isinstance(data, dict) and "faults" in data:
            data = data["faults"]
        rules = data if isinstance(data, list) else [data]
        self._rules = [parse_fault(rule) for rule in rules]

    def draw(self, *, streamed: bool) -> Fault | None:
        """The rule for a new request; counts it as fired."""
        for rule in self._rules:
            if rule.kind in IN_STREAM and not streamed:
                continue
            if rule.count is not None and rule.fired >= rule.count:
                continue
            if rule.probability >= 1 or rule._random.random() < rule.probability:
                rule.fired += 1
                return rule
        return None

    def listing(self) -> list[dict[str, Any]]:
        """The active rules with how often each fired."""
        return [{item.name: getattr(rule, item.name) for item in fields(rule) if not item.name.startswith("_")}
                for rule in self._rules]
