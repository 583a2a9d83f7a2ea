"""Names on the hub of Hugging Face, and their files: fetched once, then found in the cache."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainer import ConfigError
from trainer.base.errors import did_you_mean, one_line
from trainer.hf.repository import PARTS_INDEX, WEIGHT_FILE, look_at, matching, without_weights

WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
UNWANTED = ("*/*.safetensors", "consolidated*.safetensors", "*.fp16.safetensors")  # copies
OF_TOKENS = ("tokenizer*", "vocab*", "*.model", "preprocessor_config.json", "processor_config.json")
HUB_NAME = re.compile(
    r"(?P<repository>[\w.-]+(/[\w.-]+)?)(/(?P<gguf>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?"
)
MOST_SIBLINGS = 10_000
MISSING = "needs {}, which is not installed: pip install 'lockstep-trainer[hf]'"


@dataclass(frozen=True)
class HubName:
    repository: str
    gguf: str | None
    revision: str | None

    @property
    def patterns(self) -> list[str]:
        return [self.gguf, "*.json"] if self.gguf else list(WANTED)


def parse(name: str, key: str) -> HubName | None:
    """Return the parts of a name on the hub; None for a folder or a file."""
    if look_at(name, f"{key}={name}") is not None:
        return None
    path = Path(name).expanduser()
    match = HUB_NAME.fullmatch(name)
    is_path = name.startswith((".", "/", "~")) or (name.endswith(".gguf") and name.count("/") < 2)
    if match is None or is_path or ".." in name or "--" in name:
        close = did_you_mean(path.name, siblings(name))
        raise ConfigError(f"""{key}={name}: does not exist{close}; must be a folder, a GGUF file, or
            a name on the hub such as Qwen/Qwen3-0.6B""")
    return HubName(match["repository"], match["gguf"], match["revision"])


def siblings(name: str) -> list[str]:
    """Return names beside this one, for advice; none if they cannot be read."""
    try:
        parent = Path(name).expanduser().parent
        return [path.name for path in islice(parent.iterdir(), MOST_SIBLINGS)]
    except (OSError, ValueError, RuntimeError):
        return []


def snapshot(name: HubName) -> Path | None:
    """Return the folder of a name in the cache of the hub."""
    hub = import_packages("huggingface_hub")
    try:
        folder = hub.snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=name.patterns,
            ignore_patterns=list(UNWANTED),
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def _find_lack(folder: Path, name: HubName, beside: Sequence[str]) -> str:
    """Return what a copy in the cache lacks, such as a part of the weights; "" if it is whole."""
    if name.gguf:
        return "" if (folder / name.gguf).is_file() else name.gguf
    names = [path.name for path in folder.iterdir()]
    if not matching(names, ["*.safetensors"]):
        return "weights"
    if not matching(names, beside):
        return " or ".join(beside)
    parts: list[str] = []
    if PARTS_INDEX in names and WEIGHT_FILE not in names:
        with suppress(OSError, ValueError, AttributeError, TypeError):  # which `find` names
            parts = sorted(
                {*json.loads((folder / PARTS_INDEX).read_bytes())["weight_map"].values()}
            )
    return next((part for part in parts if part not in names), "")


def fetch_repository(name: str, hub_name: HubName, key: str, beside: Sequence[str]) -> None:
    """Download the files of a name on the hub, or those of them that its cache lacks."""
    folder = snapshot(hub_name)
    lack = "" if folder is None else _find_lack(folder, hub_name, beside)
    if folder is not None and not lack:
        return
    hub = import_packages("huggingface_hub")
    where = f"is in the cache of the hub without {lack} ({folder})"
    if hub.constants.HF_HUB_OFFLINE:
        problem = where if lack else "is neither a folder nor in the cache of the hub"
        raise ConfigError(f"""{key}={name}:
            {problem}, and HF_HUB_OFFLINE forbids to fetch it;
            give a folder, or run once without HF_HUB_OFFLINE""")
    try:
        _check_repository(hub, hub_name, f"{key}={name}")
        if not sys.stderr.isatty():
            hub.utils.disable_progress_bars()
        print(f"downloading {name} from {hub.constants.ENDPOINT}", file=sys.stderr)
        hub.snapshot_download(
            hub_name.repository,
            revision=hub_name.revision,
            allow_patterns=hub_name.patterns,
            ignore_patterns=list(UNWANTED),
        )
    except ConfigError:
        raise
    except Exception as error:
        subject = f"{key}={name}: {where}" if lack else f"{key}={name}"
        raise ConfigError(f"{subject}: {_explain(hub, error, hub_name)}") from None
    finally:
        hub.close_session()


def _check_repository(hub: Any, name: HubName, setting: str) -> None:
    """Refuse, before anything is downloaded, a repository without weights that can be loaded."""
    repository = hub.HfApi().model_info(name.repository, revision=name.revision, timeout=30)
    files = [entry.rfilename for entry in repository.siblings or ()]
    if name.gguf is not None:
        if name.gguf not in files:
            close = did_you_mean(name.gguf, files) or "; choose one of its files"
            raise ConfigError(f"{setting}: {name.repository} has no {name.gguf}{close}")
    elif not matching(files, ["*.safetensors"]):
        raise ConfigError(f"{setting}: {without_weights(files, name.repository)}")


def _explain(hub: Any, error: Exception, name: HubName) -> str:
    server = hub.constants.ENDPOINT
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return f"""is gated: accept its conditions at {server}/{name.repository},
            then `hf auth login`, or set HF_TOKEN"""
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision}"
    response = getattr(error, "response", None)
    status = 0 if response is None else response.status_code
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        close = did_you_mean(name.repository, _repositories(hub, name))
        return f"""is neither a folder nor a model on {server}{close};
            if it is private, `hf auth login`, or set HF_TOKEN"""
    reason = f"it answers {status}" if status else one_line(error)
    return f"""cannot be fetched from {server} ({reason});
        try again, or fetch it where there is a network (`hf download {name.repository}`)
        and give the folder"""


def _repositories(hub: Any, name: HubName) -> list[str]:
    owner, _, _ = name.repository.rpartition("/")
    try:
        return [model.id for model in hub.HfApi().list_models(author=owner, limit=200)]
    except Exception:  # it is only advice
        return []


def import_packages(*names: str) -> Any:
    """Return the first of the packages, after all are imported."""
    modules = []
    for name in names:
        try:
            modules.append(__import__(name))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ConfigError(MISSING.format(name)) from None
    return modules[0]
