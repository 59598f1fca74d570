"""A launch of any kernel by name, from the contract's entry for it: what ``trace`` and ``debug`` run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from backends.layout import LAYOUTS
from kernels_numba.machine.checked import CheckedLaunch
from refengine.contract.attention import AttentionCase
from refengine.contract.entry import Entry, Inputs, product_modules
from refengine.contract.gates import this_device
from refengine.contract.registry import entries
from refengine.contract.workbench import NAN, Workbench
from refengine.errors import UserError
from refengine.names import known_name
from refengine.verify.attention_bits import Heads

Block = tuple[int, int, int]
EXAMPLES: dict[str, Any] = {"prompt_attention": AttentionCase(Heads(6, 1), "paged", 48, ((17, 300),))}
"""Cases that show a kernel better than the contract's own first one."""
FORMS = {"window": ("window", 0), "paged": ("paged", 48), "paged-p256": ("paged_p256", 256)}
"""What --layout takes: the layout, and positions a page where --page-size does not say."""


@dataclass(frozen=True)
class Wish:
    """What the command line asks of a case. Left out: as the example has it."""

    kernel: str
    layout: str | None = None
    page_size: int | None = None
    rows: int | None = None
    block: str = "0,0,0"

    @property
    def block_number(self) -> Block:
        """The block that ``--block`` names. Raises UserError for what names none."""
        parts = [part.strip() for part in self.block.split(",")]
        if not 1 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
            raise UserError(f"--block {self.block}: write x,y,z, numbers from 0 on")
        x, y, z = map(int, [*parts, "0", "0"][:3])
        return x, y, z


@dataclass(frozen=True)
class Launchable:
    """A case of an entry, its inputs drawn. launch: runs it on fresh buffers, as often as one likes."""

    entry: Entry
    case: Any
    inputs: Inputs

    def launch(self) -> None:
        bench = Workbench(this_device("cpu"), NAN)
        self.entry.launch(self.case, self.inputs, bench, product_modules(self.entry))


def kernel_names() -> list[str]:
    """Every kernel that an entry covers."""
    return sorted({name for entry in entries().values() for name in entry.kernels})


def kernel_named(name: str) -> str:
    """A kernel by its own name, or the first one of an entry of the contract. Raises UserError for a name that is neither."""
    entry = entries().get(name)
    if entry is not None and entry.kernels and name not in entry.kernels:
        return entry.kernels[0]
    return known_name("KERNEL", name, kernel_names())


def checked_launch() -> type[CheckedLaunch]:
    """What a block runs on in checked mode."""
    return type("Watched", (CheckedLaunch,), {"counters": Counter()})


def run_in(wish: Wish, mode: Callable[[], AbstractContextManager[Any]], launched: Callable[[Any], bool]) -> Any:
    """(case, what ``mode`` gave) of the first case that launches the kernel. launched: whether it did.

    Raises UserError for flags that its cases do not have, NoSuchBlock, and KernelError for what stops the kernel.
    """
    with as_flags_say(wish):
        for found in cases(wish):
            with mode() as result:
                found.launch()
            if launched(result):
                return found, result
    raise UserError(f"{wish.kernel}: no case of the contract with these flags launches it; leave some out")


@contextmanager
def as_flags_say(wish: Wish) -> Iterator[None]:
    """A case that cannot be made or launched as the flags say is refused in their name. Raises UserError."""
    flags = (("--layout", wish.layout), ("--page-size", wish.page_size), ("--rows", wish.rows))
    given = " ".join(f"{flag} {value}" for flag, value in flags if value is not None)
    try:
        yield
    except (ValueError, IndexError) as problem:
        if not given:
            raise
        raise UserError(f"{given}: no launch of {wish.kernel} can be made with that: {problem}") from problem


def cases(wish: Wish) -> Iterator[Launchable]:
    """The cases to try, the best first."""
    entry = next(e for e in entries().values() if wish.kernel in e.kernels)
    listed = [EXAMPLES[wish.kernel]] if wish.kernel in EXAMPLES else entry.control_cases()
    for case in listed:
        wanted = changed(case, wish)
        yield Launchable(entry, wanted, entry.inputs(wanted, NAN, 0))


def changed(case: Any, wish: Wish) -> Any:
    """The case with what the flags say. Raises UserError for a flag that it has nothing for."""
    has = {field.name for field in fields(case)}
    if wish.layout is not None or wish.page_size is not None:
        if not {"layout", "ptok"} <= has or case.layout not in LAYOUTS:
            flag = "--layout" if wish.layout is not None else "--page-size"
            raise UserError(f"{flag}: {wish.kernel} reads no pages here; leave it out")
        case = replace(case, **form(case, wish))
    if wish.rows is not None:
        if not isinstance(getattr(case, "streams", None), tuple):
            raise UserError(f"--rows: {wish.kernel} takes no rows of a stream here; leave it out")
        if wish.rows < 1:
            raise UserError(f"--rows {wish.rows}: at least 1")
        (_, committed), *others = case.streams
        case = replace(case, streams=((wish.rows, committed), *others))
    return case


def named_form(layout: str) -> str:
    """A layout as --layout has it."""
    return next((name for name, (of_form, _) in FORMS.items() if of_form == layout), layout)


def form(case: Any, wish: Wish) -> dict[str, Any]:
    """The form of cache that the flags ask for."""
    layout, ptok = FORMS[known_name("--layout", wish.layout, list(FORMS))] if wish.layout else (case.layout, case.ptok)
    if wish.page_size is not None:
        if wish.page_size < 1:
            raise UserError(f"--page-size {wish.page_size}: at least 1")
        if LAYOUTS[layout].page is not None or layout == "window":
            raise UserError(
                f"--page-size {wish.page_size}: {named_form(layout)} has no choice of it; use --layout paged"
            )
        ptok = wish.page_size
    return {"layout": layout, "ptok": ptok}
