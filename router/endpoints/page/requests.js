// Recent requests, and the waterfall of one.

const FEW = 8; // requests shown at first
const FEW_ON_A_PHONE = 4;
const LANES = { router: "router", prefill: "prefill", "hand-off": "handoff", decode: "decode" };
const PARTS = { "router read and tokenize": "read, tokenize", "router queue": "router queue", "prefill queue": "prefill queue", "prefill prompt": "prefill", "decode prompt": "prompt on decode", "decode tokens": "decode" };
const seenRequests = { told: null, isWhole: false, story: "" };

function tone(request) {
  if (request.outcome === null) return "";
  return `mark ${request.outcome === "ok" ? "good" : request.outcome === "cancelled" ? "warn" : "bad"}`;
}

function showRequests(told) {
  seenRequests.told = told;
  const { now, requests } = told;
  const few = phone.matches ? FEW_ON_A_PHONE : FEW;
  const visible = seenRequests.isWhole ? requests : requests.slice(0, few);
  const longest = Math.max(1, ...visible.map((r) => r.e2e_ms));
  at("no-requests").hidden = requests.length > 0;
  at("request-table").hidden = requests.length === 0;
  fill(at("request-table").tBodies[0], visible, (r) => r.id, newRequest, (r, row) => showRequest(r, row, now, longest));
  showMore("more-requests", requests.length - few, seenRequests.isWhole, "requests");
}

function newRequest(request) {
  const row = document.createElement("tr");
  const heads = [...at("request-table").tHead.rows[0].cells];
  heads.forEach((head, i) => {
    const cell = element(i === 0 ? "th" : "td", "", head.className);
    if (i === 0) cell.scope = "row";
    cell.dataset.label = head.textContent;
    row.append(cell);
  });
  const button = row.cells[0].appendChild(element("button", request.id));
  button.type = "button";
  button.setAttribute("aria-label", `Waterfall of request ${request.id}`);
  button.addEventListener("click", () => tell(request.id, true));
  row.cells[8].append(shape("svg", { role: "img", viewBox: "0 0 1000 10", preserveAspectRatio: "none" }, "strip"));
  return row;
}

function put(cell, text, className = "") {
  const span = cell.firstElementChild ?? cell.appendChild(element("span"));
  write(span, text);
  span.className = className;
}

function showRequest(r, row, now, longest) {
  const cells = row.cells;
  put(cells[1], r.outcome ?? r.state, tone(r));
  put(cells[2], age(now - r.arrived));
  put(cells[3], r.cached_tokens ? `${r.prompt_tokens} (${r.cached_tokens} cached)` : `${r.prompt_tokens}`);
  put(cells[4], r.choices > 1 ? `${r.output_tokens} in ${r.choices}` : `${r.output_tokens}`);
  put(cells[5], ms(r.ttft_ms));
  put(cells[6], ms(r.tpot_ms));
  put(cells[7], r.accept_length === null ? none : r.accept_length.toFixed(2));
  const first = r.ttft_ms ?? r.e2e_ms;
  const cuts = [["router", 0, r.queue_ms], ["prefill", r.queue_ms, first], ["decode", first, r.e2e_ms]];
  const strip = cells[8].firstElementChild;
  strip.setAttribute("aria-label", `queue ${ms(r.queue_ms)}, prefill ${ms(first - r.queue_ms)}, decode ${ms(r.e2e_ms - first)}`);
  strip.replaceChildren(...cuts.map(([lane, from, to]) => {
    const x = (1000 * Math.min(from, to)) / longest;
    return shape("rect", { x, width: Math.max(from < to ? 2 : 0, (1000 * (to - from)) / longest), height: 10 }, `fill-${lane}`);
  }));
}

// --- the story of one request -----------------------------------------------------------------------------------------

async function tell(id, isNew = false) {
  seenRequests.story = id;
  try {
    const story = await ask(`requests/${encodeURIComponent(id)}`);
    const name = id.length > SHORT ? short(story.choices[0].room) : id;
    write(at("story-title"), `Request ${name}: ${story.outcome ?? story.state}`);
    at("story-body").replaceChildren(...story.choices.flatMap((choice, i) => partOf(choice, i, story.choices.length)));
  } catch (error) {
    if (error instanceof NeedsKey) return showLogin(true);
    write(at("story-title"), `Request ${short(id)}`);
    at("story-body").replaceChildren(element("p", "It is not remembered any more."));
  }
  if (isNew && !at("story").open) at("story").showModal();
}

