"""Text to token ids and back, with control tokens out of the reach of a user's text.

Owns the two `tokenizers.Tokenizer` instances of a prepared model and the bytes of each token. `detokenizer.py` turns
ids that arrive one by one into text; `chat_template.py` decides which text may hold control tokens.
"""

import json
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pagedd.client.errors import PageddError
from pagedd.daemon.prepared import PreparedModel, load_prepared
from pagedd.daemon.text.token_bytes import token_bytes_rule


class TextTokenizer:
    """The tokenizer of a prepared model.

    Immutable after construction, so any thread may call it. Two instances of the same tokenizer stand behind it. In the
    *sealed* one each control token goes by a name made of random digits that no user can know: a text that spells a
    control token is plain text there, whatever the tokenizer's model would have made of the spelling.

    Construction parses tokenizer.json twice: about 0.3 s for 49k tokens, seconds for 200k.
    """

    def __init__(self, folder: Path, prepared: PreparedModel | None = None) -> None:
        self.prepared = load_prepared(folder) if prepared is None else prepared
        source = (folder / "tokenizer.json").read_text(encoding="utf-8")
        declared = json.loads(source)
        self._open = Tokenizer.from_str(source)
        self._rule = token_bytes_rule(declared["decoder"])
        self._seals = _seals(self.prepared.special_tokens)
        self._sealed = Tokenizer.from_str(_rename(declared, self._seals)) if self._seals else self._open
        self._special_pattern = re.compile(any_of(self.prepared.special_tokens))
        self.special_ids = frozenset(self.prepared.special_tokens.values())
        self._token_bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model knows; some may have no text."""
        return self.prepared.vocab_size

    @property
    def strips_first_space(self) -> bool:
        """A decoded text loses the space that the tokenizer put before it."""
        return self._rule.strips_first_space

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = True) -> list[int]:
        """Ids of `text`.

        Args:
            parse_special: text that spells a control token becomes that token. Never for a user's text.
            add_bos: put the beginning-of-sequence id before it if the model wants one before a plain text.
        """
        tokenizer = self._open if parse_special else self._sealed
        ids = _encode(tokenizer, text)
        if add_bos and self.prepared.adds_bos and self.prepared.bos_token_id is not None:
            ids.insert(0, self.prepared.bos_token_id)
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of `text`, with control tokens where it spells one with no `mark` inside or right behind.

        `mark` is removed; what it stood in is plain text. No beginning-of-sequence id is added.
        """

        def seal(match: re.Match[str]) -> str:
            return match.group() if text.startswith(mark, match.end()) else self._seals[match.group()]

        sealed = self._special_pattern.sub(seal, text)
        return _encode(self._sealed, sealed.replace(mark, ""))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD."""
        joined = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        text = joined.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What `token_id` adds to the text, empty for an id without text."""
        known = self._token_bytes.get(token_id)
        if known is None:
            token = self._open.id_to_token(token_id)
            known = b"" if token is None else self._rule(token)
            self._token_bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """`token_id` as people read it: its text, or `bytes:\\xe4\\xb8` for a part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        # A batch of one, because `encode` holds the interpreter's lock: for a megabyte, no thread runs for 0.7 s.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError as error:  # what `tokenizers` raises for a string that has no UTF-8
        message = "the text holds half of a surrogate pair, which is no character; send well-formed Unicode"
        raise PageddError("invalid_value", message) from error
    return ids


def _seals(special_tokens: dict[str, int]) -> dict[str, str]:
    """Control token -> its secret name. Digits survive every change of case and every normalizer."""
    nonce = "".join(secrets.choice("0123456789") for _ in range(40))
    return {text: f"{nonce}{token_id:010d}" for text, token_id in special_tokens.items()}


def _rename(tokenizer: dict[str, Any], names: dict[str, str]) -> str:
    """tokenizer.json with the tokens `names` renamed where they are declared; ids stay. Changes `tokenizer`."""
    for added in tokenizer["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:  # Unigram: [[token, score], ...]
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tokenizer["post_processor"] = None  # it names control tokens, and is never run
    return json.dumps(tokenizer)


def any_of(texts: Iterable[str]) -> str:
    """A regular expression for any of `texts`, the longest where several begin. Of none: one that never matches."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"
