"use strict";
// A plan's page: reads the planner's own grid where the sliders stand, and draws it. There is no model in here.

const plan = JSON.parse(document.getElementById("data").textContent);
const FINE = 16; // places read between two rates of the grid

// Coded seconds of one contender: a step, its work, its network.
const grids = plan.seconds.map((kinds) => kinds.map((text) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)), view = new DataView(bytes.buffer);
  return Float64Array.from({ length: bytes.length / 2 }, (_, i) => {
    const k = view.getUint16(2 * i, true);
    return k && plan.code.smallest * Math.exp((k - 1) / plan.code.steps);
  });
}));

// Between two points of an axis. Steps are sums and maxima of what is proportional to the axes: straight, with a bend where
// something else takes longest. So the lines of both neighbouring cells are prolonged, and the higher one is taken.
function between(xs, ys, x) {
  let i = 0;
  while (i < xs.length - 2 && x > xs[i + 1]) i++;
  const along = (a) => ys[a] + ((ys[a + 1] - ys[a]) * (x - xs[a])) / (xs[a + 1] - xs[a]);
  if (i + 2 >= xs.length) return along(i);
  return Math.min(along(i), Math.max(i ? along(i - 1) : ys[0], along(i + 1)));
}

const axes = { ...plan.axes, slow: plan.axes.rate.map((r) => 1 / r).reverse() }; // seconds of a bit go up

// A contender's seconds at all rates of the grid; null where it cannot run.
function overRates(run, kind, at) {
  const grid = grids[run][kind], { seconds, latency, rate } = axes;
  const start = (s, l) => ((at.hosts * seconds.length + s) * latency.length + l) * rate.length;
  if (!grids[run][0][start(0, 0)]) return null;
  return rate.map((_, r) => between(latency, latency.map((_, l) => between(seconds, seconds.map((_, s) => grid[start(s, l) + r]), at.seconds)), at.latency));
}

const atRate = (values, rate) => between(axes.slow, values.toReversed(), 1 / rate);

// A contender's step, work and network; null where it cannot run.
function read(run, at) {
  const found = [0, 1, 2].map((kind) => overRates(run, kind, at));
  return found[0] && found.map((values) => Math.max(0, atRate(values, at.rate)));
}

// ---- the sentence of the nearest point, with numbers of this place

function nearest(values, x, log) {
  const f = log ? (v) => Math.log(Math.max(v, 1e-6)) : (v) => v;
  return values.reduce((best, v, i) => (Math.abs(f(v) - f(x)) < Math.abs(f(values[best]) - f(x)) ? i : best), 0);
}

