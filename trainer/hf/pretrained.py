"""A trained model that has `save_pretrained`: how it is saved, merged and loaded; and its card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainer
from trainer import Config
from trainer.base.codec import name_of
from trainer.base.errors import visible
from trainer.base.plain_files import parse_yaml
from trainer.core.api import first_rows, memory_of
from trainer.hf.classes import (
    CAUSAL,
    auto_class,
    base_of,
    find_base,
    find_pretrained,
    is_adapter,
    public_class,
    trains_embeddings,
)
from trainer.hf.reload import outputs_of

MOST_OF_OUTPUTS = 2**28  # bytes to compare: one example's logits may have hundreds of MB
SHOWN_GROUPS = ("run.", "data.", "optim.", "schedule.", "strategy.", "task.")  # of settings to show
OF_THE_PLACE = ("run.dir", "run.name", "run.resume", "run.init_from")
IS_IN_MODELS = ("license", "license_name", "license_link")  # of the base's card


@dataclass(frozen=True)
class Pretrained:
    """A trained model that has save_pretrained, with inputs of its own and its outputs for them."""

    model: Any
    inputs: Any
    outputs: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, rows: int) -> Pretrained:
        """Take the model out of its wrapper, and as many rows as can be compared."""
        inner = find_pretrained(model)
        assert inner is not None
        prepare = getattr(model, "pretrained_inputs", None) if inner is not model else None

        def first(count: int) -> Any:
            some = first_rows(inputs, count)
            own = prepare(some) if prepare else some
            return dict(own) if isinstance(own, Mapping) else own

        size = sum(t.nbytes for t in outputs_of(inner, first(1)).values())
        own = first(max(1, min(rows, MOST_OF_OUTPUTS // max(size, 1))))
        return cls(inner, own, outputs_of(inner, own))

    @property
    def is_adapter(self) -> bool:
        return is_adapter(self.model)

    def facts(self) -> dict[str, Any]:
        """Return how the folder is loaded: the library, the class, the base and options."""
        base: Any = base_of(self.model)
        kind = public_class(base)
        assert kind is not None
        library = kind.__module__.partition(".")[0]
        name = find_base(self.model)
        options: dict[str, Any] = {}
        if library == "transformers":
            dtypes = {p.dtype for p in base.parameters() if p.is_floating_point()}
            options = {"dtype": name_of(*dtypes)} if len(dtypes) == 1 else {}
            options["attn_implementation"] = base.config._attn_implementation
            gguf_file = getattr(base, "gguf_file", None)
            if gguf_file is None and name.endswith(".gguf"):
                name, gguf_file = str(Path(name).parent), Path(name).name
            options |= {"gguf_file": gguf_file} if gguf_file and self.is_adapter else {}
            if self.is_adapter and "Classification" in kind.__name__:
                options |= {"num_labels": base.config.num_labels, "ignore_mismatched_sizes": True}
        return {
            "library": library,
            "class": auto_class(kind, base) if library == "transformers" else kind.__name__,
            "is_adapter": self.is_adapter,
            "base": name if self.is_adapter or not Path(name).exists() else "",
            "options": {name: each for name, each in options.items() if each is not None},
        }

    def save(self, folder: Path) -> None:
        """Write weights and configuration. Libraries raise many types."""
        if self.is_adapter:
            own = self.model.active_adapter
            words = {"save_embedding_layers": trains_embeddings(self.model)}
            self.model.save_pretrained(folder, selected_adapters=[own], **words)
            for path in [*(folder / own).glob("*")]:  # of an adapter with a name
                path.rename(folder / path.name)
            with suppress(OSError):
                (folder / own).rmdir()
            _edit(folder / "adapter_config.json", base_model_name_or_path=self.facts()["base"])
            return
        kind = public_class(self.model)
        assert kind is not None
        if not kind.__module__.startswith("transformers."):
            self.model.save_pretrained(folder)
            return
        state = _own_memory(self.model)
        self.model.save_pretrained(folder, state_dict=dict(state))
        _edit(folder / "config.json", architectures=[kind.__name__])
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        pairs = [(state[one], state[two]) for one, two in tied.items() if {one, two} <= {*state}]
        if not all(torch.equal(one, two) for one, two in pairs):  # else a load would tie them again
            _edit(folder / "config.json", tie_word_embeddings=False)

    def merged(self) -> Pretrained:
        """Return the model with its adapters in the weights; this one is spent.

        A layer that shares its weight with another one gets its own first: peft would add the
        adapter of an output layer to the embeddings too (transformers#45127).
        """
        shared: dict[Any, int] = {}
        for _, parameter in self.model.named_parameters(remove_duplicate=False):
            shared[memory_of(parameter)] = shared.get(memory_of(parameter), 0) + 1
        for module in self.model.modules():
            layer: Any = getattr(module, "base_layer", None)
            weight = getattr(layer, "weight", None)
            if isinstance(weight, nn.Parameter) and shared.get(memory_of(weight), 1) > 1:
                own = nn.Parameter(weight.detach().clone(), requires_grad=False)
                layer.register_parameter("weight", own)
        model = self.model.merge_and_unload().eval()
        return replace(self, model=model, outputs=outputs_of(model, self.inputs))


def _own_memory(model: Any) -> dict[str, torch.Tensor]:
    """Return the state of a model, contiguous, with copies of tensors that share memory untold."""
    tied_keys = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*tied_keys, *tied_keys.values()}
    first: dict[Any, str] = {}
    state = dict(model.state_dict())
    for name, tensor in state.items():
        other = first.setdefault(memory_of(tensor) or name, name)
        is_told = name == other or {name, other} <= tied
        state[name] = tensor.contiguous() if is_told else tensor.clone().contiguous()
    return state


def _edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | values, indent=2) + "\n", encoding="utf-8")


def write_card(
    config: Config, facts: Mapping[str, Any], origin: Mapping[str, Any], weights: str
) -> str:
    """Return a card for a model that is loaded as `facts` say, of a checkpoint `origin`.

    The model began with the files in `weights`, if that is a folder; the licence is theirs.
    """
    is_average = config.run.ema_decay is not None and not facts["is_stored"]
    average = ", averaged (run.ema_decay)" if is_average else ""
    libraries = [name for name in ("transformers", "peft") if name in _libraries(facts)]
    versions = [f"{name} {version(name)}" for name in [*libraries, "torch"]]
    title = f"{config.task.name} {origin['name']}"
    base = f", an adapter of {_named_base(facts)}" * facts["is_adapter"]
    lines = [
        f"# {visible(title)}",
        f"Weights of step {origin['step']:,} of the run {visible(title)}{average}{base}. Made with "
        f"Lockstep {trainer.__version__}, {', '.join(versions)}.",
        f"## Load\n\n```python\n{_snippet(facts)}\n```",
    ]
    if origin["metrics"]:
        rows = [f"| {visible(n)} | {v} |" for n, v in sorted(origin["metrics"].items())]
        lines.append("\n".join(["## Metrics\n", "| last evaluation | value |", "|---|---|", *rows]))
    lines.append("\n".join(["## Data\n", *_describe_data(origin["data"])]))
    if origin["proof"]:
        lines.append("\n".join(["## Proof\n", *(f"- {visible(each)}" for each in origin["proof"])]))
    shown = {
        n: v for n, v in origin["config"].items() if n.startswith(SHOWN_GROUPS) and v is not None
    }
    settings = [f"{n}={json.dumps(v)}" for n, v in shown.items() if n not in OF_THE_PLACE]
    lines.append("## Settings\n\n```\n" + "\n".join(map(visible, settings)) + "\n```")
    return _head(facts, weights) + "\n\n".join(lines) + "\n"


def _libraries(facts: Mapping[str, Any]) -> list[str]:
    return [facts["library"], *["peft"] * facts["is_adapter"]]


def _named_base(facts: Mapping[str, Any]) -> str:
    gguf_file = facts["options"].get("gguf_file")
    return visible(facts["base"]) + (f" ({visible(str(gguf_file))})" if gguf_file else "")


def _head(facts: Mapping[str, Any], weights: str) -> str:
    """Return the block of metadata that the hub reads."""
    values: dict[str, Any] = {"library_name": _libraries(facts)[-1]}
    base = facts["base"]
    if base and not Path(base).exists():
        values["base_model"] = base
        values["base_model_relation"] = "adapter" if facts["is_adapter"] else "finetune"
    with suppress(OSError, ValueError, TypeError, AttributeError):
        _, head, _ = Path(weights, "README.md").read_text(encoding="utf-8").split("---", 2)
        own = parse_yaml(head)
        values |= {name: str(own[name]) for name in IS_IN_MODELS if name in own}
    if facts["class"] == CAUSAL:
        values["pipeline_tag"] = "text-generation"
    values["tags"] = ["lockstep", *["lora"] * facts["is_adapter"]]
    return "".join(["---\n", *(f"{n}: {json.dumps(v)}\n" for n, v in values.items()), "---\n\n"])


def _snippet(facts: Mapping[str, Any]) -> str:
    """Return the code that loads the model as it was loaded for the comparison."""
    options = "".join(f", {name}={value!r}" for name, value in facts["options"].items())
    name = facts["class"]
    source = repr(facts["base"]) if facts["is_adapter"] else '"FOLDER"'
    lines = [f"from {facts['library']} import {name}"]
    lines += ["from peft import PeftModel"] * facts["is_adapter"]
    lines += ["", f"model = {name}.from_pretrained({source}{options})"]
    lines += ['model = PeftModel.from_pretrained(model, "FOLDER")'] * facts["is_adapter"]
    return "\n".join(lines)


def _describe_data(splits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| split | examples | digest |", "|---|---|---|"]
    for name, facts in splits.items():
        read = json.dumps(facts.get("content"), sort_keys=True)  # of the places that were read
        digest = facts.get("digest") or hashlib.sha256(read.encode()).hexdigest()[:16]
        lines.append(f"| {visible(name)} | {facts.get('length', 0):,} | {visible(str(digest))} |")
    return lines
