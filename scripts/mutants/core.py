"""Edits of the core: decisions, objective, strategies, checks of the start, means, data, log."""

from __future__ import annotations

from mutants.edits import Edit, in_area

_decisions = in_area("decisions", "trainer/core/loop/decisions.py", "core/loop/test_decisions.py")
DECISIONS = [
    _decisions(
        "in-a-row",
        "        else:\n            self._num_skipped = 0",
        "        else:\n            pass",
        "ten bad steps of a long run end it, with good ones between",
        "core/loop/test_bad_steps.py",
    ),
    _decisions(
        "last-stop",
        "self._state.step < self._num_steps:",
        "self._state.step <= self._num_steps:",
        "a run that is asked to stop in its last step ends as stopped",
    ),
    _decisions(
        "weight-of-two",
        "has_weight &= weight != 0",
        "has_weight = weight != 0",
        "a first update without weight is not reported if the second one has some",
    ),
    _decisions(
        "skip-of-two",
        "is_skipped |= found_inf.item() != 0",
        "is_skipped = found_inf.item() != 0",
        "a first update that is not finite is not reported if the second one is",
    ),
    _decisions(
        "fp16-noted",
        "            actions.note_bad_step(step, why)\n",
        "",
        "skipped steps of fp16 are not in metrics.jsonl",
        "core/strategy/test_precision.py",
    ),
    _decisions(
        "repeated",
        "is_repeated = step in self._rolled_back",
        "is_repeated = False",
        "a step that is always bad is rolled back for ever",
        "core/loop/test_bad_steps.py",
    ),
    _decisions(
        "stale",
        "stale >= limit:",
        "stale > limit:",
        "the run makes one evaluation more than run.stop_after_evals",
        "core/loop/test_stops.py",
    ),
    _decisions(
        "longer",
        'return self._state.ended if self._state.ended_of == self._num_steps else ""',
        "return self._state.ended",
        "a longer run of an ended one ends at its start",
        "core/loop/test_stops.py",
    ),
    _decisions(
        "failed-writer",
        "return bool(self.stop) or any(writer.has_failed for writer in self._writers)",
        "return bool(self.stop)",
        "a run whose checkpoints fail goes on for hours",
        "core/loop/test_saved_after_errors.py",
        "core/checkpoints/test_writers.py",
    ),
    _decisions(
        "first-reason",
        "self.end = self.end or reason",
        "self.end = reason",
        "the reason of the end is that of a later call of stop",
        "core/loop/test_stops.py",
    ),
    _decisions(
        "end-resets",
        "report.is_stop_requested and",
        "report.is_stop_requested and not report.is_skipped and",
        "a signal that comes in a bad step is passed over",
        "core/loop/test_bad_steps.py",
    ),
    _decisions(
        "bad-noted",
        '        actions.note_bad_step(step, f"{line}; the update was skipped")',
        "        pass",
        "skipped steps are not in metrics.jsonl",
        "core/loop/test_bad_steps.py",
    ),
    _decisions(
        "at-step",
        "with self._state.at(step - 1):",
        "with self._state.at(step):",
        "examples of a bad step are named with the draws of the next one",
        "core/loop/test_bad_steps.py",
    ),
]

_objective = in_area("objective", "trainer/core/engine/objective.py", "core/engine/test_means.py")
OBJECTIVE = [
    _objective(
        "short-rows",
        " and targets.shape[:1] == values.shape[:1]:",
        ":",
        "a batch with fewer targets than values trains without an error",
        "core/engine/test_means.py",
    ),
    _objective(
        "short-gradient",
        "t.layout, t.requires_grad)",
        "t.layout, True)",
        "a loss that is detached later ends in a traceback, or weights train themselves away",
        "core/engine/test_step.py",
    ),
    _objective(
        "short-layout",
        "t.layout, t.requires_grad)",
        "torch.strided, t.requires_grad)",
        "a loss that is sparse later ends in a traceback",
    ),
    _objective(
        "signs",
        "        if self.is_weighted is None:\n            check_signs",
        "        if False:\n            check_signs",
        "negative weights train",
        "core/setup/test_wrong_hooks.py",
    ),
    _objective(
        "elements-of-resume",
        "self.elements = self.elements or agreed // 2",
        "self.elements = agreed // 2",
        "a resumed run of weighted values has other bits",
        "core/engine/test_recording.py",
        "core/checkpoints/test_resume.py",
    ),
    _objective(
        "counted-parts",
        "            return total.sum(), self.absent()",
        "            pass",
        "ranks of a mesh count the same values twice",
        "mesh/test_meshes.py",
    ),
    _objective(
        "checked-each-time",
        "            self._form = _form_of(returned)  #",
        "            self._form = None  #",
        "each micro-batch pays for checks that were made",
    ),
    _objective(
        "gradient-check",
        "if torch.is_grad_enabled() and not values.requires_grad:",
        "if False:",
        "a loss without a gradient ends in a traceback",
        "core/setup/test_wrong_hooks.py",
    ),
    _objective(
        "scale-ranks",
        "return self._ranks / (self._global_batch * self.elements)",
        "return 1 / (self._global_batch * self.elements)",
        "gradients of two ranks are halved",
    ),
]