function verdict(at, steps) {
  const { seconds, latency, rate } = axes;
  const s = nearest(seconds, at.seconds, true), l = nearest(latency, at.latency, true), r = nearest(rate, at.rate, true);
  const [kind, best] = plan.kinds[plan.verdicts[((at.hosts * seconds.length + s) * latency.length + l) * rate.length + r]];
  const dense = steps[0], step = steps[plan.runs.findIndex((run) => run.name === best)]?.[0];
  // A small gain is one on DDP in bf16, or on DDP where the model is narrow itself; of shards on the quickest baseline.
  const narrow = plan.runs.findLastIndex((run, i) => i < plan.baselines && ["ddp", "ddp-bf16"].includes(run.name));
  const base = narrow < 0 ? Math.min(...steps.slice(0, plan.baselines).map((b) => b[0])) : steps[narrow][0];
  const gain = kind === "hidden" ? (dense[1] + dense[2]) / dense[0] : 1 - step / base;
  const values = { best, gain: Math.round(100 * Math.max(0, gain)) + "%", step: format.seconds(step), base: format.seconds(dense[0]) };
  return plan.sentences[kind].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

// ---- rates at which a recipe pays

const fine = axes.rate.flatMap((r, i) => (i + 1 < axes.rate.length ? Array.from({ length: FINE }, (_, k) => r * (axes.rate[i + 1] / r) ** (k / FINE)) : [r]));

// Where a ratio falls below, or rises above, one less a tie: [[from, to], ...] as places among the rates.
function paying(ratios) {
  const gains = ratios.map((v) => v < 1 - plan.tie), out = [];
  gains.forEach((g, i) => {
    if (g && !gains[i - 1]) out.push([i, i]);
    if (g) out.at(-1)[1] = i;
  });
  return out;
}

function said([from, to]) {
  const last = fine.length - 1;
  if (to === last) return from ? `above ${format.rate(fine[from])}` : "any rate";
  return from ? `${format.rate(fine[from])} to ${format.rate(fine[to])}` : `below ${format.rate(fine[to])}`;
}

(() => {
  const spoken = document.getElementById("say");
  const page = { runs: plan.runs, winner: null, hidden: new Set(plan.runs.map((_, i) => i).filter((i) => !plan.shown.includes(i))), say: (text) => { spoken.textContent = text; } };
  const at = { ...plan.at };

  const bars = new BarChart(addFigure(plan.charts[0], "bars"), plan.charts[0], { ...page, hidden: new Set() });
  const curve = new LineChart(addFigure(plan.charts[1], "curve"), plan.charts[1], page);

  function update() {
    const steps = plan.runs.map((_, run) => read(run, at));
    document.getElementById("verdict").textContent = verdict(at, steps);
    const ran = steps.flatMap((step, run) => (step ? [{ run, total: step[0], parts: [Math.max(0, step[0] - step[1] - step[2]), step[1], step[2]] }] : []));
    const fastest = ran.reduce((a, b) => (b.total < a.total ? b : a));
    document.getElementById("steps").textContent = `${plan.runs[0].name} takes ${format.seconds(steps[0][0])} a step, ${plan.runs[fastest.run].name} ${format.seconds(fastest.total)}.`;
    bars.spec.rows = ran.sort((a, b) => a.total - b.total);
    page.winner = bars.page.winner = fastest.run;
    cross();
    draw();
  }

  // The lines over the rate, their crossing points, and the table of rates.
  function cross() {
    const lines = plan.runs.map((_, run) => {
      const values = overRates(run, 0, at);
      return values && fine.map((rate) => atRate(values, rate));
    });
    curve.spec.series = lines.flatMap((line, run) => (line ? [{ run, points: fine.map((rate, i) => [rate, line[i], null, null]) }] : []));
    curve.spec.here = at.rate;
    curve.spec.crossings = [];
    for (const row of document.querySelectorAll("#crossings tbody tr")) {
      const run = Number(row.dataset.run);
      for (let base = 0; base < plan.baselines; base++) {
        const found = lines[run] ? paying(lines[run].map((v, i) => v / lines[base][i])) : [];
        row.cells[base + 1].textContent = lines[run] ? found.map(said).join(", ") || "–" : "cannot run";
        if (base) continue;
        for (const k of found.flat()) if (k && k < fine.length - 1) curve.spec.crossings.push({ run, x: fine[k], y: lines[run][k] });
      }
    }
  }

  function draw(width) { bars.draw(width); curve.draw(width); }

  // ---- sliders: logarithms, but hosts

  const shown = { rate: format.rate, latency: format.latency, seconds: format.seconds, hosts: (i) => String(axes.hosts[i]) };
  const reach = { rate: [axes.rate[0], axes.rate.at(-1)], latency: [1e-5, axes.latency.at(-2)], seconds: [axes.seconds[0], axes.seconds.at(-1)] };
  for (const slider of document.querySelectorAll("#sliders input")) {
    const name = slider.name, log = name !== "hosts";
    const [lo, hi] = log ? reach[name].map(Math.log) : [0, axes.hosts.length - 1];
    Object.assign(slider, { min: lo, max: hi, step: log ? (hi - lo) / 400 : 1 });
    slider.value = log ? Math.log(at[name]) : at[name];
    const tell = () => { slider.parentElement.querySelector("output").textContent = shown[name](at[name]); slider.setAttribute("aria-valuetext", shown[name](at[name])); };
    slider.addEventListener("input", () => {
      at[name] = log ? Math.exp(Number(slider.value)) : Number(slider.value);
      tell();
      update();
    });
    tell();
  }
  document.getElementById("sliders").addEventListener("submit", (e) => e.preventDefault());

  const chips = [...document.querySelectorAll("#legend .chip")];
  const press = () => { for (const chip of chips) chip.setAttribute("aria-pressed", !page.hidden.has(Number(chip.dataset.run))); };
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      const run = Number(chip.dataset.run);
      if (!page.hidden.delete(run)) page.hidden.add(run);
      press();
      curve.draw();
    });
  }
  press();
  update();
  window.addEventListener("resize", () => draw());
  window.addEventListener("beforeprint", () => draw(680));
  window.addEventListener("afterprint", () => draw());
})();
