// Shows /status and /requests, once a second while somebody looks. What comes is data and becomes text, never markup.

const EVERY_MS = 1000;
const WINDOW_MS = 5000; // of a rate
const POINTS = 90; // of a line
const ROWS = 30;
const SHORT = 8; // digits of an id
const THEMES = ["auto", "light", "dark"];
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);
const seen = { rates: new Map(), lines: new Map(), isPaused: false, timer: 0, turn: 0, story: "" };

// --- asking -----------------------------------------------------------------------------------------------------------

class NeedsKey extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem("key");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const reply = await fetch(path, { headers, cache: "no-store", credentials: "omit", redirect: "error" });
  if (reply.status === 401) throw new NeedsKey();
  if (reply.status === 403) return null; // this key is not shown it
  if (!reply.ok) throw new Error(`${reply.status}`);
  return reply.json();
}

async function look() {
  clearTimeout(seen.timer);
  const turn = (seen.turn += 1); // of two at once the later one goes on
  try {
    const [status, requests] = await Promise.all([ask("status"), ask(`requests?limit=${ROWS}`)]);
    showLogin(false);
    showCluster(status);
    showRequests(requests);
    if (seen.story && at("story").open) await tell(seen.story);
  } catch (error) {
    if (error instanceof NeedsKey) return showLogin(true);
    setState(error instanceof TypeError ? "router cannot be reached" : `router answered ${error.message}`, "bad");
  }
  if (turn === seen.turn && !seen.isPaused && !document.hidden) seen.timer = setTimeout(look, EVERY_MS);
}

function showLogin(isWanted) {
  const wasWrong = isWanted && sessionStorage.getItem("key");
  if (isWanted) {
    sessionStorage.removeItem("key");
    at("refused").textContent = wasWrong ? "This key is not valid." : "";
    setState("needs a key", "warn");
  }
  const wasHidden = at("login").hidden;
  at("login").hidden = !isWanted;
  at("main").hidden = isWanted;
  at("forget").hidden = isWanted || !sessionStorage.getItem("key");
  if (isWanted && (wasHidden || wasWrong)) at("key").focus();
}

// --- words ------------------------------------------------------------------------------------------------------------

const none = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function scaled(value, units, step) {
  let i = 0;
  while (value >= step && i < units.length - 1) {
    value /= step;
    i += 1;
  }
  return `${value >= 100 || i === 0 ? whole.format(value) : value.toFixed(value >= 10 ? 1 : 2)} ${units[i]}`;
}

const bytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const perSecond = (n) => (n === null ? none : `${bytes(n)}/s`);
const short = (id) => id.slice(0, SHORT);

