"""Prepared folders: made once, made again when stale or torn, and every fact from where it is declared."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from pagedd.client.errors import PageddError
from pagedd.daemon import prepare as prepare_module
from pagedd.daemon.prepare import prepare
from pagedd.daemon.prepared import load_prepared


def write_gguf(path: Path, **changes: Any) -> Path:
    facts: dict[str, Any] = {"context_length": 64, "pre": "gpt-2"} | changes
    writer = gguf.GGUFWriter(path, "llama")
    if facts["context_length"] is not None:
        writer.add_context_length(facts["context_length"])
    writer.add_file_type(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(facts["pre"])
    writer.add_token_list(["<|end|>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.Q4_1.gguf")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


def refusal(weights: Path, root: Path) -> PageddError:
    with pytest.raises(PageddError) as refused:
        prepare(weights, root)
    assert not any(path.is_dir() for path in root.iterdir())  # nothing half made stays
    return refused.value


# --- GGUF ------------------------------------------------------------------------------------------------------------


def test_a_gguf_file_gives_its_facts_and_its_tokenizer(gguf_file: Path, root: Path) -> None:
    folder = prepare(gguf_file, root)
    prepared = load_prepared(folder)
    assert prepared.name == "tiny.Q4_1"
    assert prepared.weights == str(gguf_file)
    assert (prepared.architecture, prepared.quantization) == ("llama", "Q4_1")
    assert (prepared.context_length, prepared.vocab_size) == (64, 4)
    assert prepared.eos_token_ids == [0]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids == [3]


def test_the_second_time_nothing_is_made(gguf_file: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(gguf_file, root)
    monkeypatch.setattr(prepare_module, "read_metadata", lambda path: pytest.fail("the file was read again"))
    assert prepare(gguf_file, root) == folder


@pytest.mark.parametrize("torn", ["model.json", "tokenizer.json", "source.json"])
@pytest.mark.parametrize("how", ["cut", "removed"])
def test_a_torn_folder_is_made_again(gguf_file: Path, root: Path, torn: str, how: str) -> None:
    folder = prepare(gguf_file, root)
    whole = (folder / torn).read_bytes()
    if how == "cut":
        (folder / torn).write_bytes(whole[: len(whole) // 2])
    else:
        (folder / torn).unlink()
    assert prepare(gguf_file, root) == folder
    assert (folder / torn).read_bytes() == whole


def test_a_folder_of_other_weights_another_name_or_another_format_is_made_again(
    gguf_file: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(gguf_file, root)
    write_gguf(gguf_file, context_length=128)
    assert load_prepared(prepare(gguf_file, root)).context_length == 128
    assert load_prepared(prepare(gguf_file, root, name="other")).name == "other"
    (folder / "model.json").chmod(0o600)
    made = (folder / "model.json").stat().st_ino
    monkeypatch.setattr(prepare_module, "_FORMAT_VERSION", 10**6)
    prepare(gguf_file, root, name="other")
    assert (folder / "model.json").stat().st_ino != made


def test_another_digest_than_the_expected_one_removes_the_file(gguf_file: Path, root: Path) -> None:
    with pytest.raises(PageddError, match="checksum_mismatch"):
        prepare(gguf_file, root, sha256="0" * 64)
    assert not gguf_file.exists()


@pytest.mark.parametrize("changes", [{"context_length": None}, {"context_length": 0}, {"pre": "unknown-pre"}])
def test_a_gguf_file_that_lacks_what_is_needed_is_refused(tmp_path: Path, root: Path, changes: dict[str, Any]) -> None:
    assert refusal(write_gguf(tmp_path / "bad.gguf", **changes), root).code == "unsupported_model"


def test_a_file_that_is_not_there_is_unavailable_and_one_that_is_no_gguf_unsupported(
    tmp_path: Path, root: Path
) -> None:
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    assert refusal(tmp_path / "text.gguf", root).code == "unsupported_model"
    assert refusal(tmp_path / "absent.gguf", root).code == "model_unavailable"


def test_a_cache_that_cannot_be_written_is_told(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PageddError, match="model_unavailable: cannot write"):
        prepare(gguf_file, tmp_path / "file" / "prepared")


# --- Hugging Face folders --------------------------------------------------------------------------------------------


@pytest.fixture
def hugging_face_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-hf"
    folder.mkdir()
    tokenizer = Tokenizer(BPE(vocab={"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<|turn|>"), AddedToken("<tool>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").touch()
    write_json(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=128,
        vocab_size=8,
        eos_token_id=1,
        dtype="bfloat16",
    )
    write_json(folder / "generation_config.json", eos_token_id=[1, 4])
    write_json(
        folder / "tokenizer_config.json",
        bos_token={"content": "<s>"},
        eos_token="<|turn|>",
        chat_template="from the configuration",
    )
    return folder


def write_json(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, **{**json.loads(path.read_text(encoding="utf-8")), **changes})


def test_a_folder_gives_its_facts_and_the_union_of_all_ends(hugging_face_folder: Path, root: Path) -> None:
    folder = prepare(hugging_face_folder, root, name="org/tiny")
    prepared = load_prepared(folder)
    assert msgspec.to_builtins(prepared) == {
        "name": "org/tiny",
        "weights": str(hugging_face_folder),
        "architecture": "LlamaForCausalLM",
        "quantization": "bfloat16",
        "context_length": 128,
        "vocab_size": 8,
        "bos_token_id": 0,
        "adds_bos": True,
        "eos_token_ids": [1, 4, 5],  # config and generation config; generation config; tokenizer
        "chat_template": "from the configuration",
        "special_tokens": {"<s>": 0, "</s>": 1, "<|turn|>": 5},  # the last by its spelling
        "template_variables": {"bos_token": "<s>", "eos_token": "<|turn|>"},
        "sha256": None,
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab<|turn|>").ids == [0, 4, 5]
    assert tokenizer.decode([4, 5, 6]) == "ab<tool>"


def test_the_configuration_overrides_the_post_processor_about_the_beginning(
    hugging_face_folder: Path, root: Path
) -> None:
    change_json(hugging_face_folder / "tokenizer_config.json", add_bos_token=False)
    assert not load_prepared(prepare(hugging_face_folder, root)).adds_bos


def test_a_template_file_comes_before_the_configuration_and_of_several_the_default_counts(
    hugging_face_folder: Path, root: Path
) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    change_json(hugging_face_folder / "tokenizer_config.json", chat_template=several)
    assert load_prepared(prepare(hugging_face_folder, root)).chat_template == "the default"
    (hugging_face_folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert load_prepared(prepare(hugging_face_folder, root)).chat_template == "from the file"


def test_a_changed_file_of_the_folder_is_noticed(hugging_face_folder: Path, root: Path) -> None:
    prepare(hugging_face_folder, root)
    write_json(hugging_face_folder / "generation_config.json", eos_token_id=2)
    os.utime(hugging_face_folder / "generation_config.json", ns=(1, 1))
    assert load_prepared(prepare(hugging_face_folder, root)).eos_token_ids == [1, 2, 5]


@pytest.mark.parametrize(
    ("remove", "reason"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no safetensors"),
        ("tokenizer.json", "save it with transformers"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused_with_what_to_do(
    hugging_face_folder: Path, root: Path, remove: str, reason: str
) -> None:
    (hugging_face_folder / remove).unlink()
    error = refusal(hugging_face_folder, root)
    assert error.code == "unsupported_model"
    assert reason in error.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_file_that_is_no_json_object_is_refused_by_name(
    hugging_face_folder: Path, root: Path, name: str, content: bytes
) -> None:
    (hugging_face_folder / name).write_bytes(content)
    error = refusal(hugging_face_folder, root)
    assert error.code == "unsupported_model"
    assert name in error.message


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"],
)
@pytest.mark.parametrize("what", ["pipe", "endless"])
def test_a_file_that_would_never_end_is_refused_by_name(
    hugging_face_folder: Path, root: Path, name: str, what: str
) -> None:
    file = hugging_face_folder / name
    file.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    error = refusal(hugging_face_folder, root)
    assert (error.code, "no regular file" in error.message) == ("unsupported_model", True)
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", {"text_config": 3, "quantization_config": [1]}),
        ("config.json", {"max_position_embeddings": "many", "vocab_size": 8}),
        ("tokenizer.json", {"added_tokens": [3]}),
        ("tokenizer.json", {"model": {"type": "Nothing"}, "added_tokens": []}),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(
    hugging_face_folder: Path, root: Path, name: str, content: dict[str, Any]
) -> None:
    write_json(hugging_face_folder / name, **content)
    error = refusal(hugging_face_folder, root)
    assert error.code == "unsupported_model"
    assert name in error.message


@pytest.mark.parametrize("value", ["", [], {}, [[]], {"a": 1}, True, 1.5, -1, 10**400, "x", [10**400]])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_value_of_any_wrong_kind_is_refused_or_means_nothing(
    hugging_face_folder: Path, root: Path, name: str, value: object
) -> None:
    keys = ("architectures", "max_position_embeddings", "vocab_size", "eos_token_id", "dtype", "text_config")
    ours = (*keys, "model_type", "quantization_config", "bos_token", "eos_token", "chat_template", "add_bos_token")
    path = hugging_face_folder / name
    before = path.read_bytes()
    for key in (*ours, "unk_token", "bos_token_id"):
        path.write_bytes(before)
        change_json(path, **{key: value})
        with suppress_code("unsupported_model"):
            prepared = load_prepared(prepare(hugging_face_folder, root))
            assert all(0 <= token_id < prepared.vocab_size for token_id in prepared.eos_token_ids)


@contextmanager
def suppress_code(code: str) -> Iterator[None]:
    """Another refusal than that is a failure."""
    try:
        yield
    except PageddError as error:
        if error.code != code:
            raise
