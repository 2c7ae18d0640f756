"""The routes of the embedded engine: requests in, scheduler and streams, answers out.

Input: `handle(connection, request)` from `engine.http_server`. Output: answers.
Does not: parse bytes (http_server), validate bodies (http_api), decide scheduling (scheduler) or keep time (driver).

Routes: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/version`, `/metrics`,
`/debug/requests` (the engine's own record), `/debug/decisions` (why), `/debug/state`, `/debug/faults`,
`/debug/rollout` (engine/http_rollout.py).
`docs/engine-http.md` describes them.
"""
from __future__ import annotations

import asyncio
import hmac
import itertools
import math
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qs

import orjson

from engine import metrics as prometheus
from engine.faults import Fault, Faults
from engine.http_api import ApiError, Call, error_body, parse_call
from engine.http_fleet import Fleet
from engine.http_rollout import RolloutRoutes
from engine.http_rollout import encode as encode_rows
from engine.http_server import Connection, Request
from engine.http_stream import Stream
from engine.http_truth import FIELDS, TruthLog, encode
from engine.scheduler import Reject

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}\Z")  # safe in a header and in JSON
# Rows of /debug/requests written between two turns of the loop (about 0.5 ms).
_ROWS_PER_TURN = 100
# reason -> what the client is told; the reasons are those of control/admission.py
REFUSALS = {
    "too_long": "This model's maximum context length is {limit} tokens. However, you requested {output} output tokens "
                "and your prompt contains {prompt} tokens. Shorten the prompt or lower max_tokens",
    "never_fits": "A request of {prompt} prompt and {output} output tokens needs more KV blocks, or a larger step, "
                  "than this engine has",
    "tenant_quota": "The tenant is above its quota",
    "tenant_share": "The tenant holds its share of a full engine",
    "queue_full": "The waiting queue is full",
    "queue_tokens": "The prompts that wait leave no room for another of this length",
    "kv_budget": "The memory promised to accepted requests leaves no room",
    "ttft_budget": "The first token would come after its deadline",
}
_PLAIN = "text/plain; charset=utf-8"


