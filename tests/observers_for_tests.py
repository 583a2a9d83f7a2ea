"""Observers of runs, for test_observers.py."""

import json
import time

from trainer import Observer


class Diary(Observer):
    """Writes what it was told to diary.jsonl in the run directory."""

    def start(self, step):
        self.write("start", step, self.config.task.name)

    def scalars(self, step, values):
        self.write("scalars", step, sorted(values))
        values.clear()  # a copy: other sinks keep theirs

    def evaluation(self, step, metrics):
        self.write("evaluation", step, sorted(metrics))

    def checkpoint(self, step, path):
        self.write("checkpoint", step, path.name)

    def end(self, code, reason):
        self.write("end", code, reason)

    def write(self, *facts):
        with (self.directory / "diary.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")


class Broken(Observer):
    def scalars(self, step, values):
        raise SystemExit("no connection")


class Stuck(Observer):
    def scalars(self, step, values):
        time.sleep(1000)


class NoObserver:
    pass
