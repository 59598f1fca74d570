"""The main job: one prompt and its decode through several backends, and where they differ, if they do. Spec serving §5."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.base import PROMPT, Backend
from refengine.device import Device
from refengine.model import Model
from refengine.serve.forward import Pass
from refengine.serve.session import Session
from refengine.verify.hashes import array_hash, logits_hash, token_hash
from refengine.verify.witness import Witness

Progress = Callable[[], None]
"""Called after each pass."""


@dataclass(eq=False)
class Arm:
    """What one backend's run gave.

    tables: the pages of each stream, in order of position. attention: bf16 [W, H, D] for each pass and attention layer. sparse,
    dense: rows of a model with an indexer that chose their keys, and that read all; dense_keys: the most that such a row has.
    """

    name: str
    paged: bool
    page_size: int
    tables: list[list[int]] = field(default_factory=list)
    prompt_hashes: list[str] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    attention: list[list[tuple[int, np.ndarray]]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    lookups: int = 0
    straddles: int = 0
    sparse: int = 0
    dense: int = 0
    dense_keys: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0

    @property
    def logits_hash(self) -> str:
        return logits_hash(self.logits)

    @property
    def token_hash(self) -> str:
        return token_hash([t for reply in self.replies for t in reply])

    @property
    def attention_hash(self) -> str:
        """One hash over every layer's attention output of every pass."""
        return array_hash(
            np.concatenate([a.reshape(-1) for layers in self.attention for _, a in layers]).view(np.uint16)
        )


def run_arm(
    backend: Backend,
    model: Model,
    device: Device,
    prompts: Sequence[Sequence[int]],
    prompt_rows: int,
    tokens: int,
    done: Progress,
) -> Arm:
    """Run the prompts and ``tokens`` generated tokens of each through a backend."""
    witness, shape = Witness(backend), backend.shape
    arm = Arm(
        backend.name, backend.paged, backend.positions, dense_keys=shape.index_ratio * (shape.index_budget + 1) - 1
    )
    session = Session(model, witness, device, prompts, prompt_rows)  # type: ignore[arg-type]
    taps: list[tuple[int, np.ndarray]] = []
    began = time.perf_counter()
    for one in session.run(tokens, lambda layer, o: taps.append((layer, device.get(o).copy()))):
        arm.passes.append(one)
        arm.attention.append(list(taps))
        taps.clear()
        done()
    device.synchronize()
    arm.seconds = time.perf_counter() - began
    arm.prompt_hashes = [logits_hash(p.logits) for p in arm.passes if p.phase == PROMPT]
    arm.logits = list(in_stream_order(arm.passes, len(prompts)))
    arm.replies = session.replies
    arm.tables = [list(s.pages) for s in session.streams]
    arm.kv_bytes = sum(backend.cache_bytes(s) for s in session.streams)
    for name in ("lookups", "straddles", "sparse", "dense"):
        setattr(arm, name, witness.counters[name])
    for stream in session.streams:
        stream.release()
    return arm


def in_stream_order(passes: Sequence[Pass], streams: int) -> Iterator[np.ndarray]:
    """The last row of every prompt pass and the rows of every decode pass, by stream number."""
    for number in range(streams):
        for one in passes:
            yield from (row for owner, row in zip(one.streams, one.logits) if owner == number)


def first_difference(a: Arm, b: Arm) -> str | None:
    """Where two arms part: the first pass, layer, row, head and dim with both values in hex; None when they are equal."""
    for number, (left, right) in enumerate(zip(a.attention, b.attention)):
        place = f"pass {number + 1} ({a.passes[number].phase})"
        for (layer, x), (_, y) in zip(left, right):
            if (found := differing(x.view(np.uint16), y.view(np.uint16))) is not None:
                row, head, dim = found
                return f"{place}, layer {layer}, row {row}, head {head}, dim {dim}: {hexed(x, found)} against {hexed(y, found)}"
        x, y = a.passes[number].logits, b.passes[number].logits
        if (found := differing(x.view(np.uint32), y.view(np.uint32))) is not None:
            return f"{place}, logits row {found[0]}, token {found[1]}: {hexed(x, found)} against {hexed(y, found)}"
    return None if a.replies == b.replies else "the generated tokens differ"


def differing(x: np.ndarray, y: np.ndarray) -> tuple[int, ...] | None:
    """The first index at which two arrays of bits differ."""
    where = np.argwhere(x != y)
    return tuple(int(i) for i in where[0]) if len(where) else None


def hexed(array: np.ndarray, at: tuple[int, ...]) -> str:
    """An element's bits."""
    bits = array[at].tobytes()[::-1].hex()
    return f"0x{bits}"


def unexercised(arm: Arm) -> str | None:
    """Why an arm proves nothing, if it does not: no sparse row of sparse attention; of pages, one page, pages in order, no
    lookup, no straddling item."""
    if arm.dense and not arm.sparse:
        return f"{arm.name}: no row was sparse; a prompt of more than {arm.dense_keys} tokens has some"
    if not arm.paged:
        return None
    if all(len(pages) < 2 for pages in arm.tables):
        return f"{arm.name}: used one page only; a prompt of more than {arm.page_size} tokens takes more"
    if all(sorted(pages) == pages for pages in arm.tables):
        return f"{arm.name}: its page tables are ascending; hand the pages out in the order that Sizes.shuffle asks for"
    if arm.lookups == 0:
        return f"{arm.name}: no page was looked up"
    if arm.page_size % 32 and arm.straddles == 0 and not arm.sparse:
        return f"{arm.name}: no item lay in two pages of {arm.page_size}"
    if arm.name == "paged-p256" and arm.straddles:
        return f"{arm.name}: {arm.straddles} items lay in two pages, none can"
    return None


def not_finite(arm: Arm) -> str | None:
    """Which pass gave a NaN or an infinity, if one did: equal NaNs prove nothing."""
    for number, one in enumerate(arm.passes):
        if not np.isfinite(one.logits).all():
            return f"{arm.name}: pass {number + 1} has logits that are not finite"
    return None


def verdict(arms: Sequence[Arm]) -> tuple[str, bool]:
    """The last line of ``compare`` and whether all is well."""
    reference = arms[0]
    for arm in arms[1:]:
        if (where := first_difference(arm, reference)) is not None:
            return f"DIFFERENT {arm.name} from {reference.name}: {where}", False
    for arm in arms:
        if (reason := not_finite(arm) or unexercised(arm)) is not None:
            return f"UNCHECKED {reason}", False
    if len(arms) < 2:
        return f"UNCHECKED {reference.name}: one backend has nothing to be compared with", False
    hashes = {(a.logits_hash, a.token_hash, a.attention_hash) for a in arms}
    assert len(hashes) == 1, "equal arrays with unequal hashes"
    tokens = sum(len(r) for r in reference.replies)
    return (
        f"EQUAL {len(arms)} backends, {len(reference.prompt_hashes)} prompt passes, {tokens} tokens, "
        f"logits {reference.logits_hash}, tokens {reference.token_hash}"
    ), True
