"""Settings: where values come from, what is refused and how it is said."""

import os
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedd.client.errors import PageddError
from pagedd.daemon.config import DaemonConfig, load_config
from pagedd.daemon.quota_config import QuotaLimits
from pagedd.daemon.setting import Setting, settings_of
from pagedd.daemon.settings import Loaded, markdown_table
from pagedd.engine.config import EngineConfig

NO_FILE = Path("/nonexistent/pagedd.toml")


def load(*argv: str, environ: dict[str, str] | None = None, file: Path = NO_FILE) -> Loaded[DaemonConfig]:
    return load_config(list(argv), environ or {}, file)


def refusal(*argv: str, environ: dict[str, str] | None = None, file: Path = NO_FILE) -> PageddError:
    with pytest.raises(PageddError) as caught:
        load(*argv, environ=environ, file=file)
    return caught.value


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "pagedd.toml"
    path.write_text('max_num_seqs = 4\nblock_size = 8\nmodel = "from-toml"\n')
    return path


def test_flags_win_over_environment_over_toml_over_defaults(toml: Path) -> None:
    loaded = load("--max-num-seqs", "2", environ={"PAGEDD_MAX_NUM_SEQS": "3", "PAGEDD_BLOCK_SIZE": "32"}, file=toml)
    config = loaded.config
    assert (config.max_num_seqs, config.block_size, config.model, config.dtype) == (2, 32, "from-toml", "auto")
    assert loaded.origins["max_num_seqs"] == "--max-num-seqs"
    assert loaded.origins["block_size"] == "PAGEDD_BLOCK_SIZE"
    assert loaded.origins["model"] == str(toml)
    assert loaded.origins["dtype"] == "default"


def test_a_named_file_is_read_in_place_of_the_default_one(toml: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("max_num_seqs = 9\n")
    assert load("--config", str(other), file=toml).config.max_num_seqs == 9
    assert load(environ={"PAGEDD_CONFIG": str(other)}, file=toml).config.max_num_seqs == 9
    assert load(f"--config={toml}", environ={"PAGEDD_CONFIG": str(other)}).config.max_num_seqs == 4


def test_a_named_file_must_exist_and_the_default_one_need_not() -> None:
    assert load().config == DaemonConfig()
    assert refusal("--config", "/nonexistent/x.toml").code == "invalid_setting"


def test_a_flag_that_does_not_exist_names_the_nearest() -> None:
    error = refusal("--max-num-sequences", "8")
    assert error.code == "unknown_setting"
    assert "did you mean --max-num-seqs?" in error.message


@pytest.mark.parametrize("spelling", ["--max-num-seq=8", "--max", "--blocksize"])
def test_no_flag_may_be_abbreviated(spelling: str) -> None:
    assert refusal(spelling).code == "unknown_setting"


def test_a_variable_that_does_not_exist_names_the_nearest() -> None:
    error = refusal(environ={"PAGEDD_BLOCKSIZE": "16"})
    assert error.code == "unknown_setting"
    assert "did you mean PAGEDD_BLOCK_SIZE?" in error.message


def test_a_toml_key_that_does_not_exist_names_file_and_nearest(toml: Path) -> None:
    toml.write_text("max-num-seqs = 4\n")
    error = refusal(file=toml)
    assert error.code == "unknown_setting"
    assert error.message.startswith(f"key max-num-seqs ({toml}): ")
    assert "did you mean max_num_seqs?" in error.message


def test_a_number_written_as_a_toml_text_is_shown_as_a_text(toml: Path) -> None:
    toml.write_text('max_num_seqs = "4"')
    assert refusal(file=toml).message == f'max_num_seqs = "4" ({toml}): it is a whole number'


def test_a_bare_word_is_no_flag() -> None:
    assert refusal("--block-size", "16", "serve").code == "unknown_setting"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--block-size", "12"], "block_size = 12 (--block-size): it is 8, 16 or 32"),
        (["--max-num-seqs", "0"], "max_num_seqs = 0 (--max-num-seqs): it must be at least 1, at most 4096"),
        (["--max-num-seqs", "many"], "max_num_seqs = many (--max-num-seqs): it is a whole number"),
        (["--gpu-memory-utilization", "0"], "it must be more than 0, at most 1"),
        (["--gpu-memory-utilization", "1.5"], "it must be more than 0, at most 1"),
        (["--drain-seconds", "nan"], "drain_seconds = nan"),
        (["--dtype", "int8"], "it is auto, float32, bfloat16 or float16"),
        (["--device", "tpu"], "it is auto, cpu, cuda or cuda:N"),
        (["--http-host", "0.0.0.0", "--http-port", "80", "--api-key-file", "k"], "loopback"),
        (["--http-port", "8000"], "set api_key_file as well"),
        (["--max-num-seqs", "32", "--max-num-batched-tokens", "16"], "at least max_num_seqs, 32"),
        (["--block-size"], "expected one argument"),
        (["--num-blocks", "1" + "0" * 400], "it must be at least 1, at most 2147483647"),
        (["--max-model-len", "2147483648"], "it must be at least 1, at most 2147483647"),
        (["--max-num-seqs", "1" + "0" * 400], "it must be at least 1, at most 4096"),
        (["--served-model-name", "\udcff"], "it must be UTF-8 without a NUL"),
        (["--model", "/models/\udcff.gguf"], "it must be UTF-8 without a NUL"),
        (["--runtime-dir", "/run/\udcff"], "it must be UTF-8 without a NUL"),
    ],
)
def test_a_value_out_of_range_is_refused_with_value_and_limit(argv: list[str], said: str) -> None:
    error = refusal(*argv)
    assert error.code == "invalid_setting"
    assert said in error.message


