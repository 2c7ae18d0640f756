"""The settings of a run: one pydantic model per section of the config file.

Input: plain dicts, lists, numbers and words as JSON or YAML give them.
Output: `Config`, frozen, with every default filled in.
Does not: read files or the environment (`load.py`), compare keys with each other (`checks.py`).

1. Types are strict: "32", 32.5 and true are not integers; an integer is a number.
2. Unknown keys are refused, and so are NaN and infinity.
3. Every key has a description and a unit; `docs/config.md` and `configs/schema.json` come from them.
4. Milliseconds only where the reference config has them (`*_ms`); everything else in the unit of its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Endpoint = Literal["chat", "completions", "responses", "messages"]
Process = Literal["constant", "poisson", "gamma", "trace"]
LengthKind = Literal["lognormal", "uniform", "fixed", "empirical"]

# Bounds that only catch typing errors (a rate of 1e9, a length of 1e12); no machine reaches them.
MAX_QPS = 100_000.0
MIN_QPS = 1e-4  # one request in almost three hours
MAX_TOKENS = 10_000_000
MAX_SECONDS = 7 * 86_400.0

Qps = Annotated[float, Field(ge=MIN_QPS, le=MAX_QPS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
SecondsOrZero = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Millis = Annotated[float, Field(gt=0, le=MAX_SECONDS * 1000)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Word = Annotated[str, Field(min_length=1, max_length=4096)]
# Two whole numbers, low and high; order is checked in checks.py so that the message can say more.
TokenRange = Annotated[list[Tokens], Field(min_length=2, max_length=2)]


def _key(default: Any, text: str, *, unit: str = "", **more: Any) -> Any:
    """A field with its description and unit (unit also lands in the JSON Schema)."""
    if isinstance(default, (list, dict)):
        value = default
        return Field(default_factory=lambda: value.copy(), description=text, json_schema_extra={"unit": unit}, **more)
    return Field(default, description=text, json_schema_extra={"unit": unit}, **more)


class Section(BaseModel):
    """What every section shares: strict types, no unknown keys, no NaN, frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Scheduler(Section):
    """How the service batches; the embedded engine obeys it, a real service is only compared with it."""

    policy: Literal["fcfs", "priority", "sjf", "edf", "slack_aware", "mlfq", "fair"] = _key(
        "slack_aware", "order of the waiting queue of the embedded engine"
    )
    max_num_batched_tokens: int = _key(4096, "token budget of one step", unit="tokens", ge=1, le=MAX_TOKENS)
    max_num_seqs: int = _key(32, "sequences that may run at once", unit="sequences", ge=1, le=65536)
    batch_size_cap: int = _key(16, "admission cap on running sequences", unit="sequences", ge=1, le=65536)
    hopeless: Literal["demote", "shed", "keep"] = _key(
        "demote", "slack_aware: what happens to a request that can no longer meet its deadline"
    )
    preemption_mode: Literal["recompute", "swap", "auto"] = _key("recompute", "what happens to a preempted sequence")
    swap_space_gb: float = _key(8.0, "host memory for swapped KV blocks", unit="GB", ge=0, le=65536)
    enable_chunked_prefill: bool = _key(True, "whether a prompt may be split over steps")


class Slo(Section):
    """What an answer must meet to count, and which share of ALL arrivals must."""

    ttft_deadline_ms: float = _key(800.0, "time to first token, from the intended time", unit="ms", gt=0, le=6e8)
    tpot_deadline_ms: float = _key(100.0, "mean time per further output token", unit="ms", gt=0, le=6e8)
    p95_target_ms: float = _key(2000.0, "P95 of the whole request", unit="ms", gt=0, le=6e8)
    attainment_target: float = _key(0.99, "share of all arrivals that must meet both deadlines", unit="1", gt=0, lt=1)


