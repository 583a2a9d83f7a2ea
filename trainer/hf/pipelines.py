"""Calls of `transformers.pipeline` on an export, compared with the run's own model.

Equal logits are not enough: a pipeline prepares its inputs itself, reads names and the tokens that
end an answer from files of the folder, and takes both from the base of an adapter. A task tells by
`pipeline_calls()` what users will call, and what its model takes for the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.base.errors import one_line
from trainer.base.same import BY_HAND
from trainer.base.same.distance import apart

GENERATION = "text-generation"
NEW_TOKENS = 8  # of the answer that is compared
FORCED = 1e4  # a logit: it is the largest, also in fp16


@dataclass(frozen=True)
class PipelineCall:
    """A call `pipeline(task, FOLDER)(argument, **options)` that a user of an export would make.

    `argument`: a text, messages of a chat, the path of a picture, or a picture as a tensor of uint8
    (height, width, 3). `inputs`: what the run's model takes for it, by name, one row. `stop`: the
    token after which an answer must end, of a language model.
    """

    task: str
    argument: Any
    inputs: Mapping[str, torch.Tensor]
    stop: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def describe_calls(calls: list[dict[str, Any]]) -> list[str]:
    """Return lines about calls that were found to be right, one for each kind."""
    lines = {}
    for call in calls:
        words = "gives the run's answer"
        if call["task"] == GENERATION:
            words = "continues a prompt with the run's tokens"
            words += f" and stops at token {call['stop']}" if call["stop"] is not None else ""
        elif "pixel_values" in call["inputs"]:
            words = "reads the run's pixels and gives its answer"
        lines[call["task"]] = f"pipeline({call['task']!r}, FOLDER) {words}"
    return list(lines.values())


@torch.no_grad()
def expect(model: Any, calls: list[PipelineCall]) -> list[dict[str, Any]]:
    """Return the calls as plain values, with what the model in memory answers.

    A prompt that leaves no position for an answer is left out.
    """
    expected = []
    for call in calls:
        plain = {"task": call.task, "argument": call.argument, "inputs": dict(call.inputs)}
        plain |= {"stop": call.stop, "options": dict(call.options)}
        if call.task != GENERATION:
            expected.append(plain | _classify(model, call))
        elif (count := _room(model, call.inputs["input_ids"])) > 2:
            expected.append(plain | _continue(model, call, count))
    return expected


def _room(model: Any, prompt: torch.Tensor) -> int:
    """Return how many tokens may follow a prompt."""
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    return min(NEW_TOKENS, (positions or NEW_TOKENS + prompt.shape[1]) - prompt.shape[1])


def _continue(model: Any, call: PipelineCall, count: int) -> dict[str, Any]:
    prompt = call.inputs["input_ids"]
    named = {"max_new_tokens": count, "do_sample": False, "num_beams": 1}
    named |= {"return_dict_in_generate": True, "output_scores": True}
    mask = torch.ones_like(prompt)
    generated = model.generate(input_ids=prompt, attention_mask=mask, **named)
    scores = torch.cat(generated.scores).float()
    return {"tokens": generated.sequences[0].tolist(), "scores": scores, "count": count}


def _classify(model: Any, call: PipelineCall) -> dict[str, Any]:
    names = model.config.id2label
    values = model(**call.inputs).logits[0].float().softmax(0)
    return {"names": [str(names[i]) for i in range(len(values))], "values": values}


def check_calls(folder: str, calls: list[dict[str, Any]]) -> str:
    """Call pipelines of a folder, in a fresh process; return how one differs, else ""."""
    import transformers

    pipes: dict[str, Any] = {}
    for call in calls:
        kind = call["task"]
        check = _check_answer if kind == GENERATION else _check_classes
        try:
            if kind not in pipes:
                pipes[kind] = transformers.pipeline(kind, folder, device="cpu")
            with torch.no_grad():
                why = check(pipes[kind], call)
        except Exception as error:  # libraries raise many types
            why = f"fails: {type(error).__name__}: {one_line(error)}"
        if why:
            return f"pipeline({kind!r}, FOLDER) {why}"
    return ""


def _check_answer(pipe: Any, call: Mapping[str, Any]) -> str:
    """Compare tokens, those of the prompt too, and force the model to end its answer."""
    named = {"do_sample": False, "num_beams": 1, "return_tensors": True, **call["options"]}

    def ask(count: int) -> list[int]:
        (answer,) = pipe(call["argument"], max_new_tokens=count, **named)
        return [int(token) for token in answer["generated_token_ids"]]

    start = call["inputs"]["input_ids"].shape[1]
    tokens, wanted = ask(call["count"]), call["tokens"]
    if tokens[:start] != wanted[:start]:
        return f"reads a prompt as {_head(tokens[:start])}, the run as {_head(wanted[:start])}"
    if not _are_alike(tokens[start:], wanted[start:], call["scores"], pipe.model.dtype):
        return f"answers {_head(tokens[start:])}, the run {_head(wanted[start:])}"
    if call["stop"] is not None and len(_force(pipe, ask, call["stop"])) != start + 2:
        return f"does not stop at token {call['stop']}, which ends the answers of the run's data"
    return ""


def _are_alike(
    tokens: list[int], wanted: list[int], scores: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Return True if an answer is the wanted one, up to where two tokens are equally likely."""
    for token, likeliest, row in zip(tokens, wanted, scores, strict=False):
        if token != likeliest:
            gap = float(row[likeliest] - row[token])
            return gap <= BY_HAND.of(dtype) * float(row[row.isfinite()].abs().max())
    return len(tokens) == len(wanted)


def _head(tokens: list[int]) -> str:
    return str(tokens[:12]) + (" ..." if len(tokens) > 12 else "")


def _force(pipe: Any, ask: Any, stop: int) -> list[int]:
    """Return prompt and answer of a model whose second new token is `stop`, and no other is."""
    ends = pipe.model.generation_config.eos_token_id
    ends = {stop, *(ends if isinstance(ends, (list, tuple)) else [ends])}
    other = next(token for token in range(len(ends) + 1) if token not in ends)
    passes = 0

    def replace(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        nonlocal passes
        logits = torch.zeros_like(outputs.logits)
        logits[..., stop if passes == 1 else other] = FORCED
        outputs["logits"] = logits
        passes += 1
        return outputs

    handle = pipe.model.register_forward_hook(replace)
    try:
        return list(ask(3))
    finally:
        handle.remove()


def _check_classes(pipe: Any, call: Mapping[str, Any]) -> str:
    argument, options = call["argument"], dict(call["options"])
    limit = BY_HAND.of(pipe.model.dtype)
    if isinstance(argument, torch.Tensor):
        from PIL import Image

        argument = Image.fromarray(argument.numpy())
    if "pixel_values" in call["inputs"]:
        pixels = pipe.preprocess(argument)["pixel_values"]
        far = apart(call["inputs"]["pixel_values"].float(), pixels.float())
        if not far <= limit:
            return f"reads other pixels than the run: {far:.1e} of the largest apart"
    classes = pipe(argument, top_k=len(call["names"]), **options)
    values = {str(each["label"]): float(each["score"]) for each in classes}
    if {*values} != {*call["names"]}:
        return f"answers {', '.join(sorted(values)[:3])}, the run {', '.join(call['names'][:3])}"
    off = (torch.tensor([values[name] for name in call["names"]]) - call["values"]).abs()
    if bool((off <= limit).all()):
        return ""
    name, far = call["names"][int(off.argmax())], float(off.max())
    return f"gives {name} a probability that is {far:.1e} off the run's"
