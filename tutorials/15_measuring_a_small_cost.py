# %% [markdown]
"""
# 15 · Measuring a 0.3 % cost: A/A, ABBA, noise

Before this: [02 · Pages and page tables](02_pages_and_page_tables.py). The last part runs the kernel of tutorial 03; you need
not know it.

    make .venv/ready    # once
    .venv/bin/python tutorials/15_measuring_a_small_cost.py
"""

# %%
import numpy as np
from matplotlib.figure import Figure

from backends.base import PROMPT
from refengine.device import open_device
from refengine.lab.notebook import picture, show, table
from refengine.measure.paired import interval_of, ratios_of, rounds_of
from refengine.verify.attention_bits import Bench, Case, Heads

# %% [markdown]
"""
## The question

Attention through pages does a little more than attention through a window: it looks pages up. Say that costs 0.3 %. But when
you time the very same thing twice, the two times differ by several percent. How can you measure a difference that is smaller
than the noise?

Not by a better clock. By the order in which you run things, and by asking the machine how much it lies.
"""

# %% [markdown]
"""
## A worked example in numbers

A takes 100 ms. B does the same work, so it takes 100 ms, too. But the machine gets slower: each run takes 1 ms longer than the
one before it. (It grows warm and lowers its clock, or somebody else began to work on it.) Four runs:

| order | A | B | B by A |
|---|---|---|---|
| A A B B | 100, 101 | 102, 103 | 205 / 201: B seems 2 % slower |
| A B A B | 100, 102 | 101, 103 | 204 / 202: B seems 1 % slower |
| A B B A | 100, 103 | 101, 102 | 203 / 203: the same |

In A B B A, what grows steadily adds the same to both. And if B really takes 0.3 ms more, A B B A says so: 203.6 / 203, which is
0.3 %.
"""


# %%
def in_order(order, b=100.0):
    """Sum of B's runs by sum of A's, on a machine where each run takes 1 ms more."""
    took = [(100.0 if arm == "A" else b) + run for run, arm in enumerate(order)]
    return sum(t for t, arm in zip(took, order) if arm == "B") / sum(t for t, arm in zip(took, order) if arm == "A")


assert in_order("AABB") == 205 / 201 and in_order("ABAB") == 204 / 202 and in_order("ABBA") == 1
assert round(in_order("ABBA", b=100.3), 4) == 1.0030

# %% [markdown]
"""
## The code

What is the cost that we look for? Here is where the kernel of a prompt fetches an item of 32 rows. The condition is true for
rows that lie past the end of a page: they are looked up a second time.
"""

# %%
show("kernels_numba/prompt_attention.py", "stage_item", start="for i in range(item_steps", end="locate(key0 + row")

# %% [markdown]
"""
And this is the engine's stopwatch. It runs rounds of A B B A and gives each round's ratio:
"""

# %%
show("refengine/measure/paired.py", "rounds_of", "seconds_of", "ratios_of")

# %% [markdown]
"""
`clock` can be replaced. That is what we do now.

## A machine whose truth is known

A real machine does not tell what the true cost is, so nobody can say whether a way of measuring is right. A simulated one does.
It has what real ones have: its speed wanders slowly, each run has noise of its own, and now and then something else takes part
of a run's time. All is drawn from a seed, so you get the numbers that stand here.
"""

# %%
TRUE = 1.003


class Machine:
    """A clock that only runs advance; runs take a time times the machine's mood."""

    def __init__(self, seed, bias=1.0):
        self.rng, self.now, self.slow, self.bias = np.random.default_rng(seed), 0.0, 0.0, bias

    def run(self, milliseconds):
        """One run. It wanders: what it was, and a little step."""
        self.slow += 0.002 * self.rng.standard_normal()
        noise = 1 + 0.005 * self.rng.standard_normal()
        company = 1 + 0.3 * self.rng.random() if self.rng.random() < 0.02 else 1.0
        self.now += milliseconds * np.exp(self.slow) * noise * company

    def a(self):
        self.run(100.0)

    def b(self):
        self.run(100.0 * TRUE * self.bias)

    def clock(self):
        return self.now


one = Machine(0)
times = rounds_of(one.a, one.a, 40, one.clock)  # A A A A ...: always the same work
print(f"160 runs of the same work: {times.min():.1f} to {times.max():.1f} ms, 100 in truth")
assert times.max() / times.min() > 1.05  # more than ten times the cost that we look for

# %% [markdown]
"""
## Why means of separate runs lie

The usual way: run A 80 times, take the mean, run B 80 times, take the mean, divide. Against it, 40 rounds of A B B A: as many
runs, the median of the rounds' ratios. We do each on 300 machines.

With the means comes the usual *standard error*: the spread of the runs by the square root of their number. Twice that to either
side should hold the truth 19 times of 20.
"""


