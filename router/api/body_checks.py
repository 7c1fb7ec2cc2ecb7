"""Validates request bodies of the OpenAI API and translates them for the router.

Every mistake of a client becomes one line that names the field. Fields of the public API that are not
supported are refused by name; a value that asks for nothing (null, or the API's default) passes.
"""

import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import msgspec

from ...cluster.protocol.messages import Sampling
from ..errors import bad_request, printable
from .body_types import (
    MAX_CHOICES,
    MAX_SEED,
    ChatBody,
    CommonBody,
    CompletionBody,
    DetokenizeBody,
    RequestMessage,
    TokenizeBody,
)
from .field_errors import UNREADABLE, RefusedFields, check_refused, is_unknown_field, refused_of, unreadable
from .message_bodies import CountBody, MessageBody
from .response_bodies import MAX_METADATA, ResponseBody
from .response_items import check_items
from .structured import check_constraint
from .tool_bodies import AllowedTools, Function, ToolChoice
from .unknown_fields import unknown_field_error, unknown_fields, without

MAX_MESSAGES = 4096
MAX_STOPS = 64  # OpenAI's API has 4; vLLM has no bound, and evaluations send long lists
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
SEED_MASK = MAX_SEED
COLDEST = (
    1e-3  # the lowest temperature above 0 that is served: logits divided by less leave the range of float32
)
COMPLETION_MAX_TOKENS = 16
BODIES = (ChatBody, CompletionBody, ResponseBody, MessageBody)
REFUSED: Mapping[type, RefusedFields] = {kind: refused_of(kind) for kind in BODIES}
REFUSED_IN_MESSAGES = refused_of(RequestMessage)

B = TypeVar("B", ChatBody, CompletionBody, ResponseBody, MessageBody, CountBody, TokenizeBody, DetokenizeBody)


def parse_body(raw: bytes, kind: type[B], ignored: list[str] | None = None) -> B:
    """Parses and checks a body. Raises ApiError (400), which names the field at fault.

    Unknown fields are refused; with a list `ignored` they are left out and their paths appended to it.
    """
    raw = raw.removeprefix(BOM_UTF8)  # some clients of Windows write it
    try:
        body = _decoded(raw, kind, ignored)
    except UNREADABLE as error:
        raise unreadable(error) from None
    if type(body) in REFUSED:
        check_refused(body, REFUSED[type(body)])
    if isinstance(body, ChatBody):
        check_chat(body)
    elif isinstance(body, CompletionBody):
        _check_completion(body)
    elif isinstance(body, ResponseBody) and len(body.metadata or {}) > MAX_METADATA:
        raise bad_request(f"metadata has more than {MAX_METADATA} pairs", param="metadata")
    elif isinstance(body, TokenizeBody):
        _check_tokenize(body)
    return body


def _decoded(raw: bytes, kind: type[B], ignored: list[str] | None) -> B:
    """The body of a request. Raises ApiError for unknown fields, and else one of UNREADABLE."""
    try:
        return _strictly(raw, kind)
    except msgspec.ValidationError as error:
        if not is_unknown_field(error):
            raise
    if ignored is not None:
        raw, paths = without(raw, kind)
        ignored += paths
        return _strictly(raw, kind)
    found = unknown_fields(msgspec.json.decode(raw), kind)
    if not found:  # it is behind the part of a large body that is searched
        return _strictly(raw, kind)
    raise unknown_field_error(found)


def _strictly(raw: bytes, kind: type[B]) -> B:
    body = msgspec.json.decode(raw, type=kind)
    if isinstance(body, ResponseBody) and isinstance(body.input, list):
        check_items(body.input)
    return body


