"""One target with or without a drafter, driven by request, and the drafts that formulas alone give."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch
from baton.engine.kv.page_table import build_page_table, pages_for, slots_for
from baton.engine.kv.pool import KVPool
from baton.engine.models.config import ModelConfig
from baton.engine.models.interface import CausalLM
from baton.engine.models.weights import load_model
from baton.engine.request import Request
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculative.adaptive import StepPolicy
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.drafters.eagle3_weights import load_eagle3
from baton.engine.speculative.drafters.protocol import Drafter, Proposal, reads_features
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.engine.speculative.step.result import StepResult
from baton.engine.speculative.step.step_graphs import StepGraphs, step_graphs
from baton.tests.parity.eagle3_toys import DEFAULT_IDS, SHAPE
from baton.tests.parity.toy_models import reference_model

PAGE_SIZE, NUM_PAGES, STEPS, MAX_REQUESTS = 4, 400, 3, 8


@dataclass
class Engine:
    """One target, optionally with a drafter, driven request by request."""

    target: Path
    head: Path | None = None
    aux_ids: Sequence[int] | None = None  # instead of those of the head's config
    steps: int = STEPS
    topk: int = 1
    tokens: int = 0
    policy: StepPolicy | None = None
    max_context: int = 256
    device: str = "cpu"
    is_greedy: bool = False
    next_page: int = 1
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, config = load_model(self.target, dtype=torch.float32, device=self.device)
        self.vocab_size = config.vocab_size
        self.runner = ModelRunner(model, KVPool(NUM_PAGES, model.kv_layout(PAGE_SIZE), self.device))
        self.drafter = None
        if self.head is not None:
            self.drafter = self.make_drafter(model, config)
        self.sampler = Sampler(self.vocab_size, self.device)
        self.shape = DraftShape.of(self.steps, self.topk, self.tokens)
        self.decoder = AsyncDecoder(
            self.step_graphs(), shape=self.shape, policy=self.policy, launches_ahead=False
        )

    def make_drafter(self, model: CausalLM, config: ModelConfig) -> Drafter:
        """The drafter of `head` for `model`, whose layers it configures."""
        draft = load_draft_config(self.head, config, dtype="float32")
        self.runner.set_aux_layer_ids(self.aux_ids or draft.aux.ids)
        eagle3 = load_eagle3(draft, dtype=torch.float32, device=self.device)
        eagle3.share(model.embed_tokens, model.lm_head, config.max_position_embeddings)
        sizes = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "capacity": 2}
        return Eagle3Drafter(eagle3, dtype=torch.float32, device=self.device, **sizes)

    def step_graphs(self, make: type[StepGraphs] = StepGraphs) -> StepGraphs:
        """Steps that nothing is captured of yet; with `is_greedy` graphs can be captured of greedy ones
        alone."""
        shape = self.shape if self.drafter is not None else PLAIN
        made = step_graphs(
            self.runner,
            self.drafter,
            shapes=[shape] if self.policy is None else self.policy.shapes[::-1],
            watched=shape if self.policy is not None and self.policy.is_watched else None,
            max_requests=MAX_REQUESTS,
            max_context=self.max_context,
            make=make,
        )
        if self.is_greedy:
            made.kinds = tuple(kind for kind in made.kinds if kind.shape == shape and not kind.is_ranked)
        return made

    def prefill(
        self, prompt: Sequence[int], params: SamplingParams, *, chunk: int = 1000, pages: int | None = None
    ) -> Request:
        """A request with its prompt computed, its first token sampled and its draft KV written in chunks."""
        request = Request(room=f"{self.next_page:032x}", epoch=0, prompt_ids=list(prompt), sampling=params)
        wanted = pages or pages_for(len(prompt) + params.max_new_tokens + self.shape.spare_slots, PAGE_SIZE)
        request.pages = list(range(self.next_page, self.next_page + wanted))[::-1]
        self.next_page += wanted
        n = len(prompt)
        batch = ForwardBatch(
            input_ids=torch.tensor(request.prompt_ids, device=self.device),
            positions=torch.arange(n, device=self.device),
            slots=slots_for(request.pages, 0, n, PAGE_SIZE).to(self.device),
            page_table=build_page_table([request.pages], self.device),
            q_lens=[n],
            kv_lens=[n],
            capture_hidden=CaptureHidden.FULL if reads_features(self.drafter) else CaptureHidden.NULL,
        )
        output = self.runner.forward(batch)
        chosen = self.sampler.sample(output.logits[-1:], self.sampler.build([request.masked_row]))
        request.append(chosen.tokens.tolist(), ())
        request.num_computed = n
        if output.hidden is not None:
            for start in range(0, n, chunk):
                self.decoder.draft_prefill(request, output.hidden[start : start + chunk], start)
        return request

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Steps all of `requests` to their end; after each step draft rows must cover the committed rows,
        but for those that wait for the drafter."""
        live = [request for request in requests if not request.is_finished]
        while live:
            self.results.append(self.decoder.step(live))
            assert any(self.results[-1].tokens), "a step gave no token, and the next one would not either"
            for request in live:
                assert request.num_computed == request.num_tokens - 1
                if self.drafter is not None:
                    late = self.decoder.coverage.most_late([request])
                    assert late <= self.decoder.steps.late_rows
                    assert self.decoder.num_covered(request) == request.num_tokens - 1 - late
            live = [request for request in live if not request.is_finished]
        for request in requests:
            self.decoder.forget(request)
        if self.drafter is not None:
            assert self.drafter.states.num_open == 0
        return [request.output_ids for request in requests]

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        return self.run([self.prefill(prompt, params) for prompt in prompts])

    @property
    def accept_lens(self) -> list[int]:
        """Of the steps that offered all drafts."""
        return [
            n
            for r in self.results
            for n, drafted in zip(r.accept_lens, r.drafted, strict=True)
            if drafted == self.steps
        ]


