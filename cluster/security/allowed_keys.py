"""Decides whether a peer may connect, by answering libzmq's ZAP requests, one per CURVE handshake.

`ZapRules` is pure: it maps a request to a reply. `net.authenticator` owns the socket and the thread. ZAP
(ZeroMQ RFC 27) identifies an admitted peer by a user, here `role/name`, which libzmq attaches to each of the
peer's messages. A routing id is chosen by the peer and proves nothing; the user is assigned here.
"""

import logging
from collections.abc import Collection, Sequence

from ..errors import ConfigError
from ..process.log import fields
from ..process.log_throttle import LogThrottle
from .keyring import KEY_BYTES, AllowList
from .tickets import Tickets

logger = logging.getLogger(__name__)

ZAP_VERSION = b"1.0"
ZAP_DOMAIN = b"baton"
ZAP_PARTS = 7  # version, request, domain, address, routing id, mechanism, and a key or user
TICKET_DOMAIN = b"baton-ticket"
TICKET_USER = b"ticket"
TICKET_PARTS = 8  # a user and a ticket instead of the key


class ZapRules:
    """Admits the keys that `peers` lists under one of `roles`, and holders of `tickets`.

    Used by one thread.
    """

    def __init__(self, peers: AllowList, roles: Collection[str], tickets: Tickets | None = None) -> None:
        self.roles = tuple(roles)
        self.num_refused = 0
        self._peers = peers
        self._tickets = tickets
        self._log_throttle = LogThrottle()

    def __repr__(self) -> str:
        return f"ZapRules({'|'.join(self.roles)}, refused={self.num_refused})"

    def answer(self, parts: Sequence[bytes]) -> list[bytes]:
        """The reply to one ZAP request: version, request id, status, reason, user, empty metadata."""
        request = parts[1] if len(parts) > 1 else b""
        user, reason = self._judge(parts)
        status = b"200" if user else b"400"
        return [ZAP_VERSION, request, status, reason.encode(), user.encode(), b""]

    def _judge(self, parts: Sequence[bytes]) -> tuple[str, str]:
        """(user, "") of a peer that is admitted, else ("", reason)."""
        if not ZAP_PARTS <= len(parts) <= TICKET_PARTS or parts[0] != ZAP_VERSION:
            return self._refuse("", "", "the request is not of ZAP 1.0")
        if parts[2] == TICKET_DOMAIN:
            return self._judge_ticket(parts)
        _, _, domain, address, _, mechanism, key = parts[:ZAP_PARTS]
        where = address.decode(errors="replace")
        if len(parts) != ZAP_PARTS or domain != ZAP_DOMAIN or mechanism != b"CURVE" or len(key) != KEY_BYTES:
            return self._refuse("", where, "the peer shows no key")
        public = key.hex()
        try:
            peer = self._peers.find(public, self.roles)
        except ConfigError as error:
            return self._refuse("", where, str(error))
        if peer is None:
            roles = " or ".join(self.roles)
            return self._refuse(public, where, f"the key is not listed as {roles}, or its time is over")
        logger.debug("peer admitted", extra=fields(user=peer.user, address=where))
        return peer.user, ""

    def _judge_ticket(self, parts: Sequence[bytes]) -> tuple[str, str]:
        where = parts[3].decode(errors="replace")
        if self._tickets is None or parts[5:7] != [b"PLAIN", TICKET_USER] or len(parts) != TICKET_PARTS:
            return self._refuse("", where, "the peer shows no ticket")
        user = self._tickets.redeem(parts[7].decode(errors="replace"))
        return (user, "") if user else self._refuse("", where, "the ticket is unknown, used or too old")

    def _refuse(self, public: str, address: str, reason: str) -> tuple[str, str]:
        self.num_refused += 1
        if self._log_throttle.is_due(public or address):
            logger.warning("peer refused", extra=fields(key=public, address=address, reason=reason))
        return "", reason