def sampling_of(body: ChatBody | CompletionBody, *, max_new: int, choice: int, grammar: str = "") -> Sampling:
    """The sampling options of choice number `choice`. A given seed makes every choice repeatable and
    different.

    A temperature between 0 and `COLDEST` is served as `COLDEST`, at which the likeliest token wins all but
    ties.
    """
    temperature, logprobs = _or(body.temperature, 1.0), logprobs_of(body)
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
        min_new_tokens=min(_or(body.min_tokens, 0), max_new),
        logprobs=max(logprobs, 0) if body.num_tries > body.num_choices else logprobs,  # best_of compares them
        prompt_logprobs=logprobs if body.wants_echo else -1,
        routed_experts=_or(body.routed_experts_start_len, 0) if body.return_routed_experts else -1,
        grammar=grammar,
    )


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """A completion body's prompts besides embeddings: a string, strings, token ids, or lists of token ids.

    With embeddings there need not be any. Raises ApiError (400).
    """
    prompt, num_embeds = body.prompt or [], len(body.embeds)
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif _are_ids(prompt):
        prompts = [cast(list[int], prompt)]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(set(map(type, prompt))) > 1:
            raise bad_request("prompt mixes strings and token ids: give one kind", param="prompt")
    if not (prompts or num_embeds) or any(len(item) == 0 for item in prompts):
        raise bad_request("prompt is empty: give at least one character or token", param="prompt")
    num_prompts = len(prompts) + num_embeds
    if num_prompts * body.num_tries > MAX_CHOICES:
        param = "n" if body.best_of is None else "best_of"
        text = f"{num_prompts} prompts with {param}={body.num_tries} exceed {MAX_CHOICES} choices"
        raise bad_request(text, param=param)
    return prompts


def _are_ids(prompt: Sequence[str | int | list[int]]) -> bool:
    """Whether all items, at least one, are token ids."""
    try:
        sum(cast(Sequence[int], prompt))  # nothing else can be added; faster than a look at each type
    except TypeError:
        return False
    return len(prompt) > 0


