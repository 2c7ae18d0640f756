"""A channel between master and workers that stalls, a master that stands still, a full disk, a clock of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Ran, clean_environment, locust_command
from .test_workers import Crew, check_once, crew, truth  # noqa: F401  # crew is a fixture


class Relay:
    """A TCP relay whose two ways can stall, one by one: no byte is lost, all come late, as behind a broken network."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.up, self.down = threading.Event(), threading.Event()  # set: the way is open
        self.up.set()
        self.down.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                if self._server.fileno() < 0:
                    return
                near.close()  # the master is not there yet; the worker tries again
                continue
            threading.Thread(target=self._pipe, args=(near, far, self.up), daemon=True).start()
            threading.Thread(target=self._pipe, args=(far, near, self.down), daemon=True).start()

    def _pipe(self, source: socket.socket, sink: socket.socket, is_open: threading.Event) -> None:
        waiting: deque[bytes] = deque()
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                waiting.append(data)
                is_open.wait(30)
                sink.sendall(waiting.popleft())
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.up.set()
        self.down.set()
        self._server.close()


def start_worker(crew: Crew, *options: str, port: int | None = None, before: tuple[str, ...] = ()) -> None:  # noqa: F811
    """One more worker, through a relay or started by another command."""
    ports = list(crew.ports)
    if port is not None:
        ports[ports.index("--master-port") + 1] = str(port)
    log = (crew.folder / f"log-{len(crew.workers)}-worker.txt").open("w")
    crew.workers.append(
        subprocess.Popen(
            [*before, *locust_command("--worker", *options, *ports)], env=crew.environment, cwd=crew.folder, stdout=log,
            stderr=log, text=True, start_new_session=True,
        )
    )  # fmt: skip


def start_master(crew: Crew, workers: int, *options: str) -> None:  # noqa: F811
    crew.master = crew._start(
        "--headless", "--master", "--expect-workers", str(workers), "--bench-config", str(crew.config_file), "--run-dir",
        str(crew.run_dir), *options,
    )  # fmt: skip


@pytest.fixture
def relay(crew: Crew) -> Iterator[Relay]:  # noqa: F811
    there = Relay(int(crew.ports[crew.ports.index("--master-port") + 1]))
    try:
        yield there
    finally:
        there.close()


@pytest.mark.parametrize("ways", ["up", "down", "both"])
def test_a_channel_that_stalls_sends_nothing_twice(engine: Any, crew: Crew, relay: Relay, ways: str) -> None:  # noqa: F811
    """One way alone is the hard case: the worker still hears its master, which hears nothing of it, or the reverse."""
    start_master(crew, 2, "--qps-stages", "40,10", "--stage-duration", "7")
    start_worker(crew, port=relay.port)
    start_worker(crew)
    crew.wait_for_rows(10)
    stalled = [relay.up, relay.down] if ways == "both" else [getattr(relay, ways)]
    for way in stalled:
        way.clear()
    time.sleep(4)
    for way in stalled:
        way.set()
    ran = crew.finish()
    check_once(engine, ran)
    first = ran.rows("stages.csv")[0]
    rows = [r for r in ran.rows() if r["stage"] == "0"]
    if ways == "up" or ways == "both":  # the master heard nothing for 4 s
        assert "worker_lost" in first["marks"].split(";"), ran.err
        assert any(int(r["worker"]) != int(r["arrival"]) % 2 for r in rows)
    assert {r["status"] for r in rows} <= {"ok", "unsent", "error"}
    assert {r["code"] for r in rows if r["status"] != "ok"} <= {"CL-LOST"}


