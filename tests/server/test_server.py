"""The MCP server over a real pipe, spoken to by the SDK's own client; the service is the embedded engine with a key."""
from __future__ import annotations

import asyncio
import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from bench.commands.engine_process import start_engine
from bench.commands.mcp_jobs import Jobs, Settings, SettingsError, read_settings

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-mcp-test-Q7wL93xZ"


@dataclass
class Place:
    folder: Path
    env: dict[str, str]

    def parameters(self, **changes: str) -> StdioServerParameters:
        return StdioServerParameters(command=sys.executable, args=["-m", "bench.server"], cwd=self.folder,
                                     env={**self.env, **changes})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("mcp")
    shutil.copytree(ROOT / "configs", folder / "configs")
    config = folder / "short.json"
    config.write_text(json.dumps({
        "model": "m", "base_url": "http://127.0.0.1:9/v1",  # nobody listens there: the environment must win
        "loadgen": {"output_len_mu": 2.0, "input_len_range": [10, 50], "target_qps": 5, "seed": 4},
        "sweep": {"qps": [5], "stage_duration_sec": 1, "warmup_sec": 0, "drain_limit_sec": 5},
    }))
    engine_config = folder / "engine.json"
    engine_config.write_text(json.dumps({"model": "m", "engine": {"embedded": True}, "loadgen": {"output_len_mu": 2.0}}))
    key_file = folder / "key"
    key_file.write_text(KEY)
    with start_engine(engine_config, api_key_file=key_file) as engine:
        env = {"BENCH_BASE_URL": engine.base_url + "/v1", "BENCH_MODEL": "m", "BENCH_API_KEY": KEY,
               "BENCH_CONFIG": "short.json", "BENCH_MCP_MAX_DURATION_S": "40"}
        yield Place(folder, env)


def talk(place: Place, scenario, **changes: str):
    """Run an async scenario(client) with a fresh server."""

    async def main():
        async with Client(place.parameters(**changes), read_timeout_seconds=100) as client:
            return await scenario(client)

    return asyncio.run(main())


async def call(client: Client, tool: str, **arguments):
    """The structured result of a tool; its error text when it failed."""
    answer = await client.call_tool(tool, arguments)
    assert KEY not in answer.model_dump_json()
    if answer.is_error:
        return answer.content[0].text
    return answer.structured_content


TOOLS = {"check", "validate", "plan", "run", "status", "analyse", "report", "compare", "simulate", "explain", "cancel"}


def test_tools_resources_and_limits(place):
    async def scenario(client):
        tools = (await client.list_tools()).tools
        resources = (await client.list_resources()).resources
        templates = (await client.list_resource_templates()).resource_templates
        fast = await call(client, "run", qps="500", stage_duration_s=1)
        long = await call(client, "run", qps="1", stage_duration_s=1000)
        many = await call(client, "run", qps="20", stage_duration_s=39, shape="single")
        burst = await call(client, "run", qps="5,2000", stage_duration_s=3, shape="spike")
        outside = await call(client, "run", qps="1", stage_duration_s=1, config="/etc/passwd")
        escape = await call(client, "report", run="../../etc")
        return tools, resources, templates, fast, long, many, burst, outside, escape

    tools, resources, templates, fast, long, many, burst, outside, escape = talk(
        place, scenario, BENCH_MCP_MAX_REQUESTS="500")
    assert {tool.name for tool in tools} == TOOLS
    asked = {name for tool in tools for name in tool.input_schema.get("properties", {})}
    assert not asked & {"base_url", "api_key", "key", "url", "host", "ctx"}  # no tool takes an address or a key
    assert all(tool.description for tool in tools)
    assert [str(r.uri) for r in resources] == ["bench://runs"]
    assert {t.uri_template for t in templates} == {f"bench://runs/{{run}}/{n}" for n in ("summary", "analysis", "report")}
    assert "rate: 500 asked, at most 20" in fast and "BENCH_MCP_MAX_QPS" in fast
    assert "1000 asked, at most 40" in long
    assert "planned requests: 780 asked, at most 500" in many
    assert "rate: 2000 asked" in burst  # the peak counts, not the mean
    assert "below the working folder" in outside and "no run" in escape


