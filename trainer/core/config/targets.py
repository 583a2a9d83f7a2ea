"""Targets: import and call what a config names. The only module that does; secrets are refused."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from trainer.base.errors import ConfigError, one_line
from trainer.core.config.typed import convert, suggest

_SECRETS = {"token", "password", "passwd", "passphrase", "secret", "apikey", "accesskey"}
_PHRASES = {("api", "key"), ("access", "key"), ("private", "key")}
# pad_token: "<pad>" is a vocabulary entry, so "token" after one of these is no secret
_MARKS = {"pad", "bos", "eos", "unk", "sep", "cls", "mask"}
# Each takes time that grows with the length of a text. A port is no password, and keys of clouds
# may have a slash.
_LOGIN = re.compile(r"://[^/\s@:]{0,200}:(?!\d{0,9}/)[^\s@]{1,2000}@")
_QUERY_PART = re.compile(r"([?&])([\w%.-]+)=([^&#\s'\"]+)")  # of an address
_PAIR = re.compile(r"""(?<![\w.-])([\w.-]+)['"]?\s{0,9}:\s*([^,}]*)""")
_SIGNED = re.compile(r"(^sig|signature|token)$", re.IGNORECASE)  # no sigma, signal or design
_MASKED_TEXT = "***"
_LEAST_OF_A_SECRET = 6  # characters of a secret that is looked for alone in a text


def check_no_secret(value: Any, key: str = "") -> None:
    """Raise ConfigError if a key in a nested value names a secret, or an address has one.

    The message has no values.
    """
    if isinstance(value, Mapping):
        for name, below in value.items():
            check_no_secret(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, below in enumerate(value):
            check_no_secret(below, f"{key}.{index}")
    elif _is_secret(key, str(value)):
        raise _refuse(key, "is the name of a secret")
    elif _mask_address(str(value)) != str(value):
        raise _refuse(key, "is an address with a password or a signature")


def _refuse(key: str, why: str) -> ConfigError:
    name = re.sub(r"\W", "_", key.rpartition(".")[2]).upper()
    return ConfigError(f"""{key}: {why}, and a configuration is written to files;
        read it inside the task, as os.environ["{name}"]""")


def check_override(text: str) -> None:
    """Raise ConfigError for a secret in a raw override, before another error can print it."""
    key, _, value = text.partition("=")
    key = key.lstrip("+~-")
    check_no_secret(value, key)
    for name, below in _pairs_in(value):
        check_no_secret(below, f"{key}.{name}")


def _pairs_in(value: str) -> list[tuple[str, str]]:
    """Return names and values of a mapping as an override has it, `{a: 1, b: 2}`."""
    return _PAIR.findall(value) if "{" in value else []


def masked(text: str, words: Iterable[str] = ()) -> str:
    """Return a text, such as an error, without the secrets of addresses and of `words`.

    Those are the arguments of the command line, which an error may quote before they are checked.
    """
    for word in words:
        key, _, value = word.partition("=")
        secrets = [value] if _is_secret(key.lstrip("+~-"), value) else []
        secrets += [below for name, below in _pairs_in(value) if _is_secret(name, below)]
        for secret in filter(None, (each.strip(" '\"") for each in secrets)):
            text = re.sub(rf"([=:]\s*['\"]?){re.escape(secret)}", rf"\1{_MASKED_TEXT}", text)
            if len(secret) >= _LEAST_OF_A_SECRET:
                text = text.replace(secret, _MASKED_TEXT)
    return _mask_address(text)


def _mask_address(text: str) -> str:
    def mask(part: re.Match[str]) -> str:
        name = unquote(part[2])
        is_secret = _SIGNED.search(name) or _is_secret(name, part[3])
        return f"{part[1]}{part[2]}={_MASKED_TEXT}" if is_secret else part[0]

    return _QUERY_PART.sub(mask, _LOGIN.sub(f"://{_MASKED_TEXT}@", text))


def _is_secret(key: str, value: str) -> bool:
    """Return True if a whole word of the key names a secret; num_tokens and tokenizer do not.

    A number is a secret only if that word is the last one, so token_dim=64 is not.
    """
    text = value.strip(" '\"").lower()
    if text in ("", "null", "none", "true", "false"):
        return False
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", key)]
    named = [
        before not in _MARKS if word == "token" else word in _SECRETS or (before, word) in _PHRASES
        for before, word in zip(["", *words], words, strict=False)
    ]
    is_number = all(re.fullmatch(r"[-+.\de]+", part.strip()) for part in text.split(","))
    return any(named) and (named[-1] or not is_number)


ALLOWED_PACKAGES = ("torch.optim", "torch.nn", "trainer")
Spec = Mapping[str, Any]  # a `_target_` and its arguments

# of packages that tasks import
EXTRAS = {
    **dict.fromkeys(("datasets", "gguf", "huggingface_hub", "peft", "tokenizers"), "hf"),
    "transformers": "hf",
    "torchmetrics": "metrics",
    "pyarrow": "parquet",
}


def resolve(name: str, key: str, packages: Sequence[str] = ()) -> Any:
    """Import and return the object that a config names, such as `torch.optim.SGD`.

    Raises ConfigError unless both the name and the module that defines the object are under an
    allowed package.
    """
    allowed = check_name(name, key, packages)
    home, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        extra = EXTRAS.get(missing.partition(".")[0])
        how = f" with the extra {extra}: pip install 'lockstep-trainer[{extra}]'" if extra else ""
        advice = f", which {home} imports; install it{how}"
        if f"{home}.".startswith(f"{missing}."):
            advice = "; start in the folder that contains it, or set PYTHONPATH"
        raise ConfigError(f"{key}={name}: no module named {missing}{advice}") from None
    except ImportError as error:
        if "no known parent package" not in str(error):
            raise
        raise ConfigError(f"""{key}={name}:
            must be named with its package, since it imports from it;
            start in the folder above, with {key}=<folder>.{name}""") from error
    if inspect.ismodule(getattr(module, attribute, None)) or _is_file_of(module, name):
        raise ConfigError(f"{key}={name}: is a module: must be a class in it, so add its name")
    if not hasattr(module, attribute):
        near = suggest(attribute, [each for each in vars(module) if not each.startswith("_")])
        raise ConfigError(f"{key}={name}: {home} has no {attribute}{near}")
    target = getattr(module, attribute)
    origin = getattr(target, "__module__", None) or ""
    if not callable(target) or not lies_under(origin, allowed):
        raise ConfigError(f"""{key}={name}:
            must be a class or function defined under {", ".join(allowed)}""")
    return target


def _is_file_of(package: types.ModuleType, name: str) -> bool:
    """Return True for the name of a module of a package that may not be imported yet."""
    attribute = name.rpartition(".")[2]
    if hasattr(package, attribute) or not hasattr(package, "__path__"):
        return False
    return importlib.util.find_spec(name) is not None


def check_name(name: str, key: str, packages: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the packages that a target may come from, without importing anything.

    Raises ConfigError if the name is not under one of them.
    """
    allowed = tuple(dict.fromkeys((*ALLOWED_PACKAGES, *packages)))
    parts = name.split(".")
    problem = ""
    if not lies_under(name.rpartition(".")[0], allowed):
        problem = f"be under {', '.join(allowed)}; add yours with task.packages=[<package>]"
    elif parts[0] in sys.stdlib_module_names:
        problem = f"not be in Python's standard library ({parts[0]}); write a class or function"
    elif not all(part.isidentifier() for part in parts):
        problem = "be <module>.<name>, such as tasks.spiral.Spiral"
    if problem:
        raise ConfigError(f"{key}={name}: must {problem}")
    return allowed


def lies_under(name: str, packages: Iterable[str]) -> bool:
    """Return True if a dotted name is one of the packages or inside one of them."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def check_target(spec: Spec, key: str, packages: Sequence[str], kind: type | None = None) -> Any:
    """Return the object that `spec["_target_"]` names, after a check of its arguments.

    It must be a subclass of `kind`, or, if `kind` is None, take `num_steps` as its first argument,
    as schedules do. Otherwise a config could call any function of an allowed package. Raises
    ConfigError also for arguments that are missing, unknown or of a wrong type.
    """
    name = spec["_target_"]
    target = resolve(name, f"{key}._target_", packages)
    signature = _signature_of(target)
    if kind is None and next(iter(signature.parameters), None) != "num_steps":
        raise ConfigError(f"""{key}._target_={name}:
            must take num_steps first, as in def mine(num_steps, warmup_steps=0)""")
    if kind is not None and not (isinstance(target, type) and issubclass(target, kind)):
        raise ConfigError(f"""{key}._target_={name}:
            must be a subclass of {kind.__module__}.{kind.__name__}""")
    if target is kind or inspect.isabstract(target):
        raise ConfigError(f"""{key}._target_={name}:
            must be a class that can be built, not an abstract one; give one of its subclasses""")
    arguments = {argument: value for argument, value in spec.items() if argument != "_target_"}
    for argument, value in arguments.items():
        if argument in signature.parameters:
            _check_argument(signature.parameters[argument], value, f"{key}.{argument}")
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        line = f"{key} ({name}): {error}"
        if unknown := [a for a in arguments if a not in signature.parameters]:
            accepted = [name for name in list(signature.parameters)[1:] if name.isidentifier()]
            full_name = f"{key}.{unknown[0]}"
            near = suggest(unknown[0], accepted, f"{key}.")
            if not near or near.endswith(f" {full_name}"):  # as of optim.lr, which hints know
                near = f": must be {', '.join(accepted)}; leave it out with ~{full_name}"
            line = f"{full_name} is not an argument of {name}{near}"
        raise ConfigError(line) from None
    return target


def _signature_of(target: Any) -> inspect.Signature:
    """Return the signature, with annotations as objects where their names can be resolved."""
    for is_resolved in (True, False):
        with suppress(Exception):  # a name may exist for type checkers only
            return inspect.signature(target, eval_str=is_resolved)
    return inspect.Signature()  # some builtins have none


def _check_argument(parameter: inspect.Parameter, value: Any, key: str) -> None:
    """Check a value against the parameter's annotation or default, if that is a bool or numbers."""
    default = parameter.default
    kind: Any = {bool: bool, int: float, float: float}.get(type(default), Any)
    if _is_plain(parameter.annotation):
        kind = parameter.annotation
    elif isinstance(default, tuple) and {type(part) for part in default} == {float}:
        kind = list[float]
    convert(kind, value, key)
    if isinstance(default, tuple) and isinstance(value, list) and len(value) != len(default):
        raise ConfigError(f"{key}={value}: must be {len(default)} numbers")


def _is_plain(kind: Any) -> bool:
    """Return True for bool, int and float, also with limits, optional or in a list."""
    origin = typing.get_origin(kind)
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if origin is typing.Annotated:
        return isinstance(parts[1], Mapping) and _is_plain(parts[0])  # limit(...)
    if origin in (list, typing.Union, types.UnionType):
        return len(parts) == 1 and _is_plain(parts[0])
    return kind in (bool, int, float)


def call_target(
    spec: Spec, key: str, packages: Sequence[str], kind: type | None, first: Any, **extra: Any
) -> Any:
    """Call `spec["_target_"]` with `first`, its arguments, and those in `extra` that it accepts.

    Raises ConfigError for wrong arguments, and for any exception of the call.
    """
    target = check_target(spec, key, packages, kind)
    parameters = inspect.signature(target).parameters
    arguments = {name: value for name, value in extra.items() if name in parameters} | {**spec}
    del arguments["_target_"]
    try:
        return target(first, **arguments)
    except Exception as error:  # the constructor's own check of its arguments
        raise ConfigError(f"{key} ({spec['_target_']}): {one_line(error)}") from None
