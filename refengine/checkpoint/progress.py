"""A progress bar that appears only when the work takes longer than a moment."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")


def progress(items: Sequence[T], label: str, after: float = 1.0) -> Iterator[T]:
    """Yield `items`; once `after` seconds have passed, show on stderr how many are done."""
    start, bar, task = time.monotonic(), None, None
    with ExitStack() as stack:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - start >= after:
                bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
                task = bar.add_task(label, total=len(items))
            if bar is not None and task is not None:
                bar.update(task, completed=done)
            yield item
