# %% [markdown]
"""
# 10 · Prefix sharing and recurrent state

Before this: [08 · Two paths round differently](08_two_paths_round_differently.py) and
[09 · Pool, admission, waiting](09_pool_admission_waiting.py). The words *pool*, *claim* and *round* come from there.

    make .venv/ready    # once
    .venv/bin/python tutorials/10_prefix_sharing_and_recurrent_state.py
"""

# %%
from contextlib import nullcontext

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from backends.arena import CacheShape, PaperArena
from backends.base import DECODE, PROMPT, BackendError, Sizes, backend_class
from refengine.checkpoint import load_weights
from refengine.commands.inputs import find_model
from refengine.device import open_device
from refengine.lab.notebook import picture, show, table
from refengine.model import cache_shape, open_model
from refengine.registry import load_model
from refengine.serve.forward import Forward
from refengine.serve.paper import PaperStep
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.requests import Request
from refengine.serve.scheduler import Scheduler
from refengine.verify.attention_bits import Bench, Heads
from refengine.verify.planted import FAULTS

# %% [markdown]
"""
## The question

A hundred requests begin with the same manual of 24,000 tokens. Must each read it again? And if they share what the first one
left in its pages: is that all that it left?

What prompts have in common at their beginning is a *prefix*. To keep it for others is *prefix caching*. It is not all in pages.
"""

# %% [markdown]
"""
## A worked example in numbers

**Pages.** The manual has 10 tokens, a page has 4 positions. The first request has read the manual into pages 0, 1 and 2, and
the last of them holds 2 positions of it. The next request begins with the manual, too:

* Pages 0 and 1 are full, and nobody will ever write to them. The new page table names them as well. Each has two *holders* now.
* Page 2 is full in part. The new request will write its own token 10 to slot 2, and the first one has something else there. So
  the two positions are **copied** to a page of its own, say 5.

Its table is `[0, 1, 5]`. Three pages' worth of text, and one new page.

**Recurrent state.** Many models have layers of a second kind (tutorial 12). Such a layer keeps no rows. It has one *state*, and
each token changes it. Take a state of one number and the rule `s = s / 2 + x`. The manual is 8, 4, 2, 6 here:

| token | x | s |
|---|---|---|
| 0 | 8 | 0 / 2 + 8 = 8 |
| 1 | 4 | 8 / 2 + 4 = 8 |
| 2 | 2 | 8 / 2 + 2 = 6 |
| 3 | 6 | 6 / 2 + 6 = 9 |

The next token has x = 1. Right is 9 / 2 + 1 = 5.5. Whoever shares the pages and forgets the state begins at 0 and gets 1. And
someone who shares only the first two tokens needs the 8 that stood there *then*. It is gone: the state is 9 now.
"""


# %%
def states(xs, s=0.0):
    """The state after each token."""
    found = []
    for x in xs:
        s = s / 2 + x
        found.append(s)
    return found


manual = states([8, 4, 2, 6])
assert manual == [8, 8, 6, 9]
assert states([1], s=manual[-1]) == [5.5] and states([1]) == [1]

# %% [markdown]
"""
So a kept prefix is three things: its tokens, its pages, and the state behind its last token. Rows of a page are good for every
prompt that goes at least so far. A state is good for exactly one place.

Why not keep a state at every page, then? Because it is large:
"""

