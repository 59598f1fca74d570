"""Text whose token ids are its bytes, for synthetic checkpoints."""

from __future__ import annotations

from codecs import getincrementaldecoder

BYTES = 256


class ByteText:
    """Token id = byte of the UTF-8 text; ids from 256 on show nothing."""

    def encode(self, text: str, templated: bool = False) -> list[int]:
        """The text's bytes; a surrogate escape is the byte that it stands for."""
        return list(text.encode("utf-8", "surrogateescape"))

    def stream(self) -> ByteStream:
        return ByteStream()


class ByteStream:
    """Bytes to whole characters; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self.decoder = getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(bytes([token])) if token < BYTES else ""

    def end(self) -> str:
        return self.decoder.decode(b"", final=True)
