"""Exercises of tutorial 12: Gated DeltaNet beside attention.

Replace each ``raise NotImplementedError`` by your answer.
"""

from collections.abc import Sequence

import numpy as np


def delta_step(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: float, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """One token of the gated delta rule: (the state after it, its result y).

    state: [values, keys]; it is not changed in place. q, k: [keys]; v: [values]. First the state decays; then the
    part of v that is missing under k goes in, as much of it as beta says; then y is read with q.
    """
    raise NotImplementedError


def decode_sum(s: np.ndarray, k: np.ndarray) -> np.float32:
    """The sum of s · k as the step kernel makes it, to the bit.

    s, k: float32 [128]; the result is a float32. Lane n of 32 has the elements 4n .. 4n + 3 and adds their products
    as ((s0·k0 + s1·k1) + s2·k2) + s3·k3; each product and each sum is rounded to float32. Then, for d in 16, 8, 4,
    2, 1, every lane adds what lane (its own number XOR d) has, all at once. In the end all lanes have the result.
    """
    raise NotImplementedError


def begin_at(prompt: Sequence[int], older: Sequence[int], states: Sequence[int]) -> int:
    """How many tokens of a prompt need not be read again: where a kept state stands.

    prompt, older: token ids; ``older`` was read before, and its keys and values are all there. states: the lengths
    of ``older``'s beginnings behind which the states of all layers were kept, in any order; a 3 stands for the
    state after its first three tokens. At least one token of the prompt is left to read. 0 if nothing can be used.
    """
    raise NotImplementedError
