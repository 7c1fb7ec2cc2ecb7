"""The accept length of lookup on the demo model: short on chats, long where answers copy their prompt."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.hub import NGRAM
from baton.engine.loader import EngineLoader
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.prompts import CHATS

pytestmark = [pytest.mark.smollm2, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CODE = '''def area(width, height):
    """Return the area of a rectangle."""
    return width * height

def volume(width, height, depth):
    """Return the volume of a box."""
    return area(width, height) * depth

def surface(width, height, depth):
    """Return the surface of a box."""
    return 2 * (area(width, height) + area(height, depth) + area(width, depth))
'''
TEXT = (
    "The harbour of Aldmoor was built in 1874 by the engineer Ruth Calloway. It has three basins. The "
    "northern basin is used by fishing boats, the southern basin by ferries, and the middle basin by the "
    "pilots. In 1911 a storm destroyed the breakwater, and the town rebuilt it with granite from the Corrie "
    "quarry. Since 1968 the harbour has been owned by the town."
)
COPYING = (
    f"Repeat the following code exactly, but rename the function area to area_of:\n\n{CODE}",
    f"Repeat the following text word for word:\n\n{TEXT}",
    f"Quote every sentence of this text that has a year in it, then repeat the whole text:\n\n{TEXT}",
    f"Add type hints to this code and print it again:\n\n{CODE}",
)
NUM_TOKENS = 128


def load(model: Path, draft: str) -> Engine:
    config = EngineConfig(
        model=str(model), draft=draft, device="cpu", dtype="float32", kv_memory_mb=256, max_context=1024,
        max_running=8, spec_steps=5, spec_adaptive="off",
    )  # fmt: skip
    loader = EngineLoader(config, has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader.engine()


def answered(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[float, list[list[int]]]:
    """(accept length, outputs) of all prompts in one batch."""
    decoder, eos_ids, requests = engine.decoder(), engine.model_config.eos_token_ids, []
    for number, ids in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
        request = Request(room=f"{number:032x}", epoch=0, prompt_ids=ids, sampling=params)
        tokens = len(ids) + NUM_TOKENS + engine.shape.spare_slots
        request.pages = engine.cache.alloc(-(-tokens // engine.page_size))
        batch = extend_batch([(request, 0, len(ids))], page_size=engine.page_size, device=engine.pool.device)
        request.append([int(engine.runner.forward(batch).logits[-1].argmax())], eos_ids)
        request.num_computed = len(ids)
        requests.append(request)
    committed = verifies = 0
    while running := [request for request in requests if not request.is_finished]:
        committed += sum(map(len, decoder.step(running).tokens))
        verifies += len(running)
    return committed / verifies, [request.output_ids for request in requests]


def test_lookup_accepts_much_where_prompts_are_copied_and_little_elsewhere(
    smollm2_dir: Path, smollm2_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    chats = [prompt.token_ids(smollm2_tokenizer) for prompt in CHATS][:8]
    copying = [
        smollm2_tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in COPYING
    ]
    plain, lookup = load(smollm2_dir, ""), load(smollm2_dir, NGRAM)
    lengths = {}
    for name, prompts in (("chats", chats), ("copying", copying)):
        lengths[name], outputs = answered(lookup, prompts)
        assert outputs == answered(plain, prompts)[1]
    print({name: round(length, 2) for name, length in lengths.items()})
    assert 1.2 < lengths["chats"] < 1.6
    assert lengths["copying"] > 2.4
