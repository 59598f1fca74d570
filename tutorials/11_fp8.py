# %% [markdown]
"""
# 11 · fp8

Before this: [01 · What a KV cache is](01_what_a_kv_cache_is.py) and [02 · Pages and page tables](02_pages_and_page_tables.py).
The words *row*, *plane* and *bf16* come from there.

    make .venv/ready    # once
    .venv/bin/python tutorials/11_fp8.py
"""

# %%
from math import frexp

import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

from backends.base import DECODE, PROMPT, Sizes, backend_class
from refengine.device import open_device
from refengine.lab.notebook import picture, show, table
from refengine.model import cache_shape
from refengine.registry import load_model
from refengine.verify import attention_oracle, fp8_oracle
from refengine.verify.attention_bits import Bench, Heads

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn

# %% [markdown]
"""
## The question

A cache of 8-bit numbers holds twice the positions of one with 16 bits. But 8 bits are 256 different values. How do keys and
values fit in there, what do they lose, and what stays exact?

## A worked example in numbers

An 8-bit float of the kind **e4m3** has a sign, 4 bits of exponent and 3 bits behind the binary point. Between 1 and 2 there are
eight values: 1, 1 1/8, 1 2/8, ... Between 2 and 4 there are eight again, twice as far apart. And so on, up to 448. Towards zero
the steps shrink as well, down to 1/512. There it ends: below 1/64 they stay at 1/512 (*subnormal* numbers), down to 0.

So a row whose largest number is 1000 does not fit, and one whose numbers are all near 0.001 would lose everything. The cure:
one power of two for each row, kept beside its codes.

    value = code · 2^e

e is the smallest exponent with which the row's largest number comes down to 448 or less. Take a row of four numbers, 1000, -3,
27/64 and 3/256. With e = 1 the largest is 500, too large. With e = 2 it is 250. So e = 2, and each number is divided by 4:

| x | x / 4 | neighbours among the codes | code | code · 4 |
|---|---|---|---|---|
| 1000 | 250 | 240, 256 | 256 | 1024 |
| -3 | -0.75 | it is one | -0.75 | -3 |
| 27/64 | 13.5 / 128 | 13/128, 14/128 | 14/128 | 7/16 |
| 3/256 | 1.5 / 512 | 1/512, 2/512 | 2/512 | 1/64 |

The last two lie just in the middle of their neighbours. Then the *even* one is taken: the one whose last bit is 0. Dividing by
a power of two loses nothing. The only loss is in the step to the next code.
"""

# %%
row = np.array([1000, -3, 27 / 64, 3 / 256])
codes = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)  # the value of every code
assert np.nanmax(codes) == 448 and np.isnan(codes).sum() == 2
assert [x for x in sorted(codes[codes >= 0]) if 1 <= x < 2] == [1 + n / 8 for n in range(8)]
assert {240.0, 256.0, 13 / 128, 14 / 128, 1 / 512, 2 / 512} <= set(codes.tolist())

e = 2
assert 1000 / 2**e <= 448 < 1000 / 2 ** (e - 1)
kept = (row / 2**e).astype(E4M3).astype(np.float64) * 2**e
assert kept.tolist() == [1024, -3, 7 / 16, 1 / 64]
table(["x", "kept as", "off by"], [[x, y, f"{abs(y / x - 1):.1%}"] for x, y in zip(row.tolist(), kept.tolist())])

# %% [markdown]
"""
The largest number is off by 2.4 %. The smallest is off by a third: beside 1000 it is so small that few codes are left for it.
That is what fp8 does. It keeps what is large in a row to within 1/16, and what is tiny beside it only roughly.

## The code

Whole numbers are enough to compute all this. A float's bits *are* a whole number, with the exponent in front:
"""

# %%
show("kernels_numba/fp8.py", "magnitude", "exponent_of", "e4m3")

