// Looks at /status and /requests once a second, and at /history every two, while somebody looks at the page.

const EVERY_MS = 1000;
const ROWS = 30;
const look = { isPaused: false, timer: 0, turn: 0, historyAt: -Infinity };

async function refresh() {
  clearTimeout(look.timer);
  const turn = (look.turn += 1); // of two at once the later one goes on
  try {
    const [status, requests] = await Promise.all([ask("status"), ask(`requests?limit=${ROWS}`), refreshHistory()]);
    if (turn !== look.turn) return;
    showLogin(false);
    await showCluster(status);
    showRequests(requests);
    if (seenRequests.story && at("story").open) await tell(seenRequests.story);
  } catch (error) {
    if (error instanceof NeedsKey) return showLogin(true);
    setState(error instanceof TypeError ? "router cannot be reached" : `router answered ${error.message}`, "bad");
  }
  if (turn === look.turn && !look.isPaused && !document.hidden) look.timer = setTimeout(refresh, EVERY_MS);
}

async function refreshHistory() {
  const now = performance.now();
  if (now - look.historyAt < 0.9 * 1000 * history.every) return;
  look.historyAt = now;
  const told = await ask(history.last < 0 ? "history" : `history?since=${history.last}`);
  if (!told) return;
  if (told.last < history.last) history.last = -1; // another router, or a restarted one
  if (history.last >= 0 && told.first !== history.last + 1) history.last = -1;
  remember(told);
  showCharts();
}

function setState(text, tone) {
  write(at("state"), text); // a screen reader hears changes only
  at("state").className = `badge ${tone}`;
}

async function showCluster(status) {
  for (const part of document.querySelectorAll(".cluster")) part.hidden = status === null;
  at("own").hidden = status !== null;
  if (status === null) {
    setState("own requests", "warn");
    if (!chat.model) setModel((await ask("v1/models"))?.data[0]?.id ?? "");
    return;
  }
  const { router, workers } = status;
  const isServing = router.state === "serving";
  if (isServing && !router.is_ready) setState(`not ready: ${router.why_not_ready}`, "bad");
  else setState(router.state, isServing ? "good" : "warn");
  setModel(router.model);
  write(at("uptime"), `up ${age(router.uptime_s)}`);
  write(at("running"), `${router.running}`);
  write(at("queued"), `${router.queued}`);
  showClasses(router.classes);
  const serving = workers.filter((w) => w.state === "serving").length;
  write(at("serving"), serving === workers.length ? `${serving}` : `${serving} of ${workers.length}`);
  const lengths = workers.map((w) => w.accept_length).filter((length) => length !== null);
  write(at("accept"), lengths.length ? (lengths.reduce((a, b) => a + b) / lengths.length).toFixed(2) : none);
  showWorkers(workers);
}

/** A line of the classes of requests, where there are others than normal, or requests that gave something up. */
function showClasses(classes) {
  const hasLost = (one) => Object.keys(one.retracted).length > 0;
  const used = classes.filter((one) => one.queued || one.running || hasLost(one));
  at("classes").hidden = used.every((one) => one.priority === "normal" && !hasLost(one));
  write(at("classes"), used.map(classText).join(" · "));
}

function classText(one) {
  const reasons = { "full pool": "gave pages back to a full pool", preempted: "made way for urgent ones" };
  const lost = Object.entries(one.retracted).map(([reason, number]) => `${count(number)} ${reasons[reason] ?? reason}`);
  const queued = one.queued ? `${one.queued} queued, ${one.oldest_wait_s.toFixed(1)} s at most` : "";
  return `${one.priority}: ${[`${one.running} running`, queued, ...lost].filter(Boolean).join(", ")}`;
}

function setModel(model) {
  chat.model = model;
  write(at("model"), model);
  document.title = model ? `${model} · baton` : "baton";
}

// --- the key ----------------------------------------------------------------------------------------------------------

function showLogin(isWanted) {
  const wasWrong = isWanted && secret.key !== "";
  const wasHidden = at("login").hidden;
  if (isWanted) {
    secret.key = "";
    write(at("refused"), wasWrong ? "This key is not valid." : "");
    setState("needs a key", "warn");
  }
  at("login").hidden = !isWanted;
  at("main").hidden = isWanted;
  at("forget").hidden = isWanted || !secret.key;
  if (isWanted && (wasHidden || wasWrong)) at("key").focus();
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  secret.key = at("key").value.trim();
  at("key").value = "";
  look.historyAt = -Infinity;
  history.last = -1;
  refresh();
});
at("forget").addEventListener("click", () => {
  chat.controller?.abort();
  at("chat-clear").click();
  secret.key = "";
  look.historyAt = -Infinity;
  refresh();
});
for (const link of document.querySelectorAll("[data-raw]")) {
  link.addEventListener("click", async (event) => {
    if (!secret.key) return; // a plain link; with a key the browser would not send it
    event.preventDefault();
    const reply = await request(link.getAttribute("href")).catch(() => null);
    const text = reply?.ok ? await reply.text() : reply ? await faultOf(reply) : "The router cannot be reached.";
    const isJson = reply?.headers.get("content-type")?.startsWith("application/json");
    write(at("raw-title"), `/${link.getAttribute("href")}`);
    write(at("raw-body"), reply?.ok && isJson ? JSON.stringify(JSON.parse(text), null, 2) : text);
    at("raw").showModal();
  });
}

// --- keyboard ---------------------------------------------------------------------------------------------------------

function pause() {
  look.isPaused = !look.isPaused;
  at("pause").setAttribute("aria-pressed", `${look.isPaused}`);
  refresh();
}

function goTo(id) {
  at(id).scrollIntoView({ block: "start" });
  at(id).focus({ preventScroll: true });
}

const KEYS = {
  "/": () => at("ask").focus(),
  "?": () => at("shortcuts").showModal(),
  l: () => charts[0].svg.focus(),
  w: () => goTo("workers"),
  r: () => goTo("requests"),
  p: pause,
  t: nextTheme,
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (event.key === "Escape" && chat.controller && !document.querySelector("dialog[open]")) {
    chat.controller.abort();
    at("ask").focus();
  }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (!at("single-keys").checked || at("main").hidden || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

at("single-keys").checked = localStorage.getItem("single-keys") !== "off";
at("single-keys").addEventListener("change", () => localStorage.setItem("single-keys", at("single-keys").checked ? "on" : "off"));
at("pause").addEventListener("click", pause);
at("keys").addEventListener("click", () => at("shortcuts").showModal());
document.addEventListener("visibilitychange", () => document.hidden || refresh());
refresh();
