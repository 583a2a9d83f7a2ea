"""task=lm and task=dpo: in any layout, packed or not, by LoRA; losses are those of others."""

import json
import math
import os
import shlex
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import check_parity, fit_on, slow_but
from harness.hub_server import serving_hub
from harness.launch import TORCHRUN, ended, launch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread

from trainer import ConfigError  # noqa: E402
from trainer.hf.causal import (  # noqa: E402
    IGNORED,
    LanguageModel,
    RowCounts,
    answer,
    check_parts,
    count_bytes,
)
from trainer.hf.probe import check_rows  # noqa: E402
from trainer.tasks.dpo import DPO, PairModel  # noqa: E402
from trainer.tasks.lm import LM, build_llama, build_tokenizer  # noqa: E402

SMALL = [
    *("task.options.files=16", "task.options.context=192", "task.options.width=16"),
    *("task.options.layers=2", "task.options.heads=2", "task.options.answers=1"),
]
WORDS = [
    *("task=lm", *SMALL, "strategy.precision=fp64", "data.global_batch=6", "run.steps=20"),
    *("eval.every_steps=10", "optim=sgd", "optim.lr=0.1", "log.every_steps=1"),
    *("checkpoint.every_steps=null", "schedule=constant"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


LAYOUTS = {
    "accumulated": (1, ["strategy=single", "data.micro_batch=2"]),
    "2": (2, ["strategy=ddp"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "zero1 2": (2, ["strategy=zero1"]),
    "tp 2": (2, ["strategy=tp"]),
}  # a stage of pp refuses activations that follow from which tokens are learned


PAIRS = [(layout, lora) for layout in LAYOUTS for lora in ("null", "4")]


@pytest.mark.parametrize(("layout", "lora"), slow_but(PAIRS, ("2", "4")))
def test_run_does_not_depend_on_layout(layout, lora, tmp_path):
    ranks, words = LAYOUTS[layout]
    words = [*WORDS, f"task.options.lora={lora}", *words]
    one = fit_on(1, tmp_path / "one", *WORDS, f"task.options.lora={lora}", "strategy=single")
    check_parity(one, fit_on(ranks, tmp_path / "many", *words), falls=False)


def write_short(path):
    """Write prompts and completions, several of which fit in a row."""
    draws = torch.Generator().manual_seed(3)
    rows = [{"prompt": "ab" * n, "completion": f"{n}"} for n in range(1, 20)]
    rows += [{"prompt": f"{n} ", "completion": "yes" * (n % 7 + 1)} for n in range(60)]
    order = torch.randperm(len(rows), generator=draws).tolist()
    path.write_text("".join(json.dumps(rows[n]) + "\n" for n in order))
    return f"task.options.data={path}"


@pytest.mark.parametrize(
    ("packing", "lora"), slow_but(product(["true", "false"], ["4", "null"]), ("true", "4"))
)
def test_ranks_divide_the_rows_of_chats(packing, lora, tmp_path):
    """Rows of several sequences, or with padding at their ends."""
    words = [*WORDS, write_short(tmp_path / "short.jsonl"), "task.options.context=64"]
    words += [f"task.options.packing={packing}", f"task.options.lora={lora}", "optim.lr=0.3"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")
    check_parity(one, fit_on(2, tmp_path / "two", *words, "strategy=cp"), falls=False)


@pytest.mark.slow
def test_ranks_divide_the_rows_of_texts(tmp_path):
    rows = [json.dumps({"text": f"{n} is {n * n}. " * (n % 9 + 1)}) for n in range(80)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    words = [*WORDS, f"task.options.data={tmp_path}/texts.jsonl", "task.options.learn=all"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")
    many = [*words, "strategy.mesh.replicate=2", "strategy.mesh.context=2", "strategy=cp"]
    check_parity(one, fit_on(4, tmp_path / "many", *many), falls=False)


def test_a_window_in_attention_and_pairs_cannot_be_divided(tmp_path):
    line = r"context: the ranks cannot divide the rows of MistralForCausalLM, which has sliding_att"
    for kind, sizes in {"Mistral": {"sliding_window": 8}, "Llama": {}, "Qwen2": {}}.items():
        model = LanguageModel(tiny(kind, **sizes))
        with pytest.raises(ConfigError, match=line) if sizes else nullcontext():
            check_parts(model, "strategy.mesh.context")
    with pytest.raises(AssertionError, match="task=dpo cannot divide the rows of pairs; use"):
        fit_on(2, tmp_path, *PREFERENCES, "strategy=cp")


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "GPTNeoX", "Gemma2", "Mixtral"])
def test_losses_are_those_of_transformers(kind):
    """Gemma 2 changes its logits after the last layer."""
    close = {"rtol": 1e-9, "atol": 1e-9}
    model = LanguageModel(tiny(kind)).double().eval()
    if kind == "Gemma2":  # its norms compute in fp32
        close = {"rtol": 1e-6, "atol": 1e-6}
    if kind == "Mixtral":  # torch has no grouped product of experts in fp64
        close = {"rtol": 1e-4, "atol": 1e-5}
        model.float()
    check_rows(model, "packing", is_packed=True)
    assert model.has_plain_logits == (kind != "Gemma2")
    tokens, places, labels = rows()
    losses = model(tokens, places, labels)
    for row in range(2):
        for begin, end in ((0, 7), (7, 12)):
            logits = model.model(input_ids=tokens[row : row + 1, begin:end]).logits[0]
            wanted = F.cross_entropy(logits, labels[row, begin:end], reduction="none")
            torch.testing.assert_close(losses[row, begin:end], wanted, **close)
    losses.sum().backward()
    head = model.base.get_output_embeddings().weight
    assert head.grad is not None and not losses[labels == IGNORED].any()


def tiny(kind, **more):
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "max_position_embeddings": 32}
    sizes |= more
    sizes |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = getattr(transformers, f"{kind}Config")()
    config = getattr(transformers, f"{kind}Config")(
        **{k: v for k, v in sizes.items() if hasattr(config, k)}
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def rows():
    """Return two rows of two sequences, of 7 and 5 tokens."""
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 40, (2, 14), generator=draws)
    places = torch.tensor([*range(7), *range(5), 0, 0]).expand(2, -1)
    labels = tokens.roll(-1, 1).masked_fill(places < 2, IGNORED)
    labels[:, [6, 11, 12, 13]] = IGNORED
    return tokens, places, labels


def test_logits_are_never_whole():
    model = LanguageModel(tiny("Llama"))
    check_rows(model, "packing", is_packed=True)
    sizes = []
    head = model.base.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, outputs: sizes.append(outputs.shape))
    tokens, places, labels = (each.repeat(400, 1) for each in rows())
    model(tokens, places, labels).sum().backward()
    learned = int((labels != IGNORED).sum())
    assert max(size[0] for size in sizes) == 512
    assert sum(size[0] for size in sizes) == 2 * learned, "forward, and again in backward"


def test_a_model_that_mixes_packed_sequences_is_refused():
    model = LanguageModel(tiny("Llama"))
    forward = model.model.forward

    def without_places(*arguments, position_ids=None, **named):
        return forward(*arguments, **named)

    model.model.forward = without_places
    with pytest.raises(ConfigError, match=r"packing=true: Llama\w+ mixes the sequences of a row"):
        check_rows(model, "packing", is_packed=True)
    check_rows(model, "packing", is_packed=False)


LONG = {
    "Phi3": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "Llama": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.mark.parametrize("kind", LONG)
def test_rows_end_where_rope_changes_with_the_longest_row(kind):
    rope = {"rope_theta": 100.0, "original_max_position_embeddings": 12, **LONG[kind]}
    sizes = {"max_position_embeddings": 48 if kind == "Phi3" else 12, "rope_parameters": rope}
    model = LanguageModel(tiny(kind, original_max_position_embeddings=12, **sizes))
    line = f"options.context=13: {kind}ForCausalLM takes at most 12 tokens: its rope "
    with pytest.raises(ConfigError, match=line):
        check_rows(model, "packing", is_packed=False, context=13)
    check_rows(model, "packing", is_packed=True, context=12)


def test_rows_end_where_a_table_of_positions_does():
    for kind in ("GPT2", "OPT", "GPTJ"):
        model = LanguageModel(tiny(kind, ffn_dim=32, word_embed_proj_dim=16, rotary_dim=4))
        with pytest.raises(ConfigError, match=r"33: \w+ takes at most 32 tokens: it has no other"):
            check_rows(model, "packing", is_packed=False, context=33)
        check_rows(model, "packing", is_packed=False, context=32)
    check_rows(LanguageModel(tiny("Llama")), "packing", is_packed=True, context=33)


def test_a_model_whose_earlier_tokens_see_later_ones_is_refused():
    for is_packed in (True, False):
        with pytest.raises(ConfigError, match=r"BertLMHeadModel is not causal: a later token"):
            check_rows(LanguageModel(tiny("Bert")), "packing", is_packed)
    check_rows(LanguageModel(tiny("Bert", is_decoder=True)), "packing", is_packed=False)


@pytest.mark.parametrize("kind", ["Bloom", "Mamba", "OPT"])
def test_a_leak_is_seen_in_small_and_in_rounded_weights(kind):
    for deviation, dtype in ((0.006, torch.float32), (0.05, torch.bfloat16)):
        inner = tiny(kind, initializer_range=deviation, init_std=deviation, ffn_dim=32)
        with pytest.raises(ConfigError, match="mixes the sequences of a row"):
            check_rows(LanguageModel(inner.to(dtype)), "packing", is_packed=True)
    for kind in ("Llama", "Mixtral"):
        check_rows(LanguageModel(tiny(kind).bfloat16()), "packing", is_packed=True)


def test_a_weight_that_is_not_finite_is_named():
    model = LanguageModel(tiny("Llama"))
    with torch.no_grad():
        model.model.model.layers[0].mlp.up_proj.weight[1, 1] = math.nan
    line = r"computes NaN: model.layers.0.mlp.up_proj.weight has values that are not finite;"
    with pytest.raises(ConfigError, match=line):
        check_rows(model, "task.options.packing", False)


def test_an_output_layer_of_zeros_hides_no_scale_and_no_cap():
    free = {"tie_word_embeddings": False}
    for kind, more in {"Granite": {"logits_scaling": 4.0}, "Cohere": {}, "Gemma2": {}}.items():
        model = LanguageModel(tiny(kind, **free, **more))
        model.base.get_output_embeddings().weight.data.zero_()
        check_rows(model, "packing", is_packed=True)
        assert not model.has_plain_logits, kind
    model = LanguageModel(tiny("Llama"))
    model.base.get_output_embeddings().weight.data.zero_()
    check_rows(model, "packing", is_packed=True)
    assert model.has_plain_logits


def test_states_of_32_bits_meet_an_output_layer_of_16():
    model = LanguageModel(tiny("Mamba").bfloat16())
    model.base.backbone.norm_f.float()
    model.base.backbone.embeddings.float()
    check_rows(model, "packing", is_packed=False)
    tokens, places, labels = rows()
    wanted = model.model(input_ids=tokens).logits.transpose(1, 2)
    losses = model(tokens, places, labels)
    torch.testing.assert_close(losses, F.cross_entropy(wanted, labels, reduction="none"))


def test_dropout_in_attention_does_not_depend_on_the_rows_beside(tmp_path):
    """Its numbers are drawn for pairs of tokens, so all rows have the length of the context."""
    for more in ({}, {"attn_pdrop": 0.0}):
        model = LanguageModel(tiny("GPT2", **more))
        check_rows(model, "packing", is_packed=True)
        assert model.is_trimmed == bool(more)
    tokenizer = build_tokenizer()
    tiny("GPT2", vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(
        tmp_path / "gpt2"
    )
    tokenizer.save_pretrained(tmp_path / "gpt2")
    words = [*WORDS, write_short(tmp_path / "short.jsonl"), "task.options.context=64"]
    words += [f"task.options.model={tmp_path}/gpt2", "task.options.packing=false"]
    words += ["task.options.answers=0", "run.steps=2"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")["losses"]
    assert fit_on(2, tmp_path / "two", *words, "strategy=ddp")["losses"] == pytest.approx(one)


@pytest.mark.parametrize("kind", ["GPT2", "Bart", "OpenAIGPT", "Rwkv", "Llama"])
def test_answers_are_written_with_or_without_a_cache_up_to_the_last_position(kind):
    model = LanguageModel(
        tiny(kind, d_model=16, decoder_layers=3, n_positions=32, context_length=64)
    ).eval()
    model.base.get_output_embeddings().weight.data.mul_(9)
    check_rows(model, "packing", is_packed=False)
    assert model.has_cache == (kind in ("GPT2", "Llama"))
    text = [5, 6, 7]
    written = answer(lambda inputs: model(**inputs), model, text, -1, 64)
    assert len(written) == (64 if kind in ("Llama", "Rwkv") else 30)
    for stop in {*written[:9]}:
        ended = answer(lambda inputs: model(**inputs), model, text, stop, 64)
        assert ended == written[: written.index(stop)]
    for word in written[:20]:
        logits = model.model(input_ids=torch.tensor([text]), use_cache=False).logits
        assert word == int(logits[0, -1].argmax())
        text = [*text, word]


def test_a_token_without_an_embedding_is_refused_if_rows_have_it(tmp_path):
    tokenizer = build_tokenizer()
    data = write_short(tmp_path / "short.jsonl")
    for folder, lacking in (("stop", 1), ("image", 0)):
        if folder == "image":
            tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        size = tokenizer.eos_token_id + 1 - lacking
        tiny("Llama", vocab_size=size, max_position_embeddings=64).save_pretrained(
            tmp_path / folder
        )
        tokenizer.save_pretrained(tmp_path / folder)
        line = r"has 259 tokens and the model 258 embeddings, none for <\|im_end\|> \(258\); take"
        with pytest.raises(AssertionError, match=line) if lacking else nullcontext():
            words = [*WORDS, data, f"task.options.model={tmp_path}/{folder}", "run.steps=1"]
            fit_on(1, tmp_path / f"{folder} run", *words, "strategy=single")


def test_bytes_of_tokens_add_up_to_those_of_the_text():
    tokenizer = build_tokenizer()
    sizes = count_bytes(tokenizer)
    text = "def f(x):\n\treturn 'é€'"
    assert sum(sizes[token] for token in tokenizer(text)["input_ids"]) == len(text.encode())
    assert sizes[tokenizer.eos_token_id] == 0


class Pieces:
    """A tokenizer as of SentencePiece, which writes a space as ▁, or of BERT."""

    names = ("<s>", "<0x0A>", "▁two", "##ing", "é", "<0xyz>!", None)
    all_special_ids = (0,)

    def __len__(self):
        return len(self.names)

    def convert_ids_to_tokens(self, ids):
        return [self.names[i] for i in ids]


def test_a_piece_that_is_one_byte_counts_as_one():
    assert count_bytes(Pieces()) == [0, 1, 4, 3, 2, 7, 0]


PREFERENCES = ["task=dpo", *WORDS[1:], "data.global_batch=4", "optim.lr=0.5"]


@pytest.mark.parametrize(("layout", "lora"), slow_but(PAIRS, ("2", "4")))
def test_dpo_begins_with_its_reference_and_does_not_depend_on_layout(layout, lora, tmp_path):
    """Without a difference to the reference the loss is ln 2."""
    ranks, words = LAYOUTS[layout]
    lora = f"task.options.lora={lora}"
    one = fit_on(1, tmp_path / "one", *PREFERENCES, lora, "strategy=single")
    assert one["losses"][1] == pytest.approx(math.log(2), abs=1e-6)  # of an fp32 reference
    evals = [row["eval/loss"] for row in one["record"] if "eval/loss" in row]
    assert abs(evals[-1] - one["losses"][1]) > 1e-4  # it has left its reference
    words = ["data.micro_batch=1" if "micro" in word else word for word in words]
    check_parity(one, fit_on(ranks, tmp_path / "many", *PREFERENCES, lora, *words), falls=False)


def test_a_run_of_dpo_begins_with_its_reference_and_with_no_other_weights(tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(1)}, weights)
    why = r"run.init_from: training begins with the reference, which is task.options.model"
    with pytest.raises(AssertionError, match=why):
        fit_on(1, tmp_path, *PREFERENCES, "strategy=single", f"run.init_from={weights}")


def test_the_reference_of_a_base_of_16_bits_is_computed_in_32(tmp_path):
    """As its adapters are: in 16 bits it would be another model than the run begins with."""
    torch.manual_seed(0)
    sizes = SimpleNamespace(width=16, heads=2, layers=1, context=192)
    tokenizer = build_tokenizer()
    build_llama(sizes, tokenizer).bfloat16().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words = [*PREFERENCES, "strategy=single", "strategy.precision=fp32", "task.options.lora=4"]
    words += ["run.steps=1", f"task.options.model={tmp_path / 'base'}", "eval.every_steps=null"]
    found = fit_on(1, tmp_path / "run", *words)
    assert found["losses"][1] == pytest.approx(math.log(2), abs=1e-6)


class Pairs(str):
    @property
    def digest(self):
        return str(self)


def place_of_reference(folder=None, lora=None, pairs="of pairs", seed=0, **sizes):
    sizes = {"width": 16, "layers": 1, "heads": 2} | sizes
    model = None if folder is None else str(folder)
    options = SimpleNamespace(model=model, lora=lora, **sizes)
    config = SimpleNamespace(run=SimpleNamespace(seed=seed))
    task = SimpleNamespace(options=options, config=config)
    task._reference = DPO._reference.func(task)
    return DPO._values_of(task, Pairs(pairs)).path


def test_a_reference_follows_from_the_weights_of_its_model_not_from_their_place(tmp_path):
    places = []
    model = tiny("Llama")
    for name, factor in (("one", 1), ("copy", 1), ("other", 2)):
        with torch.no_grad():
            model.lm_head.weight *= factor
        model.save_pretrained(tmp_path / name)
        os.utime(tmp_path / name / "model.safetensors", (1e9, 1e9))
        places.append(place_of_reference(tmp_path / name))
    assert places[0] == places[1] != places[2]


def test_a_reference_follows_from_each_byte_of_the_weights_that_are_loaded(tmp_path):
    """It was named by samples of files, and by those that an index names only if they were there
    by another name too."""
    tiny("Llama", vocab_size=100_000).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    assert size > 64 * 2**16
    first = place_of_reference(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"of another model")
    assert place_of_reference(tmp_path) == first
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(size - 2**16)  # between two samples
        file.write(b"\1")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == size and place_of_reference(tmp_path) != first


def test_a_reference_follows_from_parts_that_an_index_names(tmp_path):
    places = []
    model = tiny("Llama")
    for name in ("one", "other"):
        model.save_pretrained(tmp_path / name, max_shard_size="8kB")
        places.append(place_of_reference(tmp_path / name))
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
    assert len([*(tmp_path / "one").glob("*.safetensors")]) > 2 and places[0] != places[1]


def test_a_reference_follows_from_what_else_decides_it(tmp_path, monkeypatch):
    """A base of adapters keeps the 16 bits of its file; a new model follows from its seed."""
    for name, dtype in (("half", torch.bfloat16), ("same", torch.bfloat16)):
        tiny("Llama").to(dtype).save_pretrained(tmp_path / name)
    config = tmp_path / "same/config.json"
    config.write_text(config.read_text().replace('"bfloat16"', '"float16"'))
    whole = [place_of_reference(tmp_path / name) for name in ("half", "same")]
    lora = [place_of_reference(tmp_path / name, lora=4) for name in ("half", "same")]
    assert whole[0] == whole[1] and lora[0] != lora[1] and whole[0] != lora[0]
    new = [{}, {"seed": 1}, {"width": 32}, {"layers": 2}, {"heads": 1}, {"pairs": "of others"}]
    places = [place_of_reference(**each) for each in new]
    monkeypatch.setattr("transformers.__version__", "0")
    assert len({*places, place_of_reference()}) == len(new) + 1
    assert place_of_reference() == place_of_reference()


def test_a_damaged_reference_is_computed_again(tmp_path, capfd):
    words = [*PREFERENCES, "run.steps=1", "run.prove=false", "strategy=single"]
    words += ["eval.every_steps=1", "task.options.files=10"]
    first = fit_on(1, tmp_path / "one", *words)["losses"]
    assert capfd.readouterr().out.count("reference: the log-probabilities of ") == 2  # and eval
    files = sorted(tmp_path.glob("cache/**/reference/*"))
    assert [path.suffix for path in files] == [".npy", ".npy"]
    files[0].write_bytes(files[0].read_bytes()[:200])
    files[1].write_bytes(b"")
    again = fit_on(1, tmp_path / "two", *words)["losses"]
    assert capfd.readouterr().out.count("reference: the log-probabilities of ") == 2
    assert again == first
    fit_on(1, tmp_path / "three", *words)
    assert "reference: " not in capfd.readouterr().out
    assert sorted(tmp_path.glob("cache/**/reference/*")) == files


def test_dpo_logs_the_share_of_right_answers_and_the_margin():
    """The margin is beta times the difference of log-ratios; no preference is not a right one."""
    task = SimpleNamespace(options=SimpleNamespace(beta=0.1), _margin=partial(DPO._margin, None))
    outputs = torch.tensor([[-1.0, -5.0], [-4.0, -2.0], [-3.0, -3.0]])
    reference = torch.tensor([[-2.0, -4.0], [-3.0, -3.0], [-3.0, -3.0]], dtype=torch.float64)
    found = DPO.metrics(task, outputs, reference)
    assert found["accuracy"].tolist() == [1.0, 0.0, 0.0]
    assert found["margin"].tolist() == pytest.approx([0.2, -0.2, 0.0])
    assert {*found} == {"accuracy", "margin"} and DPO.summarize(task, {"loss": 1.0}) == {}
    losses = DPO.loss(task, outputs, reference)
    wanted = [-math.log(1 / (1 + math.exp(-each))) for each in (0.2, -0.2, 0.0)]
    assert losses.tolist() == pytest.approx(wanted)


def test_lm_logs_bits_per_byte_and_perplexity():
    """Bits of all learned tokens per byte that they stand for; a control token stands for none."""
    task = SimpleNamespace(sizes=torch.tensor([1, 4, 0]))  # bytes of tokens 0, 1 and 2
    labels = torch.tensor([[0, 1, 2, IGNORED]])
    losses = math.log(2) * torch.tensor([[3.0, 2.0, 5.0, 7.0]])
    values, weights = LM.metrics(task, losses, labels)["bits_per_byte"]
    assert weights.tolist() == [[1.0, 4.0, 0.0, 0.0]] and values.dtype == torch.float64
    mean = float((values * weights).sum() / weights.sum())
    assert mean == pytest.approx((3 + 2) / (1 + 4))
    values, weights = LM.loss(task, losses, labels)
    assert values is losses and weights.tolist() == [[1.0, 1.0, 1.0, 0.0]]
    assert LM.summarize(task, {"loss": math.log(8)})["perplexity"] == pytest.approx(8)
    assert LM.summarize(task, {"loss": 9e9})["perplexity"] < math.inf


def test_labels_are_the_next_tokens_of_the_same_sequence():
    batch = {
        "tokens": torch.tensor([[5, 6, 7, 8, 9, 0]]),
        "learned": torch.tensor([[False, True, True, True, True, False]]),
        "segments": torch.tensor([[1, 1, 1, 2, 2, 0]]),
        "positions": torch.tensor([[0, 1, 2, 0, 1, 0]]),
    }
    task = SimpleNamespace(divides_rows=False)
    inputs, labels = LM.split_batch(task, batch)
    assert labels.tolist() == [[6, 7, IGNORED, 9, IGNORED, IGNORED]]
    assert inputs["labels"] is labels and inputs["input_ids"] is batch["tokens"]
    assert {*inputs} == {"input_ids", "position_ids", "labels", "counts"}


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_losses_are_the_same_where_the_host_knows_the_counts(kind):
    """The host waited for the device three times in each micro-batch, to count tokens."""
    model = LanguageModel(tiny(kind)).double().eval()
    check_rows(model, "packing", is_packed=True)
    tokens, places, labels = (torch.cat(each) for each in zip(rows(), rows(), strict=True))
    tokens, places, labels = (F.pad(each, (0, 3)) for each in (tokens, places, labels))
    labels[:, -3:] = IGNORED
    labels[1, 3:] = IGNORED
    counts = RowCounts.of(labels[:, :-1] != IGNORED, places)
    assert counts.learned == (6, 1, 6, 6) and counts.lengths == (12,) * 4
    asked = []
    model._length, own = (lambda *given: asked.append(own(*given)) or asked[-1]), model._length
    for count in (4, 3, 1):  # some of the rows, as the start's checks take them
        part = [each[:count] for each in (tokens, places, labels)]
        found = []
        for known in (counts, None):
            losses = model(*part, counts=known)
            losses.sum().backward()
            weights = [p for p in model.parameters() if p.grad is not None]
            found.append([losses.detach(), *(p.grad.clone() for p in weights)])
            model.zero_grad()
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert {*asked} == {12}


def test_a_batch_has_the_counts_of_its_labels():
    options = SimpleNamespace(packing=False, context=8)
    task = SimpleNamespace(options=options, divides_rows=False)
    masks = ([False, True, True, False], [True, False, True], [False, False])
    examples = [{"tokens": torch.arange(len(m)) + 3, "learned": torch.tensor(m)} for m in masks]
    inputs, labels = LM.split_batch(task, LM.collate(task, examples))
    assert inputs["counts"].learned == (2, 1, 0) and inputs["counts"].lengths == (4, 3, 2)
    assert (labels != IGNORED).sum(1).tolist() == [2, 1, 0] and labels.shape == (3, 8)


def test_dpo_is_exported_and_goes_on_from_its_own_reference_only(tmp_path):
    for name, seed in (("base", 0), ("other", 1)):
        torch.manual_seed(seed)
        sizes = SimpleNamespace(width=16, heads=2, layers=1, context=192)
        build_llama(sizes, tokenizer := build_tokenizer()).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = [*PREFERENCES, "strategy=single", "strategy.precision=fp32", "run.name=a"]
    words += ["run.steps=2", "checkpoint.export=hf", "run.resume=auto"]
    fit_on(1, tmp_path, *words, f"task.options.model={tmp_path / 'base'}")
    (folder,) = tmp_path.glob("**/export")
    assert (folder / "model.safetensors").is_file()
    words += ["run.steps=3", f"task.options.model={tmp_path / 'other'}"]
    with pytest.raises(AssertionError, match=r"the train data has digest .* the run to resume had"):
        fit_on(1, tmp_path, *words)


def test_a_reference_follows_from_the_config_of_its_model(tmp_path):
    tiny("Llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    places = []
    rope = {"rope_theta": 50.0, "rope_type": "default"}
    for changed in (
        {},
        {"transformers_version": "6", "use_cache": False},
        {"rope_parameters": rope},
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        places.append(place_of_reference(tmp_path))
    assert places[0] == places[1] != places[2]


def test_dpo_has_the_loss_of_its_paper():
    """Rafailov et al. (2023), equation 7, with sums over the learned tokens of each answer."""
    inner = tiny("Llama")
    model = PairModel(inner).double()
    tokens, places, _ = (each[None] for each in rows())
    places = torch.arange(14).expand(1, 2, -1)
    labels = tokens.roll(-1, 2).masked_fill(places < 4, IGNORED)
    labels[..., -1] = IGNORED
    found = model(tokens, places, labels)
    wanted = []
    for row in range(2):
        scores = inner(input_ids=tokens[0, row : row + 1]).logits[0].log_softmax(1)
        wanted.append(sum(scores[i, tokens[0, row, i + 1]] for i in range(4, 13)))
    torch.testing.assert_close(found[0], torch.stack(wanted), rtol=1e-9, atol=1e-9)
    reference = found.detach() + torch.tensor([[0.3, -0.5]])
    task = SimpleNamespace(options=SimpleNamespace(beta=0.1), _margin=partial(DPO._margin, None))
    loss = DPO.loss(task, found.detach(), reference)
    assert float(loss) == pytest.approx(-math.log(1 / (1 + math.exp(-0.1 * -0.8))))


@pytest.mark.slow
def test_the_readmes_command_fetches_a_model_and_leaves_a_folder_for_peft(tmp_path):
    """Its words as they stand, but for the model, which is a small one on a hub of the test."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in readme.splitlines() if "checkpoint.export=hf" in line]
    words = shlex.split(line.replace("Qwen/Qwen3-0.6B", "hub/llama"))
    assert words[:4] == ["torchrun", "--nproc_per_node=2", "-m", "trainer"]
    sizes = SimpleNamespace(width=16, heads=2, layers=1, context=64)
    tokenizer = build_tokenizer()
    build_llama(sizes, tokenizer).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    said = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
    rows = [json.dumps({"messages": [*said, *said][: 2 + 2 * (i % 2)], "id": i}) for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    with serving_hub(llama=tmp_path / "llama") as hub:
        place = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        few = ["run.steps=2", "task.options.context=64", "run.name=r", "data.global_batch=2"]
        process = launch(tmp_path, *words[4:], *few, launcher=TORCHRUN, **place)
        code, out, err = ended(process, 300)
    assert code == 0, err
    assert err == f"downloading hub/llama from {hub.url}\n"
    assert "tokens of a row are learned, the stop token <|im_end|> too" in out
    last = "adapter of hub/llama and tokenizer in runs/lm/r/export ("
    assert last in out and "): peft loads it with equal logits\n" in out


class Products(TorchDispatchMode):
    """Records the shape of each product of two matrices, forward and backward."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        found = function(*arguments, **named or {})
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(found.shape))
        return found


class Counted(LM):
    def update(self, batch, *arguments):
        with Products() as products:
            outcome = super().update(batch, *arguments)
        frozen = [p.shape for p in self.model.parameters() if not p.requires_grad and p.dim() == 2]
        found = {"shapes": products.shapes, "frozen": [sorted(shape) for shape in frozen]}
        Path(self.config.run.dir, "products.json").write_text(json.dumps(found))
        return outcome


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_step_with_lora_computes_no_gradient_of_a_frozen_weight(strategy, tmp_path):
    """In one layer 7 linear layers are adapted by 2 products each. The first three read embeddings,
    which need no gradients."""
    words = [
        *WORDS,
        "task.options.lora=4",
        "run.prove=false",
        "run.steps=2",
        f"strategy={strategy}",
    ]
    fit_on(1, tmp_path, *words, task=Counted)
    found = json.loads((tmp_path / "products.json").read_text())
    assert [16, 16] in found["frozen"] and [16, 64] in found["frozen"]
    assert not [shape for shape in found["shapes"] if sorted(shape) in found["frozen"]]
    linear = 2 * 7  # layers, each with two factors of an adapter
    forward = linear + 2 * linear
    # through layers and their adapters, and within these; the first three need none of their input
    of_inputs = (linear - 3) * 2 + linear
    head = 2 + 1  # its logits twice, since they are not kept, and the gradient of its input
    assert len(found["shapes"]) == forward + of_inputs + 2 * linear + head


def test_the_base_of_adapters_keeps_the_16_bits_of_its_file(tmp_path):
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    base = tiny("Llama", vocab_size=len(tokenizer), max_position_embeddings=192).bfloat16()
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words = [*WORDS, f"task.options.model={tmp_path}/base", "task.options.lora=4", "run.steps=2"]
    words += ["strategy=fsdp", "eval.every_steps=2"]
    run = fit_on(2, tmp_path / "half", *words, "strategy.precision=amp_bf16")
    layers = {n: w for n, w in run["weights"].items() if n.endswith("base_layer.weight")}
    assert layers and {weight.dtype for weight in layers.values()} == {torch.bfloat16}
    trained = [w.dtype for name, w in run["weights"].items() if ".lora_" in name]
    assert set(trained) == {torch.float32}
    run = fit_on(2, tmp_path / "whole", *words)
    assert {weight.dtype for weight in run["weights"].values()} == {torch.float64}
