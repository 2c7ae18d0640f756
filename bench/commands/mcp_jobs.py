"""What the MCP server runs: `bench` commands as processes, with limits, progress and cancel.

Input: settings of the environment; arguments of tools. Output: JSON-able dicts without the key.
Does not: speak MCP (bench/server.py does).

1. A command's stdin is closed and its stdout is read here: it cannot disturb the protocol.
2. Processes get the environment of the server, so the key travels there and never in an argument.
3. What is started is ended: by cancel, by the client's cancel, or with the server.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import html
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import anyio
from anyio.abc import Process

from bench.commands import mcp_limits
from bench.commands.mcp_limits import JobRefused
from bench.records.ledger import RUN, find_requests

# piece -> names of the environment, the first one set wins
PIECES = {
    "base URL": ("BENCH_BASE_URL", "TAOTOKEN_BASE_URL"),
    "key": ("BENCH_API_KEY", "BENCH_API_KEY_FILE", "TAOTOKEN_API_KEY", "TAOTOKEN_API_KEY_FILE"),
    "model": ("BENCH_MODEL", "TAOTOKEN_MODEL_ID"),
}
MAX_OUTPUT = 200_000  # characters of one answer; an assistant reads no more
COMMAND_LIMIT_S = 300.0
MAX_COMMANDS = 2  # at once; further ones wait
STOP_LIMIT_S = 45.0  # after a cancel: drain, analysis and report; then it is killed
MEANING = {
    0: "passed",
    1: "the SLO is missed",
    2: "config or usage",
    3: "channel: the service cannot be used",
    4: "measurement INVALID",
    5: "regression against the baseline",
    130: "interrupted",
}


class SettingsError(Exception):
    """The server cannot start; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user allowed."""

    base_url: str
    model: str
    key: str = field(repr=False)
    home: Path = Path()
    config: Path = Path("configs/scheduler_bench.json")
    runs: Path = Path("runs")
    max_qps: float = 20.0
    max_duration_s: float = 180.0
    max_requests: int = 2000
    max_tokens: int = 5_000_000


def read_settings(env: Mapping[str, str] | None = None) -> Settings:
    """The three-piece set and the limits. Raises SettingsError that names every missing piece."""
    from bench.client.endpoint import parse_base_url
    from bench.client.errors import ChannelError
    from bench.config import ConfigError, api_key_from_environment
    from bench.config.dotenv import environment

    try:
        where = environment(env)
        missing = [
            f"{piece} ({' or '.join(names)})"
            for piece, names in PIECES.items()
            if not any(where.get(name) for name in names)
        ]
        if missing:
            raise SettingsError(
                "missing: " + "; ".join(missing) + ". Set them in the env block of the MCP client, or in "
                ".env; see docs/mcp.md"
            )
        key = api_key_from_environment(env)
        base_url = _first(where, PIECES["base URL"])
        parse_base_url(base_url)
    except (ConfigError, ChannelError) as error:
        raise SettingsError(str(error)) from None
    return Settings(
        base_url=base_url,
        model=_first(where, PIECES["model"]),
        key=key or "",
        home=Path.cwd(),
        config=Path(where.get("BENCH_CONFIG") or _default_config()),
        runs=Path(where.get("BENCH_RUNS") or "runs"),
        max_qps=_limit(where, "BENCH_MCP_MAX_QPS", 20.0),
        max_duration_s=_limit(where, "BENCH_MCP_MAX_DURATION_S", 180.0),
        max_requests=int(_limit(where, "BENCH_MCP_MAX_REQUESTS", 2000.0)),
        max_tokens=int(_limit(where, "BENCH_MCP_MAX_TOKENS", 5e6)),
    )


def _first(where: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next(where[name] for name in names if where.get(name))


def _default_config() -> Path:
    here = Path("configs/scheduler_bench.json")
    return here if here.exists() else Path(__file__).resolve().parents[2] / here


def _limit(where: Mapping[str, str], name: str, default: float) -> float:
    text = where.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise SettingsError(f"{name} is {text[:20]!r}; a number above 0, such as {default:g}")
    return value


@dataclass
class Job:
    """One run that was planned within the limits."""

    arguments: list[str]
    run_dir: Path
    planned_s: float
    arrivals: float
    stages: int
    process: Process | None = None
    started_s: float = 0.0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    result: dict[str, Any] | None = None
    cancelled: bool = False


class Jobs:
    """All processes of one server."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.job: Job | None = None
        self._turn = anyio.Lock()  # of starting a run: two tools may be called at once
        self._short = anyio.Semaphore(MAX_COMMANDS)
        self._claim: IO[str] | None = None  # the locked file that says a run of this folder is going on

    # -- names -----------------------------------------------------------------------------------------------------

    def scrub(self, text: str) -> str:
        """The text without the key, whatever a service or a log has put into it."""
        key = self.settings.key
        # As it is, and as JSON and HTML write it.
        for form in {key, json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1], html.escape(key)} - {""}:
            text = text.replace(form, "***")
        return text

    def run_names(self) -> list[str]:
        """Run folders, newest first."""
        home = self.settings.runs
        if not home.is_dir():
            return []
        found = [p for p in home.iterdir() if p.is_dir() and ((p / RUN).exists() or find_requests(p) is not None)]
        return [p.name for p in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)]

    def run_path(self, run: str) -> Path:
        """The folder of a run by its name; "latest" is the newest. Nothing outside of the runs folder."""
        names = self.run_names()
        name = names[0] if run == "latest" and names else Path(run).name
        path = self.settings.runs / name
        if not name or (run != "latest" and run not in (name, str(path))) or not path.is_dir() or name not in names:
            raise JobRefused(f"no run {run!r}; runs: {', '.join(names[:20]) or 'none yet'}")
        return path

    def new_run_path(self, kind: str) -> Path:
        """A folder for a new run."""
        now = datetime.datetime.now(datetime.UTC)
        return self.settings.runs / f"{now:%Y%m%dT%H%M%SZ}-{kind}-{secrets.token_hex(3)}"

    def config_path(self, config: str) -> Path:
        """A config file below the working folder; the user's own by default."""
        if not config:
            return self.settings.config
        path = (self.settings.home / config).resolve()
        shipped = Path(__file__).resolve().parents[2] / "configs"
        inside = any(path.is_relative_to(root) for root in (self.settings.home.resolve(), shipped))
        if not inside or path.suffix not in (".json", ".yaml", ".yml"):
            raise JobRefused(f"config {config!r}: only .json and .yaml files below the working folder are read")
        if not path.is_file():
            raise JobRefused(f"config {config!r}: no such file")
        return path

    # -- short commands ----------------------------------------------------------------------------------------------

    async def bench(self, *arguments: str) -> dict[str, Any]:
        """Run `bench ARGUMENTS` to its end: exit code, its meaning, the JSON or the text it printed."""
        command = [sys.executable, "-m", "bench", *arguments]
        try:
            async with self._short:
                with anyio.fail_after(COMMAND_LIMIT_S):
                    done = await anyio.run_process(
                        command, stdin=subprocess.DEVNULL, check=False, env=self._environment(), start_new_session=True
                    )
        except TimeoutError:
            raise JobRefused(f"bench {arguments[0]} took longer than {COMMAND_LIMIT_S:g} s and was ended") from None
        return self._answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "NO_COLOR": "1", "BENCH_RUNS": str(self.settings.runs)}

    def _answer(self, code: int, out: str, err: str) -> dict[str, Any]:
        out, err = self.scrub(out).strip(), self.scrub(err).strip()
        answer: dict[str, Any] = {"exit_code": code, "meaning": MEANING.get(code, "ended abnormally")}
        last = out.splitlines()[-1] if out else ""
        for text in (out, last):
            if text.startswith("{") and len(text) <= MAX_OUTPUT:
                with contextlib.suppress(ValueError):
                    answer["result"] = json.loads(text)
                    break
        else:
            answer["text"] = out[-MAX_OUTPUT:]
        if "result" not in answer and code not in (0, 2, 130):
            answer["meaning"] = "ended without a result"  # such as a process that was killed: nothing was judged
        if err and (code != 0 or "result" not in answer):
            answer["messages"] = err[-4000:]
        return answer

    # -- runs ----------------------------------------------------------------------------------------------------------

    def prepare(self, config: str, shape: str, qps: str, stage_duration_s: float) -> Job:
        """A run within the limits. Raises JobRefused with the number and the limit."""
        limits, path = self.settings, self.config_path(config)
        try:
            settings = mcp_limits.load(path, {}, limits)
            plan = mcp_limits.plan(settings, shape, qps, stage_duration_s)
            mcp_limits.refuse_addresses(settings, path, limits)
            seconds, arrivals = mcp_limits.bound(plan, limits)
        except JobRefused as error:
            raise JobRefused(self.scrub(f"{error}")) from None
        folder = self.new_run_path("mcp")
        arguments = ["run", "--config", str(path), "--shape", shape, "--run-dir", str(folder), "--json"]
        arguments += ["--qps", qps] if qps else []
        arguments += ["--stage-duration", f"{stage_duration_s:g}"] if stage_duration_s else []
        if not settings.engine.embedded:  # an embedded engine is started for the run and is nobody's service
            arguments += ["--base-url", limits.base_url, "--model", limits.model]
        return Job(arguments, folder, seconds, arrivals, len(plan.stages))

    def check_simulation(self, config: str, shape: str, qps: str, stage_duration_s: float, sets: dict[str, str]) -> str:
        """The path of the config of a simulation that is allowed. Raises JobRefused."""
        import yaml

        path = self.config_path(config)
        try:
            overrides = {key.strip(): yaml.safe_load(value) for key, value in sets.items()}
            settings = mcp_limits.load(path, overrides, self.settings)
            mcp_limits.bound_simulation(mcp_limits.plan(settings, shape, qps, stage_duration_s))
        except (JobRefused, yaml.YAMLError) as error:
            raise JobRefused(self.scrub(f"{error}")) from None
        return str(path)

    async def start(self, job: Job) -> None:
        """Start the run. Raises JobRefused when another one is going on, here or by another server of this folder."""
        async with self._turn:
            if self.job is not None and await self._alive(self.job):
                raise JobRefused(f"run {self.job.run_dir.name} is going on; wait for it (status) or cancel it")
            self._claim_folder()
            try:
                job.run_dir.mkdir(parents=True, exist_ok=True)
                said, told = job.run_dir / "console.txt", job.run_dir / "result.txt"
                with said.open("wb") as console, told.open("wb") as out:
                    job.process = await anyio.open_process(
                        [sys.executable, "-m", "bench", *job.arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=console,
                        env={**self._environment(), "BENCH_PARENT_PID": str(os.getpid())},
                        start_new_session=True,
                        pass_fds=[self._claim.fileno()] if self._claim is not None else [],
                    )
            except BaseException:
                self._release_folder()
                raise
            job.started_s = time.monotonic()
            self.job = job

    def _claim_folder(self) -> None:
        """Lock the runs folder for one run; the run itself holds the lock too, so it outlives this server."""
        self.settings.runs.mkdir(parents=True, exist_ok=True)
        claim = (self.settings.runs / ".mcp-run.lock").open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            raise JobRefused("another server's run of this folder is going on; wait for its end") from None
        self._claim = claim

    def _release_folder(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    async def _alive(self, job: Job) -> bool:
        """Whether it still runs; collects its result when it does not."""
        assert job.process is not None
        if job.process.returncode is None:
            with anyio.move_on_after(0.01):
                await job.process.wait()
        if job.process.returncode is None:
            return True
        if job.result is None:
            self._release_folder()
            text = _read(job.run_dir / "result.txt")
            job.result = {
                "run": job.run_dir.name,
                "cancelled": job.cancelled,
                **self._answer(job.process.returncode, text, _read(job.run_dir / "console.txt")),
            }
        return False

    async def wait(self, job: Job, progress: Callable[[float, str], Awaitable[None]]) -> dict[str, Any]:
        """The result of a run; tells its progress once a second. The client's cancel ends the run in order."""
        told = 0.0
        try:
            while await self._alive(job):
                now = time.monotonic()
                if now - told >= 1.0:
                    told = now
                    await progress(now - job.started_s, self._last_line(job))
                await anyio.sleep(0.1)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._stop(job)
            raise
        await progress(job.planned_s, "done")
        assert job.result is not None
        return job.result

    async def cancel(self) -> dict[str, Any]:
        """End the run that is going on; its result."""
        job = self.job
        if job is None or not await self._alive(job):
            return {"cancelled": False, "text": "no run is going on"}
        await self._stop(job)
        return job.result or {"cancelled": True, "run": job.run_dir.name}

    async def _stop(self, job: Job) -> None:
        """SIGINT: stop and drain; a second one gives up what is open; then the end."""
        job.cancelled = True
        assert job.process is not None
        for patience_s in (STOP_LIMIT_S / 3, STOP_LIMIT_S):
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGINT)
            with anyio.move_on_after(patience_s):
                await job.process.wait()
            if job.process.returncode is not None:
                break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
            await job.process.wait()
        await self._alive(job)

    def _last_line(self, job: Job) -> str:
        lines = [line.strip() for line in _read(job.run_dir / "console.txt").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "starting"

    async def status(self) -> dict[str, Any]:
        """The run that is going on, the result of the last one, and the newest 20 runs."""
        job = self.job
        now = None
        if job is not None and await self._alive(job):
            now = {
                "run": job.run_dir.name,
                "elapsed_s": round(time.monotonic() - job.started_s, 1),
                "planned_s": job.planned_s,
                "last": self.scrub(self._last_line(job)),
            }
        return {
            "running": now,
            "last_result": job.result if job is not None else None,
            "runs": [self.verdict_of(self.settings.runs / name) for name in self.run_names()[:20]],
        }

    def close(self) -> None:
        """The server ends: so does its run, in order and by itself."""
        job = self.job
        if job is not None and job.process is not None and job.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGINT)

    def verdict_of(self, folder: Path) -> dict[str, Any]:
        """What is known of a run folder, in a few words."""
        found: dict[str, Any] = {"run": folder.name}
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {**found, "verdict": None, "text": "no report yet"}
        verdict = summary.get("verdict")
        found["verdict"] = verdict.get("status") if isinstance(verdict, dict) else verdict
        capacity = summary.get("capacity") or {}
        if found["verdict"] in ("PASS", "FAIL") and isinstance(capacity, dict):
            found.update({key: capacity.get(key) for key in ("knee_qps", "watermark_low_qps", "watermark_high_qps")})
        for key in ("sentence", "exit_code"):
            value = summary.get(key) if not isinstance(verdict, dict) else verdict.get(key)
            if value is not None:
                found[key] = self.scrub(value) if isinstance(value, str) else value
        return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
