"""A text of pagedd's own, prose, code, tables and speech, on which a cache's quality is measured at load."""

from importlib.resources import files


def sample_text() -> str:
    """About 900 tokens."""
    return files("pagedd.daemon.text").joinpath("sample.txt").read_text(encoding="utf-8")
