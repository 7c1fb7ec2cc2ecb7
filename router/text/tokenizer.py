"""The model's tokenizer: prompts and chats to token ids. It imports no torch.

A chat takes three steps: `guard` here, rendering in the sandbox (`templates`), `encode_rendered` here.

Text in a chat message stays text: where it spells a control token, the spelling is encoded as letters, so a
message cannot end its own turn or open another. A raw completion prompt may use control tokens.
"""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from ...cluster.errors import ConfigError, StartupError
from ..errors import bad_request, nested_too_deeply, printable
from ..sandbox.template_renderer import Chat, Setup, Switches
from .detokenizer import Detokenizer, TokenBytes
from .tool_prompts import ChatMessage, written_out
from .word_ids import word_ids

RENDERING = signature(PreTrainedTokenizerFast.apply_chat_template)
TEMPLATE_FILE = "chat_template.json"  # beside the settings of models of images
# Mistral Small 2501 and 3.1 and their like are published with the cuts of Llama 3 in tokenizer.json, not with
# those of the tekken.json that they were trained with.
LLAMA_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_CUTS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_MARK = ("[INST]", 3)  # a token of every tekken, and its id
RESERVED_SWITCHES = frozenset((*RENDERING.parameters, "messages", "conversations"))


@dataclass(frozen=True)
class GuardedChat:
    """A chat for the template. `mark`, a number and an x replace each spelled control token."""

    chat: Chat
    mark: str
    spelled: list[str]

    def num_chars_of(self, rendered: str) -> int:
        """The number of characters of `rendered` without the marks."""
        return len(rendered) - len(self.mark) * len(self.spelled)


