"""Renders a chat by the model's template, inside a sandboxed worker.

A template is a program that comes with the model. Jinja's sandbox confines its access, but does not bound its
time or memory, and clients' data drive it. Templates therefore never run in the router. `pool_worker` runs
this file in a process of its own; `text/templates` calls it from the router.
"""

from typing import Any

import msgspec
from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from .frames import REFUSED, RENDERED, TOO_LARGE

MAX_RENDERED = 16 << 20  # bytes; GROWTH times the chat's own bytes where that is more
GROWTH = 4

Switches = dict[str, bool | int | float | str | None]


class Setup(msgspec.Struct, frozen=True):
    """A worker's setup: one template or several by name, and the model's special tokens."""

    chat_template: str | dict[str, str]
    special_tokens: dict[str, str]


class Chat(msgspec.Struct, frozen=True):
    """The input of a template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    switches: Switches = {}
    has_answer_head: bool = True  # the head of an answer follows the messages
    is_continued: bool = False  # the text of the last message stays open


class TemplateRenderer:
    """Renders as `transformers` does for this model. It needs no vocabulary for that."""

    def __init__(self, setup: Setup) -> None:
        self._special_tokens = setup.special_tokens
        empty = Backend(models.BPE())
        hf = PreTrainedTokenizerFast(tokenizer_object=empty)  # type: ignore[no-untyped-call,unused-ignore]
        self._hf = hf
        self._hf.chat_template = setup.chat_template
        self._decoder = msgspec.json.Decoder(Chat)

    def __repr__(self) -> str:
        return "TemplateRenderer()"

    def answer(self, data: bytes) -> bytes:
        """The reply to an encoded Chat. An exception of the template becomes a reply, too."""
        try:
            text = self._render(self._decoder.decode(data)).encode()
        except MemoryError:
            return TOO_LARGE
        except (TemplateError, TypeError, ValueError) as error:
            return REFUSED + _first_line(error)
        except Exception as error:  # the message may quote this process, so the client gets the type only
            return REFUSED + type(error).__name__.encode()
        return RENDERED + text if len(text) <= max(MAX_RENDERED, GROWTH * len(data)) else TOO_LARGE

    def _render(self, chat: Chat) -> str:
        given: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": chat.has_answer_head,
            "continue_final_message": chat.is_continued,
            "tools": chat.tools or None,
        }
        rendered: object = self._hf.apply_chat_template(
            chat.messages, **(given | self._special_tokens | chat.switches)
        )
        assert isinstance(rendered, str)
        return rendered


def _first_line(error: Exception) -> bytes:
    text = str(error)
    return (text.splitlines()[0][:200] if text.strip() else "template error").encode(errors="replace")
