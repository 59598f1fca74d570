"""Names given on the command line: what is not known is refused with the nearest that is."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from refengine.errors import UserError


def known_name(flag: str, name: str, known: Sequence[str]) -> str:
    """The name, if it is known. Raises UserError that names the flag and the nearest names, or else all of them."""
    if name in known:
        return name
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"{flag} {name or repr(name)}: unknown; {hint}")
