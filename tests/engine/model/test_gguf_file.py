"""The container, well formed and not."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedd.engine.errors import EngineError
from pagedd.engine.model.gguf_file import GGUFFile
from pagedd.engine.model.gguf_header import SkippedArray


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(0.5)
    writer.add_bool("switch", True)
    writer.add_token_list(["a", "bc", "def"])
    writer.add_array("numbers", [1, 2])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_scalars_are_read_and_arrays_skipped(path) -> None:
    metadata = GGUFFile(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["llama.rope.freq_base"] == 0.5
    assert metadata["switch"] is True
    assert metadata["tokenizer.ggml.tokens"] == SkippedArray(3)
    assert metadata["numbers"] == SkippedArray(2)


def test_tensors_are_read_in_numpys_order_of_dimensions(path) -> None:
    file = GGUFFile(path)
    assert list(file.tensors) == ["first", "second"]
    assert file.tensors["first"].shape == (2, 3)
    assert file.read(file.tensors["first"]).view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.read(file.tensors["second"]).view(np.float16).tolist() == [0, 1, 2, 3, 4]


def test_the_real_file_reads_as_the_librarys_reader_reads_it(model_gguf) -> None:
    ours, theirs = GGUFFile(model_gguf), gguf.GGUFReader(model_gguf)
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors[::40]:
        entry = ours.tensors[tensor.name]
        assert entry.type == tensor.tensor_type
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.offset == tensor.data_offset
        assert np.array_equal(ours.read(entry).view(tensor.data.dtype), tensor.data.reshape(*entry.shape[:-1], -1))


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"GGU", "ends in the middle"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (header(version=1), "version 1"),
        (header(num_keys=2**60), "a count of 1152921504606846976"),
        (header(num_tensors=2**60), "a count of"),
        (header(num_keys=1) + text(b"key") + struct.pack("<I", 99) + bytes(8), "value type 99"),
        (header(num_keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(8), "a count of"),
        (header(num_keys=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**60) + bytes(8), "a count of"),
        (header(num_keys=1) + text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(64), "nest"),
        (header(num_keys=2) + (text(b"k") + struct.pack("<IB", 7, 1)) * 2 + bytes(9), "stands twice"),
        (header(num_keys=1) + text(b"\xff\xfe") + struct.pack("<II", 4, 1), "utf-8"),
        (header(num_tensors=1) + tensor(b"t", (), 0) + bytes(64), "0 dimensions"),
        (header(num_tensors=1) + tensor(b"t", (4, 0), 0) + bytes(64), "tensor t is empty"),
        (header(num_tensors=1) + tensor(b"t", (4,), 0) + bytes(8), "middle of tensor t"),
        (header(num_tensors=1) + tensor(b"t", (4,), 0, offset=2**63) + bytes(64), "middle of tensor t"),
        (header(num_tensors=1) + tensor(b"t", (2**40, 2**40), 0) + bytes(64), "middle of tensor t"),
        (header(num_tensors=1) + tensor(b"t", (20,), 3) + bytes(64), "20 long, not a multiple of Q4_1's 32"),
    ],
)
def test_a_malformed_file_is_an_engine_error_that_says_what_is_wrong(tmp_path, content, told) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(EngineError) as refusal:
        GGUFFile(path)
    assert refusal.value.code == "model_unavailable"
    assert told in refusal.value.message


def test_an_unknown_tensor_type_is_refused_by_number(tmp_path) -> None:
    (tmp_path / "bad.gguf").write_bytes(header(num_tensors=1) + tensor(b"t", (4,), 9999) + bytes(64))
    with pytest.raises(EngineError, match="unsupported_model: GGUF tensor type 9999 of t"):
        GGUFFile(tmp_path / "bad.gguf")


def test_an_absent_file_is_named(tmp_path) -> None:
    with pytest.raises(EngineError, match=r"model_unavailable: .*absent\.gguf: No such file"):
        GGUFFile(tmp_path / "absent.gguf")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 2000), flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), max_size=4))
def test_a_damaged_file_reads_or_is_refused_and_never_traces(path, tmp_path, cut, flips) -> None:
    damaged = bytearray(path.read_bytes()[:cut])
    for position, bits in flips:
        damaged[position % len(damaged)] ^= bits
    target = tmp_path / "damaged.gguf"
    target.write_bytes(damaged)
    try:
        file = GGUFFile(target)
    except EngineError:
        return
    for entry in file.tensors.values():
        file.read(entry)
