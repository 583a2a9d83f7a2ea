"""The forms of a row: chats, prompts with completions, texts, and pairs of answers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trainer import ConfigError
from trainer.base.errors import visible
from trainer.hf.chat.flaws import Flaw, check_value

ROLES = ("system", "developer", "user", "assistant", "tool")
FORMS_OF_CHATS = {
    "messages": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "text": ("text",),
}
COLUMNS_OF_PAIRS = ("prompt", "chosen", "rejected")
COLUMNS_OF_CHATS = ("messages", "text", "completion", *COLUMNS_OF_PAIRS, "tools")
OF_MESSAGES = " of messages"
OF_A_CHAT = "must have messages, prompt and completion, or text"
OF_A_PAIR = "must have prompt, chosen and rejected"
MOST_MESSAGES = 1000  # each answer is rendered with all before it
MOST_NAMES_SHOWN = 5  # that an error lists


@dataclass(frozen=True)
class PlainText:
    """A text, learned from after `prompt` on; both are plain, without a chat template."""

    prompt: str
    rest: str


@dataclass(frozen=True)
class Chat:
    """Messages, of which the assistant's are learned from number `first` on."""

    messages: list[dict[str, Any]]
    first: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of the template, such as tools


Example = PlainText | Chat


def read_chat(row: Mapping[str, Any]) -> tuple[str, list[Example]]:
    """Return the name of a row's form, and its example. Raises Flaw."""
    forms = [
        form
        for form, names in FORMS_OF_CHATS.items()
        if all(row.get(name) is not None for name in names)
    ]
    if not forms:
        raise Flaw(f"without such columns: {_names(row)}", OF_A_CHAT)
    if len(forms) > 1:
        raise Flaw(f"in 2 forms, {forms[0]} and {forms[1]}", "must have one form; remove a column")
    (form,) = forms
    if form == "messages":
        return form, [Chat(_messages(row["messages"], form), 0, _options(row))]
    if form == "text":
        return form, [PlainText("", _text(row["text"], form))]
    example = _joined(row["prompt"], row["completion"], "completion", _options(row))
    return form + OF_MESSAGES * isinstance(example, Chat), [example]


