"""Measurements, run as `python -P -m pagedd.bench.NAME`. Each prints a table for people and, last, one line of JSON."""
