"use strict";
// Follows /slo/data every two seconds and draws it. All text goes in as text, never as markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const H = 250, LEFT = 52, RIGHT = 14, TOP = 24, BOTTOM = 38;
  const $ = (id) => document.getElementById(id);
  const here = location.pathname.replace(/\/+$/, "");

  function el(name, attributes, ...children) {
    const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    for (const child of children) node.append(child);
    return node;
  }

  const finite = (v) => typeof v === "number" && Number.isFinite(v);
  const seconds = (v) => (v === "inf" ? "∞" : !finite(v) ? "–" : v >= 1 ? (v * 1000).toFixed(0) : Number((v * 1000).toPrecision(3)).toString());
  const rate = (v) => (finite(v) ? (v >= 100 ? v.toFixed(0) : v.toFixed(1)) : "–");
  const percent = (v) => (100 * v).toFixed(2);
  const range = (p) => (!p ? "–" : percent(p[0]) === percent(p[1]) ? `${percent(p[0])} %` : `${percent(p[0])} to ${percent(p[1])} %`);

  // -- charts -----------------------------------------------------------------------------

  function steps(low, high, count, whole) {
    const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw && (!whole || s >= 1)) || 1;
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Math.abs(v) < step * 1e-6 ? 0 : v);
    return out;
  }

  function decades(low, high) {
    const out = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const m of high / low > 300 ? [1] : high / low > 20 ? [1, 3] : [1, 2, 5]) out.push(m * 10 ** power);
    return out.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }

  const label = (v) => (v !== 0 && Math.abs(v) < 0.01 ? v.toExponential(0) : Number(v.toPrecision(4)).toString());

  // chart: {title, caption, x, y, log, zero, top, series: [{name, ink, dash, points: [[x, y]]}], ranges: [[x, low, high]], limit: {y, name}}
  function draw(chart) {
    const W = chart.wide ? 1096 : 520;
    const xs = [], ys = [];
    for (const s of chart.series) for (const [x, y] of s.points) { xs.push(x); if (finite(y)) ys.push(y); }
    for (const [x, low, high] of chart.ranges || []) { xs.push(x); ys.push(low, high); }
    const svg = el("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${chart.title}. ${chart.caption}` });
    if (!ys.length) {
      svg.append(el("svg:text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "nothing measured yet"));
      return svg;
    }
    if (chart.limit) ys.push(chart.limit.y);
    let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys);
    if (chart.zero) { x0 = 0; x1 = x1 || 1; }
    else { const pad = (x1 - x0) * 0.05 || Math.max(1, x1 * 0.2); x0 = Math.max(0, x0 - pad); x1 += pad; }
    if (chart.log) { y0 = Math.max(y0 / 1.3, 1e-6); y1 *= 1.3; }
    else if (chart.top !== undefined) { y1 = chart.top; y0 = Math.max(0, y0 - (y1 - y0) * 0.12 - 0.002); }
    else { y0 = 0; y1 = y1 * 1.08 || 1; }
    const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
    const f = chart.log ? Math.log : (v) => v;
    const py = (y) => H - BOTTOM - ((f(y) - f(y0)) / (f(y1) - f(y0) || 1)) * (H - TOP - BOTTOM);
    for (const v of chart.log ? decades(y0, y1) : steps(y0, y1, 5, chart.whole)) {
      svg.append(el("svg:line", { class: "gridline", x1: LEFT, x2: W - RIGHT, y1: py(v), y2: py(v) }));
      svg.append(el("svg:text", { x: LEFT - 7, y: py(v) + 4, "text-anchor": "end" }, label(v)));
    }
    for (const v of steps(x0, x1, 6)) svg.append(el("svg:text", { x: px(v), y: H - BOTTOM + 17, "text-anchor": "middle" }, label(v)));
    svg.append(el("svg:line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM }));
    svg.append(el("svg:text", { x: 4, y: 13 }, chart.y));
    svg.append(el("svg:text", { x: W - RIGHT, y: H - 4, "text-anchor": "end" }, chart.x));
    if (chart.limit) {
      const y = py(chart.limit.y);
      svg.append(el("svg:line", { class: "s slo", x1: LEFT, x2: W - RIGHT, y1: y, y2: y, "stroke-dasharray": "7 4" }));
      svg.append(el("svg:text", { class: "slo-text", x: W - RIGHT, y: y - 5, "text-anchor": "end" }, chart.limit.name));
    }
    for (const [x, low, high] of chart.ranges || [])
      svg.append(el("svg:line", { class: "s grey range", x1: px(x), x2: px(x), y1: py(low), y2: py(Math.max(high, low)) - 0.5 }));
    for (const s of chart.series) {
      let path = "", pen = "M";
      for (const [x, y] of s.points) {
        if (!finite(y)) { pen = "M"; continue; }
        path += `${pen}${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
        pen = "L";
      }
      svg.append(el("svg:path", { class: `s ${s.ink}`, d: path || "M0 0", "stroke-dasharray": s.dash || "none" }));
      for (const [x, y] of s.dots ? s.points : []) {
        if (finite(y)) svg.append(el("svg:circle", { class: `d ${s.ink}`, cx: px(x), cy: py(y), r: 3.2 }));
        else if (y === "inf") svg.append(el("svg:path", { class: `d ${s.ink}`, d: `M${px(x)} ${TOP - 6}l4.5 8h-9Z` }));
      }
    }
    return svg;
  }

  function figure(chart) {
    const legend = el("ul", { class: "legend" });
    for (const s of chart.series)
      legend.append(el("li", {}, el("svg:svg", { width: 28, height: 10, viewBox: "0 0 28 10", "aria-hidden": "true" },
        el("svg:path", { class: `s ${s.ink}`, d: "M0 5H28", "stroke-dasharray": s.dash || "none" })), s.name));
    const caption = el("figcaption", {}, el("h3", {}, chart.title), el("p", {}, chart.caption));
    return el("figure", { class: chart.wide ? "wide" : "narrow" }, caption, legend, draw(chart));
  }

  // -- what is drawn ----------------------------------------------------------------------

  // "at 20 requests/s and at every measured rate above it", or the rates one by one when a higher one is fine again.
  function where(bad, all) {
    const rates = (list) => [...new Set(list.map((s) => s.offered_qps))].sort((a, b) => a - b);
    const found = rates(bad), others = rates(all).filter((r) => !found.includes(r));
    const onward = found.length > 1 && !others.some((r) => r > found[0]);
    const names = found.map(label);
    const list = names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}` : names[0];
    return onward ? `at ${names[0]} requests/s and at every measured rate above it` : `at ${list} requests/s`;
  }

  function byRate(stages, name, title, limit) {
    const known = stages.filter((s) => s[name].p95 !== null), measured = known.length > 0;
    const worst = known.filter((s) => s[name].p95 === "inf" || s[name].p95 > limit);
    const inks = { p50: ["blue", ""], p95: ["purple", "6 3"], p99: ["green", "2 3"] };
    return {
      title, x: "offered, requests/s", y: "ms", log: true, limit: { y: limit * 1000, name: `deadline ${label(limit * 1000)} ms` },
      caption: !stages.length ? "" : worst.length
        ? `The p95 is above the deadline ${where(worst, known)}.`
          : measured ? "The p95 is within the deadline at every measured rate so far." : "No p95 yet: too few answers.",
      series: Object.entries(inks).map(([p, [ink, dash]]) => ({
        name: p, ink, dash, dots: true, points: stages.filter((s) => s[name][p] !== null).map((s) => [s.offered_qps, s[name][p] === "inf" ? "inf" : s[name][p] * 1000]),
      })),
    };
  }

  function charts(data) {
    const stages = data.stages.filter((s) => s.ended).sort((a, b) => a.offered_qps - b.offered_qps);
    const known = stages.filter((s) => s.attainment);
    const over = known.filter((s) => s.attainment[1] < data.slo.attainment);
    const time = (name, index, ink, dash) => ({ name, ink, dash, points: data.series.map((p) => [p[0], p[index]]) });
    const now = data.series.length ? data.series[data.series.length - 1] : null;
    return [
      { title: "Attainment by offered rate", x: "offered, requests/s", y: "share of all arrivals", top: 1,
        caption: !known.length ? "" : over.length ? `The SLO is missed ${where(over, known)}.` : "No rate has missed the SLO so far.",
        limit: { y: data.slo.attainment, name: `target ${label(data.slo.attainment)}` },
        ranges: known.map((s) => [s.offered_qps, ...s.attainment]),
        series: [{ name: "met (bar: still open)", ink: "blue", dots: true, points: known.map((s) => [s.offered_qps, s.attainment[0]]) }] },
      byRate(stages, "ttft_s", "TTFT by offered rate", data.slo.ttft_s),
      byRate(stages, "tpot_s", "TPOT by offered rate", data.slo.tpot_s),
      { title: "In flight over time", x: "seconds from the start", y: "requests", zero: true, whole: true,
        caption: now ? `${data.in_flight} now; the most of a stage was ${Math.max(0, ...data.stages.map((s) => s.in_flight_max))}.` : "",
        series: [time("in flight", 4, "blue")] },
      { title: "Offered, sent and ended over time", x: "seconds from the start", y: "requests/s", zero: true, wide: true,
        caption: now && data.state === "sending" ? `Offered ${rate(now[1])}, sent ${rate(now[2])}, ended ${rate(now[3])} requests/s in the last second.` : "Nothing is due now.",
        series: [time("offered", 1, "grey", "6 3"), time("sent", 2, "blue"), time("ended", 3, "green", "2 3")] },
    ];
  }

  function tiles(data) {
    const s = data.stages[data.stages.length - 1];
    if (!s) return [];
    const failed = Object.entries(s.statuses).filter(([k]) => k !== "ok").map(([k, n]) => `${n} ${k}`).join(", ");
    return [
      ["Stage", `${data.stages.length} of ${data.planned_stages}`, s.name + (s.left_s ? `, ${s.left_s.toFixed(0)} s left` : "")],
      ["Requests/s", `${label(s.offered_qps)} / ${rate(s.arrived_qps)}`, "offered / arrived"],
      ["Attainment so far", range(s.attainment), s.attainment ? `of ${s.due} arrivals due` : "the window has not begun"],
      ["TTFT p95", `${seconds(s.ttft_s.p95)} ms`, `limit ${label(data.slo.ttft_s * 1000)}, n ${s.ttft_s.n}`],
      ["TPOT p95", `${seconds(s.tpot_s.p95)} ms`, `limit ${label(data.slo.tpot_s * 1000)}, n ${s.tpot_s.n}${s.tpot_unmeasured ? `; ${s.tpot_unmeasured} long answers without a TPOT miss it` : ""}`],
      ["In flight", String(s.in_flight), failed || "no failures"],
      s.sender_late
        ? ["Send lag p99", `${seconds(s.send_lag_p99_s)} ms`, `✕ too late, limit ${seconds(s.send_lag_limit_s)} ms: INVALID`, "late"]
        : ["Send lag p99", `${seconds(s.send_lag_p99_s)} ms`, `our own lateness, limit ${seconds(s.send_lag_limit_s)} ms`],
    ];
  }

  function table(data) {
    const head = ["Stage", "State", "Offered", "Arrived", "Due", "Attainment", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99", "Max in flight", "Lag p99", "Verdict so far"];
    const row = el("tr", {}, ...head.map((h, i) => el("th", { scope: "col", class: i > 1 && i < 14 ? "num" : "" }, h)));
    const body = el("tbody");
    for (const s of [...data.stages].reverse()) {
      const cells = [s.name, s.state, label(s.offered_qps), rate(s.arrived_qps), s.due, range(s.attainment), ...["ttft_s", "tpot_s"].flatMap((m) => ["p50", "p95", "p99"].map((p) => seconds(s[m][p]))), s.in_flight_max];
      const tr = el("tr", {}, ...cells.map((c, i) => el(i ? "td" : "th", i ? { class: i > 1 ? "num" : "" } : { scope: "row" }, String(c))));
      const lag = seconds(s.send_lag_p99_s);
      tr.append(el("td", { class: s.sender_late ? "num late" : "num" }, s.sender_late ? `✕ ${lag}, limit ${seconds(s.send_lag_limit_s)}` : lag));
      const marks = s.marks.length ? ` [${s.marks.join(", ")}]` : "";
      tr.append(el("td", { class: s.sender_late ? "late" : s.verdict }, (s.sender_late ? `INVALID, our sender is late (${s.verdict})` : s.verdict) + marks));
      body.append(tr);
    }
    return [el("thead", {}, row), body];
  }

  const KINDS = [["passes", "pass", "✓ PASS SO FAR"], ["fails", "fail", "✕ FAIL SO FAR"], ["invalid", "fail", "✕ INVALID SO FAR"], ["stopped", "fail", "✕ STOPPED"], ["not started", "fail", "✕ NOT STARTED"]];

  function show(data) {
    const running = !["ready", "finished"].includes(data.state);
    const [, kind, word] = KINDS.find(([k]) => data.verdict.startsWith(k)) || ["", "open", running ? "– OPEN" : data.stages.length ? "– NOT DECIDED" : "– WAITING"];
    $("verdict").className = `box ${kind}`;
    $("verdict-word").textContent = word;
    $("verdict-text").textContent = data.stages.length || data.problem ? data.verdict.replace(/^[^:]*: /, "") : "Start a run on Locust's page; this page follows by itself.";
    // After a refused start there is no run of its own to show: what follows belongs to the one before, and says so.
    const previous = data.problem && data.stages.length > 0;
    $("previous").hidden = !previous;
    $("bar").hidden = previous;
    $("previous").textContent = previous ? `Nothing was started. All figures below are of the previous run ${data.run_id}: ${data.run_verdict}.` : "";
    $("stages-title").textContent = previous ? `Stages of the previous run ${data.run_id}` : "Stages";
    $("title").textContent = data.problem ? "Start refused" : data.run_id ? `${data.model || "model"} · ${data.planned_stages} stage${data.planned_stages === 1 ? "" : "s"}` : "No run yet";
    $("meta").textContent = data.run_id ? `${data.problem ? "previous run" : "run"} ${data.run_id} · seed ${data.seed} · ${data.loop} loop · ${data.state}${data.state === "finished" ? `; judge it with: bench analyse ${data.run_dir}` : ""}` : "";
    $("bar").max = data.planned_s || 1;
    $("bar").value = data.spent_s;
    $("tiles").replaceChildren(...tiles(data).map(([name, value, sub, kind]) => el("li", { class: kind || "" }, el("p", { class: "label" }, name), el("p", { class: "value" }, value), el("p", { class: "sub" }, sub))));
    $("charts").replaceChildren(...(data.stages.length ? charts(data).map(figure) : []));
    $("stages").replaceChildren(...table(data));
    document.title = `${word.replace(/^\S+ /, "")} · SLO · scheduler-bench`;
  }

  async function follow() {
    if (!document.hidden) {
      try {
        const answer = await fetch(`${here}/data`, { cache: "no-store" });
        if (!answer.ok || !(answer.headers.get("content-type") || "").startsWith("application/json")) throw new Error(answer.redirected ? "log in again" : `HTTP ${answer.status}`);
        show(await answer.json());
        $("stamp").textContent = `updated ${new Date().toLocaleTimeString()}`;
      } catch (error) {
        $("stamp").textContent = `not updated: ${error.message}`;
      }
    }
    setTimeout(follow, 2000);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) $("stamp").textContent = "updating"; });
  follow();
})();
