"""Heads of every dialect load to the same network; anything left over, missing or misshapen is refused."""

from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.speculative.drafters.eagle3_head import DraftPhase, Eagle3Head
from baton.engine.speculative.drafters.eagle3_weights import load_eagle3
from baton.engine.speculative.drafters.spec_config import load_draft_config
from baton.kernels.attention_form import AttentionForm
from baton.tests.parity.eagle3_toys import (
    DRAFT_VOCAB,
    HIDDEN,
    PREFIXES,
    VOCAB,
    head_config,
    head_tensors,
    toy_target,
    write_head,
)

ROWS = 7


def load(path: Path) -> Eagle3Head:
    return load_eagle3(load_draft_config(path, toy_target()), dtype=torch.float32)


def share(head: Eagle3Head) -> Eagle3Head:
    generator = torch.Generator().manual_seed(5)
    head.share(
        torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator), 64
    )
    return head


def dense_attend(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
) -> torch.Tensor:
    """Causal attention within the rows given."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
    return out.transpose(0, 1)


def logits_of(head: Eagle3Head, width: int = 3 * HIDDEN) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    features = torch.randn(ROWS, width, generator=generator)
    ids = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    out = head.forward(features, ids, torch.arange(ROWS), dense_attend, DraftPhase.FROM_TARGET_FEATURES)
    return head.compute_logits(out)


@pytest.mark.parametrize("dialect", [1, 3, 4])
def test_each_dialect_gives_the_logits_of_the_native_one(tmp_path: Path, dialect: int) -> None:
    native = load(write_head(tmp_path / "native", head_config(2), head_tensors()))
    other = load(write_head(tmp_path / "other", head_config(dialect), head_tensors(prefix=PREFIXES[dialect])))
    assert torch.equal(logits_of(share(other)), logits_of(share(native)))
    assert torch.equal(other.target_ids, native.target_ids)
    assert native.target_ids[:3].tolist() == [1, 3, 5]


def test_the_prefix_of_the_top_level_does_not_matter(tmp_path: Path) -> None:
    tensors = {f"model.{name}" if "lm_head" not in name else name: t for name, t in head_tensors().items()}
    tensors["d2t"], tensors["t2d"] = tensors.pop("model.d2t"), tensors.pop("model.t2d")
    tensors = {name.replace("model.midlayer.", "model.layers.0."): t for name, t in tensors.items()}
    plain = load(write_head(tmp_path / "plain", head_config(2), head_tensors()))
    prefixed = load(write_head(tmp_path / "prefixed", head_config(2), tensors))
    assert torch.equal(logits_of(share(prefixed)), logits_of(share(plain)))


def test_feature_norms_load_under_new_and_old_names(tmp_path: Path) -> None:
    norms = [torch.rand(HIDDEN) + 0.5 for _ in range(3)]
    new = {f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms)}
    old = {f"aux_norm_{name}.weight": norm for name, norm in zip(("low", "mid", "high"), norms, strict=True)}
    heads = [
        share(load(write_head(tmp_path / str(i), head_config(2, fc_norm=True), head_tensors() | extra)))
        for i, extra in enumerate((new, old))
    ]
    assert torch.equal(logits_of(heads[0]), logits_of(heads[1]))
    features = torch.randn(4, 3 * HIDDEN)
    pairs = zip(features.chunk(3, -1), norms, strict=True)
    chunks = [torch.nn.functional.rms_norm(chunk, (HIDDEN,), weight, 1e-5) for chunk, weight in pairs]
    expected = torch.cat(chunks, -1) @ head_tensors()["fc.weight"].T
    assert torch.allclose(heads[0].project(features), expected, atol=1e-5)


def test_one_norm_over_all_features_is_not_one_per_feature(tmp_path: Path) -> None:
    weight = torch.rand(3 * HIDDEN) + 0.5
    config = head_config(2)
    config["eagle_config"]["norm_before_fc"] = True
    head = load(write_head(tmp_path, config, head_tensors() | {"input_norm.weight": weight}))
    features = torch.randn(4, 3 * HIDDEN) * torch.tensor([1.0, 5.0, 25.0]).repeat_interleave(HIDDEN)
    normed = torch.nn.functional.rms_norm(features, (3 * HIDDEN,), weight, 1e-5)
    assert torch.allclose(head.project(features), normed @ head_tensors()["fc.weight"].T, atol=1e-5)


def test_a_full_vocabulary_head_uses_the_targets_lm_head(tmp_path: Path) -> None:
    tensors = head_tensors()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    head = share(load(write_head(tmp_path, head_config(2, draft_vocab_size=None), tensors)))
    assert logits_of(head).shape == (ROWS, VOCAB)
    assert torch.equal(head.target_ids, torch.arange(VOCAB))


def test_fc_is_applied_by_phase_though_the_widths_are_equal(tmp_path: Path) -> None:
    tensors = head_tensors(num_features=1)
    head = share(load(write_head(tmp_path, head_config(2, (5,)), tensors)))
    hidden, ids, positions = torch.randn(ROWS, HIDDEN), torch.arange(ROWS), torch.arange(ROWS)
    fed = head.forward(hidden, ids, positions, dense_attend, DraftPhase.FROM_TARGET_FEATURES)
    chained = head.forward(
        hidden @ tensors["fc.weight"].T, ids, positions, dense_attend, DraftPhase.SELF_CHAIN
    )
    assert torch.allclose(fed, chained, atol=1e-5)
    assert not torch.allclose(
        fed, head.forward(hidden, ids, positions, dense_attend, DraftPhase.SELF_CHAIN), atol=1e-2
    )


def test_no_rows_pass_through(tmp_path: Path) -> None:
    head = share(load(write_head(tmp_path, head_config(2), head_tensors())))
    ids = torch.empty(0, dtype=torch.int64)
    out = head.forward(
        torch.empty(0, 3 * HIDDEN), ids, ids, lambda _, q, k, v, form: q, DraftPhase.FROM_TARGET_FEATURES
    )
    assert head.compute_logits(out).shape == (0, DRAFT_VOCAB)


def test_a_head_does_not_run_before_weights_are_shared(tmp_path: Path) -> None:
    head = load(write_head(tmp_path, head_config(2), head_tensors()))
    with pytest.raises(LifecycleError, match="shared"):
        logits_of(head)


def changed(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = head_tensors() | {name: t for name, t in changes.items() if t is not None}
    return {name: t for name, t in tensors.items() if changes.get(name, t) is not None}


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        (head_config(2), changed(**{"extra.weight": torch.ones(1)}), ["extra.weight", "belongs to no part"]),
        (head_config(2), changed(**{"fc_norm.0.weight": torch.ones(HIDDEN)}), ["fc_norm.0.weight"]),
        (head_config(2), changed(**{"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}), ["layers.1"]),
        (head_config(2), changed(**{"norm.weight": None}), ["norm.weight", "missing"]),
        (head_config(2, fc_norm=True), changed(), ["fc_norm.0.weight", "missing"]),
        (head_config(2), changed(**{"norm.weight": torch.ones(5)}), ["norm.weight", "[5]", "[64]"]),
        (head_config(2, (4, 9)), changed(), ["fc.weight", "192", "128"]),
        (head_config(2), changed(**{"norm.weight": torch.ones(HIDDEN, dtype=torch.int32)}), ["int32"]),
        (head_config(2), changed(d2t=None), ["d2t", "missing"]),
        (head_config(2), changed(d2t=torch.arange(DRAFT_VOCAB) * 2 + 1), ["d2t", "offsets"]),
        (head_config(2), changed(d2t=-torch.arange(DRAFT_VOCAB)), ["d2t", "increasing"]),
        (head_config(2), changed(t2d=torch.ones(VOCAB, dtype=torch.bool)), ["d2t and t2d"]),
        (head_config(2), changed(**{"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}), ["hidden_norm"]),
    ],
)
def test_a_checkpoint_that_contradicts_its_config_is_refused(
    tmp_path: Path, config: dict[str, object], tensors: dict[str, torch.Tensor], parts: list[str]
) -> None:
    path = write_head(tmp_path, config, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "\n" not in text
    assert all(part in text for part in parts), text


def test_a_missing_lm_head_of_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    head = load(write_head(tmp_path, head_config(2), changed(**{"lm_head.weight": None})))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        share(head)


def test_an_embedding_of_another_width_cannot_be_shared(tmp_path: Path) -> None:
    head = load(write_head(tmp_path, head_config(2), head_tensors()))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing"):
        head.share(torch.zeros(VOCAB, HIDDEN + 1), torch.zeros(VOCAB, HIDDEN), 64)


def test_pickled_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write_head(tmp_path, head_config(2), head_tensors())
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*convert"):
        load(path)


def test_an_empty_checkpoint_is_refused_with_the_missing_names(tmp_path: Path) -> None:
    path = write_head(tmp_path, head_config(2), head_tensors())
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(path)
