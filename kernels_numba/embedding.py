"""Embedding: the rows of a table, by token id."""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import cuda, kernel

THREADS = 128


def embed(out: Any, table: Any, ids: Any, stream: Any = None) -> None:
    """out[i] = table[ids[i]].

    out: bf16 [rows, D]; table: bf16 [vocabulary, D]; ids: int32 [rows], each in 0 .. vocabulary - 1.
    """
    embed_kernel.at()[ids.shape[0], THREADS, stream](out, table, ids)


@kernel
def embed_kernel(out, table, ids):
    """A block copies a row. out: bf16 [rows, D]; table: bf16 [vocabulary, D]; ids: int32 [rows].

    Launch: grid rows, 128 threads.
    """
    row = cuda.blockIdx.x
    token = ids[row]
    for first in range(0, out.shape[1], THREADS):
        word = first + cuda.threadIdx.x
        if word < out.shape[1]:
            out[row, word] = table[token, word]
