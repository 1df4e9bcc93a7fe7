"""The fetched models that are kept: listed, and removed with all that was made of them."""

import os
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon import cli, models
from pagedd.daemon.kept_models import kept_models, models_table, remove_model
from pagedd.daemon.model_download import HubModel, WheelModel
from pagedd.daemon.model_use import ModelUse, is_used
from pagedd.daemon.models import pull_model, resolve_model
from pagedd.daemon.served_model import ServedModel

DAY_S = 86_400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagedd"


@pytest.fixture
def fetched(cache: Path, model_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model, prepared; two of the hub, one of which did not come whole."""

    def from_wheel(model: WheelModel, target: Path, report: object) -> None:
        target.parent.mkdir(parents=True)
        target.symlink_to(model_gguf)

    def from_hub(model: HubModel, folder: Path, report: object) -> None:
        path = folder / (model.file or "model.safetensors")
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1_500_000))

    monkeypatch.setattr(models, "fetch_from_wheel", from_wheel)
    monkeypatch.setattr(models, "fetch_from_hub", from_hub)
    resolve_model("default")
    pull_model("Org/A-b:sub/c.gguf")
    partial = cache / "models" / ".Org--part.partial"
    partial.mkdir()
    (partial / "x").write_bytes(bytes(2_000))


@pytest.mark.usefixtures("fetched")
def test_each_is_listed_under_the_name_that_fetches_it_with_its_size_and_last_use(cache: Path) -> None:
    [prepared] = [path for path in (cache / "prepared").iterdir() if path.is_dir()]
    os.utime(prepared, (3 * DAY_S, 3 * DAY_S))
    lines = list(models_table(kept_models(), now_s=5.5 * DAY_S))
    assert [line.split() for line in lines[1:3]] == [
        ["Org/A-b:sub/c.gguf", "1.5", "MB", "never", str(cache / "models" / "Org--A-b--sub--c.gguf")],
        ["Org/part", "(not", "whole)", "0.0", "MB", "never", str(cache / "models" / ".Org--part.partial")],
    ]
    assert lines[3].startswith("SmolLM2-135M-Instruct")
    assert "2 days ago" in lines[3]
    resolve_model("default")
    assert "today" in list(models_table(kept_models()))[3]


@pytest.mark.usefixtures("fetched")
def test_a_removed_model_is_gone_with_what_was_prepared_of_it_and_the_others_stay(
    cache: Path, model_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "remove", "smollm2-135m-instruct"]) == 0
    assert cli.main(["models", "remove", "Org/part"]) == 0
    assert str(cache / "models" / "SmolLM2-135M-Instruct") in capsys.readouterr().out
    assert [model.name for model in kept_models()] == ["Org/A-b:sub/c.gguf"]
    assert not [path for path in (cache / "prepared").iterdir() if path.is_dir()]
    assert model_gguf.exists()


@pytest.mark.usefixtures("fetched")
def test_a_model_that_a_daemon_serves_stays_until_it_serves_another(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ServedModel(resolve_model("default"), None)
    assert cli.main(["models", "remove", "default"]) == os.EX_TEMPFAIL
    assert "model_in_use: a daemon serves SmolLM2-135M-Instruct; stop it, or" in capsys.readouterr().err
    assert len(kept_models()) == 3
    served.close()
    assert cli.main(["models", "remove", "default"]) == 0


def test_a_model_in_a_folder_below_counts_and_one_that_is_not_there_is_served_by_nobody(tmp_path: Path) -> None:
    weights = tmp_path / "model" / "sub" / "c.gguf"
    weights.parent.mkdir(parents=True)
    weights.touch()
    uses = [ModelUse(weights), ModelUse(weights.parent), ModelUse(tmp_path / "gone" / "d.gguf")]
    for use in uses:
        assert is_used(tmp_path / "model") is (use is not uses[2])
        use.close()
        use.close()


@pytest.mark.usefixtures("fetched")
def test_a_name_that_is_not_kept_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "remove", "Org/A-b:c.gguf"]) == os.EX_UNAVAILABLE
    assert (
        "'Org/A-b:c.gguf': no model of that name is kept; did you mean Org/A-b:sub/c.gguf?" in capsys.readouterr().err
    )
    assert cli.main(["models", "remov", "x"]) == os.EX_CONFIG
    assert len(kept_models()) == 3


def test_an_empty_cache_has_no_models(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out == "name  size  last use  path\n"
    with pytest.raises(PageddError, match="no model of that name is kept"):
        remove_model("default")
