"""The import table of docs/words.md holds for the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]

# area -> (areas it may import, third-party packages it may import); None = any
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "doors": ({"client", "workload", "records", "config", "analysis", "reports", "engine", "control", "doors"}, None),
    "locustfiles": ({"client", "workload", "records", "config", "locustfiles"}, {"locust", "gevent", "numpy", "flask", "prometheus_client"}),
    "shapes": ({"workload", "records", "config", "analysis", "shapes"}, {"locust", "gevent"}),
    "reports": ({"records", "reports"}, {"jinja2", "altair", "vl_convert", "junitparser", "markupsafe"}),
    "analysis": ({"records", "config", "analysis"}, {"numpy", "pandas", "scipy"}),
    "engine": ({"control", "workload", "records", "config", "engine"}, {"numpy", "prometheus_client", "orjson"}),
    "control": ({"records", "config", "control"}, set()),
    "client": ({"records", "config", "client"}, {"orjson"}),
    "workload": ({"records", "config", "workload"}, {"numpy"}),
    "records": ({"records"}, {"numpy"}),
    "config": ({"config"}, {"pydantic", "pydantic_core", "yaml"}),
}
OURS = {"bench", "engine", "analysis", "reports", "control", "locustfiles", "shapes", "benchmarks"}


def area_of(module: str) -> str | None:
    """The area a module belongs to; None for the bare package `bench`."""
    parts = module.split(".")
    if parts[0] != "bench":
        return parts[0]
    if len(parts) < 2 or parts[1] == "__version__":
        return None
    return parts[1] if parts[1] in ("client", "workload", "records", "config") else "doors"


def files() -> list[Path]:
    roots = ("bench", "engine", "analysis", "reports", "control", "locustfiles", "shapes")
    return sorted(path for root in roots for path in (PROJECT / root).rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import, also those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module in ("bench",):
                found += [(node.lineno, f"bench.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return found


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PROJECT)))
def test_imports_follow_the_table(path: Path) -> None:
    import sys

    module = ".".join(path.relative_to(PROJECT).with_suffix("").parts)
    area = area_of(module)
    if area is None:
        return
    ours, others = ALLOWED[area]
    wrong: list[str] = []
    for line, name in imports(path):
        top = name.split(".")[0]
        if top in OURS:
            target = area_of(name)
            special = module == "analysis.replay" and target in ("engine", "workload")
            if target is not None and target not in ours and not special:
                wrong.append(f"line {line}: {name} ({area} may import {', '.join(sorted(ours))})")
        elif top not in sys.stdlib_module_names and others is not None and top not in others:
            gevent_here = area == "client" and top == "gevent" and "gevent" in _transport_files()
            if not (gevent_here and path.name in _transport_files()["gevent"]):
                wrong.append(f"line {line}: {name} (not among the packages of {area})")
    assert not wrong, f"{path.relative_to(PROJECT)}: " + "; ".join(wrong)


def _transport_files() -> dict[str, set[str]]:
    """The files of the client that are the transport: only they know gevent."""
    return {
        "gevent": {"transport.py", "stream.py", "pool.py", "dialing.py", "sockets.py", "loop_lag.py", "gather.py"}
    }


def test_no_locustfile_or_shape_hides_another_module() -> None:
    """Locust imports them by their bare stem: `queue.py` there would hide the standard library's."""
    import sys
    from importlib.metadata import packages_distributions

    taken = set(sys.stdlib_module_names) | set(packages_distributions()) - OURS
    for folder in ("locustfiles", "shapes"):
        stems = {path.stem for path in (PROJECT / folder).glob("*.py")} - {"__init__"}
        assert not stems & taken, f"{folder}: {stems & taken} are names of other modules"
