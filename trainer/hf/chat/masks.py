"""Tokens of chats, and which of them are learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Encoding

from trainer.hf.chat.flaws import Flaw
from trainer.hf.chat.forms import Chat, Example, PlainText
from trainer.hf.chat.sealed import SealedTokenizer
from trainer.hf.chat.template import PARTS_OF_CHATS, ChatTemplate, Span

MARK_ADVICE = "put {% generation %} into the template, or set task.options.learn=all"

# Facts of rows, which are named at the start after their number.
UNSTABLE = "the template renders an answer otherwise once other messages follow"
UNEVEN = "a token has the prompt's last and the answer's first characters; it is learned"
UNLEARNED = "the stop token is not learned: the template has it after {% endgeneration %}"
NO_STOP = "no stop token ends an answer"
BLANK = "the template leaves out an answer but for its stop token"
SPECIAL = "special tokens in the content, which are plain text here"
CUT = "longer than task.options.context, so cut"
CUT_ANSWER = "an answer loses its end by that, and its stop token"
ALTERED = "the template leaves out parts of an answer, or renders it otherwise"
PART_LEFT_OUT = "the template leaves out {}"
OF_TEXT = (UNLEARNED, NO_STOP, BLANK, UNSTABLE, ALTERED, UNEVEN, SPECIAL, CUT, CUT_ANSWER)
NAMED = (*OF_TEXT, *map(PART_LEFT_OUT.format, PARTS_OF_CHATS))


@dataclass(frozen=True)
class AnswerPlan:
    """A sealed text and its answers, spans of characters; None: all is learned.

    `befores`: for each answer the end of the text that precedes it when the model answers, from its
    last mark on: a mark's tokens do not depend on what is around it.
    """

    sealed: str
    answers: list[Span] | None
    befores: list[str]
    facts: set[str]
    parts: tuple[str, str] | None = None  # of a plain text


@dataclass(frozen=True)
class Masked:
    """Tokens (n,) of an example, which of them are learned (n,), and the facts of the example."""

    tokens: np.ndarray
    learned: np.ndarray
    facts: frozenset[str]


class Masks:
    """Makes tokens and masks of examples, of at most `context` tokens."""

    def __init__(self, tokenizer: Any, context: int, learn: str, setting: str):
        """`learn`: "assistant" or "all". `setting`: the setting of the tokenizer, for errors."""
        self._sealed = SealedTokenizer(tokenizer, setting)
        self.template = ChatTemplate(tokenizer, self._sealed, setting)
        self._context = context
        self._learns_all = learn == "all"

    def stop_of(self, example: Example) -> int | None:
        """Return the token that ends an answer: of the template, or of a plain text."""
        return self.template.stop if isinstance(example, Chat) else self._sealed.stop

    def plan(self, example: Example) -> AnswerPlan:
        """Render an example and find its answers. Raises Flaw."""
        if isinstance(example, PlainText):
            prompt, rest = example.prompt, example.rest
            _, has_special = self._sealed.shield([prompt, rest])
            facts = {SPECIAL} if has_special else set()
            if self._sealed.stop is None:
                facts.add(NO_STOP)
            text = prompt + rest
            if self._learns_all or not prompt:
                return AnswerPlan(text, None, [], facts, (prompt, rest))
            return AnswerPlan(text, [(len(prompt), len(text))], [prompt], facts, (prompt, rest))
        (messages, options), has_special = self._sealed.shield([example.messages, example.options])
        sealed, spans = self.template.render(messages, options)
        facts = {SPECIAL} if has_special else set()
        facts |= {
            PART_LEFT_OUT.format(each) for each in self.template.find_left_out(messages, options)
        }
        if self._learns_all:
            return AnswerPlan(sealed, None, [], facts)
        by = self._by_marks if self.template.marks_answers(options) else self._by_prefixes
        plan = by(messages, options, example.first, sealed, spans, facts)
        answers = (each for each in messages[example.first :] if each["role"] == "assistant")
        texts = [self._sealed.seal(each["content"]).strip() for each in answers]
        if UNSTABLE not in facts and not all(text in sealed for text in texts):
            facts.add(ALTERED)
        return plan

    def _by_marks(
        self, messages: Any, options: Any, first: int, sealed: str, spans: Any, facts: set[str]
    ) -> AnswerPlan:
        """Return the answers that `{% generation %}` marks, from message `first` on.

        Without what precedes them when the model answers, which some templates mark too.
        """
        begins: list[int] = []
        for turn, message in enumerate(messages) if first or self.template.marks_headers else ():
            if turn >= first and message["role"] == "assistant":
                both = (self.template.render(messages[:turn], options, o) for o in (True, False))
                begins += islice((len(text) for text, _ in both if sealed.startswith(text)), 1)
        if first:
            spans = [span for span in spans if begins and span[1] > begins[0]]
        spans = [(next((b for b in begins if start < b < end), start), end) for start, end in spans]
        for start, end in spans:
            if self._sealed.is_blank(sealed[start:end]):
                facts.add(BLANK)
            if self._sealed.last_mark(sealed[start:end]) is None:
                follows = self._sealed.starts_with_mark(sealed[end:])
                facts.add(UNLEARNED if follows else NO_STOP)
        return AnswerPlan(sealed, spans, [], facts)

    def _by_prefixes(
        self, messages: Any, options: Any, first: int, sealed: str, _: Any, facts: set[str]
    ) -> AnswerPlan:
        """Return what rendering adds for each answer, up to its stop token."""
        answers = []
        befores = []
        for turn in range(first, len(messages)):
            if messages[turn]["role"] != "assistant":
                continue
            before = self.template.before_answer(messages[:turn], options, sealed)
            if not sealed.startswith(before):
                raise Flaw(
                    "of which the template renders the first messages otherwise alone", MARK_ADVICE
                )
            is_last = turn + 1 == len(messages)
            after = sealed if is_last else self.template.render(messages[: turn + 1], options)[0]
            start = len(before)
            if sealed.startswith(after):
                end = self._sealed.last_mark(sealed[start : len(after)])
                if end is None:
                    facts.add(NO_STOP)
                    end = len(after) - start
            else:
                facts.add(UNSTABLE)
                answer_end = self.template.find_end(messages, options, turn, sealed, start)
                if answer_end is None:
                    raise Flaw(
                        "of which the template renders an answer otherwise later", MARK_ADVICE
                    )
                end = answer_end - start
            answers.append((start, start + end))
            if self._sealed.is_blank(sealed[start : start + end]):
                facts.add(BLANK)
            befores.append(self._sealed.end_of(before))
        return AnswerPlan(sealed, answers, befores, facts)

    def make(self, plans: Sequence[AnswerPlan]) -> list[Masked | Flaw]:
        """Return tokens and mask of each plan, or why it has none."""
        befores = dict.fromkeys(before for plan in plans for before in plan.befores)
        encodings = self._sealed.encode([*(plan.sealed for plan in plans), *befores])
        of_befores = dict(zip(befores, encodings[len(plans) :], strict=True))
        masked: list[Masked | Flaw] = []
        for plan, encoding in zip(plans, encodings, strict=False):
            needed = [encoding, *(of_befores[before] for before in plan.befores)]
            try:
                whole, *parts = map(_encoding_of, needed)
                masked.append(self._mask(plan, whole, [part.ids for part in parts]))
            except Flaw as flaw:
                masked.append(flaw)
        return masked

    def _mask(self, plan: AnswerPlan, encoding: Encoding, befores: list[list[int]]) -> Masked:
        ids = encoding.ids
        self._sealed.check_control(ids, plan.sealed)
        tokens = np.array(ids, np.int64)
        learned = np.full(len(tokens), plan.answers is None)
        facts = set(plan.facts)
        if plan.answers is not None:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for index, (begin, end) in enumerate(plan.answers):
                first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
                last = int(np.searchsorted(offsets[:, 0], end, side="left"))
                if befores and befores[index] != ids[first - len(befores[index]) : first]:
                    if plan.parts is not None:  # the prompt is read alone when the model answers
                        return self._of_parts(plan)
                    facts.add(UNEVEN)
                learned[first:last] = True
        if plan.parts is not None:
            tokens, learned = self._between(tokens, learned)
        return self._cut(tokens, learned, facts)

    def _of_parts(self, plan: AnswerPlan) -> Masked:
        both = map(_encoding_of, self._sealed.encode(plan.parts or ()))
        prompt, rest = (each.ids for each in both)
        tokens = np.array([*prompt, *rest], np.int64)
        learned = np.arange(len(tokens)) >= len(prompt)
        return self._cut(*self._between(tokens, learned), set(plan.facts))

    def _between(self, tokens: np.ndarray, learned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a plain text between the token of its start, if there is one, and that of stop."""
        head = self._sealed.head
        tail = [] if self._sealed.stop is None else [self._sealed.stop]
        masks = ([False] * len(head), learned, [True] * len(tail))
        return np.array([*head, *tokens, *tail], np.int64), np.concatenate(masks).astype(bool)

    def _cut(self, tokens: np.ndarray, learned: np.ndarray, facts: set[str]) -> Masked:
        learned[:1] = False  # no token precedes it that could tell it
        if not learned.any():
            raise Flaw("without a learned token", "give an answer, or set task.options.learn=all")
        if len(tokens) > self._context:
            facts.add(CUT)
            if learned[self._context :].any():
                facts.add(CUT_ANSWER)
        return Masked(tokens[: self._context], learned[: self._context], frozenset(facts))


def _encoding_of(encoding: Encoding | Flaw) -> Encoding:
    """Return an encoding. Raises Flaw if there is none."""
    if isinstance(encoding, Flaw):
        raise encoding
    return encoding
