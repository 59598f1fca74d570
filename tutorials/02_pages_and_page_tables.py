# %% [markdown]
"""
# 02 · Pages and page tables

Before this: [01 · What a KV cache is](01_what_a_kv_cache_is.py). The words *row*, *KV head*, *stream*, *pass* and
*window* come from there.

    make .venv/ready    # once
    .venv/bin/python tutorials/02_pages_and_page_tables.py
"""

# %%
import numpy as np

from backends.base import PROMPT, Sizes, backend_class
from refengine.device import open_device
from refengine.lab.notebook import page_walk, show, table
from refengine.lab.page_walk import PageWalk
from refengine.verify.attention_bits import Bench, Heads

# %% [markdown]
"""
## The question

A text's cache grows token by token, and nobody knows how long the text will be. How much memory do you give it, and
what do you do with the part that it never uses?

With a window you must decide at the start: reserve room for the longest text that is allowed. A reply that ends early
has reserved it for nothing. Operating systems met this problem long ago, and the answer is the same here: *pages*.
"""

# %% [markdown]
"""
## A worked example in numbers

Take a memory of 24 rows, cut into 6 pages of 4 rows. A row stands for all that one token leaves. Two texts, A and B,
arrive together. A has 6 tokens, B has 3. Pages are handed out in some order, here 4, 1, 5, 0, 2, 3.

* A needs 2 pages for 6 rows: it gets 4 and 1.
* B needs 1 page for 3 rows: it gets 5.
* Then A writes on, up to 9 tokens. It needs a third page: the next free one is 0.

Each text keeps a list of its pages, in the order of its tokens: the **page table**. A's is `[4, 1, 0]`, B's is `[5]`.

Where is A's token 6? A page has 4 places for rows, its *slots* 0 to 3. So the token is in entry 6 // 4 = 1 of the
table, in slot 6 % 4 = 2 of that page.
Entry 1 says page 1. So it is row 1 · 4 + 2 = 6 of the memory. And A's token 2: entry 0, slot 2, page 4, row 4 · 4 + 2
= 18.
"""

# %%
PAGE = 4
free = [4, 1, 5, 0, 2, 3]
memory = np.full(6 * PAGE, "..", dtype="<U2")
tables = {"A": [], "B": []}


def write(text, position):
    """Write a token's row, taking a page where the text has none for it yet."""
    entry, slot = divmod(position, PAGE)
    if entry == len(tables[text]):
        tables[text].append(free.pop(0))
    memory[tables[text][entry] * PAGE + slot] = f"{text}{position}"


for text, positions in (("A", range(6)), ("B", range(3)), ("A", range(6, 9))):
    for position in positions:
        write(text, position)

assert tables == {"A": [4, 1, 0], "B": [5]} and free == [2, 3]
assert memory[6] == "A6" and memory[18] == "A2"
table(["page", "rows"], [[page, " ".join(rows)] for page, rows in enumerate(memory.reshape(6, PAGE).tolist())])

# %% [markdown]
"""
A's rows are all over the memory, and nobody minds: the table finds them. What is lost is only the end of each text's
last page: 3 slots of A, 1 of B. Pages 2 and 3 are free for a third text.

## The code

This is the engine's own address function, in the three forms that it comes in. `locate` says where a position's page
starts in the arena (`start`) and which slot of that page the position takes.
"""

# %%
show("backends/layout.py", "locate_window", "locate_paged", "locate_paged_p256")

# %% [markdown]
"""
* **window**: the whole window counts as one page. The slot is the position.
* **paged**: what you just did by hand. `ptok` is the page size in tokens, `pages` holds the page tables of all
  streams, and `table` is where this stream's table begins in it. `count` counts the lookup, for those who want to
  know.
* **paged-p256**: the page size is always 256. Then `pos // 256` is a shift by 8 bits, and `pos % 256` keeps the low 8
  bits. The compiler knows it, so nothing is divided.

A page of the real cache holds more than one row a token. It has, for each attention layer, all keys of the page, then
all values, each KV head's rows side by side. So the whole address of a row is

    start = page · page_words
    word  = start + plane + (kv_head · page_size + slot) · head_dim / 2

`plane` is where the layer's keys (or values) begin in a page. A *word* is 32 bits: two numbers of 16 bits, hence
`head_dim / 2`.

Let us do it by hand once. `PageWalk` is a stream of the model `qwen3.5-tiny` in pages of 48. The model has 2
attention layers, 2 KV heads and `head_dim` 256. Look for the key of position 50, KV head 1, in its first attention
layer, number 3:
"""