function ms(value) {
  if (value === null || value === undefined) return none;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

// --- rates and lines --------------------------------------------------------------------------------------------------

/** Growth per second over the last seconds of what only grows; null before there are two looks. */
function rate(name, total) {
  const now = performance.now();
  const points = (seen.rates.get(name) ?? []).filter(([then, was]) => now - then <= WINDOW_MS && was <= total);
  points.push([now, total]);
  seen.rates.set(name, points);
  const [then, was] = points[0];
  return now > then ? ((total - was) * 1000) / (now - then) : null;
}

function draw(id, value) {
  const values = seen.lines.get(id) ?? [];
  values.push(value ?? 0);
  seen.lines.set(id, values.slice(-POINTS));
  const most = Math.max(...values, 1e-9);
  const spots = values.slice(-POINTS).map((v, i) => `${(i * 100) / (POINTS - 1)},${22 - (20 * v) / most}`);
  const line = at(id).firstChild ?? at(id).appendChild(document.createElementNS(SVG, "polyline"));
  at(id).setAttribute("viewBox", "0 0 100 24");
  at(id).setAttribute("preserveAspectRatio", "none");
  line.setAttribute("points", spots.join(" "));
  line.setAttribute("fill", "none");
  line.setAttribute("stroke", "currentColor");
  line.setAttribute("vector-effect", "non-scaling-stroke");
}

// --- what is shown ----------------------------------------------------------------------------------------------------

function setState(text, tone) {
  const badge = at("state");
  if (badge.textContent !== text) badge.textContent = text; // a screen reader hears changes only
  badge.className = `badge ${tone}`;
}

/** An ordinary key is shown its own requests, and nothing of the cluster. */
function showCluster(status) {
  for (const part of document.querySelectorAll(".cluster")) part.hidden = status === null;
  at("own").hidden = status !== null;
  if (status === null) return setState("own requests", "good");
  showRouter(status);
  showWorkers(status.workers);
}

function showRouter({ router, workers }) {
  const isWell = router.is_ready && router.state === "serving";
  setState(isWell ? "serving" : router.state === "serving" ? "not ready" : router.state, isWell ? "good" : "warn");
  at("model").textContent = router.model;
  document.title = `${router.running} running, ${router.queued} queued – baton`;
  at("uptime").textContent = `up ${age(router.uptime_s)}, pid ${router.pid}`;
  at("running").textContent = whole.format(router.running);
  at("queued").textContent = whole.format(router.queued);
  const serving = (role) => workers.filter((w) => w.role === role && w.state === "serving").length;
  at("serving").textContent = `${serving("prefill")} P, ${serving("decode")} D`;
  const lengths = workers.map((w) => w.accept_length).filter((length) => length !== null);
  at("accept").textContent = lengths.length ? (lengths.reduce((a, b) => a + b) / lengths.length).toFixed(2) : none;
}

function showWorkers(workers) {
  at("no-workers").hidden = workers.length > 0;
  at("worker-table").hidden = workers.length === 0;
  let tokens = 0;
  let handoff = 0;
  const sorted = [...workers].sort((a, b) => b.role.localeCompare(a.role) || a.instance.localeCompare(b.instance));
  fill("worker-table", sorted, (w) => short(w.instance), (w, cells) => {
    const isDecode = w.role === "decode";
    const out = rate(`${w.instance} tokens`, (isDecode ? w.counters.tokens : w.counters.prompt_tokens) ?? 0);
    const moved = rate(`${w.instance} bytes`, (isDecode ? w.counters.handoff_bytes : w.counters.bytes) ?? 0);
    if (isDecode) {
      tokens += out ?? 0;
      handoff += moved ?? 0;
    }
    const used = w.pages_total - w.pages_free;
    put(cells[0], w.role);
    put(cells[1], short(w.instance), "id", `${w.host} pid ${w.pid}, ${w.device}`);
    put(cells[2], w.card || w.device, "", w.device);
    put(cells[3], w.state, `mark ${w.state === "serving" ? "good" : "warn"}`);
    put(cells[4], `${w.running} running, ${w.queued} queued, ${w.transferring} in hand-off`);
    meter(cells[5], used, w.pages_total, `${whole.format(used)} of ${whole.format(w.pages_total)}`);
    put(cells[6], out === null ? none : `${scaled(out, ["", "k", "M"], 1000).trim()}/s ${isDecode ? "out" : "in"}`);
    put(cells[7], `${perSecond(moved)} ${isDecode ? "in" : "out"}`);
    put(cells[8], w.accept_length === null ? none : `${w.accept_length.toFixed(2)} (${w.spec_steps ?? 0} steps)`);
    put(cells[9], `${w.heartbeat_age_s.toFixed(1)} s ago`);
  });
  at("tokens").textContent = `${scaled(tokens, ["", "k", "M"], 1000).trim()} tok/s`;
  at("handoff").textContent = perSecond(handoff);
  draw("tokens-line", tokens);
  draw("handoff-line", handoff);
}

function tone(request) {
  if (request.outcome === null) return "mark";
  return `mark ${request.outcome === "ok" ? "good" : request.outcome === "cancelled" ? "warn" : "bad"}`;
}

function showRequests({ now, requests }) {
  at("no-requests").hidden = requests.length > 0;
  at("request-table").hidden = requests.length === 0;
  fill("request-table", requests, (r) => r.id, (r, cells) => {
    opener(cells[0], r.id);
    put(cells[1], r.outcome ?? r.state, tone(r));
    put(cells[2], age(now - r.arrived));
    put(cells[3], r.cached_tokens ? `${r.prompt_tokens} (${r.cached_tokens} cached)` : `${r.prompt_tokens}`);
    put(cells[4], r.choices > 1 ? `${r.output_tokens} in ${r.choices}` : `${r.output_tokens}`);
    put(cells[5], ms(r.ttft_ms));
    put(cells[6], ms(r.tpot_ms));
    put(cells[7], r.handoff_bytes === null ? none : `${bytes(r.handoff_bytes)} in ${ms(r.handoff_ms)}`);
    put(cells[8], r.accept_length === null ? none : r.accept_length.toFixed(2));
    put(cells[9], `${r.attempts}`);
    put(cells[10], r.prefill ? (r.prefill === r.decode ? r.decode : `${r.prefill} → ${r.decode}`) : none, "id");
  });
}

/** One row for each item, kept while its item is there, so that focus stays where it is. */
function fill(tableId, items, nameOf, show) {
  const body = at(tableId).tBodies[0];
  const labels = [...at(tableId).tHead.rows[0].cells].map((cell) => cell.textContent);
  const rows = new Map([...body.rows].map((row) => [row.dataset.name, row]));
  items.forEach((item, i) => {
    const name = nameOf(item);
    const row = rows.get(name) ?? newRow(name, labels);
    rows.delete(name);
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null);
    show(item, row.cells);
  });
  for (const row of rows.values()) row.remove();
}

function newRow(name, labels) {
  const row = document.createElement("tr");
  row.dataset.name = name;
  labels.forEach((label, i) => {
    const cell = document.createElement(i === 0 ? "th" : "td");
    if (i === 0) cell.scope = "row";
    cell.dataset.label = label;
    row.append(cell);
  });
  return row;
}

function put(cell, text, className = "", title = "") {
  const span = cell.firstElementChild ?? cell.appendChild(document.createElement("span"));
  if (span.textContent !== text) span.textContent = text;
  span.className = className;
  span.title = title;
}

