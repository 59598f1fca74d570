"""A kernel means on the CPU machine what Python and CUDA's types say, thread by thread, or is refused by name and line."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import numpy as np
import pytest
from mutants import module_from

from kernels_numba.machine import (
    KernelError,
    boolean,
    checked,
    cuda,
    device,
    float32,
    int64,
    kernel,
    lanes,
    mma,
    uint32,
)
from kernels_numba.machine.cpu import SUPPORT

THREADS = 32
MODES = {"plain": nullcontext, "checked": checked}


@pytest.fixture(params=MODES)
def mode(request):
    """The machine's two ways to run a kernel."""
    return MODES[request.param]


def launched(mode, kernel, *args, columns: int = 1) -> list:
    """A launch of one warp; out, the kernel's first argument: int64 [32] or [32, columns]."""
    out = np.full((THREADS, columns) if columns > 1 else THREADS, -99, np.int64)
    with mode():
        kernel[1, THREADS](out, *args)
    return out.tolist()


def line_of(kernel, text: str) -> int:
    """The line of this file on which the kernel has the text."""
    lines, first = inspect.getsourcelines(kernel.fn)
    (found,) = [i for i, line in enumerate(lines) if text in line]
    return first + found


def refusal(mode, kernel, *args, at: str, **bound) -> str:
    """What the kernel is refused with, after the name, the file and the line that has the text ``at``."""
    out = np.zeros(THREADS, np.int64)
    with pytest.raises(KernelError) as refused, mode():
        kernel.at(**bound)[1, THREADS](out, *args)
    text, place = str(refused.value), f"{kernel.__name__}: {__file__}:{line_of(kernel, at)}: "
    assert text.startswith(place) and "\n" not in text
    return text.removeprefix(place)


# --- 64 bits ----------------------------------------------------------------------------------------------------------


@kernel
def wraps(out, s):
    """The same for a value that is one for all threads and for a lane array."""
    t = int64(cuda.threadIdx.x)
    v = s + t * 0
    out[t, 0] = (s * s >> 40) + (s << 60 >> 60) + s * s * s * s
    out[t, 1] = (v * v >> 40) + (v << 60 >> 60) + v * v * v * v
    out[t, 2] = -(s * 8388608) - 1
    out[t, 3] = -(v * 8388608) - 1


def test_an_int_that_is_one_for_all_threads_wraps_at_64_bits(mode):
    assert launched(mode, wraps, 2**40, columns=4) == [[0, 0, 2**63 - 1, 2**63 - 1]] * THREADS


@kernel
def divided(out, n):
    t = int64(cuda.threadIdx.x)
    out[t] = 7 // n


@kernel
def divided_by_lane(out, n):
    t = int64(cuda.threadIdx.x)
    out[t] = 7
    if t > 2:
        out[t] %= (t - n) // 2


def test_an_integer_division_by_zero_names_the_thread(mode):
    text = refusal(mode, divided, 0, at="7 // n")
    assert text == "block (0, 0, 0), thread 0: integer division or modulo by zero"
    text = refusal(mode, divided_by_lane, 4, at="%=")
    assert text == "block (0, 0, 0), thread 4: integer division or modulo by zero"
    assert launched(mode, divided_by_lane, 1)[:6] == [7, 7, 7, 0, 0, 1]


@kernel
def folded(out, *, K):
    out[0] = K * K


@kernel
def folded_shift(out, *, K):
    out[0] = 1 << K


@pytest.mark.parametrize("broken, k", [(folded, 2**32), (folded_shift, 2**40), (folded_shift, 63), (folded_shift, -1)])
def test_compile_time_arithmetic_stays_in_int64(broken, k):
    text = refusal(nullcontext, broken, at="out[0]", K=k)
    assert text.startswith("compile-time arithmetic failed: ")


@kernel
def stored(out, words, k):
    """A negative int into unsigned memory wraps, from one value as from a lane array."""
    t = cuda.threadIdx.x
    own = cuda.local.array(2, uint32)
    own[0] = k
    own[1] = k + t * 0
    words[t] = k
    out[t, 0] = own[0]
    out[t, 1] = own[1]


