"""Computations on the meta device: what is remembered has the form that torch computes."""

import pytest
import torch
import torch.nn.functional as F

from trainer.mesh import meta_shapes
from trainer.mesh.stage import OnMeta

OPERATIONS = {
    "linear": lambda x: F.linear(x, x),
    "norm": lambda x: F.layer_norm(x, (4,)),
    "several results": lambda x: x.topk(2),
    "a list": lambda x: torch.cat(x.split([1, 2])),
    "a view": lambda x: x.t()[1:],
    "in place": lambda x: x.clone().add_(1),
    "another dtype": lambda x: x.sum(0, dtype=torch.float64),
    "a true value": lambda x: x.sum(0, keepdim=True),
    "a false value": lambda x: x.sum(0, keepdim=False),
    "a number": lambda x: x + 1,
    "a float": lambda x: x.long() + 1.0,
    "an integer": lambda x: x.long() + 1,
    "a new tensor": lambda x: torch.zeros_like(x, dtype=torch.int8),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
}


def form_of(result):
    parts = result if isinstance(result, tuple) else (result,)
    return [(part.shape, part.stride(), part.dtype, part.device.type) for part in parts]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_remembered_result_has_the_form_that_torch_computes(name):
    for _ in range(2):
        for x in (torch.ones(3, 4, device="meta"), torch.ones(4, 3, device="meta").half().t()):
            expected = form_of(OPERATIONS[name](x))
            with OnMeta():
                assert form_of(OPERATIONS[name](x)) == expected


def test_gradients_pass_through_remembered_results():
    for _ in range(2):
        x = torch.ones(3, 4, device="meta", requires_grad=True)
        with OnMeta():
            (slope,) = torch.autograd.grad(F.layer_norm(x, (4,)).square().sum(), x)
        assert form_of(slope) == form_of(x)


def test_a_view_is_made_anew():
    x = torch.ones(3, 4, device="meta")
    with OnMeta():
        assert x.t()._base is x and x.view(12)._base is x
        assert torch.add(x, 1) is not torch.add(x, 1)


def test_no_more_forms_are_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr(meta_shapes, "MOST_KNOWN", 3)
    monkeypatch.setattr(meta_shapes, "_known", {})
    with OnMeta():
        for size in range(1, 9):
            assert torch.ones(size, device="meta").exp().shape == (size,)
    assert 0 < len(meta_shapes._known) <= 3