def max_new_of(body: CommonBody) -> int | None:
    """The output length that the client asked for; None: the default."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def logprobs_of(body: ChatBody | CompletionBody) -> int:
    """The number of alternatives per token; 0 for the chosen token only, -1 for no log probabilities."""
    if isinstance(body, ChatBody):
        return _or(body.top_logprobs, 0) if body.logprobs else -1
    return -1 if body.logprobs is None else body.logprobs


def check_token_ids(body: CommonBody, prompt_ids: list[int], vocab_size: int) -> None:
    """Raises ApiError (400) for an id outside the vocabulary, wherever the body names one."""
    biased = [int(token) for token in body.logit_bias] if body.logit_bias else ()
    named = (("prompt", prompt_ids), ("stop_token_ids", body.stop_token_ids), ("logit_bias", biased))
    for param, ids in named:
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise bad_request(
                f"{param}: token id {wrong} is outside the vocabulary of {vocab_size}", param=param
            )


T = TypeVar("T")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_common(body: CommonBody) -> None:
    if len(body.stops) > MAX_STOPS:
        raise bad_request(
            f"stop has {len(body.stops)} strings, at most {MAX_STOPS} are allowed", param="stop"
        )
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in body.stops):
        raise bad_request(f"every stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
    if body.min_tokens and body.max_tokens is not None and body.min_tokens > body.max_tokens:
        text = f"min_tokens {body.min_tokens} is more than max_tokens {body.max_tokens}"
        raise bad_request(text, param="min_tokens")
    if body.truncate_prompt_tokens == 0:
        text = "truncate_prompt_tokens 0 leaves no prompt: give at least 1, or -1 for what fits"
        raise bad_request(text, param="truncate_prompt_tokens")
    if (constraint := check_constraint(body)) is not None:
        _check_guided(body, constraint.param)
    if body.routed_experts_start_len is not None and not body.return_routed_experts:
        text = "routed_experts_start_len needs return_routed_experts: true"
        raise bad_request(text, param="routed_experts_start_len")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    biases = body.logit_bias or {}
    if len(biases) > MAX_BIASES:
        raise bad_request(
            f"logit_bias has {len(biases)} tokens, at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    wrong = next((key for key in biases if not re.fullmatch(r"[0-9]{1,9}", key)), None)
    if wrong is not None:
        raise bad_request(f"logit_bias: {printable(wrong)} is not a token id", param="logit_bias")


def check_chat(body: ChatBody) -> None:
    """Raises ApiError (400) for a chat that is empty or whose fields contradict each other."""
    _check_common(body)
    _check_messages(body.messages)
    _check_tools(body)
    _check_continuation(body, body.messages)
    if body.echo and not body.continue_final_message:
        raise bad_request("echo of a chat needs continue_final_message: true", param="echo")
    if not any(message.text or message.tool_calls for message in body.messages):
        raise bad_request("all messages are empty: give at least one character", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")


def _check_messages(messages: Sequence[RequestMessage]) -> None:
    if not messages:
        raise bad_request("messages is empty: give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(
            f"messages has {len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages"
        )
    for number, message in enumerate(messages):
        check_refused(message, REFUSED_IN_MESSAGES, f"messages[{number}].", "messages")


def _check_functions(functions: Sequence[Function]) -> list[str]:
    """The names of the functions.

    All are checked, since a template may also show functions that may not be called.
    """
    names = [function.name for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise bad_request(f"tools: {twice} is there twice", param="tools")
    for function in functions:
        try:
            is_object = isinstance(msgspec.json.decode(function.schema), dict)
        except UNREADABLE:
            is_object = False
        if not is_object:
            raise bad_request(
                f'tools: the parameters of {function.name} are not a schema of type "object"', param="tools"
            )
    return names


def _check_tokenize(body: TokenizeBody) -> None:
    if body.messages is not None:
        _check_messages(body.messages)
    elif body.tools:
        raise bad_request("tools needs messages", param="tools")
    _check_continuation(body, body.messages or ())
    _check_functions([tool.function for tool in body.tools or ()])


def _check_tools(body: ChatBody) -> None:
    names = _check_functions([tool.function for tool in body.tools or ()])
    chosen = body.tool_choice
    wanted = [chosen] if isinstance(chosen, ToolChoice) else []
    if isinstance(chosen, AllowedTools):
        wanted = chosen.allowed_tools.tools
    strange = next((choice.function.name for choice in wanted if choice.function.name not in names), None)
    if strange is not None:
        raise bad_request(f"tool_choice: {printable(strange)} is not one of the tools", param="tool_choice")
    if isinstance(chosen, AllowedTools):  # the other functions do not count
        allowed = {choice.function.name for choice in wanted}
        body.tools = [tool for tool in body.tools or () if tool.function.name in allowed]
        body.tool_choice = chosen.allowed_tools.mode
    if chosen == "required" and not names:
        raise bad_request("tool_choice required needs tools", param="tool_choice")
    if body.calls_tools:
        _check_guided(body, "tools")
        constraint = body.constraint
        if constraint is not None and not constraint.is_json:
            text = f"{constraint.param} and tools exclude each other: give one of them, or tool_choice none"
            raise bad_request(text, param=constraint.param.partition(".")[0])


def _check_guided(body: CommonBody, param: str) -> None:
    """Raises ApiError (400) for fields that a grammar excludes, since the grammar itself decides the output's
    end."""
    for name, is_set in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if is_set:
            raise bad_request(f"{name} and {param} exclude each other", param=name)


def _check_continuation(body: ChatBody | TokenizeBody, messages: Sequence[RequestMessage]) -> None:
    if body.continue_final_message:
        if body.add_generation_prompt:
            text = "continue_final_message and add_generation_prompt exclude each other: give one of them"
            raise bad_request(text, param="add_generation_prompt")
        if not messages or not messages[-1].text or messages[-1].tool_calls:
            text = "continue_final_message needs text in the last message, and no tool calls"
            raise bad_request(text, param="continue_final_message")


def _check_completion(body: CompletionBody) -> None:
    _check_common(body)
    if body.prompt is None and body.prompt_embeds is None:
        raise bad_request("prompt is missing: give prompt, or prompt_embeds", param="prompt")
    if body.prompt_embeds is not None and not all(body.embeds or [""]):
        raise bad_request("prompt_embeds is empty: give at least one tensor", param="prompt_embeds")
    if body.embeds and body.truncate_prompt_tokens is not None:
        text = "truncate_prompt_tokens and prompt_embeds exclude each other"
        raise bad_request(text, param="truncate_prompt_tokens")
    if body.embeds and body.wants_echo:
        text = "echo and prompt_embeds exclude each other: embeddings have no text"
        raise bad_request(text, param="echo")
    if body.num_tries < body.num_choices:
        text = f"best_of {body.num_tries} is less than n {body.num_choices}: give at least n"
        raise bad_request(text, param="best_of")
    if body.stream and body.num_tries > body.num_choices:
        raise bad_request("best_of greater than n cannot be streamed: give stream false", param="best_of")
