"""`baton chat`: a conversation with a running cluster in the terminal.

Ctrl-C interrupts the answer (the server cancels it), Ctrl-D ends the conversation.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from ...cluster.config.fields import Setting, check_fields, read_command_line, setting
from ...cluster.process.process import EXIT_OK
from .client import KEY_VARIABLE, ChatClient, RequestFailed, StreamedAnswer
from .command import run_command

PROG = "baton chat"
SUMMARY = "Chat with a running cluster. Ctrl-C interrupts an answer, Ctrl-D quits."


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Chat."""

    url: str = setting("http://127.0.0.1:8000", Setting(help="address of the router", metavar="URL"))
    system: str = setting("", Setting(help="system message; empty: the model's own"))
    max_tokens: int = setting(512, Setting(help="longest answer", unit="tokens", minimum=1, maximum=2**20))
    temperature: float = setting(0.0, Setting(help="0: always the likeliest token", minimum=0, maximum=2))
    once: str = setting("", Setting(help="answer this one message and end", metavar="PROMPT"))

    def __post_init__(self) -> None:
        check_fields(self)


class Conversation:
    """The messages so far. A turn enters the history only when its answer is complete."""

    def __init__(self, client: ChatClient, config: ChatConfig, model: str) -> None:
        self._client, self._config, self._model = client, config, model
        self.messages: list[dict[str, str]] = []
        if config.system:
            self.messages.append({"role": "system", "content": config.system})

    def __repr__(self) -> str:
        return f"<Conversation {len(self.messages)} messages with {self._model}>"

    def ask(self, prompt: str, on_text: Callable[[str], None]) -> StreamedAnswer:
        """Sends `prompt` with the history. Raises RequestFailed, which leaves the history unchanged."""
        turn = [*self.messages, {"role": "user", "content": prompt}]
        body: dict[str, Any] = {
            "model": self._model,
            "messages": turn,
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        answer = self._client.stream(body, on_text)
        self.messages = [*turn, {"role": "assistant", "content": answer.text}]
        return answer


def describe(answer: StreamedAnswer) -> str:
    """One line of figures about an answer: duration, speed, accept length."""
    parts = [f"{answer.num_tokens} tokens"]
    if answer.first_text_s is not None:
        parts.append(f"first after {answer.first_text_s * 1000:.0f} ms")
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tok/s")
    if answer.accept_length is not None:
        parts.append(f"accept length {answer.accept_length:.2f}")
    if answer.finish_reason == "length":
        parts.append("cut at --max-tokens")
    return "[" + ", ".join(parts) + "]"


def _writer(out: TextIO) -> Callable[[str], None]:
    def write(text: str) -> None:
        out.write(text)
        out.flush()

    return write


def _prompts() -> Iterator[str]:
    """Reads the user's prompts until Ctrl-D. Ctrl-C at the prompt starts a new line."""
    while True:
        try:
            prompt = input("you> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n(Ctrl-D quits)\n")
            continue
        if prompt:
            yield prompt


def converse(conversation: Conversation, prompts: Iterator[str], out: TextIO) -> None:
    """Answers each prompt. A failed or interrupted answer ends its turn only."""
    write = _writer(out)
    for prompt in prompts:
        try:
            answer = conversation.ask(prompt, write)
            write(f"\n{describe(answer)}\n")
        except KeyboardInterrupt:
            write("\n(interrupted)\n")
        except RequestFailed as error:
            write(f"\n{error}\n")


def _ask_once(conversation: Conversation, prompt: str) -> None:
    """Asks once. Writes the answer to stdout, for pipes, and the figures to stderr."""
    answer = conversation.ask(prompt, _writer(sys.stdout))
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stderr.write(describe(answer) + "\n")


def main(argv: list[str]) -> int:
    """Runs `baton chat`. Returns 0 at the end of the conversation, 1 on failure, 2 for a bad command line."""
    return run_command(PROG, lambda: _chat(argv))


def _chat(argv: list[str]) -> int:
    config = ChatConfig(**read_command_line(ChatConfig, argv, PROG, SUMMARY))  # type: ignore[arg-type]
    client = ChatClient(config.url, api_key=os.environ.get(KEY_VARIABLE, ""))
    model = client.model()
    conversation = Conversation(client, config, model)
    if config.once:
        _ask_once(conversation, config.once)
    else:
        sys.stdout.write(f"{config.url} serves {model}; {SUMMARY.partition('. ')[2]}\n")
        converse(conversation, _prompts(), sys.stdout)
    return EXIT_OK
