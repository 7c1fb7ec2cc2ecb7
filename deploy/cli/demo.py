"""`baton demo`: the demo model, a cluster and one request on this machine.

1. Get the model into the user's cache (downloaded and converted the first time). 2. Start router, prefill and
decode; wait until a pair can serve. 3. Stream the answer to one chat request. 4. Show the request's timeline;
`--once` stops here. 5. Show a curl line and the addresses; stay up until Ctrl-C. Everything that was
started stops; another Ctrl-C makes it stop at once.
"""

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...cluster.config.fields import Setting, check_fields, port_number, read_command_line, setting
from ...cluster.config.roles import UpConfig
from ...cluster.distribution import DISTRIBUTION
from ...cluster.errors import ConfigError, StartupError
from ...cluster.process.process import EXIT_INTERRUPTED, EXIT_OK, Shutdown
from ..up.launcher import Cluster
from .client import ChatClient, StreamedAnswer
from .command import run_command
from .demo_model import ensure_demo_model

PROG = "baton demo"
SUMMARY = "Start a cluster with the demo model, stream one answer and show where the time went."
READY_TIMEOUT_S = 180.0
POLL_S = 0.2
DRAFT_DIR = Path(__file__).resolve().parents[2] / "assets" / "smollm2-135m-eagle3"

Row = tuple[str, str, str]  # (step, figure, remark)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Demo."""

    prompt: str = setting(
        "Explain in a few sentences why the sky is blue.", Setting(help="the user's message")
    )
    max_tokens: int = setting(160, Setting(help="longest answer", unit="tokens", minimum=1, maximum=4096))
    port: int = setting(8000, port_number("port of the router; 0: any free one"))
    no_draft: bool = setting(False, Setting(help="serve without speculation"))
    once: bool = setting(False, Setting(help="stop after the answer"))

    def __post_init__(self) -> None:
        check_fields(self)


def draft_dir() -> Path:
    """The directory of the installed EAGLE3 head. Raises ConfigError where it is missing."""
    if not (DRAFT_DIR / "config.json").is_file():
        raise ConfigError(f"no draft head in {DRAFT_DIR}: install {DISTRIBUTION} again, or use --no-draft")
    return DRAFT_DIR


class Interruption:
    """Signal handling: the first signal interrupts the demo's wait, a signal during the stop makes it
    immediate."""

    def __init__(self) -> None:
        self.shutdown = Shutdown(self._on_signal)
        self._may_interrupt = True

    def __repr__(self) -> str:
        return f"Interruption({self.shutdown})"

    def disarm(self) -> None:
        """Makes later signals raise no exception."""
        self._may_interrupt = False

    def _on_signal(self) -> None:
        if self._may_interrupt:
            self._may_interrupt = False
            raise KeyboardInterrupt


def run(config: DemoConfig, console: Console, interruption: Interruption) -> None:
    """Runs the steps of the module's docstring. Stops the cluster in every case. Raises BatonError."""
    model = ensure_demo_model()
    draft = "" if config.no_draft else str(draft_dir())
    cluster = Cluster(
        UpConfig(
            model=str(model),
            draft=draft,
            no_draft=config.no_draft,
            device="cpu",
            port=config.port,
            log_level="warning",
        )
    )
    try:
        with console.status("starting router, prefill and decode"):
            cluster.start()
            cluster.wait_ready(READY_TIMEOUT_S)
        show_children(cluster, console)
        client = ChatClient(cluster.url)
        body = request_body(client.model(), config)
        answer = ask(client, body, console)
        console.print(timeline_table(answer))
        if not config.once:
            show_addresses(cluster.url, body, console)
            console.print("running until Ctrl-C")
            stay(cluster)
    finally:
        interruption.disarm()
        with console.status("stopping: running requests may end, Ctrl-C ends them now"):
            cluster.stop(interruption.shutdown.stop, drain_s=cluster.drain_s)


def stay(cluster: Cluster) -> None:
    """Waits for Ctrl-C. Raises StartupError when the cluster gives up before."""
    while not cluster.failure:
        time.sleep(POLL_S)
    raise StartupError(cluster.failure)