_ddp = in_area("ddp", "trainer/core/strategy/ddp.py", "core/strategy/test_strategies.py")
DDP = [
    _ddp(
        "buffers",
        "tensors = [*module.parameters(), *module.buffers()]",
        "tensors = [*module.parameters()]",
        "ranks that build other buffers train on with them",
    ),
    _ddp(
        "third-rank",
        "if self.world.world_size > 2 or not is_plain:",
        "if not is_plain:",
        "on three ranks a resumed run has other bits",
    ),
    _ddp(
        "compressed-precision",
        'config.strategy.weights != "fp32"',
        'config.strategy.weights in ("fp64", "bf16")',
        "a hook that compresses float32 is accepted for an fp16 model",
    ),
    _ddp(
        "bf16-hook",
        'if hook == "bf16" and choose_backend(config.dist, world) != "nccl":',
        "if False:",
        "the bf16 hook is accepted on a backend without bf16",
    ),
    _ddp(
        "compressed-weights",
        "dtype = torch.float64 if is_compressed else self.precision.wide",
        "dtype = self.precision.wide",
        "the weight of a batch is compressed to 16 bits, so the mean is wrong",
        "core/strategy/test_precision.py",
    ),
    _ddp(
        "powersgd-resume",
        'if is_resumed and self.config.comm_hook == "powersgd":',
        "if False:",
        "a resume with PowerSGD does not say that it is not exact",
        "core/strategy/test_precision.py",
    ),
    _ddp(
        "no-sync",
        "with nullcontext() if batch_number == last else self._wrapped.no_sync():",
        "with nullcontext():",
        "each micro-batch is all-reduced",
    ),
    _ddp(
        "rank-0-alone",
        'is_alone = spec.world.world_size == 1 and comm_hook == "none"',
        "is_alone = spec.world.world_size == 1",
        "a hook that is asked for on one rank is left out silently",
    ),
    _ddp(
        "others",
        "        self._check_reached(objective)\n        return self._unload()",
        "        return self._unload()",
        "a parameter that no loss reaches is not stepped, without a line",
        "core/loop/test_decisions.py",
        "core/engine/test_named_updates.py",
    ),
]

_exact = in_area(
    "exact",
    "trainer/core/strategy/exact.py",
    "core/engine/test_facts_of_steps.py",
    "core/strategy/test_exact.py",
)
EXACT = [
    _exact(
        "leaves",
        "MOST_LEAVES = 8",
        "MOST_LEAVES = 4",
        "the default leaf is another one than documented, so a run has other bits",
    ),
    _exact(
        "sparse",
        "if gradient.is_sparse:",
        "if False:",
        "sparse gradients end in a traceback",
        "core/setup/test_wrong_hooks.py",
    ),
    _exact(
        "devices",
        "if block.devices_per_rank > 1:",
        "if False:",
        "several devices of a rank are accepted without a fixed order",
    ),
    _exact(
        "auto",
        'if config.data.micro_batch == "auto":',
        "if False:",
        "a micro-batch that depends on the memory is accepted",
    ),
    _exact(
        "of-the-run",
        'of_the_run = ("strategy.name", "data.micro_batch", "eval.micro_batch")',
        'of_the_run = ("strategy.name", "data.micro_batch")',
        "runs with other leaves in evaluation count as the same run",
    ),
    _exact(
        "threads",
        "        torch.set_num_threads(1)\n        return 1",
        "        return super().set_threads(world)",
        "bits depend on the number of cores",
    ),
]

_base = in_area(
    "strategy",
    "trainer/core/strategy/base.py",
    "core/engine/test_facts_of_steps.py",
    "core/strategy/test_strategies.py",
)
STRATEGY = [
    _base(
        "norm-narrow",
        "            gradients = [gradient.float() for gradient in gradients]",
        "            pass",
        "the norm of gradients of 16 bits overflows, and clipping zeroes them",
        "core/strategy/test_precision.py",
    ),
    _base(
        "device-ids",
        "if block.device_ids is not None and not cls.takes_device_ids:",
        "if False:",
        "strategy.device_ids is ignored silently",
    ),
    _base(
        "no-parameters",
        "if not any(p.requires_grad for p in self.tensors.structure.parameters()):",
        "if False:",
        "a model that is frozen as a whole ends in a traceback",
        "core/setup/test_wrong_hooks.py",
    ),
    _base(
        "sparse",
        "parameter.grad.layout is not torch.strided:",
        "False:",
        "sparse gradients end in a traceback in the first step",
        "core/setup/test_wrong_hooks.py",
    ),
    _base(
        "one-row",
        "has_all = all(p.grad is not None for p in self.tensors.trained)",
        "has_all = True",
        "a large model whose first row reaches no expert is refused",
    ),
    _base(
        "channels-last",
        "    if is_channels_last:\n        inputs",
        "    if False:\n        inputs",
        "images are converted in each layer",
    ),
]

