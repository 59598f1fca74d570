"""Independent runs side by side, a process each: the CPU machine is Python and takes one core.

Processes are forked, so they share the model's weights and everything else that was made before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, TypeVar

from refengine.cores import usable_cores

Result = TypeVar("Result")
Tick = Callable[[], None]
Job = Callable[[Tick], Result]
"""A run: takes what it calls after each step, returns a result that can be pickled."""

POLL_SECONDS = 0.1
_jobs: Sequence[Job] = ()
_ticks: Any = None


def cores() -> int:
    """Cores this process may use; 1 where processes cannot be forked safely."""
    return usable_cores() if sys.platform == "linux" else 1


def run_all(jobs: Sequence[Job], ticked: Callable[[int], None], workers: int) -> list[Result]:
    """The jobs' results, in order; ``ticked(n)`` is called after each step of job n.

    workers: processes, at most; 1 runs them here, one after the other. A job's exception is raised here.
    """
    if min(workers, len(jobs)) < 2:
        return [job(lambda n=n: ticked(n)) for n, job in enumerate(jobs)]  # type: ignore[misc]
    global _jobs, _ticks
    context = get_context("fork")
    _jobs, _ticks = jobs, context.SimpleQueue()
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        waiting = futures = [pool.submit(_run, n) for n in range(len(jobs))]
        while waiting:
            waiting = list(wait(waiting, POLL_SECONDS, FIRST_COMPLETED).not_done)
            while not _ticks.empty():
                ticked(_ticks.get())
        return [future.result() for future in futures]


def _run(number: int) -> Any:
    """In a forked process: one job."""
    return _jobs[number](lambda: _ticks.put(number))
