"""A rollout in a running engine: a good policy goes to full, a bad one back, through restarts; other services are refused."""
from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands.engine_process import start_engine
from bench.commands.rollout import Journal, RolloutError, command
from bench.commands.rollout_live import Engine, run_live
from bench.commands.rollout_plan import PlanFileError, read_plan

# Steps of 2 ms; an answer of 30 tokens takes 60 ms, so 90 requests/s keep some six inside. With one sequence at a time a
# replica makes 16 a second: two of them cannot carry 90.
CONFIG = {
    "model": "m", "scheduler": {"policy": "fcfs", "max_num_seqs": 32, "batch_size_cap": 32},
    "slo": {"ttft_deadline_ms": 400, "tpot_deadline_ms": 100}, "admission": {"reject_on_budget_exceed": False},
    "engine": {"embedded": True, "time_scale": 0.25, "noise_cv": 0.0, "max_model_len": 8192, "replicas": 2},
}
GOOD, BAD = {"scheduler.policy": "edf"}, {"scheduler.batch_size_cap": 1}
RATE = 90.0
STAGES = {"shadow": {"requests": 150, "block": 10}, "gray": {"requests": 400, "block": 10, "share": 0.5},
          "full": {"requests": 150, "block": 10}}


class Load:
    """Requests of 20 tenants to an engine, from a thread, until told to stop; failures of the engine are counted."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._place = (host, int(port))
        self._stop = threading.Event()
        self.sent = self.failed = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(30)

    async def _run(self) -> None:
        start, tasks = time.monotonic(), set()
        while not self._stop.is_set():
            task = asyncio.create_task(self._one(self.sent))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            self.sent += 1
            await asyncio.sleep(max(0.0, start + self.sent / RATE - time.monotonic()))
        for task in list(tasks):
            task.cancel()

    async def _one(self, i: int) -> None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 50}], "max_tokens": 30,
                           "ignore_eos": True}).encode()
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nConnection: close\r\nx-request-id: l{i}\r\n"
                f"x-tenant: tenant-{i % 20}\r\nContent-Length: {len(body)}\r\n\r\n")
        try:
            reader, writer = await asyncio.open_connection(*self._place)
            writer.write(head.encode() + body)
            self.failed += not (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        except OSError:
            self.failed += 1


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def plan(tmp_path: Path, new_policy: dict, **changes):
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps({"name": "live", "config": "config.json", "new_policy": new_policy, "stages": STAGES,
                                "gates": [{"metric": "attainment", "margin": 0.05, "detect": 0.6}]} | changes))
    return path


def events(folder: Path) -> list[dict]:
    return Journal(folder / "journal.ndjson").events()


def last_judged(folder: Path) -> dict:
    return [e for e in events(folder) if e["event"] == "judged"][-1]


def state_of(url: str) -> dict:
    return Engine(url).state


def test_a_good_policy_goes_to_full(tmp_path, config):
    with start_engine(config) as engine, Load(engine.base_url) as load:
        done = CliRunner().invoke(command, [str(plan(tmp_path, GOOD)), "--home", str(tmp_path / "good"), "--json", "-q",
                                            "--live", engine.base_url])
        assert done.exit_code == 0, done.output
        result = json.loads(done.output)
        assert result["status"] == "completed" and result["passed"] == ["shadow", "gray", "full"]
        state = state_of(engine.base_url)
        assert state["stage"] == "complete" and state["new_replicas"] == [0, 1] and state["new_policy"] == GOOD
        folder = tmp_path / "good" / "live"
        active = json.loads((folder / "active.json").read_text())
        assert active["stage"] == "complete" and active["new_policy"] == GOOD
        assert json.loads((folder / "difference_shadow.json").read_text())["same"] > 100
        # another rollout on top of one that is in force would compare with the wrong policy
        other = CliRunner().invoke(command, [str(plan(tmp_path, BAD, name="other")), "--home", str(tmp_path / "o"), "-q",
                                             "--live", engine.base_url])
        assert other.exit_code == 2 and "is at stage complete" in other.output
        assert load.failed == 0


def test_a_bad_policy_is_rolled_back_in_the_shadow(tmp_path, config):
    with start_engine(config) as engine, Load(engine.base_url) as load:
        bad = read_plan(plan(tmp_path, BAD, stages={"shadow": STAGES["shadow"], "gray": STAGES["gray"]}))
        result = run_live(bad, tmp_path / "bad", lambda _: None, engine.base_url, 20.0)
        assert result["status"] == "rolled_back" and "stage shadow" in result["reason"] and result["passed"] == []
        assert last_judged(tmp_path / "bad")["requests"] <= STAGES["shadow"]["requests"]
        found = json.loads((tmp_path / "bad" / "difference_shadow.json").read_text())
        assert found["only_old_met"] >= 20 and found["only_new_met"] == 0 and found["examples"]
        # the twin's decisions were recorded, nobody was served by it
        name = found["examples"][0]["request_id"]
        twin, _ = Engine(engine.base_url).rows(f"/debug/decisions?of=twin&request_id={name}")
        live, _ = Engine(engine.base_url).rows(f"/debug/decisions?request_id={name}")
        assert [e["event"] for e in live] == ["accepted", "scheduled", "first_token", "finished"]
        assert twin and twin[0]["event"] == "accepted" and twin[0]["numbers"]["waiting"] > live[0]["numbers"]["waiting"]
        state = state_of(engine.base_url)
        assert state["stage"] == "rolled_back" and state["new_replicas"] == [] and load.failed == 0


def test_gray_alone_takes_a_bad_policy_back_and_survives_a_restart_of_the_command(tmp_path, config):
    """The command dies in the stage; the next one judges from the engine's record and rolls back."""
    loaded = read_plan(plan(tmp_path, BAD, stages={"gray": STAGES["gray"]}))
    folder = tmp_path / "gray"

    class Died(Exception):
        pass

    def say(text: str) -> None:
        if "observing" in text:
            raise Died

    with start_engine(config) as engine, Load(engine.base_url) as load:
        with pytest.raises(Died):
            run_live(loaded, folder, say, engine.base_url, 20.0)
        state = state_of(engine.base_url)
        assert state["stage"] == "gray" and state["new_replicas"] == [1]  # the engine goes on without the command
        until = time.monotonic() + 20
        while state_of(engine.base_url)["observed"] < 60 and time.monotonic() < until:
            time.sleep(0.05)
        rows, headers = Engine(engine.base_url).rows("/debug/rollout/samples")
        first = run_live(loaded, folder, lambda _: None, engine.base_url, 20.0)
        assert first["status"] == "rolled_back" and "stage gray" in first["reason"]
        assert last_judged(folder)["requests"] <= STAGES["gray"]["requests"]
        assert [e["event"] for e in events(folder)].count("resumed") == 1
        assert headers["x-lost"] == "0" and len(rows) >= 60
        arms: dict[str, set] = {}
        for row in rows:
            arms.setdefault(row["tenant"], set()).add(row["arm"])
        assert all(len(arm) == 1 for arm in arms.values()) and set.union(*arms.values()) == {"new", "old"}
        assert state_of(engine.base_url)["stage"] == "rolled_back"
        # nothing is left of it: the same command again says so and changes nothing
        before = events(folder)
        again = run_live(loaded, folder, lambda _: None, engine.base_url, 20.0)
        assert again["status"] == "rolled_back" and events(folder) == before and load.failed == 0


