# %% [markdown]
"""
# 03 · The prompt kernel, tile by tile

Before this: [02 · Pages and page tables](02_pages_and_page_tables.py). You need no CUDA: the few words of it are explained here.

> **Words so far**
>
> * *row*: what belongs to one token in an array. A row of the prompt is one of its tokens, for which each query head has a
>   result; a row of the cache is one key, or one value, of one KV head.
> * *KV head*: the keys and values that a group of query heads looks into.
> * *page*, *slot*, *page table*: a piece of memory for so many positions; a place in it; the list of a text's pages.
> * *stream*, *pass*: a text's place in the cache; one run over some of its new tokens. *window*: a cache without pages.

    make .venv/ready    # once
    .venv/bin/python tutorials/03_the_prompt_kernel_tile_by_tile.py
"""

# %%
from math import exp, isclose, log

import ml_dtypes
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from backends.base import PROMPT, Sizes, backend_class
from kernels_numba.machine import checked
from kernels_numba.prompt_attention import ITEM, THREADS, TILE, launch_shape, slot_words, slots
from refengine.device import open_device
from refengine.lab.changes import changed, show_edits
from refengine.lab.notebook import picture, show, table
from refengine.verify.attention_bits import Bench, Heads
from refengine.verify.attention_oracle import prompt_attention

# %% [markdown]
"""
## The question

Softmax divides by a sum over all keys, and needs the largest score first. Must the kernel keep a row's scores until it has seen
the last key?

For a prompt of 4,096 tokens and 24 heads the scores would be 400 million numbers in each layer. The kernel does not store
them. It goes through the keys in pieces, keeps very little for each row, and mends what it has when a larger score turns up.
"""

# %%
assert 4096 * 4096 * 24 == 402_653_184

# %% [markdown]
"""
## A worked example in numbers

One query, four keys, one number a value. The scores are logarithms, so that `exp` gives nice numbers:

| key | score | exp(score) | value |
|---|---|---|---|
| 0 | 0 | 1 | 4 |
| 1 | ln 2 | 2 | 8 |
| 2 | ln 4 | 4 | 2 |
| 3 | 0 | 1 | 16 |

All at once: the weights are 1/8, 2/8, 4/8, 1/8. The result is (4 + 16 + 8 + 16) / 8 = 5.5.

Now in two *tiles* of two keys. A row keeps three things:

* `m`, the largest score so far,
* `l`, the sum of all `exp(score - m)`,
* `o`, the sum of all `exp(score - m) · value`.

**Tile 0.** The largest score is `m` = ln 2. The weights are exp(0 - ln 2) = 1/2 and exp(0) = 1. So `l` = 1.5 and
`o` = 1/2 · 4 + 1 · 8 = 10.

**Tile 1.** Its largest score is ln 4, so `m` must grow from ln 2 to ln 4. What was summed with the old `m` is now too large, by
exp(ln 4 - ln 2) = 2. So both sums are multiplied by alpha = exp(old m - new m) = 1/2, and then the tile's own weights, 1 and 1/4,
are added:

    l = 1.5 · 1/2 + (1 + 1/4)            = 2
    o = 10  · 1/2 + (1 · 2 + 1/4 · 16)   = 11

At the end, `o / l` = 5.5. To take a tile in like this is to *fold* it; the method is called *online softmax*.
"""

# %%
scores, values = [0.0, log(2), log(4), 0.0], [4.0, 8.0, 2.0, 16.0]
weights = [exp(s) for s in scores]
at_once = sum(w * v for w, v in zip(weights, values)) / sum(weights)

m = scores[1]
l = exp(scores[0] - m) + exp(scores[1] - m)  # noqa: E741
o = exp(scores[0] - m) * values[0] + exp(scores[1] - m) * values[1]
assert isclose(l, 1.5) and isclose(o, 10)

