"""The limits that live workers set to a request, and the output length when the request gives none."""

from collections.abc import Collection, Sequence

from ...cluster.config.router_groups import CHAT_AUTO
from ...cluster.protocol.codec import CONTROL_MAX_FRAME
from ...cluster.protocol.messages import YOUNG_SAMPLING_FIELDS, RoutedShape, Sampling
from ..api.body_checks import COMPLETION_MAX_TOKENS
from ..errors import ApiError, bad_request, context_too_long, unavailable
from ..sandbox.grammar_compiler import MAX_GRAMMAR
from ..workers.eligibility import Limits, Need, can_ever, known_pairs, obeyed
from ..workers.registry import Registry, Worker

# A prompt travels in one control frame: 5 bytes per id at most, and room for a grammar and the other sampling
# fields.
MAX_PROMPT_TOKENS = (CONTROL_MAX_FRAME - MAX_GRAMMAR - (64 << 10)) // 5
ANSWER_ID_BYTES = 4  # of an expert, before base64
MAX_ROUTED_BYTES = 64 << 20  # of the experts in an answer, before base64
CHAT_MAX_TOKENS = 1024  # output of a chat that names no length, where decode reserves pages for all of it
DEFAULTS = Sampling()
# The API's names of young fields.
SAID = {
    "min_new_tokens": "min_tokens",
    "prompt_logprobs": "echo with logprobs",
    "routed_experts": "return_routed_experts",
    "grammar": "response_format, tools and other grammars",
    "salt": "the tenants of API keys, or cache_salt",
    "embeds": "prompt_embeds",
}


def no_workers() -> ApiError:
    return unavailable("No prefill and decode worker of the same model are ready. Try again soon.")


def max_new_tokens(num_prompt: int, asked: int | None, *, is_chat: bool, chat_max: int, live: Limits) -> int:
    """The output length: as asked, or a default that fits (`chat_max` for a chat; 0: all that fits;
    CHAT_AUTO: all that fits, unless decode would hold its pages from the start).

    Raises ApiError for a prompt that is too long.
    """
    param = "messages" if is_chat else "prompt"
    check_prompt(num_prompt, param, live)
    if asked is None:
        room = min(live.context, live.decode_tokens) - num_prompt
        if chat_max == CHAT_AUTO:
            chat_max = 0 if live.grows else CHAT_MAX_TOKENS
        default = (chat_max or room) if is_chat else COMPLETION_MAX_TOKENS
        return max(1, min(default, room))
    if num_prompt + asked > live.context:
        raise context_too_long(
            f"This model's context is {live.context} tokens, but the request asks for {num_prompt + asked}: "
            f"{num_prompt} in the prompt and {asked} of output.",
            param=param,
        )
    return max(1, asked)  # 0: the prompt alone is of interest


