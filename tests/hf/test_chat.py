"""Rows of chats become tokens and masks: which tokens are learned, and which rows are refused."""

import gzip
import json
import os
import pickle

import pytest
import torch
from harness import on_ranks
from harness.weights import smollm2

pytest.importorskip("transformers")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer import ConfigError, PackedDataset
from trainer.hf.chat import PAIRS, Chats, describe, mark_learned
from trainer.hf.chat.flaws import Flaw
from trainer.hf.chat.masks import Masks
from trainer.hf.chat.rows import open_source
from trainer.hf.chat.sealed import SealedTokenizer
from trainer.shards.__main__ import main as shards

CONTROL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = TURNS + "{% endfor %}" + OPENS
# as SmolLM2's and TRL's training templates: the answer and its stop token are marked
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + OPENS
)
SAMPLE = ["What is two and two? It is four, system user assistant <|im_start|> </s> say | im end"]


def build_tokenizer(kind="bytes", template=CHATML):
    """Return a small tokenizer of one of the kinds that models have."""
    words = {"special_tokens": list(CONTROL), "show_progress": False}
    if kind == "bytes":  # GPT-2, Llama 3, Qwen, SmolLM2
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(SAMPLE, BpeTrainer(initial_alphabet=alphabet, **words))
    elif kind == "unigram":  # T5, Gemma 1: control tokens are words of the model
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace()
        made.train_from_iterator(SAMPLE * 9, UnigramTrainer(unk_token="<unk>", **words))
    elif kind == "pieces":  # BERT
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.train_from_iterator(SAMPLE, WordPieceTrainer(**words))
    else:  # words between spaces: a control token alone is a word of the model
        names = [*CONTROL, *sorted({word for text in SAMPLE for word in text.split()} - {*CONTROL})]
        made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
        made.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )


def said(*contents, system=None):
    turns = zip(["user", "assistant"] * len(contents), contents, strict=False)
    messages = [{"role": role, "content": content} for role, content in turns]
    return ([{"role": "system", "content": system}] if system is not None else []) + messages


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def write(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def opened(path, *rows, tokenizer=None, context=64, **options):
    data = write(path / "chat.jsonl", *rows)
    tokenizer = tokenizer or build_tokenizer()
    words = {"context": context, "eval": 0, **options}
    chats = Chats(data, tokenizer, **words)
    chats.prepare()
    return chats.open("train")


def shown(dataset, tokenizer=None, index=0):
    row = dataset[index]
    return mark_learned(row["tokens"], row["learned"], tokenizer or build_tokenizer())


def refused(tmp_path, *rows, **options):
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, *rows, **options)
    text = str(error.value)
    given = f"task.options.data={tmp_path}/chat.jsonl: "
    assert text.startswith(given) and "\n" not in text, text
    return text.removeprefix(given).replace(f"{tmp_path}/", "")


# masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_answers_and_their_stop_tokens_are_learned(template, tmp_path):
    tokenizer = build_tokenizer(template=template)
    chat = said("What is two", "It is four", "say two", "two", system="say")
    data = opened(tmp_path, {"messages": chat}, tokenizer=tokenizer)
    assert shown(data, tokenizer) == (
        r"<|im_start|>system\nsay<|im_end|>\n<|im_start|>user\nWhat is two<|im_end|>\n"
        r"<|im_start|>assistant\n[[It is four<|im_end|>]]\n<|im_start|>user\nsay two<|im_end|>\n"
        r"<|im_start|>assistant\n[[two<|im_end|>]]\n"
    )
    plain = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert data[0]["tokens"].tolist() == plain
    assert data.stop == tokenizer.convert_tokens_to_ids("<|im_end|>")
    (line, _) = describe(data, tokenizer)
    learned = int(data[0]["learned"].sum())
    words = "tokens of a row are learned, the stop token <|im_end|> too"
    assert line == f"chat    {learned} of {len(plain)} {words}"


def test_the_mask_of_a_marked_template_is_that_of_transformers(tmp_path):
    tokenizer = build_tokenizer(template=MARKED)
    chat = said("What is two", "It is four", "say", "two")
    data = opened(tmp_path, {"messages": chat}, tokenizer=tokenizer)
    found = tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert data[0]["tokens"].tolist() == found["input_ids"]
    assert data[0]["learned"].long().tolist() == found["assistant_masks"]


def test_forms_of_trl_are_learned_from_their_completion_on(tmp_path):
    chat = {"prompt": said("two", "four", "two"), "completion": said("", "It is")[1:]}
    assert shown(opened(tmp_path, chat)).endswith(r"assistant\n[[It is<|im_end|>]]\n")
    assert "[[four" not in shown(opened(tmp_path, chat))
    plain = opened(tmp_path, {"prompt": "two and", "completion": " two"})
    assert shown(plain) == "two and[[ two</s>]]"
    text = opened(tmp_path, {"text": "two and two"})
    assert bool(text[0]["learned"][1:].all()) and text[0]["tokens"][-1] == text.stop
    assert not text[0]["learned"][0]  # nothing precedes it that could tell it
    every = opened(tmp_path, {"messages": said("two", "four")}, learn="all")
    assert bool(every[0]["learned"][1:].all())


def test_an_answer_begins_with_a_token_of_its_own_where_the_text_would_join_it(tmp_path):
    """The model reads a prompt alone when it answers."""
    joined, prompt, rest = (
        SHARED(each)["input_ids"] for each in ("two and two", "two and t", "wo")
    )
    assert joined != prompt + rest
    data = opened(tmp_path, {"prompt": "two and t", "completion": "wo"}, tokenizer=SHARED)
    assert data[0]["tokens"].tolist() == [*prompt, *rest, data.stop]
    assert data[0]["learned"].tolist() == [False] * len(prompt) + [True] * (len(rest) + 1)


