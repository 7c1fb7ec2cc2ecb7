// Line charts with axes over the router's history of the load, and small ones for the workers.

const GUTTER = { left: 54, right: 10, top: 8, bottom: 20 };
const BRIDGED_S = 30; // a longer gap between two known points interrupts a line
const history = { first: 0, last: -1, every: 2, kept: 450, router: {}, workers: new Map(), minutes: 15 };

const CHARTS = [
  { title: "Output", unit: "tok/s", format: count, least: 3, series: [["output_tokens_per_s", "tokens", 1]], area: true },
  { title: "Requests", unit: "", format: count, least: 3, series: [["running", "running", 1], ["queued", "queued", 2]], area: true },
  { title: "First token", unit: "", format: (us) => ms(us / 1000), least: 3000, series: [["ttft_p50_us", "p50", 1], ["ttft_p95_us", "p95", 2]] },
  { title: "Per token", unit: "", format: (us) => ms(us / 1000), least: 3000, series: [["gap_p50_us", "p50", 3]] },
];

/** Takes what /history told: all points, or those after `history.last`. */
function remember(told) {
  const isNext = told.first === history.last + 1;
  const joined = (before, values) => (isNext && before ? [...before, ...values] : values).slice(-told.points_kept);
  Object.assign(history, { last: told.last, every: told.every_s, kept: told.points_kept });
  for (const [name, values] of Object.entries(told.router)) history.router[name] = joined(history.router[name], values);
  const length = history.router.running?.length ?? 0;
  const workers = new Map();
  for (const { instance, role, series } of told.workers) {
    const before = history.workers.get(instance)?.series ?? {};
    const made = {};
    for (const [name, values] of Object.entries(series)) {
      const all = joined(before[name], values);
      made[name] = [...new Array(Math.max(0, length - all.length)).fill(null), ...all];
    }
    workers.set(instance, { role, series: made });
  }
  history.workers = workers;
}

const latest = (values) => (values?.length ? values[values.length - 1] : null);
const shown = (values) => (values ?? []).slice(-Math.round((history.minutes * 60) / history.every));

/** About `wanted` round steps from 0 up to at least `most`: [step, number of steps]. */
function steps(most, wanted = 3) {
  const rough = Math.max(most, 1e-9) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? 10 * power;
  return [step, Math.max(1, Math.ceil(most / step))];
}

