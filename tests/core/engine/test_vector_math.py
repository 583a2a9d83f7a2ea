"""MKL's vector functions: one thread calls each first, or another may get a kernel of 11 bits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.base.process import torch_flags

HEADER = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
NAMES = {function.__name__ for function in torch_flags.FUNCTIONS}
# Counts what is computed while a module is imported.
NOTING = """
import json
from torch.utils._python_dispatch import TorchDispatchMode
class Noting(TorchDispatchMode):
    calls = []
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        dtype = getattr(arguments[0], "dtype", None) if arguments else None
        self.calls.append([function.overloadpacket.__name__, str(dtype)])
        return function(*arguments, **(options or {}))
with Noting():
    from trainer import Trainer
print(json.dumps(Noting.calls))
"""


def output_of(code, **more):
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **more})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_has_every_function_that_torch_computes_by_mkl():
    found = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", HEADER.read_text(), re.M)
    assert len(found) > 10 and set(found) == NAMES


def test_each_function_is_resolved_before_a_task_can_compute():
    calls = json.loads(output_of(NOTING))
    for dtype in ("torch.float32", "torch.float64"):
        assert {name for name, used in calls if used == dtype} >= NAMES


def test_each_function_is_resolved_before_a_recorded_script_computes(tmp_path):
    from trainer.prove.runner import Recording

    code = 'import torch, sys; print("_lockstep_recorder.torch_flags" in sys.modules)'
    assert output_of(code, **Recording(1, "native").variables(tmp_path)) == "True\n"


@pytest.mark.slow
def test_processes_whose_first_call_is_on_several_threads_agree():
    script = Path(__file__).parents[3] / "scripts/bench/first_calls.py"
    words = [sys.executable, str(script), "1000", "resolved"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "resolved before: 0 of 1000 processes differ" in done.stdout
