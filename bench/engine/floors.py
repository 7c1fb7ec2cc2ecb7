"""Lower bounds for the time of a forward: its bytes and operations, at rates measured in the same run.

A pass reads each used weight and the KV of its context once, and computes its matrix products. The longer of
the two times is the bound. Activations and logits do not count, since a faster kernel could keep them on the
chip.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...engine.kv.layouts import MHALayout
from ...engine.models.config import ModelConfig
from ...engine.models.deepseek_config import LatentConfig
from ...engine.parallel.vocabulary import num_rank_rows
from ...engine.speculative.drafters.eagle3 import draft_layout
from ...engine.speculative.drafters.eagle_config import EagleConfig
from ...engine.speculative.drafters.mtp_config import MtpConfig
from ...engine.speculative.drafters.spec_config import Eagle3Config, HeadConfig

MXFP4_BYTES = 0.5 + 1 / 32  # of a value, with its part of a scale


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured rates of the device.

    A copy's rate counts bytes read plus bytes written per second. A matrix product's rate counts operations
    per second in the model's dtype.
    """

    copy_bytes_per_s: float
    matmul_flop_per_s: float

    def seconds(self, work: "Work") -> float:
        return max(work.num_bytes / self.copy_bytes_per_s, work.num_flops / self.matmul_flop_per_s)


UNKNOWN = Ceilings(copy_bytes_per_s=float("inf"), matmul_flop_per_s=float("inf"))


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one or more passes: bytes moved and operations computed."""

    num_bytes: float
    num_flops: float


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """Sizes of a target or of its head, and the work of each pass over it.

    `body`, `vocab` and `fc` count the values of the layers' matrices, of the output projection, and of the
    head's input projection (0 in a target). `end` counts the values that a row meets behind its last
    attention: a prompt needs them for its last row only. `kv` counts the values of K and V per token.
    `attention` counts operations per pair of a new row and a context row. `experts` counts the values of the
    experts on this rank, of all of which a row uses `used_share`; the rows of `gathered` ranks meet there.
    `windows`: of the layers' attention, 0 for all tokens. `itemsize`: bytes of a value, `body_itemsize` of
    one of the layers' matrices if these are quantised, with its part of the scales, and `expert_itemsize` of
    one of the experts'.
    """

    body: int
    vocab: int
    fc: int
    kv: int
    attention: int
    itemsize: int
    body_itemsize: float = 0.0
    expert_itemsize: float = 0.0
    end: int = 0
    experts: int = 0
    used_share: float = 0.0
    gathered: int = 1
    windows: tuple[int, ...] = ()

    @classmethod
    def of_target(cls, config: ModelConfig, itemsize: int) -> "PassCounts":
        layer = _layer(config.hidden_size, config)
        kv = config.kv_layout(config.num_layers, 1, torch.bfloat16)
        moe, experts, body = config.moe, 0, config.num_layers * layer
        quantised = 0.0 if config.quant is None else config.quant.form.value_bytes
        end = _end_of_layer(config)
        if moe is not None:
            sparse = config.num_layers - len(moe.dense_layers)
            body -= sparse * 3 * config.hidden_size * config.intermediate_size
            body += sparse * config.hidden_size * (moe.num_experts + 3 * moe.shared_size)
            experts = sparse * len(moe.experts_here) * 3 * config.hidden_size * moe.intermediate_size
            if config.num_layers - 1 not in moe.dense_layers:
                end -= 3 * config.hidden_size * (config.intermediate_size - moe.top_k * moe.intermediate_size)
                end += config.hidden_size * (moe.num_experts + 3 * moe.shared_size)
        return cls(
            body=body,
            vocab=config.vocab_size * config.hidden_size,
            fc=0,
            kv=kv.elements_per_token,
            attention=config.num_layers * _pair_operations(config),
            itemsize=itemsize,
            end=end,
            experts=experts,
            used_share=0.0 if moe is None else moe.used_share,
            gathered=1 if moe is None else moe.gathered,
            body_itemsize=quantised,
            expert_itemsize=MXFP4_BYTES if moe is not None and moe.is_packed else quantised,
            windows=config.forms.windows,
        )

    def of_rank(self, num_ranks: int) -> "PassCounts":
        """With a rank's part of the output projection; all else is that of the config."""
        return replace(self, vocab=num_rank_rows(self.vocab, num_ranks))

    @classmethod
    def of_head(cls, config: Eagle3Config, itemsize: int) -> "PassCounts":
        kv = draft_layout(config, 1, torch.bfloat16)
        return cls(
            body=_layer(2 * config.hidden_size, config),
            vocab=config.draft_vocab_size * config.hidden_size,
            fc=config.dims.target_feature_width * config.hidden_size,
            kv=kv.elements_per_token,
            attention=4 * config.num_heads * config.head_dim,
            itemsize=itemsize,
        )

    @classmethod
    def of_eagle(cls, config: EagleConfig, itemsize: int) -> "PassCounts":
        """Every forward of an EAGLE head reads `fc`, so `fc` is part of the body."""
        kv = draft_layout(config, 1, torch.bfloat16)
        return cls(
            body=_layer(config.hidden_size, config) + 2 * config.hidden_size**2,
            vocab=config.vocab_size * config.hidden_size,
            fc=0,
            kv=kv.elements_per_token,
            attention=4 * config.num_heads * config.head_dim,
            itemsize=itemsize,
        )

    @classmethod
    def of_module(cls, config: MtpConfig, itemsize: int) -> "PassCounts":
        """Of one of the modules."""
        layer = config.layer
        kv = MHALayout.of(layer, num_layers=1, page_size=1, dtype=torch.bfloat16)
        return cls(
            body=_layer(layer.hidden_size, layer),
            vocab=layer.vocab_size * layer.hidden_size,
            fc=2 * layer.hidden_size * layer.hidden_size,
            kv=kv.elements_per_token,
            attention=4 * layer.num_heads * layer.head_dim,
            itemsize=itemsize,
        )

    def _body_bytes(self, values: float, experts: float) -> float:
        """The bytes of so many values of the layers' matrices, and of those of experts."""
        of_experts = experts * (self.expert_itemsize or self.itemsize)
        return values * (self.body_itemsize or self.itemsize) + of_experts

    def _read_experts(self, rows: int) -> float:
        """The values of the experts that `rows` rows use, if each row chooses at random."""
        return self.experts * (1 - (1 - self.used_share) ** (rows * self.gathered))

    @property
    def _used(self) -> int:
        """The values of experts here that meet a row, for each row of this rank."""
        return round(self.experts * self.used_share * self.gathered)

    def _seen(self, context: int) -> float:
        """The mean over layers of the tokens that a row behind `context` tokens attends to."""
        if not self.windows:
            return context
        return sum(min(context, window or context) for window in self.windows) / len(self.windows)

    def step(self, batch: int, rows: int, context: int, *, logit_rows: int, has_fc: bool = False) -> Work:
        """One pass: each of `batch` requests has `context` tokens, `rows` new rows and logits of `logit_rows`
        rows."""
        body = self.body + (self.fc if has_fc else 0)
        weights = body + self._used
        seen = self._seen(context)
        return Work(
            num_bytes=self._body_bytes(body, self._read_experts(batch * rows))
            + self.itemsize * (self.vocab + batch * (seen + rows) * self.kv),
            num_flops=batch
            * (2 * rows * weights + 2 * logit_rows * self.vocab + rows * seen * self.attention),
        )

    def prefill(self, tokens: int) -> Work:
        """A causal pass over a whole prompt of `tokens`, with the logits of its last row."""
        windows = self.windows or (0,)
        pairs = sum(_pairs(tokens, window or tokens) for window in windows) // len(windows)
        used = self.body + self._used
        return Work(
            num_bytes=self._body_bytes(self.body, self._read_experts(tokens))
            + self.itemsize * (self.vocab + tokens * self.kv),
            num_flops=2 * tokens * (used - self.end) + 2 * (self.end + self.vocab) + pairs * self.attention,
        )