function partOf(choice, i, number) {
  const t = choice.timeline;
  const facts = [
    ["prompt", `${choice.prompt_tokens} tokens, ${t.cached_tokens ?? 0} cached${t.pulled_tokens ? `, ${t.pulled_tokens} of these pulled from decode in ${ms(t.pull_ms)}` : ""}`],
    ["output", `${choice.output_tokens} tokens, first after ${ms(t.ttft_ms)}, then ${ms(t.tpot_ms)} each`],
    ["hand-off", t.handoff_bytes ? `${bytes(t.handoff_bytes)} in ${t.handoff_blocks} ${t.handoff_blocks === 1 ? "block" : "blocks"} over ${t.handoff_transport}` : none],
    ["drafts", t.verify_steps ? `${t.accepted} of ${t.drafted} accepted in ${t.verify_steps} verifies` : none],
  ];
  for (const a of t.attempt_log) {
    const pair = a.prefill_instance === a.decode_instance ? short(a.decode_instance) : `${short(a.prefill_instance)} → ${short(a.decode_instance)}`;
    facts.push([`attempt ${a.epoch + 1}`, `${pair}: ${a.outcome}${a.reason ? ` (${a.reason})` : ""}, ${a.tokens} tokens`]);
  }
  const list = element("dl");
  for (const [name, text] of facts) list.append(element("dt", name), element("dd", text));
  const heading = number > 1 ? [element("h3", `Choice ${i + 1}`)] : [];
  return [...heading, zoomOf(choice.waterfall, t), waterfall(choice.waterfall, t), list];
}

const TAIL = 0.75; // a last part with more of the time hides the others: the waterfall then begins zoomed

/** The end of the visible time: all of it, or a little more than the parts before the last one. */
function visibleEnd(parts, timeline) {
  const end = Math.max(timeline.e2e_ms, ...parts.map((p) => p.end_ms ?? 0), 0.1);
  const before = Math.max(...parts.map((p) => p.start_ms), ...parts.slice(0, -1).map((p) => p.end_ms ?? 0));
  const canZoom = end - before > TAIL * end;
  const isZoomed = canZoom && (seenRequests.isZoomed ?? true);
  return { canZoom, isZoomed, end: isZoomed ? Math.max(0.1, 1.15 * before) : end };
}

function zoomOf(parts, timeline) {
  const { canZoom, isZoomed } = visibleEnd(parts, timeline);
  const group = element("div", "", "spans zoom");
  group.hidden = !canZoom;
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "Time shown");
  for (const [name, zoomed] of [["Start", true], ["Whole request", false]]) {
    const button = group.appendChild(element("button", name));
    button.type = "button";
    button.setAttribute("aria-pressed", `${isZoomed === zoomed}`);
    button.addEventListener("click", async () => {
      seenRequests.isZoomed = zoomed;
      await tell(seenRequests.story);
      at("story-body").querySelector(`.zoom [aria-pressed="true"]`)?.focus();
    });
  }
  return group;
}

function waterfall(parts, timeline) {
  const { end } = visibleEnd(parts, timeline);
  const list = element("ul", "", "waterfall");
  list.append(scale(end));
  for (const part of parts) {
    const until = part.end_ms ?? Math.max(end, timeline.e2e_ms);
    const item = element("li");
    const again = part.attempt ? ` (attempt ${part.attempt + 1})` : "";
    const name = PARTS[`${part.lane} ${part.name}`] ?? part.name;
    const picture = shape("svg", { "aria-hidden": "true", viewBox: "0 0 1000 10", preserveAspectRatio: "none" });
    const x = (1000 * part.start_ms) / end;
    const width = Math.min(1000 - x, Math.max(3, (1000 * (until - part.start_ms)) / end));
    picture.append(shape("rect", { x: Math.min(x, 997), width: Math.max(3, width), height: 10 }, `fill-${LANES[part.lane]}`));
    const took = element("span", part.end_ms === null ? "running" : ms(until - part.start_ms), "ms");
    const label = element("span", `${name}${again}`, "name");
    item.append(label, picture, took);
    item.append(element("span", `, from ${ms(part.start_ms)}`, "hidden"));
    list.append(item);
  }
  return list;
}

/** The axis of a waterfall. */
function scale(end) {
  const item = element("li", "", "scale");
  const picture = shape("svg", { "aria-hidden": "true" });
  const [step, number] = steps(end, phone.matches ? 2 : 6);
  for (let k = 0; k <= number && k * step <= end; k += 1) {
    const x = `${(100 * k * step) / end}%`;
    const anchor = k === 0 ? "start" : (k * step) / end > 0.9 ? "end" : "middle";
    const label = shape("text", { x, y: 11, "text-anchor": anchor }, "axis");
    label.textContent = k === 0 ? "0" : ms(k * step).replace(".0 ", " ").replace(".00 ", " ");
    picture.append(label);
  }
  item.append(element("span", "since arrival", "name"), picture, element("span", "took", "ms"));
  return item;
}

at("more-requests").addEventListener("click", () => {
  seenRequests.isWhole = !seenRequests.isWhole;
  if (seenRequests.told) showRequests(seenRequests.told);
});
phone.addEventListener("change", () => seenRequests.told && showRequests(seenRequests.told));
