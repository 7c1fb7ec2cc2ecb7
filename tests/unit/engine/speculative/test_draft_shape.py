"""Steps, topk and tokens go together, or are refused with the remedy; every other size follows from them."""

from collections.abc import Callable
from itertools import product

import pytest
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig
from baton.cluster.errors import ConfigError
from baton.engine.config import EngineConfig
from baton.engine.errors import CheckpointError
from baton.engine.loader import EngineLoader
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape, most_nodes
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head


@pytest.mark.parametrize(
    ("args", "nodes", "spare"),
    [
        ((0,), 1, 1), ((3,), 4, 4), ((3, 1, 4), 4, 4), ((1, 4), 5, 5), ((3, 4), 13, 13), ((3, 4, 8), 8, 8),
        ((5, 4, 6), 6, 16), ((2, 2, 7), 7, 7), ((0, 4), 1, 1),
    ],
)  # fmt: skip
def test_sizes_follow_from_steps_topk_and_tokens(args, nodes, spare):
    shape = DraftShape.of(*args)
    assert (shape.num_nodes, shape.spare_slots, shape.num_path) == (nodes, spare, 1 + args[0])
    assert shape.is_tree is (len(args) > 1 and args[1] > 1 and args[0] > 0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((-1,), "spec_steps -1"), ((3, 0), "spec_topk 0"), ((3, 1, 3),
        "spec_tokens 3.*at least 4.*lower spec_steps"),
        ((3, 1, 5), "spec_tokens 5.*no more than 4.*raise spec_topk"), ((2, 2, 8), "no more than 7"),
        ((5, 4, 5), "at least 6"),
    ],
)  # fmt: skip
def test_inconsistent_sizes_are_refused_with_the_remedy(args, words):
    with pytest.raises(ValueError, match=words):
        DraftShape.of(*args)


def test_the_command_line_refuses_what_an_engine_refuses():
    """The rule stands in two houses, for neither may look into the other."""
    for steps, topk, tokens in product((1, 2, 3, 5), (1, 2, 4), (*range(16), 24, 70)):
        flags = ["--model", "m", f"--spec-steps={steps}", f"--spec-topk={topk}", f"--spec-tokens={tokens}"]
        told = reason_of(lambda: load_config(DecodeConfig, flags, {}, warns=False))  # noqa: B023
        raised = reason_of(lambda: DraftShape.of(steps, topk, tokens))  # noqa: B023
        assert (told is None) is (raised is None), flags
        assert told is None or (isinstance(told, ConfigError) and f"--spec-tokens {tokens}:" in str(told))


def reason_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (ConfigError, ValueError) as error:
        return error
    return None


def test_the_count_of_nodes_is_that_of_the_levels():
    assert [most_nodes(steps, 3) for steps in range(4)] == [1, 4, 13, 22]


def test_shorter_chains_stand_in_for_a_chain_and_plain_decode_for_a_tree():
    assert [shape.steps for shape in DraftShape.of(6).candidates()] == [0, 1, 2, 3, 5, 6]
    assert DraftShape.of(3, 4, 8).candidates() == (PLAIN, DraftShape.of(3, 4, 8))
    assert PLAIN.candidates() == (PLAIN,)


def test_a_head_that_knows_fewer_tokens_than_topk_is_refused(toy_checkpoint, tmp_path):
    tensors = head_tensors()
    tensors["lm_head.weight"], tensors["d2t"] = tensors["lm_head.weight"][:2], tensors["d2t"][:2]
    del tensors["t2d"]
    head = write_head(tmp_path, head_config(2, draft_vocab_size=2), tensors)
    model = toy_checkpoint("llama", num_hidden_layers=12)
    loader = EngineLoader(
        EngineConfig(model=str(model), draft=str(head), device="cpu", spec_topk=3), has_drafter=True
    )
    phases = [run for _, run in loader.phases()]
    for run in phases[:2]:
        run()
    with pytest.raises(CheckpointError, match=r"spec_topk 3.*2 tokens.*lower"):
        phases[2]()
