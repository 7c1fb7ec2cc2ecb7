// A card for each worker and for each machine: load, KV pages, accept length, CPU, GPU.

const CARDS = 12; // shown at first
const CARDS_ON_A_PHONE = 4;
const phone = matchMedia("(max-width: 40rem)");
const SPARKS = { pages: "pages_permille", tokens: "tokens_per_s", accept: "accept_length_percent", moved: "handoff_kib_per_s" };
const seenWorkers = { all: [], isWhole: false };

function showWorkers(workers) {
  const order = (w) => `${w.role === "decode" ? 1 : 0} ${w.instance}`;
  seenWorkers.all = [...workers].sort((a, b) => (order(a) < order(b) ? -1 : 1));
  const few = phone.matches ? CARDS_ON_A_PHONE : CARDS;
  const visible = seenWorkers.isWhole ? seenWorkers.all : seenWorkers.all.slice(0, few);
  at("no-workers").hidden = workers.length > 0;
  fill(at("worker-cards"), visible, (w) => short(w.instance), newWorker, showWorker);
  showMore("more-workers", workers.length - few, seenWorkers.isWhole, "workers");
  showMachines(workers);
  showWorkerCharts();
}

function showMore(id, hidden, isWhole, what) {
  at(id).hidden = hidden <= 0;
  write(at(id), isWhole ? `Show fewer ${what}` : `Show ${hidden} more ${what}`);
  at(id).setAttribute("aria-expanded", `${isWhole}`);
}

function newWorker(worker) {
  const card = element("li", "", `card worker ${worker.role}`);
  const title = element("div", "", "title");
  title.append(element("span", "", "chip"), element("span", worker.role, "role"), element("span", short(worker.instance), "id"), element("span", "", "mark"));
  const measures = element("dl", "", "measures");
  const names = worker.role === "decode"
    ? [["pages", "KV pages"], ["tokens", "Tokens"], ["accept", "Accept length"], ["moved", "Hand-off in"]]
    : [["pages", "KV pages"], ["tokens", "Prompt tokens"], ["cached", "Prefix cache"], ["moved", "Hand-off out"]];
  names.push(["load", "Requests"], ["cpu", "CPU"]);
  for (const [key, name] of names) {
    const item = element("div");
    item.dataset.measure = key;
    item.append(element("dt", name), element("dd", none));
    if (SPARKS[key]) item.append(shape("svg", { "aria-hidden": "true" }, "spark"));
    measures.append(item);
  }
  card.append(title, element("p", "", "where"), measures);
  return card;
}

function measure(card, key, text, more = "") {
  const item = card.querySelector(`[data-measure="${key}"] dd`);
  if (!item) return;
  const value = item.firstElementChild ?? item.appendChild(element("span"));
  const note = item.children[1] ?? item.appendChild(element("small"));
  if (item.childNodes.length !== 2) item.replaceChildren(value, note);
  write(value, text);
  write(note, more ? ` ${more}` : "");
}

function showWorker(w, card) {
  const mark = card.querySelector(".mark");
  write(mark, w.state);
  mark.className = `mark ${w.state === "serving" ? "good" : "warn"}`;
  const beat = `beat ${w.heartbeat_age_s.toFixed(1)} s ago`;
  write(card.querySelector(".where"), [w.host, w.card || w.device, w.aggregated ? "aggregated" : "", beat].filter(Boolean).join(" · "));
  const used = w.pages_total - w.pages_free;
  const below = w.tiers.map((tier) => `${tier.name} ${bytes(tier.used)}`); // prefixes below the pool
  const held = [`${count(used)} of ${count(w.pages_total)}`, ...below].join(", ");
  measure(card, "pages", w.pages_total ? percent(used / w.pages_total) : none, held);
  const waiting = w.queued + w.transferring;
  const others = [waiting ? `${waiting} waiting` : "", retractedText(w.counters)].filter(Boolean);
  measure(card, "load", `${w.running}`, ["running", ...others].join(", "));
  measure(card, "accept", w.accept_length === null ? none : w.accept_length.toFixed(2), w.spec_steps ? `of ${w.spec_steps + 1}` : "");
  const pulled = w.counters.pulled_tokens; // of prompts, whose KV came from decode workers
  const kept = [`${count(w.pages_cached)} pages`, pulled ? `${count(pulled)} tokens pulled` : ""].filter(Boolean);
  measure(card, "cached", w.pages_total ? percent(w.pages_cached / w.pages_total) : none, kept.join(", "));
  measure(card, "cpu", w.usage ? w.usage.cpu_cores.toFixed(1) : none, w.usage ? `of ${w.usage.num_cores} cores` : "");
}

