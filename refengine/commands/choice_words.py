"""Where two runs of sparse attention chose different keys, in words and for a report."""

from __future__ import annotations

from typing import Any

from kernels_numba.flash_next.pages import BLOCK
from refengine.verify.key_choice import Block, ChoiceParting


def choice_words(names: tuple[str, str], found: ChoiceParting) -> str:
    """Which block one run has and the other has not, and why as far as index queries, keys and scores say. names: of the runs."""
    names = names if names[0] != names[1] else ("the first run", "the second run")
    x, y = found.blocks
    has, lacks = names if x.taken else names[::-1]
    said = f"they chose different keys: {has} has block {x.number}, from position {BLOCK * x.number} on, and {lacks} has not"
    if not found.scores_differ:
        return f"{said}; its score is {shown(x)} in both, as with every such block: the choosing itself differs"
    return f"{said}; it scores {shown(x)} in {names[0]} and {shown(y)} in {names[1]}: {', '.join(reasons(found))}"


def reasons(found: ChoiceParting) -> list[str]:
    """What makes the scores of the block differ."""
    x, y = found.blocks
    queries = f"index queries {'differ' if found.queries_differ else 'are equal'}"
    if not found.pooled_differ:
        scoring = [] if found.queries_differ else ["so the scoring itself differs"]
        return [queries, "its pooled keys are equal", *scoring]
    pooled = f"its pooled keys differ ({x.pooled.where} against {y.pooled.where})"
    if found.raw is None:
        return [queries, pooled, "its raw keys are equal"]
    position, a, b = found.raw
    return [queries, pooled, f"so does its raw key of position {position} ({a.where} against {b.where})"]


def shown(block: Block) -> str:
    """A score, in as many digits as tell it from every other float32."""
    return f"{block.score:.9g}"


def choice_body(found: ChoiceParting | None) -> dict[str, Any] | None:
    """The block that one run has and the other has not, for the report."""
    if found is None:
        return None
    a, b = (block_body(block) for block in found.blocks)
    raw = None if found.raw is None else found.raw[0]
    return {
        "block": found.blocks[0].number, "index_queries_differ": found.queries_differ,
        "pooled_differ": found.pooled_differ, "raw_position": raw, "a": a, "b": b,
    }  # fmt: skip


def block_body(block: Block) -> dict[str, Any]:
    """One run's part of it; the score as text, for a NaN is no JSON."""
    return {"taken": block.taken, "score": shown(block), "pooled": block.pooled.where}
