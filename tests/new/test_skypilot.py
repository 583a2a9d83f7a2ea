"""scripts/deploy/skypilot.yaml fits SkyPilot's schema, and its commands are commands."""

import subprocess
import sys
import types
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from torch.distributed.run import parse_args

from trainer.core.config.compose import load_config
from trainer.new.__main__ import _file_of

VERSION = "0.14.1"  # its wheel alone: SkyPilot's dependencies contradict ours
TEXT = (Path(__file__).parents[2] / "scripts/deploy/skypilot.yaml").read_text(encoding="utf-8")
OF_PROJECT = _file_of("skypilot", {"__NAME__": "My_run"})["skypilot.yaml"]


def test_machines_without_a_disk_resume_from_the_bucket():
    task = yaml.safe_load(TEXT)
    command = task["run"].partition("\ntorchrun")[2]
    words = f"printf '%s\\n' {command}"
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": "/usr/bin:/bin",
        **task["envs"],
    }
    options = {"capture_output": True, "text": True, "check": True}
    said = subprocess.run(["bash", "-c", words], env=variables, **options).stdout
    given = parse_args(said.splitlines())
    assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", 1, "8")
    assert (given.master_addr, given.training_script) == ("10.0.0.1", "trainer")
    config = load_config(given.training_script_args)
    assert (config.run.resume, config.checkpoint.mirror) == ("auto", task["envs"]["BUCKET"])
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


def load_schemas(folder, patch):
    """Return SkyPilot's module of schemas, alone: the package needs 80 others."""
    words = ["pip", "download", "-q", "--no-deps", "-d", str(folder), f"skypilot=={VERSION}"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"SkyPilot {VERSION} cannot be downloaded: {done.stderr[-200:]}")
    (wheel,) = folder.glob("*.whl")
    source = zipfile.ZipFile(wheel).read("sky/utils/schemas.py")
    names = ("sky", "sky.skylet", "sky.utils", "sky.server")
    schemas = types.ModuleType("schemas")
    for name in names:
        patch.setitem(sys.modules, name, MagicMock())
    constants = sys.modules["sky.skylet"].constants
    constants.ALL_CLOUDS = ["kubernetes"]
    constants.ENV_VAR_IS_SKYPILOT_SERVER = "IS_SKYPILOT_SERVER"
    patch.setenv("IS_SKYPILOT_SERVER", "1")  # it knows all names, a client lets others pass
    exec(compile(source, "schemas.py", "exec"), vars(schemas))
    return schemas


@pytest.mark.slow
def test_the_files_fit_the_schema_of_skypilot(tmp_path, monkeypatch):
    """All of SkyPilot 0.14.1 read both files too, once, by hand: sky.Task.from_yaml."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schemas = load_schemas(tmp_path, monkeypatch)
    whole = jsonschema.Draft202012Validator(schemas.get_task_schema())
    resources = schemas._get_single_resources_schema()
    for text in (TEXT, OF_PROJECT):
        task = yaml.safe_load(text)
        whole.validate(task)
        assert set(task["resources"]) <= set(resources["properties"])
    for wrong in ({"num_node": 1}, {"workdir": 1}, {"envs": {"a-b": "c"}}):
        with pytest.raises(jsonschema.ValidationError):
            whole.validate({**task, **wrong})
