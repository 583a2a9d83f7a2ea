"""Models of Hugging Face: names on a hub, folders, GGUF files, LoRA; what is refused and how."""

import json
import os
import shutil

import pytest
import torch
from harness import slow_but
from harness.hub_server import commit_of, serving_hub, use_hub

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread

from trainer import ConfigError  # noqa: E402
from trainer.hf import loading as hf  # noqa: E402
from trainer.hf.repository import ModelFiles  # noqa: E402

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
KEY = "task.options.model"


def build_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=1, eos_token_id=2)
    )


def write_tokenizer(folder):
    from trainer.tasks.finetune import build_tokenizer

    build_tokenizer([f"word{number} of many" for number in range(40)], 37).save_pretrained(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a folder with a small Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    build_llama().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def copied(llama, tmp_path):
    """Return a copy of that folder, to be changed."""
    return shutil.copytree(llama, tmp_path / "copy")


@pytest.fixture
def hub(llama, tmp_path, monkeypatch):
    with serving_hub(llama=llama) as server:
        use_hub(server.url, tmp_path / "home", monkeypatch.setattr)
        yield server


def refusal(call, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_equal(model, other):
    one, two = model.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# Names on the hub ------------------------------------------------------------------------------


def test_a_name_on_the_hub_is_fetched_once_and_loaded_without_a_server(hub, capfd):
    hf.fetch("hub/llama")
    assert capfd.readouterr().err == f"downloading hub/llama from {hub.url}\n"
    num_asked = len(hub.asked)
    hf.fetch("hub/llama")
    model = hf.load_model("AutoModelForCausalLM", "hub/llama")
    assert len(hf.load_tokenizer("hub/llama")) == 40
    assert len(hub.asked) == num_asked
    assert capfd.readouterr() == ("", "")
    check_equal(model, build_llama())
    assert model.name_or_path == "hub/llama"
    assert model.config._commit_hash == commit_of("hub/llama")
    assert hf.find("hub/llama").revision == commit_of("hub/llama")


def test_the_revision_that_is_fetched_is_the_one_that_is_checked(llama, tmp_path, monkeypatch):
    pickles = tmp_path / "pickles"
    shutil.copytree(llama, pickles)
    (pickles / "model.safetensors").rename(pickles / "pytorch_model.bin")
    folders = {"new": pickles, "new@v2": llama, "old": llama, "old@v2": pickles}
    with serving_hub(**folders) as server:
        use_hub(server.url, tmp_path / "home", monkeypatch.setattr)
        hf.fetch("hub/new@v2")
        hf.fetch("hub/old")
        for name in ("hub/new", "hub/old@v2"):
            assert "pickle" in refusal(hf.fetch, name)
        assert hf.find("hub/new@v2").revision == commit_of("hub/new@v2")
        assert not any("pytorch_model" in asked for asked in server.asked)


def test_weights_that_a_repository_has_twice_are_fetched_once(copied, tmp_path, monkeypatch):
    """As Mistral's and Llama's have them beside those that transformers loads."""
    twice = ("original/model.safetensors", "consolidated.safetensors", "model.fp16.safetensors")
    for name in (*twice, "consolidated-00001-of-00002.safetensors"):
        (copied / name).parent.mkdir(exist_ok=True)
        shutil.copy(copied / "model.safetensors", copied / name)
    with serving_hub(twice=copied) as server:
        use_hub(server.url, tmp_path / "home", monkeypatch.setattr)
        hf.fetch("hub/twice")
        fetched = {each.rpartition("/")[2] for each in server.asked if "safetensors" in each}
    assert fetched == {"model.safetensors"}
    assert not [each for each in server.asked if "original/" in each]


def test_a_gguf_file_that_was_replaced_is_unpacked_again(tmp_path, monkeypatch):
    """Also one of the same size."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "one.gguf"
    source = ModelFiles("one.gguf", tmp_path, "one.gguf", "one")
    places = []
    for content, time_s in ((b"weights", 1e9), (b"weights", 1e9), (b"others!", 2e9), (b"x", 2e9)):
        file.write_bytes(content)
        os.utime(file, (time_s, time_s))
        places.append(hf._unpacked(source))
    assert places[0] == places[1] and len({*places}) == 3
    monkeypatch.setattr("transformers.__version__", "0")
    assert hf._unpacked(source) not in places


def test_a_revision_is_part_of_a_name(hub):
    name = f"hub/llama@{commit_of('hub/llama')}"
    hf.fetch(name)
    assert hf.find(name).revision == commit_of("hub/llama")
    error = refusal(hf.fetch, "hub/llama@v2")
    assert error == f"{KEY}=hub/llama@v2: hub/llama has no revision v2"


def test_pickles_and_copies_of_weights_are_not_downloaded(hub, copied):
    for name in ("pytorch_model.bin", "model.fp16.safetensors", "onnx/model.safetensors", "a.py"):
        (copied / name).parent.mkdir(exist_ok=True)
        (copied / name).write_bytes(b"1")
    hub.folders["hub/more"] = copied
    hf.fetch("hub/more")
    names = {path.name for path in hf.find("hub/more").folder.rglob("*") if path.is_file()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {"pytorch_model.bin", "model.fp16.safetensors", "a.py"}
    assert not (hf.find("hub/more").folder / "onnx").exists()


def test_a_name_that_was_not_fetched_is_refused(hub):
    error = refusal(hf.find, "hub/llama")
    assert error == (
        f"{KEY}=hub/llama: is neither a folder nor in the cache of the hub; give a folder, or "
        "call fetch('hub/llama') of trainer.hf.loading in prepare()"
    )
    assert not hub.asked


def test_a_name_with_a_typo_is_refused_with_a_near_one(hub):
    error = refusal(hf.fetch, "hub/lama")
    assert error == (
        f"{KEY}=hub/lama: is neither a folder nor a model on {hub.url}; did you mean "
        "hub/llama?; if it is private, `hf auth login`, or set HF_TOKEN"
    )


def test_a_gated_repository_is_refused_with_what_to_do(hub):
    hub.gated.add("hub/llama")
    error = refusal(hf.fetch, "hub/llama")
    assert error == (
        f"{KEY}=hub/llama: is gated: accept its conditions at {hub.url}/hub/llama, then "
        "`hf auth login`, or set HF_TOKEN"
    )


def test_a_server_that_is_away_is_named(hub, tmp_path, monkeypatch):
    hub.status = 503
    rest = "try again, or fetch it where there is a network (`hf download hub/llama`) and give"
    error = refusal(hf.fetch, "hub/llama")
    assert error == (
        f"{KEY}=hub/llama: cannot be fetched from {hub.url} (it answers 503); {rest} the folder"
    )
    use_hub("http://127.0.0.1:9", tmp_path / "home", monkeypatch.setattr)
    error = refusal(hf.fetch, "hub/llama")
    assert error.startswith(f"{KEY}=hub/llama: cannot be fetched from http://127.0.0.1:9 ([Errno")
    assert error.endswith(f"{rest} the folder")


def test_hf_hub_offline_is_honoured(hub, tmp_path, monkeypatch):
    use_hub(hub.url, tmp_path / "home", monkeypatch.setattr, is_offline=True)
    error = refusal(hf.fetch, "hub/llama")
    assert error == (
        f"{KEY}=hub/llama: is neither a folder nor in the cache of the hub, and HF_HUB_OFFLINE "
        "forbids to fetch it; give a folder, or run once without HF_HUB_OFFLINE"
    )
    assert not hub.asked


def test_a_download_that_broke_off_is_not_taken_for_the_model(hub, monkeypatch):
    hf.fetch("hub/llama")
    (hf.find("hub/llama").folder / "model.safetensors").unlink()
    assert refusal(hf.find, "hub/llama").startswith(f"{KEY}=hub/llama: ")
    hf.fetch("hub/llama")
    check_equal(hf.load_model("AutoModelForCausalLM", "hub/llama"), build_llama())


def test_a_download_without_a_tokenizer_is_completed(hub, llama):
    """As transformers has left it, which fetches file by file."""
    from huggingface_hub import hf_hub_download

    for path in sorted(llama.glob("[!t]*")):
        hf_hub_download("hub/llama", path.name)
    num_asked = len(hub.asked)
    hf.fetch("hub/llama", beside=["config.json"])  # as of images, which need none
    assert len(hub.asked) == num_asked
    hf.fetch("hub/llama")
    assert len(hf.load_tokenizer("hub/llama")) == 40


def test_libraries_are_asked_for_no_server_and_no_code(tmp_path):
    for gguf in (None, "x.gguf"):
        words = hf._place(hf.ModelFiles("x", tmp_path, gguf))
        assert words["local_files_only"] is True and words["trust_remote_code"] is False
        assert words.get("gguf_file") == gguf


def test_a_repository_of_pickles_or_of_ggufs_is_refused_before_a_download(hub, tmp_path):
    for name, file in (("old", "pytorch_model.bin"), ("packed", "small.gguf"), ("empty", "x.md")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"1")
        hub.folders[f"hub/{name}"] = tmp_path / name
    assert refusal(hf.fetch, "hub/old") == (
        f"{KEY}=hub/old: has no *.safetensors; pytorch_model.bin is not opened, since a pickle "
        "can run any code; take a model with *.safetensors, or convert it where nothing can be "
        "harmed: load it there and save_pretrained(FOLDER)"
    )
    assert refusal(hf.fetch, "hub/packed") == (
        f"{KEY}=hub/packed: has its weights as GGUF files; give one of them, such as "
        "hub/packed/small.gguf"
    )
    assert refusal(hf.fetch, "hub/packed/smal.gguf") == (
        f"{KEY}=hub/packed/smal.gguf: hub/packed has no smal.gguf; did you mean small.gguf?"
    )
    assert refusal(hf.fetch, "hub/empty") == (
        f"{KEY}=hub/empty: has no weights: must hold *.safetensors, as save_pretrained of "
        "transformers writes them"
    )
    assert not [line for line in hub.asked if "/resolve/" in line]


# Folders ---------------------------------------------------------------------------------------


def test_a_folder_is_loaded_without_a_word(llama, capfd):
    hf.fetch(str(llama))
    check_equal(hf.load_model("AutoModelForCausalLM", str(llama)), build_llama())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["./nothing", "/nothing/at/all", "no name", "a/b/c", "x.gguf"])
def test_what_is_no_name_is_refused(name):
    must = "must be a folder, a GGUF file, or a name on the hub such as Qwen/Qwen3-0.6B"
    assert refusal(hf.fetch, name) == f"{KEY}={name}: does not exist; {must}"


def test_a_folder_with_a_typo_is_refused_with_a_near_one(llama):
    name = str(llama.with_name("lama0"))
    assert f"does not exist; did you mean {llama.name}?; must be" in refusal(hf.find, name)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_code_of_a_repository_is_refused(file, copied):
    path = copied / file
    content = json.loads(path.read_text()) if path.exists() else {}
    content["text"] = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    path.write_text(json.dumps(content))
    (copied / "evil.py").write_text("raise SystemExit('it ran')")
    for call in (hf.fetch, hf.load_tokenizer):
        assert refusal(call, str(copied)) == (
            f"{KEY}={copied}: {file} has auto_map: it wants code of the repository to be run, "
            "which never happens here; take a model whose code is in transformers, or remove "
            "auto_map from a copy of the folder if this one's is"
        )


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_digest_of_a_model_follows_what_decides_its_outputs(copied):
    def digest():
        return hf.load_model("AutoModelForCausalLM", str(copied)).digest

    first = digest()
    change(copied, transformers_version="6", dtype="bfloat16", use_cache=False, temperature=0.5)
    assert digest() == first
    change(copied, rope_parameters={"rope_theta": 50.0, "rope_type": "default"})
    assert digest() != first


def test_a_kernel_of_the_hub_is_refused(copied):
    change(copied, attn_implementation="evil/kernel")
    assert "it wants a kernel of the hub to be run" in refusal(hf.find, str(copied))


def test_quantized_weights_are_refused(copied):
    change(copied, quantization_config={"quant_method": "gptq"})
    assert refusal(hf.find, str(copied)) == (
        f"{KEY}={copied}: its weights are quantized (gptq), which cannot be trained here; give the "
        "model as it was before, or a GGUF file, which is unpacked"
    )


def test_a_folder_whose_weights_are_pickles_is_refused(copied):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert "pytorch_model.bin is not opened" in refusal(hf.find, str(copied))


def test_a_missing_part_of_the_weights_is_named(copied):
    index = {"weight_map": {"one": "model-00001-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(hf.find, str(copied)) == (
        f"{KEY}={copied}: has no model-00001-of-00002.safetensors, which "
        "model.safetensors.index.json names; add it"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_config_is_one_line(content, copied):
    (copied / "config.json").write_bytes(content)
    assert refusal(hf.find, str(copied)).startswith(
        f"{KEY}={copied}: config.json is not readable ("
    )


def test_broken_weights_are_one_line(copied):
    (copied / "model.safetensors").write_bytes(b"broken")
    assert refusal(hf.load_model, "AutoModelForCausalLM", str(copied)).startswith(
        f"{KEY}={copied}: AutoModelForCausalLM cannot load it (SafetensorError: "
    )


def test_an_adapter_is_no_model(copied):
    content = {"peft_type": "LORA", "base_model_name_or_path": "hub/llama"}
    (copied / "adapter_config.json").write_text(json.dumps(content))
    must = "is an adapter of peft, not a model; give its base, hub/llama"
    assert refusal(hf.find, str(copied)) == f"{KEY}={copied}: {must}"


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_an_encoder_decoder_is_no_causal_model(kind, tmp_path):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert refusal(hf.load_model, "AutoModelForCausalLM", str(tmp_path)) == (
        f"{KEY}={tmp_path}: is an encoder-decoder (model_type={kind.lower()}); must be a "
        "decoder-only model, such as a Llama or a Qwen, which AutoModelForCausalLM loads whole"
    )


def test_weights_that_are_missing_are_refused_but_for_a_new_head(llama, copied):
    from safetensors.torch import load_file, save_file

    said = []
    model = hf.load_model(
        "AutoModelForSequenceClassification", str(llama), say=said.append, num_labels=3
    )
    assert said == [f"new weights, not in {llama}: score.weight"]
    assert model.new_modules == ("score",)
    weights = load_file(copied / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert refusal(hf.load_model, "AutoModelForCausalLM", str(copied)) == (
        f"{KEY}={copied}: has no model.layers.1.mlp.up_proj.weight of LlamaForCausalLM; must be a "
        "model that AutoModelForCausalLM loads whole"
    )


def test_a_config_that_does_not_fit_the_weights_is_refused(llama, copied):
    change(copied, num_hidden_layers=1)
    surplus = refusal(hf.load_model, "AutoModelForCausalLM", str(copied))
    assert surplus.startswith(f"{KEY}={copied}: its files have model.layers.1.")
    assert "which its config.json leaves out; must be the config" in surplus
    vocabulary = hf.load_config(str(llama)).vocab_size
    change(copied, num_hidden_layers=2, vocab_size=vocabulary + 1)
    others = refusal(hf.load_model, "AutoModelForCausalLM", str(copied))
    assert f"has shape ({vocabulary}, " in others and f"and ({vocabulary + 1}, " in others


def test_only_a_new_head_may_have_another_shape(llama, copied):
    change(copied, vocab_size=hf.load_config(str(llama)).vocab_size + 1)
    told = refusal(hf.load_model, "AutoModelForSequenceClassification", str(copied))
    assert told.startswith(f"{KEY}={copied}: model.embed_tokens.weight has shape (")


def test_weights_of_pretraining_alone_are_no_flaw(tmp_path):
    """A token for hidden patches, and layers that predict further tokens."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    transformers.ViTForMaskedImageModeling(config).save_pretrained(tmp_path / "vit")
    hf.load_model("AutoModelForImageClassification", str(tmp_path / "vit"))
    config = transformers.LlamaConfig(**sizes | {"num_hidden_layers": 2}, vocab_size=32)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    change(tmp_path / "llama", num_hidden_layers=1, num_nextn_predict_layers=1)
    hf.load_model("AutoModelForCausalLM", str(tmp_path / "llama"))


# GGUF ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gguf_file_is_unpacked_once_and_can_be_saved(tmp_path, monkeypatch, capfd):
    from harness.weights import smollm2

    pytest.importorskip("gguf")
    file = smollm2()
    use_hub("http://127.0.0.1:9", tmp_path / "home", monkeypatch.setattr)
    hf.fetch(str(file))
    out, err = capfd.readouterr()
    assert out == ""
    first, *progress = err.splitlines()  # a slow disk prints lines of progress
    assert first.startswith(f"unpacking {file} into ")
    assert all(line.startswith(f"unpacking {file.name}: ") for line in progress)
    model = hf.load_model("AutoModelForCausalLM", str(file))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    hf.fetch(str(file))
    assert capfd.readouterr() == ("", "")
    tokenizer = hf.load_tokenizer(str(file))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**tokens, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.strip().startswith("The capital of France is Paris.")
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    check_equal(again, model)
    adapted = hf.adapt(model, 8)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert sum(weight.numel() for weight in trained) == 2_442_240


# LoRA ------------------------------------------------------------------------------------------


def names_of_trained(model):
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def test_each_linear_layer_but_the_last_is_adapted_in_fp32():
    model = build_llama().to(torch.bfloat16)
    adapted = hf.adapt(model, 4)
    trained = names_of_trained(adapted)
    assert len(trained) == 2 * 7 * 2  # layers, linear ones in each, A and B
    assert not [name for name in trained if "lm_head" in name or "lora_" not in name]
    parts = dict(adapted.named_parameters())
    assert {parts[name].dtype for name in trained} == {torch.float32}
    assert {weight.dtype for name, weight in parts.items() if name not in trained} == {
        torch.bfloat16
    }
    config = adapted.peft_config["default"]
    assert (config.r, config.lora_alpha, config.task_type) == (4, 8, "CAUSAL_LM")


def test_the_settings_of_adapters_are_those_that_are_given():
    model = build_llama()
    model.config._commit_hash = "abc"
    config = hf.adapt(model, 4, alpha=3.0, dropout=0.25).peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 3.0, 0.25)
    assert config.revision == "abc"  # of the base, by which peft finds it again
    config = hf.adapt(build_llama(), 4).peft_config["default"]
    assert (config.lora_dropout, config.revision) == (0.0, None)


def test_adapters_are_drawn_from_the_generator_of_torch():
    def drawn(seed):
        model = build_llama()
        torch.manual_seed(seed)
        parts = dict(hf.adapt(model, 4).named_parameters())
        return [parts[name] for name in parts if "lora_A" in name]

    assert all(map(torch.equal, drawn(1), drawn(1)))
    assert not any(map(torch.equal, drawn(1), drawn(2)))


@pytest.mark.parametrize(
    ("targets", "count"),
    [(["q_proj", "mlp.up_proj"], 4), (r".*layers\.1\..*_proj", 7), ("q_proj", 2)],
)
def test_targets_are_names_or_a_pattern(targets, count):
    assert len(names_of_trained(hf.adapt(build_llama(), 4, targets))) == 2 * count


def test_targets_that_match_nothing_are_refused_with_near_names():
    def of(targets):
        return refusal(hf.adapt, build_llama(), 4, targets)

    begin = "task.options.lora: targets"
    of_llama = "matches no layer of LlamaForCausalLM"
    assert of(["q_pro"]) == f"{begin}=q_pro {of_llama}; did you mean q_proj?"
    linear = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"
    assert of("attention.*") == f"{begin}=attention.* {of_llama}; choose among {linear}"
    assert of("q_proj(").startswith(f"{begin}=q_proj( must be a pattern (missing ), ")
    assert of([]) == f"{begin}=[] names no layer; name some of {linear}, or set all-linear"
    assert of(["norm"]) == (
        f"{begin} has model.norm, a LlamaRMSNorm, which LoRA cannot adapt; "
        f"name layers with a matrix, such as {linear}"
    )


def test_experts_that_all_linear_would_leave_out_are_named():
    sizes = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.MixtralForCausalLM(config)
    assert refusal(hf.adapt, model, 4) == (
        "task.options.lora: targets=all-linear would leave out "
        "model.layers.0.mlp.experts.gate_up_proj and others, 6,144 weights that are no linear "
        "layers; name what to adapt, such as targets=[q_proj,k_proj,v_proj,o_proj]"
    )
    assert len(names_of_trained(hf.adapt(model, 4, ["q_proj", "v_proj"]))) == 4


def test_the_output_layer_of_a_mamba_is_left_out():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 32}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    names = names_of_trained(hf.adapt(model, 4))
    assert any("in_proj" in name for name in names)
    assert not any("out_proj" in name for name in names)