_checks = in_area("checks", "trainer/startup_checks/__init__.py", "startup_checks/test_proof.py")
_rows = in_area(
    "checks",
    "trainer/startup_checks/row_independence.py",
    "startup_checks/test_tried_rows.py",
    "startup_checks/test_proof.py",
)
_agreement = in_area(
    "checks",
    "trainer/startup_checks/rank_agreement.py",
    "startup_checks/test_tried_rows.py",
    "startup_checks/test_proof.py",
)
CHECKS = [
    _checks(
        "late",
        "LATE = (1, 9, 99, 999)",
        "LATE = (1, 9)",
        "what begins after step 10 is never looked at",
        "startup_checks/test_late.py",
    ),
    _checks(
        "warn",
        'if self._parts.config.run.prove == "warn":',
        "if self._parts.config.run.prove:",
        "a run that would differ trains on after a warning",
    ),
    _checks(
        "outside",
        'outside = "apart from plain BatchNorm, "',
        'outside = ""  #',
        "the line of the proof claims what plain BatchNorm breaks",
    ),
    _checks(
        "tried",
        'tried = f"{result.rows} rows tried, " if not result.unproved else ""',
        'tried = ""',
        "nobody learns that three rows of a large model were tried",
    ),
    _checks(
        "notes",
        'run.say(f"note: {what} {why}: runs with another run.prove may differ")',
        "pass",
        "traces that trial passes leave outside are not told",
    ),
    _checks(
        "name-rank",
        "if not is_first and not self._has_equal_weights():",
        "if False:",
        "ranks whose weights have drifted blame the loss",
        "startup_checks/test_late.py",
    ),
    _checks(
        "draws-again",
        "if had_row and any(self._parts.ranks.group.max(bool(found.line))):",
        "if False:",
        "a large model that draws from two rows on is refused",
        "core/strategy/test_experts.py",
    ),
    _rows(
        "too-large",
        "if size > PROVED_BYTES:",
        "if False:",
        "the checks of a model that fills the memory run out of it",
    ),
    _rows(
        "too-slow",
        "if 6 * self._flops > MOST_FLOPS:",
        "if False:",
        "the start of a large model takes an hour on a CPU",
    ),
    _rows(
        "written",
        "if is_large(structure) and written and not result.line:",
        "if False:",
        "a pass that writes weights of a large model changes them at the start",
        "startup_checks/test_late.py",
    ),
    _rows(
        "fast",
        "flops = unit * self._parts.strategy.flops / (FASTER if is_fast else 1)",
        "flops = self._parts.strategy.flops / (FASTER if is_fast else 1)",
        "with run.norm_rows the checks take a multiple of their time",
    ),
    _rows(
        "most-rows-first",
        "                return replace(result, rows=cuts[-1])",
        "                return replace(result, rows=trials[0][1][-1])",
        "the line of the proof names more rows than were tried",
    ),
    _rows(
        "memory",
        'return CheckResult(unproved="left out: memory is not enough for a few rows more")',
        "return CheckResult()",
        "a start without memory for a few rows says that all is proved",
    ),
    _agreement(
        "large-rows",
        "if 2 * LEAST * flops >= COSTLY_FLOPS:",
        "if LEAST * flops >= COSTLY_FLOPS:",
        "the start of a middle-sized model takes twice as long, or tries other rows",
    ),
    _agreement(
        "read-rows",
        "most = min(MOST_GATHERED if costs.is_resident else MOST_READ, global_batch)",
        "most = min(MOST_GATHERED, global_batch)",
        "the start reads 256 examples one by one",
    ),
    _agreement(
        "bytes",
        "CHEAP_BYTES // max(costs.size, 1))",
        "MOST)",
        "the start copies rows of a gigabyte",
    ),
    _agreement(
        "least",
        "return max(LEAST, most)",
        "return max(2, most)",
        "a small global batch is proved on two rows",
    ),
    _agreement(
        "limit-of-rows",
        "return gap(one[0], other[0]) <= CLOSE * max(one[1], other[1])",
        "return gap(one[0], other[0]) <= 1000 * CLOSE * max(one[1], other[1])",
        "the module that differs on a rank is not the one that is named",
    ),
    _agreement(
        "reread",
        "    if is_alike and found is None:  # padded otherwise\n        return None",
        "    if is_alike:\n        return None",
        "rows that change their length when they are read again pass",
        "startup_checks/test_reasons.py",
    ),
]

_recording = in_area(
    "recorder",
    "trainer/core/engine/recording.py",
    "core/engine/test_facts_of_steps.py",
    "core/engine/test_recording.py",
)
_values = in_area("recorder", "trainer/core/engine/values.py", "core/engine/test_means.py")
_means = in_area("recorder", "trainer/core/engine/means.py", "core/engine/test_means.py")
RECORDER = [
    _recording(
        "taken",
        "        if name in self._taken:\n            raise",
        "        if False:\n            raise",
        "a recorded value is added to the loss of an update of its name",
    ),
    _recording(
        "names",
        "        self._names.add(name)\n",
        "",
        "a value and a metric of one name are added up",
    ),
    _recording(
        "own-loss",
        "hooks = self._hooks if self._hooks and loss == self._hooks.loss else None",
        "hooks = self._hooks",
        "the metrics of a GAN's two updates are added up",
    ),
    _recording(
        "another-loss",
        "if watched_pair is None or watched_pair[0] != loss or self._compiles:",
        "if watched_pair is None or self._compiles:",
        "the loss of the first step is used for ever",
    ),
    _values(
        "narrow",
        "        values = values.float()\n",
        "        pass\n",
        "losses of 16 bits are summed in 16 bits",
    ),
    _values(
        "sign",
        "    if least < 0:",
        "    if least < -1:",
        "negative weights train",
        "core/setup/test_wrong_hooks.py",
    ),
    _values(
        "size-of-sums",
        "torch.stack([weighted.sum(), weighted.abs().sum(), weights.sum().double()])",
        "torch.stack([weighted.sum(), weighted.sum(), weights.sum().double()])",
        "a loss whose values cancel is called different in another layout",
        "startup_checks/test_proof.py",
    ),
    _means(
        "no-weight",
        "means[name] = total / weight if weight else math.nan",
        "means[name] = total / weight if weight else 0.0",
        "a mean without examples is logged as 0",
    ),
    _means(
        "some-leaves",
        "if any(len(row) % leaves.count for row in rows):",
        "if False:",
        "under exact a value of some micro-batches only is in the wrong place",
        "core/strategy/test_exact.py",
        "core/engine/test_recording.py",
    ),
    _means(
        "integers",
        "weighted = values if weights is None else values * weights",
        "weighted = values if weights is None else values.float() * weights.float()",
        "weighted means lose 29 of their 53 bits",
    ),
]

