"""conf/schema.json describes every file of conf/, and refuses what a run would refuse."""

import json
from pathlib import Path

import make_schema
import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads(make_schema.FILE.read_text(encoding="utf-8"))
FILES = sorted((ROOT / "conf").rglob("*.yaml")) + sorted((ROOT / "tests/conf").rglob("*.yaml"))
GROUPS = set(SCHEMA["$defs"]) - {"task"}
TASK = yaml.safe_load((ROOT / "conf/task/text.yaml").read_text())
MISTAKES = [
    {"rn": {}},
    {"run": {"epohcs": 3}},
    {"run": {"epochs": 0}},
    {"run": {"epochs": 2.5}},
    {"run": {"epochs": "many"}},
    {"run": {"seed": -1}},
    {"run": {"ema_decay": 1.5}},
    {"run": {"clip_norm": 0}},
    {"run": {"dropout": "none"}},
    {"run": {"compile": "fast"}},
    {"run": {"name": ["a"]}},
    {"data": {"batch_size": 8}},
    {"data": {"global_batch": None}},
    {"data": {"workers": -1}},
    {"strategy": {"precision": "fp8"}},
    {"strategy": {"mesh": {"tensors": 2}}},
    {"checkpoint": {"best_mode": "most"}},
    {"eval": {"splits": "eval"}},
    {"log": {"trackers": ["comet"]}},
    {"log": {"every_steps": 0}},
    {"dist": {"backend": "horovod"}},
    {"task": {"options": [1]}},
    {"optim": "adamw"},
]


def check(content, group=""):
    place = {"$ref": f"#/$defs/{group}", "$defs": SCHEMA["$defs"]} if group else SCHEMA
    jsonschema.Draft202012Validator(place).validate(content)


def test_file_is_current():
    assert make_schema.make_schema() == SCHEMA, "run python scripts/generate/make_schema.py"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_are_accepted(path):
    content = yaml.safe_load(path.read_text()) or {}
    group = path.parent.name if path.parent.name in GROUPS else ""
    check({k: v for k, v in content.items() if v != "???"}, group)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_refused(mistake):
    check(TASK)
    with pytest.raises(jsonschema.ValidationError):
        check({**TASK, **mistake})
