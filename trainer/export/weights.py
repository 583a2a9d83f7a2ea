"""safetensors: the weights alone, compared by loading them into a new model."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.checkpoints.tensor_files import write_tensors
from trainer.errors import RunError
from trainer.export.model import ExportModel, tensors_in


@torch.no_grad()
def write_weights(trained: ExportModel, path: Path, facts: dict[str, str]) -> list[str]:
    """Write the model's weights and buffers; tied ones are there once for each name.

    Raises RunError if a model with the weights of the file has other outputs.
    """
    from safetensors.torch import load_file

    state = trained.model.state_dict()
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    write_tensors(path, forms, lambda name: state[name].contiguous(), facts, 0o666)
    before = [t.clone() for t in trained.flat(*tensors_in(trained.inputs))]
    trained.model.load_state_dict(load_file(path))
    after = trained.flat(*tensors_in(trained.inputs))
    if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise RunError("format=safetensors: a model with these weights has other outputs")
    return [f"{len(state)} tensors; a model with these weights has the same outputs, bit for bit"]
