"""Edits of what stands beside the core: buckets, Ray, language models, exports, the recorder."""

from __future__ import annotations

from mutants.edits import Edit, in_area

OF_BUCKETS = (
    *("places/test_bucket_order.py", "places/test_mirror.py"),
    *("places/test_newest_whole.py", "places/test_last_checkpoint.py"),
    *("places/test_shared_buckets.py", "core/checkpoints/test_failed_start.py"),
    *("places/test_lost_nodes.py", "places/test_stores.py"),
    *("places/test_slow_uplink.py", "core/checkpoints/test_hostile_files.py"),
)
OF_RAY = ("places/test_ray_ranks.py", "places/test_ray.py")
OF_CHATS = ("hf/test_chat.py", "hf/test_hostile_chats.py")
OF_MODELS = (
    *("hf/test_hf.py", "hf/test_hostile_models.py"),
    *("hf/test_finetune.py", "hf/test_images.py"),
    "hf/test_exports.py",
)
OF_LM = ("hf/test_lm.py", "hf/test_exports.py")
OF_EXPORTS = (
    *("hf/test_pretrained.py", "hf/test_exports.py", "use/test_export.py"),
    "hf/test_staged_folder.py",
)
OF_PROVE = (
    *("prove/test_recorded_facts.py", "prove/test_prove.py"),
    *("prove/test_prove_causes.py", "prove/test_prove_endings.py"),
)
_mirror = in_area("mirror", "trainer/places/mirror.py", *OF_BUCKETS)
MIRROR = [
    _mirror(
        "best",
        "return step in self._keep.kept({*self._places, step}, scores) | also",
        "return step in self._keep.kept({*self._places, step}, scores)",
        "the best checkpoint of an older step is never copied",
    ),
    _mirror(
        "prune-keeps-best",
        "kept_steps = self._keep.kept(self._places, self._scores) | also",
        "kept_steps = self._keep.kept(self._places, {}) | also",
        "a resumed run removes the bucket's best checkpoint",
    ),
    _mirror(
        "fence-before-prune",
        "        self._fence.check()  # before anything is removed: the next writer may not count "
        "this one\n",
        "",
        "a writer that has lost its lease removes checkpoints of the next one",
    ),
    _mirror(
        "manifest-first",
        'key=lambda n: not n.endswith(f"/{MANIFEST}")',
        'key=lambda n: n.endswith(f"/{MANIFEST}")',
        "a stop between two removals leaves a manifest without its files",
    ),
    _mirror(
        "record-of-own",
        'if f"{own}/{n}" in held.sizes}',
        "if n}",
        "a record that was removed from the bucket is not written again",
    ),
    _mirror(
        "publish-after-files",
        'if not self._bucket.create(f"{folder}/{MANIFEST}", text):',
        'if self._bucket.put(f"{folder}/{MANIFEST}", text):',
        "a manifest of another content counts for these files",
    ),
    _mirror(
        "fence-before-removal",
        "        self._fence.check(held)\n        for step in old:",
        "        for step in old:",
        "a writer whose successor has begun meanwhile removes what that one needs",
    ),
    _mirror(
        "size-of-manifest",
        "if sizes[name] > MOST_OF_JSON:",
        "if False:",
        "a manifest of gigabytes in a bucket takes all memory",
    ),
]

_owner = in_area("fence", "trainer/core/distributed/owner.py", *OF_BUCKETS)
_fence = in_area("fence", "trainer/places/fence.py", *OF_BUCKETS)
FENCE = [
    _fence(
        "released",
        '        if facts.get("released"):\n            return\n',
        "",
        "each resume on another machine waits 35 s",
    ),
    _fence(
        "host-is-dead",
        "if owner.is_running and not owner.is_this_process:",
        "if False:",
        "a second run on the machine takes over from a living one",
        "places/test_shared_buckets.py",
    ),
    _fence(
        "reached",
        "if reached is not None and newest > reached:",
        "if False:",
        "a start that read an older step takes over from one that has gone on",
        "places/test_shared_buckets.py",
    ),
    _owner(
        "later-process",
        'return start == HIDDEN_PROCESS or (start != "" and self.began in ("", start))',
        'return start == HIDDEN_PROCESS or start != ""',
        "a process that has the number of a dead writer blocks the run for ever",
    ),
    _fence(
        "release-undone",
        "                    if not self._is_closed.is_set():\n                        self._put()",
        "                    if True:\n                        self._put()",
        "a renewal undoes the release, and the next start waits",
    ),
    _fence(
        "lease-moved",
        "            if self.bucket.state_of(name) != first:",
        "            if False:",
        "a writer that renews its lease is taken over after 35 s",
        "places/test_shared_buckets.py",
    ),
]

