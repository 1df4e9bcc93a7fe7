"""Another model in place of the served one: over a real daemon with models of some kilobytes."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedd.client import pagectl
from pagedd.client.errors import PageddError
from pagedd.client.sync import Client

from .conftest import DaemonFactory, RunningDaemon
from .tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "one")
    write_tiny_model(folder / "two", seed=1)
    write_tiny_model(folder / "torn", without="model.layers.1.mlp.up_proj.weight")
    write_tiny_model(folder / "foreign", hidden_act="gelu_of_tomorrow")
    return folder


@pytest.fixture(scope="module")
def daemon(daemon_cache: Path, models: Path) -> Iterator[RunningDaemon]:
    folder = Path(tempfile.mkdtemp(prefix="pagedd-"))
    factory = DaemonFactory(folder, daemon_cache, models / "one")
    yield factory.start("--num-blocks", "32", "--drain-seconds", "20", "--idle-sleep-seconds", "600").wait_ready()
    factory.close()
    shutil.rmtree(folder)


def load(daemon: RunningDaemon, model: Path | str, *flags: str) -> int:
    return pagectl.main(["--runtime-dir", str(daemon.endpoints.directory), "load", str(model), *flags])


def served(daemon: RunningDaemon) -> list[str]:
    return [card["id"] for card in json.loads(daemon.get("/v1/models")[1])["data"]]


def texts(daemon: RunningDaemon, model: str = "default") -> str:
    with Client(daemon.endpoints.directory) as client:
        done = client.generate("ab", model=model, max_tokens=8, temperature=0).result()
        return f"{done.model} {done.choices[0].token_ids}"


def test_another_model_is_loaded_and_everything_names_it(daemon: RunningDaemon, models: Path) -> None:
    before = texts(daemon, "one")
    assert load(daemon, models / "two") == 0
    assert served(daemon) == ["two"]
    after = texts(daemon, "two")
    assert after.split(" ", 1)[1] != before.split(" ", 1)[1], "other weights"
    with Client(daemon.endpoints.directory) as client:
        frame = client.stats()
        with pytest.raises(PageddError, match="'one' is not served; ask for 'two'") as refused:
            client.generate("ab", model="one").result()
    assert refused.value.code == "model_not_found"
    assert (frame.model, [event.reason for event in frame.events if event.kind == "model"][-1]) == ("two", "serves two")


@pytest.mark.parametrize(
    ("model", "message", "status"),
    [
        ("torn", "up_proj", os.EX_UNAVAILABLE),  # seen when the weights are read
        ("foreign", "gelu_of_tomorrow", os.EX_CONFIG),
        ("nowhere", "model_unavailable", os.EX_UNAVAILABLE),
    ],
)
def test_a_model_that_cannot_be_served_leaves_the_one_before_in_service(
    daemon: RunningDaemon, models: Path, capsys: pytest.CaptureFixture[str], model: str, message: str, status: int
) -> None:
    names, before = served(daemon), texts(daemon)
    assert load(daemon, models / model) == status
    assert message in capsys.readouterr().err
    assert (served(daemon), texts(daemon)) == (names, before)


def test_what_runs_ends_with_its_own_model_and_what_comes_waits_for_the_next(
    daemon: RunningDaemon, models: Path
) -> None:
    [name] = served(daemon)
    with Client(daemon.endpoints.directory) as client:
        running = client.generate("ab", max_tokens=250, ignore_eos=True, temperature=0)
        deltas = iter(running)
        next(deltas)
        client.sleep()  # waits for it, so that the rest is from a daemon that sleeps
        done = running.result()
        assert (done.model, len(done.choices[0].token_ids)) == (name, 250)
        loading = threading.Thread(target=load, args=(daemon, models / "two"))
        loading.start()
        daemon.wait_until(lambda daemon: "loading two from" in daemon.log.rpartition("asked")[2])
        assert client.generate("ab", max_tokens=1).result().model in (name, "two"), "it wakes what there is"
        loading.join()
        assert client.generate("ab", max_tokens=1).result().model == "two"
