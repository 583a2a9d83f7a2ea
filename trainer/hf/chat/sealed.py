"""A tokenizer that makes control tokens of a chat template's own text, and of no other text."""

import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
from tokenizers import Encoding, Tokenizer

from trainer import ConfigError
from trainer.base.errors import describe, shortened
from trainer.hf.chat.flaws import Flaw


class SealedTokenizer:
    """A tokenizer whose control tokens come from secret marks only, and from no text.

    It is the given one, with a mark instead of each special token's text, in the model's own words
    too: a Unigram or WordLevel model would else find them there. `seal_source` writes the marks
    into a template, so that whatever it does to a text of others makes none.
    """

    def __init__(self, tokenizer: Any, setting: str):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"""{setting}: its tokenizer, a {type(tokenizer).__name__},
                is written in Python; must be a fast one, with a tokenizer.json""")
        form = json.loads(backend.to_str())
        names = [added["content"] for added in form["added_tokens"] if added["special"]]
        names += [name for name in tokenizer.all_special_tokens if name not in names]
        self.ids = {name: int(tokenizer.convert_tokens_to_ids(name)) for name in names}
        self.stop: int | None = tokenizer.eos_token_id
        bos = tokenizer.bos_token_id
        self.head = [bos] if tokenizer("")["input_ids"][:1] == [bos] else []
        secret = str(secrets.randbits(128))  # digits: no filter of a template changes their case
        self._marks = {name: f"{secret}1{i:06}" for i, name in enumerate(names)}
        self._shields = {name: f"{secret}2{i:06}" for i, name in enumerate(names)}
        self._plain = {shield: name for name, shield in self._shields.items()}
        longest_first = sorted(map(re.escape, names), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or r"(?!)")
        self._shield = re.compile(f"{secret}2[0-9]{{6}}")
        self._mark = re.compile(f"{secret}1([0-9]{{6}})")
        self._of_mark = [self.ids[name] for name in names]
        self._backend = Tokenizer.from_str(json.dumps(_rename(form, self._marks)))
        unknown = getattr(tokenizer, "unk_token_id", None)  # any text may be that
        self._control = {*self.ids.values()} - {unknown}

    def shield(self, value: Any) -> tuple[Any, bool]:
        """Return a value whose strings have no special tokens, and whether one had."""
        if isinstance(value, str):
            shielded = self._special.sub(lambda match: self._shields[match[0]], value)
            return shielded, shielded != value
        if isinstance(value, dict):
            pairs = [(self.shield(k), self.shield(v)) for k, v in value.items()]
            has = any(k[1] or v[1] for k, v in pairs)
            return {k[0]: v[0] for k, v in pairs}, has
        if isinstance(value, list):
            items = [self.shield(each) for each in value]
            return [item for item, _ in items], any(has for _, has in items)
        return value, False

    def seal_source(self, template: str) -> str:
        """Return a template of Jinja with marks for the special tokens in its own text."""
        words: Any = {"trim_blocks": True, "lstrip_blocks": True}  # as transformers
        lexer = jinja2.Environment(**words, keep_trailing_newline=True)  # noqa: S701  # only lexes
        try:
            tokens = [*lexer.lex(template)]
        except jinja2.TemplateSyntaxError:  # which rendering names
            return template
        texts = ("data", "string")  # and no names or operators, which may look like a special token
        return "".join(self.mark(v) if kind in texts else v for _, kind, v in tokens)

    def mark(self, value: Any) -> Any:
        """Return the template's own text, or texts, with marks for its special tokens."""
        if isinstance(value, list | tuple):
            return [self.mark(each) for each in value]
        return self._special.sub(lambda match: self._marks[match[0]], str(value))

    def names_in(self, rendered: str) -> list[str]:
        """Return the special tokens that a rendered text has as text, in their order."""
        return self._special.findall(rendered)

    def seal(self, rendered: str, has_own: bool = False) -> str:
        """Return a rendered text without shields; with marks if its special tokens are all the
        template's own."""
        marked = self.mark(rendered) if has_own else rendered
        return self._shield.sub(lambda match: self._plain[match[0]], marked)

    def marks(self, sealed: str) -> list[int]:
        """Return the special tokens of a sealed text."""
        return [self._of_mark[int(match[1])] for match in self._mark.finditer(sealed)]

    def encode(self, sealed: Sequence[str]) -> list[Encoding | Flaw]:
        """Return the tokens of texts, or why one has none: a pattern of another's may panic."""
        try:
            with _quiet_panics():
                return [*self._backend.encode_batch(list(sealed), add_special_tokens=False)]
        except BaseException as error:  # Rust's PanicException is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            if len(sealed) == 1:
                problem = (
                    f"of which the tokenizer makes no tokens ({shortened(describe(error), 120)})"
                )
                return [Flaw(problem, "remove it, or take a model with another tokenizer")]
        return [each for text in sealed for each in self.encode([text])]

    def check_control(self, tokens: list[int], sealed: str) -> None:
        """Raise Flaw unless the control tokens are those of the marks."""
        control_tokens = [token for token in tokens if token in self._control]
        if control_tokens != [token for token in self.marks(sealed) if token in self._control]:
            raise Flaw("whose text becomes control tokens", "take a model with another tokenizer")

    def end_of(self, sealed: str) -> str:
        """Return a text from its last mark on."""
        begins = [match.start() for match in self._mark.finditer(sealed)]
        return sealed[begins[-1] if begins else 0 :]

    def starts_with_mark(self, sealed: str) -> bool:
        return bool(self._mark.match(sealed.lstrip()))

    def is_blank(self, sealed: str) -> bool:
        return not self._mark.sub("", sealed).strip()

    def last_mark(self, sealed: str) -> int | None:
        """Return the place after the last mark of a text, if only space follows it."""
        ends = [match.end() for match in self._mark.finditer(sealed)]
        return ends[-1] if ends and not sealed[ends[-1] :].strip() else None

    def find_end(
        self, sealed: str, start: int, content_end: int | None, token: int | None
    ) -> int | None:
        """Return the place after the first mark of a token from `start` on, else after the first
        mark of any from `content_end` on."""
        marks = [*self._mark.finditer(sealed, start)]
        ends = [m.end() for m in marks if self._of_mark[int(m[1])] == token]
        ends += [m.end() for m in marks if content_end is not None and m.start() >= content_end]
        return ends[0] if ends else None


@contextmanager
def _quiet_panics() -> Iterator[None]:
    """Drop what is written to stderr, where a panic of Rust writes the stack of each thread."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _rename(form: dict[str, Any], marks: dict[str, str]) -> dict[str, Any]:
    """Return the form of a tokenizer with a mark for each special token's text."""
    model = form["model"]
    words = model["vocab"]
    if isinstance(words, dict):
        model["vocab"] = {marks.get(word, word): token for word, token in words.items()}
    else:  # of a Unigram model, with scores
        model["vocab"] = [[marks.get(word, word), score] for word, score in words]
    if "merges" in model:  # a pair is a list, or in old files a text
        pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if "".join(pair) not in marks]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = marks.get(unknown, unknown)
    for added in form["added_tokens"]:
        added["content"] = marks.get(added["content"], added["content"])
    # special tokens are added here, and trimmed offsets would leave out spaces
    return form | {"post_processor": None, "truncation": None, "padding": None}
