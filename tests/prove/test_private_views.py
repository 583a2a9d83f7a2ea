"""trainer.prove changes nothing on the disk of its user, whatever the commands write."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import wait_for
from test_prove import RECORDER, SCRIPTS, found_of, is_running

from trainer.base.errors import ConfigError
from trainer.prove import enter_view, private_view
from trainer.prove.__main__ import main
from trainer.prove.end_view import remove
from trainer.prove.runner import Bench, CommandRun, Recording, run_command

WRITES = f"{sys.executable} {SCRIPTS / 'writes.py'}"
QUICK = ("dtype=fp64", "steps=4", "limit=120")
KINDS = [
    line.split('"')[1]
    for line in (SCRIPTS / "writes.py").read_text().splitlines()
    if line[:5] == '    "' and '": ' in line
]
PROGRAMS = ("shell", "rmtree", "own folder", "python", "git", "later", "sed")
OF_PYTHON = [kind for kind in KINDS if kind not in PROGRAMS]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with files of several kinds, which is the working directory, and a home."""
    folder = tmp_path / "project"
    for name in ("folder", "empty", "../home"):
        (folder / name).mkdir(parents=True)
    (folder / "folder" / "inner.txt").write_text("inner")
    (folder / "kept.txt").write_text("kept")
    (folder / "link.txt").symlink_to("kept.txt")
    (folder / "kept.bin").write_bytes(bytes(64))
    (folder / "helper.py").write_text("")
    torch.save(torch.zeros(3), folder / "kept.pt")
    np.save(folder / "kept.npy", np.zeros(3))
    with sqlite3.connect(folder / "kept.db") as base:
        base.execute("create table t (x)")
    base.close()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "xdg"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return tmp_path


def state_of(folder: Path) -> dict[str, tuple]:
    """Return mode, time and content of all files below a folder."""
    found = {}
    for each in sorted(folder.rglob("*")):
        about = each.lstat()
        content = each.read_bytes() if stat.S_ISREG(about.st_mode) else ""
        time = None if stat.S_ISDIR(about.st_mode) else about.st_mtime_ns
        found[str(each)] = (about.st_mode, time, about.st_nlink, content)
    return found


def test_the_cache_of_a_data_set_stays_in_its_own_precision(project):
    """No test saw that fp64 came into a script's own cache: no script of the tests had one."""
    before = state_of(project)
    command = f"{WRITES} 'dataset,torch.save,replace,sqlite,unlink,home,rename,shell,own folder'"
    found = found_of(command, command, *QUICK)
    assert found["is_same"], found
    assert state_of(project) == before
    (note,) = [each for each in found["notes"] if each.startswith("A and B wrote ")]
    assert "(removed)" in note and note.endswith("that is gone; your files are unchanged")


def test_without_overlays_python_code_writes_to_private_copies(project, monkeypatch):
    monkeypatch.setattr(private_view, "_find_kind", lambda folder: "overlay")
    before = state_of(project)
    slow = ("libraries", "new folder", "pool", "parts", "archives")
    quick = [kind for kind in OF_PYTHON if kind not in slow]
    command = f"{WRITES} '{','.join(quick)}'"
    found = found_of(command, command, *QUICK)
    assert found["is_same"], found
    assert state_of(project) == before
    assert "is on overlay): Python code wrote to private copies" in "".join(found["notes"])
    (note,) = [each for each in found["notes"] if each.startswith("A wrote ")]
    assert note.endswith(", in private copies that are gone")  # and not "files are unchanged"
    changed = {Path(each["path"]).name: each["what"] for each in found["written"]["A"]}
    assert changed["data.pt"] == "new" and changed["kept.txt"] == "changed"
    assert changed["kept.npy"] == "removed"