def test_no_way_round_the_limits(place):
    """What an assistant might try, by mistake or not; nothing of it starts anything."""
    def config(name: str, **sections) -> str:
        (place.folder / name).write_text(json.dumps({"model": "m", **sections}))
        return name

    sweep = {"warmup_sec": 0, "qps": [5], "stage_duration_sec": 30}
    clumps = config("clumps.json", loadgen={"arrival_process": "gamma", "burstiness": 0.01}, sweep=sweep)
    big = config("big.json", sweep={"qps": [5, 10, 15], "stage_duration_sec": 600})
    many = config("many.json", loadgen={"input_len_range": [90_000, 100_000]}, sweep=sweep)
    asks = config("asks.json", target={"metrics_url": "http://192.0.2.1/metrics"}, sweep=sweep)
    proxy = config("proxy.json", target={"proxy": "http://192.0.2.1:3128"}, sweep=sweep)
    repeats = config("repeats.json", sweep={**sweep, "repeats": 9})
    (place.folder / "rush.jsonl").write_text("".join(
        json.dumps({"timestamp": t, "input_length": 5, "output_length": 1}) + "\n" for t in [0] * 100 + [15_000]))
    rush = config("rush.json", loadgen={"trace_file": "rush.jsonl", "trace_spread_ties": False}, sweep=sweep)
    secret = place.folder.parent / "outside.csv"
    secret.write_text("the-secret-of-another-folder")

    async def scenario(client):
        async def run(**more):
            return await call(client, "run", **{"qps": "", "stage_duration_s": 0, **more})

        async def simulate(**settings):
            return await call(client, "simulate", config="short.json", settings=settings)

        return {
            "knee_search": await run(qps="1", stage_duration_s=1, shape="knee_search"),
            "hold": await run(qps="1", stage_duration_s=4000, shape="hold"),
            "config": await run(config=big), "repeats": await run(config=repeats),
            "clumps": await run(config=clumps, qps="15", stage_duration_s=30),
            "rush": await run(config=rush, shape="replay"),
            "tokens": await run(config=many, qps="5", stage_duration_s=30),
            "proxy": await run(config=proxy), "metrics": await run(config=asks),
            "nan": await run(qps="nan", stage_duration_s=1), "inf": await run(qps="1", stage_duration_s=1e308),
            "file": await simulate(**{"loadgen.trace_file": str(secret), "loadgen.arrival_process": "trace"}),
            "file in a section": await simulate(loadgen="{trace_file: " + str(secret) + ", arrival_process: trace}"),
            "profile": await simulate(**{"engine.profile": "../outside.json"}),
            "disk": await call(client, "simulate", config="short.json", qps="30000", stage_duration_s=60.0),
            "option": await call(client, "explain", run="latest", request="--help"),
            "status": await call(client, "status"),
        }

    said = talk(place, scenario)
    expected = {
        "knee_search": "adds stages by itself", "hold": "4000 asked, at most 40", "config": "planned seconds: 1800",
        "repeats": "planned seconds: 270", "clumps": "in the busiest second", "rush": "requests in the busiest second: 100",
        "tokens": "BENCH_MCP_MAX_TOKENS", "proxy": "through a proxy", "metrics": "asks 192.0.2.1 for metrics",
        "nan": "qps holds nan", "inf": "duration is 1e+308", "file": "only files below the working folder",
        "file in a section": "only files below the working folder", "profile": "only files below the working folder",
        "disk": "simulated requests", "option": "no run 'latest'",
    }  # fmt: skip
    assert {name: text for name, text in said.items() if name in expected and expected[name] not in text} == {}
    assert "the-secret" not in json.dumps(said) and said["status"]["running"] is None
    assert said["status"]["runs"] == []


