"""A command line that does not know a word names the nearest one."""

import pytest

from pagedd.client import pagectl


@pytest.mark.parametrize(
    ("given", "usage", "said"),
    [
        (["genrate", "x"], "pagectl ", "pagectl: error: there is no command genrate; did you mean generate?"),
        (
            ["--runtimdir", "x", "ps"],
            "pagectl ",
            "pagectl: error: there is no flag --runtimdir; did you mean --runtime-dir",
        ),
        (["frobnicate"], "pagectl ", "pagectl: error: there is no command frobnicate; there are generate, chat, ps"),
        (
            ["generate", "--temprature=3", "x"],
            "pagectl generate ",
            "pagectl generate: error: there is no flag --temprature; did you mean --temperature?",
        ),
        (
            ["load", "model", "--zzz"],
            "pagectl load ",
            "pagectl load: error: there is no flag --zzz; there are -h, --help, --name",
        ),
        (
            ["generate", "once", "upon", "a"],
            "pagectl generate ",
            "pagectl generate: error: too many arguments: upon a; a text of several words is one in quotes",
        ),
        (
            ["completion", "fsh"],
            "pagectl completion ",
            "pagectl completion: error: there is no shell fsh; did you mean fish?",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_and_the_usage_that_it_belongs_to(
    given: list[str], usage: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        pagectl.main(given)
    assert ended.value.code == 2
    heard = capsys.readouterr().err
    assert heard.startswith(f"usage: {usage}")
    assert said in heard
