"""Which variables a thread may still read: so that a masked assignment keeps old values only for lanes that need them.

Under a mask, the lanes outside wait somewhere: at a branch's other side, behind the branch, behind the loop, at the loop's next
turn. ``name = E`` must spare their value only where ``name`` is live at one of these places; else every lane takes E, which
costs no merge and leaves a value that is the same for all lanes a scalar.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

Names = frozenset[str]
NONE: Names = frozenset()


@dataclass(frozen=True)
class Exits:
    """What is live where jumps go: behind the innermost loop, at its next turn."""

    behind: Names = NONE
    again: Names = NONE


def loaded(node: ast.AST | None) -> Names:
    """The names an expression reads, or a statement's target that is read before it is written."""
    if node is None:
        return NONE
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def assigned(target: ast.expr) -> Names:
    """The names that an assignment writes whole."""
    if isinstance(target, ast.Name):
        return frozenset([target.id])
    if isinstance(target, ast.Tuple):
        return frozenset().union(*map(assigned, target.elts))
    return NONE


def live_before(body: list[ast.stmt], after: Names, exits: Exits) -> Names:
    """The names live where ``body`` starts, given those live where it ends."""
    for statement in reversed(body):
        after = before_statement(statement, after, exits)
    return after


def before_statement(node: ast.stmt, after: Names, exits: Exits) -> Names:
    """The names live just before a statement."""
    if isinstance(node, ast.Assign):
        written = frozenset().union(*map(assigned, node.targets))
        return (after - written) | loaded(node.value) | frozenset().union(*map(loaded, node.targets))
    if isinstance(node, ast.AugAssign):
        own = assigned(node.target)
        return after | own | loaded(node.target) | loaded(node.value)
    if isinstance(node, ast.If):
        sides = live_before(node.body, after, exits) | live_before(node.orelse, after, exits)
        return sides | loaded(node.test)
    if isinstance(node, (ast.For, ast.While)):
        return loop_head(node, after) | (loaded(node.iter) if isinstance(node, ast.For) else NONE)
    if isinstance(node, ast.Return):
        return loaded(node.value)
    if isinstance(node, ast.Break):
        return exits.behind
    if isinstance(node, ast.Continue):
        return exits.again
    return after | loaded(node)


def loop_head(node: ast.For | ast.While, after: Names) -> Names:
    """The names live where a turn of the loop starts: until one more turn adds none."""
    written = assigned(node.target) if isinstance(node, ast.For) else NONE
    read = loaded(node.test) if isinstance(node, ast.While) else NONE
    head, before = after | read, None
    while head != before:
        before = head
        head = head | read | (live_before(node.body, head, Exits(after, head)) - written)
    return head


def jumps_back(node: ast.For | ast.While) -> bool:
    """Whether a lane may wait at the loop's next turn."""
    return any(isinstance(n, ast.Continue) for n in ast.walk(node))


def names_read(tree: ast.AST, line: int) -> Names:
    """The names that the smallest statement on a line reads, its blocks left out."""
    there = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    if not there:
        return NONE
    smallest = min(there, key=lambda n: (n.end_lineno or n.lineno) - n.lineno)
    parts = [loaded(n) for n in ast.iter_child_nodes(smallest) if not isinstance(n, ast.stmt)]
    read = smallest.target if isinstance(smallest, ast.AugAssign) else None
    return NONE.union(*parts, assigned(read) if read is not None else NONE)
