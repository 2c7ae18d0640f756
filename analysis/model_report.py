"""What the fitted model says about every stage, and how good that was.

Input: the fit, prepared stages, deadlines. Output: the filled `Analysis.model` dict.
Does not: fit, or use a latency of a stage it predicts.

1. A prediction is judged only below JUDGED_LOAD of lambda_max and only on comparable rows.
2. Whatever cannot be said is None with a note; nothing is infinite or NaN.

Source: `docs/queueing.md` sections 6-8.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis import predict
from analysis.batching import (
    Lengths,
    flattening_batch_size,
    lambda_max_gradient,
    lambda_max_qps,
    lengths_of,
    marginal_gain,
    mean_field,
    peak_batch_size,
    throughput_qps,
    usl_form,
)
from analysis.computed_tokens import computed
from analysis.model_stages import MAX_FAILED_RATIO, MAX_HIDDEN_RATIO, Stage
from analysis.percentiles import MIN_SAMPLES
from analysis.predict import Criterion, Deadlines, Knee, KneeInput, KneeSearch, Latencies, TtftShift
from analysis.queueing import sample_moments
from analysis.step_clock import StepFit
from bench.records.sentences import joined, said

JUDGED_LOAD = 0.92  # of lambda_max: above it three equal runs differ by more than 15 % anyway
CALIBRATION_LOAD = 0.55  # calibrating above it is no longer predicting from low load
# Largest |predicted / measured - 1| that still counts as predictive. 10 %: what published
# capacity models claim for mean times; 15 %: the seed's own tolerance for a p95; 25 %: TTFT.
LIMITS = {"e2e_mean_s": 0.10, "e2e_p95_s": 0.15, "ttft_p95_s": 0.25}
SYSTEMATIC_RATIO = 0.002  # of lambda_max: bias of the step clock itself, docs/evidence/queueing.md section 2
TTFT_SLACK_S = 0.010  # a TTFT off by less is right whatever the ratio: one engine step
ATTAINMENT_LIMIT = 0.02  # in shares


def describe_fit(
    report: dict[str, Any], fitted: StepFit, chosen: list[Stage], lengths: Lengths, seqs: int | None
) -> None:
    """Everything that follows from the coefficients alone."""
    law, notes = fitted.law, report["notes"]
    report["fit"] = {
        "alpha_s": law.alpha_s, "beta_s": law.beta_s, "gamma_s": law.gamma_s, "kappa_s": law.kappa_s,
        "kv_s": law.kv_s, "prefill_s": law.prefill_s,
        "se": {k: _number(v) for k, v in fitted.se.items()}, "r2": fitted.r2,
        "rmse_step_s": fitted.rmse_s, "rows": fitted.rows, "outliers": fitted.outliers, "order": fitted.order,
        "order_note": fitted.order_note, "batch_size_max": fitted.batch_size_max,
    }  # fmt: skip
    report["calibration_stages"] = [s.source.stage for s in chosen]
    report["lengths"] = {
        "input_mean_tokens": lengths.input_mean, "output_mean_tokens": lengths.output_mean,
        "output_scv": lengths.output_scv, "context_mean_tokens": lengths.context_mean,
        "cached_mean_tokens": lengths.cached_mean,
    }  # fmt: skip
    if lengths.cached_mean > 0:
        notes.append(said("model.cached", share=lengths.cached_mean / lengths.input_mean))
    if seqs is None:
        report["lambda_max_qps"] = _number(lambda_max_qps(law, lengths, None))
        return
    top = lambda_max_qps(law, lengths, seqs)
    gradient = lambda_max_gradient(law, lengths, seqs)
    error = math.hypot(math.sqrt(max(0.0, float(gradient @ fitted.covariance @ gradient))), SYSTEMATIC_RATIO * top)
    report["lambda_max_qps"] = _number(top)
    report["lambda_max_low_qps"] = _number(max(0.0, top - 1.96 * error))
    report["lambda_max_high_qps"] = _number(top + 1.96 * error)
    report["calibration_load_max"] = _number(max(s.source.offered_qps for s in chosen) / top)
    report["batch_curve"] = [{k: _number(v) for k, v in point.items()} for point in marginal_gain(law, lengths, seqs)]
    usl = usl_form(law, lengths)
    report["usl"] = {"first_qps": usl.first_qps, "sigma": usl.sigma, "kappa": usl.kappa}
    report["flattening_batch_size"] = flattening_batch_size(law, lengths, seqs)
    if report["calibration_load_max"] > CALIBRATION_LOAD:
        notes.append(said("model.load", load=report["calibration_load_max"], limit=CALIBRATION_LOAD))
    if fitted.batch_size_max < seqs / 4:
        notes.append(said("model.extrapolated", batch_size=fitted.batch_size_max, max_num_seqs=seqs))
    if (law.beta_s + law.kv_s) * lengths.context_mean + law.kappa_s == 0:
        notes.append(said("model.no_batch_cost"))
    peak = peak_batch_size(law, lengths, seqs)
    if peak < seqs:
        best = float(throughput_qps(law, lengths, peak))
        notes.append(said("model.peak", batch_size=peak, best_qps=best, top_qps=top, max_num_seqs=seqs))


def _number(value: float | None) -> float | None:
    """A finite float, or None."""
    return None if value is None or not math.isfinite(value) else float(value)


class Predictor:
    """Fills the prediction part of the report; holds what every prediction shares."""

    def __init__(
        self, report: dict[str, Any], fitted: StepFit, sample: tuple[np.ndarray, np.ndarray, np.ndarray], seqs: int,
        budget: int, slo: Deadlines, seqs_known: bool,
    ) -> None:
        self.report, self.fitted, self.sample = report, fitted, sample
        self.seqs, self.budget, self.slo, self.seqs_known = seqs, budget, slo, seqs_known
        self.lengths = lengths_of(*sample)
        self.limit = lambda_max_qps(fitted.law, self.lengths, seqs)

    def run(self, stages: list[Stage], chosen: list[Stage], process: str, burstiness: float) -> None:
        """Predict every stage, then the knee, then say how good that was."""
        replayed = {id(s): self._replay(s) for s in chosen}
        shift = TtftShift(
            np.concatenate([s.measured.ttft_s[s.window & s.complete] for s in chosen]),
            np.concatenate([replayed[id(s)].ttft_s[s.window & s.complete] for s in chosen]),
        )
        self.report["ttft_overhead_s"] = shift.median_s
        lowest = chosen[0].measured.take(chosen[0].window)
        for stage in sorted(stages, key=lambda s: (s.source.offered_qps, s.source.stage)):
            rows = shift.apply(replayed.get(id(stage)) or self._replay(stage))
            self._stage(stage, rows, lowest, shift.median_s)
        self._knee(shift, process, burstiness)
        _judge(self.report, self._refuted(stages))

    def _refuted(self, stages: list[Stage]) -> float | None:
        """The highest throughput of a window that lies above the limit's interval, 1/s; None when there is none.

        By two standard deviations of its count: short answers may end a window faster than the long run can.
        """
        high, found = self.report["lambda_max_high_qps"], []
        for stage in stages if high is not None else ():
            source, done = stage.source, stage.start_s + stage.measured.e2e_s
            count = int(np.count_nonzero((done >= source.window_start_s) & (done < source.window_end_s)))
            span = source.window_end_s - source.window_start_s
            sure = source.valid and stage.failed_ratio <= MAX_FAILED_RATIO
            if sure and count - 2 * math.sqrt(count) > high * span > 0:
                found.append(count / span)
        return max(found, default=None)

    def _replay(self, stage: Stage) -> Latencies:
        """The planned arrivals through the fitted engine; unknown lengths are drawn from the sample."""
        prompt, output = stage.input_tokens.copy(), stage.output_tokens.copy()
        unknown = ~np.isfinite(prompt) | ~np.isfinite(output) | (output < 1)
        if unknown.any():
            rng = np.random.default_rng(stage.source.stage)
            pick = rng.integers(0, self.sample[0].size, int(unknown.sum()))
            prompt[unknown], output[unknown] = self.sample[0][pick], self.sample[1][pick]
        cached = stage.cached_tokens
        if cached is not None:
            cached = np.where(stage.complete, np.nan_to_num(cached), self.lengths.cached_mean)  # of no answer: the mean
            if unknown.any():
                cached[unknown] = self.sample[2][pick]
        return predict.replay_latencies(
            stage.start_s, prompt, output, self.fitted.law, self.seqs, self.budget, cached
        )

    def _stage(self, stage: Stage, rows: Latencies, lowest: Latencies, overhead_s: float) -> None:
        source, law = stage.source, self.fitted.law
        count = int(stage.window.sum())
        if not count:
            self.report["notes"].append(said("model.no_arrivals", stage=source.stage))
            return
        span = max(source.window_end_s - source.window_start_s, 1e-9)
        qps = source.offered_qps if source.offered_qps > 0 else count / span
        seen = stage.measured.take(stage.window)
        measured = predict.metrics(seen, self.slo)
        spans = {"e2e_p95_s": predict.p95_interval(seen.e2e_s), "ttft_p95_s": predict.p95_interval(seen.ttft_s)}
        predicted = predict.metrics(rows.take(stage.window), self.slo)
        work = computed(self.sample[0], self.sample[2])
        chain = predict.birth_death_metrics(law, self.lengths, work, self.sample[1], qps, self.seqs, overhead_s)
        pk = predict.naive_pk_metrics(lowest, qps)
        mgk = predict.naive_mgk_metrics(lowest, qps, self.seqs, self.slo)
        point = mean_field(law, self.lengths, qps, self.seqs)
        service = float(np.mean(lowest.e2e_s[np.isfinite(lowest.e2e_s)]))
        load = qps / self.limit
        self.report["stage_models"].append({
            "stage": source.stage, "offered_qps": qps, "calibration": stage.calibration, "load_ratio": _number(load),
            "mean_field_batch_size": _number(point.batch_size),
            "mean_field_exists": point.exists and point.admissible and load < 1,  # a state the service can stay in
            "mean_field_admissible": point.admissible, "mean_field_reason": point.reason,
            "naive_pk_rho": _number(qps * service), "naive_mgk_rho": _number(qps * service / self.seqs),
            "failed_ratio": stage.failed_ratio, "arrivals": count, **_service(seen),
        })  # fmt: skip
        if stage.failed_ratio > MAX_FAILED_RATIO and not stage.calibration:
            self.report["notes"].append(
                said("model.failed", stage=source.stage, failed_ratio=stage.failed_ratio)
            )
        for metric in predict.METRICS:
            given = measured[metric] if count >= MIN_SAMPLES["p95"] or not metric.endswith("p95_s") else None
            entry = {
                "stage": source.stage, "name": source.name, "offered_qps": qps, "metric": metric,
                "measured": _number(given), "predicted": _number(predicted[metric]),
                "predicted_birth_death": _number(chain[metric]), "naive_pk": _number(pk[metric]),
                "naive_mgk": _number(mgk[metric]),
            }  # fmt: skip
            low, high = spans.get(metric, (None, None)) if entry["measured"] is not None else (None, None)
            entry["measured_low"], entry["measured_high"] = _number(low), _number(high)
            entry.update(_residual(metric, entry["measured"], entry["predicted"]))
            entry["naive_mgk_residual_ratio"] = _residual(metric, entry["measured"], entry["naive_mgk"])[
                "residual_ratio"
            ]
            entry["status"] = self._status(stage, entry, load)
            self.report["predictions"].append(entry)

    def _status(self, stage: Stage, entry: dict[str, Any], load: float) -> str:
        """calibration | beyond | not_comparable | predictive | not_predictive, for one prediction."""
        if stage.calibration:
            return "calibration"
        if load > JUDGED_LOAD or stage.source.stationarity == "UNSTABLE":
            return "beyond"
        if not stage.source.valid or entry["measured"] is None or entry["predicted"] is None:
            return "not_comparable"
        if stage.hidden_ratio > MAX_HIDDEN_RATIO:  # its first output comes after steps that the replay takes for output
            return "not_comparable"
        if stage.failed_ratio > MAX_FAILED_RATIO and entry["metric"] != "attainment":
            return "not_comparable"
        if entry["metric"] == "attainment":
            good = abs(entry["residual_share"]) <= ATTAINMENT_LIMIT
        else:
            good = abs(entry["residual_ratio"]) <= LIMITS[entry["metric"]]
            if entry["measured_low"] is not None:  # within what the measurement itself leaves open
                good = good or entry["measured_low"] <= entry["predicted"] <= (entry["measured_high"] or math.inf)
            if entry["metric"] == "ttft_p95_s":
                good = good or abs(entry["measured"] - entry["predicted"]) <= TTFT_SLACK_S
        return "predictive" if good else "not_predictive"

    def _knee(self, shift: TtftShift, process: str, burstiness: float) -> None:
        """The predicted SLO crossing and the rate at which p95 of E2E meets its target."""
        report, slo = self.report, self.slo
        if not self.seqs_known:
            return
        top = report["lambda_max_qps"]
        error = (report["lambda_max_high_qps"] - top) / 1.96 / top if top else 0.0
        case = KneeInput(
            self.fitted.law, self.lengths, *self.sample[:2], self.seqs, self.budget, shift, process, burstiness, error,
            cached_tokens=self.sample[2] if self.sample[2].any() else None,
        )
        criteria = {}
        if math.isfinite(slo.ttft_s) or math.isfinite(slo.tpot_s):
            criteria["slo"] = Criterion(
                lambda rows: (rows.ttft_s <= slo.ttft_s) & ~(rows.tpot_s > slo.tpot_s), slo.attainment_target
            )
        if math.isfinite(slo.e2e_s):
            criteria["p95"] = Criterion(lambda rows: rows.e2e_s <= slo.e2e_s, 0.95)
        if not criteria:
            return
        search = KneeSearch(case, list(criteria.values()))
        for index, name in enumerate(criteria):
            knee = search.knee(index)
            if name == "slo":
                self._store_knee(knee)
            else:
                report["p95_crossing_predicted_qps"] = _number(knee.qps) if knee.kind == "crossing" else None

    def _store_knee(self, knee: Knee) -> None:
        self.report["knee_kind"] = knee.kind
        self.report["knee_predicted_qps"] = _number(knee.qps)
        self.report["knee_predicted_low_qps"] = _number(knee.low_qps)
        self.report["knee_predicted_high_qps"] = _number(knee.high_qps)


def _service(seen: Latencies) -> dict[str, float | None]:
    """E[S], s, E[S^2], s^2, and the squared variation of the whole answers that finished."""
    times = seen.e2e_s[np.isfinite(seen.e2e_s)]
    if not times.size:
        return {"service_mean_s": None, "service_m2_s2": None, "service_scv": None}
    moments = sample_moments(times)
    return {"service_mean_s": moments.mean, "service_m2_s2": moments.second, "service_scv": _number(moments.scv)}


def _residual(metric: str, measured: float | None, predicted: float | None) -> dict[str, float | None]:
    """Ratio for times, difference in shares for attainment (a ratio to 0 says nothing)."""
    if measured is None or predicted is None:
        return {"residual_ratio": None, "residual_share": None}
    if metric == "attainment":
        return {"residual_ratio": None, "residual_share": predicted - measured}
    return {"residual_ratio": predicted / measured - 1 if measured > 0 else None, "residual_share": None}


def _judge(report: dict[str, Any], refuted_qps: float | None) -> None:
    """The verdict over all judged stages and the one sentence. `refuted_qps`: a throughput above the limit, 1/s.

    Without a stage to judge, the stages of the fit speak: a law that does not give back their mean is no law.
    """
    judged = [p for p in report["predictions"] if p["status"] in ("predictive", "not_predictive")]
    times = [p for p in judged if p["residual_ratio"] is not None]
    rates = sorted({s["offered_qps"] for s in report["stage_models"] if s["calibration"]})
    limit = report["lambda_max_qps"]
    claim = said("model.hard_limit", limit_qps=limit) if limit else said("model.unlimited")
    if report["knee_predicted_qps"] is not None and report["knee_kind"] == "crossing":
        claim = said("model.knee", knee_qps=report["knee_predicted_qps"], limit=claim)
    told = {"rates": joined("and", rates), "claim": claim}
    if refuted_qps is not None:
        report["predictive"] = False
        report["sentence"] = said("model.refuted", completed_qps=refuted_qps, **told)
        return
    means = [p for p in times if p["metric"] == "e2e_mean_s"]
    if not means:
        own = [p for p in report["predictions"] if p["status"] == "calibration" and p["metric"] == "e2e_mean_s"
               and p["residual_ratio"] is not None]  # fmt: skip
        worst = max(own, key=lambda p: abs(p["residual_ratio"]), default=None)
        if worst is not None and abs(worst["residual_ratio"]) > LIMITS["e2e_mean_s"]:
            report["predictive"], report["worst_residual_ratio"] = False, worst["residual_ratio"]
            size = said("model.ratio", ratio=worst["residual_ratio"])
            report["sentence"] = said("model.own_stages", residual=size, offered_qps=worst["offered_qps"], **told)
            return
        report["sentence"] = said("model.unchecked", load=JUDGED_LOAD, **told)
        return
    worst = max(means, key=lambda p: abs(p["residual_ratio"]))
    report["worst_residual_ratio"] = worst["residual_ratio"]
    bad = [p for p in judged if p["status"] == "not_predictive"]
    report["predictive"] = not bad
    if bad:
        first = max(bad, key=_miss)
        by_share = first["residual_ratio"] is None
        size = said("model.points", points=first["residual_share"] * 100) if by_share else said(
            "model.ratio", ratio=first["residual_ratio"]
        )
        report["sentence"] = said("model.not_predictive", residual=size, metric=first["metric"],
                                  offered_qps=first["offered_qps"], **told)  # fmt: skip
        return
    naive = [abs(p["naive_mgk_residual_ratio"]) for p in means if p["naive_mgk_residual_ratio"] is not None]
    report["sentence"] = said(
        "model.predictive", worst=abs(worst["residual_ratio"]),
        naive=said("model.naive", ratio=max(naive)) if naive else said(""), **told,
    )  # fmt: skip


def _miss(prediction: dict[str, Any]) -> float:
    """How far outside its limit a prediction lies, in multiples of the limit."""
    if prediction["residual_ratio"] is None:
        return abs(prediction["residual_share"]) / ATTAINMENT_LIMIT
    return abs(prediction["residual_ratio"]) / LIMITS[prediction["metric"]]
