"""Llama 3: the whole answer is JSON objects of `name` and `parameters`, separated by `;`.

Some versions begin with the control token `<|python_tag|>`.
"""

from .blocks import BROKEN, Block, BlockReader, JsonEnd, call_of, skip_space

TAG = "<|python_tag|>"
BETWEEN = ";"


class LlamaJsonReader(BlockReader):
    """Reads an answer that is calls only. An answer that begins otherwise has none."""

    OPENERS = (TAG, "{", BETWEEN)
    STARTS_TEXT = True

    def begin_block(self) -> None:
        self._json = JsonEnd()

    def block_of(self, held: str, *, is_last: bool) -> Block | None:
        if held.startswith(BETWEEN) and not self.num_calls:
            return Block(1, None)
        opener = next((opener for opener in (TAG, BETWEEN) if held.startswith(opener)), "")
        start = skip_space(held, len(opener))
        end = self._json.of(held, start)
        if end is None and not is_last:
            return None
        if end is None or end == BROKEN:
            return Block(max(1, len(opener)), None)
        call = call_of(held[start:end])
        return Block(end, None if call is None else (call,))
