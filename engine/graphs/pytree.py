"""Nested tuples, lists and dicts of tensors: the inputs and outputs of graphs and breaks."""

from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch

from .errors import GraphError

NestT = TypeVar("NestT")


def own(nest: NestT, num_rows: int | None = None) -> NestT:
    """The nest with a copy of each tensor, cut to its first `num_rows` rows.

    The copies survive the next replay.
    """
    return cast(NestT, _own(nest, num_rows))


def _own(nest: object, num_rows: int | None) -> object:
    if isinstance(nest, torch.Tensor):
        return nest[:num_rows].clone() if num_rows is not None else nest.clone()
    if isinstance(nest, dict):
        return {key: _own(value, num_rows) for key, value in nest.items()}
    return map_items(nest, lambda item: _own(item, num_rows))


def map_items(nest: object, change: Callable[[object], object]) -> object:
    """A sequence (also a named tuple) of the same type with changed items.

    Other objects are returned unchanged.
    """
    if isinstance(nest, list):
        return [change(item) for item in nest]
    if isinstance(nest, tuple):
        items = tuple(change(item) for item in nest)
        make: Callable[..., object] | None = getattr(nest, "_make", None)
        return items if make is None else make(items)
    return nest


def tensors_of(nest: object) -> Iterator[torch.Tensor]:
    """Every tensor in the nest, in order."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from tensors_of(value)
    elif isinstance(nest, (tuple, list)):
        for value in nest:
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
