"""Candidates: what the last word of a command line can become. No torch and no Hydra: it is quick.

Names, choices and groups come from conf/schema.json, conf/ and the user's config folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import CONF
from trainer.config.folder import read_settings
from trainer.config.options import find_options
from trainer.config.plain_files import read_yaml
from trainer.distributed.devices import list_devices
from trainer.distributed.entry import VERBS
from trainer.errors import ConfigError

FLAGS = ("--help", "--json", "--config-dir")
# The flags and words of each verb, beside the settings.
OWN = {
    "audit": ("--long",),
    "checkpoints": ("--export",),
    "compare": ("out=",),
    "completion": ("bash", "fish", "zsh"),
    "evaluate": ("split=",),
    "export": ("format=", "out=", "split="),
    "plan": ("ranks=", "local_ranks=", "device=", "devices=", "disk_gb_s="),
    "predict": ("split=", "out="),
    "prove": ("--resume", "steps=", "dtype=", "limit=", "kill=", "out="),
    "replay": ("step=",),
    "report": ("out=",),
    "shards": (
        "write",
        "index",
        "check",
        "to=",
        "split=",
        "shard_mb=",
        "tokens=",
        "dtype=",
        "header=",
    ),
    "train": ("-m", "--cfg"),
    "verify": ("--bits", "--resume", "layouts=", "steps=", "kills=", "seed="),
}
OF_RUNS = ("audit", "checkpoints", "compare", "evaluate", "export", "predict", "replay", "report")
WITHOUT_SETTINGS = ("audit", "checkpoints", "compare", "completion", "new", "prove", "report")
FORMATS = ("onnx", "safetensors", "tensorrt")
SPLITS = ("eval", "test", "train")
CONFIG_DIR = ("--config-dir", "-cd")


@dataclass(frozen=True)
class CommandLine:
    """A verb, and the words between it and the one that is completed; "" before a verb."""

    verb: str
    words: Sequence[str]

    @property
    def config_dirs(self) -> list[str]:
        """Folders given, or those of the settings of the working directory."""
        pairs = zip(self.words, self.words[1:], strict=False)
        given = [folder for flag, folder in pairs if flag in CONFIG_DIR]
        given += [w.partition("=")[2] for w in self.words if w.startswith("--config-dir=")]
        if not given:
            with suppress(ConfigError, OSError):
                return read_settings(Path()).config_dirs
        return given

    @property
    def choices(self) -> dict[str, str]:
        """Words given as key=value."""
        pairs = [word.partition("=") for word in self.words]
        return {key: value for key, equals, value in pairs if equals}


def complete(words: Sequence[str]) -> list[str]:
    """Return what the last of `words` can become, "" for a new one; nothing where files are meant.

    A candidate that ends with `=` or `.` is not a whole word yet.
    """
    *before, word = words
    if before[-1:] == ["-m"] and "trainer".startswith(word[:7]):
        modules = ["trainer", *(f"trainer.{verb}" for verb in VERBS if verb != "train")]
        return [name for name in modules if name.startswith(word)]
    line = _read(before)
    if line is None or before[-1] in CONFIG_DIR:
        return []
    key, equals, value = word.partition("=")
    if word.startswith("-"):
        flags = [flag for flag in OWN.get(line.verb or "train", ()) if flag.startswith("-")]
        shared = FLAGS[:1] + FLAGS[2:] if line.verb in ("", "train") else FLAGS
        return [flag for flag in (*flags, *shared) if flag.startswith(word)]
    if not equals:
        return sorted(_complete_name(line, word))
    *listed, last = value.split(",")  # in a sweep
    head = "=".join([key, ",".join([*listed, ""])])
    return [f"{head}{each}" for each in _list_values(line, key) if each.startswith(last)]


def _read(words: Sequence[str]) -> CommandLine | None:
    """Return the command line of `lockstep`, or of `-m trainer`; None without one."""
    for at, word in enumerate(words):
        if Path(word).name == "lockstep":
            verb = words[at + 1] if words[at + 1 :] else ""
            return CommandLine(verb, words[at + 2 :]) if verb in VERBS else _train(words[at + 1 :])
        if words[at - 1 : at] == ["-m"] and word.partition(".")[0] == "trainer":
            verb = word.partition(".")[2] or "train"
            return CommandLine(verb, words[at + 1 :])
    return None


def _train(words: Sequence[str]) -> CommandLine:
    return CommandLine("train" if words else "", words)


def _complete_name(line: CommandLine, word: str) -> set[str]:
    """Return verbs, words and settings that begin with a word; settings as far as the next dot."""
    verb = line.verb
    has_run = any("=" not in each and each[:1] != "-" for each in line.words)
    if verb in OF_RUNS and not has_run:
        return set()  # a run directory comes first
    own = [each for each in OWN.get(verb, ()) if each[:1] != "-"]
    found = {each for each in (*own, *VERBS * (verb == "")) if each.startswith(word)}
    if verb in WITHOUT_SETTINGS:
        return found
    sign = word[:1] if word[:1] in ("+", "~") else ""
    begun = word.removeprefix(sign)
    for name in _list_names(line):
        if name.startswith(begun):
            block, dot, _ = name[len(begun) :].partition(".")
            found.add(f"{sign}{begun}{block}{dot}" if dot else f"{sign}{name}=")
    return found


def _list_names(line: CommandLine) -> Iterator[str]:
    """Yield all groups and settings."""
    options = find_options(line.config_dirs)
    yield from options
    yield from _read_schema()
    for group in ("optim", "schedule"):
        yield from (f"{group}.{name}" for name in _read_names(options[group], line, group))
    for group in options:
        if group == "task" or not (CONF / group).is_dir():
            yield from (f"task.options.{n}" for n in _read_names(options[group], line, group))


def _read_names(files: Mapping[str, Sequence[Path]], line: CommandLine, group: str) -> set[str]:
    """Return the settings in the file that is chosen of a group, or else in all of its files."""
    chosen = files.get(line.choices.get(group, ""))
    names: set[str] = set()
    for path in chosen or [path for paths in files.values() for path in paths]:
        with suppress(OSError, ValueError):
            content = read_yaml(path)
            if group == "task":
                content = content["task"]["options"]
            names |= {str(name) for name in content if str(name)[:1] != "_" and name != "defaults"}
    return names


def _list_values(line: CommandLine, key: str) -> list[str]:
    own = {"format": FORMATS, "split": SPLITS}
    if f"{key}=" in OWN.get(line.verb, ()):
        return list_devices() if key == "device" else list(own.get(key, ()))
    options = find_options(line.config_dirs)
    key = key.lstrip("+")
    if key in options or key == "strategy.name":
        return sorted(options[key.partition(".")[0]])
    return _read_schema().get(key, [])


def _read_schema() -> dict[str, list[str]]:
    """Return each setting with its choices; those without are numbers, names or paths."""
    found: dict[str, list[str]] = {}

    def walk(name: str, part: Mapping[str, Any]) -> None:
        if "properties" in part:
            for each, below in part["properties"].items():
                if each not in ("defaults", "_target_"):
                    walk(f"{name}.{each}" if name else each, below)
        elif name:
            found[name] = _list_choices(part)

    schema = json.loads((CONF / "schema.json").read_text(encoding="utf-8"))
    for group, part in schema["$defs"].items():
        walk(group, part)
    return found


def _list_choices(part: Mapping[str, Any]) -> list[str]:
    choices = [str(each) for each in part.get("enum", ())]
    if part.get("type") == "boolean":
        choices += ["true", "false"]
    below = [each for other in part.get("anyOf", ()) for each in _list_choices(other)]
    return choices + below
