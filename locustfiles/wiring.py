"""Connects a Locust process to the generator and the conductor: options, messages, signals, the end.

Input: Locust's `init` event. Output: `environment.bench` (a `Wiring`), which
shapes and users find there. Does not: send, record or judge.

1. The API key is never an option: options travel to every worker in clear and stand in the web page.
2. Every option's default is a literal of its final type (Locust casts with `type(default)`).
3. The first Ctrl-C stops arrivals and drains; the second gives up what is in flight; the third ends the process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import MasterRunner, WorkerRunner

from bench.client.endpoint import page_headers
from bench.client.request import PATHS
from bench.config import Config, ConfigError, Resolved, api_key, load_config
from bench.config.schema import MAX_QPS, MIN_QPS
from bench.records.part import WHOLE, parse_part
from bench.workload.plan import Plan, PlanError, build_plan
from bench.workload.stage_count import stage_settings
from locustfiles import labels, live_page, observe, start_form, stats
from locustfiles.conductor import Conductor, NextStage
from locustfiles.generator import Generator
from locustfiles.server_metrics import metrics_address
from locustfiles.start_form import check_ranges

log = logging.getLogger("bench")

ALIVE_S = 10.0
DEFAULT_CONFIG = "configs/scheduler_bench.json"


def add_options(parser: Any) -> None:
    """Our own options; a value of 0 or "" means: as the config says."""
    parser.set_defaults(web_host="127.0.0.1")  # Locust's own default is every interface, without a login
    add = parser.add_argument  # an argument group of Locust's parser does not know include_in_web_ui
    add("--bench-config", env_var="BENCH_CONFIG", default="", help="Config file", include_in_web_ui=False)
    add("--run-dir", env_var="BENCH_RUN_DIR", default="", help="Run folder", include_in_web_ui=False)
    add("--qps-stages", env_var="BENCH_QPS_STAGES", default="", help="Sweep, requests/s, such as 5,10,15")
    add("--offered-qps", env_var="BENCH_OFFERED_QPS", type=float, default=0.0, help="One rate, requests/s; 0: config")
    add("--stage-duration", env_var="BENCH_STAGE_DURATION", type=float, default=0.0, help="Seconds; 0: config")
    add("--stage-repeats", env_var="BENCH_STAGE_REPEATS", type=int, default=0, help="Times each rate is run; 0: config")
    add("--plan-seed", env_var="BENCH_SEED", type=int, default=0, help="Arrivals, lengths; 0: config")
    add("--shard-dir", env_var="BENCH_SHARD_DIR", default="", help="Workers' own records", include_in_web_ui=False)
    hidden: dict[str, Any] = {"include_in_web_ui": False}
    add("--metrics-port", env_var="BENCH_METRICS_PORT", type=int, default=0, help="Port of /metrics; 0: none", **hidden)
    add("--metrics-host", env_var="BENCH_METRICS_HOST", default="127.0.0.1", help="Its address", **hidden)
    add("--part", env_var="BENCH_PART", default="", help="Part of the plan, such as 1/4; empty: all of it", **hidden)
    add("--meet", env_var="BENCH_MEET", default="127.0.0.1:5560", help="Where part 1 waits for the others", **hidden)
    add("--target-model", env_var="BENCH_TARGET_MODEL", default="", help="Model id; empty: config")
    add("--slo-ttft-ms", env_var="BENCH_SLO_TTFT_MS", type=float, default=0.0, help="TTFT deadline, ms; 0: config")
    add("--slo-tpot-ms", env_var="BENCH_SLO_TPOT_MS", type=float, default=0.0, help="TPOT deadline, ms; 0: config")


class Wiring:
    """What one Locust process of ours consists of."""

    def __init__(self, environment: Environment, *, loop: str) -> None:
        self.environment = environment
        self.loop = loop
        runner = environment.runner
        self.is_worker = isinstance(runner, WorkerRunner)
        self.generator = None if isinstance(runner, MasterRunner) else Generator(environment)
        self.conductor = None if self.is_worker else Conductor(environment, self.settings)
        self._resolved: Resolved | None = None
        self._form: start_form.StartForm | None = None
        stats.install(environment)
        for side in (self.generator, self.conductor):
            for name, listener in (side.listeners() if side is not None else {}).items():
                runner.register_message(name, listener)
        self._listen()
        if self.conductor is not None and environment.web_ui is not None:
            self._show_target()
            live_page.attach(environment.web_ui, self.options(), self.conductor)
            observe.attach(environment.web_ui, self.options(), self.conductor.observer)
            self._form = start_form.StartForm(environment, self.conductor, self._check_start)
            start_form.attach(environment.web_ui, self.options(), self._form, loop)
        options = self.options()
        if self.conductor is not None and getattr(options, "metrics_port", 0):
            self._metrics = observe.serve(self.conductor.observer, options.metrics_host, options.metrics_port)
        if self.generator is not None:
            # Not on a user's greenlet: Locust stops and moves users when a worker joins or is lost.
            gevent.spawn(self.generator.run)

    def _show_target(self) -> None:
        """Put the config's address into the start form, where it can be changed."""
        try:
            self.environment.host = self.environment.host or self.load().config.base_url or None
        except (ConfigError, PlanError):
            return  # said when a run is started

    # -- config and plan -----------------------------------------------------------------

    def options(self) -> Any:
        return self.environment.parsed_options

    def load(self, options: Any = None) -> Resolved:
        """The config with the overrides of options (default: of this process). Raises ConfigError or PlanError."""
        options = options or self.options()
        check_ranges(options)
        path = Path(options.bench_config or DEFAULT_CONFIG)
        overrides: dict[str, Any] = {}
        if options.target_model:
            overrides["model"] = options.target_model
        for key, value in (("ttft_deadline_ms", options.slo_ttft_ms), ("tpot_deadline_ms", options.slo_tpot_ms)):
            if value:
                overrides[f"slo.{key}"] = value
        base_url = options.host or os.environ.get("BENCH_TARGET_URL")
        if base_url:
            overrides["base_url"] = base_url
        return load_config(path, env=os.environ, overrides=overrides)

    def plan(self, shape: str) -> Plan:
        """The plan of a shape by the config and the options. Raises ConfigError or PlanError."""
        self._resolved = self.load()
        return self._plan(shape, self.options(), self._resolved.config)

    def _plan(self, shape: str, options: Any, config: Config) -> Plan:
        qps = parse_rates(options.qps_stages)
        if shape == "single" and options.offered_qps:
            qps = [options.offered_qps]
        return build_plan(
            config,
            shape,
            qps=qps,
            duration_s=options.stage_duration or None,
            repeats=options.stage_repeats or None,
            seed=options.plan_seed or None,
        )

    def begin(self, shape: str, next_stage: NextStage | None = None) -> None:
        """Start the run of a shape. A bad config stops Locust with exit code 2 and all problems in the log.

        `next_stage`: see `Conductor.begin`.
        """
        assert self.conductor is not None
        try:
            plan = self.plan(shape)
            _refuse_nowhere(self._resolved)
            self._refuse_key(self._resolved)
            self._refuse_part(shape)
        except (ConfigError, PlanError) as error:
            self.environment.process_exit_code = 2
            self.conductor.live.refuse(str(error))
            if self._form is not None:
                self._form.begun()
            for line in str(error).splitlines():
                log.error("%s", line)
            raise StopTest() from None
        if self.loop == "closed":
            users = getattr(self.options(), "num_users", None) or 1
            stages = [replace(s, name=f"{s.index:02d} {_kind(s.name)} c{users}") for s in plan.stages]
            plan = replace(plan, stages=tuple(stages))
        self.conductor.begin(plan, shape=shape, loop=self.loop, next_stage=next_stage)
        if self._form is not None:
            self._form.begun()

    def _check_start(self, options: Any) -> None:
        """Would a run begin with these options? Changes nothing. Raises ConfigError or PlanError."""
        resolved = self.load(options)
        shape = getattr(self.environment.shape_class, "plan_name", "") or self._shape_of(options)
        self._plan(shape, options, resolved.config)
        _refuse_nowhere(resolved)
        self._refuse_key(resolved)
        self._refuse_part(shape)

    def _shape_of(self, options: Any) -> str:
        """The shape of a start without a shape class."""
        return "sweep" if options.qps_stages.strip() and self.loop == "open" else "single"

    def _refuse_key(self, resolved: Resolved | None) -> None:
        """The key that the senders will read must be usable before the first stage. Raises ConfigError.

        A master whose workers may be on other machines sends nothing: its own key is only warned of.
        """
        assert resolved is not None
        try:
            api_key(resolved.config)
        except ConfigError as error:
            here = self.generator is not None or getattr(self.options(), "processes", None)
            if here:
                raise
            log.warning("the key here is unusable, the workers' own must not be: %s", error)

    def _refuse_part(self, shape: str) -> None:
        """A part needs a plan that all masters know from the beginning. Raises PlanError."""
        options = self.options()
        try:
            part = parse_part(options.part)
        except ValueError as error:
            raise PlanError(str(error)) from None
        if part != WHOLE and (self.loop == "closed" or shape == "knee_search"):
            what = "a closed loop" if self.loop == "closed" else "a knee search"
            raise PlanError(f"--part is {options.part}: {what} has no plan that parts could share; leave --part out")

    def settings(self) -> dict[str, Any]:
        """What the conductor and the workers need of the config; holds no key."""
        assert self._resolved is not None
        resolved, options = self._resolved, self.options()
        config = resolved.config
        target, client = config.target, config.client
        return {
            "run_dir": options.run_dir,
            "part": options.part,
            "meet": options.meet,
            "command": _command(),
            "masked_config": resolved.masked(),
            "config_origin": dict(resolved.origin),
            "target_info": {"base_url": config.base_url, "model": config.model, "endpoint": target.endpoint},
            "preflight": _preflight(),
            "limits": config.limits.model_dump(),
            "metrics_url": metrics_address(target.metrics_url, config.base_url, embedded=config.engine.embedded),
            "metrics_headers": lambda: _metrics_headers(config),  # asked when it is needed, so that no key lies here
            "live": stage_settings(config),
            "worker": {
                "base_url": config.base_url,
                "api_key_file": target.api_key_file,
                "request": {
                    "model": config.model,
                    "endpoint": target.endpoint,
                    "ignore_eos": target.ignore_eos,
                    "extra_body": dict(target.extra_body),
                },
                "pin_length": target.pin_length,
                "prompt_sample_ratio": client.prompt_sample_ratio,
                "max_in_flight": client.max_in_flight,
                "transport": {
                    "path": PATHS[target.endpoint],
                    "auth": target.auth,
                    "read": client.read,
                    "drain_interval_s": client.drain_interval_ms / 1000,
                    "idle_reuse_s": client.idle_reuse_sec,
                    "connect_timeout_s": target.connect_timeout_sec,
                    "first_token_timeout_s": target.first_token_timeout_sec,
                    "idle_timeout_s": target.idle_timeout_sec,
                    "total_timeout_s": target.total_timeout_sec,
                    "proxy": target.proxy,
                    "ca_file": target.ca_file,
                    "tls_verify": target.tls_verify,
                },
                "extra_headers": sorted(target.extra_headers.items()),
                "trust_env": target.trust_env,
                "embedded": config.engine.embedded,
                "labels": labels.wanted(config),
            },
        }

    # -- the life of the process ------------------------------------------------------------

    def _listen(self) -> None:
        env = self.environment
        if self.is_worker:
            # Ctrl-C reaches the whole terminal group; the master tells workers what to do about it.
            self._signals = gevent.signal_handler(signal.SIGINT, self._worker_interrupted)
            if os.environ.get("BENCH_ALIVE_FILE"):
                gevent.spawn(self._show_alive, Path(os.environ["BENCH_ALIVE_FILE"]))
            self._hits = 0
            return
        self._hits = 0
        self._signals = gevent.signal_handler(signal.SIGINT, self._interrupted)
        env.events.test_start.add_listener(self._on_test_start)
        env.events.test_stopping.add_listener(self._on_stopping)
        env.events.quitting.add_listener(self._on_stopping)
        if os.environ.get("BENCH_PARENT_PID"):
            gevent.spawn(self._watch_parent, int(os.environ["BENCH_PARENT_PID"]))
        prefix = getattr(self.options(), "csv_prefix", None)
        if prefix:
            atexit.register(stats.write_final_stats, env, prefix)

    def _show_alive(self, path: Path) -> None:
        """Touch a file while the master answers: the health check of a container without a port."""
        runner: Any = self.environment.runner
        while True:
            if (runner.last_heartbeat_timestamp or 0.0) > time.time() - ALIVE_S:
                path.touch()
            gevent.sleep(ALIVE_S / 5)

    def _watch_parent(self, parent: int) -> None:
        """End in order when `bench run` was killed: nobody would stop the load any more."""
        while os.getppid() == parent:
            gevent.sleep(1.0)
        log.warning("the command that started this run is gone: stopping")
        if self.conductor is not None and not self.conductor.finished:
            self.conductor.interrupt()
            self.conductor.wait()
        self._quit()

    def _on_test_start(self, environment: Environment, **_: Any) -> None:
        if environment.shape_class is None:
            gevent.spawn(self._without_shape)

    def _without_shape(self) -> None:
        """A start without a shape: one stage at the offered rate, then the end of the test."""
        assert self.conductor is not None
        try:
            self.begin(self._shape_of(self.options()))
        except StopTest:
            pass
        else:
            self.conductor.wait()
        runner = self.environment.runner
        if getattr(self.options(), "headless", False):
            runner.quit()
        else:
            runner.stop()

    def _on_stopping(self, environment: Environment, **_: Any) -> None:
        """Locust wants to stop (web page, run time, SIGTERM): drain first, so that no arrival is lost."""
        if self.conductor is not None and not self.conductor.finished:
            self.conductor.interrupt("worker_lost" if self.conductor.deserted else "interrupted")
            self.conductor.wait()

    def _interrupted(self) -> None:
        self._hits += 1
        if self.conductor is None or self.conductor.finished or self._hits > 2:
            os._exit(130) if self._hits > 2 else self._quit()
        elif self._hits == 1:
            log.warning("interrupted: no more arrivals; waiting for open answers (Ctrl-C again gives them up)")
            self.conductor.interrupt()
        else:
            self.conductor.interrupt()

    def _quit(self) -> None:
        self.environment.process_exit_code = 130
        gevent.spawn(self.environment.runner.quit)

    def _worker_interrupted(self) -> None:
        self._hits += 1
        if self._hits > 2:
            os._exit(130)


