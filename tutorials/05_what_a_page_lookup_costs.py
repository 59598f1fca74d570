# %% [markdown]
"""
# 05 · What a page lookup costs

Before this: [03 · The prompt kernel, tile by tile](03_the_prompt_kernel_tile_by_tile.py), where items, straddling and checked
mode are explained.

    make .venv/ready    # once
    .venv/bin/python tutorials/05_what_a_page_lookup_costs.py
"""

# %%
import re
from collections import Counter
from importlib.util import find_spec

import numpy as np
from matplotlib.figure import Figure

from backends.layout import LAYOUTS
from kernels_numba.locate import locate
from kernels_numba.machine import checked
from kernels_numba.machine.modes import recorded
from kernels_numba.machine.records import ptx_text, sass_text
from refengine.device import open_device
from refengine.lab.changes import changed, show_edits
from refengine.lab.notebook import picture, show, table
from refengine.registry import load_model
from refengine.verify.attention_bits import Bench, Case, Heads

# %% [markdown]
"""
## The question

With pages, a kernel that wants a key must first ask the page table where it is. Attention reads every key again and again. Does
that not double the work?

It would, nearly, if the kernel asked before each read. How often it asks is decided by one thing: where in the loop the question
stands. Here we count. We count lookups, bytes and instructions, which are the same on every run and every machine. Time is
another matter: to measure a small difference takes care, and is the subject of tutorial 15.
"""

# %% [markdown]
"""
## A worked example in numbers

A block of the prompt kernel has 256 threads and fetches *items* of 32 rows. Let a row have 256 numbers of 2 bytes. A thread
copies 16 bytes at a time, a *piece*.

* A row has 512 bytes, which is 32 pieces. An item has 32 · 32 = 1,024 pieces: each thread copies 4.
* Thread t copies a piece of row t // 32, and of the rows 8, 16 and 24 further on.

Now where to ask for the page?

* **Before each piece.** 1,024 lookups an item.
* **Once an item**, in each thread. 256 lookups.
* **Once an item, and again behind an edge.** With pages of 48, item 1 is positions 32 to 63, and its last 16 rows are in another
  page. Each thread has 2 of its 4 rows there. So it asks 1 + 2 = 3 times: 768 lookups.

In this tutorial items are numbered by position, as in tutorial 02: item 1 is positions 32 to 63, and the block fetches it twice,
its keys and its values. So 192 positions are 6 items of keys and 6 of values. With pages of 48 the items 1 and 4 straddle, of
keys and of values:

    before each piece             12 · 1,024           = 12,288
    once an item, pages of 64     12 · 256             =  3,072
    once an item, pages of 48      8 · 256 + 4 · 768   =  5,120
"""

