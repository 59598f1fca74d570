"""Kernel source in, lock-step Python out: each statement runs once for all lanes, divergence is a mask.

``translate`` turns a Program into a Python function ``name(_x, _m, *params)``: ``_x`` is the launch (machine/cpu.py), ``_m``
the mask of the lanes that take part (True: all; None: none; else a bool array). Statements keep the line numbers of the
kernel's file, so a debugger or a traceback stands in the kernel itself. The forms it writes:

    name = E                    name = merge(_m, E, name)
    a[i] = E                    store(_x, _m, a, i, E)
    if C: A else: B             _t, _f = split(_m, C); if _t is not None: A under _t; if _f is not None: B under _f
    for i in range(a, b, c)     for i, _l in _x.steps(_m, a, b, c): body under _l
    return, break, continue     the lanes join a "gone" mask, which the statements after them run without
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import lanes
from .dialect import Instruction
from .frontend import Program, refuse
from .liveness import NONE, Exits, Names, jumps_back, live_before, loop_head

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mult", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.LShift: "lshift", ast.RShift: "rshift", ast.BitAnd: "bitand", ast.BitOr: "bitor", ast.BitXor: "bitxor",
    ast.Eq: "eq", ast.NotEq: "noteq", ast.Lt: "lt", ast.LtE: "lte", ast.Gt: "gt", ast.GtE: "gte",
}  # fmt: skip
UNARY = {ast.USub: "usub", ast.UAdd: "uadd", ast.Invert: "invert", ast.Not: "logical_not"}
INTEGER_CALLS = {"min": "int_min", "max": "int_max", "abs": "int_abs"}
JUMPS = (ast.Return, ast.Break, ast.Continue)
INT_OPERATORS = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.LShift,
    ast.RShift,
    ast.BitAnd,
    ast.BitOr,
    ast.BitXor,
)


def load_name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(load_name(function), list(args), [])


def method(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(load_name("_x"), name, ast.Load()), list(args), [])


def assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def some_lane(mask: str, body: list[ast.stmt]) -> list[ast.stmt]:
    """``if mask is not None: body``."""
    test = ast.Compare(load_name(mask), [ast.IsNot()], [ast.Constant(None)])
    return [ast.If(test, body, [])] if body else []


class Loop:
    """The masks of one loop: lanes that left it, lanes that skip the rest of this turn."""

    def __init__(self, number: int):
        self.broke, self.skipped = f"_broke{number}", f"_skipped{number}"


@dataclass(frozen=True)
class Scope:
    """Where a statement stands. mask: the variable that holds its lanes. waiting: the names that lanes outside may still read.
    after: the names live behind the statement. exits: those live where jumps go."""

    mask: str
    waiting: Names = NONE
    after: Names = NONE
    exits: Exits = Exits()

    def inside(self, mask: str, waiting: Names) -> Scope:
        """The scope of a branch: its lanes, and what the lanes outside it need besides."""
        return replace(self, mask=mask, waiting=self.waiting | waiting)


class Translator:
    """Translates one Program; ``namespace`` collects the constants the code refers to.

    ranks: of each parameter that is a local array its dimensions, of others 0. Then elements of local arrays whose index is
    sure to be the same for every lane are reached without a call: ``ints`` are the names that are sure to hold one int, in
    ``ranks`` stand the names that are sure to hold a local array. None: every access is a call, for checked mode.
    """

    def __init__(self, program: Program, callee: Callable, ranks: tuple[int, ...] | None):
        self.program, self.callee = program, callee
        self.direct = ranks is not None
        self.ranks = {p: rank for p, rank in zip(program.params, ranks or ()) if rank}
        self.ints: set[str] = set()
        self.namespace: dict[str, Any] = {}
        self.names = 0
        self.loops: list[Loop] = []

    def fresh(self, stem: str) -> str:
        self.names += 1
        return f"_{stem}{self.names}"

    def constant(self, value: Any) -> ast.expr:
        """A name for a typed constant."""
        name = f"_k{type(value).__name__}_{value}".replace("-", "m").replace(".", "_").replace("+", "p")
        self.namespace[name] = value
        return load_name(name)

    def error(self, node: ast.AST, message: str) -> Exception:
        return refuse(self.program.filename, node, self.program.name, message)

    # --- The function ---------------------------------------------------------------------------------------------------

    def function(self) -> ast.FunctionDef:
        tree = self.program.counted
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        fresh = sorted(stored - set(self.program.params)) + ["_gone", "_result"]
        start: list[ast.stmt] = [assign(n, ast.Constant(None)) for n in fresh]
        body = self.block(tree.body, Scope("_m"))
        end: list[ast.stmt] = [ast.Return(load_name("_result"))]
        args = [ast.arg(a) for a in ("_x", "_m", *self.program.params)]
        made = ast.FunctionDef(
            name=tree.name,
            args=ast.arguments([], args, None, [], [], None, []),
            body=start + body + end,
            decorator_list=[],
        )
        return locate(made, tree)

    def block(self, body: list[ast.stmt], scope: Scope) -> list[ast.stmt]:
        """Statements under a mask variable; after one that may jump, the rest runs without the lanes that left."""
        out: list[ast.stmt] = []
        for i, statement in enumerate(body):
            rest = body[i + 1 :]
            here = replace(scope, after=live_before(rest, scope.after, scope.exits))
            out += [locate(s, statement) for s in self.statement(statement, here)]
            if isinstance(statement, JUMPS):
                break
            gone = self.jumps(statement)
            if gone:
                left = call("without", load_name(scope.mask), *map(load_name, gone))
                out.append(locate(assign(scope.mask, left), statement))
                out += [locate(s, statement) for s in some_lane(scope.mask, self.block(rest, scope))]
                break
        return out

    def jumps(self, statement: ast.stmt) -> list[str]:
        """The gone masks that a statement may add lanes to."""
        gone = ["_gone"] if any(isinstance(n, ast.Return) for n in ast.walk(statement)) else []
        if self.loops and not isinstance(statement, (ast.For, ast.While)):
            inner = list(outer_jumps(statement))
            if any(isinstance(n, ast.Break) for n in inner):
                gone.append(self.loops[-1].broke)
            if any(isinstance(n, ast.Continue) for n in inner):
                gone.append(self.loops[-1].skipped)
        return gone

    def statement(self, node: ast.stmt, scope: Scope) -> list[ast.stmt]:
        return getattr(self, f"do_{type(node).__name__}")(node, scope)

    # --- Statements -----------------------------------------------------------------------------------------------------

    def do_Pass(self, node: ast.Pass, scope: Scope) -> list[ast.stmt]:
        return [ast.Pass()]

    def do_Expr(self, node: ast.Expr, scope: Scope) -> list[ast.stmt]:
        return [ast.Expr(self.expression(node.value, scope.mask))]

    def do_Assign(self, node: ast.Assign, scope: Scope) -> list[ast.stmt]:
        value = self.expression(node.value, scope.mask)
        self.note(node, scope)
        if len(node.targets) == 1:
            return self.store(node.targets[0], value, scope)
        kept = self.fresh("v")
        out: list[ast.stmt] = [assign(kept, value)]
        for target in node.targets:
            out += self.store(target, load_name(kept), scope)
        return out

    def do_AugAssign(self, node: ast.AugAssign, scope: Scope) -> list[ast.stmt]:
        target, mask = node.target, scope.mask
        if isinstance(target, ast.Name):
            old: ast.expr = load_name(target.id)
            return self.store(target, call(BINARY[type(node.op)], old, self.expression(node.value, mask)), scope)
        assert isinstance(target, ast.Subscript)
        index = self.fresh("i")
        old = call("load", load_name("_x"), load_name(mask), self.expression(target.value, mask), load_name(index))
        new = call(BINARY[type(node.op)], old, self.expression(node.value, mask))
        put = call(
            "store", load_name("_x"), load_name(mask), self.expression(target.value, mask), load_name(index), new
        )
        return [assign(index, self.expression(target.slice, mask)), ast.Expr(put)]

    def store(self, target: ast.expr, value: ast.expr, scope: Scope) -> list[ast.stmt]:
        """An assignment; a name keeps its old value in lanes outside only where one of them may read it."""
        mask = scope.mask
        if isinstance(target, ast.Name):
            if target.id not in scope.waiting:
                return [assign(target.id, value)]
            return [assign(target.id, call("merge", load_name(mask), value, load_name(target.id)))]
        if isinstance(target, ast.Tuple):
            names = [self.fresh("t") for _ in target.elts]
            unpack = ast.Assign([ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())], value)
            return [unpack] + [s for t, n in zip(target.elts, names) for s in self.store(t, load_name(n), scope)]
        assert isinstance(target, ast.Subscript)
        row = self.row(target)
        if row is not None:
            return [ast.Expr(call("put", load_name(mask), row, value))]
        array, index = self.expression(target.value, mask), self.expression(target.slice, mask)
        return [ast.Expr(call("store", load_name("_x"), load_name(mask), array, index, value))]

    def do_If(self, node: ast.If, scope: Scope) -> list[ast.stmt]:
        """The lanes of the other side wait at its start while this side runs, then behind it."""
        yes, no = self.fresh("yes"), self.fresh("no")
        test = self.expression(node.test, scope.mask)
        other = live_before(node.orelse, scope.after, scope.exits)
        body = some_lane(yes, self.block(node.body, scope.inside(yes, other)))
        if not node.orelse:
            return [assign(yes, call("both", load_name(scope.mask), test)), *body]
        masks = ast.Tuple([ast.Name(yes, ast.Store()), ast.Name(no, ast.Store())], ast.Store())
        orelse = some_lane(
            no, self.block(node.orelse, scope.inside(no, scope.after | jump_targets(node.body, scope.exits)))
        )
        return [ast.Assign([masks], call("split", load_name(scope.mask), test)), *body, *orelse]

    def do_For(self, node: ast.For, scope: Scope) -> list[ast.stmt]:
        """The variable takes its value without a merge: lanes outside the loop do not read it."""
        assert isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Name)
        loop, turn = self.enter(), self.fresh("turn")
        bounds = [self.expression(a, scope.mask) for a in node.iter.args]
        if all(self.sure(a) is not None for a in node.iter.args):
            self.ints.add(node.target.id)
        pair = ast.Tuple([ast.Name(node.target.id, ast.Store()), ast.Name(turn, ast.Store())], ast.Store())
        body = self.turn(node, loop, turn, scope)
        steps = method("steps", load_name(scope.mask), *bounds)
        self.loops.pop()
        return [assign(loop.broke, ast.Constant(None)), ast.For(pair, steps, body, [])]

    def do_While(self, node: ast.While, scope: Scope) -> list[ast.stmt]:
        loop, turn = self.enter(), self.fresh("turn")
        start = assign(turn, call("without", load_name(scope.mask), load_name(loop.broke), load_name("_gone")))
        check = assign(turn, call("both", load_name(turn), self.expression(node.test, turn)))
        leave = ast.If(ast.Compare(load_name(turn), [ast.Is()], [ast.Constant(None)]), [ast.Break()], [])
        body = self.turn(node, loop, turn, scope)
        self.loops.pop()
        return [
            assign(loop.broke, ast.Constant(None)),
            ast.While(ast.Constant(True), [start, *some_lane(turn, [check]), leave, *body], []),
        ]

    def enter(self) -> Loop:
        self.names += 1
        self.loops.append(Loop(self.names))
        return self.loops[-1]

    def turn(self, node: ast.For | ast.While, loop: Loop, turn: str, scope: Scope) -> list[ast.stmt]:
        """One turn of a loop: lanes that broke out or returned in an earlier turn do not take part; they wait behind it."""
        inside = list(ast.walk(node))
        gone = [loop.broke] if any(isinstance(n, ast.Break) for n in inside) else []
        gone += ["_gone"] if any(isinstance(n, ast.Return) for n in inside) else []
        head = loop_head(node, scope.after)
        waiting = scope.waiting | scope.after | (head if jumps_back(node) else NONE)
        body = self.block(node.body, Scope(turn, waiting, head, Exits(scope.after, head)))
        if isinstance(node, ast.For) and gone:
            ended = ast.If(ast.Compare(load_name(turn), [ast.Is()], [ast.Constant(None)]), [ast.Continue()], [])
            body = [assign(turn, call("without", load_name(turn), *map(load_name, gone))), ended, *body]
        return [assign(loop.skipped, ast.Constant(None)), *body]

    def do_Break(self, node: ast.Break, scope: Scope) -> list[ast.stmt]:
        broke = self.loops[-1].broke
        return [assign(broke, call("union", load_name(broke), load_name(scope.mask)))]

    def do_Continue(self, node: ast.Continue, scope: Scope) -> list[ast.stmt]:
        skipped = self.loops[-1].skipped
        return [assign(skipped, call("union", load_name(skipped), load_name(scope.mask)))]

    def do_Return(self, node: ast.Return, scope: Scope) -> list[ast.stmt]:
        out: list[ast.stmt] = [assign("_gone", call("union", load_name("_gone"), load_name(scope.mask)))]
        if node.value is not None:
            value = self.expression(node.value, scope.mask)
            out.insert(0, assign("_result", call("merge", load_name(scope.mask), value, load_name("_result"))))
        return out

    # --- Local arrays, reached directly -----------------------------------------------------------------------------------

    def note(self, node: ast.Assign, scope: Scope) -> None:
        """Remember a name, assigned this once, that is sure to hold one int or a local array."""
        (target, *more), value = node.targets, node.value
        if not self.direct or more or not isinstance(target, ast.Name) or self.stores(target.id) != 1:
            return
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "cuda.local.array":
            self.ranks[target.id] = len(value.args[0].elts) if isinstance(value.args[0], ast.Tuple) else 1
        elif target.id not in scope.waiting and self.sure(value) is not None:
            self.ints.add(target.id)

    def stores(self, name: str) -> int:
        """How often the function assigns a name; a parameter counts."""
        nodes = [n for n in ast.walk(self.program.counted) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        return sum(n.id == name for n in nodes) + (name in self.program.params)

    def sure(self, node: ast.expr) -> ast.expr | None:
        """The expression in Python's own ints, if it is sure to be one int for every lane."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node
        if isinstance(node, ast.Name) and node.id in self.ints:
            return load_name(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, INT_OPERATORS):
            left, right = self.sure(node.left), self.sure(node.right)
            return None if left is None or right is None else ast.BinOp(left, node.op, right)
        return None

    def row(self, node: ast.Subscript) -> ast.expr | None:
        """The lanes of one element of a local array, if both are sure."""
        if not self.direct or not isinstance(node.value, ast.Name) or node.value.id not in self.ranks:
            return None
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        index = [found for part in parts if (found := self.sure(part)) is not None]
        if not len(index) == len(parts) == self.ranks[node.value.id]:
            return None
        lanes_of: ast.expr = ast.Attribute(load_name(node.value.id), "rows", ast.Load())
        for number in index:
            lanes_of = ast.Subscript(lanes_of, number, ast.Load())
        return lanes_of

    def rank(self, node: ast.expr) -> int:
        """Dimensions of an argument that is sure to be a local array or a row of one; else 0."""
        if isinstance(node, ast.Name):
            return self.ranks.get(node.id, 0)
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and not isinstance(node.slice, ast.Tuple)
        ):
            return max(0, self.ranks.get(node.value.id, 0) - 1)
        return 0

    # --- Expressions ----------------------------------------------------------------------------------------------------

    def expression(self, node: ast.expr, mask: str) -> ast.expr:
        made = getattr(self, f"value_{type(node).__name__}")(node, mask)
        return locate(made, node)

    def value_Constant(self, node: ast.Constant, mask: str) -> ast.expr:
        value = node.value
        if isinstance(value, bool):
            return self.constant(np.bool_(value))
        if isinstance(value, int):
            return self.constant(np.uint64(value) if value >= 2**63 else lanes.Int(value))
        if isinstance(value, str):
            return ast.Constant(value)
        raise self.error(node, f"{value!r}: write float32({value!r}), a bare float is float64")

    def value_Name(self, node: ast.Name, mask: str) -> ast.expr:
        return load_name(node.id)

    def value_Tuple(self, node: ast.Tuple, mask: str) -> ast.expr:
        return ast.Tuple([self.expression(e, mask) for e in node.elts], ast.Load())

    def value_BinOp(self, node: ast.BinOp, mask: str) -> ast.expr:
        if type(node.op) not in BINARY:
            raise self.error(node, f"operator {type(node.op).__name__} is not in the kernel dialect")
        return call(BINARY[type(node.op)], self.operand(node.left, mask), self.operand(node.right, mask))

    def operand(self, node: ast.expr, mask: str) -> ast.expr:
        """An operand that is used up at once: an element of a local array need not be copied."""
        if isinstance(node, ast.Subscript) and not self.is_shape(node):
            return locate(self.element("peek", node, mask), node)
        return self.expression(node, mask)

    def value_UnaryOp(self, node: ast.UnaryOp, mask: str) -> ast.expr:
        return call(UNARY[type(node.op)], self.expression(node.operand, mask))

    def value_Compare(self, node: ast.Compare, mask: str) -> ast.expr:
        left = self.expression(node.left, mask)
        tests: list[ast.expr] = []
        for op, right in zip(node.ops, node.comparators):
            value = self.expression(right, mask)
            if len(node.ops) > 1:
                kept = self.fresh("c")
                tests.append(call(BINARY[type(op)], left, ast.NamedExpr(ast.Name(kept, ast.Store()), value)))
                left = load_name(kept)
            else:
                tests.append(call(BINARY[type(op)], left, value))
        out = tests[0]
        for test in tests[1:]:
            out = call("logical_and", out, test)
        return out

    def value_BoolOp(self, node: ast.BoolOp, mask: str) -> ast.expr:
        """Python's short circuit: a later operand is evaluated for the lanes that still need it."""
        out = self.expression(node.values[0], mask)
        for later in node.values[1:]:
            first, lanes_left = self.fresh("b"), self.fresh("m")
            kept = ast.NamedExpr(ast.Name(first, ast.Store()), out)
            need: ast.expr = load_name(first)
            if isinstance(node.op, ast.Or):
                need = call("logical_not", need)
            narrowed = ast.NamedExpr(ast.Name(lanes_left, ast.Store()), call("both", load_name(mask), need))
            function = "logical_or" if isinstance(node.op, ast.Or) else "logical_and"
            value = ast.Tuple(
                [kept, narrowed, self.lazily(lanes_left, self.expression(later, lanes_left), first)], ast.Load()
            )
            picked = ast.Subscript(value, ast.Constant(2), ast.Load())
            out = call(function, picked, load_name(first))
            mask = lanes_left if isinstance(node.op, ast.And) else mask
        return out

    def lazily(self, mask: str, value: ast.expr, otherwise: str) -> ast.expr:
        """The value, not evaluated when no lane needs it."""
        return ast.IfExp(ast.Compare(load_name(mask), [ast.Is()], [ast.Constant(None)]), load_name(otherwise), value)

    def value_IfExp(self, node: ast.IfExp, mask: str) -> ast.expr:
        condition, yes, no = self.fresh("q"), self.fresh("yes"), self.fresh("no")
        kept = ast.NamedExpr(ast.Name(condition, ast.Store()), self.expression(node.test, mask))
        yes_mask = ast.NamedExpr(ast.Name(yes, ast.Store()), call("both", load_name(mask), load_name(condition)))
        no_mask = ast.NamedExpr(
            ast.Name(no, ast.Store()), call("both", load_name(mask), call("logical_not", load_name(condition)))
        )
        first = ast.Subscript(ast.Tuple([kept, yes_mask, no_mask], ast.Load()), ast.Constant(0), ast.Load())
        sides = [self.lazily(m, self.expression(e, m), m) for m, e in ((yes, node.body), (no, node.orelse))]
        return call("select", first, *sides)

    def is_shape(self, node: ast.Subscript) -> bool:
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"

    def value_Subscript(self, node: ast.Subscript, mask: str) -> ast.expr:
        if self.is_shape(node):
            assert isinstance(node.value, ast.Attribute) and isinstance(node.slice, ast.Constant)
            return ast.Subscript(
                ast.Attribute(self.expression(node.value.value, mask), "shape", ast.Load()), node.slice, ast.Load()
            )
        return self.element("load", node, mask)

    def element(self, how: str, node: ast.Subscript, mask: str) -> ast.expr:
        row = self.row(node)
        if row is not None:
            return row if how == "peek" else ast.Call(ast.Attribute(row, "copy", ast.Load()), [], [])
        array, index = self.expression(node.value, mask), self.expression(node.slice, mask)
        return call(how, load_name("_x"), load_name(mask), array, index)

    def value_Attribute(self, node: ast.Attribute, mask: str) -> ast.expr:
        """An index of the thread's place: ``cuda.threadIdx.x``."""
        return ast.Attribute(load_name("_x"), ast.unparse(node).removeprefix("cuda.").replace(".", "_"), ast.Load())

    def value_Call(self, node: ast.Call, mask: str) -> ast.expr:
        if isinstance(node.func, ast.Attribute):
            return self.special(node, mask)
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        target = self.program.env[name]
        if isinstance(target, Program):
            self.namespace[name] = self.callee(target, *((tuple(map(self.rank, node.args)),) if self.direct else ()))
            return call(name, load_name("_x"), load_name(mask), *[self.expression(a, mask) for a in node.args])
        if isinstance(target, Instruction):
            return self.instruction(node, target, mask)
        if name == "count":
            return method("count", load_name(mask), *[self.expression(a, mask) for a in node.args])
        if name in INTEGER_CALLS:
            return call(INTEGER_CALLS[name], *[self.expression(a, mask) for a in node.args])
        return self.conversion(node, name, mask)

    def instruction(self, node: ast.Call, target: Instruction, mask: str) -> ast.expr:
        fetch = self.operand if target.name == "mma" else self.expression
        return method(f"do_{target.name}", load_name(mask), *[fetch(a, mask) for a in node.args])

    def conversion(self, node: ast.Call, name: str, mask: str) -> ast.expr:
        """``float32(x)``; of a literal, the constant itself."""
        (argument,) = node.args
        dtype = np.dtype(name.replace("boolean", "bool"))
        if isinstance(argument, ast.Constant):
            with np.errstate(all="ignore"):
                return self.constant(lanes.uniform(np.array(argument.value).astype(dtype)[()]))
        return call(f"cast_{dtype}", self.expression(argument, mask))

    def special(self, node: ast.Call, mask: str) -> ast.expr:
        name = ast.unparse(node.func).removeprefix("cuda.").replace(".", "_")
        if name in ("shared_array", "local_array"):
            shape, kind = node.args
            return method(name, shape, ast.Constant(ast.unparse(kind)))
        return method(name, load_name(mask))