_step = in_area(
    "step",
    "trainer/core/engine/step.py",
    "core/engine/test_facts_of_steps.py",
    "core/engine/test_optimizers.py",
)
_engine = in_area(
    "step",
    "trainer/core/engine/engine.py",
    "core/engine/test_facts_of_steps.py",
    "core/engine/test_named_updates.py",
)
_precision = in_area(
    "step",
    "trainer/core/engine/precision.py",
    "core/engine/test_facts_of_steps.py",
    "core/strategy/test_precision.py",
)
_optimizers = in_area(
    "step",
    "trainer/core/engine/optimizers.py",
    "core/engine/test_facts_of_steps.py",
    "core/engine/test_optimizers.py",
)
_state = in_area(
    "step",
    "trainer/core/engine/training_state.py",
    "core/engine/test_facts_of_steps.py",
    "use/test_frozen_weights.py",
)
STEP = [
    _step(
        "stale-norm",
        "norms, self._found = self._found, {}",
        "norms, self._found = self._found, self._found",
        "the norm of an earlier step is logged again",
        "core/engine/test_recording.py",
    ),
    _step(
        "late-momentum",
        "if 0 < len(late) < len(ready):",
        "if False:",
        "a parameter that gets its first gradient late ends the run",
    ),
    _step(
        "dampening",
        'not group["momentum"] or group["dampening"]:',
        'not group["momentum"]:',
        "with dampening a late parameter makes another first update than torch",
    ),
    _step(
        "no-lr",
        'built = [group for group in groups if "lr" in group.get("initial", {})]',
        'built = [group for group in groups if "initial" in group]',
        "an optimizer without a learning rate ends in a traceback",
        "core/setup/test_features.py",
    ),
    _engine(
        "others-freed",
        "        for parameter in others:\n            parameter.grad = None\n",
        "",
        "the gradients of the other network are clipped and stepped too",
        "core/engine/test_steps_of_users.py",
    ),
    _engine(
        "every-second",
        "        self.optimizers.rates.set(step)\n",
        "        for _ in range(1 + 20 * (step % 2)):\n"
        "            self.optimizers.rates.set(step)\n",
        "every second step is slower",
        "core/engine/test_step.py",
    ),
    _engine(
        "statistics-undone",
        "            strategy.statistics.undo(found_inf)",
        "            pass",
        "running statistics keep the NaN of a skipped step",
        "core/loop/test_bad_steps.py",
    ),
    _engine(
        "half-step",
        "            if not self._has_updated:\n                self.step.leave()",
        "            if True:\n                self.step.leave()",
        "a step that was half made is saved",
        "startup_checks/test_proof.py",
    ),
    _precision(
        "growth",
        '            self._growth.copy_(state["growth"])',
        "            pass",
        "after a resume in fp16 the scale doubles at another step",
    ),
    _precision(
        "interval",
        "2.0, 0.5, 2000)",
        "2.0, 0.5, 200)",
        "the scale doubles ten times as often as GradScaler's",
    ),
    _precision(
        "max-skipped",
        "self.max_skipped = 30 if self.is_scaled else 10",
        "self.max_skipped = 10",
        "a run in fp16 ends while its scale falls",
    ),
    _precision(
        "tf32",
        'self._is_tf32 = name == "tf32"',
        "self._is_tf32 = False",
        "the checks of the start refuse tf32 for its rounding",
        "core/strategy/test_simulated.py",
    ),
    _precision(
        "root-dtype",
        "key = (factor, total.dtype)",
        "key = (factor, torch.float32)",
        "a loss of another dtype in mid-run ends in a traceback",
        "core/engine/test_step.py",
    ),
    _optimizers(
        "muon-embedding",
        "matrices = [p for p in trained if p.dim() == 2 and p not in embeddings]",
        "matrices = [p for p in trained if p.dim() == 2]",
        "Muon steps the rows of an embedding too",
    ),
    _optimizers(
        "scheduler",
        'if any("initial_lr" in group for group in optimizer.param_groups):',
        "if False:",
        "a scheduler of torch is overwritten silently",
        "core/setup/test_wrong_hooks.py",
    ),
    _optimizers(
        "schedule-free",
        'if callable(getattr(optimizer, "train", None)) and',
        "if False and",
        "a schedule-free optimizer is evaluated at the wrong weights",
        "core/setup/test_wrong_hooks.py",
    ),
    _state(
        "ema-restart",
        "        if self.ema:\n            self.ema.restart()",
        "        if False:\n            self.ema.restart()",
        "run.init_from with run.ema_decay averages from random weights",
        "core/checkpoints/test_weights.py",
    ),
    _state(
        "ema-frozen",
        "if unused := [name for name in saved if name in self._frozen]:",
        "if unused := []:",
        "the averages of weights that are frozen here are dropped silently",
    ),
    _state(
        "base-values",
        "        if here != [dtype, shape, saved_digest]:",
        "        if here[:2] != [dtype, shape]:",
        "a resume with another base goes on silently",
    ),
]

