"""Refusal of secrets in settings, which are written to config.yaml and every checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError

_WORDS = {"token", "password", "passwd", "passphrase", "secret", "apikey", "accesskey"}
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key")}
# pad_token: "<pad>" is a vocabulary entry, so "token" after one of these is no secret
_MARKS = {"pad", "bos", "eos", "unk", "sep", "cls", "mask"}
_IN_ADDRESS = re.compile(
    r"://[^/\s@]*:[^/\s@]+@|[?&]([\w-]*signature|sig|[\w-]*token)=", re.IGNORECASE
)


def check_no_secret(value: Any, key: str = "") -> None:
    """Raise ConfigError if a key in a nested value names a secret, or an address has one.

    The message has no values.
    """
    if isinstance(value, Mapping):
        for name, below in value.items():
            check_no_secret(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, below in enumerate(value):
            check_no_secret(below, f"{key}.{number}")
    elif _is_secret(key, str(value)):
        raise _refuse(key, "is the name of a secret")
    elif _IN_ADDRESS.search(str(value)):
        raise _refuse(key, "is an address with a password or a signature")


def _refuse(key: str, why: str) -> ConfigError:
    name = re.sub(r"\W", "_", key.rpartition(".")[2]).upper()
    written = "and a configuration is written to files"
    return ConfigError(f'{key}: {why}, {written}; read it inside the task, as os.environ["{name}"]')


def check_override(text: str) -> None:
    """Raise ConfigError for a secret in a raw override, before another error can print it."""
    key, _, value = text.partition("=")
    key = key.lstrip("+~-")
    check_no_secret(value, key)
    if "{" in value:
        for name, below in re.findall(r"""([\w.-]+)['"]?\s*:\s*([^,}]*)""", value):
            check_no_secret(below, f"{key}.{name}")


def _is_secret(key: str, value: str) -> bool:
    """Return True if a whole word of the key names a secret; num_tokens and tokenizer do not.

    A number is a secret only if that word is the last one, so token_dim=64 is not.
    """
    text = value.strip(" '\"").lower()
    if text in ("", "null", "none", "true", "false"):
        return False
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", key)]
    named = [
        before not in _MARKS if word == "token" else word in _WORDS or (before, word) in _PAIRS
        for before, word in zip(["", *words], words, strict=False)
    ]
    is_number = all(re.fullmatch(r"[-+.\de]+", part.strip()) for part in text.split(","))
    return any(named) and (named[-1] or not is_number)
