"""The plan of a run: its stages and laws, everything a worker needs to compute the load by itself.

Input: a `Config` and the name of a shape.
Output: `Plan`, frozen, to and from JSON (the master sends it to its workers).
Does not: draw anything (`schedule.py` does), know the time of day, know workers.

1. A plan is complete: trace rows and observed lengths travel inside it, so that no worker reads a file. The one
   exception are the user's own prompts: their lengths, places and SHA-256 travel, each worker reads the text.
2. A stage's seed follows from the run's seed, its rates and (when repeats differ) its repeat. So the
   stage at 20 QPS sends the same load alone, in a sweep, or in another order.
3. `build_plan` alone opens files: the trace, the list of lengths and the prompts that the config names.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.config.dotenv import environment
from bench.config.schema import MAX_QPS, MIN_QPS, Config
from bench.config.secrets import known_keys
from bench.workload import lengths as laws
from bench.workload.arrivals import Levels, integrated_rate, rate_at
from bench.workload.labels import Labels
from bench.workload.lengths import Lengths
from bench.workload.prompt_file import PromptFile, read_prompts
from bench.workload.trace import Trace, TraceError, read_trace

SHAPES = ("sweep", "repeat", "ramp", "spike", "smoke", "replay", "single", "hold", "knee_search")
SMOKE_QPS = 2.0  # the reference's small-scale check before a sweep
SMOKE_S = 30.0
SPIKE_FACTOR = 3.0  # peak over base when no rates are given
MAX_ARRIVALS = 5_000_000  # of one stage: its arrays take 50 bytes an arrival
FORMAT = 1
FORMAT_LINES = 2  # with prompts of a file: an older version would make its own


class PlanError(ValueError):
    """The shape cannot be built from this config; the message says which key to change."""


@dataclass(frozen=True)
class Cut:
    """Lengths of a file above `loadgen.max_output_tokens`, which are sent with that limit."""

    key: str  # of loadgen, that names the file
    file: str
    what: str  # lines, rows, lengths
    count: int
    of: int
    first: int  # line number of the first; 0: not known
    largest: int
    limit: int

    def text(self) -> str:
        """A sentence with its numbers."""
        first = f" (first line {self.first})" if self.first else ""
        return (
            f"{self.count:,} of {self.of:,} {self.what} of {self.file}{first} ask for more output than "
            f"loadgen.max_output_tokens ({self.limit}), up to {self.largest:,} tokens; they are sent with {self.limit}"
        )


@dataclass(frozen=True)
class Stage:
    """One offered rate. Times in seconds from the stage's start; `duration_s` includes the warm-up."""

    index: int
    repeat: int
    name: str
    offered_qps: float  # constant rate, start of a ramp, mean of a spike or replay
    ramp_to_qps: float | None
    process: str
    burstiness: float
    duration_s: float
    warmup_s: float
    drain_limit_s: float
    seed: int
    # Rate profile when it is neither constant nor one ramp: (time_s, qps) points.
    profile: tuple[tuple[float, float], ...] = ()

    def levels(self) -> Levels:
        """Rate profile as (time_s, qps) points, from 0 to `duration_s`."""
        if self.profile:
            return self.profile
        end = self.offered_qps if self.ramp_to_qps is None else self.ramp_to_qps
        return ((0.0, self.offered_qps), (self.duration_s, end))

    def rate_at(self, t_s: float) -> float:
        """Asked rate in 1/s at `t_s` seconds from the stage's start."""
        return rate_at(self.levels(), t_s)

    @property
    def expected_arrivals(self) -> float:
        """Integral of the rate over the stage, warm-up included."""
        return integrated_rate(self.levels(), self.duration_s)

    @property
    def expected_window_arrivals(self) -> float:
        """Integral of the rate over the window (the warm-up left out)."""
        return self.expected_arrivals - integrated_rate(self.levels(), self.warmup_s)

    @property
    def window_s(self) -> float:
        """Seconds whose arrivals enter the statistics."""
        return self.duration_s - self.warmup_s


@dataclass(frozen=True)
class LengthLaws:
    """Laws of prompt and output length (a trace, when there is one, takes their place)."""

    input: Lengths
    output: Lengths


