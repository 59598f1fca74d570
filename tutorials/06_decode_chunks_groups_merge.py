# %% [markdown]
"""
# 06 · Decode: chunks, groups, merge

Before this: [03 · The prompt kernel, tile by tile](03_the_prompt_kernel_tile_by_tile.py). You need its `m`, `l`, `o` and the
fold.

> **Words so far**
>
> * *block*, *warp*, *lane*: 128 or 256 threads that share fast memory; 32 of them in step; one of the 32.
> * *tile*: 64 keys, counted from position 0. *fold*: to take a tile into a row's `m`, `l`, `o`.
> * *row*: here, a new token. Each query head has results of its own for it. *KV head*: the keys and values that several query
>   heads look into.
> * *pass*, *phase*: one run over new tokens; *prompt* where they are given text, *decode* where they are the reply's.
> * *committed*: how many positions of a text are in the cache already.

    make .venv/ready    # once
    .venv/bin/python tutorials/06_decode_chunks_groups_merge.py
"""

# %%
from contextlib import ExitStack
from math import exp, inf, isclose, log

import ml_dtypes
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from backends.base import DECODE, PROMPT, Sizes, backend_class
from kernels_numba.decode_plan import CHUNK, GROUP_CHUNKS, plan_decode
from kernels_numba.prompt_attention import heads_per_block, launch_shape
from kernels_numba.streams import COLUMNS, COMMITTED, ROWS
from refengine.device import open_device
from refengine.lab.changes import changed, show_edits
from refengine.lab.notebook import picture, show, table
from refengine.registry import load_model
from refengine.verify.attention_bits import Bench, Heads

# %% [markdown]
"""
## The question

A prompt of 4,000 tokens gives the prompt kernel hundreds of blocks, since rows are shared out among blocks. In *decode* a text
has one new token: one row. Who works on a GPU with more than a hundred processors, and does the result depend on how the work was
shared?

The work must be cut along the *keys*. Then each piece is a sum of its own, and sums must be joined. Joining rounds. So the
interesting part is to cut in such a way that nobody can tell from the bits.

In numbers, for `qwen3.8-27b`: 24 query heads, 6 to a KV head. A block of the prompt kernel has 8 warps of 16 rows of one head.
Here it takes 2 of the 6 heads and so 4 groups of 16 = 64 rows. That makes 24 / 2 = 12 blocks for 64 rows, and 4000 / 64 → 63
times as many for 4,000: 63 · 12 = 756 blocks. For one row it is 12.
"""

