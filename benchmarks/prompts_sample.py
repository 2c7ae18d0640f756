"""Writes configs/prompts-sample.jsonl: fifty requests of our own words, to show the format of `loadgen.prompts_file`.

`python -m benchmarks.prompts_sample`. Seeded: the same file each time. Single questions under a common system prompt,
dialogs of several turns, plain texts, a few in Chinese; some lines say their output limit, class, and body fields.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "configs" / "prompts-sample.jsonl"
SYSTEM = (
    "You answer questions of travellers at the information desk of a harbour. Ferries leave from four piers. Say the "
    "pier, the time and the price, in this order, and nothing that the traveller did not ask for. When you do not know "
    "the answer, say so and name the desk that does. Prices are in whole coins. Children under six travel free. Dogs "
    "need a ticket, cats do not. Bicycles go on the lower deck and have to be there ten minutes before the ferry "
    "leaves. In a storm no ferry leaves, and tickets stay valid for a week."
)
SYSTEM_ZH = "你是港口问询处的工作人员。渡轮从四个码头出发。请依次回答码头、时间和票价，不要说旅客没有问到的内容。"
PLACES = ("Northisle", "Saltmark", "Green Point", "Oldharbour", "the lighthouse", "Seal Bay")
PLACES_ZH = ("北岛", "盐滩", "绿岬", "老港", "灯塔")
WITH_ZH = ("一只狗", "自行车", "皮划艇")
WITH = ("a dog", "two children", "a bicycle", "a large suitcase", "a group of nine", "a kayak")
WHEN = ("this morning", "after lunch", "tonight", "on Sunday", "tomorrow at dawn")
TASKS = (
    "Write a short notice for the pier: the ferry to {place} leaves {late} minutes late {when}.",
    "List {late} things that a traveller with {what} should know before a trip to {place}.",
    "Turn this into one friendly sentence: no {what} on the upper deck, not even {when}.",
)


def rows() -> list[dict[str, Any]]:
    """The fifty requests."""
    draw = random.Random(20261130)
    out: list[dict[str, Any]] = []
    trips = [(place, when, what) for place in PLACES for when in WHEN for what in WITH]
    for place, when, what in draw.sample(trips, 26):
        ask = f"When does the next ferry to {place} leave {when}, and may I bring {what}?"
        out.append({"messages": [_said("system", SYSTEM), _said("user", ask)], "max_tokens": draw.randrange(24, 96, 8)})
    for _ in range(10):
        place, what = draw.choice(PLACES), draw.choice(WITH)
        turns = [_said("system", SYSTEM), _said("user", f"I want to go to {place} with {what}. Which pier?")]
        for _ in range(draw.randint(1, 3)):
            at = f"{draw.randint(6, 21)}:{draw.randrange(0, 60, 5):02d}"
            turns.append(_said("assistant", f"Pier {draw.randint(1, 4)}, at {at}."))
            turns.append(_said("user", f"And {draw.choice(WHEN)}, back from {draw.choice(PLACES)}?"))
        out.append({"messages": turns})
    for place, when, what in draw.sample(trips, 8):
        text = draw.choice(TASKS).format(place=place, what=what, when=when, late=draw.randint(3, 30))
        out.append({"prompt": text, "max_tokens": 128, "extra_body": {"temperature": 0}})
    for place, what in draw.sample([(place, what) for place in PLACES_ZH for what in WITH_ZH], 6):
        ask = f"去{place}的下一班渡轮几点开？可以带{what}吗？"
        out.append({"messages": [_said("system", SYSTEM_ZH), _said("user", ask)], "max_tokens": 48})
    draw.shuffle(out)
    for number, row in enumerate(out, 1):
        row["id"] = f"sample-{number:02d}"
        row["request_class"] = "task" if "prompt" in row else "chat"
    return out


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def text() -> str:
    """The file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
