"""Is the service reachable, right and quiet: the checks before a run, each with its fault and the next thing to try.

Input: a resolved config and the API key. Output: `PreflightReport`, one line of verdict in it.
Does not: send load (at most eight short requests, one after the other), print, judge capacity.

1. The layers are checked in order: address and key, connection, models, one request, one stream, idle latency. The
   first failed check ends it; the ones after it are `skipped`.
2. No part of the key is in the report: its length is.
3. Every failed check has a code of `outcome.CODES`, a fix, and a link to a section of docs/troubleshooting.md.
4. Plain blocking sockets: works in any process, needs no gevent.
"""
from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from bench.client.answer import AnswerOptions, AnswerReader
from bench.client.blocking import Channel, connect, exchange
from bench.client.endpoint import Endpoint, check_key, parse_base_url
from bench.client.errors import ChannelError
from bench.client.kernel_time import stamps_supported
from bench.client.outcome import CODES, DOCS_PAGE, Outcome
from bench.client.redact import redact
from bench.client.request import PATHS, PINNING, key_field, request_body

PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
IDLE_REQUESTS = 5
# Enough tokens that a stream shows more than one event; cheap on a paid service.
TOKENS = 8
# The least that OpenAI takes for `responses`.
TOKENS_RESPONSES = 16
# Wall clocks further apart than this make dates in answers (Retry-After, token expiry) wrong.
CLOCK_OFFSET_MAX_S = 5.0
MODELS_SHOWN = 5
# A new prompt shares the chat template with the one before it, and nothing else.
CACHED_SHARE_MAX = 0.5
# What a service that still starts says beside its 503.
LOADING = re.compile(r"\b(?:loading|starting up|warming up|not (?:yet )?(?:ready|loaded|started))\b", re.I)

# code -> the next thing to try. Codes without an entry use the text of their layer.
FIXES: dict[str, str] = {
    "CH-DNS": "check the spelling of the host in the base URL, then the name server of this machine",
    "CH-REFUSED": "start the service, or correct host and port in the base URL",
    "CH-UNREACHABLE": "check the network route, VPN and firewall of this machine",
    "CH-RESET": "check firewall and limits of connections on the way; compare http:// with https:// in the base URL",
    "CH-CLOSED": "look into the log of the service; compare http:// with https:// in the base URL",
    "CH-CUT": "look into the log of the service and of gateways on the way: who closed the connection",
    "CH-TLS": "compare https:// with http:// in the base URL, and the port",
    "CH-TLS-CERT": "give the authority of the certificate as target.ca_file; check the host name",
    "CH-PROXY": "start the proxy or unset target.proxy; with target.trust_env also HTTP_PROXY and HTTPS_PROXY",
    "CH-407": "put user and password of the proxy into target.proxy",
    "CH-401": "check that BENCH_API_KEY is exported in this shell, is whole, and is not disabled or expired",
    "CH-KEY": "check that BENCH_API_KEY is exported in this shell, is whole, and is not disabled or expired",
    "CH-403": "ask for the right to this model or endpoint with this key; check address filters",
    "CH-OAUTH": "use an API key of the service (BENCH_API_KEY), not another tool's login; give base URL, key and model",
    "CH-404": "check the path of the base URL: the requests go to BASE/v1 and the path of target.endpoint",
    "CH-MODEL": "set model to one of the names that the service offers",
    "CH-REDIRECT": "write the address it points to into the base URL; a redirect would drop the key",
    "CH-402": "check the account of the key",
    "CH-502": "the gateway has no working server behind it: look there",
    "CH-504": "the gateway gave up waiting: raise its limit or lower the load",
    "CH-TO-CONNECT": "check host, port and firewall; raise target.connect_timeout_sec for a far service",
    "CH-TO-FIRST": "is the model still loading or is a queue ahead? then wait, or raise target.first_token_timeout_sec",
    "CH-TO-IDLE": "the stream stalls: look into the service; raise target.idle_timeout_sec if that is normal there",
    "CH-TO-TOTAL": "raise target.total_timeout_sec or ask for fewer tokens",
    "SC-CONTEXT": "lower loadgen.input_len_range or max_output_tokens: together they exceed the model's context",
    "SC-PARAM": "set target.ignore_eos to false, or remove the field from target.extra_body",
    "SC-400": "compare the request (bench probe --json) with the documentation of the service",
    "SC-CHOICES": "print the whole answer with bench probe; check the path of the base URL and the model name",
    "SC-ERROR-BODY": "read the message: the gateway hides an error behind status 200 (model name, channel, quota)",
    "SC-JSON": "print the answer with bench probe; something on the way rewrites it",
    "SC-SSE": "something else answers at this address (a login page, a proxy): check the base URL",
    "SC-HTTP": "the port does not speak HTTP/1.1: check port and scheme",
    "SC-TRUNCATED": "look for the one who ends the stream: service log, gateway timeouts, its limit of response size",
    "SC-EMPTY": "the model ends at once: try another prompt or set target.ignore_eos",
    "SV-429": "wait as asked, and ask for a higher limit: this one is below a single request now",
    "SV-QUOTA": "top up the account or use another key",
    "SV-503": "wait until the service is free: it refuses a single request now",
    "SV-529": "wait until the service is free: it refuses a single request now",
    "SV-500": "look into the log of the service",
    "SV-STREAM": "look into the log of the service: it failed inside the answer",
    "SV-STREAM-BUSY": "wait until the service is free: it refuses a single request now",
}


