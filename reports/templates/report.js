"use strict";
(function () {
  var root = document.documentElement;
  root.classList.add("js");
  function each(selector, action) { Array.prototype.forEach.call(document.querySelectorAll(selector), action); }

  // Theme: colours are CSS variables inside the charts too, so nothing is drawn again.
  function setTheme(name) {
    if (name === "auto") { root.removeAttribute("data-theme"); } else { root.setAttribute("data-theme", name); }
    each("[data-set-theme]", function (b) { b.setAttribute("aria-pressed", String(b.dataset.setTheme === name)); });
  }
  function store(name) { try { if (name === undefined) { return localStorage.getItem("bench-theme"); } localStorage.setItem("bench-theme", name); } catch (_) { /* no storage on file pages */ } return null; }
  each("[data-set-theme]", function (b) { b.addEventListener("click", function () { setTheme(b.dataset.setTheme); store(b.dataset.setTheme); }); });
  var kept = store();
  if (kept === "light" || kept === "dark") { setTheme(kept); }

  // Charts: static SVG first; the library is parsed when the first chart is needed, each chart once it is near.
  var holder = document.getElementById("charts");
  var specs = holder ? JSON.parse(holder.textContent) : { specs: {}, config: {} };
  var linear = {};
  var loading;
  function unpack(text) {
    var bytes = Uint8Array.from(atob(text), function (c) { return c.charCodeAt(0); });
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  function library() {
    if (!loading) {
      loading = unpack(document.getElementById("bundle").textContent).then(function (code) {
        var script = document.createElement("script");
        script.textContent = code; // allowed by its hash
        document.body.appendChild(script);
        return window.vegaEmbed;
      });
    }
    return loading;
  }
  function specOf(id, group) {
    var spec = JSON.parse(JSON.stringify(specs.specs[id]));
    spec.config = specs.config;
    Object.keys(spec.datasets).forEach(function (name) {
      var data = spec.datasets[name];
      if (!Array.isArray(data)) {
        spec.datasets[name] = data.rows.map(function (row) {
          var item = {};
          data.columns.forEach(function (column, i) { item[column] = row[i]; });
          return item;
        });
      }
    });
    if (group && linear[group]) {
      spec.layer.forEach(function (layer) {
        var y = layer.encoding && layer.encoding.y;
        if (y && y.scale && y.scale.type === "log") {
          y.scale = { type: "linear", domain: [0, y.scale.domain[1]], nice: false, clamp: true };
          if (y.axis) { delete y.axis.values; y.axis.tickCount = 6; }
        }
      });
    }
    return spec;
  }
  function embed(plot) {
    var id = plot.dataset.chart, figure = plot.closest("figure.tabs");
    if (!specs.specs[id] || !plot.clientWidth) { return Promise.resolve(); }
    plot.dataset.state = "working";
    var still = Array.prototype.filter.call(plot.querySelectorAll("svg"), function (s) { return s.getBoundingClientRect().height > 0; })[0];
    var stage = document.createElement("div");
    var label = still && still.getAttribute("aria-label");
    // As high as what it replaces, or the page below would jump. Vega's "fit" counts the labels into the height.
    var tall = still ? Math.round(still.getBoundingClientRect().height) : 0;
    stage.className = "live";
    plot.appendChild(stage);
    return library().then(function (embedIn) {
      var spec = specOf(id, figure && figure.id.replace("fig-", ""));
      if (tall) { spec.height = Math.max(tall, 180); }
      return embedIn(stage, spec, {
        ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: { disableDefaultStyle: true, theme: "report" }
      });
    }).then(function (result) {
      Array.prototype.slice.call(plot.children).forEach(function (child) { if (child !== stage) { child.remove(); } });
      var svg = stage.querySelector("svg");
      // The picture has one name and a table beside it; Vega's roles on every mark have no names and only add noise.
      Array.prototype.forEach.call(stage.querySelectorAll("[role],[aria-roledescription]"), function (e) { e.removeAttribute("role"); e.removeAttribute("aria-roledescription"); });
      if (svg && label) { svg.setAttribute("role", "img"); svg.setAttribute("aria-label", label); }
      if (plot.view) { plot.view.finalize(); }
      plot.view = result.view;
      plot.dataset.state = "live";
      root.dataset.live = String(document.querySelectorAll('[data-state="live"]').length);
    }).catch(function (error) {
      stage.remove();
      plot.dataset.state = "failed";
      console.error("chart " + id + ": " + error.message);
    });
  }
  var queue = [], busy = false;
  function pump() {
    if (busy || !queue.length) { return; }
    busy = true;
    var plot = queue.shift();
    (window.requestIdleCallback || window.setTimeout)(function () {
      embed(plot).then(function () { busy = false; pump(); });
    });
  }
  if (holder && "IntersectionObserver" in window && "DecompressionStream" in window) { // else the drawings stay as they are
    var watcher = new IntersectionObserver(function (entries) {
      entries.forEach(function (entry) {
        if (entry.isIntersecting && entry.target.clientWidth) { watcher.unobserve(entry.target); queue.push(entry.target); }
      });
      pump();
    }, { rootMargin: "120px" });
    each(".plot[data-chart]", function (p) { watcher.observe(p); });
  }
  each("[data-scale]", function (b) {
    b.addEventListener("click", function () {
      var group = b.dataset.scale;
      linear[group] = !linear[group];
      b.setAttribute("aria-pressed", String(linear[group]));
      each("#fig-" + group + " .plot", function (p) { if (p.clientWidth) { queue.push(p); } else { watcher.observe(p); } });
      pump();
    });
  });

  // Stage rows open in place.
  function toggle(button, open) {
    var row = document.getElementById(button.getAttribute("aria-controls"));
    button.setAttribute("aria-expanded", String(open));
    row.classList.toggle("open", open);
    row.querySelector("details").open = open;
  }
  each(".opener", function (b) {
    b.addEventListener("click", function () { toggle(b, b.getAttribute("aria-expanded") !== "true"); });
  });

  // Sorting: a table body per stage, or plain rows; numbers by data-v, texts as they are.
  each("table.sortable", function (table) {
    var headers = table.tHead.rows[table.tHead.rows.length - 1].cells;
    function sorter(th, column, part) { // a cell may hold two lines, each with its own heading
      var button = document.createElement("button"), home = part || th;
      button.type = "button"; button.className = "sort";
      while (home.firstChild) { button.appendChild(home.firstChild); }
      home.appendChild(button);
      var below = part && part.className === "below";
      button.addEventListener("click", function () {
        var down = th.getAttribute("aria-sort") === "ascending" && button.dataset.on === "1";
        Array.prototype.forEach.call(headers, function (other) { other.removeAttribute("aria-sort"); });
        Array.prototype.forEach.call(table.querySelectorAll(".sort"), function (other) { delete other.dataset.on; });
        button.dataset.on = "1";
        th.setAttribute("aria-sort", down ? "descending" : "ascending");
        var many = table.tBodies.length > 1, rows = many ? table : table.tBodies[0];
        var items = Array.prototype.slice.call(many ? table.tBodies : rows.rows);
        function key(item) {
          var cell = (many ? item.rows[0] : item).cells[column];
          if (below) { cell = cell.querySelector("span[data-v]") || { dataset: { v: "" } }; }
          var raw = cell.dataset.v !== undefined ? cell.dataset.v : cell.textContent.trim();
          var value = raw === "inf" ? Infinity : parseFloat(raw.replace(/,/g, ""));
          return { number: isNaN(value) ? null : value, text: raw };
        }
        items.map(function (item) { return [key(item), item]; }).sort(function (a, b) {
          var x = a[0], y = b[0], sign = down ? -1 : 1;
          if (x.number === null && y.number === null) { return sign * x.text.localeCompare(y.text); }
          if (x.number === null) { return 1; }
          if (y.number === null) { return -1; }
          return x.number === y.number ? 0 : sign * (x.number < y.number ? -1 : 1);
        }).forEach(function (pair) { rows.appendChild(pair[1]); });
      });
    }
    Array.prototype.forEach.call(headers, function (th, column) {
      var parts = Array.prototype.slice.call(th.children);
      if (!parts.length) { sorter(th, column); }
      parts.forEach(function (part) { sorter(th, column, part); });
    });
  });

  each("[data-copy]", function (b) {
    b.addEventListener("click", function () {
      var text = document.getElementById(b.dataset.copy).textContent, before = b.textContent;
      function done() { b.textContent = b.dataset.done; setTimeout(function () { b.textContent = before; }, 1500); }
      function byHand() {
        var range = document.createRange(); range.selectNodeContents(document.getElementById(b.dataset.copy));
        getSelection().removeAllRanges(); getSelection().addRange(range);
        if (document.execCommand("copy")) { done(); }
      }
      if (navigator.clipboard) { navigator.clipboard.writeText(text).then(done, byHand); } else { byHand(); }
    });
  });

  // Contents: mark the section that is being read.
  if ("IntersectionObserver" in window) {
    var spy = new IntersectionObserver(function (entries) {
      entries.forEach(function (entry) {
        if (!entry.isIntersecting) { return; }
        each(".toc a", function (a) {
          if (a.getAttribute("href") === "#" + entry.target.id) { a.setAttribute("aria-current", "true"); } else { a.removeAttribute("aria-current"); }
        });
      });
    }, { rootMargin: "-15% 0px -75% 0px" });
    each("main section", function (s) { spy.observe(s); });
  }

  var opened = [];
  window.addEventListener("beforeprint", function () {
    each("details.numbers:not([open])", function (d) { d.open = true; opened.push(d); });
  });
  window.addEventListener("afterprint", function () { opened.forEach(function (d) { d.open = false; }); opened = []; });
}());
