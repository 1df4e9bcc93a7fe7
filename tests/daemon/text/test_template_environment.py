"""What chat templates may call, as transformers defines it."""

from datetime import datetime
from typing import Any

import pytest

from pagedd.daemon.text.template_environment import compile_template, render_bounded


def render(source: str, **variables: Any) -> str:
    return render_bounded(compile_template(source), variables)


def test_blocks_leave_no_lines_behind() -> None:
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_loops_can_be_left_and_continued() -> None:
    source = (
        "{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(source) == "13"


def test_tojson_escapes_neither_html_nor_letters() -> None:
    value = {"b": "<世>&'", "a": 1}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<世>&\'", "a": 1}'
    assert render("{{ v | tojson(indent=1, sort_keys=true) }}", v={"b": 1, "a": 2}) == '{\n "a": 2,\n "b": 1\n}'


def test_a_generation_block_is_its_content() -> None:
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_namespaces_carry_a_value_out_of_a_loop() -> None:
    assert render("{% set n = namespace(x=0) %}{% for i in [1,2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}") == "3"


def test_range_is_limited() -> None:
    with pytest.raises(OverflowError):
        render("{% for i in range(10000000) %}{% endfor %}")
