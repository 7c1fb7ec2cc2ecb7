"""Rendering short chats in the router itself, where the model's template is known to be harmless.

The trip to a template worker and back costs a short chat more than its rendering. A template that `template_rules` lets
through takes at most FUEL here, milliseconds at worst, and can neither hang nor grow; whatever it does not finish within
that, refuses or stumbles over is rendered once more by a worker, whose word counts. So the text is always the worker's.
"""

import logging
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..cluster.process.log import fields
from .rendering import Chat, Setup
from .template_rules import MAX_SOURCE, TurnedDown, metered
from .template_steps import OPERATORS, Meter, OutOfFuel, Unusual

logger = logging.getLogger(__name__)

FUEL = 30_000  # units of one chat; short chats in known templates take 100 to 14000
OF_LOOPS = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})
REST = 100  # chats that go to workers after one that took it all


class InlineRenderer:
    """Renders for one router, in one thread."""

    def __init__(self, setup: Setup) -> None:
        """Raises TurnedDown for a template that is none of the harmless."""
        self._special_tokens = setup.special_tokens
        self._meter = Meter()
        self._template = _compiled(setup.chat_template, self._meter)
        self._rest = 0

    def __repr__(self) -> str:
        return f"InlineRenderer({self._rest} chats to rest)"

    def render(self, chat: Chat) -> str | None:
        """The text; None: a worker shall say."""
        if self._rest:
            self._rest -= 1
            return None
        given: dict[str, Any] = {"messages": chat.messages, "tools": chat.tools or None, "documents": None}
        given |= {"add_generation_prompt": True, **self._special_tokens, **chat.switches}
        self._meter.left = FUEL
        try:
            return "".join(self._template.root_render_func(self._template.new_context(given)))
        except OutOfFuel:
            self._rest = REST
        except Exception:  # of a template; the worker finds it again, and knows how to tell
            pass
        return None


class _Environment(ImmutableSandboxedEnvironment):
    """As `transformers` sets it up, but that every step is paid for and nothing is worked out while compiling."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, meter: Meter) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols])
        self.filters = meter.steps()
        self.globals = {"raise_exception": _raise, "namespace": Namespace, "strftime_now": _now}
        self._calculated = meter.calculated

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - Jinja's
        return self._calculated(operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - Jinja's
        """As Jinja does, without asking what is safe of what is: fields of mappings and namespaces, and what loops tell."""
        kind = type(obj)
        if kind is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        if kind is Namespace:
            return Environment.getattr(self, obj, attribute)
        return (
            getattr(obj, attribute)
            if kind is LoopContext and attribute in OF_LOOPS
            else super().getattr(obj, attribute)
        )


def inline_renderer(setup: Setup) -> InlineRenderer | None:
    """None: workers render all chats of this model."""
    try:
        made = InlineRenderer(setup)
    except TurnedDown as why:
        logger.info("chats are rendered by template workers alone", extra=fields(template=str(why)))
        return None
    logger.info("short chats are rendered in the router")
    return made


def _compiled(source: str | dict[str, str], meter: Meter) -> Template:
    """Raises TurnedDown."""
    if not isinstance(source, str):
        raise TurnedDown("it is several templates")
    if len(source) > MAX_SOURCE:
        raise TurnedDown(f"it is longer than {MAX_SOURCE} characters")
    environment = _Environment(meter)
    try:
        tree: nodes.Template = metered(environment.parse(source))
        code = environment.compile(tree)
        assert not isinstance(code, str)
        return Template.from_code(environment, code, environment.globals)
    except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TurnedDown(f"it cannot be compiled: {type(error).__name__}") from None


def _raise(message: object) -> None:
    raise Unusual(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
