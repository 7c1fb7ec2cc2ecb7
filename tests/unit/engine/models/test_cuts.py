"""The parts of all ranks are the model: of every tensor, and of its heads; what cannot be cut is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.kv.layouts import MHALayout
from baton.engine.models.cuts import PARTS, cuts_of, rank_config
from baton.engine.models.registry import MODELS, load_model_config
from baton.engine.models.weights import iter_safetensors, load_model
from baton.engine.parallel.group import TensorGroup
from baton.tests.parity.eagle3_toys import toy_target

LAYOUT = {"num_layers": 3, "page_size": 4, "dtype": torch.float32}


def parts_of(path: Path, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of each rank, without a process group: nothing is computed."""
    groups = [TensorGroup(rank=rank, size=num_ranks) for rank in range(num_ranks)]
    return [dict(load_model(path, dtype=torch.float32, group=group)[0].tensors()) for group in groups]


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        ("llama", 2),
        ("qwen3_moe", 4),
        ("mixtral", 2),
        ("deepseek_v2", 4),
        ("deepseek_v3", 2),
        ("qwen2_moe", 2),
        ("glm4_moe", 2),
    ],
)
def test_the_parts_of_all_ranks_are_the_stored_tensor(
    toy_checkpoint: Callable[..., Path], family: str, num_ranks: int
):
    path = toy_checkpoint(family, vocab_size=257)
    config, ranks = load_model_config(path), parts_of(path, num_ranks)
    for name, whole in iter_safetensors(path):
        covered = torch.zeros_like(whole)
        for rank, tensors in enumerate(ranks):
            part = tensors[name]
            cut = cuts_of([name], config, TensorGroup(rank=rank, size=num_ranks)).get(name)
            if cut is None:
                torch.testing.assert_close(part, whole, atol=0, rtol=0)
                continue
            held = part.narrow(cut.dim, 0, cut.size)
            assert not part.narrow(cut.dim, cut.size, part.shape[cut.dim] - cut.size).any()
            torch.testing.assert_close(held, whole.narrow(cut.dim, cut.first, cut.size), atol=0, rtol=0)
            covered.narrow(cut.dim, cut.first, cut.size).fill_(1)
        if name.rpartition(".")[0].rpartition(".")[2] in PARTS:
            assert covered.all(), name


def test_a_rank_reads_its_part_of_the_bytes_only(toy_checkpoint: Callable[..., Path], caplog):
    caplog.set_level("INFO", "baton.engine.models.weights")
    path = toy_checkpoint("llama", hidden_size=128, intermediate_size=512, num_hidden_layers=1)
    whole = sum(tensor.nbytes for _, tensor in iter_safetensors(path))
    read = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in parts_of(path, 2)]
    norms = 3 * 128 * 4
    assert [bytes_of for bytes_of in read] == [(whole - norms) // 2 + norms] * 2
    assert all("weights: 0.00 GiB" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_ranks_config_has_the_kv_layout_of_a_shard(num_kv_heads: int, num_ranks: int):
    config = replace(toy_target(), num_heads=8, num_kv_heads=num_kv_heads)
    own = MHALayout.of(rank_config(config, num_ranks), **LAYOUT)
    assert own == MHALayout.of(config, **LAYOUT).shard(num_ranks)


def test_query_heads_of_a_rank_meet_their_own_kv_heads():
    config = replace(toy_target(), num_heads=12, num_kv_heads=3, head_dim=1)
    for num_ranks in (1, 3, 6, 12):
        for rank in range(num_ranks):
            group = TensorGroup(rank=rank, size=num_ranks)
            cuts = cuts_of(["a.q_proj.weight", "a.k_proj.weight"], config, group) if num_ranks > 1 else {}
            if not cuts:
                continue
            queries, keys = cuts["a.q_proj.weight"], cuts["a.k_proj.weight"]
            each, local = 12 // 3, queries.size // keys.size
            wanted = [(queries.first + i) // each for i in range(queries.size)]
            assert wanted == [keys.first + i // local for i in range(queries.size)]


@pytest.mark.parametrize(
    ("changes", "num_ranks", "said"),
    [
        (
            {"num_heads": 9, "num_kv_heads": 3},
            2,
            "9 attention heads, which 2 does not divide; use tp 1, 3",
        ),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "has 3 KV heads, which cannot be dealt to 2 ranks"),
        ({"intermediate_size": 97}, 2, "has intermediate_size 97, which 2 does not divide; use tp 1"),
        ({"architecture": "SparseBlockForCausalLM"}, 2, "runs on one device only; use tp 1"),
    ],
    ids=["heads", "kv-heads", "width", "architecture"],
)
def test_a_model_that_cannot_be_cut_is_refused_with_what_fits(
    changes: dict[str, object], num_ranks: int, said: str
):
    with pytest.raises(CheckpointError, match=r"^tp 2: the model at somewhere") as caught:
        rank_config(replace(toy_target(), **changes), num_ranks, "somewhere")
    assert said in str(caught.value)


def test_every_architecture_but_the_sparse_one_can_be_cut():
    refused = []
    for entry in MODELS:
        try:
            rank_config(replace(toy_target(), architecture=entry.architecture), 2)
        except CheckpointError:
            refused.append(entry.architecture)
    assert "LlamaForCausalLM" not in refused
    assert "SparseBlockForCausalLM" in refused