# %%
def separate(seed, runs=80):
    """(ratio of means, its standard error) of so many runs of A, then as many of B."""
    machine = Machine(seed)
    took_a = rounds_of(machine.a, machine.a, runs // 4, machine.clock).ravel()
    took_b = rounds_of(machine.b, machine.b, runs // 4, machine.clock).ravel()
    errors = [took.std(ddof=1) / np.sqrt(runs) / took.mean() for took in (took_a, took_b)]
    return took_b.mean() / took_a.mean(), np.hypot(*errors)


def paired(seed, rounds=40):
    """The interval of so many rounds."""
    machine = Machine(seed)
    return interval_of(ratios_of(rounds_of(machine.a, machine.b, rounds, machine.clock)), seed, resamples=500)


means, errors = np.array([separate(seed) for seed in range(300)]).T
longer, longer_errors = np.array([separate(seed, runs=320) for seed in range(300)]).T
intervals = [paired(seed) for seed in range(300)]
middles = np.array([one.middle for one in intervals])

held_by_means = np.mean(abs(means - TRUE) <= 2 * errors)
held_by_longer = np.mean(abs(longer - TRUE) <= 2 * longer_errors)
held_by_pairs = np.mean([TRUE in one for one in intervals])
percent = "{:.0%}".format
table(
    ["", "typical error", "says that B is faster", "interval holds the truth"],
    [
        ["means of separate runs", f"{np.std(means):.2%}", percent(np.mean(means < 1)), percent(held_by_means)],
        ["the same, 4 times the runs", f"{np.std(longer):.2%}", percent(np.mean(longer < 1)), percent(held_by_longer)],
        ["median of A B B A", f"{np.std(middles):.2%}", percent(np.mean(middles < 1)), percent(held_by_pairs)],
    ],
)
assert np.std(means) > 8 * np.std(middles)
assert 0.3 < np.mean(means < 1) < 0.7 and np.mean(middles < 1) < 0.02
assert held_by_longer < held_by_means < 0.5 and 0.9 < held_by_pairs < 0.99

# %% [markdown]
"""
The means of separate runs are hardly better than a coin at saying which one is slower. And they are *sure* of it: their
interval holds the truth in a third of the cases. The formula for the standard error takes runs for independent of each other.
They are not: a machine that is slow now is slow in the next run, too. More runs make it worse: the machine wanders further, and
the interval shrinks.

The rounds' ratios do not depend on each other much, for each round is short. So their spread can be trusted.

### The bootstrap

How does one get an interval for a median? There is a way that needs no formula. Take the ratios for the whole world: draw 40
from the 40, some twice, some never, and take the median. Do that 2,000 times. The middle 95 % of these medians is the interval.
"""

# %%
show("refengine/measure/paired.py", "interval_of")

# %% [markdown]
"""
By hand, with three ratios 1, 2, 3. There are 27 ways to draw three. The median is 1 if at least two are 1: 7 ways. By symmetry
it is 3 in 7 ways, and 2 in the other 13. A bootstrap that draws often enough finds these shares.
"""

# %%
ways = [np.median([x, y, z]) for x in (1, 2, 3) for y in (1, 2, 3) for z in (1, 2, 3)]
assert [ways.count(m) for m in (1, 2, 3)] == [7, 13, 7]
drawn = np.random.default_rng(0).integers(1, 4, (20_000, 3))
shares = [np.mean(np.median(drawn, axis=1) == m) for m in (1, 2, 3)]
assert np.allclose(shares, [7 / 27, 13 / 27, 7 / 27], atol=0.02)

# %% [markdown]
"""
### How many rounds?

The interval shrinks with the square root of the number of rounds: four times the rounds, half the width. Work out what you need
before you begin. Here the width is averaged over 30 machines.
"""


# %%
def width(rounds):
    """Half the width of an interval, on average."""
    found = [paired(seed, rounds) for seed in range(30)]
    return np.mean([(one.high - one.low) / 2 for one in found])


widths = {rounds: width(rounds) for rounds in (10, 40, 160)}
table(["rounds", "half the interval"], [[rounds, f"{half:.2%}"] for rounds, half in widths.items()])
assert widths[10] > 0.003 > widths[40]  # ten rounds cannot see 0.3 %, forty can
assert 1.5 < widths[10] / widths[40] < 2.7 and 1.5 < widths[40] / widths[160] < 2.7

# %% [markdown]
"""
## A/A: ask the machine how much it lies

Now forget the truth again. How do you know that your stopwatch is good? Measure A against A. The true ratio is 1. What comes
out is what your machine makes of nothing, and **a difference inside the A/A spread is not a finding**.

Below, the same is done with a stopwatch that has a fault: B's memory was allocated later than A's and lies worse, so that
whatever stands in its place takes 0.4 % longer. Rounds do not help, the interval is narrow and wrong. Only A/A shows it.
"""

# %%
fair, unfair = Machine(1), Machine(1, bias=1.004)
a_a = interval_of(ratios_of(rounds_of(fair.a, fair.a, 160, fair.clock)))
a_a_unfair = interval_of(ratios_of(rounds_of(unfair.a, lambda: unfair.run(100.0 * unfair.bias), 160, unfair.clock)))
a_b_unfair = interval_of(ratios_of(rounds_of(unfair.a, unfair.b, 160, unfair.clock)))
table(
    ["", "measured cost"],
    [["A/A, fair", str(a_a)], ["A/A, unfair", str(a_a_unfair)], ["A/B, unfair", str(a_b_unfair)]],
)
assert 1.0 in a_a
assert 1.0 not in a_a_unfair and TRUE not in a_b_unfair

# %% [markdown]
"""
What can differ from one start of a program to the next, and stays as it is until it ends, no number of rounds averages out:
where memory lies, what the compiler chose. So one starts afresh many times, and the *starts* are what the bootstrap draws from.

## A picture

Left: the runs of one machine, first A, then B. The wandering is far larger than the cost. Right: what the two ways say on 300
machines. The line is the truth.
"""

# %%
figure = Figure(figsize=(10, 3.2))
left, right = figure.subplots(1, 2)
machine = Machine(4)
runs = np.array(
    [*rounds_of(machine.a, machine.a, 20, machine.clock).ravel(), *rounds_of(machine.b, machine.b, 20, machine.clock).ravel()]
)  # fmt: skip
left.plot(range(80), runs[:80], ".", color="#3b6ea5", label="A")
left.plot(range(80, 160), runs[80:], ".", color="#c46a2b", label="B")
left.set(
    xlabel="run",
    ylabel="ms",
    title="one machine: A, then B",
    ylim=(np.quantile(runs, 0.01) - 2, np.quantile(runs, 0.95) + 4),
)
left.legend()
for found, label, color in ((means, "means of separate runs", "#999999"), (middles, "A B B A", "#3b6ea5")):
    right.hist(100 * (found - 1), bins=np.arange(-8, 8.1, 0.2), color=color, label=label, alpha=0.8)
right.axvline(100 * (TRUE - 1), color="#c46a2b", linewidth=1)
right.set(xlabel="cost that is measured, %", ylabel="machines", title="300 machines", xlim=(-6, 10))
right.legend()
picture("15-two-ways", figure)

# %% [markdown]
"""
## A real one

Now two kernels on your machine: attention of a prompt of 192 rows, through a window and through pages of 48. First the bits,
for there is no point in timing a kernel that is wrong. Then A/A, then A/B.

The kernels run on the CPU machine here, which plays a GPU's threads with arrays. So what you see is the cost of a lookup
*there*, not on a GPU. The numbers are yours, they differ from run to run, and nothing is asserted of them.
"""

# %%
ROWS = 192
bench = Bench(Heads(heads=4, kv_heads=1, head_dim=64), ROWS, open_device("cpu"))


def launch(name, page_size=48):
    """A function that runs attention once more and gives its output; everything is compiled and in place."""
    backend = bench.build(Case(name, page_size, PROMPT, ROWS, 0))
    batch = backend.batch(PROMPT, [(backend.open(), ROWS)])
    q = backend.store(0, bench.rows, bench.norms, bench.rope, batch)
    return lambda: backend.attend(0, q, batch)


window, again, pages = launch("window"), launch("window"), launch("paged")
assert window().tobytes() == again().tobytes() == pages().tobytes()

same = interval_of(ratios_of(rounds_of(window, again, 30)))
times = rounds_of(window, pages, 30)
cost = interval_of(ratios_of(times))
print(f"runs of {1000 * np.median(times):.0f} ms")
table(["", "measured cost"], [["A/A: window, window", str(same)], ["A/B: window, pages of 48", str(cost)]])
if cost.low > max(1, same.high):
    print("pages are slower here")
elif cost.high < min(1, same.low):
    print("pages are faster here, which deserves a question")
else:
    print("no finding: the difference lies inside the noise")

# %% [markdown]
"""
Report such a number with all that belongs to it: the interval, the A/A beside it, how many rounds, which machine, which
versions, and that the bits were the same.

## Exercises

    .venv/bin/refengine tutorial start 15
    .venv/bin/refengine tutorial check 15

1. `abba_ratios`: from the times of all runs in the order A B B A A B B A ..., the ratio of each round.
2. `bootstrap`: the interval of a median. The draws are given to you, so there is one right answer.
3. `finding`: is it a finding? Given the intervals of A/B and of A/A.
"""

# %% [markdown]
"""
## What production engines do

* GPU work is asynchronous: a launch returns before the kernel has run. So one times with *events* that the GPU itself records,
  or waits for the GPU before the clock is read. `torch.cuda.Event` and `triton.testing.do_bench` do that. The latter also
  clears the cache between runs, for a kernel that finds its data in the cache from the run before looks better than it is.
* NVIDIA's `nvbench` keeps measuring until the noise is small enough, and reports the noise.
* vLLM, SGLang and TensorRT-LLM bring commands that measure a whole server: time to the first token, time for each further one,
  requests a second, with percentiles rather than means alone. A server's users feel the slowest request in a hundred.
* A GPU's clock moves with heat and load. Many lock it for a benchmark (`nvidia-smi --lock-gpu-clocks`), which takes rights that
  you may not have. ABBA needs no rights.
* When you read a comparison, ask in which order things ran, and look for the A/A.
"""

# %% [markdown]
"""
## Next

[16 · Write your own backend](16_write_your_own_backend.py): now that you can prove it equal and measure what it costs.
"""