_resume = in_area(
    "resume", "trainer/core/checkpoints/resume.py", "core/checkpoints/test_resume.py", *OF_BUCKETS
)
_state = in_area(
    "resume", "trainer/core/checkpoints/progress.py", "core/checkpoints/test_resume.py"
)
RESUME = [
    _resume(
        "fixed",
        'FIXED = ("task.name", "run.seed", "data.global_batch")',
        'FIXED = ("task.name", "run.seed")',
        "a resume with another global batch repeats or skips samples",
    ),
    _resume(
        "restarts",
        "    if vain >= RESTARTS:",
        "    if False:",
        "a run that always fails at one step restarts for ever",
        "core/distributed/test_launching.py",
    ),
    _resume(
        "unused",
        "if named is not None and named.exists() and not _is_empty_folder(named):",
        "if named is not None and named.exists() and False:",
        "a second run of a name writes into the first one's folder",
    ),
    _resume(
        "latest",
        "    return max(saved)[2] if saved else None",
        "    return min(saved)[2] if saved else None",
        "run.resume=auto continues the oldest run",
    ),
    _resume(
        "behind",
        "    if begun.checkpoint and last > _step_of(begun.checkpoint):",
        "    if False:",
        "a resume from an older checkpoint overwrites what followed it",
    ),
    _resume(
        "set-aside",
        "        if step >= first:\n            transaction.set_aside(path)",
        "        if step > first:\n            transaction.set_aside(path)",
        "an invalid checkpoint of the next step stays in the way",
    ),
    _state(
        "sessions",
        "sessions = [*manifest.sessions, [manifest.step, world_size]]",
        "sessions = [[manifest.step, world_size]]",
        "the record forgets on how many ranks earlier steps were made",
    ),
    _state(
        "branch",
        "        if not is_same_run:\n",
        "        if False:\n",
        "a branch has the run id of the run it left",
    ),
]

_bucket = in_area("bucket", "trainer/places/bucket.py", *OF_BUCKETS)
_listing = in_area("bucket", "trainer/places/listing.py", *OF_BUCKETS)
_stores = in_area("bucket", "trainer/core/config/stores.py", *OF_BUCKETS)
_copies = in_area("bucket", "trainer/core/config/copies.py", *OF_BUCKETS)
BUCKET = [
    _listing(
        "later-writer",
        "            if step <= min(later, default=step):",
        "            if True:",
        "a checkpoint of a writer that had lost its lease is resumed",
        "places/test_shared_buckets.py",
    ),
    _listing(
        "home",
        '        return max(homes, key=int, default="")',
        '        return min(homes, key=int, default="")',
        "show of a bucket shows the first session's record",
    ),
    _listing(
        "own-files",
        "return {name: fence for name, fence in fences.items() if fence in writer_fences}",
        "return fences",
        "files of others below the prefix are removed",
    ),
    _bucket(
        "lost-answer",
        "is_same = self.get(name) == content",
        "is_same = False",
        "a lost answer of the store ends the start",
    ),
    _bucket(
        "any-content",
        "is_same = self.get(name) == content",
        "is_same = True",
        "two writers hold one lease",
    ),
    _bucket(
        "too-large",
        "while begin < size <= most:",
        "while begin < size:",
        "a file that is too large for its manifest fills the disk",
        "core/checkpoints/test_hostile_files.py",
    ),
    _stores(
        "login-in-address",
        "    if parts.username or parts.password or parts.query or parts.fragment:",
        "    if parts.username or parts.password:",
        "a secret in an address is recorded",
        "core/config/test_security.py",
    ),
    _copies(
        "fork",
        "        if pid == os.getpid():\n            shutil.rmtree",
        "        if True:\n            shutil.rmtree",
        "a fork that ends removes the copy that its parent reads",
    ),
    _copies(
        "sweep-own",
        "is_over = folder.name.startswith(own) and _is_free(folder / HELD)",
        "is_over = folder.name.startswith(own)",
        "a second start removes the copy of the first one",
    ),
]

