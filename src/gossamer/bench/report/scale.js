"use strict";
// Numbers into words and into pixels.

const format = {
  // The same wording as in the tables, with one digit more to spare for a tooltip.
  number(v, digits = 3) {
    if (v === null || v === undefined) return "–";
    if (v < 0) return "\u2212" + format.number(-v, digits);
    if (v === 0) return "0";
    if (v < 0.001 || v >= 1e6) return v.toExponential(digits - 2);
    if (v >= 10 ** (digits - 1) - 0.5) return Math.round(v).toLocaleString("en").replaceAll(",", "\u00a0");
    const shown = Number(v.toPrecision(digits));
    return v.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(shown))));
  },
  seconds(v, digits = 3) {
    if (v === null || v === undefined) return "–";
    return v < 1 ? format.number(v * 1e3, digits) + " ms" : format.number(v, digits) + " s";
  },
  latency(v) { return v < 1e-3 ? format.number(v * 1e6) + " us" : format.seconds(v); },
  bytes(v, digits = 3) {
    if (v < 1000) return Math.round(v) + " B";
    const power = Math.min(4, Math.floor(Math.log10(v) / 3 + 1e-9));
    return format.number(v / 1000 ** power, digits) + " " + UNITS.bytes[power][1];
  },
  count(v) { return String(v); },
  rate(v, digits = 3) {
    const unit = unitFor("rate", v);
    return format.number(v / unit[0], digits) + " " + unit[1];
  },
};

const UNITS = {
  bytes: [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]],
  seconds: [[1e-3, "ms"], [1, "s"], [60, "min"], [3600, "h"]],
  number: [[1, ""]],
  count: [[1, ""]],
  rate: [[1e3, "kbit/s"], [1e6, "Mbit/s"], [1e9, "Gbit/s"], [1e12, "Tbit/s"]],
};

// The largest unit that leaves a handful of whole ones: 172 s stays seconds, 1500 s becomes 25 min.
function unitFor(kind, v) {
  let best = UNITS[kind][0];
  for (const unit of UNITS[kind]) if (v >= unit[0] * (unit[0] === 60 || unit[0] === 3600 ? 10 : 0.999)) best = unit;
  return best;
}

function tickText(v, unit) {
  const scaled = v / unit[0];
  const text = Math.abs(scaled) < 1e-4 && scaled !== 0 ? scaled.toExponential(0) : String(Number(scaled.toPrecision(6)));
  return (text + " " + unit[1]).trim().replace("-", "\u2212");
}

function makeScale(lo, hi, from, to, log) {
  const f = log ? Math.log : (v) => v;
  const back = log ? Math.exp : (v) => v;
  const a = f(lo), b = f(hi), k = (to - from) / (b - a || 1);
  return { lo, hi, log, at: (v) => from + (f(v) - a) * k, value: (px) => back(a + (px - from) / k) };
}

function niceStep(span, count, whole = false) {
  const raw = Math.max(span / Math.max(1, count), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  for (const m of whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]) if (raw <= m * power * 1.0001) return m * power;
  return 10 * power;
}

function ticks(scale, kind, count) {
  const decades = scale.log ? Math.log10(scale.hi / scale.lo) : 0;
  if (decades > 0.7) return logTicks(scale, kind, decades, count);
  const unit = unitFor(kind, Math.max(Math.abs(scale.lo), Math.abs(scale.hi)));
  const step = niceStep((scale.hi - scale.lo) / unit[0], count, kind === "count");
  const out = [];
  for (let i = Math.ceil(scale.lo / unit[0] / step - 1e-9); i * step * unit[0] <= scale.hi * (1 + 1e-9) + 1e-300 && out.length < 50; i++) {
    const v = i * step * unit[0];
    out.push({ v, text: v === 0 && unit[1] ? "0" : tickText(v, unit) });
  }
  return out;
}

function logTicks(scale, kind, decades, count) {
  const wanted = decades > count / 1.6 ? [1] : decades > count / 3.2 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / count));
  const out = [];
  for (let p = Math.floor(Math.log10(scale.lo)); p <= Math.log10(scale.hi); p++) {
    if (p % every) continue;
    for (const m of wanted) {
      const v = m * 10 ** p;
      const unit = kind === "seconds" && v > 0.999 ? UNITS.seconds[1] : unitFor(kind, v); // 1000 s is no whole number of minutes
      if (v >= scale.lo * 0.9999 && v <= scale.hi * 1.0001) out.push({ v, text: tickText(v, unit) });
    }
  }
  return out;
}

function extent(values) {
  let lo = Infinity, hi = -Infinity;
  for (const v of values) { if (v < lo) lo = v; if (v > hi) hi = v; }
  return lo <= hi ? [lo, hi] : null;
}

// One element, its attributes, its place. Text goes in as text, never as markup.
function svg(name, attributes = {}, parent = null, text = null) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, parent, text);
}
function html(name, attributes = {}, parent = null, text = null) {
  return fill(document.createElement(name), attributes, parent, text);
}
function fill(element, attributes, parent, text) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

// The frame of a chart, in the element with an id: its title, caption and tools, and room to draw in.
function addFigure(spec, place) {
  const figure = html("figure", { id: spec.id }, document.getElementById(place));
  const caption = html("figcaption", {}, figure), words = html("div", {}, caption);
  html("h2", {}, words, spec.title);
  html("p", { class: "caption" }, words, spec.caption);
  html("div", { class: "tools" }, caption);
  html("div", { class: "plot" }, figure);
  return figure;
}

// A small card beside the pointer: a name and some values.
class Tip {
  constructor(plot) { this.box = html("div", { class: "tip" }, plot); this.plot = plot; this.hide(); }
  hide() { this.box.hidden = true; }
  show(run, title, values, x, y) {
    this.box.className = "tip s" + run;
    this.box.replaceChildren();
    html("b", {}, this.box, title);
    for (const [label, value] of values) {
      const line = html("div", {}, this.box);
      html("span", {}, line, label);
      html("span", {}, line, value);
    }
    this.box.hidden = false;
    const w = this.box.offsetWidth, h = this.box.offsetHeight;
    const left = x + 16 + w > this.plot.clientWidth ? Math.max(0, x - w - 16) : x + 16;
    this.box.style.transform = `translate(${left}px, ${Math.max(0, y - h - 10)}px)`;
  }
}
