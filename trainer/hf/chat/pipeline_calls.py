"""The call of a pipeline that continues a prompt, with the tokens that rows of training have."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.hf.chat.flaws import Flaw
from trainer.hf.chat.sealed import SealedTokenizer
from trainer.hf.chat.template import ChatTemplate
from trainer.hf.loading import MODEL_KEY
from trainer.hf.pipelines import GENERATION, PipelineCall

PROMPT = "Hi"  # short, for models with few positions


def call_pipeline(tokenizer: Any, stop: int | None) -> list[PipelineCall]:
    """Return the call for an answer in a chat, or for a text if the tokenizer has no template.

    `stop` is the token that ends an answer in the data.
    """
    sealed = SealedTokenizer(tokenizer, MODEL_KEY)
    template = ChatTemplate(tokenizer, sealed, MODEL_KEY)
    argument: Any = PROMPT
    if not template.text or template.stop != stop:
        tokens = [*sealed.head, *_encoded(sealed, PROMPT)]
        return [_generation(argument, tokens, stop)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    try:
        rendered, _ = template.render(messages, {}, opens=True)
    except Flaw:  # it takes longer chats only
        return [_generation(argument, tokenizer(PROMPT)["input_ids"], stop)]
    if template.takes_parts:
        messages[0]["content"] = [{"type": "text", "text": PROMPT}]
    tokens = _encoded(sealed, rendered)
    if "strftime_now" in template.text:  # training has one day for all chats
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens = chat["input_ids"]
    return [_generation(messages, tokens, stop)]


def _encoded(sealed: SealedTokenizer, text: str) -> list[int]:
    """Return the tokens of a text of ours, which has no flaw."""
    encoded: Any = sealed.encode([text])[0]
    return list(encoded.ids)


def _generation(argument: Any, tokens: Sequence[int], stop: int | None) -> PipelineCall:
    inputs = {"input_ids": torch.tensor([[*tokens]])}
    return PipelineCall(GENERATION, argument, inputs, stop)
