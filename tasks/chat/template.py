"""The chat template of a tokenizer, and the digest of all that makes tokens."""

import hashlib
import json
import re
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any

import tokenizers
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from trainer import ConfigError
from trainer.errors import describe, shortened
from trainer.tasks.chat.flaws import Flaw
from trainer.tasks.chat.sealed import SealedTokenizer

FORMAT = 2  # of tokens and masks: another one makes them again
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates that ask for the date get one day, else the tokens of a chat would change every day.
# Values of a call must be plain, so it is a macro, which replaces what strftime would.
DIRECTIVES = ("-d", "-m", "-H", "-I", *"aAbBcdeDFHIjmMpSTuUwWxXyYZ")
ONE_DAY = "{% macro strftime_now(format='%d %b %Y') %}{{ format" + "".join(
    f"|replace('%{each}', '{datetime(2024, 7, 26).strftime(f'%{each}')}')" for each in DIRECTIVES
)
ONE_DAY += " }}{% endmacro %}"
ASKED, ANSWERED = "7305918264", "8264017395"  # digits: no filter of a template changes their case
PROBE = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
MOST_SHOWN = 120  # characters of what a template raises

Span = tuple[int, int]


class ChatTemplate:
    """The chat template of a tokenizer, which renders chats as sealed texts."""

    def __init__(self, tokenizer: Any, sealed: SealedTokenizer, given: str):
        self._sealed = sealed
        self._given = given
        self.text = find_template(tokenizer)
        self._variables = dict(tokenizer.special_tokens_map)
        self.marks_answers = bool(GENERATION.search(self.text or ""))
        self.stop = self._find_stop() if self.text else None

    def render(self, messages: Any, options: Any, opens: bool = False) -> tuple[str, list[Span]]:
        """Return the sealed text of messages, and its spans of `{% generation %}`.

        `opens`: with what precedes an answer. Raises Flaw.
        """
        if not self.text:
            raise ConfigError(f"""{self._given}: its tokenizer has no chat template; give rows of
                prompt and completion or of text, or a model with one, such as an Instruct model""")
        try:
            (rendered,), spans = render_jinja_template(
                [messages],
                chat_template=ONE_DAY * ("strftime_now" in self.text) + self.text,
                add_generation_prompt=opens,
                return_assistant_tokens_mask=self.marks_answers,
                **(self._variables | options),
            )
        except Exception as error:  # a template is a program
            problem = shortened(describe(error), MOST_SHOWN)
            advice = "mend or remove it, or take a model with another template"
            raise Flaw(f"that the chat template refuses ({problem})", advice) from None
        bounds = [place for span in (spans or [[]])[0] for place in span]
        cuts = [0, *bounds, len(rendered)]
        parts = [self._sealed.seal(rendered[a:b]) for a, b in pairwise(cuts)]
        ends = [*accumulate(map(len, parts))][:-1]
        return "".join(parts), list(zip(ends[::2], ends[1::2], strict=True))

    def _find_stop(self) -> int | None:
        """Return the special token after an answer, if there is one."""
        try:
            sealed, _ = self.render(PROBE, {})
        except Flaw:
            return None
        _, found, rest = sealed.rpartition(ANSWERED)
        after = self._sealed.marks(rest) if found else []
        return after[0] if after else None


def find_template(tokenizer: Any) -> str | None:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:  # it has none
        return None


def make_recipe(tokenizer: Any, context: int, learn: str, kind: str) -> str:
    """Return a digest of all that makes tokens of rows."""
    parts = [
        FORMAT,
        kind,
        context,
        learn,
        find_template(tokenizer),
        {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        tokenizer("")["input_ids"],
        transformers.__version__,
        tokenizers.__version__,
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    digest.update(b"" if backend is None else backend.to_str().encode())
    return digest.hexdigest()
