"""One prefill worker offers features of layers; a decode worker takes those of its head in order, or none.

Blocks are cut, sent, checked and landed by the real code; the network is played.
"""

import pytest
import torch
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig
from baton.cluster.errors import ConfigError
from baton.engine.errors import CheckpointError
from baton.kvtransfer.protocol.layout import KVLayout
from baton.tests.parity.eagle3_toys import ORACLE_IDS, head_config, head_tensors, write_head, write_oracle
from baton.tests.parity.feature_rows import FeatureRows
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.worker_pair import DEFAULTS, D, Pair, engine_of, name

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN, OTHER = "c" * 32, "d" * 32
PROMPT = random_ids(29, seed=3)


@pytest.fixture(scope="module")
def target(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=12)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Two heads of one target that read different layers."""
    return [
        write_head(tmp_path_factory.mktemp("head"), head_config(2, ids), head_tensors(num_features=len(ids)))
        for ids in ((8, 1, 5), (5, 2))
    ]


def serve(pair, number, *, to=D):
    room = name(number)
    pair.send(room, PROMPT, to=to)
    pair.run()
    return pair.tokens[room]


def features_of(decode):
    """The features that the worker's drafter was given, by position of the prompt."""
    rows = FeatureRows(decode.engine.drafter)
    return lambda: torch.stack([row for _, row in sorted(next(iter(rows.prefilled.values())).items())])


@pytest.mark.parametrize("chunk_size", [0, 8])
@pytest.mark.parametrize("offered", ["2,5,8,1", "5,1,8", "0,1,2,3,4,5,6,7,8,9"])
def test_a_subset_of_the_offered_features_lands_bitwise_as_an_exact_match(target, heads, offered, chunk_size):
    exact = Pair(target, heads[0], pages=96, chunk_size=chunk_size)
    some = Pair(
        target, heads[0], pages=96, chunk_size=chunk_size, ours={"draft": "", "feature_layers": offered}
    )
    assert some.prefill.engine.feature_ids == tuple(map(int, offered.split(",")))
    found = [features_of(pair.decode) for pair in (exact, some)]
    assert serve(exact, 0) == serve(some, 0)
    assert torch.equal(found[0](), found[1]())
    ends = [pair.ends[name(0)].timeline for pair in (exact, some)]
    assert ends[0].handoff_bytes == ends[1].handoff_bytes, "only the taken layers travel"
    assert ends[0].verify_steps == ends[1].verify_steps > 0
    some.assert_nothing_is_held()


def test_one_prefill_serves_plain_and_speculative_decode_and_two_heads(target, heads):
    pair = Pair(target, heads[0], pages=96, ours={"feature_layers": "2,5"})
    assert pair.prefill.engine.feature_ids == (8, 1, 5, 2), "the head's layers first, each layer once"
    plain = pair.add_decode(PLAIN, no_draft=True)
    other = pair.add_decode(OTHER, draft=str(heads[1]))
    own = Pair(target, heads[1], pages=96)
    found = [features_of(decode) for decode in (other, own.decode)]
    for number, instance in enumerate((D, PLAIN, OTHER)):
        pair.send(name(number), PROMPT, to=instance)
    pair.run()
    tokens = [pair.tokens[name(number)] for number in range(3)]
    assert tokens[0] == tokens[1] == tokens[2] == serve(own, 0)
    torch.testing.assert_close(found[0](), found[1](), atol=1e-4, rtol=1e-4)
    steps = [pair.ends[name(number)].timeline.verify_steps for number in range(3)]
    assert steps[0] > 0
    assert steps[1] == 0
    assert steps[2] == own.ends[name(0)].timeline.verify_steps
    for number, decode in enumerate((pair.decode, plain, other)):
        layout = KVLayout(decode.link.transport.session.layout.wire)
        num_pages = -(-len(PROMPT) // DEFAULTS["page_size"])
        page_bytes = layout.kv_page_bytes + layout.feature_page_bytes
        assert pair.ends[name(number)].timeline.handoff_bytes == num_pages * page_bytes
    pair.assert_nothing_is_held()


def test_an_oracle_head_accepts_a_subset_of_features_in_full(tmp_path, monkeypatch):
    target, head = write_oracle(tmp_path)
    layers = ",".join(str(layer) for layer in sorted({*ORACLE_IDS, 0, 3}))
    pair = Pair(target, head, pages=96, ours={"draft": "", "feature_layers": layers})
    decoder, accept_lens = pair.decode.decoder, []
    commit = decoder.read

    def read(*args):
        result = commit(*args)
        accept_lens.extend(result.accept_lens)
        return result

    monkeypatch.setattr(decoder, "read", read)
    pair.send(name(0), [3, 40, 7, 9, 11, 13, 15, 17, 19, 21, 23], max_new_tokens=13)
    pair.run()
    assert accept_lens == [4, 4, 4]


def test_plain_prefill_serves_plain_decode_only(target, heads):
    pair = Pair(target, pages=96, theirs={"draft": str(heads[0])})
    plain = pair.add_decode(PLAIN)
    pair.send(name(0), PROMPT)
    pair.send(name(1), PROMPT, to=PLAIN)
    pair.run(until=lambda: name(0) in pair.ends and name(1) in pair.ends)
    assert pair.ends[name(0)].kind == "HandshakeRefused"
    assert "features [8, 1, 5]" in pair.ends[name(0)].message
    assert len(pair.tokens[name(1)]) == 12
    assert plain.engine.feature_ids == ()


def test_a_layer_that_the_model_lacks_is_refused_at_start(target):
    settings = {"model": str(target), "pages": 8, "feature_layers": "3,12"}
    with pytest.raises(CheckpointError, match="has layers 0 to 11, not 12"):
        engine_of(settings, has_drafter=False)


@pytest.mark.parametrize("text", ["a", "1,,2", "-1", "1 2", ",".join("1" * 65)])
def test_a_wrong_list_of_layers_is_refused_with_a_valid_example(text):
    with pytest.raises(ConfigError, match="--feature-layers"):
        load_config(PrefillConfig, ["--model", "m", "--feature-layers", text], {})
    with pytest.raises(ConfigError):
        load_config(DecodeConfig, ["--model", "m", "--feature-layers", "1"], {})