_ranks = in_area("ray", "trainer/places/ray_ranks.py", *OF_RAY)
_cluster = in_area("ray", "trainer/places/ray_cluster.py", *OF_RAY)
RAY = [
    _ranks(
        "code-2",
        "elif not has_failed or 2 in codes or asked or failures == config.max_restarts:",
        "elif not has_failed or asked or failures == config.max_restarts:",
        "a mistake in the settings is started again and again",
    ),
    _ranks(
        "first-code",
        "return next((code for code in (2, 1, STOPPED) if code in codes), 1)",
        "return next((code for code in (STOPPED, 1, 2) if code in codes), 1)",
        "a run that failed exits as stopped",
    ),
    _ranks(
        "restart-count",
        '"TORCHELASTIC_RESTART_COUNT": str(starts)}',
        '"TORCHELASTIC_RESTART_COUNT": "0"}',
        "a restart does not find its own previous attempt",
    ),
    _ranks(
        "local-rank",
        '                "LOCAL_RANK": seen[node],',
        '                "LOCAL_RANK": rank,',
        "ranks of a second node take devices that are not there",
    ),
    _ranks(
        "old-variables",
        "left_out = {*OF_A_GROUP, *of_ray}",
        "left_out = {*of_ray}",
        "a rank believes variables of the launcher around Ray",
    ),
    _cluster(
        "draining",
        "return sum(_fits(self.needs, has) for node, has in free.items() if node not in leaving)",
        "return sum(_fits(self.needs, has) for node, has in free.items())",
        "a run moves to a node that ends soon",
    ),
    _cluster(
        "labels",
        "        if is_there == is_not:",
        "        if not is_there:",
        "a label with ! asks for what it forbids",
    ),
    _cluster(
        "least",
        "    if least > room:",
        "    if least >= room:",
        "a cluster with just enough room is refused by the check",
    ),
]

_chats = in_area("chat", "trainer/hf/chat/__init__.py", *OF_CHATS)
_store = in_area("chat", "trainer/hf/chat/token_store.py", *OF_CHATS)
_masks = in_area("chat", "trainer/hf/chat/masks.py", *OF_CHATS)
_sealed = in_area("chat", "trainer/hf/chat/sealed.py", *OF_CHATS)
_forms = in_area("chat", "trainer/hf/chat/forms.py", *OF_CHATS)
CHAT = [
    _chats(
        "learn-in-recipe",
        "recipe = make_recipe(self.tokenizer, self.context, self.learn, self.kind.name)",
        'recipe = make_recipe(self.tokenizer, self.context, "", self.kind.name)',
        "task.options.learn=all trains on the masks of an earlier run",
    ),
    _chats(
        "split-in-digest",
        "        digest.update(rows.tobytes())\n",
        "",
        "a resume with another share of held-out rows goes on silently",
    ),
    _chats(
        "held-out",
        "return hashes == hashes.min() if share and not held.any() else held",
        "return held",
        "a small data set has no row for the evaluation",
    ),
    _store(
        "damaged",
        'if sizes != facts["sizes"] or (is_verified and _digest(folder) != facts["digest"]):',
        'if sizes != facts["sizes"]:',
        "tokens that a bad disk has changed are trained on",
    ),
    _store(
        "equal-pairs",
        "if len({each.tokens.tobytes() for each in sequences}) < len(sequences):",
        "if False:",
        "pairs whose answers are alike after the cut are trained on",
    ),
    _masks(
        "first-token",
        "        learned[:1] = False  # no token precedes it that could tell it\n",
        "",
        "a mask claims a token that cannot be learned",
    ),
    _masks(
        "cut-answer",
        "            if learned[self._context :].any():",
        "            if False:",
        "nobody learns that answers lose their stop token",
    ),
    _masks(
        "of-parts",
        "learned = np.arange(len(tokens)) >= len(prompt)",
        "learned = np.arange(len(tokens)) > len(prompt)",
        "the first token of an answer is not learned",
    ),
    _sealed(
        "longest-first",
        "longest_first = sorted(map(re.escape, names), key=len, reverse=True)",
        "longest_first = sorted(map(re.escape, names), key=len)",
        "a special token that begins with another one is read as that one",
    ),
    _sealed(
        "control",
        "if control_tokens != [token for token in self.marks(sealed) if token in self._control]:",
        "if len(control_tokens) < len(self.marks(sealed)):",
        "text of a user becomes control tokens",
    ),
    _forms(
        "common-start",
        "while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:",
        "while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:",
        "pairs that begin alike lose an answer",
    ),
    _forms(
        "parts-of-content",
        '            return "".join(texts)',
        "            return texts[0]",
        "of a content in parts only the first one is learned",
    ),
]

