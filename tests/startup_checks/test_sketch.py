"""A sketch of a tensor keeps norms, also of differences."""

import pytest
import torch

from trainer.base.same.distance import sketch

SHAPES = [(), (1,), (1023,), (1025,), (300, 500), (1024, 1024), (1500, 1500)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sketch_keeps_norms(shape, dtype):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    every = [whole]
    if len(shape) == 2:
        every += [whole[:1] - whole, torch.ones(shape, dtype=dtype)]
    if shape == (1024, 1024):
        every += [whole - whole.T, torch.eye(1024, dtype=dtype)]
    for tensor in every:
        wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64)
        assert 0.4 < float(sketch(tensor).norm() / wide.norm()) < 2


def test_a_sketch_is_linear():
    one, other = torch.randn(2, 700, 900, dtype=torch.float64)
    torch.testing.assert_close(sketch(one) - sketch(other), sketch(one - other))