# %%
assert heads_per_block(24 // 4) == 2
assert launch_shape(rows=4000, heads=24, kv_heads=4, D=256)[0] == (-(-4000 // 64), 24 // 2) == (63, 12)
assert launch_shape(rows=1, heads=24, kv_heads=4, D=256)[0] == (1, 12)

# %% [markdown]
"""
## A worked example in numbers

The four keys of tutorial 03: `exp(score)` is 1, 2, 4, 1, the values are 4, 8, 2, 16, and the result is 5.5. Two blocks take two
keys each. Each begins from nothing and leaves a *partial*:

| | keys | m | l | o |
|---|---|---|---|---|
| A | 0, 1 | ln 2 | 1/2 + 1 = 1.5 | 1/2 · 4 + 1 · 8 = 10 |
| B | 2, 3 | ln 4 | 1 + 1/4 = 1.25 | 1 · 2 + 1/4 · 16 = 6 |

Neither knew the other's largest score. To *merge* them, bring both to the larger m = ln 4. A is multiplied by
a = exp(ln 2 - ln 4) = 1/2, B by b = exp(ln 4 - ln 4) = 1:

    l = 1.5 · 1/2 + 1.25 · 1 = 2
    o = 10  · 1/2 + 6 · 1    = 11           o / l = 5.5

A partial is small: two numbers, and one for each number of a value. No keys, no scores.
"""

# %%
A, B = (log(2), 1.5, 10.0), (log(4), 1.25, 6.0)


def fold_parts(part, other):
    """Join two partials (m, l, o), in Python's floats."""
    m = max(part[0], other[0])
    a, b = exp(part[0] - m), exp(other[0] - m)
    return m, part[1] * a + other[1] * b, part[2] * a + other[2] * b


m, total, o = fold_parts(A, B)
assert isclose(m, log(4)) and isclose(total, 2) and isclose(o, 11) and isclose(o / total, 5.5)
assert fold_parts((-inf, 0.0, 0.0), B) == B  # joined to nothing, a partial is itself

# %% [markdown]
"""
In exact arithmetic the order of merging is free. In float32 it is not, as with any sum. So this engine fixes the whole tree, by
positions alone:

    a tile is 64 keys,  a chunk 8 tiles (512 keys),  a group 4 chunks (2,048 keys),  a row all its groups

Chunks and groups count from position 0. Inside a chunk, tiles are folded one after the other, from nothing. Chunks are folded in
order into their group, groups in order into the row.

Who computes which part of the tree may differ. The tree may not.

## The code

Three kernels do it, one after the other:

* `decode_rows`: the whole chunks of keys that are in the cache. A block takes one chunk, or a whole group.
* `decode_partial`: the last chunk, which is not full, and the keys of the new rows themselves. They are not in the cache yet, but
  in the *record* of the pass's new rows. A new row may be a *draft*: a guess at what the reply's next tokens are, made by
  something cheap. Several guesses are checked in one pass, and wrong ones are thrown away. (The code calls a text's new rows its
  *window*. This has nothing to do with the form of cache of that name.)
* `decode_merge`: all partials of a row into its result.

The plan says how many partials there are. `committed` is the number of positions in the cache, `rows` the number of new rows.
Three words of this code: a *program* is a block. An *item* is a piece of work for a block, nothing that is fetched. And `group`,
the argument of `items_of`, is how many query heads share a KV head; all other groups are groups of chunks.
"""

# %%
show("kernels_numba/decode_plan.py", "folded_groups", "slots_of", "items_of")

# %% [markdown]
"""
A *slot* is the place of a partial, counted for each row from 0. Where whole groups times new rows make 64 or more, there are
blocks enough without cutting further: a block folds a whole group and leaves one partial in place of four. Else each chunk has a
block.

An item is three numbers, (stream, pair, code). A *pair* is a new row and a query head; a block takes 16 of them, from this one
on. The code says which keys: j from 0 on is the whole group j; a negative one, -1 - c, is chunk c of those behind the whole
groups.
"""


# %%
def plan_of(committed, rows, heads=4, kv_heads=1, head_dim=64):
    """The plan of a pass with one stream."""
    stream = np.zeros((1, COLUMNS), np.int64)
    stream[0, COMMITTED], stream[0, ROWS] = committed, rows
    return plan_decode(stream, heads, kv_heads, head_dim)


lines = []
for committed, rows in ((700, 1), (10_000, 1), (10_000, 16), (131_072, 1)):
    plan = plan_of(committed, rows)
    codes = [code for _, pair, code in plan.items.tolist() if pair == 0]
    groups, chunks = sum(code >= 0 for code in codes), sum(code < 0 for code in codes)
    lines.append([committed, rows, groups, chunks, plan.slots[0]])
table(["committed", "rows", "groups in one block", "whole chunks", "slots"], lines)
assert [slots for *_, slots in lines] == [2, 20, 8, 65]
assert 131_072 // 2048 == 64 and 64 * 1 >= 64  # one row of a text this long is cut by groups

# %% [markdown]
"""
How many blocks is that? `qwen3.8-27b` has 4 KV heads, and each has blocks of its own. A block's tensor-core instruction has 16
rows, and takes one pair in each, all of which share the block's keys. One row with 6 query heads to a
KV head fills 6 of the 16:
"""

# %%
heads = load_model("qwen3.8-27b").attention
assert (heads.heads, heads.kv_heads) == (24, 4)
plans = [plan_of(10_000, rows, heads.heads, heads.kv_heads, heads.head_dim) for rows in (1, 2, 3)]
assert plans[0].rows_grid == 19 * 4 == plans[1].rows_grid  # 2 rows of 6 heads still fit into 16
assert plans[2].rows_grid == 19 * 4 * 2
print("blocks of decode_rows for 1, 2, 3 rows:", [plan.rows_grid for plan in plans])

# %% [markdown]
"""
Two rows cost as many blocks as one, and read the keys as often. This is what drafting lives on.

Now the joint. `fold_sums` is the merge that you did by hand, without `o`:
"""

# %%
show("kernels_numba/decode_attention.py", "fold_sums", "fold_pair")
show("kernels_numba/decode_attention.py", "decode_merge", start="empty(state)", end="low, high = state[2]")

# %% [markdown]
"""
* `cm`, `cl`, `co` are those of the part that is joined (`first` and `second` are two numbers of its `co`).
* A part with `cl` = 0 is empty, and changes nothing. (A row that does not reach a chunk leaves an empty part there.)
* `decode_merge` takes the slots in order. The first `folded` of them are whole groups. The others are chunks: every fourth ends a
  group.

Inside `decode_rows` a group is made by the same fold, from an empty group as well. A block that takes a single chunk does it,
too: joined to nothing, a chunk is itself.
"""

# %%
show("kernels_numba/decode_attention.py", "decode_rows", start="if tile % CHUNK_TILES ==", end="start_chunk(state")
show("kernels_numba/decode_attention.py", "decode_rows", start="== CHUNK_TILES - 1", end="fold_chunk(")

# %% [markdown]
"""
### The cut does not show

A text of 2,600 positions has one whole group and chunks after it. With one row the plan lets each chunk have its block. Change
the threshold of 64 to 1, and a block folds the group:
"""

# %%
POSITIONS = 2_600
bench = Bench(Heads(heads=4, kv_heads=1, head_dim=64), POSITIONS + 8, open_device("cpu"))


def decode(committed, rows, name="paged", edits=None):
    """(output, plan, scratch) of ``rows`` new rows after ``committed`` positions. edits: of modules, by name."""
    with ExitStack() as changes:
        for module, changed_text in (edits or {}).items():
            changes.enter_context(changed(f"kernels_numba.{module}", changed_text))
        sizes = Sizes(POSITIONS + 8, page_size=48, spare_pages=2, shuffle=3, window_rows=8)
        backend = backend_class(name)(bench.heads.shape, sizes)
        stream = backend.open()
        bench.store(backend, PROMPT, stream, committed)
        batch = backend.batch(DECODE, [(stream, rows)])
        new = bench.rows[committed : committed + rows]
        out = backend.attend(0, backend.store(0, new, bench.norms, bench.rope, batch), batch)
        return out, batch.plan, batch.scratch


by_chunks, plan, scratch = decode(POSITIONS, 1)
THRESHOLD = {"decode_plan": {"MIN_GROUPED = 64": "MIN_GROUPED = 1"}}
show_edits(THRESHOLD["decode_plan"])
by_groups, other, _ = decode(POSITIONS, 1, edits=THRESHOLD)
assert (plan.slots, len(plan.items)) == ((6,), 5) and (other.slots, len(other.items)) == ((3,), 2)
assert by_groups.tobytes() == by_chunks.tobytes()
print("6 partials or 3: the same bits")

# %% [markdown]
"""
Nor does it show who else is in the pass. Four new rows together, each of which follows the one before, or the first of them
alone:
"""

# %%
together, plan_of_four, _ = decode(POSITIONS, 4)
assert len(plan_of_four.items) == len(plan.items)  # 4 rows of 4 heads: the 16 pairs of the same blocks
assert together[0].tobytes() == by_chunks[0].tobytes()
for row in range(1, 4):
    alone, _, _ = decode(POSITIONS + row, 1)  # the rows before it are in the cache now
    assert alone[0].tobytes() == together[row].tobytes()
assert decode(POSITIONS, 1, "window")[0].tobytes() == by_chunks.tobytes()
print("together, alone, through pages or a window: the same bits")

# %% [markdown]
"""
The second half of that is worth a thought. Row 3 of the four found the keys of rows 0 to 2 in the record of new rows, row 3 alone
found them in the cache, with one tile of `decode_partial` cut elsewhere. A key counts the same wherever it lies, since its
*position* decides its place in the tree. So a reply with drafts is the reply without.

### Another tree shows in float32

Here are the six partials of the first pass above, as the kernels left them. We fold them in NumPy, first as a tree, then in a row
without groups:
"""

# %%
po, pm, pl = plan.carve(scratch)  # [slots, rows, heads, D], the others without D
parts = [(pm[slot, 0], pl[slot, 0], po[slot, 0]) for slot in range(6)]


def fold_float32(part, other):
    """Join partials of all heads: m, l: [H], o: [H, D]."""
    m = np.maximum(part[0], other[0])
    a, b = np.exp(part[0] - m), np.exp(other[0] - m)
    return m, part[1] * a + other[1] * b, part[2] * a[:, None] + other[2] * b[:, None]


def fold_all(parts):
    found = parts[0]
    for part in parts[1:]:
        found = fold_float32(found, part)
    return found


results = {}
for name, shape in (("tree", [parts[:4], parts[4:]]), ("no groups", [[part] for part in parts])):
    m, total, o = fold_all([fold_all(group) for group in shape])
    results[name] = o / total[:, None]
assert all(result.dtype == np.float32 for result in results.values())
differing = int((results["tree"] != results["no groups"]).sum())
print(differing, "of", results["tree"].size, "float32 numbers differ")
assert differing > 0
for result in results.values():
    rounded = result.astype(ml_dtypes.bfloat16)
    assert rounded.tobytes() == by_chunks[0].tobytes()  # both become the kernel's own bits

# %% [markdown]
"""
These are differences in the last bits of 24, and bf16 keeps 8. Here bf16 hides them altogether: rounded, both are what the kernel
gave, in every bit. It mostly does: for 65,536 float32 numbers there is one edge between two bf16 numbers, beside which a last bit
decides. But a model has many layers, heads and steps.

Chunks of another size show at once. The running maximum of a chunk is another then, so the weights are rounded to bf16 from other
numbers:
"""


# %%
def with_chunks(keys):
    """Edits that make a chunk so many keys: in the plan, and in the kernels."""
    taken = "from kernels_numba.decode_plan import CHUNK, GROUP_CHUNKS, PAIRS, DecodePlan"
    own = f"from kernels_numba.decode_plan import GROUP_CHUNKS, PAIRS, DecodePlan\n\nCHUNK = {keys}"
    return {"decode_plan": {"CHUNK = 512": f"CHUNK = {keys}"}, "decode_attention": {taken: own}}


right = decode(1_000, 1)[0]
lines = []
for keys in (128, 256, 512, 1024):
    found, plan, _ = decode(1_000, 1, edits=with_chunks(keys))
    lines.append([keys, plan.slots[0], int((found != right).sum())])
table(["keys a chunk", "slots", "numbers that differ, of 256"], lines)
assert [(count == 0) for *_, count in lines] == [False, False, True, False]

# %% [markdown]
"""
None of these is wrong. But an engine that takes the size of its chunks from the load of the moment, such as the number of texts
in the pass, gives a text other bits when others come and go. Some day a word changes.

And the prompt kernel? It has no chunks: one chain of tiles from the first to the last. Up to 512 keys the tree is a single chunk,
and beyond it the bits part:
"""


# %%
def prompt(committed, rows):
    backend = backend_class("window")(bench.heads.shape, Sizes(POSITIONS + 8))
    stream = backend.open()
    bench.store(backend, PROMPT, stream, committed)
    return bench.store(backend, PROMPT, stream, rows, attend=True)


lines = []
for committed in (60, 400, 600, 2_600):
    differ = decode(committed, 1)[0] != prompt(committed, 1)
    lines.append([committed, int(differ.sum())])
table(["committed", "numbers that differ between prompt and decode, of 256"], lines)
assert lines[2][1] > 0 and lines[3][1] > 0

# %% [markdown]
"""
So which kernel a row takes must never depend on circumstances. In this engine the *phase* decides: rows of a prompt take the one,
rows of a reply the other. (In a shorter text they also differ, in the order of the sum of weights. It is too little to show in
this example's bf16.) Tutorial 08 is about an engine where paging decided.

## A picture

10,000 positions, with one new row and with 16. The colour says which kernel makes a part of the tree. Pale chunks are folded by a
block on its way to a group, and never leave it. The boxes are the same in both: the tree is one.
"""

# %%
COLORS = {"rows": "#3b6ea5", "partial": "#d98c3f", "merge": "#b5b5b5", "inside": "#d6e7f7"}


def tree(axes, committed, rows):
    """Draw a row's tree; returns how many boxes are left in scratch as partials."""
    plan = plan_of(committed, rows)
    folded, end = int(plan.groups[0]), committed + rows
    partials = 0
    for level, span in enumerate((CHUNK, CHUNK * GROUP_CHUNKS, -(-end // 2048) * 2048)):
        for first in range(0, end, span):
            last = min(first + span, end)
            if level == 0:
                maker = (
                    "inside" if first < folded * 2048 else "rows" if last <= committed // CHUNK * CHUNK else "partial"
                )
            else:
                maker = "rows" if level == 1 and first < folded * 2048 else "merge"
            partials += maker in ("rows", "partial")
            axes.add_patch(Rectangle((first + 20, level), last - first - 40, 0.8, facecolor=COLORS[maker]))
    axes.set(xlim=(0, end), ylim=(-0.2, 3), yticks=[0.4, 1.4, 2.4], yticklabels=["chunks", "groups", "row"])
    axes.set_title(f"{rows} new row{'s' * (rows > 1)}: {partials} partials", fontsize=10)
    assert partials == plan.slots[0]
    return partials


figure = Figure(figsize=(9, 3.8), layout="constrained")
upper, lower = figure.subplots(2, 1, sharex=True)
assert tree(upper, 10_000, 1) == 20
assert tree(lower, 10_000, 16) == 8
lower.set_xlabel("position")
names = {
    "rows": "decode_rows",
    "partial": "decode_partial",
    "merge": "decode_merge",
    "inside": "inside a block of decode_rows",
}
figure.legend(
    handles=[Patch(color=COLORS[n], label=text) for n, text in names.items()], loc="outside lower center", ncols=4
)
picture("06-tree", figure)

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 06
    .venv/bin/refengine tutorial check 06

1. `slots`: how many partials does a row have?
2. `fold`: join two partials, either of which may be empty.
3. `merge`: chunks into a row, in the order of the tree. The test looks at the order itself.
"""

# %% [markdown]
"""
## What production engines do

* Cutting along the keys is known as *split-KV* or *flash decoding*. FlashAttention, FlashInfer, vLLM and TensorRT-LLM do it, with
  a second kernel that merges.
* The number of splits is usually a heuristic: it looks at the batch and at the GPU's processors. Then a reply may depend on what
  else runs. FlashInfer can be told a fixed size (`fixed_split_size`), or not to split (`disable_split_kv`). vLLM and SGLang have
  modes in which it is fixed, too (tutorial 04).
* Drafts (*speculative decoding*, in all of them) make a small window of new rows. Where a row of a window has the bits that it
  has alone, as here, the greedy reply with drafts is the reply without, to the last word.
"""

# %% [markdown]
"""
## Next

[07 · Slices and the 257-row fault](07_slices_and_the_257_row_fault.py): partials need memory, and somebody must know how much.
"""
