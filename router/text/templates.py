"""Renders chats by the model's template, in a pool of sandboxed processes."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from ..errors import ApiError, bad_request, nested_too_deeply, template_failed, template_too_costly
from ..sandbox.fork_server import ForkServer
from ..sandbox.frames import REFUSED, RENDERED
from ..sandbox.sandbox_pool import SandboxPool, TooCostly, WorkerLost
from ..sandbox.template_renderer import Chat, Setup

logger = logging.getLogger(__name__)

WARM = Chat(messages=[{"role": "user", "content": "hi"}])


def encoded(chat: Chat) -> bytes:
    """A chat in JSON, as pool workers read it. Raises ApiError (400)."""
    try:
        return msgspec.json.encode(chat)
    except RecursionError:
        raise nested_too_deeply() from None


class Templates:
    """Renders chats for one router, on one event loop."""

    def __init__(
        self,
        setup: Setup,
        fork_server: ForkServer,
        clock: Callable[[], float],
        events: Counter[str] | None = None,
    ) -> None:
        self._pool = SandboxPool(msgspec.json.encode(setup), fork_server, clock)
        self._events = Counter() if events is None else events
        self._warming: list[asyncio.Task[str]] = []

    def __repr__(self) -> str:
        return f"Templates({self._pool})"

    def warm(self) -> None:
        """Starts the workers and compiles the template before the first request."""
        encoded = msgspec.json.encode(WARM)
        for is_long in (False, True):
            task = asyncio.get_running_loop().create_task(self.render(encoded, is_long=is_long))
            # some templates refuse such a chat
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._warming.append(task)

    def close(self) -> None:
        """Ends all workers. Idempotent."""
        for task in self._warming:
            task.cancel()
        self._pool.close()

    async def render(self, chat: bytes, *, is_long: bool) -> str:
        """The text of an encoded Chat.

        Raises ApiError: 400 when the template refuses it or takes too much, 500 when workers died.
        """
        try:
            reply = await self._pool.reply_to(chat, is_long=is_long)
        except TooCostly:
            raise self._too_costly() from None
        except WorkerLost:
            raise self._failed() from None
        kind, text = reply[:1], reply[1:].decode()
        if kind == RENDERED:
            return text
        if kind == REFUSED:
            raise bad_request(f"the model's chat template refuses these messages: {text}", param="messages")
        raise self._too_costly()

    def _too_costly(self) -> ApiError:
        self._events["template_cut"] += 1
        logger.warning("a chat template took too much time or memory")
        return template_too_costly()

    def _failed(self) -> ApiError:
        self._events["template_worker_lost"] += 1
        logger.error("template workers died of one chat, or could not be made")
        return template_failed()
