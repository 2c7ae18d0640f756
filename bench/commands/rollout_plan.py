"""A rollout plan file: read, checked, with all problems at once.

Input: YAML or JSON text of a plan. Output: `Loaded`; or `PlanFileError`.
Does not: run anything.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.rollout import METRICS, STAGES, Gate, Rollout, StageSpec, problems

TOP = ("name", "config", "service", "new_policy", "load", "replicas", "tenants", "stages", "gates", "alpha")
LOAD = ("qps", "seed", "trace", "rate_scale")
STAGE = ("requests", "share", "tenants", "block", "qps")
GATE = ("metric", "margin", "detect", "limit_ms", "limit_us")
REQUESTS = 2000  # per stage, when the plan does not say
DEFAULT_GATES = (
    {"metric": "attainment"},
    {"metric": "rejections", "margin": 0.05, "detect": 0.2},
    {"metric": "decision_us", "limit_us": 200},
)


class PlanFileError(Exception):
    """The plan cannot be used; `problems` holds one line each, all of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plan that may start."""

    rollout: Rollout
    config: Path
    new_policy: dict[str, Any]
    qps: float | None
    seed: int
    trace: Path | None
    rate_scale: float
    replicas: int
    tenants: int
    named: tuple[str, ...]  # gray tenants by name; empty = by share
    stage_qps: dict[str, float]  # per replica, of stages that have a rate of their own
    fingerprint: str
    service: str = ""  # address of a running embedded engine; empty: virtual time


def read_plan(path: Path) -> Loaded:
    """The plan in a file. Raises PlanFileError."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _error(
            path,
            "",
            f"cannot be read ({getattr(error, 'strerror', None) or error})",
            "a YAML or JSON file",
            "see docs/production.md",
        ) from None
    if not isinstance(data, dict):
        raise _error(path, "", "is no mapping", "keys " + ", ".join(TOP), "see docs/production.md")
    found: list[str] = []
    _unknown(data, TOP, path, "", found)
    load = _part(data, "load", LOAD, path, found)
    stages, named, stage_qps = _stages(data.get("stages"), path, found)
    gates = _gates(data.get("gates"), path, found)
    config = path.parent / str(data.get("config") or "")
    if not data.get("config"):
        found.append(
            _problem(path, "config", "is missing", "the config of the service in force", "config: ../demo.json")
        )
    new = data.get("new_policy")
    if not isinstance(new, dict) or not new:
        found.append(
            _problem(
                path,
                "new_policy",
                f"is {new!r}",
                "config keys and their new values",
                "new_policy: {scheduler.policy: slack_aware}",
            )
        )
        new = {}
    replicas = _number(data, "replicas", 2, 1, 64, path, "replicas", found, whole=True)
    if any(s.name == "gray" for s in stages) and replicas < 2:
        found.append(
            _problem(
                path,
                "replicas",
                f"is {replicas}",
                "at least 2 for a gray stage: each policy needs one",
                "raise it or leave stages.gray out",
            )
        )
    service = data.get("service") or ""
    if not isinstance(service, str) or (service and not service.startswith(("http://", "https://"))):
        found.append(
            _problem(
                path,
                "service",
                f"is {service!r}",
                "the address of a running embedded engine",
                "service: http://127.0.0.1:8000",
            )
        )
    rollout = Rollout(
        str(data.get("name") or path.stem),
        tuple(stages),
        tuple(gates),
        float(_number(data, "alpha", 0.05, 1e-6, 0.5, path, "alpha", found)),
    )
    if not found:
        found += [
            _problem(path, "gates", text_, "gates that their stages can judge", "change the plan")
            for text_ in problems(rollout)
        ]
    if found:
        raise PlanFileError(found)
    trace = load.get("trace")
    return Loaded(
        rollout,
        config,
        {str(k): v for k, v in new.items()},
        load.get("qps"),
        int(load.get("seed") or 1),
        path.parent / str(trace) if trace else None,
        float(load.get("rate_scale") or 1.0),
        int(replicas),
        int(_number(data, "tenants", 40, 2, 10_000, path, "tenants", found, whole=True)),
        named,
        stage_qps,
        hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16],
        service,
    )


