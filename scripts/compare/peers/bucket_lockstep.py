"""Lockstep's way to a bucket: checkpoint.mirror=s3://... and run.resume=auto."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peers.bucket_sessions import BATCH, SAVE_EVERY, Session, serve
from peers.lockstep_task import Task
from peers.problem import Settings
from trainer import load_config
from trainer.places.mirror import Mirrored

PEERS = Path(__file__).resolve().parent


class Noted(Task):
    session: Session

    def fit(self) -> Any:
        summary = super().fit()
        if summary.exit_code:
            raise SystemExit(summary.exit_code)
        self.session.finish(self.model)
        return summary

    def on_train_start(self) -> None:
        self.session.note("began", self.step)


def train(session: Session) -> None:
    put_checkpoint = Mirrored.put_checkpoint

    def put_and_note(self: Mirrored, step: int, path: Path) -> None:
        put_checkpoint(self, step, path)
        session.note("saved", step)

    Mirrored.put_checkpoint = put_and_note  # type: ignore[method-assign]
    os.environ |= Settings(session.notes).environment()
    words = ["task=points", f"run.dir={session.disk}", f"checkpoint.mirror={session.address}"]
    words += [f"checkpoint.every_steps={SAVE_EVERY}", "run.resume=auto", "log.trackers=[]"]
    words += [f"data.global_batch={BATCH}", "run.epochs=1"]
    task = Noted(load_config(words, [str(PEERS / "conf")]))
    task.session = session
    task.fit()


if __name__ == "__main__":
    serve(train)
