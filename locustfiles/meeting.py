"""Lets several masters send one plan together: each has a part of the arrivals, and all begin a stage at one moment.

Input: which part this master has, the address where the first part's master listens. Output: the run time at which each
stage begins, and the offset of this master's clock to the first part's, with its bound.
Does not: carry rows, config or a key; the parts' run folders are merged afterwards by `bench recover --into`.

1. The first part's master waits for all others before the first stage, and before each stage until all are ready.
2. A part that is lost later is left out, and the stage is marked; without the first part nobody begins another stage.
3. The offset is measured before each stage, as that of workers is (clock.py): same rule, same bound.
4. One line of JSON is one message. There is no password: like the workers' port it belongs into a private network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent

from bench.records.part import Part
from locustfiles.clock import ClockOffset, clock_id, now_s

log = logging.getLogger("bench.meeting")

JOIN_LIMIT_S = 300.0  # as long as a master waits for its workers
TRIPS, TRIP_GAP_S = 8, 0.05
LEAD_S = 0.5  # longer than a line takes from the first master to the others
ANSWER_LIMIT_S = 60.0  # beyond what the slowest part may take; then its process hangs
LINE_BYTES = 10_000
POLL_S = 0.05


class MeetingError(Exception):
    """The parts do not come together; nothing was sent."""


@dataclass
class Peer:
    """Another part's master, as the first one knows it."""

    part: int
    line: Line
    ready: int = -1  # the stage that it has prepared


class Line:
    """Messages over one connection, each side in its own greenlet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._file = connection.makefile("rb")
        self.open = True

    def send(self, **message: Any) -> None:
        """Send, or find the line dead."""
        try:
            self._connection.sendall(json.dumps(message).encode("ascii") + b"\n")
        except OSError:
            self.close()

    def read(self) -> dict[str, Any] | None:
        """The next message; None when the line is dead or speaks another language."""
        try:
            text = self._file.readline(LINE_BYTES)
            message = json.loads(text) if text.endswith(b"\n") else None
        except (OSError, ValueError):
            message = None
        if not isinstance(message, dict):
            self.close()
            return None
        return message

    def close(self) -> None:
        """Hang up."""
        self.open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@dataclass
class Meeting:
    """What both sides have: `t0_s` is the master's clock at the run's start."""

    part: Part
    address: tuple[str, int]
    plan_hash: str
    load: str  # the first part's name for it, which all parts share
    t0_s: float
    stopped: Callable[[], bool] = lambda: False
    lead_t0_s: float = 0.0
    clock: ClockOffset = field(default_factory=ClockOffset)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """What `run.json` says of it."""
        return {
            "part": self.part.index + 1, "of": self.part.of, "load": self.load, "t0_s": self.t0_s,
            "lead_t0_s": self.lead_t0_s, "stages": self.stages,
        }  # fmt: skip

    def measured(self, stage: int, duration_s: float) -> None:
        """Keep the offset that holds for this stage."""
        bound_s = self.clock.bound_after(duration_s)
        self.stages[str(stage)] = {
            "offset_s": self.clock.offset_s, "bound_s": bound_s if math.isfinite(bound_s) else None,
            "shared": self.clock.shared,
        }  # fmt: skip

    def wait(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came true within the limit and before a stop."""
        limit = now_s() + limit_s
        while not done() and not self.stopped() and now_s() < limit:
            gevent.sleep(POLL_S)
        return done()