def test_a_store_wraps_to_the_array_s_type(mode):
    words = np.zeros(THREADS, np.uint32)
    assert launched(mode, stored, words, -2, columns=2) == [[2**32 - 2] * 2] * THREADS
    assert words.tolist() == [2**32 - 2] * THREADS


# --- Arrays are one for all threads -----------------------------------------------------------------------------------


@kernel
def rebound(out, x, y):
    src = x
    if cuda.threadIdx.x < 16:
        src = y
    out[cuda.threadIdx.x] = src[0]


@kernel
def row_rebound(out):
    rows = cuda.local.array((2, 2), int64)
    rows[0, 0] = 1
    rows[1, 0] = 2
    row = rows[0]
    if cuda.threadIdx.x < 16:
        row = rows[1]
    out[cuda.threadIdx.x] = row[0]


@device
def either(x, y, t):
    if t < 16:
        return x
    return y


@kernel
def returned(out, x, y):
    src = either(x, y, cuda.threadIdx.x)
    out[cuda.threadIdx.x] = src[0]


@kernel
def selected(out, x, y):
    src = x if cuda.threadIdx.x < 16 else y
    out[cuda.threadIdx.x] = src[0]


@kernel
def declared_twice(out):
    if cuda.threadIdx.x < 16:
        own = cuda.local.array(2, int64)
        own[0] = 1
    else:
        own = cuda.local.array(2, int64)  # the other
        own[0] = 2
    out[cuda.threadIdx.x] = own[0]