def test_a_master_that_stood_still_takes_nobody_for_lost(engine: Any, crew: Crew) -> None:  # noqa: F811
    crew.start(2, "--qps-stages", "30,10", "--stage-duration", "7.5")
    crew.wait_for_rows(10)
    assert crew.master is not None
    os.kill(crew.master.pid, signal.SIGSTOP)
    try:
        time.sleep(4)
    finally:
        os.kill(crew.master.pid, signal.SIGCONT)
    ran = crew.finish()
    check_once(engine, ran)
    assert all("worker_lost" not in stage["marks"] for stage in ran.rows("stages.csv")), ran.err
    rows = ran.rows()
    gone = [r for r in rows if r["status"] != "ok"]
    # without leave of their master they sent nothing for a while, and say so; every answer they had is kept
    assert {(r["status"], r["code"]) for r in gone} <= {("unsent", "CL-LOST")}
    answered = {r["request_id"] for r in truth(engine, ran)}
    assert answered == {r["request_id"] for r in rows if r["status"] == "ok"}


def test_the_loss_of_all_workers_is_no_interruption(engine: Any, crew: Crew) -> None:  # noqa: F811
    crew.start(2, "--qps-stages", "30,10", "--stage-duration", "6")
    crew.wait_for_rows(10)
    for worker in crew.workers:
        worker.kill()
    ran = crew.finish()
    check_rows(ran)
    assert ran.code == 4 and ran.run()["interrupted"] is False, ran.err
    first = ran.rows("stages.csv")[0]
    assert "worker_lost" in first["marks"] and "interrupted" not in first["marks"]


def check_rows(ran: Ran) -> None:
    for stage in ran.rows("stages.csv"):
        mine = sorted(int(r["arrival"]) for r in ran.rows() if r["stage"] == stage["stage"])
        assert mine == list(range(int(stage["planned"])))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_shard_disk_that_is_full_costs_the_copy_alone(engine: Any, crew: Crew, small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    start_master(crew, 2, "--qps-stages", "40", "--stage-duration", "4")
    for _ in range(2):
        start_worker(crew, "--shard-dir", str(small_disk))
    ran = crew.finish()
    check_once(engine, ran)
    assert ran.code == 0 and {r["status"] for r in ran.rows()} == {"ok"}, ran.err
    assert "no copy of the rows is kept from here on: No space left on device" in ran.err
    # what is on the disk can be merged still, an empty shard beside it does no harm
    (small_disk / "empty.shard").touch()
    said = subprocess.run(
        [sys.executable, "-m", "bench", "recover", str(ran.run_dir), str(small_disk), "-o", str(tmp_path / "again")],
        env=clean_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0 and "empty.shard: 0 bytes" in said.stdout, said.stderr
    assert Counter(r["status"] for r in Ran(0, "", "", tmp_path / "again").rows()) == Counter(r["status"] for r in ran.rows())


def test_a_worker_with_a_clock_of_its_own(engine: Any, crew: Crew) -> None:  # noqa: F811
    """A time namespace: its monotonic clock is 1000 s ahead, as on another machine."""
    before = ("unshare", "--fork", "--time", "--monotonic", "1000", "--boottime", "1000")
    probe = subprocess.run([*before, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("a time namespace needs the right to make one")
    start_master(crew, 2, "--qps-stages", "30,10", "--stage-duration", "3")
    start_worker(crew, before=before)
    start_worker(crew)
    ran = crew.finish()
    check_once(engine, ran)
    assert {r["status"] for r in ran.rows()} == {"ok"}, ran.err
    (ahead,) = [w for w in ran.run()["worker_info"] if not w["shared"]]
    assert abs(ahead["offset_s"] + 1000) <= ahead["bound_s"] < 0.08  # a tenth of the deadline
    received = {r["request_id"]: r["received_s"] for r in truth(engine, ran)}
    gaps: dict[str, list[float]] = {}
    for row in ran.rows():
        gaps.setdefault(row["worker"], []).append(received[row["request_id"]] - float(row["sent_s"]))
    one, two = (sorted(each)[len(each) // 2] for each in gaps.values())
    assert abs(one - two) < 0.1  # both on the master's clock
