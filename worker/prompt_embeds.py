"""Prompt embeddings on a worker, between their messages and the order that they belong to.

Rows are converted to the model's dtype as they arrive. All rows that wait, and those of rooms whose prompt is
not computed yet, stay within `MAX_BYTES`; a single prompt is always taken.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from ..cluster.protocol.messages import Prefill, PromptEmbeds, Reserve
from ..cluster.protocol.prompt_embeds import ELEMENT_BYTES
from ..engine.engine import Engine
from ..engine.models.interface import InputEmbeds
from .refusal import Refusal

MAX_BYTES = 512 << 20  # in the model's dtype
RETRY_AFTER_MS = 250
OFF = "the workers run without --prompt-embeds"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(kw_only=True)
class _Waiting:
    """The rows of one attempt so far. `fault`: why its order will be refused for ever, "" if it will not."""

    parts: list[torch.Tensor] = field(default_factory=list)
    num_rows: int = 0
    fault: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class EmbedsInbox:
    """Rows of prompt embeddings that wait for their order. `width` and `dtype`: those of the model.

    `fault` tells why this worker takes none, "" if it does.
    """

    def __init__(
        self, *, width: int, dtype: torch.dtype, fault: str = "", max_bytes: int = MAX_BYTES
    ) -> None:
        self.width = width
        self.dtype = dtype
        self.fault = fault
        self.max_bytes = max_bytes
        self._waiting: OrderedDict[tuple[str, int], _Waiting] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that wait."""
        return sum(waiting.num_bytes for waiting in self._waiting.values())

    def keep(self, part: PromptEmbeds) -> None:
        """Keep the rows of one message. Rows behind a gap are dropped with all earlier ones of the attempt.

        Beyond the bound on bytes, the attempts that have waited longest lose their rows.
        """
        key = part.room, part.epoch
        if part.start == 0:  # the first part, or the first of a repetition
            self._waiting[key] = _Waiting()
        waiting = self._waiting.get(key)
        if self.fault or waiting is None:
            self._waiting.pop(key, None)
            return
        row_bytes = part.width * ELEMENT_BYTES[part.dtype]
        if part.start != waiting.num_rows or len(part.data) % row_bytes:
            del self._waiting[key]
            return
        waiting.num_rows += len(part.data) // row_bytes
        if part.width != self.width:
            waiting.fault = f"prompt_embeds has rows of {part.width} elements, the model takes {self.width}"
            return
        rows = torch.frombuffer(bytearray(part.data), dtype=DTYPES[part.dtype]).view(-1, self.width)
        waiting.parts.append(rows.to(self.dtype))
        if not bool(waiting.parts[-1].isfinite().all()):
            waiting.fault = f"prompt_embeds has a value that is not finite in {self.dtype}"
        while len(self._waiting) > 1 and self.num_bytes > self.max_bytes:
            self._waiting.popitem(last=False)

    def take(self, order: Reserve | Prefill, held_bytes: int) -> torch.Tensor | Refusal:
        """The rows `[n, width]` of an order with embeddings, or its refusal.

        `held_bytes`: bytes of the embeddings that the worker's rooms hold already.
        """
        waiting = self._waiting.pop((order.room, order.epoch), None) or _Waiting()
        assert order.embeds is not None
        if fault := self.fault or waiting.fault:
            return Refusal(reason=fault, retry_after_ms=0)
        if waiting.num_rows != order.embeds.count or waiting.num_rows > len(order.prompt_ids):
            lost = f"{waiting.num_rows} of {order.embeds.count} prompt embeddings are here"
            return Refusal(reason=lost, retry_after_ms=RETRY_AFTER_MS)
        if held_bytes and held_bytes + waiting.num_bytes > self.max_bytes:
            full = "prompt embeddings of other requests fill the memory for them"
            return Refusal(reason=full, retry_after_ms=RETRY_AFTER_MS)
        return torch.cat(waiting.parts)

    def drop(self, room: str, epoch: int) -> None:
        """Drop the rows of every attempt of `room` up to `epoch`."""
        for key in [key for key in self._waiting if key[0] == room and key[1] <= epoch]:
            del self._waiting[key]

    def clear(self) -> None:
        """Drop all rows. An order that comes for them is refused for now."""
        self._waiting.clear()

    def __repr__(self) -> str:
        return f"<EmbedsInbox {len(self._waiting)} prompts, {self.num_bytes} bytes>"


def embeds_inbox(engine: Engine, *, is_on: bool) -> EmbedsInbox:
    """The inbox of a worker. It takes embeddings if the settings say so (`is_on`) and the model does."""
    model, fault = engine.runner.model, "" if is_on else OFF
    if is_on and not (isinstance(model, InputEmbeds) and model.takes_input_embeds):
        fault = f"{type(model).__name__} takes no input_embeds"
    if is_on and not fault and not engine.group.is_solo:
        fault = "tensor-parallel workers take no prompt embeddings"
    return EmbedsInbox(width=engine.model_config.hidden_size, dtype=model.dtype, fault=fault)
