# %% [markdown]
"""
# 16 · Write your own backend

Before this: [02 · Pages and page tables](02_pages_and_page_tables.py). The code of this tutorial is a package of its own,
[two_level](two_level/two_level.py), that knows the engine only through what the engine offers.

    make .venv/ready    # once
    .venv/bin/python tutorials/16_write_your_own_backend.py
"""

# %%
from contextlib import suppress

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from backends.base import PROMPT, Backend, BackendError, Sizes, backend_class, backend_names
from backends.layout import Layout
from backends.paged import PagedBackend
from backends.pool import PoolBroken
from kernels_numba.machine import KernelError, device, int64, uint32
from refengine.contract.backend import BackendEntry
from refengine.contract.controls import plant_control
from refengine.contract.gates import GATES, Trial, judge
from refengine.device import open_device
from refengine.lab.notebook import picture, show, table
from refengine.lab.plugins import make_known
from refengine.lab.sources import ROOT
from refengine.verify.attention_bits import Bench, Case, Heads

# %% [markdown]
"""
## The question

You have an idea of your own where cache rows should lie. What must you write so that the engine runs on it, and how do you know
that it is right?

Less than you may think, and more than a test that passes. The idea here is a page table of two levels, as operating systems
have it.
"""

# %% [markdown]
"""
## A worked example in numbers

Pages of 48 positions, and a text that may become 131,072 positions long. Its page table needs an entry for each page: 131,072 /
48, rounded up, is 2,731. Most texts are short, and most of the entries are never used.

With two levels, the table is cut into *leaves* of 4 entries. A text has a *directory* with one entry for each leaf, 683 of
them. A leaf is taken only when the text grows into it.

A text of 500 positions has 11 pages, which take 3 leaves: 683 + 3 · 4 = 695 entries instead of 2,731.

Where is position 500? 500 // 48 = 10, so it is in the text's page number 10, in slot 500 - 480 = 20. Page number 10 is in leaf
10 // 4 = 2, at place 10 % 4 = 2 of it. So there are two lookups: directory entry 2 says where the leaf begins, and two places
behind that stands the page.
"""

# %%
PAGE, LEAF = 48, 4
directory = [9, 5, 17]  # where the three leaves begin, in one long table
long_table = np.full(24, -1)
long_table[9:13], long_table[5:9], long_table[17:20] = [31, 8, 2, 40], [7, 22, 19, 3], [11, 5, 28]