def request_body(model: str, config: DemoConfig) -> dict[str, Any]:
    """The body of the demo's chat completion."""
    messages = [{"role": "user", "content": config.prompt}]
    return {"model": model, "messages": messages, "max_tokens": config.max_tokens, "temperature": 0}


def show_children(cluster: Cluster, console: Console) -> None:
    """Prints one line with the process id of each child."""
    console.print("started " + ", ".join(f"{child.role} (pid {child.pid})" for child in cluster.children))


def ask(client: ChatClient, body: dict[str, Any], console: Console) -> StreamedAnswer:
    """Sends the request and writes the answer as it arrives."""
    console.print("\n[bold]user[/]       ", end="")
    console.print(body["messages"][-1]["content"], markup=False)
    console.print("[bold]assistant[/]  ", end="")

    def write(text: str) -> None:
        console.file.write(text)
        console.file.flush()

    answer = client.stream(body, write)
    console.print("\n")
    return answer


def timeline_rows(answer: StreamedAnswer) -> list[Row]:
    """The timeline as rows in the order of the steps. Steps that the server did not report are left out."""
    t = answer.timeline

    def ms(key: str) -> str:
        return f"{t[key]:.1f} ms" if isinstance(t.get(key), (int, float)) else ""

    def count(key: str) -> int:
        return int(t.get(key) or 0)

    prompt = int(answer.usage.get("prompt_tokens") or 0)
    drafts = f"{count('accepted')} of {count('drafted')} drafted tokens accepted"
    accept = f"{answer.accept_length:.2f}" if answer.accept_length is not None else ""
    rows = [
        ("tokenize", ms("tokenize_ms"), f"{prompt} prompt tokens"),
        ("queue", ms("queue_ms"), "waiting for a free pair"),
        ("prefill queue", ms("prefill_queue_ms"), ""),
        ("prefill", ms("prefill_ms"), f"{count('cached_tokens')} tokens from the prefix cache"),
        ("first token (TTFT)", ms("ttft_ms"), "sampled by prefill, before the hand-off ends"),
        (
            "hand-off",
            ms("handoff_ms"),
            f"{count('handoff_bytes') / 2**20:.2f} MiB in {count('handoff_blocks')} blocks",
        ),
        ("per token (TPOT)", ms("tpot_ms"), f"{answer.num_tokens} tokens, ended by {answer.finish_reason}"),
        ("verify steps", str(count("verify_steps") or ""), drafts),
        ("accept length", accept, "tokens committed per verify"),
        ("end to end", ms("e2e_ms"), ""),
    ]
    return [row for row in rows if row[1]]


def timeline_table(answer: StreamedAnswer) -> Table:
    """The timeline for the terminal."""
    table = Table(
        title="the road of this request", title_justify="left", box=None, pad_edge=False, show_header=False
    )
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for row in timeline_rows(answer):
        table.add_row(*row)
    return table


def curl_line(url: str, body: dict[str, Any]) -> str:
    """A shell line that sends `body` again, streaming."""
    payload = json.dumps({**body, "stream": True})
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(payload)}"


def show_addresses(url: str, body: dict[str, Any], console: Console) -> None:
    """Prints the addresses of the running cluster, and a curl line."""
    console.print("\n[bold]try it[/]")
    console.print(curl_line(url, body), soft_wrap=True, markup=False, highlight=False)
    console.print(f"baton chat --url {url}", highlight=False)
    console.print(f"\nstatus   {url}/status\nmetrics  {url}/metrics", highlight=False)


def main(argv: list[str]) -> int:
    """Runs `baton demo`.

    Returns 0 after the answer (`--once`, or Ctrl-C in the wait), 1 for a failure, 2 for bad usage.
    """
    return run_command(PROG, lambda: _demo(argv))


def _demo(argv: list[str]) -> int:
    config = DemoConfig(**read_command_line(DemoConfig, argv, PROG, SUMMARY))  # type: ignore[arg-type]
    console = Console(highlight=False)
    interruption = Interruption()
    interruption.shutdown.install()
    try:
        run(config, console, interruption)
    except KeyboardInterrupt:
        console.print("stopped")
        return EXIT_INTERRUPTED if config.once else EXIT_OK
    return EXIT_OK