class App:
    """Everything behind the socket of one engine process."""

    def __init__(self, fleet: Fleet, *, model: str, api_key: bytes | None = None, guard_debug: bool = False) -> None:
        self.fleet = fleet
        self.model = model
        self.truth = TruthLog()
        self.faults = Faults()
        self.started_s = time.monotonic()
        self.created = int(time.time())
        self._api_key = api_key
        self._guard_debug = guard_debug
        self._model_json = orjson.dumps(model)
        self._counter = itertools.count()
        self._streams: set[Stream] = set()
        self._routes: dict[str, dict[str, Callable[[Connection, Request], None]]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": lambda connection, _: connection.respond(200, b"", _PLAIN)},
            "/version": {"GET": lambda connection, _: self._json(connection, {"version": version("scheduler-bench")})},
            "/metrics": {"GET": self._metrics},
            "/debug/requests": {"GET": self._debug_requests},
            "/debug/decisions": {"GET": self._debug_decisions},
            "/debug/state": {"GET": self._debug_state},
            "/debug/faults": {"GET": self._list_faults, "POST": self._set_faults, "DELETE": self._set_faults},
        }
        self.rollout = RolloutRoutes(fleet.live)
        self._routes.update(self.rollout.routes)
        self._routes["/debug/rollout/samples"] = {"GET": self._rollout_samples}
        fleet.on_end = self._ended

    # --- entry -------------------------------------------------------------------------------------------------

    def bad_request(self, status: int, message: str) -> bytes:
        """The JSON body for a request that could not be read."""
        return error_body(message, "invalid_request_error", None, status)

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer one request."""
        try:
            path = request.path.rstrip("/") or "/"
            guarded = path.startswith("/v1") or (self._guard_debug and path.startswith("/debug"))
            if self._api_key is not None and guarded:
                self._check_key(request)
            methods = self._routes.get(path)
            if methods is None:
                raise ApiError(404, f"no route {request.path!r}; this engine has {', '.join(self._routes)}",
                               "NotFoundError")
            action = methods.get(request.method)
            if action is None:
                raise ApiError(405, f"{request.method} is not allowed here; use {', '.join(methods)}")
            action(connection, request)
        except ApiError as problem:
            extra = "WWW-Authenticate: Bearer\r\n" if problem.status == 401 else ""
            connection.respond(problem.status, problem.body(), extra=extra)

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        assert self._api_key is not None
        matches = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._api_key)
        if scheme.lower() != "bearer" or not matches:
            found = f"a key of {len(given)} characters that is not the right one" if given else "no key"
            raise ApiError(401, f"unauthorized: found {found}; send 'Authorization: Bearer KEY'",
                           "invalid_request_error", code="invalid_api_key")

    @staticmethod
    def _json(connection: Connection, data: Any) -> None:
        connection.respond(200, orjson.dumps(data))

    # --- completions -------------------------------------------------------------------------------------------

    def _chat(self, connection: Connection, request: Request) -> None:
        self._complete(connection, request, chat=True)

    def _completions(self, connection: Connection, request: Request) -> None:
        self._complete(connection, request, chat=False)

    def _complete(self, connection: Connection, request: Request, *, chat: bool) -> None:
        call = parse_call(request.body, chat=chat)
        if call.model != self.model:
            raise ApiError(404, f"The model `{call.model}` does not exist; this engine serves `{self.model}`.",
                           "NotFoundError", "model", "model_not_found")
        headers = request.headers
        call.tenant = headers.get("x-tenant") or call.tenant
        call.request_class = headers.get("x-request-class") or call.request_class
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.match(request_id):
            request_id = f"engine-{next(self._counter)}"
        limit = self.fleet.config.max_model_len
        max_tokens = call.max_tokens if call.max_tokens is not None else max(1, limit - call.prompt_tokens)
        fault = self.faults.draw(streamed=call.stream)
        if fault is not None and fault.kind in ("status", "disconnect"):
            self._refuse_by_fault(connection, call, request, request_id, max_tokens, fault)
            return
        answer_id = ("chatcmpl-" if chat else "cmpl-") + request_id
        stream = Stream(connection, call, request_id=request_id, answer_id=answer_id, created=self.created,
                        model=self._model_json, interval=self.fleet.config.stream_interval, max_tokens=max_tokens,
                        received_s=request.received_s, fault=fault,
                        report_cached=self.fleet.config.prefix_caching)
        self._streams.add(stream)
        refusal = self.fleet.submit(stream)
        if refusal is not None:
            self._streams.discard(stream)
            self._refuse(connection, stream, refusal)
            return
        request.on_disconnect = lambda: self.fleet.leave(stream)

    def _refuse(self, connection: Connection, stream: Stream, refusal: Reject) -> None:
        status, reason = refusal.http_status, refusal.reason
        self.truth.add(stream.record("rejected", reason, status, time.monotonic(), 0))
        kind = {400: "invalid_request_error", 429: "rate_limit_error"}.get(status, "service_unavailable_error")
        message = REFUSALS.get(reason, "refused by admission control").format(
            limit=self.fleet.config.max_model_len, prompt=stream.call.prompt_tokens, output=stream.max_tokens)
        if refusal.text:
            message += f": {refusal.text}"
        extra = f"x-request-id: {stream.request_id}\r\n"
        if refusal.retry_after_s is not None:  # whole seconds, never early
            extra += f"Retry-After: {max(1, math.ceil(refusal.retry_after_s))}\r\n"
        connection.respond(status, error_body(f"{message} ({reason})", kind, None, reason), extra=extra)

    def _refuse_by_fault(self, connection: Connection, call: Call, request: Request, request_id: str, max_tokens: int,
                         fault: Fault) -> None:
        now_s = time.monotonic()
        record = dict.fromkeys(FIELDS)
        record.update(request_id=request_id, received_s=request.received_s, done_s=now_s, outcome="fault",
                      prompt_tokens=call.prompt_tokens, max_tokens=max_tokens, output_tokens=0, chunks=0,
                      preemptions=0, reason=fault.kind, decision_s=0.0, tenant=call.tenant,
                      request_class=call.request_class, http_status=fault.status if fault.kind == "status" else None)
        self.truth.add(record)
        if fault.kind == "disconnect":
            connection.cut(reset=fault.reset)
            return
        extra = f"x-request-id: {request_id}\r\n"
        if fault.retry_after_s is not None:
            extra += f"Retry-After: {fault.retry_after_s:g}\r\n"
        if fault.html:
            page = b"<html><head><title>%d</title></head><body>injected failure</body></html>" % fault.status
            connection.respond(fault.status, page, "text/html", extra)
        else:
            connection.respond(fault.status, error_body("injected failure", "InternalServerError", None,
                                                        fault.status), extra=extra)

    def _ended(self, stream: Stream, record: dict[str, Any]) -> None:
        self._streams.discard(stream)
        self.truth.add(record)

    # --- the rest ----------------------------------------------------------------------------------------------

    def _models(self, connection: Connection, request: Request) -> None:
        self._json(connection, {"object": "list", "data": [{
            "id": self.model, "object": "model", "created": self.created, "owned_by": "scheduler-bench",
            "root": self.model, "parent": None, "max_model_len": self.fleet.config.max_model_len}]})

    def _metrics(self, connection: Connection, request: Request) -> None:
        state = self.fleet.lateness()
        own = {
            "bench_engine_steps_total": ("counter", "Steps of all replicas.", self.fleet.steps()),
            "bench_engine_decision_seconds_total": (
                "counter", "Scheduler CPU time in steps, part of the latency.", self.fleet.decision_total_s()),
            "bench_engine_step_lateness_p99_seconds": (
                "gauge", "How late step boundaries were processed, p99.", state["lateness_p99_s"] or 0.0),
            "bench_engine_valid": ("gauge", "0 when steps were too late to trust the run.", int(state["valid"])),
        }
        config = self.fleet.config
        info = {"block_size": config.block_size, "num_gpu_blocks": config.total_blocks,
                "enable_prefix_caching": config.prefix_caching, "gpu_memory_utilization": 0.92}
        page = prometheus.render(self.model, self.fleet.metric_rows(), own, info)
        connection.respond(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _debug_requests(self, connection: Connection, request: Request) -> None:
        query = parse_qs(request.query)
        rows = self.truth.take(clear=query.get("clear", ["0"])[0] not in ("0", "", "false"))
        wanted = query.get("request_id")
        if wanted:
            rows = [row for row in rows if row[0] in wanted]
        self._lines(connection, request, rows, encode)

    def _debug_decisions(self, connection: Connection, request: Request) -> None:
        query = parse_qs(request.query)
        of = query.get("of", ["live"])[0]
        if of not in ("live", "twin"):
            raise ApiError(400, f"of is {of[:20]!r}; allowed: live, twin (of a rollout's shadow)", param="of")
        log = self.fleet.decisions if of == "live" else self.fleet.live.twin_decisions
        lines, after, lost = log.page(_whole(query, "after", 0), _whole(query, "limit", None))
        for name in query.get("request_id", ()):
            mark = b'"request_id":%b,' % orjson.dumps(name)
            lines = [line for line in lines if mark in line]
        self._lines(connection, request, lines, b"".join, extra=f"x-next-cursor: {after}\r\nx-lost: {lost}\r\n")

    def _rollout_samples(self, connection: Connection, request: Request) -> None:
        query = parse_qs(request.query)
        rows, extra = self.rollout.page(_whole(query, "after", 0), _whole(query, "limit", None))
        self._lines(connection, request, rows, encode_rows, extra)

    def _lines(self, connection: Connection, request: Request, rows: list[Any], encode: Callable[[list[Any]], bytes],
               extra: str = "") -> None:
        """Answer with JSON lines, written in pieces so that no step waits for a long listing."""
        connection.open_stream("application/x-ndjson", extra)
        task = asyncio.get_running_loop().create_task(self._write_rows(connection, rows, encode))
        request.on_disconnect = task.cancel

    @staticmethod
    async def _write_rows(connection: Connection, rows: list[Any], encode: Callable[[list[Any]], bytes]) -> None:
        for start in range(0, len(rows), _ROWS_PER_TURN):
            while connection.unsent_bytes() > 1_000_000:
                await asyncio.sleep(0.005)
            data = encode(rows[start: start + _ROWS_PER_TURN])
            connection.write(b"%x\r\n%b\r\n" % (len(data), data))
            await asyncio.sleep(0)
        connection.write(b"0\r\n\r\n")
        connection.finish()

    def _debug_state(self, connection: Connection, request: Request) -> None:
        state = {
            "model": self.model, "now_s": time.monotonic(), "uptime_s": time.monotonic() - self.started_s,
            "time_scale": self.fleet.config.time_scale, "cpu_s": time.process_time(),
            **self.fleet.lateness(),
            "open_requests": len(self._streams), "records_kept": len(self.truth), "records_total": self.truth.total,
            "decisions_kept": len(self.fleet.decisions), "decisions_total": self.fleet.decisions.total,
            "replicas": self.fleet.snapshots(), "faults": self.faults.listing(),
        }
        if parse_qs(request.query).get("reset", ["0"])[0] not in ("0", "", "false"):
            self.fleet.reset_lateness()
        connection.respond(200, orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))

    def _list_faults(self, connection: Connection, request: Request) -> None:
        self._json(connection, {"faults": self.faults.listing()})

    def _set_faults(self, connection: Connection, request: Request) -> None:
        try:
            self.faults.replace([] if request.method == "DELETE" else orjson.loads(request.body))
        except ValueError as problem:  # also orjson's
            raise ApiError(400, str(problem)) from None
        self._list_faults(connection, request)


def _whole(query: dict[str, list[str]], name: str, default: int | None) -> Any:
    """A whole number of the query, 0 or more; 400 when it is none."""
    text = query.get(name, [""])[0]
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, f"{name} is {text[:20]!r}; a whole number from 0 on is needed", param=name)
    return int(text)
