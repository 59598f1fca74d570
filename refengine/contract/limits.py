"""Gate 5: does every launch still fit? What it compiles to on each architecture, held against the hardware and the records.

No GPU takes part: NVVM makes the PTX, once a launch and spread over processes; ptxas makes each architecture's machine code
of it and says what that takes. A figure that differs from its record is reported. A problem, which fails the gate, is a figure
past the hardware's limit, a launch that does not compile, and a launch without a record or a record without its launch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernels_numba.machine import KernelError
from kernels_numba.machine.compiler import REGISTERS, Capability, architecture, ptx_path
from kernels_numba.machine.errors import SetupError
from kernels_numba.machine.kernel import MAX_THREADS
from kernels_numba.machine.modes import Noted
from kernels_numba.machine.records import ARCHITECTURES, PTX_TARGET, compiler_version, ptx_text
from kernels_numba.machine.records import records as compiled
from refengine.contract.limit_records import Figures, KernelRecord, Launch, Records
from refengine.cores import usable_cores
from refengine.verify.launches import LaunchName, engine_launches

KIB = 1024
SHARED_A_BLOCK = {
    "sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB,
    "sm_120": 99 * KIB, "sm_121": 99 * KIB,
}  # fmt: skip
"""Bytes of shared memory that a block gets when it asks: what an SM has, less 1 KiB that the system keeps."""
REGISTERS_A_THREAD, REGISTER_UNIT = 255, 8
"""A thread's registers are handed out in units."""
STACK_A_THREAD = 512 * KIB
"""Local memory: the stack, which holds what is spilled, too."""


@dataclass(frozen=True)
class Finding:
    """Something to say of a kernel's launch. text: what, behind the launch's name."""

    kernel: str
    arguments: str
    text: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kernel, self.arguments))) + f": {self.text}"


@dataclass(frozen=True)
class Measured:
    """What was compiled. compiler: its versions. launches: by name. problems: what does not compile."""

    compiler: str
    launches: dict[LaunchName, Launch] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)

    @property
    def records(self) -> dict[str, KernelRecord]:
        """The figures as records, by kernel."""
        out: dict[str, KernelRecord] = {}
        for name, launch in self.launches.items():
            out.setdefault(name.kernel, KernelRecord(self.compiler, {})).launches[name.arguments] = launch
        return out


# --- Compiling --------------------------------------------------------------------------------------------------------


def launches_of(kernels: Iterable[str] | None) -> dict[LaunchName, Noted]:
    """The launches of some kernels, or all."""
    wanted = None if kernels is None else set(kernels)
    return {name: one for name, one in engine_launches().items() if wanted is None or name.kernel in wanted}


def measure(found: Mapping[LaunchName, Noted], tick: Callable[[], None] = lambda: None) -> Measured:
    """Compile each launch for each architecture, ptxas on every core. tick: called after each launch.

    Raises SetupError when a compiler is missing.
    """
    out = Measured(compiler_version())
    pool = ThreadPoolExecutor(usable_cores())
    try:
        jobs = {name: started(pool, name, one, out.problems) for name, one in found.items()}
        for name, parts in jobs.items():
            figures = {}
            for sm, part in parts.items():
                with telling(name, f"{sm}: ", out.problems):
                    figures[sm] = part.result()
            out.launches[name] = Launch(found[name].threads, found[name].shared_bytes, figures)
            tick()
    finally:
        pool.shutdown(cancel_futures=True)
    return out


def started(pool: Executor, name: LaunchName, one: Noted, problems: list[Finding]) -> dict[str, Future[Figures]]:
    """The launch's machine code in the making, by architecture; none where there is no PTX."""
    with telling(name, "", problems):
        ptx_text(one.program, one.signature)
        return {architecture(target): pool.submit(figures_on, target, one) for target in ARCHITECTURES}
    return {}


def figures_on(target: Capability, one: Noted) -> Figures:
    """What the launch takes on an architecture."""
    (r,) = compiled(one.program, one.signature, [target], one.threads)
    return Figures(r.registers, r.shared_bytes, r.stack_bytes, r.spill_store_bytes, r.spill_load_bytes)


