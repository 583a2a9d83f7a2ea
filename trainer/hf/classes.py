"""Classes of Hugging Face: what a model is, by which name it is loaded, and whether it is saved."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

CAUSAL = "AutoModelForCausalLM"
MODEL_PACKAGES = ("transformers", "peft", "diffusers")  # whose models are saved by save_pretrained


def find_pretrained(model: nn.Module) -> nn.Module | None:
    """Return the model that has `save_pretrained`: itself, or the only module in a wrapper."""
    inner = [module for module in model.children() if _is_pretrained(module)]
    return model if _is_pretrained(model) else inner[0] if len(inner) == 1 else None


def _is_pretrained(module: nn.Module) -> bool:
    return callable(getattr(module, "save_pretrained", None))


def public_class(model: nn.Module) -> type | None:
    """Return the class of a model in its library, which a class of the user's may derive from."""
    kinds = type(model).__mro__
    return next((k for k in kinds if k.__module__.partition(".")[0] in MODEL_PACKAGES), None)


def auto_class(kind: type, model: Any) -> str:
    """Return the Auto class that makes a model of this class from its config, else the class."""
    auto = import_module("transformers.models.auto.modeling_auto")
    general = ("AutoModelForPreTraining", "AutoModel", "AutoModelForTextEncoding")
    names = [name for name in vars(auto) if name.startswith("AutoModel") and name not in general]
    for name in (CAUSAL, *names, *general):
        mapping = getattr(getattr(auto, name), "_model_mapping", None) or {}
        if type(model.config) in mapping:
            model_class = mapping[type(model.config)]
            if kind is model_class or (
                isinstance(model_class, tuple) and model_class and model_class[0] is kind
            ):
                return name
    return kind.__name__


def is_adapter(model: nn.Module) -> bool:
    kind = public_class(model)
    return kind is not None and kind.__module__.startswith("peft.")


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that an adapter of peft is for; any other model itself."""
    inner: Any = model
    return inner.base_model.model if is_adapter(model) else model


def find_base(model: nn.Module) -> str:
    """Return the name that loads the weights a model began with, "" without one.

    A folder in the cache of the hub has the name of its repository.
    """
    name = str(getattr(base_of(model), "name_or_path", None) or "")
    parts = Path(name).parts
    hub = [part for part in parts if part.startswith("models--")]
    return "/".join(hub[-1].split("--")[1:]) if hub and "snapshots" in parts else name


def why_not_exported(model: nn.Module, is_merged: bool = False) -> str:
    """Return the reason why a model cannot become a folder of Hugging Face; empty if it can."""
    inner = find_pretrained(model)
    if inner is None:
        return f"""the model ({type(model).__name__}) has no save_pretrained, and not one module
            in it that does; use a model of transformers, peft or diffusers"""
    kind = public_class(inner)
    if kind is None:
        return (
            f"{type(inner).__name__} is of no library that can load it: {', '.join(MODEL_PACKAGES)}"
        )
    if is_adapter(inner) and not is_merged:
        return _why_no_adapter(inner)
    quantizer = getattr(base_of(inner), "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_serializable():
        how = type(quantizer).__name__
        return f"the model is quantized ({how}), and transformers does not save it; load it whole"
    return ""


def _why_no_adapter(model: Any) -> str:
    from peft import get_peft_model_state_dict

    if not find_base(model):
        return """the base of the adapter has no name that loads it; build it by from_pretrained,
            or merge the adapter: RUN out=FOLDER merge=true"""
    name = model.active_adapter
    words = {"adapter_name": name, "save_embedding_layers": trains_embeddings(model)}
    saved = {
        key.removeprefix("base_model.model.") for key in get_peft_model_state_dict(model, **words)
    }
    for each, parameter in model.named_parameters():
        plain = each.removeprefix("base_model.model.").replace(f".modules_to_save.{name}", "")
        if parameter.requires_grad and plain.replace(f".{name}", "") not in saved:
            return f"{each} trains, and peft does not save it; name its module in modules_to_save"
    return _why_no_base(base_of(model), find_base(model))


# Of a base, which an adapter's folder has no place for: what pipelines read, and its meaning.
OF_A_BASE = {
    "id2label": "names of classes",
    "problem_type": "a kind of classes",
    "pad_token_id": "a token for padding",
}


def _why_no_base(model: Any, name: str) -> str:
    """Return what pipelines read from an adapter's base, and this run has changed; else ""."""
    from transformers import AutoConfig, GenerationConfig

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    advice = "which the adapter's folder cannot hold; merge it: RUN out=FOLDER/ merge=true"
    config = getattr(model, "config", None)
    try:
        own = AutoConfig.from_pretrained(name, **options)
    except Exception:  # a base of another kind, such as a GGUF file: the end of the export tells
        return ""
    settings = {each: getattr(own, each, None) for each in OF_A_BASE}
    settings["problem_type"] = settings["problem_type"] or getattr(config, "problem_type", None)
    for each, words in OF_A_BASE.items():
        if (
            "Classification" in type(model).__name__
            and getattr(config, each, None) != settings[each]
        ):
            return f"the run gives its base {words} ({each}), {advice}"
    wanted = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if wanted is None:
        return ""
    try:
        ends = GenerationConfig.from_pretrained(name, **options).eos_token_id
    except OSError:  # transformers takes those of config.json then
        ends = own.get_text_config(decoder=True).eos_token_id
    missing = {*_listed(wanted)} - {*_listed(ends)}
    return (
        f"answers end with token {min(missing)}, after which its base does not stop, {advice}"
        if missing
        else ""
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def trains_embeddings(model: Any) -> bool:
    """Return True if an adapter's base has embeddings that train, as those of new tokens do."""
    base: Any = base_of(model)
    embedding = base.get_input_embeddings()
    return any(p.requires_grad for p in embedding.parameters()) if embedding is not None else False