def read_pair(row: Mapping[str, Any]) -> tuple[str, list[Example]]:
    """Return the name of a row's form, and the chosen and the rejected example. Raises Flaw."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        raise Flaw(f"without such columns: {_names(row)}", OF_A_PAIR)
    prompt = row.get("prompt")
    if prompt is None:
        prompt, chosen, rejected = _common_start(chosen, rejected)
    if chosen == rejected:
        raise Flaw("with equal chosen and rejected", "must be two different answers; remove it")
    answers = (("chosen", chosen), ("rejected", rejected))
    examples = [_joined(prompt, answer, name, _options(row)) for name, answer in answers]
    return "pairs" + OF_MESSAGES * isinstance(examples[0], Chat), examples


def check_forms(forms: Mapping[str, str], setting: str) -> None:
    """Raise ConfigError for more than one form. `forms`: the place of the first row of each."""
    if len(forms) > 1:
        (one, first), (two, second) = [*forms.items()][:2]
        raise ConfigError(f"""{setting}: has rows of 2 forms, {one} ({visible(first)}) and
            {two} ({visible(second)}); must be of one form; write two files""")


def content_hash(examples: list[Example]) -> int:
    """Return 64 bits of the content of a row, which decide whether it is held out."""
    parts = [vars(example) for example in examples]
    text = json.dumps(parts, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _common_start(chosen: Any, rejected: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages that both begin with, and the rest of each."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise Flaw("without a prompt", f"{OF_A_PAIR}; only messages may hold their prompt")
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    rest = (each[count] for each in (chosen, rejected) if count < len(each))
    if any(isinstance(each, Mapping) and each.get("role") != "assistant" for each in rest):
        must = "both must begin with the same messages, up to an answer"
        raise Flaw("whose chosen and rejected differ before an answer", must)
    return chosen[:count], chosen[count:], rejected[count:]


def _joined(prompt: Any, answer: Any, name: str, options: dict[str, Any]) -> Example:
    if isinstance(prompt, list) != isinstance(answer, list):
        must = "both must be strings, or both lists of messages"
        raise Flaw(f"with a {_type(prompt)} as prompt and a {_type(answer)} as {name}", must)
    if not isinstance(answer, list):
        text = _text(answer, name)
        return PlainText(_text(prompt, "prompt", may_be_empty=True), text)
    messages = _messages([*prompt, *answer], name)
    if not any(message["role"] == "assistant" for message in messages[len(prompt) :]):
        raise Flaw(f"without an assistant's message in {name}", "add the answer, or remove it")
    return Chat(messages, len(prompt), options)


def _options(row: Mapping[str, Any]) -> dict[str, Any]:
    tools = row.get("tools")
    if isinstance(tools, str):  # as many data sets hold them
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Flaw("with tools that are not JSON", "must be a list of schemas") from None
    if not tools:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Flaw(f"with a {_type(tools)} as tools", "must be a list of JSON schemas")
    check_value(tools)
    return {"tools": tools}


def _messages(raw_messages: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(raw_messages, list):
        must = 'must be a list of {"role": ..., "content": ...}'
        raise Flaw(f"with a {_type(raw_messages)} as {name}", must)
    if not raw_messages:
        raise Flaw("without messages", "add messages, or remove it")
    if len(raw_messages) > MOST_MESSAGES:
        raise Flaw(f"of more than {MOST_MESSAGES:,} messages", "divide it, or remove it")
    messages = [_message(each) for each in raw_messages]
    _check_order([message["role"] for message in messages])
    return messages


def _message(raw_message: Any) -> dict[str, Any]:
    if not isinstance(raw_message, Mapping) or "role" not in raw_message:
        shown = _names(raw_message) if isinstance(raw_message, Mapping) else _type(raw_message)
        must = 'must be {"role": ..., "content": ...}'
        raise Flaw(f"with a message that has no role ({shown})", must)
    role = raw_message["role"]
    if role not in ROLES:
        raise Flaw(f"with the role {role!r:.40}", f"must be one of {', '.join(ROLES)}")
    message = {str(key): value for key, value in raw_message.items() if value is not None}
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    for value in message.values():
        check_value(value)
    content = _content(message.get("content"), role, "tool_calls" in message)
    if role == "assistant" and not content.strip() and "tool_calls" not in message:
        raise Flaw("with an empty answer", "write the answer, or remove it")
    return message | {"content": content}


def _content(content: Any, role: str, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if isinstance(content, list) and content:
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    problem = "no content" if content is None else f"a {_type(content)} as content"
    raise Flaw(f"with {problem} of a message of {role}", "must be a string; images are not read")


def _check_order(roles: list[str]) -> None:
    advice = "system comes first if at all, then user and assistant take turns"
    spoken = roles[1:] if roles[0] in ("system", "developer") else roles
    turns = [role if role in ("user", "assistant", "tool") else "system" for role in spoken]
    is_first = not turns or turns[0] == "user"
    follows = pairwise(turns)
    is_turn = all(one != two or one == "tool" for one, two in follows)
    if not is_first or not is_turn or "system" in turns or "assistant" not in turns:
        shown = ", ".join(roles[:MOST_NAMES_SHOWN]) + (
            ", ..." if len(roles) > MOST_NAMES_SHOWN else ""
        )
        if "assistant" not in turns:
            raise Flaw("without an assistant's message", "add the answer, or remove it")
        raise Flaw(f"with roles out of order, such as {shown}", advice)


def _text(text: Any, name: str, may_be_empty: bool = False) -> str:
    if not isinstance(text, str):
        raise Flaw(f"with a {_type(text)} as {name}", "must be a string")
    if not text.strip() and not may_be_empty:
        raise Flaw(f"with an empty {name}", "write it, or remove it")
    check_value(text)
    return text


def _type(value: Any) -> str:
    names = {dict: "dict", list: "list", str: "string", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _names(row: Mapping[str, Any]) -> str:
    names = [f"{name!s:.30}" for name, value in row.items() if value is not None]
    return (
        ", ".join(names[:MOST_NAMES_SHOWN]) + (", ..." if len(names) > MOST_NAMES_SHOWN else "")
        or "none"
    )
