"""The body of POST /roles and its reply: an order to change the role of one worker."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...cluster.protocol.message_parts import Id
from ...cluster.protocol.messages import ChangeRole
from .field_errors import UNREADABLE, unreadable


class RoleOrderBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /roles."""

    instance: Id  # of the worker, as /status names it
    order: Id  # 32 hex digits that the caller chooses; a repeated order is performed once
    role: Annotated[str, Meta(pattern="^(prefill|decode)$")]  # that it shall have
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0  # then its running requests go on elsewhere


class RoleOrderReply(Struct, frozen=True, kw_only=True):
    """The order is on its way; `role_changes` in /status tells what became of it."""

    instance: str
    order: str
    role: str


def role_order_of(raw: bytes) -> ChangeRole:
    """The order in a body. Raises ApiError (400), which names the field at fault."""
    try:
        body = msgspec.json.decode(raw, type=RoleOrderBody)
    except UNREADABLE as error:
        raise unreadable(error) from None
    return ChangeRole(
        instance=body.instance, order=body.order, role=body.role, drain_ms=round(body.drain_s * 1000)
    )
