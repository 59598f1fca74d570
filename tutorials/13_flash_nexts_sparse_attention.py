# %% [markdown]
"""
# 13 · Flash Next's sparse attention and its pages

Before this: [02 · Pages and page tables](02_pages_and_page_tables.py) and [04 · Why paged equals
window](04_why_paged_equals_window.py).

    make .venv/ready    # once
    .venv/bin/python tutorials/13_flash_nexts_sparse_attention.py
"""

# %%
import ml_dtypes
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from backends.arena import CacheShape
from backends.base import DECODE, PROMPT, BackendError, Sizes, SparseNorms, backend_class
from kernels_numba.flash_next.scores import fn_qsa_scores
from kernels_numba.flash_next.select import fn_qsa_select, list_width
from kernels_numba.machine import checked
from kernels_numba.rope_store import rope_table
from kernels_numba.streams import BASE, COLUMNS, COMMITTED, K_PLANE, V_PLANE
from refengine.lab.notebook import picture, show, table
from refengine.registry import load_model

# %% [markdown]
"""
## The question

A new token reads the keys and values of all tokens before it. In a text of 262,144 tokens that is 512 MiB in each
attention layer of `qwen3.8-flash-next`, and most of the weights come out near zero. Could it read only the few keys
that matter? But who knows which they are, without reading them?

A second, much smaller set of keys knows: *index keys*, one for four tokens. A token looks at all of those first,
chooses, and reads the keys and values of what it chose. That is *sparse* attention. Reading all is called *dense*.
"""

# %%
model = load_model("qwen3.8-flash-next")
KV_BYTES = 2 * model.attention.kv_heads * model.attention.head_dim * 2  # key and value, bf16: of a position, in a layer
assert KV_BYTES * 262_144 == 512 * 2**20

# %% [markdown]
"""
## A worked example in numbers

Positions are taken in **blocks** of four: 0 to 3, 4 to 7, and so on. A token at position 17 has 18 keys before and
with itself: 4 complete blocks, and a **tail** of 2 positions, 16 and 17. It may read 2 blocks; that is its *budget*.
The tail it always reads.

Beside key and value, each token left a small index key, here of 4 numbers. Once a block is complete its four index
keys are **pooled**: their mean stands for the block. And the token that reads has some index queries, here two,
`[1, 1, 0, 0]` and `[0, 1, 1, 0]`. A block's score is the sum of its dot products with the queries, each cut off at
zero, divided by the root of 4:

| block | pooled key | first query | second query | score |
|---|---|---|---|---|
| 0 | `[-8, -8, 0, 0]` | -16, cut off: 0 | -8, cut off: 0 | 0 |
| 1 | `[2, 0, 0, 0]` | 2 | 0 | 1 |
| 2 | `[0, 0, 2, 0]` | 0 | 2 | 1 |
| 3 | `[0, 3, 0, 0]` | 3 | 3 | 3 |

Block 3 is the best. Blocks 1 and 2 tie for the second place, and the rule says: **of equal scores the lower block**.
So the token reads blocks 1 and 3 and the tail: positions 4, 5, 6, 7, 12, 13, 14, 15, 16, 17. 10 keys of 18.
"""

# %%
BLOCK = 4


def scores_of(queries, keys):
    """queries: [heads, dims]. keys: [positions, dims], whose complete blocks are pooled and scored."""
    complete = len(keys) // BLOCK
    pooled = keys[: complete * BLOCK].reshape(complete, BLOCK, -1).mean(axis=1)
    return np.maximum(pooled @ queries.T, 0).sum(axis=1) / np.sqrt(queries.shape[1])


def chosen(scores, position, budget):
    """The positions that a token reads, in order."""
    end = position + 1
    complete = end // BLOCK
    if complete <= budget:
        return list(range(end))
    best = np.argsort(-scores[:complete], kind="stable")[:budget]  # stable: of equals, the lower first
    return [BLOCK * b + i for b in sorted(best.tolist()) for i in range(BLOCK)] + list(range(BLOCK * complete, end))


index_keys = np.zeros((18, 4))
index_keys[0:4, :2] = -8
index_keys[4:8, 0] = [1, 3, 1, 3]
index_keys[8:12, 2] = [4, 0, 4, 0]
index_keys[12:16, 1] = 3
queries = np.array([[1.0, 1, 0, 0], [0, 1, 1, 0]])
scores = scores_of(queries, index_keys)
assert scores.tolist() == [0, 1, 1, 3]
assert chosen(scores, position=17, budget=2) == [4, 5, 6, 7, 12, 13, 14, 15, 16, 17]

