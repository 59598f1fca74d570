# %% [markdown]
"""
# 12 · Gated DeltaNet beside attention

Before this: [01 · What a KV cache is](01_what_a_kv_cache_is.py) and [02 · Pages and page
tables](02_pages_and_page_tables.py).

    make .venv/ready    # once
    .venv/bin/python tutorials/12_gated_deltanet_beside_attention.py
"""

# %%
import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

from kernels_numba import gated_delta_net
from kernels_numba.streams import COLUMNS, ROWS
from refengine.lab.notebook import picture, show, table
from refengine.registry import load_model
from refengine.verify import oracles
from refengine.verify.bounds import worst_fraction

# %% [markdown]
"""
## The question

A KV cache grows with every token. In `qwen3.8-27b` only 16 of 64 layers have one; the other 48 take the same number
of bytes after ten tokens and after a hundred thousand. What do those layers keep, and what do they give up for it?

They keep one square of numbers for each head, the **state**, and change it a little with each token. The rule of the
change is the *delta rule*; the kind of layer is called *Gated DeltaNet*.
"""

# %%
model = load_model("qwen3.8-27b")
assert (len(model.attention_layers), len(model.linear_layers)) == (16, 48)

# %% [markdown]
"""
## A worked example in numbers

A state is a matrix `S` that answers questions: give it a key, and `S @ key` is the value that was stored under it.
Let keys and values have two numbers each, and let `S` be zero at first. As in attention, each token brings a key `k`,
a value `v` and a query `q`. What it does, in order:

    mem   = S @ k                  # what is stored under this key so far
    delta = (v - mem) · beta       # what is missing there
    S     = S + delta ⊗ k          # put it in:  S[i, j] += delta[i] · k[j]
    y     = S @ q                  # the token's result

`beta` says how much of the difference goes in. It is 1 for now. Three tokens:

| token | k | v | mem | delta | S after it |
|---|---|---|---|---|---|
| 0 | `[1, 0]` | `[4, 8]` | `[0, 0]` | `[4, 8]` | `[[4, 0], [8, 0]]` |
| 1 | `[0, 1]` | `[2, 6]` | `[0, 0]` | `[2, 6]` | `[[4, 2], [8, 6]]` |
| 2 | `[1, 0]` | `[0, 4]` | `[4, 8]` | `[-4, -4]` | `[[0, 2], [4, 6]]` |

Token 2 has the key of token 0. Its value takes the place of the old one, and token 1's is still there.
"""

# %%


def token(state, k, v, decay=1.0, beta=1.0):
    """The state after a token. state: [values, keys], k: [keys], v: [values]."""
    state = state * decay
    delta = (v - state @ k) * beta
    return state + np.outer(delta, k)


east, north = np.array([1.0, 0.0]), np.array([0.0, 1.0])
after_0 = token(np.zeros((2, 2)), east, np.array([4.0, 8.0]))
after_1 = token(after_0, north, np.array([2.0, 6.0]))
after_2 = token(after_1, east, np.array([0.0, 4.0]))
assert after_1.tolist() == [[4, 2], [8, 6]] and after_2.tolist() == [[0, 2], [4, 6]]
assert (after_2 @ east).tolist() == [0, 4] and (after_2 @ north).tolist() == [2, 6]

# %% [markdown]
"""
Why *delta* rule? The simpler rule `S = S + v ⊗ k`, *linear attention*, adds without looking. Then token 2's answer
would be the sum of old and new, `[4, 12]`, which nobody stored.
"""

# %%
added = sum(np.outer(v, k) for k, v in ((east, [4, 8]), (north, [2, 6]), (east, [0, 4])))
assert (added @ east).tolist() == [4, 12]

# %% [markdown]
"""
Two gates complete it. Each token computes both of them from its own input, for each head:

* **decay**, between 0 and 1: the whole state is multiplied by it first. That forgets.
* **beta**, between 0 and 1: how far the stored value moves toward the new one.

A fourth token with `k = [0.6, 0.8]`, `v = [5, 10]`, decay 1/2 and beta 1/2. Its key lies between the other two, so it
finds a mixture:

1. S becomes `[[0, 1], [2, 3]]`.
2. mem = `[0.8, 1.2 + 2.4]` = `[0.8, 3.6]`.
3. delta = `[4.2, 6.4]` / 2 = `[2.1, 3.2]`.
4. S becomes `[[0 + 1.26, 1 + 1.68], [2 + 1.92, 3 + 2.56]]` = `[[1.26, 2.68], [3.92, 5.56]]`.

Asked with the same key, it now answers `[2.9, 6.8]`: half way from mem to v, as beta says. That is exact only because
the key has length 1 (0.36 + 0.64 = 1). The layer divides every key by its length for this reason.
"""

