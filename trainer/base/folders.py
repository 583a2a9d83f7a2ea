"""Where the package is, and conf/ and tasks/."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel, conf/ and tasks/ are inside the package; in a checkout they are beside it.
HOME = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
CONF = HOME / "conf"
