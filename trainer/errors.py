"""The two errors that are the user's to mend: each is one line that names the key, what was given, what is allowed."""


class ConfigError(ValueError):
    """A setting, or what it points at, cannot work. `python -m trainer` prints the line and exits with code 2."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be read, or does not belong to this run."""