@dataclass(frozen=True)
class Prompts:
    """How prompts are made of words."""

    tokens_per_word: float = 1.0
    unique: bool = True


@dataclass(frozen=True)
class Group:
    """A tenant or a request class: label and share of arrivals."""

    name: str
    share: float


@dataclass(frozen=True)
class Plan:
    """All stages and the laws of their load."""

    stages: tuple[Stage, ...]
    run_seed: int
    shape: str
    lengths: LengthLaws
    prompts: Prompts
    trace: Trace | None = None
    tenants: tuple[Group, ...] = ()
    classes: tuple[Group, ...] = ()
    target_qps: float | None = field(default=None)
    lines: PromptFile | None = None  # the user's own prompts
    cuts: tuple[Cut, ...] = ()  # said before a run; does not travel

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal plan."""
        lines = {"lines": self.lines.to_dict()} if self.lines is not None else {}
        return json.dumps(
            {
                "format": FORMAT_LINES if lines else FORMAT,
                "run_seed": self.run_seed,
                "shape": self.shape,
                "target_qps": self.target_qps,
                "stages": [asdict(stage) for stage in self.stages],
                "lengths": {"input": self.lengths.input.to_dict(), "output": self.lengths.output.to_dict()},
                "prompts": asdict(self.prompts),
                "trace": self.trace.to_dict() if self.trace is not None else None,
                "tenants": [asdict(group) for group in self.tenants],
                "classes": [asdict(group) for group in self.classes],
                **lines,
            },
            allow_nan=False,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan in a `to_json` text. Raises ValueError on another format number."""
        data = json.loads(text)
        if data.get("format") not in (FORMAT, FORMAT_LINES):
            raise ValueError(
                f"plan: format is {data.get('format')!r}, this version reads {FORMAT} and {FORMAT_LINES}; use one "
                "version everywhere"
            )
        return cls(
            stages=tuple(
                Stage(**{**stage, "profile": tuple((t, q) for t, q in stage["profile"])}) for stage in data["stages"]
            ),
            run_seed=data["run_seed"],
            shape=data["shape"],
            target_qps=data["target_qps"],
            lengths=LengthLaws(
                Lengths.from_dict(data["lengths"]["input"]), Lengths.from_dict(data["lengths"]["output"])
            ),
            prompts=Prompts(**data["prompts"]),
            trace=Trace.from_dict(data["trace"]) if data["trace"] is not None else None,
            tenants=tuple(Group(**group) for group in data["tenants"]),
            classes=tuple(Group(**group) for group in data["classes"]),
            lines=PromptFile.from_dict(data["lines"]) if data.get("lines") else None,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())


def stage_seed(run_seed: int, rates: Levels, repeat: int) -> int:
    """Seed of a stage, a whole number below 2**53 (exact in JSON everywhere).

    Keyed by the rates (in micro-QPS), not by the position, and by the repeat; `build_plan` passes repeat 0
    when repeats shall send the same load.
    """
    key = [round(qps * 1_000_000) for _, qps in rates] + [repeat]
    words = [part for number in key for part in (number & 0xFFFFFFFF, number >> 32)]
    state = np.random.SeedSequence(run_seed, spawn_key=tuple(words)).generate_state(2, np.uint32)
    return (int(state[0]) | int(state[1]) << 32) >> 11


