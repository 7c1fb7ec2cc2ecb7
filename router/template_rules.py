"""Which chat templates may be rendered in the router: an allow-list over the nodes of Jinja's syntax tree.

A template that loops over what it is given and puts texts together is rewritten so that every step that could take long or
make something large is one of `template_steps`, which pay for what they do before they do it. One that says anything else
(calls what is not named here, repeats a text, counts with a range, calls itself) is turned down, and rendered by a
process that can be killed (see `templates`). Nothing of the template runs while it is looked at, and no constant is folded.

    for, if    pay for their bodies when they run         + % ~ and what is shown    are steps
    macro      pays in every call; calls earlier ones     namespaces                 hold no namespaces
    filters    of a short list, each one a step          methods                    become the filters of that name
    [..] {..}  hold plain values alone, so that no value is reached by more than one way and can grow by being shared
"""

import re

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from .template_steps import FILTERS, METHODS, PER_ITEM

MAX_SOURCE = 1 << 15  # characters
MAX_DEPTH = 100  # of nodes in nodes
CHARS_PER_UNIT = 8  # of a text: what they cost beside a node
FIELD_UNITS, CALL_UNITS = 4, 20  # what a field costs that is not there, and a namespace
FUNCTIONS = frozenset({"raise_exception", "namespace", "strftime_now"})
ABSENT = frozenset(
    {"range", "dict", "lipsum", "cycler", "joiner", "self", "super", "caller", "varargs", "kwargs"}
)
TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "number", "sequence", "iterable"})
TESTS |= frozenset({"true", "false", "boolean", "integer", "float"})
ITEM_TESTS = frozenset({"equalto", "==", "eq", "ne", "!="}) | TESTS  # of an item, or of a field of it
DATE = re.compile(r"[%a-zA-Z ,:/.-]{,64}")  # no width, which would be room for any length
BRANCH_UNITS = 8  # a larger branch pays for itself when it is taken
BRANCHES = (nodes.Template, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Break, nodes.Continue)
VALUES = (nodes.Neg, nodes.Pos, nodes.Sub, nodes.Div, nodes.FloorDiv, nodes.Mod)


class TurnedDown(Exception):
    """The template is none of those that may be rendered here; says why."""


def metered(template: nodes.Template) -> nodes.Template:
    """The template with every costly step paid for. Raises TurnedDown. Changes its argument."""
    try:
        paid = _round(template.body)
        _Rules().visit(template)
    except RecursionError:
        raise TurnedDown("it is nested too deeply") from None
    template.body.insert(0, paid)
    return template


