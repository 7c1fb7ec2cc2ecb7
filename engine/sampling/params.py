"""The sampling parameters of one request and their validation."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. `cluster.protocol.messages.Sampling` is the wire form with the same fields.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. Frequency and presence penalties count
    output tokens only; repetition_penalty counts prompt and output. Tokens that end the request are banned
    before `min_new_tokens` output tokens. `logprobs` -1 reports none, 0 the chosen token's, k also the top k;
    `prompt_logprobs` does the same for the prompt's tokens. `routed_experts` reports the experts of all rows
    from this one on, -1 none. `grammar` constrains the output, see `guided`; ""
    is no constraint.
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
    routed_experts: int = -1
    grammar: str = ""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_argmax(self) -> bool:
        """Whether only the likeliest token can be chosen, so no noise is needed."""
        return self.is_greedy or self.top_k == 1

    @property
    def needs_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_edits(self) -> bool:
        """Whether logits are edited before the choice, or reported with it."""
        return (
            self.needs_penalties
            or bool(self.logit_bias)
            or self.min_new_tokens > 0
            or self.logprobs >= 0
            or bool(self.grammar)
        )

    def needs_ranking(self, vocab_size: int) -> bool:
        """Whether sampling needs ranked candidates, for a top-k or a nucleus."""
        return not self.is_argmax and (0 < self.top_k < vocab_size or self.top_p < 1)


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError, naming the value, for parameters that the sampler cannot serve."""
    bad_bias = [token for token, bias in params.logit_bias.items() if not math.isfinite(bias)]
    foreign, endless = (
        [token for token in ids if not 0 <= token < vocab_size]
        for ids in (params.logit_bias, params.stop_token_ids)
    )
    for is_wrong, text in (
        (not 0 <= params.temperature < math.inf, f"temperature {params.temperature}: finite, >= 0"),
        (params.top_k < 0, f"top_k {params.top_k}: 0 (off) or more"),
        (not 0 <= params.top_p <= 1, f"top_p {params.top_p}: in [0, 1]"),
        (not 0 <= params.min_p <= 1, f"min_p {params.min_p}: in [0, 1]"),
        (
            not math.isfinite(params.frequency_penalty),
            f"frequency_penalty {params.frequency_penalty}: finite",
        ),
        (not math.isfinite(params.presence_penalty), f"presence_penalty {params.presence_penalty}: finite"),
        (
            not 0 < params.repetition_penalty < math.inf,
            f"repetition_penalty {params.repetition_penalty}: > 0, finite",
        ),
        (bool(bad_bias), f"logit_bias of tokens {bad_bias}: finite"),
        (bool(foreign), f"logit_bias of tokens {foreign}: ids in [0, {vocab_size})"),
        (bool(endless), f"stop_token_ids {endless}: ids in [0, {vocab_size})"),
    ):
        if is_wrong:
            raise ValueError(f"{text} is what the sampler takes")