# %%
walk = PageWalk(page_size=48)
print("page table:", walk.table)
assert walk.table == [4, 2, 0, 3]

entry, slot = divmod(50, 48)
page = walk.table[entry]
assert (entry, slot, page) == (1, 2, 2)

plane_words = 2 * 48 * 256 // 2  # KV heads · page size · words of a row
page_words = 2 * 2 * plane_words  # layers · (keys, values)
assert (plane_words, page_words) == (12_288, 49_152)

word = page * page_words + 0 + (1 * 48 + slot) * 128  # the first layer's keys come first: plane = 0
assert word == 104_704
assert word == walk.word(layer=3, plane=0, position=50, kv_head=1)  # what the engine's kernels compute
print("the row starts at word", f"{word:,}")

# %% [markdown]
"""
Who fills the table? A stream asks for room up to some position, and the backend takes the pages that are missing:
"""

# %%
show("backends/paged.py", "PagedBackend.grow", "PagedBackend.enter")
show("backends/pool.py", "PagePool.lowest")

# %% [markdown]
"""
In steps:

1. `pages_for(end)` is the number of pages for so many positions, rounded up. What the stream has already is taken
   off.
2. The pool looks for the first pages that nobody holds, in its order, and writes down that they have a holder now.
3. `enter` writes their numbers into the stream's part of the table, behind those that stand there.

No row is moved or copied. (Why *claim*? A stream is promised its pages when it begins, so that it cannot get stuck
half way: tutorial 09.)

Now the kernels. The same random text of 100 tokens is read through a window and through pages of 48, handed out in
shuffled order.
"""

# %%
TOKENS = 100
bench = Bench(Heads(heads=4, kv_heads=1, head_dim=64), TOKENS, open_device("cpu"))


def open_cache(name, page_size=48):
    """A backend of that name with room for the text, and a stream in it."""
    backend = backend_class(name)(bench.heads.shape, Sizes(TOKENS, page_size=page_size, spare_pages=2, shuffle=3))
    return backend, backend.open()


def read(backend, stream, tokens, spoil=None):
    """Read the next tokens in one pass; spoil is called once they are stored. Returns their attention output."""
    first = stream.committed
    batch = backend.batch(PROMPT, [(stream, tokens)])
    q = backend.store(0, bench.rows[first : first + tokens], bench.norms, bench.rope, batch)
    if spoil:
        spoil(backend)
    out = backend.attend(0, q, batch)
    backend.finish(batch)
    return out


through_window = read(*open_cache("window"), TOKENS)
backend, stream = open_cache("paged")
through_pages = read(backend, stream, TOKENS)
print("page table:", backend.pages.tolist(), "- the pool's order:", backend.pool.order.tolist())
assert backend.pages.tolist() == stream.pages == backend.pool.order[:3].tolist()
assert sorted(stream.pages) != stream.pages  # not in order of memory
assert through_pages.tobytes() == through_window.tobytes()
print("the same in every bit")

# %% [markdown]
"""
Equal in every bit, not just nearly. Tutorial 04 says why that must be so.

Does the kernel use the table at all? Exchange the first two entries after the rows were stored, and look again. Now
positions 0 to 47 and positions 48 to 95 have changed places. Positions 96 to 99 are in the third page, and are where
they were.
"""


# %%
def swap(backend):
    backend.pages[[0, 1]] = backend.pages[[1, 0]]


swapped = read(*open_cache("paged"), TOKENS, spoil=swap)
off = np.abs(swapped.astype(np.float32) - through_pages.astype(np.float32)).max(axis=(1, 2))  # of each row
lines = [[f"{rows.start} to {rows.stop - 1}", f"{off[rows].min():.3f}", f"{off[rows].max():.3f}"]
         for rows in (slice(0, 4), slice(4, 95), slice(95, 100))]  # fmt: skip
table(["rows", "off by at least", "by at most"], lines)
assert (off > 0).all()  # all 100 rows differ
assert off[:4].min() > 3 and off[:95].min() > 0.1
assert off[95:].max() < 0.005

