"""Fixtures for every test. Heavy libraries are imported only by the fixtures that need them."""

from collections.abc import Callable
from pathlib import Path

import pytest


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
