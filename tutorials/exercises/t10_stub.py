"""Exercises of tutorial 10: prefix sharing and recurrent state. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Callable, Sequence


def chain(ids: Sequence[int], page_size: int, hashed: Callable[[bytes], bytes]) -> list[bytes]:
    """The keys of a prompt's whole pages.

    The first key is b"", that of no page. The key of each further whole page is ``hashed(the key before + the page's token ids
    as int64 bytes)``. A last page that is not full has no key. ``numpy.array(ids, numpy.int64).tobytes()`` are bytes.
    """
    raise NotImplementedError


def longest(prompt: Sequence[int], kept: Sequence[tuple[int, ...]]) -> int | None:
    """The kept prefix that a prompt resumes from: its place in ``kept``.

    kept: tokens of each. The prompt must begin with all of them, and at least one token of the prompt must be left to run. Of
    several the longest; None: there is none.
    """
    raise NotImplementedError


def begin(pages: list[int], positions: int, page_size: int) -> tuple[list[int], int | None]:
    """The pages that a stream shares with a kept prefix, and the page that it must copy.

    pages: of the prefix, in order. positions: that it holds. Full pages are shared. A last page that is full in part is copied;
    None: there is no such page.
    """
    raise NotImplementedError


def resume(xs: Sequence[float], kept: dict[int, float]) -> tuple[float, int]:
    """The state of a recurrent layer after all tokens, and how many tokens were read for it.

    xs: what each token brings. The rule is s = s / 2 + x, from 0. kept: the state behind so many tokens, for some places. Begin
    at the last one that leaves at least one token to run; without one, at the first token.
    """
    raise NotImplementedError
