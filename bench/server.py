"""`python -m bench.server`: the commands of this project as tools of an MCP client, over stdin and stdout.

Input: the three-piece set (base URL, key or key file, model) from the environment or `.env`; MCP messages on stdin.
Output: MCP messages on stdout, nothing else; logs on stderr. Exit code 2 when a piece is missing, and which.
Does not: measure or judge; each tool runs `bench COMMAND` as a process of its own (bench/commands/mcp_jobs.py).

1. Load goes to the base URL of the environment and to nothing else; no tool takes an address or a key.
2. No run is longer, faster or larger than the limits of the environment, and only one runs at a time.
3. The key is taken out of everything that is sent back.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError

from bench import __version__
from bench.commands import mcp_jobs, mcp_limits
from bench.commands.mcp_jobs import JobRefused, Jobs, Settings

INSTRUCTIONS = """Load tests of one LLM service, the one that the user configured. Order of work: check (is the service
reachable), validate (what a run would send), run (sends load; costs time and tokens: ask the user first), then
report, plan and explain from the run folder it names. simulate sends nothing and is free. A verdict INVALID means that
the measurement failed its own checks: never quote numbers of such a run."""


def build(settings: Settings) -> MCPServer:
    """The server with its tools and resources."""
    jobs = Jobs(settings)

    @asynccontextmanager
    async def life(_server: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            jobs.close()

    server: MCPServer = MCPServer(
        "scheduler-bench", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING", lifespan=life
    )
    _read_tools(server, jobs)
    _load_tools(server, jobs)
    _resources(server, jobs)
    return server


async def _bench(jobs: Jobs, *arguments: str) -> dict[str, Any]:
    try:
        return await jobs.bench(*arguments)
    except JobRefused as error:
        raise ToolError(str(error)) from None


def _run_path(jobs: Jobs, run: str) -> str:
    try:
        return str(jobs.run_path(run))
    except JobRefused as error:
        raise ToolError(str(error)) from None


def _config_path(jobs: Jobs, config: str) -> str:
    try:
        return str(jobs.config_path(config))
    except JobRefused as error:
        raise ToolError(str(error)) from None


def _read_tools(server: MCPServer, jobs: Jobs) -> None:
    """Tools that send no load."""

    @server.tool()
    async def check() -> dict[str, Any]:
        """Preflight of the configured service: address, key, model, one request, one stream. Sends at most eight short
        requests. Says whose fault a failure is and what to try next."""
        return await _bench(
            jobs, "check", "--base-url", jobs.settings.base_url, "--model", jobs.settings.model, "--json"
        )

    @server.tool()
    async def validate(
        config: str = "", shape: str = "sweep", qps: str = "", stage_duration_s: float = 0
    ) -> dict[str, Any]:
        """Dry run of a config file: problems, resolved values, how many requests and tokens a run would send.
        `qps` such as "5,10,15". Sends nothing."""
        extra = [*_opt("--qps", qps), *_opt("--stage-duration", stage_duration_s)]
        return await _bench(jobs, "validate", _config_path(jobs, config), "--shape", shape, "--json", *extra)

    @server.tool()
    async def simulate(
        config: str = "",
        qps: str = "",
        stage_duration_s: float = 0,
        shape: str = "sweep",
        settings: dict[str, str] | None = None,
        decisions: bool = True,
    ) -> dict[str, Any]:
        """The config's load through the embedded scheduler in virtual time: seconds instead of minutes, nothing is
        sent. `settings` are config keys, such as {"scheduler.policy": "edf"}. Gives a run for report, plan, explain."""
        try:
            path = await anyio.to_thread.run_sync(
                lambda: jobs.check_simulation(config, shape, qps, stage_duration_s, settings or {})
            )
        except JobRefused as error:
            raise ToolError(str(error)) from None
        sets = [part for key, value in (settings or {}).items() for part in ("--set", f"{key}={value}")]
        extra = [
            *_opt("--qps", qps),
            *_opt("--stage-duration", stage_duration_s),
            *sets,
            *(["--decisions"] if decisions else []),
        ]
        folder = jobs.new_run_path("sim")
        return await _bench(
            jobs,
            "simulate",
            "--config",
            path,
            "--shape",
            shape,
            "--run-dir",
            str(folder),
            "--json",
            "--quiet",
            *extra,
        )

    @server.tool()
    async def analyse(
        run: str, slo_ttft_ms: float = 0, slo_tpot_ms: float = 0, attainment: float = 0
    ) -> dict[str, Any]:
        """Judge a run again, with other limits if given: verdict, reasons, capacity, one line per stage."""
        extra = [
            *_opt("--slo-ttft-ms", slo_ttft_ms),
            *_opt("--slo-tpot-ms", slo_tpot_ms),
            *_opt("--attainment", attainment),
        ]
        return await _bench(jobs, "analyse", _run_path(jobs, run), *extra)

    @server.tool()
    async def report(run: str, lang: str = "en") -> dict[str, Any]:
        """Write a run's report again (lang en or zh-CN); its files, and its summary as Markdown."""
        folder = _run_path(jobs, run)
        done = await _bench(jobs, "report", folder, "--lang", lang, "--json")
        summary = Path(folder) / "summary.md"
        if summary.exists():
            done["summary"] = jobs.scrub(summary.read_text(encoding="utf-8"))
        return done

    @server.tool()
    async def compare(base: str, new: str) -> dict[str, Any]:
        """What became worse, better, or did not clearly change from run `base` to run `new`."""
        return await _bench(jobs, "compare", _run_path(jobs, base), _run_path(jobs, new), "--json")

    @server.tool()
    async def plan(run: str, target_qps: float = 0, growth: float = 0) -> dict[str, Any]:
        """From a run to production: safe rate, instances for a target rate grown by `growth` (0.3 = 30 % more), batch
        and queue limits with their formulas, options of vLLM, SGLang, TensorRT-LLM and llama.cpp. Refuses an INVALID
        run."""
        extra = [*_opt("--target-qps", target_qps), *_opt("--growth", growth)]
        return await _bench(jobs, "plan", _run_path(jobs, run), "--json", *extra)

    @server.tool()
    async def explain(run: str, request: str) -> dict[str, Any]:
        """The story of one request (its id, or STAGE-ARRIVAL): every decision, its numbers and its rule."""
        return await _bench(jobs, "explain", "--json", "--", _run_path(jobs, run), request)

    @server.tool()
    async def status(run: str = "") -> dict[str, Any]:
        """What runs now, and the runs there are (newest first) with their verdicts; or one run's verdict."""
        if run:
            return jobs.verdict_of(Path(_run_path(jobs, run)))
        return await jobs.status()


