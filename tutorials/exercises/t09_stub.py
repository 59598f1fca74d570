"""Exercises of tutorial 09: pool, admission, waiting. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Sequence


def pages_needed(prompt: int, reply: int, page_size: int, run_pages: int = 0) -> int:
    """The pages that a request claims.

    prompt, reply: tokens. page_size: positions a page. run_pages: pages of its recurrent state, which are claimed, too.
    """
    raise NotImplementedError


def admitted(available: int, line: Sequence[int]) -> int:
    """How many of the requests in line are let in now.

    available: pages that nobody holds and nobody was promised. line: pages that each claims, the first in line first. Whoever
    is let in takes them out of ``available``. Where one has no room, all behind it wait, too.
    """
    raise NotImplementedError


def waits(pool: int, page_size: int, requests: Sequence[tuple[int, int]]) -> list[int]:
    """For each request, the rounds that it waits.

    pool: pages. requests: (prompt, reply) tokens; all arrive before the first round, each fits into the pool alone. A round
    begins with admission. A request that is let in runs in that round: it reads its prompt and writes two tokens (or the one
    that it wants). In each further round it writes one. When it has written all, it gives its pages back, and they are
    available at the next admission. One that is let in in the first round has waited 0 rounds.
    """
    raise NotImplementedError