USER = 65533  # that this machine does not know
MOVES = """
import os, private_files
try:
    os.rename("kept", "moved")
    print("renamed without us")
except OSError:
    private_files.move_folders()
    os.rename("kept", "moved")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_view_works_for_users_who_may_not_mount(tmp_path_factory):
    """A user's own namespace has other rules: no overlay over mounts, no folders of others."""
    folder = tmp_path_factory.getbasetemp().parent.parent / f"lockstep-view-test-{os.getpid()}"
    try:
        for name in ("view/root", "view/empty", "results", "shared", "old", "kept"):
            (folder / name).mkdir(parents=True)
        (folder / "kept" / "inner.txt").write_text("inner")
        (folder / "kept.txt").write_text("kept")
        subprocess.run(["chown", "-R", f"{USER}:{USER}", folder], check=True)
        os.chown(folder / "shared", 0, 0)
        (folder / "shared").chmod(0o777)
        own = [str(folder), str(folder / "shared")]
        spec = {"view": str(folder / "view"), "through": [str(folder / "results")], "own": own}
        (folder / "spec.json").write_text(json.dumps(spec))
        shutil.copy(enter_view.__file__, folder / "enter.py")
        shutil.copy(RECORDER / "private_files.py", folder)
        (folder / "moves.py").write_text(MOVES)
        words = """set -e; echo more >> kept.txt; echo x > shared/new; echo y > results/y; rmdir old
            id -u; grep CapEff /proc/self/status; ! touch /etc/x; ls view; cat kept.txt; echo
            /usr/bin/python3 -S -B moves.py; cat moved/inner.txt; ! ls kept"""
        files = map(str, (folder / "enter.py", folder / "spec.json"))
        program = ["/usr/bin/python3", "-I", "-S", *files, "/bin/sh", "-c", words]
        before = state_of(folder)
        about = {"cwd": folder, "user": USER, "group": USER, "extra_groups": []}
        done = subprocess.run(program, **about, capture_output=True, text=True, check=False)
        if (folder / "view" / "problem").exists():
            pytest.skip((folder / "view" / "problem").read_text())
        assert done.returncode == 0, done.stderr
        user, capabilities, *lines = done.stdout.splitlines()
        assert user == str(USER) and set(capabilities.split()[1]) == {"0"}
        assert lines == ["keptmore", "", "inner"]
        after = state_of(folder)
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        assert not [each for each in changed if "/view" not in each and "/results" not in each]
        assert (folder / "results" / "y").read_text() == "y\n"
    finally:
        remove(str(folder))
    assert not folder.exists()