# %%
POSITIONS = 192
pieces = 32 * 256 * 2 // 16
assert pieces == 1024 == 4 * 256
items = 2 * POSITIONS // 32
edges = range(48, POSITIONS, 48)
straddling = [i for i in range(POSITIONS // 32) if any(32 * i < edge < 32 * i + 32 for edge in edges)]
assert straddling == [1, 4]
assert items * pieces == 12_288 and items * 256 == 3_072
assert (items - 4) * 256 + 4 * 768 == 5_120

# %% [markdown]
"""
## The code

The first lookup of an item stands before the loop over the thread's pieces. To take something out of a loop, since it does not
change there, is called *hoisting*. The second one stands in the loop, behind an `if`:
"""

# %%
show(
    "kernels_numba/prompt_attention.py",
    "stage_item",
    start="start, slot = layout.locate",
    end="word = other + offset",
)

# %% [markdown]
"""
`layout.straddles` is known when the kernel is compiled. Where it is false, the whole `if` is not there.

We run one block and let checked mode count. It is the block that sees all 192 positions, so it fetches all 12 items.
"""

# %%
bench = Bench(Heads(heads=1, kv_heads=1, head_dim=256), POSITIONS, open_device("cpu"))


def count_prompt(name, page_size, edits=None):
    """(counters of the last block, the bits of the output) of a prompt of 192 positions."""
    backend = bench.build(Case(name, page_size, "prompt", POSITIONS, 0))
    batch = backend.batch("prompt", [(backend.open(), POSITIONS)])
    q = backend.store(0, bench.rows, bench.norms, bench.rope, batch)
    kernel = changed("kernels_numba.prompt_attention", edits or {})
    with kernel, checked(sample=lambda grid: (grid[0] - 1, 0, 0)) as report:
        out = backend.attend(0, q, batch)
    return Counter(report.counters), out.tobytes()


window, bits = count_prompt("window", 256)
p64, bits_64 = count_prompt("paged", 64)
p48, bits_48 = count_prompt("paged", 48)
assert bits == bits_64 == bits_48
assert (window["lookups"], p64["lookups"], p48["lookups"]) == (0, 3_072, 5_120)
assert (window["straddles"], p64["straddles"], p48["straddles"]) == (0, 0, 4)

# %% [markdown]
"""
As computed by hand. Now put the lookup where a first version of such a kernel often has it, before each piece. The bits stay the
same, for the addresses do:
"""

# %%
EACH_PIECE = {
    "start, slot = layout.locate(min(key0, keys - 1), base, table, ptok, pages, page_words)": "start, slot = base, key0",
    "if layout.straddles and slot + row >= ptok and key0 + row < keys:": "if key0 + row < keys:",
}
show_edits(EACH_PIECE)
each, bits_each = count_prompt("paged", 64, EACH_PIECE)
assert bits_each == bits and each["lookups"] == 12_288 == 4 * p64["lookups"]

# %% [markdown]
"""
Checked mode also counts the bytes that threads ask for in global memory, the GPU's large, slow memory. A lookup is one number of
4 bytes. So pages must cost exactly 4 bytes a lookup more than the window:
"""

# %%
arms = [("window", window), ("pages of 64", p64), ("pages of 48", p48), ("pages of 64, each piece", each)]
rows = []
for name, found in arms:
    more = found["global_bytes"] - window["global_bytes"]
    assert more == 4 * found["lookups"]
    rows.append([name, found["lookups"], more, f"{more / window['global_bytes']:.1%}"])
table(["cache", "lookups", "bytes more", "of what the window's block reads"], rows)

# %% [markdown]
"""
In truth it is less. 32 threads in step, a *warp*, read in one go, and here all 32 have pieces of the same row, so they ask for
the same number of the page table. The memory answers such a question once. By warps, pages of 64 ask 3,072 / 32 = 96 times, and
the same few numbers again and again: three pages have three entries, which lie in the nearest cache after the first time.
"""

# %%
assert p64["lookups"] // 32 == 96
assert -(-POSITIONS // 64) == 3

# %% [markdown]
"""
So bytes are not the point. What counts is that the address of a row is known only when the answer is there: a read that waits for
a read. That is why the number of lookups in the way of a copy matters, and why the kernel asks for items that are needed later
while it computes (`next_item` in tutorial 03).

### Asking once a page

The decode kernel, which has one row or few, takes whole tiles of 64 keys with 128 threads. It goes further. A thread remembers
where its last page ends, and asks only when it comes to a key behind it. What it finds serves the keys and the values.
"""

# %%
show("kernels_numba/decode_attention.py", "find_rows", start="thread = int64", end="return page_end")

# %% [markdown]
"""
`page_end` and `origin` are handed on from tile to tile. A page of 256 positions is asked for once by each thread, though it has
four tiles of keys and four of values. Let us count 512 keys, which one block of decode walks, and the prompt kernel's block over
the same 512 keys. (What a decode pass looks like in full is tutorial 06.)
"""

# %%
KEYS = 512
long_bench = Bench(Heads(heads=8, kv_heads=1, head_dim=256), KEYS + 16, open_device("cpu"))


def count_long(phase, rows, page_size):
    """Lookups of the first block of a pass's first attention launch; it walks 512 cached keys."""
    committed = KEYS if phase == "decode" else KEYS - rows
    backend = long_bench.build(Case("paged", page_size, phase, rows, committed))
    stream = backend.open()
    long_bench.store(backend, "prompt", stream, committed)
    batch = backend.batch(phase, [(stream, rows)])
    new = long_bench.rows[committed : committed + rows]
    q = backend.store(0, new, long_bench.norms, long_bench.rope, batch)
    with checked(sample=lambda grid: (0, 0, 0) if grid == (1, 1, 1) else None) as report:
        backend.attend(0, q, batch)
    return report.counters["lookups"]


rows = []
for page_size in (64, 128, 256):
    prompt, decode = count_long("prompt", 16, page_size), count_long("decode", 1, page_size)
    assert prompt == 8 * 4 * 256  # 8 tiles, 4 items each
    assert decode == KEYS // page_size * 128  # once a page
    rows.append([page_size, prompt, decode])
table(["page size", "prompt block", "decode block"], rows)

# %% [markdown]
"""
The prompt block asks once an item, whatever the page. It can afford it: it has 16 rows · 8 heads of work for every item, where
the decode block has one row. Decode reads each key once, for one token, so it is the one that must hurry.

There is a third way, in the older decode kernel of tutorial 07: one thread for each key of a tile asks, and leaves the answer
in shared memory for all others. That makes 64 lookups a tile:
"""

# %%
show("kernels_numba/decode_scalar.py", "find_keys", start="thread = int64", end="slots[thread] = slot")

# %% [markdown]
"""
### A division that is not there

To find the page is to divide: `pos // page_size`. A GPU has no instruction for dividing whole numbers. The compiler makes a
sequence of others, with the reciprocal of a float in the middle. When it knows that the page size is 256, none of it is needed.
This is why the backend `paged-p256` exists:
"""

# %%
show("backends/layout.py", "locate_paged", "locate_paged_p256")

# %% [markdown]
"""
We can look at the machine code, with no GPU, where NVIDIA's compiler is installed (it comes with this project on Linux).
`locate_kernel` is a kernel that does nothing but `locate`. `NOP` fills up the end and is not counted. `MUFU` is the instruction
of the reciprocal.
"""

# %%
OPCODE = re.compile(r"/\*[0-9a-f]{4}\*/\s+(?:@!?\w+\s+)?([A-Z0-9]+)")


def machine_code(layout):
    """(PTX, the compiler's own language; names of the machine instructions) of locate_kernel on an H100 or H200."""
    with recorded() as recording:
        locate(np.zeros((4, 2), np.int64), np.arange(4), np.zeros(4, np.int32), 0, 0, 256, 100, LAYOUTS[layout])
    (launch,) = recording.launches
    text = sass_text(launch.program, launch.signature, (9, 0))
    return ptx_text(launch.program, launch.signature), [op for op in OPCODE.findall(text) if op != "NOP"]


if find_spec("numba_cuda"):
    code = {layout: machine_code(layout) for layout in ("window", "paged", "paged_p256")}
    rows = [[name, len(ops), len(re.findall(r"\bdiv\.", ptx)), ops.count("MUFU")] for name, (ptx, ops) in code.items()]
    table(["layout", "instructions", "divisions in PTX", "MUFU"], rows)
    assert [divisions for _, _, divisions, _ in rows] == [0, 1, 0] == [mufu for *_, mufu in rows]
    assert rows[0][1] < rows[2][1] < rows[1][1]

# %% [markdown]
"""
The price is freedom: the page size is 256 and nothing else. Page and tile fit, so nothing straddles, and the branch of the second
lookup is gone, too. The number of lookups is the same as with any page that 32 divides. In the prompt kernel:
"""

# %%
p256, bits_256 = count_prompt("paged-p256", 256)
assert bits_256 == bits and p256["lookups"] == p64["lookups"] and p256["straddles"] == 0
assert 4 * p256["lookups"] - (p256["global_bytes"] - window["global_bytes"]) == 256 * 8  # no thread reads the page size

# %% [markdown]
"""
(The last line: the *stream table* is what a kernel is told of each stream, 13 numbers of 8 bytes: how many positions it has,
where its page table begins, the page size and so on. Now none of the 256 threads need read the page size.)

### What the table itself takes

A page table has 4 bytes a page. It is the same for all layers and heads, since a page holds the rows of all of them. For a text
of 131,072 positions of `qwen3.8-27b`:
"""

# %%
model, text = load_model("qwen3.8-27b"), 131_072
rows = []
for page_size in (1, 16, 48, 256):
    pages = -(-text // page_size)
    cache = pages * page_size * model.kv_bytes_per_token()
    rows.append([page_size, pages, 4 * pages, f"{4 * pages / cache:.7%}"])
table(["page size", "entries", "bytes", "of the cache's bytes"], rows)
assert rows[-1][1:3] == [512, 2048] and rows[0][2] == 512 * 1024

# %% [markdown]
"""
Nothing to speak of.

## A picture

Lookups of the block above, for many page sizes: each point is a count by the real kernel. The dashed line is what the block needs
at least, one lookup an item in each thread: 12 · 256 = 3,072. Sizes that 32 divides lie on it. All others pay for rows behind an
edge. On the whole less, the larger the page, but not steadily: 16 and 24 cost the same, and 40 costs more than 48. What counts is
how many rows lie behind the edge of their item's first page, and that depends on where the edges fall.
"""

# %%
sizes = [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192]
counted = [count_prompt("paged", size)[0]["lookups"] for size in sizes]
figure = Figure(figsize=(7.5, 3.6))
axes = figure.subplots()
fits = [size % 32 == 0 for size in sizes]
axes.vlines(sizes, 3072, counted, color="#9db8d2", zorder=1)
axes.scatter(sizes, counted, c=["#3b6ea5" if fit else "#c0504d" for fit in fits], zorder=2)
axes.axhline(3072, color="#888888", linewidth=0.8, linestyle="--")
axes.axhline(12_288, color="#888888", linewidth=0.8, linestyle=":")
for count, text in (
    (12_288, "a lookup before each piece: 12,288"),
    (3_072, "one lookup an item, in each thread: 3,072"),
):
    axes.annotate(text, (192, count), xytext=(0, -12), textcoords="offset points", ha="right")
axes.set(xlabel="page size", ylabel="lookups", xticks=range(0, 193, 32), ylim=(0, 13_500))
axes.set_title("192 positions: blue, 32 divides the page size; red, it does not")
picture("05-lookups", figure)
assert all((count == 3072) == fit for count, fit in zip(counted, fits))
behind = [sum(p // size != p // 32 * 32 // size for p in range(POSITIONS)) for size in sizes]
assert counted == [3_072 + 2 * 32 * rows for rows in behind]  # a row's 32 pieces, of keys and of values
at = dict(zip(sizes, counted))
assert at[16] == at[24] and at[40] > at[48] and sorted(counted)[-1] == counted[0]
assert counted[0] == 12 * 256 * 4  # pages of 8: the second lookup is made for three rows of four

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 05
    .venv/bin/refengine tutorial check 05

1. `straddling`: which items of a text lie in more than one page?
2. `block_lookups`: the count of the whole block. It is compared with the kernel's own, for texts that fill no item.
3. `rows_of`: find rows with as few lookups as there are pages.
"""

# %% [markdown]
"""
## What production engines do

* vLLM's usual page on GPUs has 16 tokens, and SGLang's table has an entry for each token unless told otherwise. FlashAttention-2
  takes multiples of 256 only, FlashAttention-3 any size. Smaller pages waste less memory and share more; larger ones need fewer
  lookups and longer runs of neighbouring rows.
* In a hybrid model a page of attention must match the size of the recurrent states beside it. That gave vLLM pages of hundreds of
  tokens, and kernels that know only small ones: so the memory manager's page and the kernel's need not be the same.
* Where a page is at least as large as what a kernel fetches at a time, and both are powers of two, nothing straddles. Many
  kernels simply demand it.
"""

# %% [markdown]
"""
## Next

[06 · Decode: chunks, groups, merge](06_decode_chunks_groups_merge.py): one row, and many blocks that share its keys.
"""