_evaluation = in_area(
    "evaluation",
    "trainer/core/engine/evaluation.py",
    "core/engine/test_facts_of_steps.py",
    "core/engine/test_evaluation.py",
)
_schedule = in_area(
    "evaluation",
    "trainer/core/schedule.py",
    "core/engine/test_facts_of_steps.py",
    "core/engine/test_schedule.py",
)
_progress = in_area(
    "evaluation",
    "trainer/core/checkpoints/progress.py",
    "core/engine/test_facts_of_steps.py",
    "core/loop/test_stops.py",
)
EVALUATION = [
    _evaluation(
        "metric-called-loss",
        'if "loss" in returned:',
        "if False:",
        "a metric called loss replaces the loss without a word",
        "core/setup/test_wrong_hooks.py",
    ),
    _evaluation(
        "padding",
        "means.add(name, values[:rows],",
        "means.add(name, values,",
        "padded rows count in an evaluation",
    ),
    _evaluation(
        "signs",
        "if self._is_dry_run:\n                check_signs",
        "if False:\n                check_signs",
        "a metric with negative weights is logged",
        "core/setup/test_wrong_hooks.py",
    ),
    _evaluation(
        "names",
        "        if names != earlier_names:",
        "        if not names >= earlier_names:",
        "a metric of some batches only is a mean over these",
    ),
    _schedule(
        "sqrt",
        '"linear": 1.0, "sqrt": 0.5}',
        '"linear": 1.0, "sqrt": 1.0}',
        "run.lr_scaling=sqrt scales linearly",
    ),
    _schedule(
        "longer",
        "if abs(goes_on - ends) > 0.01 * max(goes_on, ends):",
        "if False:",
        "nobody learns that the rate jumps in a longer run",
    ),
    _schedule(
        "not-finite",
        "if not 0 <= number < math.inf:",
        "if not 0 <= number:",
        "an infinite rate is accepted",
        "core/setup/test_wrong_hooks.py",
    ),
    _schedule(
        "one-cycle",
        "peak = int(0.3 * num_steps) if warmup_steps is None else warmup_steps",
        "peak = int(0.3 * num_steps)",
        "one_cycle ignores its warmup_steps",
    ),
    _progress(
        "mode",
        'sign = 1 if mode == "max" else -1',
        'sign = -1 if mode == "max" else 1',
        "the worst checkpoint is kept as the best",
        "core/engine/test_evaluation.py",
    ),
    _progress(
        "other-metric",
        "        if self.best_of != best_of:",
        "        if False:",
        "after checkpoint.best_metric changed, the best of the old one stays",
    ),
    _progress(
        "nan-first",
        "is_first = self.improved is None and not math.isnan(value)",
        "is_first = self.improved is None",
        "after a first evaluation of NaN nothing counts as better",
    ),
    _progress(
        "tie",
        "sign * value <= sign * self.best):",
        "sign * value < sign * self.best):",
        "of two equal evaluations the later one is the best",
        "core/engine/test_evaluation.py",
    ),
]

_log = in_area(
    "log",
    "trainer/core/record/run_log.py",
    "core/record/test_logged_facts.py",
    "core/engine/test_recording.py",
)
_saves = in_area(
    "log",
    "trainer/core/loop/checkpointer.py",
    "core/record/test_logged_facts.py",
    "core/checkpoints/test_checkpoint.py",
)
LOG = [
    _log(
        "norm-name",
        'values["optim/grad_norm" + (f"/{name}" if name != "loss" else "")] = norm',
        'values["optim/grad_norm"] = norm',
        "of a GAN's two norms one is logged",
        "core/engine/test_named_updates.py",
    ),
    _log(
        "epoch",
        "self._later.begin(self._log(engine, step, step / steps_per_epoch))",
        "self._later.begin(self._log(engine, step, step // steps_per_epoch))",
        "the logged epoch has no fraction",
    ),
    _log(
        "paused",
        "        self._paused += time.monotonic() - begun",
        "        pass",
        "evaluations count as training time, so the logged speed is too low",
    ),
    _log(
        "speed",
        "examples = (step - then) * self._config.data.global_batch",
        "examples = step * self._config.data.global_batch",
        "the logged speed rises with the step",
    ),
    _log(
        "hint-once",
        "        self._may_hint = False\n",
        "",
        "the hint at data.workers is printed at each log",
        "core/record/test_output.py",
    ),
    _log(
        "hyper-parameters",
        "        if self._is_new:\n            self._record.hyper_parameters",
        "        if True:\n            self._record.hyper_parameters",
        "a resume writes the settings to trackers once more",
        "places/test_trackers.py",
    ),
    _log(
        "total-speed",
        "steps = state.step - self.first_step",
        "steps = state.step",
        "the speed of a resumed run counts the steps of earlier sessions",
        "core/record/test_output.py",
    ),
    _log(
        "slowest",
        'SLOWEST = ("speed/data_wait", "speed/memory_gb", "speed/reserved_gb")',
        'SLOWEST = ("speed/data_wait", "speed/reserved_gb", "speed/memory_gb")',
        "reserved and used memory are exchanged in the log",
        "core/strategy/test_simulated.py",
    ),
    _log(
        "exit-reason",
        'reason = "stopped" if is_stopped else "done" + (f": {why}" if why else "")',
        'reason = "stopped" if is_stopped else "done"',
        "exit.json does not say why a run ended early",
        "core/loop/test_stops.py",
    ),
    _saves(
        "requested",
        "        self.is_requested = False\n        self._ranks",
        "        self._ranks",
        "after save_checkpoint each segment ends with a checkpoint",
        "core/engine/test_step.py",
        "core/setup/test_features.py",
    ),
    _saves(
        "metrics-of-step",
        "strict(state.metrics if state.evaluated == state.step else {})",
        "strict(state.metrics)",
        "keep_best keeps a checkpoint for an evaluation of an earlier step",
        "core/engine/test_evaluation.py",
    ),
    _saves(
        "beyond",
        "    if state.step > num_steps:",
        "    if False:",
        "a run that is beyond run.steps ends without a word",
        "core/checkpoints/test_resume.py",
    ),
    _saves(
        "data-checked",
        "        fingerprint.check_data(data, manifest.data)",
        "        pass",
        "a resume on other data goes on silently",
        "show/test_data_content.py",
    ),
    _saves(
        "base-checked",
        "    restored.check_base(setup.parts)\n",
        "",
        "a resume with another base goes on silently",
        "use/test_frozen_weights.py",
    ),
    _saves(
        "code-noted",
        '            "code": self._code,',
        '            "code": {},',
        "compare cannot tell that the code has changed",
        "show/test_compare.py",
    ),
]

