"""Configuration: Hydra composes it, this package checks it and returns a dataclass. No torch."""

import sys

if not hasattr(sys.modules["trainer"], "ConfigError"):  # of coqui-tts-trainer, which imports this
    line = "trainer/__init__.py is missing, or overwritten by another package"
    raise ImportError(f"{line}: run `lockstep`, which says by which, and what to do")