def most_of_prompt(asked: int | None, default: int, live: Limits) -> int:
    """The most tokens of a prompt that fit beside its output: the asked length, or the default one.

    A default output takes half of what fits at most.
    """
    output = min(default, live.fitting // 2) if asked is None else max(1, asked)
    return max(1, min(live.fitting - output, MAX_PROMPT_TOKENS, live.prefill_tokens))


def check_prompt(num_prompt: int, param: str, live: Limits) -> None:
    """Raises ApiError (400) for a prompt that leaves no space for one token of output."""
    longest = min(live.fitting - 1, MAX_PROMPT_TOKENS, live.prefill_tokens)
    if num_prompt > longest:
        raise context_too_long(
            f"The prompt has {num_prompt} tokens, but at most {longest} fit: the context is {live.context} "
            f"tokens, and the workers' KV pages hold {min(live.decode_tokens, live.prefill_tokens)}.",
            param=param,
        )


def young_fields(sampling: Sampling, salt: str, *, has_embeds: bool) -> tuple[str, ...]:
    """The fields of an order that are set and that workers of an older version may not know."""
    asked: tuple[str, ...] = ()
    for name in YOUNG_SAMPLING_FIELDS:
        if getattr(sampling, name) != getattr(DEFAULTS, name):
            asked += (name,)
    if salt:
        asked += ("salt",)
    return (*asked, "embeds") if has_embeds else asked


def embeds_width(live: Collection[tuple[Worker, Worker]]) -> int:
    """The elements of a prompt embedding.

    Raises ApiError where no pair takes them: 400 with the workers' reason, 503 without workers that know.
    """
    for prefill, decode in live:
        width = decode.hello.embeds_width
        if width and prefill.hello.embeds_width == width:
            return width
    workers = [worker for pair in live for worker in pair]
    fault = next((worker.hello.embeds_fault for worker in workers if worker.hello.embeds_fault), "")
    if not fault:
        raise no_pair_for(Need(1, 1, asks=("embeds",)), live)
    text = f"prompt_embeds is not taken here: {fault}. Send prompt."
    raise bad_request(text, param="prompt_embeds")


def routed_shape(live: Collection[tuple[Worker, Worker]]) -> RoutedShape:
    """The experts that a pair returns. Raises ApiError (400) where none does."""
    for prefill, decode in live:
        shape = decode.hello.experts
        if shape is not None and prefill.hello.experts == shape:
            return shape
    text = (
        "return_routed_experts is off: the model has no experts, or its workers were started without "
        "--return-routed-experts"
    )
    raise bad_request(text, param="return_routed_experts")


def check_routed(shape: RoutedShape, requests: Sequence[tuple[int, Sampling]]) -> None:
    """Raises ApiError (400) for experts of tokens that do not begin in the prompt, or for too many of them.

    `requests`: the length of the prompt, and the sampling, of each choice.
    """
    size = 0
    for num_prompt, sampling in requests:
        first = sampling.routed_experts
        if first > num_prompt:
            text = f"routed_experts_start_len {first} is more than the prompt's {num_prompt} tokens"
            raise bad_request(text, param="routed_experts_start_len")
        num_rows = num_prompt + sampling.max_new_tokens - 1 - first
        size += num_rows * shape.num_layers * shape.top_k * ANSWER_ID_BYTES
    if size > MAX_ROUTED_BYTES:
        text = (
            f"return_routed_experts: the experts of this request may take {size >> 20} MiB, at most "
            f"{MAX_ROUTED_BYTES >> 20} MiB are returned: ask for fewer choices or tokens, or give "
            "routed_experts_start_len"
        )
        raise bad_request(text, param="return_routed_experts")


def no_pair_for(need: Need, pairs: Collection[tuple[Worker, Worker]]) -> ApiError:
    """The ApiError (503) with the reason why no live pair serves the request, such as an unknown field."""
    unknown = [name for name in need.asks if not any(obeyed(p, d, [name]) for p, d in pairs)] or need.asks
    if not pairs or not unknown or any(obeyed(p, d, need.asks) for p, d in pairs):
        return no_workers()
    text = (
        f"The workers that serve are of an older version, which does not know {SAID[unknown[0]]}. "
        "Try again later."
    )
    return unavailable(text)


def check_obeyed(need: Need, live: Collection[tuple[Worker, Worker]]) -> None:
    """Raises ApiError (503) where no pair knows all fields of a request."""
    if not need.asks:
        return
    for prefill, decode in live:
        if obeyed(prefill, decode, need.asks):
            return
    raise no_pair_for(need, live)


def check_fits(need: Need, registry: Registry, live: Limits) -> None:
    """Raises ApiError (400) for a request that no idle decode worker could hold."""
    if need.total > live.decode_tokens:
        raise context_too_long(
            f"{need.prompt} prompt tokens and {need.max_new} output tokens need KV pages for "
            f"{need.total} tokens, "
            f"but the largest decode worker has pages for {live.decode_tokens}: ask for fewer.",
            param="max_tokens",
        )
    if not can_ever(known_pairs(registry), need):
        raise context_too_long(
            f"No pair of workers can hold {need.prompt} prompt tokens and {need.max_new} output tokens: "
            "ask for fewer.",
            param="max_tokens",
        )
