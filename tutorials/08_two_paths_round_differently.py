# %% [markdown]
"""
# 08 · Two paths round differently

Before this: [04 · Why paged equals window](04_why_paged_equals_window.py) and
[06 · Decode: chunks, groups, merge](06_decode_chunks_groups_merge.py). The words *tile*, *fold* and *decode pass* come from
there.

    make .venv/ready    # once
    .venv/bin/python tutorials/08_two_paths_round_differently.py
"""

# %%
import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

from backends.base import DECODE, PROMPT, Sizes, backend_class
from refengine.checkpoint import load_weights
from refengine.commands.inputs import find_model
from refengine.device import open_device
from refengine.lab.notebook import picture, show, table
from refengine.model import cache_shape, open_model
from refengine.serve.session import Session
from refengine.verify import attention_oracle, bounds
from refengine.verify.attention_bits import Bench, Heads

# %% [markdown]
"""
## The question

You send the same prompt twice, with the same weights, and at each step the engine takes the most likely token. Nothing is
random. Can the second reply be another one, only because somebody else's text was in the same pass?

It can. This tutorial builds that fault, out of two kernels that are both right.
"""

# %% [markdown]
"""
## A worked example in numbers

Take a computer whose numbers have three decimal digits. Every sum is rounded to the nearest such number. Now add 1, 0.004 and
0.004:

* from the left: 1 + 0.004 = 1.004, rounded **1.00**. Again + 0.004: **1.00**.
* the small ones first: 0.004 + 0.004 = 0.008. 1 + 0.008 = 1.008, rounded **1.01**.

The exact sum is 1.008. Both answers are what such a computer gives; the order makes the difference.

A model scores all possible next tokens, and the largest score wins; of equal scores the first token in the vocabulary wins. Say
that "no" comes first and has 1.00, and "yes" has the score that was just computed. The first order says "no", the second says
"yes". What follows may have nothing in common, for each token is computed from those before it.
"""


# %%
def rounded(x):
    """To three decimal digits."""
    return float(f"{x:.3g}")


def from_the_left(a, b, c):
    return rounded(rounded(a + b) + c)


def small_ones_first(a, b, c):
    return rounded(a + rounded(b + c))


NO = 1.00
choices = {}
for order in (from_the_left, small_ones_first):
    yes = order(1, 0.004, 0.004)
    choices[order.__name__] = [yes, "yes" if yes > NO else "no"]
assert choices == {"from_the_left": [1.0, "no"], "small_ones_first": [1.01, "yes"]}
table(["order", "score of yes", "the model says"], [[name, *found] for name, found in choices.items()])

# %% [markdown]
"""
The computer's real numbers have 24 binary digits in place of three decimal ones. The story stays the same:
"""

# %%
one, small = np.float32(1), np.float32(2**-24)
assert (one + small) + small == 1
assert one + (small + small) > 1

# %% [markdown]
"""
## The code

The engine has two ways to attend. Tutorials 03 and 06 had the way by *tiles*: tensor cores multiply small matrices. The second
way is older and simpler. It is called the **scalar path**: plain multiplications and additions, one after the other. Here is
how it scores keys. A *lane* is one of 16 threads that work on a query head; each has four of a tile's 64 keys.
"""

# %%
show("kernels_numba/decode_scalar.py", "score_keys", "weigh", "head_sum")

# %% [markdown]
"""
* `score_keys`: a score is one long chain. Each `fma` multiplies two numbers, adds the product to the sum so far and rounds
  once. The tensor core takes 16 products at a time and has a rounding of its own (tutorial 14).
* `weigh`: each lane adds the weights of its keys: `lane`, `lane + 16`, `lane + 32`, `lane + 48`, from the left.
* `head_sum`: 16 sums become one in four rounds. `shfl_xor(x, 8)` is the `x` of the lane whose number differs by 8, so lanes 0
  and 8 add theirs, lanes 1 and 9, and so on. Then at distance 4, 2 and 1.

Decode by tiles adds the same 64 weights in another order. Here it is for comparison. Four warps have 16 keys each, and a group
of four lanes (`quad`) has them within a warp:
"""

# %%
show("kernels_numba/decode_attention.py", "quad_sum", "add_sums")