_lm = in_area("lm", "tasks/lm.py", *OF_LM)
_causal = in_area("lm", "trainer/hf/causal.py", *OF_LM)
LM = [
    _lm(
        "bits-sizes",
        "bits = outputs.double() / math.log(2) / sizes.clamp_min(1)",
        "bits = outputs.double() / math.log(2)",
        "bits per byte are bits per token",
    ),
    _lm(
        "bits-weights",
        'return {"bits_per_byte": (bits, sizes.double())}',
        'return {"bits_per_byte": (bits, (sizes > 0).double())}',
        "bits per byte are a mean over tokens, not over bytes",
    ),
    _lm(
        "perplexity",
        'return {"perplexity": math.exp(min(means["loss"], 700))}',
        'return {"perplexity": 2 ** min(means["loss"], 700)}',
        "the logged perplexity is too low",
    ),
    _lm(
        "segments",
        "return (segments[:, 1:] == segments[:, :-1]) & batch",
        "return (segments[:, 1:] >= 0) & batch",
        "the first token of a chat is learned from the end of the one before",
    ),
    _lm(
        "dtype-of-base",
        'dtype = "auto" if options.lora else torch.float32',
        "dtype = torch.float32",
        "a base in bf16 takes twice its memory",
    ),
    _causal(
        "stop",
        "        if word == stop:\n            break",
        "        if False:\n            break",
        "answers that are shown go on after their stop token",
    ),
    _causal(
        "special-bytes",
        "return [0 if i in special else _size(name, is_of_bytes)",
        "return [_size(name, is_of_bytes)",
        "special tokens count as text in bits per byte",
    ),
    _causal(
        "byte-piece",
        '    if len(name) == 6 and name.startswith("<0x"):',
        "    if False:",
        "a byte of SentencePiece counts as six",
    ),
    _causal(
        "window",
        '    if windows or config._attn_implementation != "sdpa":',
        '    if config._attn_implementation != "sdpa":',
        "strategy=cp ignores a model's sliding window",
    ),
]

_dpo = in_area("dpo", "tasks/dpo.py", *OF_LM)
DPO = [
    _dpo(
        "accuracy",
        '"accuracy": (margin > 0).double()',
        '"accuracy": (margin >= 0).double()',
        "a model that has learned nothing has an accuracy of 1",
    ),
    _dpo(
        "margin",
        '"margin": self.options.beta * margin}',
        '"margin": margin}',
        "the logged margin lacks beta",
    ),
    _dpo(
        "sign",
        "return gained[:, 0] - gained[:, 1]",
        "return gained[:, 0] + gained[:, 1]",
        "the rejected answer is preferred too",
    ),
    _dpo(
        "reference-files",
        "            made.append(digest_files(loading.find_weights(options.model)))\n",
        "",
        "other weights get the reference of earlier ones",
    ),
    _dpo(
        "reference-of-data",
        "return ReferenceValues((pairs.digest, self._reference), (len(pairs), 2))",
        "return ReferenceValues((self._reference,), (len(pairs), 2))",
        "other pairs get the reference of earlier ones",
    ),
    _dpo(
        "eval-mode",
        "model = self.build_model().float().to(self.world.device).eval()",
        "model = self.build_model().to(self.world.device).eval()",
        "the reference of a base of 16 bits is rounded to 16 bits",
    ),
    _dpo(
        "init-from",
        "        if self.config.run.init_from:",
        "        if False:",
        "run.init_from trains against a reference that is not the start",
    ),
    _dpo(
        "reference-in-digest",
        'hashlib.sha256(f"{pairs.digest} {reference}".encode())',
        'hashlib.sha256(f"{pairs.digest}".encode())',
        "a resume with another reference goes on silently",
    ),
]

