"""Random kernels of the dialect, and what they compute by a reading of their source that shares nothing with the machine.

``random_program(seed)`` writes a program, valid by construction: indices are reduced into their range, loops end,
divisors are positive, and a name is read only where it has been assigned. ``reference`` runs it thread by thread as ordinary
Python, each thread a generator that stops where threads meet, on numbers that know their type. ``smaller`` lists what a
failing program may be reduced to.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

HEADER = """from kernels_numba.machine import (
    bits_float, bf16_low, cuda, device, float32, float_bits, fma, fmax, fmin, int32, int64, kernel, lanewise, pack_bf16,
    round_int, shfl, shfl_xor, sqrt, uint32, uint64,
)
"""
PARAMETERS = "out_i, out_n, out_w, out_f, ints, longs, words, floats, n, m, scale"
"""Of every kernel; out_*: [lanes, 4], a row a thread; ints, longs, words: [16]; floats: [4, 4]; n, m, scale: numbers."""

BOUND = {"K": 3, "FLAG": True, "MODE": "left"}
"""The kernel's compile-time arguments."""


# --- Programs: trees of text ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Expr:
    """An expression. kind: its type, a numba name. parts: its text, in which other expressions stand."""

    kind: str
    parts: list[Any]

    def __str__(self) -> str:
        return "".join(map(str, self.parts))


@dataclass(eq=False)
class Stmt:
    """A statement. parts: its text, or its head's; body, orelse: what stands under a compound one."""

    parts: list[Any]
    body: list[Stmt] | None = None
    orelse: list[Stmt] = field(default_factory=list)

    def lines(self, indent: str) -> list[str]:
        head = [indent + "".join(map(str, self.parts))]
        if self.body is None:
            return head
        tail = [f"{indent}else:", *suite_lines(self.orelse, indent)] if self.orelse else []
        return [*head, *suite_lines(self.body, indent), *tail]


def suite_lines(body: list[Stmt], indent: str) -> list[str]:
    indent += "    "
    return [line for s in body for line in s.lines(indent)] or [indent + "pass"]


@dataclass(eq=False)
class Function:
    """A device function. params: (name, kind) each, an array's kind as "int64[4]". results: a kind each."""

    name: str
    decorator: str
    params: list[tuple[str, str]]
    option: str
    results: tuple[str, ...]
    body: list[Stmt] = field(default_factory=list)

    def __str__(self) -> str:
        option = f", *, {self.option}" if self.option else ""
        head = f"@{self.decorator}\ndef {self.name}({', '.join(n for n, _ in self.params)}{option}):"
        return "\n".join([head, *suite_lines(self.body, "")])

    @property
    def writes(self) -> bool:
        return any("[" in kind for _, kind in self.params)


@dataclass(eq=False)
class Program:
    """functions: callees first. body: the kernel's. blocks, threads: the launch."""

    seed: int
    blocks: int
    threads: int
    functions: list[Function] = field(default_factory=list)
    body: list[Stmt] = field(default_factory=list)

    def __str__(self) -> str:
        kernel = "\n".join([f"@kernel\ndef program({PARAMETERS}, *, {', '.join(BOUND)}):", *suite_lines(self.body, "")])
        used: list[str] = [kernel]
        for f in reversed(self.functions):
            if any(f"{f.name}(" in text for text in used):
                used.insert(0, str(f))
        return "\n\n\n".join([HEADER.rstrip(), *used]) + "\n"

    def suites(self) -> Iterator[list[Stmt]]:
        """Every list of statements, outer ones first."""
        waiting = [self.body, *(f.body for f in self.functions)]
        while waiting:
            suite = waiting.pop(0)
            yield suite
            waiting += [inner for s in suite if s.body is not None for inner in (s.body, s.orelse)]


# --- The grammar ---------------------------------------------------------------------------------------------------------

SIGNED, NARROW, UNSIGNED = ("int32", "int64"), ("int32", "int64", "uint32"), ("uint32", "uint64")
GROUPS = {"signed": SIGNED, "narrow": NARROW, "unsigned": UNSIGNED, "any": (*NARROW, "uint64")}
"""Words of templates that stand for one of several kinds."""

ARITHMETIC = ("+", "-", "*", "&", "|", "^")
FORMS: dict[str, list[str]] = {
    "int64": [
        *(f"({{signed}} {op} {{narrow}})" for op in ARITHMETIC),
        *(f"({{narrow}} {op} {{signed}})" for op in ARITHMETIC),
        "({signed} // {divisor})", "({signed} % {divisor})", "({signed} % {divisor})", "({uint32} % {divisor})",
        "({signed} // -{divisor})", "({signed} % -{divisor})",
        "({signed} << {shift})", "({signed} >> {shift})", "({signed} >> {shift})", "(-{signed})", "(~{signed})",
        "int64({any})", "int64({bool})", "min({int64}, {narrow})", "max({int32}, {int64})", "abs({int64})",
        "min({int32}, {uint32})", "({int64} if {bool} else {int64})", "int64({int32} if {bool} else {int64})",
    ],
    "int32": [
        "int32({any})", "int32({any})", "int32({bool})", "min({int32}, {int32})", "max({int32}, {int32})", "abs({int32})",
        "({int32} if {bool} else {int32})", "round_int(fmin(fmax({float32}, float32(-999)), float32(999)))",
        "int32(fmin(fmax({float32}, float32(-99)), float32(99)))",
    ],
    "uint64": [
        *(f"({{unsigned}} {op} {{unsigned}})" for op in ARITHMETIC), "uint64({narrow})", "({unsigned} >> {shift})",
        "({unsigned} << {shift})", "({unsigned} // ({unsigned} | uint32(1)))", "({unsigned} % ({unsigned} | uint32(1)))",
        "({uint64} if {bool} else {uint64})", *["(-{uint32})", "(~{uint32})"] * 3,
    ],
    "uint32": [
        "uint32({any})", "uint32({any})", "uint32({uint32} * {uint32})", "float_bits({float32})", "min({uint32}, {uint32})",
        "pack_bf16({float32}, {float32})", "({uint32} if {bool} else {uint32})", "uint32({uint32} - {uint32})",
    ],
    "float32": [
        *(f"({{float32}} {op} {{float32}})" for op in "+-*/"), "fma({float32}, {float32}, {float32})", "(-{float32})",
        "fmax({float32}, {float32})", "fmin({float32}, {float32})", "sqrt(fmax({float32}, float32(0)))",
        "float32({narrow})", "float32({int64})", "({float32} if {bool} else {float32})",
        "bf16_low(uint32({uint32} & uint32(0x3FFF)))", "bits_float(uint32({uint32} & uint32(0x3FFFFFFF)))",
    ],
    "bool": [
        *(f"({{narrow}} {op} {{narrow}})" for op in ("<", "<=", ">", ">=", "==", "!=")),
        *(f"({{float32}} {op} {{float32}})" for op in ("<", ">=", "==")), "({unsigned} < {unsigned})",
        "({narrow} < {narrow} <= {narrow})", "({signed} >= {narrow} != {narrow} > {signed})", "(not {bool})",
        "({bool} and {bool})", "({bool} or {bool})", "({bool} and {bool} or {bool})", "({bool} & {bool})",
        "({bool} ^ {bool})", "({bool} if {bool} else {bool})", "({signed} % 2 == 0)", "({signed} % 3 != {signed} % 3)",
    ],
}  # fmt: skip
LITERALS = {
    "int64": ["0", "1", "2", "3", "-1", "-5", "7", "K", "(K * 2 + 1)", "(4 if FLAG else 5)", "65535", "2147483647",
              "-2147483648", "4294967297"],
    "int32": ["int32(0)", "int32(1)", "int32(-3)", "int32(11)", "int32(2147483647)", "int32(-2147483648)", "m"],
    "uint32": ["uint32(1)", "uint32(6)", "uint32(0)", "uint32(4294967295)", "uint32(2654435769)"],
    "uint64": ["uint64(3)", "uint64(4294967297)"],
    "float32": ["float32(0)", "float32(1)", "float32(-2)", "float32(0.1)", "float32(3.75)", "float32(K)"],
    "bool": ["(MODE == 'left')", "True", "(K > 5)"],
    "divisor": ["2", "3", "5", "7", "(K + 1)", "1000003"],
    "shift": ["1", "2", "K", "7", "13"],
}  # fmt: skip
OF_THE_THREAD = {"int32": ["t", "t"], "int64": ["i", "i"], "bool": ["(t % 3 == 1)", "(t & 4 == 0)"]}
KINDS = ("int64", "int32", "uint32", "float32", "bool", "uint64")
OUTPUTS = {"out_i": "int64", "out_n": "int32", "out_w": "uint32", "out_f": "float32"}
INPUTS = {"ints": "int32", "longs": "int64", "words": "uint32", "floats": "float32"}
FIRST_NAMES = {"u1": "int64", "u2": "int32", "x": "int64", "y": "float32", "z": "uint32", "b": "bool"}
ARGUMENTS = {"n": "int64", "m": "int32", "scale": "float32"}


