"""`bench rollout --live URL`: the stages of a rollout take place in a running embedded engine.

Input: a plan, the engine's address. Output: the engine's policy table, the journal, `active.json`; what was judged.
Does not: send load (whoever uses the engine does), judge (control/rollout.py) or serve (engine/live.py).

1. The engine gets a table before `active.json` does, and both between an intent and its `done` in the journal.
2. Observations are read by cursor. After a restart of this command the stage is judged from the engine's own record of
   it; after one of the engine the table is put in force again, and judging goes on with what comes.
3. A failed gate rolls back with the next request to the engine, before anything else is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.commands.rollout import TELL_EVERY, Journal, Lab, RolloutError, note_judged, put_in_force, run, say_judged

POLL_S = 0.2
AWAY_S = 30.0  # an engine may take this long to come back
LONELY = 400  # observations of one arm without one of the other
EXAMPLES = 20
CLOSE_S = 0.005  # first tokens nearer than this came at the same time, as far as clocks that wait can tell


class Engine:
    """A running embedded engine, as far as a rollout needs it."""

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        base = url.rstrip("/")
        self.base = base[: -len("/v1")] if base.endswith("/v1") else base
        self._sleep = sleep
        state = self.ask("GET", "/debug/rollout", first=True)
        if not isinstance(state, dict) or state.get("engine") != "scheduler-bench":
            raise RolloutError(self._no_engine("its /debug/rollout is something else"))
        self.state = state

    def _no_engine(self, why: str) -> str:
        return (
            f"{self.base} is not the embedded engine ({why}); a live rollout acts on an engine that "
            "`bench serve-engine` runs. Real services are watched, never steered: `bench watch`"
        )

    def ask(self, method: str, path: str, body: Any = None, *, first: bool = False) -> Any:
        """The JSON of an answer; waits for an engine that is away, except the first time. Raises RolloutError."""
        return json.loads(self._open(method, path, body, first)[0])

    def rows(self, path: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The JSON lines of an answer and its headers."""
        data, headers = self._open("GET", path, None, False)
        return [json.loads(line) for line in data.splitlines()], headers

    def _open(self, method: str, path: str, body: Any, first: bool) -> tuple[bytes, dict[str, str]]:
        import urllib.error
        import urllib.request

        from bench.config.secrets import api_key_from_environment

        headers = {"Content-Type": "application/json"}
        if key := api_key_from_environment():
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until = time.monotonic() + AWAY_S
        while True:
            try:
                request = urllib.request.Request(self.base + path, data, headers, method=method)
                with opener.open(request, timeout=10) as answer:
                    return answer.read(), {name.lower(): value for name, value in answer.headers.items()}
            except urllib.error.HTTPError as error:
                if first and error.code in (404, 405, 501):
                    raise RolloutError(self._no_engine(f"status {error.code} for {path}")) from None
                raise RolloutError(f"{self.base}{path}: status {error.code}: {_reason(error.read())}") from None
            except (OSError, ValueError) as error:
                if first or time.monotonic() > until:
                    raise RolloutError(
                        f"{self.base} cannot be reached ({error}); start the engine (`bench serve-engine --active "
                        "FOLDER/active.json` begins where the rollout stands), then give the same command again"
                    ) from None
                self._sleep(POLL_S)


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no text"


def run_live(loaded: Any, folder: Path, say: Callable[[str], None], url: str, idle_s: float) -> dict[str, Any]:
    """Go on with the rollout in the engine at `url`, to the end."""
    engine = Engine(url)
    replicas = int(engine.state["replicas"])
    if replicas < 2 and any(s.name == "gray" for s in loaded.rollout.stages):
        raise RolloutError(
            f"{engine.base} has 1 replica; a gray stage needs at least 2, each policy schedules its own: start the "
            "engine with engine.replicas above 1, or leave stages.gray out"
        )
    loaded = replace(loaded, replicas=replicas, fingerprint=loaded.fingerprint + "-live")
    lab = LiveLab(loaded, engine, idle_s)
    if lab.fingerprint != engine.state["config"]:
        raise RolloutError(
            f"{engine.base} was started with other settings than {loaded.config}; name the config that the engine "
            "serves, or start it with this one"
        )

    def act(where: Path, active: dict[str, Any]) -> None:
        table = lab.table(active)
        engine.ask("POST", "/debug/rollout", table)
        put_in_force(where, table)

    result = run(loaded, folder, say, act=act, make_lab=lambda _: lab)
    if result["active"] is not None and engine.ask("GET", "/debug/rollout")["rollout"] in ("", loaded.rollout.name):
        act(folder, result["active"])  # an engine that was started anew since then
    return result


