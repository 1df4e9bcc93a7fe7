"""The bytes that one token adds to a text, for the decoders that language models use.

Owns the reading of tokenizer.json's `decoder`. A decoder under which a token's bytes depend on its neighbours, or that
is not known, is refused: incremental text could not be exact.
"""

import re
from dataclasses import dataclass
from typing import Any

from pagedd.client.errors import PageddError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class TokenBytesRule:
    """Maps a token's spelling in the vocabulary to its bytes.

    Attributes:
        byte_level: each character stands for one byte, in GPT-2's table.
        byte_fallback: `<0xE4>` stands for that byte.
        replacements: (from, to) within each token, in order.
        strips_first_space: the first space of a whole text is not part of it.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strips_first_space: bool = False

    def __call__(self, token: str) -> bytes:
        if self.byte_level:
            # A token with a character outside the table was added as plain text (tokenizers' ByteLevel decoder).
            mapped = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in mapped else bytes(b for b in mapped if b is not None)
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def token_bytes_rule(decoder: dict[str, Any] | None) -> TokenBytesRule:
    """The rule of tokenizer.json's `decoder`.

    Raises:
        PageddError: `unsupported_model` for a decoder whose pieces are not known.
    """
    steps = _steps(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenBytesRule(byte_level=True)
    byte_fallback = False
    replacements: list[tuple[str, str]] = []
    strips_first_space = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                strips_first_space |= step.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass  # joins the pieces, as bytes are joined anyway
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips_first_space |= start == 1
            case _:
                raise _unsupported(step)
    return TokenBytesRule(
        byte_fallback=byte_fallback, replacements=tuple(replacements), strips_first_space=strips_first_space
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise _unsupported(decoder)
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _unsupported(decoder: object) -> PageddError:
    message = (
        f"the tokenizer's decoder {decoder!r} is not known; use a model with a byte-level or SentencePiece tokenizer"
    )
    return PageddError("unsupported_model", message)


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: a printable character for each byte, itself where Latin-1 has one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
