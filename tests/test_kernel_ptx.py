"""Every kernel the engine launches: its PTX has each rounding that the source writes, and no float64."""

from __future__ import annotations

import pytest

from backends.base import backend_class, backend_names
from refengine.registry import load_model
from refengine.verify.launches import launches, one_of_each_kind

SPEC = one_of_each_kind(load_model("qwen3.5-tiny"))


@pytest.mark.parametrize("backend", backend_names())
def test_no_product_and_sum_become_one_rounding_that_the_source_does_not_write(backend):
    pytest.importorskip("numba_cuda")
    from kernels_numba.machine.records import float_operations, ptx_text

    found = launches(SPEC, backend_class(backend))
    assert len(found) > 20
    for one in found:
        text = ptx_text(one.program, one.signature)
        assert float_operations(text).unwanted == {}, one.program.name
        assert ".f64" not in text, f"{one.program.name} computes in float64"
