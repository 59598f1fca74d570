"""Record what the public transformers implementations make of the small random models, and how far the engine is from them.

    pip install -e '.[oracle]'
    python benchmarks/record_oracle.py

Writes tests/data/oracle_*.npz and benchmarks/oracle.json.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from refengine.commands.report import write_report
from refengine.verify.against_oracle import Held, errors, hold
from refengine.verify.oracle_cases import CASES, DENSE, Case
from refengine.verify.transformers_oracle import run_oracle

HERE = Path(__file__).parent
DATA = HERE.parent / "tests" / "data"
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}


def record(case: Case, folder: Path) -> Held:
    """Run a case's checkpoint and write its file."""
    oracle = run_oracle(case.checkpoint(folder), case.ids)
    versions = np.array([f"{name} {version}" for name, version in VERSIONS.items()])
    arrays = {name: array for name, array in asdict(oracle).items() if array.size}
    np.savez_compressed(DATA / f"{case.name.replace('-', '_')}.npz", versions=versions, **arrays)
    return hold(case, oracle)


def measure(held: Held) -> dict[str, Any]:
    """A case's numbers."""
    found, off = held.found(held.model()), errors(held.logits(), held.oracle)
    return {
        "case": held.case.name,
        "layers": [*held.case.spec.layer_types, "head"],
        "worst_fraction_of_bound": held.fractions(found),
        "mean_square_over_expected": held.mean_squares(found),
        "rows_of_other_choices": held.rows_of_other_choices(found),
        "oracle_from_float64_fraction_of_bound": held.oracle_fractions(held.oracle),
        "error_over_bf16_error": off.ratio,
        "middle_row_error_over_bf16_error": off.middle_ratio,
        "worst_row_error_over_bf16_error": float(off.row_ratios.max()),
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        cases = [measure(record(case, Path(folder))) for case in CASES]
    for case in cases:
        print(*(f"{key}: {value}" for key, value in case.items()), sep="\n", end="\n\n")
    claims = [
        {
            "name": "oracle/worst_layer_fraction",
            "value": max(max(c["worst_fraction_of_bound"]) for c in cases),
            "unit": "of the bound",
        },
        {
            "name": "oracle/worst_model_ratio",
            "value": max(c["error_over_bf16_error"] for c in cases if c["case"] in {case.name for case in DENSE}),
            "unit": "of the bf16 error",
        },
        {
            "name": "oracle/worst_middle_row_ratio",
            "value": max(c["middle_row_error_over_bf16_error"] for c in cases),
            "unit": "of the bf16 error",
        },
    ]
    write_report(HERE / "oracle.json", {"claims": claims, "oracle": VERSIONS, "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
