"""`bench rollout PLAN`: a new scheduling policy through replay, shadow, gray and full, with automatic rollback.

Input: a plan file. Output: a journal, the policy in force (`active.json`), text; an exit code.
Does not: judge (control/rollout.py) or schedule (engine/arms.py). It acts on the embedded engine: in virtual time, or
on a running one (bench/commands/rollout_live.py).

1. The journal (`journal.ndjson`) is only ever appended to and is on the disk before anything is done.
2. `active.json` says who uses which policy; it is replaced in one step, and only by an action of the journal.
3. One rollout at a time per service: a lock that the system gives back when the process dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

EXIT_ROLLED_BACK, EXIT_USAGE = 1, 2
JOURNAL, ACTIVE = "journal.ndjson", "active.json"
TELL_EVERY = 10  # blocks between two judgements in the journal; failures are always written


class RolloutError(Exception):
    """The rollout cannot go on; the text says what to do."""


@click.command(
    "rollout",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""A new policy through replay, shadow, gray and full; a failed gate rolls it back by itself.

    Runs on the embedded engine in virtual time, or with --live on one that is running and gets its load from elsewhere.
    The state is kept under --home: the same command goes on where it was interrupted.

    Exit code 0: the new policy serves everybody; 1: rolled back; 2: the plan cannot be used, or another rollout runs.

    \b
    Example:
      bench rollout configs/study/rollout_good.yaml
      bench rollout configs/study/rollout_bad.yaml --json
      bench rollout plan.yaml --live http://127.0.0.1:8000
    """,
)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--home",
    type=click.Path(path_type=Path),
    default=Path("rollouts"),
    show_default=True,
    help="Folder of the journals, one folder per rollout.",
)
@click.option(
    "--live",
    metavar="URL",
    help="A running embedded engine (bench serve-engine): shadow, gray and full take place in it. Also key `service` "
    "of the plan.",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(min=1.0),
    default=60.0,
    show_default=True,
    help="Live: stop when no arrival was observed for this long; the state stays.",
)
@click.option("--check", "only_check", is_flag=True, help="Check the plan and say what each gate needs; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output at the end.")
@click.option("--quiet", "-q", is_flag=True, help="Only the result.")
def command(
    plan: Path, home: Path, live: str | None, idle_s: float, only_check: bool, as_json: bool, quiet: bool
) -> None:
    """Roll out and exit."""
    from bench.commands.rollout_plan import PlanFileError, read_plan
    from bench.config import ConfigError

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    try:
        loaded = read_plan(plan)
        if only_check:
            _needs(loaded, click.echo)
            return
        with lock(home, loaded.config):
            folder = home / loaded.rollout.name
            if live or loaded.service:
                from bench.commands.rollout_live import run_live

                result = run_live(loaded, folder, say, live or loaded.service, idle_s)
            else:
                result = run(loaded, folder, say)
    except (PlanFileError, ConfigError, RolloutError) as error:
        click.echo(f"bench rollout: {error}", err=True)
        sys.exit(EXIT_USAGE)
    click.echo(json.dumps(result) if as_json else result["sentence"])
    sys.exit(0 if result["status"] == "completed" else EXIT_ROLLED_BACK)


def _needs(loaded: Any, say: Callable[[str], None]) -> None:
    from control.rollout import needed_requests

    rollout = loaded.rollout
    say(f"{rollout.name}: plan is fine; each gate of each stage at error {rollout.gate_alpha:.2g}")
    for stage in rollout.stages:
        for gate in rollout.gates:
            need = None if gate.metric == "decision_us" else needed_requests(rollout, stage, gate)
            if need is not None:
                say(
                    f"  {stage.name:<7} {gate.metric:<12} sees {gate.detect:g} within about {need} of "
                    f"{stage.requests} requests"
                )


