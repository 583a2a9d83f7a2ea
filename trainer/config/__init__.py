"""Configuration: Hydra composes it, this package checks it and returns a dataclass. No torch."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel, conf/ and tasks/ are inside the package; in a checkout they are beside it.
HOME = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
CONF = HOME / "conf"
