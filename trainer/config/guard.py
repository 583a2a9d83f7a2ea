"""What a configuration may not bring along: secrets, since it is written to config.yaml, TensorBoard and every
checkpoint, and interpolations that would fetch them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainer.errors import ConfigError

RESOLVERS = (
    "oc.create",
    "oc.decode",
    "oc.select",
    "oc.dict.keys",
    "oc.dict.values",
)  # they see the config alone
_WORDS = {"token", "password", "passwd", "passphrase", "secret", "apikey", "accesskey"}
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key")}
_MARKS = {
    "pad",
    "bos",
    "eos",
    "unk",
    "sep",
    "cls",
    "mask",
}  # pad_token: "<pad>" is an entry of a vocabulary


def check_no_secret(value: Any, key: str = "") -> None:
    """Raises ConfigError, without the value, for a key anywhere in a tree that names a secret."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            check_no_secret(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, below in enumerate(value):
            check_no_secret(below, f"{key}.{number}")
    elif _is_secret(key, str(value)):
        name = re.sub(r"\W", "_", key.rpartition(".")[2]).upper()
        why = "is the name of a secret, and a configuration is written to files"
        raise ConfigError(f'{key}: {why}; read it inside the task, as os.environ["{name}"]')


def check_override(text: str) -> None:
    """The same for an override as it was typed, before anything can fail and print it."""
    key, _, value = text.partition("=")
    key = key.lstrip("+~-")
    check_no_secret(value, key)
    for name, below in (
        re.findall(r"""([\w.-]+)['"]?\s*:\s*([^,}]*)""", value) if "{" in value else ()
    ):
        check_no_secret(below, f"{key}.{name}")


def _is_secret(key: str, value: str) -> bool:
    """Whole words: num_tokens and tokenizer are none. A number is one only where the word stands last (token_dim)."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", key)]
    pairs = list(zip(["", *words], words, strict=False))
    found = [
        before not in _MARKS if word == "token" else word in _WORDS or (before, word) in _PAIRS
        for before, word in pairs
    ]
    text = value.strip(" '\"").lower()
    if not any(found) or text in ("", "null", "none", "true", "false"):
        return False
    return found[-1] or not all(
        re.fullmatch(r"[-+.\de]+", part.strip()) for part in text.split(",")
    )


@contextmanager
def pure_resolvers(*also: str) -> Iterator[None]:
    """Refuse resolvers that look at the machine: what `${oc.env:...}` reads would be written into config.yaml."""
    from omegaconf import OmegaConf
    from omegaconf.basecontainer import BaseContainer

    kept, refused = dict(BaseContainer._resolvers), list[str]()
    for name in set(kept) - {*RESOLVERS, *also}:
        OmegaConf.register_new_resolver(
            name, lambda *_, name=name: refused.append(name), replace=True
        )
    try:
        yield
    finally:
        BaseContainer._resolvers = kept
        if refused:
            allowed = f"must be one of {', '.join(RESOLVERS)}, or a plain ${{key}}"
            raise ConfigError(
                f"${{{refused[0]}:...}}: {allowed}; let the task read what it needs"
            ) from None