alpha = exp(m - scores[2])
m = scores[2]
l = l * alpha + exp(scores[2] - m) + exp(scores[3] - m)  # noqa: E741
o = o * alpha + exp(scores[2] - m) * values[2] + exp(scores[3] - m) * values[3]
assert isclose(alpha, 0.5) and isclose(l, 2) and isclose(o, 11)
assert isclose(o / l, at_once) and isclose(at_once, 5.5)

# %% [markdown]
"""
However many keys there are, a row keeps `m`, `l` and one `o` for each number of a value. Keys that the row must not see, those
after its own position, are *masked*: their score is minus infinity, so their weight is exp(-∞) = 0.

## The code

The kernel is run by *blocks* of 256 threads. A block takes some neighbouring rows of the prompt, for some query heads that share
a KV head: they all need the same keys and values, so these are fetched once. 32 threads in step are a *warp*. Each of the 8 warps
has 16 rows of one head.

With 4 query heads to a KV head, the 8 warps are 4 heads times 2 groups of 16 rows. So a block takes 32 rows, and 100 rows make 4
blocks:
"""

# %%
grid, threads, _ = launch_shape(rows=100, heads=4, kv_heads=1, D=64)
assert (grid, threads) == ((4, 1), 256)

# %% [markdown]
"""
Here is the way of a block through its tiles. A tile has 64 keys. They are fetched in *items* of 32 rows, four to a tile: the
lower and the upper half of its keys, then of its values. From here on, item n is the block's n-th fetch. So items 0 and 2 are of
the same positions, 0 to 31, once their keys and once their values. (In tutorial 02 an item was just 32 positions.)
"""

# %%
show("kernels_numba/prompt_attention.py", "prompt_attention", start="for tile in range(tiles)", end="half=0, kv=kv)")
show("kernels_numba/prompt_attention.py", "prompt_attention", start="# Fold: s becomes p", end="half=0, kv=kv)")

# %% [markdown]
"""
(What stands between the two parts is the tile's second item, in the same way; after them comes the fourth. `half` says which 32
of the tile's 64 keys an item has: 0 the lower, 1 the upper.)

1. `await_item`: wait until the item's rows have arrived in *shared memory*, the block's own fast memory.
2. `score_item`: the warp's 16 queries times the item's 32 keys. Tensor cores do it, 16 × 8 × 16 numbers an instruction
   (tutorial 14).
3. `next_item`: nobody needs the item any more, so its place takes the one that comes next. Copies run while the block computes.
4. `fold_row`: the fold. `s` holds scores before and weights after. Who has which row? A thread's number in its warp is its
   *lane*, 0 to 31. Four lanes, a *quad*, share two of the warp's 16 rows: row g, with g = lane // 4, and row g + 8. So `fold_row`
   is called once for each: `part=0` is row g, `part=1` is row g + 8.
5. `scale_output`: `o · alpha`, and `add_values`: the weights times the values, added onto `o`. Tensor cores again.

This is the fold. Compare it with what you did by hand. `@lanewise` marks arithmetic that each lane does alone, with its own
numbers; `@device` marks functions in which lanes may also exchange numbers.
"""

# %%
show("kernels_numba/prompt_attention.py", "scale_and_mask", "rescale", "weigh", "fold_row")

# %% [markdown]
"""
* `scale_and_mask`: a score is multiplied by `1 / sqrt(D)`; past the row's own `position` it is minus infinity.
* `rescale`: the new largest score, and alpha. Before the first tile `m` is minus infinity and nothing was summed, so alpha is 0.
  A tile in which the row sees nothing (`active` is false) leaves everything as it is.
* `weigh`: the weights. `exp_to_one` is this engine's `exp` for numbers up to 0. It has the same bits on every machine.
* `fold_row`: `fma(total, alpha, row_sum(sums))` is `l · alpha + sum`, rounded once.

`row_sum` adds the 64 weights in an order that is written down, and so is every other order here. That is tutorial 04.

Does it compute attention? Let us read 100 tokens through a window, take the keys and values out of the cache, and compute the
same in float64, all at once.
"""

# %%
TOKENS = 100
HEADS = Heads(heads=4, kv_heads=1, head_dim=64)
bench = Bench(HEADS, TOKENS, open_device("cpu"))


