"""An architecture is one registry entry: config and class. No other part of the engine names it."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models.config import read_dense_config
from baton.engine.models.llama import LlamaForCausalLM
from baton.engine.models.registry import MODELS, ModelEntry, build_model, load_model_config
from baton.tests.meta.source_trees import package_files
from baton.tests.unit.engine.models.test_model_config import write


class Sparse(LlamaForCausalLM):
    """A new architecture."""


def read_sparse(reader):
    dense = read_dense_config(reader, architecture="LlamaForCausalLM")
    return replace(dense, architecture="SparseForCausalLM")


SPARSE = ModelEntry(
    architecture="SparseForCausalLM", model_type="sparse", read_config=read_sparse, build=Sparse
)
SMALL = {"num_hidden_layers": 1, "vocab_size": 64}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_key_value_heads": 3}
LATENT = {
    "kv_lora_rank": 4,
    "q_lora_rank": None,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3,
    "v_head_dim": 4,
    "n_routed_experts": 2,
    "shared_expert_intermediate_size": 6,
}
WITH_EXPERTS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
)


@pytest.mark.parametrize("named", [{"architectures": ["SparseForCausalLM"]}, {"architectures": "absent"}])
def test_one_entry_adds_an_architecture(tmp_path, named):
    path = write(tmp_path, SMALL | {"model_type": "sparse"} | named)
    config = load_model_config(path, [*MODELS, SPARSE])
    model = build_model(config, dtype=torch.float32, models=[*MODELS, SPARSE])
    assert (config.architecture, type(model)) == ("SparseForCausalLM", Sparse)


def test_an_unknown_architecture_names_those_that_are_supported(tmp_path):
    supported = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    path = write(tmp_path, SMALL | {"architectures": ["SparseForCausalLM"]})
    with pytest.raises(CheckpointError, match=rf"architectures = .*Sparse.*supported are {supported}"):
        load_model_config(path)
    config = load_model_config(write(tmp_path, SMALL))
    with pytest.raises(CheckpointError, match=f"'Other': supported are {supported}"):
        build_model(replace(config, architecture="Other"), dtype=torch.float32)


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.model_type)
def test_an_entry_reads_and_builds_its_own_architecture(tmp_path, entry):
    experts = EXPERTS | LATENT if entry.architecture in WITH_EXPERTS else {}
    path = write(tmp_path, SMALL | experts | {"architectures": [entry.architecture]})
    config = load_model_config(path)
    assert (config.moe is not None) == bool(experts)
    assert config.architecture == entry.architecture
    assert isinstance(entry.read_config, partial)
    assert entry.architecture in repr(build_model(config, dtype=torch.float32))


def test_no_module_outside_of_models_imports_a_model_class():
    importers = {
        source.relative
        for source in package_files(naming="llama")
        for found in source.imports()
        if re.search(r"engine\.models\.llama$", found.module)
    }
    assert {path.rpartition("/")[0] for path in importers} == {"engine/models"}
