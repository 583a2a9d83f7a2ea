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
from trainer.base.errors import describe, shortened
from trainer.hf.chat.flaws import Flaw
from trainer.hf.chat.sealed import SealedTokenizer

TOKENS_FORMAT = 4  # of tokens and masks: another one makes them again
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates that ask for the date get one day, else the tokens of a chat would change every day.
# Values of a call must be plain, so it is a macro, which replaces what strftime would.
DIRECTIVES = ("-d", "-m", "-H", "-I", *"aAbBcdeDFHIjmMpSTuUwWxXyYZ")
ONE_DAY = "{% macro strftime_now(format='%d %b %Y') %}{{ format" + "".join(
    f"|replace('%{each}', '{datetime(2024, 7, 26).strftime(f'%{each}')}')" for each in DIRECTIVES
)
ONE_DAY += " }}{% endmacro %}"
# digits: no filter of a template changes their case
ASKED, ANSWERED, SHOWN = "7305918264", "8264017395", "1593570286"
PROBE_CHAT = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
MOST_RENDERED = 2**24  # characters: a row has at most an eighth of them in bytes
MOST_SHOWN_OF_AN_ERROR = 120  # characters of what a template raises
_FUNCTION = {"name": SHOWN, "description": "", "parameters": {"type": "object", "properties": {}}}
_CALL = {"type": "function", "function": {"name": SHOWN, "arguments": {}}}
_CALLING: dict[str, Any] = {**PROBE_CHAT[1], "tool_calls": [_CALL]}
# what a row may have beside contents: a chat that has it, and options
PARTS_OF_CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "tools": (PROBE_CHAT, {"tools": [{"type": "function", "function": _FUNCTION}]}),
    "messages of system": ([{"role": "system", "content": SHOWN}, *PROBE_CHAT], {}),
    "messages of developer": ([{"role": "developer", "content": SHOWN}, *PROBE_CHAT], {}),
    "messages of tool": (
        [PROBE_CHAT[0], _CALLING, {"role": "tool", "content": SHOWN}, PROBE_CHAT[1]],
        {},
    ),
    "reasoning_content": ([PROBE_CHAT[0], PROBE_CHAT[1] | {"reasoning_content": SHOWN}], {}),
    "tool_calls": ([PROBE_CHAT[0], _CALLING], {}),
}

Span = tuple[int, int]