class Admission(Section):
    """When the embedded engine says no."""

    kv_reserve_ratio: float = _key(0.85, "share of the KV blocks that may be promised", unit="1", gt=0, le=1)
    oversubscribe_factor: float = _key(1.3, "how far promises may exceed that share", unit="1", gt=0, le=100)
    reject_on_budget_exceed: bool = _key(True, "true: answer 429/503 at once; false: queue")
    promise: Literal["max_tokens", "p95_output", "ewma"] = _key(
        "max_tokens", "output that admission reckons with: the limit asked for, or the P95 or mean of finished answers"
    )
    max_num_queued_reqs: Annotated[int, Field(ge=1, le=10**6)] | None = _key(
        None, "requests that may wait in one replica; above it 503 (`bench plan` derives it)", unit="requests"
    )
    max_num_queued_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = _key(
        None, "prompt tokens that may wait in one replica; above it 503 (`bench plan` derives it)", unit="tokens"
    )


class Loadgen(Section):
    """What is sent: arrivals, prompt lengths, output lengths. All of it follows from `seed`."""

    arrival_process: Process = _key("poisson", "law of the gaps between arrivals")
    target_qps: float = _key(20.0, "the rate at which the SLO must hold", unit="1/s", ge=MIN_QPS, le=MAX_QPS)
    duration_sec: float = _key(300.0, "arrivals of one stage last this long", unit="s", gt=0, le=MAX_SECONDS)
    input_len_range: TokenRange = _key([100, 2000], "prompt length, uniform over both ends", unit="tokens")
    output_len_dist: LengthKind = _key("lognormal", "law of the output length")
    output_len_mu: float = _key(6.0, "lognormal: mean of ln(tokens)", unit="ln tokens", ge=-5, le=16)
    output_len_sigma: float = _key(0.6, "lognormal: standard deviation of ln(tokens)", unit="ln tokens", ge=0, le=5)
    output_len_range: TokenRange | None = _key(None, "uniform: low and high, both included", unit="tokens")
    output_len_fixed: Tokens | None = _key(None, "fixed: the length", unit="tokens")
    output_len_file: Word | None = _key(None, "empirical: a text file, one length a line", unit="path")
    max_output_tokens: int = _key(
        4096, "no output is asked longer; longer draws are cut to it", unit="tokens", ge=1, le=MAX_TOKENS
    )
    burstiness: float = _key(
        1.0, "gamma: shape of the gaps; 1 is Poisson, below 1 bursts (CV = 1/sqrt(shape))", unit="1", ge=0.01, le=1000
    )
    # 11: all counts of the default sweep lie within 2 % of their mean (seed 1 is 3.3 sigma low at 20 QPS).
    seed: Seed = _key(11, "everything random follows from it; fixed by default so that runs repeat")
    unique_prompts: bool = _key(True, "false: all prompts of a length are equal (prefix caches will hit)")
    prompts_file: Word | None = _key(
        None, "your own prompts instead of made ones: JSONL, one request a line, plain or .gz", unit="path"
    )
    prompts_order: Literal["shuffled", "file"] = _key(
        "shuffled", "prompts_file: which line is next; shuffled: by the stage's seed, file: as they stand"
    )
    trace_file: Word | None = _key(None, "trace: Azure CSV or Mooncake JSONL, plain or .gz", unit="path")
    trace_rate_scale: float = _key(1.0, "trace: 2 replays it twice as fast", unit="1", gt=0, le=1e6)
    trace_spread_ties: bool = _key(True, "trace: spread equal stamps over the gap that follows")
    trace_prefixes: bool = _key(True, "trace: prompts begin alike where its hash_ids say so; false: none do")
    trace_start_sec: SecondsOrZero = _key(0.0, "trace: leave out what comes before", unit="s of the trace")
    trace_end_sec: Seconds | None = _key(None, "trace: leave out what comes from here on", unit="s of the trace")
    trace_max_input_tokens: Tokens | None = _key(None, "trace: longer prompts are cut to it", unit="tokens")