function meter(cell, value, most, text) {
  const shown = cell.querySelector("meter") ?? cell.appendChild(document.createElement("meter"));
  const words = cell.querySelector("span") ?? cell.appendChild(document.createElement("span"));
  shown.max = most || 1;
  shown.high = 0.9 * (most || 1);
  shown.value = value;
  shown.setAttribute("aria-label", "pages used");
  words.textContent = text;
}

function opener(cell, id) {
  if (cell.firstElementChild) return;
  const button = cell.appendChild(document.createElement("button"));
  button.type = "button";
  button.textContent = id;
  button.setAttribute("aria-label", `Request ${id}: what became of it`);
  button.addEventListener("click", () => tell(id, true));
}

// --- the story of one request -----------------------------------------------------------------------------------------

async function tell(id, isNew = false) {
  seen.story = id;
  try {
    const story = await ask(`requests/${encodeURIComponent(id)}`);
    at("story-title").textContent = `Request ${id}: ${story.outcome ?? story.state}`;
    at("story-body").replaceChildren(...story.choices.flatMap((choice, i) => partOf(choice, i, story.choices.length)));
  } catch (error) {
    if (error instanceof NeedsKey) return showLogin(true);
    at("story-title").textContent = `Request ${id}`;
    at("story-body").replaceChildren(element("p", "It is not remembered any more."));
  }
  if (isNew) at("story").showModal();
}

function partOf(choice, i, count) {
  const t = choice.timeline;
  const stages = [
    ["queue", t.queue_ms], ["prefill's queue", t.prefill_queue_ms], ["prefill", t.prefill_ms], ["first token", t.ttft_ms],
    ["hand-off", t.handoff_ms], ["draft prefill", t.draft_prefill_ms], ["decode", t.decode_ms], ["end to end", t.e2e_ms],
  ];
  const facts = [
    ["prompt", `${choice.prompt_tokens} tokens, ${t.cached_tokens ?? 0} cached`],
    ["output", `${choice.output_tokens} tokens, ${ms(t.tpot_ms)} each`],
    ["hand-off", t.handoff_bytes ? `${bytes(t.handoff_bytes)} in ${t.handoff_blocks} blocks over ${t.handoff_transport}` : none],
    ["drafts", t.verify_steps ? `${t.accepted} of ${t.drafted} accepted in ${t.verify_steps} verifies` : none],
  ];
  for (const a of t.attempt_log) {
    const pair = a.prefill_instance === a.decode_instance ? short(a.decode_instance) : `${short(a.prefill_instance)} → ${short(a.decode_instance)}`;
    const times = `placed ${ms(a.placed_ms)}, reserved ${ms(a.reserved_ms)}, first token ${ms(a.first_token_ms)}, ended ${ms(a.ended_ms)}`;
    facts.push([`attempt ${a.epoch + 1}`, `${pair}: ${a.outcome}${a.reason ? ` (${a.reason})` : ""}, ${a.tokens} tokens; ${times}`]);
  }
  const list = element("dl");
  for (const [name, text] of facts) list.append(element("dt", name), element("dd", text));
  const heading = count > 1 ? [element("h3", `Choice ${i + 1}`)] : [];
  return [...heading, bars(stages), list];
}

function bars(stages) {
  const list = element("ul");
  list.className = "bars";
  const most = Math.max(...stages.map(([, value]) => value ?? 0), 1e-9);
  for (const [name, value] of stages) {
    const item = element("li");
    const picture = document.createElementNS(SVG, "svg");
    picture.setAttribute("aria-hidden", "true");
    const bar = picture.appendChild(document.createElementNS(SVG, "rect"));
    bar.setAttribute("width", `${(100 * (value ?? 0)) / most}%`);
    bar.setAttribute("height", "100%");
    bar.setAttribute("fill", "currentColor");
    const number = element("span", ms(value));
    number.className = "n";
    item.append(element("span", name), picture, number);
    list.append(item);
  }
  return list;
}

function element(kind, text = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

// --- what people do ---------------------------------------------------------------------------------------------------

function setTheme(theme) {
  localStorage.setItem("theme", theme);
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  at("theme").textContent = `Theme: ${theme}`;
}

at("theme").addEventListener("click", () => {
  const next = THEMES.indexOf(localStorage.getItem("theme") ?? "auto") + 1;
  setTheme(THEMES[next % THEMES.length]);
});
at("pause").addEventListener("click", () => {
  seen.isPaused = !seen.isPaused;
  at("pause").setAttribute("aria-pressed", `${seen.isPaused}`);
  look();
});
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value.trim());
  at("key").value = "";
  look();
});
at("forget").addEventListener("click", () => {
  sessionStorage.removeItem("key");
  look();
});
at("close").addEventListener("click", () => at("story").close());
document.addEventListener("visibilitychange", () => document.hidden || look());

const chosen = localStorage.getItem("theme");
setTheme(THEMES.includes(chosen) ? chosen : "auto");
look();
