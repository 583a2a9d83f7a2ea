"""Trackers: curves in a CSV file, in Weights & Biases (offline) and in MLflow (a real server)."""

import csv
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from typing import get_args, get_type_hints

import pytest
import torch
from harness import CONF, fit_on, on_ranks, slow_but
from harness.training import compose, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Tiny

from trainer import ConfigError
from trainer.core import extensions
from trainer.core.config.schema import LogSettings
from trainer.show.run_page import RunSummary
from trainer.show.run_reading import RunFiles

WORDS = ["task=tiny", "run.steps=20", "log.every_steps=4", "eval.every_steps=8"]


def curves_of(run):
    """Return the scalars of metrics.jsonl by step and name."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {
        (entry["step"], name): value
        for entry in map(json.loads, lines)
        for name, value in entry.items()
        if "/" in name or name == "epoch"
    }


def test_tensorboard_draws_both_losses_in_one_chart_and_has_the_epoch(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    run = fit_on(1, tmp_path, *WORDS, "run.steps=8")["directory"]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    (chart,) = layout.category[0].chart
    tags = events.Tags()["tensors"] + events.Tags()["scalars"]
    drawn = [tag for tag in tags for pattern in chart.multiline.tag if re.match(pattern, tag)]
    assert sorted(drawn) == ["eval/loss", "train/loss"]
    epochs = {step: value for (step, name), value in curves_of(run).items() if name == "epoch"}
    assert epochs == {4: round(4 / 9, 6), 8: round(8 / 9, 6)}  # 203 examples, batches of 22
    assert [event.step for event in events.Scalars("epoch")] == [4, 8]


@pytest.mark.parametrize("ranks", slow_but([1, 2], 2))
def test_csv_has_the_curves_once_after_a_resume(ranks, tmp_path):
    words = [*WORDS, "log.trackers=[csv]"]
    stopped = fit_on(ranks, tmp_path, *words, "task.options.signal_at=9")
    assert stopped["code"] == 75
    run = fit_on(ranks, tmp_path, *words, "run.resume=auto")["directory"]
    with (run / "metrics.csv").open() as file:
        rows = [
            (int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)
        ]
    found = {(step, name): value for step, name, value in rows}
    assert len(rows) == len(found) and found == curves_of(run)
    assert not (run / "tensorboard").exists()


def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(tmp_path, capfd):
    run = fit_on(1, tmp_path, *WORDS, "log.trackers=[csv]", "run.steps=8")["directory"]
    (run / "metrics.csv").unlink()
    (run / "metrics.csv").mkdir()  # where the file would be
    words = ["log.trackers=[csv,tensorboard]", "run.resume=auto"]
    assert fit_on(1, tmp_path, *WORDS, *words)["step"] == 20
    told = capfd.readouterr()
    assert "warning: log.trackers: metrics.csv: " in told.out + told.err


def test_each_name_of_a_tracker_is_opened_by_somebody():
    (name_of_each,) = get_args(get_type_hints(LogSettings)["trackers"])
    assert {*get_args(name_of_each)} == {"tensorboard", "csv", *extensions.TRACKERS}


def test_unknown_and_missing_trackers_are_one_line(command):
    given = ["task=tiny", f"--config-dir={CONF}"]
    for word, line in (
        ("log.trackers=[wadnb]", "log.trackers"),
        ("log.trackers=wandb", "log.trackers"),
    ):
        done = command(*given, word)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {line}"), done.stderr
        assert done.stderr.count("\n") == 1


# Weights & Biases ---------------------------------------------------------------------------------


def offline(folder, *words):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(folder)}
    return fit(folder, *WORDS, "log.trackers=[wandb]", *words)["directory"]


@pytest.mark.slow
def test_wandb_gets_config_and_curves_offline_under_one_id_after_a_resume(tmp_path):
    pytest.importorskip("wandb")
    compose(tmp_path, *WORDS)
    on_ranks(1, offline, tmp_path, "task.options.signal_at=9")
    (run,) = on_ranks(1, offline, tmp_path, "run.resume=auto")
    name = json.loads((run / "trackers.json").read_text())["wandb"]
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(name) for folder in folders)
    curves = {}
    for folder in folders:
        (file,) = folder.glob("*.wandb")
        curves |= read_wandb(file)
    expected = curves_of(run)
    assert expected.items() <= curves.items()


def records_of(data):
    """Yield the records of a log in LevelDB's format, after wandb's header of 7 bytes."""
    begin = 7
    record = b""
    while begin + 7 <= len(data):
        left = 32768 - begin % 32768
        if left < 7:
            begin += left
            continue
        _, length, kind = struct.unpack("<IHB", data[begin : begin + 7])
        record += data[begin + 7 : begin + 7 + length]
        begin += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(file):
    """Return the curves in a file of wandb."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    has_config = False
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            keys = {item.key: item.value_json for item in record.run.config.update}
            has_config |= keys.get("run.steps") == "20"
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            step = int(items.pop("_step"))
            found |= {(step, name): json.loads(v) for name, v in items.items() if name[0] != "_"}
    assert has_config
    return found


