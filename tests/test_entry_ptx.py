"""Kernels that no model launches yet compile for CUDA: each rounding that the source writes, and no float64."""

from __future__ import annotations

import pytest

from kernels_numba.machine.modes import recorded
from refengine.contract.entry import product_modules
from refengine.contract.registry import entry_named
from refengine.contract.workbench import NAN, Workbench
from refengine.device import open_device

UNLAUNCHED = [
    "route", "group", "expert_matmul", "combine",
    "spread_streams", "norm_streams", "readout_gates", "mix_streams", "write_back",
    "ngram_rows", "commit_tokens", "ngram_gate", "ngram_conv", "commit_tails",
]  # fmt: skip


@pytest.mark.parametrize("name", UNLAUNCHED)
def test_no_product_and_sum_become_one_rounding_that_the_source_does_not_write(name: str) -> None:
    pytest.importorskip("numba_cuda")
    from kernels_numba.machine.records import float_operations, ptx_text

    entry = entry_named(name)
    with recorded() as recording:
        for case in entry.control_cases():
            bench = Workbench(open_device("cpu"), NAN)
            entry.launch(case, entry.inputs(case, NAN, 0), bench, product_modules(entry))
    assert {one.program.name for one in recording.launches} == set(entry.kernels)
    for one in recording.launches:
        text = ptx_text(one.program, one.signature)
        assert float_operations(text).unwanted == {}, one.program.name
        assert ".f64" not in text, f"{one.program.name} computes in float64"