@pytest.mark.parametrize("line", ['model = "a\\u0000"', 'runtime_dir = "/run/\\u0000"'])
def test_a_text_with_a_nul_is_no_value(toml: Path, line: str) -> None:
    toml.write_text(line)
    assert "it must be UTF-8 without a NUL" in refusal(file=toml).message


@pytest.mark.parametrize("line", ['max_num_seqs = "4"', "max_num_seqs = 4.0", "enable_prefix_caching = 1", "model = 3"])
def test_toml_values_must_have_the_settings_type(toml: Path, line: str) -> None:
    toml.write_text(line)
    assert refusal(file=toml).code == "invalid_setting"


@pytest.mark.parametrize(
    "content",
    [b"= =", b"\xff\xfe", b"model = " + b"[" * 5000, b"max_num_seqs = " + b"9" * 5000],
    ids=["=", "ff", "[", "9"],
)
def test_a_file_that_is_not_toml_is_refused_by_name(toml: Path, content: bytes) -> None:
    toml.write_bytes(content)
    error = refusal(file=toml)
    assert error.code == "invalid_setting"
    assert str(toml) in error.message


@pytest.mark.parametrize(
    "content",
    ["drain_seconds = 0x" + "f" * 5000, "model = 0x" + "f" * 5000, f"model = {[7] * 5000}", "a" * 5000 + " = 1"],
    ids=["float", "text", "list", "key"],
)
def test_a_value_of_any_size_is_refused_in_few_words(toml: Path, content: str) -> None:
    toml.write_text(content)
    assert len(refusal(file=toml).message) < 600


def test_a_pipe_under_the_name_of_the_settings_file_is_refused_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pagedd.toml")
    with pytest.raises(PageddError, match="no regular file"):
        load_config(["--config", str(tmp_path / "pagedd.toml")], {})


def test_a_whole_number_will_do_for_a_number(toml: Path) -> None:
    toml.write_text("drain_seconds = 3")
    assert load(file=toml).config.drain_seconds == 3.0


def test_switches_have_both_forms_and_words() -> None:
    assert load("--no-enable-prefix-caching").config.enable_prefix_caching is False
    assert load("--enable-prefix-caching", environ={"PAGEDD_ENABLE_PREFIX_CACHING": "no"}).config.enable_prefix_caching
    assert load(environ={"PAGEDD_ENABLE_PREFIX_CACHING": "off"}).config.enable_prefix_caching is False
    assert refusal(environ={"PAGEDD_ENABLE_PREFIX_CACHING": "maybe"}).code == "invalid_setting"


def test_none_is_written_auto_or_off(toml: Path) -> None:
    toml.write_text('num_blocks = 7\nhttp_port = "off"\n')
    loaded = load("--num-blocks", "auto", file=toml)
    assert loaded.config.num_blocks is None
    assert loaded.config.http_port is None


def test_an_empty_variable_is_as_if_unset() -> None:
    assert load(environ={"PAGEDD_MODEL": ""}).config.model == DaemonConfig().model


def test_every_variable_that_the_sources_read_may_be_set() -> None:
    root = Path(__file__).parents[2]
    sources = [*(root / "engine").rglob("*.py"), *(root / "kernels").rglob("*.py"), root / "tests" / "conftest.py"]
    read = {name for path in sources for name in re.findall(r'"(PAGEDD_\w+)"', path.read_text(encoding="utf-8"))}
    assert read >= {"PAGEDD_KERNELS", "PAGEDD_TEST_MODEL"}
    assert load(environ=dict.fromkeys(read, "x") | {"HOME": "/root"}).config == DaemonConfig()


def test_the_engine_gets_every_setting_that_has_its_name() -> None:
    config = load("--block-size", "8", "--num-threads", "2", "--no-enable-prefix-caching").config
    engine = config.to_engine_config("/w.gguf")
    assert engine == EngineConfig(model="/w.gguf", block_size=8, num_threads=2, enable_prefix_caching=False)


