"""Measures how long requests with penalties take to join decode steps, on the host:
`python tests/unit/engine/speculative/bench_joining.py [device]`. One thread, a vocabulary of 151936 tokens.
"""

import sys
import time

import torch
from baton.engine.sampling.edits import SamplingRow
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.step.device_state import DeviceState, RequestInit

ROUNDS, VOCAB, MAX_PAGES, ENTRIES = 31, 151936, 2048, 64
CASES = ((1, 1024), (16, 1024), (1, 32768))  # requests that join together, and tokens of their prompts


def joining(prompt: int, seed: int) -> RequestInit:
    """A request of as many random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (prompt,), generator=generator).tolist()
    params = SamplingParams(temperature=0.7, repetition_penalty=1.05, seed=seed)
    return RequestInit(
        newest=ids[0],
        length=prompt,
        remaining=100,
        capacity=prompt + 200,
        draft_row=0,
        pages=range(1, 1 + prompt // 16),
        row=SamplingRow(params=params, position=prompt + 1, prompt_ids=ids, output_ids=ids[:1]),
    )


def main(device: str = "cpu") -> None:
    torch.set_num_threads(1)
    state = DeviceState(1 + max(count for count, _ in CASES), MAX_PAGES, VOCAB, device)
    state.reserve_edits(ENTRIES, has_counts=True)
    for count, prompt in CASES:
        requests, slots, times = [joining(prompt, i) for i in range(count)], list(range(1, 1 + count)), []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            state.write(slots, requests)
            times.append(time.perf_counter() - began)
        median = sorted(times)[ROUNDS // 2]
        print(f"{count} requests of {prompt} tokens: {1e3 * median:.2f} ms, best {1e3 * min(times):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
