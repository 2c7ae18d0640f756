"""A config file, the environment and the command line become one checked `Config`.

Input: a JSON or YAML path, an environment, overrides by dotted key.
Output: `Resolved`: the config, the origin of every value, the warnings; or `ConfigError` with ALL problems.
Does not: talk to the service, read the API key (`secrets.api_key` does), build a plan.

Order: command line, then environment, then `.env`, then the file, then defaults.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.config import checks, explain
from bench.config.dotenv import Environment, environment
from bench.config.errors import ConfigError, Problem
from bench.config.parse import Marks, Path_, dotted, parse, read_text
from bench.config.schema import Config
from bench.config.secrets import find_secrets, known_keys

# Config key -> environment names, the first one set wins.
ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "base_url": ("BENCH_BASE_URL", "TAOTOKEN_BASE_URL"),
    "model": ("BENCH_MODEL", "TAOTOKEN_MODEL_ID"),
}


@dataclass(frozen=True)
class Resolved:
    """A checked config, where each value came from, and what to be warned of."""

    config: Config
    origin: dict[str, str]
    warnings: list[Problem] = field(default_factory=list)
    path: Path | None = None

    def masked(self) -> dict[str, Any]:
        """The config as plain data for logs and run.json: header values hidden, no key can be in it."""
        data = self.config.model_dump(mode="json")
        for name in data["target"]["extra_headers"]:
            data["target"]["extra_headers"][name] = "***"
        if data["target"]["api_key_file"] is not None:
            data["target"]["api_key_file"] = "***"  # a key that was put here by mistake
        return data

    def placeholders(self) -> list[Problem]:
        """Problems that forbid sending: base_url or model was never filled in (CFG-012)."""
        return [problem for problem in self.warnings if problem.id == "CFG-012"]


def load_config(
    path: Path | None, *, env: Mapping[str, str] | None = None, overrides: dict[str, Any] | None = None
) -> Resolved:
    """The resolved config of a file (None: defaults alone).

    env: a plain mapping; None or os.environ for the process's environment with the `.env` of the working
    folder below it.
    overrides: dotted key -> value, as from a command line.
    Raises ConfigError with every problem at once.
    """
    problems: list[Problem] = []
    try:
        where = environment(env)
    except ConfigError as error:
        problems += error.problems
        where = {}
    data: Any = {}
    marks: Marks = {}
    label = "config"
    if path is not None:
        path = Path(path)
        label = str(path)
        text, found = read_text(path)
        if not found:
            data, marks, found = parse(text, path)
        problems += found
        if data is None or any(problem.id in ("CFG-001", "CFG-002") for problem in found):
            raise ConfigError(problems)
    data = copy.deepcopy(data)
    data.pop("$schema", None)
    origin_of: dict[Path_, str] = {}
    place = _Places(label, marks, origin_of)
    _apply(data, {tuple(key.split(".")): value for key, value in (overrides or {}).items()}, "command line", origin_of)
    notes = _apply_environment(data, where, origin_of)
    problems += _secrets(data, where, place)
    config, found, bad = _validate(data, place)
    problems += found
    findings = checks.run(config, bad)
    problems += [place.problem(f) for f in findings if explain.severity(f.id) == "error"]
    warnings = [place.problem(f) for f in [*notes, *findings] if explain.severity(f.id) == "warning"]
    if problems:
        raise ConfigError(_sorted(problems) + _sorted(warnings))
    return Resolved(config, _origins(config, data, label, origin_of), _sorted(warnings), path)


def _sorted(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda p: (p.line is None, p.line or 0, p.id, p.where))


@dataclass
class _Places:
    """Turns a path into `FILE: key` with its line, or into the environment name it came from."""

    label: str
    marks: Marks
    origin_of: dict[Path_, str]

    def of(self, at: Path_) -> tuple[str, int | None]:
        origin = self.origin_of.get(at)
        if origin is not None:
            return f"{origin}: {dotted(at)}", None
        line = None
        for end in range(len(at), 0, -1):
            if at[:end] in self.marks:
                line = self.marks[at[:end]][0]
                break
        return f"{self.label}: {dotted(at)}" if at else self.label, line

    def problem(self, finding: checks.Finding) -> Problem:
        where, line = self.of(finding.at)
        return Problem(finding.id, where, finding.found, finding.allowed, finding.fix, line)


def _apply(data: dict[str, Any], values: Mapping[Path_, Any], origin: str, origin_of: dict[Path_, str]) -> None:
    for at, value in values.items():
        node = data
        for part in at[:-1]:
            child = node.get(part)
            if not isinstance(child, dict):
                child = node[part] = {}
            node = child
        node[at[-1]] = value
        origin_of[at] = origin


def _apply_environment(
    data: dict[str, Any], env: Mapping[str, str], origin_of: dict[Path_, str]
) -> list[checks.Finding]:
    """Base URL and model of the environment; notes on what was not used."""
    engine = data.get("engine")
    embedded = isinstance(engine, dict) and engine.get("embedded") is True
    unused: list[str] = []
    for key, names in ENVIRONMENT.items():
        name = _first_set(env, names)
        if name is None or (key,) in origin_of:
            continue
        if embedded:
            unused.append(name)
            continue
        origin = env.origin(name) if isinstance(env, Environment) else f"environment {name}"
        _apply(data, {(key,): env[name]}, origin, origin_of)
    if unused:
        return [
            checks.Finding(
                "CFG-016",
                ("engine", "embedded"),
                f"is true, so {' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} not used",
                "",
                "set engine.embedded to false to test that service",
            )
        ]
    return []


def _first_set(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The first name with a value; the process's environment goes before `.env`, whatever the name."""
    layers = [env.process, env.dotenv] if isinstance(env, Environment) else [env]
    for layer in layers:
        for name in names:
            if layer.get(name):
                return name
    return None


