"""The API key, and how it is kept out of everything else.

Input: the environment (with `.env`), the config's `target.api_key_file`.
Output: the key, or a `Problem` that names its length and the kind of damage, never a part of it.
Does not: log, cache, or print.

Order: BENCH_API_KEY, BENCH_API_KEY_FILE, TAOTOKEN_API_KEY, TAOTOKEN_API_KEY_FILE in the environment, then the
same four in `.env`, then target.api_key_file. An empty variable counts as not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.config.dotenv import Environment, environment
from bench.config.errors import ConfigError, Problem
from bench.config.own_machine import is_own_machine
from bench.config.schema import Config

KEY_NAMES = ("BENCH_API_KEY", "BENCH_API_KEY_FILE", "TAOTOKEN_API_KEY", "TAOTOKEN_API_KEY_FILE")
MAX_KEY_FILE_BYTES = 16_384  # a key is some hundred bytes; a larger file is another file
FIX = "put the key into BENCH_API_KEY (or TAOTOKEN_API_KEY), into .env, or into a file named by BENCH_API_KEY_FILE"

# Config keys and header names that hold secrets, compared without case, - and _.
_SECRET_NAMES = {
    "apikey",
    "xapikey",
    "key",
    "secret",
    "token",
    "accesstoken",
    "authtoken",
    "bearer",
    "password",
    "passwd",
    "authorization",
    "proxyauthorization",
    "cookie",
    "credential",
    "credentials",
    "clientsecret",
    "secretkey",
    "benchapikey",
    "taotokenapikey",
    "openaiapikey",
    "xauthtoken",
    "xgoogapikey",
    "ocpapimsubscriptionkey",
}
_SECRET_VALUE = re.compile(
    r"^\s*(bearer\s+\S{8,}|basic\s+[A-Za-z0-9+/=]{8,}|(sk|pk|hf|gsk|xai|tao|ghp|glpat)[-_][A-Za-z0-9_\-]{12,})\s*$",
    re.I,
)
_MIN_KNOWN = 8  # shorter keys are not searched for in the file: "test" would match a model name


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def is_secret_name(name: str) -> bool:
    """Whether a config key or header of that name is made to hold a secret."""
    plain = _plain(name)
    return plain in _SECRET_NAMES or plain.endswith(("apikey", "secretkey", "accesstoken", "authorization"))


def has_user(url: str) -> bool:
    """Whether an address carries a user or password (`http://user:pass@host`)."""
    try:
        return "@" in urlsplit(url).netloc
    except ValueError:
        return "@" in url


def _walk(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, value) of everything in a tree of dicts and lists, parents first."""
    stack: list[tuple[tuple[str | int, ...], Any]] = [(path, value)]
    while stack:
        spot, node = stack.pop()
        yield spot, node
        if isinstance(node, dict):
            stack += [((*spot, str(key)), child) for key, child in reversed(node.items())]
        elif isinstance(node, list):
            stack += [((*spot, index), child) for index, child in reversed(list(enumerate(node)))]


Spot = tuple[str | int, ...]


def find_secrets(data: Any, known: set[str]) -> list[tuple[Spot, Spot, str]]:
    """(path to name, path to take out, why) of every secret in a config tree; none of them shows a part of it.

    `known` holds the key of the environment, so that a copy of it is found wherever it stands.
    """
    found: list[tuple[Spot, Spot, str]] = []
    long = {key for key in known if len(key) >= _MIN_KNOWN}
    for path, value in _walk(data):
        if not path:
            continue
        name = path[-1] if isinstance(path[-1], str) else ""
        if any(key in name for key in long):
            found.append((path[:-1], path, "has the API key of the environment as the name of a key"))
        elif is_secret_name(name) and value not in (None, ""):
            size = f" of {len(value)} characters" if isinstance(value, str) else ""
            found.append((path, path, f"holds a secret{size}"))
        elif not isinstance(value, str):
            continue
        elif any(key in value for key in long):
            found.append((path, path, "holds the API key of the environment"))
        elif _SECRET_VALUE.match(value):
            found.append((path, path, f"holds what looks like a key ({len(value)} characters)"))
        elif "://" in value and has_user(value):
            found.append((path, path, "holds an address with a user or password in it"))
    return found


