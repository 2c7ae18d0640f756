"""What the run of a service does not say: keys of its config that were left to defaults of this tool.

Input: `run.json` as a dict. Output: yes or no per key; a config with some keys changed.
Does not: know what the service runs with.
"""

from __future__ import annotations

from typing import Any


def is_ours(run: dict[str, Any]) -> bool:
    """The service was the embedded engine, also in virtual time: it runs with the config."""
    return bool(run.get("simulated") or ((run.get("config") or {}).get("engine") or {}).get("embedded"))


def origin_of(run: dict[str, Any], key: str) -> str:
    """Where the value of a key came from; `default` when nobody gave it."""
    return (run.get("config_origin") or {}).get(key, "default")


def untold(run: dict[str, Any], key: str) -> bool:
    """A service runs with its own value of this key, and nobody has said which; False where no origin is recorded."""
    return not is_ours(run) and bool(run.get("config_origin")) and origin_of(run, key) == "default"


def with_settings(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A copy of the config with other values of `section.name` keys."""
    made = {section: dict(value) if isinstance(value, dict) else value for section, value in config.items()}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        made.setdefault(section, {})[name] = value
    return made