def test_a_killed_proof_leaves_no_process_and_no_folder(project):
    """SIGKILL leaves it no time to clean up: a process of its own does that."""
    scratch = project / "tmp"
    scratch.mkdir()
    code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(300)"
    script = project / "project" / "waits.py"
    script.write_text(code)
    words = [f"{sys.executable} -S -E {script} & {sys.executable} {script}", "true"]
    environment = {**os.environ, "PYTHONPATH": str(RECORDER.parents[2]), "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "trainer.prove", *words]
    proof = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        pids = wait_for(lambda: read_pids(scratch))
    finally:
        proof.send_signal(signal.SIGKILL)
        proof.wait()
    wait_for(lambda: not any(map(is_running, pids)), limit_s=20)
    wait_for(lambda: not list(scratch.iterdir()), limit_s=20)


def read_pids(scratch: Path) -> list[str]:
    """Return the pids that both processes have printed."""
    outputs = [each.read_text().split() for each in scratch.glob("lockstep-prove-*/A-*/output.txt")]
    return outputs[0] if outputs and len(outputs[0]) == 2 else []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave the view")
def test_a_process_that_a_daemon_starts_outside_of_the_view_writes_copies(project):
    """As under srun: the daemon's process is not in the namespace of the command."""
    before = state_of(project)
    inner = shlex.quote(f"cd {project / 'project'} && exec {WRITES} append,dataset")
    command = f"nsenter -t {os.getpid()} -m sh -c {inner}"
    found = found_of(command, command, *QUICK)
    assert found["is_same"], found
    assert state_of(project) == before
    assert [Path(each["path"]).name for each in found["written"]["B"]] == ["kept.txt", "data.pt"]


def test_a_resumed_command_finds_what_the_killed_one_wrote_and_nothing_is_left(project):
    script = SCRIPTS / "resume_loop.py"
    command = f"{sys.executable} {script} checkpoints"
    before = state_of(project)
    words = (f"mkdir -p checkpoints; {command}", "--resume", f"{command} --resume")
    found = found_of(*words, "kill=7", "steps=10", "dtype=fp64")
    assert found["is_same"], found
    assert any("resumed after step" in each for each in found["notes"]), found["notes"]
    assert state_of(project) == before


@pytest.mark.slow
@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_folder_under_git_is_clean_after_a_proof_of_each_kind(project, monkeypatch, is_mounted):
    """46 kinds of writing; without overlays those of Python."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(project)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    if not is_mounted:
        monkeypatch.setattr(private_view, "_find_kind", lambda folder: "overlay")
    before = state_of(project)
    for kind in KINDS if is_mounted else OF_PYTHON:
        command = f"{WRITES} '{kind}'"
        assert found_of(command, command, *QUICK)["is_same"], kind
        words = [*git, "--no-optional-locks", "status", "--porcelain"]
        status = subprocess.run(words, capture_output=True, text=True)
        assert status.stdout == "", f"{kind}: {status.stdout}"
        after = state_of(project)
        changed = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
        assert not changed, f"{kind}: {changed}"


def test_a_full_disk_is_named(project, monkeypatch):
    monkeypatch.setattr(private_view, "LEAST_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"code 3; .*; the disk that takes its writes is full"):
        main(["exit 3", "true", "dtype=native"])


def test_files_that_cannot_be_protected_are_named(project):
    views = private_view.Views.__new__(private_view.Views)
    views.problem = ""
    views._views = [private_view.View(project, project, unprotected=["/mnt/card"])]
    assert views.find_notes() == ["no overlay was possible over /mnt/card: not protected"]
    assert not views.is_whole


def test_private_copies_behave_as_files(project):
    before = state_of(project)
    folder = str(RECORDER)
    words = [sys.executable, "-I", "-S", str(SCRIPTS / "private_copies.py"), folder]
    done = subprocess.run([*words, str(project / "copies")], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
    private_view.remove(str(project / "copies"))
    assert state_of(project) == before


@pytest.fixture
def enter(project):
    """Runs a command in a view and returns how it ended; `view` makes two commands share one."""
    with private_view.private_views(project / "records", is_temporary=True) as views:
        assert not views.problem

        def run(command: str, view: private_view.View | None = None) -> CommandRun:
            name = f"A{len(list((project / 'records').glob('A*')))}"
            folder = project / "records" / name
            work, recording = project / "records" / "work", Recording(2, "native")
            return run_command(command, folder, recording, 60, work, view or views.make())

        (project / "records").mkdir()
        run.make = views.make
        yield run
    assert not (project / "records").exists()


def test_each_command_begins_with_the_same_files_unless_it_resumes(enter):
    view = enter.make()
    enter("echo 1 >> kept.txt; mkdir made; mv folder made; rm kept.db; echo x > {dir}/out", view)
    show = "cat kept.txt; ls -d folder made kept.db 2>/dev/null; cat {dir}/out"
    assert enter(show, view).last_lines().splitlines() == ["kept1", "made", "x"]
    assert enter(show).last_lines().splitlines() == ["keptfolder", "kept.db", "x"]


def test_what_a_command_wrote_is_listed(enter, monkeypatch):
    command = "echo x > a; echo x >> kept.txt; rm kept.db; mkdir __pycache__ d"
    done = enter(f"{command}; touch __pycache__/x.pyc folder/z; echo y > {tempfile.gettempdir()}/y")
    listed = {Path(each.path).name: each.what for each in done.written}
    assert listed == {"a": "new", "kept.db": "removed", "kept.txt": "changed", "z": "new"}
    monkeypatch.setattr(private_view, "MOST_LISTED", 3)
    assert len(enter("touch 1 2 3 4 5").written) == 3


def test_sockets_of_other_processes_and_devices_stay_reachable(enter):
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/server")
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('{folder}/server')"
        done = enter(f'{sys.executable} -S -c "{code}" && echo x > /dev/null && ls /proc/self/fd/0')
    assert done.code == 0, done.last_lines()


def test_folders_in_shared_memory_are_private_and_its_files_are_not(enter):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "data").write_text("data")
        shared = Path(f"{folder}-memory")
        done = enter(f"echo changed > {folder}/data; cat {folder}/data; echo x > {shared}")
        try:
            assert done.last_lines() == "changed" and shared.read_text() == "x\n"
            assert Path(folder, "data").read_text() == "data"
        finally:
            shared.unlink()


def test_a_daemon_that_a_command_leaves_is_killed(enter):
    done = enter("env -i setsid sleep 300 & echo $!; sleep 0.1")
    wait_for(lambda: not is_running(done.last_lines()), limit_s=5)


def test_a_process_of_another_view_is_not_taken_for_one_that_is_left(enter):
    """Their mount namespaces may bear one number: the kernel gives that of a view that is gone to
    the next one. So two proofs at the same time killed each other's commands now and then."""
    view = enter.make()
    enter("true", view)
    command = f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(60)'"
    other = enter.make()
    words = other.words(other.copies.parent, os.environ)
    process = subprocess.Popen([*words, "/bin/sh", "-c", f"exec {command}"], stdout=-1)
    try:
        process.stdout.readline()
        view.end()
        assert process.poll() is None
        other.end()
        assert process.wait(10) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_exit_code_of_a_failed_view_may_be_that_of_a_command(enter):
    view = enter.make()
    assert enter("exit 249", view).code == enter_view.CODE == 249
    assert view.read_problem(249) == ""


def test_a_view_that_cannot_be_made_is_given_up_with_its_reason(project, monkeypatch):
    code = "import sys; open(sys.argv[1], 'w').write('mount: not permitted'); sys.exit(249)"
    words = [sys.executable, "-S", "-c", code]
    problem = private_view.View.words

    def refuse(view, records, environment):
        found = problem(view, records, environment)
        return [*words, str(view.folder / "problem")] if found else []

    monkeypatch.setattr(private_view.View, "words", refuse)
    with private_view.private_views(project / "records", is_temporary=True) as views:
        bench = Bench(project / "records", views, 2, "native", 60, print)
        assert bench.run("A", "echo $LOCKSTEP_PROVE", "native").last_lines().startswith("{")
        assert views.problem == "mount: not permitted" and not views.make().is_mounted
