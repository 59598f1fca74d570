"""The small models that are held against recorded runs of the public implementations, each made once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from refengine.verify.against_oracle import Held, hold
from refengine.verify.oracle_cases import CASES, read_oracle

DATA = Path(__file__).parent / "data"
BY_NAME = {case.name: case for case in CASES}


@cache
def held(name: str) -> Held:
    return hold(BY_NAME[name], read_oracle(DATA / f"{name.replace('-', '_')}.npz"))
