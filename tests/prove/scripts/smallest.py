"""The smallest loop, with the trouble that its first argument names."""

import os
import shutil
import sys
from pathlib import Path

trouble = sys.argv[1] if len(sys.argv) > 1 else ""
SETTINGS = os.environ.get("LOCKSTEP_PROVE", "{}")
if trouble == "cleared environment":
    os.environ.clear()

import json  # noqa: E402

import torch  # noqa: E402

folder = Path(json.loads(SETTINGS).get("folder", "."))
if trouble == "deleted folder":
    shutil.rmtree(folder)
if trouble == "pipe and junk":
    os.mkfifo(folder / "rank7-1.jsonl")
    (folder / "rank0-old.jsonl").write_text("junk")
    (folder / "rank8-1.jsonl").mkdir()
    (folder / "error-1-rank0.txt").mkdir()
    os.mkfifo(folder / "done-7")
if trouble == "junk record":
    (folder / "rank0-1.jsonl").write_text('{"event": "start"}\nnot JSON\n')
if trouble == "not unicode":
    (folder / "rank0-1.jsonl").write_bytes(b"\xff\xfe\n")
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight)
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    loss = model(torch.ones(4, 2)).sum()
    if trouble != "no backward":
        loss.backward()
    if trouble == "clips by name":
        torch.nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
        torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=0.5)
    optimizer.step()
    optimizer.zero_grad()
if trouble == "writes its folder":
    Path(sys.argv[2], "written").touch()
if trouble == "fails at its end":
    raise ValueError("the end was not written")
