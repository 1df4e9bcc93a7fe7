"""What the front needs of a model, made once by `models.py` and kept in the cache directory. No torch, no transformers.

A prepared model is a folder:

    model.json       `PreparedModel`
    tokenizer.json   Hugging Face `tokenizers` format
"""

from pathlib import Path

import msgspec


class PreparedModel(msgspec.Struct, kw_only=True):
    """Facts about a model that text handling, admission and `/v1/models` need.

    Attributes:
        name: the served name, e.g. `SmolLM2-135M-Instruct`.
        weights: path of the GGUF file, or of the folder with config.json and safetensors.
        architecture: as the weights name it.
        context_length: the model's own limit, tokens.
        bos_token_id: None when the model has none.
        adds_bos: the tokenizer puts `bos_token_id` before a plain text.
        eos_token_ids: union of generation config, tokenizer and GGUF.
        chat_template: Jinja source, None when the model has none.
        special_tokens: text -> id of control tokens (never produced from a user's text).
        template_variables: what the chat template sees beside the messages: bos_token, eos_token, ... as text.
        sha256: digest of the weights when it was verified.
    """

    name: str
    weights: str
    architecture: str
    quantization: str
    context_length: int
    vocab_size: int
    bos_token_id: int | None
    adds_bos: bool
    eos_token_ids: list[int]
    chat_template: str | None
    special_tokens: dict[str, int]
    template_variables: dict[str, str] = {}  # msgspec copies it for each instance
    sha256: str | None = None


def load_prepared(folder: Path) -> PreparedModel:
    """Reads `folder/model.json`. Raises `FileNotFoundError`, or `msgspec.DecodeError` for a torn file."""
    return msgspec.json.decode((folder / "model.json").read_bytes(), type=PreparedModel)