class LiveLab(Lab):
    """A running engine: replay is judged in virtual time, the other stages by what the engine observed."""

    def __init__(self, loaded: Any, engine: Engine, idle_s: float) -> None:
        from engine.handover import fingerprint
        from engine.settings import EngineConfig

        super().__init__(loaded)
        self.engine = engine
        self.idle_s = idle_s
        self.fingerprint = fingerprint(EngineConfig.from_config(self.config))
        if not self.config.tenants:  # nobody knows their names: the engine goes by the hash of each
            self.gray = list(loaded.named)

    def _unknown(self, names: list[str]) -> list[str]:
        return super()._unknown(names) if self.config.tenants else []

    def table(self, active: dict[str, Any]) -> dict[str, Any]:
        """What the engine is told, and `active.json` holds."""
        limits = [g.limit for g in self.loaded.rollout.gates if g.metric == "ttft_p95" and g.limit]
        return {**active, "new_policy": self.loaded.new_policy, "ttft_horizon_s": max(limits, default=0.0)}

    def judge(self, stage: Any, folder: Path, journal: Journal, say: Callable[[str], None]) -> tuple[str, int]:
        """(why it failed or "", requests used) of one stage."""
        from control.rollout import MIN_BLOCKS, StageWatch

        if stage.name == "replay":
            return super().judge(stage, folder, journal, say)
        slow = self._decision_gate(stage)
        if slow:
            return slow, 0
        say(f"  {stage.name}: observing {self.engine.base}, up to {stage.requests} requests")
        watch, judged, differences = StageWatch(self.loaded.rollout, stage), [], Differences()
        try:
            for new, old in self.blocks(stage, folder, journal, differences):
                judged = watch.add(new, old)
                failed = next((j for j in judged if j.status == "failed"), None)
                if failed is not None:
                    # the journal's fsync comes before the rollback; it takes milliseconds
                    note_judged(journal, stage, watch, judged)
                    return failed.text, watch.requests
                if watch.blocks % TELL_EVERY == 0:
                    note_judged(journal, stage, watch, judged)
        finally:
            differences.write(folder, stage.name)
        if watch.blocks < MIN_BLOCKS:
            raise RolloutError(
                f"stage {stage.name}: {stage.requests} requests made {watch.blocks} blocks of {stage.block} of each "
                f"arm; {MIN_BLOCKS} are needed to judge. The load is not divided as planned: give the stage more "
                "requests, smaller blocks or another share"
            )
        say_judged(stage, judged, say)
        return "", watch.requests

    def blocks(
        self, stage: Any, folder: Path, journal: Journal, differences: Differences
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Blocks of both arms; a block of gray ends when each arm has enough of its own, as in virtual time.

        The stage's requests are never exceeded: what is left of a block then is not judged.
        """
        from control.rollout import Sample

        new: list[Any] = []
        old: list[Any] = []
        for used, row in enumerate(self.rows(stage, folder, journal), 1):
            for name, arm in (("new", new), ("old", old)):
                if row[name] is not None:
                    arm.append(Sample(**row[name]))
            differences.add(row)
            if len(new) >= stage.block and len(old) >= stage.block:
                yield new, old
                new, old = [], []
            elif max(len(new), len(old)) >= LONELY + stage.block:
                raise RolloutError(
                    f"stage {stage.name}: {len(new)} arrivals under the new policy, {len(old)} under the old one; the "
                    "arms cannot be compared: name tenants of the load (x-tenant), or take another share"
                )
            if used >= stage.requests:
                return

    def rows(self, stage: Any, folder: Path, journal: Journal) -> Iterator[dict[str, Any]]:
        """The engine's observations of the stage, as they come."""
        after, epoch, last = 0, "", time.monotonic()
        while True:
            found, headers = self.engine.rows(f"/debug/rollout/samples?after={after}&limit=1000")
            if headers["x-epoch"] != epoch:
                if epoch:
                    said = "the engine started anew, or its table was changed"
                    journal.add(event="note", stage=stage.name, text=said)
                    table = json.loads((folder / "active.json").read_text(encoding="utf-8"))
                    self.engine.ask("POST", "/debug/rollout", table)
                    found, headers = self.engine.rows("/debug/rollout/samples?limit=1000")
                epoch = headers["x-epoch"]
            after = int(headers["x-next-cursor"])
            if found:
                last = time.monotonic()
                yield from found
            elif time.monotonic() - last > self.idle_s:
                raise RolloutError(
                    f"stage {stage.name}: no arrival was observed for {self.idle_s:g} s; send load to "
                    f"{self.engine.base} and give the same command again: it goes on here"
                )
            else:
                time.sleep(POLL_S)


class Differences:
    """What the two policies decided differently about the same arrivals, with some of them by name."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.blocks: list[Any] = []

    def add(self, row: dict[str, Any]) -> None:
        """One observation; those of one arm say nothing."""
        from control.rollout import Sample

        if row["new"] is None or row["old"] is None:
            return
        new, old = Sample(**row["new"]), Sample(**row["old"])
        self.blocks.append(([new], [old]))
        if len(self.rows) < EXAMPLES and (new.met != old.met or new.refused != old.refused):
            self.rows.append(row)

    def write(self, folder: Path, stage: str) -> None:
        """`difference_STAGE.json`: counts, and the first arrivals that fared differently."""
        from engine.arms import difference

        if self.blocks:
            data = {**difference(self.blocks, CLOSE_S), "examples": self.rows}
            (folder / f"difference_{stage}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