def build_plan(
    config: Config,
    shape: str = "sweep",
    *,
    qps: list[float] | None = None,
    duration_s: float | None = None,
    repeats: int | None = None,
    seed: int | None = None,
) -> Plan:
    """The plan of a shape; the keyword arguments go before the config's values.

    Raises PlanError when the shape needs what the config does not give, and when a file that the config
    names is damaged (with file and line).
    """
    run_seed = config.loadgen.seed if seed is None else seed
    try:
        trace, trace_cuts = _load_trace(config, shape)
        length_laws = _length_laws(config)
        tenants = tuple(Group(t.name, t.share) for t in config.tenants)
        classes = tuple(Group(c.name, c.share) for c in config.classes)
        if trace is not None:
            trace, tenants, classes = _label(trace, config, tenants, classes, str(config.loadgen.trace_file))
        lines, line_cuts = _load_lines(config)
        if lines is not None:
            lines, tenants, classes = _label(lines, config, tenants, classes, str(config.loadgen.prompts_file))
    except (TraceError, ValueError, OSError) as error:
        raise error if isinstance(error, PlanError) else PlanError(str(error)) from None
    levels = _levels(config, shape, qps, duration_s, repeats, trace)
    stages: list[Stage] = []
    seen: dict[tuple[tuple[float, float], ...], int] = {}
    process = "trace" if shape == "replay" else config.loadgen.arrival_process
    for index, (label, points) in enumerate(levels):
        repeat = seen.get(points, 0)
        seen[points] = repeat + 1
        length_s = points[-1][0]
        expected = integrated_rate(points, length_s)
        if expected > MAX_ARRIVALS:
            raise PlanError(
                f"stage {index} would have {expected:.3g} arrivals ({label} per second for {length_s:g} s); "
                f"at most {MAX_ARRIVALS}; lower the rate or shorten the stage"
            )
        warmup_s = (
            0.0 if shape in ("ramp", "spike", "replay") else config.warmup_s(min(length_s, config.stage_duration_s()))
        )
        if warmup_s >= length_s:
            raise PlanError(
                f"sweep.warmup_sec is {warmup_s:g}, stage {index} lasts {length_s:g} s; "
                "shorten the warm-up or lengthen the stage"
            )
        simple = len(points) == 2
        stage = Stage(
            index=index,
            repeat=repeat,
            name=f"{index:02d} {config.target.endpoint} @{label}",
            offered_qps=points[0][1] if simple else integrated_rate(points, length_s) / length_s,
            ramp_to_qps=points[1][1] if simple and points[1][1] != points[0][1] else None,
            process=process,
            burstiness=config.loadgen.burstiness,
            duration_s=length_s,
            warmup_s=warmup_s,
            drain_limit_s=config.sweep.drain_limit_sec,
            seed=stage_seed(run_seed, points, repeat if config.sweep.repeat_seed == "different" else 0),
        )
        stages.append(stage if simple else replace(stage, profile=points))
    return Plan(
        stages=tuple(stages),
        run_seed=run_seed,
        shape=shape,
        lengths=length_laws,
        prompts=Prompts(config.target.tokens_per_word, config.loadgen.unique_prompts),
        trace=trace,
        tenants=tenants,
        classes=classes,
        target_qps=config.loadgen.target_qps,
        lines=lines,
        cuts=(*trace_cuts, *line_cuts, *(_law_cuts(config, length_laws.output) if trace is None else ())),
    )


def search_stage(config: Config, plan: Plan, qps: float, duration_s: float, *, hold: bool = False) -> Stage:
    """One more stage of a knee search, after those of `plan`; a rate that was run before sends another load."""
    points = _flat(qps, duration_s)[1]
    repeat = sum(1 for stage in plan.stages if stage.offered_qps == qps)
    warmup_s = config.warmup_s(duration_s)
    index = len(plan.stages)
    return Stage(
        index=index,
        repeat=repeat,
        name=f"{index:02d} {config.target.endpoint} @{qps:g}{' hold' if hold else ''}",
        offered_qps=float(qps),
        ramp_to_qps=None,
        process=config.loadgen.arrival_process,
        burstiness=config.loadgen.burstiness,
        duration_s=float(duration_s),
        warmup_s=warmup_s if warmup_s < duration_s else duration_s / 10,
        drain_limit_s=config.sweep.drain_limit_sec,
        seed=stage_seed(plan.run_seed, points, repeat),
    )


Points = tuple[tuple[float, float], ...]


def _flat(rate: float, length_s: float) -> tuple[str, Points]:
    return f"{rate:g}", ((0.0, float(rate)), (float(length_s), float(rate)))