class _Rules(NodeTransformer):
    """Visits each node once, from above."""

    def __init__(self) -> None:
        self._depth = 0
        self._macros: set[str] = set()  # that stand before the node at hand

    def visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TurnedDown("it is nested too deeply")
        seen: nodes.Node = super().visit(node)
        self._depth -= 1
        return seen

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        if not isinstance(node, BRANCHES + VALUES):
            raise TurnedDown(f"it has a {type(node).__name__}")
        return self._inside(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, str):
            _check_text(node.value)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        _check_text(node.data)
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        is_taken = node.name in FUNCTIONS or node.name in ABSENT or node.name in self._macros
        if is_taken or (node.ctx != "load" and node.name == "loop"):
            raise TurnedDown(f"it uses {node.name} as a value")
        return node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        return _public(node, node.attr)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        return self._inside(_public(node, node.attr))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if not isinstance(node.arg, nodes.Slice):
            return self._inside(node)
        node.node = self._expr(node.node)
        self._inside(node.arg)
        return _step(node, "_made")

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self._inside(node)
        if isinstance(node.target, nodes.NSRef) and isinstance(node.node, nodes.Expr):
            node.node = _step(node.node, "_kept")
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        if node.filter is not None or not isinstance(node.target, nodes.Name):
            raise TurnedDown("it filters a block")
        return self._inside(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        node.nodes = [_step(child, "_shown") for child in map(self._expr, node.nodes)]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        first, *others = map(self._expr, node.nodes)
        return nodes.Filter(first, "_concat", others, [], None, None)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """A chain of sums is one step."""
        summands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            summands.append(self._expr(left.right))
            left = left.left
        return nodes.Filter(self._expr(left), "_sum", summands[::-1], [], None, None)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        node.items = [self._item(item) for item in node.items]
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":
            return self._inside(node)
        node.items = [self._item(item) for item in node.items]
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                raise TurnedDown("it makes up the names of fields")
            pair.value = self._item(pair.value)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TurnedDown("it has a recursive loop")
        paid = _round(node.body)
        self._inside(node)
        node.body.insert(0, paid)
        if node.test is not None:
            node.test = nodes.Filter(node.test, "_tested", [nodes.Const(_cost([node.test]))], [], None, None)
        return node

    def visit_If(self, node: nodes.If) -> nodes.Node:
        paid = [
            (branch, _round(branch)) for branch in (node.body, node.else_) if _cost(branch) > BRANCH_UNITS
        ]
        self._inside(node)
        for branch, payment in paid:
            branch.insert(0, payment)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """A macro can call those before it, and so neither itself nor one that calls it."""
        if node.name in self._macros or node.name in FUNCTIONS or node.name in ABSENT:
            raise TurnedDown(f"it has a macro {node.name} in place of something else")
        paid = _round([*node.body, *node.defaults])
        self._inside(node)
        node.body.insert(0, paid)
        self._macros.add(node.name)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        left, operands = self._expr(node.expr), node.ops
        for operand in operands:
            operand.expr = self._expr(operand.expr)
        node.expr = left
        if all(_is_brief(left, operand) for operand in operands):
            return node
        if len(operands) > 1:
            raise TurnedDown("it chains comparisons")
        return nodes.Filter(left, f"_{operands[0].op}", [operands[0].expr], [], None, None)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        if node.name not in TESTS or node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise TurnedDown(f"it has the test {node.name}")
        if node.name == "defined" and isinstance(node.node, nodes.Name) and node.node.name in FUNCTIONS:
            return node
        node.node = self._expr(node.node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name not in FILTERS or node.node is None or node.dyn_args or node.dyn_kwargs:
            raise TurnedDown(f"it has the filter {node.name}")
        node.node = self._expr(node.node)
        if node.name in PER_ITEM or node.name == "tojson":
            _check_options(node)
            return node
        node.args = [self._expr(argument) for argument in node.args]
        for keyword in node.kwargs:
            keyword.value = self._expr(keyword.value)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if node.dyn_args or node.dyn_kwargs:
            raise TurnedDown("it calls with arguments that it made up")
        called = node.node
        if isinstance(called, nodes.Getattr) and called.attr in METHODS and not node.kwargs:
            given = [self._expr(argument) for argument in node.args]
            return nodes.Filter(self._expr(called.node), f".{called.attr}", given, [], None, None)
        if not isinstance(called, nodes.Name) or called.name not in FUNCTIONS | self._macros:
            raise TurnedDown("it calls what is no filter")
        if called.name in self._macros:
            node.args = [self._expr(argument) for argument in node.args]
            for keyword in node.kwargs:
                keyword.value = self._expr(keyword.value)
            return node
        return self._function(node, called.name)

    def _function(self, node: nodes.Call, name: str) -> nodes.Node:
        if name == "raise_exception" and not node.kwargs:
            node.args = [self._expr(argument) for argument in node.args]
        elif name == "namespace" and not node.args:
            for keyword in node.kwargs:
                _public(node, keyword.key)
                keyword.value = _step(self._expr(keyword.value), "_kept")
        elif not (
            name == "strftime_now" and not node.kwargs and len(node.args) == 1 and _is_date(node.args[0])
        ):
            raise TurnedDown(f"it calls {name} in a way of its own")
        return node

    def _item(self, node: nodes.Expr) -> nodes.Expr:
        """Of a list or a mapping that the template writes."""
        seen = self._expr(node)
        return seen if isinstance(seen, (nodes.List, nodes.Tuple, nodes.Dict)) else _step(seen, "_plain")

    def _expr(self, node: nodes.Expr) -> nodes.Expr:
        seen = self.visit(node)
        assert isinstance(seen, nodes.Expr)
        return seen

    def _inside(self, node: nodes.Node) -> nodes.Node:
        seen: nodes.Node = super().generic_visit(node)
        return seen


def _step(node: nodes.Expr, name: str) -> nodes.Expr:
    """The value of `node`, through a filter of our own. A constant needs none: its round has paid for it."""
    if isinstance(node, (nodes.Const, nodes.TemplateData)):
        return node
    return nodes.Filter(node, name, [], [], None, None)


def _round(body: list[nodes.Node]) -> nodes.Node:
    """What pays for one round of a loop's body, or for what else runs at once."""
    paid = nodes.Filter(nodes.Const(_cost(body)), "_round", [], [], None, None)
    return nodes.ExprStmt(paid)


def _cost(body: list[nodes.Node] | list[nodes.Expr]) -> int:
    """Of running it once, in units: a node is one, and so are some characters of its own text."""
    return 1 + sum(map(_total, body))


def _total(node: nodes.Node) -> int:
    """With what is in it, but for bodies of loops and macros and for larger branches, which pay for themselves."""
    apart: tuple[str, ...] = ()
    if isinstance(node, (nodes.For, nodes.Macro)):
        apart = ("body", "defaults")
    elif isinstance(node, nodes.If):
        branches = (("body", node.body), ("else_", node.else_))
        apart = tuple(name for name, branch in branches if _cost(branch) > BRANCH_UNITS)
    return _cost_of(node) + sum(map(_total, node.iter_child_nodes(exclude=apart)))


def _cost_of(node: nodes.Node) -> int:
    if isinstance(node, (nodes.Getattr, nodes.Getitem)):
        return FIELD_UNITS
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
        return CALL_UNITS
    if isinstance(node, nodes.TemplateData):
        return 1 + len(node.data) // CHARS_PER_UNIT
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return 1 + len(node.value) // CHARS_PER_UNIT
    return 1


def _is_brief(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Whether a comparison takes no longer than what the template spells out: one side is a constant."""
    right = operand.expr
    if operand.op in ("in", "notin"):
        is_list = isinstance(right, (nodes.List, nodes.Tuple)) and all(
            isinstance(i, nodes.Const) for i in right.items
        )
        return is_list and isinstance(left, (nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem))
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


def _is_date(node: nodes.Expr) -> bool:
    return (
        isinstance(node, nodes.Const)
        and isinstance(node.value, str)
        and DATE.fullmatch(node.value) is not None
    )


def _public(node: nodes.Node, name: str) -> nodes.Node:
    if name.startswith("_"):
        raise TurnedDown(f"it looks into {name}")
    return node


def _check_text(text: str) -> None:
    """A worker could not say it otherwise."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TurnedDown("it has half a character")


def _check_options(node: nodes.Filter) -> None:
    """The arguments of filters that are more than values."""
    given = [argument.value if isinstance(argument, nodes.Const) else None for argument in node.args]
    named = {
        str(one.key): one.value.value if isinstance(one.value, nodes.Const) else None for one in node.kwargs
    }
    if node.name == "tojson":
        is_fine = not given and named.keys() <= {"ensure_ascii", "indent", "sort_keys"}
        is_fine = is_fine and all(type(value) is bool or value in range(9) for value in named.values())
    elif node.name == "map":
        is_fine = not given and named.keys() == {"attribute"} and _is_field(named["attribute"])
    else:
        tested = given if node.name in ("select", "reject") else given[1:]
        is_fine = not named and (tested is given or (bool(given) and _is_field(given[0])))
        is_fine = is_fine and all(name in ITEM_TESTS for name in tested[:1])
        is_fine = is_fine and len(tested) < 3 and all(isinstance(value, (str, int)) for value in tested[1:])
    if not is_fine:
        raise TurnedDown(f"it has the filter {node.name} with other options")


def _is_field(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_")