def stored(name, page_size=48):
    """(backend, batch, queries) of a prompt pass whose keys and values are in the cache, ready to attend."""
    backend = backend_class(name)(HEADS.shape, Sizes(TOKENS, page_size=page_size, spare_pages=2, shuffle=3))
    batch = backend.batch(PROMPT, [(backend.open(), TOKENS)])
    return backend, batch, backend.store(0, bench.rows, bench.norms, bench.rope, batch)


backend, batch, q = stored("window")
right = backend.attend(0, q, batch)

plane = TOKENS * 64 // 2  # words: two bf16 numbers each; the window has all keys, then all values
k, v = backend.arena.words[: 2 * plane].view(ml_dtypes.bfloat16).reshape(2, TOKENS, 1, 64)
exact = prompt_attention(q, k, v, committed=0, scale=float(HEADS.scale)).out
error = np.abs(right.astype(np.float64) - exact).max()
largest = np.abs(exact).max()
print(f"largest difference {error:.5f}; results reach {largest:.2f}")
assert 2 < largest < 4 and error < 2.0**-7

# %% [markdown]
"""
The difference comes from rounding: the weights are made bf16 before they meet the values, and the result is a bf16 number.
Between 2 and 4 these stand 1/64 apart, so rounding moves a number by half of that at most, 2⁻⁷ = 0.0078. No result is off by
more.

### Who sees what

A row at position 70 must not look at key 71. Change the value of token 70, and see whose results change:
"""


# %%
def rows_changed(new_words):
    """The rows whose results change when token 70's value becomes something else."""
    backend, batch, q = stored("window")
    backend.arena.words[plane + 70 * 32 : plane + 71 * 32] = new_words
    found = backend.attend(0, q, batch)
    return np.flatnonzero((found != right).any(axis=(1, 2)))  # NaN is not equal to anything


assert rows_changed(0x3F803F80).tolist() == list(range(70, 100))  # 1.0, 1.0
print("row 70 and those after it")

# %% [markdown]
"""
Now the same with *not a number* (NaN). Beware:
"""

# %%
spoiled = rows_changed(0x7FC07FC0)
print("rows", spoiled[0], "to", spoiled[-1])
assert spoiled.tolist() == list(range(64, 100))

# %% [markdown]
"""
Rows 64 to 69 are spoiled, too, and they do not see key 70. They meet it all the same: it lies in their tile, its weight is 0, and
0 times NaN is NaN. A weight of 0 does not keep a value out. Rows below 64 are safe, because their blocks never fetch that tile.

So what stands behind the last token? The last tile here is positions 64 to 127, and the text ends at 99. The memory behind it may
hold anything. Look for `keys` in the function that fetches an item: a row past the end is not read, its place is filled with
zeros.
"""

# %%
show("kernels_numba/prompt_attention.py", "stage_item", end="cp_async16")

# %% [markdown]
"""
(Lines with `fp8` or `exp` are about a cache of 8-bit numbers, tutorial 11.) All 256 threads run this. Each copies pieces of 16
bytes: with 64 numbers a row, a row has 8 pieces, and an item's 32 rows are just 256 pieces.

1. `part` says which of the four items of a tile it is, `key0` is its first position.
2. `layout.locate` is the address function of tutorial 02. One lookup finds the page of the item's first row, and `source` is
   where this thread's row would be, *if it were in the same page*. (The whole item may lie past the text's end. Then there is no
   page for its first row, and `min(key0, keys - 1)` asks for that of the last key instead; nothing is read from there.)
3. It may not be. The item *straddles* when `slot + row` goes past the page's last slot, `ptok - 1`. Then the row has a page of
   its own to find: the second lookup. For a window this branch does not exist, since `layout.straddles` is known when the kernel
   is compiled.
4. `cp_async16` starts a copy of 16 bytes to shared memory. Its last argument says how many of them to read, all or none:
   `int32(16) if present else int32(0)`. What is not read becomes zeros.
5. `swizzled` is the piece's place in its row. Ignore it: it spreads neighbouring rows over the *banks* of shared memory, so that
   many threads can read at once. `count` is for checked mode, see below.

You can watch this. `.venv/bin/refengine trace prompt_attention --page-size 48` runs one block and writes a page on which you step
through it; it opens where an item is looked up twice.

Is the second lookup needed? Leave it out:
"""

