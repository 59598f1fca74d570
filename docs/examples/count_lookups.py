"""Page lookups and straddling items of one block of prompt attention, for several page sizes.

.venv/bin/python docs/examples/count_lookups.py
"""

from kernels_numba.machine import checked
from refengine.device import open_device
from refengine.verify.attention_bits import Bench, Case, Heads

POSITIONS = 192
PAGE_SIZES = (16, 48, 64, 256)


def main() -> None:
    bench = Bench(Heads(8, 1), POSITIONS, open_device("cpu"))
    print("page size   lookups   straddles")
    for page_size in PAGE_SIZES:
        backend = bench.build(Case("paged", page_size, "prompt", POSITIONS, 0))
        batch = backend.batch("prompt", [(backend.open(), POSITIONS)])
        q = backend.store(0, bench.rows, bench.norms, bench.rope, batch)
        with checked(sample=lambda grid: (grid[0] - 1, 0, 0)) as report:
            backend.attend(0, q, batch)
        print(f"{page_size:9}{report.counters['lookups']:10,}{report.counters['straddles']:12}")


if __name__ == "__main__":
    main()
