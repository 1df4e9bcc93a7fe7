"""The `pagedd` command: what it prints and the statuses it ends with."""

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pagedd.client.errors import ERROR_KINDS, PageddError
from pagedd.daemon import cli
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.setting import settings_of


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("PAGEDD_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_check_config_shows_every_setting_and_where_it_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDD_BLOCK_SIZE", "8")
    assert cli.main(["check-config", "--max-num-seqs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(settings_of(DaemonConfig))
    assert "max_num_seqs = 4  # --max-num-seqs" in lines
    assert "block_size = 8  # PAGEDD_BLOCK_SIZE" in lines
    assert 'num_blocks = "auto"  # default' in lines
    assert 'prefix_sharing = "caller"  # default' in lines
    assert tomllib.loads("\n".join(lines))["quota"]["weight"] == 1.0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["check-config", "--max-num-seq", "4"], "unknown_setting: flag --max-num-seq: .*--max-num-seqs"),
        (["check-config", "--block-size", "9"], "invalid_setting: block_size = 9"),
        (["check-confg"], "unknown_setting: command check-confg: .*did you mean pagedd check-config"),
        (["frobnicate"], "unknown_setting: command frobnicate: .*the commands are"),
        (["pull", "a", "b"], "invalid_setting: pagedd pull takes \\[NAME\\], not a b"),
        (["prepare", "--fast"], "invalid_setting: pagedd prepare takes \\[NAME\\], not --fast"),
        (["version", "x"], "invalid_setting: pagedd version takes no argument, not x"),
        (["hash-key", "my laptop"], "invalid_setting: the key's name 'my laptop': it has 1 to 64 letters"),
        (["hash-key", "laptop", "root"], "invalid_setting: after the key's name 'root': there comes nothing, or admin"),
    ],
)
def test_a_wrong_command_line_has_the_status_of_a_wrong_configuration(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert cli.main(argv) == os.EX_CONFIG
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.match(f"pagedd: {said}", printed.err)


@pytest.mark.parametrize("keys", ["", "laptop 0123456789abcdef0123\n"])
def test_check_config_refuses_a_quota_of_a_key_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: str
) -> None:
    (tmp_path / "keys").write_text(keys)
    (tmp_path / "pagedd.toml").write_text("[quota.key.nosuchkey]\nweight = 2\n")
    file = ["--api-key-file", str(tmp_path / "keys")] if keys else []
    assert cli.main(["check-config", "--config", str(tmp_path / "pagedd.toml"), *file]) == os.EX_CONFIG
    said = "pagedd: invalid_setting: quota.key.nosuchkey: api_key_file has no key of that name"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-model-len", "100000"], "max_model_len 100000, the model's own context is 8192; lower max_model_len"),
        (["--kv-cache-dtype", "fp16"], "kv_cache_dtype 'fp16', this model's kernels here have float32, bf16, int8"),
        (["--kv-cache-dtype", "int4", "--block-size", "8"], "block_size 8 with kv_cache_dtype int4"),
    ],
)
def test_check_config_refuses_what_the_engine_would_after_it_has_shown_the_settings(
    capsys: pytest.CaptureFixture[str], model_gguf: Path, flags: list[str], said: str
) -> None:
    settings = ["--model", str(model_gguf), "--device", "cpu", "--dtype", "float32"]
    assert cli.main(["check-config", *settings]) == 0
    assert cli.main(["check-config", *settings, *flags]) == os.EX_CONFIG
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2 * len(settings_of(DaemonConfig))
    assert printed.err.startswith(f"pagedd: invalid_setting: {said}")


