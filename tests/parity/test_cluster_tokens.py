"""The served tokens are transformers' tokens: greedy, float32, through router, prefill, ZeroMQ and decode.

Each cluster answers its rounds of prompts, 8 at once; a second round hits both prefix caches. Where a token
differs, the two largest logits of transformers must be a tie within float32 noise and the other one must be
what was served.
"""

from functools import partial

import pytest
from baton.tests.cluster.serving import at_once, complete, pages_held, serving, wait_until

pytestmark = pytest.mark.smollm2

TIE = 1e-3  # logits of this size (about 20) differ by 1e-4 between two orders of float32 sums

QUICK = [
    pytest.param(True, 64, 1, 1, id="drafts, chunk 64, 1P+1D"),
    pytest.param(False, 16, 1, 1, id="no drafts, chunk 16, 1P+1D"),
    pytest.param(True, 0, 2, 2, id="drafts, whole, 2P+2D"),
]
REST = [
    pytest.param(drafts, chunk, n, n, id=f"{'drafts' if drafts else 'no drafts'}, chunk {chunk}, {n}P+{n}D")
    for drafts in (True, False)
    for chunk in (16, 64, 0)
    for n in (1, 2)
    if (drafts, chunk, n) not in {(True, 64, 1), (False, 16, 1), (True, 0, 2)}
]


def assert_same(reference, served):
    """Equal, or split at a proven tie."""
    for i, (want, got) in enumerate(zip(reference.output_ids, served, strict=True)):
        if want != got:
            tie = reference.gaps[i] < TIE and got == reference.runners_up[i]
            assert tie, (
                f"{reference.name}: token {i} is {got}, transformers says {want} by a gap of "
                f"{reference.gaps[i]}"
            )
            return False
    return True


def share(references, number):
    """One of as many parts as there are quick settings, each of every length, and the shortest."""
    return [
        *references[number :: len(QUICK)],
        min(references, key=lambda reference: len(reference.prompt_ids)),
    ]


def check_cluster(rounds, smollm2_dir, eagle3_dir, drafts, chunk, prefill, decode):
    with serving(
        smollm2_dir,
        eagle3_dir if drafts else "",
        chunk_size=chunk,
        prefill=prefill,
        decode=decode,
        kv_memory_mb=768,
    ) as cluster:
        for i, references in enumerate(rounds):
            answers = at_once(
                [partial(complete, cluster, reference.prompt_ids) for reference in references], 8
            )
            same = [assert_same(r, ids) for r, (ids, _) in zip(references, answers, strict=True)]
            assert sum(same) >= len(same) - 2, "more ties than real text has"
            documents = [document for _, document in answers]
            if i and prefill == 1:
                cached = sum(d["usage"]["prompt_tokens_details"]["cached_tokens"] for d in documents)
                held = sum(d["timeline"]["have_tokens"] for d in documents)
                num_tokens = sum(len(reference.prompt_ids) for reference in references)
                assert cached > num_tokens / 3, "the second round finds its prompts cached on prefill"
                assert held > num_tokens / 3, "and decode does not pull again what it holds"
        if drafts:
            steps = sum(d["timeline"]["verify_steps"] for d in documents)
            accepted = sum(d["timeline"]["accepted"] for d in documents)
            assert 1 + accepted / steps > 1.5, "the drafter is heard"
        wait_until(lambda: not any(pages_held(cluster)[0].values()), 60, "every page free again")


@pytest.mark.parametrize(("drafts", "chunk", "prefill", "decode"), QUICK)
def test_served_tokens_equal_transformers(
    reference_greedy, smollm2_dir, eagle3_dir, drafts, chunk, prefill, decode
):
    """Each prompt in one of these settings, those of one again. All in all is in the full suite."""
    number = [setting.values for setting in QUICK].index((drafts, chunk, prefill, decode))
    part = share(list(reference_greedy.values()), number)
    rounds = [part, part] if chunk == 64 else [part]
    check_cluster(rounds, smollm2_dir, eagle3_dir, drafts, chunk, prefill, decode)


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "chunk", "prefill", "decode"), QUICK + REST)
def test_served_tokens_equal_transformers_in_every_setting(
    reference_greedy, smollm2_dir, eagle3_dir, drafts, chunk, prefill, decode
):
    whole = list(reference_greedy.values())
    check_cluster([whole, whole], smollm2_dir, eagle3_dir, drafts, chunk, prefill, decode)
