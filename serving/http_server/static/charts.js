// Charts of the last minutes. The x axis is in seconds before now.

import { color, element } from "./devices.js";

const LENGTH_S = 300;
const HEIGHT = 112;
const AXIS_WIDTH = 52;

export function formatTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

// Return a label of an axis: no zeros after the point, and nothing at 0, where the labels of both axes would touch.
function axisLabel(format, value) {
  return value ? format(value).replace(/\.?0+(?= )/, (end) => (end.startsWith(".") ? "" : end)) : "";
}

const formatCount = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: 0 }));

const CHARTS = [
  // The least height keeps the labels whole numbers that differ.
  { title: "Tokens/s", format: formatCount, least: 4, series: [{ name: "generated", column: 1, color: "--accent", fill: true }] },
  {
    title: "TTFT",
    format: formatTime,
    series: [
      { name: "median", column: 2, color: "--accent", dots: true },
      { name: "longest", column: 3, color: "--warn", dots: true },
    ],
  },
  {
    title: "ITL",
    format: formatTime,
    series: [
      { name: "median", column: 4, color: "--accent" },
      { name: "p99", column: 5, color: "--warn" },
    ],
  },
];

class Chart {
  constructor(root, { title, format, series, least = 0 }, bands) {
    this.format = format;
    this.least = least;
    this.series = series;
    this.bands = bands;
    this.root = root.appendChild(element("div", "", "chart"));
    const head = this.root.appendChild(element("div", "", "title"));
    head.append(element("b", title));
    const legend = head.appendChild(element("ul", "", "legend"));
    for (const each of series) {
      const item = legend.appendChild(element("li"));
      const swatch = item.appendChild(element("i"));
      swatch.style.background = `var(${each.color})`;
      item.append(each.name);
    }
    this.value = head.appendChild(element("span"));
    this.body = this.root.appendChild(element("div"));
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "img");
    this.body.setAttribute("aria-label", `${title} in the last five minutes. Arrow keys move along the time.`);
    this.title = title;
    this.data = [[], ...series.map(() => [])];
    this.body.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -LENGTH_S, End: LENGTH_S }[event.key];
      if (step === undefined || !this.data[0].length) return;
      event.preventDefault();
      const last = this.data[0].length - 1;
      const index = Math.min(Math.max((this.plot.cursor.idx ?? last + 1) + step, 0), last);
      this.plot.setCursor({ left: this.plot.valToPos(this.data[0][index], "x"), top: 10 });
    });
    this.body.addEventListener("blur", () => this.plot.setCursor({ left: -10, top: -10 }));
    this.make();
    new ResizeObserver(() => this.plot.setSize({ width: this.body.clientWidth, height: HEIGHT })).observe(this.body);
  }

  make() {
    this.plot?.destroy();
    const grid = { stroke: color("--line"), width: 1 };
    const axis = { stroke: color("--dim"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new window.uPlot(
      {
        width: this.body.clientWidth || 300,
        height: HEIGHT,
        legend: { show: false },
        padding: [6, 12, 0, 0],
        cursor: { sync: { key: "time" }, drag: { x: false, y: false }, y: false, points: { size: 5 } },
        scales: {
          x: { time: false, range: [-LENGTH_S, 0] },
          y: { range: (_, low, high) => [0, Math.max(high > 0 ? high * 1.12 : 1, this.least)] },
        },
        axes: [
          {
            ...axis,
            size: 18,
            gap: 2,
            splits: () => [-300, -240, -180, -120, -60, 0],
            values: (_, splits) => splits.map((seconds) => (seconds ? `${seconds / 60} min`.replace("-", "−") : "now")),
          },
          { ...axis, size: AXIS_WIDTH, gap: 4, space: 28, values: (_, splits) => splits.map((value) => axisLabel(this.format, value)) },
        ],
        series: [
          {},
          ...this.series.map((each) => ({
            stroke: color(each.color),
            width: 1.25,
            fill: each.fill ? `${color(each.color)}22` : undefined,
            paths: each.dots ? () => null : undefined,
            points: each.dots ? { show: true, size: 4, fill: color(each.color) } : { show: false },
          })),
        ],
        hooks: {
          drawClear: [(plot) => this.shade(plot)],
          setCursor: [() => this.read()],
        },
      },
      this.data,
      this.body,
    );
  }

  // Shade the times of changes.
  shade(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = color("--band");
    for (const [start, end] of this.bands()) {
      if (end < -LENGTH_S) continue;
      const left = plot.valToPos(Math.max(start, -LENGTH_S), "x", true), right = plot.valToPos(Math.min(end, 0), "x", true);
      ctx.fillRect(left, bbox.top, Math.max(right - left, 2), bbox.height);
    }
    ctx.restore();
  }

  update(rows) {
    this.data = [rows.map(({ at }) => at), ...this.series.map(({ column }) => rows.map(({ values }) => values?.[column] ?? null))];
    this.plot.setData(this.data);
    this.read();
  }

  read() {
    const index = this.plot?.cursor.idx;
    if (index === null || index === undefined || this.plot.cursor.left < 0) {
      this.value.textContent = "";
      return;
    }
    const values = this.series.map((_, number) => this.format(this.data[number + 1][index]));
    this.value.textContent = `${-this.data[0][index]} s ago: ${values.join(", ")}`;
  }
}

export class Charts {
  constructor() {
    this.rows = new Map();
    this.changes = [];
    this.now = 0;
    const root = document.getElementById("charts");
    const bands = () => this.changes.map(([start, end]) => [start - this.now, (end ?? this.now) - this.now]);
    this.charts = CHARTS.map((settings) => new Chart(root, settings, bands));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of this.charts) chart.make();
    });
  }

  // Add rows [second, tokens, TTFT median, TTFT maximum, ITL median, ITL p99].
  add(seconds) {
    for (const row of seconds) this.rows.set(row[0], row);
  }

  // Draw the five minutes before `now`. `changes` has [start, end] of each change; end is null for the present ones.
  draw(now, changes) {
    this.now = Math.floor(now) - 1;
    this.changes = changes;
    for (const second of this.rows.keys()) if (second < this.now - LENGTH_S) this.rows.delete(second);
    const rows = [];
    for (let at = -LENGTH_S; at <= 0; at += 1) rows.push({ at, values: this.rows.get(this.now + at) });
    for (const chart of this.charts) chart.update(rows);
  }

  // Return the latest value of a column in the last minute; null if there is none.
  latest(column) {
    for (let second = this.now; second > this.now - 60; second -= 1) {
      const value = this.rows.get(second)?.[column];
      if (value !== null && value !== undefined) return value;
    }
    return null;
  }

  // Return the mean of a column over the last `length` seconds.
  mean(column, length) {
    let sum = 0;
    for (let second = this.now; second > this.now - length; second -= 1) sum += this.rows.get(second)?.[column] ?? 0;
    return sum / length;
  }
}
