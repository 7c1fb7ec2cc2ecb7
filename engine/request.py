"""One request inside an engine: its tokens, its pages, its progress and its end."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import torch

from .grammar.guided import Guide
from .sampling.edits import SamplingRow
from .sampling.params import SamplingParams


@dataclass(kw_only=True, eq=False)
class Request:
    """The owner of every length and status of one request. Callers read the properties and never subtract.

    The last `num_prior_output` prompt tokens are output of earlier attempts: they are computed like a prompt
    and count as output for penalties. `pages[i]` holds the KV of tokens [i*page_size, (i+1)*page_size); the
    first `num_computed` tokens have their KV there. `eos_ids` are the model's end tokens. `guide` tracks the
    request's grammar. `finish_reason` is None while the request runs, then "stop", "length", or a reason set
    by the worker ("cancelled", "failed"). Requests share cached prefixes only under an equal `salt`.

    The first `num_embeds` prompt tokens are embeddings without ids; their `prompt_ids` are 0. `embeds`
    `[num_embeds, H]` holds them, in the model's dtype on the host, until no row needs them any more.

    `windows`: in an engine with window pages, the numbers of the pages whose window pages it holds, ascending
    (`request_windows`).
    """

    room: str
    epoch: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    num_prior_output: int = 0
    eos_ids: Sequence[int] = ()
    guide: Guide | None = None
    salt: str = ""
    num_embeds: int = 0
    embeds: torch.Tensor | None = None
    output_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: str | None = None

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_ids)

    @property
    def num_cacheable(self) -> int:
        """Its first prompt tokens that need no row where the prompt is computed, if they are cached there.

        The last one's logits are needed, and all rows of which the request asks for something else.
        """
        sampling, last = self.sampling, len(self.prompt_ids) - 1
        if sampling.prompt_logprobs >= 0:
            return 0
        return last if sampling.routed_experts < 0 else min(last, sampling.routed_experts)

    @property
    def num_output(self) -> int:
        """Output tokens of this attempt."""
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens; also the absolute position of the next token."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def asked_and_chosen(self) -> tuple[Sequence[int], Sequence[int]]:
        """(ids from the client, without those of embeddings; ids generated in any attempt)."""
        if not self.num_prior_output:
            return self.prompt_ids[self.num_embeds :] if self.num_embeds else self.prompt_ids, self.output_ids
        split = max(0, len(self.prompt_ids) - self.num_prior_output)
        return self.prompt_ids[self.num_embeds : split], [*self.prompt_ids[split:], *self.output_ids]

    def embeds_of(self, start: int, end: int) -> torch.Tensor | None:
        """The embeddings among tokens [start, end), which precede its ids; None if all have ids."""
        if start >= self.num_embeds:
            return None
        assert self.embeds is not None, f"{self!r}: its embeddings were dropped"
        return self.embeds[start:end]

    @property
    def num_remaining(self) -> int:
        """Output tokens that `max_new_tokens` still allows."""
        return max(0, self.sampling.max_new_tokens - len(self.output_ids))

    @property
    def all_ids(self) -> list[int]:
        """Prompt and output ids."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def bonus_token(self) -> int:
        """The newest token, which has no KV yet."""
        assert self.output_ids, f"room {self.room} has no output token"
        return self.output_ids[-1]

    @property
    def num_writable_pages(self) -> int:
        """Its first pages up to the last one that has memory for all layers."""
        return self.windows[-1] + 1 if self.windows else len(self.pages)

    @property
    def is_ready(self) -> bool:
        """Whether a token can be sampled: the grammar, if any, is compiled."""
        return self.guide is None or self.guide.is_ready

    @property
    def fault(self) -> str:
        """The reason why no token can ever be sampled; "" without a fault."""
        return "" if self.guide is None else self.guide.fault

    @property
    def is_fault_ours(self) -> bool:
        """Whether the fault is this worker's, so that another worker may help."""
        return self.guide is not None and self.guide.is_fault_ours

    @property
    def fault_kind(self) -> str:
        """The fault's name for the router, which blames this worker only for its own faults."""
        return "GrammarsOverdue" if self.is_fault_ours else "BadGrammar"

    @property
    def logits_fault(self) -> tuple[str, str]:
        """(kind, message) for logits that are not finite: the limit of a grammar or the embeddings of a
        client may be the reason.
        """
        if self.fault:
            return self.fault_kind, self.fault
        if self.num_embeds:
            return "BadEmbeds", "the model's logits for these embeddings are not finite"
        return "BadLogits", "the model's logits are not finite"

    @property
    def sampling_row(self) -> SamplingRow:
        """How the next token is chosen, without the mask of its grammar."""
        params = self.sampling
        prompt_ids, output_ids = self.asked_and_chosen if params.needs_penalties else ((), ())
        is_held = params.min_new_tokens > 0
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)) if is_held else ()
        return SamplingRow(
            params=params,
            position=self.num_tokens,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            ends=ends,
            first_end=self.num_prompt + params.min_new_tokens if is_held else 0,
        )

    @property
    def masked_row(self) -> SamplingRow:
        """`sampling_row` with the mask, where there is a grammar; it must be ready."""
        if self.guide is None:
            return self.sampling_row
        return replace(self.sampling_row, mask=self.guide.masks(self.asked_and_chosen[1], [()])[0])

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    def ends_with_prompt(self, eos_ids: Container[int]) -> bool:
        """Whether an earlier attempt already generated the token that ends the request."""
        return self.num_prior_output > 0 and self._stops_at(self.prompt_ids[-1], eos_ids)

    def append(self, ids: Sequence[int], eos_ids: Container[int]) -> int:
        """Commit `ids` up to and including the first that ends the request.

        Returns the number of committed ids.

        Sets `finish_reason`: "stop" at a stop token id, or at one of `eos_ids` unless `ignore_eos`; "length"
        at `max_new_tokens`. A stop token in the last allowed place is a "stop".
        """
        assert self.finish_reason is None, f"room {self.room} ended already: {self.finish_reason}"
        for count, token in enumerate(ids, start=1):
            self.output_ids.append(token)
            if self._stops_at(token, eos_ids):
                self.finish_reason = "stop"
            elif self.num_remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return count
        return len(ids)

    def _stops_at(self, token: int, eos_ids: Container[int]) -> bool:
        return token in self.sampling.stop_token_ids or (not self.sampling.ignore_eos and token in eos_ids)

    def __repr__(self) -> str:
        return (
            f"<Request {self.room[:8]}/{self.epoch} {self.num_computed}/{self.num_tokens} computed, "
            f"{self.num_output} output, {len(self.pages)} pages, {self.finish_reason or 'running'}>"
        )
