"""Errors for examples that cannot be batched, which name the example; the length of a dataset."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import ConcatDataset, Subset

from trainer.base.codec import name_of
from trainer.base.errors import ConfigError, describe_with_place
from trainer.core.blame import find_rows

INT64 = range(-(2**63), 2**63)


def length_of(dataset: Any, subject: str) -> int:
    """Return the number of examples. Raises ConfigError unless `len` would return it too."""
    must = "__len__ must return an integer from 1 to 2**63 - 1"
    try:
        returned = dataset.__len__()
    except Exception as error:
        raise ConfigError(f"""{subject}, whose length cannot be read: {describe_with_place(error)};
            {must}""") from None
    try:
        length = operator.index(returned)
    except TypeError:
        length = -1
    if length < 0 or length not in INT64:
        raise ConfigError(f"{subject}, whose length is {returned!r}; {must}")
    return length


def find_flaw(tree: Any, allows_gradient: bool = False) -> tuple[str, str] | None:
    """Return (what a tree contains that makes no batch, what to do), None if there is nothing."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            flaw = _flaw_of(leaf, allows_gradient)
            if flaw is not None:
                return flaw
    return None


def _flaw_of(tensor: torch.Tensor, allows_gradient: bool) -> tuple[str, str] | None:
    if tensor.requires_grad and not allows_gradient:
        return "a tensor that requires a gradient", "return tensor.detach()"
    if tensor.is_nested:
        return "a nested tensor", "pad it"
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a sparse tensor ({layout})", "return tensor.to_dense()"
    if tensor.is_quantized:
        dtype = name_of(tensor.dtype)
        return f"a quantised tensor ({dtype})", "return tensor.dequantize()"
    if tensor.is_meta:
        return "a tensor without values (on the meta device)", "build it on the CPU"
    return None


def is_complex(tree: Any) -> bool:
    """Return True if any tensor of the tree is complex."""
    return any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in tree_leaves(tree))


def find_odd(
    examples: Sequence[Any], indices: Sequence[int], collate: Any
) -> tuple[int, str, str] | None:
    """Return (index, reason, advice) for an example unlike the others; None if all are alike."""
    advice = "repair it, pad in collate(rows), or raise and set data.on_error=skip"
    for index, example in zip(indices, examples, strict=True):
        if flaw := find_flaw(example):
            return index, f"it is {flaw[0]}", flaw[1]
        large = [leaf for leaf in tree_leaves(example) if _is_large(leaf)]
        if large:
            return index, f"{large[0]} does not fit into 64 bits", "map it to a smaller number"
    forms = [form_of(example) for example in examples]
    usual = max(forms, key=forms.count)
    for index, form in zip(indices, forms, strict=True):
        if form != usual:
            return index, f"it is {form} and the others are {usual}", advice

    def fails(first: int, last: int) -> bool:
        return bool(_problem(collate, examples[first:last]))

    odd = list(find_rows(fails, len(examples)))
    if not odd or len(odd) == len(examples):
        return None
    return indices[odd[0]], _problem(collate, [examples[odd[0]]]), advice


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, int) and leaf not in INT64


def _problem(collate: Any, examples: Sequence[Any]) -> str:
    """Return the error of a batch of these examples alone; empty if there is none."""
    try:
        collate(examples)
    except Exception as error:
        return describe_with_place(error)
    return ""


def form_of(example: Any) -> str:
    """Return the shapes of the tensors and arrays of an example, and the types of the rest."""
    return str(tree_map(_form, example, is_leaf=_is_list_of_numbers))


def _is_list_of_numbers(tree: Any) -> bool:
    is_long = isinstance(tree, (list, tuple)) and len(tree) > 3
    return is_long and all(isinstance(each, (int, float)) for each in tree)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, (list, tuple)):
        return f"{len(leaf)} x {type(leaf[0]).__name__}"
    if isinstance(leaf, torch.Tensor) and leaf.is_complex():
        return f"{tuple(leaf.shape)} of {name_of(leaf.dtype)}"
    return tuple(leaf.shape) if hasattr(leaf, "shape") else type(leaf).__name__


def fetch_together(dataset: Any, indices: Sequence[int]) -> None:
    """Fetch the shards of several examples at the same time, also those of a part of `dataset`."""
    if hasattr(dataset, "fetch_examples"):
        dataset.fetch_examples(indices)
    elif isinstance(dataset, Subset):
        fetch_together(dataset.dataset, [dataset.indices[index] for index in indices])
    elif isinstance(dataset, ConcatDataset):
        starts = [0, *dataset.cumulative_sizes]
        for part, first, last in zip(dataset.datasets, starts, starts[1:], strict=False):
            if own := [index - first for index in indices if first <= index < last]:
                fetch_together(part, own)
