"""Solutions of tutorial 09: pool, admission, waiting."""

from collections.abc import Sequence


def pages_needed(prompt: int, reply: int, page_size: int, run_pages: int = 0) -> int:
    """The pages that a request claims."""
    return -(-(prompt + reply) // page_size) + run_pages


def admitted(available: int, line: Sequence[int]) -> int:
    """How many of the requests in line are let in now."""
    for count, pages in enumerate(line):
        if pages > available:
            return count
        available -= pages
    return len(line)


def waits(pool: int, page_size: int, requests: Sequence[tuple[int, int]]) -> list[int]:
    """For each request, the rounds that it waits."""
    claims = [pages_needed(prompt, reply, page_size) for prompt, reply in requests]
    found, ends = [], {}
    for round_ in range(sum(reply for _, reply in requests)):
        running = [n for n in range(len(found)) if ends[n] > round_]
        available = pool - sum(claims[n] for n in running)
        for _ in range(admitted(available, claims[len(found) :])):
            ends[len(found)] = round_ + requests[len(found)][1] - 1
            found.append(round_)
    return found