_lora = in_area("lora", "trainer/hf/lora.py", *OF_MODELS)
LORA = [
    _lora(
        "alpha",
        "lora_alpha=2 * rank if alpha is None else alpha,",
        "lora_alpha=rank if alpha is None else alpha,",
        "adapters learn at half of the documented scale",
    ),
    _lora(
        "float32",
        "            parameter.data = parameter.data.float()",
        "            pass",
        "adapters of a base of 16 bits are trained in 16 bits",
    ),
    _lora(
        "last",
        "left_out = [name for name in linear if model.get_submodule(name) is last]",
        "left_out: list[str] = []",
        "all-linear adapts the output layer too",
    ),
    _lora(
        "experts",
        "    if sum(stacked.values()) > adapted:",
        "    if False:",
        "LoRA leaves out the experts, most of a model, without a word",
    ),
    _lora(
        "heads",
        "modules_to_save=heads or None,",
        "modules_to_save=None,",
        "the new head of a classifier is frozen",
    ),
    _lora(
        "mamba",
        '        if getattr(getattr(model, "config", None), "model_type", None) in MAMBAS:',
        "        if False:",
        "a Mamba ends in an error of peft",
    ),
]

_hub = in_area("hub", "trainer/hf/hub.py", *OF_MODELS)
_hf = in_area("hub", "trainer/hf/loading.py", *OF_MODELS)
HUB = [
    _hub(
        "offline",
        "    if hub.constants.HF_HUB_OFFLINE:\n        problem",
        "    if False:\n        problem",
        "HF_HUB_OFFLINE ends in a traceback of the hub",
    ),
    _hub(
        "revision",
        "repository = hub.HfApi().model_info(name.repository, revision=name.revision, timeout=30)",
        "repository = hub.HfApi().model_info(name.repository, timeout=30)",
        "another revision is checked than is downloaded",
    ),
    _hub(
        "unwanted",
        'UNWANTED = ("*/*.safetensors", "consolidated*.safetensors", "*.fp16.safetensors")',
        'UNWANTED = ("*/*.safetensors", "*.fp16.safetensors")',
        "a second copy of the weights is downloaded",
    ),
    _hub(
        "no-weights",
        '    elif not matching(files, ["*.safetensors"]):',
        "    elif False:",
        "a repository of pickles is downloaded before it is refused",
    ),
    _hf(
        "remote-code",
        'options = {"local_files_only": True, "trust_remote_code": False}',
        'options = {"local_files_only": True, "trust_remote_code": True}',
        "code of a repository is run",
    ),
    _hf(
        "digest-of-config",
        "    model.digest = digest_config(model.config)\n",
        "",
        "a resume with another config of the model goes on silently",
    ),
    _hf(
        "gguf-time",
        "facts = (str(path), state.st_size, state.st_mtime_ns, transformers.__version__)",
        "facts = (str(path), state.st_size, transformers.__version__)",
        "a GGUF file that was replaced gives the weights of the old one",
    ),
]