def test_a_gray_stage_that_could_not_be_judged_does_not_pass(tmp_path, config):
    """One tenant of twenty: 150 requests hold 7 of it, one block of 5; 12 are needed."""
    stage = {"gray": {"requests": 150, "block": 5, "tenants": ["tenant-1"]}}
    with start_engine(config) as engine, Load(engine.base_url):
        with pytest.raises(RolloutError, match="150 requests made 1 blocks of 5 of each arm; 12 are needed"):
            run_live(read_plan(plan(tmp_path, GOOD, stages=stage)), tmp_path / "g", lambda _: None, engine.base_url, 20.0)
        assert state_of(engine.base_url)["stage"] == "gray" and not any(e["event"] == "passed" for e in events(tmp_path / "g"))


@pytest.mark.slow
def test_the_engine_dies_in_gray_and_comes_back_where_it_was(tmp_path, config):
    loaded = read_plan(plan(tmp_path, GOOD))
    folder, found = tmp_path / "state", []
    engine = start_engine(config)
    port = int(engine.base_url.rpartition(":")[2])
    url = engine.base_url
    runner = threading.Thread(target=lambda: found.append(run_live(loaded, folder, lambda _: None, url, 30.0)))
    try:
        with Load(url):
            runner.start()
            until = time.monotonic() + 40
            while time.monotonic() < until:
                state = state_of(url)
                if state["stage"] == "gray" and state["observed"] > 40:
                    break
                time.sleep(0.05)
            engine.stop()
            tenants = state["new_policy_tenants"], state["new_policy_share"]
            engine = start_engine(config, port=port)  # without --active: the command puts the table in force again
            runner.join(60)
    finally:
        engine.stop()
    assert found and found[0]["status"] == "completed" and found[0]["passed"] == ["shadow", "gray", "full"]
    notes = [e for e in events(folder) if e["event"] == "note"]
    assert len(notes) == 1 and notes[0]["stage"] == "gray" and tenants == ([], 0.5)


