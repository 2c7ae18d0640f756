"""Which replica gets a request.

Input: the request and the replicas' cores. Output: an index.
Does not: move requests later; a routed request stays.

1. Ties go to the lowest index, so the choice depends on (history, seed) only.
2. round_robin and random do not look at the replicas: their split is known from the arrival order alone.
3. prefix keeps the load even: a cached start draws a request only when it is a good part of the prompt and its replica
   has not much more to do than the least loaded one. Without that, a start that all prompts share (a system prompt)
   sends all of them to one replica. Source: the rule of SGLang's cache-aware router.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.request import Request
from engine.scheduler import Core
from engine.settings import EngineConfig

ROUTER_STREAM = 0x524F5554
MATCH_SHARE = 0.5  # of the prompt that must be cached to be worth a detour
EVEN_RATIO, EVEN_REQUESTS = 1.5, 8  # a replica with more requests than 1.5 x least + 8 gets none for its cache


class Router:
    """Chooses in arrival order; one object per run."""

    def __init__(self, config: EngineConfig, seed: int | None = None) -> None:
        self.name = config.router
        self.replicas = config.replicas
        self._next = 0
        entropy = [ROUTER_STREAM, config.seed if seed is None else seed]
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))

    @property
    def blind(self) -> bool:
        """Whether the choice ignores the replicas' state."""
        return self.name in ("round_robin", "random") or self.replicas == 1

    def choose(self, request: Request | None, cores: Sequence[Core]) -> int:
        """The replica for the next arrival."""
        if self.replicas == 1:
            return 0
        if self.name == "round_robin":
            index = self._next
            self._next = (index + 1) % self.replicas
            return index
        if self.name == "random":
            return int(self._rng.integers(self.replicas))
        if self.name == "prefix" and request is not None and request.prefix_hashes:
            most = EVEN_RATIO * min(len(core.by_id) for core in cores) + EVEN_REQUESTS
            blocks = len(request.prefix_hashes)
            # The longest cached prefix wins; among equals the least loaded.
            found, _, index = max((core.pool.match(request, blocks), -len(core.by_id), -i)
                                  for i, core in enumerate(cores))
            if found >= MATCH_SHARE * blocks and len(cores[-index].by_id) <= most:
                return -index
        return min((len(core.by_id), i) for i, core in enumerate(cores))[1]