class Lead(Meeting):
    """The first part's side: listens, answers clocks, gives the word."""

    def join(self) -> None:
        """Wait for all parts. Raises MeetingError."""
        self.lead_t0_s = self.t0_s
        self.clock.share()
        self.peers: dict[int, Peer] = {}
        self.refused: list[str] = []
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(self.address, family=family)
        except OSError as error:
            text = f"--meet: {_shown(self.address)} cannot be opened: {error.strerror}; give a free one"
            raise MeetingError(text) from None
        self._greenlet = gevent.spawn(self._accept)
        log.info("part %s waits for the others on %s", self.part, _shown(self.address))
        if not self.wait(lambda: len(self.peers) == self.part.of - 1, JOIN_LIMIT_S):
            absent = sorted(set(range(2, self.part.of + 1)) - {p + 1 for p in self.peers})
            more = f" ({self.refused[-1]})" if self.refused else ""
            self.close()
            raise MeetingError(
                f"part {', '.join(map(str, absent))} of {self.part.of} did not come to {_shown(self.address)}{more}; "
                "start each part with the same config, options and --meet"
            )

    def measure(self, stage: int, duration_s: float) -> None:
        """Our clock is the one that others are measured against."""
        self.measured(stage, duration_s)

    def begin(self, stage: int, lead_s: float, limit_s: float) -> tuple[float | None, bool]:
        """(our clock when the stage begins, whether all parts are in it)."""
        self.wait(lambda: all(p.ready >= stage or not p.line.open for p in self.peers.values()), limit_s)
        if self.stopped():
            return None, True
        for peer in self.peers.values():
            if peer.ready < stage and peer.line.open:
                log.warning("part %d/%d is not ready and is left out", peer.part + 1, self.part.of)
                peer.line.close()
        at_s = now_s() + LEAD_S + lead_s
        for peer in self.peers.values():
            if peer.line.open:
                peer.line.send(say="go", stage=stage, at_s=at_s)
        return at_s, all(peer.line.open for peer in self.peers.values())

    def close(self) -> None:
        """No more parts."""
        self._greenlet.kill(block=False)
        self._listener.close()
        for peer in self.peers.values():
            peer.line.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            gevent.spawn(self._serve, Line(connection))

    def _serve(self, line: Line) -> None:
        hello = line.read()
        fault = self._fault(hello)
        if hello is None or fault:
            self.refused.append(fault)
            line.send(say="refused", why=fault)
            line.close()
            return
        peer = self.peers[hello["part"]] = Peer(hello["part"], line)
        line.send(say="welcome", load=self.load, t0_s=self.t0_s, clock_id=clock_id())
        log.info("part %d/%d is here", peer.part + 1, self.part.of)
        while (message := line.read()) is not None:
            if message.get("say") == "ping":
                line.send(say="pong", sent_s=message["sent_s"], master_s=now_s())
            elif message.get("say") == "ready":
                peer.ready = int(message["stage"])
        log.warning("part %d/%d hung up", peer.part + 1, self.part.of)

    def _fault(self, hello: dict[str, Any] | None) -> str:
        """Why this one is no part of our plan; empty when it is."""
        if hello is None or hello.get("say") != "hello":
            return "what came was no part of a plan"
        number, of = hello.get("part"), hello.get("of")
        if of != self.part.of or not isinstance(number, int) or not 0 < number < self.part.of:
            shown = number + 1 if isinstance(number, int) else number
            return f"part {shown}/{of} came, the plan here is in {self.part.of} parts"
        if number in self.peers:
            return f"part {number + 1}/{of} is here already"
        if hello.get("plan") != self.plan_hash:
            return (
                f"part {number + 1}/{of} has schedule {str(hello.get('plan'))[:16]}, part 1 has {self.plan_hash[:16]}: "
                "config, options, seed and version must be the same"
            )
        return ""


class Follower(Meeting):
    """Every other part's side."""

    def join(self) -> None:
        """Find the first part's master. Raises MeetingError."""
        self._go: dict[int, float] = {}
        self._line: Line | None = None
        self.wait(self._connected, JOIN_LIMIT_S)
        if self._line is None:
            text = f"nobody listens on --meet {_shown(self.address)}: part 1/{self.part.of} must be started there"
            raise MeetingError(text)
        self._line.send(say="hello", part=self.part.index, of=self.part.of, plan=self.plan_hash)
        answer = self._line.read()
        if answer is None or answer.get("say") != "welcome":
            why = answer["why"] if answer else "it hung up"
            raise MeetingError(f"part 1/{self.part.of} on {_shown(self.address)} refuses: {why}")
        self.load, self.lead_t0_s = answer["load"], answer["t0_s"]
        self._shared = bool(answer["clock_id"]) and answer["clock_id"] == clock_id()
        self._greenlet = gevent.spawn(self._listen, self._line)

    def _connected(self) -> bool:
        try:
            self._line = Line(socket.create_connection(self.address, timeout=5))
        except OSError:
            gevent.sleep(0.2)
            return False
        self._line._connection.settimeout(None)
        return True

    def measure(self, stage: int, duration_s: float) -> None:
        """Measure our clock against the first part's."""
        assert self._line is not None
        self.clock = ClockOffset()
        if self._shared:
            self.clock.share()
        for _ in range(0 if self._shared else TRIPS):
            self._line.send(say="ping", sent_s=now_s())
            gevent.sleep(TRIP_GAP_S)
        if not self._shared:
            self.wait(lambda: self.clock.trips > 0 or not self._line.open, 5.0)  # type: ignore[union-attr]
        self.measured(stage, duration_s)

    def begin(self, stage: int, lead_s: float, limit_s: float) -> tuple[float | None, bool]:
        """(our clock when the stage begins, None without the first part; whether all is well)."""
        assert self._line is not None
        line = self._line
        line.send(say="ready", stage=stage)
        # the first part has the same limit for each of us, and says nothing before it is over
        self.wait(lambda: stage in self._go or not line.open, limit_s + ANSWER_LIMIT_S)
        at_s = self._go.get(stage)
        if at_s is None:
            return None, self.stopped()
        return at_s - self.stages[str(stage)]["offset_s"], True

    def close(self) -> None:
        """Hang up."""
        if self._line is not None:
            self._line.close()

    def _listen(self, line: Line) -> None:
        while (message := line.read()) is not None:
            if message.get("say") == "pong":
                self.clock.add_trip(message["sent_s"], message["master_s"], now_s())
            elif message.get("say") == "go":
                self._go[int(message["stage"])] = float(message["at_s"])


def open_meeting(
    part: Part, address: str, *, plan_hash: str, load: str, t0_s: float, stopped: Callable[[], bool]
) -> Lead | Follower:
    """A meeting that all parts have come to. Raises MeetingError."""
    host, _, port = address.rpartition(":")
    kind = Lead if part.index == 0 else Follower
    meeting = kind(part, (host.strip("[]"), int(port)), plan_hash, load, t0_s, stopped)
    meeting.join()
    return meeting


def _shown(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