def damage(text: str) -> list[str]:
    """What is wrong with a key, in words without any part of it; empty when nothing is."""
    kinds: list[str] = []
    if text != text.strip():
        before, after = len(text) - len(text.lstrip()), len(text) - len(text.rstrip())
        if before:
            kinds.append(f"{before} blank character{'s' * (before > 1)} at the start")
        if after:
            kinds.append(f"{after} blank character{'s' * (after > 1)} at the end")
    inner = text.strip()
    if not inner:
        return ["nothing but blanks"]
    if "\n" in text or "\r" in text:
        kinds.append("a line break")
    if re.search(r"[ \t]", inner):
        kinds.append("a blank inside")
    if any(mark in inner for mark in "\"'`\u201c\u201d\u2018\u2019"):
        kinds.append("a quote")
    if inner.lower().startswith("bearer "):
        kinds.append("the word Bearer (it is added for you)")
    if any(ord(char) > 126 for char in inner):
        kinds.append("a character outside ASCII")
    if any(ord(char) < 32 and char not in "\t\r\n" or ord(char) == 127 for char in inner):
        kinds.append("a control character")
    return kinds


def check_key(text: str, where: str) -> str:
    """The key itself. Raises ConfigError CFG-013 that names length and kind of damage only."""
    kinds = damage(text)
    if kinds:
        raise ConfigError(
            [
                Problem(
                    "CFG-013",
                    where,
                    f"holds a key of {len(text)} characters with {', '.join(kinds)}",
                    "a key is one word of printable ASCII",
                    "copy it again without blanks, quotes and line breaks",
                )
            ]
        )
    return text


def read_key_file(path: str, where: str) -> str:
    """The key in a file; one line break at its end is part of the file, not of the key.

    No message shows the path: now and then it is the key itself, put in the wrong place.
    """

    def refuse(found: str, fix: str) -> ConfigError:
        return ConfigError(
            [Problem("CFG-014", where, f"names a file {found}", "a small text file that holds the key alone", fix)]
        )

    try:
        with open(Path(path).expanduser(), "rb") as stream:
            raw = stream.read(MAX_KEY_FILE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path; no home folder for ~
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        found = f"which cannot be read ({reason}; its path has {len(path)} characters)"
        raise refuse(found, "give the path of the file, not the key") from None
    if len(raw) > MAX_KEY_FILE_BYTES:
        raise refuse(f"which is larger than {MAX_KEY_FILE_BYTES} bytes", "name the file of the key")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise refuse("which is not text", "save it as UTF-8") from None
    text = text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")
    if text == "":
        raise refuse("which is empty", "write the key into it")
    return check_key(text, f"{where} (a file)")


def api_key(config: Config, env: Mapping[str, str] | None = None) -> str | None:
    """The API key, or None when none is given.

    env: a plain mapping; None or os.environ for the process's environment with `.env` below it.
    The embedded engine gets no key of the environment: nothing there is owed to it. A service at another machine's
    address, given in its place by --base-url, gets one as ever.
    Raises ConfigError (CFG-013, CFG-014) on a damaged key or an unusable key file.
    """
    if config.engine.embedded and is_own_machine(config.base_url):
        return None
    return api_key_from_environment(env, key_file=config.target.api_key_file)


def api_key_from_environment(env: Mapping[str, str] | None = None, *, key_file: str | None = None) -> str | None:
    """The API key by environment, then by `key_file`; None when none is given.

    Raises ConfigError (CFG-013, CFG-014) on a damaged key or an unusable key file.
    """
    where = environment(env)
    layers: list[tuple[Mapping[str, str], str]] = [(where, "environment")]
    if isinstance(where, Environment):
        layers = [(where.process, "environment"), (where.dotenv, str(where.dotenv_path or ".env"))]
    for values, label in layers:
        for name in KEY_NAMES:
            if values.get(name):
                if name.endswith("_FILE"):
                    return read_key_file(values[name], f"{label}: {name}")
                return check_key(values[name], f"{label}: {name}")
    return read_key_file(key_file, "target.api_key_file") if key_file else None


def known_keys(env: Mapping[str, str]) -> set[str]:
    """Keys that the environment holds, to search for copies of them; never to be shown."""
    keys = {env[name].strip() for name in KEY_NAMES if not name.endswith("_FILE") and env.get(name)}
    for name in KEY_NAMES:
        if name.endswith("_FILE") and env.get(name) and os.path.isfile(env[name]):
            try:
                keys.add(read_key_file(env[name], name))
            except ConfigError:
                continue  # reported by api_key()
    return {key for key in keys if key}
