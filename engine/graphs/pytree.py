"""Nested tuples, lists and dicts of tensors: the inputs and outputs of graphs and breaks."""

from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch

from .errors import GraphError

TreeT = TypeVar("TreeT")


def own(tree: TreeT, num_rows: int | None = None) -> TreeT:
    """The tree with a copy of each tensor, cut to its first `num_rows` rows.

    The copies survive the next replay.
    """
    return cast(TreeT, _own(tree, num_rows))


def _own(tree: object, num_rows: int | None) -> object:
    if isinstance(tree, torch.Tensor):
        return tree[:num_rows].clone() if num_rows is not None else tree.clone()
    if isinstance(tree, dict):
        return {key: _own(value, num_rows) for key, value in tree.items()}
    return map_items(tree, lambda item: _own(item, num_rows))


def map_items(tree: object, change: Callable[[object], object]) -> object:
    """A sequence (also a named tuple) of the same type with changed items.

    Other objects are returned unchanged.
    """
    if isinstance(tree, list):
        return [change(item) for item in tree]
    if isinstance(tree, tuple):
        items = tuple(change(item) for item in tree)
        make: Callable[..., object] | None = getattr(tree, "_make", None)
        return items if make is None else make(items)
    return tree


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    """Every tensor in the tree, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_of(value)


def copy_into(target: object, source: object, *, where: str) -> None:
    """Copy each tensor of `source` into its counterpart in `target`.

    Raises GraphError if their structures differ.
    """
    targets, sources = list(tensors_of(target)), list(tensors_of(source))
    shapes = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (targets, sources)]
    if shapes[0] != shapes[1]:
        raise GraphError(
            f"{where} returned {shapes[1]}, but {shapes[0]} at capture; graphs have fixed shapes"
        )
    for into, value in zip(targets, sources, strict=True):
        if into is not value:
            into.copy_(value)