# %%
EDIT = {"if layout.straddles and slot + row >= ptok and key0 + row < keys:": "if False:"}
show_edits(EDIT)


def through(name, page_size, edits=None):
    """The attention of all rows, through a kernel with edits."""
    with changed("kernels_numba.prompt_attention", edits or {}):
        backend, batch, q = stored(name, page_size)
        return backend.attend(0, q, batch)


def wrong_rows(found):
    return np.flatnonzero((found != right).any(axis=(1, 2))).tolist()


assert wrong_rows(through("paged", 48)) == []
results = []
for page_size in (16, 48, 64):
    wrong = wrong_rows(through("paged", page_size, EDIT))
    results.append([page_size, len(wrong), f"{wrong[0]} to {wrong[-1]}" if wrong else ""])
table(["page size", "wrong rows", "which"], results)
assert [rows for _, rows, _ in results] == [TOKENS, TOKENS, 0]

# %% [markdown]
"""
With pages of 64 nothing is wrong: 32 divides 64, no item straddles. With 48, item 1 (the keys of positions 32 to 63) and item 3
(their values) straddle. Both take their last 16 rows from what lies behind slot 47 of the page of entry 0, which is page 4 here.
What lies there?

* Behind the page's keys: the page's own values. So the scores of keys 48 to 63 are wrong, though they are numbers.
* Behind its values: the next page of memory. Page 4 is the pool's last one, in this shuffled order, so that is the null page,
  which holds NaN.
"""

# %%
backend, _, _ = stored("paged", 48)
page, plane_words = int(backend.pages[0]), 48 * 64 // 2
assert page == 4 and backend.null_page == 5 and backend.page_words == 2 * plane_words
behind = page * backend.page_words + np.array([1, 2]) * plane_words  # the words where the keys end, and the values
taken = [backend.arena.words[word : word + 16 * 32].view(ml_dtypes.bfloat16).astype(np.float32) for word in behind]
assert np.isfinite(taken[0]).all() and np.isnan(taken[1]).all()
assert np.isnan(through("paged", 48, EDIT).astype(np.float32)).all()

# %% [markdown]
"""
All rows of the prompt are wrong, even those that see only keys below 48: every number is NaN. It is the trap that you just saw.
For these rows the weight of keys 48 to 63 is 0, and that does not help.

How often does it happen? In *checked mode* the CPU machine watches a launch and counts. `sample` chooses a block. Here each of
the four is watched in turn, with pages that straddle and pages that do not:
"""


# %%
def counts(page_size, block):
    """What checked mode counts in a block: page lookups by its threads, items that straddle."""
    backend, batch, q = stored("paged", page_size)
    with checked(sample=lambda grid: (block, 0, 0)) as report:
        backend.attend(0, q, batch)
    return report.counters["lookups"], report.counters["straddles"]


rows = []
for block in range(4):
    tiles = (min(32 * (block + 1), TOKENS) - 1) // TILE + 1  # up to the one with the block's last row
    lookups, straddles = counts(64, block)
    assert lookups == 4 * tiles * THREADS and straddles == 0  # one lookup an item, in every thread
    more, straddles = counts(48, block)
    rows.append([f"{32 * block} to {min(32 * block + 31, TOKENS - 1)}", tiles, 4 * tiles, lookups, more, straddles])
table(["rows of the block", "tiles", "items", "lookups at 64", "at 48", "items that straddle"], rows)
assert [tiles for _, tiles, *_ in rows] == [1, 1, 2, 2]
assert [straddles for *_, straddles in rows] == [2, 2, 2, 2]  # items 1 and 3: keys and values of positions 32 to 63
assert all(more == lookups + 2 * 16 * 8 for *_, lookups, more, _ in rows)  # 16 rows of 8 pieces, twice

