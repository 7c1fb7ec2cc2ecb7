"""Planned launches as text: another process compiles their variants without planning them again."""

import json
from collections.abc import Sequence
from importlib import import_module

import torch

from .triton_jit import (
    Launch,
    PointerArgument,
    descriptor_of,
    is_descriptor,
    is_tile_descriptor,
    planned_launch,
)

FORMAT = 2


def encode_launches(launches: Sequence[Launch]) -> str:
    """The launches as JSON. Raises TypeError for an argument that is neither a tensor, the descriptor of one,
    nor a number, bool, string or None.
    """
    rows = [
        {
            "kernel": [launch.kernel.fn.__module__.rpartition(".")[2], launch.kernel.fn.__name__],
            "grid": list(launch.grid),
            "arguments": [_encoded(value) for value in launch.arguments],
            "options": {name: _encoded(value) for name, value in launch.options.items()},
            "variant": list(launch.variant),
        }
        for launch in launches
    ]
    return json.dumps({"format": FORMAT, "launches": rows})


def decode_launches(text: str) -> list[Launch]:
    """The launches of `encode_launches`. Raises ValueError for another format, for kernels that do not exist
    and for variants that this source would name otherwise.
    """
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        return [_decoded(row) for row in document["launches"]]
    except (ImportError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no plan of launches: {error}") from None


def _decoded(row: dict[str, list[object] | dict[str, object]]) -> Launch:
    module, name = map(str, row["kernel"])
    if not (module.isidentifier() and name.isidentifier()):
        raise ValueError(f"no kernel: {module}.{name}")
    kernel = getattr(import_module(f".{module}", __package__), name)
    options = row["options"]
    assert isinstance(options, dict)
    launch = planned_launch(
        kernel,
        tuple(int(str(size)) for size in row["grid"]),
        tuple(_value(value) for value in row["arguments"]),
        {name: _value(value) for name, value in options.items()},
    )
    if list(launch.variant) != row["variant"]:
        raise ValueError(f"{launch} was another variant")
    return launch


def _encoded(value: object) -> object:
    if isinstance(value, PointerArgument):
        return [_name_of(value.dtype), value.offset]
    if is_descriptor(value):
        sizes = map(list, (value.shape, value.strides, value.block_shape))
        return [_name_of(value.base.dtype), 0, *sizes, is_tile_descriptor(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is no argument that a plan on disk can hold")


def _value(value: object) -> object:
    if not isinstance(value, list):
        return value
    dtype, offset, *described = value
    found = getattr(torch, str(dtype))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype: {dtype}")
    pointer = PointerArgument(found, int(offset))
    if not described:
        return pointer
    *sizes, is_tile = described
    return descriptor_of(pointer, *sizes, is_tile=bool(is_tile))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
