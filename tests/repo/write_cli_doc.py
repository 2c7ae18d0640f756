"""Writes docs/cli.md from the commands themselves: `python -m tests.repo.write_cli_doc`."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import click

from bench.__main__ import COMMANDS

WORDS = {"float range": "NUMBER", "integer range": "N", "integer": "N", "float": "NUMBER", "text": "TEXT", "path": "PATH"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
HEAD = """# The command line

`bench COMMAND --help` says the same as this page. Results go to standard output, everything else to standard error. Progress is drawn on a terminal only; otherwise there is one line per stage. `NO_COLOR` and `TERM=dumb` are honoured. Exit codes: [exit-codes.md](exit-codes.md).

With `--json`, standard output holds JSON and nothing else (`watch`: one object per line). A command that could not do its work says why on standard error and by its exit code; `run`, `demo`, `simulate`, `check` and `validate` say it in the JSON too (`error`, or `problems`).

With `--quiet`, only the result is left: the verdict, the file, the safe rate. Errors are said all the same, and `--json` prints its object. `explain`, `watch`, `serve-engine` and `completion` print nothing but their result.

The API key is never an option: `BENCH_API_KEY`, `BENCH_API_KEY_FILE` or a line in `.env` ([config.md](config.md)).

Completion: `eval "$(bench completion bash)"`, the same for zsh and fish.
"""


def load(name: str) -> click.Command:
    """The click command of a name in `COMMANDS`."""
    return importlib.import_module(COMMANDS[name][0]).command


def example(command: click.Command) -> list[str]:
    """The lines after "Example:" in a command's help."""
    lines = inspect.cleandoc(command.help or "").replace("\b", "").splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip() == "Example:"), None)
    if start is None:
        return []
    block: list[str] = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        block.append(line.strip())
    return block


def prose(command: click.Command) -> str:
    """A command's help without its example, one paragraph per line."""
    text = inspect.cleandoc(command.help or "").replace("\b", "")
    parts = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip() and not p.strip().startswith("Example:")]
    return "\n\n".join(parts)


def flags(option: click.Option) -> str:
    """`-c, --config PATH`."""
    words = ", ".join(f"`{word}`" for word in (*option.opts, *option.secondary_opts))
    if option.is_flag:
        return words
    kind = option.type
    word = " \\| ".join(kind.choices) if isinstance(kind, click.Choice) else WORDS.get(kind.name, kind.name)
    return f"{words} {word}"


def default(option: click.Option) -> str:
    """The default as it matters to a reader: nothing for flags, None, empty and 0 (which mean: as the config says)."""
    value: Any = option.default
    if option.is_flag or not isinstance(value, (str, int, float, Path)) or value in ("", 0):
        return ""
    return f"`{value}`"


def section(name: str) -> str:
    command = load(name)
    arguments = " ".join(p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument))
    out = [f"\n## bench {name}{' ' + arguments if arguments else ''}\n", prose(command) + "\n"]
    if example(command):
        out += ["```bash", *example(command), "```\n"]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if options:
        out += ["| option | default | environment | meaning |", "|---|---|---|---|"]
        for o in options:
            env = f"`{o.envvar}`" if isinstance(o.envvar, str) else ""
            out.append(f"| {flags(o)} | {default(o)} | {env} | {' '.join((o.help or '').split())} |")
    return "\n".join(out).rstrip() + "\n"


def text() -> str:
    """The page."""
    return HEAD + "".join(section(name) for name in COMMANDS)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
