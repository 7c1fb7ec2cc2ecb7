"""Rendering a chat by the model's template, as a process of its own does it, and what is said to that process.

A template is a program that came with the model. Jinja's sandbox keeps it from reaching out, but not from running for
ever or from taking all memory, and what it does depends on what clients say. So as it stands it never runs in the router:
see `template_worker` for the process, `templates` for those who ask it, and `inline_templates` for those that are bounded.

On the socket both ways: 4 bytes of length, little-endian, and that many bytes. To the worker first a Setup, then Chats,
as JSON; back first READY, then a reply per Chat in their order: its kind, one byte, and a text in UTF-8. TOO_LARGE is the
last word of a worker.
"""

import struct
from typing import Any

import msgspec
from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

READY, RENDERED, REFUSED, TOO_LARGE = (
    b"+",
    b"t",
    b"r",
    b"m",
)  # kinds: the text; why not, in one line; memory or text
MAX_RENDERED = 16 << 20  # bytes, or as many times a chat's own as GROWTH says
GROWTH = 4
LENGTH = struct.Struct("<I")

Switches = dict[str, bool | int | float | str | None]


class Setup(msgspec.Struct, frozen=True):
    """What a worker renders with: a template, or several by name, and the model's special tokens."""

    chat_template: str | dict[str, str]
    special_tokens: dict[str, str]


class Chat(msgspec.Struct, frozen=True):
    """What is to be rendered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    switches: Switches = {}


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


class Frames:
    """Cuts what a socket brings into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __repr__(self) -> str:
        return f"Frames({len(self._data)} bytes wait)"

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are whole now."""
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._data, at)
            if len(self._data) - at - LENGTH.size < size:
                break
            found.append(bytes(self._data[at + LENGTH.size : at + LENGTH.size + size]))
            at += LENGTH.size + size
        del self._data[:at]
        return found


class Renderer:
    """Renders as `transformers` does for this model; it needs no vocabulary for that."""

    def __init__(self, setup: Setup) -> None:
        self._special_tokens = setup.special_tokens
        empty = Backend(models.BPE())
        self._hf = PreTrainedTokenizerFast(tokenizer_object=empty)  # type: ignore[no-untyped-call,unused-ignore]
        self._hf.chat_template = setup.chat_template
        self._decoder = msgspec.json.Decoder(Chat)

    def __repr__(self) -> str:
        return "Renderer()"

    def answer(self, data: bytes) -> bytes:
        """The reply to an encoded Chat. Whatever a template raises is a reply, too."""
        try:
            text = self._render(self._decoder.decode(data)).encode()
        except MemoryError:
            return TOO_LARGE
        except (TemplateError, TypeError, ValueError) as error:
            return REFUSED + _first_line(error)
        except (
            Exception
        ) as error:  # a template may do anything; its words could be ours, so only their kind is told
            return REFUSED + type(error).__name__.encode()
        return RENDERED + text if len(text) <= max(MAX_RENDERED, GROWTH * len(data)) else TOO_LARGE

    def _render(self, chat: Chat) -> str:
        given: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": True,
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