def test_a_new_head_is_trained_beside_the_adapters(llama):
    model = hf.load_model("AutoModelForSequenceClassification", str(llama), num_labels=3)
    adapted = hf.adapt(model.bfloat16(), 4)
    trained = names_of_trained(adapted)
    head = "base_model.model.score.modules_to_save.default.weight"
    assert [name for name in trained if "lora_" not in name] == [head]
    # the least step of 16 bits is larger than most updates; peft widens adapters only
    assert adapted.get_parameter(head).dtype == torch.float32


def test_a_model_of_torch_is_adapted_too():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    adapted = hf.adapt(model, 2, trained=["2"])
    assert [name for name in names_of_trained(adapted) if "lora_" in name] == [
        "base_model.model.0.lora_A.default.weight",
        "base_model.model.0.lora_B.default.weight",
    ]
    assert adapted(torch.ones(3, 4)).shape == (3, 2)
    assert refusal(hf.adapt, torch.nn.Conv2d(1, 1, 1), 2) == (
        "task.options.lora: Conv2d has no linear layer to adapt; name other layers by targets, "
        "or train all weights"
    )


@pytest.mark.parametrize(("package", "call"), [("peft", hf.adapt), ("gguf", hf.load_tokenizer)])
def test_a_missing_package_is_named_with_the_extra(package, call, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    arguments = (build_llama(), 2) if call is hf.adapt else (str(file),)
    assert refusal(call, *arguments) == (
        f"needs {package}, which is not installed: pip install 'lockstep-trainer[hf]'"
    )


# Whole runs ------------------------------------------------------------------------------------

LORA = (
    *("task=finetune", "task.options.lora=2", "task.options.texts=12", "task.options.context=24"),
    *("run.steps=2", "data.global_batch=12", "strategy.precision=fp64"),
)


@pytest.mark.parametrize("words", slow_but(["", "strategy=fsdp"], ""))
def test_two_ranks_start_from_a_name_on_the_hub(words, hub, command, tmp_path):
    home = tmp_path / "home_of_ranks"
    done = command(
        *LORA,
        *words.split(),
        "task.options.model=hub/llama",
        ranks=2,
        before=lambda: use_hub(hub.url, home, setattr),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [line for line in hub.asked if line.endswith("/model.safetensors")]
    assert len(asked) == 2  # HEAD and GET, of one rank
    assert done.stderr.count("new weights, not in hub/llama: score.weight") == 1


@pytest.mark.parametrize("rank", ["0", "-4"])
def test_a_rank_of_lora_that_is_none_is_refused(rank, command):
    done = command("task=finetune", f"task.options.lora={rank}")
    assert done.returncode == 2
    must = "must be an integer of at least 1"
    assert done.stderr == f"error: task.options.lora={rank}: {must}\n"