/** Requests whose pages or places went to others: to older ones in a full pool, or to more urgent ones. */
function retractedText(counters) {
  const urgent = (counters.retractions_urgent_pages ?? 0) + (counters.retractions_urgent_place ?? 0);
  const all = counters.retractions ? `${count(counters.retractions)} retracted` : "";
  return urgent ? `${all} (${count(urgent)} for urgent ones)` : all;
}

function showWorkerCharts() {
  for (const card of at("worker-cards").children) {
    const worker = seenWorkers.all.find((w) => short(w.instance) === card.dataset.name);
    const series = history.workers.get(worker?.instance)?.series;
    if (!series) continue;
    const tokens = shown(series.tokens_per_s);
    const chartOf = (key) => card.querySelector(`[data-measure="${key}"] .spark`);
    spark(chartOf("pages"), shown(series[SPARKS.pages]), 1000);
    const most = spark(chartOf("tokens"), tokens, null);
    const now = newest(tokens);
    measure(card, "tokens", now === null ? none : count(now), `/s, most ${count(most)}`);
    if (chartOf("accept")) spark(chartOf("accept"), shown(series.accept_length_percent), 100 * ((worker.spec_steps ?? 3) + 1));
    spark(chartOf("moved"), shown(series.handoff_kib_per_s), null);
    const moved = newest(series.handoff_kib_per_s);
    measure(card, "moved", moved === null ? none : `${bytes(1024 * moved)}/s`);
  }
}

// --- machines ---------------------------------------------------------------------------------------------------------

/** One machine for each GPU, and one for the CPU of each host. */
function machinesOf(workers) {
  const machines = new Map();
  for (const w of workers.filter((one) => one.usage)) {
    const isGpu = w.usage.gpu_memory_total > 0;
    const name = isGpu ? `${w.host} ${w.card}` : `${w.host} CPU`;
    const found = machines.get(name) ?? { name, title: isGpu ? w.card : "CPU", host: w.host, isGpu, cores: 0, memory: 0, workers: 0 };
    found.workers += 1;
    found.cores += w.usage.cpu_cores;
    found.memory += w.usage.memory_bytes;
    Object.assign(found, { numCores: w.usage.num_cores, busy: w.usage.gpu_busy, used: w.usage.gpu_memory_bytes, total: w.usage.gpu_memory_total });
    machines.set(name, found);
  }
  return [...machines.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
}

function showMachines(workers) {
  const machines = machinesOf(workers);
  at("machines-title").hidden = machines.length === 0;
  fill(at("machines"), machines, (m) => m.name, newMachine, showMachine);
}

function newMachine(machine) {
  const card = element("li", "", "card machine");
  const title = element("div", "", "title");
  title.append(element("span", machine.title, "role"));
  const measures = element("dl", "", "measures");
  for (const [key, name] of [["busy", machine.isGpu ? "Busy" : "Cores used"], ["memory", machine.isGpu ? "Memory" : "Memory of workers"]]) {
    const item = element("div");
    item.dataset.measure = key;
    item.append(element("dt", name), element("dd", none));
    if (key === "busy" || machine.isGpu) {
      const meter = item.appendChild(element("meter"));
      meter.setAttribute("aria-label", `${machine.title} ${name.toLowerCase()}`);
    }
    measures.append(item);
  }
  card.append(title, element("p", "", "where"), measures);
  return card;
}

function showMachine(m, card) {
  write(card.querySelector(".where"), `${m.host} · ${m.workers} ${m.workers === 1 ? "worker" : "workers"}`);
  const meter = (key, value, most) => {
    const found = card.querySelector(`[data-measure="${key}"] meter`);
    if (!found) return;
    found.max = most || 1;
    found.value = value ?? 0;
  };
  if (m.isGpu) {
    measure(card, "busy", m.busy === null ? none : percent(m.busy));
    measure(card, "memory", percent(m.used / m.total), `of ${bytes(m.total)}`);
    meter("busy", m.busy, 1);
    meter("memory", m.used, m.total);
  } else {
    measure(card, "busy", m.cores.toFixed(1), `of ${m.numCores}`);
    measure(card, "memory", bytes(m.memory));
    meter("busy", m.cores, m.numCores);
  }
}

at("more-workers").addEventListener("click", () => {
  seenWorkers.isWhole = !seenWorkers.isWhole;
  showWorkers(seenWorkers.all);
});