@contextmanager
def lock(home: Path, config: Path) -> Iterator[None]:
    """Held for as long as the rollout runs; RolloutError when another one of the same service holds it."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(str(config.resolve()).encode()).hexdigest()[:12]
        handle = (home / f".lock-{name}").open("a+", encoding="utf-8")
    except OSError as error:
        raise RolloutError(f"{home}: {error.strerror}; give --home a folder that can be written") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            who = handle.read().strip() or "unknown"
            raise RolloutError(
                f"another rollout of {config.name} runs (process {who}); wait for it, or end it"
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


@dataclass
class Journal:
    """The append-only log of one rollout."""

    path: Path

    def events(self) -> list[dict[str, Any]]:
        """All whole lines. A torn last line is what a crash left behind: it never happened, and is cut off."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with self.path.open("r+b") as handle:
                handle.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.decode("utf-8").splitlines()]
        except ValueError as error:
            raise RolloutError(f"{self.path}: is damaged ({error}); move the folder away and start again") from None

    def add(self, **event: Any) -> None:
        """Append one event; it is on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(event, ensure_ascii=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())


def put_in_force(folder: Path, active: dict[str, Any]) -> None:
    """Replace `active.json` in one step; doing it twice changes nothing."""
    made = folder / (ACTIVE + ".new")
    with made.open("w", encoding="utf-8") as handle:
        handle.write(json.dumps(active, indent=1) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    made.replace(folder / ACTIVE)


def run(
    loaded: Any,
    folder: Path,
    say: Callable[[str], None],
    act: Callable[[Path, dict[str, Any]], None] = put_in_force,
    make_lab: Callable[[Any], Lab] | None = None,
) -> dict[str, Any]:
    """Go on from what the journal says, to the end. `act` puts an action's policy table in force; `make_lab` makes
    what judges a stage (default: both policies in virtual time)."""
    from control import rollout as rules

    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / JOURNAL)
    events = journal.events()
    try:
        state = rules.replay_events(events)
    except (ValueError, KeyError) as error:
        raise RolloutError(f"{journal.path}: {error}; move the folder away and start again") from None
    if not events:
        journal.add(event="started", name=loaded.rollout.name, plan=loaded.fingerprint)
    elif events[0].get("plan") != loaded.fingerprint:
        raise RolloutError(f"{folder} holds a rollout of another plan; give the plan another name, or another --home")
    elif state.status == rules.RUNNING:
        journal.add(event="resumed", stage=state.stage, passed=state.passed)
        say(f"going on with {loaded.rollout.name}: passed {', '.join(state.passed) or 'nothing'} so far")

    def do(action: dict[str, Any], *, meant: bool = False) -> None:
        if not meant:
            journal.add(event="intent", action=action)
        act(folder, action["active"])
        journal.add(event="done")

    if state.pending is not None:
        say(f"repairing: {state.pending['do']} was meant and not done")
        do(state.pending, meant=True)
        state = rules.replay_events(journal.events())
    lab = None
    while state.status == rules.RUNNING:
        stage = rules.next_stage(loaded.rollout, state)
        if stage is None:
            do(rules.complete(loaded.rollout))
        else:
            lab = lab or (make_lab or Lab)(loaded)
            do(rules.enter(loaded.rollout, stage, lab.gray))
            failed, requests = lab.judge(stage, folder, journal, say)
            if failed:
                reason = f"stage {stage.name}, after {requests} requests: {failed}"
                say(f"  rolling back: {reason}")
                do(rules.roll_back(loaded.rollout, reason))
            else:
                journal.add(event="passed", stage=stage.name, requests=requests)
                say(f"  {stage.name}: passed after {requests} requests")
        state = rules.replay_events(journal.events())
    name = loaded.rollout.name
    sentence = (
        f"{name}: the new policy serves everybody"
        if state.status == rules.COMPLETED
        else f"{name}: rolled back, the old policy serves everybody; {state.reason}"
    )
    return {
        "name": name,
        "status": state.status,
        "reason": state.reason,
        "passed": state.passed,
        "journal": str(journal.path),
        "active": state.active,
        "sentence": sentence,
    }


def note_judged(journal: Journal, stage: Any, watch: Any, judged: list[Any]) -> None:
    """Write down what the gates say after a block."""
    journal.add(
        event="judged",
        stage=stage.name,
        block=watch.blocks,
        requests=watch.requests,
        gates=[{"metric": j.metric, "status": j.status, "text": j.text} for j in judged],
    )


def say_judged(stage: Any, judged: list[Any], say: Callable[[str], None]) -> None:
    """The gates at the end of a stage that none of them failed, and what it means that one is not decided."""
    for j in judged:
        say(f"  {stage.name}: {j.text} ({j.status})")
    if pending := [j.metric for j in judged if j.status == "pending"]:
        say(
            f"  {stage.name}: pending ({', '.join(pending)}): the interval reaches beyond what is accepted, so neither "
            f"a loss nor its absence is certain. A stage passes when no gate is certain of a loss by its last request; "
            f"more requests (stages.{stage.name}.requests) narrow the interval"
        )


class Lab:
    """The embedded engine with both policies, in virtual time."""

    def __init__(self, loaded: Any) -> None:
        from bench.config import load_config
        from control.rollout import gray_tenants
        from engine.settings import EngineConfig

        self.loaded = loaded
        self.config = load_config(loaded.config).config
        merged = load_config(loaded.config, overrides=dict(loaded.new_policy)).config
        self.old = EngineConfig.from_config(self.config).with_(replicas=loaded.replicas)
        self.new = EngineConfig.from_config(merged).with_(replicas=loaded.replicas)
        shares = {t.name: t.share for t in self.config.tenants} or {
            f"tenant-{i:03d}": 1.0 / loaded.tenants for i in range(loaded.tenants)
        }
        self.names = tuple(shares)
        gray = next((s for s in loaded.rollout.stages if s.name == "gray"), None)
        self.gray = list(loaded.named) or (gray_tenants(shares, gray.share, loaded.rollout.name) if gray else [])
        unknown = self._unknown(self.gray)
        if unknown:
            raise RolloutError(
                f"stages.gray.tenants: {', '.join(unknown)} are no tenants of {loaded.config.name}; they "
                f"are {', '.join(self.names[:10])}"
            )

    def _unknown(self, names: list[str]) -> list[str]:
        return sorted(set(names) - set(self.names))

    def traffic(self, stage: Any) -> Any:
        """Arrivals of a stage: the trace for the replay when there is one, else the load with a seed per stage."""
        from bench.workload.plan import PlanError, build_plan
        from bench.workload.schedule import build_schedule
        from engine.arms import traffic_of

        loaded, seed = self.loaded, self.loaded.seed * 100 + ("replay", "shadow", "gray", "full").index(stage.name)
        rate = loaded.stage_qps.get(stage.name) or loaded.qps or self.config.loadgen.target_qps
        rate *= loaded.replicas
        config = self.config
        try:
            if stage.name == "replay" and loaded.trace is not None:
                from bench.config import load_config

                config = load_config(
                    loaded.config,
                    overrides={
                        "loadgen.trace_file": str(loaded.trace),
                        "loadgen.arrival_process": "trace",
                        "loadgen.trace_rate_scale": loaded.rate_scale,
                    },
                ).config
                plan = build_plan(config, "replay", seed=seed)
            else:
                plan = build_plan(config, "single", qps=[rate], duration_s=stage.requests / rate * 1.2 + 10, seed=seed)
        except (PlanError, ValueError) as error:
            raise RolloutError(str(error)) from None
        return traffic_of(plan, build_schedule(plan, plan.stages[0]), config, self.names, seed, stage.requests), seed

    def judge(self, stage: Any, folder: Path, journal: Journal, say: Callable[[str], None]) -> tuple[str, int]:
        """(why it failed or "", requests used) of one stage, block by block."""
        from control.rollout import StageWatch
        from engine import arms

        traffic, seed = self.traffic(stage)
        if stage.name == "replay" and self.loaded.trace is not None and self._colder(traffic):
            say(
                f"  loss: {self.loaded.trace} does not say which prompts began alike (no hash_ids); here none do, "
                "so both policies meet a colder prefix cache than the service had"
            )
        slow = self._decision_gate(stage)
        if slow:
            return slow, 0
        if stage.name != "gray":
            blocks = list(arms.paired(self.old, self.new, traffic, stage.block, seed))
            (folder / f"difference_{stage.name}.json").write_text(
                json.dumps(arms.difference(blocks), indent=1) + "\n", encoding="utf-8"
            )
        else:
            blocks = list(arms.split(self.old, self.new, traffic, self.gray, stage.block, seed))
        watch = StageWatch(self.loaded.rollout, stage)
        judged: list[Any] = []
        for number, (new, old) in enumerate(blocks, 1):
            judged = watch.add(new, old)
            failed = next((j for j in judged if j.status == "failed"), None)
            if failed is not None or number % TELL_EVERY == 0:
                note_judged(journal, stage, watch, judged)
            if failed is not None:
                return failed.text, watch.requests
        say_judged(stage, judged, say)
        return "", watch.requests

    def _colder(self, traffic: Any) -> bool:
        """Whether an engine has a prefix cache and no prompt of the traffic finds its start there."""
        caching = self.old.prefix_caching or self.new.prefix_caching
        return caching and traffic.unique and traffic.schedule.shared is None

    def _decision_gate(self, stage: Any) -> str:
        """Whether the new policy thinks too long; measured once, in the first stage, while 1,000 requests wait."""
        from engine.decision_time import decision_us

        gate = next((g for g in self.loaded.rollout.gates if g.metric == "decision_us"), None)
        if gate is None or stage.name != self.loaded.rollout.stages[0].name:
            return ""
        times = sorted(decision_us(self.new, requests=500).tolist())
        p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
        return (
            f"decision_us: p99 {p99:.0f} us > {gate.limit:.0f} us at 1,000 waiting" if p99 > (gate.limit or 0) else ""
        )