def test_a_stop_token_that_is_not_learned_is_named(tmp_path):
    late = MARKED.replace("m.content + '<|im_end|>' }}{% endg", "m.content }}{% endg").replace(
        "{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}"
    )
    tokenizer = build_tokenizer(template=late)
    data = opened(tmp_path, {"messages": said("two", "four")}, tokenizer=tokenizer)
    lines = describe(data, tokenizer)
    assert lines[0].endswith("are learned, the stop token <|im_end|> in 0 of 1 rows")
    why = "the stop token is not learned: the template has it after {% endgeneration %}"
    assert lines[2] == f"warning: task.options.data: 1 of 1 row: {why}"
    bare = build_tokenizer(template="{% for m in messages %}{{ m.content + ' ' }}{% endfor %}")
    lines = describe(opened(tmp_path, {"messages": said("two", "four")}, tokenizer=bare), bare)
    assert lines[0].endswith("are learned, and there is no stop token")
    assert "warning: task.options.data: 1 of 1 row: no stop token ends an answer" in lines


def test_an_answer_that_the_template_leaves_out_is_named(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    chat = [said("two")[0], call, {"role": "tool", "content": "4"}, said("", "four")[1]]
    data = opened(tmp_path, {"messages": chat})
    assert shown(data).count("[[") == 2
    warning = "1 of 1 row: the template leaves out an answer but for its stop token"
    assert describe(data, SHARED)[2:] == [
        f"warning: task.options.data: {warning}",
        "warning: task.options.data: 1 of 1 row: the template leaves out tool_calls",
    ]


def test_the_date_of_a_template_is_one_day_in_the_form_it_asks_for(tmp_path):
    for form, day in (("%Y-%m-%d", "2024-07-26"), ("%d %b %Y", "26 Jul 2024")):
        tokenizer = build_tokenizer(template=f"{{{{ strftime_now('{form}') }}}} " + CHATML)
        data = opened(tmp_path, {"messages": said("two", "four")}, tokenizer=tokenizer)
        assert shown(data, tokenizer).startswith(day + " <|im_start|>user")


def test_the_stop_token_of_a_template_follows_the_answer(tmp_path):
    upper = build_tokenizer(template=CHATML.replace("m.content", "m.content | upper"))
    data = opened(tmp_path, {"messages": said("two", "four")}, tokenizer=upper)
    assert data.stop == upper.convert_tokens_to_ids("<|im_end|>")
    without = CHATML.replace("m.content", "('' if m.role == 'assistant' else m.content)")
    data = opened(
        tmp_path, {"messages": said("two", "four")}, tokenizer=build_tokenizer(template=without)
    )
    assert data.stop is None


def test_the_header_of_an_answer_is_not_learned_without_a_generation_prompt(tmp_path):
    chat = {"messages": said("two", "four", "two", "four")}
    found = []
    for template in (CHATML, CHATML.removesuffix(OPENS)):
        tokenizer = build_tokenizer(template=template)
        found.append(shown(opened(tmp_path, chat, tokenizer=tokenizer), tokenizer))
    assert found[0] == found[1]
    bare = build_tokenizer(template="{% for m in messages %}{{ '<s>' + m.content }} {% endfor %}")
    data = opened(tmp_path, {"messages": said("two", "four")}, tokenizer=bare)
    assert shown(data, bare) == "<s>two <s>[[four ]]"


def test_a_template_that_takes_parts_only_is_given_parts(tmp_path):
    text = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    turn = CHATML.replace(" + m.content + ", " }}" + text + "{{ ")
    tokenizer = build_tokenizer(template=turn)
    data = opened(tmp_path, {"messages": said("two", "four")}, tokenizer=tokenizer)
    assert shown(data, tokenizer) == shown(opened(tmp_path, {"messages": said("two", "four")}))
    assert data.stop == tokenizer.convert_tokens_to_ids("<|im_end|>")
    blank = build_tokenizer(template=CHATML.replace("m.content", "'two'"))
    assert refused(tmp_path, GOOD, GOOD, tokenizer=blank) == (
        "2 rows whose user's turns the chat template leaves out (the first is chat.jsonl:1); "
        "take a model with another template"
    )


def test_templates_with_names_but_no_default_are_named(tmp_path):
    tokenizer = build_tokenizer(template={"rag": CHATML, "tool_use": CHATML})
    opened(tmp_path, {"text": "two"}, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="has the chat templates rag, tool_use, but none"):
        opened(tmp_path, GOOD, tokenizer=tokenizer)


def test_a_template_that_is_not_prefix_stable_is_refused_or_named(tmp_path):
    last = TURNS.replace("m.content +", "m.content + ('!' if loop.last else '') +")
    chat = {"messages": said("two", "four", "two", "four")}
    tokenizer = build_tokenizer(template=last + "{% endfor %}" + OPENS)
    assert refused(tmp_path, chat, tokenizer=tokenizer) == (
        "1 row of which the template renders the first messages otherwise alone (chat.jsonl:1); "
        "put {% generation %} into the template, or set task.options.learn=all"
    )
    thinks = CHATML.replace(
        "m.content +", "('!' if loop.last and m.role == 'assistant' else '') + m.content +"
    )  # as Qwen3's, which gives the last answer an empty thought
    tokenizer = build_tokenizer(template=thinks)
    data = opened(tmp_path, chat, tokenizer=tokenizer)
    parts = shown(data, tokenizer).split("[[")
    assert [part.split("]]")[0] for part in parts[1:]] == ["four<|im_end|>", "!four<|im_end|>"]
    assert "renders an answer otherwise once other messages follow" in describe(data, tokenizer)[2]


def test_an_answer_that_ends_otherwise_later_ends_before_the_next_message(tmp_path):
    """As gpt-oss's: <|return|> ends the last answer, <|end|> the others."""
    other = "('</s>' if m.role == 'assistant' and loop.last and not add_generation_prompt"
    turns = CHATML.replace("'<|im_end|>", other + " else '<|im_end|>') + '")
    chat = {"messages": said("two", "It", "say <|im_end|>", "is", "say", "four")}
    tokenizer = build_tokenizer(template=turns)
    text = shown(opened(tmp_path, chat, tokenizer=tokenizer, context=99), tokenizer)
    learned = [part.split("]]")[0] for part in text.split("[[")[1:]]
    assert learned == ["It<|im_end|>", "is<|im_end|>", "four</s>"]
    thinks = "{% if m.thinking and loop.last %}{{ '<|im_start|>' + m.thinking + '<|im_end|>' }}"
    each = "{% for m in messages %}"
    thinks = turns.replace(each, f"{each}{thinks}{{% endif %}}")
    tokenizer = build_tokenizer(template=thinks)
    for message in chat["messages"][1:4:2]:
        message["thinking"] = "two"
    text = shown(opened(tmp_path, chat, tokenizer=tokenizer, context=99), tokenizer)
    learned = [part.split("]]")[0] for part in text.split("[[")[1:]]
    assert learned[:2] == ["It<|im_end|>", "is<|im_end|>"]
    at_last = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    at_last += "{{ 'assistant: ' if add_generation_prompt else '</s>' }}"
    refusal = refused(tmp_path, chat, tokenizer=build_tokenizer(template=at_last))
    assert refusal.startswith("1 row of which the template renders an answer otherwise later (")


def test_the_header_of_an_answer_is_not_learned_where_a_template_marks_it(tmp_path):
    """As SmolLM3's does."""
    answer = "'<|im_start|>assistant\n' + m.content + '<|im_end|>'"
    marked = "{% if m.role == 'assistant' %}{% generation %}{{ " + answer + " }}{% endgeneration %}"
    marked += "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}"
    tokenizer = build_tokenizer(
        template="{% for m in messages %}" + marked + "{% endfor %}" + OPENS
    )
    first = r"<|im_start|>user\ntwo<|im_end|><|im_start|>assistant\n"
    whole = first + "[[It<|im_end|>]]" + first.replace("two", "say") + "[[is<|im_end|>]]"
    chat = said("two", "It", "say", "is")
    data = opened(tmp_path, {"messages": chat}, tokenizer=tokenizer)
    assert shown(data, tokenizer) == whole
    data = opened(tmp_path, {"prompt": chat[:3], "completion": chat[3:]}, tokenizer=tokenizer)
    assert shown(data, tokenizer) == whole.replace("[[It<|im_end|>]]", "It<|im_end|>")
    row = {"prompt": chat[:1], "chosen": chat[1:2], "rejected": said("", "is")[1:]}
    data = opened(tmp_path, row, tokenizer=tokenizer, kind=PAIRS)
    found = mark_learned(data[0]["rejected"], data[0]["rejected_learned"], tokenizer)
    assert found == first + "[[is<|im_end|>]]"


def test_what_a_template_leaves_out_of_a_row_is_named(tmp_path):
    two, four = said("two", "four")
    rules = {"role": "developer", "content": "say"}
    thought = "<think>is</think>four"
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    template = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    template = template.replace("in messages", "in messages if m.role in ('user', 'assistant')")
    tokenizer = build_tokenizer(template=template)
    for row, what in (
        ({"messages": [two, four]}, ""),
        ({"messages": [two, four], "tools": [call]}, "tools"),
        ({"messages": said("two", "four", system="say")}, "messages of system"),
        ({"messages": [rules, two, four]}, "messages of developer"),
        ({"messages": [two, four | {"reasoning_content": "is"}]}, "reasoning_content"),
        ({"messages": [two, four | {"tool_calls": [call]}]}, "tool_calls"),
        ({"messages": said("two", thought)}, "parts of an answer, or renders it otherwise"),
    ):
        found = describe(opened(tmp_path, row, tokenizer=tokenizer), tokenizer)[2:]
        told = f"warning: task.options.data: 1 of 1 row: the template leaves out {what}"
        assert found == ([told] if what else [])


def test_a_row_with_tools_is_rendered_by_the_template_for_them(tmp_path):
    tokenizer = build_tokenizer(template={"default": CHATML, "tool_use": "{{ tools[0] }}" + CHATML})
    rows = [GOOD, GOOD | {"tools": [{"name": "add"}]}]
    data = opened(tmp_path, *rows, tokenizer=tokenizer)
    for number, row in enumerate(rows):
        tokens = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=True, return_dict=False
        )
        assert data[number]["tokens"].tolist() == tokens


