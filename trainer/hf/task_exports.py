"""Calls by which an export must do what the run does, when a pipeline of transformers reads it.

An export is compared with these calls before it is written: `trainer/hf/pipelines.py`.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from trainer.hf.pipelines import PipelineCall


def end_answers(model: Any, stop: int | None) -> None:
    """Have `generate` stop at the token that ends answers in the data.

    A base model often stops at the end of a text only. `save_pretrained` writes the tokens into
    generation_config.json, which transformers and vLLM read, and config.json, which others read.
    """
    if stop is None:
        return
    if model.generation_config is not None:  # of a model that generates
        _add_end(model.generation_config, stop)
    with suppress(Exception):  # some configs of transformers take one token only
        _add_end(model.config.get_text_config(decoder=True), stop)


def _add_end(settings: Any, stop: int) -> None:
    ends = getattr(settings, "eos_token_id", None)
    ends = list(ends) if isinstance(ends, (list, tuple)) else ([ends] if ends is not None else [])
    if stop not in ends:
        settings.eos_token_id = [stop, *ends] if ends else stop


def named_classes(names: Sequence[str]) -> dict[str, Any]:
    """Return settings of a config for a classifier, which pipelines read: one class of several."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": "single_label_classification",
    }


def text_classification(tokenizer: Any, texts: Sequence[str]) -> list[PipelineCall]:
    """Return a call for each text. Longer ones are truncated as in training."""
    calls = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, return_tensors="pt")
        options = {"truncation": True}
        calls.append(PipelineCall("text-classification", text, dict(tokens), options=options))
    return calls


def image_classification(
    pictures: Sequence[Any], pixels: Sequence[torch.Tensor]
) -> list[PipelineCall]:
    """Return a call for each picture: a path, or pixels of uint8 (height, width, 3)."""
    kind = "image-classification"
    pairs = zip(pictures, pixels, strict=True)
    return [PipelineCall(kind, picture, {"pixel_values": each[None]}) for picture, each in pairs]
