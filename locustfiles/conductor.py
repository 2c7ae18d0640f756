"""The master's side of a run: walks the plan stage by stage and leaves a whole run folder.

Input: a plan, the settings, the workers that Locust has connected.
Output: the run folder, an exit code for Locust.
Does not: send load, parse answers, judge an SLO (that is `analysis/`).

1. Stages run one after the other (`stage_run.py`), on workers that are watched and replaced (`crew.py`).
2. A run that was begun leaves a whole folder, however it ends.
3. Locust's statistics and the ledger are compared before the run folder is closed.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment

from bench import __version__
from bench.config.limits import passed_limit
from bench.records.collect import Collector
from bench.records.ledger import PLAN
from bench.records.part import WHOLE, parse_part
from bench.records.server import ServerRow
from bench.records.stage import RunInfo
from bench.workload.plan import Plan, Stage
from bench.workload.schedule import plan_hash
from locustfiles import made_on, messages, stats
from locustfiles.clock import now_s
from locustfiles.meeting import MeetingError, open_meeting
from locustfiles.server_metrics import Scraper
from locustfiles.stage_run import POLL_S, StageRun

log = logging.getLogger("bench")

NextStage = Callable[[Plan, Path], Stage | None]  # (plan so far, run folder) -> one more stage, or the end


class Conductor(StageRun):
    """Runs one plan at a time on Locust's runner; made once per master or local process."""

    def __init__(self, environment: Environment, settings: Callable[[], dict[str, Any]]) -> None:
        super().__init__(environment)
        self._settings_of = settings
        self._greenlet: gevent.Greenlet | None = None
        self._next_stage: NextStage | None = None
        self._part = WHOLE
        self._refused = False
        self._scraper: Scraper | None = None

    # -- what others call -----------------------------------------------------------

    def begin(self, plan: Plan, *, shape: str, loop: str = "open", next_stage: NextStage | None = None) -> None:
        """Start a run in a greenlet of its own. Raises RuntimeError when one is running.

        `next_stage` is asked after the plan's last stage, when the run folder holds all rows so far: it answers one
        more stage, which joins the plan, or None for the end.
        """
        if not self.finished:
            raise RuntimeError("a run is in progress; stop it first")
        self._finished.clear()
        self._stop.clear()
        self._abort, self._stop_mark, self.interrupted = False, "", False
        self._next_stage = next_stage
        self._greenlet = gevent.spawn(self._run, plan, shape, loop)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the run has its whole folder."""
        return self._finished.wait(timeout_s)

    # -- the run --------------------------------------------------------------------------

    def _run(self, plan: Plan, shape: str, loop: str) -> None:
        csv_files = None
        try:
            settings = self._settings_of()
            self._open(plan, settings, shape, loop)
            assert self.collector is not None
            self._meet(plan, settings)
            csv_files = stats.FinalCSV(self.environment, self.collector.run_dir / "locust")
            if settings.get("metrics_url"):
                where = lambda: (self.run_time_s, self._stage_index())  # noqa: E731
                self._scraper = Scraper(
                    settings["metrics_url"], where, self._scraped, settings.get("metrics_headers", dict)
                )
            self._walk(plan, settings, loop)
            self._flush_stats()
            self._reconcile(loop)
        except MeetingError as error:
            self._refused = True
            self.collector.problem(str(error))  # type: ignore[union-attr]
        except Exception as error:
            log.exception("the run stopped on an error of its own")
            if self.collector is not None:
                self.collector.problem(f"the run stopped on an error of its own: {type(error).__name__}: {error}")
        finally:
            try:
                self._close(csv_files)
            finally:
                self.live.finish()
                self._finished.set()

    def _open(self, plan: Plan, settings: dict[str, Any], shape: str, loop: str) -> None:
        started = datetime.datetime.now(datetime.UTC)
        self._run_id = os.environ.get("BENCH_RUN_ID") or f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        run_dir = Path(settings["run_dir"] or Path(os.environ.get("BENCH_RUNS") or "runs") / self._run_id)
        os.environ.pop("BENCH_RUN_ID", None)  # a second run from the web page has a name of its own
        self._names = {stage.index: stage.name for stage in plan.stages}
        self._plan_text, self._lossy = plan.to_json(), set()
        self._part, self._meeting, self._refused = parse_part(settings["part"]), None, False
        info = RunInfo(
            run_id=self._run_id,
            started_utc=started.isoformat(timespec="seconds"),
            finished_utc=None,
            tool_version=__version__,
            versions=made_on.versions(),
            host=made_on.host(),
            seed=plan.run_seed,
            schedule_hash=plan_hash(plan) if loop == "open" else "",
            command=settings["command"] or sys.argv,
            config=settings["masked_config"],
            config_origin=settings["config_origin"],
            loop=loop,
            shape=shape,
            workers=len(self._clients()),
            target=settings["target_info"],
            preflight=settings["preflight"],
        )
        self.collector = Collector(run_dir, info)
        self.live.open_run(plan, settings["live"], run_id=self._run_id, run_dir=str(run_dir), loop=loop)
        self._t0_s, self._told_s = now_s(), 0.0
        log.info("run %s writes %s; schedule %s", self._run_id, run_dir, info.schedule_hash[:16] or "(closed loop)")

    def _meet(self, plan: Plan, settings: dict[str, Any]) -> None:
        """Come together with the masters of the other parts, when this one has a part. Raises MeetingError."""
        assert self.collector is not None
        if self._part == WHOLE:
            return
        load = f"{self._run_id}-{secrets.token_hex(3)}"  # a run folder's name may come again, a load does not
        self._meeting = open_meeting(
            self._part, settings["meet"], plan_hash=plan_hash(plan), load=load, t0_s=self._t0_s,
            stopped=self._stop.is_set,
        )  # fmt: skip
        self.collector.info.part = self._meeting.document()
        (self.collector.run_dir / PLAN).write_text(plan.to_json() + "\n", encoding="utf-8")

    def _walk(self, plan: Plan, settings: dict[str, Any], loop: str) -> None:
        assert self.collector is not None
        for so_far, stage in self._stages(plan, loop):
            if self._stop.is_set():
                self._not_run(stage, loop)
                continue
            self._run_stage(so_far, stage, settings, loop)
            if self.collector.failed:
                self.interrupt("write_failed")
            self._check_limits(settings)

    def _stages(self, plan: Plan, loop: str) -> Iterator[tuple[Plan, Stage]]:
        """The plan's stages, then those that `next_stage` adds to it; each with the plan that holds it."""
        assert self.collector is not None
        for stage in plan.stages:
            yield plan, stage
        while self._next_stage is not None and not self._stop.is_set():
            added = self._next_stage(plan, self.collector.run_dir)
            if added is None:
                return
            plan = dataclasses.replace(plan, stages=(*plan.stages, added))
            self._plan_text, self.live.plan = plan.to_json(), plan
            self._names[added.index] = added.name
            if loop == "open":
                self.collector.info.schedule_hash = plan_hash(plan)
            yield plan, added

    def _check_limits(self, settings: dict[str, Any]) -> None:
        assert self.collector is not None
        if self._stop.is_set():
            return
        sent, tokens_in, tokens_out = self.collector.totals()
        hit = passed_limit(settings["limits"], sent, tokens_in, tokens_out, now_s() - self._t0_s)
        if hit:
            self.collector.problem(f"stopped in order: {hit}")
            self.interrupt("limit")

    def _scraped(self, row: ServerRow) -> None:
        if self.collector is not None:
            self.collector.add_server(row)

    # -- the end ------------------------------------------------------------------------------

    def _flush_stats(self) -> None:
        """Wait until each worker's last statistics have come: they follow the rows on the same channel."""
        self._flushed = set()
        asked = {s.client_id for s in self._stripes.values() if not s.lost}
        whole = self.collector is not None and not self.collector.failed
        self._send_all(messages.FLUSH, {"run_id": self._run_id, "whole": whole})
        limit = now_s() + 5.0
        while not asked <= self._flushed and now_s() < limit:
            gevent.sleep(POLL_S)
        for client in asked - self._flushed:
            self.collector.problem(f"worker {client}: its last statistics never came")  # type: ignore[union-attr]

    def _reconcile(self, loop: str) -> None:
        """Compare Locust's request counts with the ledger, row by row of `_stats.csv`."""
        assert self.collector is not None
        for index, record in self.collector.stages.items():
            entry = self.environment.stats.entries.get((self._names[index], stats.E2E_TYPE))
            counted = entry.num_requests if entry is not None else 0
            if index in self._lossy:
                continue  # statistics that a lost worker had not sent yet are gone; its rows need not be
            if counted != record.rows:
                self.collector.problem(
                    f"stage {index}: Locust counted {counted} requests, the ledger has {record.rows} rows"
                )

    def _close(self, csv_files: stats.FinalCSV | None) -> None:
        if self._scraper is not None:
            self._scraper.stop()
            self._scraper = None
        if self._meeting is not None:
            self._meeting.close()
        if csv_files is not None:
            try:
                csv_files.finish()
            except OSError as error:
                self.collector.problem(f"Locust's CSV files cannot be written: {error.strerror}")  # type: ignore[union-attr]
        if self.collector is None:
            self.environment.process_exit_code = 2
            return
        info = self.collector.info
        info.finished_utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        info.interrupted = self.interrupted
        self._run_id = ""  # what comes from a worker after this belongs to no run
        self.collector.finish()
        self.environment.process_exit_code = self._exit_code()
        for problem in info.problems:
            log.warning("%s", problem)
        folder = self.collector.run_dir
        step = f"bench analyse {shlex.quote(str(folder))}"
        if self._part != WHOLE:
            step = "with the folders of all parts, bench recover PART1 PART2 ... --into MERGED"
        log.info("run %s is complete: %s; next: %s", info.run_id, folder, step)

    def _exit_code(self) -> int:
        """2 the parts did not meet, 130 interrupted, 4 the record is not whole, else 0: the analysis judges the SLO."""
        assert self.collector is not None
        if self._refused:
            return 2
        if self.interrupted:
            return 130
        return 4 if self.collector.failed or self.collector.problems else 0
