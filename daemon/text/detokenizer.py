"""Text from token ids that arrive one by one.

Owns the bytes of an unfinished character and nothing else: a token costs the same however long the text before it is.
What bytes a token has is `tokenizer.py`'s; cutting at a stop string is `stop_strings.py`'s.
"""

import codecs
from collections.abc import Iterable

from pagedd.daemon.text.tokenizer import TextTokenizer


class Detokenizer:
    """One choice's text. The pieces of `push` and `finish` joined are `tokenizer.decode` of all ids.

    At most three bytes are held back, until their character is complete or cannot become one. U+FFFD stands for bytes
    that are no UTF-8 and for a character that the end cut, never for one that is still arriving.

    Args:
        continues_text: the ids go on from other text, so that a first space belongs to them.
        skip_special: control tokens have no text.
    """

    def __init__(self, tokenizer: TextTokenizer, *, continues_text: bool = False, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_first_space = tokenizer.strips_first_space and not continues_text

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete, perhaps none."""
        return self._text(b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skipped), final=False)

    def finish(self) -> str:
        """The rest: empty, or U+FFFD for a character that the end cut. Nothing may be pushed after it."""
        return self._text(b"", final=True)

    def _text(self, new_bytes: bytes, *, final: bool) -> str:
        text = self._utf8.decode(new_bytes, final=final)
        if text and self._at_first_space:
            self._at_first_space = False
            return text.removeprefix(" ")
        return text
