"""A model runner with just enough bookkeeping to feed it requests by name."""

import random
from pathlib import Path

import torch
from baton.engine.batch.forward_batch import CaptureHidden, ForwardBatch, ForwardOutput
from baton.engine.kv.page_table import build_page_table, pages_for, slots_for
from baton.engine.kv.pool import KVPool
from baton.engine.models.weights import load_model
from baton.engine.runner.model_runner import ModelRunner

NUM_PAGES, PAGE_SIZE = 64, 16


class ToyEngine:
    """Requests by name; their pages come in shuffled order, so that no test relies on neighbours."""

    def __init__(
        self,
        path: Path,
        aux: tuple[int, ...] | None = None,
        *,
        kv_dtype: str = "auto",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.config = load_model(path, dtype=dtype, kv_dtype=kv_dtype)
        self.pool = KVPool(NUM_PAGES, self.model.kv_layout(PAGE_SIZE), row_dtype=dtype)
        self.runner = ModelRunner(self.model, self.pool)
        if aux is not None:
            self.runner.set_aux_layer_ids(aux)
        self.free = list(range(1, NUM_PAGES))
        random.Random(7).shuffle(self.free)
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def batch(self, *chunks: tuple[str, list[int]]) -> ForwardBatch:
        """The next rows of the named requests; their lengths advance."""
        positions, slots, ids = [], [], []
        for name, chunk in chunks:
            start = self.lengths.get(name, 0)
            end = start + len(chunk)
            pages = self.pages.setdefault(name, [])
            while len(pages) < pages_for(end, PAGE_SIZE):
                pages.append(self.free.pop())
            self.lengths[name] = end
            ids += chunk
            positions.append(torch.arange(start, end))
            slots.append(slots_for(pages, start, end, PAGE_SIZE))
        return ForwardBatch(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            slots=torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64),
            page_table=build_page_table([self.pages[name] for name, _ in chunks]),
            q_lens=[len(chunk) for _, chunk in chunks],
            kv_lens=[self.lengths[name] for name, _ in chunks],
        )

    def run(
        self, *chunks: tuple[str, list[int]], capture: CaptureHidden = CaptureHidden.NULL
    ) -> ForwardOutput:
        batch = self.batch(*chunks)
        batch.capture_hidden = capture
        return self.runner.forward(batch)

    def greedy(self, ids: list[int], count: int, name: str = "greedy") -> list[int]:
        """`count` tokens by argmax, prompt at once, then one by one."""
        out = [int(self.run((name, ids)).logits[-1].argmax())]
        while len(out) < count:
            out.append(int(self.run((name, out[-1:])).logits[-1].argmax()))
        return out


def random_ids(count: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
