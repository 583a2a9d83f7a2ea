"""`new --from SCRIPT`: a task with the parts of a training script, and TODOs for the rest.

The script is read, not run. A part is taken if the script has it once and all that it needs is
found; otherwise the task has a TODO that quotes the script's lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.new.conversion import Conversion, ModelUse, comment
from trainer.new.script import (
    LOOP_WRAPPERS,
    Code,
    TrainingScript,
    UnclearError,
    identifier,
    last_name,
    root_name,
    strip,
)

# Losses that are the mean of what they return with reduction="none", given these arguments.
LOSSES = re.compile(
    "(cross_entropy|(mse|l1|smooth_l1|huber)_loss|binary_cross_entropy(_with_logits)?"
    "|(CrossEntropy|MSE|L1|SmoothL1|Huber|BCE|BCEWithLogits)Loss)"
)
PLAIN_ARGUMENTS = {"label_smoothing", "beta", "delta"}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax")
SCHEDULES = re.compile(r"lr_scheduler\.[A-Z]|\b[A-Z]\w+LR$|LROnPlateau$|WarmRestarts$|_schedule")
# Calls in a training loop that Lockstep makes, or that only log.
DONE = {"zero_grad", "backward", "step", "update", "unscale_", "clip_grad_norm_", "train", "print"}
DONE |= {"item", "append", "log", "info", "add_scalar", "set_postfix", "set_description", "save"}


def convert(path: Path) -> Conversion:
    """Return what becomes of a script. Raises ConfigError if it trains nothing."""
    script = TrainingScript(path)
    made = Conversion(script)
    loops = list(script.enclosing(script.backward[0]))
    model = ModelUse(script)
    made.attempt("build_model", lambda: model.write(made), "return the model, without DDP")
    data = DataUse(script, loops)
    made.attempt("build_dataset", lambda: data.write(made), "return the data of a split, or None")
    made.attempt(
        "loss",
        lambda: _write_loss(made, model, data),
        "return one value per example, and no mean over them",
    )
    made.attempt("build_optimizer", lambda: _write_optimizer(made, model), "return the optimizer")
    data.set_batch(made)
    made.set_one("run.epochs", lambda: _find_epochs(script, loops))
    _set_rest(made)
    if len(data.loaders) > 1:
        why = "metrics(outputs, targets): what the evaluation computes, for each example."
        others = [each for each in data.loaders if each is not data.train]
        made.methods["metrics"] = comment(why, script.quote(*others))
    if rest := [each for loop in loops[:1] for each in _find_rest(loop, model, data)]:
        why = "the training loop also has these lines; augment or train_step may do what they do."
        made.methods["train_step"] = comment(why, script.quote(*rest))
    if made.order:
        made.methods["sampling"] = [
            "if not self.options.script_order:",
            "    return None",
            "# for the proof: the order of the script",
            f'return ScriptOrder(len(self.build_dataset("train")), {made.order})',
        ]
    return made


class DataUse:
    """The loader of the training loop, that of an evaluation, and the names of a batch."""

    def __init__(self, script: TrainingScript, loops: Sequence[ast.For]):
        self.script = script
        self.loaders = script.calls("DataLoader")
        self.batch: list[str] = []  # names of the parts of a batch
        self.train: ast.Call | None = None
        if loops:
            self.train = self._find_loader(loops[0])
            self.batch = self._find_batch(loops[0])

    def _find_loader(self, loop: ast.For) -> ast.Call | None:
        node = loop.iter
        while isinstance(node, ast.Call) and last_name(node) in LOOP_WRAPPERS and node.args:
            node = node.args[0]
        try:
            found = self.script.resolve(node)
        except UnclearError:
            found = node
        if found in self.loaders:
            return self.loaders[self.loaders.index(found)]
        return self.loaders[0] if len(self.loaders) == 1 else None

    def _find_batch(self, loop: ast.For) -> list[str]:
        target: ast.AST = loop.target
        is_numbered = isinstance(loop.iter, ast.Call) and last_name(loop.iter) == "enumerate"
        if is_numbered and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
        if isinstance(target, ast.Name):  # for batch in loader: x, y = batch
            name = target.id
            inside = [n for n in ast.walk(loop) if isinstance(n, ast.Assign)]
            pairs = [n for n in inside if isinstance(n.value, ast.Name) and n.value.id == name]
            target = pairs[0].targets[0] if len(pairs) == 1 else target
        elements = target.elts if isinstance(target, ast.Tuple) else []
        return [each.id for each in elements if isinstance(each, ast.Name)]

    def write(self, made: Conversion) -> list[str]:
        """Return the body of build_dataset; set collate, workers and the order for the proof."""
        if self.train is None or not self.train.args:
            raise UnclearError("the DataLoader of the training loop is not found", *self.loaders)
        keywords = {k.arg: k.value for k in self.train.keywords}
        body = made.write(self.script.gather(self.script.resolve(self.train.args[0])))
        lines = ['if split == "train":', *(f"    {line}" for line in body)]
        others = [each for each in self.loaders if each is not self.train and each.args]
        if len(others) == 1:
            evaluated = made.write(self.script.gather(self.script.resolve(others[0].args[0])))
            lines += ['if split == "eval":', *(f"    {line}" for line in evaluated)]
        elif others:
            why = "return the data of an evaluation; the script has several loaders."
            lines += comment(why, self.script.quote(*others))
        if "collate_fn" in keywords:
            code = self.script.gather(keywords["collate_fn"])
            code.expression = ast.Call(code.expression, [ast.Name("rows")], [])
            made.methods["collate"] = made.write(code)
        made.order = self._find_order(keywords)
        return [*lines, "return None"]

    def _find_order(self, keywords: dict[str | None, ast.expr]) -> str:
        """Return the arguments of ScriptOrder; "" if the order is drawn from a global generator."""
        if "sampler" not in keywords:
            is_shuffled = keywords.get("shuffle", ast.Constant(False))
            return "is_shuffled=False" if getattr(is_shuffled, "value", True) is False else ""
        own: dict[str | None, Any] = {}
        try:
            sampler = self.script.resolve(keywords["sampler"])
            if not isinstance(sampler, ast.Call) or last_name(sampler) != "DistributedSampler":
                return ""
            given = [k for k in sampler.keywords if k.arg in ("seed", "shuffle")]
            own = {k.arg: self.script.value(k.value) for k in given}
        except UnclearError:
            return ""
        words = {"seed": own.get("seed", 0), "is_shuffled": own.get("shuffle", True)}
        words["advances"] = bool(self.script.calls("set_epoch"))
        return ", ".join(f"{name}={value}" for name, value in words.items())

    def set_batch(self, made: Conversion) -> None:
        """Set the batch size, times the micro-batches that the script accumulates, and workers."""
        if self.train is None:
            made.left += comment("data.global_batch: rows of an optimizer step, over all ranks", [])
            return
        keywords = {k.arg: k.value for k in self.train.keywords}
        size = self.train.args[1] if len(self.train.args) > 1 else keywords.get("batch_size")
        divisor = find_accumulation(self.script)

        def find_size() -> Any:
            if size is None:
                raise UnclearError("the DataLoader has no batch_size", *self.loaders)
            return self.script.value(size)

        def find_batch() -> Any:
            return find_size() * (self.script.value(divisor) if divisor is not None else 1)

        made.set_one("data.global_batch", find_batch)
        if divisor is not None:
            made.set_one("data.micro_batch", find_size)
        if "num_workers" in keywords:
            made.set_one("data.workers", lambda: self.script.value(keywords["num_workers"]))


def find_accumulation(script: TrainingScript) -> ast.expr | None:
    """Return how many micro-batches are accumulated: N of `if step % N == 0: optimizer.step()`."""
    for call in script.steps:
        node = script.parents.get(call)
        while node is not None and not isinstance(node, ast.For):
            tests = ast.walk(node.test) if isinstance(node, ast.If) else ()
            for each in tests:
                if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
                    return each.right
            node = script.parents.get(node)
    return None


def _write_loss(made: Conversion, model: ModelUse, data: DataUse) -> list[str]:
    script = made.script
    if len(script.backward) != 1:
        raise UnclearError(f"backward is called at {len(script.backward)} places", *script.backward)
    (call,) = script.backward
    node: Any = call.args[0] if call.args else call.func.value  # type: ignore[attr-defined]
    divisors: set[str] = set()
    while not isinstance(node, ast.Call) or last_name(node) == "scale":
        before = node
        if isinstance(node, ast.Call):  # scaler.scale(loss)
            node = node.args[0]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisors.add(ast.unparse(node.right))
            node = node.left
        elif isinstance(node, ast.Name):
            values = [a.value for a in script.assigned.get(node.id, [])]
            divided = [
                v for v in values if isinstance(v, ast.BinOp) and identifier(v.left) == node.id
            ]
            divisors |= {ast.unparse(v.right) for v in divided}
            node = script.resolve(node)
        if node is before:
            raise UnclearError("the loss is not one call", node)
    divisor = find_accumulation(script)
    if divisors != ({ast.unparse(divisor)} if divisor is not None else set()):
        raise UnclearError("the loss is not divided by the micro-batches of a step", call)
    return made.write(_make_loss(script, node, model, data))


def _make_loss(script: TrainingScript, node: ast.Call, model: ModelUse, data: DataUse) -> Code:
    """Return the loss of each example. Raises UnclearError for a loss that is no plain mean."""
    is_function = bool(LOSSES.fullmatch(last_name(node)))
    kind = node if is_function else script.resolve(node.func)
    if not isinstance(kind, ast.Call) or not LOSSES.fullmatch(last_name(kind)):
        raise UnclearError("it is no loss of torch", node)
    keywords = {k.arg for k in kind.keywords}
    if keywords - PLAIN_ARGUMENTS or len(kind.args) != 2 * is_function or len(node.args) != 2:
        raise UnclearError("the loss has arguments that may change its mean", kind, node)
    if len(data.batch) != 2:
        raise UnclearError("the batch is not (inputs, targets); split_batch makes that of it", node)
    outputs, targets = node.args
    made_by = outputs if isinstance(outputs, ast.Call) else script.resolve(outputs)
    is_plain = isinstance(made_by, ast.Call) and identifier(made_by.func) in model.names
    if not is_plain or not _takes(made_by, data.batch[0]):
        raise UnclearError("its outputs are not model(inputs)", made_by, node)
    if identifier(strip(targets)) != data.batch[1]:
        raise UnclearError("its targets are not those of the batch", node)
    none = [*kind.keywords, ast.keyword("reduction", ast.Constant("none"))]
    arguments: list[ast.expr] = [ast.Name("outputs"), ast.Name("targets")]
    code = script.gather(kind.func)
    if is_function:
        code.expression = ast.Call(kind.func, arguments, none)
    else:
        code.expression = ast.Call(ast.Call(kind.func, [], none), arguments, [])
    return code


def _takes(call: Any, name: str) -> bool:
    """Return True for a call with this name alone."""
    return not call.keywords and [identifier(strip(each)) for each in call.args] == [name]


def _write_optimizer(made: Conversion, model: ModelUse) -> list[str]:
    script = made.script
    calls = [c for c in script.calls(*OPTIMIZERS) if c.args]
    if len(calls) != 1:
        raise UnclearError(f"{len(calls)} optimizers of torch are found", *(calls or script.steps))
    (call,) = calls
    given = call.args[0]
    is_plain = isinstance(given, ast.Call) and last_name(given) == "parameters"
    if not is_plain or root_name(given) not in model.names:
        raise UnclearError("it is not given all parameters of the model", call)
    keywords = {k.arg: k.value for k in call.keywords}
    rate = call.args[1] if len(call.args) > 1 else keywords.get("lr")
    if rate is None:
        raise UnclearError("it has no lr", call)
    made.set_one("optim.lr", lambda: script.value(rate))
    rest = [k for k in call.keywords if k.arg != "lr"]
    code = script.gather(ast.Call(call.func, call.args[2:], rest))
    own = ast.parse('self.config.optim["lr"]', mode="eval").body
    parameters = ast.parse("model.parameters()", mode="eval").body
    keyword = ast.keyword("lr", own)
    code.expression = ast.Call(call.func, [parameters], [keyword, *rest])
    return made.write(code)


def _find_epochs(script: TrainingScript, loops: Sequence[ast.For]) -> Any:
    for loop in loops[1:]:
        if isinstance(loop.iter, ast.Call) and last_name(loop.iter) == "range":
            if len(loop.iter.args) != 1:
                raise UnclearError("the loop over epochs does not begin with 0", loop)
            return script.value(loop.iter.args[0])
    raise UnclearError("no loop over epochs is found", *loops)


def _find_rest(loop: ast.For, model: ModelUse, data: DataUse) -> Iterator[ast.stmt]:
    """Yield the statements of the training loop that Lockstep does not make in its own way."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            is_moved = all(isinstance(strip(value), (ast.Name, ast.Constant)) for value in values)
            stored = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if stored & {*data.batch} and not is_moved:
                yield node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from [node] * (last_name(node.value) not in DONE)


def _set_rest(made: Conversion) -> None:
    """Set seed, clipping, precision and SyncBN; leave the schedule and the evaluation as TODOs."""
    script = made.script
    seeds = [c for c in script.calls("manual_seed") if ast.unparse(c.func) == "torch.manual_seed"]
    if seeds:
        made.set_one("run.seed", lambda: script.value(seeds[0].args[0]))
    if clips := script.calls("clip_grad_norm_"):
        made.set_one("run.clip_norm", lambda: script.value(clips[0].args[1]))
    if script.calls("convert_sync_batchnorm"):
        made.settings["strategy.sync_batchnorm"] = "true"
    if casts := script.calls("autocast"):
        is_bf16 = all("bfloat16" in ast.unparse(call) for call in casts)
        made.settings["strategy.precision"] = "amp_bf16" if is_bf16 else "amp_fp16"
    calls = [n for n in script.nodes if isinstance(n, ast.Call)]
    schedules = [call for call in calls if SCHEDULES.search(ast.unparse(call.func))]
    if schedules:
        why = "build_schedule(num_steps): return factor(step), which multiplies the rates."
        made.methods["build_schedule"] = comment(why, script.quote(*schedules))
