# %% [markdown]
"""
# 09 · Pool, admission, waiting

Before this: [02 · Pages and page tables](02_pages_and_page_tables.py). The words *page*, *window*, *stream* and *null page*
come from there.

    make .venv/ready    # once
    .venv/bin/python tutorials/09_pool_admission_waiting.py
"""

# %%
from backends.arena import PaperArena
from backends.base import Sizes, backend_class
from backends.pool import PagePool, PoolFull
from refengine.errors import UserError
from refengine.lab.notebook import picture, show, table
from refengine.lab.pool_picture import Panel
from refengine.lab.pool_picture import picture as pool_picture
from refengine.lab.pool_requests import arrivals, read_requests
from refengine.lab.pool_run import Simulation
from refengine.registry import load_model
from refengine.serve.paper import PaperStep
from refengine.serve.requests import Request
from refengine.serve.scheduler import Scheduler
from refengine.serve.settings import GIB, Settings, memory_for, model_bytes, planned, startup_line
from refengine.verify.attention_bits import Heads

# %% [markdown]
"""
## The question

A server has a fixed number of pages. Each request needs more of them with every few tokens that it writes. Whom do you let in,
and what do you do when the pages run out in the middle of a reply?

The pages are kept in a *pool*. To let a request in is called *admission*.
"""

# %% [markdown]
"""
## A worked example in numbers

A pool has 10 pages of 4 positions. Three requests arrive together:

| request | prompt | reply | pages for the prompt | pages for all of it |
|---|---|---|---|---|
| A | 12 | 12 | 3 | 6 |
| B | 12 | 12 | 3 | 6 |
| C | 2 | 2 | 1 | 1 |

**Let in whoever fits now.** A and B take 3 pages each for their prompts, and both begin to write. For the first token each
needs a fourth page, four tokens later a fifth. That makes 10. Four tokens later each needs a sixth, and there is none. A waits
for B, and B waits for A: a *deadlock*.
"""

# %%
PAGE, POOL = 4, 10