# %% [markdown]
"""
The blocks of the first 64 rows stop after tile 0: nobody in them sees a later key. What these lookups cost is tutorial 05.

While a block computes with one item, others are on their way. Shared memory has room for 8 items of this size, two whole tiles.
(The code calls such a place a *slot*, too. It has nothing to do with the slots of a page.)
With 256 numbers a row it has room for 2:
"""

# %%
assert (slots(64), slots(256)) == (8, 2)
assert 4 * slot_words(256) == ITEM * 256 * 2 == 16_384  # bytes of an item, two bytes a number

# %% [markdown]
"""
## A picture

192 rows and their keys, as blocks and tiles. Blue: scores that count. Pale: computed and masked, because tiles are whole. White:
tiles that a block never fetches. Dotted lines: where the upper half of a tile begins, its second item. Orange: one block's way,
and one tile of it.
"""

# %%
ROWS = 192
figure = Figure(figsize=(6.5, 6))
axes = figure.subplots()
computed = 0
for row0 in range(0, ROWS, 32):
    for tile in range((row0 + 31) // TILE + 1):
        axes.add_patch(Rectangle((tile * TILE, row0), TILE, 32, facecolor="#d6e7f7", edgecolor="#8899aa"))
        computed += 32 * TILE
axes.fill([0, 0, ROWS], [0, ROWS, ROWS], facecolor="#3b6ea5", alpha=0.75)
for first, width, name, ink in ((0, ROWS, "block", "#8a4b08"), (TILE, TILE, "tile", "#ffffff")):  # of rows 128 to 159
    axes.add_patch(Rectangle((first, 128), width, 32, fill=False, edgecolor="#d98c3f", linewidth=2.5, zorder=3))
    axes.text(first + width - 3, 157, name, color=ink, ha="right", weight="bold", zorder=4)
for key in range(ITEM, ROWS, TILE):
    axes.axvline(key, color="#8899aa", linestyle=":", linewidth=0.8)
axes.set(xlim=(0, ROWS), ylim=(ROWS, 0), aspect="equal", xlabel="key", ylabel="row of the prompt")
axes.set(xticks=range(0, ROWS + 1, TILE), yticks=range(0, ROWS + 1, 32))
visible = ROWS * (ROWS + 1) // 2
axes.set_title(f"{computed:,} scores computed, {visible:,} count")
picture("03-tiles", figure)
assert computed == 2 * 32 * 64 * (1 + 2 + 3) == 24_576 and visible == 18_528

# %% [markdown]
"""
The longer the prompt, the smaller the part that is wasted: only tiles on the diagonal have masked keys.

## Exercises

    .venv/bin/refengine tutorial start 03
    .venv/bin/refengine tutorial check 03

1. `item_rows`: what a block fetches as its n-th item.
2. `fold`: a tile into (m, l, o), with keys that are masked. Test it on a tile in which nothing is visible.
3. `attend`: one row's attention, tile by tile. It may fetch no tile that the row does not need.
"""

# %% [markdown]
"""
## What production engines do

* FlashAttention made this way of attention standard: tiles through shared memory, online softmax, no table of scores. FlashInfer,
  vLLM, SGLang and TensorRT-LLM have or use kernels of this kind. The form of `m`, `l`, `o` is the same everywhere; tile sizes
  differ from kernel to kernel and from GPU to GPU.
* Engines cut long prompts into chunks (*chunked prefill* in vLLM and SGLang), so that others need not wait. A chunk's rows begin
  at a later position; that is the `committed` of the code above. Here a row's bits do not depend on the chunks.
* In FlashInfer, somebody found that scores below a "large negative number" used as mask came out as zeros. That is why a mask
  should be minus infinity.
"""

# %% [markdown]
"""
## Next

[04 · Why paged equals window, and four ways to break it](04_why_paged_equals_window.py): the fixed order of every sum.
"""
