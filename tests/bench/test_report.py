"""Reports: aligned for people, one last line of JSON for programs."""

import json

import pytest

from pagedd.bench.report import print_report, table


def test_columns_are_aligned_and_numbers_stand_to_the_right():
    assert table([{"load": "single", "tokens/s": 7.125}, {"load": "prefix", "tokens/s": 1234.5}]).splitlines() == [
        "load    tokens/s",
        "------  --------",
        "single     7.125",
        "prefix      1234",
    ]


def test_what_is_not_available_is_not_zero():
    assert table([{"ttft_ms": None}]).splitlines()[-1].strip() == "n/a"


def test_the_last_line_is_json_with_figures_machine_and_versions(capsys: pytest.CaptureFixture[str]):
    print_report("paging", [{"block size": 8}], {"fragmentation": 0.01})
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["benchmark"] == "paging"
    assert last["fragmentation"] == 0.01
    assert last["machine"]["num_cpus"] >= 1
    assert last["versions"]["torch"]