_order = in_area("data", "trainer/core/data/order.py", "core/data/test_order.py")
_ledger = in_area("data", "trainer/core/data/ledger.py", "show/test_ledger.py")
_batches = in_area(
    "data",
    "trainer/core/data/batches.py",
    "core/record/test_logged_facts.py",
    "core/loop/test_bad_steps.py",
)
DATA = [
    _order(
        "empty",
        "if batch_split.unit == 1 and rows < accumulation:",
        "if False:",
        "a rank has an empty micro-batch",
        "core/config/test_bad_configuration.py",
    ),
    _order(
        "larger-first",
        "first = start + part * size + min(part, larger)",
        "first = start + part * size + max(0, part - parts + larger)",
        "ranks of an uneven batch overlap",
    ),
    _ledger(
        "position",
        "positions = torch.arange(start, start + indices.shape[1], device=indices.device)",
        "positions = torch.arange(indices.shape[1], device=indices.device)",
        "the ledger does not see that ranks exchanged their rows",
    ),
    _ledger(
        "values",
        "return (repr(leaf) if isinstance(leaf, (int, type(None))) else type(leaf).__name__)"
        ".encode()",
        "return type(leaf).__name__.encode()",
        "a data set with other labels counts as the same",
        "show/test_data_content.py",
    ),
    _batches(
        "one-percent",
        "most = max(MOST_UNREADABLE, self._sampler.sampling.num_examples // 100)",
        "most = MOST_UNREADABLE",
        "11 unreadable examples of a million end the run",
    ),
    _batches(
        "length",
        "        if length != original:",
        "        if length < original:",
        "a data set that grows in a run gives another order",
        "core/checkpoints/test_resume.py",
        "show/test_data_content.py",
        "core/data/test_data_hooks.py",
    ),
    _batches(
        "close-every",
        "            if len(pending) >= CLOSE_EVERY:\n                self.ledger.close(group)\n",
        "",
        "memory grows with the steps between two checkpoints",
        "show/test_ledger.py",
    ),
    _batches(
        "replaced-restored",
        "        self.replaced = dict(replaced)",
        "        pass",
        "a resumed run forgets which examples were replaced",
    ),
]

_D = "core/rng/test_what_draws_depend_on.py"
_keyed = in_area("rng", "trainer/core/rng/forward.py", _D)
_philox = in_area("rng", "trainer/core/rng/philox.py", _D, "core/rng/test_randomness.py")
_seeds = in_area("rng", "trainer/core/rng/__init__.py", _D)
_loaders = in_area("rng", "trainer/core/data/loaders.py", _D, "core/data/test_data_hooks.py")
_made = in_area("rng", "trainer/core/setup/build.py", _D)
RNG = [
    _keyed(
        "step",
        "seed_layers(self._seed, step, key if self.is_entered else micro_batch_index,",
        "seed_layers(self._seed, 0, key if self.is_entered else micro_batch_index,",
        "dropout has the same masks in each step",
    ),
    _keyed(
        "update",
        "        key = _key_of(self._update)",
        "        key = 7",
        "two updates of a step have the same masks",
    ),
    _keyed(
        "global",
        "seed_global_rngs(self._seed, step, key)",
        "seed_global_rngs(self._seed, 0, key)",
        "a model that draws from numpy draws the same in each step",
        "core/rng/test_coins.py",
    ),
    _philox(
        "split",
        "key_bits = key_of(self._seed, self._split, name)",
        "key_bits = key_of(self._seed, name)",
        "an evaluation draws the numbers of training",
    ),
    _philox(
        "name",
        "key_bits = key_of(self._seed, self._split, name)",
        "key_bits = key_of(self._seed, self._split)",
        "two draws of augment are the same",
    ),
    _philox(
        "epoch",
        'epoch = self.epoch + 1 if per == "epoch" else 0',
        "epoch = 0",
        "augmentation is the same in each epoch",
    ),
    _philox(
        "per-run",
        'epoch = self.epoch + 1 if per == "epoch" else 0',
        'epoch = self.epoch if per == "epoch" else 0',
        "a draw of the run is that of its first epoch",
    ),
    _seeds(
        "example-epoch",
        "torch.default_generator.manual_seed(mixed(seed, epoch, index))",
        "torch.default_generator.manual_seed(mixed(seed, index))",
        "transforms of a data set are the same in each epoch",
    ),
    _seeds(
        "example-global",
        "    seed_global_rngs(seed, epoch, index)",
        "    seed_global_rngs(seed, 0, index)",
        "transforms by numpy are the same in each epoch",
    ),
    _seeds(
        "step-global",
        "        seed_global_rngs(seed, step, -1)",
        "        pass",
        "train_step draws unseeded numbers from numpy",
    ),
    _loaders(
        "example-split",
        'seed = key_of(self.seed, self.split, "example")',
        'seed = key_of(self.seed, "example")',
        "transforms of the evaluation are those of training",
    ),
    _made(
        "weights",
        "    seed_all(task.config.run.seed)\n    with without_bars():",
        "    with without_bars():",
        "initial weights depend on what drew before",
    ),
]