def pages_for(positions):
    """-(-a // b) is a / b, rounded up."""
    return -(-positions // PAGE)


pool = PagePool(POOL)
pages = {name: pool.take(pages_for(12)) for name in "AB"}
written = dict.fromkeys("AB", 0)
stuck = []
while not stuck:
    for name in "AB":
        if pages_for(12 + written[name] + 1) > len(pages[name]):
            try:
                pages[name] += pool.take(1)
            except PoolFull as full:
                stuck.append(f"{name}: {full}")
                continue
        written[name] += 1
print(stuck)
assert written == {"A": 8, "B": 8} and len(stuck) == 2 and pool.free == 0

# %% [markdown]
"""
Somebody must now lose pages in the middle of a reply. (That is one way to go on, *preemption*: see below.)

**Let in whoever fits to the end.** A gets 3 pages, and the *promise* of 3 more. So of 10 pages 7 are free, and 4 are
*available*: free and not promised. B will need 6. It waits, and holds nothing. When A is over, its pages are free again, and B
is let in. The price is that fewer requests run at once. In return an admitted request never gets stuck.
"""

# %%
pool = PagePool(POOL)
claim_of_a = pool.claim(pages_for(24))
pages_of_a = claim_of_a.take(pages_for(12))
assert (pool.free, pool.promised, pool.available) == (7, 3, 4)
try:
    pool.claim(pages_for(24))
except PoolFull as full:
    print("B waits:", full)
pages_of_a += claim_of_a.take(3)  # A writes its whole reply
pool.give_back(pages_of_a)
claim_of_a.release()
assert pool.claim(pages_for(24)).left == 6 and pool.available == 4  # B's turn

# %% [markdown]
"""
## The code

That was the engine's own pool. Here is what you just used:
"""

# %%
show(
    "backends/pool.py",
    "PagePool.free",
    "PagePool.promised",
    "PagePool.available",
    "PagePool.claim",
    "PagePool.check_room",
)
show("backends/pool.py", "Claim.take")

# %% [markdown]
"""
* `holders` counts, for each page, who holds it. Zero is free. (Why a count? Tutorial 10: a page can be shared.)
* `claim` is all or nothing. If there is no room, it raises `PoolFull` before anything has changed.
* `run` is a second kind of memory from the same pool: pages in a row for the state of recurrent layers. A stream holds them
  from start to end (tutorials 10 and 12).
* `Claim.take` hands out pages that were promised. It asks only whether they were. That there is room, `claim` has seen to.

Pages are handed out lowest first, so equal requests give equal page tables. A fault that comes once comes again.

Who calls `claim`? The scheduler. Requests wait in a line. Each *round* begins with admission:
"""

# %%
show("refengine/serve/scheduler.py", "Scheduler.round", "Scheduler.admit", "Scheduler.seat", "Scheduler.opened")

# %% [markdown]
"""
In steps:

1. `admit` looks at the **first** in line, and only at the first. If it has no room (`seat` is false) while others run, it
   waits, and so do all behind it: `return`. Nobody overtakes.
2. `seat` opens a stream, and that claims all that the request will ever need. Should there be no room, it first throws out old
   prompts that are kept for their own sake (tutorial 10).
3. If nobody runs and there is still no room, nothing will ever change. The request fails at once, with a reason.
4. Then a round computes: one prompt pass for those who still read, one decode pass for those who write. So a reply gets a token
   in every round, however long the prompts beside it are.

Now the three requests in the engine. Nothing is computed here: the arena is *paper*, it counts words and has none. The pool,
the scheduler and the backend are real.
"""

# %%
shape = Heads(heads=1, kv_heads=1, head_dim=64).shape  # one attention layer, no recurrent ones


def server():
    """A scheduler whose backend has 10 pages of 4 positions."""
    sizes = Sizes(context=24, streams=3, page_size=PAGE, pool=POOL)
    backend = backend_class("paged")(shape, sizes, arena=PaperArena)
    return Scheduler(backend, PaperStep(backend), prompt_rows=64, check=True)


scheduler = server()
names = {1: "A", 2: "B", 3: "C"}
for number, (prompt, reply) in enumerate([(12, 12), (12, 12), (2, 2)], start=1):
    scheduler.submit(Request(range(prompt), reply, number=number))

rows = []
while scheduler.waiting or scheduler.live:
    line = "".join(names[one.number] for one in scheduler.waiting)
    passes = list(scheduler.round())
    running = "".join(sorted({names[number] for one in passes for number in one.streams}))
    pool = scheduler.backend.pool
    rows.append(
        [
            len(rows) + 1,
            running,
            "".join(names[one.number] for one in scheduler.waiting),
            pool.free,
            pool.promised,
            pool.available,
        ]
    )
table(["round", "ran", "waits", "free", "promised", "available"], rows)
assert [row[1] for row in rows] == ["A"] * 11 + ["BC"] + ["B"] * 10
assert [row[2] for row in rows] == ["BC"] * 11 + [""] * 11
assert rows[0][3:] == [6, 2, 4] and rows[-1][3:] == [10, 0, 10]

# %% [markdown]
"""
A runs alone for 11 rounds. (Its first round reads the prompt, which gives the reply's first token, and writes a second one. So
12 tokens take 11 rounds.) Then B and C run together, and C is gone after one round.

Look at round 1: 4 pages are available, and C would need only one. It waits nevertheless, because B is before it. Is that not a
waste? It is. But let the small ones pass, and as long as small ones keep coming, B waits for ever. A rule that nobody overtakes
needs no proof that everybody gets a turn.

A request that could not run even alone does not join the line. It is refused, with the number that would do:
"""

# %%
try:
    scheduler.submit(Request(range(20), 30, number=4))
except UserError as never:
    print(never)
    assert "at most 24 tokens" in str(never)

# %% [markdown]
"""
And whoever leaves gives everything back, wherever it was: in the line, reading or writing.
"""

# %%
scheduler = server()
requests = [Request(range(12), 12, number=1), Request(range(12), 12, number=2)]
for request in requests:
    scheduler.submit(request)
for _ in range(5):
    list(scheduler.round())
assert scheduler.backend.pool.available == 4
scheduler.cancel(requests[0])  # it runs
scheduler.cancel(requests[1])  # it waits
assert scheduler.backend.pool.available == POOL and not scheduler.live and not scheduler.waiting

# %% [markdown]
"""
### What a promise costs

Replies often end sooner than they may. Then pages were promised that nobody took. Say that a pool has 100 pages, a prompt takes
2, a reply may take 8 and takes 1:
"""

# %%
by_promise, by_use = 100 // (2 + 8), 100 // (2 + 1)
assert (by_promise, by_use) == (10, 33)
print("at once, if all that they may need is promised:", by_promise, "- if it were known what they will use:", by_use)

# %% [markdown]
"""
So it helps to ask for no longer a reply than you want. An engine that does not promise runs more requests at once, and must
have an answer for the moment when the pool is full.

## Windows or pages, on a real model

How much do pages help? `qwen3.8-27b` on a device with 30 GiB for caches, beside the weights. A context of 131,072 positions is
allowed. Twelve requests have 30,000 tokens of prompt, three have 90,000, and eight have 2,000.

First, windows for 16 streams. A window is reserved whole, so the server can say at its start that this will not do:
"""

# %%
model = load_model("qwen3.8-27b")
memory = memory_for(model_bytes(model) + 30 * GIB)
LIST = "12x30000+96,3x90000+48,8x2000+64"  # count x prompt + reply


def plan(streams, page_size):
    settings = Settings(streams, 131_072, memory, kv_pages=page_size, kv_pages_all="1")
    return planned(model, settings)


try:
    plan(16, 0)
except UserError as problem:
    refused = str(problem)
print(refused)
assert "use --parallel 3" in refused

# %% [markdown]
"""
With windows `--parallel` is a reservation. With pages it is only a cap: the pool gets the memory that there is, and who does
not fit waits.
"""

# %%
panels, rows = [Panel("16 windows", None, refused)], []
for title, streams, page_size in (("3 windows", 3, 0), ("pages of 256", 16, 256)):
    there = plan(streams, page_size)
    print(startup_line(there), "\n")
    story = Simulation(there, arrivals(read_requests(LIST), model.vocabulary, seed=0), cached=False).run()
    panels.append(Panel(title, story))
    waits = story.waits
    rows.append([title, story.most_streams, len(waits), sum(waits) // len(waits), story.rounds])
table(["cache", "streams at most", "waited", "rounds each", "rounds in all"], rows)
windows, paged = rows
assert (windows[1], paged[1]) == (3, 16)
assert paged[4] < windows[4] / 3

# %% [markdown]
"""
The same memory, the same requests, a third of the rounds. (A round with more streams takes longer. But in decode the weights
are read once for all of them, so it does not take so much longer.)

`refengine pool` does this for any list of requests:

    .venv/bin/refengine pool --requests 12x30000+96,3x90000+48,8x2000+64

## A picture

Who holds the memory, round by round, and who waits. (The right one has fewer rounds.) With windows most of the memory is
promised and never written. With pages a promise is what a request will need, and fills up as its prompt is read. Dark grey are
the recurrent states: this model has 48 layers of that kind, whose state takes the same room for a short text as for a long one.
"""

# %%
picture("09-who-holds-the-memory", pool_picture("Who holds the memory, and who waits?", panels, "svg"))
peak = panels[2].story.peak.books
assert peak.written > 0.8 * (peak.written + peak.promised + peak.runs + peak.free)

# %% [markdown]
"""
Does waiting change a reply? It may not. That is one of the engine's equalities, *waited == not* (`refengine equal --only 5b`):
tutorial 08 says what it takes.

## Exercises

    .venv/bin/refengine tutorial start 09
    .venv/bin/refengine tutorial check 09

1. `pages_needed`: what does a request claim?
2. `admitted`: who is let in now? Nobody overtakes.
3. `waits`: how many rounds does each wait? The test asks the engine's scheduler.
"""

# %% [markdown]
"""
## What production engines do

* vLLM lets in by what is needed now, and takes further blocks while a reply grows. When there are none, it *preempts*: the
  newest request loses its blocks and goes back into the line. Later its prompt, and what it had written, is computed again.
* SGLang lets in by an estimate of how long replies will be, which it corrects as it goes. When the pool is full it *retracts*
  requests.
* TensorRT-LLM has both rules by name: `GUARANTEED_NO_EVICT`, as here, and `MAX_UTILIZATION`, which may pause a request.
* Whoever lets in without promising needs an argument that somebody can always go on. Engines have locked up here: every request
  alive, each waiting for a page.

This engine can preempt, too (`Scheduler.preempt`), for those who want to make room by hand. The prompt is read again by prompt
kernels, and what was written is run again by decode kernels. Otherwise bits would change: tutorial 08.
"""

# %% [markdown]
"""
## Next

[10 · Prefix sharing and recurrent state](10_prefix_sharing_and_recurrent_state.py): two requests that begin alike need not have
the same pages twice.
"""