# %% [markdown]
"""
Both orders in NumPy. `a + b` of two float32 arrays is rounded as on the GPU, number by number.
"""


# %%
def sum_of_scalar(p):
    """The 64 weights of a tile as the scalar path adds them. p: float32 [64]."""
    a, b, c, d = p.reshape(4, 16)  # key = 16 · row + lane
    x = ((a + b) + c) + d
    for distance in (8, 4, 2, 1):
        x = x[:distance] + x[distance:]
    return x[0]


def sum_of_tiles(p):
    """The same as decode by tiles adds them."""
    low, high = p.reshape(2, 4, 4, 2).transpose(0, 3, 1, 2)  # key = 32 · half + 8 · warp + 2 · lane + odd
    t = ((low[0] + low[1]) + high[0]) + high[1]  # [warp, lane of the quad]
    w = (t[:, 0] + t[:, 2]) + (t[:, 1] + t[:, 3])
    return (w[0] + w[2]) + (w[1] + w[3])


weights = np.random.default_rng(0).random((1000, 64), dtype=np.float32)
pairs = np.array([[sum_of_scalar(p), sum_of_tiles(p)] for p in weights])
differ = int((pairs[:, 0] != pairs[:, 1]).sum())
print("sums that differ:", differ, "of 1,000")
assert 300 < differ < 900
assert np.abs(pairs[:, 0] / pairs[:, 1] - 1).max() < 14 * 2**-24  # seven roundings on each side

# %% [markdown]
"""
### Who chooses the path?

Two paths do no harm as long as each row always takes the same one. Here is the place where the engine chooses:
"""

# %%
show("backends/attention.py", "takes_scalar", "plan_pass")

# %% [markdown]
"""
In its normal mode, `TILES`, the phase alone decides: prompt passes take the prompt kernel, decode passes the decode kernels. A
row knows its phase, whoever else is there.

The other two modes, `--attention scalar-batch` and `scalar-decode`, are a fault that is kept for teaching. Look at
`holds_pages`: it asks whether *any* stream of the pass is on pages. The choice is then made for *every* row. Why would someone
write that? One kernel can read windows only; a new one can read pages; and a pass wants one launch. So passes with pages take
the new kernel. It looks harmless.

Let us try it. In the backend `mixed` the first stream has a window, and the others take pages. The first stream has read 99
tokens. Now its 100th is computed: alone, and beside another stream.
"""

# %%
TOKENS = 100
bench = Bench(Heads(heads=4, kv_heads=1, head_dim=64), 2 * TOKENS, open_device("cpu"))


def last_row(mode, phase, company):
    """The first stream, its 100th token's attention output bf16 [heads, D], and all output of that pass."""
    sizes = Sizes(TOKENS, streams=2, page_size=16, shuffle=3, attention=mode)
    backend = backend_class("mixed")(bench.heads.shape, sizes)
    streams = [backend.open() for _ in range(2 if company else 1)]
    for number, stream in enumerate(streams):  # each reads 99 tokens of its own
        first = number * TOKENS
        run_pass(backend, PROMPT, [stream], bench.rows[first : first + TOKENS - 1])
    rows = bench.rows[[number * TOKENS + TOKENS - 1 for number in range(len(streams))]]
    q, out = run_pass(backend, phase, streams, rows)
    return streams[0], q[0], out[0]