class Tokenizer:
    """The tokenizer of one model. Its methods are thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._hf = tokenizer
        self._backend: Backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        _keep_spaces(self._backend)
        self._plain: Backend = Backend.from_str(self._backend.to_str())
        self._plain.encode_special_tokens = True
        self._word_ids = word_ids(self._backend)
        self._has_frame = self._backend.num_special_tokens_to_add(False) > 0
        self._frame = self._frame_of("a")
        self.token_bytes = TokenBytes(self._backend)
        self.longest_token = max(1, self.token_bytes.longest)
        added = self._backend.get_added_tokens_decoder()
        spellings = sorted(
            (token.content for token in added.values() if token.special), key=len, reverse=True
        )
        self._reserved = RESERVED_SWITCHES | tokenizer.special_tokens_map.keys()
        self._special = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, chat={self.has_chat_template})"

    def __len__(self) -> int:
        return len(self.token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._hf.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a raw prompt.

        `add_special_tokens` adds the tokenizer's own frame, such as a begin token.
        """
        if add_special_tokens and self._has_frame:
            return self._encode(self._backend, text, add_special_tokens=True)
        return self._encode_text(text)

    def encode_with_starts(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """The ids of a raw prompt, and for each token the index in `text` of its first character.

        A token that spells no character (such as a begin token) has the index of the next one.
        """
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        starts, start = [], len(text)
        for first, end in reversed(encoding.offsets):
            start = first if first < end else start
            starts.append(start)
        return encoding.ids, starts[::-1]

    @property
    def chat_template(self) -> object:
        """The model's template, several by name, or None."""
        return self._hf.chat_template

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of control tokens by their text."""
        return {self.token_bytes[token].decode(): token for token in self.token_bytes.special}

    @property
    def template_setup(self) -> Setup | None:
        """The setup of the model's template workers; None without a template."""
        if not self.has_chat_template:
            return None
        return Setup(chat_template=self._hf.chat_template, special_tokens=dict(self._hf.special_tokens_map))

    def guard(
        self,
        messages: Sequence[ChatMessage],
        switches: Switches | None = None,
        tools: Sequence[ChatMessage] = (),
        *,
        is_native: bool = False,
        has_answer_head: bool = True,
        is_continued: bool = False,
    ) -> GuardedChat:
        """A chat that may be rendered by the model's template: no text in it spells a control token.

        `switches` are further variables of the template. With `is_native` the template writes tools and
        calls; otherwise they become text of messages. Raises ApiError (400).
        """
        if not self.has_chat_template:
            raise bad_request("this model has no chat template: use /v1/completions", param="messages")
        self._check_switches(switches or {})
        if not is_native:
            messages, tools = written_out(messages, tools), ()
        guard = _Guard(self._special)
        try:
            guarded = [_in_strings(guard, message) for message in messages]
            given = [_in_strings(guard, tool) for tool in tools]
        except RecursionError:
            raise nested_too_deeply() from None
        chat = Chat(
            messages=guarded,
            tools=given,
            switches=switches or {},
            has_answer_head=has_answer_head,
            is_continued=is_continued,
        )
        return GuardedChat(chat, guard.mark, guard.spelled)

    def _check_switches(self, switches: Switches) -> None:
        """Switches reach the template unchanged, so none may name or spell a control token.

        Raises ApiError (400).
        """
        taken = sorted(self._reserved.intersection(switches))
        if taken:
            text = f"chat_template_kwargs: {taken[0]} is not a switch of a template"
            raise bad_request(text, param="chat_template_kwargs")
        for name, value in switches.items():
            if isinstance(value, str) and self._special is not None and self._special.search(value):
                text = f"chat_template_kwargs: {printable(name)} spells a control token of the model"
                raise bad_request(text, param="chat_template_kwargs")

    def encode_rendered(
        self, chat: GuardedChat, rendered: str, *, add_special_tokens: bool = False
    ) -> list[int]:
        """The token ids of a rendered chat. Spelled control tokens are encoded as letters.

        `add_special_tokens` adds the tokenizer's own frame to what the template wrote.
        """
        ids = self._encode_guarded(chat, rendered)
        return [*self._frame[0], *ids, *self._frame[1]] if add_special_tokens else ids

    def _encode_guarded(self, chat: GuardedChat, rendered: str) -> list[int]:
        if not chat.spelled:
            return self._encode_text(rendered)
        ids: list[int] = []
        for i, part in enumerate(rendered.split(chat.mark)):
            text = part
            if i:  # a number, an x, and the following text
                number, _, text = part.partition("x")
                ids += self._encode(self._plain, chat.spelled[int(number)], add_special_tokens=False)
            if text:
                ids += self._encode_text(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        detokenizer = self.detokenizer(skip_special=False)
        return detokenizer.feed(ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special: bool = True, shown: AbstractSet[int] = frozenset()) -> Detokenizer:
        return Detokenizer(self.token_bytes, skip_special=skip_special, shown=shown)

    def _frame_of(self, text: str) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and behind a text."""
        bare = self._encode(self._backend, text, add_special_tokens=False)
        framed = self._encode(self._backend, text, add_special_tokens=True)
        at = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
        return framed[:at], framed[at + len(bare) :]

    def _encode_text(self, text: str) -> list[int]:
        """The ids of a text with control tokens in it, and nothing added around it."""
        ids = None if self._word_ids is None else self._word_ids.encode(text)
        return self._encode(self._backend, text, add_special_tokens=False) if ids is None else ids

    @staticmethod
    def _encode(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids without offsets, which would cost half as much again."""
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def _keep_spaces(backend: Backend) -> None:
    """Makes offsets of tokens include their leading space, also where the tokenizer's file trims it."""
    processor = backend.post_processor
    if processor is not None:
        parts = json.loads(processor.__getstate__(), object_hook=_untrimmed)
        processor.__setstate__(json.dumps(parts).encode())
        backend.post_processor = processor


def _untrimmed(part: dict[str, Any]) -> dict[str, Any]:
    return part | {"trim_offsets": False} if "trim_offsets" in part else part


class _Guard:
    """Replaces each spelled control token by an unguessable mark and a number, and notes its spelling."""

    def __init__(self, special: re.Pattern[str] | None) -> None:
        self._special = special
        self.mark = ""  # made for the first spelled control token
        self.spelled: list[str] = []

    def __call__(self, text: str) -> str:
        if self._special is None or self._special.search(text) is None:
            return text
        self.mark = self.mark or secrets.token_hex(16)
        return self._special.sub(self._note, text)

    def _note(self, match: re.Match[str]) -> str:
        self.spelled.append(match.group())
        return f"{self.mark}{len(self.spelled) - 1}x"


def _in_strings(change: Callable[[str], str], value: Any) -> Any:  # noqa: ANN401 - JSON
    """`value` with `change` applied to every string in it, keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _in_strings(change, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_strings(change, item) for item in value]
    return value


def _template_in(file: Path) -> str:
    """The chat template of a checkpoint that reads images. Raises ConfigError where the file holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str):
        raise ConfigError(f"{file}: holds no chat_template; fetch the file again")
    return found


def _correct_cuts(backend: Backend) -> None:
    """Gives a tekken with the cuts of Llama 3 its own."""
    token, token_id = TEKKEN_MARK
    if backend.pre_tokenizer is None or backend.token_to_id(token) != token_id:
        return
    parts = json.loads(backend.pre_tokenizer.__getstate__()).get("pretokenizers") or [{}]
    if parts[0].get("pattern") == {"Regex": LLAMA_CUTS}:
        backend.pre_tokenizer[0] = Split(Regex(TEKKEN_CUTS), behavior="isolated")


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model directory or hub id. Raises ConfigError or StartupError in one line."""
    path = Path(model)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        remedy = "give a Hugging Face directory with a fast tokenizer"
        if (path / "tekken.json").is_file():
            remedy = "a tekken.json alone is not read; take tokenizer.json from another copy of the model"
        raise ConfigError(f"--model {model} has no tokenizer.json: {remedy}")
    if not path.is_dir() and (path.is_absolute() or model.startswith(".") or model.count("/") != 1):
        raise ConfigError(f"--model {model!r} is neither a directory nor a hub id (owner/name)")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        if tokenizer.chat_template is None and (path / TEMPLATE_FILE).is_file():
            tokenizer.chat_template = _template_in(path / TEMPLATE_FILE)
        _correct_cuts(tokenizer.backend_tokenizer)
        return Tokenizer(tokenizer)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise StartupError(f"cannot load the tokenizer of {model}: {reason}") from None
