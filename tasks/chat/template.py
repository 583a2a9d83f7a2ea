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
        self._absent = "no chat template"
        if isinstance(named := tokenizer.chat_template, dict) and named:
            names = ", ".join(sorted(named))
            self._absent = f"the chat templates {names}, but none named default, which is taken"
        self._variables = dict(tokenizer.special_tokens_map)
        self.marks_answers = bool(GENERATION.search(self.text or ""))
        self._takes_parts = False
        self._drops_users = False
        if self.text:
            self._find_form_of_content()
        self.stop = self._find_stop()
        self._opens = self._probe(PROBE[:1], opens=True) != self._probe(PROBE[:1])

    def render(self, messages: Any, options: Any, opens: bool = False) -> tuple[str, list[Span]]:
        """Return the sealed text of messages, and its spans of `{% generation %}`.

        `opens`: with what precedes an answer. Raises Flaw.
        """
        if not self.text:
            raise ConfigError(f"""{self._given}: its tokenizer has {self._absent}; give rows of
                prompt and completion or of text, or a model with one, such as an Instruct model""")
        if self._drops_users:
            advice = "take a model with another template"
            raise Flaw("whose user's turns the chat template leaves out", advice)
        if self._takes_parts:
            messages = [each | {"content": _parts(each["content"])} for each in messages]
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

    def before_answer(self, messages: Any, options: Any, sealed: str) -> str:
        """Return the sealed text before the next answer of a whole chat. Raises Flaw.

        A template that ignores `add_generation_prompt` has the header of an answer with the answer:
        it is what two different ones begin with.
        """
        before, _ = self.render(messages, options, opens=True)
        if self._opens:
            return before
        answers = ({"role": "assistant", "content": each} for each in (ASKED, ANSWERED))
        ends = [self.render([*messages, answer], options)[0] for answer in answers]
        pairs = enumerate(zip(*ends, strict=False))
        longer = ends[0][: next((place for place, (a, b) in pairs if a != b), 0)]
        is_header = longer.startswith(before) and longer[len(before) :].strip()
        return longer if is_header and sealed.startswith(longer) else before

    def _probe(self, messages: Any, opens: bool = False) -> str:
        """Return the sealed text of messages; empty if the template refuses them."""
        try:
            return self.render(messages, {}, opens)[0] if self.text else ""
        except Flaw:
            return ""

    def _find_form_of_content(self) -> None:
        """Find whether the template takes a content as text, or only as a list of parts."""
        shown = self._probe(PROBE)
        if ASKED not in shown:
            self._takes_parts = True
            self._takes_parts = ASKED in self._probe(PROBE)
            self._drops_users = bool(shown) and not self._takes_parts

    def _find_stop(self) -> int | None:
        """Return the special token after an answer, if there is one."""
        _, found, rest = self._probe(PROBE).rpartition(ANSWERED)
        after = self._sealed.marks(rest) if found else []
        return after[0] if after else None


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


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
