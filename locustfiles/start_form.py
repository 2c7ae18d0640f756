"""The start form of Locust's web page: what it sends is looked at before Locust acts on it.

Input: a POST to `/swarm`. Output: nothing when the run may start, else Locust's own refusal (`success: false` and a
message, which the page shows); the form shows what was typed until a start is accepted, and says what users are for.
Does not: start anything, or change any setting.

Locust alone would answer a form with `offered_qps=ten` by status 500, one with -5 by success, and would ignore a second
start while a run goes. It would also take any option from the form, those that are not shown in it too.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from locust import argument_parser
from locust.runners import STATE_CLEANUP, STATE_RUNNING, STATE_SPAWNING, STATE_STOPPING, MasterRunner
from locust.web import jsonify, request  # Flask's, by the names under which Locust uses them

from bench.config import ConfigError
from bench.config.schema import MAX_QPS, MAX_SECONDS, MIN_QPS
from bench.workload.plan import PlanError

log = logging.getLogger("bench")

# Fields of Locust's own form, which Locust checks; every other one is a visible option.
LOCUST_FIELDS = {"user_count", "spawn_rate", "host", "run_time", "profile", "user_classes", "shape_class"}
# A start was accepted, and neither has its run begun nor was it refused: so long no other start is accepted.
PENDING_S = 5.0
_BUSY = (STATE_SPAWNING, STATE_RUNNING, STATE_CLEANUP, STATE_STOPPING)
USERS_SCRIPT = Path(__file__).resolve().parent / "pages" / "users_note.js"
USERS_NOTES = {
    "open": "Open loop: users do not set the rate. Leave this as it is; the rates are under Custom parameters.",
    "closed": "Closed loop: this is the concurrency. Each user sends its next request when its last one has ended.",
}
# Field of Locust's own form -> its name in the page's template arguments.
_LOCUST_ARGUMENTS = {"user_count": "num_users", "spawn_rate": "spawn_rate", "host": "host", "run_time": "run_time"}
_KINDS = {float: "a number", int: "a whole number"}
# option -> (lowest, highest) of what it may be, beside 0 for "as the config says"
_RANGES: dict[str, tuple[float, float]] = {
    "offered_qps": (MIN_QPS, MAX_QPS),
    "stage_duration": (1e-3, MAX_SECONDS),
    "stage_repeats": (1, 99),
    "plan_seed": (1, 2**63 - 1),
    "slo_ttft_ms": (1e-3, MAX_SECONDS * 1000),
    "slo_tpot_ms": (1e-3, MAX_SECONDS * 1000),
}


def check_ranges(options: Any) -> None:
    """Raise PlanError when a number among our options is outside what it may be."""
    for name, (lowest, highest) in _RANGES.items():
        value = getattr(options, name, 0) or 0
        if value != 0 and not lowest <= value <= highest:  # a NaN is in no range
            raise PlanError(
                f"--{name.replace('_', '-')} is {value:g}; 0 (as the config says), or {lowest:g} to {highest:g}"
            )


class StartForm:
    """The look at each start; one for a web page."""

    def __init__(self, environment: Any, conductor: Any, check: Callable[[Any], None]) -> None:
        """check: takes the options as the form would make them; raises ConfigError or PlanError."""
        self._environment = environment
        self._conductor = conductor
        self._check = check
        self._pending_s = -math.inf
        self._visible: set[str] = set()
        self._typed: dict[str, str] = {}

    def refusal(self, form: Mapping[str, str]) -> str:
        """Why this start is refused; empty when it may go on."""
        why = self._refusal(form)
        self._typed = dict(form) if why else {}
        return why

    def keep_typed(self, template: dict[str, Any]) -> None:
        """Put the values of a refused start into the template arguments of Locust's page; they change no option."""
        for name, option in template["extra_options"].items():
            option["default_value"] = self._typed.get(name, option["default_value"])
        for name, argument in _LOCUST_ARGUMENTS.items():
            template[argument] = self._typed.get(name, template[argument])

    def _refusal(self, form: Mapping[str, str]) -> str:
        if not self._conductor.finished:
            return "a run is in progress; press Stop and wait until it has drained, then start the next one"
        runner = self._environment.runner
        if runner.state in _BUSY or time.monotonic() - self._pending_s < PENDING_S:
            return "the start or the end of another run is in progress; try again in some seconds"
        if isinstance(runner, MasterRunner) and not runner.worker_count:
            return "no worker is connected yet; start one with --worker"
        try:
            self._check(self._options(form))
        except (ConfigError, PlanError) as error:
            problems = error.problems if isinstance(error, ConfigError) else []
            text = "\n".join(p.text() for p in problems if p.severity == "error") or str(error)
            self._conductor.live.refuse(text)
            for line in text.splitlines():
                log.error("%s", line)
            return text
        self._pending_s = time.monotonic()
        return ""

    def begun(self) -> None:
        """The accepted start has become a run, or was refused after all."""
        self._pending_s = -math.inf

    def _options(self, form: Mapping[str, str]) -> argparse.Namespace:
        """A copy of the options with the form's fields, by Locust's own rules. Raises PlanError."""
        options = argparse.Namespace(**vars(self._environment.parsed_options))
        self._visible = self._visible or set(argument_parser.ui_extra_args_dict())
        for key, text in form.items():
            if not hasattr(options, key) and key not in LOCUST_FIELDS:
                continue
            if key not in LOCUST_FIELDS | self._visible:
                raise PlanError(f"{key} cannot be set in the web page; give it on the command line")
            kind = type(getattr(options, key, None))
            if key == "host":
                options.host = text.replace("<", "").replace(">", "")
            elif kind in _KINDS and key not in LOCUST_FIELDS:
                try:
                    setattr(options, key, kind(text))
                except ValueError:
                    need = f"{_KINDS[kind]} is needed; 0: as the config says"
                    raise PlanError(f"{key} is {text[:40]!r}; {need}") from None
            elif kind in (str, type(None)):
                setattr(options, key, text)
        return options


def attach(web_ui: Any, options: Any, form: StartForm, loop: str) -> None:
    """Put the look in front of Locust's own `/swarm`, behind its login, and our notes into its form."""
    base = (getattr(options, "web_base_path", "") or "").rstrip("/")
    path = f"{base}/swarm"
    update = web_ui.update_template_args
    note = USERS_SCRIPT.read_text(encoding="utf-8").replace("TEXT", json.dumps(USERS_NOTES[loop]), 1)

    def update_and_keep() -> None:
        update()
        form.keep_typed(web_ui.template_args)

    web_ui.update_template_args = update_and_keep

    @web_ui.auth_required_if_enabled
    def look() -> Any:
        refused = form.refusal(request.form)
        if not refused:
            return None
        return jsonify({"success": False, "message": refused, "host": web_ui.environment.host})

    @web_ui.app.before_request
    def before() -> Any:
        return look() if request.path == path and request.method == "POST" else None

    @web_ui.app.after_request
    def after(response: Any) -> Any:
        if request.path == path and response.is_json and not (response.get_json(silent=True) or {}).get("success"):
            form.begun()  # refused by Locust itself
        if request.path in (base, f"{base}/") and response.status_code == 200 and response.mimetype == "text/html":
            page = response.get_data(as_text=True)
            response.set_data(page.replace("</body>", f"<script>{note}</script></body>", 1))
        return response
