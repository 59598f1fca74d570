# %% [markdown]
"""
# 14 · Tensor cores, to the bit

Before this: [04 · Why paged equals window](04_why_paged_equals_window.py), where the order of a sum decides its last
bits.

    make .venv/ready    # once
    .venv/bin/python tutorials/14_tensor_cores_to_the_bit.py
"""

# %%
from fractions import Fraction

import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

from kernels_numba.machine import emulate
from kernels_numba.machine.exact_mma import AMPERE, HOPPER, Accumulation
from kernels_numba.matmul import matmul
from refengine.lab.notebook import picture, show, table
from refengine.lab.sources import ROOT

# %% [markdown]
"""
## The question

Nearly all arithmetic of a language model is sums of products. A GPU makes them on *tensor cores*: one instruction,
`mma`, takes 16 products and adds them to a running sum. In what order does it add the 17 numbers?

In none. It does something else, and no float32 addition on a CPU gives the same bits. An engine that wants one result
on a CPU and on a GPU must know exactly what.
"""

# %% [markdown]
"""
## A worked example in numbers

First in decimals. Say that we may keep three digits, and add 0.004 four times to 1.00. One after the other, each sum
is rounded: 1.004 becomes 1.00, and so it stays. All four are lost. A tensor core writes the numbers in one column
instead, with an extra digit, adds them exactly, and then keeps three digits of the sum:

      1.000
      0.004
      0.004
      0.004
      0.004
      -----
      1.016  ->  1.01

*Keeps* means that it drops the rest. It does not round: 1.016 becomes 1.01, not 1.02.

Now in binary. A float32 has 24 bits. The column of an H200 starts at the largest number's first bit and has 25 bits
behind it. A unit of the column's last place is `2^(e - 25)`, where `2^e` is the first bit. What is smaller than a
unit is dropped before the sum, *toward zero*.

Take the products 1 and four times 2^-25. e is 0, and a unit is 2^-25. So the column holds 2^25 units, and four times
1 unit. The sum is 2^25 + 4 units, which is 1 + 2^-23: a float32. Nothing was lost. Float32 additions in order give 1.

Next, 1 and *eight* times 2^-26. The exact sum is the same. But each small number is half a unit, so each is dropped:
the result is 1. Here float32 does better, if it adds the small ones first.
"""

# %%
BF16 = ml_dtypes.bfloat16


def tensor_core(a, b, c=0.0):
    """c + the sum of a · b, 16 each, by the engine's machine: every row of A is a, every column of B is b."""
    quarter = np.arange(32) % 4  # which of a row's words a lane holds
    a, b = (np.array([*x, *[0] * (16 - len(x))], BF16).view(np.uint32) for x in (a, b))
    words = a[quarter], a[quarter], a[quarter + 4], a[quarter + 4], b[quarter], b[quarter + 4]
    return emulate.mma(np.ones(32, bool), *words, *[np.full(32, c, np.float32)] * 4)[0][0]


def in_order(terms):
    """Float32 additions, one after the other."""
    total = np.float32(0)
    for term in terms:
        total += np.float32(term)
    return total


NEXT = 1 + 2.0**-23  # the float32 after 1
four, eight = [1, *[2.0**-25] * 4], [1, *[2.0**-26] * 8]
ones = [1] * 16
assert sum(map(Fraction, four)) == sum(map(Fraction, eight)) == NEXT  # exactly
assert tensor_core(four, ones[:5]) == NEXT and in_order(four) == 1
assert tensor_core(eight, ones[:9]) == 1 and in_order(eight[::-1]) == NEXT
rows = [["1 and 4 of 2^-25", four], ["1 and 8 of 2^-26", eight]]
table(
    ["terms", "float32 in order", "small ones first", "tensor core"],
    [
        [name, *(f"{float(x):.9f}" for x in (in_order(t), in_order(t[::-1]), tensor_core(t, ones[: len(t)])))]
        for name, t in rows
    ],
)

# %% [markdown]
"""
The third example is about the end of the sum. c is 2^-25, and the only product is -1. The exact result, -1 + 2^-25,
lies half way between two float32: -1 and -1 + 2^-24. Rounding to the nearest (even) gives -1. The tensor core drops
what is beyond the 24th bit, toward zero: -1 + 2^-24.
"""

