# %% [markdown]
"""
# 01 · What a KV cache is

You need to know Python and NumPy. A GPU is not needed. From the top of the repository:

    make .venv/ready
    .venv/bin/python tutorials/01_what_a_kv_cache_is.py

The first command installs what the engine needs, once. The second runs this file. It is a notebook, too:
[README](README.md) says how to open it in Jupyter.
"""

# %%
from math import log

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from backends.base import PROMPT, Sizes, backend_class
from refengine.device import open_device
from refengine.lab.notebook import picture, show, table
from refengine.registry import available, load_model
from refengine.verify.attention_bits import Bench, Heads

# %% [markdown]
"""
## The question

A language model writes one token at a time, and each new token looks back at all the tokens before it. Does the model
read the whole text again for every token?

It does not. It keeps what the older tokens left behind, in a *KV cache*.
"""

# %% [markdown]
"""
## A worked example in numbers

In an attention layer each token has three small vectors:

* a **query** `q`: what it looks for,
* a **key** `k`: what it can be found by,
* a **value** `v`: what it gives to those who find it.

A token compares its query with every key up to its own. Each dot product is a *score*. `exp` makes a positive weight
of a score, and the weights are divided by their sum: that is *softmax*. The result is the weighted sum of the values.

Three tokens, two numbers a vector. The third token's query is `[1, 0]`, so its scores are the first numbers of the
keys:

| token | key | score | exp(score) | weight | value |
|---|---|---|---|---|---|
| 0 | `[0, 5]` | 0 | 1 | 1/4 | `[4, 0]` |
| 1 | `[ln 2, 3]` | ln 2 | 2 | 2/4 | `[0, 8]` |
| 2 | `[0, 1]` | 0 | 1 | 1/4 | `[4, 4]` |

First number: 1/4 · 4 + 2/4 · 0 + 1/4 · 4 = 2. Second: 1/4 · 0 + 2/4 · 8 + 1/4 · 4 = 5.
"""

# %%
query = np.array([1.0, 0.0])
keys = np.array([[0.0, 5.0], [log(2), 3.0], [0.0, 1.0]])
values = np.array([[4.0, 0.0], [0.0, 8.0], [4.0, 4.0]])


def attend(q, k, v):
    """One query's attention to n keys and values. q: [D], k, v: [n, D]."""
    weights = np.exp(k @ q)
    return weights / weights.sum() @ v


assert np.allclose(attend(query, keys, values), [2, 5])

# %% [markdown]
"""
Real layers also multiply each score by `1 / sqrt(D)`, which was left out here.

Now look at what the third token needed of the other two: their keys and values. Not their queries. And a token never
looks *forward*, so nothing that comes later changes an older token's key or value. They can be computed once and
kept.

Here is a layer that does both. It is given a vector of 3 numbers for each token. Three matrices make the query, the
key and the value of it. Four tokens are read one by one through a cache, and then the whole text once more without
one:
"""

# %%
rng = np.random.default_rng(0)
W_q, W_k, W_v = rng.standard_normal((3, 2, 3))  # each makes 2 numbers of 3
text = rng.standard_normal((4, 3))
computed = []  # the tokens whose vectors were computed


def project(token):
    """The three vectors of a token of the text."""
    computed.append(token)
    return W_q @ text[token], W_k @ text[token], W_v @ text[token]


cache_k, cache_v = [], []


def read_next(token):
    """With the cache: only the new token's vectors are computed."""
    q, k, v = project(token)
    cache_k.append(k)
    cache_v.append(v)
    return attend(q, np.array(cache_k), np.array(cache_v))


for token in range(3):
    read_next(token)
computed.clear()
with_cache = read_next(3)
assert computed == [3]

computed.clear()
q, k, v = zip(*[project(token) for token in range(4)])  # without a cache: all four, anew
read_again = attend(q[3], np.array(k), np.array(v))
assert computed == [0, 1, 2, 3]
assert (with_cache == read_again).all()
print("the fourth token's result, both times:", with_cache.round(3))

# %% [markdown]
"""
A word that you will meet often is **row**. The vectors of many tokens stand in one array, a token below the other, so
what belongs to one token is a row of it. To *compute a row* is to send one token through the model. A *row of the
cache* is one key, or one value, of one token.

What does the cache save? Take a prompt of 1,000 tokens and a reply of 100. Without a cache, token after token, the
model computes 1,000 rows, then 1,001, then 1,002, and so on. With a cache it computes the prompt once, which gives
the first token of the reply, and then one row for each of the 99 others.
"""

# %%
prompt, reply = 1000, 100
without = sum(prompt + i for i in range(reply))
cached = prompt + (reply - 1)
assert (without, cached) == (104_950, 1_099)
table(["", "rows computed"], [["without a cache", without], ["with a cache", cached]])

