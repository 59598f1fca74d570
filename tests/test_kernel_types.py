"""Every kernel the engine launches: no finding in checked mode, and in each variable the type that CUDA gives it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import numba
import numpy as np
import pytest

from backends.base import Sizes, backend_class
from backends.stream import SCALAR_BATCH, TILES
from kernels_numba.machine import checked
from kernels_numba.machine.frontend import Program
from refengine.checkpoint import load_mtp, load_weights, make_checkpoint, open_checkpoint
from refengine.device import open_device
from refengine.model import MtpHead, Qwen35, cache_shape
from refengine.registry import load_model
from refengine.serve.sampling import Sampling, draw
from refengine.serve.session import Session
from refengine.verify.launches import one_of_each_kind, rehearse_drafts, rehearse_head

SPEC = one_of_each_kind(load_model("qwen3.5-tiny"))
PROMPT, ROWS, TOKENS = list(range(52)), 33, 2
Observed = dict[tuple[Program, tuple], dict[str, set[str]]]
"""(lock-step function, its arguments' types) -> variable -> the types it had."""


def numba_type(value: Any) -> Any:
    """The type CUDA would give a value of the CPU machine; None for what is not a value."""
    if not hasattr(value, "dtype"):
        return None
    scalar = numba.from_dtype(np.dtype(value.dtype))
    is_array = hasattr(value, "load")
    return numba.types.Array(scalar, len(value.shape), "C") if is_array else scalar


@contextmanager
def observing(found: Observed) -> Iterator[None]:
    """Note the type of each variable of each lock-step function as it returns."""

    def watch(frame: Any, event: str, _: Any) -> None:
        program = frame.f_globals.get("__lockstep__")
        if event != "return" or program is None or frame.f_code.co_name != program.name:
            return
        types = {name: numba_type(value) for name, value in frame.f_locals.items() if not name.startswith("_")}
        arguments = tuple(types[p] for p in program.params)
        for name, kind in types.items():
            if kind is not None and not isinstance(kind, numba.types.Array):
                found[program, arguments][name].add(str(kind))

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


FORMS = [
    *product(("window", "paged", "paged-p256"), ("bf16",), (TILES,)), ("paged", "fp8", TILES), ("mixed", "fp8", SCALAR_BATCH)
]  # fmt: skip


@pytest.fixture(scope="module", params=FORMS, ids=" ".join)
def observed(request, tmp_path_factory) -> Observed:
    """The engine, one layer of each kind, run in checked mode: any finding is an error here."""
    folder = make_checkpoint(SPEC, tmp_path_factory.mktemp("checkpoint") / "tiny")
    device, found = open_device("cpu"), defaultdict(lambda: defaultdict(set))
    name, kv, attention = request.param
    kind, sizes = backend_class(name), Sizes(64, 2, 48, 3, 1, 0, kv, attention)
    checkpoint = open_checkpoint(folder, SPEC)
    model = Qwen35(SPEC, load_weights(checkpoint, SPEC), device, 64)
    session = Session(model, kind(cache_shape(SPEC), sizes), device, [PROMPT, PROMPT[:5]], ROWS)
    head = MtpHead(SPEC, load_mtp(checkpoint, SPEC), model, device)
    with checked(), observing(found):
        passes = list(session.run(TOKENS))
        draw(passes[-1].logits, [Sampling(temperature=1.0, top_k=5, top_p=0.9)] * 2, [len(PROMPT) + 1, 6], device)
        rehearse_drafts(model, kind(cache_shape(SPEC), sizes), 2)
        rehearse_head(head, kind(cache_shape(SPEC, mtp=True), sizes), 2)
    assert all(np.isfinite(p.logits).all() for p in passes)
    return found


@cache
def cuda_types(program: Program, arguments: tuple) -> dict[str, set[str]]:
    """Variable -> the types that numba-cuda infers for it."""
    from numba.cuda.compiler import compile_cuda

    from kernels_numba.machine.compiler import NVVM_OPTIONS, python_function

    returns = numba.types.void if program.kind == "kernel" else None
    compiled = compile_cuda(python_function(program), returns, arguments, nvvm_options=NVVM_OPTIONS, cc=(9, 0))
    types = defaultdict(set)
    for name, kind in compiled.type_annotation.typemap.items():
        types[name.split(".")[0]].add(str(getattr(kind, "literal_type", kind)))
    return types


def test_a_variable_has_the_type_that_the_cuda_compiler_gives_it(observed):
    pytest.importorskip("numba_cuda")
    compared = 0
    for (program, arguments), variables in observed.items():
        wanted = cuda_types(program, arguments)
        for name, types in variables.items():
            assert types <= wanted[name], f"{program.name}: {name} is {types} here, {wanted[name]} in CUDA"
            compared += len(types)
    assert compared > 300