@contextmanager
def telling(name: LaunchName, where: str, problems: list[Finding]) -> Iterator[None]:
    """A launch that does not compile is a problem; a compiler that is missing is not the launch's."""
    try:
        yield
    except SetupError:
        raise
    except KernelError as problem:
        problems.append(told(name, f"{where}{problem}"))


def uncached(found: Mapping[LaunchName, Noted]) -> list[LaunchName]:
    """The launches whose PTX the cache lacks."""
    return [n for n, one in found.items() if not ptx_path(one.program, one.signature, PTX_TARGET).exists()]


def make_ptx(name: LaunchName) -> None:
    """The PTX of a launch, in this process, into the cache; what does not compile is said by ``measure``."""
    one = engine_launches()[name]
    gc.disable()  # numba's syntax trees live until it is done: looking through them again and again frees nothing
    try:
        with telling(name, "", []):
            ptx_text(one.program, one.signature)
    finally:
        gc.enable()


# --- Against the hardware ---------------------------------------------------------------------------------------------


def past_the_hardware(name: LaunchName, launch: Launch) -> Iterator[Finding]:
    """Every figure that is more than an architecture has."""
    for sm, found in launch.sm.items():
        taken = -(-found.registers // REGISTER_UNIT) * REGISTER_UNIT
        for what, figure, most in (
            ("threads a block", launch.threads, MAX_THREADS),
            ("registers a thread", found.registers, REGISTERS_A_THREAD),
            ("registers a block", taken * launch.threads, REGISTERS),
            ("bytes of shared memory a block", found.static_shared + launch.dynamic_shared, SHARED_A_BLOCK[sm]),
            ("bytes of stack a thread", found.stack, STACK_A_THREAD),
        ):
            if figure > most:
                yield Finding(name.kernel, name.arguments, f"{sm}: {figure:,} {what}, at most {most:,}")


# --- Against the records ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What gate 5 found. changes: figures that differ from their records. problems: what fails it."""

    measured: Measured
    changes: list[Finding]
    problems: list[Finding]


def judged(measured: Measured, recorded: Records, kernels: Iterable[str]) -> Limits:
    """Hold what was compiled against the hardware and the records. kernels: all that there should be launches of."""
    compared = against_records(measured, recorded)
    problems = measured.problems + [p for name, one in measured.launches.items() for p in past_the_hardware(name, one)]
    problems += [told(n, "is not in the records; see it with contract --record, then commit it") for n in compared.new]
    problems += [told(n, "is recorded and launched no more; contract --record takes it out") for n in compared.gone]
    silent = set(kernels) - {n.kernel for n in measured.launches}
    problems += [Finding(k, "", "the engine launches it nowhere: its limits are unknown") for k in sorted(silent)]
    return Limits(measured, compared.changes, problems)


@dataclass(frozen=True)
class Compared:
    """Records and what was compiled now. changes: figures that differ. new, gone: launches that only one side has."""

    changes: list[Finding]
    new: list[LaunchName]
    gone: list[LaunchName]


def against_records(measured: Measured, recorded: Records) -> Compared:
    """What has changed since the records."""
    known = {LaunchName(k, arguments): one for k, r in recorded.items() for arguments, one in r.launches.items()}
    found, now = measured.launches, measured.compiler
    both = [n for n in found if n in known]
    changes = [line for n in both for line in changed(n, known[n], found[n], recorded[n.kernel].compiler, now)]
    return Compared(changes, [n for n in found if n not in known], [n for n in known if n not in found])


def told(name: LaunchName, text: str) -> Finding:
    """A finding of a launch."""
    return Finding(name.kernel, name.arguments, text)


def changed(name: LaunchName, before: Launch, after: Launch, recorded_with: str, made_with: str) -> Iterator[Finding]:
    """Each figure that differs from its record, and the compilers where they do."""
    other = "" if recorded_with == made_with else f" (recorded with {recorded_with}, now {made_with})"
    for what, figure in after.numbers.items():
        if (old := before.numbers.get(what)) != figure:
            yield told(name, f"{what} {'none' if old is None else old} -> {figure}{other}")