# %% [markdown]
"""
## The code

Real layers have several *heads*: each does on its own what you just saw, with vectors of its own. Several **query
heads** may look into the same keys and values; these belong to one **KV head**. `qwen3.8-27b` has 24 query heads and
4 KV heads, so 6 query heads share each.

In the engine an attention layer is a few lines. A matrix product gives the queries, keys and values of the new
tokens, for all heads (`projected`). `backend.store` puts keys and values into the cache, and `backend.attend` reads
the whole cache. A *backend* is a form of cache; you will meet three of them in tutorial 02.
"""

# %%
show("refengine/model/blocks.py", "Blocks.attention")

# %% [markdown]
"""
The two lines that matter are `q = backend.store(...)` and `backend.attend(...)`. (The lines with `Sparse` or `sparse`
in them are for a model of tutorial 13. The *gate* multiplies each result by a number between 0 and 1 that the model
computes from the token; it and the last product have nothing to do with the cache.)

What does `store` write? For each token and each KV head a key and a value, a row each. Below is the GPU kernel that
does it for a prompt, written in Python. Many threads run it, and each does a small part. You need not follow every
name. Look for two things:

* A query (`if head < H`, H query heads) is *normed*, *rotated* and handed back by `store_row`. *Normed*: brought to a
  common length, then multiplied by numbers that the model learned (`w.norms` above, `q_gain` below). *Rotated*: the
  token's position is mixed into it.
* A key (`elif head < H + HK`, HK KV heads) is normed and rotated, too. Then it goes to `store_cached`, into the array
  `arena`: that is the cache. The value follows it as it is.

A token's position never changes, so neither does what was stored.
"""

# %%
show("kernels_numba/rope_store.py", "rope_store_kernel")

# %% [markdown]
"""
Let us run this kernel. `Bench` has random projections for a layer of 4 query heads that share 1 KV head of 64
numbers. The kernels run here on your CPU, and give the bits that a GPU gives.

The backend `window` is the simplest cache: one contiguous stretch of memory for each text. A *stream* is a text's
place in it. A *pass* is one run over some new tokens.
"""

# %%
TOKENS = 100
bench = Bench(Heads(heads=4, kv_heads=1, head_dim=64), TOKENS, open_device("cpu"))


def new_cache():
    """A window for TOKENS positions, and a stream in it."""
    backend = backend_class("window")(bench.heads.shape, Sizes(context=TOKENS))
    return backend, backend.open()


def read(backend, stream, tokens):
    """Read the next tokens in one pass; returns their attention output: bf16 [tokens, heads, D]."""
    first = stream.committed
    batch = backend.batch(PROMPT, [(stream, tokens)])
    q = backend.store(0, bench.rows[first : first + tokens], bench.norms, bench.rope, batch)
    out = backend.attend(0, q, batch)
    backend.finish(batch)
    return out


backend, stream = new_cache()
all_at_once = read(backend, stream, TOKENS)
print("output:", all_at_once.shape, all_at_once.dtype, "- positions in the cache:", stream.committed)

# %% [markdown]
"""
Now the same text in two passes: 99 tokens, then the last one alone. The second pass is given one row. It can only
know the other 99 tokens from the cache.
"""

# %%
backend, stream = new_cache()
read(backend, stream, TOKENS - 1)
before = backend.arena.words.copy()
last = read(backend, stream, 1)

assert last[0].tobytes() == all_at_once[-1].tobytes()
print("the last token's result is the same in every bit")

# %% [markdown]
"""
And what changed in memory? The arena is an array of 32-bit words. A word holds two numbers of 16 bits (*bf16*: a
float with 8 bits of precision). So a key of 64 numbers is 32 words, and so is a value. One pass over one token must
write 64 words. The rest must stay as it was.

How large is the arena? In a window all keys come first, then all values: 100 positions of 64 words. Behind them is
room for one more token of 64 words, where a reply's newest token waits until it is kept (the *record* of tutorial
06).
"""

# %%
changed_words = np.flatnonzero(before != backend.arena.words)
assert len(changed_words) == 2 * 64 // 2
assert len(before) == (TOKENS + 1) * 64
assert changed_words.tolist() == [*range(99 * 32, 100 * 32), *range(199 * 32, 200 * 32)]  # the last key, the last value
print("words written:", len(changed_words), "of", f"{len(before):,}")

# %% [markdown]
"""
Is the cache really read? Spoil it and see. Here the key of token 40 is replaced by *not a number* (NaN), after the 99
tokens were read. All keys come first, 32 words each, so it is words 40 · 32 to 41 · 32 - 1. The last token's result
must be lost.
"""