@pytest.mark.timeout(180)
def test_of_runs_at_once_one_begins_and_the_clients_cancel_ends_it(place):
    """Three calls at once, and a second server of the same folder; then the client gives up its call."""
    async def scenario(client):
        first = await asyncio.gather(*[
            call(client, "run", qps="2", stage_duration_s=30, background=True) for _ in range(3)], call(client, "status"))
        async with Client(place.parameters(), read_timeout_seconds=100) as other:
            elsewhere = await call(other, "run", qps="2", stage_duration_s=1)
        await call(client, "cancel")
        async with Client(place.parameters(), read_timeout_seconds=100) as other:
            waiting = asyncio.create_task(call(other, "run", qps="2", stage_duration_s=30))
            while (await call(other, "status"))["running"] is None:
                await asyncio.sleep(0.1)
            waiting.cancel()
            for _ in range(600):  # it drains and writes its report
                status = await call(other, "status")
                if status["running"] is None:
                    break
                await asyncio.sleep(0.1)
        return first, elsewhere, status

    first, elsewhere, status = talk(place, scenario)
    started = [x for x in first if isinstance(x, dict) and "started" in x]
    refused = [x for x in first if isinstance(x, str)]
    assert len(started) == 1 and len(refused) == 2 and all("is going on" in x for x in refused)
    assert "another server's run" in elsewhere
    assert status["running"] is None and status["last_result"]["cancelled"] is True


def test_the_key_is_taken_out_in_every_spelling():
    for key in ("sk-plain", "a&b<c>", "back\\slash", "tab\tkey"):
        jobs = Jobs(Settings("http://127.0.0.1:1/v1", "m", key))
        page = f"text {key} json {json.dumps({'k': key})} html {html.escape(key)}"
        clean = jobs.scrub(page)
        assert key not in clean and clean.count("***") == 3
    assert Jobs(Settings("http://127.0.0.1:1/v1", "m", "")).scrub("text") == "text"


def test_a_command_that_was_killed_judged_nothing():
    answer = Jobs(Settings("http://127.0.0.1:1/v1", "m", "k"))._answer(1, "", "Fatal Python error")
    assert answer["meaning"] == "ended without a result" and "Fatal" in answer["messages"]
    assert Jobs(Settings("http://127.0.0.1:1/v1", "m", "k"))._answer(1, '{"verdict": "FAIL"}', "")["meaning"] == "the SLO is missed"


@pytest.mark.timeout(180)
def test_check_run_and_read_the_report(place):
    seen: list[tuple[float, float | None, str | None]] = []

    async def progress(done: float, total: float | None, text: str | None) -> None:
        seen.append((done, total, text))

    async def scenario(client):
        found = await call(client, "check")
        answer = await client.call_tool("run", {"qps": "4", "stage_duration_s": 3}, progress_callback=progress)
        assert KEY not in answer.model_dump_json() and not answer.is_error, answer
        run = answer.structured_content
        name = run["run"]
        status = await call(client, "status")
        report = await call(client, "report", run=name)
        summary = await client.read_resource(f"bench://runs/{name}/summary")
        page = await client.read_resource(f"bench://runs/{name}/report")
        first = await call(client, "explain", run=name, request="0:0")
        return found, run, status, report, summary, page, first

    found, run, status, report, summary, page, first = talk(place, scenario)
    assert found["exit_code"] == 0 and found["result"]["ok"] is True
    assert run["exit_code"] in (0, 1, 4) and run["result"]["verdict"] in ("PASS", "FAIL", "INVALID"), run
    assert not run["cancelled"] and status["running"] is None
    assert run["run"] in [r["run"] for r in status["runs"]]
    assert report["exit_code"] == (4 if run["result"]["verdict"] == "INVALID" else 0) and report["summary"].strip()
    assert summary.contents[0].text.strip() and "<html" in page.contents[0].text[:2000].lower()
    assert KEY not in page.contents[0].text
    assert first["result"]["row"]["status"] == "ok"
    assert seen and seen[-1][0] == seen[-1][1] == 3.0
    # it went to the address of the environment although the config names another
    config = json.loads((place.folder / "runs" / run["run"] / "run.json").read_text())["config"]
    assert config["base_url"] == place.env["BENCH_BASE_URL"]


@pytest.mark.timeout(180)
def test_a_background_run_is_alone_and_can_be_cancelled(place):
    async def scenario(client):
        started = await call(client, "run", qps="3", stage_duration_s=35, background=True)
        second = await call(client, "run", qps="1", stage_duration_s=1)
        for _ in range(200):  # until it sends
            status = await call(client, "status")
            if status["running"] and "running:" in status["running"]["last"] or "plan:" in str(status["running"]):
                break
            await asyncio.sleep(0.1)
        before = time.monotonic()
        result = await call(client, "cancel")
        return started, second, result, time.monotonic() - before, await call(client, "status"), await call(client, "cancel")

    started, second, result, took, status, again = talk(place, scenario)
    assert started["planned_s"] == 35 and "is going on" in second
    assert result["cancelled"] is True and result["run"] == started["started"] and took < 30
    assert status["running"] is None and again["cancelled"] is False