def find(position):
    """(page, slot) of a position."""
    number, slot = divmod(position, PAGE)
    return int(long_table[directory[number // LEAF] + number % LEAF]), slot


assert -(-131_072 // PAGE) == 2_731 and -(-2_731 // LEAF) == 683  # -(-a // b): a / b, rounded up
assert find(0) == (31, 0) and find(500) == (28, 20)

# %% [markdown]
"""
## The code

### The address

Kernels know nothing of a cache but one function, `locate`. Here is the engine's, for pages, and the new one:
"""

# %%
show("backends/layout.py", "locate_paged")
show("tutorials/two_level/two_level.py", "locate_two_level")

# %% [markdown]
"""
* The arguments are those of every form of cache. `table` is now where the text's directory begins. Directories and leaves lie
  in the one array `pages`.
* `int64(...)` makes a number wide. Page ids have 32 bits, and a page id times `page_words` may need more.
* It returns where the page starts in the arena, and the slot in it. What follows from there, every kernel works out alike.

This is a *device function*: Python that runs on a GPU, and here on your CPU. It may use what [the dialect](../docs/dialect.md)
has.

### The class

What else must a backend decide? These methods have no body in the base class:
"""

# %%
missing = sorted(Backend.__abstractmethods__)
table(["method", "what it decides"], [[m, getattr(Backend, m).__doc__.split(". ")[0].split(".\n")[0]] for m in missing])
assert missing == ["address", "cache_words", "freed", "grow", "page_positions"]

# %% [markdown]
"""
A backend with pages need not write any of them anew: `PagedBackend` has a pool, promises pages to texts, hands them out and
takes them back. It leaves three places to those who keep their tables otherwise. `address` says where a text's table begins,
`enter` writes its next pages into it, `forget` cleans up when the text is gone.
"""

# %%
show("tutorials/two_level/two_level.py", "TwoLevelBackend.address", "TwoLevelBackend.enter", "TwoLevelBackend.forget")

# %% [markdown]
"""
`stream.slot` is the text's place among those that are open. In `enter`, each fourth page begins a leaf, and its place is
written into the directory. Entries that are not in use name the *null page*, which nobody may read.

(This example sets aside leaves for the worst case, so that a text can never run out of them. To save memory you would have
fewer, and promise them as the pool promises pages: tutorial 09.)

### The name

`pip install -e tutorials/two_level` makes the backend known. What does it do? It leaves a small folder with a text file, and
Python finds that by looking through its path. The line `NAME = MODULE:CLASS` stands in the package's `setup.cfg`. We do here
what pip would do, in a folder that is thrown away, so that your installation stays as it is.
"""

# %%
print(make_known(ROOT / "tutorials" / "two_level"))
print(", ".join(backend_names()))
assert {"two-level", "two-level-broken"} <= set(backend_names())
TwoLevel = backend_class("two-level")

# %% [markdown]
"""
From here on every command of the engine takes the name, as in `refengine compare --backends window,two-level`.

## Is it right?

Read a text of 150 tokens through it, and through a window. The same bits?
"""

# %%
bench = Bench(Heads(heads=4, kv_heads=1, head_dim=64), 300, open_device("cpu"))


def equals_window(name, tokens):
    """Whether attention over so many tokens, in one prompt pass with pages of 48, has the bits of the window."""
    found, wanted = (bench.attend(Case(backend, PAGE, PROMPT, tokens, 0)) for backend in (name, "window"))
    return found.tobytes() == wanted.tobytes()


assert equals_window("two-level", 150)

# %% [markdown]
"""
They are. Are we done? There is a second backend in the file, `two-level-broken`. It takes its first leaf to go on for ever:
"""

# %%
show("tutorials/two_level/two_level.py", "locate_past_the_leaf")
assert equals_window("two-level-broken", 150)

# %% [markdown]
"""
It passes, too. 150 tokens are 4 pages, and 4 pages are one leaf. The fault begins with token 192. A test finds only what it
touches, and the one who writes a backend is the last to think of the case that he forgot.
"""

# %%
assert equals_window("two-level-broken", LEAF * PAGE)
with suppress(KernelError):  # a read outside of the table stops the launch
    assert not equals_window("two-level-broken", LEAF * PAGE + 1)

# %% [markdown]
"""
## The contract

So the engine brings the test along, written by people who do not know your idea. It is called the *contract*. In each case it
asks four questions, the *gates*. *bound*: Is the result within the error that rounding explains, measured against float64?
*exact*: Has it the bits of the window? *repeats*: Do three runs give the same bits? *guards*: Does it write only its own rows,
and read nothing that nobody wrote?

The cases have pages of 1, 48 and 256 positions, several texts at once, texts that have just begun, both kinds of pass, bf16 and
fp8. Pages come in shuffled order. Whatever is not in use is *poison*: in one run NaN, in the next large numbers, in the third
ones. A result that depends on the poison has read what it may not.

`refengine contract --backend two-level` runs them. Below is what this command does for each case.
"""

# %%
CPU = Trial(open_device("cpu"))


class OnTrial(BackendEntry):
    """The contract's entry of a backend class, whether or not it has a registered name."""

    def __init__(self, backend):
        self.name, self.backend = f"backend {backend.name}", backend


def contract(backend):
    """The verdict of each case on a backend."""
    return [judge(OnTrial(backend), case, CPU) for case in OnTrial(backend).cases(full=False)]


verdicts = contract(TwoLevel)
assert len(verdicts) == 12 and all(v.passed for v in verdicts)

# %% [markdown]
"""
And the broken one, beside two other ideas that look fine. Read them before you run them, and guess which are found:

* **Backwards**: the slots of a page are used from the last to the first. Each row still has a place of its own.
* **OneDirectory**: all texts use the first directory.
"""


# %%
@device
def locate_backwards(pos, base, table, ptok, pages, page_words):
    """Another slot for each position: no two positions share one."""
    entry = int64(uint32(pos) // uint32(ptok))
    return base + int64(pages[table + entry]) * page_words, ptok - 1 - (pos - entry * ptok)


class Backwards(PagedBackend):
    name = "backwards"
    layout = Layout("backwards", straddles=True, page=None, locate=locate_backwards)


class OneDirectory(TwoLevel):
    name = "one-directory"

    def address(self, stream):
        return 0, 0


rows = []
for backend in (backend_class("two-level-broken"), Backwards, OneDirectory):
    verdicts = contract(backend)
    red = [v for v in verdicts if not v.passed]
    rows.append([backend.name, len(verdicts) - len(red), *(sum(gate in v.problems for v in red) for gate in GATES)])
    print(f"{backend.name}: {red[0].case}: {next(iter(red[0].problems.values()))}\n")
    assert 0 < len(red) < len(verdicts)
table(["backend", "cases passed", *(f"stopped by {gate}" for gate in GATES)], rows)

# %% [markdown]
"""
All three are found, none in every case: each is right somewhere. A case can be stopped by two gates: what is wrong has other
bits than the window, too. And *guards* stops a run that reaches outside of its arrays.

`Backwards` deserves a thought. It gives each position its own place, and still it is wrong. A kernel does not look up each row.
It looks up the first row of an item and takes the next ones from the slots that follow. So there is a rule behind `locate`:
**within a page, slots go up with positions, one by one**. Where a page begins is yours, how it is filled is not.

Some mistakes do not even get that far. A layout says whether a tile of 64 keys may lie in two pages. If that does not fit the
page size, the backend is refused when it is built:
"""


# %%
class NeverStraddles(PagedBackend):
    name = "never-straddles"
    layout = Layout("never", straddles=False, page=None, locate=locate_backwards)


try:
    NeverStraddles(bench.heads.shape, Sizes(context=300, page_size=PAGE))
    raise AssertionError("pages of 48 straddle")
except BackendError as refusal:
    print(refusal)

# %% [markdown]
"""
### Can the contract itself be trusted?

A gate that never fails proves nothing. So faults are planted in the *right* backend, and each must come out red.
"""

# %%
planted = [plant_control(OnTrial(TwoLevel), control, CPU) for control in OnTrial(TwoLevel).controls()]
table(["planted", "found by", "what it says"], [[p.name, p.gate, p.found[:70]] for p in planted])
assert len(planted) == 3 and all(p.red for p in planted)

# %% [markdown]
"""
### What it does not ask

The contract opens texts and reads them. It does not open and close them for hours. A backend that loses a leaf each time a text
ends would pass, and stop a server after a day. For that each backend has `check()`: is every page free or held by just those
who hold it, and do the tables name the right ones? The scheduler calls it after each pass when it is asked to, and the tests do
so while texts come and go at random.
"""


# %%
class Leaky(TwoLevel):
    name = "leaky"

    def forget(self, stream):
        super().forget(stream)
        self.free_leaves.pop()


assert all(v.passed for v in contract(Leaky))
leaky = Leaky(bench.heads.shape, Sizes(context=300, streams=2, page_size=PAGE))
text = leaky.open()
text.grow(250)
leaky.check()
text.release()
try:
    leaky.check()
    raise AssertionError("a leaf is gone")
except PoolBroken as problem:
    print(problem)

# %% [markdown]
"""
## A picture

The tables of two texts, as they lie in memory: directories first, then the leaves. The numbers are the pages. Grey: the null
page.
"""

# %%
backend = TwoLevel(bench.heads.shape, Sizes(context=600, streams=2, page_size=PAGE, shuffle=5))
long, short = backend.open(), backend.open()
long.grow(440)
short.grow(100)
colors = {long.slot: "#d6e7f7", short.slot: "#f7e3c8", None: "#e6e6e6"}

figure = Figure(figsize=(10, 2.6))
axes = figure.subplots()


def cells(x, y, first, count, slot):
    """Draw entries of the table beside one another; grey where one is not in use."""
    for n, entry in enumerate(backend.pages[first : first + count].tolist()):
        used = entry != backend.null_page
        color = colors[slot if used else None]
        axes.add_patch(Rectangle((x + n, y), 1, 1, facecolor=color, edgecolor="#666666", linewidth=0.6))
        axes.text(x + n + 0.5, y + 0.5, entry if used else "", ha="center", va="center", fontsize=7)


for leaf in range(backend.leaves):
    owner = [slot for slot, leaves in backend.taken.items() if leaf in leaves]
    cells(leaf * 5, 0, backend.leaf_start(leaf), LEAF, owner[0] if owner else None)
for stream in (long, short):
    x, first = 6 + 14 * stream.slot, stream.slot * backend.entries
    cells(x, 3, first, backend.entries, stream.slot)
    for n, leaf in enumerate(backend.taken[stream.slot]):
        axes.annotate("", (leaf * 5 + 2, 1.05), (x + n + 0.5, 3), arrowprops={"arrowstyle": "->", "color": "#666666"})
axes.set(xlim=(-0.3, 5 * backend.leaves), ylim=(-0.2, 4.2))
axes.axis("off")
picture("16-two-levels", figure)
assert [len(backend.taken[s.slot]) for s in (long, short)] == [3, 1]
assert len(long.pages) == 10 and len(short.pages) == 3

# %% [markdown]
"""
## Exercises

    .venv/bin/refengine tutorial start 16
    .venv/bin/refengine tutorial check 16

A backend of your own: **packed**. A pool of less than 65,536 pages has ids of 16 bits, so two of them fit into one entry. That
halves the table. Entry `n // 2` holds page number `n`, in its low half if `n` is even and in its high half if it is odd.

1. `locate_packed`: the address function. Mind the sign: `pages` is int32, so an entry whose high half is 32,768 or more is a
   negative number.
2. `enter_packed`: write a page's id into its half, and leave the other half alone. The test then builds a backend of your two
   functions and runs it through the engine's kernels, against the window.
3. `stray_writes`: the gate *guards* in NumPy. Which words changed that may not?
"""

# %% [markdown]
"""
## What production engines do

* vLLM finds plug-ins through entry points of installed packages, as here: platforms, models and more come that way. Its
  attention backends are classes chosen by name, and its block table has one level.
* mini-sglang swaps attention backends by a string, and takes pairs such as `fa,fi`: one for prefill, one for decode. Its
  `check_integrity()` is product code, like `check()` here.
* Hugging Face transformers lets you register an attention function by name. llama.cpp can load its backends as shared
  libraries.
* FlashInfer avoids reserved entries in another way: the tables of all texts of a batch lie behind one another in one array,
  each as long as it is, and a second array says where each begins.
"""

# %% [markdown]
"""
## Next

This was the last one. [Add a backend](../docs/add_a_backend.md) is the same as a list of steps, and
[docs/spec/contract.md](../docs/spec/contract.md) has the contract's rules. If you have an idea, write it.
"""