# %%
backend, stream = new_cache()
read(backend, stream, TOKENS - 1)
key_words = 64 // 2
backend.arena.words[40 * key_words : 41 * key_words] = 0xFFFFFFFF  # two bf16 NaNs a word
spoiled = read(backend, stream, 1)
assert np.isnan(spoiled.astype(np.float32)).all()
print("with one key spoiled, the result is", spoiled[0, 0, 0])

# %% [markdown]
"""
The price is memory. A token leaves a key and a value in each attention layer, for each KV head. For `qwen3.8-27b`
that is 16 attention layers · 4 KV heads · 256 numbers · 2 (key and value) · 2 bytes = 65,536 bytes.

(Its other 48 layers are of another kind, Gated DeltaNet: they keep a state of fixed size. See tutorial 12.)
"""

# %%
model = load_model("qwen3.8-27b")
assert len(model.attention_layers) == 16
assert model.kv_bytes_per_token() == 16 * 4 * 256 * 2 * 2 == 65_536


def gib(name, positions):
    """Size of one text's cache."""
    return f"{load_model(name).kv_bytes_per_token() * positions / 2**30:.2f}"


table(
    ["model", "bytes a token", "GiB at 8,192 tokens", "GiB at 131,072"],
    [[name, load_model(name).kv_bytes_per_token(), gib(name, 8192), gib(name, 131_072)] for name in available()],
)

# %% [markdown]
"""
Two things follow, and the other tutorials are about them:

* **Room.** One long text takes gigabytes. Many texts at once, of lengths that nobody knows in advance, do not fit if
  each reserves the most that it might need (tutorials 02 and 09).
* **Reading.** A new token reads the whole cache of its text, in each layer. In long texts this is most of the work
  (tutorial 06).
"""

# %% [markdown]
"""
## A picture

Each line is a step of the model; each column is a token of the text. Dark: a row that is computed in this step. Pale:
a row whose key and value are read from the cache. Eight tokens of prompt, then a reply.
"""


# %%
def steps(axes, with_cache, prompt=8, reply=6):
    """Draw what each step computes; the cells are counted."""
    computed = 0
    for step in range(reply):
        for token in range(prompt + step):
            new = not with_cache or step == 0 or token == prompt + step - 1
            computed += new
            color = "#3b6ea5" if new else "#d6e7f7"
            axes.add_patch(Rectangle((token, step), 0.9, 0.9, facecolor=color))
    axes.set(xlim=(0, prompt + reply), ylim=(reply, 0), aspect="equal", xlabel="token", ylabel="step")
    for axis, count in ((axes.xaxis, prompt + reply), (axes.yaxis, reply)):
        axis.set_ticks([n + 0.45 for n in range(0, count, 2)], range(0, count, 2))  # below the cells' centres
    axes.set_title(f"{'with' if with_cache else 'without'} a cache: {computed} rows computed")
    return computed


figure = Figure(figsize=(10, 3.2))
left, right = figure.subplots(1, 2)
assert steps(left, with_cache=False) == sum(8 + i for i in range(6)) == 63
assert steps(right, with_cache=True) == 8 + 5 == 13
picture("01-steps", figure)

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 01
    .venv/bin/refengine tutorial check 01

The first command writes `answers/t01.py`: functions to fill in. The second says which are right.

1. `cache_bytes`: how many bytes do so many positions take?
2. `attend`: attention of one query, as above, with the scale. Beware: `exp(1000)` is infinite. Subtract the largest
   score first; the weights stay the same. (Why? `exp(s - m) = exp(s) / exp(m)`, and the division by the sum takes
   `exp(m)` out.)
3. `step`: one token through a cache that grows.

`.venv/bin/refengine tutorial check 01 --solution` runs the same tests on the solution,
[exercises/t01_solution.py](exercises/t01_solution.py).
"""

# %% [markdown]
"""
## What production engines do

* Every engine that serves language models keeps such a cache in GPU memory: vLLM, SGLang, TensorRT-LLM, llama.cpp.
* Models are built to make it small. In *grouped-query attention* several query heads share one KV head: 24 query
  heads share 4 in `qwen3.8-27b`. DeepSeek's *latent attention* (MLA) keeps one compressed vector a token, from which
  all heads' keys and values follow.
* Caches of 8 bits halve it again: vLLM, SGLang and TensorRT-LLM can keep keys and values in fp8. So can this engine
  (tutorial 11).
* What two texts have in common at their beginning can be kept once: *prefix caching* (tutorial 10).
"""

# %%
assert (model.attention.heads, model.attention.kv_heads) == (24, 4)
assert model.kv_bytes_per_token("fp8") == 16 * 4 * 2 * (256 + 1)  # a byte a number, and one exponent a row

# %% [markdown]
"""
## Next

[02 · Pages and page tables](02_pages_and_page_tables.py): where the rows lie, when a text need not have one
contiguous stretch.
"""
