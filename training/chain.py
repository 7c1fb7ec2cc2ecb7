"""Training-time test of a drafter that feeds on its own output (EAGLE-3, arXiv 2503.01840).

Row i pairs the target's features of position i with token i+1. Step 0 predicts token i+2 from the features,
step k predicts token i+2+k from the drafter's own output of step k-1, as the chain of a decode step does. A
row of step k sees the keys of step 0 at positions 0 to i and its own keys of steps 1 to k.

Shape legend: B samples, L rows, T steps, H draft hidden, Ht target hidden, K features, V vocabulary, Vd draft
vocabulary, D head dimension, n predicted tokens.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.host_copy import to_device
from ..engine.models.rope import RotaryEmbedding
from ..kernels.output_loss import loss_gradient, loss_rows
from .chain_attention import KeysValues
from .draft_layers import Norm
from .frozen_target import FrozenTarget, TargetRows
from .loss_vocabulary import LossVocabulary
from .output_loss import output_loss
from .samples import Batch
from .trainee import StepLosses

STEP_DECAY = 0.8  # weight of a step's loss over that of the step before


class ChainTrainee(nn.Module):
    """A drafter with one output projection that is trained over `steps` steps of its chain.

    `target_ids` int64 `[Vd]` maps draft tokens to target tokens. A drafter of the whole vocabulary has no
    `lm_head`: it shares the target's, and its loss runs over a `vocabulary` if there is one. `sharpness`
    multiplies the target's logits: above 1 the loss weighs the target's best token more. A row's loss is
    multiplied by `missed` for each wrong draft before it in its chain, since a server seldom gets there.
    Weights are float32; the dtype of products is the target's.
    """

    target_ids: torch.Tensor
    norm: Norm
    lm_head: nn.Linear | None

    def __init__(
        self,
        target: FrozenTarget,
        target_ids: torch.Tensor,
        *,
        steps: int,
        sharpness: float,
        missed: float = 1.0,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        super().__init__()
        self.steps, self.sharpness, self.missed, self._vocabulary = steps, sharpness, missed, vocabulary
        self.lm_head = None
        self._target = target
        self.register_buffer("target_ids", target_ids.clone(), persistent=False)

    # --- what a drafter is -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def rotary(self) -> RotaryEmbedding:
        """The tables of its attention."""

    @abstractmethod
    def project(self, rows: TargetRows) -> torch.Tensor:
        """The hidden input `[B, L, H]` of step 0."""

    @abstractmethod
    def layer(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        earlier: list[KeysValues],
    ) -> torch.Tensor:
        """One step: embeddings and hidden `[B, L, H]`, rotary tables `[L, D]` -> outputs `[B, L, H]`.

        `earlier` holds the keys and values of the steps before; this step's are added.
        """

    @abstractmethod
    def feedback(self, out: torch.Tensor) -> torch.Tensor:
        """The hidden input of the next step, of the outputs `[B, L, H]`."""

    @abstractmethod
    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint, by their published names."""

    # --- training --------------------------------------------------------------------------------------

    def forward(self, batch: Batch, rows: TargetRows) -> StepLosses:
        """The losses of all steps over `batch`; rows that predict no generated token count nothing."""
        device = rows.hidden.device
        width = batch.tokens.shape[1]
        # row j of the target gives the distribution of token j+1
        flat = _shifted(batch.mask, 1).flatten().nonzero()[:, 0]
        column, places = to_device(flat % width, device), to_device(flat, device)
        later = 1 + torch.arange(self.steps, device=device)[:, None]
        is_valid = (column >= later).float()  # [T, n]
        counts = is_valid.sum(1)
        decay = STEP_DECAY ** torch.arange(self.steps, device=device, dtype=torch.float32)
        weights = is_valid * (decay / counts.clamp(min=1))[:, None]
        hidden = rows.hidden.flatten(0, 1).index_select(0, places)
        loss, correct = (torch.zeros(self.steps, device=device) for _ in range(2))
        dtype = self._target.model.dtype
        ids, weight = self._output_rows(batch.seed)
        chances = ChainChances(places, self.steps, self.missed)

        def grade(part: slice, logits: torch.Tensor) -> torch.Tensor:
            best, wanted, is_known = self._wanted(hidden[part], ids, logits.dtype)
            found = loss_rows(logits, wanted)
            shape = (self.steps, len(best))
            losses = found.loss.view(shape) * is_known * is_valid[:, part]
            hits = (ids[found.best].view(shape) == best) * is_valid[:, part]
            given = weights[:, part] * is_known * chances.of(part, hits > 0)
            loss.add_(losses.sum(1))
            # a wrong draft is wrong to a client, whether or not the vocabulary has the right one
            correct.add_(hits.sum(1))
            loss_gradient(logits, wanted, found.norm, given.flatten())
            return (found.loss.view(shape) * given).sum()

        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            # output j-1-k of step k predicts what row j of the target does
            outs = [
                out.flatten(0, 1).index_select(0, (places - 1 - step).clamp(min=0))
                for step, out in enumerate(self.outputs(batch.tokens, rows))
            ]
            objective = output_loss(self.norm(torch.stack(outs)), weight, grade)
        # every parameter takes part, also where a batch has no row to predict: ranks exchange all gradients
        anchor = sum(parameter.sum() for parameter in self.parameters()) * 0
        return StepLosses(objective + anchor, loss / counts.clamp(min=1), correct, counts)

    def outputs(self, tokens: torch.Tensor, rows: TargetRows) -> Iterator[torch.Tensor]:
        """The layer's output `[B, L, H]` of each step, un-normed, for `tokens` int64 `[B, L]`."""
        length, last = tokens.shape[1], self.rotary.max_position - 1
        hidden = self.project(rows)
        earlier: list[KeysValues] = []
        for step in range(self.steps):
            embeds = F.embedding(_shifted(tokens, 1 + step), self._target.model.embed_tokens)
            positions = torch.arange(length, device=tokens.device) + step
            cos, sin = self.rotary.lookup(positions.clamp(max=last), self._target.model.dtype)
            out = self.layer(embeds, hidden, cos, sin, earlier)
            yield out
            hidden = self.feedback(out)

    def _output_rows(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's tokens int64 `[Vd]` that a batch's loss runs over, and their output rows `[Vd, H]`."""
        if self.lm_head is not None:
            return self.target_ids, self.lm_head.weight
        if self._vocabulary is None:
            return self.target_ids, self._target.model.lm_head
        ids = self._vocabulary.draw(seed)
        return ids, self._target.model.lm_head[ids]

    @torch.no_grad()
    def _wanted(
        self, hidden: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the target's rows `[n, Ht]`: the best token `[n]`, the distribution over the tokens `ids` `[Vd]`
        in `dtype`, and float 1 where the best token is among them, else 0.
        """
        logits = self._target.logits(hidden)
        best = logits.argmax(-1)
        if len(ids) == logits.shape[1]:
            return best, self._shares(logits, dtype), torch.ones_like(best, dtype=torch.float32)
        logits = logits.index_select(1, ids)
        # a token that is not among them cannot be predicted: its row teaches nothing
        is_known = (ids[logits.argmax(-1)] == best).float()
        return best, self._shares(logits, dtype), is_known

    def _shares(self, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return logits.mul_(self.sharpness).softmax(-1).to(dtype)


class ChainChances:
    """The weights of drafts by the drafts before them in their chains: `missed` for each wrong one.

    Column j of T steps holds the drafts of the token at `places[j]` `[n]`. The draft of step k there follows
    that of step k-1 at the place before. Parts of the columns are asked for in turn.
    """

    def __init__(self, places: torch.Tensor, steps: int, missed: float) -> None:
        self._missed = missed
        # the draft before a first generated token is of the prompt: no server makes it
        self._follows = torch.cat((torch.zeros_like(places[:1]), (places[1:] - places[:-1] == 1).long())) > 0
        self._before = torch.ones(steps, 1, device=places.device)  # of the column before the next part

    def of(self, part: slice, hits: torch.Tensor) -> torch.Tensor:
        """The weights `[T, m]` of the drafts of columns `part`, of which `hits` bool `[T, m]` are right."""
        if self._missed == 1:
            return torch.ones_like(hits, dtype=torch.float32)
        follows = self._follows[part]
        rows = [torch.ones(hits.shape[1], device=hits.device)]
        last = []
        for step, is_hit in enumerate(hits):
            after = torch.where(is_hit, rows[step], rows[step] * self._missed)
            last.append(after[-1:])
            rows.append(torch.where(follows, torch.cat((self._before[step], after[:-1])), 1.0))
        self._before = torch.stack(last)
        return torch.stack(rows[:-1])


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """`x` `[B, L, ...]` moved left by `by` rows; zeros come in on the right."""
    if by >= x.shape[1]:
        return torch.zeros_like(x)
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)