@pytest.mark.parametrize(
    "broken, arrays, at",
    [
        (rebound, 2, "src = y"),
        (row_rebound, 0, "row = rows[1]"),
        (selected, 2, "src = x if"),
        (declared_twice, 0, "# the other"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_an_array_variable_that_would_differ_between_threads_is_refused(mode, broken, arrays, at):
    text = refusal(mode, broken, *(np.zeros(4, np.int64) for _ in range(arrays)), at=at)
    assert text == "a variable holds one array for all threads: here some would have another one"


def test_a_function_that_returns_different_arrays_is_refused(mode):
    with pytest.raises(KernelError, match=f":{inspect.getsourcelines(either.fn)[1] + 4}: a variable holds one array"):
        launched(mode, returned, np.zeros(4, np.int64), np.zeros(4, np.int64))


@device
def stage(t, n):
    """Some threads return early, some from a loop, some a tuple's worth at the end."""
    if t < n:
        return 1, t
    for i in range(3):
        if t == 10 + i:
            return 2, i
    if n:
        return 3, t + n
    return 4, t


@kernel
def stages(out, n):
    t = int64(cuda.threadIdx.x)
    out[t] = -1
    if t < 20:
        a, b = stage(t, n)
        out[t] = 100 * a + b


@pytest.mark.parametrize("n", [0, 5])
def test_each_thread_keeps_what_it_returned(mode, n):
    def wanted(t: int) -> int:
        return -1 if t >= 20 else 100 + t if t < n else 190 + t if 10 <= t < 13 else 300 + t + n if n else 400 + t

    assert launched(mode, stages, n) == [wanted(t) for t in range(THREADS)]


@kernel
def array_and_number(out, x):
    src = x
    if cuda.threadIdx.x < 16:
        src = 5
    out[cuda.threadIdx.x] = src


def test_a_variable_that_is_an_array_or_a_number_is_refused(mode):
    text = refusal(mode, array_and_number, np.zeros(4, np.int64), at="src = 5")
    assert text == "one variable takes an array and int64: give each a name of its own"


@kernel
def chosen(out, x, y, n, swap):
    """The choice is one for all threads that are left, among whom some have returned."""
    t = int64(cuda.threadIdx.x)
    rows = cuda.local.array((2, 2), int64)
    rows[0, 0] = x[0]
    rows[1, 0] = y[0]
    if t >= n:
        return
    src, row = x, rows[0]
    for turn in range(3):
        if turn == 1 and t == 1:
            return
        if swap:
            src = y
            row = rows[1]
        if t < 4:
            src = src
    same = y if swap else x
    either_way = x if t < 4 else x
    out[t] = src[0] + row[0] + same[0] + either_way[0]


@pytest.mark.parametrize("swap", [False, True])
def test_an_array_variable_changes_for_all_threads_that_are_left(mode, swap):
    x, y = np.array([1]), np.array([20])
    wanted = [-99 if t >= 10 or t == 1 else 3 * (20 if swap else 1) + 1 for t in range(THREADS)]
    assert launched(mode, chosen, x, y, 10, swap) == wanted


@kernel
def own_turns(out):
    """Thread t declares the array again in the turns that t % 3 says, and reads it behind the loop."""
    t = int64(cuda.threadIdx.x)
    total = 0
    for turn in range(3):
        if turn <= t % 3:
            own = cuda.local.array(2, int64)
            own[0] = 10 * turn + t
            own[1] = 0
        if t % 2:
            continue
        own[1] += 1
        total += own[0]
    out[t] = 1000 * total + 100 * own[1] + own[0]


def test_a_local_array_declared_again_by_some_threads_keeps_the_others_contents(mode):
    def wanted(t: int) -> int:
        total = 0
        for turn in range(3):
            if turn <= t % 3:
                own = [10 * turn + t, 0]
            if t % 2 == 0:
                own[1] += 1
                total += own[0]
        return 1000 * total + 100 * own[1] + own[0]

    assert launched(mode, own_turns) == [wanted(t) for t in range(THREADS)]


@kernel
def tuples(out):
    """A variable that holds a tuple, assigned by some threads; one chosen by a conditional."""
    t = int64(cuda.threadIdx.x)
    pair = t, 2
    if t < 8:
        pair = 5, t
    a, b = pair
    c, d = (a, b) if t % 2 else (b, a)
    out[t] = 1000 * a + 100 * b + 10 * c + d


def test_a_tuple_merges_element_by_element(mode):
    def wanted(t: int) -> int:
        a, b = (5, t) if t < 8 else (t, 2)
        c, d = (a, b) if t % 2 else (b, a)
        return 1000 * a + 100 * b + 10 * c + d

    assert launched(mode, tuples) == [wanted(t) for t in range(THREADS)]


# --- Order of evaluation ----------------------------------------------------------------------------------------------


@device
def bump(a):
    a[0] = a[0] + 1
    return a[0]


@kernel
def operands(out):
    """Left to right, the value before the target: a call may write what an earlier operand has read."""
    t = int64(cuda.threadIdx.x)
    a = cuda.local.array(4, int64)
    a[0] = t
    out[t, 0] = a[0] + bump(a)
    out[t, 1] = (a[0] * 1) - (1 + bump(a))
    out[t, 2] = int64(a[0] < bump(a))
    a[0] = 1
    for i in range(1, 4):
        a[i] = 0
    a[a[0]] = bump(a)
    out[t, 3] = 10 * a[1] + a[2]
    a[0] += bump(a)
    out[t, 4] = a[0]


def test_operands_are_evaluated_in_python_s_order(mode):
    wanted = [[2 * t + 1, t + 1 - (1 + t + 2), 1, 2, 5] for t in range(THREADS)]
    assert launched(mode, operands, columns=5) == wanted


@device
def raised(c):
    c[0] = c[0] + float32(100)
    return float32(0)


@kernel
def mma_operands(out):
    """The first accumulator is read before the call that writes it."""
    c = cuda.local.array(1, float32)
    c[0] = float32(cuda.threadIdx.x)
    z = uint32(0)
    d0, d1, d2, d3 = mma(z, z, z, z, z, z, c[0], raised(c), c[0], c[0])
    out[cuda.threadIdx.x] = int64(d0) * 1000 + int64(d2)


def test_operands_of_mma_are_evaluated_in_order(mode):
    assert launched(mode, mma_operands) == [1000 * t + t + 100 for t in range(THREADS)]


# --- Conditions -------------------------------------------------------------------------------------------------------


@kernel
def leading(out, *, K, flag):
    """Python's own value where it is known."""
    t = int64(cuda.threadIdx.x)
    out[t, 0] = K or 8
    out[t, 1] = K and 8
    out[t, 2] = (flag or K) + 0
    out[t, 3] = K and t
    if t < 0 and flag and K == 12345:
        out[t, 3] = nothing_of_the_kind  # noqa: F821


@pytest.mark.parametrize("k", [3, 1])
def test_and_or_of_constants_are_python_s(mode, k):
    t = range(THREADS)
    assert launched(mode, leading.at(K=k, flag=False), columns=4) == [[k or 8, k and 8, k, k and i] for i in t]
    assert launched(mode, leading.at(K=0, flag=True), columns=4) == [[8, 0, 1, 0]] * THREADS


@kernel
def called(out, *, flag):
    """A constant behind a call decides, but the call is made."""
    t = int64(cuda.threadIdx.x)
    a = cuda.local.array(1, int64)
    a[0] = t
    if bump(a) > 0 and flag:
        a[0] += 100
    out[t] = a[0]


@pytest.mark.parametrize("flag", [False, True])
def test_a_device_function_in_a_condition_is_called(mode, flag):
    assert launched(mode, called.at(flag=flag)) == [t + 1 + 100 * flag for t in range(THREADS)]


@kernel
def int_and(out):
    t = int64(cuda.threadIdx.x)
    out[t] = t and 7


@kernel
def int_or(out, n):
    t = int64(cuda.threadIdx.x)
    if t < 4 or n:
        out[t] = 7


def test_and_or_of_numbers_are_refused(mode):
    assert refusal(mode, int_and, at="t and 7") == "and takes booleans, not int64: write x != 0"
    assert refusal(mode, int_or, 1, at="or n") == "or takes booleans, not int64: write x != 0"


@kernel
def truth(out, n):
    """A number is a condition by itself; t & 6 under a mask and its complement."""
    t = int64(cuda.threadIdx.x)
    found = 0
    if t < 20:
        if t & 6:
            found += 1
        else:
            found += 10
    while n - t // 8:
        n -= 1
        found += 100
    out[t] = found + (1000 if t & 1 else 2000) + (5 if not t else 0)


def test_a_number_is_true_where_it_is_not_zero(mode):
    def wanted(t: int) -> int:
        found = 0 if t >= 20 else 1 if t & 6 else 10
        return found + 100 * (4 - t // 8) + (1000 if t & 1 else 2000) + (5 if t == 0 else 0)

    assert launched(mode, truth, 4) == [wanted(t) for t in range(THREADS)]


@kernel
def chained(out, x, n):
    """x has n elements and is read, or divided by, only where the earlier comparisons hold."""
    t = int64(cuda.threadIdx.x)
    out[t] = 0
    if 0 <= t < n <= x[t] < 100:
        out[t] = 1
    if 0 < n < 20 // n < t < bump(x) < 1000:
        out[t] += 10


def test_a_chain_of_comparisons_stops_where_python_does(mode):
    x = np.array([1, 4, 5, 200])
    assert launched(mode, chained, x, 4) == [0, 1, 1, 0] + [0] * 28
    assert x.tolist() == [2, 4, 5, 200]
    x = np.zeros(0, np.int64)
    assert launched(mode, chained, x, 0) == [0] * THREADS


# --- Names ------------------------------------------------------------------------------------------------------------


@kernel
def assigned(out, *, D):
    D = 3
    out[0] = D


@kernel
def looped(out, *, D):
    for D in range(3):
        out[D] = 1


@kernel
def unpacked(out, *, D):
    a, D = 1, 2
    out[0] = a + D


@kernel
def augmented(out, *, D):
    D += 1
    out[0] = D


@pytest.mark.parametrize(
    "broken, at",
    [(assigned, "D = 3"), (looped, "for D"), (unpacked, "a, D"), (augmented, "D += 1")],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_an_assignment_to_a_compile_time_argument_is_refused(broken, at):
    text = refusal(nullcontext, broken, at=at, D=8)
    assert text.startswith("D is a compile-time argument: assign to a variable of another name")


@kernel
def underscored(out):
    __t = int64(cuda.threadIdx.x)
    out[__t] = 1


@kernel
def not_needed(out):
    t = int64(cuda.threadIdx.x)
    _, b = t, 2
    for _ in range(3):
        b += 1
    out[t] = b


def test_names_with_two_underscores_are_the_machines(mode):
    text = refusal(mode, underscored, at="__t = ")
    assert text.startswith("__t: a kernel's variables do not start with two underscores")
    assert launched(mode, not_needed) == [5] * THREADS


HELPERS = sorted(name for name, value in {**vars(lanes), **SUPPORT}.items() if callable(value) and name[0] != "_")


def test_a_kernel_s_names_are_its_own(mode):
    """A kernel whose variables have the names of all that the generated code calls."""
    names = [n for n in HELPERS if n not in ("t", "out")]
    lines = [f"    {name} = t + {i}" for i, name in enumerate(names)]
    body = [
        "@device", "def helped(a):", "    return a", "@kernel", "def crowded(out):",
        "    t = int64(cuda.threadIdx.x)", *lines, "    a = cuda.local.array(2, int64)", "    a[0] = t", "    a[t % 2] = 3",
        "    if t < 5 and t % 2 == 0:", "        select = 2 if t < 3 else helped(select)", f"    out[t] = {' + '.join(names)}",
    ]  # fmt: skip
    header = "from kernels_numba.machine import cuda, device, int64, kernel\n"
    crowded = module_from(header + "\n".join(body) + "\n", "names").crowded
    plain = [len(names) * t + len(names) * (len(names) - 1) // 2 for t in range(THREADS)]
    for t in (0, 2):
        plain[t] += 2 - (t + names.index("select"))
    assert launched(mode, crowded) == plain and len(names) > 40


f32 = float32


@kernel
def shadows(out):
    float32 = 3
    out[0] = int64(f32(float32))


def test_a_variable_with_the_name_of_a_type_in_use_is_refused(mode):
    text = refusal(mode, shadows, at="f32(float32)")
    assert text.startswith("float32 is also a variable here: give the variable another name")


@kernel
def never(out, *, flag):
    if flag:
        k = 3
    out[0] = k


@kernel
def first_read(out, n):
    if n > 5:
        k = 3
    out[cuda.threadIdx.x] = (
        1
        + k
    )  # fmt: skip


@kernel
def first_changed(out, n):
    if n > 5:
        k = 3
    k += 1
    out[0] = k


def test_a_variable_read_before_it_is_assigned_is_named(mode):
    assert refusal(mode, never, at="out[0] = k", flag=False).startswith(
        "k is read, but no branch that is left assigns it"
    )
    assert refusal(mode, first_read, 0, at="1\n") == "k is read before any thread has assigned it"
    assert refusal(mode, first_changed, 0, at="k += 1") == "k is read before any thread has assigned it"


# --- Indices and loops ------------------------------------------------------------------------------------------------


@kernel
def before_the_first(out):
    own = cuda.local.array(4, int64)
    for i in range(4):
        own[i] = i
    for i in range(4):
        out[i] = own[i - 1]


@kernel
def stored_before_the_first(out):
    own = cuda.local.array(4, int64)
    for i in range(-1, 3):
        own[i] = i
    out[0] = own[0]


@kernel
def past_the_last(out):
    own = cuda.local.array(4, int64)
    for i in range(5):
        own[i] = i
    out[0] = own[0]


def test_an_index_outside_a_local_array_is_refused(mode):
    assert "index -1 is outside local array" in refusal(mode, before_the_first, at="own[i - 1]")
    assert "index -1 is outside local array" in refusal(mode, stored_before_the_first, at="own[i] = i")
    assert "is outside" in refusal(mode, past_the_last, at="own[i] = i")


@kernel
def reused(out):
    """i is a loop's variable, then the thread's own; j a loop's that the body changes; k a parameter's name's."""
    t = int64(cuda.threadIdx.x)
    own = cuda.local.array(4, int64)
    for i in range(4):
        own[i] = 10 * i
    i = t % 4
    total = own[i]
    for j in range(2):
        j = (j + t) % 4
        total += 100 * own[j]
    for k in range(2):
        for k in range(t % 3):
            total += 1000 * own[k]
    out[t] = total + 1


def test_a_loop_s_name_may_be_used_again(mode):
    def wanted(t: int) -> int:
        turns = sum(100 * 10 * ((j + t) % 4) for j in range(2)) + 2 * sum(1000 * 10 * k for k in range(t % 3))
        return 10 * (t % 4) + turns + 1

    assert launched(mode, reused) == [wanted(t) for t in range(THREADS)]


@device
def first_of(row, other):
    """The parameter changes what it holds."""
    row = other
    return row[0]


@kernel
def passes_rows(out, x):
    t = int64(cuda.threadIdx.x)
    own = cuda.local.array(2, int64)
    own[0] = 1
    out[t] = first_of(own, x)


def test_a_parameter_may_hold_another_array(mode):
    assert launched(mode, passes_rows, np.array([7])) == [7] * THREADS


@kernel
def by_float(out, x):
    for i in range(x):
        out[i] = 1


@kernel
def step_of_zero(out, n):
    for i in range(0, 10, n):
        out[i] = 1


@kernel
def lanes_by_zero(out, n):
    for i in range(cuda.threadIdx.x, 10, n):
        out[i] = 1


@kernel
def flag_index(out, flag):
    own = cuda.local.array(4, int64)
    own[flag] = 1
    out[0] = own[0]


@kernel
def no_such_axis(out):
    out[0] = out.shape[3]


@kernel
def unlike_tuple(out):
    a, b, c = 1, 2
    out[0] = a + b + c


@kernel
def power(out, n):
    out[0] = n**2


@kernel
def is_none(out, n):
    if n is None:
        out[0] = 1


@kernel
def shape_of_run(out, n):
    own = cuda.local.array(n, int64)
    out[0] = own[0]


REFUSED = [
    (by_float, (np.float32(3),), "for i", "range takes integers"),
    (step_of_zero, (0,), "for i", "a range's step is not 0"),
    (lanes_by_zero, (0,), "for i", "a range's step is not 0"),
    (flag_index, (True,), "own[flag]", "an index is an integer, not bool"),
    (no_such_axis, (), "out.shape", "an index is outside a tuple or shape"),
    (unlike_tuple, (), "a, b, c", "not enough values to unpack"),
    (power, (3,), "n**2", "operator Pow is not in the kernel dialect"),
    (is_none, (3,), "n is None", "operator Is is not in the kernel dialect"),
    (shape_of_run, (3,), "local.array", "a local array takes a shape known at compile time and a type"),
]


@pytest.mark.parametrize("broken, args, at, message", REFUSED, ids=[r[0].__name__ for r in REFUSED])
def test_a_kernel_at_fault_is_refused_by_name_file_and_line(mode, broken, args, at, message):
    assert refusal(mode, broken, *args, at=at).startswith(message)


@kernel
def shapes(out, x):
    """A shape whole, a local array's shape, an array of booleans."""
    t = cuda.threadIdx.x
    n, m = x.shape
    own = cuda.local.array((3, 5), boolean)
    own[1, 4] = t > 3
    out[t] = 1000 * n + 100 * m + 10 * own.shape[0] + own.shape[1] + (own[1, own.shape[1] - 1] if n else False)


def test_shapes_and_booleans(mode):
    assert launched(mode, shapes, np.zeros((2, 7), np.int32)) == [2735 + (t > 3) for t in range(THREADS)]