def _secrets(data: dict[str, Any], env: Mapping[str, str], place: _Places) -> list[Problem]:
    """CFG-010 for each secret in the tree; the secret is taken out so that no later message can show it."""
    problems: list[Problem] = []
    for at, inner, why in find_secrets(data, known_keys(env)):
        where, line = place.of(at)
        problems.append(
            Problem(
                "CFG-010",
                where,
                why,
                "no secret in a config",
                "put the key into BENCH_API_KEY or a file named by BENCH_API_KEY_FILE",
                line,
            )
        )
        _cut(data, inner)
    return problems


def _cut(data: Any, at: Path_) -> None:
    node = data
    for part in at[:-1]:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(node, dict):
        node.pop(at[-1], None)
    elif isinstance(node, list) and isinstance(at[-1], int) and at[-1] < len(node):
        node[at[-1]] = None


def _validate(data: dict[str, Any], place: _Places) -> tuple[Config, list[Problem], set[Path_]]:
    """(config, problems, paths that are wrong). Wrong values are dropped, so that the rest can be checked."""
    problems: list[Problem] = []
    bad: set[Path_] = set()
    rest = copy.deepcopy(data)
    # pydantic names no place for such a text, so these are found first.
    for at, finding in _half_characters(rest):
        problems.append(place.problem(finding))
        bad.add(at)
        _cut(rest, at)
    for _ in range(20):
        try:
            return Config.model_validate(rest), problems, bad
        except ValidationError as error:
            cuts: set[Path_] = set()
            for detail in error.errors(include_url=False):
                at, finding = explain.finding(detail, rest)
                if finding is not None and at not in bad:
                    problems.append(place.problem(finding))
                bad.add(at)
                cuts.add(explain.cut(at, rest))
            bad |= cuts
            for at in sorted(cuts, key=lambda p: (len(p), str(p)), reverse=True):
                _cut(rest, at)
    return Config(), problems, bad | {(name,) for name in Config.model_fields}


def _half_characters(data: Any) -> list[tuple[Path_, checks.Finding]]:
    """(path, finding) of every key and text with a lone surrogate: no file, header or request can hold one."""
    out: list[tuple[Path_, checks.Finding]] = []
    stack: list[tuple[Path_, Any]] = [((), data)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, str) and _is_half(node):
            found = "holds half a character (a lone surrogate)"
            out.append((at, checks.Finding("CFG-005", at, found, "a text of whole characters", "write it again")))
        elif isinstance(node, list):
            stack += [((*at, index), child) for index, child in enumerate(node)]
        elif isinstance(node, dict):
            for name, child in node.items():
                if _is_half(name):
                    found = "is not a known key: its name holds half a character (a lone surrogate)"
                    out.append(((*at, name), checks.Finding("CFG-004", (*at, name), found, "", "remove it")))
                else:
                    stack.append(((*at, name), child))
    return out


def _is_half(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text) if not text.isascii() else False


def _origins(config: Config, data: dict[str, Any], label: str, origin_of: dict[Path_, str]) -> dict[str, str]:
    """Origin of every leaf of the config, by dotted key; lists are one leaf."""
    out: dict[str, str] = {}

    def visit(value: Any, given: Any, at: Path_) -> None:
        if isinstance(value, dict) and (value or not at) and not (at[:1] == ("target",) and len(at) == 2):
            for name, child in value.items():
                inner = given.get(name, _MISSING) if isinstance(given, dict) else _MISSING
                visit(child, inner, (*at, name))
            return
        out[dotted(at)] = origin_of.get(at) or (f"file {label}" if given is not _MISSING else "default")

    visit(config.model_dump(mode="json"), data, ())
    for at, origin in origin_of.items():
        # `--set target.extra_body.x` is inside a leaf: the leaf shows it.
        for end in range(1, len(at)):
            if dotted(at[:end]) in out:
                out[dotted(at[:end])] = origin
    return out


_MISSING = object()
