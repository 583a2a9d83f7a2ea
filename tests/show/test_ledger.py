"""The ledger: a hash chain of the examples that each step really took, equal in any layout and
after any restart."""

import json
import os
import shutil

import pytest
import torch
from harness import fit, fit_on, newest, on_ranks
from harness.verbs import audit

from trainer.base.errors import ConfigError
from trainer.core.data.ledger import CLOSE_EVERY, Ledger, digests
from trainer.core.data.order import BatchPlan, EpochSampler
from trainer.core.data.sampling import Shuffle
from trainer.core.rng.philox import Order
from trainer.show import audit as audit_module
from trainer.show.audit import count_taken, expected

RECIPE = ["task=tiny", "run.steps=30"]


class Alone:
    def total(self, tensor):
        return tensor


@pytest.mark.slow
def test_chain_does_not_depend_on_layout(tmp_path):
    chains = {
        newest(fit_on(ranks, tmp_path / str(ranks), *RECIPE, *more)["directory"]).manifest["ledger"]
        for ranks, more in (
            (1, []),
            (2, ["data.micro_batch=6"]),
            (3, ["data.path=streamed", "data.workers=2"]),
        )
    }
    assert len(chains) == 1


@pytest.mark.parametrize(
    "mesh",
    [
        "pipeline=2",
        pytest.param("pipeline=2 strategy.mesh.tensor=2", marks=pytest.mark.slow),
        pytest.param("shard=2 strategy.mesh.context=2", marks=pytest.mark.slow),
    ],
)
def test_rows_that_ranks_of_a_mesh_share_count_once(mesh, tmp_path):
    words = ["task=meshed", *f"strategy.mesh.{mesh}".split()]
    assert audit([str(fit_on(2 ** mesh.count("="), tmp_path, *words)["directory"])]) == 0


def test_digest_changes_with_another_example_another_position_and_a_repeat():
    batch = torch.arange(100, 132).view(1, -1)
    others = [batch.flip(1), batch + 1, torch.where(batch == 131, 130, batch), batch[:, :-1]]
    assert len({int(digests(each)) for each in [batch, *others]}) == 5
    parts = digests(batch[:, :11]) + digests(batch[:, 11:], start=11)
    assert torch.equal(parts, digests(batch))


def test_chain_is_the_same_however_often_it_is_closed():
    plan = BatchPlan(20, 2, 2, 1)
    seldom, often = Ledger(plan, 0), Ledger(plan, 0)
    for step in range(CLOSE_EVERY + 5):
        indices = [torch.tensor([step % 20, (step + 1) % 20])]
        seldom.pending.append(indices)
        if len(seldom.pending) >= CLOSE_EVERY:
            seldom.close(Alone())
        often.pending.append(indices)
        if step % 7 == 0:
            often.close(Alone())
    seldom.close(Alone())
    often.close(Alone())
    assert (seldom.step, seldom.chain) == (
        often.step,
        often.chain,
    ) and seldom.step == CLOSE_EVERY + 5


@pytest.mark.parametrize("every", [1, 4])
def test_a_run_closes_its_chain_now_and_then(every, tmp_path, monkeypatch):
    closed = []
    close = Ledger.close

    def noting(self, group):
        closed.append(len(self.pending))
        close(self, group)

    def body(folder, often):
        if often:
            monkeypatch.setattr("trainer.core.data.batches.CLOSE_EVERY", every)
            monkeypatch.setattr(Ledger, "close", noting)
        words = ["task=tiny", "run.steps=9", "log.every_steps=9"]
        record = fit(folder, *words)["directory"]
        lines = (record / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["ledger"] for line in lines if '"ledger"' in line], closed

    seldom, often = (on_ranks(2, body, tmp_path / str(n), n)[0] for n in (0, 1))
    assert seldom[0] == often[0] and seldom[0]
    assert max(often[1]) == every


def test_audit_agrees_over_restarts_on_other_ranks(tmp_path, capfd):
    fit_on(2, tmp_path, *RECIPE, "task.options.signal_at=7")
    fit_on(3, tmp_path, *RECIPE, "run.resume=auto", "task.options.signal_at=16")
    directory = fit_on(1, tmp_path, *RECIPE, "run.resume=auto")["directory"]
    capfd.readouterr()
    assert audit([str(directory)]) == 0
    said = capfd.readouterr().out
    assert (
        "3 sessions: from step 0 on 2 ranks, from step 9 on 3 ranks, from step 18 on 1 rank" in said
    )
    assert (
        "nothing was repeated or skipped" in said
        and "30 steps of 22 examples, so 3 epochs and 3 steps" in said
    )