class Sweep(Section):
    """The stages: one offered rate each."""

    qps: Annotated[list[Qps], Field(min_length=1, max_length=99)] = _key(
        [5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0], "offered rates, in this order", unit="1/s"
    )
    stage_duration_sec: Seconds | None = _key(
        None, "arrivals of a stage last this long, warm-up included (default: loadgen.duration_sec)", unit="s"
    )
    target_duration_sec: Seconds | None = _key(
        None, "the same for the stage at loadgen.target_qps, which needs most arrivals", unit="s"
    )
    min_window_arrivals: int = _key(
        0,
        "stages of slow rates last longer, until so many arrivals are expected after the warm-up",
        unit="requests",
        ge=0,
        le=10**7,
    )
    warmup_sec: SecondsOrZero | None = _key(
        None, "start of each stage that is left out of the statistics (default: a tenth, at most 30 s)", unit="s"
    )
    drain_limit_sec: SecondsOrZero = _key(60.0, "longest wait for open answers after a stage", unit="s")
    repeats: int = _key(1, "times the whole sweep is run", ge=1, le=99)
    repeat_seed: Literal["same", "different"] = _key("same", "same: repeats send the identical load")
    processes: int = _key(1, "worker processes that send", ge=1, le=256)


class Search(Section):
    """The adaptive search for the knee, `bench run --shape knee_search`."""

    start_qps: Qps | None = _key(None, "rate of the first stage (default: loadgen.target_qps)", unit="1/s")
    lowest_qps: Qps | None = _key(None, "no stage is slower (default: a 64th of the first)", unit="1/s")
    highest_qps: Qps | None = _key(None, "no stage is faster (default: 64 times the first)", unit="1/s")
    stage_sec: Seconds = _key(
        120.0, "shortest stage, warm-up included; an undecided one is run again, longer", unit="s"
    )
    width_ratio: Annotated[float, Field(gt=0, le=1)] = _key(
        0.1,
        "the search ends when the interval of the knee, before a fit is widened by 1.2, is narrower than this share of "
        "it",
        unit="1",
    )
    width_qps: Qps | None = _key(None, "or narrower than this, whichever comes first", unit="1/s")
    max_duration_sec: Seconds = _key(7200.0, "the whole search, hold and drains included, takes no longer", unit="s")
    max_requests: Annotated[int, Field(ge=1)] | None = _key(None, "and sends no more", unit="requests")
    hold_sec: SecondsOrZero = _key(
        300.0, "last stage at 75 % of the interval's lower end, which must hold the SLO; 0: none", unit="s"
    )


class Target(Section):
    """How the service is spoken to."""

    endpoint: Endpoint = _key(
        "chat", "what is spoken: chat/completions, completions, OpenAI responses or Anthropic messages"
    )
    auth: Literal["auto", "bearer", "x-api-key"] = _key(
        "auto", "header of the API key; auto: x-api-key for messages, a bearer token else"
    )
    api_key_file: Word | None = _key(
        None, "file that holds the API key, when no environment variable does", unit="path"
    )
    connect_timeout_sec: Seconds = _key(5.0, "longest wait for a connection", unit="s")
    first_token_timeout_sec: Seconds = _key(60.0, "longest wait for the first output", unit="s")
    idle_timeout_sec: Seconds = _key(30.0, "longest gap between two reads of one answer", unit="s")
    total_timeout_sec: Seconds = _key(120.0, "longest life of one request", unit="s")
    trust_env: bool = _key(False, "whether HTTP_PROXY and the like are obeyed")
    proxy: Word | None = _key(None, "http://host:port of a proxy", unit="URL")
    ca_file: Word | None = _key(None, "PEM file of extra certificate authorities", unit="path")
    tls_verify: bool = _key(True, "false: accept any certificate")
    extra_headers: dict[Word, str] = _key({}, "headers added to each request; never a key")
    extra_body: dict[Word, Any] = _key({}, "fields added to each request body")
    send_labels: bool | None = _key(
        None, "send each request's tenant and request_class as body fields; default: to the embedded engine only"
    )
    ignore_eos: bool = _key(True, "ask the service not to stop before max_tokens (vLLM, SGLang)")
    pin_length: bool = _key(True, "answers shorter than asked are flagged `short`")
    metrics_url: Word | None = _key(None, "Prometheus page of the service", unit="URL")
    tokens_per_word: float = _key(
        1.0, "tokens that one word of our prompts becomes in the model's tokenizer", unit="tokens/word", ge=0.1, le=20
    )


