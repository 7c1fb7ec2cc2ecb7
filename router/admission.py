"""What a request may ask of the workers that are there, and how long its output is when it does not say."""

from collections.abc import Iterable

from ..cluster.messages import YOUNG_SAMPLING_FIELDS, Sampling
from ..cluster.sockets import CONTROL_MAX_FRAME
from .errors import ApiError, bad_request, context_too_long, unavailable
from .grammars import MAX_GRAMMAR
from .openai import COMPLETION_MAX_TOKENS
from .policy import Limits, Need, can_ever, live_pairs
from .registry import Registry, Worker

# A prompt travels in one control frame: 5 bytes per id at most, and room for a grammar and the other sampling fields.
MAX_PROMPT_TOKENS = (CONTROL_MAX_FRAME - MAX_GRAMMAR - (64 << 10)) // 5
CHAT_MAX_TOKENS = 1024
DEFAULTS = Sampling()


def no_workers() -> ApiError:
    return unavailable("No prefill and decode worker of the same model are ready. Try again soon.")




def max_new_tokens(num_prompt: int, asked: int | None, *, is_chat: bool, live: Limits) -> int:
    """The output length: what was asked, or the default as far as it fits. Raises ApiError for a prompt too long."""
    param = "messages" if is_chat else "prompt"
    check_prompt(num_prompt, param, live)
    if asked is None:
        room = min(live.context, live.decode_tokens) - num_prompt
        return max(1, min(CHAT_MAX_TOKENS if is_chat else COMPLETION_MAX_TOKENS, room))
    if num_prompt + asked > live.context:
        raise context_too_long(
            f"This model's context is {live.context} tokens, but the request asks for {num_prompt + asked}: "
            f"{num_prompt} in the prompt and {asked} of output.",
            param=param,
        )
    return max(1, asked)  # 0: the prompt alone is of interest


def check_prompt(num_prompt: int, param: str, live: Limits) -> None:
    """Raises ApiError (400) for a prompt that leaves no room for one token of output."""
    longest = min(live.context - 1, MAX_PROMPT_TOKENS, live.prefill_tokens)
    if num_prompt > longest:
        raise context_too_long(
            f"The prompt has {num_prompt} tokens, but at most {longest} fit (the context is {live.context} tokens).",
            param=param,
        )


def check_obeyed(sampling: Sampling, workers: Iterable[Worker]) -> None:
    """Raises ApiError (503) where a worker would not obey a field, since it is of an older version."""
    asked = [name for name in YOUNG_SAMPLING_FIELDS if getattr(sampling, name) != getattr(DEFAULTS, name)]
    for worker in workers if asked else ():
        strange = [name for name in asked if name not in worker.hello.takes]
        if worker.is_serving and strange:
            raise unavailable(f"Some workers are of an older version, which does not know {strange[0]}. Try again later.")


def check_fits(need: Need, registry: Registry, live: Limits) -> None:
    """Raises ApiError (400) for a request that no decode worker could hold even when it is idle."""
    if need.total > live.decode_tokens:
        raise bad_request(
            f"{need.prompt} prompt tokens and {need.max_new} output tokens need KV pages for {need.total} tokens, "
            f"but the largest decode worker has pages for {live.decode_tokens}: ask for fewer.",
            param="max_tokens",
        )
    if not can_ever(live_pairs(registry), need):
        raise bad_request(
            f"No pair of workers can hold {need.prompt} prompt tokens and {need.max_new} output tokens: ask for fewer.",
            param="max_tokens",
        )
