"""The process that looks at device and model for `config_check.py`: one JSON object in, one out.

python -P -m pagedd.daemon.config_check_process < QUESTION
"""

import sys

import msgspec

from pagedd.daemon.config_check import Question, Verdict
from pagedd.engine.errors import EngineError
from pagedd.engine.model.load import check_loadable, usable_device


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    verdict = Verdict()
    try:
        if question.has_model:
            check_loadable(question.config)
        else:
            usable_device(question.config.device)
    except EngineError as error:
        verdict = Verdict(code=error.code, message=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(verdict))


if __name__ == "__main__":
    main()
