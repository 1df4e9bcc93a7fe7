"""Joules of the box: what counters tell, else what was stated, else nothing."""

from pagedd.daemon.energy import EnergyMeter


def test_counters_are_added_up_from_their_first_reading() -> None:
    meter = EnergyMeter(stated_watts=100.0, now_s=0.0)
    assert meter.advance({"gpu_energy_joules": 5000.0, "cpu_energy_joules": 10.0}, 1.0) == 0.0
    assert meter.advance({"gpu_energy_joules": 5300.0, "cpu_energy_joules": 40.0}, 2.0) == 330.0
    assert meter.source == "gpu+cpu"


def test_what_a_counter_missed_is_in_its_next_reading() -> None:
    meter = EnergyMeter(stated_watts=100.0, now_s=0.0)
    meter.advance({"cpu_energy_joules": 10.0}, 1.0)
    assert meter.advance({"cpu_energy_joules": None}, 2.0) == 0.0
    assert meter.advance({"cpu_energy_joules": 60.0}, 3.0) == 50.0
    assert meter.source == "cpu"


def test_a_counter_that_begins_anew_takes_nothing_away() -> None:
    meter = EnergyMeter(stated_watts=None, now_s=0.0)
    meter.advance({"gpu_energy_joules": 5000.0}, 1.0)
    assert meter.advance({"gpu_energy_joules": 3.0}, 2.0) == 0.0
    assert meter.advance({"gpu_energy_joules": 10.0}, 3.0) == 7.0


def test_without_counters_the_stated_wattage_holds() -> None:
    meter = EnergyMeter(stated_watts=100.0, now_s=0.0)
    assert meter.advance({}, 2.0) == 200.0
    assert meter.source == "stated"


def test_a_card_that_stays_away_gives_way_to_the_stated_wattage_and_is_not_counted_twice() -> None:
    meter = EnergyMeter(stated_watts=100.0, now_s=0.0)
    meter.advance({"gpu_energy_joules": 1000.0}, 1.0)
    assert meter.advance({}, 10.0) == 0.0
    assert meter.advance({}, 12.0) == 200.0
    assert meter.source == "stated"
    assert meter.advance({"gpu_energy_joules": 9000.0}, 13.0) == 0.0


def test_nothing_measured_and_nothing_stated_has_no_source() -> None:
    meter = EnergyMeter(stated_watts=None, now_s=0.0)
    assert (meter.advance({}, 5.0), meter.source) == (0.0, "")
