"""Orders about the weights of a running drafter: another thread stages them, the scheduler applies them.

    check   reads and checks a checkpoint, and forgets it
    swap    the same, then copies the weights over those in use, between two steps
    back    restores the weights that the last swap replaced; they are kept in host memory until then
    restart ends the worker after its requests, so that its supervisor starts it with a head of another shape

Requests go on: no token depends on the weights of the drafter. The draft KV of running requests is of the old
weights, so their drafts are accepted less until they end. They are not counted for the new weights, and their
pages do not enter the prefix cache, which a change of weights clears. A worker that restarts has the head of
its settings.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from ..cluster.process.log import fields
from ..cluster.protocol.messages import DraftHead, SwapDraft
from ..engine.errors import CheckpointError
from ..engine.speculative.drafters.live_head import LiveHead, OtherShape, StagedHead
from ..engine.speculative.step.result import StepResult
from .queues import DecodeRoom

logger = logging.getLogger(__name__)

LONGEST_FAULT = 1000  # characters in a heartbeat


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The result of the thread: weights to apply and those to keep, or the fault.

    `found`: fingerprint of the checkpoint that was read, `found_ids` the layers that it reads. `difference`:
    why it cannot take the place of the head in use, though it fits the target.
    """

    found: str = ""
    found_ids: tuple[int, ...] = ()
    difference: str = ""
    is_restart: bool = False
    head: StagedHead | None = None
    kept: StagedHead | None = None
    fault: str = ""


class HeadSwap:
    """Performs orders, one at a time, on the weights of `head`.

    `on_change` is called after every change of the weights, `reach` is the failpoint before it. `named` is
    the setting --draft, `on_restart` begins the drain of a worker that is to be started again.
    """

    def __init__(
        self, head: LiveHead, on_change: Callable[[], None], reach: Callable[[], None] = lambda: None
    ) -> None:
        self._head, self._on_change, self._reach = head, on_change, reach
        self.named = ""
        self.on_restart: Callable[[], None] = lambda: None
        self.is_leaving = False
        self.number = 0  # changes of the weights so far; a room has the number of its start
        self._verifies = self._tokens = 0  # of rooms with this number
        self._order: SwapDraft | None = None
        self._state, self._fault = "", ""
        self._read = Staged()  # of the newest order
        self._results: SimpleQueue[Staged] = SimpleQueue()

    def __repr__(self) -> str:
        return f"<HeadSwap {self._head!r}, {self.number} changes, {self._state or 'no order'}>"

    @property
    def status(self) -> DraftHead:
        """The weights in use and the newest order, for the heartbeat."""
        head, order = self._head, self._order
        return DraftHead(
            path=str(head.version.path),
            fingerprint=head.version.fingerprint,
            feature_ids=head.feature_ids,
            verifies=self._verifies,
            tokens=self._tokens,
            order="" if order is None else order.order,
            state=self._state,
            fault=self._fault,
            found=self._read.found,
            found_ids=self._read.found_ids,
            link=self.named if os.path.islink(self.named) else "",
            previous="" if head.previous is None else head.previous.fingerprint,
        )

    def observe(self, batch: Sequence[DecodeRoom], result: StepResult) -> None:
        """Counts the verifies of rooms that began with the weights in use."""
        for room, tokens, drafted in zip(batch, result.tokens, result.drafted, strict=True):
            if drafted and tokens and room.head_number == self.number:
                self._verifies += 1
                self._tokens += len(tokens)

    def take(self, order: SwapDraft) -> None:
        """Begins an order. A repeated one, and any while another one is under way, is ignored: the sender
        repeats an order until the heartbeat names it.
        """
        if self._state == "busy" or (self._order is not None and self._order.order == order.order):
            return
        self._order, self._state, self._fault, self._read = order, "busy", "", Staged()
        logger.info("draft order", extra=fields(action=order.action, path=order.path))
        threading.Thread(target=self._stage, args=(order,), name="draft head", daemon=True).start()

    def turn(self) -> None:
        """Applies weights that are ready. Call it between two steps."""
        try:
            staged = self._results.get_nowait()
        except Empty:
            return
        self._read = Staged(found=staged.found, found_ids=staged.found_ids)
        if staged.fault:
            self._state, self._fault = "refused", staged.fault
            logger.warning("draft order refused: %s", staged.fault)
        elif staged.is_restart:
            self._state, self.is_leaving = "leaving", True
            self.on_restart()
        elif staged.head is None:
            self._state, self._fault = "other" if staged.difference else "checked", staged.difference
        else:
            self._reach()
            self._head.apply(staged.head, staged.kept)
            self.number += 1
            self._verifies = self._tokens = 0
            self._on_change()
            self._state = "done"
            logger.info(
                "drafts are of another head",
                extra=fields(path=str(staged.head.version.path), fingerprint=staged.head.version.fingerprint),
            )

    def _stage(self, order: SwapDraft) -> None:
        """Runs in a thread of its own."""
        head = self._head
        try:
            if order.action == "back":
                previous = head.stage_previous()
                self._results.put(Staged(found=previous.version.fingerprint, head=previous))
                return
            if order.action == "restart" or order.action == "check":
                self._results.put(self._checked(order))
                return
            staged = head.stage(Path(order.path))
            self._results.put(
                Staged(
                    found=staged.version.fingerprint,
                    found_ids=head.feature_ids,
                    head=staged,
                    kept=head.keep(),
                )
            )
        except (CheckpointError, OSError) as error:
            self._results.put(Staged(fault=_one_line(str(error))))
        except Exception as error:  # such as too little memory: the worker goes on with what it has
            self._results.put(Staged(fault=_one_line(f"{order.path}: {type(error).__name__}: {error}")))

    def _checked(self, order: SwapDraft) -> Staged:
        """Reads the checkpoint of an order. Raises CheckpointError if a start with it would fail."""
        path, head, difference = Path(order.path), self._head, ""
        if order.action == "restart" and os.path.realpath(self.named) != os.path.realpath(path):
            raise CheckpointError(
                f"--draft {self.named} of this worker does not lead to {path}; start it with --draft LINK, "
                "and let the link name the new head"
            )
        try:
            version, ids = head.stage(path).version, head.feature_ids
        except OtherShape as error:
            difference = _one_line(str(error))
            version, ids = head.read_other(path)
        return Staged(
            found=version.fingerprint,
            found_ids=ids,
            difference=difference,
            is_restart=order.action == "restart",
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST_FAULT]