# %%
assert np.float32(-1 + 2.0**-25) == -1
assert tensor_core([-1], [1], c=2.0**-25) == -1 + 2.0**-24

# %% [markdown]
"""
## The code

This is the rule as the engine has it, in whole numbers. A number is a sign, a whole `significand`, and the exponent
of its last bit. `unit` is the exponent of the column's last place. (`group` is for older GPUs, see below.)
"""

# %%
show("kernels_numba/machine/exact_mma.py", "_element", start="largest = exponent[16]", end="c = _encode")
show("kernels_numba/machine/exact_mma.py", "_encode")

# %% [markdown]
"""
In steps:

1. `largest` is the largest exponent of the 17. A product's is the *sum* of its factors' exponents: 1.5 · 1.5 = 2.25
   counts as 2^0, not as 2^1. Zeros take no part. (`_length` is a number's bits, so `_length - 1` is the place of its
   first.)
2. `significand >> -shift` drops bits of the size, so it cuts toward zero, whatever the sign.
3. `total` is a sum of whole numbers. Their order cannot matter.
4. `_encode` keeps 24 bits of the total, cutting again.

`_element` is for odd cases. The machine spends most of its time in a form for whole columns. That one multiplies by a
power of two (`scale`), makes whole numbers (`fptosi` cuts toward zero), and adds those:
"""

# %%
show("kernels_numba/machine/exact_mma.py", "_sum")

# %% [markdown]
"""
### What an H200 says

How does one know? By asking. The repository holds the operands and results of 800 `mma` of an H200: for each, A is 16
× 16, B is 16 × 8, and C and the result are 16 × 8. An `mma` is done by a warp, 32 threads (*lanes*). Each holds some
numbers of each matrix; `matrices` puts them where they belong. A word of A or B holds two bf16.
"""

# %%
with np.load(ROOT / "tests/data/mma_m16n8k16_bf16_h200.npz") as file:
    recorded = {name: file[name] for name in "abco"}  # [800 warps, 32 lanes, words]