# %% [markdown]
"""
* `magnitude`: without its sign bit a larger float is a larger integer. So the largest number of a row is found by comparing
  integers.
* `exponent_of`: `largest >> 7` is the exponent of a bf16, with 127 added. 448 is 1.75 · 2^8, so the result is the exponent less
  8 (127 + 8 = 135), or one more if the 7 bits behind are larger than those of 1.75: 0x60.
* `e4m3`: a float32 has 23 bits behind the point, 3 are kept, 20 go. Adding half of what goes (0x7FFFF, and one more if the last
  bit that stays is odd) and cutting off rounds to the nearest, ties to even. A carry runs into the exponent by itself.
  And `120 << 3` makes up for the two kinds of exponent: 127 is added to the one, 7 to the other.
* Below 1/64 there are fixed steps of 1/512. Adding 2^14 to a small number makes the float32 addition itself round to them.
* `min(normal, LARGEST_CODE)`: what is too large *saturates* at 448. Without it, it would become the next code, and that one is
  NaN.

By hand for 250, the first number of the example:
"""

# %%
bits = int(np.float32(250).view(np.uint32))
assert bits == 0x437A0000
code = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
print(f"250 is 0x{bits:08X} as a float32; its code is 0x{code:02X}, exponent {code >> 3} - 7, and {code & 7} eighths")
assert code == 0x78 and codes[code] == 256 == (1 + 0 / 8) * 2 ** (15 - 7)

mantissa, exponent = frexp(1000)  # 1000 = mantissa · 2^exponent, mantissa in [1/2, 1)
assert (mantissa, exponent) == (0.9765625, 10)  # that is 1.953125 · 2^9
assert (9 - 8) + (1.953125 > 1.75) == 2  # e, as exponent_of finds it

# %% [markdown]
"""
The way back:
"""

# %%
show("kernels_numba/fp8.py", "widen", "exponent_at")

# %% [markdown]
"""
A code has 4 significant bits, and bf16 has 8. So `code · 2^e` is a bf16 exactly; nothing is rounded on the way back. (e is kept
between -117 and 119, so that no value leaves the range of bf16.) Why a power of two, and not the exact factor 448 / largest?
Because of this: with any other factor the way back would round once more.

Kernels do the rest as always. They read codes, widen them to bf16, and add and multiply as for a cache of 16 bits. So this must
hold, bit for bit:

> attention through an fp8 cache = attention through a bf16 cache whose rows are the rounded ones

Let us see. `fp8_oracle` does the rounding in NumPy, by another way than the kernels.
"""

# %%
TOKENS = 100
HEADS = Heads(heads=4, kv_heads=1, head_dim=64)
bench = Bench(HEADS, TOKENS, open_device("cpu"))


def read(name, kv, change=None, last=PROMPT):
    """Attention output of all tokens, the last one in a pass of its own, and the stream. change: done to the memory first."""
    sizes = Sizes(TOKENS, page_size=48, spare_pages=2, shuffle=3, kv=kv)
    backend = backend_class(name)(HEADS.shape, sizes)
    stream, outs = backend.open(), []
    for phase, rows in ((PROMPT, TOKENS - 1), (last, 1)):
        batch = backend.batch(phase, [(stream, rows)])
        first = stream.committed
        q = backend.store(0, bench.rows[first : first + rows], bench.norms, bench.rope, batch)
        if change:
            change(backend)
        outs.append(backend.attend(0, q, batch))
        backend.finish(batch)
    return np.concatenate(outs), stream