def _pairs(tokens: int, window: int) -> int:
    """The pairs of a row and a row that it attends to, in a prompt of `tokens`."""
    inside = min(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * window


def chain_step(target: PassCounts, head: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
    """The passes of one chain step: the verify, the head's extend, and one of the head per draft after the
    first.

    The first draft costs no pass of its own: the extend of the step before has computed it.
    """
    verify = target.step(batch, steps + 1, context, logit_rows=steps + 1)
    draft = head.step(batch, 1, context, logit_rows=1)
    return [verify, *[draft] * (steps - 1), head.step(batch, steps + 1, context, logit_rows=1, has_fc=True)]


def parallel_step(target: PassCounts, head: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
    """As `chain_step`, with one pass of the head for all drafts after the first."""
    verify, *_, extend = chain_step(target, head, batch, steps, context)
    count = steps - 1
    return [verify, *([head.step(batch, count, context, logit_rows=count)] if count else []), extend]


def mtp_step(
    target: PassCounts, module: PassCounts, num_modules: int, batch: int, steps: int, context: int
) -> list[Work]:
    """The passes of one step with `num_modules` MTP modules.

    Several modules run once each, over the verified rows and the front rows. A single one runs as an EAGLE3
    head does, with its input projection in every pass.
    """
    rows = steps + 1
    verify = target.step(batch, rows, context, logit_rows=rows)
    if num_modules > 1:
        window = num_modules - 1 + rows
        return [verify, *[module.step(batch, window, context, logit_rows=1, has_fc=True)] * num_modules]
    draft = module.step(batch, 1, context, logit_rows=1, has_fc=True)
    return [verify, *[draft] * (steps - 1), module.step(batch, rows, context, logit_rows=1, has_fc=True)]


def _pair_operations(config: ModelConfig) -> int:
    """Operations of a layer for a pair of a new row and a context row; over latents those of a step."""
    if isinstance(config, LatentConfig):
        return 2 * config.num_heads * (2 * config.rank + config.rope_size)
    return 4 * config.num_heads * config.head_dim


def _layer(input_size: int, config: ModelConfig | HeadConfig) -> int:
    if isinstance(config, LatentConfig):
        queries = config.num_heads * config.head_dim
        rank = config.query_rank
        down = input_size * ((rank or queries) + config.rank + config.rope_size)
        up = rank * queries + config.rank * config.num_heads * config.latent_outputs
        return down + up + _end_of_layer(config)
    qkv = input_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return qkv + _end_of_layer(config)


def _end_of_layer(config: ModelConfig | HeadConfig) -> int:
    """The matrices behind the attention of a layer."""
    value_dim = config.value_dim if isinstance(config, ModelConfig) else config.head_dim
    return config.hidden_size * (config.num_heads * value_dim + 3 * config.intermediate_size)


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> Ceilings:
    """Measures a copy of 1 GiB and a product of 8192 x 8192 matrices on CUDA, smaller ones elsewhere;
    medians."""
    size, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 24, 512)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Ceilings(
        copy_bytes_per_s=2 * size / _seconds(lambda: target.copy_(source), device),
        matmul_flop_per_s=2 * side**3 / _seconds(lambda: a @ b, device),
    )


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    times = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
        else:
            run()
            times.append(time.perf_counter() - began)
    return statistics.median(times[3:])
