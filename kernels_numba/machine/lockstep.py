"""Kernel source in, lock-step Python out: each statement runs once for all lanes, divergence is a mask.

``translate`` turns a Program into a Python function ``name(__x, __m, *params)``: ``__x`` is the launch (machine/cpu.py), ``__m``
the mask of the lanes that take part (True: all; None: none; else a bool array). Statements keep the line numbers of the
kernel's file, so a debugger or a traceback stands in the kernel itself. The forms it writes:

    name = E                    name = __merge(__t, E, name, __m, __gone), where lanes outside __t may still read it
    a[i] = E                    __store(__x, __m, a, i, E)
    if C: A else: B             __t, __f = __split(__m, C); if __t is not None: A under __t; if __f is not None: B under __f
    for i in range(a, b, c)     for i, __l in __x.steps(__m, a, b, c): body under __l
    return, break, continue     the lanes join a "gone" mask, which the statements after them run without

Whatever it adds has a name that starts with two underscores, as no kernel's name does: helpers like ``__merge`` stand in
machine/lanes.py, arrays.py and choices.py without it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import lanes
from .expressions import Expressions, declares
from .frontend import Program
from .liveness import NONE, Exits, Names, jumps_back, live_before, loop_head
from .syntax import assign, call, helper, load_name, locate, method, some_lane

JUMPS = (ast.Return, ast.Break, ast.Continue)


class Loop:
    """The masks of one loop: lanes that left it, lanes that skip the rest of this turn."""

    def __init__(self, number: int):
        self.broke, self.skipped = f"__broke{number}", f"__skipped{number}"


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


class Translator(Expressions):
    """Translates one Program: its statements, and through Expressions what is in them.

    masks: the variable that holds the lanes of the statement on a line, for debuggers.
    """

    def __init__(self, program: Program, callee: Callable, ranks: tuple[int, ...] | None):
        super().__init__(program, callee, ranks)
        self.loops: list[Loop] = []
        self.masks: dict[int, str] = {}

    # --- The function ---------------------------------------------------------------------------------------------------

    def function(self) -> ast.FunctionDef:
        tree = self.program.counted
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        fresh = sorted(stored - set(self.program.params)) + ["__gone", "__result"]
        start: list[ast.stmt] = [assign(n, ast.Constant(None)) for n in fresh]
        body = self.block(tree.body, Scope("__m"))
        end: list[ast.stmt] = [ast.Return(load_name("__result"))]
        args = [ast.arg(a) for a in ("__x", "__m", *self.program.params)]
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
            self.masks[statement.lineno] = scope.mask
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
        gone = ["__gone"] if any(isinstance(n, ast.Return) for n in ast.walk(statement)) else []
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
        self.note(node, scope.waiting)
        if len(node.targets) == 1 and not self.late(node):
            how = "redeclared" if declares(node.value) else "merge"
            return self.store(node.targets[0], value, scope, how)
        kept = self.fresh("v")
        out: list[ast.stmt] = [assign(kept, value)]
        for target in node.targets:
            out += self.store(target, load_name(kept), scope)
        return out

    def late(self, node: ast.Assign) -> bool:
        """Whether a device function called by the value may change where the target points to."""
        return isinstance(node.targets[0], ast.Subscript) and self.calls(node.value)

    def do_AugAssign(self, node: ast.AugAssign, scope: Scope) -> list[ast.stmt]:
        target, mask = node.target, scope.mask
        if isinstance(target, ast.Name):
            old: ast.expr = load_name(target.id)
            return self.store(
                target, self.operation(node, node.op, old, self.expression(node.value, mask), mask), scope
            )
        assert isinstance(target, ast.Subscript)
        array, index = self.fresh("a"), self.fresh("i")
        place = [load_name("__x"), load_name(mask), load_name(array), load_name(index)]
        new = self.operation(node, node.op, call("load", *place), self.expression(node.value, mask), mask)
        return [
            assign(array, self.expression(target.value, mask)),
            assign(index, self.expression(target.slice, mask)),
            ast.Expr(call("store", *place, new)),
        ]

    def store(self, target: ast.expr, value: ast.expr, scope: Scope, how: str = "merge") -> list[ast.stmt]:
        """An assignment; a name keeps its old value in lanes outside only where one of them may read it."""
        mask = scope.mask
        if isinstance(target, ast.Name):
            return [assign(target.id, self.kept(target.id, value, mask, how) if target.id in scope.waiting else value)]
        if isinstance(target, ast.Tuple):
            names = [self.fresh("t") for _ in target.elts]
            unpack = ast.Assign([ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())], value)
            return [unpack] + [s for t, n in zip(target.elts, names) for s in self.store(t, load_name(n), scope)]
        assert isinstance(target, ast.Subscript)
        row = self.row(target)
        if row is not None:
            return [ast.Expr(call("put", load_name(mask), row, value))]
        array, index = self.expression(target.value, mask), self.expression(target.slice, mask)
        return [ast.Expr(call("store", load_name("__x"), load_name(mask), array, index, value))]

    def kept(self, name: str, value: ast.expr, mask: str, how: str = "merge") -> ast.expr:
        """The variable's value, where lanes outside the mask keep the old one."""
        return call(how, load_name(mask), value, load_name(name), load_name("__m"), load_name("__gone"))

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
        if node.target.id in scope.after | scope.waiting:
            raise self.error(node, f"{node.target.id} is read behind its loop: copy it to a variable of its own there")
        loop, turn = self.enter(), self.fresh("turn")
        bounds = [self.expression(a, scope.mask) for a in node.iter.args]
        self.count_up(node)
        pair = ast.Tuple([ast.Name(node.target.id, ast.Store()), ast.Name(turn, ast.Store())], ast.Store())
        body = self.turn(node, loop, turn, scope)
        steps = locate(method("steps", load_name(scope.mask), *bounds), node.iter)
        self.loops.pop()
        self.ints.pop(node.target.id, None)
        return [assign(loop.broke, ast.Constant(None)), ast.For(pair, steps, body, [])]

    def count_up(self, node: ast.For) -> None:
        """Note a loop's variable that in its body is sure to be one int."""
        assert isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Name)
        name, args = node.target.id, node.iter.args
        self.ints.pop(name, None)
        written = [
            n for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
        if all(self.sure(a) is not None for a in args) and all(n.id != name for n in written):
            start_and_step = [*args[:-1][:1], *args[2:]]
            self.ints[name] = all(map(self.natural, start_and_step))

    def do_While(self, node: ast.While, scope: Scope) -> list[ast.stmt]:
        """A lane that has left does not come back: what its condition reads may be gone by then."""
        loop, turn, inside = self.enter(), self.fresh("turn"), self.fresh("inside")
        left = assign(inside, call("without", load_name(inside), load_name(loop.broke), load_name("__gone")))
        check = assign(inside, call("both", load_name(inside), self.expression(node.test, inside)))
        leave = ast.If(ast.Compare(load_name(inside), [ast.Is()], [ast.Constant(None)]), [ast.Break()], [])
        body = [assign(turn, load_name(inside)), *self.turn(node, loop, turn, scope)]
        self.loops.pop()
        return [
            assign(loop.broke, ast.Constant(None)),
            assign(inside, load_name(scope.mask)),
            ast.While(ast.Constant(True), [left, *some_lane(inside, [check]), leave, *body], []),
        ]

    def enter(self) -> Loop:
        self.names += 1
        self.loops.append(Loop(self.names))
        return self.loops[-1]

    def turn(self, node: ast.For | ast.While, loop: Loop, turn: str, scope: Scope) -> list[ast.stmt]:
        """One turn of a loop: lanes that broke out or returned in an earlier turn do not take part; they wait behind it."""
        inside = list(ast.walk(node))
        gone = [loop.broke] if any(isinstance(n, ast.Break) for n in inside) else []
        gone += ["__gone"] if any(isinstance(n, ast.Return) for n in inside) else []
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
        out: list[ast.stmt] = [assign("__gone", call("union", load_name("__gone"), load_name(scope.mask)))]
        if node.value is not None:
            value = self.expression(node.value, scope.mask)
            readers = [load_name("__gone"), ast.Constant(None)]
            out.insert(
                0, assign("__result", call("merge", load_name(scope.mask), value, load_name("__result"), *readers))
            )
        return out


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


def translate(
    program: Program, callee: Callable, support: dict[str, Any], ranks: tuple[int, ...] | None = None
) -> Callable:
    """The lock-step function of a Program. ``callee`` gives that of a device function (and of its arguments' ranks, where
    there are any), ``support`` the names that the code calls. ranks: see Translator."""
    translator = Translator(program, callee, ranks)
    module = ast.Module([translator.function()], [])
    casts = {f"cast_{name}": cast for name, cast in lanes.CASTS.items()}
    helpers = {**vars(lanes), **casts, **support}
    namespace = {helper(name): value for name, value in helpers.items() if callable(value)}
    namespace |= {**translator.namespace, "__lockstep__": program, "__masks__": translator.masks}
    made: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(module), program.filename, "exec"), namespace, made)
    return made[program.tree.name]
