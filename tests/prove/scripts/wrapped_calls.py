"""Calls each function that the recorder watches by place and by name, and compares the results.

Run with the recorder, it ends with code 1 if a function is watched that no case here calls.
"""

import functools
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

WRAPPED = sys.modules["_lockstep_recorder.wrapping"].WRAPPED
FOLDER = Path(tempfile.mkdtemp())
called = set()


def watched(owner, name):
    """Return the watched function and its original."""
    function = getattr(owner, name)
    called.add((owner, name))
    return function, function.__wrapped__


def gradients():
    model = nn.Linear(3, 2)
    for each in model.parameters():
        each.data.fill_(1.0)
        each.grad = torch.full_like(each, 2.0)
    return model.parameters()


def check(owner, name, make, *forms):
    """Call a function in each form, of which `make` returns the arguments by name."""
    for form in forms:
        results = []
        for function in watched(owner, name):
            given = make()
            places = [given.pop(key) for key in form]
            result = function(*places, **given)
            results.append(result if torch.is_tensor(result) else None)
        same = results[0] is results[1] or torch.equal(*results)
        assert same, f"{name}{form}: {results}"


def check_clipping():
    clip = nn.utils.clip_grad
    for name, limit in (("clip_grad_norm_", "max_norm"), ("clip_grad_value_", "clip_value")):
        make = lambda limit=limit: {"parameters": gradients(), limit: 0.5}  # noqa: E731
        check(clip, name, make, (), ("parameters",), ("parameters", limit))
        assert getattr(nn.utils, name) is getattr(clip, name)
    norm = nn.utils.clip_grad_norm_(gradients(), max_norm=0.5, norm_type=1.0, foreach=False)
    assert norm == 16.0
    one = nn.Parameter(torch.ones(2))
    one.grad = torch.ones(2)
    nn.utils.clip_grad_value_(one, clip_value=0.25)
    assert one.grad.tolist() == [0.25, 0.25]
    nn.utils.clip_grad_norm_(one, 0.1, 2.0)


def check_criteria():
    classes = {"input": torch.ones(4, 3), "target": torch.tensor([0, 1, 2, 0])}
    plain = {"input": torch.full((4, 3), 0.5), "target": torch.full((4, 3), 0.25)}
    for owner, name in WRAPPED:
        if owner is F:
            given = classes if name in ("cross_entropy", "nll_loss") else plain
            given = given | ({"var": torch.ones(4, 3)} if name == "gaussian_nll_loss" else {})
            make = functools.partial(dict, given)
            check(F, name, make, (), ("input",), tuple(given))
    F.cross_entropy(classes["input"], classes["target"], None, None, 1, None, "sum", 0.1)
    F.cross_entropy(input=classes["input"], target=torch.rand(4, 3), weight=torch.rand(3))


def check_collectives():
    dist.init_process_group("gloo", init_method=f"file://{FOLDER / 'store'}", rank=0, world_size=1)
    one = functools.partial(torch.ones, 2)
    cases = {
        "all_reduce": lambda: {"tensor": one()},
        "reduce": lambda: {"tensor": one(), "dst": 0},
        "all_gather": lambda: {"tensor_list": [one()], "tensor": one()},
        "gather": lambda: {"tensor": one(), "gather_list": [one()]},
        "all_gather_into_tensor": lambda: {"output_tensor": one(), "input_tensor": one()},
        "all_gather_single": lambda: {"output_tensor": one(), "input_tensor": one()},
        "all_gather_object": lambda: {"object_list": [None], "obj": 1.0},
        "gather_object": lambda: {"obj": 1.0, "object_gather_list": [None]},
    }
    for owner, name in WRAPPED:
        if owner is dist:
            make = cases[name]
            check(dist, name, make, (), tuple(make()))


def check_models():
    model = nn.Linear(2, 1)
    rows = torch.ones(3, 2)
    call, original = watched(nn.Module, "__call__")
    for function in (call, original):
        assert torch.equal(function(model, rows), function(model, input=rows))
    backward, _ = watched(torch.autograd, "backward")
    backward(model(rows).sum())
    backward(tensors=[model(rows)], grad_tensors=[torch.ones(3, 1)], retain_graph=False)
    model(rows).sum().backward()
    assert model.weight.grad.tolist() == [[9.0, 9.0]]
    watched(DistributedDataParallel, "__init__")
    DistributedDataParallel(model)
    wrapper = DistributedDataParallel(module=model, find_unused_parameters=True)
    wrapper(rows).sum().backward()
    watched(nn.Module, "zero_grad")
    model.zero_grad(set_to_none=False)
    nn.Module.zero_grad(self=model)
    assert model.weight.grad is None


