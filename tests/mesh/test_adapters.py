"""LoRA by peft on a model of transformers: equal in every layout."""

import os
import signal

import pytest
import torch
from harness import fit_on, newest, slow_but
from harness.stored import tensors_of
from mesh_gpt import Meshed
from torch import nn

from trainer.core.loop.run import Run

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft on transformers 5

WORDS = ["task=meshed", "strategy.precision=fp64", "run.steps=3", "optim=adamw", "optim.lr=0.05"]
SIZES = {
    **{"vocab_size": 12, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16},
    **{"tie_word_embeddings": False},
}
LAYOUTS = {
    "ddp": 2,
    "zero1": 2,
    "exact": 2,
    "fsdp": 2,
    "hsdp": 4,
    "tp": 2,
    "fsdp_tp": 4,
    "pp": 2,
    "cp": 2,
}


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, positions):
        return self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits


class Lora(Meshed):
    adapter = {}

    def build_model(self):
        config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
        given = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
        lora = peft.LoraConfig(**given | self.adapter)
        return Wrapper(peft.get_peft_model(transformers.LlamaForCausalLM(config), lora))

    def blocks(self, model):
        return list(model.get_submodule("model.base_model.model.model.layers"))

    def tensor_plan(self):
        return "auto"


class Partly(Lora):
    adapter = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}


class Decomposed(Lora):
    adapter = {"use_dora": True}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return tensors_of(newest(fit_on(1, folder, *WORDS, "strategy=single", task=Lora)["directory"]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_adapters_are_equal_in_every_layout(strategy, alone, tmp_path):
    run = fit_on(LAYOUTS[strategy], tmp_path, *WORDS, f"strategy={strategy}", task=Lora)
    found = tensors_of(newest(run["directory"]))
    assert found.keys() == alone.keys() and all(".lora_" in name for name in found)
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_plan_divides_layers_with_and_without_adapters(tmp_path):
    one = fit_on(1, tmp_path / "one", *WORDS, "strategy=single", task=Partly)
    two = fit_on(2, tmp_path / "two", *WORDS, "strategy=tp", task=Partly)
    one, two = (tensors_of(newest(run["directory"])) for run in (one, two))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_an_adapter_that_no_plan_divides_is_refused_by_name(tmp_path):
    line = r"tensor_plan=auto: layers.0.self_attn.q_proj has an adapter that is not plain LoRA"
    with pytest.raises(AssertionError, match=line):
        fit_on(2, tmp_path, *WORDS, "strategy=tp", task=Decomposed)


class Halved(Lora):
    """A base in bf16, as most are on the hub, or the same values in fp32."""

    is_half = True

    def build_model(self):
        model = super().build_model()
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
                parameter.data = parameter.data if self.is_half else parameter.data.float()
        return model


class Whole(Halved):
    is_half = False


HALF = [*WORDS, "strategy.precision=amp_bf16", "optim.lr=0.01", "log.every_steps=1"]
KEPT = ("_proj.base_layer.weight", "lm_head.weight")  # in bf16; embeddings and norms are not


@pytest.mark.parametrize("strategy", slow_but(LAYOUTS, "fsdp"))
def test_a_frozen_base_in_bf16_stays_so_and_changes_no_bit(strategy, tmp_path):
    """Of a run in amp_bf16, whose matrix products convert the same values from 32 bits."""
    runs = []
    for task in (Halved, Whole):
        words = [*HALF, f"strategy={strategy}"]
        runs.append(fit_on(LAYOUTS[strategy], tmp_path / task.__name__, *words, task=task))
    half, whole = runs
    assert half["losses"] == whole["losses"]
    assert half["weights"].keys() == whole["weights"].keys()
    for name, value in half["weights"].items():
        is_kept = name.endswith(KEPT)
        assert value.dtype == (torch.bfloat16 if is_kept else torch.float32), name
        assert torch.equal(value.float(), whole["weights"][name]), name
    manifest = newest(half["directory"]).manifest
    assert all(facts[0] == "bfloat16" for facts in manifest["frozen"].values())
    assert not any(".base_layer." in name for name in tensors_of(newest(half["directory"])))


@pytest.mark.slow
def test_a_frozen_base_in_bf16_is_converted_for_other_precisions(tmp_path):
    for precision in ("fp64", "fp32", "bf16"):
        words = [*WORDS, f"strategy.precision={precision}", "strategy=fsdp"]
        run = fit_on(2, tmp_path / precision, *words, task=Halved)
        assert len({part.dtype for part in run["weights"].values()}) == 1


class Killed(Lora):
    """All its ranks are gone at once in step 4, as after a power cut."""

    def train_step(self, batch):
        if self.step == 3 and isinstance(self._run, Run):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


@pytest.mark.parametrize("strategy", slow_but(["exact", "ddp", "fsdp", "zero1"], "exact"))
def test_adapters_of_a_killed_run_resume_on_other_ranks(strategy, tmp_path):
    """Killed on 2 ranks, resumed on 3: as a run on one rank that nothing disturbed."""
    words = [*(word for word in WORDS if "optim=" not in word), "optim=sgd"]
    words += ["run.steps=6", "checkpoint.every_steps=2", "checkpoint.background=false"]
    many = [*words, f"strategy={strategy}"]
    with pytest.raises(AssertionError):
        fit_on(2, tmp_path / "killed", *many, task=Killed)
    one = strategy if strategy == "exact" else "single"
    whole = fit_on(1, tmp_path / "whole", *words, f"strategy={one}", task=Lora)
    resumed = fit_on(3, tmp_path / "killed", *many, "run.resume=auto", task=Lora)
    assert newest(resumed["directory"]).manifest["sessions"] == [[0, 2], [2, 3]]  # step, ranks
    # Llama's norms compute in fp32, whose rounding changes with ddp's factor of 3; not with 2
    limits = {"rtol": 0, "atol": 0} if strategy == "exact" else {"rtol": 1e-5, "atol": 1e-8}
    found, wanted = (tensors_of(newest(run["directory"])) for run in (resumed, whole))
    assert found.keys() == wanted.keys() and all(".lora_" in name for name in found)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **limits)


@pytest.mark.slow
def test_adapters_saved_by_two_ranks_of_fsdp_are_loaded_by_one(tmp_path):
    run = fit_on(2, tmp_path, *WORDS, "strategy=fsdp", task=Lora)
    saved = tensors_of(newest(run["directory"]))
    words = [*WORDS, f"run.init_from={run['directory']}", "run.name=alone", "optim.lr=0.0"]
    alone = fit_on(1, tmp_path, *words, "strategy=single", task=Lora)
    loaded = tensors_of(newest(alone["directory"]))
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
