"use strict";
// y over x, one line per run: hover, arrow keys, zoom by dragging, by buttons and by keys, logarithmic axes.

class LineChart {
  constructor(figure, spec, page) {
    Object.assign(this, { spec, page, log: { x: spec.x.log, y: spec.y.log }, view: null, at: null, drag: null });
    this.plot = figure.querySelector(".plot");
    const tools = figure.querySelector(".tools");
    this.resetButton = this.addButton(tools, "Reset zoom", { hidden: "", "data-reset": "" }, () => this.zoom(null));
    this.addButton(tools, "\u2212", { "data-zoom": "out", "aria-label": "Zoom out", title: "Zoom out" }, () => this.scaleX(2));
    this.addButton(tools, "+", { "data-zoom": "in", "aria-label": "Zoom in", title: "Zoom in; or drag over the chart" }, () => this.scaleX(0.5));
    for (const axis of ["x", "y"]) this.addLog(tools, axis);
    this.svg = svg("svg", {
      class: "lines", tabindex: "0", role: "application", "aria-roledescription": "chart",
      "aria-label": `${spec.title}. Left and right arrow: along a line. Up and down: between recipes. Plus, minus or drag: zoom. Escape: reset zoom.`,
    }, this.plot);
    this.tip = new Tip(this.plot);
    this.listen();
  }

  addButton(tools, text, attributes, act) {
    const button = html("button", { type: "button", ...attributes }, tools, text);
    button.addEventListener("click", act);
    return button;
  }

  addLog(tools, axis) {
    const values = this.spec.series.flatMap((s) => s.points.map((p) => p[axis === "x" ? 0 : 1]));
    if (!values.some((v) => v > 0) || values.some((v) => v < 0)) return;
    const name = axis === "x" ? this.spec.x.label : this.spec.y.label;
    const button = this.addButton(tools, `log ${axis}`, { "data-log": axis, "aria-pressed": this.log[axis], title: `Logarithmic axis: ${name}` }, () => {
      this.log[axis] = !this.log[axis];
      button.setAttribute("aria-pressed", this.log[axis]);
      this.zoom(null);
    });
  }

  listen() {
    const s = this.svg;
    s.addEventListener("pointerdown", (e) => this.press(e));
    s.addEventListener("pointermove", (e) => this.move(e));
    s.addEventListener("pointerup", (e) => this.release(e));
    s.addEventListener("pointercancel", () => { this.drag = null; this.unhover(); this.band(null); });
    s.addEventListener("pointerleave", () => { if (!this.drag) this.unhover(); });
    s.addEventListener("dblclick", () => this.zoom(null));
    s.addEventListener("keydown", (e) => this.key(e));
    s.addEventListener("blur", () => this.unhover());
  }

  // ---- drawing

  draw(width = this.plot.clientWidth) {
    this.svg.replaceChildren();
    this.points = [];
    this.tip.hide();
    if (!width) return;
    const height = width < 560 ? 300 : 400;
    fill(this.svg, { viewBox: `0 0 ${width} ${height}`, height }, null, null);
    const shown = this.visible();
    const domain = this.domain(shown);
    if (!domain) {
      svg("text", { class: "empty", x: width / 2, y: height / 2, "text-anchor": "middle" }, this.svg, shown.length ? "Nothing to show on this axis." : "No recipe selected.");
      return;
    }
    this.frame(width, height, domain, shown);
    const clip = `clip-${this.spec.id}`;
    const box = this.box;
    svg("rect", { x: box.left - 6, y: box.top - 6, width: box.right - box.left + 12, height: box.bottom - box.top + 7 }, svg("clipPath", { id: clip }, svg("defs", {}, this.svg)));
    const layer = svg("g", { "clip-path": `url(#${clip})` }, this.svg);
    const aim = this.target();
    for (const series of shown) this.line(series, layer);
    this.marked(shown, layer);
    this.labels(shown, aim, width >= 560);
    this.over = svg("g", {}, this.svg);
  }

  visible() { return this.spec.series.filter((s) => !this.page.hidden.has(s.run)); }

  usable(p) { return p[1] !== null && (!this.log.x || p[0] > 0) && (!this.log.y || p[1] > 0); }

