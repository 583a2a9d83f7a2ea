"""Configuration: composed by Hydra, checked here, a plain dataclass everywhere else. No torch."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# A wheel has conf/ and tasks/ inside the package, a checkout beside it; never the working folder.
HOME = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
CONF = HOME / "conf"
