"""Request bodies for wrk: one constant body of token ids, or chats that are all different.

A router may cache text. Each chat is therefore one of a thousand excerpts of English prose (Python's manual)
with three new words in it.
"""

import json
import secrets
from collections.abc import Mapping
from pydoc_data import topics

NUM_TEXTS = 1000
TEXT_CHARS = 500
SAME = """wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer %s"
wrk.body = %s
"""
DIFFERENT = """local heads, middles, tail = {%s}, {%s}, %s
local threads, count = 0, 0

function setup(thread)
    thread:set("id", threads)
    threads = threads + 1
end

local function word(number)  -- in letters
    local letters = ""
    repeat
        letters = letters .. string.char(97 + number %% 26)
        number = math.floor(number / 26)
    until number == 0
    return letters
end

function request()
    count = count + 1
    local fresh, at = "%s" .. word(id) .. word(count), count %% #heads + 1
    local words = fresh .. "a " .. fresh .. "b " .. fresh .. "c"
    return wrk.format(nil, nil, nil, heads[at] .. words .. middles[at] .. tail)
end
"""


def same(key: str, body: Mapping[str, object]) -> str:
    """A wrk script that sends the same body each time."""
    return SAME % (key, _lua(json.dumps(body)))


def different(key: str, body: Mapping[str, object]) -> str:
    """A wrk script that sends `body` with different messages each time."""
    mark = secrets.token_hex(8)
    asked = {**body, "messages": [{"role": "user", "content": mark}]}
    before, after = json.dumps(asked).split(mark)
    halves = [_halves(text) for text in excerpts()]
    heads = [before + _inner(f"{head} ") for head, _ in halves]
    middles = [_inner(f" {middle}") for _, middle in halves]
    parts = (", ".join(map(_lua, heads)), ", ".join(map(_lua, middles)), _lua(after))
    nonce = "".join(chr(ord("a") + secrets.randbelow(26)) for _ in range(4))
    return SAME % (key, _lua("")) + DIFFERENT % (*parts, nonce)


def excerpts() -> list[str]:
    """Excerpts of about TEXT_CHARS characters that begin and end with a whole word."""
    words = " ".join(topics.topics.values()).split()
    found: list[str] = []
    line: list[str] = []
    size = 0
    for word in words:
        if size + len(word) > TEXT_CHARS and line:
            found.append(" ".join(line))
            line, size = [], 0
        line.append(word)
        size += len(word) + 1
    return found[:NUM_TEXTS]


def _halves(text: str) -> tuple[str, str]:
    at = text.rindex(" ", 0, TEXT_CHARS // 2)
    return text[:at], text[at + 1 :]


def _inner(text: str) -> str:
    """`text` escaped for the inside of a JSON string."""
    return json.dumps(text)[1:-1]


def _lua(text: str) -> str:
    """`text` as a Lua string literal.

    Lua and JSON escape quotes and backslashes alike. `text` must be ASCII without control characters.
    """
    return json.dumps(text)