  domain(shown) {
    const points = shown.flatMap((s) => s.points.filter((p) => this.usable(p)));
    if (!points.length) return null;
    let x = this.view?.x ?? extent(points.map((p) => p[0]));
    if (!this.view && !this.log.x) x = [Math.min(0, x[0]), x[1]];
    const inside = points.filter((p) => p[0] >= x[0] && p[0] <= x[1]);
    let ys = (inside.length ? inside : points).map((p) => p[3] ?? p[1]);
    const aim = this.spec.target?.value, focus = this.spec.focus;
    if (!this.view && !this.log.y && focus !== null) {
      const near = ys.filter((v) => this.spec.target.below ? v <= focus : v >= focus);
      if (near.length) ys = near;
    }
    if (!this.view && aim !== undefined && (!this.log.y || aim > 0)) ys.push(aim);
    const y = this.view?.y ?? this.padded(extent(ys));
    return { x: x[0] < x[1] ? x : [x[0] * 0.9, x[1] * 1.1 + 1e-9], y };
  }

  padded([lo, hi]) {
    // More room on the side where the target has its label.
    const aim = this.view ? null : this.spec.target, below = aim?.below ? 2 : 1, above = aim && !aim.below ? 2 : 1;
    if (this.log.y) return [lo / 1.08 ** below, hi * 1.08 ** above];
    const room = (hi - lo || Math.abs(hi) || 1) * 0.05;
    return [lo >= 0 ? Math.max(0, lo - below * room) : lo - below * room, hi + above * room];
  }

