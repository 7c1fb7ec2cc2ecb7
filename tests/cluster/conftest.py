"""The demo model and its references, as the parity tests have them, and clusters that several files share."""

import shutil

import httpx
import pytest
from baton.deploy.keys.keys import init
from baton.tests.cluster.router_fakes import routers, save_tokenizer
from baton.tests.cluster.serving import serving
from baton.tests.parity.conftest import eagle3_dir, reference_greedy, smollm2_dir, smollm2_tokenizer
from baton.tests.patience import patience_with_peers

__all__ = ["eagle3_dir", "patience_with_peers", "reference_greedy", "smollm2_dir", "smollm2_tokenizer"]

SMALL = {"transport": "tcp", "kv_memory_mb": 8, "threads": 1}  # settings of the shared clusters


@pytest.fixture(scope="session", autouse=True)
def patience_of_clients():
    """A request without a timeout gets a minute, not httpx's 5 s: a router may get no core for a while."""
    default = httpx._config.DEFAULT_TIMEOUT_CONFIG
    default.connect = default.read = default.write = default.pool = 60.0


@pytest.fixture(scope="module", autouse=True)
def patience_with_all_peers(patience_with_peers):
    """Also of what a module's own fixtures make."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tokenizer, all that a router needs of a model."""
    return save_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture
def start(tmp_path, model_dir):
    """start(**settings) -> (router, script)"""
    with routers(tmp_path, model_dir) as make:
        yield make


@pytest.fixture(scope="session")
def served_dir(tmp_path_factory, toy_checkpoint):
    """A toy model with a tokenizer."""
    directory = tmp_path_factory.mktemp("served")
    shutil.copytree(toy_checkpoint("llama", vocab_size=330), directory, dirs_exist_ok=True)
    return save_tokenizer(directory)


@pytest.fixture(scope="session")
def shared_keys(tmp_path_factory):
    """The directory of keys that all processes of `keyed_cluster` share."""
    directory = tmp_path_factory.mktemp("host") / "keys"
    init(directory, ["router", "prefill", "decode"], "here")
    return directory


@pytest.fixture(scope="session")
def plain_cluster(served_dir):
    """A router, a prefill and a decode process on TCP without keys. Leave it as you find it."""
    with serving(served_dir, env={"BATON_ROUTER_MAX_QUEUE": "4096"}, **SMALL) as running:
        yield running


@pytest.fixture(scope="session")
def keyed_cluster(served_dir, shared_keys):
    """The same with keys. Leave it as you find it."""
    with serving(served_dir, keys=str(shared_keys), **SMALL) as running:
        yield running
