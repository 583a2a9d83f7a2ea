"""task=cifar: its data are downloaded completely or not at all, and only once for all ranks; its
second net is ResNet-18."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from harness import fit, on_ranks, slow_but, wait_for
from harness.download import ARCHIVE, FILES, KEY, SHA256, content, names, packed, serving

from trainer import ConfigError, ResidentDataset, load_config
from trainer.tasks import cifar
from trainer.tasks.cifar import ResNet
from trainer.tasks.data import cifar10, download

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_files_are_fetched_once_into_a_new_folder(tmp_path, capsys):
    with serving(ARCHIVE) as (url, asked):
        for _ in range(2):
            download.fetch(url, str(tmp_path / "new/root"), SHA256, KEY)
        assert len(asked) == 1
    assert content(tmp_path / "new/root") == FILES
    assert names(tmp_path / "new") == [".root.lock", "root"]
    out, err = capsys.readouterr()
    assert out == "" and err == f"downloading {url}\n"


def test_a_folder_with_some_of_the_files_gets_them_all_and_keeps_the_rest(tmp_path):
    (tmp_path / "one.bin").write_bytes(b"cut sho")
    (tmp_path / "mine.txt").write_bytes(b"mine")
    with serving(ARCHIVE) as (url, _):
        download.fetch(url, str(tmp_path), SHA256, KEY)
    assert content(tmp_path) == {"mine.txt": b"mine", **FILES}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            {"body": ARCHIVE[: len(ARCHIVE) // 2], "length": len(ARCHIVE)},
            "ended before|end of data",
        ),
        ({"body": ARCHIVE[:3]}, "ended before"),
        ({"body": b""}, "empty file|end of data"),
        ({"body": b"<html>come back later</html>"}, "[Nn]ot a gzipped file"),
        ({"body": b"gone", "status": 404}, "HTTP Error 404: Not Found"),
        (
            {"body": packed({"one.bin": FILES["one.bin"], "two.bin": b"another"})},
            "its two.bin has SHA-256 .*, must",
        ),
        ({"body": packed({"one.bin": FILES["one.bin"]})}, "it has no two.bin"),
    ],
    ids=["truncated", "three bytes", "empty", "a page", "404", "wrong hash", "a file less"],
)
def test_wrong_archive_leaves_nothing_behind(answer, reason, tmp_path):
    with serving(**answer) as (url, _), pytest.raises(ConfigError) as raised:
        download.fetch(url, str(tmp_path / "root"), SHA256, KEY)
    assert names(tmp_path) == [".root.lock"]
    raised.match(
        rf"^{KEY}: cannot get {url} \(.*({reason}).*\); put the 2 files one.bin ... two.bin of "
        rf"all.tar.gz into "
    )
    assert "\n" not in str(raised.value)
    with serving(ARCHIVE) as (url, _):  # the next attempt starts again
        download.fetch(url, str(tmp_path / "root"), SHA256, KEY)
    assert content(tmp_path / "root") == FILES


def test_no_server_is_one_line_that_says_which_file_to_put_where(tmp_path):
    with serving(b"") as (url, _):
        pass
    root = tmp_path / "root"
    with pytest.raises(
        ConfigError,
        match=rf"cannot get {url} \(.*Connection refused\); put the 2 files .* into {root}$",
    ):
        download.fetch(url, str(root), SHA256, KEY)


def test_a_server_that_stalls_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    given_up = threading.Event()
    with serving(ARCHIVE, amid=given_up.wait) as (url, _):
        try:
            with pytest.raises(ConfigError, match=r"\(timed out\)"):
                download.fetch(url, str(tmp_path / "root"), SHA256, KEY)
        finally:
            given_up.set()
    assert names(tmp_path) == [".root.lock"]


def fetch_as_rank(url, folder):
    """Fetch as a rank does and return its outcome; mark in `folder` before waiting for the lock."""
    lock = fcntl.flock

    def noted_lock(file, operation):
        (folder / f"{os.getpid()}.waits").touch()
        lock(file, operation)

    fcntl.flock = noted_lock
    try:
        download.fetch(url, str(folder / "root"), SHA256, KEY)
    except ConfigError as error:
        return str(error)
    return content(folder / "root")


@pytest.mark.parametrize(
    ("body", "status"), [(ARCHIVE, 200), (b"gone", 404)], ids=["good", "failing"]
)
def test_one_rank_downloads_and_all_share_the_outcome(body, status, tmp_path):
    def before():
        wait_for(lambda: len(list(tmp_path.glob("*.waits"))) >= 3)

    with serving(body, status, before=before) as (url, asked):
        results = on_ranks(3, fetch_as_rank, url, tmp_path)
        assert len(asked) == 1
        if status == 200:
            assert results == [FILES] * 3
            return
        assert "HTTP Error 404" in results[0] and len(set(results)) == 1
        assert (
            on_ranks(1, fetch_as_rank, url, tmp_path) == results[:1] and len(asked) == 2
        )  # a later run retries


def test_when_the_downloading_process_is_killed_one_that_waits_takes_over(tmp_path):
    script = f"""import fcntl; from trainer.tasks.data import download; flock = fcntl.flock