def _levels(
    config: Config,
    shape: str,
    qps: list[float] | None,
    duration_s: float | None,
    repeats: int | None,
    trace: Trace | None,
) -> list[tuple[str, Points]]:
    """(label, rate profile) of every stage of a shape, in order."""
    target = config.loadgen.target_qps
    length_s = duration_s or config.stage_duration_s()
    for rate in qps or ():
        if not MIN_QPS <= rate <= MAX_QPS:
            raise PlanError(f"qps holds {rate:g}; rates lie between {MIN_QPS:g} and {MAX_QPS:.0f}")
    if duration_s is not None and not 0 < duration_s <= 7 * 86_400:
        raise PlanError(f"duration is {duration_s:g} s; it lies above 0 and at most a week")
    if repeats is not None and repeats < 1:
        raise PlanError(f"repeats is {repeats}; at least 1")
    if shape == "sweep":
        one = []
        for rate in qps or config.sweep.qps:
            own_s = duration_s or config.stage_duration_s(rate)
            if duration_s is None and rate == target and config.sweep.target_duration_sec is not None:
                own_s = config.sweep.target_duration_sec
            one.append(_flat(rate, own_s))
        return one * (repeats or config.sweep.repeats)
    if shape == "repeat":
        # One repeat shows nothing; three is what the reference asks for.
        times = repeats or max(config.sweep.repeats, 3)
        if duration_s is None and config.sweep.target_duration_sec is not None:
            length_s = config.sweep.target_duration_sec
        return [_flat(rate, length_s) for rate in qps or [target] for _ in range(times)]
    if shape == "single":
        if duration_s is None and config.sweep.target_duration_sec is not None:
            length_s = config.sweep.target_duration_sec
        return [_flat((qps or [target])[0], length_s)] * (repeats or 1)
    if shape == "hold":
        # One rate for as long as asked: the watermark of `bench plan`, else the target rate.
        return [_flat((qps or [target])[0], length_s)] * (repeats or 1)
    if shape == "knee_search":  # the first stage; the search adds the others, see `search_stage`
        return [_flat((qps or [config.search.start_qps or target])[0], duration_s or config.search.stage_sec)]
    if shape == "smoke":
        return [_flat((qps or [SMOKE_QPS])[0], duration_s or SMOKE_S)]
    if shape == "ramp":
        rates = qps or [config.sweep.qps[0], config.sweep.qps[-1]]
        if len(rates) < 2 or (qps is None and len(config.sweep.qps) < 2):
            raise PlanError("shape ramp needs two rates or more, from and to; give --qps 5,40 or sweep.qps")
        step = length_s / (len(rates) - 1)
        points = tuple((step * i, float(rate)) for i, rate in enumerate(rates))
        return [("-".join(f"{rate:g}" for rate in (rates[0], rates[-1])), points)] * (repeats or 1)
    if shape == "spike":
        base, peak = (qps[0], qps[-1]) if qps and len(qps) > 1 else (target, SPIKE_FACTOR * target)
        third = length_s / 3
        points = ((0.0, base), (third, base), (third, peak), (2 * third, peak), (2 * third, base), (length_s, base))
        return [(f"{base:g}^{peak:g}", tuple((float(t), float(q)) for t, q in points))] * (repeats or 1)
    if shape == "replay":
        assert trace is not None
        scale = config.loadgen.trace_rate_scale
        rate = qps[0] if qps else trace.rate_qps * scale
        span_s = len(trace) / rate
        return [(f"trace {rate:.3g}", ((0.0, rate), (min(duration_s or span_s, span_s), rate)))] * (repeats or 1)
    raise PlanError(f"no shape {shape!r}; shapes: {', '.join(SHAPES)}")


def _load_trace(config: Config, shape: str) -> tuple[Trace | None, list[Cut]]:
    load = config.loadgen
    if shape != "replay" and load.arrival_process != "trace":
        return None, []
    if load.trace_file is None:
        raise PlanError("loadgen.trace_file is not given; a replay needs an Azure CSV or a Mooncake JSONL file")
    found = read_trace(
        Path(load.trace_file),
        start_s=load.trace_start_sec,
        end_s=load.trace_end_sec,
        spread_ties=load.trace_spread_ties,
        max_input_tokens=load.trace_max_input_tokens,
        prefixes=load.trace_prefixes,
        keys=_api_keys(config),
    )
    cap = load.max_output_tokens
    cuts = _cuts("trace_file", load.trace_file, "rows", found.output_tokens, cap)
    return replace(found, output_tokens=np.minimum(found.output_tokens, cap)), cuts


