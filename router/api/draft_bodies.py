"""The body of POST /drafts and its reply: an order about the draft weights of one decode worker."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...cluster.protocol.message_parts import Id, Text
from ...cluster.protocol.messages import SwapDraft
from ..errors import bad_request
from .field_errors import UNREADABLE, unreadable


class DraftOrderBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /drafts."""

    instance: Id  # of the decode worker, as /status names it
    order: Id  # 32 hex digits that the caller chooses; a repeated order is performed once
    action: Annotated[str, Meta(pattern="^(check|swap|back|restart)$")]
    path: Text = ""  # absolute directory on the worker's host; empty for "back"


class DraftOrderReply(Struct, frozen=True, kw_only=True):
    """The order is on its way; `draft` of the worker in /status tells what became of it."""

    instance: str
    order: str


def draft_order_of(raw: bytes) -> SwapDraft:
    """The order in a body. Raises ApiError (400), which names the field at fault."""
    try:
        body = msgspec.json.decode(raw, type=DraftOrderBody)
    except UNREADABLE as error:
        raise unreadable(error) from None
    if (body.action == "back") != (body.path == ""):
        raise bad_request("path: name a directory to check or take, and none to go back", param="path")
    return SwapDraft(instance=body.instance, order=body.order, action=body.action, path=body.path)
