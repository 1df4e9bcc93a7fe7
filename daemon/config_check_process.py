"""The process that looks at device and model for `config_check.py`: one JSON object in, one out.

python -P -m pagedd.daemon.config_check_process --parent PID < QUESTION
"""

import argparse
import sys
from pathlib import Path

import msgspec

from pagedd.daemon.config_check import Question, Verdict
from pagedd.daemon.files import reason
from pagedd.daemon.parent import die_with_parent
from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.foresee import foresee
from pagedd.engine.kv.disk_tier import refuse_unless_private


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by pagedd; people use `pagedd check-config`.")
    parser.add_argument("--parent", required=True, type=int)
    die_with_parent(parser.parse_args().parent)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    try:
        chosen = foresee(question.config, has_model=question.has_model)
        verdict = Verdict(chosen=chosen, notes=_notes(question.config))
    except EngineError as error:
        verdict = Verdict(code=error.code, message=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(verdict))


def _notes(settings: EngineConfig) -> list[str]:
    """What serves, but not as asked."""
    if not settings.kv_disk_gib or settings.kv_disk_directory is None:
        return []
    directory = Path(settings.kv_disk_directory)
    try:
        refuse_unless_private(directory)
    except FileNotFoundError:
        return []  # it will be made
    except OSError as error:
        return [f"kv_disk_directory will not be used, and the daemon serves without that tier: {reason(error)}"]
    return []


if __name__ == "__main__":
    main()
