"use strict";
// The page: charts from the data, one legend for all of them, light and dark, print.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const spoken = document.getElementById("say");
  const page = { runs: data.runs, winner: data.winner, hidden: new Set(), say: (text) => { spoken.textContent = text; } };
  const charts = data.charts.map(addChart);

  function addChart(spec) {
    return new (spec.kind === "bars" ? BarChart : LineChart)(addFigure(spec, "charts"), spec, page);
  }

  function drawAll(width) { for (const chart of charts) chart.draw(width); }

  // ---- legend

  const chips = [...document.querySelectorAll("#legend .chip")];
  const all = document.getElementById("all");

  function update() {
    for (const chip of chips) chip.setAttribute("aria-pressed", !page.hidden.has(Number(chip.dataset.run)));
    for (const row of document.querySelectorAll("tr[data-run]")) row.classList.toggle("off", page.hidden.has(Number(row.dataset.run)));
    for (const head of document.querySelectorAll("[data-column]")) head.classList.toggle("off", page.hidden.has(Number(head.dataset.column)));
    if (all) all.hidden = !page.hidden.size;
    drawAll();
  }

  for (const chip of chips) {
    const run = Number(chip.dataset.run);
    chip.addEventListener("click", () => {
      if (!page.hidden.delete(run)) page.hidden.add(run);
      update();
    });
    chip.addEventListener("dblclick", () => {
      page.hidden = new Set(data.runs.map((_, i) => i).filter((i) => i !== run));
      update();
    });
  }
  all?.addEventListener("click", () => { page.hidden.clear(); update(); });

  // ---- tables sort by any column: first upwards, then downwards, then as they came

  for (const table of document.querySelectorAll("table.sorts")) {
    const body = table.tBodies[0], came = [...body.rows];
    const value = (row, k) => {
      const cell = row.cells[k], v = cell.dataset.v;
      return v === undefined ? cell.textContent.trim() : v === "" ? null : Number(v);
    };
    [...table.tHead.rows[0].cells].forEach((head, k) => {
      const button = html("button", { type: "button", class: "sort", title: "Sort by this column" });
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[head.ariaSort ?? "none"];
        for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
        head.ariaSort = next;
        const sign = next === "descending" ? -1 : 1;
        const rows = next === "none" ? came : [...came].sort((a, b) => {
          const x = value(a, k), y = value(b, k);
          if (x === null || y === null) return (x === null) - (y === null); // what is not known is last, either way
          return sign * (typeof x === "number" ? x - y : x.localeCompare(y));
        });
        body.append(...rows);
        page.say(`Sorted by ${button.textContent.trim()}, ${next}`);
      });
    });
  }

  // ---- light and dark

  const theme = document.getElementById("theme");
  const next = { auto: "light", light: "dark", dark: "auto" };

  function setTheme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
    // A page opened from a disk may have no storage; then the choice lasts as long as the page.
    try { localStorage.setItem("gossamer-theme", name); } catch { /* not kept */ }
  }

  theme.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "auto";
    setTheme(next[now]);
  });
  try { if (localStorage.getItem("gossamer-theme") in next) setTheme(localStorage.getItem("gossamer-theme")); } catch { /* auto */ }

  // ---- the rest

  document.getElementById("copy").addEventListener("click", async (e) => {
    const command = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      e.target.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command); // then the reader's own keys can copy it
      e.target.textContent = "Selected";
    }
    setTimeout(() => { e.target.textContent = "Copy"; }, 1500);
  });

  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    drawAll();
  }).observe(document.getElementById("charts"));
  window.addEventListener("beforeprint", () => drawAll(680));
  window.addEventListener("afterprint", () => drawAll());
})();