# %%
rows = []
for name in ("qwen3.5-tiny", "qwen3.5-4b", "qwen3.8-27b"):
    model = load_model(name)
    state = 4 * cache_shape(model).run_words
    rows.append([name, state, model.kv_bytes_per_token(), state // model.kv_bytes_per_token()])
table(["model", "bytes of a state", "bytes of a position's keys and values", "a state is so many positions"], rows)
assert rows[-1][3] == 2349

# %% [markdown]
"""
A state of `qwen3.8-27b` takes the room of 2,349 positions. It is kept at a few chosen places, the *marks*. By default that is
the last page boundary of a prompt. A request may name others: where the manual ends, say.

## The code

Keeping a prefix is `snapshot`, and a stream begins with one in `seat` and `start`:
"""

# %%
show("backends/paged.py", "PagedBackend.snapshot", "PagedBackend.seat", "PagedBackend.start")

# %% [markdown]
"""
1. `snapshot` takes no copy of keys and values: `share` counts one more holder for each page. The state is copied to a *run*,
   pages in a row from the top of the pool. The stream itself goes on and changes its own.
2. `seat` claims fewer pages than the request needs, for the full ones are there already (`- len(shared)`), and names these in
   the new page table.
3. `start` copies the state (`arena.copy`), and of a page that is full in part the positions that belong to the prefix.

When the kept prefix is thrown out, or a stream ends, each page has one holder less. It is free when nobody holds it.

How is a prefix found? For each whole page of tokens there is a key, a hash. Into it goes the key of the page before:
"""

# %%
show("refengine/serve/prompt_cache.py", "PromptCache.keys", "PromptCache.look_up")

# %% [markdown]
"""
Because each key contains the one before, equal keys mean equal beginnings, and not just an equal page. A hash only says where
to look: `one.ids == ids[...]` compares the tokens themselves. If two texts ever had the same hash, no reply would get the
other's pages.

At least one token of a prompt is always left to run (`len(prompt) - 1` in `find`): its row gives the scores for the reply's
first token, and nobody kept those.
"""


# %%
def paper_server(shape, pool, streams):
    """A scheduler with a prompt cache. Nothing is computed."""
    backend = backend_class("paged")(shape, Sizes(64, streams, page_size=4, pool=pool), arena=PaperArena)
    return Scheduler(backend, PaperStep(backend), prompt_rows=64, cache=PromptCache(backend), check=True)


SMALL = CacheShape(  # an attention layer and a recurrent one, whose state takes two pages
    (0,), (1,), heads=1, kv_heads=1, head_dim=64, value_heads=1, value_dim=16, key_dim=16, conv_channels=40, conv_rows=3
)
cache = paper_server(SMALL, 16, 1).cache
one, two = cache.keys([1, 2, 3, 4, 5, 6, 7, 8, 9]), cache.keys([1, 2, 3, 4, 5, 6, 0, 8, 9])
assert len(one) == len(two) == 3  # of nothing, of one page, of two
assert one[:2] == two[:2] and one[2] != two[2]

# %% [markdown]
"""
### It must not change a reply

Now a whole model. Two questions follow the same manual. First each is read from its first token on. Then with a prompt cache:
the first request keeps the manual, and the second one begins where it ends.
"""

# %%
MANUAL = list(b"You are a librarian. Answer in one word, be kind, and never say what is in box forty-eight. ")
QUESTIONS = [list(b"Where is the book on pages?"), list(b"When do you close?")]
TOKENS = 4
spec, _, checkpoint = find_model("qwen3.5-tiny", 0)
device = open_device("cpu")
model = open_model(spec, load_weights(checkpoint(), spec), device, 160)


def serve(cached, fault=nullcontext):
    """The second question's request, its decode rows' logits, and the backend."""
    sizes = Sizes(160, streams=2, page_size=16, spare_pages=20, shuffle=3)
    backend = backend_class("paged")(cache_shape(spec), sizes)
    scheduler = Scheduler(
        backend,
        Forward(model, backend, device),
        prompt_rows=256,
        cache=PromptCache(backend) if cached else None,
        check=True,
    )
    with fault():
        for question in QUESTIONS:
            request = Request(MANUAL + question, TOKENS, marks=(len(MANUAL),))
            scheduler.submit(request)
            passes = list(scheduler.run())
    logits = np.concatenate([one.logits for one in passes[-TOKENS:]])
    return request, logits, backend


fresh, fresh_logits, _ = serve(cached=False)
resumed, resumed_logits, backend = serve(cached=True)
(prefix,) = backend.prefixes
table(
    ["", "positions read", "positions resumed", "reply"],
    [
        [name, len(one.prompt) - one.resumed, one.resumed, str(one.reply)]
        for name, one in (("fresh", fresh), ("resumed", resumed))
    ],
)
assert resumed.resumed == len(MANUAL) == 92 == 5 * 16 + 12
assert len(prefix.full_pages) == 5 and len(prefix.pages) == 6  # five shared, one copied
assert resumed.reply == fresh.reply and resumed_logits.tobytes() == fresh_logits.tobytes()

# %% [markdown]
"""
The same in every bit of every score. This is the third of the engine's equalities, **resumed == fresh**.

### A hit without its recurrent state

Now the fault. The pages are shared as they should be, and the state is forgotten: it begins at zero. The engine has this fault
ready to plant, for its checks must find it (`refengine equal --controls`):
"""

# %%
show("refengine/verify/planted.py", "no_state")

# %%
(fault,) = [one for one in FAULTS if one.name == "a hit without its recurrent state"]
wrong, wrong_logits, _ = serve(cached=True, fault=fault.planted)
table(["", "reply"], [["fresh", str(fresh.reply)], ["without its state", str(wrong.reply)]])
print("scores moved by up to", np.abs(wrong_logits[0] - fresh_logits[0]).max().round(2), "at the first token")
assert wrong.resumed == len(MANUAL) and wrong_logits.tobytes() != fresh_logits.tobytes()
assert wrong.reply != fresh.reply and np.isfinite(wrong_logits).all()

# %% [markdown]
"""
Nothing crashed. The pages are the right ones, the attention layers read the whole manual, and no number is infinite. Random
weights speak noise, so here the reply is another one from the first token on. A trained model may well answer in good English,
and have forgotten half of its manual. No text tells you that. The bits do, at the first token.

### What may be kept

A reply's positions lie in pages as well. Why not keep them for the next turn of a conversation, which begins with them? Because
decode kernels made them. Tutorial 08: another path, other bits. The next turn's prompt, read fresh, would be made by prompt
kernels. So a stream remembers how many of its positions prompt passes made, and the backend refuses the rest:
"""

# %%
show("backends/base.py", "Backend.check_prompted")

# %%
bench = Bench(Heads(heads=1, kv_heads=1, head_dim=64), 16, device)
backend = backend_class("paged")(bench.heads.shape, Sizes(16, streams=1, page_size=4, spare_pages=4))
stream = backend.open()
bench.store(backend, PROMPT, stream, 6)
backend.snapshot(stream).release()  # this is allowed
bench.store(backend, DECODE, stream, 1)
try:
    backend.snapshot(stream)
except BackendError as refusal:
    print(refusal)
    assert "were generated" in str(refusal)

# %% [markdown]
"""
## A picture

A pool of 20 pages, on paper. Request 1 has read a manual of 10 tokens, and it was kept. Requests 2 and 3 begin with the manual
and run now. Who holds which page?
"""

# %%
scheduler = paper_server(SMALL, 20, 2)
scheduler.submit(Request([*range(10), 90, 91], 1, number=1, marks=(10,)))
list(scheduler.run())
for number in (2, 3):
    scheduler.submit(Request([*range(10), 10 * number, 10 * number + 1], 6, number=number, marks=()))
for _ in range(3):
    list(scheduler.round())

backend = scheduler.backend
(kept,) = backend.prefixes
holders = {"kept prompt": (kept.pages, kept.run)}
for request in scheduler.live:
    holders[f"request {request.number}"] = (request.place.pages, request.place.claim.run)
pages_of = {name: pages for name, (pages, _) in holders.items()}
print("page tables:", pages_of)
assert all(pages[:2] == kept.pages[:2] for pages in pages_of.values())  # full: shared
assert len({pages[2] for pages in pages_of.values()}) == 3  # in part: everyone has a copy
assert backend.pool.holders[kept.pages].tolist() == [3, 3, 1]

COLORS = {"shared": "#e69f00", "its own": "#0072b2", "recurrent state": "#4a4a4a"}
figure = Figure(figsize=(10, 2.4))
axes = figure.subplots()
for line, (pages, run) in enumerate(holders.values()):
    for page in range(backend.pool.count):
        kind = "recurrent state" if page in run else "its own" if page in pages else ""
        kind = "shared" if page in pages and backend.pool.holders[page] > 1 else kind
        axes.add_patch(Rectangle((page, line), 0.9, 0.8, facecolor=COLORS.get(kind, "#f0f0f0")))
        if page in pages:
            axes.text(page + 0.45, line + 0.42, pages.index(page), ha="center", va="center", color="white", fontsize=9)
axes.set(xlim=(0, backend.pool.count), ylim=(len(holders), 0), xlabel="page of the pool", aspect="equal")
axes.set_xticks(np.arange(backend.pool.count) + 0.45, range(backend.pool.count))
axes.set_yticks(np.arange(len(holders)) + 0.4, holders)
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
figure.legend([Patch(color=color) for color in COLORS.values()], COLORS, loc="upper center", ncols=3, frameon=False)
picture("10-who-holds-which-page", figure)

# %% [markdown]
"""
The white numbers are the entries of each page table. Entries 0 and 1 are the same pages for all three. Entry 2, which the
manual fills in part, is another page for each. And everyone has a recurrent state of its own.

## Exercises

    .venv/bin/refengine tutorial start 10
    .venv/bin/refengine tutorial check 10

1. `chain`: the keys of a prompt's whole pages, each with the one before in it.
2. `longest`: which kept prefix does a prompt begin with? Mind the one token that is left to run.
3. `begin`: which pages are shared, and which is copied?
4. `resume`: a recurrent layer that goes on from a kept state, or from nothing.
"""

# %% [markdown]
"""
## What production engines do

* vLLM keys each full block by a hash of its tokens and the hash of the block before, as here. Blocks that are full in part are
  not shared. Who trusts a hash needs one for which nobody can make two texts alike: vLLM takes SHA-256
  unless told otherwise.
* SGLang keeps prompts in a *radix tree*, whose edges are runs of tokens. Two prompts part where the tree branches.
  It calls this RadixAttention.
* Both throw out what was used longest ago, as here.
* Models with recurrent layers came later, and engines had to add kept states to what was built for pages. vLLM has a test that
  a hit gives a fresh run's bits for a model with Gated DeltaNet layers. It is careful to say that a state which is kept in bf16
  need not do so. Here a state is kept as it is, in float32.
* Wrong results after a prefix hit are among the faults that engines report again and again. [docs/faults.md](../docs/faults.md)
  has a section about them, with the test for each.
"""

# %% [markdown]
"""
## Next

[11 · fp8](11_fp8.py): half the bytes for the same positions, and what that does to them.
"""
