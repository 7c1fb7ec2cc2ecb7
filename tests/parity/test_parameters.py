"""The parameters of a model are the memory of all its tensors, the experts of a layer as one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.graphs.graph_pool import BoundTensors
from baton.engine.models.interface import CausalLM
from baton.engine.models.moe import MixtureOfExperts
from baton.engine.models.weights import load_model
from baton.tests.parity.quant_toys import EXPERTS, SHAPE, write_quantised
from baton.tests.parity.tensor_memory import memory
from baton.tests.parity.toy_models import FAMILIES


def model_of(path: Path) -> CausalLM:
    return load_model(path, dtype=torch.float32)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_memory_of_all_tensors(toy_checkpoint: Callable[..., Path], family: str):
    model = model_of(toy_checkpoint(family))
    parameters = list(model.parameters())
    assert memory(parameters) == memory(model.tensors())
    assert len({name for name, _ in parameters}) == len(parameters)


@pytest.mark.parametrize(
    ("family", "count"),
    [("qwen3_moe", "num_experts"), ("mixtral", "num_local_experts"), ("deepseek_v3", "n_routed_experts")],
)
def test_more_experts_are_not_more_parameters(toy_checkpoint: Callable[..., Path], family: str, count: str):
    few, many = (model_of(toy_checkpoint(family, **{count: number})) for number in (8, 16))
    assert len(list(few.parameters())) == len(list(many.parameters()))
    assert len(list(few.tensors())) < len(list(many.tensors()))


@pytest.mark.parametrize("form", ["tensor", "channel", "block", "awq"])
def test_stored_experts_are_one_tensor_of_each_kind(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, form: str
):
    plain = toy_checkpoint("qwen3_moe", **SHAPE | EXPERTS["qwen3_moe"])
    write_quantised(plain, tmp_path / form, form)
    model = model_of(tmp_path / form)
    experts = [tensor for name, tensor in model.parameters() if ".experts." in name]
    layers = sum(isinstance(layer.mlp, MixtureOfExperts) for layer in model.layers)
    assert len(experts) == 4 * layers  # values and scales of both products
    unused = {
        tensor.untyped_storage().data_ptr()
        for name, tensor in model.tensors()
        if ".experts." in name and "input_scale" in name
    }
    held = memory(model.tensors())
    assert memory(model.parameters()) == {at: size for at, size in held.items() if at not in unused}


def test_experts_that_were_replaced_are_stale(toy_checkpoint: Callable[..., Path]):
    model = model_of(toy_checkpoint("qwen3_moe"))
    bound = BoundTensors(model.parameters)
    assert bound.stale() == []
    number, mlp = next(
        (number, layer.mlp)
        for number, layer in enumerate(model.layers)
        if isinstance(layer.mlp, MixtureOfExperts)
    )
    mlp.down = mlp.down.clone()
    assert bound.stale() == [f"model.layers.{number}.mlp.experts.down"]