@pytest.mark.timeout(180)
def test_simulate_plan_and_explain(place):
    async def scenario(client):
        done = await call(client, "simulate", config="configs/demo.json", qps="10,18,24", stage_duration_s=20.0,
                          settings={"admission.max_num_queued_reqs": "5", "admission.reject_on_budget_exceed": "true"})
        name = Path(done["result"]["run_dir"]).name
        planned = await call(client, "plan", run=name, target_qps=40.0, growth=0.5)
        told = await call(client, "explain", run=name, request="0:3")
        checked = await call(client, "validate", config="configs/demo.json", qps="5")
        bad = await call(client, "plan", run="nothing")
        return done, planned, told, checked, bad

    done, planned, told, checked, bad = talk(place, scenario)
    assert done["exit_code"] in (0, 1) and done["result"]["knee_qps"], done
    assert planned["result"]["watermark_qps"] > 5, planned
    assert {d["event"] for d in told["result"]["decisions"]} >= {"accepted", "scheduled", "first_token", "finished"}
    assert checked["result"]["ok"] is True and "no run 'nothing'" in bad


@pytest.mark.parametrize(("gone", "said"), [
    (("BENCH_BASE_URL",), "base URL"), (("BENCH_API_KEY",), "key"), (("BENCH_MODEL",), "model"),
    (("BENCH_BASE_URL", "BENCH_MODEL"), "base URL (BENCH_BASE_URL or TAOTOKEN_BASE_URL); model"),
])
def test_every_missing_piece_is_named(place, gone, said):
    with pytest.raises(SettingsError, match="missing: " + re.escape(said)) as caught:
        read_settings({k: v for k, v in place.env.items() if k not in gone})
    assert KEY not in str(caught.value)


def test_the_other_names_and_a_key_file_do_as_well(place):
    names = {"TAOTOKEN_BASE_URL": "http://127.0.0.1:1/v1", "TAOTOKEN_MODEL_ID": "x",
             "BENCH_API_KEY_FILE": str(place.folder / "key"), "BENCH_MCP_MAX_QPS": "3"}
    found = read_settings(names)
    assert (found.base_url, found.model, found.key, found.max_qps) == ("http://127.0.0.1:1/v1", "x", KEY, 3.0)
    assert KEY not in repr(found)
    with pytest.raises(SettingsError, match="BENCH_MCP_MAX_QPS"):
        read_settings({**names, "BENCH_MCP_MAX_QPS": "many"})


def test_it_refuses_to_start_without_the_three_pieces(place, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BENCH_", "TAOTOKEN_"))}
    env |= {k: v for k, v in place.env.items() if k != "BENCH_MODEL"}
    done = subprocess.run([sys.executable, "-m", "bench.server"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          cwd=tmp_path, env=env, timeout=60, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "missing: model" in done.stderr and KEY not in done.stderr


def test_only_protocol_on_standard_output(place):
    """A client that is not the SDK: every line of standard output is a JSON-RPC message, also while a command runs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BENCH_", "TAOTOKEN_"))} | place.env
    process = subprocess.Popen([sys.executable, "-m", "bench.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, cwd=place.folder, env=env)
    assert process.stdin is not None and process.stdout is not None

    def send(**message) -> None:
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        process.stdin.flush()

    try:
        send(id=1, method="initialize", params={"protocolVersion": "2025-06-18", "capabilities": {},
                                                "clientInfo": {"name": "t", "version": "1"}})
        lines = [process.stdout.readline()]
        send(method="notifications/initialized")
        send(id=2, method="tools/call", params={"name": "validate", "arguments": {"qps": "5"}})
        lines.append(process.stdout.readline())
    finally:
        process.stdin.close()
        lines += process.stdout.readlines()
        process.wait(20)
    messages = [json.loads(line) for line in lines if line.strip()]
    assert [m["id"] for m in messages] == [1, 2] and all(m["jsonrpc"] == "2.0" for m in messages)
    assert messages[0]["result"]["serverInfo"]["name"] == "scheduler-bench" and process.returncode == 0