def round_rows(backend):
    """Every row of a window of bf16, as an fp8 cache gives it back."""
    memory = backend.arena.words[: 2 * TOKENS * 64 // 2].view(BF16).reshape(2 * TOKENS, 64)
    memory[:] = fp8_oracle.through_fp8(memory)


with_fp8, stream = read("window", "fp8")
with_bf16, stream_16 = read("window", "bf16")
rounded, _ = read("window", "bf16", change=round_rows)
assert with_fp8.tobytes() == rounded.tobytes()
assert with_fp8.tobytes() != with_bf16.tobytes()
print("fp8 is bf16 on rounded rows, in every bit")

# %% [markdown]
"""
(The second pass rounds rows that were rounded before. That changes nothing: what came out of an fp8 cache goes in as it is.)

And the cache itself? `save` copies what a stream has written. Codes and exponents are those of the oracle:
"""

# %%
saved, saved_16 = stream.save(), stream_16.save()
found_codes, found_exponents = saved.rows.view(np.uint8), saved.exponents
keys_values = saved_16.rows.view(BF16)  # [layers, K and V, KV heads, positions, D]
wanted_codes, wanted_exponents = fp8_oracle.narrowed(keys_values)
assert (found_codes == wanted_codes).all() and (found_exponents == wanted_exponents).all()
print("exponents of the keys:", np.unique(found_exponents[0, 0]), "- of the values:", np.unique(found_exponents[0, 1]))

# %% [markdown]
"""
### What may not matter, and what does

fp8 has other bits than bf16. It has to. But which *form* of cache it is must not show, nor whether a row was stored by a prompt
pass or by decode. A decode pass looks at its own new row before that is in the cache. It must see the rounded row already, not
the fresh one:
"""

# %%
show("kernels_numba/cache_rows.py", "through_fp8")

# %%
rows = []
for kv in ("bf16", "fp8"):
    for last in (PROMPT, DECODE):
        outs = {name: read(name, kv, last=last)[0].tobytes() for name in ("window", "paged", "paged-p256")}
        rows.append([kv, last, len(set(outs.values()))])
table(["cache", "the last token's pass", "different results of three forms"], rows)
assert all(count == 1 for _, _, count in rows)

# %% [markdown]
"""
How far off is the result? Compare with attention in float64 over the rows as they were:
"""

# %%
backend = backend_class("window")(HEADS.shape, Sizes(TOKENS))
one = backend.open()
batch = backend.batch(PROMPT, [(one, TOKENS)])
q = backend.store(0, bench.rows, bench.norms, bench.rope, batch)
k, v = (part.transpose(1, 0, 2) for part in keys_values[0])
exact = attention_oracle.prompt_attention(q, k, v, 0, float(HEADS.scale)).out


def error(out):
    """Root of the mean square, beside that of the exact result."""
    return float(np.sqrt(((out.astype(np.float64) - exact) ** 2).mean() / (exact**2).mean()))


table(["cache", "error of the output"], [["bf16", f"{error(with_bf16):.2%}"], ["fp8", f"{error(with_fp8):.2%}"]])
assert error(with_bf16) < 0.01 < error(with_fp8) < 0.1

# %% [markdown]
"""
A single number is off by at most 1/16: half a step of 1/8. (Tiny ones, by at most half a step of 1/512, times 2^e.) In a sum
over many keys some errors cancel.
"""

# %%
wide = keys_values.astype(np.float64)
back = fp8_oracle.widened(found_codes, found_exponents).astype(np.float64)
power = np.ldexp(1.0, found_exponents.astype(np.int32))[..., None]
off = np.abs(back - wide)
normal = np.abs(wide) / power >= 1 / 64
assert (off[normal] <= np.abs(wide[normal]) / 16).all()
assert (off[~normal] <= np.broadcast_to(power / 1024, off.shape)[~normal]).all()
print(
    f"numbers off by {(off[normal] / np.abs(wide[normal])).mean():.1%} on average; below 1/64 of 2^e: {(~normal).mean():.2%}"
)

# %% [markdown]
"""
### What it saves

A row of 256 numbers is 256 codes and one exponent: 257 bytes in place of 512. So a cache holds nearly twice the positions.

The exponents of a layer lie together in a page, one byte for each row, behind its codes. Every such plane begins at a multiple
of 16 bytes. With pages of 256 that costs nothing. With pages of one position and 4 KV heads, 12 of the 16 bytes are filling:
"""

# %%
model = load_model("qwen3.8-27b")
shape = cache_shape(model)
assert model.kv_bytes_per_token("bf16") == 16 * 4 * 2 * 512 and model.kv_bytes_per_token("fp8") == 16 * 4 * 2 * 257
rows = []
for page in (1, 16, 48, 256):
    wide, narrow = (4 * shape.page_words(page, kv) / page for kv in ("bf16", "fp8"))
    rows.append([page, f"{wide:,.0f}", f"{narrow:,.0f}", f"{wide / narrow:.3f}"])
table(["page size", "bytes a position, bf16", "fp8", "so many times the positions"], rows)
assert rows[0][2] == f"{16 * 2 * (4 * 256 + 16):,}" and rows[3][2] == f"{16 * 2 * 4 * 257:,}"

# %% [markdown]
"""
## A picture

How far off is a number, as a share of it? Here are numbers of a row whose e is 0. bf16 is equally good everywhere. e4m3 is off
by at most 1/16, from 448 down to 1/64. Below that the share grows until nothing is left; above it everything becomes 448. The
exponent of a row shifts the blue line to the left or right.
"""

# %%
x = np.exp2(np.linspace(-14, 12, 4001))
figure = Figure(figsize=(8, 3.4))
axes = figure.subplots()
for name, y, color in (
    ("e4m3", np.clip(x, -448, 448).astype(E4M3).astype(np.float64), "#0072b2"),
    ("bf16", x.astype(BF16).astype(np.float64), "#e69f00"),
):
    axes.plot(x, np.abs(y / x - 1), color=color, linewidth=0.8, label=name)
for edge, text in ((1 / 64, "1/64"), (448, "448")):
    axes.axvline(edge, color="#888888", linewidth=0.8, linestyle="--")
    axes.text(edge, 1.3, f" {text}", color="#555555")
axes.set(xscale="log", yscale="log", ylim=(1e-5, 2), xlabel="number", ylabel="off by, as a share of it")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
axes.spines[["top", "right"]].set_visible(False)
picture("11-what-rounding-costs", figure)

inside = (x >= 1 / 64) & (x <= 448)
assert np.abs(np.clip(x, -448, 448).astype(E4M3).astype(np.float64) / x - 1)[inside].max() <= 1 / 16
assert np.abs(x.astype(BF16).astype(np.float64) / x - 1).max() <= 2**-8

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 11
    .venv/bin/refengine tutorial check 11

1. `row_exponent`: e of a row. Beware of zeros, of NaN, and of the ends.
2. `value_of`: what a code stands for, from its bits.
3. `nearest_code`: the code of a number: nearest, ties to even, saturating. You may use `value_of`; speed does not matter.
"""

# %% [markdown]
"""
## What production engines do

* vLLM, SGLang, TensorRT-LLM and FlashInfer can keep keys and values in fp8. In vLLM it is `--kv-cache-dtype fp8`.
* The usual scale is one float32 factor for a whole layer's keys and one for its values, found when the model is *calibrated*,
  or 1. It costs no memory, and a row that is larger than what was seen then saturates. One exponent a row costs one byte in
  257.
* There are two common 8-bit floats. e4m3 is the finer one. e5m2 has one bit more of exponent, and one less behind the point.
  Caches mostly take e4m3.
* Some kernels multiply fp8 by fp8 in the tensor core, and do not widen first. That is faster. Queries and weights are then
  rounded to 8 bits, too.
* llama.cpp keeps caches in 8 and in 4 bits, as whole numbers with a scale for each small block.

Faults that such caches have had: a path that forgets the scale; an outlier that becomes NaN, for the conversion does not
saturate; the code of NaN, read as a number. [docs/faults.md](../docs/faults.md) has the tests that hold them off here.
"""

# %% [markdown]
"""
## Next

[12 · Gated DeltaNet beside attention](12_gated_deltanet_beside_attention.py): the other kind of layer, which keeps no rows.
"""
