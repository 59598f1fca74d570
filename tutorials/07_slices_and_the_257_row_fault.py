# %% [markdown]
"""
# 07 · Slices and the 257-row fault

Before this: [06 · Decode: chunks, groups, merge](06_decode_chunks_groups_merge.py), where partials and slots come from.

    make .venv/ready    # once
    .venv/bin/python tutorials/07_slices_and_the_257_row_fault.py
"""

# %%
import re
from contextlib import ExitStack

import numpy as np
from matplotlib.figure import Figure

from backends.base import PROMPT, Sizes, backend_class
from backends.stream import SCALAR_BATCH
from kernels_numba.machine import KernelError, checked
from kernels_numba.scalar_plan import MOST_SCALAR_ROWS, slices
from refengine.device import open_device
from refengine.lab.changes import changed, show_edits
from refengine.lab.notebook import picture, show, table
from refengine.registry import load_model
from refengine.verify.attention_bits import Bench, Heads

# %% [markdown]
"""
## The question

An engine in production had this fault: prompts of up to 128 tokens were right, one of 257 tokens took the server down, and those
between came back as if nothing were wrong. What kind of mistake looks like that?

Every size that was tested was fine. The mistake is in a number that nobody passed on: how many rows some memory was made for.
"""

# %% [markdown]
"""
## A worked example in numbers

A kernel leaves partials in *scratch*, memory that is used again in each pass. Say there is room for 2 slots of 4 rows: 8 places,
slot after slot. The partial of a row belongs at

    place = slot · 4 + row

Launch it for 6 rows, and nobody checks. Row 4 of slot 0 goes to place 4. So does row 0 of slot 1. And row 5 of slot 1 goes to
place 9, which does not exist: it lies in whatever memory comes next.
"""

# %%
SLOTS, HELD = 2, 4


def written(rows):
    """{place: who writes there} of a launch of so many rows."""
    places = {}
    for slot in range(SLOTS):
        for row in range(rows):
            places.setdefault(slot * HELD + row, []).append((slot, row))
    return places


lines = []
for rows in (4, 6, 9):
    places = written(rows)
    twice = sum(len(writers) > 1 for writers in places.values())
    outside = sum(place >= SLOTS * HELD for place in places)
    lines.append([rows, len(places), twice, outside])
table(["rows", "places written", "written twice", "outside"], lines)
assert written(6)[4] == [(0, 4), (1, 0)] and written(6)[9] == [(1, 5)]
assert lines == [[4, 8, 0, 0], [6, 10, 2, 2], [9, 13, 5, 5]]

# %% [markdown]
"""
The cure: no launch of more rows than there is room for. 6 rows go as 4 and 2, through the same 8 places one after the other. Such
a part of the rows is a *slice*. With 128 rows to a slice, 257 rows are 128, 128 and 1.
"""

# %%
assert MOST_SCALAR_ROWS == 128
assert list(slices(6, 4)) == [(0, 4), (4, 2)]
assert list(slices(257)) == [(0, 128), (128, 128), (256, 1)]

# %% [markdown]
"""
Why not make the scratch larger? Each slot of each row takes one float32 for `m`, one for `l` and 256 for `o`, in each of 24 heads
of `qwen3.8-27b`. A text of 131,072 positions has 256 slots.
"""

# %%
heads = load_model("qwen3.8-27b").attention