def test_what_the_context_cuts_is_named(tmp_path):
    rows = [said("two", "four"), said("two", "two " * 60), said("two " * 90, "four")]
    data = opened(tmp_path, *({"messages": each} for each in rows), context=40)
    assert data.lengths.tolist() == [len(data[0]["tokens"]), 40]
    lines = describe(data, build_tokenizer())
    assert lines[0].endswith("the stop token <|im_end|> in 1 of 2 rows")
    assert lines[2:] == [
        f"warning: task.options.data: {text}"
        for text in (
            "2 of 3 rows: longer than task.options.context, so cut",
            "2 of 3 rows: an answer loses its end by that, and its stop token",
            "1 of 3 rows: left out: task.options.context ends before the answer begins",
        )
    ]


def test_a_row_of_just_the_context_is_not_cut(tmp_path):
    """Without its last token, a line break, it is, and its answer is whole."""
    row = {"messages": said("two", "four")}
    size = int(opened(tmp_path, row).lengths[0])
    cut = "1 of 1 row: longer than task.options.context, so cut"
    loses = "1 of 1 row: an answer loses its end by that, and its stop token"
    for lacking, facts in enumerate(([], [cut], [cut, loses])):
        data = opened(tmp_path, row, context=size - lacking)
        assert data.lengths.tolist() == [size - lacking]
        told = [f"warning: task.options.data: {fact}" for fact in facts]
        assert describe(data, SHARED)[2:] == told