def test_a_configuration_cannot_be_changed() -> None:
    config = DaemonConfig()
    with pytest.raises(FrozenInstanceError):
        config.block_size = 8  # type: ignore[misc]


def test_every_default_is_in_its_own_range_and_every_setting_is_explained() -> None:
    for item in settings_of(DaemonConfig):
        if item.default is not None:
            assert item.check(item.default, "default") == item.default
        assert item.help.endswith(".")


def test_the_table_has_a_row_for_every_flag() -> None:
    rows = [row for table in ("", "quota", "cost") for row in markdown_table(DaemonConfig, table).splitlines()]
    assert len(rows) == 3 * 2 + len(settings_of(DaemonConfig))
    assert "| `--block-size` | 16 | 8, 16 or 32 | Tokens in a KV block. |" in rows


# Tables


def test_a_table_s_settings_have_flags_and_variables_with_the_table_s_name_first(toml: Path) -> None:
    toml.write_text("[quota]\nmax_requests = 4\nkv_share = 0.5\n[cost]\nwatts = 65\n")
    loaded = load("--quota-kv-share", "0.25", environ={"PAGEDD_COST_PUE": "1.2"}, file=toml)
    assert (loaded.config.quota.max_requests, loaded.config.quota.kv_share) == (4, 0.25)
    assert (loaded.config.cost.watts, loaded.config.cost.pue) == (65.0, 1.2)
    assert loaded.origins["quota_max_requests"] == str(toml)
    assert loaded.origins["quota_kv_share"] == "--quota-kv-share"
    assert loaded.origins["cost_pue"] == "PAGEDD_COST_PUE"


def test_one_caller_s_table_has_what_it_leaves_out_from_everybody_s_wherever_that_is_from(toml: Path) -> None:
    toml.write_text("[quota]\nmax_requests = 4\n[quota.user.0]\nweight = 2\n[quota.key.laptop]\nmax_requests = 1\n")
    loaded = load("--quota-tokens-per-minute", "600", file=toml)
    quota = loaded.config.quota
    assert quota.by_uid() == {0: QuotaLimits(max_requests=4, tokens_per_minute=600, weight=2.0)}
    assert quota.key == {"laptop": QuotaLimits(max_requests=1, tokens_per_minute=600)}
    lines = list(loaded.explain())
    assert f"quota.max_requests = 4  # {toml}" in lines
    assert f"quota.user.0.weight = 2.0  # {toml}" in lines
    assert "quota.user.0.tokens_per_minute = 600  # --quota-tokens-per-minute" in lines


def test_a_user_may_be_named_or_numbered_but_not_both(toml: Path) -> None:
    toml.write_text("[quota.user.root]\nmax_requests = 2\n")
    assert load(file=toml).config.quota.by_uid() == {0: QuotaLimits(max_requests=2)}
    toml.write_text("[quota.user.root]\n[quota.user.0]\n")
    assert "user 0 has a table already" in refusal(file=toml).message
    toml.write_text("[quota.user.nobody-here]\n")
    assert refusal(file=toml).message.startswith("quota.user.nobody-here: there is no user of that name")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("quota_max_requests = 4", "unknown_setting", "key quota_max_requests"),
        ("[quota]\nmax_request = 4", "unknown_setting", "did you mean quota.max_requests?"),
        ("[quotas]\nmax_requests = 4", "unknown_setting", "did you mean quota?"),
        ("[quota.users.0]\n", "unknown_setting", "did you mean quota.user?"),
        ("[quota.user.0]\nwieght = 1", "unknown_setting", "did you mean quota.user.0.weight?"),
        ("[quota.user.0.more]\nweight = 1", "unknown_setting", "key quota.user.0.more"),
        ("quota = 3", "invalid_setting", "quota = 3"),
        ("[quota]\nuser = 3", "invalid_setting", "it is a table, [quota.user]"),
        ("[quota.user]\nana = 3", "invalid_setting", "it is a table, [quota.user.ana]"),
        ("[quota]\nkv_share = 0", "invalid_setting", "quota_kv_share = 0.0"),
        ("[quota.user.0]\nkv_share = 2", "invalid_setting", "quota.user.0.kv_share = 2.0"),
    ],
)
def test_what_a_table_does_not_know_is_refused_like_everything_else(
    toml: Path, text: str, code: str, said: str
) -> None:
    toml.write_text(text)
    error = refusal(file=toml)
    assert error.code == code
    assert said in error.message


@settings(deadline=None)
@given(st.sampled_from(settings_of(DaemonConfig)), st.text(max_size=8))
def test_any_text_gives_a_value_in_range_or_a_coded_refusal(item: Setting, text: str) -> None:
    try:
        value = item.parse(text, "flag")
    except PageddError as error:
        if error.code != "invalid_setting":
            raise
    else:
        assert value is None or item.check(value, "flag") == value