def _cuts(key: str, file: str, what: str, tokens: np.ndarray, cap: int, *, line: np.ndarray | None = None) -> list[Cut]:
    """The lengths above the cap; none, or one entry. `line`: line number of each."""
    over = np.flatnonzero(tokens > cap)
    if not len(over):
        return []
    first = int(line[over[0]]) if line is not None else 0
    return [Cut(key, file, what, len(over), len(tokens), first, int(tokens.max()), cap)]


def _law_cuts(config: Config, output: Lengths) -> list[Cut]:
    """Lengths of `output_len_file` above the cap."""
    load = config.loadgen
    if output.kind != "empirical" or load.output_len_file is None:
        return []
    tokens = np.repeat(output.values or (), output.counts or ())
    return _cuts("output_len_file", load.output_len_file, "lengths", tokens, load.max_output_tokens)


def _load_lines(config: Config) -> tuple[PromptFile | None, list[Cut]]:
    load = config.loadgen
    if load.prompts_file is None:
        return None, []
    try:
        found = read_prompts(
            Path(load.prompts_file), order=load.prompts_order, endpoint=config.target.endpoint,
            text_only=config.engine.embedded, keys=_api_keys(config),
        )  # fmt: skip
    except OSError as error:
        raise PlanError(
            f"{load.prompts_file}: cannot be read ({error.strerror or error}); loadgen.prompts_file names a JSONL "
            "file, from the working folder"
        ) from None
    cuts = _cuts("prompts_file", load.prompts_file, "lines", found.max_tokens, load.max_output_tokens, line=found.line)
    return replace(found, max_tokens=np.minimum(found.max_tokens, load.max_output_tokens)), cuts


def _api_keys(config: Config) -> frozenset[str]:
    """The API keys that are known here, so that none of them becomes a label."""
    path = config.target.api_key_file
    return frozenset(known_keys(environment(None)) | (known_keys({"BENCH_API_KEY_FILE": path}) if path else set()))


Labelled = TypeVar("Labelled", Trace, PromptFile)


def _label(
    source: Labelled, config: Config, tenants: tuple[Group, ...], classes: tuple[Group, ...], file: str
) -> tuple[Labelled, tuple[Group, ...], tuple[Group, ...]]:
    """The rows of a file with their labels counted in the groups of the plan, and these groups.

    Rows that name nobody leave the draw by shares as it is. Where rows do, the names that the config declares are the
    only ones allowed; a config that declares none takes them as they come, with the shares that they have.
    """
    if source.tenants:
        known = [g.name for g in tenants] or source.tenants.names
        by_tenant = source.tenants.counted_in(known, file=file, what="tenant", section="tenants")
        source, tenants = replace(source, tenants=by_tenant), _groups_of(by_tenant, tenants)
    if source.classes:
        known = [g.name for g in classes] or source.classes.names
        by_class = source.classes.counted_in(known, file=file, what="request_class", section="classes")
        source, classes = replace(source, classes=by_class), _groups_of(by_class, classes)
    return source, tenants, classes


def _groups_of(labels: Labels, declared: tuple[Group, ...]) -> tuple[Group, ...]:
    """A group for each label; what is not declared has the share of its rows."""
    found = tuple(map(Group, labels.names, labels.shares()))
    return (*declared, *found[len(declared) :])


def _length_laws(config: Config) -> LengthLaws:
    load = config.loadgen
    low, high = load.input_len_range
    cap = load.max_output_tokens
    if load.output_len_dist == "lognormal":
        output = laws.lognormal(load.output_len_mu, load.output_len_sigma, cap)
    elif load.output_len_dist == "uniform":
        first, last = load.output_len_range or [1, cap]
        output = laws.uniform(min(first, cap), min(last, cap))
    elif load.output_len_dist == "fixed":
        output = laws.fixed(min(load.output_len_fixed or cap, cap))
    else:
        if load.output_len_file is None:
            raise PlanError("loadgen.output_len_file is not given; output_len_dist empirical needs it")
        output = laws.empirical(laws.read_lengths(Path(load.output_len_file)), cap)
    return LengthLaws(laws.uniform(low, high), output)


__all__ = [
    "SHAPES",
    "Group",
    "LengthLaws",
    "Plan",
    "PlanError",
    "Prompts",
    "Stage",
    "TraceError",
    "build_plan",
    "search_stage",
    "stage_seed",
]