_export = in_area("export", "trainer/hf/folder_export.py", *OF_EXPORTS)
_reload = in_area("export", "trainer/hf/reload.py", *OF_EXPORTS)
_saved = in_area("export", "trainer/hf/pretrained.py", *OF_EXPORTS)
EXPORT = [
    _export(
        "limit",
        "    if not most <= limits.of(trained.outputs[name].dtype):",
        "    if not most <= 1.0:",
        "a folder whose model computes something else is published",
    ),
    _export(
        "code",
        'if odd := [name for name in facts["files"] if not name.endswith(SAFE)]:',
        "if odd := []:",
        "a folder with code in it is published",
    ),
    _export(
        "changed-folder",
        "        if sizes != listed:",
        "        if False:",
        "a folder that somebody has changed is overwritten",
    ),
    _export(
        "best",
        "if config.checkpoint.best_metric is not None and summary.best_step is not None:",
        "if False:",
        "the export has the last weights, not the best ones",
    ),
    _export(
        "exit-code",
        "            write_exit(summary.directory, 1, line, **facts)",
        "            pass",
        "exit.json says done of a run whose export failed",
    ),
    _reload(
        "tokens",
        '    if wanted["tokens"] != tokenizer(wanted["text"])["input_ids"]:',
        "    if False:",
        "a folder whose tokenizer reads texts otherwise is published",
    ),
    _reload(
        "missing",
        "    if missing:\n        raise",
        "    if False:\n        raise",
        "a folder that lacks weights is published",
    ),
    _saved(
        "tied",
        "if not all(torch.equal(one, two) for one, two in pairs):",
        "if False:",
        "weights that were untied are tied again when they are loaded",
    ),
    _saved(
        "shared-merge",
        "if isinstance(weight, nn.Parameter) and shared.get(memory_of(weight), 1) > 1:",
        "if False:",
        "merging adds the adapter of the output layer to the embeddings",
    ),
    _saved(
        "own-settings",
        'OF_THE_PLACE = ("run.dir", "run.name", "run.resume", "run.init_from")',
        'OF_THE_PLACE = ("run.name", "run.resume", "run.init_from")',
        "a card for the hub has a path of this machine",
    ),
]

_hooks = in_area("prove", "trainer/prove/recorder/hooks.py", *OF_PROVE)
_compare = in_area("prove", "trainer/prove/comparison.py", *OF_PROVE)
PROVE = [
    _hooks(
        "scale",
        "factor = 1.0 if scale is None else 1.0 / float(scale)",
        "factor = 1.0",
        "fp16 with a fused optimizer is called different for its loss scale",
    ),
    _hooks(
        "closure",
        "            if not is_taken:\n                is_taken = True\n"
        "                self.take_gradients(optimizer)",
        "            is_taken = True\n            self.take_gradients(optimizer)",
        "of LBFGS the gradients of the last evaluation are compared",
    ),
    _hooks(
        "failed-step",
        "        if is_within_step():\n            return None\n        self.begin(optimizer)",
        "        self.begin(optimizer)",
        "a step within a step, of a wrapper's own optimizer, counts too",
    ),
    _hooks(
        "steps",
        '        if done == SETTINGS["steps"]:',
        '        if done == SETTINGS["steps"] + 1:',
        "steps= compares one step more",
    ),
    _hooks(
        "frozen",
        'self._gradients |= {"frozen": frozen} if frozen else {}',
        "pass",
        "a parameter that is frozen in mid-run is not named",
    ),
    _compare(
        "spread",
        "                if value > bound:",
        "                if value > 1:",
        "ranks that start with other weights are not named",
    ),
    _compare(
        "no-gradient",
        "if all(step.gradients.is_zero for pair in _pairs(comparison) for step in pair):",
        "if False:",
        "two scripts that learn nothing are proved",
    ),
    _compare(
        "harmless",
        "    if all(each.kind not in NUMBERS for each in causes):",
        "    if True:",
        "scripts that read other examples are proved",
    ),
    _compare(
        "consequence",
        "and each.place + (each.kind not in SAME_STEP[deviation.kind]) <= deviation.place",
        "and each.place <= deviation.place",
        "a cause is left out as the consequence of one in the same step",
    ),
]

COMPANIONS: list[Edit] = [
    *MIRROR,
    *FENCE,
    *RESUME,
    *BUCKET,
    *RAY,
    *CHAT,
    *LM,
    *DPO,
    *LORA,
    *HUB,
    *EXPORT,
    *PROVE,
]