# MLflow -------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    """Start a real server of MLflow on SQLite, and return its address."""
    pytest.importorskip("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    words += ["--artifacts-destination", f"{tmp_path}/artifacts", "--port", str(port)]
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words],
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd=tmp_path,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


class Named(Tiny):
    """A second update, and a name with characters that MLflow refuses."""

    def train_step(self, batch):
        outcome = self.update(batch, name="again@5")
        return outcome + super().train_step(batch)


def on_server(folder, address, *words):
    os.environ["MLFLOW_TRACKING_URI"] = address
    return fit(folder, *WORDS, "log.trackers=[mlflow]", *words, task=Named)["directory"]


@pytest.mark.slow
def test_mlflow_gets_config_and_curves_in_one_run_after_a_resume(server, tmp_path):
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "runs"
    compose(folder, *WORDS)
    on_ranks(1, on_server, folder, server, "task.options.signal_at=9")
    (run,) = on_ranks(1, on_server, folder, server, "run.resume=auto")
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("tiny")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["run.steps"] == "20"
    for (step, name), value in curves_of(run).items():
        history = client.get_metric_history(found.info.run_id, name.replace("@", "_"))
        points = [point for point in history if point.step == step]
        assert [point.value for point in points] == [value], (step, name)


@pytest.mark.slow
def test_a_server_that_is_not_there_warns_and_the_run_ends_as_without(tmp_path, capfd):
    pytest.importorskip("mlflow")
    os_words = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
    for name, value in os_words.items():
        os.environ[name] = value
    try:
        (run,) = on_ranks(1, on_server, tmp_path, "http://127.0.0.1:9")
    finally:
        for name in os_words:
            del os.environ[name]
    told = capfd.readouterr()
    assert "warning: log.trackers: mlflow: " in told.out + told.err
    assert json.loads((run / "exit.json").read_text())["code"] == 0


class WithSamples(Tiny):
    def samples(self, forward):
        outputs = forward(torch.zeros(1, 4, dtype=torch.float64))
        return {"a point": f"class\n{int(outputs.argmax())} of 3", "step": f"\x1b[1m{self.step}"}


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_samples_of_an_evaluation_go_to_terminal_record_board_and_page(
    ranks, strategy, tmp_path, capfd
):
    words = ["task=tiny", "run.steps=4", f"strategy={strategy}", "eval.every_steps=2"]
    words += ["eval.every_epochs=null", "checkpoint.every_epochs=null"]
    fit_on(ranks, tmp_path, *words, task=WithSamples)
    said = capfd.readouterr().out
    assert said.count("a point:\n    class\n") == 2 and "\x1b" not in said
    directory = next(path.parent for path in tmp_path.rglob("metrics.jsonl"))
    found = RunFiles.read(str(directory)).samples
    assert found.keys() == {"a point", "step"} and found["step"] == (4, "\x1b[1m4")
    page = RunSummary.of(RunFiles.read(str(directory)), [str(CONF)], False).make_page()
    assert "a point, step 4" in [section.title for section in page.sections]
    board = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert board.Tags()["tensors"].count("samples/a point/text_summary") == 1


class WithoutText(Tiny):
    def samples(self, forward):
        return {"answer": 3}


def test_a_sample_that_is_no_text_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="samples returned a value of type int as answer"):
        fit(tmp_path, "task=tiny", "run.steps=1", task=WithoutText)
