"""Configuration: Hydra composes it, this package checks it and returns a dataclass. No torch."""

import sys
from pathlib import Path

if not hasattr(sys.modules["trainer"], "ConfigError"):  # of coqui-tts-trainer, which imports this
    line = "trainer/__init__.py is missing, or overwritten by another package"
    raise ImportError(f"{line}: run `lockstep`, which says by which, and what to do")

PACKAGE = Path(__file__).resolve().parents[2]
# In a wheel, conf/ and tasks/ are inside the package; in a checkout they are beside it.
HOME = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
CONF = HOME / "conf"