def _load_tools(server: MCPServer, jobs: Jobs) -> None:
    """Tools that send load to the configured service, or stop it."""
    limits = jobs.settings

    async def run(
        ctx: Context,
        qps: str,
        stage_duration_s: float,
        config: str = "",
        shape: str = "sweep",
        background: bool = False,
    ) -> dict[str, Any]:
        try:
            job = await anyio.to_thread.run_sync(lambda: jobs.prepare(config, shape, qps, stage_duration_s))
            await jobs.start(job)
        except JobRefused as error:
            raise ToolError(str(error)) from None
        if background:
            return {
                "started": job.run_dir.name,
                "planned_s": job.planned_s,
                "arrivals": job.arrivals,
                "next": "call status until it is done, or cancel",
            }

        async def progress(done_s: float, text: str) -> None:
            await ctx.report_progress(min(done_s, job.planned_s), job.planned_s, jobs.scrub(text))

        return await jobs.wait(job, progress)

    run.__doc__ = f"""Send load to the configured service and judge it: preflight, stages, drain, analysis, report.
        `qps` are offered rates such as "5,10" (at most {limits.max_qps:g}), `stage_duration_s` seconds of each, in all
        at most {limits.max_duration_s:g} s, {limits.max_requests} requests and {limits.max_tokens} tokens. Shapes:
        {", ".join(mcp_limits.SHAPES)}. Costs tokens: ask the user first. background=true returns at once: use status
        and cancel."""
    server.tool(name="run")(run)

    @server.tool()
    async def cancel() -> dict[str, Any]:
        """Stop the run that is going on: no more arrivals, open answers are waited for, a report is still written."""
        return await jobs.cancel()


def _resources(server: MCPServer, jobs: Jobs) -> None:
    """Runs and their files."""

    def read(run: str, name: str) -> str:
        try:
            path = jobs.run_path(run) / name
            return jobs.scrub(path.read_text(encoding="utf-8"))
        except (JobRefused, OSError):
            raise ResourceNotFoundError(
                f"run {run!r} has no {name}; runs: {', '.join(jobs.run_names()) or 'none'}"
            ) from None

    @server.resource("bench://runs", mime_type="application/json", description="All runs with their verdicts.")
    async def runs() -> dict[str, Any]:
        return await jobs.status()

    @server.resource("bench://runs/{run}/summary", mime_type="text/markdown", description="Summary of a run.")
    def summary(run: str) -> str:
        return read(run, "summary.md")

    @server.resource("bench://runs/{run}/analysis", mime_type="application/json", description="All numbers of a run.")
    def analysis(run: str) -> str:
        return read(run, "analysis.json")

    @server.resource("bench://runs/{run}/report", mime_type="text/html", description="The report page of a run.")
    def page(run: str) -> str:
        return read(run, "report.html")


def _opt(flag: str, value: Any) -> list[str]:
    """A command-line option, or nothing for an empty value."""
    return [flag, f"{value:g}" if isinstance(value, float) else str(value)] if value else []


def main() -> int:
    """Serve until stdin closes; the exit code."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__, file=sys.stderr)  # standard output carries the protocol alone
        return 0
    try:
        settings = mcp_jobs.read_settings()
    except mcp_jobs.SettingsError as error:
        print(f"bench.server: {error}", file=sys.stderr)
        return 2
    build(settings).run("stdio")
    return 0


if __name__ == "__main__":
    sys.exit(main())
