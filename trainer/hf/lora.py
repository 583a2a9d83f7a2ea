"""LoRA by peft, for models of transformers and any other."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from trainer import ConfigError, RunError
from trainer.base.errors import did_you_mean, one_line
from trainer.hf.hub import import_packages
from trainer.hf.repository import NEW_HEADS

TASKS = {  # of peft, by the end of the model's class
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
ALL_LINEAR = "all-linear"
# whose kernels read the weight of out_proj themselves, so that peft refuses it
MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
ADAPTED = (nn.Linear, nn.Embedding, nn.MultiheadAttention, _ConvNd)  # by peft, and Conv1D


def adapt(
    model: nn.Module,
    rank: int,
    targets: str | Sequence[str] = ALL_LINEAR,
    alpha: float | None = None,
    dropout: float = 0.0,
    trained: Sequence[str] | None = None,
    key: str = "task.options.lora",
) -> nn.Module:
    """Return the model of peft with LoRA on `targets`; all its other weights are frozen.

    `targets` are "all-linear" (each linear layer but the last, and a Mamba's out_proj), names of
    layers such as "q_proj", one such name, or one regular expression for whole names. `trained`
    names modules that are trained as they are: by default the head of a classifier and what
    `load_model` found no weights for. `alpha` divided by the rank scales what LoRA adds; by default
    it is twice the rank. Adapters are float32 whatever the dtype of the model is, and are drawn
    from torch's generator: in `build_model` each rank draws the same ones.
    """
    peft = import_packages("peft")
    heads = _heads(model) if trained is None else list(trained)
    wanted = _targets(model, targets, heads, key)
    kind = next((TASKS[end] for end in TASKS if type(model).__name__.endswith(end)), None)
    config = peft.LoraConfig(
        task_type=kind,
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=wanted,
        modules_to_save=heads or None,
        revision=getattr(getattr(model, "config", None), "_commit_hash", None),
    )
    problem = f"{key}: peft cannot adapt {type(model).__name__}"
    with warnings.catch_warnings(), in_one_line(problem):
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 warns peft 0.21
        warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # peft sets it for GPT-2
        adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return adapted


def _heads(model: nn.Module) -> list[str]:
    """Return what a classifier has beside its body, and modules with new weights."""
    heads = list(getattr(model, "new_modules", ()))
    body = getattr(model, "base_model_prefix", None)
    if body and any(part in type(model).__name__ for part in NEW_HEADS):
        for name, module in model.named_children():
            if name != body and any(True for _ in module.parameters()):
                heads.append(name)
    return list(dict.fromkeys(heads))


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _targets(
    model: nn.Module, targets: str | Sequence[str], heads: Sequence[str], key: str
) -> list[str] | str:
    """Return whole names of layers, so that what is adapted does not depend on peft's guesses."""
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    if targets == ALL_LINEAR:
        last = getattr(model, "get_output_embeddings", lambda: None)()
        left_out = [name for name in linear if model.get_submodule(name) is last]
        left_out += [name for name in linear for head in heads if _ends(name, head)]
        if getattr(getattr(model, "config", None), "model_type", None) in MAMBAS:
            left_out += [name for name in linear if _ends(name, "out_proj")]
        layer_names = [name for name in linear if name not in left_out and not _is_in(name, heads)]
        if not layer_names:
            raise ConfigError(f"""{key}: {type(model).__name__} has no linear layer to adapt; name
                other layers by targets, or train all weights""")
        _check_experts(model, layer_names, key)
        return layer_names
    names = _names(model)
    layer_names = []
    if isinstance(targets, str):
        try:
            layer_names = [name for name in names if re.fullmatch(targets, name)]
        except re.error as error:
            raise ConfigError(f"{key}: targets={targets} must be a pattern ({error})") from None
        targets = [targets]
    suggestions = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    layer_names = layer_names or _find_named(model, targets, suggestions, key)
    for name in layer_names:
        layer = model.get_submodule(name)
        if not isinstance(layer, ADAPTED) and type(layer).__name__ != "Conv1D":
            raise ConfigError(f"""{key}: targets has {name}, a {type(layer).__name__}, which LoRA
                cannot adapt; name layers with a matrix, such as {", ".join(suggestions)}""")
    return layer_names


def _find_named(
    model: nn.Module, targets: Sequence[str], suggestions: Sequence[str], key: str
) -> list[str]:
    """Return the whole names of the layers whose names end with one of `targets`."""
    shown = ", ".join(suggestions)
    if not targets:
        raise ConfigError(f"""{key}: targets=[] names no layer; name some of {shown},
            or set {ALL_LINEAR}""")
    names = _names(model)
    for target in targets:
        if not any(_ends(name, target) for name in names):
            close = did_you_mean(target, suggestions) or f"; choose among {shown}"
            kind = type(model).__name__
            raise ConfigError(f"{key}: targets={target} matches no layer of {kind}{close}")
    return [name for name in names if any(_ends(name, target) for target in targets)]


def _check_experts(model: nn.Module, linear: Sequence[str], key: str) -> None:
    """Raise ConfigError if most weights are stacks of matrices, such as experts, which LoRA on
    linear layers would leave out."""
    stacked = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3
        and len(parameter) > 1
        and not isinstance(model.get_submodule(name.rpartition(".")[0]), _ConvNd)
    }
    layers: list[Any] = [model.get_submodule(name) for name in linear]
    adapted = sum(layer.weight.numel() for layer in layers)
    if sum(stacked.values()) > adapted:
        ends = ",".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise ConfigError(f"""{key}: targets={ALL_LINEAR} would leave out {next(iter(stacked))} and
            others, {sum(stacked.values()):,} weights that are no linear layers; name what to adapt,
            such as targets=[{ends}]""")


def _is_in(name: str, heads: Sequence[str]) -> bool:
    return any(f".{name}.".find(f".{head}.") >= 0 for head in heads)


@contextmanager
def in_one_line(problem: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, RunError):
        raise
    except (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise ConfigError(f"{problem} ({type(error).__name__}: {one_line(error)})") from error