@dataclass(slots=True)
class Check:
    """One line of the report. `status`: ok, note, failed, skipped."""

    name: str
    status: str
    found: str
    code: str | None = None
    fix: str = ""
    link: str = ""
    duration_s: float | None = None


@dataclass(slots=True)
class PreflightReport:
    """What was found, and the verdict in one line."""

    base_url: str
    model: str
    ok: bool = False
    sentence: str = ""
    next_step: str = ""
    checks: list[Check] = field(default_factory=list)
    ttft_idle_s: list[float] = field(default_factory=list)
    ttft_idle_median_s: float | None = None
    tpot_idle_median_s: float | None = None
    connect_s: float | None = None
    tls_s: float | None = None
    clock_offset_s: float | None = None
    kernel_stamps: bool = False
    models: list[str] = field(default_factory=list)
    nearest_models: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    server_timings: dict[str, float] | None = None
    checked_at_utc: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, JSON-able."""
        return asdict(self)

    @property
    def failed(self) -> Check | None:
        """The check that failed, None when all is well."""
        return next((check for check in self.checks if check.status == "failed"), None)


class _Stop(Exception):
    """A check failed: no later one can say anything."""


NAMES = ("base URL", "API key", "model", "proxy", "connection", "models", "request", "stream", "idle latency")


def run_preflight(
    resolved: Any, api_key: str | None, *, env: Mapping[str, str] | None = None, idle_requests: int = IDLE_REQUESTS
) -> PreflightReport:
    """Return the report on the service of a resolved config (`bench.config.Resolved`); never raises for its faults."""
    return Preflight(resolved, api_key, env if env is not None else os.environ, idle_requests).run()


class Preflight:
    """One run through the checks."""

    def __init__(self, resolved: Any, api_key: str | None, env: Mapping[str, str], idle_requests: int) -> None:
        config = self.config = resolved.config
        self.placeholders = {problem.where.split()[-1]: problem for problem in resolved.placeholders()}
        self.key = api_key
        self.env = env
        self.idle_requests = idle_requests
        self.report = PreflightReport(redact(config.base_url, self._secrets()), config.model)
        self.report.kernel_stamps = stamps_supported()
        self.report.checked_at_utc = datetime.now(UTC).isoformat(timespec="seconds")
        self.endpoint: Endpoint | None = None
        self.prompts = 0
        self.served = ""  # the model that the last stream named
        self.tokens = TOKENS_RESPONSES if config.target.endpoint == "responses" else TOKENS

    def _secrets(self) -> tuple[str, ...]:
        return (self.key,) if self.key else ()

    def run(self) -> PreflightReport:
        """Do the checks in order and write the verdict."""
        steps: tuple[Callable[[], None], ...] = (
            self._base_url, self._api_key, self._model, self._proxy, self._connection, self._models, self._request,
            self._stream, self._idle,
        )  # fmt: skip
        report = self.report
        for number, step in enumerate(steps):
            try:
                step()
            except _Stop:
                report.checks += [Check(name, "skipped", "not reached") for name in NAMES[number + 1 :]]
                break
        self._verdict()
        return report

    # --- the three-piece set ---

    def _refuse_placeholder(self, name: str, key: str, code: str) -> None:
        """A value of the example config that was never filled in is named before anything is sent."""
        if problem := self.placeholders.get(key):
            self._fail(name, code, f"{key} {problem.found}", problem.fix)

    def _base_url(self) -> None:
        self._refuse_placeholder("base URL", "base_url", "CH-URL")
        try:
            self.endpoint = parse_base_url(self.config.base_url)
        except ChannelError as error:
            self._fail("base URL", error.code, error.message, error.fix)
        assert self.endpoint is not None
        self.report.base_url = self.endpoint.url()
        self._add("base URL", "ok", f"requests go to {self.endpoint.url(self._path())}")

    def _api_key(self) -> None:
        assert self.endpoint is not None
        try:
            check_key(self.key, needed=False)
        except ChannelError as error:
            self._fail("API key", error.code, error.message, error.fix)
        if self.key:
            self._add("API key", "ok", f"{len(self.key)} characters")
        elif self.endpoint.is_local:
            self._add("API key", "ok", "none is set; a service on this host mostly needs none")
        else:
            self._add("API key", "note", "none is set; most services away from this host want one",
                      fix="export BENCH_API_KEY=... in this shell")  # fmt: skip

    def _model(self) -> None:
        model = self.config.model
        self._refuse_placeholder("model", "model", "CH-MODEL")
        if not model.strip():
            self._fail("model", "CH-MODEL", "no model is set", "set model, or BENCH_MODEL in the environment")
        if model != model.strip() or any(char in "\"'\r\n\t" for char in model):
            self._fail("model", "CH-MODEL", "the model name has blanks or quotes around it", "remove them")
        self._add("model", "ok", redact(model, self._secrets()))

    def _proxy(self) -> None:
        target = self.config.target
        names = [name for name in PROXY_NAMES if self.env.get(name) or self.env.get(name.lower())]
        if target.proxy:
            self._add("proxy", "ok", f"{redact(target.proxy)} (target.proxy)")
        elif names and target.trust_env:
            used = self._proxy_url()
            self._add("proxy", "ok", f"{redact(used)} (environment)" if used else "the environment excludes this host")
        elif names:
            self._add("proxy", "note", f"{', '.join(names)} is set and not used (target.trust_env is false)")
        else:
            self._add("proxy", "ok", "none")

    def _proxy_url(self) -> str | None:
        target = self.config.target
        if target.proxy or not target.trust_env:
            return target.proxy
        from bench.client.dialing import proxy_from_env

        assert self.endpoint is not None
        return proxy_from_env(self.endpoint.scheme, self.endpoint.host)

    # --- the wire ---

    def _channel(self) -> Channel:
        target = self.config.target
        assert self.endpoint is not None
        return Channel(
            self.endpoint, self.key, tuple(target.extra_headers.items()), self._proxy_url(), target.ca_file,
            target.tls_verify, target.connect_timeout_sec, target.first_token_timeout_sec, target.idle_timeout_sec,
            target.total_timeout_sec, self._path(), target.auth,
        )  # fmt: skip

    def _path(self) -> str:
        return PATHS[self.config.target.endpoint]

    def _connection(self) -> None:
        outcome = connect(self._channel())
        self._must_be_ok("connection", outcome)
        self.report.connect_s, self.report.tls_s = outcome.connect_s, outcome.tls_s
        parts = [("name", outcome.dns_s), ("connect", outcome.connect_s), ("TLS", outcome.tls_s)]
        self._add("connection", "ok", ", ".join(f"{name} {_ms(s)}" for name, s in parts if s is not None))

    def _models(self) -> None:
        """Look the model up; many gateways have no such list, so only a wrong key or a dead channel ends here."""
        outcome, reader = exchange(self._channel(), "GET", "/models", options=self._plain())
        self._clock(reader)
        if outcome.status != "ok":
            if outcome.error_kind in ("connection", "timeout", "redirect") or outcome.code in ("CH-TLS", "SC-HTTP"):
                self._must_be_ok("models", outcome)
            self._add("models", "note", f"no list of models ({outcome.code}: {outcome.detail or outcome.http_status})")
            return
        names = _model_names(bytes(reader.body))
        self.report.models = [redact(name, self._secrets(), 120) for name in names[:200]]
        if not names:
            self._add("models", "note", "the list of models is empty or in a form of its own")
        elif self.config.model in names:
            self._add("models", "ok", f"{self.config.model} is one of {len(names)}")
        else:
            near = self._nearest()
            found = f"{self.config.model} is not among the {len(names)} models; nearest: {', '.join(near)}"
            self._add("models", "note", found, fix=f"set model to {near[0]}")

    def _nearest(self) -> list[str]:
        """The offered names most like the asked one."""
        models = self.report.models
        by_lower = {name.lower(): name for name in models}
        wanted = self.config.model.lower()
        near = [by_lower[name] for name in difflib.get_close_matches(wanted, by_lower, n=MODELS_SHOWN, cutoff=0.4)]
        tail = wanted.rsplit("/", 1)[-1]
        near = [name for name in models if name.lower().rsplit("/", 1)[-1] == tail and name not in near] + near
        self.report.nearest_models = (near or sorted(models))[:MODELS_SHOWN]
        return self.report.nearest_models

    def _clock(self, reader: AnswerReader) -> None:
        """How far the service's wall clock is from ours, by its Date field (whole seconds)."""
        try:
            theirs = parsedate_to_datetime(reader.headers["date"]).timestamp()
        except (KeyError, TypeError, ValueError):
            return
        self.report.clock_offset_s = theirs + 0.5 - time.time()

    def _plain(self) -> AnswerOptions:
        return AnswerOptions(plain=True, secrets=self._secrets())

    def _send(self, *, stream: bool) -> Outcome:
        target = self.config.target
        self.prompts += 1
        # A new prompt each time, different from its first word on, so that no prefix cache answers.
        prompt = f"{time.time_ns() % 10**9:09d} {self.prompts}: write a few words about queues."
        body = request_body(self.config.model, prompt, self.tokens, endpoint=target.endpoint, stream=stream,
                            ignore_eos=target.ignore_eos, extra_body=target.extra_body)  # fmt: skip
        pins = target.ignore_eos and target.endpoint in PINNING
        options = AnswerOptions(secrets=self._secrets(), pinned_tokens=self.tokens if pins else None)
        outcome, reader = exchange(self._channel(), "POST", self._path(), body, options)
        self.served = redact(reader.served_model or "", self._secrets(), 120)
        return outcome

    def _request(self) -> None:
        outcome = self._send(stream=False)
        self._must_be_ok("request", outcome)
        assert outcome.done_at is not None and outcome.send_at is not None
        took = _ms(outcome.done_at - outcome.send_at)
        self._add("request", "ok", f"status {outcome.http_status}, {outcome.output_tokens} tokens in {took}")

    def _stream(self) -> None:
        outcome = self._send(stream=True)
        self._must_be_ok("stream", outcome)
        report = self.report
        report.server_timings = outcome.server_timings
        report.flags = sorted(outcome.flags)
        notes = []
        if "tokens_estimated" in outcome.flags:
            notes.append("no usage in the stream: output tokens will be counted events (stream_options.include_usage?)")
        if "burst" in outcome.flags:
            notes.append("the tokens came in one piece: something on the way buffers, so TPOT would be false")
        if "short" in outcome.flags:
            of = f"{outcome.output_tokens} of {self.tokens}"
            notes.append(f"{of} tokens: the service does not keep to the asked length")
        if "hidden_reasoning" in outcome.flags:
            hidden = outcome.reasoning_tokens
            notes.append(f"{hidden} tokens are reasoning that is not streamed: TPOT is over the others")
        if "other_model" in outcome.flags:
            notes.append(f"the answer names another model, {self.served}: is it routed to something else?")
        if _mostly_cached(outcome):
            of = f"{outcome.cached_tokens} of {outcome.prompt_tokens or 'its'} tokens"
            notes.append(f"the service took {of} of a new prompt from its cache")
        found = f"{outcome.chunks} events with output, {outcome.output_tokens} tokens ({outcome.output_tokens_source})"
        self._add("stream", "note" if notes else "ok", "; ".join([found, *notes]))

    def _idle(self) -> None:
        """TTFT of a few requests, one after the other: the floor that a deadline must lie above."""
        tpots: list[float] = []
        for _ in range(self.idle_requests):
            outcome = self._send(stream=True)
            self._must_be_ok("idle latency", outcome)
            row = outcome.to_row(stage=0, arrival=0, worker=0, repeat=0, offered_qps=0.0, phase="window", tenant="",
                                 request_class="", request_id="", intended_s=outcome.send_at or 0.0, input_tokens=None,
                                 max_tokens=self.tokens, to_run_s=float)  # fmt: skip
            assert row.ttft_s is not None
            self.report.ttft_idle_s.append(row.ttft_s)
            if row.tpot_s is not None:
                tpots.append(row.tpot_s)
        if not self.report.ttft_idle_s:
            return
        times = sorted(self.report.ttft_idle_s)
        median_s = self.report.ttft_idle_median_s = times[(len(times) - 1) // 2]
        self.report.tpot_idle_median_s = sorted(tpots)[(len(tpots) - 1) // 2] if tpots else None
        found = f"TTFT median {_ms(median_s)} ({_ms(times[0])} to {_ms(times[-1])})"
        deadline_s = self.config.slo.ttft_deadline_ms / 1000.0
        if median_s > deadline_s:
            self._add("idle latency", "note",
                      f"{found}: above slo.ttft_deadline_ms ({_ms(deadline_s)}) with nothing else running",
                      fix="raise the deadline above the idle TTFT: no load can meet it",
                      link=f"{DOCS_PAGE}#attainment-too-low")  # fmt: skip
        else:
            self._add("idle latency", "ok", found)

    # --- lines ---

    def _add(self, name: str, status: str, found: str, *, fix: str = "", link: str = "") -> None:
        self.report.checks.append(Check(name, status, redact(found, self._secrets(), 400), fix=fix, link=link))

    def _must_be_ok(self, name: str, outcome: Outcome) -> None:
        if outcome.status == "ok":
            return
        code = outcome.code or "CL-BUG"
        found = CODES[code].text + (f": {outcome.detail}" if outcome.detail else "")
        fix = FIXES.get(code, "look into the log of the service")
        if code == "CH-MODEL" and self.report.models:
            fix = f"set model to one of: {', '.join(self._nearest())}"
        elif code in ("CH-401", "CH-KEY") and not self.key:
            fix = "no key is set: export BENCH_API_KEY=... in this shell"
        elif code in ("CH-401", "CH-KEY", "CH-OAUTH"):
            fix += self._other_auth()
        elif code in ("SV-503", "SV-500", "CH-502") and LOADING.search(outcome.detail):
            found = f"the service is up and not ready: {outcome.detail}"
            fix = "wait until the model is loaded, then try again (bench run --wait 300 waits by itself)"
        elif outcome.retry_after_s is not None:
            fix += f" (it asks for {outcome.retry_after_s:g} s)"
        self._fail(name, code, found, fix)

    def _other_auth(self) -> str:
        """What to try when the key was refused and the way it was sent is not the usual one; empty when it is."""
        target = self.config.target
        if key_field(self._path(), target.auth) == "x-api-key":
            return "; it is sent as x-api-key: set target.auth to bearer when the service wants a bearer token"
        if target.endpoint == "messages":
            return "; it is sent as a bearer token: set target.auth to auto when the service wants x-api-key"
        return ""

    def _fail(self, name: str, code: str, found: str, fix: str) -> None:
        check = Check(name, "failed", redact(found, self._secrets(), 400), code, redact(fix, self._secrets(), 400),
                      f"{DOCS_PAGE}#{CODES[code].anchor}")  # fmt: skip
        self.report.checks.append(check)
        raise _Stop

    def _verdict(self) -> None:
        report = self.report
        failed = report.failed
        if report.clock_offset_s is not None and abs(report.clock_offset_s) > CLOCK_OFFSET_MAX_S:
            found = f"the service's wall clock is {report.clock_offset_s:+z.0f} s from ours"
            fix = "set the clocks by NTP; the latencies here do not depend on it"
            report.checks.append(Check("clock", "note", found, fix=fix))
        if failed is None:
            report.ok = True
            idle = "" if report.ttft_idle_median_s is None else f", idle TTFT {_ms(report.ttft_idle_median_s)}"
            count = sum(check.status == "note" for check in report.checks)
            notes = f"; {count} {'note' if count == 1 else 'notes'}" if count else ""
            name = report.model
            if "other_model" in report.flags:
                name = f"{self.served}, not as {name}"
            report.sentence = f"READY: {report.base_url} answers as {name}{idle}{notes}"
            first = next((check.fix for check in report.checks if check.status == "note" and check.fix), "")
            report.next_step = first or "bench run"
            return
        assert failed.code is not None
        layer = CODES[failed.code].layer
        report.sentence = f"NOT READY [{failed.code}], {layer} layer, at the {failed.name}: {failed.found}"
        report.next_step = f"{failed.fix} ({failed.link})"


def _mostly_cached(outcome: Outcome) -> bool:
    """Most of the prompt came from a cache. What all prompts share, the chat template, may be found there anywhere."""
    cached, prompt = outcome.cached_tokens, outcome.prompt_tokens
    return "cached" in outcome.flags and (not cached or not prompt or cached > CACHED_SHARE_MAX * prompt)


def _model_names(body: bytes) -> list[str]:
    """Names in the answer to GET /models: OpenAI's, or a bare list, or Ollama's."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    if isinstance(value, dict):
        value = value.get("data") or value.get("models")
    names = []
    for item in value if isinstance(value, list) else ():
        name = (item.get("id") or item.get("name")) if isinstance(item, dict) else item
        if isinstance(name, str) and name:
            names.append(name)
    return names


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
