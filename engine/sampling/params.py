"""How tokens are chosen for one request."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The knobs of the sampler; the wire form with the same fields is `cluster.messages.Sampling`.

    Before `min_new_tokens` output tokens no token is chosen that would end the request.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. Frequency and presence penalties count output tokens
    only, repetition_penalty counts prompt and output. `logprobs` -1: none, 0: the chosen token's, k: also the top k;
    `prompt_logprobs` the same of the prompt's own tokens. `grammar`: what the output follows, see `guided`; "" nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] | list[int] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: str = ""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def sees_drafts(self) -> bool:
        """Whether a row's choice depends on which drafts stand in front of it, and not only on how many."""
        return self.needs_penalties or bool(self.grammar)
