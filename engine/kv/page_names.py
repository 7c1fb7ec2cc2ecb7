"""The names of pages: digests of everything that the content of a page depends on.

Workers and routers compute the same ones.

The key of a page is SHA-256 over the key of the page before it and the page's own part. So the keys of a
prompt form a path of a tree without links, and one key stands for all tokens up to the end of its page. The
first page of a prompt begins with the root, a digest of the fingerprint of all that pages depend on besides
tokens (weights, layout, dtype, page size, the drafter's weights). The part of a page is its tokens and the
`lookahead` tokens behind them; that of a first page has the salt of the request behind the tokens. So equal
tokens of another tenant, or under other weights, have other keys.

This file imports nothing but the standard library.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NAME_BYTES = 16  # of a key: enough that no two pages of a cluster have one name by chance
TOKEN_BYTES = 8
PARTS_AT_ONCE = 64  # pages whose tokens are packed by one call


@dataclass(frozen=True, kw_only=True)
class PageScheme:
    """The way in which a worker names its pages. `root`: the parent of the first page of every prompt."""

    root: bytes
    page_size: int
    lookahead: int = 0

    def keys(self, token_ids: Sequence[int], salt: str) -> Iterator[bytes]:
        """The keys of the whole pages of a prompt, in order; each is computed when it is asked for."""
        num_pages = max(0, len(token_ids) - self.lookahead) // self.page_size
        key = self.root
        for part in page_parts(
            token_ids, 0, num_pages, page_size=self.page_size, lookahead=self.lookahead, salt=salt
        ):
            key = child_key(key, part)
            yield key


def root_key(fingerprint: str) -> bytes:
    """The parent of the first page of every prompt."""
    return hashlib.sha256(fingerprint.encode()).digest()


def child_key(parent: bytes, part: bytes) -> bytes:
    """The key of the page with `part` behind the page with the key `parent`."""
    return hashlib.sha256(parent + part).digest()


def name_of(key: bytes, *, is_bare: bool = False) -> bytes:
    """The name under which a worker tells of the page `key`. Its last bit says that the page has no features,
    or lies behind one that has none.
    """
    return key[: NAME_BYTES - 1] + bytes((key[NAME_BYTES - 1] & 0xFE | is_bare,))


def page_parts(
    token_ids: Sequence[int], first: int, end: int, *, page_size: int, lookahead: int, salt: str
) -> Iterator[bytes]:
    """The parts of the pages [first, end) of a prompt.

    Tokens are packed in blocks: an unknown prompt costs one block, and a known one no Python per token.
    """
    width, step = (page_size + lookahead) * TOKEN_BYTES, page_size * TOKEN_BYTES
    for block in range(first, end, PARTS_AT_ONCE):
        stop = min(end, block + PARTS_AT_ONCE)
        data = array("q", token_ids[block * page_size : stop * page_size + lookahead]).tobytes()
        if block == 0:
            yield data[:width] + salt.encode()
        for start in range(step * (block == 0), (stop - block) * step, step):
            yield data[start : start + width]