def run_pass(backend, phase, streams, rows):
    """A pass in which the rows are shared out evenly. Returns queries and output."""
    batch = backend.batch(phase, [(stream, len(rows) // len(streams)) for stream in streams])
    q = backend.store(0, rows, bench.norms, bench.rope, batch)
    out = backend.attend(0, q, batch)
    backend.finish(batch)
    return q, out


found, changed = {}, {}
for mode in ("tiles", "scalar-batch", "scalar-decode"):
    for phase in (PROMPT, DECODE):
        for company in (False, True):
            stream, q, found[mode, phase, company] = last_row(mode, phase, company)
        alone, beside = found[mode, phase, False], found[mode, phase, True]
        changed[mode, phase] = int((alone.view(np.uint16) != beside.view(np.uint16)).sum())

table(
    ["mode", "phase", "numbers that changed", "of"],
    [[mode, phase, count, alone.size] for (mode, phase), count in changed.items()],
)
assert changed["tiles", PROMPT] == changed["tiles", DECODE] == 0
assert changed["scalar-batch", PROMPT] > 0 and changed["scalar-batch", DECODE] > 0
assert changed["scalar-decode", PROMPT] == 0 < changed["scalar-decode", DECODE]

# %% [markdown]
"""
The first stream's memory is the same in all twelve runs. It has a window. Only the company changed, and some of its numbers
did.

### Which of the two is wrong?

Neither. Compare both with a computation in float64, which is exact for our purpose. The engine has a *bound* for each kernel:
how far its roundings can take it from the exact result at most. Both stay below theirs. (The largest error is the same: it
comes from the last step, where both round their result to 8 bits. The scalar path's bound is the tighter one, for its weights
are float32.)
"""

# %%
keys, values = (
    part.view(ml_dtypes.bfloat16).transpose(1, 0, 2) for part in stream.save().rows[0]
)  # [positions, KV heads, D]
exact = attention_oracle.prompt_attention(q[None], keys, values, TOKENS - 1, float(bench.heads.scale))

errors = []
for name, mode, bound in (
    ("tiles", "tiles", bounds.decode_attention),
    ("scalar", "scalar-batch", bounds.scalar_attention),
):
    out = found[mode, DECODE, True][None]
    share = bounds.worst_fraction(out, exact.out, bound(exact, 64))
    errors.append([name, f"{np.abs(out.astype(np.float64) - exact.out).max():.5f}", f"{share:.2f}"])
    assert share < 1
table(["path", "largest error", "of its bound"], errors)

# %% [markdown]
"""
So no test of a kernel alone will ever find this fault, however exact. The kernels are right, and their *choice* is wrong.

## The reply that depended on paging

Now a whole model, `qwen3.5-tiny` with random weights. Its vocabulary begins with the 256 bytes, so a prompt is its bytes. (What
it answers is noise; the arithmetic is that of a trained model.) The asker has a window. Sometimes another request is there, on
pages.
"""

# %%
REPLY = 9
spec, _, checkpoint = find_model("qwen3.5-tiny", 0)
device = open_device("cpu")
model = open_model(spec, load_weights(checkpoint(), spec), device, 64)
asker, other = list(b"What is 2 + 2?"), list(b"What is a page table?")


def reply(mode, prompts):
    """What the first prompt is answered, in passes with the others; the scores that its last token was chosen by."""
    sizes = Sizes(64, streams=2, page_size=16, shuffle=3, attention=mode)
    backend = backend_class("mixed")(cache_shape(spec), sizes)
    session = Session(model, backend, device, prompts, prompt_rows=64)
    for _ in session.read(len(prompts), REPLY):
        pass
    *_, last = session.write(REPLY)
    return session.replies[0], last.logits[last.streams.index(0)]


answers = {
    (mode, company): reply(mode, [asker, other][: 1 + company])
    for mode in ("tiles", "scalar-batch")
    for company in (False, True)
}
replies = {how: ids for how, (ids, _) in answers.items()}
table(
    ["mode", "company", "tokens of the reply"],
    [[mode, "a stream on pages" if company else "nobody", str(ids)] for (mode, company), ids in replies.items()],
)
assert replies["tiles", False] == replies["tiles", True] == replies["scalar-batch", False]
assert replies["scalar-batch", True] != replies["scalar-batch", False]
assert replies["scalar-batch", True][: REPLY - 1] == replies["scalar-batch", False][: REPLY - 1]

# %% [markdown]
"""
Eight tokens are the same, and the ninth is not. Look at the scores of the two ninth tokens:
"""

# %%
alone, beside = (answers["scalar-batch", company][1] for company in (False, True))
one, two = replies["scalar-batch", False][-1], replies["scalar-batch", True][-1]
table(
    ["", f"score of {one}", f"score of {two}"],
    [["alone", f"{alone[one]:.6f}", f"{alone[two]:.6f}"], ["beside", f"{beside[one]:.6f}", f"{beside[two]:.6f}"]],
)
assert alone[one] > alone[two] and beside[one] < beside[two]
moved = np.abs(beside - alone)
print(f"scores moved by {moved.mean():.4f} on average, between {alone.min():.1f} and {alone.max():.1f}")
assert 0 < moved.max() < 0.05 * (alone.max() - alone.min())

# %% [markdown]
"""
The scores have moved a little. For eight tokens the best candidate was far enough ahead. At the ninth, two were close enough
for it to matter. Whoever reads the texts will find nothing: the fault shows in some replies, at some place, when certain others
are there.

That is why the engine's checks look at bits, and not at texts. Of its *equalities* the second one says: **together == alone**.
Each stream of a pass must have the bits that it has by itself. It needs no exact result, and finds what is wrong with the
choice:

    .venv/bin/refengine equal --only 2
    .venv/bin/refengine equal --only 2 --attention scalar-batch

The first call ends with all equalities held. The second one fails: a stream in a window, beside one on pages.

## A picture

The same weights, in the two orders. Each dot adds what hangs above it. Read from the top: which keys meet first?
"""


# %%
def tree(axes, groups, title):
    """Draw how 16 of a tile's 64 weights come together. groups: of four keys; they meet in pairs, then all."""
    lanes = [4 * n + 1.5 for n in range(4)]
    lines = [(x, 0, lanes[x // 4]) for x in range(16)]
    lines += [(x, 1, sum(lanes[n // 2 * 2 :][:2]) / 2) for n, x in enumerate(lanes)]
    lines += [(3.5, 2, 7.5), (11.5, 2, 7.5)]
    for x, level, below in lines:
        axes.plot([x, below], [level, level + 1], color="#3b6ea5", linewidth=1)
        axes.plot(below, level + 1, "o", color="#3b6ea5", markersize=7)
    axes.set(xticks=range(16), xticklabels=sum(groups, []), yticks=[], ylim=(3.3, -0.1))
    axes.xaxis.tick_top()
    axes.set_title(f"{title}: keys", fontsize=10)
    axes.spines[["top", "left", "right", "bottom"]].set_visible(False)


scalar = [[lane, lane + 16, lane + 32, lane + 48] for lane in (0, 8, 4, 12)]
tiles = [[key, key + 1, key + 32, key + 33] for key in (0, 4, 2, 6)]
figure = Figure(figsize=(10, 2.6))
left, right = figure.subplots(1, 2)
tree(left, scalar, "scalar, four of its 16 lanes")
tree(right, tiles, "tiles, one of its four warps")
picture("08-two-orders", figure)

# %% [markdown]
"""
Each picture has 16 of the 64 keys, those that meet soonest. On the right keys 0 and 1 are the first to meet. On the left they
belong to two lanes and meet last of all. Neither is better, as long as a row does not change trees.

## Exercises

    .venv/bin/refengine tutorial start 08
    .venv/bin/refengine tutorial check 08

1. `fold_lanes`: the scalar path's four rounds, for any number of lanes that is a power of two. Bit for bit.
2. `path_of`: which kernels does a row take? Fill in the rule of `takes_scalar` from its three modes.
3. `changed_by_company`: the check of "together == alone", for any server. What does `==` on floats not see?
"""

# %% [markdown]
"""
## What production engines do

* The name for what this tutorial wants is *batch invariance*: a row's bits do not depend on the batch. Thinking Machines wrote
  about it and published `batch_invariant_ops`: kernels for matrix products and means that keep one order. In its example 1,000
  greedy replies to one prompt are 18 different ones without these kernels, and one with them.
* vLLM has a batch-invariant mode. One of its tests is the twin of our `scalar-batch`: it passes only if differences *do* appear
  while the mode is off.
* SGLang has a mode for deterministic inference, with a test that samples a prompt many times and counts different replies.
* FlashInfer can fix how a row's keys are split (`fixed_split_size`), so that the split does not follow from the load.
* In most engines these modes are off by default: libraries choose kernels by the number of rows, which is faster. The replies
  are then as good, and not repeatable.

Known ways in which a row comes to depend on its company: a matrix library that chooses its algorithm by the number of rows,
sums that are split by the load, and chunks of keys that begin where the pass begins. All have the same cure: the order of a sum
follows from positions alone.
"""

# %% [markdown]
"""
## Next

[09 · Pool, admission, waiting](09_pool_admission_waiting.py): the company may not change a reply. But it can make it wait.
"""
