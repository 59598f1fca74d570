"""Which blocks a row of sparse attention chose, from what, and where the choices of two runs part. Spec flash-next §4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.machine.frontend import Program
from kernels_numba.machine.modes import Grid
from kernels_numba.streams import COMMITTED, FIRST
from refengine.verify.fold_watch import Arguments, Element, FoldWatch
from refengine.verify.located import IndexRow, Located

SELECT, CHUNKS = "fn_qsa_select_kernel", "fn_attn_chunks_kernel"


# --- What a launch has of a row -----------------------------------------------------------------------------------------


def row_end(args: Arguments, row: int) -> int:
    """Keys at or before the position of a launch's row."""
    streams, stream = args["streams"], int(args["rows"][row])
    return int(streams[stream, COMMITTED] + row - streams[stream, FIRST]) + 1


def row_list(args: Arguments, row: int) -> np.ndarray:
    """int64 [n]: the positions that a row of a launch of fn_attn_chunks reads, in order."""
    end, budget = row_end(args, row), int(args["budget"])
    if end // BLOCK <= budget:
        return np.arange(end)
    return args["listed"][row, : BLOCK * budget + end % BLOCK].astype(np.int64)


class ChoiceWatch(FoldWatch):
    """A FoldWatch of sparse attention. keys: int64 [n], the list of the element's row. scores: float32 [complete blocks], by
    which it chose; None where the row is dense.
    """

    def __init__(self, element: Element):
        super().__init__(element)
        self.keys = np.zeros(0, np.int64)
        self.scores: np.ndarray | None = None

    def watch(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        row = self.element.row - self.done
        if program.name in (SELECT, CHUNKS) and 0 <= row < grid[0]:
            self.note(program.name, row, dict(zip(program.params, args)))
        super().watch(program, grid, threads, shared_bytes, args)

    def note(self, kernel: str, row: int, args: Arguments) -> None:
        """The scores or the list of a launch's row."""
        complete = row_end(args, row) // BLOCK
        if kernel == CHUNKS:
            self.keys = row_list(args, row)
        elif complete > int(args["budget"]):
            self.scores = args["scores"][row, :complete].copy()


# --- What it chose from -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A complete block as one run has it. raw: of its positions, in order."""

    number: int
    taken: bool
    score: np.float32
    pooled: IndexRow
    raw: list[IndexRow]


@dataclass(frozen=True)
class Choice:
    """What a sparse row chose from. index_q: float32 [IH, DI]. blocks: the complete ones, ascending."""

    index_q: np.ndarray
    blocks: list[Block]


def choice_of(stream: Located, index_q: np.ndarray, watch: ChoiceWatch) -> Choice | None:
    """The choice of the watched row, its index rows out of the cache; None where it is dense. index_q: float32 [IH, DI]."""
    if watch.scores is None:
        return None
    count = len(watch.scores)
    pooled, raw = stream.pooled(np.arange(count)), stream.raw(np.arange(BLOCK * count))
    taken = np.isin(BLOCK * np.arange(count), watch.keys)
    found = zip(taken.tolist(), watch.scores, pooled, strict=True)
    blocks = [Block(n, *one, raw[BLOCK * n : BLOCK * (n + 1)]) for n, one in enumerate(found)]
    return Choice(index_q, blocks)


# --- Where two part -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChoiceParting:
    """A block that one run chose and the other did not, as each has it; and whether their index queries differ."""

    blocks: tuple[Block, Block]
    queries_differ: bool

    @property
    def scores_differ(self) -> bool:
        return differ(*(block.score for block in self.blocks))

    @property
    def pooled_differ(self) -> bool:
        return differ(*(block.pooled.key for block in self.blocks))

    @property
    def raw(self) -> tuple[int, IndexRow, IndexRow] | None:
        """(position, each run's row) of the block's first raw key that differs."""
        a, b = self.blocks
        pairs = enumerate(zip(a.raw, b.raw, strict=True), BLOCK * a.number)
        return next(((position, x, y) for position, (x, y) in pairs if differ(x.key, y.key)), None)


def choice_parting(a: Choice | None, b: Choice | None) -> ChoiceParting | None:
    """The lowest block that one chose and the other did not, of those whose scores differ if there are any."""
    if a is None or b is None:
        return None
    queries_differ = differ(a.index_q, b.index_q)
    pairs = zip(a.blocks, b.blocks, strict=True)
    apart = [ChoiceParting(pair, queries_differ) for pair in pairs if pair[0].taken != pair[1].taken]
    return next((one for one in apart if one.scores_differ), apart[0] if apart else None)


def differ(x: np.ndarray | np.float32, y: np.ndarray | np.float32) -> bool:
    """Whether two floats, or arrays of them, have other bits."""
    return x.tobytes() != y.tobytes()