@pytest.mark.parametrize(
    "planted", ["repeats an epoch's order", "skips a batch", "swaps two ranks' shares"]
)
def test_audit_finds_a_run_that_took_other_examples(planted, tmp_path, capfd, monkeypatch):
    """Errors that a resume makes in other frameworks are planted into the sampler."""
    right = EpochSampler.__iter__

    def wrong(self):
        if planted == "repeats an epoch's order":
            self.order = Order(self.seed, 0, self.plan.num_examples)
        batches = right(self)
        if planted == "skips a batch" and self.epoch == 1:
            next(batches)
        yield from (
            (batch.flip(0) for batch in batches)
            if planted.startswith("swaps") and self.epoch
            else batches
        )

    monkeypatch.setattr(EpochSampler, "__iter__", wrong)
    steps = "run.steps=12" if planted == "skips a batch" else "run.steps=30"
    directory = fit_on(1, tmp_path, "task=tiny", steps)["directory"]
    capfd.readouterr()
    assert audit([str(directory)]) == 1
    assert "DIFFERENT: of the steps 10 to " in capfd.readouterr().out


def test_every_epoch_of_the_expected_run_takes_each_example_at_most_once():
    epochs = {}
    for step, _, indices in expected(Shuffle(203), 3, 22, 27):
        epochs.setdefault((step - 1) // 9, []).append(indices)
    assert (
        all(len(torch.cat(parts).unique()) == 9 * 22 for parts in epochs.values())
        and len(epochs) == 3
    )


@pytest.mark.parametrize("block", [50, 2**20])
def test_repeats_of_examples_are_counted_without_a_counter_for_each(block, monkeypatch):
    """Example 5 is replaced wherever it occurs; splitting epochs and data into blocks changes
    nothing."""
    monkeypatch.setattr(audit_module, "EXAMPLES_PER_BLOCK", block)
    replaced = {f"{epoch}/5": 6 for epoch in range(4)}
    for size, *rest in ((203, 3, 22, 27), (203, 0, 22, 30), (100, 1, 10, 7)):
        run = (Shuffle(size), *rest)
        times = torch.zeros(size, dtype=torch.int64)
        for _, _, indices in expected(*run, replaced):
            assert 5 not in indices
            times.index_add_(0, indices, torch.ones_like(indices))
        assert count_taken(*run, replaced) == (int(times.min()), int(times.max()))


def test_chain_does_not_depend_on_the_block(monkeypatch):
    whole = [chain for _, chain, _ in expected(Shuffle(203), 3, 22, 27)]
    monkeypatch.setattr(audit_module, "EXAMPLES_PER_BLOCK", 50)
    assert [chain for _, chain, _ in expected(Shuffle(203), 3, 22, 27)] == whole


def test_chain_is_in_metrics_jsonl_at_every_save(tmp_path):
    run = fit_on(2, tmp_path, *RECIPE)
    lines = [
        json.loads(line) for line in (run["directory"] / "metrics.jsonl").read_text().splitlines()
    ]
    kept = {line["step"]: line["ledger"] for line in lines if "ledger" in line}
    assert kept == {
        step: chain
        for step, chain, _ in expected(Shuffle(203), 0, 22, 30)
        if step in (9, 18, 27, 30)
    }


def test_audit_counts_only_what_it_has_compared(tmp_path, capfd):
    directory = fit_on(1, tmp_path, *RECIPE, "checkpoint.keep_last=9")["directory"]
    shutil.rmtree(directory / "checkpoints/step-00000030")
    capfd.readouterr()
    assert audit([str(directory)]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[-2:] == [
        "3 saves agree with the recomputed order: nothing was repeated or skipped",
        "1 save after step 27 not compared: their checkpoints no longer exist",
    ]


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_audit_reads_no_link_and_waits_for_no_pipe(planted, tmp_path):
    directory = fit_on(1, tmp_path, *RECIPE)["directory"]
    record = directory / "metrics.jsonl"
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere") if planted == "link" else os.mkfifo(record)
    with pytest.raises(
        ConfigError, match=r"metrics.jsonl: must be a plain file, not a link; remove it$"
    ):
        audit([str(directory)])


def test_audit_of_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"has no checkpoint to audit; give a run directory$"):
        audit([str(tmp_path)])
