"""DeepSeek V3, R1 and V3.1: calls between markers of the vocabulary.

    V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, JSON in a code block, <｜tool▁call▁end｜>
    V3.1     <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

`<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>` stand around all calls.
"""

import re

from .blocks import Block, BlockReader, arguments_of, skip_space

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
IN_CODE = re.compile(r"\s*([\w.-]+)\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


class DeepSeekReader(BlockReader):
    """Reads calls of all three versions."""

    OPENERS = (CALLS, CALL, CALLS_END)

    def block_of(self, held: str, *, is_last: bool) -> Block | None:
        if held.startswith(CALLS_END):
            return Block(len(CALLS_END), () if self.num_calls else None)
        opener = CALLS if held.startswith(CALLS) else CALL
        start = len(opener)
        if opener == CALLS:
            start = skip_space(held, start)
            if (
                not is_last
                and CALL.startswith(held[start : start + len(CALL)])
                and len(held) < start + len(CALL)
            ):
                return None
            if not held.startswith(CALL, start):
                return Block(len(opener), None)
            start += len(CALL)
        end = held.find(CALL_END, start)
        if end < 0 and not is_last:
            return None
        call = _call_of(held[start:] if end < 0 else held[start:end])
        if call is None:
            return Block(len(opener), None)
        return Block(len(held) if end < 0 else end + len(CALL_END), (call,))


def _call_of(text: str) -> tuple[str, str] | None:
    before, _, after = text.partition(SEPARATOR)
    found = IN_CODE.fullmatch(after)
    name, written = (found[1], found[2]) if found is not None else (before.strip(), after)
    arguments = arguments_of(written)
    return (name, arguments) if name and arguments is not None else None
