"""Step-time coefficients of hardware and model pairs, each with its source and with what is a guess.

Input: a profile name, or the path of a JSON file of the same fields (a calibrated profile).
Output: `Profile`, the coefficients of

    t(T, n, K) = max(a0 + b0 T, a1 + b1 T) + c n + g K + o        [s]

T tokens of the step, n decoding sequences, K cached tokens read (context of all scheduled sequences before the
step), o overhead of the host. Two lines because a step costs a weight read (a0) up to about 128 tokens and is
bound by arithmetic (b1) beyond.
Does not: claim absolute milliseconds. The form is good to about 10 %, at worst 14 % between 128 and 512 tokens;
without a run on a GPU the profiles claim the order of devices and the place of the knee (docs/engine.md).

Source: linear parts fitted from the kernel profiles of Vidur (microsoft/vidur 7d47513, MLSys 2024); the KV term is
bytes / (0.8 x memory bandwidth), where 0.8 is a guess; overhead 1.5 ms and KV room (0.92 of memory, less weights,
less 3 GiB) are guesses. `synthetic` profiles are made for tests: their truth is their definition.
"""
from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

KINDS = ("measured", "fitted", "guess", "synthetic")


@dataclass(frozen=True, slots=True)
class Profile:
    """One hardware and model pair; seconds, tokens and bytes."""

    name: str
    title: str
    a0_s: float  # floor of a small step
    b0_s: float  # per token, small steps
    a1_s: float  # intercept of a large step
    b1_s: float  # per token, large steps: 1/b1 is the prefill rate
    kv_s: float  # per cached token read
    kv_bytes_per_token: int  # of all devices together
    kv_tokens: int  # room in the KV cache
    overhead_s: float = 0.0015
    decode_s: float = 0.0  # further cost of each decoding sequence
    attention_s: float = 0.0  # per token squared of a prefill; used for preemption costs only
    pcie_gb_s: float = 25.0  # effective rate of one device-to-host copy
    transfer_fixed_s: float = 0.001  # fixed cost of one copy
    swap_async: bool = False  # True: copies delay the victim only, not the step
    kind: str = "guess"  # one of KINDS, of the profile as a whole
    source: str = ""
    engine_version: str = ""
    # field -> measured | fitted | guess | synthetic, with a word why
    origin: dict[str, str] = field(default_factory=dict)
    # of a calibrated profile: source run, whether it was measured, fit, errors, ranges (docs/calibrate.md)
    calibration: dict[str, Any] = field(default_factory=dict)

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens per second of large steps; inf when they cost nothing."""
        per_token = max(self.b1_s, self.b0_s)
        return 1.0 / per_token if per_token > 0 else float("inf")

    def step_s(self, tokens: int, decoding: int = 0, kv_tokens: int = 0) -> float:
        """Seconds of one step without noise."""
        linear = max(self.a0_s + self.b0_s * tokens, self.a1_s + self.b1_s * tokens)
        return linear + self.decode_s * decoding + self.kv_s * kv_tokens + self.overhead_s


_VIDUR = "fit of microsoft/vidur 7d47513 data/profiling/compute mlp.csv"
_ENGINE = "vLLM 0.33 semantics (V1); kernels of 2024"
_FITTED = {"a0_s": "fitted", "b0_s": "fitted", "a1_s": "fitted", "b1_s": "fitted", "kv_s": "guess: 0.8 of bandwidth",
           "overhead_s": "guess", "kv_tokens": "guess: 0.92 of memory, less weights, less 3 GiB",
           "pcie_gb_s": "guess: 78 % of the link", "transfer_fixed_s": "guess", "attention_s": "guess"}
_ROOFLINE = {**_FITTED, **{k: "guess: roofline" for k in ("a0_s", "b0_s", "a1_s", "b1_s")}}
_TRUTH = {k: "synthetic" for k in _FITTED}


def _vidur(name: str, title: str, ms_us: tuple[float, float, float, float], kv_ns: float, kv_bytes: int,
           kv_tokens: int, attention_ns: float, pcie: float, **more: Any) -> Profile:
    a0_ms, b0_us, a1_ms, b1_us = ms_us
    facts: dict[str, Any] = {"kind": "fitted", "source": _VIDUR, "engine_version": _ENGINE, "origin": _FITTED, **more}
    return Profile(name, title, a0_ms / 1e3, b0_us / 1e6, a1_ms / 1e3, b1_us / 1e6, kv_ns / 1e9, kv_bytes, kv_tokens,
                   attention_s=attention_ns / 1e9, pcie_gb_s=pcie, **facts)


_ALL = (
    _vidur("h100-8b", "H100 80 GB, Llama-3-8B", (5.6, 10.9, 1.4, 21.0), 49, 131_072, 450_000, 1.1, 50.0,
           source=_VIDUR + " (H100, Llama-2-7B linear parts; KV of an 8B with grouped queries)"),
    _vidur("a100-80-llama3-8b", "A100 80 GB, Llama-3-8B", (9.8, 29, 1.0, 67), 82, 131_072, 450_000, 3.4, 25.0),
    _vidur("a100-80-llama2-7b", "A100 80 GB, Llama-2-7B", (8.8, 29, 1.9, 64.7), 328, 524_288, 119_000, 3.4, 25.0),
    _vidur("a40-llama2-7b", "A40 48 GB, Llama-2-7B", (24.9, 54, 1.6, 127), 942, 524_288, 52_000, 6.7, 25.0),
    _vidur("l4-8b", "L4 24 GB, Llama-3-8B", (63, 20, 2, 265), 546, 131_072, 30_000, 14.0, 25.0, kind="guess",
           source="roofline: 300 GB/s, 121 TFLOPS, MFU 0.5", origin=_ROOFLINE),
    # Of the two lines the larger counts, so the second must lie below the first at small steps. The best lines above
    # 1,000 tokens do not (81 ms + 162 us here, 13.6 ms + 41.7 us for h100-70b-tp8); these two are fitted from 256 on.
    _vidur("a100-70b-tp4", "4 x A100 80 GB, Llama-3-70B", (30.4, 101, 18, 180), 51, 327_680, 490_000, 4.2, 100.0),
    _vidur("h100-70b-tp4", "4 x H100 80 GB, Llama-2-70B", (21.6, 0, 6.8, 67.5), 31, 327_680, 490_000, 1.4, 200.0),
    _vidur("h100-70b-tp8", "8 x H100 80 GB, Llama-2-70B", (13.4, 25, 8.7, 41.8), 15, 327_680, 1_400_000, 0.7, 400.0),
    # alpha 0.6 ms, beta 0.04 ms per decoding sequence, gamma 8 us per prompt token: the reference shape of the
    # analysis pages, five to ten times faster than one GPU. b0 counts each token, so decoding adds 32 us to it.
    Profile("reference-shape", "synthetic: 0.6 ms + 0.04 ms/sequence + 8 us/prompt token", 0.0006, 8e-6, 0.0, 0.0, 0.0,
            131_072, 1_000_000, overhead_s=0.0, decode_s=32e-6, kind="synthetic", source="by definition",
            engine_version="none", origin=_TRUTH),
)
PROFILES: dict[str, Profile] = {p.name: p for p in _ALL}


def load_profile(name: str) -> Profile:
    """The built-in profile of that name, or the one in the JSON file at that path.

    Raises ValueError that says what is there, what is allowed and what to do.
    """
    if name in PROFILES:
        return PROFILES[name]
    if name.endswith(".json"):
        return read_profile(Path(name))
    near = get_close_matches(name, PROFILES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"engine.profile: {name!r} is no profile{hint} Known: {', '.join(PROFILES)}, or a .json file")


def read_profile(path: Path) -> Profile:
    """The profile stored at `path`. Raises ValueError when fields are missing, unknown or negative."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        raise ValueError(f"engine.profile: {path}: {problem}") from None
    names = {f.name for f in dataclasses.fields(Profile)}
    needed = {f.name for f in dataclasses.fields(Profile)
              if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    if not isinstance(data, dict) or set(data) - names or needed - set(data):
        unknown = sorted(set(data) - names) if isinstance(data, dict) else ["(no object)"]
        raise ValueError(f"engine.profile: {path}: unknown {unknown}, missing {sorted(needed - set(data))}")
    bad = [k for k, v in data.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and v < 0]
    if bad:
        raise ValueError(f"engine.profile: {path}: {', '.join(bad)} is negative; times and sizes are at least 0")
    return Profile(**data)


def write_profile(path: Path, profile: Profile) -> None:
    """Store a profile as JSON for `engine.profile: PATH`."""
    path.write_text(json.dumps(dataclasses.asdict(profile), indent=1, sort_keys=True) + "\n", encoding="utf-8")
