"""The real daemon with the scripted engine of `fake_engine.py`; the text side is the real model's."""

import sys
from pathlib import Path

from pagedd.daemon import cli, engine_lives

engine_lives.ENGINE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("fake_engine.py")))

if __name__ == "__main__":
    sys.exit(cli.main())
