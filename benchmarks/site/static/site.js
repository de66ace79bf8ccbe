"use strict";
// Sorting, filtering and charts. Every number is in the page without this.

const WIDE = 480; // pixels of a chart that has room for words along its lines
const table = document.getElementById("matrix");
if (table) matrix(table, document.getElementById("filter"), document.getElementById("matching"));
document.querySelectorAll(".plot").forEach(draw);

/** What is chosen is in the address, so that it can be kept, sent, and gone back from. */
function matrix(table, filter, matching) {
  const body = table.tBodies[0];
  const heads = [...table.querySelectorAll("th[data-column]")];
  const rows = [...body.rows];

  function show() {
    const asked = new URLSearchParams(location.search);
    const at = heads.findIndex((head) => head.dataset.column === asked.get("sort"));
    const down = asked.get("order") === "down";
    heads.forEach((head, place) => {
      if (place === at) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.append(...(at < 0 ? rows : sorted(rows, at, down)));
    const part = (asked.get("models") ?? "").toLowerCase();
    rows.forEach((row) => { row.hidden = !row.dataset.model.toLowerCase().includes(part); });
    matching.textContent = part ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
    if (document.activeElement !== filter) filter.value = asked.get("models") ?? "";
  }

  function ask(change, isNew) {
    const asked = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(change)) {
      if (value) asked.set(key, value);
      else asked.delete(key);
    }
    const address = `${location.pathname}${asked.size ? `?${asked}` : ""}${location.hash}`;
    history[isNew ? "pushState" : "replaceState"](null, "", address);
    show();
  }

  heads.forEach((head) => head.querySelector("button").addEventListener("click", () => {
    const first = head.dataset.column === "model" ? "up" : "down";
    const now = { ascending: "up", descending: "down" }[head.getAttribute("aria-sort")];
    const order = now === undefined ? first : now === "up" ? "down" : "up";
    ask({ sort: head.dataset.column, order }, true);
  }));
  filter.addEventListener("input", () => ask({ models: filter.value }, false));
  addEventListener("popstate", () => { filter.blur(); show(); });
  show();
}

/** What has no number comes last, whichever way. */
function sorted(rows, at, down) {
  const value = (row) => (at ? row.cells[at].dataset.sort : row.dataset.model);
  const compare = (a, b) => (at ? a - b : a < b ? -1 : Number(a > b));
  return [...rows].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    return down ? compare(b, a) : compare(a, b);
  });
}

/** A chart of a model over the commits that were measured. */
function draw(plot) {
  const chart = JSON.parse(plot.querySelector("script").textContent);
  const section = plot.closest(".chart");
  const readout = section.querySelector(".readout");
  const at = chart.commits.map((_, place) => place);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let picture;

  function make() {
    picture?.destroy();
    const [text, line] = [colour("--text"), colour("--line")];
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui" };
    picture = new uPlot({
      width: plot.clientWidth,
      height: plot.clientHeight,
      legend: { show: false },
      padding: [10, 40, 0, 0], // half of the last label
      cursor: { drag: { x: false, y: false }, points: { size: 8 } },
      scales: { x: { time: false, range: [-0.5, at.length - 0.5] }, y: { range: around } },
      axes: [
        { ...axis, size: 46, space: 84, incrs: [1, 2, 3, 5, 10, 20, 50, 100], values: (_, places) => places.map(label) },
        { ...axis, size: 80, values: (_, values) => values.map((value) => `${+value.toPrecision(4)} ${chart.unit}`) },
      ],
      series: [{}, ...chart.series.map(lineOf)],
      hooks: { draw: [markSteps], setCursor: [tell] },
    }, [at, ...chart.series.map((each) => each.values)], plot);
  }

  function label(place) {
    const commit = chart.commits[place];
    return commit ? `${commit[1].slice(5)}\n${commit[0]}` : "";
  }

  function around(_, least, most) {
    const room = (most - least || most || 1) * 0.08;
    return [Math.max(0, least - room), most + room];
  }

  function lineOf(each) {
    const isShown = section.querySelector(`[data-line="${chart.series.indexOf(each) + 1}"]`).ariaPressed !== "false";
    const stroke = colour(`--slot-${Math.min(each.slot, 11)}`);
    const dash = each.dash ? [6, 4] : undefined;
    return { label: each.name, stroke, dash, width: 2, spanGaps: true, show: isShown, points: { show: true, size: 6, fill: stroke } };
  }

  function markSteps(u) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--quiet");
    ctx.font = `${11 * ratio}px system-ui`;
    [ctx.textAlign, ctx.textBaseline] = ["left", "bottom"];
    for (const place of chart.steps) {
      const x = u.valToPos(place, "x", true);
      ctx.setLineDash([3 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (plot.clientWidth < WIDE) continue; // it would lie over the lines, and the table names it
      ctx.save();
      ctx.translate(x - 4 * ratio, bbox.top + bbox.height - 4 * ratio);
      ctx.rotate(-Math.PI / 2);
      ctx.fillText(cut(chart.commits[place][2], 46), 0, 0);
      ctx.restore();
    }
    ctx.restore();
  }

  function tell(u) {
    const place = u.cursor.idx;
    if (place == null || !chart.commits[place]) return;
    const [short, date, subject] = chart.commits[place];
    const values = chart.series.filter((each) => each.values[place] != null)
      .map((each) => `${each.name} ${+each.values[place].toPrecision(3)} ${chart.unit}`);
    readout.textContent = `${short}, ${date}, ${subject}: ${values.join(" · ")}`;
  }

  section.querySelectorAll("[data-line]").forEach((button) => button.addEventListener("click", () => {
    const isShown = button.ariaPressed === "false";
    button.ariaPressed = String(isShown);
    picture.setSeries(Number(button.dataset.line), { show: isShown });
  }));
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.min(at.length - 1, Math.max(0, (picture.cursor.idx ?? -1) + step));
    picture.setCursor({ left: picture.valToPos(next, "x"), top: 20 });
  });
  new ResizeObserver(() => picture.setSize({ width: plot.clientWidth, height: plot.clientHeight })).observe(plot);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", make);
  make();
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
