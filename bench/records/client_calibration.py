"""The file that `bench calibrate-client` writes: what the client adds, and the highest rate that it can send.

Input: nothing; a plain dataclass with a JSON codec and one comparison.
Does not: measure or judge (`analysis/client_ceiling.py` does).

1. A calibration speaks for one machine, one number of workers and one way to read; `differences` names what is not so.
"""
from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "client-calibration.json"
SCHEMA_VERSION = 1
SAME_MACHINE = ("system", "machine", "cpu", "cores")  # keys of `host` in run.json
LONGER = 1.25  # answers up to so many times as long as the calibrated ones cost the client about the same


@dataclass
class ClientCalibration:
    """One calibration of the client against the null server."""

    made_utc: str
    tool_version: str
    machine: dict[str, Any]  # `host` of run.json
    workers: int
    read: str  # client.read
    output_tokens_mean: float | None
    ceiling_qps: float | None  # None: not even the lowest rate
    ceiling_kind: str  # "between" two measured rates | "at_least": nothing was too fast | "below" every rate
    first_miss_qps: float | None  # the lowest rate that the client could not send
    bound_by: list[str]  # ids of what bound it there: INV-LAG, INV-RATE, ..., or "server"
    limits: dict[str, float]
    # what the client adds at the lowest rate: ttft_p50_s, ttft_p99_s, e2e_p50_s, e2e_p99_s, send_lag_p99_s
    adds: dict[str, float | None]
    stages: list[dict[str, Any]] = field(default_factory=list)
    sentence: str = ""
    code: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def as_target(self, path: Path) -> dict[str, Any]:
        """What run.json keeps of it, as `target.calibration`."""
        keep = ("ceiling_qps", "ceiling_kind", "first_miss_qps", "made_utc", "adds", "workers", "read")
        return {"file": path.name, **{name: getattr(self, name) for name in keep}}


def write_calibration(path: Path, made: ClientCalibration) -> None:
    """Write the file in one step."""
    part = path.with_name(path.name + ".part")
    text = json.dumps(dataclasses.asdict(made), ensure_ascii=False, indent=1, allow_nan=False)
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read_calibration(path: Path) -> ClientCalibration:
    """The calibration at `path`. Raises ValueError with the place and the mend, OSError when it cannot be read."""
    again = "make it again with `bench calibrate-client`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); {again}") from None
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path}: schema_version is {found!r}, this version reads {SCHEMA_VERSION}; {again}")
    known = {f.name: f for f in dataclasses.fields(ClientCalibration)}
    lacking = [name for name, f in known.items() if name not in data and f.default is dataclasses.MISSING
               and f.default_factory is dataclasses.MISSING]  # fmt: skip
    if lacking:
        raise ValueError(f"{path}: lacks {', '.join(lacking)}; {again}")
    ceiling = data["ceiling_qps"]
    sound = isinstance(ceiling, (int, float)) and not isinstance(ceiling, bool) and ceiling > 0
    if ceiling is not None and not sound:
        raise ValueError(f"{path}: ceiling_qps is {ceiling!r}, a positive number or null is allowed; {again}")
    return ClientCalibration(**{name: value for name, value in data.items() if name in known})


def differences(
    made: ClientCalibration, host: dict[str, Any], workers: int, read: str, output_tokens_mean: float | None
) -> list[str]:
    """Why a calibration does not speak for a run, one phrase each; [] when it does. `host`: as in run.json."""
    out = [
        f"{key} is {host.get(key)!r} here and {made.machine.get(key)!r} there"
        for key in SAME_MACHINE if host.get(key) != made.machine.get(key)
    ]  # fmt: skip
    if workers != made.workers:
        out.append(f"{workers} workers sent here, {made.workers} there")
    if read != made.read:
        out.append(f"client.read is {read} here, {made.read} there")
    longest = LONGER * made.output_tokens_mean if made.output_tokens_mean else None
    if longest is not None and output_tokens_mean is not None and output_tokens_mean > longest:
        out.append(f"answers have {output_tokens_mean:.0f} tokens here and {made.output_tokens_mean:.0f} there")
    return out
