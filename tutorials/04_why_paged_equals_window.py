# %% [markdown]
"""
# 04 · Why paged equals window, and four ways to break it

Before this: [02 · Pages and page tables](02_pages_and_page_tables.py). If you have read [03 · The prompt kernel, tile by
tile](03_the_prompt_kernel_tile_by_tile.py), you know the code below; if not, this page says what is needed.

    make .venv/ready    # once
    .venv/bin/python tutorials/04_why_paged_equals_window.py
"""

# %%
from dataclasses import replace

import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

from backends.base import PROMPT, Sizes, backend_class
from refengine.device import open_device
from refengine.lab.changes import changed, show_edits
from refengine.lab.notebook import picture, show, table
from refengine.lab.sources import excerpt
from refengine.verify.attention_bits import Bench, Case, Heads
from refengine.verify.attention_oracle import prompt_attention as exact_attention
from refengine.verify.hashes import array_hash

# %% [markdown]
"""
## The question

A page table only says where rows lie. So attention through pages should give what attention through a window gives. But then,
why do engines give *other* numbers when one changes the page size, or the number of requests at once?

Because a sum of floating-point numbers depends on the order in which it is made. Pages must not change that order. It is easy
to let them.
"""

# %% [markdown]
"""
## A worked example in numbers

A float32 has 24 bits of precision. Above 2²⁴ = 16,777,216 it can no longer tell odd numbers: 16,777,216 + 1 is half way between
two neighbours, and rounds back to 16,777,216: ties go to the even one. Sum the numbers 16777216, 1, 1, 1.

* From left to right, every 1 is lost: 16,777,216.
* In pairs: (16777216 + 1) + (1 + 1) = 16,777,218.
"""

# %%
numbers = np.array([16_777_216, 1, 1, 1], np.float32)


def left_to_right(x):
    """The sum in order, each step rounded to float32."""
    total = np.float32(0)
    for number in x:
        total = total + number
    return total


def page_by_page(x, page_size):
    """The sum of each page, then the sum of these."""
    return left_to_right([left_to_right(x[i : i + page_size]) for i in range(0, len(x), page_size)])


assert left_to_right(numbers) == 16_777_216
assert page_by_page(numbers, 2) == 16_777_218
assert page_by_page(numbers, 3) == 16_777_216  # (16777216 + 1 + 1) + 1
table(["page size", "sum"], [[size, int(page_by_page(numbers, size))] for size in (1, 2, 3, 4)])

# %% [markdown]
"""
So a kernel that sums page by page gives a result that depends on the page size. The cure: sum in groups that have nothing to do
with pages, and ask the page table only *where* a number lies.
"""

# %%