class Client(Section):
    """How answers are read and how many may be open."""

    read: Literal["lazy", "prompt", "auto"] = _key("auto", "lazy: after the first output read in intervals")
    drain_interval_ms: Millis = _key(200.0, "lazy: time between two reads of one stream", unit="ms")
    prompt_sample_ratio: Share = _key(0.05, "auto: share of streams read at once, for token gaps", unit="1")
    max_in_flight: int = _key(20_000, "streams one worker may have open", ge=1, le=1_000_000)
    idle_reuse_sec: SecondsOrZero = _key(4.0, "an idle connection older than this is not used again", unit="s")


class Engine(Section):
    """The embedded engine: a real scheduler over a simulated GPU."""

    embedded: bool = _key(False, "true: start it and send everything to it")
    style: Literal["vllm", "sglang", "trt_no_evict", "trt_max_util"] = _key("vllm", "whose step loop is followed")
    profile: Word = _key("h100-8b", "step-time coefficients: a name of docs/engine.md or a .json file")
    replicas: int = _key(1, "independent engines behind one address", ge=1, le=1024)
    router: Literal["round_robin", "random", "least_loaded", "prefix"] = _key("round_robin", "who gets a request")
    block_size: int = _key(16, "tokens of one KV block", unit="tokens", ge=1, le=1024)
    num_blocks: Annotated[int, Field(ge=1, le=10**9)] | None = _key(
        None, "KV blocks (default: the profile's)", unit="blocks"
    )
    watermark: float = _key(0.0, "share of the KV blocks kept free when a request is admitted", unit="1", ge=0, lt=1)
    max_model_len: Tokens = _key(8192, "prompt + output of one request", unit="tokens")
    prefix_caching: bool = _key(False, "whether equal prompt starts share KV blocks")
    noise_cv: float = _key(0.03, "spread of step times", unit="1", ge=0, le=2)
    overhead_ms: Annotated[float, Field(ge=0, le=1e4)] | None = _key(
        None, "per-step overhead (default: the profile's)", unit="ms"
    )
    time_scale: float = _key(1.0, "step times are multiplied by it", unit="1", gt=0, le=1000)
    seed: Seed = _key(1, "seed of noise and of sampled lengths")
    stream_interval: int = _key(1, "tokens of one streamed chunk", unit="tokens", ge=1, le=10_000)


class Gate(Section):
    """One extra check of the verdict, such as `ttft p99 <= 1200 at target`."""

    metric: Literal[
        "ttft",
        "ttfo",
        "tpot",
        "e2e",
        "residence",
        "itl_p99",
        "send_lag",
        "attainment",
        "attainment_ttft",
        "attainment_tpot",
        "goodput_qps",
        "completed_qps",
        "error_ratio",
        "knee_qps",
        "repeat_spread",
    ] = Field(description="what is measured", json_schema_extra={"unit": ""})
    statistic: Literal["mean", "p50", "p90", "p95", "p99", "max", "value"] = _key("value", "which statistic of it")
    operator: Literal["<=", "<", ">=", ">"] = Field(description="comparison", json_schema_extra={"unit": ""})
    value: float = Field(
        description="limit; ms for latencies, else the metric's unit", json_schema_extra={"unit": "ms or metric"}
    )
    at: Literal["target", "max", "all", "run"] | Qps = _key(
        "target", "stage: target, max, all, run, or an offered rate"
    )
    severity: Literal["fail", "warn"] = _key("fail", "what a miss does")
    abort: bool = _key(False, "true: a miss stops the run in order")