_build = in_area("setup", "trainer/core/setup/build.py", "core/setup/test_wrong_hooks.py")
_early = in_area(
    "setup", "trainer/core/setup/early_checks.py", "core/config/test_bad_configuration.py"
)
_facts = in_area("setup", "trainer/core/record/fingerprint.py", "core/loop/test_decisions.py")
_start = in_area("setup", "trainer/core/record/startup.py", "core/record/test_whole_output.py")
_session = in_area("setup", "trainer/core/setup/session.py", "core/checkpoints/test_resume.py")
SETUP = [
    _build(
        "prepare-once",
        "            if task.world.local_rank == 0:",
        "            if True:",
        "each rank of a node downloads the data",
        "core/setup/test_features.py",
    ),
    _build(
        "freeze-nothing",
        "        if not matched:\n            some",
        "        if False:\n            some",
        "run.freeze with a misspelt name freezes nothing",
        "core/checkpoints/test_weights.py",
        "core/setup/test_features.py",
        "core/config/test_bad_configuration.py",
    ),
    _build(
        "freeze-all",
        "    if patterns and not any(p.requires_grad for p in names.values()):",
        "    if False:",
        "run.freeze of all weights is not named as the cause",
        "core/checkpoints/test_weights.py",
        "core/setup/test_features.py",
        "core/config/test_bad_configuration.py",
    ),
    _build(
        "sampling-size",
        "    if chosen.num_examples != len(dataset):",
        "    if chosen.num_examples > len(dataset):",
        "a sampling of fewer examples leaves out the others silently",
        "core/data/test_sampling.py",
    ),
    _build(
        "wrapped",
        "    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):",
        "    if False:",
        "a model in DDP is wrapped twice",
        "verbs/test_first_contact.py",
    ),
    _build(
        "blocks",
        "    if len(set(blocks)) < len(blocks) or model in blocks:",
        "    if False:",
        "a block that is named twice ends in a traceback",
        "core/strategy/test_divided_parameters.py",
    ),
    _early(
        "train-split",
        '    if "train" in config.eval.splits:',
        "    if False:",
        "metrics of an evaluation have the names of training",
        "check/test_plan.py",
    ),
    _early(
        "own-names",
        "            if isinstance(attribute, property):\n",
        "            if False:\n",
        "a task that defines `model` replaces the trainer's",
        "core/setup/test_wrong_hooks.py",
        "core/setup/test_features.py",
    ),
    _facts(
        "rank-0",
        'OF_RANK_0 = ("run.dir", "run.name", "run.resume")',
        'OF_RANK_0 = ("run.dir", "run.name")',
        "a restart of some nodes with run.resume is refused",
        "core/checkpoints/test_resume.py",
        "core/distributed/test_launching.py",
    ),
    _facts(
        "default-dtype",
        '    facts["the default dtype"] = str(torch.get_default_dtype())\n',
        "",
        "ranks with another default dtype are not named",
    ),
    _facts(
        "data-size",
        'for name in ("length", "digest", "size", "sampling"):',
        'for name in ("length", "digest", "size"):',
        "a resume with another sampling goes on silently",
        "core/data/test_sampling.py",
    ),
    _facts(
        "content",
        '        if changed := ledger.find_changes(before, current[split].get("content")):',
        "        if changed := []:",
        "a resume on other data of the same length goes on silently",
        "show/test_data_content.py",
    ),
    _start(
        "dropped",
        "left = plan.num_examples - per_epoch * plan.global_batch",
        "left = plan.num_examples % plan.micro_batch",
        "the start tells a wrong number of dropped examples",
    ),
    _start(
        "changes",
        "keys = [key for key in {**saved, **ours} if key not in fingerprint.OF_RANK_0]",
        "keys = [key for key in ours if key not in saved]",
        "a resume does not tell which settings it changes",
    ),
    _start(
        "longer",
        'more = f"run.steps={2 * steps}" if steps else',
        'more = f"run.steps={steps}" if steps else',
        "the printed command does not train longer",
    ),
    _start(
        "session-failed",
        '    if ended.get("code") in (None, 0, STOPPED):',
        '    if ended.get("code") in (None, 0, 1, STOPPED):',
        "a resume does not tell why the last session failed",
        "core/distributed/test_silent_ends.py",
        "core/checkpoints/test_resume.py",
    ),
    _start(
        "room",
        "    if need <= free:",
        "    if True:",
        "nobody learns that the disk will be full",
        "core/checkpoints/test_checkpoint.py",
        "core/checkpoints/test_nothing_lost.py",
    ),
    _session(
        "kept-precision",
        'inherited["strategy.precision"] or choose_precision(not without)',
        "choose_precision(not without)",
        "a resume on another machine changes the precision of the run",
        "core/loop/test_stops.py",
    ),
    _session(
        "fence-released",
        "            self._release_writer()\n            raise",
        "            raise",
        "a start that fails blocks its bucket for 35 s",
        "core/checkpoints/test_failed_start.py",
        "places/test_stores.py",
        "places/test_shared_buckets.py",
        "places/test_mirror.py",
    ),
    _session(
        "best-metric",
        "keep = replace(config.checkpoint, best_metric=config.best_metric, "
        "best_mode=config.best_mode)",
        "keep = config.checkpoint",
        "by default no best checkpoint is kept",
        "core/engine/test_evaluation.py",
    ),
]

