"""What keys of a config must mean together: each check is one function from `Config` to findings.

Input: a `Config` whose single values are right, and the paths that were not.
Output: `Finding`s, errors and warnings, with the numbers that led to them.
Does not: read files, open sockets, know line numbers.

A check is skipped when one of the keys it reads was wrong: a default in its place would only confuse.
"""
from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from urllib.parse import urlsplit

from bench.config.limits import limit_problems
from bench.config.parse import Path_
from bench.config.profiles import STEP_COEFFICIENTS
from bench.config.schema import Config


__all__ = ["Finding", "limit_problems", "run"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem before it has a file and a line."""

    id: str
    at: Path_
    found: str
    allowed: str = ""
    fix: str = ""


Check = Callable[[Config], Iterator[Finding]]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []


def _reads(*keys: str) -> Callable[[Check], Check]:
    """Registers a check with the dotted keys that it reads."""
    def register(check: Check) -> Check:
        _CHECKS.append((keys, check))
        return check
    return register


def run(config: Config, bad: set[Path_]) -> list[Finding]:
    """Findings of all checks whose keys are right."""
    wrong = {tuple(str(part) for part in at) for at in bad}
    out: list[Finding] = []
    for keys, check in _CHECKS:
        paths = [tuple(key.split(".")) for key in keys]
        touched = any(path[: len(at)] == at or at[: len(path)] == path for path in paths for at in wrong if at)
        if not touched:
            out += check(config)
    return out


def p95_output_tokens(config: Config) -> int | None:
    """P95 of the output length in tokens; None for an empirical law (its file is not read here)."""
    load = config.loadgen
    cap = load.max_output_tokens
    if load.output_len_dist == "lognormal":
        drawn = math.exp(min(load.output_len_mu + load.output_len_sigma * NormalDist().inv_cdf(0.95), 700.0))
        return int(min(max(drawn, 1), cap))
    if load.output_len_dist == "uniform" and load.output_len_range:
        low, high = load.output_len_range
        return min(low + math.ceil(0.95 * (high - low + 1)) - 1, cap)
    if load.output_len_dist == "fixed" and load.output_len_fixed:
        return min(load.output_len_fixed, cap)
    return None


def is_placeholder(text: str) -> bool:
    """Whether a base URL or model is still the one of the example config, or empty."""
    lower = text.strip().lower()
    return lower == "" or "your-" in lower or "your_" in lower or "你的" in text or lower.startswith("<") or "example.invalid" in lower


@_reads("base_url", "engine.embedded")
def _base_url(config: Config) -> Iterator[Finding]:
    if config.engine.embedded and is_placeholder(config.base_url):
        return
    url = config.base_url
    if is_placeholder(url):
        yield Finding(
            "CFG-012", ("base_url",), "is still a placeholder" if url else "is empty", "the address of the service",
            "set BENCH_BASE_URL (or TAOTOKEN_BASE_URL), or write it here",
        )
        if not url:
            return
    wrong = url_fault(url)
    if wrong:
        yield Finding("CFG-011", ("base_url",), wrong[0], "http(s)://host[:port][/path]", wrong[1])


def url_fault(url: str) -> tuple[str, str] | None:
    """(what is wrong, what to do) with a base URL, or None. Shows no query: it may hold a secret."""
    if url != url.strip() or any(char.isspace() or ord(char) < 32 for char in url):
        return "holds blanks or line breaks", "remove them"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no address ({error})", "write http://host:port/path"
    if parts.scheme not in ("http", "https"):
        return f'has the scheme "{parts.scheme[:20]}"' if "://" in url else "has no scheme", "begin it with http:// or https://"
    if not parts.hostname:
        return "has no host", "write http://host:port/path"
    if "@" in parts.netloc:
        return "holds a user or password", "remove it; the key goes into BENCH_API_KEY"
    if parts.query or "?" in url:
        names = [pair.partition("=")[0] for pair in parts.query.split("&") if pair]
        tracking = any(name.lower().startswith("utm") for name in names)
        return (
            "has a query string" + (" of tracking parameters (utm)" if tracking else ""),
            "remove everything from the question mark on; the plain API address is meant",
        )
    if parts.fragment or "#" in url:
        return "has a fragment", "remove everything from # on"
    if port == 0:
        return "has port 0", "write the port that the service listens on"
    if parts.path.rstrip("/").endswith(("/chat/completions", "/completions")):
        return "ends in the endpoint", "cut /chat/completions; it is added (target.endpoint)"
    return None


@_reads("model", "engine.embedded")
def _model(config: Config) -> Iterator[Finding]:
    if config.engine.embedded:
        return
    if is_placeholder(config.model):
        yield Finding(
            "CFG-012", ("model",), "is still a placeholder" if config.model else "is empty", "a model ID of the service",
            "set BENCH_MODEL (or TAOTOKEN_MODEL_ID), or write it here",
        )
    elif config.model != config.model.strip() or any(ord(char) < 32 for char in config.model):
        yield Finding("CFG-006", ("model",), "has blanks at an end or control characters", "the exact model ID", "remove them")


@_reads("scheduler.batch_size_cap", "scheduler.max_num_seqs")
def _cap(config: Config) -> Iterator[Finding]:
    cap, seqs = config.scheduler.batch_size_cap, config.scheduler.max_num_seqs
    if cap > seqs:
        yield Finding(
            "CFG-020", ("scheduler", "batch_size_cap"), f"is {cap}, above scheduler.max_num_seqs ({seqs})",
            f"at most {seqs}", "lower the cap or raise max_num_seqs",
        )


@_reads("scheduler.max_num_batched_tokens", "scheduler.max_num_seqs")
def _budget(config: Config) -> Iterator[Finding]:
    budget, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if budget < seqs:
        yield Finding(
            "CFG-021", ("scheduler", "max_num_batched_tokens"), f"is {budget}, below scheduler.max_num_seqs ({seqs})",
            f"at least {seqs}: each running sequence takes one token of a step", "raise the budget or lower max_num_seqs",
        )


@_reads("scheduler.enable_chunked_prefill", "scheduler.max_num_batched_tokens", "engine.embedded",
        "engine.max_model_len", "loadgen.input_len_range")
def _chunking(config: Config) -> Iterator[Finding]:
    if config.scheduler.enable_chunked_prefill:
        return
    budget = config.scheduler.max_num_batched_tokens
    need, name = max(config.loadgen.input_len_range), "loadgen.input_len_range"
    if config.engine.embedded:
        need, name = config.engine.max_model_len, "engine.max_model_len"
    if budget < need:
        yield Finding(
            "CFG-022", ("scheduler", "max_num_batched_tokens"),
            f"is {budget} with enable_chunked_prefill false, below {name} ({need})",
            f"at least {need}: a prompt must fit one step whole", "raise the budget or turn chunked prefill on",
        )


@_reads("admission.kv_reserve_ratio", "admission.oversubscribe_factor")
def _oversubscribe(config: Config) -> Iterator[Finding]:
    ratio, factor = config.admission.kv_reserve_ratio, config.admission.oversubscribe_factor
    product = ratio * factor
    sum_ = f"x kv_reserve_ratio is {factor:g} x {ratio:g} = {product:.4g}"
    # 1.15: a guess of the reference notes; above 2 half of all promises cannot be kept at once.
    if product > 2 + 1e-9:
        yield Finding("CFG-024", ("admission", "oversubscribe_factor"), sum_, "at most 2", "lower one of them: preemption would never end")
    elif product > 1.15 + 1e-9:
        yield Finding("CFG-023", ("admission", "oversubscribe_factor"), sum_, "up to 1.15 without preemption storms", "lower one of them")


def naive_batch_bound(v_single_tps: float, tpot_s: float) -> float:
    """Largest batch by the seed's rule n <= v_single x deadline (step time proportional to n)."""
    return v_single_tps * tpot_s


def affine_batch_bound(profile: str, tpot_s: float, context_tokens: float, overhead_s: float | None = None) -> float | None:
    """Largest batch by the affine rule n = (TPOT - a0 - o)/(b0 + g c), in sequences; None for an unknown profile.

    a0: s per step; o: overhead, s per step; b0: s per token of the step; g: s per cached token read;
    c: mean context, tokens. Source: docs/engine.md, step-time models.
    """
    coefficients = STEP_COEFFICIENTS.get(profile)
    if coefficients is None:
        return None
    o = coefficients.overhead_s if overhead_s is None else overhead_s
    slope = coefficients.b0_s + coefficients.g_s * context_tokens
    return (tpot_s - coefficients.a0_s - o) / slope if slope > 0 else math.inf


@_reads("scheduler.batch_size_cap", "slo.tpot_deadline_ms", "engine.profile", "engine.overhead_ms",
        "loadgen.input_len_range", "loadgen.output_len_dist", "loadgen.output_len_mu", "loadgen.output_len_sigma")
def _tpot_cap(config: Config) -> Iterator[Finding]:
    coefficients = STEP_COEFFICIENTS.get(config.engine.profile)
    if coefficients is None:
        return
    tpot_s = config.slo.tpot_deadline_ms / 1000
    overhead_s = None if config.engine.overhead_ms is None else config.engine.overhead_ms / 1000
    o = coefficients.overhead_s if overhead_s is None else overhead_s
    v_single = 1.0 / (coefficients.a0_s + coefficients.b0_s + o)  # one sequence: one token a step
    naive = naive_batch_bound(v_single, tpot_s)
    cap = config.scheduler.batch_size_cap
    # Mean context of a running sequence: its prompt and, on average, half of its output.
    context = sum(config.loadgen.input_len_range) / 2 + (p95_output_tokens(config) or 0) / 4
    affine = affine_batch_bound(config.engine.profile, tpot_s, context, overhead_s) or 0.0
    if cap <= naive:
        return
    both = f"; by the affine rule (TPOT - a0 - o)/(b0 + g c) it is {max(math.floor(affine), 0)} (context {context:.0f} tokens)"
    verdict = "the affine rule holds for GPUs: nothing to do" if cap <= affine else "lower the cap: both rules say so"
    yield Finding(
        "CFG-025", ("scheduler", "batch_size_cap"),
        f"is {cap}, above v_single x tpot_deadline = {v_single:.0f}/s x {tpot_s:g} s = {naive:.1f}",
        f"at most {math.floor(naive)} by that rule for profile {config.engine.profile}{both}", verdict,
    )


@_reads("slo.p95_target_ms", "slo.ttft_deadline_ms", "slo.tpot_deadline_ms", "loadgen.output_len_dist",
        "loadgen.output_len_mu", "loadgen.output_len_sigma", "loadgen.output_len_range",
        "loadgen.output_len_fixed", "loadgen.max_output_tokens")
def _p95(config: Config) -> Iterator[Finding]:
    tokens = p95_output_tokens(config)
    if tokens is None:
        return
    slo = config.slo
    # n tokens have n - 1 gaps.
    worst_ms = slo.ttft_deadline_ms + (tokens - 1) * slo.tpot_deadline_ms
    if slo.p95_target_ms < worst_ms:
        left = (slo.p95_target_ms - slo.ttft_deadline_ms) / (tokens - 1) if tokens > 1 else 0.0
        need = f"a P95 answer of {tokens} tokens may then take {max(left, 0):.3g} ms per token, not {slo.tpot_deadline_ms:g}"
        yield Finding(
            "CFG-026", ("slo", "p95_target_ms"),
            f"is {slo.p95_target_ms:g}, below ttft_deadline + (P95 output - 1) x tpot_deadline = {worst_ms:g} ms",
            need, "the deadlines and the P95 target contradict each other: all three are reported, the tightest decides",
        )


@_reads("engine.embedded", "engine.max_model_len", "engine.num_blocks", "engine.block_size",
        "loadgen.input_len_range", "loadgen.max_output_tokens", "loadgen.output_len_dist", "loadgen.output_len_range",
        "loadgen.output_len_fixed", "loadgen.arrival_process")
def _fits(config: Config) -> Iterator[Finding]:
    if not config.engine.embedded or config.loadgen.arrival_process == "trace":
        return
    load = config.loadgen
    outputs = {"uniform": max(load.output_len_range or [0]), "fixed": load.output_len_fixed or 0}
    output = min(outputs.get(load.output_len_dist, load.max_output_tokens) or load.max_output_tokens, load.max_output_tokens)
    need = max(load.input_len_range) + output
    room = config.engine.max_model_len
    if need > room:
        yield Finding(
            "CFG-027", ("engine", "max_model_len"),
            f"is {room}, below the longest request: prompt {max(load.input_len_range)} + output {output} = {need}",
            f"at least {need}", "raise it, or lower loadgen.max_output_tokens",
        )
    # One block of the pool is the null block, which holds no sequence.
    if config.engine.num_blocks is not None and (config.engine.num_blocks - 1) * config.engine.block_size < need:
        blocks = math.ceil(need / config.engine.block_size) + 1
        yield Finding(
            "CFG-027", ("engine", "num_blocks"),
            f"is {config.engine.num_blocks}, the longest request ({need} tokens) needs {blocks} with the null block",
            f"at least {blocks}", "raise it",
        )


@_reads("engine.profile")
def _profile(config: Config) -> Iterator[Finding]:
    name = config.engine.profile
    if name in STEP_COEFFICIENTS or name.endswith(".json"):
        return
    near = difflib.get_close_matches(name, STEP_COEFFICIENTS, n=1)
    yield Finding(
        "CFG-007", ("engine", "profile"), f'is "{name[:60]}"', f"one of {', '.join(STEP_COEFFICIENTS)}, or a .json file",
        f"did you mean {near[0]}?" if near else "choose one of them",
    )


@_reads("scheduler.preemption_mode", "scheduler.swap_space_gb")
def _swap(config: Config) -> Iterator[Finding]:
    if config.scheduler.preemption_mode == "swap" and config.scheduler.swap_space_gb == 0:
        yield Finding("CFG-028", ("scheduler", "swap_space_gb"), "is 0 with preemption_mode swap", "above 0", "give it memory or use recompute")


@_reads("loadgen")
def _loadgen(config: Config) -> Iterator[Finding]:
    load = config.loadgen
    for name, pair in (("input_len_range", load.input_len_range), ("output_len_range", load.output_len_range)):
        if pair is not None and pair[0] > pair[1]:
            yield Finding("CFG-030", ("loadgen", name), f"is [{pair[0]}, {pair[1]}]", "low first, then high", "swap the two")
    needs = {"uniform": "output_len_range", "fixed": "output_len_fixed", "empirical": "output_len_file"}
    for kind, name in needs.items():
        given = getattr(load, name) is not None
        if load.output_len_dist == kind and not given:
            yield Finding("CFG-031", ("loadgen", name), f"is missing with output_len_dist {kind}", "", f"add {name}")
        elif load.output_len_dist != kind and given:
            yield Finding("CFG-032", ("loadgen", name), f"has no effect with output_len_dist {load.output_len_dist}", "", f"remove it or use {kind}")
    if load.output_len_dist == "uniform" and load.output_len_range and load.output_len_range[1] > load.max_output_tokens:
        yield Finding("CFG-006", ("loadgen", "output_len_range"), f"ends at {load.output_len_range[1]}, above max_output_tokens ({load.max_output_tokens})",
                      f"at most {load.max_output_tokens}", "raise max_output_tokens")
    if load.output_len_dist == "fixed" and load.output_len_fixed and load.output_len_fixed > load.max_output_tokens:
        yield Finding("CFG-006", ("loadgen", "output_len_fixed"), f"is {load.output_len_fixed}, above max_output_tokens ({load.max_output_tokens})",
                      f"at most {load.max_output_tokens}", "raise max_output_tokens")
    if load.arrival_process == "trace" and load.trace_file is None:
        yield Finding("CFG-031", ("loadgen", "trace_file"), "is missing with arrival_process trace", "", "name an Azure CSV or Mooncake JSONL file")
    if load.arrival_process != "gamma" and load.burstiness != 1.0:
        yield Finding("CFG-032", ("loadgen", "burstiness"), f"has no effect with arrival_process {load.arrival_process}", "", "use gamma or remove it")
    if load.trace_end_sec is not None and load.trace_end_sec <= load.trace_start_sec:
        yield Finding("CFG-030", ("loadgen", "trace_end_sec"), f"is {load.trace_end_sec:g}, not after trace_start_sec ({load.trace_start_sec:g})", "", "raise it")


@_reads("sweep", "loadgen.duration_sec", "loadgen.target_qps")
def _sweep(config: Config) -> Iterator[Finding]:
    shortest = min(config.stage_duration_s(), config.sweep.target_duration_sec or math.inf)
    if config.sweep.warmup_sec is not None and config.sweep.warmup_sec >= shortest:
        yield Finding(
            "CFG-033", ("sweep", "warmup_sec"), f"is {config.sweep.warmup_sec:g}, a stage lasts {shortest:g} s",
            f"below {shortest:g}", "shorten the warm-up or lengthen the stage",
        )
    if config.loadgen.target_qps not in config.sweep.qps:
        yield Finding(
            "CFG-034", ("sweep", "qps"), f"has no stage at loadgen.target_qps ({config.loadgen.target_qps:g})",
            "the verdict is about that rate", f"add {config.loadgen.target_qps:g} to the list",
        )


@_reads("classes", "tenants")
def _groups(config: Config) -> Iterator[Finding]:
    for section, groups in (("classes", config.classes), ("tenants", config.tenants)):
        names = [group.name for group in groups]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Finding("CFG-035", (section,), f'holds the name "{name[:40]}" twice', "each name once", "rename one")
        total = math.fsum(group.share for group in groups)
        if groups and abs(total - 1) > 1e-6:
            yield Finding("CFG-036", (section,), f"has shares that add up to {total:.6g}", "1", "correct the shares")


@_reads("target.connect_timeout_sec", "target.first_token_timeout_sec", "target.idle_timeout_sec",
        "target.total_timeout_sec", "slo.ttft_deadline_ms")
def _timeouts(config: Config) -> Iterator[Finding]:
    target = config.target
    for name in ("connect_timeout_sec", "first_token_timeout_sec", "idle_timeout_sec"):
        value = getattr(target, name)
        if value > target.total_timeout_sec:
            yield Finding("CFG-037", ("target", name), f"is {value:g}, above total_timeout_sec ({target.total_timeout_sec:g})",
                          f"at most {target.total_timeout_sec:g}", "lower it or raise total_timeout_sec")
    deadline_s = config.slo.ttft_deadline_ms / 1000
    if target.first_token_timeout_sec < deadline_s:
        yield Finding("CFG-037", ("target", "first_token_timeout_sec"),
                      f"is {target.first_token_timeout_sec:g}, below slo.ttft_deadline_ms ({deadline_s:g} s)",
                      f"at least {deadline_s:g}", "raise it: requests that meet the SLO would be cut off")


# Fields of the request body that the plan decides.
PLANNED_FIELDS = ("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "ignore_eos", "n")


@_reads("target.extra_body", "target.extra_headers", "target.proxy", "target.metrics_url", "target.tls_verify")
def _target(config: Config) -> Iterator[Finding]:
    for name in config.target.extra_body:
        if name in PLANNED_FIELDS:
            yield Finding("CFG-038", ("target", "extra_body", name), "is set by the plan", "", "remove it; see loadgen and target for the key that sets it")
    for name, value in config.target.extra_headers.items():
        if not name.isascii() or any(char in name for char in " \t\r\n:()<>@,;\\\"/[]?={}") or any(ord(c) < 32 and c != "\t" or ord(c) > 255 for c in value):
            yield Finding("CFG-006", ("target", "extra_headers"), "holds a name or value that HTTP does not allow", "one line of plain characters", "correct the header")
    for name in ("proxy", "metrics_url"):
        url = getattr(config.target, name)
        fault = url_fault(url) if url and name == "proxy" else None
        if url and not url.startswith(("http://", "https://")):
            fault = ("has no http(s) scheme", "begin it with http://")
        if fault:
            yield Finding("CFG-006", ("target", name), fault[0], "http(s)://host:port", fault[1])
    if not config.target.tls_verify:
        yield Finding("CFG-044", ("target", "tls_verify"), "is false", "true", "name the authority in target.ca_file instead: the key goes to whoever answers")


@_reads("limits")
def _money(config: Config) -> Iterator[Finding]:
    limits = config.limits
    if limits.max_cost is not None:
        for name in ("price_per_million_input_tokens", "price_per_million_output_tokens"):
            if getattr(limits, name) is None:
                yield Finding("CFG-039", ("limits", "max_cost"), f"is given, {name} is not", "both prices", "add the price: a missing one counts as 0")
