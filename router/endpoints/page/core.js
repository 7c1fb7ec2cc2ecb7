// Shared by all pages: requests with the key, words for numbers, the theme. Data becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";
const THEMES = ["auto", "light", "dark"];
const SHORT = 8; // digits of an id
const none = "–";

const at = (id) => document.getElementById(id);
const secret = { key: "" }; // in memory only: no storage, no cookie, no address

class NeedsKey extends Error {}

function headersWithKey(more = {}) {
  return secret.key ? { ...more, authorization: `Bearer ${secret.key}` } : more;
}

async function request(path, options = {}) {
  const headers = headersWithKey(options.headers);
  const reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  if (reply.status === 401) throw new NeedsKey();
  return reply;
}

/** The JSON at `path`; null for a key that is not shown it. */
async function ask(path) {
  const reply = await request(path);
  if (reply.status === 403) return null;
  if (!reply.ok) throw new Error(`${reply.status}`);
  return reply.json();
}

// --- words ------------------------------------------------------------------------------------------------------------

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
const short = (id) => id.slice(0, SHORT);
const percent = (share) => `${Math.round(100 * share)} %`;

function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k` : whole.format(value);
}

function ms(value) {
  if (value === null || value === undefined) return none;
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 1 : 2)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  return value === 0 ? "0 ms" : `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

// --- elements ---------------------------------------------------------------------------------------------------------

function element(kind, text = "", className = "") {
  const made = document.createElement(kind);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function shape(kind, attributes, className = "") {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, `${value}`);
  if (className) made.setAttribute("class", className);
  return made;
}

function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** One child of `list` for each item, kept while its item is there, so that focus stays where it is. */
function fill(list, items, nameOf, make, show) {
  const children = new Map([...list.children].map((child) => [child.dataset.name, child]));
  items.forEach((item, i) => {
    const name = nameOf(item);
    let child = children.get(name);
    if (!child) {
      child = make(item);
      child.dataset.name = name;
    }
    children.delete(name);
    if (list.children[i] !== child) list.insertBefore(child, list.children[i] ?? null);
    show(item, child);
  });
  for (const child of children.values()) child.remove();
}

// --- theme ------------------------------------------------------------------------------------------------------------

function setTheme(theme) {
  localStorage.setItem("theme", theme);
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  at("theme").textContent = `Theme: ${theme}`;
}

function nextTheme() {
  const next = THEMES.indexOf(localStorage.getItem("theme") ?? "auto") + 1;
  setTheme(THEMES[next % THEMES.length]);
}

at("theme").addEventListener("click", nextTheme);
setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
