"""What clients may ask: the request bodies of the OpenAI API, checked and turned into what the router serves.

Everything a client can get wrong ends here with one line that names the field. Fields of the public API that are not
served are named as such; a value that asks for nothing (null, the API's default) is let through.
"""

import re
import secrets
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..cluster.messages import Sampling
from .errors import ApiError, bad_request, printable

MAX_CHOICES = 128  # n times the number of prompts
MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
SEED_MASK = 2**63 - 1
COLDEST = 1e-3  # the lowest temperature above 0 that is served: logits divided by less leave the range of float32
LOWEST_REPETITION_PENALTY = 0.01  # for the same reason
COMPLETION_MAX_TOKENS = 16

NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Unserved = msgspec.Raw | msgspec.UnsetType


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """One part of a message's content; only text is served."""

    text: str


class Message(Struct, forbid_unknown_fields=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    # what an answer's `message.model_dump()` holds beside; served only when it says nothing
    refusal: Unserved = msgspec.UNSET
    annotations: Unserved = msgspec.UNSET
    audio: Unserved = msgspec.UNSET
    function_call: Unserved = msgspec.UNSET
    tool_calls: Unserved = msgspec.UNSET

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def as_template_input(self) -> dict[str, str]:
        """What chat templates expect."""
        role = "system" if self.role == "developer" else self.role
        fields = {"role": role, "content": self.text}
        return fields | {"name": self.name} if self.name else fields


class CommonBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions share; null is everywhere the same as absent."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=LOWEST_REPETITION_PENALTY, le=100.0)] | None = None
    logit_bias: dict[str, Bias] | None = None
    max_tokens: Positive | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[NotNegative], Meta(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None  # each choice also carries its token ids
    user: str | None = None  # accepted and not used: requests are not attributed to users
    service_tier: Unserved = msgspec.UNSET

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_completion_tokens: Positive | None = None
    tools: Unserved = msgspec.UNSET
    tool_choice: Unserved = msgspec.UNSET
    parallel_tool_calls: Unserved = msgspec.UNSET
    functions: Unserved = msgspec.UNSET
    function_call: Unserved = msgspec.UNSET
    response_format: Unserved = msgspec.UNSET
    modalities: Unserved = msgspec.UNSET
    audio: Unserved = msgspec.UNSET
    prediction: Unserved = msgspec.UNSET
    reasoning_effort: Unserved = msgspec.UNSET
    verbosity: Unserved = msgspec.UNSET
    web_search_options: Unserved = msgspec.UNSET
    store: Unserved = msgspec.UNSET
    metadata: Unserved = msgspec.UNSET
    chat_template: Unserved = msgspec.UNSET
    chat_template_kwargs: Unserved = msgspec.UNSET


class CompletionBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Unserved = msgspec.UNSET
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: Unserved = msgspec.UNSET


B = TypeVar("B", ChatBody, CompletionBody)

# Values that ask for nothing that is not served, beside null.
HARMLESS = {
    "tools": (b"[]",),
    "functions": (b"[]",),
    "tool_choice": (b'"none"', b'"auto"'),
    "parallel_tool_calls": (b"true", b"false"),
    "response_format": (b'{"type":"text"}',),
    "modalities": (b'["text"]',),
    "echo": (b"false",),
    "store": (b"false",),
    "service_tier": (b'"auto"', b'"default"'),
    "annotations": (b"[]",),
    "tool_calls": (b"[]",),
}


def parse_body(raw: bytes, kind: type[B]) -> B:
    """The checked body. Raises ApiError (400) that names the field at fault."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad_request(f"The body is not valid JSON: {reason[:200]}") from None
    _check_unserved(body)
    _check_common(body)
    if isinstance(body, ChatBody):
        _check_chat(body)
    elif body.best_of is not None and body.best_of > body.num_choices:
        raise bad_request("best_of greater than n is not supported", param="best_of")
    return body


def sampling_of(body: CommonBody, *, max_new: int, logprobs: int, choice: int) -> Sampling:
    """How choice number `choice` of a request samples; a given seed makes every choice repeatable and different.

    A temperature between 0 and `COLDEST` is served as `COLDEST`, at which the likeliest token wins all but ties.
    """
    temperature = _or(body.temperature, 1.0)
    seed = secrets.randbits(63) if body.seed is None else (body.seed + choice) & SEED_MASK
    return Sampling(
        temperature=max(temperature, COLDEST) if temperature > 0 else 0.0,
        top_k=max(0, _or(body.top_k, 0)),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        seed=seed,
        max_new_tokens=max_new,
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """A completion body's prompts: a string, strings, token ids, or lists of token ids. Raises ApiError (400)."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise bad_request("prompt mixes strings and token ids: give one kind", param="prompt")
    if not prompts or any(len(item) == 0 for item in prompts):
        raise bad_request("prompt is empty: give at least one character or token", param="prompt")
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts with n={body.num_choices} exceed {MAX_CHOICES} choices", param="n")
    return prompts


def max_new_of(body: CommonBody) -> int | None:
    """The output length that the client asked for; None: the default."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def logprobs_of(body: ChatBody | CompletionBody) -> int:
    """-1: none; k: the chosen token's and the k best."""
    if isinstance(body, ChatBody):
        return _or(body.top_logprobs, 0) if body.logprobs else -1
    return -1 if body.logprobs is None else body.logprobs


def check_token_ids(body: CommonBody, prompt_ids: list[int], vocab_size: int) -> None:
    """Raises ApiError (400) for an id outside the vocabulary, wherever the body names one."""
    named = {"prompt": prompt_ids, "stop_token_ids": body.stop_token_ids or []}
    named["logit_bias"] = [int(token) for token in body.logit_bias or {}]
    for param, ids in named.items():
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise bad_request(f"{param}: token id {wrong} is outside the vocabulary of {vocab_size}", param=param)


T = TypeVar("T")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_unserved(body: Struct, where: str = "", param: str | None = None) -> None:
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, msgspec.Raw):
            compact = bytes(value).translate(None, b" \t\r\n")
            if compact != b"null" and compact not in HARMLESS.get(name, ()):
                raise bad_request(f"{where}{name} is not supported", param=param or name)


def _check_common(body: CommonBody) -> None:
    if len(body.stops) > MAX_STOPS:
        raise bad_request(f"stop has {len(body.stops)} strings, at most {MAX_STOPS} are allowed", param="stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in body.stops):
        raise bad_request(f"every stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    biases = body.logit_bias or {}
    if len(biases) > MAX_BIASES:
        raise bad_request(f"logit_bias has {len(biases)} tokens, at most {MAX_BIASES} are allowed", param="logit_bias")
    wrong = next((key for key in biases if not re.fullmatch(r"[0-9]{1,9}", key)), None)
    if wrong is not None:
        raise bad_request(f"logit_bias: {printable(wrong)} is not a token id", param="logit_bias")


def _check_chat(body: ChatBody) -> None:
    if not body.messages:
        raise bad_request("messages is empty: give at least one message", param="messages")
    if len(body.messages) > MAX_MESSAGES:
        text = f"messages has {len(body.messages)} messages, at most {MAX_MESSAGES} are allowed"
        raise bad_request(text, param="messages")
    for number, message in enumerate(body.messages):
        _check_unserved(message, f"messages[{number}].", "messages")
    if not any(message.text for message in body.messages):
        raise bad_request("all messages are empty: give at least one character", param="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")


def _invalid_field(reason: str) -> ApiError:
    """An ApiError from msgspec's "Expected `int`, got `str` - at `$.n`"."""
    text, _, where = reason.partition(" - at `$")
    named = re.search(r"(?:field|required field) `([^`]*)`", text)
    path = re.match(r"\.?([A-Za-z_]+)", where)
    param = path.group(1) if path else (named.group(1) if named else None)
    place = f"{where.strip('`').lstrip('.')}: " if where else ""
    if text.startswith("Object contains unknown field") and named:
        return bad_request(f"{place}{printable(named.group(1))} is not a field of this request", param=param)
    line = "".join(char if char.isascii() and char.isprintable() else "?" for char in f"{place}{text}")
    return bad_request(line[:400], param=param)
