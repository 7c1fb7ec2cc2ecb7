"""Typed dispatch modes, and the identity of a tensor's memory."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Operation: TypeAlias = Callable[..., object]
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that intercepts each operation below autograd. Inside `dispatch` the mode is off."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and torch would import its compiler, for seconds, to skip it."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return self.dispatch(func, args, kwargs or {})

    @abstractmethod
    def dispatch(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Run the operation or a replacement; returns the result."""


def storages_of(*trees: object) -> set[int]:
    """The storages of all tensors in `trees`."""
    found: set[int] = set()
    _add_storages(trees, found)
    return found


def _add_storages(tree: object, found: set[int]) -> None:
    if isinstance(tree, torch.Tensor):
        found.add(storage_of(tree))
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _add_storages(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _add_storages(item, found)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, unique among living ones; 0 for tensors without memory."""
    return tensor.untyped_storage().data_ptr()
