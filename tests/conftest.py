"""Fixtures for every test, and how tests share processes and cores. Heavy libraries are imported only where needed."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# Tests that wait for real processes and sockets: one at a time, so that their deadlines hold beside one that computes.
WAITING = ("cluster", "faults", "parity/test_cluster_tokens.py")


def pytest_runtest_setup() -> None:
    """One thread of torch where several test processes share the cores."""
    if "PYTEST_XDIST_WORKER" in os.environ and (torch := sys.modules.get("torch")):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay in one process, in order, when pytest-xdist runs several (`-n 2 --dist loadgroup`)."""
    for item in items:
        path = str(item.path.relative_to(HERE))
        item.add_marker(pytest.mark.xdist_group("processes" if path.startswith(WAITING) else path))


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory `toy_checkpoint(family="llama"|"qwen2"|"qwen3", seed=0, shard_size=None, **config)` -> directory.

    A tiny random model written by transformers; equal arguments give the same directory. Treat it as read-only.
    """
    from baton.tests.parity.toy_models import write_toy_checkpoint

    written: dict[str, Path] = {}

    def factory(family: str = "llama", **options: object) -> Path:
        key = repr((family, sorted(options.items(), key=lambda item: item[0])))
        if key not in written:
            path = tmp_path_factory.mktemp(family)
            write_toy_checkpoint(path, family, **options)
            written[key] = path
        return written[key]

    return factory


@pytest.fixture
def toy_copy(toy_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Like `toy_checkpoint`, but a private copy that the test may damage."""
    import shutil

    def factory(family: str = "llama", **options: object) -> Path:
        return Path(shutil.copytree(toy_checkpoint(family, **options), tmp_path / "copy"))

    return factory
