"""The whole contract, spread over processes: cases first, then what is planted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from refengine.contract.controls import Planted, mutants, plant_control, plant_mutant
from refengine.contract.entry import Entry
from refengine.contract.gates import Trial, Verdict, judge, this_device
from refengine.contract.registry import entry_named

T = TypeVar("T")
R = TypeVar("R")
THREADS_OF_LIBRARIES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Order:
    """What to run. device: cpu or cuda. full: every case. mutate: every mutant, not the controls alone."""

    device: str
    names: tuple[str, ...]
    full: bool = False
    mutate: bool = False
    seed: int = 0
    recorded: Mapping[str, str] = field(default_factory=dict)

    def trial(self, watched: bool = False) -> Trial:
        return Trial(this_device(self.device), recorded=self.recorded, seed=self.seed, watched=watched)


@dataclass(frozen=True)
class Task:
    """A piece of work for one process: the cases of a group, or one planted fault."""

    entry: str
    kind: str
    group: str = ""
    number: int = 0


def tasks(order: Order) -> list[Task]:
    """Everything to do, the longest pieces first."""
    costs: dict[Task, float] = {}
    for name in order.names:
        entry = entry_named(name)
        if not order.mutate:
            for case in table_of(entry, order.full):
                task = Task(name, "cases", entry.group(case))
                costs[task] = costs.get(task, 0.0) + entry.cost(case)
            costs |= {Task(name, "control", number=n): 1.0 for n in range(len(entry.controls()))}
        chosen = [n for n, mutant in enumerate(mutants(entry)) if order.mutate or mutant.control]
        if order.device == "cpu":
            costs |= {Task(name, "mutant", number=n): 1.0 for n in chosen}
    return sorted(costs, key=lambda task: -costs[task])


def table_of(entry: Entry, full: bool) -> list[Any]:
    """The entry's cases and its first control case, which runs in checked mode, too; ``full`` holds all that others hold."""
    control, small = entry.control_cases(), entry.cases(False)
    return list(dict.fromkeys([*control, *small, *entry.cases(True)] if full else [control[0], *small]))


def perform(order: Order, task: Task) -> list[Verdict | Planted]:
    """One task, in this process."""
    entry = entry_named(task.entry)
    if task.kind == "control":
        return [plant_control(entry, entry.controls()[task.number], order.trial())]
    if task.kind == "mutant":
        return [plant_mutant(entry, mutants(entry)[task.number], order.trial())]
    watched = entry.control_cases()[0]
    cases = [case for case in table_of(entry, order.full) if entry.group(case) == task.group]
    return [judge(entry, case, order.trial(watched=case == watched)) for case in cases]


def results(order: Order, work: Sequence[Task], processes: int) -> Iterator[list[Verdict | Planted]]:
    """The results of tasks as they come. processes: at once; 1: this one."""
    return spread(partial(perform, order), work, processes)


def spread(do: Callable[[T], R], work: Sequence[T], processes: int) -> Iterator[R]:
    """What ``do`` gives for each piece of work, as it comes. processes: at once, no more than pieces; 1: this one."""
    if min(processes, len(work)) <= 1:
        yield from map(do, work)
        return
    for name in THREADS_OF_LIBRARIES:
        os.environ.setdefault(name, "1")
    with ProcessPoolExecutor(min(processes, len(work)), mp_context=get_context("spawn")) as pool:
        waiting: set[Future[R]] = {pool.submit(do, piece) for piece in work}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            for future in waiting:
                future.cancel()
