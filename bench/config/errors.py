"""What is wrong with a config: one `Problem` each, all of them in one `ConfigError`.

Input: findings of the loader, the schema and the cross checks.
Output: text a user can act on: where, what was found, what is allowed, what to do.
Does not: hold any part of an API key, in any field.

`PROBLEMS` is the table of ids; `docs/config.md` and the tests are checked against it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# id -> (severity, what it means). An id is never given to another meaning.
PROBLEMS: dict[str, tuple[str, str]] = {
    "CFG-001": ("error", "the file cannot be read"),
    "CFG-002": ("error", "the file is not valid JSON or YAML"),
    "CFG-003": ("error", "the same key stands twice in one section"),
    "CFG-004": ("error", "unknown key"),
    "CFG-005": ("error", "wrong type"),
    "CFG-006": ("error", "value out of the allowed range"),
    "CFG-007": ("error", "not one of the allowed words"),
    "CFG-008": ("error", "not a finite number (NaN or infinity)"),
    "CFG-009": ("error", "a value that must be given is missing"),
    "CFG-010": ("error", "a secret is written in the config"),
    "CFG-011": ("error", "base_url is not an http(s) address without query, fragment and user"),
    "CFG-012": ("warning", "base_url or model is empty or still a placeholder; whatever sends to a service refuses it"),
    "CFG-013": ("error", "the API key is damaged: blanks, line breaks, quotes or other stray characters"),
    "CFG-014": ("error", "the API key file cannot be used"),
    "CFG-015": ("error", "the .env file has a line that is not KEY=VALUE"),
    "CFG-016": ("warning", "the embedded engine is on: base URL and model of the environment are not used"),
    "CFG-020": ("error", "scheduler.batch_size_cap is above scheduler.max_num_seqs"),
    "CFG-021": ("error", "scheduler.max_num_batched_tokens is below scheduler.max_num_seqs"),
    "CFG-022": ("error", "chunked prefill is off and a prompt may not fit the token budget whole"),
    "CFG-023": ("warning", "admission.kv_reserve_ratio x oversubscribe_factor is above 1.15"),
    "CFG-024": ("error", "admission.kv_reserve_ratio x oversubscribe_factor is above 2"),
    "CFG-025": ("warning", "scheduler.batch_size_cap is above both bounds by slo.tpot_deadline_ms"),
    "CFG-026": ("warning", "slo.p95_target_ms cannot be met by answers that just meet both deadlines"),
    "CFG-027": ("error", "a request can never fit engine.max_model_len or the KV pool"),
    "CFG-028": ("error", "scheduler.preemption_mode swap needs swap_space_gb above 0"),
    "CFG-030": ("error", "a range is upside down"),
    "CFG-031": ("error", "a key that the chosen mode needs is missing"),
    "CFG-032": ("warning", "a key has no effect in the chosen mode"),
    "CFG-033": ("error", "the warm-up leaves no window"),
    "CFG-034": ("warning", "no stage of the sweep runs at loadgen.target_qps"),
    "CFG-035": ("error", "the same name stands twice in classes or tenants"),
    "CFG-036": ("error", "the shares of classes or tenants do not add up to 1"),
    "CFG-037": ("error", "timeouts contradict each other"),
    "CFG-038": ("error", "target.extra_body sets a field that the plan sets"),
    "CFG-039": ("warning", "a limit on money without prices cannot be kept"),
    "CFG-040": ("error", "a file named in the config cannot be used (trace, lengths, prompts)"),
    "CFG-041": ("error", "the plan exceeds limits.*"),
    "CFG-042": ("warning", "too few arrivals in the window to decide slo.attainment_target"),
    "CFG-043": ("warning", "too few arrivals in the window for a percentile"),
    "CFG-044": ("warning", "TLS certificates are not checked"),
    "CFG-045": ("error", "the shape cannot be built from this config"),
    "CFG-046": ("warning", "the length of answers cannot be pinned over target.endpoint"),
    "CFG-047": ("error", "the embedded engine does not speak target.endpoint"),
    "CFG-048": ("warning", "prompts of loadgen.prompts_file are sent more than once"),
    "CFG-049": ("warning", "output lengths of a file are above loadgen.max_output_tokens and are sent with that limit"),
}


def plain(text: str) -> str:
    """The text with control characters and lone surrogates escaped: it may go to a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: id, where, what was found, what is allowed, what to do."""

    id: str
    where: str
    found: str
    allowed: str = ""
    fix: str = ""
    line: int | None = None
    column: int | None = None

    @property
    def severity(self) -> str:
        """`error` or `warning`, by the id."""
        return PROBLEMS[self.id][0]

    def text(self) -> str:
        """One line: `CFG-020 FILE:LINE: KEY is 48; allowed: at most 32; lower it`."""
        place = self.where
        if self.line is not None:
            spot = f":{self.line}" + (f":{self.column}" if self.column is not None else "")
            head, colon, rest = place.partition(": ")
            place = f"{head}{spot}{colon}{rest}" if colon else f"{place}{spot}"
        parts = [f"{self.id} {place} {self.found}".rstrip()]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.fix:
            parts.append(self.fix)
        return plain("; ".join(parts))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, with the severity."""
        return {**asdict(self), "severity": self.severity}


class ConfigError(Exception):
    """The config (or the environment) is wrong; `problems` holds all of it at once, the text what must be mended."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        errors = [problem for problem in problems if problem.severity == "error"]
        super().__init__("\n".join(problem.text() for problem in errors or problems))