# %%
k = np.array([0.6, 0.8])
after_3 = token(after_2, k, np.array([5.0, 10.0]), decay=0.5, beta=0.5)
assert np.allclose(after_3, [[1.26, 2.68], [3.92, 5.56]])
assert np.allclose(after_3 @ k, [2.9, 6.8]) and np.allclose([2.9, 6.8], (np.array([0.8, 3.6]) + [5, 10]) / 2)

# %% [markdown]
"""
## The code

In the engine keys and values of a head have 128 numbers, so a state is 128 × 128, float32. There are two kernels for
the rule. The first, `step`, is for decode: one new token. It cuts a state into many small parts, for a GPU has many
processors and one token has little else to share out. A *warp* is 32 threads, *lanes*, in step; here it takes two
rows of the state, and each lane four numbers of both rows.
"""

# %%
show("kernels_numba/gated_delta_net.py", "step_row", "decay_and_read", "update_and_read", "add_outer4")

# %% [markdown]
"""
You know every line already:

* `decay_and_read`: `s = s · g`, then a lane's four products `s · k`. `warp_sum` adds up the 32 lanes: `mem0`, `mem1`.
* `(bf16_low(v) - mem0) * b` is delta. (A word holds two numbers of 16 bits, hence `low` and `high`.)
* `add_outer4` puts it in. The last `dot4` begins the sum `s · q`, and `y` is stored.

The second kernel, `chain`, is for prompts. Token 2 needs the state after token 1, so a long prompt is a long chain of
steps. Here a thread keeps 64 numbers of the state, half a row, in its registers from the first row of the prompt to
the last:
"""

# %%
show("kernels_numba/gated_delta_net.py", "chain_kernel", start="load_half_row", end="states[at + 8")
show("kernels_numba/gated_delta_net.py", "chain_read")

# %% [markdown]
"""
The state is read from memory once and written once, whatever the number of rows; and two threads need one exchange
(`shfl_xor`) to add up their halves, where 32 lanes need five.

Let us run both. One layer with one key head, which two value heads share, and 100 tokens.
"""

# %%
BF16 = ml_dtypes.bfloat16
TOKENS, VALUE_HEADS, HEAD = 100, 2, 128
rng = np.random.default_rng(0)


def unit(x):
    """Vectors divided by their lengths."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


q = unit(rng.standard_normal((TOKENS, HEAD))) / np.sqrt(HEAD)
k = unit(rng.standard_normal((TOKENS, HEAD)))
v = rng.standard_normal((TOKENS, VALUE_HEADS * HEAD))
qkv = np.concatenate([q, k, v], axis=1).astype(BF16)
decay = rng.uniform(0.9, 1.0, (TOKENS, VALUE_HEADS)).astype(np.float32)
beta = rng.uniform(0.0, 1.0, (TOKENS, VALUE_HEADS)).astype(np.float32)


def run(kernel, state, first, stop, **how):
    """The tokens from first to stop - 1 in one launch; changes the state in place, returns y."""
    y = np.zeros((stop - first, VALUE_HEADS * HEAD), BF16)
    streams = np.zeros((1, COLUMNS), np.int64)
    streams[0, ROWS] = stop - first
    rows = qkv[first:stop], decay[first:stop], beta[first:stop]
    kernel(y, state.reshape(-1), *rows, streams, np.zeros(1, np.int64), **how)
    return y


def new_state():
    return np.zeros((VALUE_HEADS, HEAD, HEAD), np.float32)


by_chain, by_step = new_state(), new_state()
y_chain = run(gated_delta_net.chain, by_chain, 0, TOKENS)
y_step = run(gated_delta_net.step, by_step, 0, TOKENS, commit=True)

# %% [markdown]
"""
Both compute the same rule, but add in another order, and round at other places (`chain` writes `fma`, a product and a
sum with one rounding). So their last bits differ. Both must lie within what their roundings allow; the engine's
float64 oracle knows how much.
"""

# %%
heads = [part.reshape(TOKENS, -1, HEAD) for part in np.split(qkv, [HEAD, 2 * HEAD], axis=1)]
found = []
for name, y, state, depth in (
    ("chain", y_chain, by_chain, oracles.CHAIN_DEPTH),
    ("step", y_step, by_step, oracles.STEP_DEPTH),
):
    exact_y, exact_state = oracles.delta_rule(new_state(), *heads, decay, beta, depth)
    worst = [worst_fraction(y.reshape(TOKENS, -1, HEAD), *exact_y), worst_fraction(state, *exact_state)]
    assert max(worst) <= 1
    found.append([name, *(f"{part:.0%}" for part in worst)])
table(["kernel", "y: worst error, of the bound", "state: the same"], found)

differ = [int((a != b).sum()) for a, b in ((by_chain, by_step), (y_chain, y_step))]
assert all(differ)
print(f"numbers with other bits: {differ[0]:,} of {by_step.size:,} in the state, {differ[1]} of {y_step.size:,} in y")

# %% [markdown]
"""
That is why *which* kernel runs must not depend on chance. A prompt takes the chain and a reply takes the step,
always; not "up to 16 rows the step, beyond it the chain". Tutorial 08 shows what happens to an engine that chooses by
the number of rows.

