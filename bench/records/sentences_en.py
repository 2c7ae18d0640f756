"""English texts of every sentence of `analysis.json`: code -> Python format string.

Input: nothing. Output: `ENGLISH`.
Does not: format (`sentences.py` does). What each code means, and what to do about it, is in docs/verdicts.md.
"""
from __future__ import annotations

ENGLISH: dict[str, str] = {
    "join.and": " and ",
    "join.comma": ", ",
    "join.semicolon": "; ",
    "text": "{text}",
    # ------------------------------------------------------------ the stimulus
    "INV-RATE": "{delivered_qps:.3f} requests/s were sent where {planned_qps:.3f} were planned "
    "({error_ratio:+z.1%}, limit {limit:.0%})",
    "INV-GAPS.constant": "gaps between sends vary by {gap_cv:.0%} (sd {sd_ms:.1f} ms); constant spacing was asked for",
    "INV-GAPS": "the gaps between sends do not follow the asked {process} process: Kolmogorov-Smirnov distance "
    "{distance:.3f}, p = {p:.1e} (limits {allowed:.3f} and {p_limit:g})",
    "INV-LAG": "send lag p99 is {lag_ms:.1f} ms (limit {limit_ms:.1f} ms): our own sender was late{cause}",
    "INV-LAG.decides": "our own client decides: {late} of {planned} {planned:arrival|arrivals} {late:was|were} sent "
    "more than {limit_ms:.0f} ms "
    "late, not sent, or read late; {label} is {as_missed:.2%} when they count as missed and {as_met:.2%} when they "
    "count as met, and the target of {target:.2%} lies between{cause}",
    "INV-LOOP": "loop lag p99 is {lag_ms:.1f} ms (limit {limit_ms:.0f} ms) and times were stamped by the late "
    "reader{cause}",
    "INV-LOOP.kernel": "loop lag p99 is {lag_ms:.1f} ms (limit {limit_ms:.0f} ms); times were stamped by the "
    "kernel{cause}",
    "INV-CPU": "a client worker used {cpu_ratio:.0%} of a core (limit {limit:.0%})",
    "cause.other": "; its workers used at most {cpu_ratio:.0%} of a core, so something else used the machine, "
    "or it was paused",
    "cause.known": "; that follows from the other reason of this stage",
    "WARN-PLAN": "the plan itself has {planned} {planned:arrival|arrivals} where {expected:.0f} were asked for "
    "({off_ratio:+z.1%})",
    "WARN-DRIFT": "the arrival rate drifts within the window: its halves differ by {z:.1f} standard deviations",
    "INV-CEILING": "{offered_qps:g} requests/s are above the client's own ceiling of {ceiling_qps:g}, "
    "measured against the null server",
    "ceiling.none": "nothing was measured against the null server",
    "ceiling.between": "{workers} {workers:worker sends|workers send} up to {ceiling_qps:g} requests/s as planned; "
    "{first_miss_qps:g} was "
    "too much ({bound_by}{busy}){adds}",
    "ceiling.at_least": "{workers} {workers:worker sends|workers send} {ceiling_qps:g} requests/s as planned, the "
    "highest rate tried{adds}",
    "ceiling.server": "{workers} {workers:worker sends|workers send} at least {ceiling_qps:g} requests/s as planned; "
    "at {first_miss_qps:g} "
    "the null server itself was late, so the client's own end was not found{adds}",
    "ceiling.below": "{workers} {workers:worker|workers} cannot send even {first_miss_qps:g} requests/s as planned "
    "({bound_by}{busy})",
    "ceiling.busy": "; its workers used {cpu_ratio:.0%} of a core, so something else held the machine: calibrate again "
    "when it is quiet",
    "ceiling.adds": "; the client adds {ttft_p50_ms:.2f} ms to TTFT and {e2e_p50_ms:.2f} ms to the whole answer "
    "(p99 {ttft_p99_ms:.1f} and {e2e_p99_ms:.1f} ms)",
    "WARN-CALIBRATION": "the client was not calibrated for this run{why}: what it adds, and the highest rate that it "
    "can send, are not known",
    "calibration.why": " ({listed})",
    "next.calibrate": "run `bench calibrate-client` with this config on this machine; it takes a minute",
    # ------------------------------------------------------------ the records of a stage
    "INV-CAP": "{count} {count:arrival was|arrivals were} not sent because the client ran out of streams or "
    "descriptors: the load was "
    "no longer open",
    "INV-CANCEL": "{count} of {planned} {planned:arrival|arrivals} {count:was|were} cancelled by the stop while their "
    "answer was open: the stage is "
    "not measured",
    "INV-WORKER.worker_lost": "a worker was lost during this stage",
    "INV-WORKER.worker_joined": "a worker joined during this stage",
    "INV-WORKER.master_lost": "the master was lost during this stage",
    "INV-WORKER.lost_arrivals": "{count} of {planned} arrivals lost on our side (CL-LOST): their worker was away, "
    "or cut off from its master",
    "INV-PLAN.schedule_differs": "workers computed different schedules",
    "INV-PLAN.not_prepared": "not every worker was ready before the stage began",
    "INV-PROMPTS.prompts_changed": "the file of prompts ({file}) was written to while this stage ran: what was sent is "
    "not known",
    "INV-PROMPTS.prompts_differ": "the file of prompts ({file}) is not the one of the plan any more, or cannot be "
    "read: a worker sent nothing",
    "INV-FAULT": "{count} {count:arrival|arrivals} ended by a fault of the client itself (CL-BUG): they say nothing "
    "about the service",
    "INV-BURST": "{share:.1%} of the answers came in bursts (limit {limit:.0%}): TPOT says nothing, TTFT is doubtful",
    "INV-SHORT": "{share:.1%} of the answers are shorter than the asked length (limit {limit:.0%})",
    "INV-TOKENS": "{share:.1%} of the answers report more output tokens than they were allowed (limit {limit:.0%}): "
    "the service's usage is wrong, and TPOT and token rates with it",
    "INV-EVENTS": "{share:.1%} of the answers brought {tokens} tokens or more in {events} events or fewer (limit "
    "{limit:.0%}): their TPOT cannot be told",
    "INV-EVENTS.uncounted": "{share:.1%} of the answers have no usage, ended at the asked length and came in far fewer "
    "events than tokens were asked for (the median: {events:g} events for {asked:g} tokens; limit {limit:.0%}): either "
    "they are short or an event holds several tokens, so neither their tokens nor their TPOT are known",
    "INV-EVENTS.unmeasured": "{share:.1%} of the answers have no TPOT where {tokens} tokens or more were allowed "
    "(limit {limit:.0%}): all came in one event without usage, or the usage names fewer tokens than events came; that "
    "they meet the TPOT clause is not shown",
    "WARN-EVENTS.several": "{share:.0%} of the answers have more tokens by the service's count than events "
    "({ratio:.3g} tokens per event at the median, {low:.3g} to {high:.3g} in nine of ten): TPOT, attainment and "
    "goodput rest on that count, which the events cannot confirm; were each event one token, {by_events:.2%} of the "
    "arrivals would meet the SLO and not {joint:.2%}",
    "WARN-EVENTS": "half of the answers carry {ratio:.3g} tokens per event or more: TPOT spreads them evenly; tokens "
    "that are counted and not streamed (hidden reasoning) make it look shorter than what a reader sees",
    "WARN-USAGE": "{share:.1%} of the answers have no usage: their tokens are counted events, so TPOT is the time per "
    "event",
    "WARN-CACHED": "{share:.1%} of the prompt tokens came from the service's cache, in {answers:.1%} of the answers: "
    "TTFT is that of a warm cache",
    "WARN-PROMPTS": "{share:.1%} of the requests repeat a prompt that the run sent before: a prefix cache may help",
    "WARN-MODEL": "{share:.1%} of the answers name another model than the one asked for: the numbers are of that one",
    "WARN-GONE": "from {since_s:.1f} s of the run on no request got an answer: the last {count} ended with {code} or "
    "its like. The service was away, which says nothing of the rate that it can carry",
    "INV-CLOCK": "{count} {count:row of the window has|rows of the window have} times that run backwards",
    "WARN-WARMUP": "in-flight settles {settles_s:.1f} s after the stage's start; the warm-up was {used_s:.1f} s",
    "WARN-WARMUP.never": "the number in flight never settles by MSER-5; the stage is too short or not stationary",
    # ------------------------------------------------------------ Little's law
    "INV-LITTLE": "{note}",
    "WARN-GAUGE": "{note}",
    "little.none": "no request was sent in this window",
    "little.identity": "the identity is broken by {residual:.2e}: rows or times are wrong",
    "little.no_gauge": "L from the rows is {in_flight:.3g}, an identity and no evidence: there is no independent "
    "gauge. The window's edges explain {edges_ratio:+z.1%}",
    "little.gauge": "the gauge counted {gauge:.3g} in flight, lambda*W gives {lambda_w:.3g}; the window's edges "
    "explain {edges_ratio:+z.1%}; gauge minus rows at the same instants is {bias:+z.3g} (limit {limit:.3g})",
    "little.stopped": "the gauge stood still for more than {gap_s:g} s in this window; {rest}",
    # ------------------------------------------------------------ stationarity and the sample
    "UNSTABLE": "UNSTABLE: {left}, {completed_qps:.2f} of {arrival_qps:.2f} requests/s were finished{growth}",
    "unstable.left": "{share:.1%} of the arrivals were left behind",
    "unstable.grows": "in-flight grows",
    "unstable.growth": "; latency grows by {per_minute_s:.1f} s per minute",
    "WARN-SUSPECT": "the number in flight shows a trend (p = {p:.1e})",
    "WARN-SHORT": "the window of {window_s:.0f} s is too short to tell growth from a start; it needs {need}",
    "short.seconds": "at least {needed_s:.0f} s",
    "short.arrivals": "arrivals",
    "WARN-UNDECIDED": "attainment {value:.4f} has the interval {low:.4f} to {high:.4f}, which holds the target "
    "{target:g}: not decided",
    "WARN-SURVIVORS": "{alive:.2%} of the answered requests met the SLO, but only {joint:.2%} of all "
    "arrivals{refused}",
    "survivors.refused": " ({count} were rejected)",
    "WARN-OPEN": "{count} {count:arrival|arrivals} ended without an outcome; attainment lies between {low:.4f} and "
    "{high:.4f}",
    # ------------------------------------------------------------ the run
    "INV-UNFINISHED": "the run has no end: its master died, or still runs; stages may be missing",
    "INV-WITNESS": "{files} are missing: the run wrote both, and without them nothing but requests.csv speaks for its "
    "own rows",
    "WARN-WITNESS": "{file} is missing: the counts and latencies of requests.csv have no second source",
    "INV-ROWS": "{problem_id}: {message}{examples}",
    "INV-LEDGER": "{problem_id}: {message}{examples}",
    "INV-SEED": "{problem_id}: {message}{examples}",
    "INV-STAGES": "{problem_id}: {message}{examples}",
    "examples": " ({items})",
    "LED": "{message}",
    "INV-CSV": "Locust's CSV and the ledger disagree: {listed}",
    "INV-OFFSET": "the offset between worker and master clocks is {known} (limit {limit_ms:.1f} ms)",
    "INV-REPEATS": "{valid} of {repeats} repeats at {offered_qps:g} requests/s {valid:is|are} valid, too few to "
    "speak for that rate and for its repeatability: {reason}",
    "offset.unknown": "not known",
    "offset.known": "known to {bound_ms:.1f} ms only",
    "INV-CHANNEL": "not one of {planned} arrivals was answered; {failed} failed in the channel, most with {error_code} "
    "({error_kind})",
    "INV-CHANNEL.silent": "not one of {planned} arrivals of {stage_name} was answered; {waited} were open at a time "
    "limit",
    "INV-EMPTY": "no stage has a single planned arrival in its window",
    "INV-TARGET": "{names} {where} is not measured: {gate}{ran}",
    "INV-TARGET.many": "{names} {where} are not measured: {gate}{ran}",
    "target.ran": "; measured rates: {rates:g}",
    "SLO-MISS": "{label} is {found}{place}{limit}{note}",
    "SLO-MISS.never": "{label}{place} falls among answers that never came; the limit is {limit}",
    "SLO-MISS.unstable": "{label}{place} counts as not met: {why}; the share of {found} (target {limit}) is that of "
    "this stage's length only, a longer stage would miss it",
    "miss.missed": "missed",
    "miss.place": " at {offered_qps:g} requests/s",
    "miss.where": " {where}",
    "miss.limit.<=": ", above {limit}",
    "miss.limit.<": ", not below {limit}",
    "miss.limit.>=": ", below {limit}",
    "miss.limit.>": ", not above {limit}",
    "miss.limit": ", not {limit}",
    "miss.note": "; {note}",
    "left_out": "{stage_name} is INVALID and left out: {reason}",
    "INTERRUPTED": "the run was interrupted: what was planned after the stop was never due and is left out{never}",
    "interrupted.never": "; {lost} of {stages} {stages:stage|stages} {lost:has|have} no measurement",
    "WARN-ABORT": "the run was stopped early: {stopped_by}",
    "WARN-RATE": "the shape {shape} ran at {rate_qps:g} requests/s: this verdict is about that rate, not about "
    "{target_qps:g}",
    "WARN-REPEAT": "repeats at {offered_qps:g} requests/s differ: {statistic} by {ratio:.1%} (limit {limit:.0%} "
    "{seeds}), {values:.4g} s; {reachable}",
    "WARN-REPEAT.invalid": "{valid} of {repeats} repeats at {offered_qps:g} requests/s valid; left out: {names}",
    "WARN-REPEAT.few": "{valid} of {repeats} repeats at {offered_qps:g} requests/s valid: repeatability is not "
    "shown, it takes two",
    "repeat.same": "for the same seed",
    "repeat.other": "for different seeds",
    "repeat.attainable": "the limit was attainable at this load, so the service or the machine differed: chance "
    "moves such a P95 by {cv:.1%} (CV, by the intervals within the stages), and {runs} repeats stay within the "
    "limit up to {needed:.1%}",
    "repeat.chance": "the limit was not attainable at this load: chance alone moves such a P95 by {cv:.1%} (CV, by "
    "the intervals within the stages), and {runs} repeats stay within the limit only up to {needed:.1%}; longer "
    "stages vary less",
    "repeat.open": "whether the limit was attainable at this load is open: the repeats vary by {cv:.1%} (CV; 95 % "
    "interval {low:.1%} to {high:.1%}), and {runs} repeats stay within it up to {needed:.1%}; longer stages vary less",
    "repeat.unattainable": "the limit was not attainable at this load: the repeats vary by {cv:.1%} (CV; 95 % "
    "interval {low:.1%} to {high:.1%}), and {runs} repeats stay within it only up to {needed:.1%}; "
    "longer stages vary less",
    # ------------------------------------------------------------ the first line
    "verdict.PASS": "{stopped}The SLO holds {where}{note}{rest}.",
    "verdict.FAIL": "{stopped}The SLO does not hold: {reason}.",
    "verdict.INVALID": "{stopped}The measurement is not to be trusted: {reason}.",
    "verdict.INVALID.target": "{stopped}The SLO is not judged: {reason}.",
    "verdict.both": "{first}{second}",
    "verdict.witness": "; {files} is missing, so the ledger is not checked by it",
    "verdict.stopped": "INTERRUPTED. ",
    "verdict.undecided": " (not decided by the number of arrivals)",
    "verdict.repeats": " ({valid} of {repeats} repeats valid{shown})",
    "verdict.not_shown": "; repeatability is not shown",
    "verdict.spread": "; its repeats differ by {ratio:.1%} in {statistic}, above the limit of {limit:.0%}",
    "verdict.run": "over the whole run",
    "verdict.gates": "where its gates ask for it",
    "verdict.at": "at {offered_qps:g} requests/s",
    "verdict.own_rate": ", the rate of this run; the target of {target_qps:g} was not measured",
    "verdict.above": ", and so at the target of {target_qps:g}, which was not measured",
    "verdict.between": " by the stages at {low_qps:g} and {high_qps:g}; the target itself was not measured",
    # ------------------------------------------------------------ gates
    "amount": "{number}",
    "amount.s": "{number} s",
    "amount.qps": "{number} requests/s",
    "amount.share": "{number} %",
    "gate.label": "{metric}",
    "gate.label.statistic": "{metric} {statistic}",
    "gate.label.share": "the share of whole answers in time",
    "gate.label.repeats": "the spread of the repeats",
    "gate.where.target": "at the target",
    "gate.where.target_rate": "at the target of {target_qps:g} requests/s",
    "gate.where.run": "over the whole run",
    "gate.where.all": "in every stage",
    "gate.where.max": "at the highest rate",
    "gate.where.rate": "at {at} requests/s",
    "gate.unusable": "the gate has no usable operator or value",
    "gate.no_target": "the run has no target rate (loadgen.target_qps)",
    "gate.no_stage": "no stage was measured",
    "gate.no_valid_stage": "no valid stage was measured",
    "gate.invalid": "{stage_name} is INVALID: {reason}",
    "gate.see_reasons": "see its reasons",
    "gate.measured": "measured at {offered_qps:g} requests/s",
    "gate.run": "over all arrivals of the run",
    "gate.all": "worst over all valid stages",
    "gate.worst": "{how} (worst of the repeats)",
    "gate.worst.only": "worst of the repeats",
    "gate.noted": "{how}; {note}",
    "gate.noted.only": "{note}",
    "gate.unstable.only": "{why}; a longer stage would miss it",
    "gate.not_decided.only": "which does not decide it: measure the target rate itself",
    "gate.share.only": "P95 itself is withheld ({withheld}), so the share within {limit} is judged",
    "gate.share_between": "{target_qps:g} was not measured: interpolated between {low_qps:g} ({low:.2%}) and "
    "{high_qps:g} ({high:.2%})",
    "gate.between": "{target_qps:g} was not measured: interpolated between {low_qps:g} ({low}) and {high_qps:g} "
    "({high})",
    "gate.one_side": "not measured on both sides",
    "gate.next_rate": "{target_qps:g} was not measured: taken at the next rate, {offered_qps:g}",
    "gate.unstable": "{how}; {why}; a longer stage would miss it",
    "gate.grows": "UNSTABLE: in-flight grows",
    "gate.nearest": "{target_qps:g} was not measured; the nearest valid stage is {offered_qps:g}",
    "gate.cannot_be_better": "a higher rate, such as the target {target_qps:g}, cannot be better",
    "gate.cannot_be_worse": "{target_qps:g} was not measured: it lies below {offered_qps:g}, and a lower rate cannot "
    "be worse",
    "gate.not_decided": "{how}, which does not decide it: measure the target rate itself",
    "gate.too_few": "P95 itself is withheld ({withheld}); {share:.2%} of {planned} {planned:arrival|arrivals} were "
    "within {limit}, too "
    "few to decide on 95 %",
    "gate.share": "{how}; P95 itself is withheld ({withheld}), so the share within {limit} is judged",
    "gate.at_least": "every measured rate held the SLO: the knee is at least this",
    "gate.at_least_unknown": "the highest measured rate lies below the limit and still held",
    "gate.below": "the lowest measured rate missed the SLO",
    "gate.not_measured": "not measured",
    "gate.repeats": "{statistic} of {runs} repeats at {offered_qps:g} requests/s",
    "gate.repeats.close": "{how}; the values differ by less than a millisecond, which is the clock's and the "
    "network's",
    "gate.repeats.none": "no rate was measured twice there: nothing is known about repeatability",
    "gate.repeats.unstable": "unstable, not a failed repeat: {offered_qps:g} requests/s lies beyond capacity, where "
    "the value grows with the stage's length",
    "gate.repeats.few": "{valid} of {repeats} repeats at {offered_qps:g} requests/s valid with a P95: it takes two",
    "gate.no_arrivals": "no arrivals",
    "gate.not_recorded": "{metric} is not recorded",
    # ------------------------------------------------------------ withheld percentiles
    "withheld.none": "no values",
    "withheld.few": "{n} {n:value|values}; {need} are needed",
    "withheld.dependent": "{n} values that depend on each other are worth {worth:.0f} at most; {need} are needed",
    # ------------------------------------------------------------ capacity
    "capacity.undecided": "The search decided no rate, so nothing is said about the knee; give it more time.",
    "capacity.none": "No stage is valid, so nothing is said about capacity.",
    "capacity.invalid": "The run is INVALID, so no capacity figure is given; see the reasons.",
    "capacity.closed": "Closed loop: the load follows the service and cannot exceed it, so it shows no knee.",
    "capacity.below": "Fewer than {target:.2%} of all arrivals met the SLO at every rate; the knee lies below "
    "{high_qps} requests/s.",
    "capacity.at_least": "Every measured rate held the SLO, up to {low_qps} requests/s; where it breaks was not "
    "found. Keep production at {safe_low_qps} to {safe_high_qps}, 70-80 % of that, or measure higher rates.",
    "capacity.at_least.thin": "Every measured rate held the SLO, the highest too briefly to prove it: what these "
    "arrivals prove is {low_qps} requests/s, the lower bound of the interval (95 %); where the SLO breaks was not "
    "found. Keep production at {safe_low_qps} to {safe_high_qps}, 70-80 % of the lower bound, or measure longer and "
    "higher.",
    "capacity.crossing": "The SLO holds up to about {knee_qps} requests/s ({stages}95 % interval {low_qps} to "
    "{high_qps}{beyond}); keep production at {safe_low_qps} to {safe_high_qps}, 70-80 % of the lower bound.",
    "capacity.stages": "crossing between the stages at {below_qps:g} and {above_qps:g}; ",
    "capacity.beyond": ", above every measured rate: measure higher ones",
    "capacity.below_met": "The lower end lies below {rate_qps:g} requests/s, where the SLO held: the latencies near "
    "the knee vary from part to part of the stages by more than that rate stays clear of the target; longer stages "
    "raise it.",
    "capacity.below_met.clusters": "The lower end lies below {rate_qps:g} requests/s, where the SLO held without a "
    "miss: misses come in clusters, and {arrivals} {arrivals:arrival|arrivals} with about {states} independent "
    "{states:state|states} of the queue may "
    "not have shown one; a longer stage there raises it.",
    "capacity.grows": "At {above_qps:g} requests/s the answers were still in time, but requests in flight kept growing"
    ": the service finished {finished_qps} a second, and a longer stage would miss the SLO.",
    "capacity.flat": "Throughput flattens at about {flat_qps} requests/s: so many were finished where more came "
    "({rates:g}).",
    "capacity.noted": "{sentence} {note}",
    "capacity.p95": "P95 of the whole answer passes its target of {target_s:g} s {where}, before that.",
    "capacity.p95_at": "at about {qps} requests/s",
    "capacity.p95_always": "at every measured rate",
    "hold.void": "The hold at the watermark, {offered_qps:g} requests/s for {window_s:.0f} s is {verdict} and proves "
    "nothing.",
    "hold.MET": "The hold at the watermark, {offered_qps:g} requests/s for {window_s:.0f} s held the SLO (attainment "
    "{attainment:.4f}, {stationarity}).",
    "hold.NOT_MET": "The hold at the watermark, {offered_qps:g} requests/s for {window_s:.0f} s did not hold the SLO "
    "(attainment {attainment:.4f}, {stationarity}).",
    "hold.UNDECIDED": "The hold at the watermark, {offered_qps:g} requests/s for {window_s:.0f} s is not decided "
    "(attainment {attainment:.4f}, {stationarity}).",
    # ------------------------------------------------------------ throughput against the cap
    "batch.open": "any more",
    "batch.n": "{n:.3g}",
    "batch.peak": "At {offered_qps:g} requests/s the gain of one more seat turns negative at a cap of about {peak:.3g} "
    "(95 % interval {low:.3g} to {high}); the best measured cap is {best_cap} with {best_qps:.2f} requests/s, the "
    "best attainment has {attainment_cap} ({attainment:.2%}).",
    "batch.rising": "At {offered_qps:g} requests/s throughput still rises at the highest cap: {gain:+z.3g} requests/s "
    "per seat from {low_cap} to {high_cap} (95 % interval {gain_low:+z.3g} to {gain_high:+z.3g}); the best attainment "
    "has {attainment_cap} ({attainment:.2%}).",
    "batch.falling": "At {offered_qps:g} requests/s throughput falls with the cap: {gain:+z.3g} requests/s per seat "
    "from {low_cap} to {high_cap} (95 % interval {gain_low:+z.3g} to {gain_high:+z.3g}); try lower caps than "
    "{low_cap}.",
    "batch.flat": "At {offered_qps:g} requests/s the gain of one more seat cannot be told from nought at the highest "
    "cap; the best measured cap is {best_cap} with {best_qps:.2f} requests/s. Longer stages narrow it.",
    "batch.not_full": "At {offered_qps:g} requests/s every cap served all that came: throughput follows the load, not "
    "the cap; the best attainment has {attainment_cap} ({attainment:.2%}). Raise the rate to see the curve.",
    "batch.few": "At {offered_qps:g} requests/s only {full} of {caps} {caps:cap|caps} was full: nothing is said about "
    "the gain of "
    "a seat. Raise the rate.",
    # ------------------------------------------------------------ the queueing model
    "model.none": "No queueing model: {why}.",
    "model.no_time": "the fitted decode step takes no time",
    "model.unchecked": "Fitted on {rates:g} requests/s alone: {claim}; no higher stage below {load:.0%} of it to check "
    "against.",
    "model.not_predictive": "Fitted on {rates:g} requests/s alone: {claim}; not predictive here, residual {residual} "
    "in {metric} at {offered_qps:g} requests/s.",
    "model.refuted": "Fitted on {rates:g} requests/s alone: {claim}; not predictive here: the service finished "
    "{completed_qps:.3g} requests/s, more than that limit. Did its speed change between the stages?",
    "model.own_stages": "Fitted on {rates:g} requests/s alone: {claim}; not predictive here: the law does not give "
    "back its own stage of {offered_qps:g} requests/s, residual {residual} in the mean.",
    "model.predictive": "Fitted on {rates:g} requests/s alone: {claim}; mean response of the higher stages predicted "
    "within {worst:.1%}{naive}.",
    "model.naive": " (M/G/K: {ratio:.0%})",
    "model.points": "{points:+z.1f} points",
    "model.ratio": "{ratio:+z.0%}",
    "model.hard_limit": "hard limit {limit_qps:.3g} requests/s",
    "model.unlimited": "no hard limit (max_num_seqs unknown)",
    "model.knee": "knee {knee_qps:.3g} requests/s, {limit}",
    "model.stages": "{stages} {stages:stage|stages}, the model reads {limit} at most; the rest is left out",
    "model.rows": "stage {stage}: {rows} {rows:row|rows}, the model uses the first {limit}",
    "model.replicas": "the service has {replicas} replicas and rows do not say which one answered: the fit treats "
    "them as one batch, trust it only as far as the residuals go",
    "model.no_limit": "max_num_seqs is not known: no hard limit, and nothing is predicted with a queue",
    "model.no_step": "the fitted decode step takes no time: the stamps do not carry the engine's steps",
    "model.process": "arrival process '{process}': the predicted knee assumes Poisson arrivals instead",
    "model.load": "calibrated at up to {load:.0%} of the predicted limit: more than {limit:.0%} is not low load",
    "model.extrapolated": "calibration saw batches of up to {batch_size:.0f} of {max_num_seqs}: the limit is "
    "extrapolated",
    "model.no_batch_cost": "no cost of the batch is visible at these rates: the limit assumes that there is none",
    "model.peak": "throughput peaks at a batch of {batch_size} ({best_qps:.3g}/s) and falls to {top_qps:.3g}/s at "
    "{max_num_seqs}: a burst can tip the service over; lower max_num_seqs",
    "model.no_arrivals": "stage {stage}: no arrivals in its window",
    "model.cached": "{share:.1%} of the prompt tokens came from the service's cache: they count as context, not as "
    "prefill work, in the fit and in every prediction; a colder cache makes the service slower than predicted",
    "model.hidden": "not predictive here: hidden reasoning. {share:.1%} of the output tokens are reasoning that was "
    "not streamed (limit {limit:.0%}), so the rows do not show how many requests shared a step, and a first token "
    "comes after steps that nobody saw",
    "model.failed": "stage {stage}: {failed_ratio:.1%} of the arrivals have no answer; the model knows no rejection "
    "and no timeout, so its latencies are not comparable",
    "model.no_stage": "no valid, stable stage with answers longer than 20 tokens and at most 2 % failures",
    "model.few_rows": "only {rows} {rows:answer|answers} in the valid stages {rows:reaches|reach} {tokens} tokens, "
    "{need} are needed",
    "model.one_stage": "only one valid stage: base and batch cost are told apart by its own fluctuations alone",
    "model.more_stages": "{stages} {stages:stage was|stages were} needed for {rows} usable {rows:row|rows}: fewer are "
    "left to predict",
    # ------------------------------------------------------------ diagnosis
    "DIA-FLOOR.ttft": "the TTFT deadline of {deadline_ms:.0f} ms lies under the idle floor: at {offered_qps:g} "
    "requests/s half of the answers already take {p50_ms:.0f} ms, so attainment cannot be high at any rate",
    "DIA-FLOOR.tpot": "the TPOT deadline of {deadline_ms:.0f} ms lies under the idle floor: at {offered_qps:g} "
    "requests/s half of the answers already take {p50_ms:.0f} ms, so attainment cannot be high at any rate",
    "DIA-CLAUSE.failures": "attainment is low though the median answer looks normal: {stages}; the cause is that "
    "{shares} arrivals failed or were refused, and stay in the denominator",
    "DIA-CLAUSE.ttft": "attainment is low though the median answer looks normal: {stages}; the cause is that only "
    "{shares} of all arrivals have their first token in time (TTFT)",
    "DIA-CLAUSE.tpot": "attainment is low though the median answer looks normal: {stages}; the cause is that only "
    "{shares} of all arrivals keep the token pace (TPOT)",
    "clause.stage": "{joint:.2%} at {offered_qps:g} requests/s (median answer {p50_s:.2f} s)",
    "clause.share": "{share:.2%}",
    "clause.failed": "{failed} of {planned}",
    "DIA-REJECTS": "rejections bought the latency: {stages}",
    "rejects.stage": "at {offered_qps:g} requests/s {refused:.1%} of the arrivals were refused; {alive:.2%} of the "
    "answered meet the SLO, {joint:.2%} of all arrivals do",
    "DIA-CLIENT": "the client limits these stages: {stages}; send lag p99 up to {lag_ms:.1f} ms{used}",
    "DIA-CLIENT.other": "something else held the machine during {stages}: send lag p99 up to {lag_ms:.1f} ms{used} "
    "of a core",
    "client.cpu": ", worker CPU {cpu_ratio:.0%}",
    "DIA-TARGETS": "even at {offered_qps:g} requests/s, where {joint:.2%} meet the TTFT and TPOT deadlines, only "
    "{e2e:.2%} end within {target_s:g} s{p95}",
    "targets.p95": " (P95 is {p95_s:.2f} s)",
    "DIA-BUFFER": "TTFT is {ratio:.0%} of the whole answer at {offered_qps:g} requests/s and {burst:.0%} of the "
    "streams arrive in bursts: a proxy or the service buffers the stream",
    "DIA-BATCH": "throughput falls from {best_qps:.2f} to {completed_qps:.2f} requests/s while in-flight rises from "
    "{best_in_flight:.0f} to {in_flight:.0f}: the batch is past its useful size",
    "DIA-PREFILL": "prefill dominates: at {offered_qps:g} requests/s TTFT is {share:.0%} of an answer and follows the "
    "prompt length (correlation {r:.2f}, {us_per_token:.1f} µs per prompt token)",
    "DIA-CHURN": "{share:.0%} of {total} {total:request|requests} opened a new connection (median {median_ms:.1f} ms "
    "each): keep-alive does not work",
    "DIA-KV": "KV memory binds at {offered_qps:g} requests/s: above 95 % in {share:.0%} of the samples, "
    "{waiting:.1f} waiting on average, {preemptions:.0f} preemptions",
    "DIA-HYSTERESIS.degraded": "the service had not come back after the overload: {rates}",
    "DIA-HYSTERESIS.recovers": "the service comes back after the overload: {rates}",
    "hysteresis.rate": "at {offered_qps:.3g} requests/s attainment was {before:.2%} before and {after:.2%} after it "
    "(95 % interval of the difference {low_points:+z.1f} to {high_points:+z.1f} points){recovery}",
    "hysteresis.recovery": ", the last miss {seconds:.0f} s after the peak",
    "DIA-OUTSIDE": "{outside_ms:.0f} ms of each request at {offered_qps:g} requests/s pass outside the engine "
    "({ratio:.0%} of its residence): HTTP queue, tokenizer, proxy or network",
    "DIA-SCHED": "scheduler overhead: at {offered_qps:g} requests/s the engine's own page counts {decision_ms:.2f} "
    "ms of decisions per step, {share:.0%} of the {step_ms:.1f} ms that a step takes ({steps_per_s:.0f} steps/s)",
    "DIA-SCHED.seats": "scheduler overhead: at {offered_qps:g} requests/s {waiting:.1f} requests waited on average "
    "while only {running:.1f} of {seats:.0f} seats were taken{kv}, in {share:.0%} of {samples} looks at the "
    "service's page: requests that could run are not let in",
    "sched.kv": " and {kv:.0%} of the KV memory",
    "DIA-SCHED.fixed": "cost of a step that no batch shares: at {offered_qps:g} requests/s the batch is full "
    "({batch_size}), and {alpha_ms:.2f} ms of the fitted {step_ms:.2f} ms of a step ({share:.0%}, {steps_per_s:.0f} "
    "steps/s) do not depend on it: scheduler, kernel launches, reading of the weights",
    # ------------------------------------------------------------ next steps
    "next.rate": "use more workers or a lower rate, and look for unsent arrivals and their codes in the error table",
    "next.gaps_constant": "see the send lag; use more workers or a quieter machine",
    "next.gaps": "compare planned and sent times in requests.csv; run again with another seed to rule out chance",
    "next.quiet_machine": "close other programs, or run again on a quiet machine",
    "next.workers_or_quiet": "use more workers (--processes); close other programs, or run again on a quiet machine",
    "next.workers_or_move": "use more workers, or move the client off the service's machine",
    "next.workers_or_lazy": "use more workers or `client.read: lazy`",
    "next.workers": "use more workers",
    "next.plan": "longer stages average this out",
    "next.drift": "look at the in-flight chart for a stalled sender",
    "next.ceiling": "use more workers and calibrate again",
    "next.cap": "use more workers, or raise client.max_in_flight and `ulimit -n`",
    "next.drain": "run again to the end; one Ctrl-C alone waits for the open answers",
    "next.fixed_workers": "run the stage again with a fixed set of workers",
    "next.prompts_file": "leave that file alone while the run lasts (run.json, problems, names worker and path) and "
    "run again",
    "next.fault": "see the traceback in log.txt (or the worker's log), report it, and run again",
    "next.same_version": "use the same version and config on every machine",
    "next.buffering": "switch off response buffering in the proxy in front of the service",
    "next.usage": "compare the service's usage with max_tokens of one request (`bench probe`)",
    "next.token_count": "several tokens per event are legal (speculative decoding, a stream interval above 1): "
    "count the tokens of some answers with the model's tokenizer and compare them with the usage (`bench probe`)",
    "next.events": "let the service stream one token per event (stream interval 1); see one answer by `bench probe`",
    "next.uncounted": "switch usage on (stream_options.include_usage) at the service or the gateway; when it is on, "
    "the gateway does not stream: switch its buffering off and see one answer by `bench probe`",
    "next.stream_options": "ask for usage: stream_options.include_usage in target.extra_body, if the service knows it",
    "next.unique_prompts": "fine when the load is meant to share prefixes; else see loadgen.unique_prompts",
    "next.short": "the service must honour ignore_eos (or min_tokens); otherwise set target.pin_length to false",
    "next.prompts": "add lines to loadgen.prompts_file, or read TTFT as that of a warm cache (column cached_tokens)",
    "next.gone": "look into the log of the service (killed, out of memory, restarted?); run again when it stays up",
    "next.model": "set model to a name that the service offers (bench check), or look at the routing of the gateway",
    "next.clock": "look for a clock step or a suspended machine; run again",
    "next.longer_stages": "use longer stages",
    "next.warmup": "set sweep.warmup_sec to at least {seconds:.0f}",
    "next.little": "look for requests without a row, and for clock jumps, in log.txt",
    "next.gauge": "see loop lag; the client may have been blocked",
    "next.unstable": "overload is a finding: read the growth, not the percentiles of this stage",
    "next.repeats": "run the repeats again on a quiet machine; for other seeds, longer stages (--stage-duration) "
    "vary less",
    "next.repeats_invalid": "mend what made them INVALID and run again",
    "next.repeat_longer": "repeat the stage, longer, before trusting it",
    "next.stage_duration": "raise sweep.stage_duration_sec",
    "next.arrivals": "even without a miss it takes {need} arrivals",
    "next.longer_stage": "a longer stage decides it",
    "next.denominator": "the denominator is all arrivals: failures and rejections bought the latency",
    "next.drain_limit": "raise sweep.drain_limit_sec",
    "next.unfinished": "look in log.txt for what ended it; `bench recover` puts rows together that workers kept; run "
    "again",
    "next.witness": "put the file that the run wrote back into the folder and analyse again, or run again",
    "next.rows": "look in log.txt for lost workers or a full disk; run again",
    "next.ledger": "the ledger was changed or damaged after the run; use the original or run again",
    "next.stages": "stages.csv or requests.csv was changed after the run; use the original folder or run again",
    "next.seed": "compare seeds in stages.csv; do not merge runs by hand",
    "next.csv": "requests or rows were lost on the way; look in log.txt for worker errors, run again",
    "next.offset": "use a quieter network between master and workers, or one machine",
    "next.check": "run `bench check`: it names the layer at fault and the fix",
    "next.check_limits": "run `bench check`; if answers take that long, raise sweep.drain_limit_sec and the timeouts "
    "of target",
    "next.again": "run again to the end",
    "next.abort": "later stages were not run; mend what the gate names, or take `abort` from the gate",
    "next.empty": "check stage duration against warm-up, and whether the run was stopped early",
    "next.add_target": "add the target rate to sweep.qps, or lengthen its stage",
    "next.more_arrivals": "run longer stages (--stage-duration, sweep.stage_duration_sec): more arrivals decide it",
    "next.binding_clause": "see the binding clause of that stage and the capacity section",
    "next.verdicts": "see docs/verdicts.md",
    "next.sweep": "run a sweep for the target rate",
    "next.floor": "run the smoke shape (2 requests/s), take its p99 as the floor and set the deadline above it",
    "next.clause": "read attainment per clause; do not compare a median with an SLO on all arrivals",
    "next.rejects": "compare with admission off at the same seed; count what clients do after a refusal (retry-after)",
    "next.double_workers": "double the workers at the same seed: if the latencies fall, it was the client",
    "next.targets": "the answers are too long for this P95 target: P95 length x TPOT must fit in it; change the "
    "target or the lengths",
    "next.probe": "send one request around the proxy with `bench probe`, or switch off its response buffering",
    "next.batch": "run max_num_seqs 8, 16 and 32 (for example) at this rate and give the runs to `bench batch-curve`: "
    "it names the cap where the gain of a seat turns negative",
    "next.prefill": "repeat the stage with half the prompt length; try prefix caching or a larger "
    "max_num_batched_tokens",
    "next.churn": "check the service's keep-alive timeout and `Connection: close`; compare TTFT of new and reused "
    "connections",
    "next.kv": "lower kv_reserve_ratio or max_model_len, or halve the output lengths at the same seed: the knee "
    "should move",
    "next.hysteresis_degraded": "look for what the overload left behind: a full queue or KV memory, retries, a cache "
    "that was emptied; shed load earlier (admission) and run the same shape again",
    "next.hysteresis_recovers": "nothing to mend here; a longer peak asks more",
    "next.outside": "compare with a request from the service's own machine; look at the scheduler's step overhead at "
    "this batch size",
    "next.sched": "profile the scheduler at this batch size; run the same seed with max_num_seqs halved: a cost per "
    "waiting or running request falls with it",
    "next.sched_seats": "raise max_num_batched_tokens (prefill may have used up the step), then compare the gap "
    "between steps with asynchronous scheduling on and off, at the same seed",
    "next.sched_fixed": "profile one step: when the gap between two steps is the scheduler's, try asynchronous or "
    "multi-step scheduling; else raise max_num_seqs at the same seed (`bench batch-curve`)",
}