def check_optimizers():
    model = nn.Linear(2, 1)
    model(torch.ones(3, 2)).sum().backward()
    watched(torch.optim.Optimizer, "add_param_group")
    watched(torch.optim.Optimizer, "zero_grad")
    optimizer = torch.optim.SGD(params=[model.weight], lr=0.1)
    optimizer.add_param_group(param_group={"params": model.bias})
    optimizer.add_param_group({"params": (nn.Parameter(torch.ones(each)) for each in (1, 2))})
    optimizer.step(closure=None)
    optimizer.step(lambda: torch.ones(1))
    optimizer.zero_grad(False)
    optimizer.zero_grad(set_to_none=True)
    schedules = torch.optim.lr_scheduler
    for owner, name in WRAPPED:
        if name == "step":
            watched(owner, name)
    step = schedules.LambdaLR(optimizer, lr_lambda=lambda step: 0.5**step)
    step.step()
    step.step(epoch=None)
    plateau = schedules.ReduceLROnPlateau(optimizer=optimizer)
    plateau.step(1.0)
    plateau.step(metrics=torch.tensor(1.0))
    schedules.SequentialLR(optimizer, [step, schedules.LambdaLR(optimizer, abs)], [1]).step()
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0)
    loss = optimizer.param_groups[0]["params"][0].sum()
    check(torch.amp.GradScaler, "scale", lambda: {"self": scaler, "outputs": loss}, (), ("self",))
    scaler.scale(outputs=loss).backward()
    watched(torch.amp.GradScaler, "unscale_")
    scaler.unscale_(optimizer=optimizer)
    scaler.step(optimizer)
    scaler.update()


def check_numbers_and_files():
    for name in ("item", "__float__"):
        function, _ = watched(torch.Tensor, name)
        assert function(torch.ones(1)) == 1.0
    assert float(torch.ones(())) == 1.0
    watched(torch, "save")
    torch.save(obj=[1], f=FOLDER / "one.pt")
    torch.save([1], str(FOLDER / "two.pt"))
    with (FOLDER / "three.pt").open("wb") as file:
        torch.save([1], file, pickle_protocol=2)
    assert all(torch.load(f=each) == [1] for each in sorted(FOLDER.glob("*.pt")))


def check_loaders():
    for loader in (
        DataLoader(range(6), 2),
        DataLoader(dataset=range(6), batch_size=2, shuffle=False),
    ):
        assert [each.tolist() for each in loader] == [[0, 1], [2, 3], [4, 5]]
    lasting = DataLoader(range(6), 3, num_workers=1, persistent_workers=True)
    assert [[each.tolist() for each in lasting] for _ in "ab"] == 2 * [[[0, 1, 2], [3, 4, 5]]]
    for owner, name in WRAPPED:
        if "DataLoader" in owner.__name__ or "Fetcher" in owner.__name__:
            watched(owner, name)
    kind = type(iter(DataLoader(range(6), 2)))
    iterator = kind(loader=DataLoader(range(6), 2))
    assert next(iterator).tolist() == [0, 1]
    assert iterator._dataset_fetcher.fetch(possibly_batched_index=[4, 5]).batch.tolist() == [4, 5]


check_clipping()
check_criteria()
check_collectives()
check_models()
check_optimizers()
check_numbers_and_files()
check_loaders()
# A wrong call has the error of the original.
for function in (nn.utils.clip_grad_norm_, F.cross_entropy, torch.save, torch.autograd.backward):
    try:
        function(nothing=1)
    except TypeError as error:
        assert "nothing" in str(error) or "missing" in str(error), error
    else:
        raise AssertionError(function)
left = {(owner.__name__, name) for owner, name in WRAPPED if (owner, name) not in called}
assert not left, f"no case calls {left}"
LOG = sys.modules["_lockstep_recorder.wrapping"].LOG
errors = [line for line in LOG._lines if '"event": "error"' in line]
assert not errors, errors
dist.destroy_process_group()
print("all", len(set(WRAPPED)))