_run = in_area("loop", "trainer/core/loop/run.py", "core/loop/test_stops.py")
_calendar = in_area("loop", "trainer/core/loop/__init__.py", "core/engine/test_step.py")
_training = in_area("loop", "trainer/core/loop/training.py", "core/engine/test_recording.py")
_diagnosis = in_area("loop", "trainer/core/loop/diagnosis.py", "core/loop/test_bad_steps.py")
LOOP = [
    _run(
        "best-saved",
        "if is_best and self.config.checkpoint.keep_best > 0:",
        "if False:",
        "the best weights between two checkpoints are lost",
        "core/engine/test_evaluation.py",
    ),
    _run(
        "code",
        "code = exit_code_of(error)",
        "code = 1",
        "exit.json calls a mistake in the settings a failure",
        "core/loop/test_saved_after_errors.py",
        "startup_checks/test_proof.py",
    ),
    _run(
        "recall",
        "        self.state.recall(opened.evaluation, *self._judged_by())\n",
        "",
        "an evaluation that a killed process recorded is made and counted twice",
        "core/loop/test_stops.py",
        "core/checkpoints/test_resume.py",
    ),
    _run(
        "sound-drift",
        "            self._is_sound = False\n            check_drift",
        "            check_drift",
        "weights that have drifted are saved as the state to resume from",
        "core/loop/test_bad_steps.py",
        "core/loop/test_drift.py",
    ),
    _run(
        "metric-name",
        "        if names and best not in names:",
        "        if False:",
        "a misspelt checkpoint.best_metric fails after the first epoch",
        "use/test_predict.py",
        "core/config/test_bad_configuration.py",
    ),
    _run(
        "longer",
        "notes = [] if why or self.is_stopped else describe_longer_run(self.num_steps)",
        "notes = describe_longer_run(self.num_steps)",
        "a run that was stopped is told what a longer one would do",
        "core/record/test_logged_facts.py",
        "core/record/test_output.py",
    ),
    _run(
        "nothing-new",
        "is_complete = is_sound and not self.engine.step.is_open and step > self._log.first_step",
        "is_complete = is_sound and not self.engine.step.is_open",
        "an error before the first step claims that a state was saved",
        "core/loop/test_saved_after_errors.py",
        "startup_checks/test_proof.py",
    ),
    _run(
        "end-logged",
        "if step == self.num_steps or self.decisions.ended_by:",
        "if False:",
        "the last steps of a run are neither logged nor saved where nothing is due",
        "core/engine/test_recording.py",
    ),
    _calendar(
        "at-zero",
        "return step > 0 and any(",
        "return any(",
        "a run evaluates and saves before its first step",
    ),
    _calendar(
        "once",
        "ends += [next((each for each in self._once if each > step), self.num_steps)]",
        "ends += [self.num_steps]",
        "a profile begins and ends at other steps",
    ),
    _training(
        "norm-of-last",
        "is_logged=batch.step + 1 == segment.logged",
        "is_logged=True",
        "each step pays for the norm of its gradients",
        "core/engine/test_step.py",
    ),
    _training(
        "owed",
        "    if run.is_evaluation_owed:",
        "    if False:",
        "an evaluation that a stop left out is never made",
        "core/checkpoints/test_resume.py",
        "core/loop/test_stops.py",
    ),
    _diagnosis(
        "integers",
        'if shard.axes == form and shard.tensor.is_floating_point() and kind != "ema"',
        'if shard.axes == form and kind != "ema"',
        "a buffer that counts a rank's own rows is called drift",
        "core/loop/test_drift.py",
        "core/loop/test_bad_steps.py",
    ),
    _diagnosis(
        "batchnorm",
        "        module.train(not has_batchnorm(module))",
        "        module.train(True)",
        "one bad example makes all others of its micro-batch bad",
    ),
    _diagnosis(
        "exit-0",
        "        if status or os.getpid() != pid:",
        "        if True:",
        "a task that calls os._exit(0) ends its run as done",
        "startup_checks/test_odd_tasks.py",
    ),
]

CORE: list[Edit] = [
    *DECISIONS,
    *OBJECTIVE,
    *DDP,
    *EXACT,
    *STRATEGY,
    *CHECKS,
    *RECORDER,
    *STEP,
    *EVALUATION,
    *LOG,
    *DATA,
    *RNG,
    *SETUP,
    *LOOP,
]
