"""The stage of a rollout in a running engine: who is served by the new rules, and what a twin does under the others.

Input: the policy table of a stage (`active.json`), live arrivals. Output: a replica per arrival; rows of observations.
Does not: judge, go to the next stage by itself, or write files: `bench rollout --live` does.

stage         serves                                              twin in virtual time
shadow        old rules                                           new rules
gray          new rules on some replicas for their tenants        none: both arms are live
full          new rules                                           old rules
complete      new rules                                           none
rolled_back   old rules                                           none

1. A table takes effect with the next step of each replica; requests inside stay where they are (engine/handover.py).
2. The same table again changes nothing, and the observations of its stage stay.
3. A tenant's arm follows from the table alone: named, or by the hash of its name (of the request's id when it has no
   tenant). A larger share keeps everybody of a smaller one, and a restart changes nobody.
4. Arrivals count from when everyone has left who was inside at the stage's beginning.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from control.rollout import bucket, gray_replicas
from engine import handover
from engine.decision_log import DecisionLog
from engine.observed import Book
from engine.request import Request
from engine.router import Router
from engine.settings import EngineConfig
from engine.twin import Twin

if TYPE_CHECKING:
    from engine.http_driver import RealTimeDriver

OFF, SHADOW, GRAY, FULL, COMPLETE, ROLLED_BACK = "off", "shadow", "gray", "full", "complete", "rolled_back"
STAGES = ("replay", SHADOW, GRAY, FULL, COMPLETE, ROLLED_BACK)
OVER = (OFF, COMPLETE, ROLLED_BACK)
SETTLE_LIMIT_S = 60.0  # who was inside may hang; after this long arrivals count all the same


class LiveError(ValueError):
    """The table cannot be put in force; `status` is the HTTP status of the answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Table:
    """Who uses which rules; the content of `active.json`."""

    rollout: str = ""
    stage: str = OFF
    share: float = 0.0
    tenants: tuple[str, ...] = ()
    new_policy: Mapping[str, Any] = field(default_factory=dict)
    ttft_horizon_s: float = 0.0

    @classmethod
    def read(cls, data: Any) -> Table:
        """The table in a JSON object. Raises LiveError."""
        if not isinstance(data, dict):
            raise LiveError("the policy table is not a JSON object; send what active.json holds")
        stage, policy, tenants = data.get("stage"), data.get("new_policy"), data.get("new_policy_tenants", [])
        share, horizon = data.get("new_policy_share", 0.0), data.get("ttft_horizon_s", 0.0)
        name = data.get("rollout")
        if not isinstance(name, str) or not name:
            raise LiveError(f"rollout is {name!r}; the name of the rollout is needed")
        if stage not in STAGES:
            raise LiveError(f"stage is {stage!r}; allowed: {', '.join(STAGES)}")
        if not isinstance(policy, dict) or not policy:
            raise LiveError(f"new_policy is {policy!r}; config keys and their new values are needed")
        if not isinstance(tenants, list) or not all(isinstance(t, str) for t in tenants):
            raise LiveError(f"new_policy_tenants is {tenants!r}; a list of names is needed")
        for key, value, most in (("new_policy_share", share, 1.0), ("ttft_horizon_s", horizon, 1e6)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise LiveError(f"{key} is {value!r}; a number from 0 to {most:g} is needed")
        return cls(name, stage, float(share), tuple(tenants), policy, float(horizon))

    def chooses(self, request: Request) -> bool:
        """Whether a request of the gray stage is served by the new rules."""
        if self.tenants:
            return request.tenant in self.tenants
        return bucket(request.tenant or request.request_id, self.rollout) < self.share


class Live:
    """The rollout of one engine process."""

    def __init__(self, config: EngineConfig, drivers: list[RealTimeDriver],
                 resolve: Callable[[Mapping[str, Any]], EngineConfig] | None = None, *,
                 decision_s: Callable[[], float] = lambda: 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`resolve` gives the settings of the engine's own config with some keys changed (ValueError: it cannot)."""
        self.base = config
        self.table = Table()
        self.book = Book()
        self.twin: Twin | None = None
        self.twin_decisions = DecisionLog(16 * 1024 * 1024)
        self.splits = self.watching = False
        self.epoch = f"{time.time_ns():x}.0"
        self._changes = 0
        self._drivers = drivers
        self._resolve = resolve
        self._decision_s = decision_s
        self._clock = clock
        self._new: list[int] = []  # replicas under the new rules
        self._routers: dict[bool, tuple[Router, list[int]]] = {}
        self._before: set[str] = set()
        self._since_s = 0.0

    # -- the table -----------------------------------------------------------------------------------------------------

    def apply(self, table: Table) -> bool:
        """Put a table in force; False when it is already. Raises LiveError and changes nothing then."""
        if table == self.table:
            return False
        if self.table.rollout not in ("", table.rollout) and self.table.stage not in (OFF, ROLLED_BACK):
            raise LiveError(
                f"the rollout {self.table.rollout!r} is at stage {self.table.stage}; end it first, or write its "
                "new_policy into the config and start the engine anew", 409)
        new = self._settings(table)
        count = len(self._drivers)
        if table.stage == GRAY and count < 2:
            raise LiveError("the engine has 1 replica; a gray stage needs at least 2 (engine.replicas): each policy "
                            "schedules replicas of its own")
        if table.stage == GRAY and not table.tenants and not 0 < table.share < 1:
            raise LiveError(f"new_policy_share is {table.share:g}; a gray stage needs one between 0 and 1, or tenants")
        if table.stage in (FULL, COMPLETE):
            mine = count
        elif table.stage == GRAY:
            mine = gray_replicas(table.share or 0.5, count)
        else:
            mine = 0
        self._switch(list(range(count - mine, count)), new)
        twin = {SHADOW: new, FULL: self.base}.get(table.stage)
        self._watch(table, twin)
        return True

    def clear(self) -> None:
        """The old rules for everybody, and no rollout any more."""
        self._switch([], self.base)
        self._watch(Table(), None)

    def _settings(self, table: Table) -> EngineConfig:
        if self._resolve is None:
            raise LiveError("this engine was started without a config file; it cannot change its rules")
        try:
            new = self._resolve(table.new_policy)
            handover.check(self.base, new)
        except ValueError as problem:
            raise LiveError(f"new_policy: {problem}") from None
        return new

    def _switch(self, new_replicas: list[int], new: EngineConfig) -> None:
        now_s = self._clock()
        for index, driver in enumerate(self._drivers):
            rules = new if index in new_replicas else self.base
            if driver.core.rules != rules:
                driver.adopt(rules, now_s)
        self._new = new_replicas
        old = [i for i in range(len(self._drivers)) if i not in new_replicas]
        self._routers = {is_new: (Router(self.base.with_(replicas=len(part))), part)
                         for is_new, part in ((True, new_replicas), (False, old)) if part}

    def _watch(self, table: Table, twin: EngineConfig | None) -> None:
        self.table = table
        self.splits = table.stage == GRAY
        self.watching = table.stage in (SHADOW, GRAY, FULL)
        self.book = Book(table.ttft_horizon_s)
        self.twin = None
        if twin is not None:
            # The live engine's steps take its scheduler's CPU time as well; the twin's would not.
            own = twin.profile.overhead_s if twin.overhead_s is None else twin.overhead_s
            self.twin = Twin(twin.with_(overhead_s=own + self._decision_s() / twin.time_scale), self.twin_decisions.add)
        self._changes += 1
        self.epoch = f"{self.epoch.partition('.')[0]}.{self._changes}"
        self._before = {name for driver in self._drivers for name in driver.core.by_id}
        self._since_s = self._clock()

    # -- arrivals ------------------------------------------------------------------------------------------------------

    def choose(self, request: Request) -> int:
        """The replica of a gray stage's arrival."""
        router, part = self._routers[self.table.chooses(request)]
        return part[router.choose(request, [self._drivers[i].core for i in part])]

    def arrived(self, request: Request, replica: int) -> None:
        """A live request was accepted or refused by a replica."""
        copy = self.twin.submit(request) if self.twin is not None else None
        if self._before and request.arrival_s - self._since_s < SETTLE_LIMIT_S:
            self._before = {name for name in self._before
                            if any(name in driver.core.by_id for driver in self._drivers)}
            if self._before:
                return
        self.book.add("new" if replica in self._new else "old", request, copy)

    def left(self, request_id: str, now_s: float) -> None:
        """The client of a live request is gone."""
        if self.twin is not None:
            self.twin.leave(request_id, now_s)

    def tick(self) -> None:
        """Bring the twin up to now, and write what is certain."""
        now_s = self._clock()
        if self.twin is not None:
            self.twin.advance(now_s)
        self.book.settle(now_s)

    def state(self) -> dict[str, Any]:
        """For `/debug/rollout`."""
        table = self.table
        return {
            "engine": "scheduler-bench", "config": handover.fingerprint(self.base), "replicas": len(self._drivers),
            "rollout": table.rollout, "stage": table.stage, "new_policy": dict(table.new_policy),
            "new_policy_share": table.share, "new_policy_tenants": list(table.tenants), "new_replicas": self._new,
            "epoch": self.epoch, "observed": self.book.total, "open": self.book.open, "settling": len(self._before),
            "twin_inside": self.twin.inside if self.twin is not None else None,
        }