# %% [markdown]
"""
Real layers do two more steps with a pooled key, which were left out: it is normed, and rotated by the position where
its block starts. Index queries are normed and rotated, too.

### The switch

While there are no more complete blocks than the budget, there is nothing to choose: the token is dense. The real
budget is 512 blocks. So position 2050 still reads all its 2,051 keys. Position 2051 completes the 513th block: it is
the first that leaves one out.
"""

# %%
budget = model.indexer.budget // model.indexer.block
assert budget == 512
read = {
    p: len(chosen(np.zeros((p + 1) // BLOCK), p, budget)) for p in (2047, 2048, 2050, 2051, 2052, 2054, 2055, 262_143)
}
assert list(read.values()) == [2048, 2049, 2051, 2048, 2049, 2051, 2048, 2048]
rows = [[p, (p + 1) // BLOCK, "sparse" if (p + 1) // BLOCK > budget else "dense", n] for p, n in read.items()]
table(["position", "complete blocks", "it is", "keys that it reads"], rows)

# %% [markdown]
"""
From there on it is 2,048 to 2,051 keys for ever. What grows is the number of pooled keys to look at. One has 256
bytes for four positions, where keys and values take 8,192. So this is what one token reads in one layer:
"""

# %%
rows = []
for end in (2052, 8192, 65_536, 262_144):
    dense = KV_BYTES * end
    sparse = model.indexer.row_bytes * (end // BLOCK) + KV_BYTES * (BLOCK * budget + end % BLOCK)
    rows.append([end, dense, sparse, f"{dense / sparse:.2f}"])
table(["keys", "dense, bytes", "sparse, bytes", "times fewer"], rows)
assert (dense, sparse) == (512 * 2**20, 20 * 2**20)
assert model.kv_bytes_per_token() == len(model.attention_layers) * (2048 + 256 + 256 // BLOCK)

# %% [markdown]
"""
At the switch it is even a little more. And memory? Nothing is saved there. Any key may be chosen by some later token,
so all are kept, and the index keys come on top: 2,048 + 256 + 64 bytes a position in each layer.

## The code

Four kernels follow one another. The first stores a pass's keys, values and raw index keys, as in tutorial 01. Then,
in order:

**Pool.** A warp (32 threads) takes a block. `find` looks the block's page up, *once*: remember that for later.
"""

# %%
show("kernels_numba/flash_next/pool.py", "fn_qsa_pool_kernel", start="if (block + 1)")
show("kernels_numba/flash_next/pool.py", "load_mean")

# %% [markdown]
"""
The first line says when: as soon as the pass has the block's *last* position. `load_mean` adds in order of position,
each sum rounded: `((k0 + k1) + k2) + k3`. So a pooled key depends on its four raw keys and nothing else.

**Score.** Here is the heart of it. `dot_piece` and `lane_sum` are a dot product in a fixed order; `fmax(..., 0)` cuts
it off.
"""

# %%
show("kernels_numba/flash_next/scores.py", "fn_qsa_scores_kernel", start="# Heads in order")

# %% [markdown]
"""
**Choose.** The kernel needs the 512 best of perhaps 65,536 blocks, in order of position. It does not sort. It finds
the score at which the list ends, the *cut*, and then walks over the blocks once.
"""

# %%
show("kernels_numba/flash_next/select.py", "rank_at", "list_blocks")

# %% [markdown]
"""
`rank` makes a whole number of a float32, so that larger scores have larger numbers. `rank_at` finds the cut bit by
bit from the top: it sets a bit if at least `budget` blocks reach that number. `list_blocks` then takes every block
above the cut, and of those *at* the cut the lowest, as many as there is room for (`equal < spare`). Counts are whole
numbers, so it does not matter which of the 1,024 threads is first.

**Attend.** The last kernel is like decode (tutorial 06), with one difference: entry `j` of its tile is not position
`j`, but what the list says.
"""

# %%
show("kernels_numba/flash_next/chunks.py", "find_keys", start="if thread < TILE", end="line = kv_head")

# %% [markdown]
"""
### Run it

A layer with small heads and a budget of 6 blocks, and a random text of 150 tokens.
"""

# %%
BF16 = ml_dtypes.bfloat16
HEADS, KV_HEADS, D, INDEX_HEADS, DI, BUDGET, TOKENS = 4, 2, 64, 2, 64, 6, 150
SHAPE = CacheShape(
    (0,), (), HEADS, KV_HEADS, D, 0, 0, 0, 0, 0, index_dim=DI, index_heads=INDEX_HEADS, index_budget=BUDGET
)
rng = np.random.default_rng(0)
projection = rng.standard_normal((TOKENS, 2 * (HEADS + KV_HEADS) * D + (INDEX_HEADS + 1) * DI)).astype(BF16)
norms = SparseNorms(*np.ones((2, D), np.float32), 1e-6, *np.ones((2, DI), np.float32))
rope = rope_table(TOKENS, 32, 1e7)


def open_cache(name="window", page_size=48):
    backend = backend_class(name)(SHAPE, Sizes(TOKENS, page_size=page_size, spare_pages=2, shuffle=3))
    return backend, backend.open()


def spoil_rows(backend, stream, positions):
    """Keys and values of these positions of a window become NaN."""
    for plane in (K_PLANE, V_PLANE):
        start = stream[BASE] + stream[plane]
        rows = backend.arena.words[start : start + KV_HEADS * TOKENS * D // 2].reshape(KV_HEADS, TOKENS, D // 2)
        rows[:, positions] = 0xFFFFFFFF


def read(backend, stream, tokens, phase=PROMPT, spoil=None):
    """The next tokens in one pass: (output, scores, lists). spoil: what to spoil first, by the last one's list."""
    first = stream.committed
    batch = backend.batch(phase, [(stream, tokens)])
    q, index_q = backend.store_sparse(0, projection[first : first + tokens], norms, rope, batch)
    streams = backend.layer_streams(0, batch)
    scores = np.zeros((tokens, (first + tokens) // BLOCK), np.float32)
    fn_qsa_scores(scores, index_q, backend.arena.words, backend.pages, streams, batch.owners, backend.layout)
    listed = np.full((tokens, list_width(BUDGET)), -1, np.int32)
    fn_qsa_select(listed, scores, streams, batch.owners, BUDGET)
    if spoil:
        spoil_rows(backend, streams[0], spoil(listed[-1]))
    out = backend.attend_sparse(0, q, index_q, batch)
    backend.finish(batch)
    return out, scores, listed


out, scores, listed = read(*open_cache(), TOKENS)
lists = [chosen(scores[position], position, BUDGET) for position in range(TOKENS)]
for position in range(BLOCK * (BUDGET + 1) - 1, TOKENS):  # the sparse ones: the kernel lists nothing for a dense row
    assert listed[position][listed[position] >= 0].tolist() == lists[position]  # those of the stable sort
print("position", TOKENS - 1, "reads", lists[-1])

# %% [markdown]
"""
Are other keys really not read? Put *not a number* into the keys and values of every position that the last token did
not choose, and read it again. Then into one that it did choose.
"""

# %%


def last_token(spoil=None):
    backend, stream = open_cache()
    read(backend, stream, TOKENS - 1)
    return read(backend, stream, 1, DECODE, spoil)[0][0]


assert last_token().tobytes() == out[-1].tobytes()
assert last_token(lambda listed: np.setdiff1d(np.arange(TOKENS), listed)).tobytes() == out[-1].tobytes()
assert np.isnan(last_token(lambda listed: listed[:1]).astype(np.float32)).all()
print("spoiled:", TOKENS - len(lists[-1]), "positions, and no bit of the result is another")

# %% [markdown]
"""
### Ties

Ties are not rare. A block whose dot products are all negative has the score 0, and there are many of those. Two equal
scores must give the same choice on each machine, at each time, or a reply depends on luck. So the rule is part of the
spec.

Even the division matters. Two totals that are neighbours in float32 can become one number in it:
"""

# %%
zeros = float(np.mean(scores[-1] == 0))
assert zeros > 0.1
print(f"score 0 of the last token: {zeros:.0%} of its blocks")

root = np.sqrt(np.float32(128))
low, high = np.float32(1.5), np.nextafter(np.float32(1.5), np.float32(2))
assert low < high and low / root == high / root


def one_block(scores):
    """What a row with two complete blocks and a budget of one reads, by the real kernel."""
    listed, streams = np.full((1, list_width(1)), -1, np.int32), np.zeros((1, COLUMNS), np.int64)
    streams[0, COMMITTED] = 2 * BLOCK - 1
    fn_qsa_select(listed, np.array([scores], np.float32), streams, np.zeros(1, np.int32), 1)
    return listed[listed >= 0].tolist()


assert one_block([low, high]) == [4, 5, 6, 7]
assert one_block([low / root, high / root]) == [0, 1, 2, 3]  # a tie: the lower block

# %% [markdown]
"""
Leaving the division out looks harmless, for it changes no order. But it changes which scores are *equal*: another
block is read, and the reply is another.

### Pages that are multiples of 4

A page of n positions now holds four things for each layer: n keys, n values, n raw index keys, and the pooled keys of
its n / 4 blocks. All words of a page of 48 positions of our layer, by hand:
"""

# %%
key_rows = KV_HEADS * 48 * D // 2  # two bf16 a word, and as much for the values
sizes = key_rows, key_rows, 0, 0, 48 * DI // 2, 48 // BLOCK * DI // 2  # (the zeros are for an fp8 cache)
assert SHAPE.layer_words(48) == sizes == (3072, 3072, 0, 0, 1536, 384) and SHAPE.page_words(48) == 8064

entry, slot = divmod(80, 48)  # block 20 starts at position 80
raw_word, pooled_word = 2 * 3072 + slot * DI // 2, 2 * 3072 + 1536 + slot // BLOCK * DI // 2
assert (entry, slot, raw_word, pooled_word) == (1, 32, 7168, 7936)
assert SHAPE.planes(0, 48)[4:] == (2 * 3072, 2 * 3072 + 1536)
print(f"block 20: in the page of entry {entry}, raw keys from word {raw_word}, pooled key from word {pooled_word}")

# %% [markdown]
"""
48 is a multiple of 4, so a page ends where a block ends. All five keys of a block lie in *one* page, and one lookup
finds them. With pages of 6, block 1 (positions 4 to 7) would have two keys in one page and two in another, and no
place of its own for the pooled one. Such a page size is refused:
"""

# %%
assert [divmod(position, 6)[0] for position in range(4, 8)] == [0, 0, 1, 1]
try:
    open_cache("paged", 6)
    raise AssertionError("pages of 6 were taken")
except BackendError as refusal:
    print(refusal)

for size in (4, 16, 48):
    assert read(*open_cache("paged", size), TOKENS)[0].tobytes() == out.tobytes()
print("pages of 4, 16 and 48: the window's bits")

# %% [markdown]
"""
How many lookups are made? The engine can count them, thread by thread. In store and pool all 32 threads of a warp
make the same lookup. In score one thread looks a block up, and in attention one thread looks a key up; the others
find the place in shared memory. That serves the key, the value, and all query heads of a KV head.
"""

# %%
with checked() as seen:
    read(*open_cache("paged", 48), TOKENS)

lookups = {
    "store": 32 * (KV_HEADS + 1) * TOKENS,  # keys of each KV head with their values, and the index key
    "pool": 32 * (TOKENS // BLOCK),
    "score": sum((position + 1) // BLOCK for position in range(TOKENS)),
    "attend": KV_HEADS * sum(map(len, lists)),
}
table(["kernel", "lookups"], list(lookups.items()))
assert seen.counters["lookups"] == sum(lookups.values()) + lookups["score"]  # read() scores once more, to show it

# %% [markdown]
"""
## A picture

Each line is a token of the text, each column a position that it could read. Dark is what it reads, orange is the
tail, pale is what it leaves out. Down to position 26 all is read; then it is 6 blocks and the tail.
"""

# %%
cells = np.zeros((TOKENS, TOKENS), int)
for position, own in enumerate(lists):
    cells[position, : position + 1] = 1
    cells[position, own] = 2
    if (position + 1) // BLOCK > BUDGET:
        cells[position, (position + 1) // BLOCK * BLOCK : position + 1] = 3
most = BLOCK * (BUDGET + 1) - 1
assert (cells[:most] != 1).all() and (cells[most:] == 1).any(axis=1).all() and most - 1 == 26

figure = Figure(figsize=(6.4, 6))
axes = figure.subplots()
axes.imshow(cells, cmap=ListedColormap(["#ffffff", "#d6e7f7", "#3b6ea5", "#d9822b"]), interpolation="nearest")
axes.set(xlabel="position that is read", ylabel="position that reads", title="budget: 6 blocks of 4")
picture("13-lists", figure)

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 13
    .venv/bin/refengine tutorial check 13

1. `keys_read`: how many keys a token reads.
2. `cut`: the score at which a list ends.
3. `taken`: the blocks of a list, by the cut and in one walk, as the kernel does it. The test compares them with the
   kernel's.

## What production engines do

* DeepSeek-V3.2 made attention of this kind known: its *lightning indexer* scores every earlier token, not blocks, and
  2,048 are read. Others choose by block, too: NSA of DeepSeek, MoBA of Moonshot. *Quest* does so for models that were
  not trained for it.
* vLLM has this model's attention on pages. Its raw index keys lie in a small ring for each request, for they are
  needed only until their block is complete. Pooled keys have a cache with a table of their own. Here both lie in the
  page: of these layers, a prefix is its pages and nothing else (tutorial 12 has the layers that need more).
* The order of ties is not promised: PyTorch says of its `topk`, which Hugging Face's code takes, that it may
  vary from call to call. Then two correct engines may read different blocks.

## Next

[14 · Tensor cores, to the bit](14_tensor_cores_to_the_bit.py): what one instruction does to a sum of seventeen
numbers.
"""
