// /docs: sends the examples, shows them as curl commands, filters the contents.

const LONGEST = 20000; // characters of an answer that are shown

at("key").addEventListener("input", () => {
  secret.key = at("key").value.trim();
});
at("key-form").addEventListener("submit", (event) => event.preventDefault());

at("filter").addEventListener("input", () => {
  const wanted = at("filter").value.trim().toLowerCase();
  for (const section of document.querySelectorAll("section")) {
    const isShown = section.textContent.toLowerCase().includes(wanted);
    section.hidden = !isShown;
    document.querySelector(`.contents a[href="#${section.querySelector("h2").id}"]`).parentElement.hidden = !isShown;
  }
});

/** The command line for a form, with the key as a variable. */
function curlOf(form) {
  const address = new URL(form.dataset.path.slice(1), document.baseURI);
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const body = form.querySelector("textarea")?.value;
  const parts = [`curl -N ${address.href}`];
  if (secret.key) parts.push('-H "Authorization: Bearer $BATON_API_KEY"');
  if (body !== undefined) parts.push("-H 'content-type: application/json'", `-d ${quoted(body)}`);
  return parts.join(" \\\n  ");
}

async function send(form, signal) {
  const [field, output, status] = ["textarea", "pre", "[role=status]"].map((selector) => form.querySelector(selector));
  const began = performance.now();
  output.hidden = false;
  output.textContent = "";
  status.textContent = "sent";
  const reply = await fetch(form.dataset.path.slice(1), {
    method: form.dataset.method,
    headers: headersWithKey(field ? { "content-type": "application/json" } : {}),
    body: field?.value,
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  const head = `${reply.status} ${reply.ok ? "in" : "after"} ${ms(performance.now() - began)}`;
  status.textContent = head;
  const isJson = reply.headers.get("content-type")?.startsWith("application/json");
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += part.value;
    output.textContent = text.slice(0, LONGEST);
    output.scrollTop = output.scrollHeight;
  }
  if (isJson) text = JSON.stringify(JSON.parse(text), null, 2);
  output.textContent = text.length > LONGEST ? `${text.slice(0, LONGEST)}\n… ${text.length - LONGEST} more characters` : text;
  output.scrollTop = isJson ? 0 : output.scrollHeight;
  status.textContent = `${head}, complete after ${ms(performance.now() - began)}`;
}

for (const form of document.querySelectorAll(".trial")) {
  const stop = form.querySelector("[data-stop]");
  const status = form.querySelector("[role=status]");
  let controller = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (controller) return;
    controller = new AbortController();
    stop.hidden = false;
    try {
      await send(form, controller.signal);
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "stopped" : "The router cannot be reached.";
    }
    controller = null;
    stop.hidden = true;
  });
  stop.addEventListener("click", () => controller?.abort());
  form.querySelector("[data-curl]").addEventListener("click", () => {
    const output = form.querySelector("pre");
    output.hidden = false;
    output.textContent = curlOf(form);
    status.textContent = "";
  });
}
