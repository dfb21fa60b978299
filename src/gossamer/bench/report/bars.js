"use strict";
// Where a step's time goes: one bar per run, its parts stacked, a tick for the whole step.

class BarChart {
  constructor(figure, spec, page) {
    Object.assign(this, { spec, page });
    this.plot = figure.querySelector(".plot");
    const keys = html("ul", { class: "parts" });
    spec.parts.forEach((part, k) => html("i", { class: `p${k}` }, html("li", {}, keys)).after(part));
    html("i", { class: "tick" }, html("li", {}, keys)).after("whole step");
    figure.querySelector(".tools").append(keys);
    this.svg = svg("svg", { role: "group", "aria-label": spec.title }, this.plot);
    this.tip = new Tip(this.plot);
    this.svg.addEventListener("pointerleave", () => this.tip.hide());
  }

  draw(width = this.plot.clientWidth) {
    this.svg.replaceChildren();
    this.tip.hide();
    if (!width) return;
    const rows = this.spec.rows.filter((r) => !this.page.hidden.has(r.run));
    const longest = Math.max(...rows.map((r) => this.page.runs[r.run].name.length));
    const narrow = width < 560 || longest > 30; // then names go above their bars
    const pitch = narrow ? 46 : 36, top = 4, bottom = top + pitch * Math.max(1, rows.length);
    fill(this.svg, { viewBox: `0 0 ${width} ${bottom + 34}`, height: bottom + 34 }, null, null);
    if (!rows.length) return void svg("text", { class: "empty", x: width / 2, y: 30, "text-anchor": "middle" }, this.svg, "No recipe selected.");
    const left = narrow ? 1 : 20 + 7.6 * longest;
    const most = Math.max(...rows.map((r) => Math.max(r.total, r.parts.reduce((a, b) => a + b, 0))), 1e-9);
    const x = makeScale(0, most, left, width - 74, false);
    for (const t of ticks(x, "seconds", narrow ? 4 : 7)) {
      svg("line", { class: "grid", x1: x.at(t.v), x2: x.at(t.v), y1: top, y2: bottom }, this.svg);
      svg("text", { x: x.at(t.v), y: bottom + 18, "text-anchor": t.v ? "middle" : narrow ? "start" : "middle" }, this.svg, t.text);
    }
    const hatch = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("defs", {}, this.svg));
    svg("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6 }, hatch);
    rows.forEach((row, i) => this.row(row, x, top + i * pitch, { pitch, narrow, width, left }));
  }

  row(row, x, y, { pitch, narrow, width, left }) {
    const name = this.page.runs[row.run].name;
    const values = row.parts.map((part, k) => [this.spec.parts[k], format.seconds(part)]).concat([["whole step", format.seconds(row.total)]]);
    if (!row.parts.length) values.push(["parts", "not measured apart"]);
    if (row.by_difference) values.push(["wait", "step without compute’s"]);
    const label = `${name}: ${values.map((v) => v.join(" ")).join(", ")}`;
    const group = svg("g", { class: "row", tabindex: "0", role: "img", "aria-label": label, "data-run": row.run, "data-total": row.total }, this.svg);
    svg("rect", { class: "reach", x: 0, y: y + 1, width, height: pitch - 2, rx: 4 }, group);
    const most = Math.floor(width / 7);
    if (narrow) svg("text", { class: "name", x: left, y: y + 15 }, group, name.length > most ? name.slice(0, most - 1) + "…" : name);
    else svg("text", { class: "name", x: left - 12, y: y + pitch / 2 + 4.5, "text-anchor": "end" }, group, name);
    const barY = narrow ? y + 21 : y + pitch / 2 - 8;
    let sum = 0;
    row.parts.forEach((part, k) => {
      const from = x.at(sum), to = x.at((sum += part));
      svg("rect", { class: `part p${k}`, x: from, y: barY, width: Math.max(0, to - from - (k < 2 && to - from > 3 ? 1 : 0)), height: 16, "data-seconds": part }, group);
    });
    if (!row.parts.length) svg("rect", { class: "unsplit", x: left, y: barY, width: x.at((sum = row.total)) - left, height: 16 }, group);
    svg("line", { class: "whole", x1: x.at(row.total), x2: x.at(row.total), y1: barY - 4, y2: barY + 20 }, group);
    svg("text", { class: "value", x: x.at(Math.max(sum, row.total)) + 9, y: barY + 12.5 }, group, format.seconds(row.total));
    const show = () => this.tip.show(row.run, name, values, x.at(sum / 2), y + 4);
    group.addEventListener("pointermove", show);
    group.addEventListener("focus", show);
    group.addEventListener("blur", () => this.tip.hide());
  }
}
