"""The recorded figures of gate 5: ``records/KERNEL.yaml``, one file a kernel, read strictly and written whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from refengine.errors import UserError
from refengine.registry.reader import Where, read
from refengine.registry.strict_yaml import load_yaml

RECORDS = Path(__file__).parents[2] / "records"


@dataclass(frozen=True)
class Figures:
    """What a launch takes on one architecture. static_shared: bytes a block; the rest a thread, bytes but for registers."""

    registers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Launch:
    """threads: a block. dynamic_shared: bytes a block. sm: figures by architecture, as sm_80."""

    threads: int
    dynamic_shared: int
    sm: dict[str, Figures]

    @property
    def numbers(self) -> dict[str, int]:
        """Every figure under a name of its own, as ``sm_80: registers``."""
        own = {"threads": self.threads, "dynamic_shared": self.dynamic_shared}
        return own | {f"{sm}: {what}": n for sm, found in self.sm.items() for what, n in asdict(found).items()}


@dataclass(frozen=True)
class KernelRecord:
    """A file. compiler: the versions that made the figures. launches: by compile-time arguments."""

    compiler: str
    launches: dict[str, Launch]


Records = Mapping[str, KernelRecord]
"""By kernel."""


def read_records(folder: Path) -> dict[str, KernelRecord]:
    """Every record of a folder. Raises UserError, naming file and key, for a file that is none."""
    return {path.stem: read(KernelRecord, load_yaml(path), Where(str(path))) for path in sorted(folder.glob("*.yaml"))}


def write_records(records: Records, gone: Iterable[str], folder: Path) -> None:
    """Write the kernels' files and remove those of kernels that are gone.

    Everything is on the disk before the first file is replaced. Raises UserError when it cannot be, and changes nothing.
    """
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new") as temporary:
            for kernel, record in records.items():
                (Path(temporary) / f"{kernel}.yaml").write_text(text_of(record), encoding="utf-8")
            for path in sorted(Path(temporary).iterdir()):
                path.replace(folder / path.name)
        for kernel in gone:
            (folder / f"{kernel}.yaml").unlink()
    except OSError as problem:
        raise UserError(f"--record: {folder}: cannot be written: {problem.strerror}; run it in a checkout") from problem


def text_of(record: KernelRecord) -> str:
    """A record as YAML: sorted, a line for an architecture, so that a diff shows what changed and where."""
    body = asdict(record) | {"launches": {name: asdict(record.launches[name]) for name in sorted(record.launches)}}
    return yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