def check_without_draft_state(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, plain: list[list[int]]
) -> None:
    """Serves two prompts together, the first without draft state: it gets no drafts, its draft KV stays as it
    is, and both get the tokens `plain`."""
    cold, warm = (engine.prefill(prompt, params) for prompt in prompts)
    engine.decoder.forget(cold)
    before = engine.drafter.pool.kv[cold.pages].clone()
    while live := [request for request in (cold, warm) if not request.is_finished]:
        assert engine.decoder.step(live).drafted[0] == 0 or cold.is_finished
    assert [cold.output_ids, warm.output_ids] == plain
    assert torch.equal(engine.drafter.pool.kv[cold.pages], before)
    assert not bool(engine.drafter.pool.kv[0].any()), "the sink stays zero"


def rows_of(engine: Engine, request: Request) -> list[torch.Tensor]:
    """Draft K and V of a request in order of its tokens, each `[slots, heads, D]`."""
    return [plane[request.pages].flatten(0, 1) for plane in engine.drafter.pool.layer(0)]


def features_of(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Features of a prompt, computed aside in the last pages of the pool."""
    count = pages_for(len(ids), PAGE_SIZE)
    pages = list(range(NUM_PAGES - count, NUM_PAGES))
    batch = ForwardBatch(
        input_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        slots=slots_for(pages, 0, len(ids), PAGE_SIZE),
        page_table=build_page_table([pages]),
        q_lens=[len(ids)],
        kv_lens=[len(ids)],
        capture_hidden=CaptureHidden.FULL,
    )
    hidden = engine.runner.forward(batch).hidden
    assert hidden is not None
    return hidden


def record_drafts(engine: Engine, request: Request) -> list[int]:
    """One step; returns the drafts that were verified in it."""
    seen: list[int] = []
    propose = engine.drafter.propose

    def spy(*args: object) -> Proposal:
        proposal = propose(*args)
        seen.extend(proposal.drafts[0].tolist())
        return proposal

    engine.drafter.propose = spy
    engine.decoder.step([request])
    engine.drafter.propose = propose
    return seen


def recomputed_drafts(
    target: Path, w: dict[str, torch.Tensor], ids: list[int], switches: dict[str, bool]
) -> list[int]:
    """Greedy drafts behind `ids` from transformers' hidden states and the head's formulas over all rows."""
    model = reference_model(target)
    with torch.no_grad():
        states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1][0] for i in DEFAULT_IDS], dim=-1)
    if "fc_norm" in switches:
        parts = features.chunk(3, -1)
        features = torch.cat([rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    rows, tokens, drafts = features @ w["fc.weight"].T, ids[1:], []
    for _ in range(STEPS):
        out = head_layer(w, rows, model.get_input_embeddings().weight.detach()[tokens], switches)
        normed = rms(out[-1:], w["norm.weight"])
        index = int((normed @ w["lm_head.weight"].T).argmax())
        drafts.append(index + int(w["d2t"][index]))
        tokens = [*tokens, drafts[-1]]
        rows = torch.cat((rows, normed if switches.get("norm_output") else out[-1:]))
    return drafts


def recomputed_children(
    target: Path, w: dict[str, torch.Tensor], ids: list[int], branch: Sequence[int], count: int
) -> list[int]:
    """The `count` likeliest drafts behind `ids` and `branch`, by the same means."""
    model = reference_model(target)
    embed = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    rows = torch.cat([states[i + 1][0] for i in DEFAULT_IDS], dim=-1) @ w["fc.weight"].T
    tokens = ids[1:]
    for token in branch:
        rows, tokens = torch.cat((rows, head_layer(w, rows, embed[tokens], {})[-1:])), [*tokens, token]
    out = head_layer(w, rows, embed[tokens], {})[-1:]
    best = (rms(out, w["norm.weight"]) @ w["lm_head.weight"].T)[0].topk(count).indices
    return (best + w["d2t"][best]).tolist()


def head_layer(
    w: dict[str, torch.Tensor], hidden: torch.Tensor, embeds: torch.Tensor, switches: dict[str, bool]
) -> torch.Tensor:
    """The draft layer over all rows `[T, H]`, position i in row i."""
    p, count = "midlayer.", hidden.shape[0]
    normed = rms(hidden, w[p + "hidden_norm.weight"])
    pair = torch.cat((rms(embeds, w[p + "input_layernorm.weight"]), normed), -1)
    q, k, v = (
        (pair @ w[f"{p}self_attn.{n}_proj.weight"].T).view(count, -1, SHAPE["head_dim"]).transpose(0, 1)
        for n in "qkv"
    )
    q, k, v = rotate(q), rotate(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) / SHAPE["head_dim"] ** 0.5
    mask = torch.ones(count, count, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
    residual = normed if switches.get("norm_before_residual") else hidden
    residual = residual + mixed.transpose(0, 1).reshape(count, -1) @ w[p + "self_attn.o_proj.weight"].T
    x = rms(residual, w[p + "post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(x @ w[p + "mlp.gate_proj.weight"].T) * (
        x @ w[p + "mlp.up_proj.weight"].T
    )
    return residual + gated @ w[p + "mlp.down_proj.weight"].T


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Neox-style rotation of `[heads, T, D]`, base 10000."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