@dataclass
class Scope:
    """What may be said at a place. names: those assigned, with their kinds; fixed: those that only their loop changes;
    arrays: local ones, "int64[4]" or "int64[3,4]". even: all threads of a block come by together. loop: "", "even" or
    "uneven". results: what a return gives, None where there is none. kernel: in the kernel itself. depth: of nesting."""

    names: dict[str, str]
    arrays: dict[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    even: bool = False
    loop: str = ""
    results: tuple[str, ...] | None = None
    kernel: bool = False
    depth: int = 0
    loops: int = 0

    def inner(self, **changes: Any) -> Scope:
        """The scope of a suite under a statement: what it assigns anew is not seen outside."""
        return replace(self, names=dict(self.names), arrays=dict(self.arrays), depth=self.depth + 1, **changes)


class Writer:
    """Writes one program. lanewise: with compiled functions. Names that start with u are the same in a whole block."""

    def __init__(self, seed: int, lanewise: bool):
        self.random = random.Random(seed)
        self.decorators = ("device", "lanewise") if lanewise else ("device",)
        self.numbers = 0
        self.functions: list[Function] = []
        self.shared: dict[str, str] = {}
        self.barred = False
        self.loop_names: list[str] = []

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def pick(self, options: Any) -> Any:
        return self.random.choice(list(options))

    def fresh(self, stem: str) -> str:
        self.numbers += 1
        return f"{stem}{self.numbers}"

    # --- Expressions ------------------------------------------------------------------------------------------------------

    def expr(self, kind: str, scope: Scope, depth: int = 2, even: bool = False) -> Expr:
        """An expression; even: of one value in a block."""
        kind = self.pick(GROUPS.get(kind, [kind]))
        if kind in ("divisor", "shift") or depth <= 0 or self.chance(0.25):
            return self.leaf(kind, scope, even)
        calls = [f for f in self.callable(scope) if f.results == (kind,) and not f.writes]
        if calls and not even and self.chance(0.2):
            return self.call(self.pick(calls), scope, depth - 1)
        if kind == "int64" and not even and self.chance(0.1):
            found = self.changed_operand(scope)
            if found is not None:
                return found
        return self.fill(kind, self.pick(FORMS[kind]), scope, depth - 1, even)

    def fill(self, kind: str, form: str, scope: Scope, depth: int, even: bool = False) -> Expr:
        """A template with an expression in each place."""
        parts = re.split(r"\{(\w+)\}", form)
        parts[1::2] = [self.expr(p, scope, depth, even) for p in parts[1::2]]  # type: ignore[misc]
        return Expr(kind, parts)

    def leaf(self, kind: str, scope: Scope, even: bool) -> Expr:
        literals = [x for x in LITERALS[kind] if scope.kernel or not re.search(r"\bK\b|\bm\b|[A-Z]{4}", x)]
        options: list[Any] = [self.pick(literals)] if literals else []
        if kind == "int64" and scope.kernel:
            options += ["longs[14]", "longs[15]"]
        if scope.kernel and not even:
            options += OF_THE_THREAD.get(kind, [])
        names = [x for x, k in scope.names.items() if k == kind and (not even or x.startswith("u") or x in ARGUMENTS)]
        options += [self.pick(names) for _ in range(3) if names]
        if scope.kernel:
            options += self.place(kind, even)
            options += [self.memory(kind, scope, even) for _ in range(2) if kind in INPUTS.values()]
        if not even:
            options += [lambda a=a: self.element(a, scope) for a, k in scope.arrays.items() if k.startswith(f"{kind}[")]
        if not options:
            options = [{"int64": "2", "int32": "int32(2)", "bool": "True"}.get(kind, f"{kind}(2)")]
        chosen = self.pick(options)
        return chosen() if callable(chosen) else Expr(kind, [chosen])

    def place(self, kind: str, even: bool) -> list[str]:
        """Where the thread is."""
        if kind == "int64":
            return ["longs.shape[0]"]
        return ["cuda.blockIdx.x", "cuda.gridDim.x"] + ([] if even else ["cuda.threadIdx.x"]) if kind == "int32" else []

    def memory(self, kind: str, scope: Scope, even: bool) -> Callable[[], Expr]:
        """A read of global memory: an input, or the thread's own row of an output."""

        def read() -> Expr:
            if not even and self.chance(0.3):
                array = self.pick(a for a, k in OUTPUTS.items() if k == kind)
                return Expr(kind, [f"{array}[i, ", *self.index(4, scope), "]"])
            array = self.pick(a for a, k in INPUTS.items() if k == kind)
            if array == "floats":
                return Expr(kind, [f"{array}[", *self.index(4, scope, even), ", ", *self.index(4, scope, even), "]"])
            return Expr(kind, [f"{array}[", *self.index(16, scope, even), "]"])

        return read

    def element(self, array: str, scope: Scope) -> Expr:
        kind, shape = scope.arrays[array].rstrip("]").split("[")
        parts: list[Any] = []
        for size in shape.split(","):
            loops = [x for x in scope.fixed if scope.names.get(x) == "int64" and x not in ("i", "n")]
            turn = loops and self.chance(0.4)
            at = [f"{self.pick(sorted(loops))} % {size}"] if turn else self.index(int(size), scope)
            parts += [", " if parts else f"{array}[", *at]
        return Expr(kind, [*parts, "]"])

    def index(self, size: int, scope: Scope, even: bool = False) -> list[Any]:
        """0 .. size - 1."""
        if self.chance(0.4):
            return [str(self.random.randrange(size))]
        return [self.expr(self.pick(NARROW), scope, 1, even), f" % {size}"]

    # --- Calls ------------------------------------------------------------------------------------------------------------

    def callable(self, scope: Scope) -> list[Function]:
        """The functions that may be called here: those that have all arrays they want."""
        kinds = set(scope.arrays.values()) | {k.replace("[3,", "[") for k in scope.arrays.values()}
        return [
            f for f in self.functions
            if f.body and all("[" not in k or k in kinds for _, k in f.params) and self.allowed(f, scope)
        ]  # fmt: skip

    def allowed(self, f: Function, scope: Scope) -> bool:
        """A compiled function calls compiled ones only."""
        return scope.kernel or not self.barred or f.decorator == "lanewise"

    def call(self, f: Function, scope: Scope, depth: int) -> Expr:
        parts: list[Any] = [f"{f.name}("]
        for number, (_, kind) in enumerate(f.params):
            parts += [", " if number else "", self.array(kind, scope) if "[" in kind else self.expr(kind, scope, depth)]
        if f.option:
            parts.append(f", {f.option}={self.pick(['K', '1', 'K - 2'] if scope.kernel else ['1', '2'])}")
        return Expr(f.results[0] if f.results else "none", [*parts, ")"])

    def array(self, kind: str, scope: Scope) -> str:
        """A local array of this kind, or a row of one."""
        whole = [a for a, k in scope.arrays.items() if k == kind]
        even = [f"{x} % 3" for x in scope.names if x.startswith("u") and scope.names[x] == "int64"]
        planes = [a for a, k in scope.arrays.items() if k.replace("[3,", "[") == kind != k]
        rows = [f"{a}[{row}]" for a in planes for row in ("0", "1", "2", *even)]
        return self.pick(whole + rows)

    def changed_operand(self, scope: Scope) -> Expr | None:
        """An element, then a call that may write it."""
        writers = [f for f in self.callable(scope) if f.writes and f.results == ("int64",)]
        arrays = [a for a, k in scope.arrays.items() if k.startswith("int64[")]
        if not writers or not arrays:
            return None
        first, then = self.element(self.pick(arrays), scope), self.call(self.pick(writers), scope, 1)
        return Expr("int64", ["(", first, " + ", then, ")"])

    # --- Statements -------------------------------------------------------------------------------------------------------

    def suite(self, scope: Scope, length: int) -> list[Stmt]:
        """Statements; those of an inner suite leave a trace in a name that outlives it."""
        out: list[Stmt] = []
        before = set(scope.names)
        for _ in range(length):
            out += self.statement(scope)
        return out + (self.trace(scope, [x for x in scope.names if x not in before]) if scope.depth else [])

    def trace(self, scope: Scope, names: list[str]) -> list[Stmt]:
        """One of the names, or an array's element, mixed into an int64 of the thread's own."""
        into = [x for x, k in scope.names.items() if k == "int64" and x in self.targets(scope) and x[0] in "xpv"]
        arrays = [a for a, k in scope.arrays.items() if not k.startswith("float32")]
        if not into or not (names or arrays):
            return []
        shown: Any = self.pick([*names, *(lambda a=a: self.element(a, scope) for a in arrays)])
        return [mixed(into[0], shown() if callable(shown) else Expr(scope.names[shown], [shown]))]

    def statement(self, scope: Scope) -> list[Stmt]:
        simple = ["assign"] * 5 + ["augment"] * 3 + ["unpack", "twice", "branch_value"]
        simple += ["element_store"] * 4 * bool(scope.arrays) + ["array"] * (len(scope.arrays) < 3)
        simple += ["output"] * 2 * scope.kernel + ["called"] * 3 * bool(self.callable(scope))
        simple += ["jump"] * 6 * bool(scope.loop) + ["leave"] * (scope.results is not None)
        simple += ["exchange", "shuffle"] * 2 * (scope.kernel and scope.even and bool(self.shared))
        nested = ["branch"] * 5 + ["guarded"] * 2
        nested += (["loop"] * 4 + ["turns"] * 3 + ["retyped", "carried", "carried"]) * (scope.loops < 2)
        return getattr(self, f"do_{self.pick(simple + nested if scope.depth < 3 else simple)}")(scope)

    def targets(self, scope: Scope) -> list[str]:
        """Names that may be assigned here."""
        return [x for x in scope.names if x not in scope.fixed and (scope.even or not x.startswith("u"))]

    def value(self, name: str, kind: str, scope: Scope) -> Expr:
        """What a name may be given; loops must not let ints grow for ever."""
        found = self.expr(kind, scope, 2, even=name.startswith("u"))
        if kind == "int64" and scope.loops and self.chance(0.6):
            return Expr(kind, ["(", found, " % 1000003)"])
        return found

    def do_assign(self, scope: Scope) -> list[Stmt]:
        if self.chance(0.2) or not self.targets(scope):
            kind = self.pick(KINDS)
            name = self.fresh("v")
        else:
            name = self.pick(self.targets(scope))
            kind = scope.names[name]
        made = Stmt([f"{name} = ", self.value(name, kind, scope)])
        scope.names[name] = kind
        return [made]

    def do_twice(self, scope: Scope) -> list[Stmt]:
        """One value for two names."""
        kind, first, second = self.pick(KINDS), self.fresh("v"), self.fresh("v")
        made = Stmt([f"{first} = {second} = ", self.value(first, kind, scope)])
        scope.names |= {first: kind, second: kind}
        return [made]

    def do_augment(self, scope: Scope) -> list[Stmt]:
        """A name keeps its kind: only int64 and float32 have operators that do."""
        names = [x for x in self.targets(scope) if scope.names[x] in ("int64", "float32") and not x.startswith("u")]
        if not names:
            return self.do_assign(scope)
        name = self.pick(names)
        if scope.names[name] == "float32":
            return [Stmt([f"{name} {self.pick('+-*')}= ", self.expr("float32", scope)])]
        out = [Stmt([f"{name} {self.pick(ARITHMETIC)}= ", self.expr("narrow", scope)])]
        return out + [Stmt([f"{name} %= 1000003"])] * (scope.loops > 0 and self.chance(0.7))

    def do_unpack(self, scope: Scope) -> list[Stmt]:
        """Two names at once, perhaps exchanged."""
        names = self.targets(scope)
        a = self.pick(names) if names else self.fresh("v")
        same = [x for x in names if x != a and scope.names[x] == scope.names[a] and x[0] == a[0]]
        if same and self.chance(0.5):
            b = self.pick(same)
            return [Stmt([f"{a}, {b} = {b}, {a}"])]
        kind, b = scope.names.get(a, "int64"), self.fresh("v")
        made = Stmt([f"{a}, {b} = ", self.value(a, kind, scope), ", ", self.value(b, "int32", scope)])
        scope.names |= {a: kind, b: "int32"}
        return [made]

    def do_array(self, scope: Scope) -> list[Stmt]:
        """A local array, every element given a value."""
        kind, name, plane = self.pick(("int64", "int32", "uint32", "float32")), self.fresh("a"), self.chance(0.4)
        shape = "(3, 4)" if plane else self.pick(("4", "K + 1") if scope.kernel else ("4",))
        out = [Stmt([f"{name} = cuda.local.array({shape}, {kind})"])]
        row, column = self.fresh("k"), self.fresh("k")
        self.loop_names += [row, column]
        inner = scope.inner()
        inner.names[column] = "int64"
        fill = Stmt([f"{name}[{row}, {column}] = " if plane else f"{name}[{column}] = ", self.expr(kind, inner, 1)])
        loop = Stmt([f"for {column} in range(4):"], [fill])
        out.append(Stmt([f"for {row} in range(3):"], [loop]) if plane else loop)
        scope.arrays[name] = f"{kind}[3,4]" if plane else f"{kind}[4]"
        return out

    def do_element_store(self, scope: Scope) -> list[Stmt]:
        array = self.pick(scope.arrays)
        target = self.element(array, scope)
        if target.kind in ("int64", "float32") and self.chance(0.4):
            return [Stmt([target, f" {self.pick('+-*')}= ", self.expr(target.kind, scope, 1)])]
        kind = self.stored(target.kind)
        if kind != target.kind and self.chance(0.7):
            return [Stmt([target, " = 4294967297"])]
        return [Stmt([target, " = ", self.expr(kind, scope)])]

    def stored(self, kind: str) -> str:
        """What may be stored in memory of a kind: an int wraps."""
        return self.pick(NARROW) if kind != "float32" and self.chance(0.2) else kind

    def do_output(self, scope: Scope) -> list[Stmt]:
        array = self.pick(OUTPUTS)
        return [Stmt([f"{array}[i, ", *self.index(4, scope), "] = ", self.expr(self.stored(OUTPUTS[array]), scope)])]

    def do_called(self, scope: Scope) -> list[Stmt]:
        f = self.pick(self.callable(scope))
        made = self.call(f, scope, 2)
        names = [self.fresh("v") for _ in f.results]
        scope.names |= dict(zip(names, f.results))
        return [Stmt([f"{', '.join(names)} = " if names else "", made])]

    def do_branch_value(self, scope: Scope) -> list[Stmt]:
        """A new name that both sides of a branch assign."""
        name, kind = self.fresh("v"), self.pick(KINDS)
        sides = []
        for _ in range(2):
            inner = scope.inner(even=False)
            sides.append([*self.suite(inner, 1), Stmt([f"{name} = ", self.value(name, kind, inner)])])
        made = Stmt(["if ", self.expr("bool", scope), ":"], *sides)
        scope.names[name] = kind
        return [made]

    def do_branch(self, scope: Scope) -> list[Stmt]:
        even = scope.even and self.chance(0.5)
        made = Stmt(["if ", self.expr("bool", scope, 2, even), ":"], [])
        made.body = self.suite(scope.inner(even=even), self.random.randint(1, 3))
        if self.chance(0.5):
            made.orelse = self.suite(scope.inner(even=even), self.random.randint(1, 3))
        return [made]

    def do_guarded(self, scope: Scope) -> list[Stmt]:
        """A name that only some threads assign, and the same ones read."""
        guard, name, kind = self.fresh("g"), self.fresh("v"), self.pick(KINDS)
        first = Stmt([f"{guard} = ", self.expr("bool", scope)])
        there = scope.inner(even=False)
        assign = Stmt([f"if {guard}:"], [Stmt([f"{name} = ", self.value(name, kind, there)])])
        between = self.suite(scope, self.random.randint(0, 2))
        inside = scope.inner(even=False)
        inside.names[name] = kind
        use = Stmt([f"if {guard}:"], self.suite(inside, self.random.randint(1, 2)))
        shown = [Stmt([f"{a}[i, 1] = {name}"]) for a, k in OUTPUTS.items() if k == kind and scope.kernel]
        use.body = shown + (use.body or [])
        return [first, assign, *between, use]

    def do_loop(self, scope: Scope) -> list[Stmt]:
        """for over range: bounds that are the same for a block, or not; upward or down."""
        even = scope.even and self.chance(0.7)
        name = self.loop_name(scope)
        made = Stmt(["for ", name, " in range(", *self.bounds(scope, even), "):"], [])
        loop = "even" if even else "uneven"
        inner = scope.inner(even=even, loop=loop, fixed=scope.fixed | {name}, loops=scope.loops + 1)
        inner.names[name] = "int64"
        first = self.do_element_store(inner) if scope.arrays else []
        made.body = first + self.suite(inner, self.random.randint(1, 3))
        again = scope.names.get(name)
        return [made] + ([Stmt([f"{name} = ", self.leaf(again, scope, even=True)])] if again else [])

    def loop_name(self, scope: Scope) -> str:
        """A name of its own, or one that stood for something else."""
        old = [x for x in self.loop_names if x not in scope.fixed]
        old += [x for x in self.targets(scope) if x.startswith("v") and not scope.depth]
        if old and self.chance(0.6):
            return self.pick(old)
        self.loop_names.append(self.fresh("j"))
        return self.loop_names[-1]

    def bounds(self, scope: Scope, even: bool) -> list[Any]:
        """At most five turns."""

        def some(most: int) -> list[Any]:
            if self.chance(0.6):
                return [self.expr("signed", scope, 1, even), f" % {most}"]
            return [str(self.random.randrange(most))]

        form = self.random.randrange(4)
        if form == 0:
            return some(5)
        if form == 1:
            return [*some(3), ", ", *some(6)]
        if form == 2:
            return [*some(3), ", ", *some(9), f", {self.pick((1, 2, 3))}"]
        return [*some(6), f", {self.pick((-1, 0, 1))}, {self.pick((-1, -2, -3))}"]

    def do_turns(self, scope: Scope) -> list[Stmt]:
        """while: a counter that the body changes first, so that continue cannot skip it."""
        name = self.fresh("w")
        inner = scope.inner(even=False, loop="uneven", fixed=scope.fixed | {name}, loops=scope.loops + 1)
        inner.names[name] = "int64"
        start = Stmt([f"{name} = ", self.expr("signed", scope, 1), " % 5"])
        test = self.expr("bool", inner, 1)
        form = self.random.randrange(4)
        head: list[Any] = [[f"{name} > 0"], [f"{name} > 0 and ", test], [test, f" and {name} > 0"], ["True"]][form]
        body = [Stmt([f"{name} -= 1"])]
        body += [Stmt([f"if {name} < 0:"], [Stmt(["break"])])] * (form == 3)
        scope.names[name] = "int64"
        made = Stmt(["while ", *head, ":"], body + self.suite(inner, self.random.randint(1, 3)))
        scope.names.pop(name)
        return [start, made]

    def do_jump(self, scope: Scope) -> list[Stmt]:
        """break or continue, in a loop whose threads need not stay together."""
        if scope.loop == "even" and not scope.even:
            return self.do_assign(scope)
        test = self.expr("bool", scope, 2, even=scope.loop == "even")
        inner = scope.inner(even=False)
        before = self.suite(inner, self.random.randint(0, 1)) if scope.depth < 3 else []
        return [Stmt(["if ", test, ":"], [*before, Stmt([self.pick(("break", "continue"))])])]

    def do_leave(self, scope: Scope) -> list[Stmt]:
        inner = scope.inner()
        return [Stmt(["if ", self.expr("bool", scope), ":"], [self.returned(inner)])]

    def returned(self, scope: Scope) -> Stmt:
        values = [self.expr(kind, scope) for kind in scope.results or ()]
        parts: list[Any] = ["return" if not values else "return "]
        for number, value in enumerate(values):
            parts += [", " if number else "", value]
        return Stmt(parts)

    def do_retyped(self, scope: Scope) -> list[Stmt]:
        """A name that means something else behind a loop."""
        if scope.depth:
            return self.do_loop(scope)
        name, loop = self.fresh("r"), self.fresh("j")
        kinds = self.random.sample(("int64", "float32", "bool", "uint32"), 2)
        start = Stmt([f"{name} = ", self.expr(kinds[0], scope)])
        scope.names[name] = kinds[0]
        inner = scope.inner(even=False, loop="uneven", fixed=scope.fixed | {loop}, loops=scope.loops + 1)
        inner.names[loop] = "int64"
        head = ["for ", loop, " in range(", *self.bounds(scope, False), "):"]
        body = [Stmt([f"{name} = ", self.value(name, kinds[0], inner)]), *self.suite(inner, 2)]
        again = Stmt([f"{name} = ", self.expr(kinds[1], scope)])
        scope.names[name] = kinds[1]
        return [start, Stmt(head, body), again]

    def do_carried(self, scope: Scope) -> list[Stmt]:
        """A value that one turn leaves to the next, that some threads do not renew, and that nobody reads behind the loop."""
        kind, name, loop = self.pick(("int64", "uint32", "float32")), self.fresh("c"), self.fresh("j")
        start = Stmt([f"{name} = ", self.expr(kind, scope, 1)])
        inner = scope.inner(even=False, loop="uneven", fixed=scope.fixed | {loop}, loops=scope.loops + 1)
        inner.names |= {loop: "int64", name: kind}
        into = [x for x in self.targets(scope) if scope.names[x] == "int64"][:1]
        body = [mixed(into[0], Expr(kind, [name]))] if into else []
        skip = Stmt(["if ", self.expr("bool", inner), ":"], [Stmt([self.pick(("continue", "continue", "break"))])])
        body += [skip, Stmt([f"{name} = ", self.value(name, kind, inner)])]
        return [start, Stmt(["for ", loop, " in range(", *self.bounds(scope, False), "):"], body)]

    def do_exchange(self, scope: Scope) -> list[Stmt]:
        """Through shared memory, a barrier before and behind the reads."""
        array, kind = self.pick(self.shared.items())
        own, other, name = "t // 8, t % 8" if array == "plane" else "t", self.expr("signed", scope, 1), self.fresh("v")
        at: list[Any] = ["t // 8, (", other, ") % 8"] if array == "plane" else ["(", other, ") % 32"]
        out = [
            Stmt([f"{array}[{own}] = ", self.expr(kind, scope)]),
            Stmt(["cuda.syncthreads()"]),
            Stmt([f"{name} = {array}[", *at, "]"]),
            Stmt(["cuda.syncthreads()"]),
        ]
        scope.names[name] = kind
        return out

    def do_shuffle(self, scope: Scope) -> list[Stmt]:
        kind, name = self.pick(("int32", "uint32", "float32")), self.fresh("v")
        value = self.expr(kind, scope)
        if self.chance(0.5):
            made = Stmt([f"{name} = shfl_xor(", value, f", {self.pick((1, 2, 8, 16, 31))})"])
        else:
            made = Stmt([f"{name} = shfl(", value, ", int32(", self.expr("signed", scope, 1), " % 32))"])
        scope.names[name] = kind
        return [made]

    # --- Functions and the kernel -----------------------------------------------------------------------------------------

    def writer(self) -> Function:
        """A function that changes an array and gives an int64."""
        while True:
            made = self.function("device")
            if made.results == ("int64",) and any(kind == "int64[4]" for _, kind in made.params):
                return made

    def function(self, decorator: str) -> Function:
        kinds = [self.pick(KINDS) for _ in range(self.random.randint(1, 3))]
        if self.chance(0.5):
            kinds.append(self.pick(("int64[4]", "int64[4]", "float32[4]", "int32[3,4]", "int64[3,4]")))
        params = [(f"p{number}", kind) for number, kind in enumerate(kinds)]
        writes = any("[" in kind for kind in kinds)
        results = tuple(self.pick(KINDS) for _ in range(self.pick((1, 1, 1, 2, 3, 1 - writes))))
        made = Function(self.fresh("f"), decorator, params, self.pick(("", "", "R")), results)
        scope = Scope({n: k for n, k in params if "[" not in k}, {n: k for n, k in params if "[" in k}, results=results)
        self.barred = decorator == "lanewise"
        body = []
        if made.option:
            body = [Stmt(["q = R + 1"])]
            scope.names["q"] = "int64"
        body += self.suite(scope, self.random.randint(1, 3))
        if made.writes:
            array = next(n for n, k in params if "[" in k)
            target = self.element(array, scope)
            body.append(Stmt([target, " = ", self.expr(target.kind, scope, 1)]))
        made.body = [*body, self.returned(scope)]
        if decorator == "lanewise" and "cuda." in str(made):
            return self.function(decorator)
        return made

    def program(self, seed: int) -> Program:
        made = Program(seed, self.random.randint(1, 3), self.pick((32, 32, 64)))
        for _ in range(self.random.randint(0, 2)):
            self.functions.append(self.function(self.pick(self.decorators)))
        self.functions.append(self.writer())
        self.barred, made.functions = False, self.functions
        meets = self.chance(0.5)
        scope = Scope(dict(ARGUMENTS), fixed=frozenset([*ARGUMENTS, "t", "i"]), even=True, kernel=True)
        start = [Stmt(["t = cuda.threadIdx.x"]), Stmt(["i = cuda.blockIdx.x * cuda.blockDim.x + t"])]
        scope.names |= {"t": "int32", "i": "int64"}
        if meets:
            self.shared = {"line": self.pick(("int32", "uint32", "float32")), "plane": "int32"}
            start += [Stmt([f"line = cuda.shared.array({made.threads}, {self.shared['line']})"]),
                      Stmt([f"plane = cuda.shared.array(({made.threads // 8}, 8), int32)"])]  # fmt: skip
        for name, kind in FIRST_NAMES.items():
            start.append(Stmt([f"{name} = ", self.expr(kind, scope, 2, even=name[0] == "u")]))
            scope.names[name] = kind
        start += [Stmt(["a = cuda.local.array(4, int64)"]), Stmt(["for k in range(4):"], [Stmt(["a[k] = i + k"])])]
        scope.arrays["a"] = "int64[4]"
        together = self.suite(scope, self.random.randint(1, 3)) if meets else []
        scope.even, scope.results = False, ()
        apart = self.suite(scope, self.random.randint(2, 5))
        made.body = [*start, *together, *apart, *self.last_outputs(scope)]
        return made

    def last_outputs(self, scope: Scope) -> list[Stmt]:
        """A digest of most that the thread knows (the rest is dead before), and every kind's newest name."""
        out = [Stmt(["digest = 1"])]
        out += [mixed("digest", Expr(kind, [name])) for name, kind in scope.names.items()
                if name not in ARGUMENTS and self.chance(0.6)]  # fmt: skip
        for array, kind in scope.arrays.items():
            axes = kind.rstrip("]").split("[")[1].split(",")
            names = [self.fresh("k") for _ in axes]
            loop = [mixed("digest", Expr(kind.split("[")[0], [f"{array}[{', '.join(names)}]"]))]
            for name, size in zip(reversed(names), reversed(axes)):
                loop = [Stmt([f"for {name} in range({size}):"], loop)]
            out += loop
        for array, kind in OUTPUTS.items():
            names = [x for x, k in scope.names.items() if k == kind][-1:]
            out += [Stmt([f"{array}[i, 0] = {name}"]) for name in names]
        return [*out, Stmt(["out_i[i, 3] = digest"])]


def mixed(name: str, value: Expr) -> Stmt:
    """A value mixed into an int64 that stays small."""
    bits = ["float_bits(", value, ")"] if value.kind == "float32" else [value]
    return Stmt([f"{name} = ({name} * 31 + int64(", *bits, ")) % 1000003"])


def random_program(seed: int, lanewise: bool = False) -> Program:
    """The program of a seed; lanewise: with compiled functions."""
    return Writer(seed, lanewise).program(seed)


def arguments(program: Program) -> dict[str, Any]:
    """The launch's arguments by name: outputs that are not zero, inputs with the limits of their types among them."""
    numbers = np.random.default_rng(program.seed)
    lanes = program.blocks * program.threads
    out = {a: numbers.integers(1, 100, (lanes, 4)).astype(k) for a, k in OUTPUTS.items()}
    for array, kind in INPUTS.items():
        if kind == "float32":
            out[array] = numbers.standard_normal((4, 4)).astype(np.float32)
        else:
            limits = np.iinfo(kind)
            small = numbers.integers(limits.min // 2**20 * (kind != "int64") - 50 * (limits.min < 0), 90, 16)
            out[array] = np.array([*small[:14].tolist(), limits.min, limits.max], kind)
    return out | {"n": 5, "m": np.int32(-7), "scale": np.float32(0.75)}


# --- The reference: numbers that know their type -------------------------------------------------------------------------


class Invalid(Exception):
    """What a valid program does not do: so the program proves nothing."""


WIDTHS = {"int32": (32, True), "int64": (64, True), "uint32": (32, False), "uint64": (64, False)}


def wrapped(value: int, kind: str) -> int:
    bits, signed = WIDTHS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


class Number:
    """An int or a float32 with its type; an operation gives the type that numba gives it."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: str, value: Any):
        self.kind, self.value = kind, value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        if self.kind == "float32":
            raise Invalid("a float as an index")
        return self.value

    def __repr__(self) -> str:
        return f"{self.kind}({self.value})"


def result_kind(a: Number, b: Number) -> str:
    """float32 with float32, uint64 of two unsigned, else int64."""
    if a.kind == b.kind == "float32":
        return "float32"
    if "float32" in (a.kind, b.kind):
        raise Invalid("a float with an int")
    if a.kind in UNSIGNED and b.kind in UNSIGNED:
        return "uint64"
    if "uint64" in (a.kind, b.kind):
        raise Invalid("uint64 with a signed int")
    return "int64"


def finite(value: np.float32) -> Number:
    """A float32; a NaN's bits are nobody's promise."""
    if value != value:
        raise Invalid("a NaN")
    return Number("float32", value)


def typed(value: Any) -> Number:
    if not isinstance(value, Number):
        raise Invalid(f"{value!r} as a number")
    return value


def arithmetic(function: Callable) -> Callable:
    divides = function in (operator.floordiv, operator.mod)

    def apply(a: Number, b: Any) -> Number:
        b = typed(b)
        kind = result_kind(a, b)
        if kind == "float32":
            if function in (operator.and_, operator.or_, operator.xor) or divides:
                raise Invalid("not an operator of floats")
            return finite(function(a.value, b.value))
        if function is operator.truediv or (divides and not b.value):
            raise Invalid("a division of ints, or by zero")
        return Number(kind, wrapped(function(a.value, b.value), kind))

    return apply


def shift(function: Callable) -> Callable:
    """The left operand alone says whether the result is signed."""

    def apply(a: Number, b: Any) -> Number:
        if typed(b).kind == "float32" or a.kind == "float32" or not 0 <= b.value < 32:
            raise Invalid("a shift out of range")
        kind = "uint64" if a.kind in UNSIGNED else "int64"
        return Number(kind, wrapped(function(a.value, b.value), kind))

    return apply


def comparison(function: Callable) -> Callable:
    def apply(a: Number, b: Any) -> bool:
        result_kind(a, typed(b))
        return bool(function(a.value, b.value))

    return apply


def sign_or_bits(function: Callable) -> Callable:
    """Done in the operand's own width, then widened."""

    def apply(a: Number) -> Number:
        if a.kind == "float32":
            return Number("float32", function(a.value))
        kind = "uint64" if a.kind in UNSIGNED else "int64"
        return Number(kind, wrapped(function(a.value), a.kind))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor"):
    setattr(Number, f"__{_name.strip('_')}__", arithmetic(getattr(operator, _name)))
for _name in ("lshift", "rshift"):
    setattr(Number, f"__{_name}__", shift(getattr(operator, _name)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", comparison(getattr(operator, _name)))
for _name in ("neg", "invert"):
    setattr(Number, f"__{_name}__", sign_or_bits(getattr(operator, _name)))


def nearest_float(number: int) -> np.float32:
    """An int rounded once, to nearest even."""
    extra = max(0, abs(number).bit_length() - 24)
    kept, lost, tie = abs(number) >> extra, abs(number) & (1 << extra) - 1, 1 << extra >> 1
    kept += extra > 0 and (lost > tie or (lost == tie and kept & 1))
    return np.float32(math.copysign(math.ldexp(kept, extra), number))


def convert(kind: str, value: Any) -> Any:
    """As C converts: ints wrap, floats are cut off toward zero."""
    number = value.value if isinstance(value, Number) else value
    if kind == "float32":
        return Number(kind, np.float32(number) if isinstance(number, (float, np.float32)) else nearest_float(number))
    if isinstance(number, np.float32):
        if not abs(number) < 2**31:
            raise Invalid("a float outside the ints")
        number = math.trunc(float(number))
    return Number(kind, wrapped(int(number), kind))


def conversion(kind: str) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, Number) and value.kind == kind else convert(kind, value)


def smallest_or_largest(function: Callable) -> Callable:
    def apply(a: Any, b: Any) -> Number:
        kind = a.kind if typed(a).kind == typed(b).kind else result_kind(a, b)
        if kind == "float32":
            raise Invalid("min and max are for ints")
        return Number(kind, function(a.value, b.value))

    return apply


def absolute(a: Any) -> Number:
    if typed(a).kind == "float32":
        raise Invalid("abs is for ints")
    return Number(a.kind, wrapped(abs(a.value), a.kind))


def of_floats(function: Callable) -> Callable:
    def apply(*operands: Any) -> Any:
        if any(typed(x).kind != "float32" for x in operands):
            raise Invalid("not a float32")
        return function(*(x.value for x in operands))

    return apply


def fused(a: np.float32, b: np.float32, c: np.float32) -> Number:
    """The product is exact in double; the sum is rounded to odd there, so that one rounding to float32 is right."""
    product, addend = float(a) * float(b), float(c)
    total = product + addend
    if math.isfinite(total):
        back = total - product
        error = (product - (total - back)) + (addend - back)
        if error and not int(np.float64(total).view(np.int64)) & 1:
            total = math.nextafter(total, math.copysign(math.inf, error))
    return finite(np.float32(total))


def extreme(larger: bool) -> Callable:
    def apply(a: np.float32, b: np.float32) -> Number:
        """Of two zeros the one whose sign says so."""
        if a == b:
            return Number("float32", a if np.signbit(b) == larger else b)
        return Number("float32", max(a, b) if larger else min(a, b))

    return apply


def bits(x: np.float32) -> int:
    return int(x.view(np.uint32))


def half(x: np.float32) -> int:
    """The nearest bf16, ties to even."""
    low = bits(x) & 0xFFFF
    up = low > 0x8000 or (low == 0x8000 and bits(x) >> 16 & 1)
    return (bits(x) >> 16) + bool(up)


def from_bits(word: Any) -> Number:
    if typed(word).kind != "uint32":
        raise Invalid("not a uint32")
    return finite(np.uint32(word.value).view(np.float32))


def nearest(x: np.float32) -> Number:
    if not abs(x) < 2**31:
        raise Invalid("a float outside the ints")
    return Number("int32", round(float(x)))


def turns(*bounds: Any) -> Iterator[Number]:
    for value in range(*(typed(b).__index__() for b in bounds)):
        yield Number("int64", value)


WORDS: dict[str, Any] = {
    **{kind: conversion(kind) for kind in (*WIDTHS, "float32")},
    "min": smallest_or_largest(min), "max": smallest_or_largest(max), "abs": absolute, "range": turns,
    "fma": of_floats(fused), "fmax": of_floats(extreme(True)), "fmin": of_floats(extreme(False)),
    "sqrt": of_floats(lambda x: finite(np.sqrt(x))), "round_int": of_floats(nearest),
    "float_bits": of_floats(lambda x: Number("uint32", bits(x))), "bits_float": from_bits,
    "pack_bf16": of_floats(lambda low, high: Number("uint32", half(low) | half(high) << 16)),
    "bf16_low": lambda word: from_bits(Number("uint32", word.value << 16 & 0xFFFFFFFF)),
}  # fmt: skip
"""What the dialect's names mean to one thread."""


class Memory:
    """An array of any kind of memory. cells: an object array of Numbers or, where nothing has been written, None."""

    def __init__(self, kind: str, cells: np.ndarray):
        self.kind, self.cells = kind, cells

    @property
    def shape(self) -> tuple[Number, ...]:
        return tuple(Number("int64", n) for n in self.cells.shape)

    def at(self, index: Any) -> tuple[int, ...]:
        place = tuple(operator.index(i) for i in (index if isinstance(index, tuple) else (index,)))
        if not all(0 <= i < n for i, n in zip(place, self.cells.shape)):
            raise Invalid(f"index {place} of {self.cells.shape}")
        return place

    def __getitem__(self, index: Any) -> Any:
        found = self.cells[self.at(index)]
        if found is None:
            raise Invalid("a read of what nothing has written")
        return Memory(self.kind, found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        place = self.at(index)
        if len(place) != self.cells.ndim or not isinstance(value, Number):
            raise Invalid("a store that is not of one number")
        if "float32" == value.kind != self.kind:
            raise Invalid("a float in memory of ints")
        self.cells[place] = convert(self.kind, value)


def empty(shape: Any, kind: Callable) -> Memory:
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, tuple) else (operator.index(shape),)
    return Memory(kind(Number("int64", 0)).kind, np.full(sizes, None, object))


def memory(array: np.ndarray) -> Memory:
    """A NumPy array as the threads see it."""
    cells = np.empty(array.shape, object)
    for place, value in np.ndenumerate(array):
        cells[place] = Number(str(array.dtype), value if array.dtype == np.float32 else int(value))
    return Memory(str(array.dtype), cells)


# --- The reference: threads ----------------------------------------------------------------------------------------------


class OneThread(ast.NodeTransformer):
    """A kernel's functions as Python that one thread runs: constants are Numbers; @device functions and the kernel are
    generators that yield where threads meet."""

    def __init__(self, generators: set[str]):
        self.generators = generators

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [self.visit(s) for s in node.body]
        if node.name in self.generators:
            node.body.insert(0, ast.parse("if False: yield").body[0])
        node.decorator_list = []
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.parse("_turn()").body[0])
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is not int:
            return node
        return ast.Call(ast.Name("_number", ast.Load()), [ast.Constant("int64"), node], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        self.generic_visit(node)
        if name in ("cuda.syncthreads", "shfl", "shfl_xor"):
            return ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load()))
        return ast.YieldFrom(node) if name in self.generators else node


def one_thread_code(source: str) -> Any:
    tree = ast.parse(source)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    generators = {f.name for f in functions if ast.unparse(f.decorator_list[0]) != "lanewise"}
    module = ast.Module([OneThread(generators).visit(f) for f in functions], [])
    return compile(ast.fix_missing_locations(module), "<reference>", "exec")


@dataclass
class Axis:
    """``cuda.threadIdx`` and its like."""

    x: Number


class Place:
    """``cuda`` of one thread; shared: its block's shared arrays, in the order of their declarations."""

    def __init__(self, block: int, thread: int, program: Program, shared: list[Memory]):
        self.blockIdx, self.threadIdx = Axis(Number("int32", block)), Axis(Number("int32", thread))
        self.gridDim, self.blockDim = Axis(Number("int32", program.blocks)), Axis(Number("int32", program.threads))
        self.local, self.shared = self, SharedArrays(shared)
        self.array = empty


class SharedArrays:
    """``cuda.shared``: a thread's n-th declaration is the block's n-th array."""

    def __init__(self, arrays: list[Memory]):
        self.arrays, self.declared = arrays, 0

    def array(self, shape: Any, kind: Callable) -> Memory:
        if self.declared == len(self.arrays):
            self.arrays.append(empty(shape, kind))
        self.declared += 1
        return self.arrays[self.declared - 1]


def reference(program: Program, args: dict[str, Any]) -> dict[str, np.ndarray]:
    """The outputs, thread by thread. Raises Invalid where the program is not valid."""
    ready = {n: memory(a) if isinstance(a, np.ndarray) and a.ndim else scalar(a) for n, a in args.items()}
    options = {n: scalar(v) if type(v) is int else v for n, v in BOUND.items()}
    turn = turn_counter()
    try:
        code = one_thread_code(str(program))
        with np.errstate(all="ignore"):
            for block in range(program.blocks):
                shared: list[Memory] = []
                threads = []
                for thread in range(program.threads):
                    names = {**WORDS, "_number": Number, "_turn": turn, "cuda": Place(block, thread, program, shared)}
                    exec(code, names)
                    threads.append(names["program"](**ready, **options))
                run_block(threads)
    except (NameError, TypeError, AttributeError, SyntaxError) as reason:
        raise Invalid(str(reason)) from reason
    return {n: plain(ready[n], args[n].dtype) for n in OUTPUTS}


def turn_counter(most: int = 20000) -> Callable[[], None]:
    """Counts the turns of while loops, all threads together: a valid program's end."""
    left = iter(range(most))

    def turn() -> None:
        if next(left, None) is None:
            raise Invalid("a loop that does not end")

    return turn


def scalar(value: Any) -> Number:
    if isinstance(value, np.float32):
        return Number("float32", value)
    return Number(str(value.dtype) if isinstance(value, np.generic) else "int64", int(value))


def plain(found: Memory, dtype: np.dtype) -> np.ndarray:
    return np.array([n.value for n in found.cells.reshape(-1)], dtype).reshape(found.cells.shape)


def run_block(threads: list[Any]) -> None:
    """Run until all have returned: each goes on to its next meeting, then those that meet exchange."""
    answers: list[Any] = [None] * len(threads)
    while True:
        meetings = [advanced(t, a) for t, a in zip(threads, answers)]
        if all(m is None for m in meetings):
            return
        if any(m is None or m[0] != meetings[0][0] for m in meetings):  # type: ignore[index]
            raise Invalid("threads that should meet do not")
        answers = [answer(meetings, t) for t in range(len(threads))]


def advanced(thread: Any, answer: Any) -> tuple | None:
    try:
        return thread.send(answer)
    except StopIteration:
        return None


def answer(meetings: list[Any], thread: int) -> Any:
    """What a thread gets where threads meet."""
    name, *operands = meetings[thread]
    if name == "cuda.syncthreads":
        return None
    value, number = operands
    if value.kind not in ("int32", "uint32", "float32"):
        raise Invalid("a shuffle of another width")
    other = thread ^ number.value if name == "shfl_xor" else (thread & ~31) | number.value
    return meetings[other][1]


# --- Shrinking -----------------------------------------------------------------------------------------------------------


def smaller(program: Program) -> Iterator[Callable[[], Callable[[], None]]]:
    """Changes that make a program smaller, most first; each does it and gives what undoes it."""
    for suite in list(program.suites()):
        some = len(suite) // 6 + 1
        for number in reversed(range(0, len(suite), some)):
            yield lambda s=suite, n=number, m=some: splice(s, n, [], m)
    for suite in list(program.suites()):
        for number in reversed(range(len(suite))):
            if number < len(suite):
                yield from (lambda s=suite, n=number, w=what: splice(s, n, w) for what in without(suite[number]))
    for suite in list(program.suites()):
        for statement in list(suite):
            yield from shorter(statement.parts)


def without(statement: Stmt) -> list[list[Stmt]]:
    """What may stand for a statement: nothing, its body, its other side, itself without that."""
    inner = [] if statement.body is None else [statement.body, statement.orelse]
    bare = [[Stmt(statement.parts, statement.body)]] if statement.orelse else []
    return [[], *(i for i in inner if i), *bare]


def splice(suite: list[Stmt], number: int, by: list[Stmt], many: int = 1) -> Callable[[], None]:
    old = list(suite)
    suite[number : number + many] = by

    def undo() -> None:
        suite[:] = old

    return undo


def shorter(parts: list[Any]) -> Iterator[Callable[[], Callable[[], None]]]:
    """Each expression replaced by the simplest of its kind, or by one of that kind within it."""
    for number, part in enumerate(parts):
        if not isinstance(part, Expr):
            continue
        simplest = {"bool": "True", "int64": "1", "none": ""}.get(part.kind, f"{part.kind}(1)")
        if str(part) != simplest and part.kind not in ("divisor", "shift"):
            for inner in [Expr(part.kind, [simplest]), *(e for e in within(part) if e.kind == part.kind)]:
                yield lambda p=parts, n=number, e=inner: replaced(p, n, e)
        yield from shorter(part.parts)


def within(expr: Expr) -> Iterator[Expr]:
    for part in expr.parts:
        if isinstance(part, Expr):
            yield part
            yield from within(part)


def replaced(parts: list[Any], number: int, by: Expr) -> Callable[[], None]:
    old = parts[number]
    parts[number] = by

    def undo() -> None:
        parts[number] = old

    return undo


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 2000) -> Program:
    """The smallest program found that still fails."""
    program = copy.deepcopy(program)
    blocks, program.blocks = program.blocks, 1
    if not fails(program):
        program.blocks = blocks
    progress = True
    while progress and tries > 0:
        progress = False
        for change in smaller(program):
            before = str(program)
            undo = change()
            if str(program) == before:
                continue
            tries -= 1
            if fails(program):
                progress = True
            else:
                undo()
            if tries <= 0:
                break
    return program
