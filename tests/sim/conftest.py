"""The toy target of the workers' simulations, and a head for it."""

import pytest
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head


@pytest.fixture(scope="module")
def target(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 3)), head_tensors())
