"""The prompt cache: beginnings of prompts that were read, for requests that begin alike. Spec serving §4.

Keys are hashes of token ids, chained page by page, so that a prompt's keys are those of every prompt with the same pages. A hash
only says where to look: tokens are compared. An entry holds positions *and* the recurrent state behind them, so a request can
begin exactly where an entry ends, and nowhere else. At least one token of a prompt is always left to run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from backends.base import Backend, BackendError, Beginning, NoRoom, Stream
from backends.kept import Kept

GRAIN = 256
"""Positions between marks of backends without pages."""
HOST_BYTES = 1 << 30
"""Memory for entries on the host, at most."""


@dataclass(eq=False)
class Entry:
    """ids: the tokens whose positions ``begin`` holds. pins: requests that found it and have not begun."""

    ids: tuple[int, ...]
    begin: Beginning
    pins: int = 0


class PromptCache:
    """Entries by what they begin with; the one used longest ago goes first. grain: positions between marks, a page's by default.

    host_bytes: of entries that lie on the host and not in the backend's pages. hits, misses: admitted requests. kept, evicted,
    refused: entries; refused, since there was no room.
    """

    def __init__(self, backend: Backend, grain: int | None = None, host_bytes: int = HOST_BYTES):
        self.backend, self.host_bytes = backend, host_bytes
        self.grain = grain or (backend.positions if backend.paged else GRAIN)
        self.table: dict[bytes, list[Entry]] = defaultdict(list)
        self.entries: list[Entry] = []
        self.hits = self.misses = self.kept = self.evicted = self.refused = 0

    def marks(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Where a prompt is kept if it does not say: at the last whole grain that leaves a token to run."""
        end = (len(prompt) - 1) // self.grain * self.grain
        return (end,) if end else ()

    # --- Finding ----------------------------------------------------------------------------------------------------------

    def find(self, prompt: Sequence[int]) -> Entry | None:
        """The longest entry that the prompt begins with and goes beyond; it stays until ``unpin``."""
        found = self.look_up(prompt, len(prompt) - 1)
        if found is not None:
            found.pins += 1
            self.use(found)
        return found

    def count(self, resumed: bool) -> None:
        """A request was admitted, and began with an entry or did not."""
        self.hits += resumed
        self.misses += not resumed

    def look_up(self, prompt: Sequence[int], most: int) -> Entry | None:
        """The longest entry of at most ``most`` tokens that the prompt begins with."""
        longest = max((len(one.ids) for one in self.entries), default=0)
        ids = tuple(prompt[:longest])
        for key in reversed(self.keys(ids)):
            alike = [one for one in self.table.get(key, ()) if len(one.ids) <= most and one.ids == ids[: len(one.ids)]]
            if alike:
                return max(alike, key=lambda one: len(one.ids))
        return None

    def unpin(self, entry: Entry) -> None:
        """The request that found it has begun, or went away."""
        entry.pins -= 1

    def use(self, entry: Entry) -> None:
        """It is the newest now."""
        self.entries.remove(entry)
        self.entries.append(entry)

    def keys(self, ids: Sequence[int]) -> list[bytes]:
        """The hash of nothing, of the first grain of tokens, of the first two, and so on."""
        keys, data, step = [b""], np.asarray(ids, np.int64).tobytes(), np.dtype(np.int64).itemsize * self.grain
        for end in range(step, len(data) + 1, step):
            keys.append(self.hashed(keys[-1] + data[end - step : end]))
        return keys

    def hashed(self, data: bytes) -> bytes:
        """A key of the chain."""
        return blake2b(data, digest_size=16).digest()

    # --- Keeping ----------------------------------------------------------------------------------------------------------

    def keep(self, ids: Sequence[int], stream: Stream) -> bool:
        """Keep a stream's positions, which are these tokens; whether it could. Older entries make room if they must.

        Raises BackendError for other tokens than the stream's, and as Backend.snapshot does.
        """
        self.check_count(ids, stream.committed)
        if self.renewed(ids):
            return True
        while True:
            try:
                return self.add(ids, self.backend.snapshot(stream))
            except NoRoom:
                if not self.evict():
                    self.refused += 1
                    return False

    def add(self, ids: Sequence[int], begin: Beginning) -> bool:
        """A new entry, which is the cache's to release; False where the host has no room for it.

        Raises BackendError for a beginning of other tokens, of another backend or shape, or that was generated in part.
        """
        self.check_begin(ids, begin)
        if self.renewed(ids):
            begin.release()
            return True
        if isinstance(begin, Kept) and not self.make_room(begin.nbytes):
            self.refused += 1
            return False
        entry = Entry(tuple(int(i) for i in ids), begin)
        self.table[self.keys(entry.ids)[-1]].append(entry)
        self.entries.append(entry)
        self.kept += 1
        return True

    def check_begin(self, ids: Sequence[int], begin: Beginning) -> None:
        """Raise BackendError unless requests can begin with it after these tokens."""
        self.check_count(ids, begin.positions)
        if isinstance(begin, Kept) and begin.prompted < begin.positions:
            raise BackendError(
                f"prompt cache: positions from {begin.prompted} on were generated; only what prompt passes made can be begun with"
            )
        self.backend.check_beginning(begin, self.backend.sizes.context)

    def check_count(self, ids: Sequence[int], positions: int) -> None:
        """Raise BackendError for no tokens, or another number than there are positions."""
        if not len(ids) or positions != len(ids):
            raise BackendError(f"prompt cache: {positions} positions are not those of {len(ids)} tokens; at least one")

    def renewed(self, ids: Sequence[int]) -> bool:
        """Whether there is an entry of just these tokens; it is the newest now."""
        known = self.look_up(ids, len(ids))
        if known is None or len(known.ids) < len(ids):
            return False
        self.use(known)
        return True

    def make_room(self, nbytes: int) -> bool:
        """Evict entries of the host until there is room for so many bytes more; False, evicting none, where there never is."""
        pinned = sum(one.begin.nbytes for one in self.entries if isinstance(one.begin, Kept) and one.pins)
        if pinned + nbytes > self.host_bytes:
            return False
        while self.held_bytes + nbytes > self.host_bytes:
            self.evict(on_host=True)
        return True

    @property
    def held_bytes(self) -> int:
        """Bytes of the entries on the host."""
        return sum(one.begin.nbytes for one in self.entries if isinstance(one.begin, Kept))

    # --- Evicting ---------------------------------------------------------------------------------------------------------

    def evict(self, on_host: bool = False) -> bool:
        """Drop the entry used longest ago that nobody has found: one of the host's, or of the backend's pages; False: none."""
        for entry in self.entries:
            if not entry.pins and isinstance(entry.begin, Kept) == on_host:
                self.drop(entry)
                self.evicted += 1
                return True
        return False

    def drop(self, entry: Entry) -> None:
        """Forget an entry, and give back what it holds."""
        self.entries.remove(entry)
        key = self.keys(entry.ids)[-1]
        self.table[key].remove(entry)
        if not self.table[key]:
            del self.table[key]
        entry.begin.release()

    def clear(self) -> None:
        """Forget every entry."""
        for entry in list(self.entries):
            self.drop(entry)
