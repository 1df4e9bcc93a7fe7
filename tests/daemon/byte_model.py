"""A prepared model that is no model: a tokenizer of bytes, the facts of a folder, and no weights.

Token id b is the byte b, so a prompt "ab" is [97, 98]; `EOS` ends a text.
"""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagedd.daemon.prepared import PreparedModel

VOCAB_SIZE = 259

EOS = 256

CONTEXT = 2048

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'cursed' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
)


def byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def write_model(folder: Path, **changes: Any) -> Path:
    """A prepared model whose ids 0 … 255 are bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {character: byte for byte, character in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts: dict[str, Any] = {
        "name": "bytes",
        "weights": "",
        "architecture": "none",
        "quantization": "none",
        "context_length": CONTEXT,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "adds_bos": False,
        "eos_token_ids": [EOS],
        "chat_template": TEMPLATE,
        "special_tokens": {text: EOS + i for i, text in enumerate(specials)},
    }
    (folder / "model.json").write_bytes(msgspec.json.encode(PreparedModel(**(facts | changes))))
    return folder