  frame(width, height, domain, shown) {
    const top = 30, bottom = height - 42;
    const y = makeScale(...domain.y, bottom, top, this.log.y);
    const yTicks = ticks(y, this.spec.y.kind, Math.round(height / 45));
    const left = 12 + 7 * Math.max(...yTicks.map((t) => t.text.length), 1);
    // Names of lines that end near the right edge need room there.
    const ends = shown.map((s) => [s.points.at(-1)[0], this.page.runs[s.run].name.length]);
    const late = ends.filter(([v]) => this.log.x || v > domain.x[0] + 0.85 * (domain.x[1] - domain.x[0]));
    const right = width - (width < 560 ? 8 : Math.min(130, 16 + LETTER * Math.max(0, ...late.map((e) => e[1]))));
    const x = makeScale(...domain.x, left, right, this.log.x);
    Object.assign(this, { x, y, box: { left, right, top, bottom, width, height } });
    for (const t of yTicks) {
      svg("line", { class: "grid", x1: left, x2: right, y1: y.at(t.v), y2: y.at(t.v) }, this.svg);
      svg("text", { x: left - 8, y: y.at(t.v) + 4, "text-anchor": "end" }, this.svg, t.text);
    }
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }, this.svg);
    for (const t of ticks(x, this.spec.x.kind, width < 560 ? 4 : 8)) {
      svg("line", { class: "axis", x1: x.at(t.v), x2: x.at(t.v), y1: bottom, y2: bottom + 4 }, this.svg);
      svg("text", { x: x.at(t.v), y: bottom + 18, "text-anchor": "middle" }, this.svg, t.text);
    }
    const named = (axis) => this.spec[axis].label + (this.log[axis] ? ", logarithmic" : "");
    svg("text", { x: 0, y: 12 }, this.svg, named("y"));
    svg("text", { x: right, y: height - 4, "text-anchor": "end" }, this.svg, named("x"));
  }

  // Its name comes before the lines, so that none is hidden, and finds its place after them.
  target() {
    const aim = this.spec.target;
    if (!aim || aim.value < this.y.lo || aim.value > this.y.hi) return null;
    const { left, right } = this.box, y = this.y.at(aim.value);
    svg("line", { class: "target", x1: left, x2: right, y1: y, y2: y }, this.svg);
    return { y, text: svg("text", { class: "aim" }, this.svg, aim.label) };
  }

  line(series, layer) {
    const run = this.page.runs[series.run];
    const group = svg("g", { class: `series s${series.run}${run.dashed ? " dashed" : ""}`, "data-run": series.run }, layer);
    const smooth = series.points.some((p) => p[3] !== null);
    if (smooth) svg("path", { class: "raw", d: this.path(series.points, (p) => p[1]) }, group);
    svg("path", { class: "main", d: this.path(series.points, (p) => (smooth ? p[3] : p[1])) }, group);
    for (const p of series.points) {
      if (!this.usable(p)) continue;
      const px = this.x.at(p[0]), py = this.y.at(smooth ? p[3] : p[1]);
      if (px >= this.box.left - 1 && px <= this.box.right + 1) this.points.push({ series, p, px, py });
      if (this.spec.marks && series.points.length <= 60) {
        svg("path", { class: "mark", d: run.mark, transform: `translate(${px.toFixed(1)} ${py.toFixed(1)})`, "data-x": p[0], "data-y": p[1] }, group);
      }
    }
  }

  // Where one stands on the x axis, and points where lines cross.
  marked(shown, layer) {
    const { here, crossings = [] } = this.spec, { top, bottom } = this.box;
    if (here) svg("line", { class: "cross", x1: this.x.at(here), x2: this.x.at(here), y1: top, y2: bottom }, layer);
    for (const c of crossings.filter((c) => shown.some((s) => s.run === c.run))) {
      svg("circle", { class: `dot s${c.run}`, cx: this.x.at(c.x), cy: this.y.at(c.y), r: 4, "data-x": c.x }, layer);
    }
  }

  path(points, value) {
    let d = "", pen = "M";
    for (const p of points) {
      const v = value(p);
      if (!this.usable(p) || v === null || (this.log.y && v <= 0)) { pen = "M"; continue; }
      d += `${pen}${this.x.at(p[0]).toFixed(1)} ${this.y.at(v).toFixed(1)}`;
      pen = "L";
    }
    return d;
  }

  labels(shown, aim, named) {
    const lines = shown.map((s) => this.points.filter((q) => q.series === s)).filter((line) => line.length);
    const ink = lines.flatMap((line) => sampled(line.map((q) => [q.px, q.py]))), taken = [];
    if (aim) {
      const place = placeAlong(aim.y, aim.text.textContent, this.spec.target.below, ink, this.box);
      fill(aim.text, { x: place.l, y: place.t + 11 }, null, null);
      taken.push(place);
    }
    const winner = this.page.winner; // it has its name on a phone, too
    const ends = lines.map((line) => ({ ...line.at(-1), name: this.page.runs[line[0].series.run].name }))
      .map((end) => ({ ...end, first: end.series.run === winner })).filter((end) => named || end.first);
    for (const { end, x, y } of placeNames(ends, ink, taken, this.box)) {
      svg("text", { class: `end s${end.series.run}`, x, y }, this.svg, end.name);
    }
  }

  // ---- pointing

  where(e) {
    const r = this.svg.getBoundingClientRect();
    return { x: ((e.clientX - r.left) * this.box.width) / r.width, y: ((e.clientY - r.top) * this.box.height) / r.height };
  }

  press(e) {
    if (e.button || !this.box || !this.points.length) return;
    this.drag = { ...this.where(e), touch: e.pointerType !== "mouse" };
    this.svg.setPointerCapture(e.pointerId);
  }

  move(e) {
    if (!this.points.length) return;
    const at = this.where(e);
    if (this.drag && Math.abs(at.x - this.drag.x) > 6) { this.unhover(); return void this.band(at); }
    let best = null, least = Infinity;
    for (const q of this.points) {
      const d = (q.px - at.x) ** 2 + (q.py - at.y) ** 2;
      if (d < least) { least = d; best = q; }
    }
    if (best) this.hover(best);
  }

  release(e) {
    const from = this.drag;
    this.drag = null;
    if (!from || !this.points.length) return;
    const to = this.where(e);
    this.band(null);
    if (Math.abs(to.x - from.x) < 8) return void this.move(e);
    const flat = this.flat(from, to);
    const clamp = (v, lo, hi) => Math.min(hi, Math.max(lo, v));
    const xs = [from.x, to.x].map((px) => this.x.value(clamp(px, this.box.left, this.box.right))).sort((a, b) => a - b);
    const ys = [from.y, to.y].map((px) => this.y.value(clamp(px, this.box.top, this.box.bottom))).sort((a, b) => a - b);
    this.zoom({ x: xs, y: flat ? null : ys });
  }

  // A drag that hardly moves up or down means the x axis only; so does every drag of a finger.
  flat(from, to) { return from.touch || Math.abs(to.y - from.y) < 24; }

  band(to) {
    this.over?.replaceChildren();
    if (!to || !this.drag) return;
    const from = this.drag, b = this.box, flat = this.flat(from, to);
    const [t, u] = flat ? [b.top, b.bottom] : [Math.min(from.y, to.y), Math.max(from.y, to.y)];
    svg("rect", { class: "band", x: Math.min(from.x, to.x), y: t, width: Math.abs(to.x - from.x), height: u - t }, this.over);
  }

  zoom(view) {
    this.view = view;
    this.resetButton.hidden = !view;
    this.draw();
  }

  // Narrower or wider around what is pointed at, or around the middle; wider than all there is means all there is.
  scaleX(factor) {
    const all = extent(this.visible().flatMap((s) => s.points.filter((p) => this.usable(p)).map((p) => p[0])));
    if (!this.box || !all || (factor > 1 && !this.view)) return;
    const { left, right } = this.box, middle = this.at?.px ?? (left + right) / 2;
    const [from, to] = [left, right].map((px) => middle + (px - middle) * factor);
    const [first, last] = all.map(this.x.at);
    if (from < first + 1 && to > last - 1) return void this.zoom(null);
    this.zoom({ x: [from, to].map((px) => this.x.value(factor > 1 ? Math.min(last, Math.max(first, px)) : px)), y: null });
  }

  hover(q) {
    this.at = q;
    const { x, y } = this.spec, run = this.page.runs[q.series.run];
    this.over.replaceChildren();
    svg("line", { class: "cross", x1: q.px, x2: q.px, y1: this.box.top, y2: this.box.bottom }, this.over);
    const others = this.across(q);
    for (const o of others) svg("circle", { class: `dot s${o.series.run}`, cx: q.px, cy: o.py, r: 3 }, this.over);
    svg("circle", { class: `dot s${q.series.run}`, cx: q.px, cy: q.py, r: 5 }, this.over);
    const values = [[y.label, format[y.kind](q.p[1], 4)]];
    if (q.p[3] !== null) values.push(["mean around it", format[y.kind](q.p[3], 4)]);
    values.push([x.label, format[x.kind](q.p[0], 4)]);
    if (x.label !== "step" && q.p[2] !== null) values.push(["step", String(q.p[2])]);
    for (const g of this.svg.querySelectorAll(".series")) g.style.opacity = g.dataset.run === String(q.series.run) ? 1 : 0.45;
    const beside = others.map((o) => [this.page.runs[o.series.run].name, format[y.kind](this.y.value(o.py), 4)]);
    this.tip.show(q.series.run, run.name, values.concat(beside.length ? [["at the same " + (x.label === "step" ? "step" : x.kind === "bytes" || x.kind === "rate" ? x.kind : "time"), ""]] : [], beside), q.px, q.py);
    return `${run.name}: ${values.map((v) => v.join(" ")).join(", ")}`;
  }

  // Where the other lines are at the same x, from the top down: between two points in a straight line.
  across(q) {
    const out = [];
    for (const series of this.visible()) {
      if (series === q.series) continue;
      const line = this.points.filter((p) => p.series === series);
      const k = line.findIndex((p) => p.px >= q.px);
      if (k < 0 || (k === 0 && line[0].px > q.px + 1)) continue;
      const b = line[k], a = line[Math.max(0, k - 1)];
      const py = b.px > a.px ? a.py + ((b.py - a.py) * (q.px - a.px)) / (b.px - a.px) : b.py;
      out.push({ series, py });
    }
    return out.sort((a, b) => a.py - b.py);
  }

  unhover() {
    this.at = null;
    this.tip.hide();
    this.over?.replaceChildren();
    for (const g of this.svg.querySelectorAll(".series")) g.style.opacity = "";
  }

  key(e) {
    if (e.key === "Escape") { this.unhover(); return this.zoom(null); }
    if (e.key === "+" || e.key === "-") return this.scaleX(e.key === "+" ? 0.5 : 2);
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (!step || !this.points.length) return undefined;
    e.preventDefault();
    const lines = [...new Set(this.points.map((q) => q.series))];
    const now = this.at && this.points.includes(this.at) ? this.at : this.points[0];
    const line = lines[(lines.indexOf(now.series) + step[1] + lines.length) % lines.length];
    const along = this.points.filter((q) => q.series === line);
    const i = line === now.series ? along.indexOf(now) + (this.at ? step[0] : 0) : Math.round((along.length - 1) / 2);
    this.page.say(this.hover(along[Math.max(0, Math.min(along.length - 1, i))]));
    return undefined;
  }
}
