"""GGUF metadata: what a writer wrote comes back, and no file makes the reader hang, crash or grow."""

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedd.client.errors import PageddError
from pagedd.daemon.gguf_metadata import read_metadata

many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def header(num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, num_keys)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key_of_type(value_type: int, value: bytes) -> bytes:
    return string(b"key") + struct.pack("<I", value_type) + value


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(PageddError) as refused:
        read_metadata(path)
    assert refused.value.code == "unsupported_model"
    return refused.value.message


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file by the `gguf` package's own writer."""
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("int", 7)
    writer.add_int64("negative", -(2**40))
    writer.add_float32("float", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "世")
    writer.add_array("texts", ["a", "", "é"])
    writer.add_array("numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_kind_of_value_comes_back(written: Path) -> None:
    assert read_metadata(written) == {
        "general.architecture": "llama",
        "int": 7,
        "negative": -(2**40),
        "float": 0.5,
        "yes": True,
        "text": "世",
        "texts": ["a", "", "é"],
        "numbers": [1, 2, 3],
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"G", "ends in the middle"),
        (b"PK\x03\x04 a zip archive", "does not begin with GGUF"),
        (header(0, version=1), "version 1"),
        (header(0)[:20], "ends in the middle"),
        (header(2**63), "a count of 9223372036854775808 runs past its end"),
        (header(1) + struct.pack("<Q", 2**62) + bytes(8), "a count of 4611686018427387904"),
        (header(1) + key_of_type(99, b""), "value type 99"),
        (header(1) + key_of_type(4, b"\0"), "ends in the middle"),
        (header(1) + key_of_type(9, struct.pack("<IQ", 0, 2**60)), "a count of 1152921504606846976"),
        (header(1) + key_of_type(9, struct.pack("<IQ", 8, 2**60)), "a count of 1152921504606846976"),
        (header(1) + key_of_type(9, struct.pack("<IQ", 9, 1) * 9), "nest deeper than 4"),
        (header(1) + string(b"\xff\xfe") + struct.pack("<IB", 0, 0), "utf-8"),
        (header(2) + 2 * key_of_type(0, b"\1"), "the key 'key' stands twice"),
    ],
)
def test_a_malformed_file_is_refused_with_what_is_wrong(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refusal(tmp_path / "bad.gguf", content)


def test_a_file_that_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(PageddError, match="model_unavailable"):
            read_metadata(path)


@many
@given(data=st.data())
def test_cut_and_changed_files_are_read_or_refused(written: Path, data: st.DataObject) -> None:
    content = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    changed = written.with_name("changed.gguf")
    changed.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with suppress(PageddError):
        read_metadata(changed)
