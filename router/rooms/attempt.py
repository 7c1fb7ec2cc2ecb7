"""One attempt of a room on a pair of workers: checks their messages and puts their tokens in order. Pure."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from ...cluster.protocol.messages import (
    Failed,
    Finished,
    FirstToken,
    Gone,
    OfferPrefix,
    Prefill,
    PromptLogprobs,
    Refused,
    Reserve,
    Reserved,
    RoutedExperts,
    Sampling,
    TokenItem,
    TokenLogprob,
)
from .effects import Pair, Timeouts

MAX_LOOKAHEAD = 64  # tokens behind a page on which its key may depend, by the bound of HeldPrefixes
MAX_EARLY_ITEMS = 256  # items of decode kept until an earlier token arrives
DRAINING = "Draining"  # kind of a Failed: the worker drains; the attempt has not failed
RETRACTED = "Retracted"  # kind of a worker's Failed: its pages went to another request; nothing has failed
UNSHARED = "Unshared"  # kind of decode's Failed: the room whose prompt it should share has none; as above
PEER_LOST = "PeerLost"  # kind of a Failed: the other worker of the pair is gone
BAD_GRAMMAR = "BadGrammar"  # no worker can compile the grammar of this request
GRAMMARS_OVERDUE = "GrammarsOverdue"  # this worker compiles too many grammars; another may have capacity
BAD_EMBEDS = "BadEmbeds"  # the prompt's embeddings give logits that are not finite
DEADLINE_EXCEEDED = "DeadlineExceeded"  # also the kind of a worker's Failed
# kinds caused by the request, not by a worker
BLAMELESS = frozenset((BAD_GRAMMAR, BAD_EMBEDS, GRAMMARS_OVERDUE, DEADLINE_EXCEEDED))
# kind of decode's Failed: prefill gave the room up and reports the reason itself
HANDOFF_ABORTED = "HandoffAborted"
HANDOFF_KINDS = frozenset(
    ("TransferError", HANDOFF_ABORTED, "TransferTimeout", "DigestMismatch", "HandshakeRefused")
)

AttemptEvent = (
    Reserved | Refused | PromptLogprobs | RoutedExperts | FirstToken | TokenItem | Finished | Failed
)
RoomEvent = AttemptEvent | Gone


@dataclass(eq=False)
class Attempt:
    """The state of one attempt.

    Tokens are numbered from 0 as the workers number them: output of earlier attempts belongs to the prompt.
    """

    pair: Pair
    epoch: int
    placed_at: float
    num_before: int  # output tokens of earlier attempts
    is_reserved: bool = False
    first: FirstToken | None = None
    finished: Finished | None = None
    num_output: int = 0  # tokens delivered to the client
    aborted: Failed | None = None  # decode's report that prefill gave the room up
    _reason_by: float = 0.0  # end of the wait for prefill's own reason
    _early: dict[int, TokenItem] = field(default_factory=dict)
    # log-probabilities of the prompt's tokens from the second on
    _scores: list[TokenLogprob] = field(default_factory=list)
    _experts: list[bytes] = field(default_factory=list)  # of prompt rows
    _num_expert_rows: int = 0  # of them, ever
    _first_expert_row: int = 0

    @property
    def instances(self) -> tuple[str, ...]:
        return self.pair.instances

    @property
    def has_first(self) -> bool:
        """Whether token 1 is here.

        Decode sends it with the other tokens of a prompt that it computes itself.
        """
        return self.first is not None or self.pair.is_local

    @property
    def waits_for(self) -> str:
        """The instance of the worker whose message is due next."""
        return self.pair.prefill if self.is_reserved and not self.has_first else self.pair.decode

    @property
    def is_flooded(self) -> bool:
        """Whether more than MAX_EARLY_ITEMS wait for an earlier token."""
        return len(self._early) > MAX_EARLY_ITEMS

    def patience(self, timeouts: Timeouts) -> float:
        """Seconds without progress after which the attempt has failed."""
        if self.num_output:
            return timeouts.token_s
        return timeouts.first_token_s if self.is_reserved else timeouts.reserve_s

    @property
    def is_complete(self) -> bool:
        """Whether decode has finished and every token is delivered."""
        return self.finished is not None and 0 < self.num_output >= self.finished.output_tokens

    def orders(
        self, room: str, prompt_ids: list[int], output_ids: list[int], sampling: Sampling, deadline_ms: int
    ) -> list[Reserve | Prefill | OfferPrefix]:
        """The orders for the workers: continue after `prompt_ids` and `output_ids`.

        Prefill's order is the first: the client waits for its work, and decode has time to attach until that
        ends. A prefix from decode is offered before prefill looks for it, and behind decode's Reserve.
        """
        if output_ids:
            sampling = _behind(sampling, len(prompt_ids), len(output_ids))
            prompt_ids = prompt_ids + output_ids
        self._first_expert_row = sampling.routed_experts
        reserve = Reserve(
            room=room,
            epoch=self.epoch,
            instance=self.pair.decode,
            prompt_ids=prompt_ids,
            num_output=len(output_ids),
            sampling=sampling,
            deadline_ms=deadline_ms,
            prefill_endpoint=self.pair.prefill_endpoint,
            prefill_instance=None if self.pair.is_local else self.pair.prefill,
            shares=self.pair.shares or None,
        )
        if self.pair.is_local:
            return [reserve]
        prefill = Prefill(
            room=room,
            epoch=self.epoch,
            instance=self.pair.prefill,
            prompt_ids=prompt_ids,
            num_output=len(output_ids),
            sampling=sampling,
            deadline_ms=deadline_ms,
            pull=self.pair.pull,
            wants_features=self.pair.wants_features,
        )
        offer = self._offer(room, prompt_ids)
        return [prefill, reserve] if offer is None else [reserve, offer, prefill]

    def _offer(self, room: str, prompt_ids: list[int]) -> OfferPrefix | None:
        """The order to the decode worker that prefill pulls from."""
        pull = self.pair.pull
        if pull is None:
            return None
        order = OfferPrefix(instance=pull.instance, transfer=pull.transfer, tokens=pull.tokens)
        if pull.is_reader:
            return replace(order, room=room, epoch=self.epoch)
        return replace(order, prompt_ids=prompt_ids[: pull.tokens + MAX_LOOKAHEAD])

    def is_answer_due(self, instance: str) -> bool:
        """Whether this worker has not answered its order yet."""
        is_awaited = not self.is_reserved if instance == self.pair.decode else self.first is None
        return instance in self.instances and is_awaited

    def accepts(self, message: AttemptEvent, instance: str) -> bool:
        """Whether `message` belongs to this attempt and `instance` may send it."""
        if message.epoch != self.epoch:
            return False
        if isinstance(message, TokenItem):  # the most frequent message
            return instance == self.pair.decode
        if instance not in self.instances:
            return False
        if isinstance(message, PromptLogprobs):
            return instance == self.pair.prefill and message.start == len(self._scores) + 1
        if isinstance(message, RoutedExperts):
            due = self._first_expert_row + self._num_expert_rows
            return instance == self.pair.prefill and message.start == due >= 0
        if isinstance(message, FirstToken):
            return instance == self.pair.prefill != self.pair.decode
        # output of earlier attempts was the whole answer
        if isinstance(message, Finished) and message.output_tokens == 0:
            return self.num_before > 0 and self.num_output == 0
        return instance == self.pair.decode or not isinstance(message, (Reserved, Finished))

    def at_fault(self, message: Failed) -> tuple[str, ...]:
        """The workers that a failure counts against. A failed hand-off counts against both ends."""
        if message.kind in BLAMELESS:
            return ()
        if message.kind == PEER_LOST:
            return tuple(instance for instance in self.instances if instance != message.instance)
        return self.instances if message.kind in HANDOFF_KINDS else (message.instance,)

    def unable(self, message: Failed) -> tuple[str, ...]:
        """The workers that cannot serve this request now, without being at fault."""
        return (message.instance,) if message.kind == GRAMMARS_OVERDUE else ()

    def defers(self, message: Failed, until: float) -> bool:
        """Whether to wait until `until` for prefill's own reason, since decode only knows that prefill gave
        the room up."""
        if message.kind != HANDOFF_ABORTED or message.instance != self.pair.decode or message is self.aborted:
            return False
        if self.aborted is None:
            self.aborted, self._reason_by = message, until
        return True

    def overdue_word(self, now: float) -> Failed | None:
        """Decode's message, if prefill has not given its own reason in time; else None."""
        return self.aborted if now >= self._reason_by else None

    def is_next(self, item: TokenItem) -> bool:
        """Whether the item directly continues the delivered tokens, which is the common case."""
        return 0 < item.seq == self.num_output and len(item.ids) > 0 and not self._early

    def keep(self, item: TokenItem) -> bool:
        """Stores tokens of decode; False for duplicates."""
        if item.seq + len(item.ids) <= self.num_output or item.seq in self._early:
            return False
        self._early[item.seq] = item
        return True

    def keep_scores(self, message: PromptLogprobs) -> None:
        """Stores log-probabilities of the next part of the prompt."""
        self._scores += message.items

    def take_scores(self) -> list[TokenLogprob]:
        """Log-probabilities of the whole prompt; empty when called again."""
        scores, self._scores = self._scores, []
        return scores

    def keep_experts(self, message: RoutedExperts) -> None:
        """Stores the experts of the next part of the prompt."""
        self._experts.append(message.ids)
        self._num_expert_rows += message.count

    def take_experts(self, item: TokenItem, skip: int) -> bytes:
        """The experts of the rows before the tokens of `item` behind the first `skip`, of the prompt's rows
        with token 1.
        """
        rows, ids = item.experts or b"", item.ids
        if not self._experts:
            return rows[skip * (len(rows) // len(ids)) :] if skip else rows
        before, self._experts = self._experts, []
        return b"".join((*before, rows))

    def head(self) -> TokenItem:
        """Token 1 of prefill as the equivalent item of decode."""
        first = self.first
        assert first is not None
        logprobs = [first.logprob] if first.logprob is not None else []
        return TokenItem(room=first.room, epoch=self.epoch, seq=0, ids=[first.token], logprobs=logprobs)

    def next_item(self) -> TokenItem | None:
        """Removes and returns the stored item that continues the delivered tokens; None if there is none."""
        while self._early:
            seq = min(self._early)
            if seq > self.num_output:
                return None
            item = self._early.pop(seq)
            if seq + len(item.ids) > self.num_output:
                return item
        return None


def _behind(sampling: Sampling, num_prompt: int, num_output: int) -> Sampling:
    """The sampling of a continuation: limits less the output so far, no prompt log-probabilities, and experts
    of the rows behind those whose tokens were delivered.
    """
    return replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - num_output,
        min_new_tokens=max(0, sampling.min_new_tokens - num_output),
        prompt_logprobs=-1,
        routed_experts=-1 if sampling.routed_experts < 0 else num_prompt + num_output - 1,
    )
