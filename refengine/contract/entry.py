"""What the contract knows of a kernel: how to draw inputs, launch it, what it must give, and whose bits it must share.

An entry stands for one kernel, or for kernels that one operation launches together. It is found by its decorator; a kernel
of ``kernels_numba`` that no entry names fails the run.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from refengine.contract.workbench import Array, Poison, Workbench

Inputs = dict[str, Any]
"""Host arrays and numbers by name; fresh ones a call, so that a control may change them."""
Outputs = dict[str, Array]
Bounds = dict[str, tuple[Array, Array]]
"""(value, bound) in float64 for outputs by name."""
Modules = Mapping[str, ModuleType]
"""The modules whose code is on trial, by name: the product's, or copies with a planted fault."""
Plant = Callable[[Inputs], None]


@dataclass(frozen=True)
class Control:
    """A fault planted in the inputs, which the named gate must find. plant: changes the inputs of the run, not of the oracle."""

    name: str
    gate: str
    plant: Plant


class Entry(ABC):
    """One line of the contract.

    name: as reports show it. kernels: names of the kernels it covers. modules: the modules whose source may be mutated.
    axes: the names of each output's axes, for messages. A case is a frozen dataclass whose ``str`` prints its parameters.
    """

    name: ClassVar[str]
    kernels: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]]
    axes: ClassVar[dict[str, tuple[str, ...]]] = {}

    @property
    def subjects(self) -> tuple[str, ...]:
        """What a report counts: the kernels, or the entry itself where it has none of the product's."""
        return self.kernels or (self.name,)

    @abstractmethod
    def cases(self, full: bool) -> Sequence[Any]:
        """The table of cases: all, or the subset that a CPU does in CI's time."""

    @abstractmethod
    def inputs(self, case: Any, poison: Poison, seed: int) -> Inputs:
        """Inputs of a case. poison: what lies where the kernel may not look."""

    @abstractmethod
    def launch(self, case: Any, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        """Place the arrays on the bench and launch."""

    @abstractmethod
    def exact(self, case: Any, inputs: Inputs) -> Bounds:
        """Gate 1: float64 values of outputs and the bound that the kernel's rounding points give (spec numerics §5)."""

    @abstractmethod
    def twins(self, case: Any, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]) -> Iterator[tuple[str, Outputs]]:
        """Gate 2: (what it is, outputs that this case's must equal bit for bit). run: another case, on clean kernels."""

    def view(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        """The outputs as the gates compare them: rows gathered from a cache, say, whose words differ between its forms."""
        return outputs

    def group(self, case: Any) -> str:
        """Cases of one group run one after the other in one process, and may share what they computed."""
        return ""

    def cost(self, case: Any) -> float:
        """About how long a case takes, beside others: the longest start first."""
        return 1.0

    def controls(self) -> Sequence[Control]:
        """Faults to plant in inputs."""
        return ()

    @abstractmethod
    def control_cases(self) -> Sequence[Any]:
        """The cases on which planted faults must show, cheapest first."""

    def place(self, output: str, index: Sequence[int], case: Any) -> str:
        """An index of an output in words."""
        names = self.axes.get(output, ())
        return ", ".join(f"{n} {i}" for n, i in zip(names, index, strict=True)) if names else f"{list(index)}"


ENTRIES: dict[str, Entry] = {}


def contract(cls: type[Entry]) -> type[Entry]:
    """Register an entry."""
    ENTRIES[cls.name] = cls()
    return cls


def product_modules(entry: Entry) -> Modules:
    """The modules on trial, as they are."""
    return {name: importlib.import_module(name) for name in entry.modules}