# %% [markdown]
"""
All 100 rows differ. Row 0 sees one key, and is given that of position 48; the numbers are at most 2.5 here, so to be
off by 4.6 is to be quite another result. But rows 95 to 99 see *both* pages whole: the same keys and values, in
another order. Mathematics does not mind the order. The last bits do: tutorial 04 is about them.

A stream takes pages only as it grows. Here it reads 40 tokens, then 10 more, then 50. An entry that is not in use
names the *null page*, number 5 here: a page behind the pool's pages 0 to 4, which no stream ever gets.
"""

# %%
backend, stream = open_cache("paged")
held = []
for tokens in (40, 10, 50):
    read(backend, stream, tokens)
    held.append([stream.committed, len(stream.pages), str(backend.pages.tolist())])
table(["positions", "pages", "page table"], held)
assert [pages for _, pages, _ in held] == [1, 2, 3]
assert backend.pool.null_page == 5 and 5 not in backend.pool.order
assert np.abs(through_pages.astype(np.float32)).max() < 2.5 and 4.6 < off[0] < 4.7  # as said above

# %% [markdown]
"""
### What page size?

A small page loses little at the end of a text. A large page has fewer entries to look up. Here is the loss, for some
texts where up to 8,192 positions are allowed. Windows would reserve 8,192 for each.
"""

# %%
lengths = [37, 180, 300, 512, 900, 1400, 2300, 5000]
ALLOWED = 8192


def slots(page_size):
    """Slots of all pages that the texts hold."""
    return sum(-(-length // page_size) * page_size for length in lengths)  # -(-a // b): a / b, rounded up


used = sum(lengths)
held = [("window", len(lengths) * ALLOWED)] + [(f"pages of {size}", slots(size)) for size in (1, 16, 48, 256, 1024)]
table(
    ["cache", "slots held", "not used", "not used, share"], [[n, s, s - used, f"{1 - used / s:.1%}"] for n, s in held]
)
assert slots(1) == used
assert all(slots(size) - used <= len(lengths) * (size - 1) for size in (16, 48, 256, 1024))  # less than a page each

# %% [markdown]
"""
A text never loses a whole page, so the loss is small as soon as texts are much longer than a page.

## A picture

The `PageWalk` stream with the table `[4, 2, 0, 3]`, now 192 positions long, drawn from the addresses that the kernels
compute. Attention fetches 32 neighbouring positions at a time. Here let an *item* be 32 such positions: item 0 is
positions 0 to 31, item 1 is 32 to 63, and so on. (In tutorial 03 the word gets a narrower meaning.)

Neighbouring items are light and dark blue in turn. With pages of 48, item 1 begins in one page and ends in another:
it *straddles*, and is orange. One lookup does not find all of its rows, so a second one is made.
"""

# %%
page_walk("02-pages-of-48", 48)
assert walk.positions == 192 and walk.straddling == [1, 4]
assert PageWalk(page_size=64).straddling == []  # 32 divides 64

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 02
    .venv/bin/refengine tutorial check 02

1. `place`: page and slot of a position.
2. `gather`: a stream's rows in the order of its tokens, out of the pages. Then a window and pages look alike.
3. `pages_of_item`: which pages an item of 32 positions touches. For which page sizes is it always one page?
"""

# %% [markdown]
"""
## What production engines do

* vLLM made this idea known as *PagedAttention*. It says *block* for a page and *block table* for a page table; 16
  tokens a block is its usual size on GPUs.
* SGLang has a table with an entry for each token, which is a page size of 1; larger pages can be chosen.
* FlashInfer takes the tables of all streams in one array, with three lists: where each stream's part begins
  (`kv_indptr`), the pages (`kv_indices`), and how many rows the last page has (`kv_last_page_len`).
* FlashAttention-2 wants page sizes that 256 divides. Hugging Face transformers takes 256 for its continuous batching,
  and nano-vllm does too. That is why this engine has a form with 256 built in.
* TensorRT-LLM has a paged cache, too; it says *tokens per block*.

Unused entries are a classic source of faults. Here they name the null page. All memory that nobody wrote, the null
page too, holds *not a number*: a kernel that reads it by mistake cannot hide it.
"""

# %% [markdown]
"""
## Next

[03 · The prompt kernel, tile by tile](03_the_prompt_kernel_tile_by_tile.py): what attention does with the rows, once
it has found them. [Paging, in one page](../docs/paging.md) has this tutorial's words and addresses for reference.
"""