def _stages(data: Any, path: Path, found: list[str]) -> tuple[list[StageSpec], tuple[str, ...], dict[str, float]]:
    data = dict.fromkeys(STAGES) if data is None else data
    if not isinstance(data, dict) or not data:
        found.append(
            _problem(path, "stages", f"is {data!r}", "a mapping of " + ", ".join(STAGES), "see docs/production.md")
        )
        return [], (), {}
    _unknown(data, STAGES, path, "stages.", found)
    named: tuple[str, ...] = ()
    stages, rates = [], {}
    for name in STAGES:
        if name not in data:
            continue
        spec = data[name] or {}
        if not isinstance(spec, dict):
            found.append(_problem(path, f"stages.{name}", f"is {spec!r}", "keys " + ", ".join(STAGE), ""))
            continue
        _unknown(spec, STAGE, path, f"stages.{name}.", found)
        spot = f"stages.{name}."
        if "qps" in spec:
            rates[name] = float(_number(spec, "qps", None, 1e-6, 1e5, path, spot + "qps", found))
        if name == "gray" and spec.get("tenants"):
            named = tuple(str(t) for t in spec["tenants"])
        stages.append(
            StageSpec(
                name,
                int(_number(spec, "requests", REQUESTS, 100, 1_000_000, path, spot + "requests", found, whole=True)),
                float(
                    _number(
                        spec,
                        "share",
                        0.5 if name == "gray" else 1.0,
                        0.01,
                        1.0 if name != "gray" else 0.9,
                        path,
                        spot + "share",
                        found,
                    )
                ),
                int(_number(spec, "block", 25, 5, 10_000, path, spot + "block", found, whole=True)),
            )
        )
    return stages, named, rates


def _gates(data: Any, path: Path, found: list[str]) -> list[Gate]:
    gates = []
    for i, spec in enumerate(DEFAULT_GATES if data is None else data if isinstance(data, list) else []):
        spot = f"gates[{i}]."
        if not isinstance(spec, dict) or spec.get("metric") not in METRICS:
            found.append(_problem(path, spot + "metric", f"is {spec!r}", ", ".join(METRICS), "name one of them"))
            continue
        _unknown(spec, GATE, path, spot, found)
        metric = spec["metric"]
        limit = None
        if metric == "ttft_p95":
            limit = _number(spec, "limit_ms", None, 0.001, 1e8, path, spot + "limit_ms", found) / 1e3
        elif metric == "decision_us":
            limit = _number(spec, "limit_us", 200, 0.001, 1e8, path, spot + "limit_us", found)
        gates.append(
            Gate(
                metric,
                float(_number(spec, "margin", 0.02, 0, 100, path, spot + "margin", found)),
                float(_number(spec, "detect", 0.10, 0, 100, path, spot + "detect", found)),
                limit,
            )
        )
    if not gates and not found:
        found.append(
            _problem(path, "gates", "is empty", "at least one gate", "leave the key out for the default gates")
        )
    return gates


def _part(data: dict[str, Any], key: str, allowed: tuple[str, ...], path: Path, found: list[str]) -> dict[str, Any]:
    part = data.get(key) or {}
    if not isinstance(part, dict):
        found.append(_problem(path, key, f"is {part!r}", "keys " + ", ".join(allowed), ""))
        return {}
    _unknown(part, allowed, path, key + ".", found)
    for name in ("qps", "rate_scale"):
        if name in part:
            _number(part, name, None, 1e-6, 1e5, path, f"{key}.{name}", found)
    return part


def _number(
    data: dict[str, Any],
    key: str,
    default: Any,
    low: float,
    high: float,
    path: Path,
    where: str,
    found: list[str],
    *,
    whole: bool = False,
) -> Any:
    value = data.get(key, default)
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not good:
        kind = "a whole number" if whole else "a number"
        found.append(_problem(path, where, f"is {value!r}", f"{kind} from {low:g} to {high:g}", "change it"))
        return low
    return value


def _unknown(data: dict[str, Any], allowed: tuple[str, ...], path: Path, prefix: str, found: list[str]) -> None:
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            found.append(
                _problem(
                    path,
                    f"{prefix}{key}",
                    "is no key",
                    ", ".join(allowed),
                    f"did you mean {near[0]}?" if near else "remove it",
                )
            )


def _problem(path: Path, where: str, said: str, allowed: str, fix: str) -> str:
    spot = f"{path}: {where}" if where else str(path)
    return f"{spot} {said}" + (f"; allowed: {allowed}" if allowed else "") + (f"; {fix}" if fix else "")


def _error(path: Path, where: str, said: str, allowed: str, fix: str) -> PlanFileError:
    return PlanFileError([_problem(path, where, said, allowed, fix)])