def test_an_engine_starts_where_its_rollout_stands(tmp_path, config):
    """`--active`: gray is in force before the first request; a table that cannot be is exit code 2."""
    import subprocess
    import sys

    active = tmp_path / "active.json"
    active.write_text(json.dumps({"rollout": "r", "stage": "gray", "new_policy_share": 0.5, "new_policy_tenants": ["a"],
                                  "new_policy": GOOD}))
    call = [sys.executable, "-m", "engine.serve", "--config", str(config), "--active", str(active)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[1]
            state = state_of(url)
            assert state["stage"] == "gray" and state["new_policy_tenants"] == ["a"] and state["new_replicas"] == [1]
        finally:
            process.terminate()
    active.write_text(json.dumps({"rollout": "r", "stage": "full", "new_policy": {"engine.num_blocks": 5000}}))
    done = subprocess.run(call, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "num_blocks cannot change while the engine runs" in done.stderr


def test_tenants_of_the_config_are_named_to_the_engine(tmp_path, config):
    """Ten tenants of equal share: half of the load is five of them, in the order of their hash (control/rollout.py)."""
    from bench.commands.rollout_live import LiveLab
    from control.rollout import enter, gray_tenants

    names = [f"t{i}" for i in range(10)]
    config.write_text(json.dumps({**CONFIG, "tenants": [{"name": n, "share": 0.1} for n in names]}))
    loaded = read_plan(plan(tmp_path, GOOD, gates=[{"metric": "ttft_p95", "limit_ms": 700, "detect": 0.6}]))
    lab = LiveLab(loaded, None, 1.0)
    told = lab.table(enter(loaded.rollout, loaded.rollout.stage("gray"), lab.gray)["active"])
    assert told["new_policy_tenants"] == gray_tenants(dict.fromkeys(names, 0.1), 0.5, "live")
    assert len(told["new_policy_tenants"]) == 5 and told["ttft_horizon_s"] == 0.7 and told["new_policy"] == GOOD


# -- refusals ----------------------------------------------------------------------------------------------------------


class Stranger(http.server.BaseHTTPRequestHandler):
    """Some service that is not the embedded engine."""

    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        return None


def test_a_real_service_is_refused(tmp_path, config):
    server = http.server.HTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        done = CliRunner().invoke(command, [str(plan(tmp_path, GOOD, service=url)), "--home", str(tmp_path / "h")])
    finally:
        server.shutdown()
        server.server_close()
    assert done.exit_code == 2 and "is not the embedded engine" in done.output and "bench watch" in done.output
    assert not (tmp_path / "h" / "live").exists()  # no journal of a rollout that never was
    with pytest.raises(RolloutError, match="cannot be reached"):
        Engine(url)
    with pytest.raises(PlanFileError, match="service is 7"):
        read_plan(plan(tmp_path, GOOD, service=7))


def test_the_engine_must_serve_the_plan_s_config_and_have_two_replicas(tmp_path, config):
    single = tmp_path / "single.json"
    single.write_text(json.dumps({**CONFIG, "engine": {**CONFIG["engine"], "replicas": 1}}))
    with start_engine(single) as engine:
        with pytest.raises(RolloutError, match="has 1 replica"):
            run_live(read_plan(plan(tmp_path, GOOD)), tmp_path / "s", print, engine.base_url, 5.0)
        with pytest.raises(RolloutError, match="other settings"):
            run_live(read_plan(plan(tmp_path, GOOD, stages={"shadow": STAGES["shadow"]})), tmp_path / "s", print,
                     engine.base_url, 5.0)
        idle = read_plan(plan(tmp_path, GOOD, config="single.json", stages={"shadow": STAGES["shadow"]}))
        with pytest.raises(RolloutError, match="no arrival was observed for 0.1 s"):
            run_live(idle, tmp_path / "i", print, engine.base_url, 0.1)
        fixed = read_plan(plan(tmp_path, {"engine.num_blocks": 5000}, config="single.json", name="f",
                               stages={"shadow": STAGES["shadow"]}))
        Engine(engine.base_url).ask("DELETE", "/debug/rollout")
        with pytest.raises(RolloutError, match="num_blocks cannot change"):
            run_live(fixed, tmp_path / "f", print, engine.base_url, 5.0)