def _refuse_nowhere(resolved: Resolved | None) -> None:
    """A load needs an address: not one of the example config's placeholders, and not an empty one."""
    assert resolved is not None
    problems = resolved.placeholders()
    if problems:
        raise ConfigError(problems)
    if not resolved.config.base_url:
        unused = [f"engine.embedded {problem.found}. " for problem in resolved.warnings if problem.id == "CFG-016"]
        raise PlanError(
            "base_url is empty; `bench run` starts the embedded engine by itself, plain locust needs an address. "
            + "".join(unused)
            + "Start the engine with `bench serve-engine` and give its address with --host"
            + (", or set engine.embedded to false to test your service" if unused else "")
        )


def parse_rates(text: str) -> list[float] | None:
    """The rates in "5, 10,15"; None when the text is empty. Raises PlanError."""
    if not text.strip():
        return None
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
        if not rates or any(not MIN_QPS <= rate <= MAX_QPS for rate in rates):
            raise ValueError
    except ValueError:
        raise PlanError(f"--qps-stages is {text[:80]!r}; positive numbers with commas, such as 5,10,15") from None
    return rates


def connect(*, loop: str = "open") -> None:
    """Register everything with Locust; a locustfile calls it once, at import."""
    stats.install_buckets()

    @events.init_command_line_parser.add_listener
    def _options(parser: Any, **_: Any) -> None:
        add_options(parser)

    @events.init.add_listener
    def _init(environment: Environment, **_: Any) -> None:
        environment.bench = Wiring(environment, loop=loop)  # type: ignore[attr-defined]


def _kind(stage_name: str) -> str:
    """The endpoint word of a stage name such as `03 chat @15`."""
    return stage_name.split()[1]


def _command() -> list[str]:
    """The command to repeat this run: what `bench` was called with, else Locust's own line."""
    text = os.environ.get("BENCH_COMMAND")
    return json.loads(text) if text else ["locust", *sys.argv[1:]]


def _metrics_headers(config: Config) -> dict[str, str]:
    """The key's header field for the service's own metrics page; empty for any other page, or without a usable key."""
    target = config.target
    try:
        key = api_key(config)
    except ConfigError:
        return {}
    return page_headers(target.metrics_url or "", config.base_url, key, PATHS[target.endpoint], target.auth)


def _preflight() -> dict[str, Any]:
    path = os.environ.get("BENCH_PREFLIGHT")
    if not path:
        return {}
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("the preflight record cannot be read: %s", error)
        return {}