def test_check_config_shows_what_is_taken_where_a_setting_leaves_the_choice(
    capsys: pytest.CaptureFixture[str], model_gguf: Path
) -> None:
    assert cli.main(["check-config", "--model", str(model_gguf), "--device", "cpu", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'kv_cache_dtype = "int8"  # auto (default)' in lines
    assert "max_model_len = 8192  # auto (default)" in lines
    assert 'dtype = "bfloat16"  # --dtype' in lines


def test_check_config_refuses_a_pool_that_the_machine_can_never_hold(
    capsys: pytest.CaptureFixture[str], model_gguf: Path
) -> None:
    flags = ["--model", str(model_gguf), "--device", "cpu", "--num-blocks", "100000000"]
    assert cli.main(["check-config", *flags]) == os.EX_CONFIG
    assert re.search(
        r"invalid_setting: num_blocks 100000000 of \d+ bytes take \d+\.\d GiB beside 0\.1 GiB of weights, cpu has",
        capsys.readouterr().err,
    )


def test_check_config_says_that_a_directory_which_others_may_read_will_not_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = tmp_path / "kv"
    flags = ["check-config", "--device", "cpu", "--kv-disk-gib", "1", "--kv-disk-directory", str(directory)]
    assert cli.main(flags) == 0
    assert "kv_disk_directory" not in capsys.readouterr().err
    directory.mkdir(mode=0o755)
    assert cli.main(flags) == 0
    assert "kv_disk_directory will not be used, and the daemon serves without that tier" in capsys.readouterr().err


def test_check_config_refuses_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", "--device", "cuda:77"]) != 0
    heard = capsys.readouterr().err
    assert "is not fetched yet, so only the device is checked" in heard
    assert "device 'cuda:77', but t" in heard


def test_check_config_accepts_a_device_in_whose_place_the_cpu_would_serve(
    capsys: pytest.CaptureFixture[str], model_gguf: Path
) -> None:
    settings = ["--model", str(model_gguf), "--device", "cuda:77", "--device-fallback", "cpu"]
    assert cli.main(["check-config", *settings]) == 0
    heard = capsys.readouterr().err
    assert "device 'cuda:77', but t" in heard
    assert "in its place the CPU would serve, which is checked instead" in heard
    assert cli.main(["check-config", *settings, "--max-model-len", "100000"]) == os.EX_CONFIG


def test_check_config_refuses_what_names_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", "--model", "smollm2-135m-instrukt"]) == os.EX_UNAVAILABLE
    assert "there is no model of that name; did you mean smollm2-135m-instruct?" in capsys.readouterr().err


def test_a_model_that_cannot_be_had_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", "/nonexistent.gguf"]) == os.EX_UNAVAILABLE
    assert "model_unavailable" in capsys.readouterr().err


def test_pull_prints_where_the_model_is_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = tmp_path / "w.gguf"
    weights.touch()
    assert cli.main(["pull", str(weights)]) == 0
    assert capsys.readouterr().out == f"{weights}\n"


def test_every_status_belongs_to_a_code_of_the_table() -> None:
    assert set(cli.EXIT_STATUSES) <= set(ERROR_KINDS)
    assert cli.exit_status(PageddError("internal", "x")) == os.EX_SOFTWARE


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_names_the_program(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([argument]) == 0
    assert re.fullmatch(r"pagedd \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_hash_key_prints_a_line_for_the_key_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("0123456789abcdef01234567\n"))
    assert cli.main(["hash-key", "laptop"]) == 0
    assert capsys.readouterr().out == (
        "laptop sha256:8865fea8edb697169ac2b4f5e6339e16439381033640eeb4f55edbad9bdc2d3d\n"
    )


def test_help_lists_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in cli.COMMANDS)
    assert all(item.flag in printed for item in settings_of(DaemonConfig))


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_each_command_has_help(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert cli.main([command, flag]) == 0
    assert capsys.readouterr().out.startswith(f"usage: pagedd {command}")


@pytest.mark.parametrize("arguments", [["config-table"], ["--help"], ["version"]])
def test_a_reader_that_leaves_ends_the_program_without_a_word(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-P", "-m", "pagedd.daemon.cli", *arguments]
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_one_sentence(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-P", "-m", "pagedd.daemon.cli", "version"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "standard output cannot be written: No space left on device; give it a place with room\n"
    assert (ended.returncode, ended.stderr) == (os.EX_IOERR, said)


INTERRUPTED_IMPORT = """
import signal, sys
from pagedd.daemon import cli

class Interrupt:
    def find_spec(name, path, target=None):
        if name == "pagedd.daemon.tune.command":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
sys.exit(cli.main(["tune"]))
"""


def test_an_interrupt_while_a_command_is_imported_ends_it_without_a_word() -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED_IMPORT]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_the_front_imports_neither_torch_nor_transformers() -> None:
    code = "import pagedd.daemon.server, sys; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"torch", "transformers", "triton"} & set(imported.split())