def jump_targets(body: list[ast.stmt], exits: Exits) -> Names:
    """What is live where the jumps of a block go: its lanes wait there."""
    inner = [n for statement in body for n in (statement, *outer_jumps(statement))]
    behind = exits.behind if any(isinstance(n, ast.Break) for n in inner) else NONE
    return behind | (exits.again if any(isinstance(n, ast.Continue) for n in inner) else NONE)


def outer_jumps(node: ast.AST) -> Any:
    """The nodes of a statement outside its inner loops."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.For, ast.While)):
            yield from outer_jumps(child)


def locate(made: Any, source: ast.AST) -> Any:
    """Give every new node the line of the source it stands for."""
    for n in ast.walk(made):
        if isinstance(n, (ast.stmt, ast.expr, ast.arg)) and not hasattr(n, "lineno"):
            ast.copy_location(n, source)
    return made


def translate(
    program: Program, callee: Callable, support: dict[str, Any], ranks: tuple[int, ...] | None = None
) -> Callable:
    """The lock-step function of a Program. ``callee`` gives that of a device function (and of its arguments' ranks, where
    there are any), ``support`` the names that the code calls. ranks: see Translator."""
    translator = Translator(program, callee, ranks)
    module = ast.Module([translator.function()], [])
    casts = {f"cast_{name}": cast for name, cast in lanes.CASTS.items()}
    namespace = {**vars(lanes), **casts, **support, "__lockstep__": program}
    namespace.update(translator.namespace)
    exec(compile(ast.fix_missing_locations(module), program.filename, "exec"), namespace)
    return namespace[program.tree.name]