def matrices(a, b, c, o):
    """float32 A [warps, 16, 16], B [warps, 16, 8], C and result [warps, 16, 8] from the lanes' words."""
    found = [np.zeros((len(a), 16, n), np.float32) for n in (16, 8, 8, 8)]
    for lane in range(32):
        g, q = divmod(lane, 4)
        for i in range(4):
            row, column = g + 8 * (i % 2), 2 * q + 8 * (i // 2)
            found[0][:, row, column : column + 2] = pair(a[:, lane, i])
            for matrix, words in ((found[2], c), (found[3], o)):
                matrix[:, g + 8 * (i // 2), 2 * q + i % 2] = words[:, lane, i]
        for i in range(2):
            found[1][:, 2 * q + 8 * i : 2 * q + 8 * i + 2, g] = pair(b[:, lane, i])
    return found


def pair(words):
    """The two bf16 of each word, as float32."""
    return np.ascontiguousarray(words).view(BF16).astype(np.float32).reshape(-1, 2)


A, B, C, RESULT = matrices(**recorded)
print("outputs of the H200:", f"{RESULT.size:,}")
assert RESULT.size == 800 * 16 * 8 == 102_400
assert np.allclose(A @ B + C, RESULT, rtol=1e-3, atol=1e-3 * np.abs(RESULT).max(axis=(1, 2), keepdims=True))

# %% [markdown]
"""
Here is the rule once more, in NumPy, for all outputs at once. Float64 holds each product exactly, and the sums of
units, too.
"""

# %%


def exponent(x):
    """e of a number 2^e · 1.xyz; far down for zero."""
    return np.where(x == 0, -1000, np.frexp(x)[1] - 1)


def the_rule(A, B, C):
    terms = A.astype(np.float64)[..., None] * B[:, None]  # [warps, 16, k, 8]
    exponents = exponent(A)[..., None] + exponent(B)[:, None]
    largest = np.maximum(exponents.max(axis=2), exponent(C))
    units = 25 - largest
    column = np.trunc(np.ldexp(terms, units[:, :, None])).sum(axis=2) + np.trunc(np.ldexp(C.astype(np.float64), units))
    kept = np.ldexp(column, -units).view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)  # 24 bits of the 53
    return kept.view(np.float64).astype(np.float32)


assert (the_rule(A, B, C).view(np.uint32) == RESULT.view(np.uint32)).all()
print("all 102,400 outputs, in every bit")

# %% [markdown]
"""
One of them, term by term. It is one where much is cut off, and that float32 additions in order miss.
"""

# %%
PRODUCTS = A[..., None] * B[:, None]  # exact in float32: two factors of 8 bits
float32_in_order = C.copy()
for k in range(16):
    float32_in_order += PRODUCTS[:, :, k]


def units_of(warp, row, column):
    """(e, the 17 terms in units of their column, exactly)."""
    c = C[warp, row, column]
    e = int(max(exponent(c), (exponent(A[warp, row]) + exponent(B[warp, :, column])).max()))
    return e, [Fraction(float(term)) / Fraction(2) ** (e - 25) for term in (c, *PRODUCTS[warp, row, :, column])]


missed = np.argwhere((float32_in_order != RESULT) & (RESULT > 0))
place = next(place for place in missed if sum(unit.denominator > 1 for unit in units_of(*place)[1]) > 6)
e, units = units_of(*place)
names = ["c", *(f"a·b, {k}" for k in range(16))]
table(["term", "in units", "kept"], [[name, f"{float(unit):,.4f}", int(unit)] for name, unit in zip(names, units)])
total = sum(map(int, units))  # int() cuts toward zero
dropped = total % 2 ** (total.bit_length() - 24)  # what is beyond 24 bits
assert (total - dropped) * Fraction(2) ** (e - 25) == Fraction(float(RESULT[*place]))
print(f"a unit is 2^{e - 25}; the sum is {total:,} units, of which {dropped} are dropped, too")
print("H200:", RESULT[*place], "- float32 in order:", float32_in_order[*place])

# %% [markdown]
"""
### Rules that it could have been

Would another rule do as well? The same machine takes other numbers of bits and groups: how many of the 102,400
outputs differ?
"""

# %%
LANES = [
    [np.ascontiguousarray(recorded[name][..., i]).reshape(-1) for i in range(recorded[name].shape[2])] for name in "abc"
]


def share(found):
    """Of the outputs, how many are not the H200's."""
    return float(np.mean(np.asarray(found).view(np.uint32) != RESULT.view(np.uint32)))


def share_of(rule):
    out = emulate.mma(np.ones(len(LANES[0][0]), bool), *LANES[0], *LANES[1], *LANES[2], rule=rule)
    words = np.stack([part.reshape(800, 32) for part in out], axis=2)
    return share(matrices(recorded["a"], recorded["b"], recorded["c"], words)[3])


def pairwise(x):
    """Neighbours are added, then neighbours of those, each sum a float32."""
    while x.shape[2] > 1:
        x = x[:, :, 0::2] + x[:, :, 1::2]
    return x[:, :, 0]


rules = {
    "float32, in order": share(float32_in_order),
    "float32, in pairs": share(pairwise(PRODUCTS) + C),
    "float64, then nearest": share((PRODUCTS.sum(axis=2, dtype=np.float64) + C).astype(np.float32)),
    **{f"column of {bits} bits": share_of(Accumulation(bits, 16, False)) for bits in (23, 24, 25, 26, 27)},
    "25 bits, 8 at a time": share_of(Accumulation(25, 8, False)),
    "model of Ampere": share_of(AMPERE),
}
table(["rule", "outputs that differ"], [[name, f"{part:.1%}"] for name, part in rules.items()])
assert [name for name, part in rules.items() if part == 0] == ["column of 25 bits"]
assert min(part for part in rules.values() if part) > 0.1
assert (HOPPER.fraction_bits, HOPPER.group) == (25, 16)

# %% [markdown]
"""
Only one has none. More bits would be *more* exact, and would be wrong. (Numbers of older GPUs are from published
models: that of Ampere adds 8 products at a time to c, with 24 bits. This engine claims equal bits only for what was
measured.)

### In a kernel

A product of matrices takes K numbers a row, far more than 16. The kernel goes through K in steps of 16, and each
`mma` takes the last one's result as its c:
"""

# %%
show(
    "kernels_numba/matmul.py", "matmul_kernel", start="for step in range", end="c[n, 0], c[n, 1], c[n, 2], c[n, 3] = c0"
)

# %% [markdown]
"""
So within 16 the order is free, and beyond it is not. Let us see: exchange columns of both matrices, which changes no
exact sum. First within each step of 16, then across the steps.
"""

# %%
rng = np.random.default_rng(0)
K = 256
x, w = rng.standard_normal((8, K)).astype(BF16), rng.standard_normal((64, K)).astype(BF16)


def product(order):
    """x · wᵀ by the kernel, float32, with the columns of both in this order."""
    out = np.zeros((len(x), len(w)), np.float32)
    matmul(out, np.ascontiguousarray(x[:, order]), np.ascontiguousarray(w[:, order]))
    return out


straight = product(np.arange(K))
within = product(np.concatenate([rng.permutation(16) + first for first in range(0, K, 16)]))
across = product(rng.permutation(K))
assert within.tobytes() == straight.tobytes()
assert (across != straight).mean() > 0.5
print(f"within steps: the same bits; across: {(across != straight).mean():.0%} of the results have other bits")

# %% [markdown]
"""
## A picture

Left: the rules of above. Right: cutting toward zero has a price. A nearest rounding errs up as often as down. A cut
errs always toward zero, so in a long sum of positive numbers the errors add up. Random numbers between 0 and 1, K of
them: how far is the result from the exact one, on average, in units of the last place?
"""

# %%


def drift(K):
    """(tensor core, float32 in order): mean signed error in last places, over 512 sums of K products."""
    x, w = rng.random((8, K)).astype(BF16), rng.random((64, K)).astype(BF16)
    found = np.zeros((8, 64), np.float32)
    matmul(found, x, w)
    products = x.astype(np.float32)[:, None] * w.astype(np.float32)
    exact = products.sum(axis=2, dtype=np.float64)
    ordered = np.add.accumulate(products, axis=2, dtype=np.float32)[:, :, -1]
    return [float(np.mean((y - exact) / np.spacing(y))) for y in (found, ordered)]


LENGTHS = [16, 64, 256, 512, 1024]
drifts = np.array([drift(K) for K in LENGTHS])
assert (drifts[:, 0] < 0).all() and drifts[-1, 0] < -8 and abs(drifts[-1, 1]) < 2

figure = Figure(figsize=(10.5, 3.4), layout="constrained")
left, right = figure.subplots(1, 2)
colors = ["#b5523b" if part == 0 else "#3b6ea5" for part in rules.values()]
left.barh(list(rules), [100 * part for part in rules.values()], color=colors)
left.plot(0, list(rules).index("column of 25 bits"), "o", color="#b5523b")
left.invert_yaxis()
left.set(xlabel="% of outputs unlike the H200's", title="which rule is it?")
right.plot(LENGTHS, drifts[:, 0], "o-", color="#b5523b", label="tensor core")
right.plot(LENGTHS, drifts[:, 1], "o-", color="#3b6ea5", label="float32 in order")
right.set(xlabel="K", ylabel="mean error, last places", title="sums of K positive products")
right.legend(frameon=False)
picture("14-rules", figure)

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 14
    .venv/bin/refengine tutorial check 14

1. `kept`: 24 bits of a number, cut toward zero.
2. `mma`: one output, of 16 products and c. The test takes outputs of the H200.
3. `dot`: K products, as the matmul kernel adds them.

## What production engines do

* They all run on tensor cores, through cuBLAS, CUTLASS, Triton, FlashAttention or FlashInfer. What one instruction
  does inside is not promised by NVIDIA. Others have found it out by asking, too; they report columns of other widths,
  cut toward zero.
* So their tests compare with tolerances. Equal bits are checked where the *same* GPU runs the *same* kernel twice:
  batch-invariant modes (Thinking Machines' `batch_invariant_ops`, then vLLM and SGLang) fix the order of steps, and
  take the inside as it is.
* tinygrad, too, has an emulator in Python that knows tensor cores, so that its kernels are tested without a GPU.
* The column can matter for quality. DeepSeek reported for V3 that fp8 sums on Hopper keep only about 14 bits. Their
  kernels move the running sum out of the tensor core every 128 products.

The whole rule, with infinities, NaN and the one case where the H200's last bit is not explained, is [numerics
§2](../docs/spec/numerics.md#2-the-tensor-core).

## Next

[15 · Measuring a 0.3 % cost](15_measuring_a_small_cost.py): what paging costs in time, and how one knows.
"""
