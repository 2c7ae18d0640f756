"""The environment, with a `.env` file of the working folder below it.

Input: `os.environ` and the text of `.env`.
Output: `Environment`, a mapping that remembers where each name came from.
Does not: change `os.environ`, expand `$VARIABLES`, run anything.

Lines: `KEY=VALUE`, `export KEY=VALUE`, blank lines, `# comments`. A value in single quotes is taken as it
stands; in double quotes \\n, \\t, \\\\, \\" are read; without quotes it ends at ` #` and loses outer blanks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.config.errors import ConfigError, Problem

_LINE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*$", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "$": "$"}
MAX_BYTES = 1_000_000


class Environment(Mapping[str, str]):
    """Process environment over `.env`; `origin(name)` says which."""

    def __init__(self, process: Mapping[str, str], dotenv: Mapping[str, str], dotenv_path: Path | None) -> None:
        self.process = dict(process)
        self.dotenv = dict(dotenv)
        self.dotenv_path = dotenv_path
        self._all = {
            **self.dotenv,
            **{name: value for name, value in self.process.items() if value or name not in self.dotenv},
        }

    def __getitem__(self, name: str) -> str:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:  # values may be keys
        return f"<Environment of {len(self._all)} names>"

    def origin(self, name: str) -> str:
        """`environment NAME`, or `.env NAME`."""
        return f"environment {name}" if self.process.get(name) else f".env {name}"


def _value(text: str) -> str | None:
    """The value of one line; None when its quotes do not close."""
    if text[:1] == "'":
        end = text.find("'", 1)
        rest = text[end + 1 :].strip()
        return text[1:end] if end > 0 and (not rest or rest.startswith("#")) else None
    if text[:1] == '"':
        match = re.match(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?$', text, re.S)
        if not match:
            return None
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m.group(1), m.group(0)), match.group(1))
    return re.split(r"(?:^|\s)#", text, maxsplit=1)[0].strip()


def parse_dotenv(text: str, path: Path) -> tuple[dict[str, str], list[Problem]]:
    """(values, problems) of a `.env` text; a problem names the line, never what stands in it."""
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line)
        value = _value(match.group(2)) if match else None
        if match is None or value is None:
            found = "is not KEY=VALUE" if match is None else f"has quotes that do not close, for {match.group(1)}"
            problems.append(
                Problem(
                    "CFG-015",
                    f"{path}",
                    found,
                    "KEY=VALUE, export KEY=VALUE, # comment",
                    "correct the line",
                    line=number,
                )
            )
            continue
        values[match.group(1)] = value
    return values, problems


def read_environment(folder: Path | None = None, process: Mapping[str, str] | None = None) -> Environment:
    """`os.environ` (or `process`) over the `.env` of `folder` (the working folder).

    Raises ConfigError CFG-015 on a damaged `.env`.
    """
    path = (folder or Path.cwd()) / ".env"
    process = os.environ if process is None else process
    try:
        with open(path, "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Environment(process, {}, None)
    except OSError as error:
        raise ConfigError(
            [
                Problem(
                    "CFG-015",
                    str(path),
                    f"cannot be read ({error.strerror})",
                    "",
                    "correct its permissions or move it away",
                )
            ]
        ) from None
    try:
        if len(raw) > MAX_BYTES:
            raise UnicodeError
        text = raw.decode("utf-8")
    except UnicodeError:
        raise ConfigError(
            [Problem("CFG-015", str(path), "is not a small UTF-8 text", "KEY=VALUE lines", "save it as UTF-8")]
        ) from None
    values, problems = parse_dotenv(text, path)
    if problems:
        raise ConfigError(problems)
    return Environment(process, values, path)


def environment(env: Mapping[str, str] | None) -> Mapping[str, str]:
    """`env` itself; None and os.environ mean the process's environment with `.env` below it."""
    return read_environment() if env is None or env is os.environ else env