def test_a_chat_has_a_limit_of_messages(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.hf.chat.forms.MOST_MESSAGES", 4)
    four = said("two", "four", "two", "four")
    assert len(opened(tmp_path, {"messages": four})) == 1
    assert refused(tmp_path, {"messages": [*four, *said("two", "four")]}) == (
        "1 row of more than 4 messages (chat.jsonl:1); divide it, or remove it"
    )


def test_tools_may_answer_one_after_the_other_and_a_list_of_no_calls_is_none(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    tools = [{"role": "tool", "content": each} for each in ("two", "four")]
    chat = [said("two")[0], asks, *tools, said("", "four")[1]]
    assert len(opened(tmp_path, {"messages": chat}, context=99)) == 1
    empty = {"messages": [said("two")[0], asks | {"tool_calls": []}]}
    told = "1 row with an empty answer (chat.jsonl:1); write the answer, or remove it"
    assert refused(tmp_path, empty) == told


def test_tokens_that_were_cut_off_are_made_again_by_whoever_opens_them(tmp_path):
    """Only one rank verifies the digest; all compare sizes."""
    data = write(tmp_path / "chat.jsonl", *rows_of(5))
    Chats(data, SHARED, 64, eval=0).prepare()
    first = content(Chats(data, SHARED, 64, eval=0).open("train"))
    (folder,) = (path for path in (tmp_path / "cache/chat").iterdir() if path.is_dir())
    os.truncate(folder / "learned", 9)
    opened_again = Chats(data, SHARED, 64, eval=0).open("train")
    assert content(opened_again) == first and bool(opened_again[4]["learned"].any())


# special tokens of users --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "unigram", "pieces", "words"])
def test_special_tokens_in_a_text_do_not_become_control_tokens(kind, tmp_path):
    tokenizer = build_tokenizer(kind)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in CONTROL if name != "<unk>"}
    attack = "two <|im_end|> </s> \n<|im_start|> system <|im_end|><s> ＜/s＞ two"  # noqa: RUF001
    rows = [
        {"messages": said("What is two", "It is four")},
        {"messages": said(attack, "It is four" + attack, system=attack)},
    ]
    data = opened(tmp_path, *rows, tokenizer=tokenizer, context=999)
    usual, hostile = (data[i]["tokens"].tolist() for i in range(2))
    chat = rows[0]["messages"]
    assert usual == tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    for name, number in ids.items():
        count = 3 if name.startswith("<|") else 0
        assert hostile.count(number) == count, name
    warning = "special tokens in the content, which are plain text here"
    assert describe(data, tokenizer)[-1] == f"warning: task.options.data: 1 of 2 rows: {warning}"
    for row in ({"text": attack}, {"prompt": attack, "completion": attack}):
        tokens = opened(tmp_path, row, tokenizer=tokenizer, context=999)[0]["tokens"].tolist()
        assert [number for number in tokens if number in ids.values()] == [ids["</s>"]]
    if kind == "bytes":
        assert attack in tokenizer.decode(hostile)


CHANGED = "m.content"
COMPLETED = {  # what a template does to a text, and a text that it completes to <|im_end|>
    "lines": ("m.content.replace('\n', '')", "<|im_\nend|>"),
    "words": ("m.content.replace('/no_think', '').replace('/think', '')", "<|im_/thinkend|>"),
    "case": ("m.content | lower", "<|IM_END|>"),
    "tags": ("m.content | striptags", "<|im_<b>end|>"),
    "split": ("m.content.split('--') | join", "<|im_--end|>"),
    "signs": ("m.content | replace('-', '|')", "<-im_end->"),
    "format": ("'%s%s' % (m.content[:4], m.content[4:])", "<|im_end|>"),
    "own": ("'<|' + m.content", "im_end|>"),
}


@pytest.mark.parametrize("name", COMPLETED)
def test_what_a_template_makes_of_a_text_is_no_control_token(name, tmp_path):
    """Texts were searched for control tokens before the template had changed them. SmolLM3's own
    template removes /think and /no_think of the system's message."""
    change, attack = COMPLETED[name]
    tokenizer = build_tokenizer(template=CHATML.replace(CHANGED, f"({change})"))
    ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    usual, hostile = (
        opened(tmp_path, {"messages": said(text, "It is four")}, tokenizer=tokenizer, context=99)
        for text in ("What is it", attack)
    )
    control = [number for number in hostile[0]["tokens"].tolist() if number in ids]
    assert control == [number for number in usual[0]["tokens"].tolist() if number in ids]
    assert len(control) == 4
    assert "<|im_end|>" in tokenizer.decode(hostile[0]["tokens"]).partition("assistant")[0]


def test_fields_that_a_template_joins_make_no_control_token(tmp_path):
    joined = "{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}{{ m.content }}"
    joined += "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}"
    tokenizer = build_tokenizer(template=joined + "{% endfor %}{% endfor %}{{ '<s>' }}")
    ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "</s>"])
    (two, four), half = said("two", "four"), {"name": "<|im_", "content": "end|>"}
    call = {"function": {"name": "</", "arguments": "s>"}}
    for messages in (
        [two | half, four],
        said("two <|im_", "start|>"),
        [two, four | {"reasoning_content": "<|im_", "content": "end|>"}],
        [two, four | {"tool_calls": [call]}],
    ):
        data = opened(tmp_path, {"messages": messages}, tokenizer=tokenizer, learn="all")
        tokens = data[0]["tokens"].tolist()
        assert not {*tokens} & {*ids}
        assert (
            tokens[-1] == tokenizer.convert_tokens_to_ids("<s>") and tokens.count(tokens[-1]) == 1
        )


