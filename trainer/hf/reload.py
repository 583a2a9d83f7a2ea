"""Load a folder of Hugging Face in a fresh process, and compare its outputs with those before.

Then have transformers' pipelines read it, as its users will.

`python -m trainer.hf.reload FOLDER CHECK` knows nothing of the task. CHECK has the inputs and
outputs of the model in memory, and gets the answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.base.errors import one_line
from trainer.base.model_calls import call_plainly
from trainer.base.process.child import end_with_parent
from trainer.base.process.torch_flags import resolve_vector_functions
from trainer.base.same.distance import apart
from trainer.hf.pipelines import check_calls

FOLDER_FACTS = "lockstep.json"  # in the folder: what loads it, and which files were written
REFERENCE_FILE = "given.pt"  # in CHECK
ANSWER = "answer.json"


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors that a model returns, by name; caches are left out."""
    returned = call_plainly(model, inputs)
    if isinstance(returned, torch.Tensor):
        returned = {"outputs": returned}
    elif isinstance(returned, (tuple, list)):
        returned = {f"outputs {index}": each for index, each in enumerate(returned)}
    tensors = {n: t for n, t in returned.items() if isinstance(t, torch.Tensor)}
    return {name: t.detach().cpu() for name, t in tensors.items() if t.is_floating_point()}


def load(folder: str, facts: Mapping[str, Any]) -> nn.Module:
    """Load a model as anybody does: by an Auto class, and by peft on the base of an adapter.

    Raises ValueError if the files lack weights of the model.
    """
    if facts["library"] == "diffusers":
        import diffusers  # type: ignore[import-not-found,unused-ignore]

        model: nn.Module = getattr(diffusers, facts["class"]).from_pretrained(folder)
        return model.eval()
    import transformers

    kind = getattr(transformers, facts["class"])
    options = {**facts["options"], "local_files_only": True, "trust_remote_code": False}
    base = facts["base"] if facts["is_adapter"] else folder
    model, report = kind.from_pretrained(base, output_loading_info=True, **options)
    if facts["is_adapter"]:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, folder).eval()
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"the folder has no {', '.join(missing[:4])}")
    return model.eval()


def check_tokens(folder: str, expected: Mapping[str, Any]) -> None:
    """Load the tokenizer and the processor. Raises ValueError if a text has other tokens."""
    import transformers

    if "processor" in expected:
        transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    if "tokenizer" not in expected:
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    wanted = expected["tokenizer"]
    if wanted["tokens"] != tokenizer(wanted["text"])["input_ids"]:
        raise ValueError("the tokenizer of the folder gives another row of tokens to a text")
    if wanted["template"] != getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer of the folder has another chat template")


def compare(folder: str, reference: Mapping[str, Any]) -> dict[str, float]:
    """Return how far each output is from the given one; 0 for equal bits."""
    facts = json.loads(Path(folder, FOLDER_FACTS).read_text(encoding="utf-8"))
    check_tokens(folder, reference["expected"])
    outputs = outputs_of(load(folder, facts), reference["inputs"])
    if outputs.keys() != reference["outputs"].keys():
        raise ValueError(
            f"it returns {', '.join(outputs)}, and not {', '.join(reference['outputs'])}"
        )
    pairs = {name: (wanted, outputs[name]) for name, wanted in reference["outputs"].items()}
    return {n: 0.0 if torch.equal(*pair) else apart(*pair) or 1e-30 for n, pair in pairs.items()}


def main(folder: str, check: str) -> None:
    end_with_parent()
    resolve_vector_functions()
    reference = torch.load(Path(check, REFERENCE_FILE), weights_only=True)
    torch.set_num_threads(reference["threads"])
    try:
        distances = compare(folder, reference)
        answer: dict[str, Any] = {
            "apart": distances,
            "differs": check_calls(folder, reference["calls"]),
        }
    except Exception as error:  # libraries raise many types
        answer = {"error": f"{type(error).__name__}: {one_line(error)}"}
    Path(check, ANSWER).write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do, and the end of torch takes half a second


if __name__ == "__main__":
    main(*sys.argv[1:])
