"""A router whose workers repeat the last message: the text after `SAY:`, three tokens at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from baton.cluster.protocol.messages import Prefill, Reserve, WorkerStats
from baton.router.text.tokenizer import Tokenizer
from baton.tests.cluster.router_fakes import ANSWER, RunningRouter, Script

PAGES = 1024  # of 16 tokens


class Saying(Script):
    """Answers of the prompt's choosing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__([])
        self._tokenizer = tokenizer

    def prefill(self, worker, message) -> None:
        (self._scripted(message) if isinstance(message, Prefill) else super()).prefill(worker, message)

    def decode(self, worker, message) -> None:
        (self._scripted(message) if isinstance(message, Reserve) else super()).decode(worker, message)

    def _scripted(self, order: Prefill | Reserve) -> Script:
        _, mark, said = self._tokenizer.decode(order.prompt_ids).rpartition("SAY:")
        answer = said.partition("<|im_end|>")[0].partition("\n</tool_response>")[0]
        return Script(self._tokenizer.encode(answer if mark else ANSWER))


@contextlib.contextmanager
def saying_router(directory: Path, model_dir: Path, **settings: str) -> Iterator[RunningRouter]:
    running = RunningRouter(directory, model_dir=model_dir, **settings)
    try:
        running.pair(Saying(running.tokenizer), max_context=8192, pages_total=PAGES)
        for worker in running.workers:
            worker.stats = WorkerStats(pages_total=PAGES, pages_free=PAGES)
        yield running
    finally:
        running.close()
