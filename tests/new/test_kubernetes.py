"""scripts/deploy/kubernetes.yaml fits the schemas of Trainer, JobSet and Kubernetes, and
its command runs in bash."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from torch.distributed.run import parse_args

from trainer.core.config.compose import load_config
from trainer.new.__main__ import _file_of

TEXT = (Path(__file__).parents[2] / "scripts/deploy/kubernetes.yaml").read_text(encoding="utf-8")
TRAINJOB, JOBSET, CLAIM = yaml.safe_load_all(TEXT)
(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


class Parts(NamedTuple):
    """The parts that both kinds have in different places; `mounted` is the container with the
    volume mounts."""

    name: str
    replicated: str
    container: dict[str, Any]
    resources: dict[str, Any]
    pod: dict[str, Any]
    mounted: dict[str, Any]
    num_pods: int


def parts_of_trainjob():
    spec = TRAINJOB["spec"]["trainer"]
    (patch,) = TRAINJOB["spec"]["runtimePatches"]
    (patched,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patched["template"]["spec"]["template"]["spec"]
    (mounted,) = pod["containers"]
    name = TRAINJOB["metadata"]["name"]
    return Parts(
        name, patched["name"], spec, spec["resourcesPerNode"], pod, mounted, spec["numNodes"]
    )


def parts_of_jobset():
    pod = JOB["template"]["spec"]
    (container,) = pod["containers"]
    name = JOBSET["metadata"]["name"]
    return Parts(
        name,
        REPLICATED["name"],
        container,
        container["resources"],
        pod,
        container,
        JOB["completions"],
    )


@pytest.fixture(params=[parts_of_trainjob, parts_of_jobset], ids=["trainjob", "jobset"])
def parts(request):
    return request.param()


# The schema ---------------------------------------------------------------------------------------


def problems(text):
    """Return the places where the documents violate the schema.

    The models silently drop an unknown field and fill a missing one with an empty value, so the
    round trip is compared.
    """
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    kinds = {
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): models.TrainerV1alpha1TrainingRuntime,
        ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
        ("v1", "PersistentVolumeClaim"): models.IoK8sApiCoreV1PersistentVolumeClaim,
    }
    found = []
    for document in yaml.safe_load_all(text):
        model = kinds[document["apiVersion"], document["kind"]]
        try:
            found += difference(document, model.from_dict(document).to_dict(), document["kind"])
        except (
            ValueError,
            TypeError,
            AttributeError,
        ) as error:  # the last two: a list in place of an object
            found.append(f"{document['kind']}: {error}")
    return found


def difference(given, kept, place):
    if isinstance(given, dict) and isinstance(kept, dict):
        for key in {**given, **kept}:
            if key not in kept:
                yield f"{place}.{key}: not in the schema"
            elif key not in given:
                yield f"{place}.{key}: missing"
            else:
                yield from difference(given[key], kept[key], f"{place}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (ours, theirs) in enumerate(zip(given, kept, strict=True)):
            yield from difference(ours, theirs, f"{place}[{number}]")
    elif given != kept:
        yield f"{place}: {given!r} became {kept!r}"


def test_documents_are_valid():
    assert problems(TEXT) == []


def test_the_file_of_a_new_project_is_valid_and_its_names_are_names_of_kubernetes():
    text = _file_of("kubernetes", {"__NAME__": "My_run"})["kubernetes.yaml"]
    assert problems(text) == []
    documents = [*yaml.safe_load_all(text)]
    names = [document["metadata"]["name"] for document in documents]
    assert names == ["my-run-trainjob", "my-run-jobset", "my-run-runs"]
    assert documents[0]["spec"]["trainer"]["image"] == "my-run:1"
    assert text.count("claimName: my-run-runs") == 2 and "cifar" not in text


_JOB = "JobSet.spec.replicatedJobs[0].template.spec"
_PATCH = (
    "TrainJob.spec.runtimePatches[0].trainingRuntimeSpec"
    ".template.spec.replicatedJobs[0].template.spec"
)


@pytest.mark.parametrize(
    ("right", "wrong", "lines"),
    [
        # misspelt, or of another version
        (
            "terminationGracePeriodSeconds:",
            "terminationGracePeriodSecond:",
            [
                f"{place}.template.spec.terminationGracePeriodSecond: not in the schema"
                for place in (_JOB, _PATCH)
            ],
        ),
        (
            "maxRestarts:",
            "maxRestart:",
            ["JobSet.spec.failurePolicy.maxRestart: not in the schema"],
        ),
        (
            "runtimePatches:",
            "podTemplateOverrides:",
            ["TrainJob.spec.podTemplateOverrides: not in the schema"],
        ),
        (
            "mountPath: /runs",
            "path: /runs",
            [".volumeMounts[0].path: not in the schema", ".mountPath: missing"],
        ),
        (
            "accessModes:",
            "accessMode:",
            ["PersistentVolumeClaim.spec.accessMode: not in the schema"],
        ),
        # of a wrong type
        (
            "completions: 2 ",
            'completions: "2" ',
            ["completions\n  Input should be a valid integer"],
        ),
        ("numNodes: 2 ", "numNodes: two ", ["numNodes\n  Input should be a valid integer"]),
        ('status: "True"', "status: True", ["status\n  Input should be a valid string"]),
        ('value: "150"', "value: 150", ["value\n  Input should be a valid string"]),
        ("command: [bash, -c]", "command: bash -c", ["command\n  Input should be a valid list"]),
        ("values: [2]", "values: 2", ["\nvalues\n  Input should be a valid list"]),
        ("operator: In,", "operator: Is,", ["must be one of enum values ('In', 'NotIn')"]),
        # in the wrong place
        (
            "emptyDir: {medium: Memory, ",
            "medium: {",
            [f"{_JOB}.template.spec.volumes[1].medium: not in the schema"],
        ),
        ("backoffLimit: 0 ", "restartPolicy: Never ", [f"{_JOB}.restartPolicy: not in the schema"]),
        (
            "  network: {",
            "  subdomain: a\n  network: {",
            ["JobSet.spec.subdomain: not in the schema"],
        ),
        (
            "limits:\n        memory: 8Gi",
            "memory: 8Gi",
            ["resourcesPerNode.memory: not in the schema"],
        ),
        (
            "containers:\n                - name: node",
            "containers:\n                  name: node",
            ["JobSet: "],
        ),
    ],
)
def test_planted_error_is_found(right, wrong, lines):
    assert right in TEXT
    found = problems(TEXT.replace(right, wrong))
    for line in lines:
        assert any(line in problem for problem in found), found


def test_rules_fit_into_a_training_runtime():
    template = {
        "spec": {"failurePolicy": JOBSET["spec"]["failurePolicy"], "replicatedJobs": [REPLICATED]}
    }
    spec = {"mlPolicy": {"numNodes": 2, "torch": {}}, "template": template}
    runtime = {
        "apiVersion": TRAINJOB["apiVersion"],
        "kind": "TrainingRuntime",
        "metadata": {"name": "a"},
        "spec": spec,
    }
    assert problems(yaml.safe_dump(runtime)) == []


# Rules that are not in the schema -----------------------------------------------------------------


def test_label_picks_one_document():
    labels = [document["metadata"]["labels"]["lockstep"] for document in (TRAINJOB, JOBSET, CLAIM)]
    assert labels == ["trainjob", "jobset", "claim"]
    assert all(f"-l lockstep={label} " in TEXT for label in labels)
    assert (
        TRAINJOB["metadata"]["name"] != JOBSET["metadata"]["name"]
    )  # a TrainJob creates a JobSet with the same name


def test_runs_are_on_the_shared_claim_and_shm_is_memory(parts):
    volumes = {volume["name"]: volume for volume in parts.pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in parts.mounted["volumeMounts"]}
    assert mounts["/runs"]["persistentVolumeClaim"] == {"claimName": CLAIM["metadata"]["name"]}
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    given = [str(value) for quantities in parts.resources.values() for value in quantities.values()]
    assert all(map(QUANTITY.fullmatch, [*given, mounts["/dev/shm"]["emptyDir"]["sizeLimit"]]))


def test_pod_outlives_the_time_that_torchrun_gives_the_ranks_to_save(parts):
    (given,) = [
        env["value"]
        for env in parts.container["env"]
        if env["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    ]
    assert 30 < int(given) < parts.pod["terminationGracePeriodSeconds"]


def action(exit_code, *conditions):
    """Return the action of the first rule that matches, as the Job controller does; None if the
    failure counts."""
    for rule in JOB["podFailurePolicy"]["rules"]:
        patterns = [c["type"] for c in rule.get("onPodConditions", []) if c["status"] == "True"]
        if exit_code in rule.get("onExitCodes", {}).get("values", []) or set(patterns) & set(
            conditions
        ):
            return rule["action"]
    return None


def test_bad_configuration_fails_at_once_and_a_disruption_does_not_count():
    assert action(2) == "FailJob" and action(75) == "Ignore"
    assert action(1, "DisruptionTarget") == action(137, "DisruptionTarget") == "Ignore"
    assert action(1) is None and action(137) is None and JOB["backoffLimit"] == 0
    assert JOB["template"]["spec"]["restartPolicy"] == "Never"  # else the Job is refused
    codes = [
        rule["onExitCodes"] for rule in JOB["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    (container,) = JOB["template"]["spec"]["containers"]
    assert all(
        code["operator"] == "In" and code["containerName"] == container["name"] for code in codes
    )
    (rule,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0


# The command --------------------------------------------------------------------------------------


def start_command(parts, folder, torchrun, more=""):
    """Start the command as in a pod, with a getent that knows only the first pod, and a stand-in
    for torchrun."""
    (label,) = [
        env["valueFrom"]["fieldRef"]["fieldPath"]
        for env in parts.container["env"]
        if "valueFrom" in env
    ]
    assert label == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    stand_ins = {
        "python": f'exec "{sys.executable}" "$@"',
        "getent": f'test "$*" = "hosts {parts.name}-{parts.replicated}-0-0.{parts.name}"',
        "torchrun": torchrun,
    }
    for program, body in stand_ins.items():
        (folder / program).write_text(f"#!/bin/sh\n{body}\n")
        (folder / program).chmod(0o755)
    given = [word.replace("task=cifar", f"task=cifar {more}") for word in parts.container["args"]]
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "JOB_NAME": parts.name,
    }
    words, pipe = [*parts.container["command"], *given], subprocess.PIPE
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_command_starts_the_ranks_with_settings_that_exist(parts, tmp_path):
    command = start_command(parts, tmp_path, "printf '%s\\n' \"$@\" > arguments; exit 3")
    assert command.communicate(timeout=60) == ("", "") and command.returncode == 3
    given = parse_args((tmp_path / "arguments").read_text().splitlines())
    assert (given.nnodes, given.nproc_per_node) == (str(parts.num_pods), "2")
    assert (given.rdzv_backend, given.rdzv_endpoint) == (
        "c10d",
        f"{parts.name}-node-0-0.{parts.name}:29400",
    )
    assert (given.rdzv_id, given.max_restarts) == (parts.name, 3)
    assert given.module and given.training_script == "trainer"
    run = load_config(given.training_script_args).run
    assert (run.dir, run.name, run.resume) == ("/runs", parts.name, "auto")


def test_pods_are_numbered_and_as_many_as_torchrun_waits_for():
    # a pod is <JobSet>-<replicated job>-<which of them>-<which pod>.<JobSet>
    assert REPLICATED["replicas"] == 1 and JOB["completionMode"] == "Indexed"
    assert JOB["parallelism"] == JOB["completions"] == TRAINJOB["spec"]["trainer"]["numNodes"] == 2
    assert TRAINJOB["spec"]["trainer"]["numProcPerNode"] == 2
    assert JOBSET["spec"]["network"] == {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
    }


def test_wrong_setting_ends_with_2_before_torchrun(parts, tmp_path):
    command = start_command(parts, tmp_path, "touch started", more="optim.lrr=1")
    said = command.communicate(timeout=60)
    assert said == ("", "error: optim.lrr is not a setting; did you mean optim.lr?\n")
    assert command.returncode == 2 and not (tmp_path / "started").exists()


def test_command_that_gets_sigterm_waits_for_the_save_and_ends_with_75(parts, tmp_path):
    saving = (
        "trap 'sleep 0.3; touch saved; exit 1' TERM; touch started; while :; do sleep 0.05; done"
    )
    command = start_command(parts, tmp_path, saving)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    command.terminate()
    assert command.communicate(timeout=60) == ("", "")
    assert command.returncode == 75 and (tmp_path / "saved").exists()