def scratch_gib(rows, positions=131_072):
    return -(-positions // 512) * rows * heads.heads * (heads.head_dim + 2) * 4 / 2**30


table(["rows", "GiB of scratch"], [[rows, f"{scratch_gib(rows):.2f}"] for rows in (1, 128, 4096)])
assert scratch_gib(128) < 0.8 and scratch_gib(4096) > 24

# %% [markdown]
"""
128 rows are what a decode pass has at most. A prompt pass may have 4,096, and that is how the fault came about: a kernel that had
been made for decode was given prompts.

## The code

The kernel is `decode_scalar`, an older way to do what tutorial 06 shows, without tensor cores. This engine keeps it to be
compared with, and can send prompts on pages through it. A block takes one row, for one chunk of its keys:
"""

# %%
show("kernels_numba/decode_scalar.py", "decode_scalar", start="row, kv_head, chunk =", end="cached = ")
show("kernels_numba/decode_scalar.py", "store_partial")

# %% [markdown]
"""
`po[chunk, row, head, ...]` is the place. `row` is the number of the block, so it counts from the first row of the *launch*.

The plan decides how much scratch there is, and the slices, in one place:
"""

# %%
show("kernels_numba/scalar_plan.py", "ScalarPlan.partials", "ScalarPlan.slices", "slices")
show("kernels_numba/decode_scalar.py", "scalar_attention", start="for first, size in plan.slices()")

# %% [markdown]
"""
Look at what begins at the slice's first row (`[own_rows]`) and what does not:

| begins at the slice's first row | stays as it is |
|---|---|
| queries, output | the stream table |
| `rows`: the stream of each row | the page tables |
| `depths`: how many rows of its own stream a row sees | the window record, the cache |

The left side has an entry *for each row*, and the kernel finds it by a row number that begins at 0 in each slice. What it finds
there, the number of a stream, is a number in the whole pass. So the right side must not move.

Let us run it. `sizes` are the streams of a prompt pass: (rows, positions that are cached before).
"""

# %%
bench = Bench(Heads(heads=1, kv_heads=1, head_dim=64), 600, open_device("cpu"))


def attend(sizes, edits=None, watched=False):
    """(output or the machine's complaint, batch) of a prompt pass on pages, through the scalar path. edits: by module."""
    with ExitStack() as stack:
        for module, edit in (edits or {}).items():
            stack.enter_context(changed(f"kernels_numba.{module}", edit))
        memory = Sizes(600, streams=len(sizes), page_size=48, attention=SCALAR_BATCH)
        backend = backend_class("paged")(bench.heads.shape, memory)
        streams = [backend.open() for _ in sizes]
        for stream, (_, committed) in zip(streams, sizes):
            bench.store(backend, PROMPT, stream, committed)
        new = np.concatenate([bench.rows[committed : committed + rows] for rows, committed in sizes])
        batch = backend.batch(PROMPT, [(stream, rows) for stream, (rows, _) in zip(streams, sizes)])
        q = backend.store(0, new, bench.norms, bench.rope, batch)
        if watched:
            stack.enter_context(checked())
        try:
            return backend.attend(0, q, batch), batch
        except KernelError as problem:
            return re.sub(r"/\S*/", "", str(problem)), batch  # without the folder


right, batch = attend([(257, 0)])
print("partials:", batch.plan.partials, "- slices:", list(batch.plan.slices()))
assert batch.plan.partials == (1, 128, 1)

# %% [markdown]
"""
Whether slices are right can be seen by their bits: a row has the same ones in slices of any size. Here 16 rows a slice, and all
in one slice, with scratch for all:
"""

# %%
for most in (16, 512):
    found, other = attend([(257, 0)], {"scalar_plan": {"MOST_SCALAR_ROWS = 128": f"MOST_SCALAR_ROWS = {most}"}})
    assert found.tobytes() == right.tobytes()
    print(
        f"slices of {most}: {len(list(other.plan.slices()))}, scratch for {other.plan.partials[1]} rows: the same bits"
    )

# %% [markdown]
"""
### Without slices

Now plant the fault. All rows go in one launch, and the scratch is for 128:
"""

# %%
ONE_LAUNCH = {"scalar_plan": {"sliced: bool = True": "sliced: bool = False"}}
show_edits(ONE_LAUNCH["scalar_plan"])
for rows in (127, 128, 129, 257):
    found, _ = attend([(rows, 0)], ONE_LAUNCH)
    print(rows, "rows:", found if isinstance(found, str) else "no complaint")
    assert isinstance(found, str) == (rows > 128)
watched, _ = attend([(129, 0)], ONE_LAUNCH, watched=True)
print("\nin checked mode:", watched)
assert "index 128 is outside axis 1 of global array po" in watched

# %% [markdown]
"""
The CPU machine refuses an index outside an array, and checked mode names array and axis. A GPU does no such thing. It adds the
index to an address and writes. What does it hit? Here `po`, `pm` and `pl` are parts of one piece of memory, one behind the other:
"""

# %%
show("kernels_numba/decode_plan.py", "carve_partials", start="size = ", end="return")

# %%
po_floats, plane_floats, D = 128 * 64, 128, 64  # of po; of pm and of pl, for one head; of a row


def hits(row):
    """What a partial's o of that row of the last slot would overwrite."""
    first = row * D - po_floats
    for name in ("pm", "pl"):
        if 0 <= first < plane_floats:
            return f"{name} of rows {first} to {first + D - 1}"
        first -= plane_floats
    return "its own place" if row < 128 else "behind the scratch"


table(["row", "its o lands in"], [[row, hits(row)] for row in (127, 128, 129, 130, 131, 132, 256)])
assert hits(128) == "pm of rows 0 to 63" and hits(131) == "pl of rows 64 to 127"

# %% [markdown]
"""
Row 128 would overwrite the largest scores of rows 0 to 63. No error: those rows come out wrong, or not, since their own `m` may
be written a moment later. From row 132 on, other memory of the process is hit. Only when an address belongs to nobody does the
GPU stop the process. Where that begins depends on what lies there. In that engine it was 257 tokens on one machine, and 181 on
another.

### The neighbours

With more than one slot there is a victim inside `po`. Stream A has 400 positions in the cache and 128 new rows, up to position
527: two chunks, so two slots. Stream B has 120 rows, from position 0. Together 248 rows.
"""

# %%
sizes = [(128, 400), (120, 0)]
complaint, batch = attend(sizes, ONE_LAUNCH)
print(complaint)
assert complaint.startswith("decode_merge")  # decode_scalar itself ran through

held = batch.plan.carve(batch.scratch)[0].reshape(256, D)  # 2 slots of 128 rows, 1 head
_, roomy = attend(sizes, {"scalar_plan": {"MOST_SCALAR_ROWS = 128": "MOST_SCALAR_ROWS = 512"}})
meant = roomy.plan.carve(roomy.scratch)[0].reshape(2, 248, D)  # where every partial has its place

neighbours = held[128:248]  # places of A's rows 0 to 119 in slot 1; and of B's rows in slot 0, if nobody checks
from_a = (neighbours == meant[1, :120]).all(axis=1)
from_b = (neighbours == meant[0, 128:248]).all(axis=1)
print(f"120 places that two rows share: {from_a.sum()} hold what A left, {from_b.sum()} what B left")
assert (from_a ^ from_b).all()

# %% [markdown]
"""
`decode_scalar` had no complaint: each of its indices was inside the array, and each of these 120 places was written twice. The
one who came later won. On a GPU nobody knows who that is. The loser's row is then made of somebody else's sums. (The merge
kernel stopped only because the CPU machine checks each axis there.)

### A shift left out

Slices bring a fault of their own. Forget to move one of the arrays, and rows from 128 on take another row's entry. Here is the
pass of one stream, and of two, with `rows` left where it was, and with `depths`:
"""

# %%
SHIFTS = {
    "rows": {"tables = rows[own_rows]": "tables = rows"},
    "depths": {"paths[own_rows], depths[own_rows]\n": "paths[own_rows], depths\n"},
}
lines = []
for name, edit in SHIFTS.items():
    for sizes in ([(200, 0)], [(100, 20), (100, 0)]):
        wrong, good = attend(sizes, {"decode_scalar": edit})[0], attend(sizes)[0]
        differ = np.flatnonzero((wrong != good).any(axis=(1, 2)))
        lines.append([name, len(sizes), f"{differ[0]} to {differ[-1]}" if len(differ) else "none"])
table(["not moved", "streams", "wrong rows"], lines)
assert [wrong for *_, wrong in lines] == ["none", "128 to 199", "128 to 199", "128 to 199"]

# %% [markdown]
"""
With one stream every entry of `rows` is 0, so it does not matter where one reads it. A test with one stream passes, whatever its
length. Only a slice that begins in the middle of a second stream shows the fault.

So a test of slices has sizes on both sides of each edge: 127, 128, 129, 255, 256, 257. It has several streams in a pass. And for
each array that must move, somebody has tried what the test says when it does not. This engine's is
[tests/test_decode_scalar.py](../tests/test_decode_scalar.py). It also looks at the launches themselves, without running them:
"""

# %%
show("tests/test_decode_scalar.py", "test_what_slices_shift", "test_red_a_shift_left_out")

# %% [markdown]
"""
[Faults, and what holds them off](../docs/faults.md) lists faults of this family under F. One sentence of it: *one plan decides
all three*, the choice of the kernel, the size of the scratch and its layout. The fault of this tutorial is what happens when they
are decided in three places.

## A picture

Places of the scratch, 2 slots of 128 rows, and what a single launch of so many rows writes there. Blue: written once. Red:
written by two rows. Black: behind the end.
"""

# %%
figure = Figure(figsize=(9, 2.9), layout="constrained")
axes = figure.subplots()
launches = (100, 128, 181, 257)
for line, rows in enumerate(launches):
    writers = np.zeros(128 + max(launches), int)
    for slot in range(2):
        writers[slot * 128 : slot * 128 + rows] += 1
    place = np.arange(len(writers))
    for color, which in (
        ("#3b6ea5", (writers == 1) & (place < 256)),
        ("#c0504d", (writers > 1) & (place < 256)),
        ("#202020", (writers > 0) & (place >= 256)),
    ):
        axes.broken_barh([(p, 1) for p in place[which]], (line + 0.1, 0.8), facecolors=color)
    assert (writers[:256] > 1).sum() == max(0, min(rows, 256) - 128)
    assert (writers[256:] > 0).sum() == max(0, rows - 128)
axes.axvline(128, color="#888888", linestyle=":")
axes.axvline(256, color="#888888")
axes.set(xlim=(0, 390), ylim=(len(launches), 0), xlabel="place", xticks=[0, 128, 256, 384])
axes.set(yticks=[n + 0.5 for n in range(len(launches))], yticklabels=[f"{rows} rows" for rows in launches])
picture("07-places", figure)

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 07
    .venv/bin/refengine tutorial check 07

1. `slices_of`: cut rows into slices.
2. `lands`: where does a row's partial go when nobody checks?
3. `in_slices`: run a kernel in slices. Move what must move.
"""

# %% [markdown]
"""
## What production engines do

* The engine of this fault was mended with slices of 128 rows, and a test that records the launches: 257 rows are 128, 128 and 1.
  Later prompts on pages went through the prompt kernel, as those in windows do, and the scratch was out of the way altogether.
* Chunked prefill in vLLM and SGLang bounds the rows of a pass; buffers are made for that bound, once, at startup.
* FlashInfer has the caller provide a *workspace*, and a planning step (`plan`, then `run`) that lays partials out in it. Plan and
  layout are one thing there, too.
* NVIDIA's `compute-sanitizer` finds writes outside an allocation on a GPU (`memcheck`). A neighbour inside the same allocation it
  does not find. Comparing bits with a launch that has room does.
"""

# %% [markdown]
"""
## Next

[08 · Two paths round differently](08_two_paths_round_differently.py): the same engine, the same kernel, and a reply that depended
on paging.
"""
