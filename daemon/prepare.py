"""Makes a prepared folder of weights: what the front reads of a model, once per file.

Owns what is read out of a GGUF file's metadata or of a Hugging Face folder's JSON files. The folder's form is
`prepared.py`'s; the GGUF tokenizer `gguf_tokenizer.py`'s. Never reads a tensor.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
from tokenizers import Tokenizer

from pagedd.client.errors import PageddError
from pagedd.daemon.files import file_lock, put_in_place, read_regular, scratch_directory, verify_sha256
from pagedd.daemon.gguf_metadata import read_metadata
from pagedd.daemon.gguf_tokenizer import build_tokenizer
from pagedd.daemon.prepared import PreparedModel, load_prepared

# Part of each folder's key: raise it when a prepared folder of the same weights would come out otherwise.
_FORMAT_VERSION = 2

# The largest tokenizer.json that people publish have some tens of MiB.
_MAX_TEXT_BYTES = 512 << 20
_CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
)

# Tokenizers of several families mark their turn markers as not special; their spelling says what they are.
_LOOKS_SPECIAL = re.compile(r"<[|｜].*[|｜]>")  # noqa: RUF001  # DeepSeek's full-width bars


class _Source(msgspec.Struct):
    """source.json: what a prepared folder was made of and holds; a folder without a right one is made again."""

    key: str
    model_sha256: str
    tokenizer_sha256: str


def prepare(weights: Path, root: Path, *, name: str | None = None, sha256: str | None = None) -> Path:
    """The folder below `root` with model.json and tokenizer.json of `weights`, made if absent, stale or torn.

    Args:
        weights: a GGUF file, or a folder with config.json, tokenizer.json and safetensors.
        name: the served name; the file's or folder's own without it.
        sha256: what the digest of the file `weights` must be; verified whenever the folder is made.

    Raises:
        PageddError: `model_unavailable` when something cannot be read or written, `unsupported_model` when the model
            cannot be served exactly, `checksum_mismatch` for another digest (the file is removed).
    """
    folder = _folder_of(weights, root)
    with file_lock(folder.with_suffix(".lock")):
        key = _key(weights, name)
        if _holds(folder, key):
            return folder
        if sha256 is not None:
            verify_sha256(weights, sha256)
        if weights.is_dir():
            prepared, tokenizer = _read_hugging_face_folder(weights, name or weights.name)
        else:
            prepared, tokenizer = _read_gguf(weights, name or weights.stem, sha256)
        model_json = msgspec.json.encode(prepared)
        tokenizer_json = tokenizer.encode()
        source = _Source(key=key, model_sha256=_sha256(model_json), tokenizer_sha256=_sha256(tokenizer_json))
        with scratch_directory(folder) as scratch:
            made = scratch / folder.name
            made.mkdir()
            (made / "model.json").write_bytes(model_json)
            (made / "tokenizer.json").write_bytes(tokenizer_json)
            (made / "source.json").write_bytes(msgspec.json.encode(source))
            put_in_place(made, folder)
        return folder


def _read_gguf(path: Path, name: str, sha256: str | None) -> tuple[PreparedModel, str]:
    metadata = read_metadata(path)
    built = build_tokenizer(metadata)
    architecture = metadata.get("general.architecture")
    context_length = metadata.get(f"{architecture}.context_length")
    if not isinstance(architecture, str) or not _is_count(context_length):
        raise _unsupported(path, "it names no architecture or no context length")
    file_type = metadata.get("general.file_type")
    prepared = PreparedModel(
        name=name,
        weights=str(path),
        architecture=architecture,
        quantization=_GGUF_FILE_TYPES.get(file_type, f"file type {file_type}"),
        context_length=context_length,
        vocab_size=built.vocab_size,
        bos_token_id=built.bos_token_id,
        adds_bos=built.adds_bos,
        eos_token_ids=built.eos_token_ids,
        chat_template=built.chat_template,
        special_tokens=built.special_tokens,
        template_variables=built.template_variables,
        sha256=sha256,
    )
    return prepared, built.tokenizer.to_str()


def _read_hugging_face_folder(folder: Path, name: str) -> tuple[PreparedModel, str]:
    config = _read_json(folder, "config.json")
    if config is None:
        raise _unsupported(folder, "it has no config.json; give the folder that holds it, or a GGUF file")
    if not any(folder.glob("*.safetensors")):
        raise _unsupported(folder, "it has no safetensors (pickles are not read, they run code); convert it first")
    source = _read_json(folder, "tokenizer.json")
    if source is None:
        why = "it has no tokenizer.json; save it with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        raise _unsupported(folder, why)
    try:
        tokenizer = Tokenizer.from_str(json.dumps(source))
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise _unsupported(folder, f"its tokenizer.json cannot be read: {error}") from error
    special_tokens: dict[str, int] = {}
    for added in source.get("added_tokens") or []:
        token_id = tokenizer.token_to_id(added["content"])
        if token_id is not None and (added["special"] or _LOOKS_SPECIAL.fullmatch(added["content"])):
            added["special"] = True
            special_tokens[added["content"]] = token_id

    tokenizer_config = _read_json(folder, "tokenizer_config.json") or {}
    generation_config = _read_json(folder, "generation_config.json") or {}
    text_config = _object(config, "text_config") or config
    context_length = next((text_config[key] for key in _CONTEXT_LENGTH_KEYS if text_config.get(key)), None)
    vocab_size = text_config.get("vocab_size")
    if not _is_count(context_length) or not _is_count(vocab_size):
        raise _unsupported(folder, f"config.json has no vocab_size or none of {list(_CONTEXT_LENGTH_KEYS)}")

    bos_token_id = _token_id(tokenizer, tokenizer_config.get("bos_token"))
    if bos_token_id is None:
        bos_token_id = next(iter(_ids(text_config.get("bos_token_id"), vocab_size)), None)
    sources = (text_config, config, generation_config)
    ends = {token_id for source in sources for token_id in _ids(source.get("eos_token_id"), vocab_size)}
    end_of_tokenizer = _token_id(tokenizer, tokenizer_config.get("eos_token"))
    if end_of_tokenizer is not None:
        ends.add(end_of_tokenizer)
    prepared = PreparedModel(
        name=name,
        weights=str(folder),
        architecture=_architecture(config),
        quantization=str(_object(config, "quantization_config").get("quant_method") or _dtype(text_config)),
        context_length=context_length,
        vocab_size=vocab_size,
        bos_token_id=bos_token_id,
        adds_bos=_adds_bos(tokenizer, tokenizer_config, bos_token_id),
        eos_token_ids=sorted(ends),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=special_tokens,
        template_variables={
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(tokenizer_config.get(name))) is not None
        },
    )
    return prepared, json.dumps(source, ensure_ascii=False)


def _adds_bos(tokenizer: Tokenizer, tokenizer_config: dict[str, Any], bos_token_id: int | None) -> bool:
    """As transformers decides: the configuration's word, else what the tokenizer's post-processor does."""
    if bos_token_id is None:
        return False
    declared = tokenizer_config.get("add_bos_token")
    if isinstance(declared, bool):
        return declared
    return tokenizer.encode("a").ids[:1] == [bos_token_id]


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja before the one in tokenizer_config.json; of several there the one named `default`."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_regular(path, _MAX_TEXT_BYTES)[0].decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unsupported(folder, f"chat_template.jinja cannot be read: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    if not path.exists():
        return None
    try:
        content = json.loads(read_regular(path, _MAX_TEXT_BYTES)[0])
    except (OSError, ValueError, RecursionError) as error:
        raise _unsupported(folder, f"{name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise _unsupported(folder, f"{name} holds no JSON object")
    return content


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`, empty when there is none."""
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _token_text(token: object) -> str | None:
    """tokenizer_config.json gives a token as text or as `{"content": text}`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token_id(tokenizer: Tokenizer, token: object) -> int | None:
    text = _token_text(token)
    return None if text is None else tokenizer.token_to_id(text)


def _ids(value: object, vocab_size: int) -> list[int]:
    """`eos_token_id` is an id, a list of ids, or null; one that the model cannot produce means nothing."""
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if type(token_id) is int and 0 <= token_id < vocab_size]


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << 31


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0] if isinstance(names, list) and names else config.get("model_type"))


def _dtype(config: dict[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "unknown")


def _folder_of(weights: Path, root: Path) -> Path:
    return root / f"{weights.stem}-{_sha256(str(weights).encode())[:16]}"


def _key(weights: Path, name: str | None) -> str:
    """Changes whenever the files that are read, the name or the format do; by sizes and times, not by content."""
    files = [weights / file for file in _CONFIG_FILES] if weights.is_dir() else [weights]
    try:
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
    except OSError as error:
        raise PageddError("model_unavailable", f"cannot read {weights}: {error.strerror}; check the path") from error
    return _sha256(repr((_FORMAT_VERSION, name, stats)).encode())


def _holds(folder: Path, key: str) -> bool:
    """Whether `folder` is whole and was made for `key`."""
    try:
        source = msgspec.json.decode((folder / "source.json").read_bytes(), type=_Source)
        load_prepared(folder)
        return (
            source.key == key
            and source.model_sha256 == _sha256((folder / "model.json").read_bytes())
            and source.tokenizer_sha256 == _sha256((folder / "tokenizer.json").read_bytes())
        )
    except (OSError, msgspec.DecodeError):
        return False


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _unsupported(path: Path, why: str) -> PageddError:
    return PageddError("unsupported_model", f"{path} cannot be served: {why}")


_CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")

# general.file_type, for people: https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h (llama_ftype)
_GGUF_FILE_TYPES: dict[object, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16",
}  # fmt: skip
