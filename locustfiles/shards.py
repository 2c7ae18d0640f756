"""Where a worker keeps its shard: one file per run, beside the rows that travel to the master.

Input: the stage messages of the master. Output: a `.shard` file per run (see bench/records/shard.py) in
`--shard-dir`, or in a folder of the system's temporary files; `bench recover` merges them when the master is lost.
Does not: send; a disk that cannot be written costs the copy, never the run.

1. In the default folder the file is removed when the master has every row; in a folder that was asked for it stays.
2. It holds rows, plan and the masked config: no key.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from locust.env import Environment

from bench.records.outbox import Outbox
from bench.records.shard import Place, ShardWriter

log = logging.getLogger("bench.shards")


def default_folder() -> Path:
    """A folder of this user among the system's temporary files."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"scheduler-bench-{user}" / "shards"


class ShardKeeper:
    """The shards of one worker process, one run after the other."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        # now: with each start Locust puts the master's options over those of this process
        self._asked = getattr(environment.parsed_options, "shard_dir", "") or os.environ.get("BENCH_SHARD_DIR", "")
        self._run_id = ""
        self._shard: ShardWriter | None = None
        self._kept = False

    def folder(self) -> tuple[Path, bool]:
        """(where shards go, whether the user asked for it)."""
        return (Path(self._asked), True) if self._asked else (default_folder(), False)

    def outbox(self, data: dict[str, Any]) -> Outbox:
        """The outbox of a stage, backed by this run's shard; by memory alone when there is no disk."""
        self._open(data)
        stage, stripe = data["stage"], data["stripe"]

        def keep(seq: int, packed: bytes) -> Place | None:
            if self._shard is None:
                return None
            try:
                return self._shard.rows(stage=stage, stripe=stripe, seq=seq, data=packed)
            except OSError as error:
                self._give_up(error)
                return None

        def read(place: Place) -> bytes:
            assert self._shard is not None
            return self._shard.read(place)

        return Outbox(keep=keep, read=read)

    def begin(self, job: Any) -> None:
        """A stage has its start."""
        self._write(
            lambda shard: shard.stage(
                {"stage": job.stage.index, "start_s": job.start_s, "stripe": job.stripe, "stripes": job.stripes}
            )
        )

    def gauge(self, job: Any, samples: list[list[Any]]) -> None:
        """Samples of the gauge."""
        self._write(lambda shard: shard.gauge(stage=job.stage.index, stripe=job.stripe, samples=samples))

    def end(self, *, whole: bool) -> None:
        """The run is over; `whole`: the master has every row."""
        if self._shard is not None:
            self._shard.close(remove=whole and not self._kept)
            if whole and not self._kept:
                with contextlib.suppress(OSError):  # shards of other workers are there still
                    self._shard.path.parent.rmdir()
        self._shard, self._run_id = None, ""

    def _open(self, data: dict[str, Any]) -> None:
        if data["run_id"] == self._run_id:
            return
        self.end(whole=False)
        self._run_id = data["run_id"]
        folder, self._kept = self.folder()
        client = getattr(self.environment.runner, "client_id", "local")
        path = folder / self._run_id / f"worker-{client[-12:]}.shard"
        try:
            self._shard = ShardWriter(path, {"run": data.get("run") or {}, "plan": data["plan"], "client_id": client})
        except OSError as error:
            self._give_up(error)

    def _write(self, write: Any) -> None:
        if self._shard is not None:
            try:
                write(self._shard)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """No more copies in this run; batches that lie on the disk only are read from it still."""
        folder, _ = self.folder()
        log.warning(
            "%s: no copy of the rows is kept from here on: %s; if the master is lost, so are they; "
            "give --shard-dir a folder with space",
            folder,
            error.strerror or error,
        )
        self._stop_writing()

    def _stop_writing(self) -> None:
        shard = self._shard
        if shard is not None:
            self._shard = _ReadOnly(shard)  # type: ignore[assignment]


class _ReadOnly:
    """A shard whose disk is full: what is in it can be read, nothing is added."""

    def __init__(self, shard: ShardWriter) -> None:
        self._of = shard
        self.path = shard.path

    def read(self, place: Place) -> bytes:
        return self._of.read(place)

    def rows(self, **_: Any) -> None:
        return None

    def stage(self, _: dict[str, Any]) -> None:
        return None

    def gauge(self, **_: Any) -> None:
        return None

    def close(self, *, remove: bool = False) -> None:
        self._of.close(remove=remove)
