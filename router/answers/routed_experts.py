"""The experts that the tokens of a choice took, as SGLang returns them: base64 of little-endian int32."""

import base64
from collections.abc import Sequence

import numpy as np

from ...cluster.protocol.messages import RoutedShape

NO_EXPERT = -1  # of layers without experts


class RoutedRows:
    """The experts of a choice's rows from `first` on, with which its prompt of `num_prompt` tokens begins at
    the latest. Parts come in order.
    """

    def __init__(self, shape: RoutedShape, first: int, num_prompt: int) -> None:
        self._shape = shape
        self._before = num_prompt - 1 - first
        self._parts: list[bytes] = []

    def add(self, ids: bytes) -> None:
        """Adds the experts of the next rows, in the form of `RoutedShape`."""
        if ids:
            self._parts.append(ids)

    def encoded(self, num_tokens: int) -> str:
        """All rows that lead to the first `num_tokens` output tokens: ids `[rows, num_layers, top_k]`.

        Raises ValueError if a worker has not sent them.
        """
        shape, num_rows = self._shape, max(0, self._before + num_tokens)
        data = b"".join(self._parts)
        if len(data) < num_rows * shape.row_bytes:
            raise ValueError(f"experts of {num_rows} rows are wanted, {len(data)} bytes are there")
        return base64.b64encode(_widened(shape, data, num_rows)).decode()


def _widened(shape: RoutedShape, data: bytes, num_rows: int) -> bytes:
    layers: Sequence[int] = shape.layers
    ids = np.frombuffer(data, f"<u{shape.id_bytes}", num_rows * len(layers) * shape.top_k)
    found = np.full((num_rows, shape.num_layers, shape.top_k), NO_EXPERT, dtype="<i4")
    found[:, list(layers)] = ids.reshape(num_rows, len(layers), shape.top_k)
    return found.tobytes()