class ChatTemplate:
    """The chat template of a tokenizer, which renders chats as sealed texts."""

    def __init__(self, tokenizer: Any, sealed: SealedTokenizer, setting: str):
        self._sealed = sealed
        self._given = setting
        self.text = find_template(tokenizer)
        self._absent = "no chat template"
        if isinstance(named := tokenizer.chat_template, dict) and named:
            names = ", ".join(sorted(named))
            self._absent = f"the chat templates {names}, but none named default, which is taken"
        both = (self.text, find_template(tokenizer, [_FUNCTION]))
        # of chats without and with tools
        self._texts = [sealed.seal_source(text or "") for text in both]
        self._are_marked = [bool(GENERATION_MARK.search(text)) for text in self._texts]
        variables = tokenizer.special_tokens_map
        self._variables = {name: sealed.mark(each) for name, each in variables.items()}
        self.takes_parts = False
        self._drops_users = False
        if self.text:
            self._find_form_of_content()
        self.stop = self._find_stop()
        opened = self._probe(PROBE_CHAT[:1], opens=True)
        self._opens = opened != self._probe(PROBE_CHAT[:1])
        spans = self.render(PROBE_CHAT, {})[1] if self._probe(PROBE_CHAT) else []
        self.marks_headers = bool(spans) and spans[0][0] < len(opened)
        self._left_out: dict[str, bool] = {}

    def marks_answers(self, options: Any) -> bool:
        return self._are_marked[bool(options.get("tools"))]

    def find_left_out(self, messages: Any, options: Any) -> list[str]:
        """Return which PARTS_OF_CHATS the template leaves out, as it does of a chat of digits."""
        parts = {key for each in messages for key, value in each.items() if value} | {*options}
        parts |= {f"messages of {each['role']}" for each in messages}
        for name in PARTS_OF_CHATS.keys() & parts - self._left_out.keys():
            messages, probe_options = PARTS_OF_CHATS[name]
            shown = self._probe(messages, options=probe_options)
            self._left_out[name] = bool(shown) and SHOWN not in shown
        return [name for name in PARTS_OF_CHATS if name in parts and self._left_out[name]]

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
        rendered, bounds = self._render(messages, options, opens)
        has_own = False
        if names := self._sealed.names_in(rendered):
            # of parts: of the template, as '<|' + role + '|>', or of what it joins or changes
            neutral = ([_neutral(each) for each in messages], _neutral(options))
            own = self._sealed.names_in(self._render(*neutral, opens)[0])
            has_own = names == own
            if own and not has_own:
                advice = "take a model with another template, or remove it"
                raise Flaw("whose text the chat template makes control tokens of", advice)
        cuts = [0, *bounds, len(rendered)]
        parts = [self._sealed.seal(rendered[a:b], has_own) for a, b in pairwise(cuts)]
        ends = [*accumulate(map(len, parts))][:-1]
        return "".join(parts), list(zip(ends[::2], ends[1::2], strict=True))

    def _render(self, messages: Any, options: Any, opens: bool) -> tuple[str, list[int]]:
        """Return what the template makes of messages, and the bounds of `{% generation %}`."""
        text = self._texts[bool(options.get("tools"))]
        if self.takes_parts:
            messages = [each | {"content": _parts(each["content"])} for each in messages]
        try:
            rendering: Any = render_jinja_template(
                [messages],
                chat_template=ONE_DAY * ("strftime_now" in text) + text,
                add_generation_prompt=opens,
                return_assistant_tokens_mask=self.marks_answers(options),
                **(self._variables | options),
            )
            (rendered,), spans = rendering
        except Exception as error:  # a template is a program
            problem = shortened(describe(error), MOST_SHOWN_OF_AN_ERROR)
            advice = "mend or remove it, or take a model with another template"
            raise Flaw(f"that the chat template refuses ({problem})", advice) from None
        if len(rendered) > MOST_RENDERED:
            problem = f"of which the chat template makes more than {MOST_RENDERED:,} characters"
            raise Flaw(problem, "remove it, or take a model with another template")
        return rendered, [bound for span in (spans or [[]])[0] for bound in span]

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
        longer = ends[0][: count_common(*ends)]
        is_header = longer.startswith(before) and longer[len(before) :].strip()
        return longer if is_header and sealed.startswith(longer) else before

    def find_end(
        self, messages: Any, options: Any, turn: int, sealed: str, start: int
    ) -> int | None:
        """Return where message `turn`, an answer that begins at `start`, ends in a whole chat.

        It is the stop token, or the one that follows its content there instead; None if neither
        comes before the next message.
        """
        other = [*messages]
        other[turn + 1] = other[turn + 1] | {"content": ASKED}
        most = count_common(sealed, self.render(other, options)[0])
        content = self._sealed.seal(messages[turn]["content"]).strip()
        content_start = sealed.find(content, start, most) if content else -1
        end = content_start + len(content) if content_start >= 0 else None
        return self._sealed.find_end(sealed[:most], start, end, self.stop)

    def _probe(self, messages: Any, opens: bool = False, options: Any = None) -> str:
        """Return the sealed text of messages; empty if the template refuses them."""
        try:
            return self.render(messages, options or {}, opens)[0] if self.text else ""
        except Flaw:
            return ""

    def _find_form_of_content(self) -> None:
        """Find whether the template takes a content as text, or only as a list of parts."""
        shown = self._probe(PROBE_CHAT)
        if ASKED not in shown:
            self.takes_parts = True
            self.takes_parts = ASKED in self._probe(PROBE_CHAT)
            self._drops_users = bool(shown) and not self.takes_parts

    def _find_stop(self) -> int | None:
        """Return the special token after an answer, if there is one."""
        shown = self._probe(PROBE_CHAT) or self._probe(PARTS_OF_CHATS["messages of system"][0])
        _, answer, rest = shown.rpartition(ANSWERED)
        after = self._sealed.marks(rest) if answer else []
        return after[0] if after else None


def count_common(one: str, other: str) -> int:
    """Return how many characters two texts begin with."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _neutral(value: Any, name: str = "") -> Any:
    """Return a value with digits for each text of others: roles and types are known words."""
    if isinstance(value, str):
        return value if name in ("role", "type") or not value else ASKED
    if isinstance(value, dict):
        names = {key: str(key) if str(key).isidentifier() else ASKED for key in value}
        return {names[key]: _neutral(each, str(key)) for key, each in value.items()}
    return [_neutral(each) for each in value] if isinstance(value, list) else value


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def find_template(tokenizer: Any, tools: Any = None) -> str | None:
    """Return the template of chats, with tools if they are given: a tokenizer may have two."""
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError:  # it has none
        return None


def make_recipe(tokenizer: Any, context: int, learn: str, kind: str) -> str:
    """Return a digest of all that makes tokens of rows."""
    parts = [
        TOKENS_FORMAT,
        kind,
        context,
        learn,
        [find_template(tokenizer, tools) for tools in (None, [_FUNCTION])],
        {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        tokenizer("")["input_ids"],
        transformers.__version__,
        tokenizers.__version__,
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    digest.update(b"" if backend is None else backend.to_str().encode())
    return digest.hexdigest()
