"""What is wrong with the rows of a ledger, by name, and the rows that can be used.

Input: a `Ledger`. Output: `Checked`. Does not: read files or compute a statistic.

1. A doubled arrival counts once; rows that cannot be placed are left out.
2. An unknown status is a miss; times that contradict each other make a row a miss.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.load import ERROR, OK, UNSENT, Ledger
from bench.records.clauses import may_have_gaps
from bench.records.request import LENGTH_FINISH, MANY_TOKENS, STATUSES, LedgerProblem

CLOCK_SLACK_S = 1e-6  # times are written with nine decimals
# Events of one token each may be fewer than the tokens asked for by so much: tokens without text, split characters.
FEWER_EVENTS = 0.1
EVERY = slice(None)  # rows


@dataclass
class Checked:
    """The ledger after its checks: essentials present, doubled rows taken once."""

    ledger: Ledger
    status: np.ndarray  # index into STATUSES; unknown words are ERROR
    impossible: np.ndarray  # rows whose time stamps contradict each other
    doubled: np.ndarray  # (k, 2) stage, arrival of rows that were there twice or more
    problems: list[LedgerProblem]


def check_rows(ledger: Ledger) -> Checked:
    """Named problems of the rows, and the rows that can be used."""
    problems = list(ledger.problems)
    bad = np.isnan(ledger["intended_s"]) | (ledger["stage"] < 0)
    if bad.any():
        text = f"{int(bad.sum())} rows have no stage or no intended_s; they cannot be placed and are left out"
        problems.append(_problem("LED-007", text, ledger, bad))
        ledger = ledger.take(~bad)
    ledger, doubled = _drop_doubled(ledger, problems)
    status = _statuses(ledger, problems)
    # What our own fault kept from being sent is no miss of the service, whatever word its row has.
    status[ledger.is_value("code", "CL-BUG") & np.isnan(ledger["sent_s"])] = UNSENT
    impossible = _impossible(ledger, status, problems)
    _check_latencies(ledger, status, problems)
    return Checked(ledger, status, impossible, doubled, problems)


def _problem(problem_id: str, text: str, ledger: Ledger, mask: np.ndarray) -> LedgerProblem:
    lines = ledger.line[mask][:5]
    return LedgerProblem(problem_id, text, int(mask.sum()), [f"line {int(n) + 1}" for n in lines])


def _drop_doubled(ledger: Ledger, problems: list[LedgerProblem]) -> tuple[Ledger, np.ndarray]:
    arrival = ledger["arrival"]
    known = arrival >= 0
    key = (ledger["stage"].astype(np.int64) << 48) + (np.maximum(ledger["repeat"], 0).astype(np.int64) << 36) + arrival
    if not known.all():
        key = np.where(known, key, -1 - np.arange(ledger.rows))  # rows without a number are never doubles
    order = np.argsort(key, kind="stable")
    again = np.zeros(ledger.rows, dtype=bool)
    again[order[1:]] = key[order[1:]] == key[order[:-1]]
    if not again.any():
        return ledger, np.zeros((0, 2), dtype=np.int64)
    text = f"{int(again.sum())} rows repeat an arrival that already has a row; the first row is used"
    problems.append(_problem("LED-008", text, ledger, again))
    pairs = np.stack([ledger["stage"][again], arrival[again]], axis=1)
    return ledger.take(~again), pairs


def _statuses(ledger: Ledger, problems: list[LedgerProblem]) -> np.ndarray:
    names = ledger.names["status"]
    lookup = np.array([STATUSES.index(n) if n in STATUSES else -1 for n in names] + [-1], dtype=np.int8)
    status = lookup[ledger.codes["status"]]
    unknown = status < 0
    if unknown.any():
        words = sorted({names[i] if i >= 0 else "(empty)" for i in np.unique(ledger.codes["status"][unknown])})
        text = f"{int(unknown.sum())} rows have an unknown status ({', '.join(words)[:80]}); they count as misses"
        problems.append(_problem("LED-006", text, ledger, unknown))
        status[unknown] = ERROR
    return status


def _impossible(ledger: Ledger, status: np.ndarray, problems: list[LedgerProblem]) -> np.ndarray:
    """Rows with sent < intended, first < sent, last < first or done < last: a clock that stepped."""
    with np.errstate(invalid="ignore"):
        slack = CLOCK_SLACK_S
        c = ledger.columns
        # A sender may be up to a millisecond early: timers of the event loop have that grain.
        bad = c["sent_s"] < c["intended_s"] - 2e-3
        bad |= c["first_token_s"] < c["sent_s"] - slack
        bad |= c["last_token_s"] < c["first_token_s"] - slack
        bad |= c["done_s"] < c["last_token_s"] - slack
        bad |= c["done_s"] < c["sent_s"] - slack
        for name in ("ttft_s", "tpot_s", "e2e_s", "residence_s"):
            bad |= c[name] < -slack if name != "ttft_s" else c[name] < -2e-3
    if bad.any():
        text = f"{int(bad.sum())} rows have times that run backwards (a clock stepped?); they count as misses"
        problems.append(_problem("LED-010", text, ledger, bad))
    incomplete = (status == OK) & (np.isnan(c["first_token_s"]) | np.isnan(c["done_s"]) | np.isnan(c["sent_s"]))
    if incomplete.any():
        text = f"{int(incomplete.sum())} rows are ok but lack sent_s, first_token_s or done_s; they count as misses"
        problems.append(_problem("LED-012", text, ledger, incomplete))
    return bad


def _check_latencies(ledger: Ledger, status: np.ndarray, problems: list[LedgerProblem]) -> None:
    """Latency columns against the stamps they come from; a cell that is absent is derived.

    An empty TPOT must not meet the clause where the row has one by the definition.
    """
    c = ledger.columns
    pairs = (
        ("send_lag_s", "sent_s", "intended_s"), ("ttft_s", "first_token_s", "intended_s"),
        ("residence_s", "done_s", "sent_s"), ("e2e_s", "last_token_s", "intended_s"),
    )  # fmt: skip
    by_stamps = {name: c[end] - c[start] for name, end, start in pairs}
    by_stamps["e2e_s"][status != OK] = np.nan
    by_stamps["tpot_s"] = _tpot(ledger)
    off = np.zeros(ledger.rows, dtype=bool)
    for name, derived in by_stamps.items():
        with np.errstate(invalid="ignore"):
            off |= np.abs(derived - c[name]) > CLOCK_SLACK_S
        gone = np.isnan(c[name]) & ~np.isnan(derived)
        if gone.any():
            c[name] = np.where(gone, derived, c[name])
    if off.any():
        text = f"{int(off.sum())} rows have a latency that is not the difference of its time stamps"
        problems.append(_problem("LED-011", text, ledger, off))


def streamed_tokens(ledger: Ledger, rows: np.ndarray | slice = EVERY) -> np.ndarray:
    """(n,) output tokens without reasoning that was not streamed: the n of TPOT."""
    tokens = ledger["output_tokens"][rows].astype(float)
    hides = _flagged(ledger, "hidden_reasoning", rows)
    if hides.any():
        tokens[hides] -= np.nan_to_num(ledger["reasoning_tokens"][rows][hides].astype(float))
    return tokens


def _flagged(ledger: Ledger, flag: str, rows: np.ndarray | slice) -> np.ndarray:
    hits = [i for i, text in enumerate(ledger.names["flags"]) if flag in text.split(";")]
    codes = ledger.codes["flags"][rows]
    return np.isin(codes, hits) if hits else np.zeros(len(codes), dtype=bool)


def fewer_events(tokens: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """(n,) answers of many tokens whose events are fewer than the tokens by more than one token each explains."""
    with np.errstate(invalid="ignore"):
        return (tokens >= MANY_TOKENS) & (chunks < tokens - np.maximum(1.0, FEWER_EVENTS * tokens))


def uncounted_tokens(ledger: Ledger, rows: np.ndarray | slice = EVERY) -> np.ndarray:
    """(n,) rows whose number of tokens nobody knows: no usage, ended at the asked length, with too few events for it.

    Either the answer is short or its events hold several tokens each.
    """
    asked, chunks = (ledger[name][rows].astype(float) for name in ("max_tokens", "chunks"))
    words = [i for i, word in enumerate(ledger.names["finish_reason"]) if word in LENGTH_FINISH]
    ended = np.isin(ledger.codes["finish_reason"][rows], words)
    return _flagged(ledger, "tokens_estimated", rows) & ended & fewer_events(asked, chunks)


def unmeasured_tpot(ledger: Ledger, rows: np.ndarray | slice = EVERY) -> np.ndarray:
    """(n,) rows without a TPOT that are not known to be short: they do not meet the clause.

    An answer of a few tokens has no TPOT and meets it. By its usage it may have many tokens; without usage one event
    may hold as many as were asked for; and a usage below the number of events is wrong.
    """
    asked, chunks = (ledger[name][rows].astype(float) for name in ("max_tokens", "chunks"))
    estimated = _flagged(ledger, "tokens_estimated", rows)
    with np.errstate(invalid="ignore"):
        long = may_have_gaps(estimated, asked, streamed_tokens(ledger, rows), chunks)
        return np.isnan(ledger["tpot_s"][rows]) & long


def _tpot(ledger: Ledger) -> np.ndarray:
    """(last - first) / (tokens - 1); NaN without two tokens, and where all came in one event."""
    c = ledger.columns
    tokens, chunks = streamed_tokens(ledger), c["chunks"]
    with np.errstate(invalid="ignore", divide="ignore"):
        derived = (c["last_token_s"] - c["first_token_s"]) / (tokens - 1)
        derived[~((tokens >= 2) & ((chunks >= 2) | np.isnan(chunks)))] = np.nan
    return derived
