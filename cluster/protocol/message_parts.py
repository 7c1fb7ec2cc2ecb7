"""Bounded scalar types for message fields, and the base class of all messages."""

from typing import Annotated

from msgspec import Meta, Struct

Id = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]*$")]  # 128 random bits in hex
Count = Annotated[int, Meta(ge=0, le=2**48)]
Small = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1 << 20)]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=64)]
# the id of a client's request, as it came or was minted; "" where it is not known
RequestId = Annotated[str, Meta(max_length=128, pattern="^[!-~]*$")]
RankNumber = Annotated[int, Meta(ge=0, le=64)]  # of tensor-parallel ranks, or one of them
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Ticket = Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]*$")]
TraceParent = Annotated[str, Meta(max_length=55, pattern="^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$")]
TraceState = Annotated[str, Meta(max_length=512, pattern="^[ -~]*$")]
KeyBytes = Annotated[bytes, Meta(max_length=64)]
AGENT_BYTES = 6 << 10  # less than the bound of any KV message
AgentBytes = Annotated[bytes, Meta(max_length=AGENT_BYTES)]
Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message; the tag is the class name."""