class Limits(Section):
    """A run that would exceed these is refused before it starts, and stopped when it does."""

    max_requests: Annotated[int, Field(ge=1)] | None = _key(None, "planned requests", unit="requests")
    max_tokens: Annotated[int, Field(ge=1)] | None = _key(None, "input + output tokens", unit="tokens")
    max_cost: Annotated[float, Field(gt=0)] | None = _key(None, "money, at the prices below", unit="currency")
    price_per_million_input_tokens: Annotated[float, Field(ge=0)] | None = _key(None, "price", unit="currency")
    price_per_million_output_tokens: Annotated[float, Field(ge=0)] | None = _key(None, "price", unit="currency")
    max_duration_sec: Seconds | None = _key(None, "run time, drains at their limit included", unit="s")


class RequestClass(Section):
    """A kind of request with deadlines of its own."""

    name: Word = Field(description="label in the ledger", json_schema_extra={"unit": ""})
    share: Share = Field(description="share of arrivals; all shares add up to 1", json_schema_extra={"unit": "1"})
    ttft_deadline_ms: Millis | None = _key(None, "default: slo.ttft_deadline_ms", unit="ms")
    tpot_deadline_ms: Millis | None = _key(None, "default: slo.tpot_deadline_ms", unit="ms")
    priority: int = _key(0, "higher goes first under policy priority", ge=-1000, le=1000)


class Tenant(Section):
    """A customer of the service."""

    name: Word = Field(description="label in the ledger", json_schema_extra={"unit": ""})
    share: Share = Field(description="share of arrivals; all shares add up to 1", json_schema_extra={"unit": "1"})
    weight: float = _key(1.0, "share of the engine under contention", unit="1", gt=0, le=1e6)
    quota_qps: Qps | None = _key(None, "rate above which the engine answers 429", unit="1/s")
    priority: int = _key(0, "above 0: may use the oversubscribed memory beyond its share", ge=-1000, le=1000)


class Config(Section):
    """The whole config file."""

    model: str = _key("", "model ID sent with each request (BENCH_MODEL, TAOTOKEN_MODEL_ID)", max_length=512)
    base_url: str = _key(
        "",
        "address of the service, with or without /v1 (BENCH_BASE_URL, TAOTOKEN_BASE_URL)",
        unit="URL",
        max_length=2048,
    )
    scheduler: Scheduler = Field(default_factory=Scheduler, description="batching of the service")
    slo: Slo = Field(default_factory=Slo, description="deadlines and the share that must meet them")
    admission: Admission = Field(default_factory=Admission, description="admission of the embedded engine")
    loadgen: Loadgen = Field(default_factory=Loadgen, description="what is sent")
    sweep: Sweep = Field(default_factory=Sweep, description="stages")
    search: Search = Field(default_factory=Search, description="adaptive search for the knee")
    target: Target = Field(default_factory=Target, description="how the service is spoken to")
    client: Client = Field(default_factory=Client, description="how answers are read")
    engine: Engine = Field(default_factory=Engine, description="the embedded engine")
    gates: Annotated[list[Gate], Field(max_length=100)] = _key([], "further checks of the verdict")
    limits: Limits = Field(default_factory=Limits, description="ceilings on requests, tokens, money, time")
    classes: Annotated[list[RequestClass], Field(max_length=32)] = _key([], "kinds of requests")
    tenants: Annotated[list[Tenant], Field(max_length=64)] = _key([], "customers")

    def stage_duration_s(self, qps: float | None = None) -> float:
        """Seconds of arrivals of one stage, warm-up included; `qps` counts for `sweep.min_window_arrivals`."""
        base = self.sweep.stage_duration_sec or self.loadgen.duration_sec
        if qps is None or self.sweep.min_window_arrivals == 0:
            return base
        return max(base, self.warmup_s(base) + self.sweep.min_window_arrivals / qps)

    def warmup_s(self, duration_s: float) -> float:
        """Seconds at the start of a stage of `duration_s` that are left out of the statistics."""
        if self.sweep.warmup_sec is not None:
            return self.sweep.warmup_sec
        return min(30.0, 0.1 * duration_s)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, for editors (`configs/schema.json`)."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "scheduler-bench config"
    # Editors want this key in the file itself; the loader allows and ignores it.
    schema["properties"]["$schema"] = {"type": "string", "description": "where editors find this schema"}
    return schema