def tile_by_tile(pages, page_table, count, tile=2):
    """The same sum in groups of ``tile``, whatever the page size. pages: [page, slot]."""
    page_size = pages.shape[1]
    x = [pages[page_table[i // page_size], i % page_size] for i in range(count)]  # only this line knows of pages
    return page_by_page(x, tile)


def in_pages(x, page_table, page_size):
    """The numbers laid out in pages; what is not used holds NaN."""
    pages = np.full((max(page_table) + 1, page_size), np.nan, np.float32)
    for i, number in enumerate(x):
        pages[page_table[i // page_size], i % page_size] = number
    return pages


for page_size, page_table in ((1, [2, 0, 3, 1]), (2, [1, 0]), (3, [2, 0]), (4, [1])):
    assert tile_by_tile(in_pages(numbers, page_table, page_size), page_table, 4) == 16_777_218
print("16,777,218 for every page size")

# %% [markdown]
"""
## The code

The engine's kernel for prompts works just so. A **tile** is 64 keys, counted from position 0 of the text. In a tile the scores
of a row are made into weights, the weights are summed, and all is joined to what the tiles before gave. This is a *fold*.

The page table is asked in one place: where a block of threads starts to copy 32 rows (an *item*) into shared memory.
"""

# %%
show("kernels_numba/prompt_attention.py", "stage_item", start="start, slot = layout.locate", end="cp_async16")

# %% [markdown]
"""
1. `layout.locate` finds the item's first row: one lookup.
2. Where pages may end inside an item (`layout.straddles`), a row past the page's edge is looked up for itself.
3. `cp_async16` starts the copy of 16 bytes to the row's place in shared memory, which is the same for every page size. Rows
   past the end of the text (`present` is false) become zeros. (Ignore `swizzled`: it spreads rows over memory banks.)

From there on a row has its place in the item, and nobody knows which page it came from. The sum of a tile's 64 weights, for
example, is always this tree:
"""

# %%
show("kernels_numba/prompt_attention.py", "quad_sum", "row_sum", "fold_row")

# %% [markdown]
"""
Four threads (a *quad*) share a row. Thread q, 0 to 3, has columns 2q and 2q + 1 of every block of 8; `sums[n]` has its two of
block n added up. `quad_sum`
adds the four threads' parts as (0 + 2) + (1 + 3), and `row_sum` adds the eight blocks as a tree. `fold_row` scales the old
total by `alpha`, because the largest score may have grown, and adds the tile's sum with one rounding (`fma`).

None of this mentions a page. We can check that:
"""

# %%
KERNEL = "kernels_numba/prompt_attention.py"
for name in ("score_item", "scale_and_mask", "rescale", "weigh", "row_sum", "fold_row", "scale_output", "add_values"):
    code = excerpt(KERNEL, name).text
    assert not any(word in code for word in ("layout", "pages", "ptok", "locate"))
assert "layout.locate" in excerpt(KERNEL, "stage_item").text

# %% [markdown]
"""
Now see it in bits. A text of 320 random tokens goes through the window, through pages of several sizes in shuffled order,
and through the form with 256 built in.
"""

# %%
TOKENS = 320
bench = Bench(Heads(heads=8, kv_heads=1, head_dim=64), TOKENS, open_device("cpu"))


def attend(name, page_size=48):
    """Attention of the whole text, in one prompt pass: bf16 [tokens, heads, D]."""
    return bench.attend(Case(name, page_size, PROMPT, TOKENS, 0))


def bits(x):
    return x.view(np.uint16)


window = attend("window")
rows = [["window", "-", array_hash(bits(window))]]
for name, page_size in (("paged", 16), ("paged", 48), ("paged", 100), ("paged-p256", 256)):
    found = attend(name, page_size)
    rows.append([name, str(page_size), array_hash(bits(found))])
    assert (bits(found) == bits(window)).all()
table(["backend", "page size", "hash of all outputs"], rows)

# %% [markdown]
"""
## Four ways to break it

Imagine an engine that has one kernel for windows and another for pages, written by other people. Both compute attention, both
are right. Here the real kernel serves the window, and pages get the same kernel with a small change. `changed` edits its source
and runs that.

To see that no version is *wrong*, we also compute everything in float64 and look at the errors of each.
"""

# %%
backend = backend_class("window")(bench.heads.shape, Sizes(TOKENS))
batch = backend.batch(PROMPT, [(backend.open(), TOKENS)])
q = backend.store(0, bench.rows, bench.norms, bench.rope, batch)
k, v = backend.arena.words[: 2 * TOKENS * 32].view(ml_dtypes.bfloat16).reshape(2, TOKENS, 1, 64)
exact = exact_attention(q, k, v, committed=0, scale=bench.heads.scale).out

results = {"none": window}


def errors(x):
    """The largest and the mean distance from the float64 result."""
    distance = np.abs(x.astype(np.float64) - exact)
    return float(distance.max()), float(distance.mean())


def report(name, found):
    """Note a result, and say how it differs from the window's, and where first."""
    results[name] = found
    wrong = np.argwhere(bits(found) != bits(window))
    assert len(wrong), f"{name}: does not break it"
    row, head, dim = (int(n) for n in wrong[0])
    a, b = window[row, head, dim], found[row, head, dim]
    print(f"{len(wrong):,} of {window.size:,} outputs differ; the first at row {row}, head {head}, dim {dim}:")
    print(f"window {float(a):.6g} (0x{a.view(np.uint16):04X}), pages {float(b):.6g} (0x{b.view(np.uint16):04X})")


# %% [markdown]
"""
### 1. Another order of a sum

A score is a dot product of 64 numbers, made by the tensor core in steps of 16. The real kernel goes from the first dimensions
to the last. Why not from the last to the first? Mathematics does not mind.
"""

# %%
BACKWARDS = "D // 16 - 1 - step"
from_the_end = {
    "a0, a1, a2, a3 = queries[step, 0], queries[step, 1], queries[step, 2], queries[step, 3]": (
        f"at = {BACKWARDS}\n            a0, a1, a2, a3 = queries[at, 0], queries[at, 1], queries[at, 2], queries[at, 3]"
    ),
    "k_word = k_row + 4 * ((2 * step + side) ^ swizzle)": (
        f"k_word = k_row + 4 * ((2 * ({BACKWARDS}) + side) ^ swizzle)"
    ),
}
show_edits(from_the_end)
with changed("kernels_numba.prompt_attention", from_the_end):
    report("order of a sum", attend("paged"))

# %% [markdown]
"""
Few outputs differ, for most of the difference is rounded away when a result becomes bf16. That makes this fault so
unpleasant: short tests pass. Then, in some long reply, two words are almost equally likely, the other one wins, and all
that follows is another text.

It can hide even better. Add up the eight blocks of `row_sum` in another order, and no output of this text differs:
"""

# %%
another_tree = {"(w04 + w26) + (w15 + w37)": "((w04 + w26) + w15) + w37"}
show_edits(another_tree)
with changed("kernels_numba.prompt_attention", another_tree):
    hidden = attend("paged")
assert (bits(hidden) == bits(window)).all()

# %% [markdown]
"""
The sums do differ in their last bits (exercise 1 shows it); here all of it was rounded away. Equal in one test is not equal.
So the engine's contract runs each kernel on many cases, and plants faults to see that they are found. This very change is
one of them, in [mutants/prompt_attention.yaml](../refengine/contract/mutants/prompt_attention.yaml).

### 2. Another tile

Smaller tiles, of 32 keys: someone wanted tiles that fit into pages of 32. Here the second half of each tile is masked (`n < 2`
keeps the first 32 keys), and tiles start every 32 keys.
"""

# %%
tiles_of_32 = {
    "key0 = item // 4 * TILE + part % 2 * ITEM": "key0 = item // 4 * ITEM + part % 2 * ITEM",
    "key = tile * TILE + 2 * quad": "key = tile * ITEM + 2 * quad",
    "- 1) // TILE + 1": "- 1) // ITEM + 1",
    "and tile * TILE <= last_seen": "and tile * ITEM <= last_seen",
    "if key + 16 * n + 8 * block + c <= position": "if n < 2 and key + 16 * n + 8 * block + c <= position",
    "p0 if active and column <=": "p0 if n < 2 and active and column <=",
    "p1 if active and column + 1 <=": "p1 if n < 2 and active and column + 1 <=",
}
show_edits(tiles_of_32)
with changed("kernels_numba.prompt_attention", tiles_of_32):
    report("tile of 32", attend("paged"))
of_tiles = bits(results["tile of 32"]) != bits(window)
assert not of_tiles[:32].any()  # rows that see 32 keys at most: one tile is one tile

# %% [markdown]
"""
Many differ now. A weight is rounded to bf16 before it meets the values, and a weight is relative to the largest score *so far*.
With other tiles it is another largest score, so other weights are rounded up or down. The first 32 rows see one tile either
way, and have the same bits.

### 3. A path chosen by the number of rows

This engine has a second way to do attention, without tensor cores: the *scalar path*. It is right, too, and has an order of its
own. Suppose an engine takes it for passes of less than 16 rows, because it may be faster there. Read the text as 310 rows and
then 10:
"""

# %%


def read_in_passes(*passes):
    """The text through pages of 48; a pass of less than 16 rows takes the scalar path."""
    backend = backend_class("paged")(bench.heads.shape, Sizes(TOKENS, page_size=48, shuffle=7))
    stream, outputs = backend.open(), []
    for rows in passes:
        backend.sizes = replace(backend.sizes, attention="scalar-batch" if rows < 16 else "tiles")
        outputs.append(bench.store(backend, PROMPT, stream, rows, attend=True))
    return np.concatenate(outputs)


assert (bits(read_in_passes(320)) == bits(window)).all()
assert (bits(read_in_passes(200, 120)) == bits(window)).all()
report("path by rows", read_in_passes(310, 10))
assert (bits(results["path by rows"]) == bits(window))[:310].all()

# %% [markdown]
"""
The cut of a prompt should not matter, and with one path it does not: 200 + 120 rows give the bits of 320. With the rule, the
last 10 rows are others. And how a server cuts a prompt depends on who else is there. This engine picks its kernels by the
*phase* of a pass, never by its number of rows: *prompt* while a given text is read, *decode* while a reply is written. Tutorial
08 is about a reply that changed for this reason.

### 4. Rescaling in another order

When a tile brings a larger score, the old output is scaled by `alpha`. The real kernel scales first, and lets the tensor
core add the tile's values onto the scaled output. One may as well sum the tile's values alone, from zero, and then
join: `o · alpha + part`.
"""

# %%
join_afterwards = {
    "@kernel\ndef prompt_attention(": '''@device
def join(o, part, alpha_low, alpha_high, *, D):
    """o = o · alpha + part, rounded once; part is emptied."""
    for n in range(D // 16):
        for i in range(8):
            o[n, i] = fma(o[n, i], alpha_low if i % 4 < 2 else alpha_high, part[n, i])
            part[n, i] = float32(0.0)


@kernel
def prompt_attention(''',
    "    s = cuda.local.array((4, 8), float32)": (
        "    part = cuda.local.array((D // 16, 8), float32)\n    s = cuda.local.array((4, 8), float32)"
    ),
    "            o[n, i] = float32(0.0)\n\n    for tile": (
        "            o[n, i] = float32(0.0)\n            part[n, i] = float32(0.0)\n\n    for tile"
    ),
    "            scale_output(o, alpha_low, alpha_high, D=D)\n": "",
    "add_values(o, memory, p, item + 2,": "add_values(part, memory, p, item + 2,",
    "            add_values(o, memory, p, item + 3, lane, D=D, half=1, kv=kv)\n": (
        "            add_values(part, memory, p, item + 3, lane, D=D, half=1, kv=kv)\n"
        "            join(o, part, alpha_low, alpha_high, D=D)\n"
    ),
}
show_edits(join_afterwards)
with changed("kernels_numba.prompt_attention", join_afterwards):
    report("rescaling", attend("paged"))
assert (bits(attend("paged")) == bits(window)).all()  # the real kernel is back

# %% [markdown]
"""
All five beside the float64 result. None stands out: each is as right as bf16 allows. A test with a tolerance would pass them
all, and could not tell an engine that computes the same from one that does not. Only bits can.
"""

# %%
table(
    ["change", "outputs that differ", "largest error", "mean error"],
    [
        [name, int((bits(x) != bits(window)).sum()), *(f"{error:.4e}" for error in errors(x))]
        for name, x in results.items()
    ],
)
largest, mean = errors(window)
for found in results.values():
    assert errors(found)[0] < 1.5 * largest and abs(errors(found)[1] / mean - 1) < 0.02

# %% [markdown]
"""
## A picture

Where outputs differ from the window's, each difference a dot: across, the 8 heads' 64 dimensions; down, the rows of the text.
Dots often lie in short lines: one weight of a row was rounded the other way, which shows in several dimensions of its head.

Why do the panels differ so? It depends on what is rounded otherwise. An order of sums changes last bits of a float32, which
seldom reach bf16. With other tiles other numbers are rounded to bf16 as weights, in each row that sees more than one tile. The
scalar path does not round its weights to bf16 at all, but only 10 rows take it. Rescaling changes a last bit, and only from the
second tile on: before that there is nothing to scale.
"""

# %%
figure = Figure(figsize=(11, 4.4), layout="constrained")
for axes, (name, found) in zip(figure.subplots(1, 4, sharey=True), list(results.items())[1:]):
    different = (bits(found) != bits(window)).reshape(TOKENS, -1)
    row, column = np.nonzero(different)
    axes.scatter(column, row, s=9 if len(row) < 100 else 0.5, color="#b3261e", linewidths=0, rasterized=True)
    axes.set(xlim=(0, different.shape[1]), ylim=(TOKENS, 0), xlabel="head · 64 + dim", title=f"{name}: {len(row):,}")
    axes.set(xticks=range(0, 512, 64), xticklabels=[0, "", 128, "", 256, "", 384, ""], yticks=range(0, TOKENS + 1, 64))
    axes.axhline(64, color="#888888", linewidth=1)
figure.axes[0].set_ylabel("row (the line: end of the first tile)")
picture("04-four-breaks", figure)
assert not (bits(results["rescaling"]) != bits(window))[:64].any()

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 04
    .venv/bin/refengine tutorial check 04

1. `row_sum`: the sum of a tile's 64 weights, in the kernel's order. The test runs the real `row_sum` beside yours.
2. `paged_sum`: a sum over a stream's pages whose bits do not depend on the page size.
3. `first_difference`: the place that `refengine compare` names when two backends part. Compare bits, not numbers: two NaNs are
   not equal as numbers, and 0.0 and -0.0 are.
"""

# %% [markdown]
"""
## What production engines do

* Users have met each of these. FlashInfer's issue 490 asks why another page size gives another result.
* Many decode kernels split a long text among more blocks of threads when there are few requests. That is a tile chosen by the
  batch. FlashInfer can fix it (`fixed_split_size`), and tests its output and sums for equal bits then.
* vLLM has a *batch invariant* mode, and SGLang a *deterministic* one: a reply is then the same alone and in a crowd. They cost
  speed. vLLM tests also that *without* the mode differences do appear, for a check that cannot fail proves nothing.
* Thinking Machines' `batch_invariant_ops` asked a model the same question 1,000 times: 18 different replies without such
  kernels, one with them.
* FlashInfer has a test that paged and contiguous prompts agree in every bit, with shuffled pages and NaN in all that is unused.

Here it holds for prompts and decode, for every form of cache, on a CPU and on a GPU, and `refengine compare` shows it for a
whole model.
"""

# %% [markdown]
"""
## Next

[05 · What a page lookup costs](05_what_a_page_lookup_costs.py): the bits are free, the lookups are not. The order of every sum
is written down in [the spec](../docs/spec/attention.md).
"""
