"""Models of transformers as a user writes them: no note at the start, and divided without a plan of
one's own."""

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks, slow_but
from harness.training import compose
from torch import nn

from trainer import ResidentDataset, Trainer
from trainer.strategy.tensor_parallel.auto_plan import find_plan

transformers = pytest.importorskip("transformers")
WORDS, LENGTH, ROWS, CLASSES = 64, 12, 96, 5
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
IMAGES = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": CLASSES,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
# Class of the model, of its config, and the config.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SMALL),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", SMALL | {"embedding_size": 16}),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 32}
        | {"num_attention_heads": 2, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGES),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.2}
        | {"num_labels": CLASSES},
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
        | {"window_size": 4, "drop_path_rate": 0.2, "num_labels": CLASSES},
    ),
}
OF_IMAGES = ("vit", "convnext", "swin")
PLANNED = (
    "llama",
    "qwen2",
    "gemma",
    "bert",
    "roberta",
    "electra",
    "distilbert",
    "opt",
    "t5",
    "vit",
)
IN_STAGES = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "bert": "bert.encoder.layer",
    "vit": "vit.layers",
}


def build(name: str) -> nn.Module:
    model, config, sizes = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


class Text(Trainer):
    name = ""

    def build_model(self):
        return build(self.name)

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        tokens = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
        return ResidentDataset(tokens, tokens.clone())

    def split_batch(self, batch):
        inputs = {"input_ids": batch[0]}
        if self.name == "t5":
            inputs["decoder_input_ids"] = batch[1]
        return inputs, batch[1]

    def loss(self, outputs, targets):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        values = F.cross_entropy(logits, targets[:, 1:].flatten(), reduction="none")
        return values.view(len(targets), -1)

    def metrics(self, outputs, targets):
        return {}

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def blocks(self, model):
        return list(model.get_submodule(IN_STAGES[self.name])) if self.name in IN_STAGES else []

    def tensor_plan(self):
        return "auto"


class Images(Text):
    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        images = torch.randn(ROWS, 3, 32, 32, generator=generator)
        return ResidentDataset(images, torch.randint(CLASSES, (ROWS,), generator=generator))

    def split_batch(self, batch):
        return {"pixel_values": batch[0]}, batch[1]

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs.logits, targets, reduction="none")


def task_of(name):
    return type(name, (Images if name in OF_IMAGES else Text,), {"name": name})


def trained(name, folder, *words):
    """Return the weights and the losses of a run of three steps."""
    made = task_of(name)(compose(folder, "task=tiny", "run.steps=3", "data.global_batch=8", *words))
    made.fit()
    return made.step


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "fp64"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_no_note_at_the_start(name, precision, tmp_path, capfd):
    if (name, precision) == ("mixtral", "fp64"):
        pytest.skip("grouped_mm takes no fp64")
    on_ranks(1, trained, name, tmp_path, f"strategy.precision={precision}")
    lines = capfd.readouterr().out.splitlines()
    assert not [line for line in lines if "would differ" in line]
    (line,) = [line for line in lines if line.startswith("proof")]
    assert line.startswith("proof   data, random numbers and buffers do not depend on the layout (")


@pytest.mark.parametrize("name", slow_but(PLANNED, "llama"))
def test_a_model_is_divided_by_its_own_plan(name, tmp_path):
    """The proof at the start compares outputs, loss and gradients with the whole model's."""
    words = ["strategy=tp", "strategy.precision=fp64"]
    assert on_ranks(2, trained, name, tmp_path, *words) == [3, 3]


@pytest.mark.parametrize("name", slow_but(list(IN_STAGES)))
def test_a_model_is_divided_into_stages(name, tmp_path):
    words = ["strategy=pp", "strategy.precision=fp64"]
    assert on_ranks(2, trained, name, tmp_path, *words) == [3, 3]


def test_what_has_no_plan_is_refused():
    with pytest.raises(Exception, match=r"^tensor_plan=auto: Sequential must have a plan in its"):
        find_plan("auto", nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(Exception, match=r"^tensor_plan returned 'own': must be a dict, or 'auto'$"):
        find_plan("own", nn.Sequential(nn.Linear(2, 2)))