fcntl.flock = lambda *arguments: (print("waits", flush=True), flock(*arguments))
download.fetch(URL, {str(tmp_path / "root")!r}, {SHA256}, {KEY!r})"""
    killed = threading.Event()

    def start(url):
        words = [sys.executable, "-c", script.replace("URL", repr(url))]
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    with serving(ARCHIVE, amid=killed.wait) as (url, asked), start(url) as first:
        wait_for(lambda: asked)
        assert names(tmp_path) == [".root.lock", ".root.part"]
        with start(url) as second:
            assert second.stdout.readline() == "waits\n"
            first.kill()
            killed.set()
            assert second.wait(20) == 0
    assert len(asked) == 2 and first.returncode == -signal.SIGKILL
    assert content(tmp_path / "root") == FILES and names(tmp_path) == [".root.lock", "root"]


def test_task_fetches_the_official_files_and_reads_them(tmp_path, monkeypatch):
    def give(url, root, sha256, key):
        assert (url, key) == ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", KEY)
        for number, name in enumerate(sha256):
            with open(tmp_path / name, "wb") as file:
                file.write(bytes([number]))
                file.truncate(30_730_000)

    monkeypatch.setattr(cifar10, "fetch", give)
    images, labels, source = cifar10.load.__wrapped__("eval", "download", str(tmp_path))
    assert (
        images.shape == (10_000, 3, 32, 32)
        and labels[:2].tolist() == [5, 0]
        and "full CIFAR-10" in source
    )


RESNET = [
    *("task=cifar", "task.options.model=resnet18", "task.options.data=bundled"),
    "run.norm_rows=null",
]


def test_resnet18_has_its_eleven_million_parameters():
    model = cifar.Cifar(load_config(RESNET)).build_model()
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert model.body[:4](torch.zeros(1, 3, 32, 32)).shape == (
        1,
        64,
        32,
        32,
    )  # there is no pooling before the blocks
    assert model.body(torch.zeros(2, 3, 32, 32)).shape == (2, 512, 4, 4)


class Narrow(cifar.Cifar):
    """Task with a small net and 32 images: the full ResNet-18 trains about twenty images/s on two
    cores."""

    def build_dataset(self, split):
        images, labels, _ = cifar10.load(split, "bundled", "")
        return ResidentDataset(images[:32], labels[:32])

    def build_model(self):
        return ResNet([1, 1], 10, self.options.norm == "batch", width=8)


@pytest.mark.parametrize("norm", slow_but(["batch", "none"], "batch"))
def test_resnet_learns_with_and_without_norm(norm, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [
        "optim=sgd",
        "schedule=cosine",
        "data.global_batch=32",
        "log.every_steps=1",
        "eval.every_epochs=null",
    ]
    words += [
        f"task.options.norm={norm}",
        "strategy.precision=fp32",
        "run.steps=30",
        "checkpoint.every_epochs=null",
    ]
    (result,) = on_ranks(1, lambda: fit(tmp_path, *RESNET, *words, task=Narrow))
    assert result["losses"][30] < 0.9 * result["losses"][1]


def test_airbench_optimizer_is_refused_for_resnet18():
    task = cifar.Cifar(load_config(RESNET))
    with pytest.raises(
        ConfigError, match=r"^task.options.model=resnet18: optim=airbench has .*; give optim=sgd"
    ):
        task.build_optimizer(torch.nn.Linear(2, 2))