/** The path of known points; `x` and `y` place them. */
function pathOf(values, x, y) {
  const bridged = BRIDGED_S / history.every;
  let path = "";
  let last = -Infinity;
  values.forEach((value, i) => {
    if (value === null) return;
    path += `${i - last > bridged ? "M" : "L"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    if (i - last > bridged) path += "h0";
    last = i;
  });
  return path;
}

/** The closed areas below a line without unknown points in between. */
function areaOf(values, x, y, base) {
  let path = "";
  let start = -1;
  for (let i = 0; i <= values.length; i += 1) {
    const isKnown = i < values.length && values[i] !== null;
    if (isKnown && start < 0) {
      start = i;
      path += `M${x(i).toFixed(1)} ${base}`;
    }
    if (isKnown) path += `L${x(i).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    else if (start >= 0) {
      path += `L${x(i - 1).toFixed(1)} ${base}Z`;
      start = -1;
    }
  }
  return path;
}

class Chart {
  constructor(plan) {
    this.plan = plan;
    this.cursor = null; // points from the right at which the pointer or the keyboard is
    this.root = element("figure", "", "chart card");
    this.root.style.margin = "0";
    const head = element("div", "", "head");
    this.name = plan.unit ? `${plan.title}, ${plan.unit}` : plan.title;
    head.append(element("h3", this.name));
    this.legend = head.appendChild(element("figcaption", "", "legend"));
    this.values = plan.series.map(([, name, ink]) => {
      const item = this.legend.appendChild(element("span"));
      item.append(element("span", "", `swatch ink-${ink}`), plan.series.length > 1 ? `${name} ` : "", element("b"));
      return item.lastChild;
    });
    this.when = this.legend.appendChild(element("span"));
    this.svg = shape("svg", { role: "img", tabindex: "0", "aria-label": this.name }); // until it is drawn
    this.root.append(head, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  get points() {
    return Math.round((history.minutes * 60) / history.every);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - GUTTER.left) / (box.width - GUTTER.left - GUTTER.right);
    this.move(Math.round((1 - Math.min(1, Math.max(0, share))) * (this.points - 1)));
  }

  key(event) {
    const by = { ArrowLeft: 1, ArrowRight: -1, PageUp: 15, PageDown: -15 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.move(Math.min(this.points - 1, Math.max(0, (this.cursor ?? 0) + by)));
  }

  move(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const all = this.plan.series.map(([name]) => shown(history.router[name]));
    const n = this.points;
    const right = width - GUTTER.right;
    const base = height - GUTTER.bottom;
    const [step, number] = steps(Math.max(this.plan.least, ...all.flat().filter((v) => v !== null)));
    const x = (i) => right - ((right - GUTTER.left) * (n - 1 - i)) / (n - 1);
    const y = (value) => base - ((base - GUTTER.top) * value) / (step * number);
    const parts = [];
    for (let k = 0; k <= number; k += 1) {
      const level = y(k * step);
      parts.push(shape("line", { x1: GUTTER.left, x2: right, y1: level, y2: level }, "grid"));
      const label = shape("text", { x: GUTTER.left - 6, y: level + 4, "text-anchor": "end" }, "axis");
      label.textContent = k === 0 ? "0" : this.plan.format(k * step).replace(".0 ", " ").replace(".00 ", " ");
      parts.push(label);
    }
    for (let k = 0; k <= 3; k += 1) {
      const anchor = k === 3 ? "end" : k === 0 ? "start" : "middle";
      const label = shape("text", { x: GUTTER.left + ((right - GUTTER.left) * k) / 3, y: height - 5, "text-anchor": anchor }, "axis");
      const minutes = (history.minutes * (3 - k)) / 3;
      label.textContent = k === 3 ? "now" : minutes >= 1 ? `−${Math.round(minutes * 10) / 10} min` : `−${Math.round(minutes * 60)} s`;
      parts.push(label);
    }
    all.forEach((values, s) => {
      const group = shape("g", {}, `ink-${this.plan.series[s][2]}`);
      const place = (i) => x(i + n - values.length);
      if (this.plan.area && s === 0) group.append(shape("path", { d: areaOf(values, place, y, base) }, "area"));
      group.append(shape("path", { d: pathOf(values, place, y) }, "line"));
      const value = this.cursor === null ? null : values[values.length - 1 - this.cursor] ?? null;
      if (value !== null) group.append(shape("circle", { cx: x(n - 1 - this.cursor), cy: y(value), r: 3.5 }, "point"));
      parts.push(group);
    });
    if (this.cursor !== null) {
      const line = x(n - 1 - this.cursor);
      parts.push(shape("line", { x1: line, x2: line, y1: GUTTER.top, y2: base }, "cross"));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
    this.tell(all);
  }

  tell(all) {
    const words = all.map((values, s) => {
      const value = this.cursor === null ? newest(values) : values[values.length - 1 - this.cursor] ?? null;
      const text = value === null ? none : this.plan.format(value);
      write(this.values[s], text);
      return this.plan.series.length > 1 ? `${this.plan.series[s][1]} ${text}` : text;
    });
    const when = this.cursor ? `${age(this.cursor * history.every)} ago` : "now";
    write(this.when, this.cursor ? when : "");
    this.svg.setAttribute("aria-label", `${this.name}: ${words.join(", ")}, ${when}`);
  }
}

/** The newest known value of the last half minute. */
function newest(values) {
  for (let i = values.length - 1; i >= Math.max(0, values.length - 15); i -= 1) {
    if (values[i] !== null) return values[i];
  }
  return null;
}

/** A chart without axes; `most` of null takes the largest value. Returns that. */
function spark(svg, values, most) {
  const top = most ?? Math.max(1, ...values.filter((v) => v !== null));
  const n = Math.max(2, Math.round((history.minutes * 60) / history.every));
  const x = (i) => (100 * (i + n - values.length)) / (n - 1);
  const y = (value) => 29 - (27 * Math.min(value, top)) / top;
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  const line = shape("path", { d: pathOf(values, x, y), "vector-effect": "non-scaling-stroke", stroke: "currentColor" }, "line");
  svg.replaceChildren(shape("path", { d: areaOf(values, x, y, 30) }, "area"), line);
  return top;
}

const charts = CHARTS.map((plan) => new Chart(plan));
at("charts").append(...charts.map((chart) => chart.root));

function showCharts() {
  for (const chart of charts) chart.draw();
  const output = newest(history.router.output_tokens_per_s ?? []);
  write(at("tokens"), output === null ? none : count(output));
  const ttft = newest(history.router.ttft_p50_us ?? []);
  write(at("ttft"), ttft === null ? none : ms(ttft / 1000));
}

for (const button of document.querySelectorAll(".spans button")) {
  button.addEventListener("click", () => {
    history.minutes = Number(button.dataset.minutes);
    for (const other of document.querySelectorAll(".spans button")) other.setAttribute("aria-pressed", `${other === button}`);
    showCharts();
    showWorkerCharts();
  });
}
