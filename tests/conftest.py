"""Fixtures for every test, and the sharing of processes and cores. Heavy libraries are imported on demand."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from baton.tests.meta.tiers import mark_tiers
from baton.tests.shared_files import SharedFiles

MATRIX = "gpu/test_path_matrix.py"  # its ids begin with the four fields that say which engine
# On a device each test of these compiles kernels and captures graphs of its own, so they share little.
SPLIT = frozenset(
    f"gpu/test_{name}.py"
    for name in (
        "bf16_alone", "bf16_audit", "cache_tiers", "cuda_cluster", "default_sizes", "dflash", "drafters",
        "families", "head_swap", "heads", "kernels", "latent", "mtp", "ngram", "page_growth", "quantised",
        "sparse", "steps", "training", "warmup",
    )
)  # fmt: skip
BY_MODEL = frozenset(("gpu/test_routed_experts.py", "gpu/test_windows.py"))  # their ids begin with the model
QUICK_EXAMPLES, FULL_EXAMPLES = 50, 400  # of hypothesis, per test

# One thread per process, children included, where several test processes share the cores. torch reads this
# when it is imported: a conftest.py of a folder named on the command line does so before any hook runs.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Handlers and levels that a test sets do not outlive it: their streams are closed then."""
    root, own = logging.getLogger(), logging.getLogger("baton")
    handlers, levels = list(root.handlers), (root.level, own.level)
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def pytest_configure(config: pytest.Config) -> None:
    """Chooses hypothesis' examples.

    Without the slow tests hypothesis tries few examples, the same in every run, so that equal code passes
    again. With them it tries many and draws anew. No time is a failure of what is tested: a process may get
    no core for a while.
    """
    with suppress(ImportError):  # on a machine for the tests of GPUs alone
        from hypothesis import HealthCheck, settings

        common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
        settings.register_profile("quick", max_examples=QUICK_EXAMPLES, derandomize=True, **common)
        settings.register_profile("full", max_examples=FULL_EXAMPLES, **common)
        settings.load_profile("quick" if "not slow" in config.option.markexpr else "full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` looks at the markers."""
    mark_tiers(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Schedules files in collection order, each in one process. On a device the path matrix goes by engine,
    files in SPLIT by test, those in BY_MODEL by test function and model, the others by test function.

    All files of `faults` go to one process: their rows have deadlines, and two rows at once would miss them.

    The dist mode `loadgroup` is the documented way, but pytest 9 loses the marks of pytest-xdist 3.8.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, test = nodeid.removeprefix("tests/").partition("::")
            if path == MATRIX:
                return "-".join(test.partition("[")[2].split("-")[:4])
            if path in SPLIT:
                return nodeid
            if path in BY_MODEL:
                return path + test.partition("-")[0]
            if path.startswith("gpu/"):
                return path + test.partition("[")[0]
            return "faults" if path.startswith("faults/") else path

    config.option.loadscopereorder = False  # it would begin with the files of the most tests
    return Files(config, log)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch while a module's tests run: their tensors are too small for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_files(tmp_path_factory: pytest.TempPathFactory) -> SharedFiles:
    """Folders that all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    return SharedFiles(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture(scope="session")
def toy_checkpoint(shared_files: SharedFiles) -> Callable[..., Path]:
    """`toy_checkpoint(family="llama"|"qwen2"|"qwen3", seed=0, shard_size=None, **config)` -> directory.

    A tiny random model written by transformers, read-only; equal arguments give the same directory.
    """
    from baton.tests.parity.toy_models import write_toy_checkpoint

    def factory(family: str = "llama", **options: object) -> Path:
        key = repr((family, sorted(options.items(), key=lambda item: item[0])))
        return shared_files.folder(family, key, lambda path: write_toy_checkpoint(path, family, **options))

    return factory


@pytest.fixture
def toy_copy(toy_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Like `toy_checkpoint`, but a private copy that the test may damage."""
    import shutil

    from baton.engine.weights_hash import CACHE_FILE

    # Another process may put the hashes of the weights beside them just now.
    ignore = shutil.ignore_patterns(f"{CACHE_FILE}*")

    def factory(family: str = "llama", **options: object) -> Path:
        return Path(shutil.copytree(toy_checkpoint(family, **options), tmp_path / "copy", ignore=ignore))

    return factory
