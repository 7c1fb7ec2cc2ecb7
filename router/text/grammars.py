"""Grammars that constrain an answer: JSON of a schema, a client's own grammar, or tool calls.

A call is written as `<tool_call>`, a line `{"name": ..., "arguments": ...}` and `</tool_call>`, the form on
which many open models were trained. Schemas come from clients, so a sandboxed process compiles them before a
worker sees them (`sandbox/grammar_compiler`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ..api.body_types import ChatBody, CompletionBody
from ..api.tool_bodies import ToolChoice
from ..errors import bad_request, grammar_too_costly, overloaded
from ..sandbox.fork_server import ForkServer
from ..sandbox.frames import REFUSED, RENDERED
from ..sandbox.grammar_compiler import GRAMMARS, Plan, check_size
from ..sandbox.pool_scheduler import SLOW_S, PoolScheduler
from ..sandbox.sandbox_pool import NoWorker, SandboxPool, TooCostly, WorkerLost

MAX_KEPT = 64
MAX_WAITING = 64  # grammars waiting to be compiled
LONG = 2000  # bytes of schemas
MAX_ASIDE = 1


def plan_of(body: ChatBody | CompletionBody) -> Plan:
    """The plan of the grammar of an answer to `body` whose calls must follow one."""
    constraint = body.constraint
    plan = Plan()
    if constraint is not None:
        plan = Plan(answer=constraint.text, kind=constraint.kind, field=constraint.param)
    if not isinstance(body, ChatBody) or not body.calls_tools:
        return plan
    chosen = body.tool_choice
    name = chosen.function.name if isinstance(chosen, ToolChoice) else None
    functions = [tool.function for tool in body.tools or ()]
    return replace(
        plan,
        tools=tuple((f.name, f.schema) for f in functions if name in (None, f.name)),
        strict=tuple(f.name for f in functions if f.strict),
        must_call=name is not None or chosen == "required",
        may_repeat=name is None and body.parallel_tool_calls is not False,
    )


class Grammars:
    """Compiles plans in the sandbox, and keeps the most recently used grammars. Used on one event loop."""

    def __init__(
        self, fork_server: ForkServer, clock: Callable[[], float], events: Counter[str] | None = None
    ) -> None:
        # llguidance aborts without memory, so a worker that died after SLOW_S was too costly
        scheduler = PoolScheduler(MAX_ASIDE, costly_s=SLOW_S)
        self._pool = SandboxPool(GRAMMARS, fork_server, clock, scheduler, kind="grammar")
        self._events = Counter() if events is None else events
        self._kept: OrderedDict[Plan, str] = OrderedDict()
        self._num_waiting = 0

    def __repr__(self) -> str:
        return f"Grammars({len(self._kept)} kept, {self._num_waiting} waiting)"

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._pool.close()

    async def of(self, plan: Plan) -> str:
        """The grammar of a plan; "" for an empty plan.

        Raises ApiError: 400 for a plan that cannot be followed, 429 when too many wait.
        """
        if not plan:
            return ""
        if plan not in self._kept:
            check_size(plan)
            if self._num_waiting >= MAX_WAITING:
                raise overloaded("Too many schemas wait to be compiled. Try again later.")
            self._num_waiting += 1
            try:
                self._kept[plan] = await self._compiled(plan)
            finally:
                self._num_waiting -= 1
        self._kept.move_to_end(plan)
        grammar = self._kept[plan]
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar

    async def _compiled(self, plan: Plan) -> str:
        try:
            reply = await self._pool.reply_to(msgspec.msgpack.encode(plan), is_long=plan.num_bytes > LONG)
        except NoWorker:
            raise overloaded("No schema can be compiled now. Try again later.") from None
        except (TooCostly, WorkerLost):  # llguidance aborts without memory
            reply = b""
        kind, text = reply[:1], reply[1:].decode()
        if kind == RENDERED:
            return text
        if kind == REFUSED:
            param, _, message = text.partition("\0")
            raise bad_request(message, param=param.partition(".")[0])
        self._events["grammar_cut"] += 1
        raise grammar_too_costly(plan.param.partition(".")[0])