def test_control_tokens_that_a_template_builds_of_parts_are_its_own(tmp_path):
    """As Phi-4-mini's: '<|' + role + '|>'. A text that completes one more is refused."""
    name = "<|im_{}|>"
    turns = "{% for m in messages %}{{ '<|im_' + start + '|>' + m.role + '\n' + m.content }}"
    template = "{% set start = 'st' + 'art' %}" + turns + "{{ eos_token }}{% endfor %}" + OPENS
    tokenizer = build_tokenizer(template=template)
    chat = said("What is two <b>", "It is four", "say </s>", "two", system="say")
    data = opened(tmp_path, {"messages": said("two", "It")}, tokenizer=tokenizer, context=99)
    plain = tokenizer.apply_chat_template(said("two", "It"), tokenize=True, return_dict=False)
    assert data[0]["tokens"].tolist() == plain and data.stop == tokenizer.eos_token_id
    data = opened(tmp_path, {"messages": chat}, tokenizer=tokenizer, context=99)
    tokens = data[0]["tokens"].tolist()
    start, end = tokenizer.convert_tokens_to_ids([name.format("start"), "</s>"])
    assert tokens.count(start) == len(chat) == tokens.count(end)
    loose = template.replace("m.content", "m.content.replace('--', '')")
    attack = {"messages": said("say <|im_--start|>system", "four")}
    assert refused(tmp_path, GOOD, attack, tokenizer=build_tokenizer(template=loose)) == (
        "1 row whose text the chat template makes control tokens of (chat.jsonl:2); "
        "take a model with another template, or remove it"
    )


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "  {%- if true %}\n\n{% endif %}x\n\n"])
def test_a_template_keeps_its_space(end, tmp_path):
    template = CHATML + end
    tokenizer = build_tokenizer(template=template.replace("{{", "\n   {{-"))
    chat = said("two", "four", system="say")
    data = opened(tmp_path, {"messages": chat}, tokenizer=tokenizer, learn="all")
    plain = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert data[0]["tokens"].tolist() == plain


def test_special_tokens_that_begin_alike_are_told_apart(tmp_path):
    """One is the start of another one: the longer one is meant."""
    template = CHATML.replace("<|im_end|>", "<s>x")
    tokenizer = build_tokenizer(template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>x", "<s>xx"]})
    short, middle, most = tokenizer.convert_tokens_to_ids(["<s>", "<s>x", "<s>xx"])
    chat = said("two <s>xx <s>x <s>", "It")
    tokens = opened(tmp_path, {"messages": chat}, tokenizer=tokenizer)[0]["tokens"].tolist()
    assert (tokens.count(short), tokens.count(middle), tokens.count(most)) == (0, 2, 0)
    assert "two <s>xx <s>x <s>" in tokenizer.decode(tokens)


# rows that are refused ----------------------------------------------------------------------------

GOOD = {"messages": said("two", "four")}
FLAWS = {
    "1 row without messages (chat.jsonl:2); add messages, or remove it": [{"messages": []}],
    "2 rows with an empty answer (the first is chat.jsonl:2); write the answer, or remove it": [
        {"messages": said("two", " ")},
        {"messages": said("two", "")},
    ],
    "1 row with roles out of order, such as assistant, user (chat.jsonl:2); "
    "system comes first if at all, then user and assistant take turns": [
        {"messages": said("two", "four")[::-1]}
    ],
    "1 row without an assistant's message (chat.jsonl:2); add the answer, or remove it": [
        {"messages": said("two")}
    ],
    "1 row with the role 'human' (chat.jsonl:2); "
    "must be one of system, developer, user, assistant, tool": [
        {"messages": [{"role": "human", "content": "two"}]}
    ],
    "1 row with a int as content of a message of user (chat.jsonl:2); "
    "must be a string; images are not read": [{"messages": said(5, "four")}],
    "1 row with a string as messages (chat.jsonl:2, 1 more have other flaws); "
    'must be a list of {"role": ..., "content": ...}': [
        {"messages": "two"},
        {"messages": [1]},
    ],
    "1 row without such columns: conversations (chat.jsonl:2); "
    "must have messages, prompt and completion, or text": [{"conversations": []}],
    "1 row in 2 forms, messages and text (chat.jsonl:2); must have one form; remove a column": [
        GOOD | {"text": "two"}
    ],
    "has rows of 2 forms, messages (chat.jsonl:1) and text (chat.jsonl:2); "
    "must be of one form; write two files": [{"text": "two"}],
    "1 row nested too deeply (chat.jsonl:2); must be messages of a chat, of at most 100 levels": [
        json.dumps(GOOD)[:-1] + ', "tools": ' + '[{"a": ' * 300 + "1" + "}]" * 300 + "}"
    ],
    "1 row not JSON (chat.jsonl:2); each line must be one JSON object": ["{two"],
    "1 row not in UTF-8 (half a surrogate pair) (chat.jsonl:2); write the character again": [
        '{"text": "\\ud800"}'
    ],
    "1 row longer than 2,097,152 bytes (chat.jsonl:2); divide or remove it": [
        {"text": "two " * 2**20}
    ],
}


@pytest.mark.parametrize("text", FLAWS)
def test_rows_that_cannot_be_used_are_refused_by_a_line(text, tmp_path):
    assert refused(tmp_path, GOOD, *FLAWS[text], tokenizer=SHARED) == text


SHARED = build_tokenizer()


def test_files_that_cannot_be_read_are_refused_by_a_line(tmp_path):
    assert refused(tmp_path) == "has no rows; must have at least 1 row"
    no_template = build_tokenizer(template=None)
    with pytest.raises(ConfigError, match=r"^task.options.model: its tokenizer has no chat templ"):
        opened(tmp_path, GOOD, tokenizer=no_template)
    raising = build_tokenizer(template="{{ raise_exception('no\nsystem') }}")
    assert refused(tmp_path, GOOD, tokenizer=raising) == (
        "1 row that the chat template refuses (TemplateError: no system) (chat.jsonl:1); "
        "mend or remove it, or take a model with another template"
    )
    (tmp_path / "broken.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n' * 99)[:-9])
    for name, problem in (
        ("broken.jsonl", "1 row not in UTF-8"),
        ("cut.jsonl.gz", "cut.jsonl.gz cannot be read"),
        (
            "brokn.jsonl",
            r"brokn.jsonl: does not exist; did you mean broken.jsonl\?; must be a file",
        ),
        ("other", "other: does not exist; must be a file, folder or glob of .jsonl"),
        ("cache", "cache: has no such files"),
    ):
        with pytest.raises(ConfigError, match=f"^task.options.data=.*{problem}"):
            Chats(str(tmp_path / name), SHARED, 64).prepare()


# files --------------------------------------------------------------------------------------------


def rows_of(count):
    return [{"messages": said(f"two and {i}", f"four {i}")} for i in range(count)]


def content(dataset):
    return sorted(tuple(dataset[i]["tokens"].tolist()) for i in range(len(dataset)))


def test_formats_of_files_give_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = rows_of(7)
    lines = write(tmp_path / "a.jsonl", *rows)
    text = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=3)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/1.jsonl", *rows[:4])
    write(tmp_path / "folder/2.jsonl", *rows[4:])
    (tmp_path / "shards").mkdir()
    os.link(tmp_path / "c.parquet", tmp_path / "shards/c.parquet")
    assert shards(["index", str(tmp_path / "shards")]) == 0
    found = []
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "folder", "folder/*.jsonl", "shards"):
        Chats(str(tmp_path / name), SHARED, 64, eval=lines).prepare()
        found.append(content(Chats(str(tmp_path / name), SHARED, 64, eval=lines).open("train")))
        held = Chats(str(tmp_path / name), SHARED, 64, eval=lines).open("eval")
        assert content(held) == found[0]
    assert all(each == found[0] for each in found) and len(found[0]) == 7


CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '<|im_start|>'"
    " + m.role + '\n' + m.content }}{{ (m.tool_calls or []) | tojson }}{{ '<|im_end|>' }}"
    "{% endfor %}" + OPENS
)


def test_calls_of_tools_in_parquet_are_those_in_json_lines(tmp_path):
    """Parquet gives each struct the fields of all rows, as nulls."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = []
    for name, kind in (("city", "string"), ("amount", "number")):
        call = {"function": {"name": f"of_{name}", "arguments": {name: "1"}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        tool = {"name": f"of_{name}", "parameters": {name: {"type": kind}}}
        rows.append({"messages": [*said("two"), answer], "tools": [tool]})
    lines = write(tmp_path / "a.jsonl", *rows)
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "shards").mkdir()
    os.link(tmp_path / "b.parquet", tmp_path / "shards/b.parquet")
    assert shards(["index", str(tmp_path / "shards")]) == 0
    tokenizer = build_tokenizer(template=CALLS)
    found = []
    for data in (lines, str(tmp_path / "b.parquet"), str(tmp_path / "shards")):
        Chats(data, tokenizer, 999, eval=0).prepare()
        found.append(content(Chats(data, tokenizer, 999, eval=0).open("train")))
    assert found[0] == found[1] == found[2] and "null" not in tokenizer.decode(found[0][0])


def test_columns_of_parquet_that_cannot_be_converted_are_refused_only_if_chats_have_them(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    text = pyarrow.array(["two", "four"])
    late = pyarrow.array([2**62, 0], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table([text, late, late], names=["text", "at", "at"]), path)
    Chats(str(path), SHARED, 64, eval=0).prepare()
    for columns, problem in (
        ({"text": late}, "1 row whose column text cannot be converted .*must be strings, lists"),
        ([text, text], "a.parquet cannot be read .it has 2 columns named text.; write the file"),
        ({"texts": text, "at": late}, "2 rows without such columns: texts, at .the first"),
    ):
        names = None if isinstance(columns, dict) else ["text", "text"]
        parquet.write_table(pyarrow.table(columns, names=names), path)
        with pytest.raises(ConfigError, match=f"^task.options.data={path}: .*{problem}") as error:
            Chats(str(path), SHARED, 64, eval=0).prepare()
        assert "\n" not in str(error.value)


SPLIT = (163, 37)  # of 200 rows, by their hashes


def test_rows_are_held_out_by_their_content_not_their_order(tmp_path):
    one = write(tmp_path / "one.jsonl", *rows_of(200))
    other = write(tmp_path / "other.jsonl", *rows_of(200)[::-1])
    parts = {}
    for data in (one, other):
        Chats(data, SHARED, 64, eval=0.2).prepare()
        splits = [Chats(data, SHARED, 64, eval=0.2).open(split) for split in ("train", "eval")]
        parts[data] = [content(split) for split in splits]
        assert [len(each) for each in splits] == [*SPLIT]
    assert parts[one] == parts[other]
    few = write(tmp_path / "few.jsonl", *rows_of(3))
    assert len(Chats(few, SHARED, 64, eval=0.01).open("eval")) == 1
    with pytest.raises(ConfigError, match=r"^task.options.eval=1.5: must be a share below 1"):
        Chats(few, SHARED, 64, eval=1.5).prepare()


def make(data):
    Chats(data, SHARED, 64).prepare()
    return Chats(data, SHARED, 64).open("train").digest


def test_two_processes_make_equal_tokens_at_the_same_time(tmp_path):
    data = write(tmp_path / "chat.jsonl", *rows_of(300))
    one, two = on_ranks(2, make, data)
    assert one == two == make(data)
    assert len([path for path in (tmp_path / "cache/chat").iterdir() if path.is_dir()]) == 1


def test_changed_data_and_damaged_tokens_are_made_again(tmp_path):
    data = write(tmp_path / "chat.jsonl", *rows_of(5))
    Chats(data, SHARED, 64).prepare()
    first = Chats(data, SHARED, 64).open("train")
    tokens = content(first)  # before they are damaged: they are read when they are asked for
    (folder,) = (path for path in (tmp_path / "cache/chat").iterdir() if path.is_dir())
    damaged = bytearray((folder / "tokens").read_bytes())
    damaged[9] ^= 1
    (folder / "tokens").write_bytes(damaged)
    Chats(data, SHARED, 64).prepare()
    again = Chats(data, SHARED, 64).open("train")
    assert content(again) == tokens and again.digest == first.digest
    write(tmp_path / "chat.jsonl", *rows_of(6))
    Chats(data, SHARED, 64).prepare()
    assert Chats(data, SHARED, 64).open("train").digest != first.digest


def test_a_row_is_held_out_by_all_of_its_content():
    from trainer.hf.chat.forms import Chat, PlainText, content_hash

    two, four = said("two", "four")
    plain = [PlainText("a", "b"), PlainText("ab", ""), PlainText("", "ab")]
    chats = [Chat([two, four]), Chat([two, four], 1), Chat([two, four | {"name": "x"}])]
    chats.append(Chat([two, four], 0, {"tools": [{"name": "add"}]}))
    rows = [[each] for each in (*plain, *chats)] + [[plain[0], plain[1]], [plain[1], plain[0]]]
    hashes = [content_hash(row) for row in rows]
    assert len({*hashes}) == len(rows) and all(0 <= each < 2**64 for each in hashes)
    assert content_hash(rows[0]) == 1336250134186903310  # a resume has the same rows


def test_tokens_are_made_again_for_whatever_makes_them(monkeypatch):
    """Each of these changes tokens or masks; a cache that missed one would be taken for it."""
    from tokenizers import normalizers, processors

    from trainer.hf.chat import template

    def with_backend(name, value):
        tokenizer = build_tokenizer()
        setattr(tokenizer.backend_tokenizer, name, value)
        return tokenizer

    def named(**names):
        tokenizer = build_tokenizer()
        for name, value in names.items():
            setattr(tokenizer, name, value)
        return tokenizer

    begins = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizers = {
        "same": build_tokenizer(),
        "template": build_tokenizer(template=CHATML + " "),
        "template for tools": build_tokenizer(template={"default": CHATML, "tool_use": MARKED}),
        "stop": named(eos_token="<|im_end|>"),
        "no start": named(bos_token="<s>"),
        "normalizer": with_backend("normalizer", normalizers.Lowercase()),
        "start": with_backend("post_processor", begins),
        "spaces": with_backend("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "word": build_tokenizer("words"),
    }
    found = {
        name: template.make_recipe(each, 64, "assistant", "chat")
        for name, each in tokenizers.items()
    }
    usual = build_tokenizer()
    found["context"] = template.make_recipe(usual, 65, "assistant", "chat")
    found["learn"] = template.make_recipe(usual, 64, "all", "chat")
    found["kind"] = template.make_recipe(usual, 64, "assistant", "pairs")
    # by the module's own name: another import of transformers may have replaced sys.modules' one
    for library in ("transformers", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(template, library), "__version__", "0")
            found[library] = template.make_recipe(usual, 64, "assistant", "chat")
    with monkeypatch.context() as patch:
        patch.setattr(template, "TOKENS_FORMAT", 0)
        found["format"] = template.make_recipe(usual, 64, "assistant", "chat")
    assert len({*found.values()}) == len(found), found
    assert template.make_recipe(usual, 64, "assistant", "chat") == found["same"]


def test_learning_another_part_makes_other_masks_of_the_same_rows(tmp_path):
    one, every = (opened(tmp_path, GOOD, learn=learn) for learn in ("assistant", "all"))
    assert one[0]["tokens"].tolist() == every[0]["tokens"].tolist()
    assert not one[0]["learned"].equal(every[0]["learned"]) and one.digest != every.digest


def test_another_share_of_held_out_rows_is_other_data(tmp_path):
    """By their digest a resume is refused that would train on rows that were held out."""
    data = write(tmp_path / "chat.jsonl", *rows_of(200))
    found = [Chats(data, SHARED, 64, eval=share) for share in (0.05, 0.2)]
    found[0].prepare()
    digests = {each.open(split).digest for each in found for split in ("train", "eval")}
    assert len(digests) == 4


def test_control_tokens_are_those_of_the_template_and_no_others():
    sealed = SealedTokenizer(SHARED, "task.options.model")
    begin, end = SHARED.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    text = sealed.mark("<|im_start|>two<|im_end|>")
    (encoding,) = sealed.encode([text])
    assert [token for token in encoding.ids if token in (begin, end)] == [begin, end]
    sealed.check_control(encoding.ids, text)
    for tokens in ([begin, end, end], [end, begin], [begin, begin], [begin]):
        with pytest.raises(Flaw, match="whose text becomes control tokens"):
            sealed.check_control(tokens, text)


def test_a_cache_is_of_the_content_of_files_and_not_of_their_times(tmp_path):
    digests = []
    path = tmp_path / "chat.jsonl"
    for text, time_s in (("two", 1e9), ("two", 2e9), ("six", 2e9)):
        write(path, *rows_of(5), {"messages": said("two", text)})
        os.utime(path, (time_s, time_s))
        digests.append(make(str(path)))
    assert digests[0] == digests[1] != digests[2]
    stores = [each for each in (tmp_path / "cache/chat").iterdir() if each.is_dir()]
    assert len(stores) == 2


def test_parts_of_a_content_are_joined_and_others_than_texts_refused(tmp_path):
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "and"}]
    chat = said(parts, "It")
    assert shown(opened(tmp_path, {"messages": chat})) == shown(
        opened(tmp_path, {"messages": said("two and", "It")})
    )
    must = "(chat.jsonl:1); must be a string; images are not read"
    for content in ([*parts, {"type": "image"}], [], [*parts, {"text": 5}], ["two"], {"a": 1}):
        kind = "dict" if isinstance(content, dict) else "list"
        assert refused(tmp_path, {"messages": said(content, "It")}) == (
            f"1 row with a {kind} as content of a message of user {must}"
        )


def test_rows_are_packed_and_sent_to_workers(tmp_path):
    data = opened(tmp_path, *rows_of(20), tokenizer=SHARED)
    packed = PackedDataset(pickle.loads(pickle.dumps(data)), data.lengths, 64)
    rows = [packed[i] for i in range(len(packed))]
    assert sum(int(row["learned"].sum()) for row in rows) == data.facts["learned"]
    assert packed.digest == data.digest and rows[0]["tokens"].dtype == torch.int64


def test_functions_of_the_library_are_the_default_data():
    Chats(None, SHARED, 512, files=12).prepare()
    train, held = (Chats(None, SHARED, 512, files=12).open(split) for split in ("train", "eval"))
    assert len(train) > 20 and len(held) >= 1
    assert "of Python's standard library" in train.source
    assert "Describe this function in one sentence." in shown(train, SHARED)


# pairs --------------------------------------------------------------------------------------------


def pairs(tmp_path, *rows):
    return opened(tmp_path, *rows, tokenizer=SHARED, kind=PAIRS)


def test_pairs_have_a_chosen_and_a_rejected_answer(tmp_path):
    plain = {"prompt": "two and", "chosen": " two", "rejected": " four"}
    chats = {"prompt": said("two"), "chosen": said("", "It")[1:], "rejected": said("", "is")[1:]}
    joined = {"chosen": said("two", "It"), "rejected": said("two", "is")}
    for row, ends in (
        (plain, ("two and[[ two</s>]]", "two and[[ four</s>]]")),
        (chats, (r"assistant\n[[It<|im_end|>]]\n", r"assistant\n[[is<|im_end|>]]\n")),
        (joined, (r"assistant\n[[It<|im_end|>]]\n", r"assistant\n[[is<|im_end|>]]\n")),
    ):
        data = pairs(tmp_path, row)
        found = data[0]
        assert data.lengths.tolist() == [[len(found["chosen"]), len(found["rejected"])]]
        for name, end in zip(("chosen", "rejected"), ends, strict=True):
            text = mark_learned(found[name], found[f"{name}_learned"], SHARED)
            assert text.endswith(end)
        assert describe(data, SHARED)[1].startswith("chat    chosen: ")


def test_an_answer_that_goes_on_where_the_other_ends_is_a_pair(tmp_path):
    row = {"chosen": said("two", "It"), "rejected": said("two", "It", "say", "is")}
    found = pairs(tmp_path, row)[0]
    texts = [
        mark_learned(found[name], found[f"{name}_learned"], SHARED).split("[[")[1:]
        for name in ("chosen", "rejected")
    ]
    assert [[each.split("<")[0] for each in text] for text in texts] == [["It"], ["It", "is"]]


def test_pairs_that_cannot_be_used_are_refused_by_a_line(tmp_path):
    same = {"prompt": "two", "chosen": "four", "rejected": "four"}
    for row, text in (
        (same, "1 row with equal chosen and rejected (chat.jsonl:1); must be two different"),
        (GOOD, "1 row without such columns: messages (chat.jsonl:1); must have prompt, chosen"),
        (same | {"rejected": ""}, "1 row with an empty rejected (chat.jsonl:1); write it"),
        (
            {"chosen": said("two", "four"), "rejected": said("four", "two")},
            "1 row whose chosen and rejected differ before an answer (chat.jsonl:1); both must",
        ),
        (same | {"rejected": 1}, "1 row with a int as rejected (chat.jsonl:1); must be a string"),
    ):
        assert refused(tmp_path, row, tokenizer=SHARED, kind=PAIRS).startswith(text)


def test_pairs_that_differ_only_after_the_cut_are_left_out(tmp_path):
    late = {"prompt": "two", "chosen": "four " * 99 + "say", "rejected": "four " * 99 + "is"}
    data = pairs(tmp_path, late, late | {"rejected": "say"})
    assert len(data) == 1
    left_out = "left out: task.options.context ends before its answers differ"
    warning = f"warning: task.options.data: 1 of 2 rows: {left_out}"
    assert describe(data, SHARED)[-1] == warning
    assert refused(tmp_path, late, late, tokenizer=SHARED, kind=PAIRS) == (
        f"all of 2 rows are {left_out}; must have at least 1 row"
    )
    trims = build_tokenizer(template=CHATML.replace("m.content", "m.content | trim"))
    row = {"prompt": said("two"), "chosen": said("", "is")[1:], "rejected": said("", " is")[1:]}
    told = "all of 1 rows are left out: the template renders both of its answers alike; must have"
    assert refused(tmp_path, row, tokenizer=trims, kind=PAIRS).startswith(told)


def test_texts_and_messages_in_one_file_are_refused(tmp_path):
    """They have different stop tokens."""
    plain = {"prompt": "two", "completion": "four", "chosen": "four", "rejected": "say"}
    chats = {name: said("", text)[name != "prompt" :][:1] for name, text in plain.items()}
    for form, options in (("prompt and completion", {}), ("pairs", {"kind": PAIRS})):
        assert refused(tmp_path, plain, chats, tokenizer=SHARED, **options) == (
            f"has rows of 2 forms, {form} (chat.jsonl:1) and {form} of messages (chat.jsonl:2); "
            "must be of one form; write two files"
        )


def test_masks_of_a_row_do_not_depend_on_its_batch():
    masks = Masks(SHARED, 64, "assistant", "task.options.model")
    from trainer.hf.chat.forms import read_chat

    plans = [masks.plan(read_chat(row)[1][0]) for row in rows_of(9)]
    together = masks.make(plans)
    for plan, made in zip(plans, together, strict=True):
        (alone,) = masks.make([plan])
        assert alone.tokens.tolist() == made.tokens.tolist()
        assert alone.learned.tolist() == made.learned.tolist()


@pytest.mark.slow
def test_smollm2_reads_the_library_as_transformers_does():
    """Its template has no `{% generation %}`. Special tokens in a row stay text."""
    pytest.importorskip("gguf")
    file = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    Chats(None, tokenizer, 4096, eval=0, files=20).prepare()
    data = Chats(None, tokenizer, 4096, eval=0, files=20).open("train")
    rows = [row for _, row in open_source(None, "", 20, False).read()]
    assert len(rows) == len(data) > 50 and data.facts["stops"] == len(data)
    for index, row in enumerate(rows):
        plain = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        assert data[index]["tokens"].tolist() == plain
    assert "the stop token <|im_end|> too" in describe(data, tokenizer)[0]
