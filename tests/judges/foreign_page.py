"""A page of another origin in a headless Chromium, which calls the router with the JavaScript clients of
OpenAI and Anthropic: models, whole and streamed answers, tools, errors. A page of an origin that is not
allowed reads nothing.
"""

import contextlib
import functools
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from baton.deploy.keys.api_keys import add
from baton.tests.cluster.browser import Browser
from baton.tests.cluster.router_fakes import MODEL
from baton.tests.judges.echo_router import saying_router

PACKAGES = ("openai@6.49.0", "@anthropic-ai/sdk@1.12.0", "@opentelemetry/api@1.9.0", "esbuild@0.25.0")
CLIENTS = (
    'export { default as OpenAI } from "openai"; export { default as Anthropic } from "@anthropic-ai/sdk";'
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PAGE = """<!doctype html><title>a page</title><script type="module">
import { OpenAI, Anthropic } from "/clients.js";

const told = text => [{ role: "user", content: "SAY:" + text }];
const schema = { type: "object", properties: { city: { type: "string" } } };

const CALLS = {
  async "openai models"({ openai, model }) {
    return (await openai.models.list()).data[0].id === model;
  },
  async "openai chat"({ openai, model }) {
    const made = await openai.chat.completions.create({ model, messages: told("hello world") });
    return made.choices[0].message.content === "hello world";
  },
  async "openai stream"({ openai, model }) {
    let text = "", count = 0;
    const asked = { model, messages: told("hello world"), stream: true };
    for await (const part of await openai.chat.completions.create(asked)) {
      text += part.choices[0]?.delta?.content ?? "";
      count += 1;
    }
    return text === "hello world" && count > 3;
  },
  async "openai tools"({ openai, model, call }) {
    const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
    const made = await openai.chat.completions.create({ model, messages: told(call), tools });
    return JSON.parse(made.choices[0].message.tool_calls[0].function.arguments).city === "Rome";
  },
  async "openai responses"({ openai, model }) {
    const made = await openai.responses.create({ model, input: "SAY:hello world" });
    return made.output_text === "hello world";
  },
  async "openai error and its id"({ openai }) {
    try {
      await openai.chat.completions.create({ model: "other", messages: told("hi") });
    } catch (error) {
      return error.status === 404 && error.code === "model_not_found" && Boolean(error.requestID);
    }
  },
  async "a wrong key"({ OpenAI, options, model }) {
    try {
      await new OpenAI({ ...options, apiKey: "wrong" }).models.list();
    } catch (error) {
      return error.status === 401;
    }
  },
  async "anthropic stream"({ anthropic, model }) {
    const stream = anthropic.messages.stream({ model, max_tokens: 99, messages: told("hello world") });
    let text = "";
    stream.on("text", part => { text += part; });
    const made = await stream.finalMessage();
    return text === "hello world" && made.content[0].text === text && made.stop_reason === "end_turn";
  },
  async "anthropic tools"({ anthropic, model, call }) {
    const tools = [{ name: "weather", input_schema: schema }];
    const made = await anthropic.messages.create({ model, max_tokens: 99, messages: told(call), tools });
    return made.content[0].input.city === "Rome";
  },
  async "anthropic error and its id"({ anthropic }) {
    try {
      await anthropic.messages.create({ model: "other", max_tokens: 9, messages: told("hi") });
    } catch (error) {
      return error.status === 404 && error.error.error.type === "not_found_error" && Boolean(error.requestID);
    }
  },
};

window.judge = async (url, key, model, call) => {
  const common = { apiKey: key, dangerouslyAllowBrowser: true, maxRetries: 0 };
  const options = { ...common, baseURL: url + "/v1" };
  const context = {
    model, call, options, OpenAI,
    openai: new OpenAI(options), anthropic: new Anthropic({ ...common, baseURL: url }),
  };
  const wrong = [];
  for (const [name, call] of Object.entries(CALLS)) {
    try {
      if (!await call(context)) wrong.push(name);
    } catch (error) {
      wrong.push(`${name}: ${error}`);
    }
  }
  return { count: Object.keys(CALLS).length, wrong };
};
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def origin_of(directory: Path) -> Iterator[str]:
    """An origin that serves a directory."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def site(directory: Path) -> Path:
    """The page, and the clients that it imports: packages of npm in one file."""
    made = directory / "made"
    made.mkdir(parents=True)
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", made, *PACKAGES]
    subprocess.run(npm, check=True, capture_output=True)
    (made / "clients.mjs").write_text(CLIENTS)
    bundle = [made / "node_modules/.bin/esbuild", made / "clients.mjs", "--bundle", "--format=esm"]
    bundle += [f"--outfile={directory / 'clients.js'}", "--platform=browser", "--external:node:*"]
    subprocess.run(bundle, check=True, capture_output=True)
    (directory / "index.html").write_text(PAGE)
    return directory


def judged_by_a_page(scratch: Path, model_dir: Path) -> tuple[bool, str]:
    """Whether the page could make all calls, and another origin's none; what it found."""
    files = site(scratch / "site")
    key, _ = add(scratch / "keys.json", {"name": "page"})
    with origin_of(files) as allowed, origin_of(files) as other:
        settings = {"allowed_origins": allowed, "api_keys": str(scratch / "keys.json")}
        with saying_router(scratch, model_dir, **settings) as saying:
            asked = ", ".join(map(json.dumps, (saying.url, key, MODEL, CALL)))
            found, refused = (
                _found(scratch / f"profile-{number}", origin, asked)
                for number, origin in enumerate((allowed, other))
            )
    is_good = not found["wrong"] and len(refused["wrong"]) == refused["count"]
    num_good = found["count"] - len(found["wrong"])
    says = f"{num_good} of {found['count']} calls from an allowed origin {found['wrong'] or ''}"
    return is_good, f"{says}, {refused['count'] - len(refused['wrong'])} from another one"


def _found(profile: Path, origin: str, asked: str) -> dict:
    browser = Browser(profile)
    try:
        page = browser.page()
        page.open(f"{origin}/index.html")
        page.until("window.judge !== undefined", "the clients are loaded")
        return page.run(f"window.judge({asked})")
    finally:
        browser.close()
