"""The drafters that `baton bench engine` measures, by name: how to make a random one, and its least work.

A new kind of drafter adds a class here and an entry to DRAFTERS. Acceptance is simulated, either by the
weights (see `model`) or by replacing the drafts from the accept length on (`cut`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch

from ...engine.models.config import ModelConfig
from ...engine.models.interface import CausalLM
from ...engine.parallel.group import SOLO, TensorGroup
from ...engine.parallel.vocabulary import Table, table_of
from ...engine.speculative.drafters.eagle3 import Eagle3Drafter
from ...engine.speculative.drafters.eagle3_head import FeatureHead
from ...engine.speculative.drafters.mtp_deep import DeepMtpDrafter
from ...engine.speculative.drafters.mtp_shared import SharedMtpDrafter
from ...engine.speculative.drafters.ngram import NgramConfig, NgramDrafter
from ...engine.speculative.drafters.protocol import Drafter, DraftView, Proposal
from ...engine.speculative.drafting.shape import DraftShape
from .blocks import SimulatedBlocks, block_config, block_step, random_blocks
from .floors import PassCounts, Work, chain_step, mtp_step, parallel_step
from .model import TOKEN, WRONG, random_eagle, random_head
from .mtp_model import modules_config, random_modules
from .shapes import eagle_head_config, head_config

D = TypeVar("D", bound=Eagle3Drafter)

ALL = "all"
NGRAMS = {"shortest": 2, "longest": 5, "window": 8192}  # the defaults of a server


@dataclass(frozen=True, kw_only=True)
class DraftWish:
    """What a random drafter is made for.

    A target of `config` accepts `accept_length` - 1 of `steps` drafts. `folder` is for temporary files. A
    rank of `group` has a part of the target's vocabulary.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    draft_vocab_size: int
    steps: int
    accept_length: int
    page_size: int
    capacity: int
    folder: Path
    group: TensorGroup = SOLO

    def tables(self, model: CausalLM) -> tuple[Table, Table]:
        """The embedding and the output projection of `model`, of which a rank has a part."""
        return (
            table_of(model.embed_tokens, self.config.vocab_size, self.group),
            table_of(model.lm_head, self.config.vocab_size, self.group),
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class BenchDrafter(Protocol):
    """A random drafter of one kind. `feature_ids`: the layer outputs of the target that it reads."""

    feature_ids: tuple[int, ...]

    def share(self, model: CausalLM) -> Callable[[int], Drafter]:
        """Makes the weights and shares those of `model`; the result makes a drafter with as many pages."""

    def step(self, target: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
        """The passes of one step of `batch` requests of `context` tokens each."""


class BenchEagle3:
    """A one-layer EAGLE3 head with a reduced vocabulary."""

    def __init__(self, wish: DraftWish) -> None:
        self.wish = wish
        self.config = head_config(wish.config, wish.dtype_name, wish.draft_vocab_size, wish.folder)
        self.feature_ids = self.config.aux.ids

    def share(self, model: CausalLM) -> Callable[[int], Drafter]:
        wish = self.wish
        head = random_head(self.config, wish.accept_length, wish.dtype, wish.device)
        head.share(*wish.tables(model), wish.config.max_position_embeddings)
        return lambda num_pages: eagle_drafter(Eagle3Drafter, head, wish, num_pages)

    def step(self, target: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
        head = PassCounts.of_head(self.config, self.wish.dtype.itemsize)
        return chain_step(target, head, batch, steps, context)


class BenchParallel(BenchEagle3):
    """As BenchEagle3, with all drafts behind the first from one forward over rows of a mask."""

    def __init__(self, wish: DraftWish) -> None:
        super().__init__(wish)
        self.config = replace(self.config, mask_token=WRONG)

    def share(self, model: CausalLM) -> Callable[[int], Drafter]:
        wish = self.wish
        head = random_head(self.config, wish.accept_length, wish.dtype, wish.device)
        head.share(*wish.tables(model), wish.config.max_position_embeddings)
        return lambda num_pages: eagle_drafter(CutEagle, head, wish, num_pages).accepting(wish.accept_length)

    def step(self, target: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
        head = PassCounts.of_head(self.config, self.wish.dtype.itemsize)
        return parallel_step(target, head, batch, steps, context)


class BenchEagle:
    """A one-layer EAGLE head with the whole vocabulary."""

    def __init__(self, wish: DraftWish) -> None:
        self.wish = wish
        self.config = eagle_head_config(wish.config, wish.dtype_name, wish.folder)
        self.feature_ids = self.config.aux.ids

    def share(self, model: CausalLM) -> Callable[[int], Drafter]:
        wish = self.wish
        head = random_eagle(self.config, wish.dtype, wish.device)
        head.share(*wish.tables(model), wish.config.max_position_embeddings, model.norm)
        return lambda num_pages: eagle_drafter(CutEagle, head, wish, num_pages).accepting(wish.accept_length)

    def step(self, target: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
        head = PassCounts.of_eagle(self.config, self.wish.dtype.itemsize)
        return chain_step(target, head, batch, steps, context)


class BenchDflash:
    """A DFLASH drafter whose block has one token more than the drafts of a step."""

    def __init__(self, wish: DraftWish) -> None:
        self.wish = wish
        self.config = block_config(wish.config, wish.dtype_name, 1 + wish.steps, wish.folder)
        self.feature_ids = self.config.aux.ids

    def share(self, model: CausalLM) -> Callable[[int], Drafter]:
        wish = self.wish
        head = random_blocks(self.config, wish.dtype, wish.device)
        head.share(*wish.tables(model), wish.config.max_position_embeddings)
        return lambda num_pages: SimulatedBlocks(
            head,
            wish.accept_length,
            num_pages=num_pages,
            page_size=wish.page_size,
            capacity=wish.capacity,
        )

    def step(self, target: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
        return block_step(target, self.config, batch, steps, context)


class BenchMtp:
    """One MTP module that is recycled over the steps."""

    def __init__(self, wish: DraftWish) -> None:
        self.wish = wish
        self.config = modules_config(wish.config, wish.dtype_name, self.num_modules)
        self.feature_ids = self.config.aux.ids

    @property
    def num_modules(self) -> int:
        return 1

    def share(self, model: CausalLM) -> Callable[[int], Drafter]:
        wish = self.wish
        head = random_modules(self.config, wish.accept_length, wish.dtype, wish.device)
        head.share(*wish.tables(model), model.norm, wish.config.max_position_embeddings)
        sizes = {"page_size": wish.page_size, "capacity": wish.capacity}
        if self.num_modules == 1:
            return lambda num_pages: CutModule(head, num_pages=num_pages, **sizes).accepting(
                wish.accept_length
            )
        return lambda num_pages: DeepMtpDrafter(head, num_pages=num_pages, **sizes)

    def step(self, target: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
        module = PassCounts.of_module(self.config, self.wish.dtype.itemsize)
        return mtp_step(target, module, self.num_modules, batch, steps, context)


class BenchDeepMtp(BenchMtp):
    """As many MTP modules as steps."""

    @property
    def num_modules(self) -> int:
        return self.wish.steps


class BenchNgram:
    """Lookup in the request's own tokens, whose text repeats one token."""

    feature_ids: tuple[int, ...] = ()

    def __init__(self, wish: DraftWish) -> None:
        self.wish = wish

    def share(self, model: CausalLM) -> Callable[[int], Drafter]:
        wish = self.wish
        config = NgramConfig(**NGRAMS, dtype=wish.dtype_name)
        config = replace(config, window=min(config.window, wish.config.max_position_embeddings))
        return lambda num_pages: CutNgram(config, capacity=wish.capacity, device=wish.device).accepting(
            wish.accept_length
        )

    def step(self, target: PassCounts, batch: int, steps: int, context: int) -> list[Work]:
        return [target.step(batch, steps + 1, context, logit_rows=steps + 1)]


DRAFTERS: Mapping[str, Callable[[DraftWish], BenchDrafter]] = MappingProxyType(
    {
        "eagle3": BenchEagle3,
        "p-eagle": BenchParallel,
        "eagle": BenchEagle,
        "dflash": BenchDflash,
        "mtp": BenchMtp,
        "mtp-deep": BenchDeepMtp,
        "ngram": BenchNgram,
    }
)


def cut(proposal: Proposal, accept_length: int) -> Proposal:
    """`proposal` for a target that says TOKEN always and shall accept `accept_length` - 1 drafts of it."""
    drafts = torch.full_like(proposal.drafts, TOKEN)
    drafts[:, accept_length - 1 :] = WRONG
    return proposal._replace(drafts=drafts)


def eagle_drafter(kind: type[D], head: FeatureHead, wish: DraftWish, num_pages: int) -> D:
    """A drafter of `kind` with the sizes of `wish`."""
    return kind(
        head,
        num_pages=num_pages,
        page_size=wish.page_size,
        dtype=wish.dtype,
        device=wish.device,
        capacity=wish.capacity,
    )


class CutEagle(Eagle3Drafter):
    """An EAGLE head whose drafts are replaced; the work stays."""

    accept_length = 1

    def accepting(self, accept_length: int) -> "CutEagle":
        self.accept_length = accept_length
        return self

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        return cut(super().propose(view, shape), self.accept_length)


class CutModule(SharedMtpDrafter):
    """One MTP module whose drafts are replaced; the work stays."""

    accept_length = 1

    def accepting(self, accept_length: int) -> "CutModule":
        self.accept_length = accept_length
        return self

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        return cut(super().propose(view, shape), self.accept_length)


class CutNgram(NgramDrafter):
    """Lookup whose drafts are replaced; the work stays."""

    accept_length = 1

    def accepting(self, accept_length: int) -> "CutNgram":
        self.accept_length = accept_length
        return self

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        return cut(super().propose(view, shape), self.accept_length)


def named_drafters(text: str) -> list[str]:
    """The drafters that an option names: ALL, or names separated by commas. Raises ValueError for others."""
    names = list(DRAFTERS) if text == ALL else list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in DRAFTERS]:
        raise ValueError(f"{unknown[0]!r}: write {ALL}, or some of {','.join(DRAFTERS)}")
    return names
