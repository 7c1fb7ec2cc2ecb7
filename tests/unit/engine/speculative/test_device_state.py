"""The state of running requests on the device: what a slot holds is that of its newest request alone."""

import random

import pytest
import torch
from baton.engine.sampling.edits import LogitEdits, SamplingRow
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.tensors import SamplingTensors
from baton.engine.speculative.step.device_state import DeviceState, RequestInit
from baton.kernels.step_glue import DRAFT_ROW, PAGES

VOCAB, MAX_PAGES = 24, 5
KINDS = [
    {},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 77},
    {"temperature": 0.0},
    {"logit_bias": {3: 2.5, 9: -1.0}},
    {"min_new_tokens": 4},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
]


def joining(rng: random.Random) -> RequestInit:
    params = SamplingParams(**rng.choice(KINDS))
    prompt, output = [rng.randrange(VOCAB) for _ in range(6)], [rng.randrange(VOCAB)]
    row = SamplingRow(
        params=params,
        position=7,
        prompt_ids=prompt,
        output_ids=output,
        ends=(1, 2) if params.min_new_tokens else (),
        first_end=6 + params.min_new_tokens if params.min_new_tokens else 0,
    )
    pages = [rng.randrange(100) for _ in range(rng.randint(1, MAX_PAGES + 2))]
    numbers = [rng.randrange(1000) for _ in range(5)]
    names = ("newest", "length", "remaining", "capacity", "draft_row")
    return RequestInit(**dict(zip(names, numbers, strict=True)), pages=pages, row=row)


@pytest.mark.parametrize("seed", range(8))
def test_a_slot_has_its_newest_request_and_nothing_of_an_earlier_one(seed: int):
    rng = random.Random(seed)
    state = DeviceState(6, MAX_PAGES, VOCAB, "cpu")
    if seed % 2:
        state.reserve_edits(8, has_counts=True)
    held: dict[int, RequestInit] = {}
    for _ in range(30):
        for slot in [slot for slot in held if rng.random() < 0.5]:
            del held[slot]
            state.close(slot)
        new = [joining(rng) for _ in range(rng.randint(1, 3))]
        slots = [state.open() for _ in new]
        state.write(slots, new)
        held.update(zip(slots, new, strict=True))
        for slot, init in held.items():
            check(state, slot, init)


def check(state: DeviceState, slot: int, init: RequestInit) -> None:
    found = state.integers[slot]
    expected = [init.newest, init.length, init.remaining, init.capacity, init.draft_row]
    assert found[: DRAFT_ROW + 1].tolist() == expected
    pages = init.pages[:MAX_PAGES]
    assert found[PAGES:].tolist() == [*pages, *[0] * (MAX_PAGES - len(pages))]
    tensors = state.read(torch.tensor([slot])).tensors
    for name, values in vars(SamplingTensors.of([init.row.params], VOCAB)).items():
        assert torch.equal(getattr(tensors, name), values), name
    if not state.edit_anchors:
        assert not init.row.params.needs_edits
        return
    edits, made = state.edits, LogitEdits.of([init.row], VOCAB)
    width = made.ids.shape[1]
    for part, whole in ((made.ids, edits.ids), (made.values, edits.values), (made.until, edits.until)):
        assert torch.equal(whole[slot, :width], part[0])
        assert not whole[slot, width:].any()
    assert torch.equal(edits.penalties[slot], made.penalties[0])
    assert state.wanted(torch.tensor([slot])).item() == init.row.params.logprobs
    if made.seen is not None:
        assert edits.seen is not None
        assert torch.equal(edits.seen[slot], made.seen[0])
