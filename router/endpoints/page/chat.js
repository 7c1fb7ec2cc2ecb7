// The chat box: streams an answer, tints accepted drafts, and tells how fast it came.

const chat = { messages: [], model: "", controller: null };

/** The events of a stream of server-sent events, as parsed JSON, until [DONE]. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function settingsOf() {
  const number = (id) => (at(id).value.trim() === "" || !at(id).checkValidity() ? undefined : Number(at(id).value));
  return { temperature: number("set-temperature"), top_p: number("set-top-p"), max_tokens: number("set-max"), seed: number("set-seed") };
}

function bodyOf() {
  const system = at("set-system").value.trim();
  return {
    model: chat.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...chat.messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true, include_accepted_drafts: true },
    ...settingsOf(),
  };
}

/** What an answer shows while it grows. */
class Answer {
  constructor() {
    this.root = element("div", "", "answer");
    this.root.classList.toggle("untinted", !at("set-tint").checked);
    this.thoughts = null;
    this.text = this.root.appendChild(element("div", "", "said text"));
    this.facts = this.root.appendChild(element("p", "", "facts"));
    this.asked = performance.now();
    this.first = this.last = null;
    this.tokens = this.drafts = 0;
    this.cached = 0;
    this.id = "";
    this.content = "";
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    this.id = event.id ?? this.id;
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    const text = delta.content ?? "";
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (choice?.accepted_drafts) this.drafts += choice.accepted_drafts;
    if (thought) this.think(thought);
    if (text) this.say(text, choice.accepted_drafts > 0);
    for (const call of delta.tool_calls ?? []) this.say(`${call.function?.name ?? ""}${call.function?.arguments ?? ""}`, false);
    if (choice?.finish_reason === "length") this.isCut = true;
    if (event.usage) {
      this.tokens = event.usage.completion_tokens;
      this.cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    if (text || thought) {
      this.last = performance.now();
      this.first ??= this.last;
      this.firstTokens ??= this.tokens;
      this.tell();
    }
  }

  say(text, isDraft) {
    this.content += text;
    const kind = isDraft ? "draft" : "own";
    const end = this.text.lastElementChild;
    if (end?.className === kind) end.firstChild.appendData(text);
    else this.text.append(element("span", text, kind));
  }

  think(text) {
    if (!this.thoughts) {
      const fold = element("details");
      fold.append(element("summary", "Reasoning"));
      this.thoughts = fold.appendChild(element("div"));
      this.thoughts.append("");
      this.root.prepend(fold);
    }
    this.thoughts.firstChild.appendData(text);
  }

  tell(note = "") {
    const parts = [];
    const add = (value, unit) => {
      const part = element("span");
      part.append(element("b", value), ` ${unit}`);
      parts.push(part);
    };
    if (this.first !== null) add(ms(this.first - this.asked), "to first token");
    const seconds = (this.last - this.first) / 1000;
    const later = this.tokens - (this.firstTokens ?? 0);
    if (later > 0 && seconds > 0) add((later / seconds).toFixed(later / seconds >= 100 ? 0 : 1), "tok/s");
    if (this.tokens) add(`${this.tokens}`, this.tokens === 1 ? "token" : "tokens");
    if (this.tokens && this.drafts) add(percent(this.drafts / this.tokens), "drafts");
    if (this.cached) add(`${this.cached}`, "cached");
    if (note) parts.push(element("span", note));
    this.facts.replaceChildren(...parts);
  }

  end(note) {
    this.tell(note || (this.isCut ? "cut at the most tokens" : ""));
    if (!this.id) return;
    const more = element("button", "Waterfall", "plain");
    more.type = "button";
    more.setAttribute("aria-label", "Waterfall of this answer");
    more.addEventListener("click", () => tell(this.id, true));
    this.facts.append(more);
  }

  fail(text) {
    const line = element("p", text, "bad");
    line.setAttribute("role", "alert");
    this.root.append(line);
  }
}

async function say(text) {
  at("hello").hidden = true;
  at("chat-clear").hidden = false;
  chat.messages.push({ role: "user", content: text });
  at("log").append(element("div", text, "said user"));
  const answer = new Answer();
  at("log").append(answer.root);
  setAsking(true);
  at("log").scrollTop = at("log").scrollHeight;
  let note = "";
  try {
    await receive(answer);
    write(at("spoken"), "The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else if (error instanceof NeedsKey) showLogin(true);
    else answer.fail(error instanceof TypeError ? "The router cannot be reached." : error.message);
    write(at("spoken"), note ? "The answer was stopped." : "");
  }
  answer.end(note);
  if (answer.content) chat.messages.push({ role: "assistant", content: answer.content });
  else chat.messages.pop();
  setAsking(false);
}

async function receive(answer) {
  chat.controller = new AbortController();
  const reply = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(bodyOf()),
    signal: chat.controller.signal,
  });
  if (!reply.ok) throw new Error(await faultOf(reply));
  for await (const event of eventsOf(reply.body)) {
    const log = at("log");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    answer.take(event);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
}

async function faultOf(reply) {
  const told = await reply.json().catch(() => null);
  const wait = reply.headers.get("retry-after");
  return `${told?.error?.message ?? `The router answered ${reply.status}.`}${wait ? ` Retry in ${wait} s.` : ""}`;
}

function setAsking(isAsking) {
  if (!isAsking) chat.controller = null;
  at("send").hidden = isAsking;
  at("stop").hidden = !isAsking;
  if (!isAsking && document.activeElement === document.body) at("ask").focus({ preventScroll: true });
}

function grow() {
  const field = at("ask");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("ask").value.trim();
  if (!text || chat.controller || at("stop").hidden === false) return;
  at("ask").value = "";
  grow();
  say(text);
});
at("ask").addEventListener("input", grow);
at("ask").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
at("stop").addEventListener("click", () => {
  chat.controller?.abort();
  at("ask").focus();
});
at("chat-clear").addEventListener("click", () => {
  chat.controller?.abort();
  chat.messages = [];
  for (const child of [...at("log").children]) if (child.id !== "hello") child.remove();
  at("hello").hidden = false;
  at("chat-clear").hidden = true;
  at("ask").focus();
});
at("set-tint").addEventListener("change", () => {
  for (const answer of document.querySelectorAll(".answer")) answer.classList.toggle("untinted", !at("set-tint").checked);
});
for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => {
    at("ask").focus({ preventScroll: true });
    say(idea.textContent.trim());
  });
}
