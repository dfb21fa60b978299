"use strict";
// Where names go in a chart: they cover as little of the lines as can be, and never each other.

const LETTER = 7.4, HIGH = 14; // pixels

const touches = (a, b) => a.l < b.r && b.l < a.r && a.t < b.b && b.t < a.b;
const covered = (b, ink) => ink.filter(([x, y]) => x > b.l - 3 && x < b.r + 3 && y > b.t + 1 && y < b.b - 1).length;

// The name of a level line: at its right end if nothing is in the way there.
function placeAlong(y, name, below, ink, box) {
  const w = 6.6 * name.length;
  const tops = below ? [y + 4, y - HIGH - 3] : [y - HIGH - 3, y + 4];
  const places = [0, 0.5, 1].flatMap((k) => tops.map((t, i) => {
    const l = box.right - w - k * (box.right - box.left - w);
    return { l, r: l + w, t, b: t + HIGH, bias: k + 0.6 * i };
  }));
  return places.map((p) => ({ ...p, cost: p.bias + covered(p, ink) })).sort((a, b) => a.cost - b.cost)[0];
}

// Names at the ends of lines, [{ px, py, name, ... }]; none where there is no room, for the legend has them all.
function placeNames(ends, ink, taken, box) {
  const inside = (b) => b.l > box.left && b.r < box.width + 4 && b.t > 14 && b.b < box.bottom + 2;
  const out = [];
  // Whoever ends furthest right has the most room; the crowd at the left takes what it finds.
  for (const end of [...ends].sort((a, b) => Boolean(b.first) - Boolean(a.first) || b.px - a.px)) {
    const free = spots(end, LETTER * end.name.length).filter((b) => inside(b) && !taken.some((o) => touches(b, o)));
    const best = free.map((b) => ({ ...b, cost: b.cost + covered(b, ink) })).sort((a, b) => a.cost - b.cost)[0];
    if (!best || (best.cost > 3 && !end.first)) continue;
    taken.push({ l: best.l - 8, r: best.r + 8, t: best.t, b: best.b });
    out.push({ end, x: best.l, y: best.t + 11 });
  }
  return out;
}

// Right of the end, a little above or below it, or under it.
function spots({ px, py }, w) {
  const right = [0, -8, 8, -14, 14].map((dy, i) => ({ l: px + 9, t: py + dy - HIGH / 2, cost: 0.4 * i }));
  const under = [{ l: px - w / 2, t: py + 8, cost: 2.5 }, { l: px - w - 9, t: py + 4, cost: 3 }, { l: px - w, t: py + 12, cost: 3.2 }];
  const over = [{ l: px - w, t: py - 20, cost: 3.4 }];
  return [...right, ...under, ...over].map((b) => ({ ...b, r: b.l + w, b: b.t + HIGH }));
}

// A point every few pixels along a line: where its ink is.
function sampled(line) {
  const out = line.slice(0, 1);
  for (let i = 1; i < line.length; i++) {
    const [x0, y0] = line[i - 1], [x1, y1] = line[i];
    const n = Math.min(100, Math.max(1, Math.ceil(Math.hypot(x1 - x0, y1 - y0) / 8)));
    for (let k = 1; k <= n; k++) out.push([x0 + ((x1 - x0) * k) / n, y0 + ((y1 - y0) * k) / n]);
  }
  return out;
}
