"""Rewrite a chat template's syntax tree so that its operators are counted.  Runs no template.

Jinja compiles `~`, comparisons, slices, literals and loops to Python's own, past every hook of an
environment; as filters they go through it.  The filters' names hold a space: no template has them.
"""

from __future__ import annotations

from typing import NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

NODES = 16  # of a body, that cost one unit each time


def rewrite(tree: nodes.Template) -> nodes.Template:
    """The same template, counted; raise TemplateSyntaxError for what none may hold."""
    rewritten: nodes.Template = _Rewriter().visit(tree)
    return rewritten


def _filtered(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, f" {name}", list(args), [], None, None, lineno=node.lineno)


def _weight(body: list[nodes.Node]) -> nodes.Const:
    """The units that a body costs each time, beside those of what it calls."""
    count = sum(1 for part in body for _ in part.find_all(nodes.Node))
    return nodes.Const(count // NODES)


class _Rewriter(NodeTransformer):
    """Children first, except where a body's size is asked for."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = _weight(node.body)
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr), "a loop has no iterable"
        node.iter = _filtered("looped", node.iter, weight)
        return node

    def _begins(self, node: nodes.Macro | nodes.Block | nodes.CallBlock) -> nodes.Node:
        weight = _weight(node.body)
        self.generic_visit(node)
        tick = _filtered("passed", weight)
        tick.lineno = node.lineno
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_Macro = visit_Block = visit_CallBlock = _begins

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *more = node.nodes
        return _filtered("joined", first, *more)

    def _literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        if all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return _filtered("made", node)

    visit_List = visit_Tuple = visit_Dict = _literal

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """`in` is a filter of its own; a constant beside any other operator ends it at once."""
        self.generic_visit(node)
        first = node.ops[0]
        if len(node.ops) == 1 and first.op in ("in", "notin"):
            found = _filtered("within", first.expr, node.expr)
            return found if first.op == "in" else nodes.Not(found, lineno=node.lineno)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) == 2 and any(isinstance(side, nodes.Const) for side in sides):
            return node
        node.expr = _filtered("made", node.expr)
        for operand in node.ops:
            operand.expr = _filtered("made", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            ends = (node.arg.start, node.arg.stop, node.arg.step)
            return _filtered("sliced", node.node, *(end or nodes.Const(None) for end in ends))
        if node.ctx == "load" and not isinstance(node.arg, nodes.Const):
            node.arg = _filtered("made", node.arg)
        return node

    def _loads(self, node: nodes.Node) -> NoReturn:
        raise TemplateSyntaxError("a chat template cannot load others", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _loads

    def _escapes(self, node: nodes.Node) -> NoReturn:
        raise TemplateSyntaxError("a chat template has nothing to escape", node.lineno)

    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _escapes