Within a kernel the order of sums never depends on how the tokens are cut into launches. 60 tokens, then 40, is the
same as 100:
"""

# %%
state = new_state()
parts = [run(gated_delta_net.chain, state, 0, 60)]
after_60 = state.copy()
parts.append(run(gated_delta_net.chain, state, 60, TOKENS))
assert np.concatenate(parts).tobytes() == y_chain.tobytes() and state.tobytes() == by_chain.tobytes()
print("60 tokens, then 40: the same bits")

# %% [markdown]
"""
What the layer does around the rule is in the same file: a *convolution* mixes each number with those of the three
tokens before (so a stream keeps three rows of that, too), keys and queries are normed, and a gate decides how much of
`y` is used. The spec is [attention §5](../docs/spec/attention.md#5-gated-deltanet).

### The bytes

A layer of `qwen3.8-27b` has 48 value heads. So all states of a stream take 48 · 48 · 128 · 128 · 4 bytes: 144 MiB.
Its KV cache takes 65,536 bytes a token (tutorial 01). They are equal at 2,304 tokens: for short texts, the state is
the larger part.
"""

# %%
states = 48 * 48 * 128 * 128 * 4
assert states == 144 * 2**20
assert model.state_bytes == states + 48 * 3 * 10_240 * 2  # and three rows of the convolution's input, bf16
assert states == 2304 * model.kv_bytes_per_token()

# %% [markdown]
"""
### What a prefix needs

Two prompts begin with the same 60 tokens. The second may begin where they part: it shares the pages that hold the
first 60 rows of keys and values (tutorial 10). With these layers that is not enough.

Keys and values of a token stay as they are, so a KV cache can be cut behind any token. A state cannot. After 100
tokens, the state after 60 is *gone*: it was written over, and cannot be computed back. Here are two different pasts
that end in one state, because token 2 replaces what they differ in:
"""

# %%
other_past = token(token(np.zeros((2, 2)), east, np.array([100.0, -7.0])), north, np.array([2.0, 6.0]))
assert (other_past != after_1).any()
assert (token(other_past, east, np.array([0.0, 4.0])) == after_2).all()

# %% [markdown]
"""
So an engine keeps a copy of all states at the places where another prompt may begin. With the copy, the rest of the
prompt has the bits of the whole. Without it (zeros in place of the copy), nearly everything is wrong:
"""

# %%
resumed = after_60.copy()
assert run(gated_delta_net.chain, resumed, 60, TOKENS).tobytes() == parts[1].tobytes()

without = run(gated_delta_net.chain, new_state(), 60, TOKENS)
wrong = float((without != parts[1]).mean())
assert wrong > 0.95
print(f"begun without the state: {wrong:.1%} of y is another")

# %% [markdown]
"""
A copy takes 144 MiB, as many bytes as the keys and values of 2,304 tokens. So there is one at chosen places, not one
a page. This engine makes one behind the last whole page of a prompt.

Drafts meet the same problem: tokens that were guessed and then rejected must leave no trace. In a KV cache the rows
behind the end are just not read. A state must not be changed until it is known which tokens stay. So `step` has a
form that writes no state back, and the accepted tokens are run once more:
"""

# %%
state = after_60.copy()
drafted = run(gated_delta_net.step, state, 60, 69, commit=False)
assert state.tobytes() == after_60.tobytes()
kept = run(gated_delta_net.step, state, 60, 64, commit=True)  # 4 of the 9 were accepted
assert kept.tobytes() == drafted[:4].tobytes() and state.tobytes() != after_60.tobytes()

# %% [markdown]
"""
## A picture

Left: what one text keeps, as it grows. Right: what a state of fixed size gives up. 512 pairs of random keys and
values, 128 numbers each, went into one state, without decay and with beta 1. Then each key is asked for again: how
far is the answer from its value? An error of 1 means that it is off by as much as the value is long. A KV cache has
them all exactly.
"""

# %%
PAIRS = 512
keys, values = unit(rng.standard_normal((PAIRS, HEAD))), unit(rng.standard_normal((PAIRS, HEAD)))
by_delta, by_sum = np.zeros((HEAD, HEAD)), np.zeros((HEAD, HEAD))
for key, value in zip(keys, values):
    by_delta = token(by_delta, key, value)
    by_sum = by_sum + np.outer(value, key)


def errors(state):
    """How far each answer is off, the newest pair first."""
    return np.linalg.norm(keys @ state.T - values, axis=1)[::-1]


assert errors(by_delta)[0] < 1e-12 and errors(by_delta)[:16].mean() < 0.4 and errors(by_delta)[256:].mean() > 1
assert errors(by_sum)[:16].mean() > 1.5

figure = Figure(figsize=(10, 3.2))
left, right = figure.subplots(1, 2)
tokens = np.arange(0, 8193, 64)
left.plot(tokens, tokens * model.kv_bytes_per_token() / 2**20, color="#3b6ea5", label="KV cache, 16 layers")
left.plot(tokens, np.full(len(tokens), states / 2**20), color="#b5523b", label="states, 48 layers")
left.set(xlabel="tokens", ylabel="MiB", title="qwen3.8-27b, one text")
right.plot(errors(by_sum), ".", markersize=3, color="#8a8a8a", label="plain sum")
right.plot(errors(by_delta), ".", markersize=3, color="#b5523b", label="delta rule")
right.set(xlabel="pairs stored after it", ylabel="error", ylim=(0, 3.4), title="512 pairs in one state of 128 × 128")
for axes in (left, right):
    axes.legend(frameon=False)
picture("12-state", figure)

# %% [markdown]
"""
At most 128 keys of 128 numbers can all be at right angles to each other, so there is no exact room for more. The
delta rule keeps the newest pairs well and lets the old ones go; the plain sum blurs all of them alike. That is why
there are attention layers beside: one layer in four keeps every token, to be looked up exactly.

## Exercises

    .venv/bin/refengine tutorial start 12
    .venv/bin/refengine tutorial check 12

1. `delta_step`: one token, with both gates and the result.
2. `decode_sum`: `sum s · k` in the order of the step kernel, to the bit. The test takes the real kernel's sum.
3. `begin_at`: how many tokens of a prompt need not be read again, given the places where states were kept.

## What production engines do

* Three layers with a state to one with attention is the pattern of Qwen3-Next and Qwen3.5; other hybrid models put
  Mamba layers where these have Gated DeltaNet. The rule's kernels that most engines use come from the library
  *flash-linear-attention*: vLLM and SGLang have copies of them.
* Its prompt kernel is not a chain. It takes chunks of 64 tokens and turns them into matrix products, so that tensor
  cores can work. That is faster for long prompts, but then sums run within chunks: where chunks begin must not
  change, or the bits do.
* vLLM has one pool for both kinds of memory: it makes the pages of attention so large that a page has the bytes of a
  state. With states of this size pages get long (one issue names 672 tokens).
* A prefix cache needs states there as well. SGLang's radix tree keeps some of them at its nodes. vLLM tests that a
  prefix from the cache gives a hybrid model the bits of one that was just read.

## Next

[13 · Flash Next's sparse attention and its pages](13_flash_nexts_sparse_attention.py): attention that keeps every
token, and reads few.
"""
