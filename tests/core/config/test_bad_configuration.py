"""A bad configuration gives one line that names the key, and exit code 2: no socket is opened, no
file is written, nothing waits.

Each row holds the command-line arguments of `python -m trainer`, preceded by environment
variables, and the beginning of the expected error line.
"""

import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TORCHRUN
from harness.command import hide_gpus, refuse_meeting
from harness.launch import environment_of_a_command
from harness.training import CONF
from harness.waiting import QUIET_S, seconds_of_importing_torch

from trainer import load_config

SLOW = pytest.mark.slow
TORCHRUN_LIMIT_S = 5.0
ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    group: ", ".join(sorted(path.stem for path in (ROOT / "conf" / group).glob("[a-z]*.yaml")))
    for group in ("optim", "strategy")
}
RANK_0 = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost"

TASK = """# @package _global_
task:
  name: mine
  trainer: tiny.Tiny
  options: {dropout: 0.0, norm: false, weights: false, examples: 203, signal_at: null}
"""
FILES: dict[str, str | bytes] = {
    "file": "",
    "good/task/mine.yaml": TASK,
    "other/task/mine.yaml": TASK + "# another\n",
    "cifar/task/cifar.yaml": TASK,
    "bracket/task/mine.yaml": "task: {name: mine\n",
    "tab/task/mine.yaml": "task:\n\tname: mine\n",
    "latin/task/mine.yaml": b"task:\n  name: caf\xe9\n",
    "mark/task/mine.yaml": b"\xef\xbb\xbf" + TASK.encode(),
    "mark/task/sound.yaml": TASK,
    "choice/task/mine.yaml": TASK + "optim: adamw\n",
    "quoted/task/mine.yaml": TASK + "run: {seed: '3'}\n",
    "list/task/mine.yaml": "- a\n- b\n",
    "empty/task/mine.yaml": "",
    "no_package/task/mine.yaml": TASK.replace("# @package _global_\n", ""),
    "no_name/task/mine.yaml": TASK.replace("  name: mine\n", ""),
    "no_trainer/task/mine.yaml": TASK.replace("  trainer: tiny.Tiny\n", ""),
    "no_dropout/task/mine.yaml": TASK.replace("dropout: 0.0, ", ""),
    "group/task/mine.yaml": TASK + "optin: {lr: 1}\n",
    "key/task/mine.yaml": TASK + "run: {epoch: 3}\n",
    "key_twice/task/mine.yaml": TASK + "run: {seed: 1, seed: 2}\n",
    "null/task/mine.yaml": TASK + "run: null\n",
    "reference/task/mine.yaml": TASK + "run: {seed: '${run.sed}'}\n",
    "default/task/mine.yaml": TASK.replace("task:", "defaults: [override /optim: sdg]\ntask:"),
    "default_group/task/mine.yaml": TASK.replace("task:", "defaults: [/optin: sgd]\ntask:"),
    "override/task/mine.yaml": TASK.replace("task:", "defaults: [override /optin: sgd]\ntask:"),
    "no_target/optim/mine.yaml": "lr: 0.1\n",
    "target/optim/mine.yaml": "_target_: torch.optim.SGDD\nlr: 0.1\n",
    "run_bracket/config.json": '{"run": [',
    "run_other/config.json": '{"a": 1}',
    "run_empty/config.json": "",
    "run_list/config.json": '["run"]',
    "run_bytes/config.json": b'{"run": "\xff"}',
    "run_number/config.json": '{"run": 5, "task": 7}',
    "run_manifest/checkpoints/step-00000001/manifest.json": "{",
    "runs/cifar/taken/config.json": '{"run": {}}',
}

NO_TASK = "must be one of cifar, dpo, finetune, images, lm, text; did you mean cifar?"
WHOLE, WHOLE_OR_NULL = (
    "must be an integer of at least 1",
    "must be an integer of at least 1 or null",
)
SWITCH = "must be true or false"
BAD = [
    # nothing to run, arguments that are not settings, flags
    ("", "task is missing: give task=<name>, one of cifar, dpo, finetune, images, lm, text"),
    ("task=", "task=: must be one of cifar, dpo, finetune, images, lm, text"),
    ("task=null", "task=null: must be one of cifar, dpo, finetune, images, lm, text"),
    ("task=[cifar]", "task=['cifar']: must be one of cifar, dpo, finetune, images, lm, text"),
    (
        "task=conf/task/cifar.yaml",
        "task=conf/task/cifar.yaml: must be one of cifar, dpo, finetune, images, lm, text; "
        "give the name without folder and ending: task=cifar",
    ),
    ("task=cifar task=text", "task=text: task=cifar was given before; give only one"),
    ("task=cifar ~task", "task.name is missing: set it in the task's file"),
    ("task=cifar epochs", "'epochs' is not a setting: write key=value"),
    ("task=cifar run.epochs =3", "'run.epochs' is not a setting: write key=value"),
    ("task=cifar =3", "'=3' is not a setting: write key=value"),
    (
        "verify task=cifar",
        "verify: use prove: python -m trainer.prove --help",
    ),
    ("task=cifar run.epochs==3", "run.epochs==3: cannot be read as key=value; quote"),
    (
        "task=cifar run.name=größe",
        "run.name=größe: cannot be read as key=value; quote special characters: \"run.name='grö",
    ),
    ("task=cifar run.name=[a", "run.name=[a: cannot be read as key=value; quote"),
    ("task=cifar optim.lr=0.1,", "optim.lr=0.1,: cannot be read as key=value; quote"),
    ("task=cifar --epochs 3", "--epochs is not a flag: allowed are --config-dir, --help"),
    ("task=cifar -x", "-x is not a flag: allowed are --config-dir, --help"),
    ("task=cifar --config-dri=a", "--config-dri is not a flag: allowed are --config-dir"),
    (
        "task=cifar hydra.run.dir=x",
        "hydra.run.dir=x: settings of Hydra itself are of trainer.sweep only",
    ),
    ("task=cifar hydra/launcher=basic", "hydra/launcher=basic: settings of Hydra itself"),
    ("task=cifar --cfg", "--cfg/-c: expected one argument"),
    ("task=cifar --cfg foo", "--cfg/-c: invalid choice: 'foo' (choose from"),
    ("task=cifar --info foo", "--info/-i: invalid choice: 'foo' (choose from"),
    (
        "task=cifar --multirun=3",
        "--multirun=3: use sweep: python -m trainer.sweep task=cifar",
    ),
    ("task=cifar run.sed=1 --cfg job", "run.sed is not a setting; did you mean run.seed?"),
    (
        "task=cifra --cfg job",
        "task=cifra: must be one of cifar, dpo, finetune, images, lm, text; did you mean cifar?",
    ),
    (
        "--cfg job",
        "task is missing: give task=<name>, one of cifar, dpo, finetune, images, lm, text",
    ),
    # typos in the name of every group
    ("task=cifar lr=1", "lr is not a setting; did you mean optim.lr?"),
    ("task=cifar OPTIM=sgd", "OPTIM is not a setting"),
    ("task=cifar optin=sgd", "optin is not a setting; did you mean optim?"),
    ("task=cifar rum.seed=1", "rum.seed is not a setting; did you mean run.seed?"),
    ("task=cifar run.sed=1", "run.sed is not a setting; did you mean run.seed?"),
    (
        "task=cifar data.global_bach=32",
        "data.global_bach is not a setting; did you mean data.global_batch?",
    ),
    (
        "task=cifar strategy.precison=fp32",
        "strategy.precison is not a setting; did you mean strategy.precision?",
    ),
    ("task=cifar dist.backed=gloo", "dist.backed is not a setting; did you mean dist.backend?"),
    (
        "task=cifar launch.nproc=3",
        "launch.nproc is not a setting; did you mean launch.nproc_per_node?",
    ),
    (
        "task=cifar checkpoint.every_step=3",
        "checkpoint.every_step is not a setting; did you mean checkpoint.every_steps?",
    ),
    (
        "task=cifar eval.every_epoch=3",
        "eval.every_epoch is not a setting; did you mean eval.every_epochs?",
    ),
    (
        "task=cifar log.every_step=3",
        "log.every_step is not a setting; did you mean log.every_steps?",
    ),
    ("task=cifar task.nam=x", "task.nam is not a setting; did you mean task.name?"),
    (
        "task=cifar task.options.widhts=[1]",
        "task.options.widhts is not a setting; did you mean task.options.widths?",
    ),
    ("task=cifar optim.lrr=1", "optim.lrr is not a setting; did you mean optim.lr?"),
    (
        "task=cifar optim=adamw optim.bettas=[0.9]",
        "optim.bettas is not a setting; did you mean optim.betas?",
    ),
    ("task=cifar schedule.finl=3", "schedule.finl is not a setting; did you mean schedule.final?"),
    ("task=cifar ~run.sed", "run.sed is not a setting; did you mean run.seed?"),
    ("task=cifar +a=1", "a is not a setting"),
    ("task=cifar +run.sed=1", "run.sed is not a setting; did you mean run.seed?"),
    ("task=cifar ++run.sed=1", "run.sed is not a setting; did you mean run.seed?"),
    ("task=cifar +data.wokers=2", "data.wokers is not a setting; did you mean data.workers?"),
    (
        "task=cifar +strategy.precison=fp32",
        "strategy.precison is not a setting; did you mean strategy.precision?",
    ),
    ("task=cifar +dist.bakend=gloo", "dist.bakend is not a setting; did you mean dist.backend?"),
    (
        "task=cifar +checkpoint.every=2",
        "checkpoint.every is not a setting; did you mean checkpoint.every_steps?",
    ),
    (
        "task=cifar +eval.evry_steps=2",
        "eval.evry_steps is not a setting; did you mean eval.every_steps?",
    ),
    ("task=cifar +log.imags=2", "log.imags is not a setting; did you mean log.images?"),
    ("task=cifar +task.optons=2", "task.optons is not a setting; did you mean task.options?"),
    (
        "task=cifar +task.options.widht=2",
        "task.options.widht is not a setting; did you mean task.options.widths?",
    ),
    (
        "task=cifar +optim.nesterof=true",
        "optim.nesterof is not an argument of trainer.tasks.cifar.Muon",
    ),
    ("task=cifar +schedule.gama=2", "schedule.gama is not an argument of trainer.schedule.linear"),
    ("task=cifar +run.seed=1", "+run.seed=1: run.seed already exists; leave out the '+'"),
    (
        "task=cifar +experiment=parity",
        "+experiment=parity: experiment already exists; leave out the '+'",
    ),
    (
        "task=cifar +experiment=null",
        "+experiment=null: experiment already exists; leave out the '+'",
    ),
    ("task=cifar experiment=null", "experiment=null: must be one of parity"),
    # typos in the name of an option
    ("task=cifra", f"task=cifra: {NO_TASK}"),
    ("optim=sdg task=text", f"optim=sdg: must be one of {NAMES['optim']}; did you"),
    (
        "task=cifar strategy=dpp",
        f"strategy=dpp: must be one of {NAMES['strategy']}; did you mean pp?",
    ),
    (
        "task=cifar strategy=_common",
        f"strategy=_common: must be one of {NAMES['strategy']}",
    ),
    ("task=cifar dist=smoke", "dist=smoke: must be one of auto, gloo, mpi, nccl"),
    ("task=cifar launch=slurm", "launch=slurm: must be one of elastic, inline, ray, spawn"),
    (
        "task=cifar schedule=cosin",
        "schedule=cosin: must be one of constant, cosine, linear, multistep, one_cycle; did",
    ),
    (
        "task=cifar experiment=partiy",
        "experiment=partiy: must be one of parity; did you mean parity?",
    ),
    (
        "task=cifar optim=[sgd,adam]",
        f"optim=['sgd', 'adam']: must be one of {NAMES['optim']}",
    ),
    ("task=cifar optim=sgd optim=adam", "optim=adam: optim=sgd was given before; give only one"),
    ("task=cifar run=3", "run=3: must be a group of settings"),
    ("task=cifar ~optim", "optim is missing: give optim=<a mapping>"),
    ("task=cifar ~run.seed", "run.seed is missing: give run.seed=<an integer of at least 0"),
    # types and ranges
    ("task=cifar run.epochs=many", f"run.epochs=many: {WHOLE}"),
    ("task=cifar run.epochs=", f"run.epochs='': {WHOLE}"),
    ("task=cifar run.epochs=1.5", f"run.epochs=1.5: {WHOLE}"),
    ("task=cifar run.epochs=true", f"run.epochs=true: {WHOLE}"),
    ("task=cifar run.epochs=null", f"run.epochs=null: {WHOLE}"),
    ("task=cifar run.epochs=0", f"run.epochs=0: {WHOLE}"),
    ("task=cifar run.steps=1e3", f"run.steps=1000.0: {WHOLE_OR_NULL}"),
    ("task=cifar run.seed=-1", "run.seed=-1: must be an integer of at least 0"),
    (
        "task=cifar run.seed=9223372036854775808",
        "run.seed=9223372036854775808: must be an integer of at least 0 and of",
    ),
    ("task=cifar run.seed=1 run.seed=x", "run.seed=x: must be an integer of at least 0"),
    ("task=cifar 'run.seed=${run.sed}'", "run.seed: Interpolation key 'run.sed' not found"),
    ("task=cifar 'run.seed=${oc.env:NO_SUCH_SEED}'", "${oc.env:...}: must be one of "),
    ("task=cifar run.name=[a]", "run.name=['a']: must be a string or null"),
    ("task=cifar run.name=", "run.name='': must be a string or null"),
    ("task=cifar run.name=a/b", "run.name=a/b: must be one folder name"),
    ("task=cifar run.name=..", "run.name=..: must be one folder name"),
    ("task=cifar run.dir=null", "run.dir=null: must be a string"),
    ("task=cifar run.dir=", "run.dir='': must be a string"),
    ("task=cifar run.compile=maybe", f"run.compile=maybe: {SWITCH}"),
    (
        "task=cifar run.ema_decay=1.1",
        "run.ema_decay=1.1: must be a number of at least 0 and below 1 or null",
    ),
    ("task=cifar run.ema_decay=nan", "run.ema_decay=nan: must be a number of at least 0"),
    ("task=cifar run.clip_norm=0", "run.clip_norm=0: must be a number above 0 or null"),
    ("task=cifar run.clip_norm=inf", "run.clip_norm=inf: must be a number above 0 or null"),
    ("task=cifar run.lr_scaling=cubic", "run.lr_scaling=cubic: must be one of none, linear, sqrt"),
    ("task=cifar run.lr_batch=0", f"run.lr_batch=0: {WHOLE_OR_NULL}"),
    ("task=cifar data.global_batch=-32", f"data.global_batch=-32: {WHOLE}"),
    ("task=cifar data.global_batch=null", f"data.global_batch=null: {WHOLE}"),
    (
        "task=cifar data.micro_batch=half",
        "data.micro_batch=half: must be an integer of at least 1 or auto or null",
    ),
    ("task=cifar data.workers=-1", "data.workers=-1: must be an integer of at least 0"),
    ("task=cifar data.timeout_s=1m", "data.timeout_s=1m: must be a number of at least 0"),
    ("task=cifar data.path=ram", "data.path=ram: must be one of auto, resident, streamed"),
    (
        "task=cifar strategy.name=zero",
        f"strategy.name=zero: must be one of {NAMES['strategy']}",
    ),
    (
        "task=cifar strategy.precision=fp31",
        "strategy.precision=fp31: must be one of default, auto, fp64, fp32, tf32, amp_bf16",
    ),
    ("task=cifar strategy.sync_batchnorm=yes", f"strategy.sync_batchnorm=yes: {SWITCH}"),
    ("task=cifar strategy.channels_last=2", f"strategy.channels_last=2: {SWITCH}"),
    (
        "task=cifar strategy=dp strategy.device_ids=0",
        "strategy.device_ids=0: must be a list or null",
    ),
    (
        "task=cifar strategy=dp strategy.device_ids=[a]",
        "strategy.device_ids[0]=a: must be an integer of at least 0",
    ),
    (
        "task=cifar strategy=dp strategy.device_ids=[0,-1]",
        "strategy.device_ids[1]=-1: must be an integer of at least",
    ),
    ("task=cifar strategy.devices_per_rank=0", f"strategy.devices_per_rank=0: {WHOLE}"),
    ("task=cifar strategy.bucket_mb=0", "strategy.bucket_mb=0: must be a number above 0"),
    ("task=cifar strategy.static_graph=1", f"strategy.static_graph=1: {SWITCH}"),
    (
        "task=cifar strategy.comm_hook=fp8",
        "strategy.comm_hook=fp8: must be one of none, fp16, bf16, powersgd, parameter",
    ),
    ("task=cifar dist.backend=ncll", "dist.backend=ncll: must be one of auto, nccl, gloo, mpi"),
    ("task=cifar dist.init=mpi", "dist.init=mpi: must be one of env, tcp, file"),
    (
        "task=cifar dist.timeout_s=0",
        "dist.timeout_s=0: must be a number above 0 and of at most 1000000",
    ),
    ("task=cifar dist.timeout_s=5min", "dist.timeout_s=5min: must be a number above 0"),
    ("task=cifar dist.hang_timeout_s=0", "dist.hang_timeout_s=0: must be a number above 0"),
    (
        "task=cifar launch.name=torchrun",
        "launch.name=torchrun: must be one of inline, elastic, spawn",
    ),
    (
        "task=cifar launch.nproc_per_node=2",
        "launch.nproc_per_node=2: use launch=elastic or launch=spawn",
    ),
    (
        "task=cifar launch.max_restarts=1",
        "launch.max_restarts=1: use launch=elastic or launch=spawn",
    ),
    ("task=cifar launch.ranks=2", "launch.ranks=2: must be null without launch=ray"),
    (
        "task=cifar launch=ray launch.ranks=[3,2]",
        "launch.ranks=[3, 2]: must be a number, or [least,most], as in [2,8]",
    ),
    (
        "task=cifar launch=ray launch.nproc_per_node=2",
        "launch.nproc_per_node=2: must be null with launch=ray; give launch.ranks",
    ),
    (
        "task=cifar launch=spawn launch.max_restarts=1",
        "launch.max_restarts=1: launch=spawn does not restart ranks",
    ),
    (
        "task=cifar launch=elastic launch.nproc_per_node=two",
        "launch.nproc_per_node=two: must be gpu, cpu, auto or",
    ),
    (
        "task=cifar launch.on_failed_job=skip",
        "launch.on_failed_job=skip: must be one of continue, stop",
    ),
    ("task=cifar checkpoint.every_steps=0", f"checkpoint.every_steps=0: {WHOLE_OR_NULL}"),
    ("task=cifar checkpoint.every_epochs=0.5", f"checkpoint.every_epochs=0.5: {WHOLE_OR_NULL}"),
    ("task=cifar checkpoint.keep_last=0", f"checkpoint.keep_last=0: {WHOLE}"),
    (
        "task=cifar checkpoint.keep_best=-1",
        "checkpoint.keep_best=-1: must be an integer of at least 0",
    ),
    ("task=cifar checkpoint.background=often", f"checkpoint.background=often: {SWITCH}"),
    (
        "task=cifar checkpoint.on_error=ignore",
        "checkpoint.on_error=ignore: must be one of stop, continue",
    ),
    (
        "task=cifar checkpoint.best_mode=high",
        "checkpoint.best_mode=high: must be one of min, max or null",
    ),
    (
        "task=cifar checkpoint.best_mode=null",
        "checkpoint.best_mode is missing: set it to min or max for eval/accuracy",
    ),
    (
        "task=cifar checkpoint.best_metric=loss",
        "checkpoint.best_mode=max: must be min for eval/loss",
    ),
    ("task=cifar checkpoint.best_metric=", "checkpoint.best_metric='': must be a string or null"),
    ("task=cifar eval.every_epochs=0", f"eval.every_epochs=0: {WHOLE_OR_NULL}"),
    ("task=cifar eval.micro_batch=all", f"eval.micro_batch=all: {WHOLE_OR_NULL}"),
    ("task=cifar log.every_steps=null", f"log.every_steps=null: {WHOLE}"),
    ("task=cifar log.images=-1", "log.images=-1: must be an integer of at least 0"),
    ("task=cifar log.histograms_every_steps=0", f"log.histograms_every_steps=0: {WHOLE_OR_NULL}"),
    ("task=cifar log.profile_steps=10", "log.profile_steps=10: must be a list or null"),
    (
        "task=cifar log.profile_steps=[20,10]",
        "log.profile_steps=[20, 10]: must be [<step to begin after>, <last step>]",
    ),
    ("task=cifar log.profile_steps=[1,b]", "log.profile_steps[1]=b: must be an integer"),
    ("task=cifar task.name=a/b", "task.name=a/b: must be one folder name"),
    ("task=cifar task.packages=torch", "task.packages=torch: must be a list"),
    ("task=cifar task.options=3", "task.options=3: must be a mapping"),
    # settings that contradict each other or the place where they run
    (
        "task=cifar data.micro_batch=500",
        "data.micro_batch=500: must be at most data.global_batch=240",
    ),
    (
        "task=cifar run.lr_batch=250",
        "run.lr_scaling=none: must be linear or sqrt if run.lr_batch is given",
    ),
    ("task=cifar run.lr_scaling=sqrt", "run.lr_scaling=sqrt: give run.lr_batch=<the global batch"),
    (
        "task=cifar strategy=single strategy.comm_hook=fp16",
        "strategy.comm_hook=fp16: strategy=single takes no comm hook; use ddp",
    ),
    (
        "task=cifar strategy.comm_hook=fp16 strategy.precision=fp64",
        "strategy.comm_hook=fp16: compresses float32 gradients, and strategy.precision=fp64 has "
        "none",
    ),
    (
        "task=cifar strategy.comm_hook=bf16",
        "strategy.comm_hook=bf16: needs dist.backend=nccl; use fp16",
    ),
    ("task=cifar strategy.device_ids=[0]", "strategy.device_ids=[0]: must be null without"),
    (
        "task=cifar strategy=dp strategy.sync_batchnorm=true",
        "strategy.sync_batchnorm=true: is not supported by torch's DataParallel",
    ),
    (
        "task=cifar strategy=dp strategy.devices_per_rank=2",
        "strategy.devices_per_rank=2: is not supported by torch's DataParallel",
    ),
    (
        "task=cifar strategy.precision=tf32",
        "strategy.precision=tf32: needs a CUDA GPU, and torch sees none",
    ),
    ("task=cifar dist.backend=nccl", "dist.backend=nccl: needs CUDA, but torch sees no GPU here"),
    ("task=cifar dist.backend=mpi", "dist.backend=mpi: needs mpirun or srun"),
    ("task=cifar dist.init=tcp", "dist.address is missing: dist.init=tcp needs it on every rank"),
    ("task=cifar dist.init=file", "dist.path is missing: dist.init=file needs it on every rank"),
    (
        "task=cifar dist.address=a:1",
        "dist.address=a:1: must be null with dist.init=env; or set dist.init=tcp",
    ),
    (
        "task=cifar dist.init=tcp dist.address=host",
        "dist.address=host: must be <host>:<port>, port from 1 to 65535",
    ),
    (
        "task=cifar dist.init=tcp dist.address=host:99999",
        "dist.address=host:99999: must be <host>:<port>, port from 1",
    ),
    (
        "task=cifar dist.init=tcp dist.address=h:1 dist.path=x",
        "dist.path=x: must be null with dist.init=tcp; or set dist.init=file",
    ),
    ("task=cifar dist.init=file dist.path=nowhere/x", "dist.path=nowhere/x: "),
    # optimizer and schedule
    ("task=cifar optim.lr=fast", "optim.lr=fast: must be a number of at least 0"),
    ("task=cifar optim.lr=-0.1", "optim.lr=-0.1: must be a number of at least 0"),
    ("task=cifar optim.lr=nan", "optim.lr=nan: must be a number of at least 0"),
    ("task=cifar optim.lr=null", "optim.lr=null: must be a number of at least 0"),
    ("task=cifar ~optim.lr", "optim (trainer.tasks.cifar.Muon): missing a required argument: 'lr'"),
    (
        "task=cifar optim.momentum=high",
        "optim.momentum=high: must be a number of at least 0 and of at most 1",
    ),
    (
        "task=cifar optim.momentum=-1",
        "optim.momentum=-1: must be a number of at least 0 and of at most 1",
    ),
    ("task=cifar optim.momentum=[1]", "optim.momentum=[1]: must be a number of at least 0"),
    ("task=cifar optim.iterations=2.5", f"optim.iterations=2.5: {WHOLE}"),
    ("task=cifar optim=sgd optim.nesterov=3", f"optim.nesterov=3: {SWITCH}"),
    ("task=cifar optim=sgd optim.weight_decay=much", "optim.weight_decay=much: must be a number"),
    (
        "task=cifar optim=sgd optim.weight_decay=-1",
        "optim (torch.optim.SGD): Invalid weight_decay value: -1",
    ),
    (
        "task=cifar optim=sgd optim.nesterov=true optim.momentum=0",
        "optim (torch.optim.SGD): Nesterov momentum requires",
    ),
    ("task=cifar optim=adam optim.betas=0.9", "optim.betas=0.9: must be a list"),
    ("task=cifar optim=adam optim.betas=[a,b]", "optim.betas[0]=a: must be a number"),
    (
        "task=cifar optim=adam optim.betas=[0.9,0.9,0.9]",
        "optim.betas=[0.9, 0.9, 0.9]: must be 2 numbers",
    ),
    (
        "task=cifar optim=adam optim.betas=[0.9,1.5]",
        "optim (torch.optim.Adam): Invalid beta parameter at index 1: 1.5",
    ),
    (
        "task=cifar schedule.warmup_steps=-1",
        "schedule.warmup_steps=-1: must be an integer of at least 0",
    ),
    (
        "task=cifar schedule.warmup_steps=0.5",
        "schedule.warmup_steps=0.5: must be an integer of at least 0",
    ),
    (
        "task=cifar schedule.warmup_steps=null",
        "schedule.warmup_steps=null: must be an integer of at least 0",
    ),
    ("task=cifar schedule.final=low", "schedule.final=low: must be a number of at least 0"),
    ("task=cifar schedule.final=-1", "schedule.final=-1: must be a number of at least 0"),
    ("task=cifar schedule.final=nan", "schedule.final=nan: must be a number"),
    (
        "task=cifar schedule=multistep schedule.milestones=0.5",
        "schedule.milestones=0.5: must be a list or null",
    ),
    (
        "task=cifar schedule=multistep schedule.milestones=[a]",
        "schedule.milestones[0]=a: must be a number of at least 0",
    ),
    (
        "task=cifar schedule=multistep schedule.gamma=null",
        "schedule.gamma=null: must be a number of at least 0",
    ),
    (
        "task=cifar schedule=one_cycle schedule.warmup_steps=-5",
        "schedule.warmup_steps=-5: must be an integer of at",
    ),
    # names that are imported as code
    (
        "task=cifar ~optim._target_",
        f"optim._target_ is missing: give optim=<name> ({NAMES['optim']})",
    ),
    (
        "task=cifar schedule._target_=null",
        "schedule._target_ is missing: give schedule=<name> (constant, cosine",
    ),
    (
        "task=cifar optim._target_=SGD",
        "optim._target_=SGD: must be under torch.optim, torch.nn, trainer",
    ),
    (
        "task=cifar optim._target_=os.system",
        "optim._target_=os.system: must be under torch.optim, torch.nn",
    ),
    (
        "task=cifar optim._target_=torch.optim",
        "optim._target_=torch.optim: must be under torch.optim, torch.nn",
    ),
    (
        "task=cifar optim._target_=torch.optim.",
        "optim._target_=torch.optim.: must be <module>.<name>",
    ),
    (
        "task=cifar optim._target_=torch.optim.SGDD",
        "optim._target_=torch.optim.SGDD: torch.optim has no SGDD; did you mea",
    ),
    (
        "task=cifar optim._target_=torch.optim.sdg.SGD",
        "optim._target_=torch.optim.sdg.SGD: no module named torch.optim.sd",
    ),
    (
        "task=cifar optim._target_=torch.optim.SGD",
        "optim.iterations is not an argument of torch.optim.SGD; use run.steps",
    ),
    (
        "task=cifar optim._target_=torch.nn.Linear",
        "optim._target_=torch.nn.Linear: must be a subclass of torch.optim",
    ),
    (
        "task=cifar schedule._target_=trainer.schedule.cosin",
        "schedule._target_=trainer.schedule.cosin: trainer.schedule h",
    ),
    ("task=cifar task.trainer=Cifar", "task.trainer=Cifar: must be <module>.<class>"),
    ("task=cifar task.trainer=null", "task.trainer=null: must be a string"),
    (
        "task=cifar task.trainer=tasks/mine.py",
        "task.trainer=tasks/mine.py: must be <module>.<name>, such",
    ),
    (
        "task=cifar task.trainer=trainer.tasks.cifar",
        "task.trainer=trainer.tasks.cifar: is a module: must be a class in it, so add its name",
    ),
    (
        "task=cifar task.trainer=torch.nn.utils",
        "task.trainer=torch.nn.utils: is a module: must be a class in it, so add its name",
    ),
    (
        "task=mine --config-dir {files}/mark",
        "{files}/mark/task/mine.yaml: begins with a byte order mark; save it as UTF-8 without one",
    ),
    ("task=cifar run.ema_decay=1", "run.ema_decay=1: must be a number of at least 0 and below 1"),
    (
        "task=cifar optim._target_=torch.optim.Optimizer",
        "optim._target_=torch.optim.Optimizer: must be a class that can be built, not an abstract "
        "one; give one of its subclasses",
    ),
    (
        "task=cifar optim._target_=torch.optim.LBFGS",
        "optim.momentum is not an argument of torch.optim.LBFGS: must be lr, max_iter, max_eval, ",
    ),
    (
        "task=mine --config-dir {files}/choice",
        "optim=adamw: must be a mapping; in a file write '- override /optim: adamw' in defaults",
    ),
    (
        "task=mine --config-dir {files}/quoted",
        "run.seed=3: must be an integer of at least 0 and of at most 9223372036854775807; leave",
    ),
    (
        "task=cifar +schedule.milestones=[5]",
        "schedule.milestones is not an argument of trainer.schedule.linear: must be warmup_steps",
    ),
    ("task=cifar eval.splits=val", "eval.splits=val: must be a list; write [val]"),
    (
        "task=cifar task.trainer=mine.Task",
        "task.trainer=mine.Task: no module named mine; start in the folder that contains it",
    ),
    (
        "task=cifar task.trainer=torch.optim.SGD",
        "task.trainer=torch.optim.SGD: must be a subclass of trainer.Trainer",
    ),
    (
        "task=cifar task.trainer=trainer.Trainer",
        "task.trainer=trainer.Trainer: must be a subclass of trainer.Trainer",
    ),
    (
        "task=cifar task.trainer=trainer.tasks.cifar.Cifra",
        "task.trainer=trainer.tasks.cifar.Cifra: trainer.tasks.cifar has",
    ),
    # options of a task
    (
        "task=cifar task.options.data=ful",
        "task.options.data=ful: must be one of auto, full, bundled, download",
    ),
    ("task=cifar task.options.root=null", "task.options.root=null: must be a string"),
    (
        "task=cifar task.options.model=resnet",
        "task.options.model=resnet: must be one of airbench, resnet18",
    ),
    ("task=cifar task.options.norm=layer", "task.options.norm=layer: must be one of batch, none"),
    ("task=cifar task.options.widths=64", "task.options.widths=64: must be a list"),
    ("task=cifar task.options.widths=[64,0,1]", f"task.options.widths[1]=0: {WHOLE}"),
    ("task=cifar task.options.widths=[64,64]", "task.options.widths=[64, 64]: must be three"),
    ("task=cifar task.options.bias_lr=0", "task.options.bias_lr=0: must be a number above 0"),
    ("task=cifar task.options.head_lr=fast", "task.options.head_lr=fast: must be a number above 0"),
    (
        "task=cifar task.options.label_smoothing=1.5",
        "task.options.label_smoothing=1.5: must be a number of at least 0",
    ),
    (
        "task=cifar ~task.options.widths",
        "task.options.widths is missing: give task.options.widths=<a list>",
    ),
    ("task=cifar ~task.options", "task.options is missing: give task.options=<a mapping>"),
    ("task=text task.options.context=0", f"task.options.context=0: {WHOLE}"),
    ("task=text task.options.layers=many", f"task.options.layers=many: {WHOLE}"),
    ("task=text task.options.heads=3", "task.options.heads=3: must divide task.options.width=64"),
    (
        "task=text task.options.dropout=2",
        "task.options.dropout=2: must be a number of at least 0 and of at most 1",
    ),
    (
        "task=text task.options.files=1",
        "task.options.files=1: must be an integer of at least 2",
    ),
    (
        "task=text task.options.fils=10",
        "task.options.fils is not a setting; did you mean task.options.files?",
    ),
    ("task=text +task.options.bytes=2", "task.options.bytes is not a setting"),
    # the environment
    ("RANK=0 WORLD_SIZE=two task=text", "WORLD_SIZE=two: must be an integer of at least 1"),
    ("RANK=0 WORLD_SIZE=0 task=text", "WORLD_SIZE=0: must be an integer of at least 1"),
    ("RANK=0 WORLD_SIZE= task=text", "WORLD_SIZE=: must be an integer of at least 1"),
    ("RANK=0 task=text", "WORLD_SIZE is not set: RANK and WORLD_SIZE must be set together"),
    ("WORLD_SIZE=2 task=text", "RANK is not set: RANK and WORLD_SIZE must be set together"),
    ("RANK=2 WORLD_SIZE=2 task=text", "RANK=2: must be an integer of at least 0 and at most 1"),
    (
        "RANK=-1 WORLD_SIZE=2 task=text",
        "RANK=-1: must be an integer of at least 0 and at most 1",
    ),
    ("RANK=x WORLD_SIZE=2 task=text", "RANK=x: must be an integer of at least 0 and at most 1"),
    (
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 task=text",
        "LOCAL_RANK=2: must be an integer of at least 0 and at most 1",
    ),
    (
        "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 task=text",
        "LOCAL_WORLD_SIZE=3: must be an integer of at least 1 and",
    ),
    (
        "RANK=0 WORLD_SIZE=2 GROUP_RANK=5 task=text",
        "GROUP_RANK=5: must be an integer of at least 0 and at most 0",
    ),
    ("RANK=0 WORLD_SIZE=2 task=text", "MASTER_ADDR is not set, but WORLD_SIZE=2"),
    (f"{RANK_0} task=text", "MASTER_PORT is not set, but WORLD_SIZE=2"),
    (f"{RANK_0} MASTER_PORT=http task=text", "MASTER_PORT=http: must be a port from 1 to 65535"),
    (f"{RANK_0} MASTER_PORT=99999 task=text", "MASTER_PORT=99999: must be a port from 1 to 65535"),
    (
        f"{RANK_0} MASTER_PORT=1 task=text strategy=single",
        "strategy=single: must run on 1 rank, and 2 ranks were started",
    ),
    (
        f"{RANK_0} MASTER_PORT=1 task=text strategy=dp",
        "strategy=dp: must be one process, and 2 ranks were started",
    ),
    (
        f"{RANK_0} MASTER_PORT=1 task=text data.global_batch=1",
        "data.global_batch=1: must be at least the 2 data-parallel",
    ),
    (
        f"{RANK_0} MASTER_PORT=1 task=text -m optim.lr=1,2",
        "-m: use sweep: python -m trainer.sweep task=text optim.lr=1,2",
    ),
    # sweeps
    ("task=cifar optim.lr=0.1,0.2", "optim.lr=0.1,0.2: several values (a,b"),
    (
        "-m optim.lr=0.1,0.2",
        "-m: use sweep: python -m trainer.sweep optim.lr=0.1,0.2",
    ),
    ("sweep task=cifar optim.lrr=0.1,0.2", "optim.lrr is not a setting; did you mean optim.lr?"),
    ("sweep task=cifar optim.lr=0.1,abc", "optim.lr=abc: must be a number of at least 0"),
    ("sweep task=cifar optim=sgd,foo", f"optim=foo: must be one of {NAMES['optim']}"),
    (
        "sweep task=cifar,cifra",
        "task=cifra: must be one of cifar, dpo, finetune, images, lm, text; did you mean cifar?",
    ),
    (
        "sweep task=cifar data.micro_batch=10,500",
        "data.micro_batch=500: must be at most data.global_batch=240",
    ),
    (
        "sweep task=cifar optim.lr=0.1,0.2 run.name=a,b",
        "run.name=a: two jobs of the sweep have this name; sweep run.name alone",
    ),
    (
        "sweep task=cifar run.seed=range(0)",
        "run.seed=range(0): several values (a,b or range(1,4)) need sweep",
    ),
    (
        "sweep task=cifar run.seed=glob(*)",
        "run.seed=glob(*): several values (a,b or range(1,4)) need sweep",
    ),
    (
        "sweep task=cifar optim.lr=interval(0,1)",
        "optim.lr=interval(0,1): several values (a,b or range(1,4)) need sweep",
    ),
    (
        "sweep task=cifar strategy=single,ddp strategy.comm_hook=fp16",
        "strategy.comm_hook=fp16: strategy=single takes no comm hook; use ddp",
    ),
    ("sweep task=cifar run.seed=1,2 run.resume=nowhere", "run.resume=nowhere: no checkpoint there"),
    (
        "sweep task=cifar hydra/sweeper=foo",
        "hydra/sweeper=foo: must be hydra/sweeper=optuna, or hydra/launcher=submitit_slurm",
    ),
    (
        "sweep task=cifar --config-dir nowhere run.seed=1,2",
        "--config-dir nowhere: must be a directory",
    ),
    # files and directories: a run to resume
    (
        "run.resume=nowhere",
        "run.resume=nowhere: has no config.json; give a run directory, or one of its checkpoints",
    ),
    (
        "task=cifar run.resume=nowhere",
        "run.resume=nowhere: no checkpoint there; give auto, a run directory",
    ),
    ("run.resume={files}/file", "run.resume={files}/file: has no config.json"),
    ("task=cifar run.resume={files}/file", "run.resume={files}/file: no checkpoint there"),
    ("task=cifar run.resume=", "run.resume='': must be a string or null"),
    ("run.resume=auto", "task is missing: give task=<name>"),
    (
        "run.resume={files}/run_bracket",
        "run.resume={files}/run_bracket: its config.json was not written by a run",
    ),
    (
        "run.resume={files}/run_other",
        "run.resume={files}/run_other: its config.json was not written by a run",
    ),
    (
        "run.resume={files}/run_empty",
        "run.resume={files}/run_empty: its config.json was not written by a run",
    ),
    (
        "run.resume={files}/run_list",
        "run.resume={files}/run_list: its config.json was not written by a run",
    ),
    (
        "run.resume={files}/run_bytes",
        "run.resume={files}/run_bytes: its config.json was not written by a run",
    ),
    (
        "run.resume={files}/run_number",
        "run.resume={files}/run_number: its config.json was not written by a run",
    ),
    (
        "task=cifar run.dir=/dev/null",
        "run.dir: /dev/null/cifar cannot be created, /dev/null is not a directory",
    ),
    (
        "task=cifar run.dir={files}/file",
        "run.dir: {files}/file/cifar cannot be created, {files}/file is not a directory",
    ),
    (
        "task=cifar run.dir={files}/runs run.name=taken",
        "run.name=taken: {files}/runs/cifar/taken exists and is not being",
    ),
    # files and directories: the user's own configurations
    ("task=cifar --config-dir", "--config-dir: give a directory"),
    ("task=cifar --config-dir=", "--config-dir : must be a directory"),
    ("task=cifar --config-dir nowhere", "--config-dir nowhere: must be a directory"),
    ("task=cifar --config-dir {files}/file", "--config-dir {files}/file: must be a directory"),
    (
        "task=miine --config-dir {files}/good",
        "task=miine: must be one of cifar, dpo, finetune, images, lm, text, mine; "
        "did you mean mine?",
    ),
    (
        "task=mine --config-dir {files}/good task.options.dropot=1",
        "task.options.dropot is not a setting; did you mean",
    ),
    (
        "task=mine --config-dir {files}/good --config-dir {files}/other",
        "task=mine is defined twice, in {files}/good/task/",
    ),
    ("task=cifar --config-dir {files}/cifar", "task=cifar is defined twice, in "),
    (
        "task=mine --config-dir {files}/bracket",
        "--config-dir {files}/bracket: a YAML file cannot be read: while parsing",
    ),
    (
        "task=mine --config-dir {files}/tab",
        "--config-dir {files}/tab: a YAML file cannot be read: while scanning",
    ),
    (
        "task=mine --config-dir {files}/latin",
        "{files}/latin/task/mine.yaml: byte 0xe9 at position 17 is not UTF-8; save it as UTF-8",
    ),
    (
        "task=mine --config-dir {files}/key_twice",
        "--config-dir {files}/key_twice: a YAML file cannot be read: while",
    ),
    ("task=mine --config-dir {files}/list", "--config-dir {files}/list: In 'task/mine': "),
    (
        "task=mine --config-dir {files}/empty",
        "task.name is missing: set it in the task's file, below a first line '# @pac",
    ),
    (
        "task=mine --config-dir {files}/no_package",
        "task.name is missing: set it in the task's file, below a first line",
    ),
    ("task=mine --config-dir {files}/no_name", "task.name is missing: set it in the task's file"),
    (
        "task=mine --config-dir {files}/no_trainer",
        "task.trainer is missing: give task.trainer=<a string>",
    ),
    (
        "task=mine --config-dir {files}/no_dropout",
        "task.options.dropout is missing: give task.options.dropout=<a number",
    ),
    ("task=mine --config-dir {files}/group", "optin is not a setting; did you mean optim?"),
    ("task=mine --config-dir {files}/key", "run.epoch is not a setting; did you mean run.epochs?"),
    ("task=mine --config-dir {files}/null", "run=null: must be a group of settings"),
    ("task=mine --config-dir {files}/reference", "run.seed: Interpolation key 'run.sed' not found"),
    (
        "task=mine --config-dir {files}/default",
        "--config-dir {files}/default: In 'config': Could not find 'optim/sdg'",
    ),
    (
        "task=mine --config-dir {files}/default_group",
        "--config-dir {files}/default_group: In 'task/mine': Could not find",
    ),
    (
        "task=mine --config-dir {files}/override",
        "--config-dir {files}/override: In 'task/mine': Could not override 'optin'."
        " No match in the defaults list; write '- override /optim: adamw' in defaults, or"
        " '- /model: small' for your own group",
    ),
    (
        "task=cifar optim=mine --config-dir {files}/no_target",
        "optim._target_ is missing: give optim=<name>",
    ),
    (
        "task=cifar optim=mine --config-dir {files}/target",
        "optim._target_=torch.optim.SGDD: torch.optim has no SGDD; did",
    ),
]
LINES = dict(BAD)
# Only the data or the model can show these errors; the process group exists by then.
BAD_FOR_THE_DATA = [
    (
        "task=cifar data.global_batch=6000",
        "data.global_batch=6000: must be at most the 5000 training examples",
    ),
    (
        "task=cifar task.options.data=full",
        "task.options.root=data/cifar-10-batches-bin: has no data_batch_1.bin",
    ),
    (
        "task=cifar task.options.model=resnet18",
        "task.options.model=resnet18: optim=airbench has learning rates",
    ),
    (
        "task=cifar checkpoint.best_metric=eval/acuracy",
        "checkpoint.best_metric=eval/acuracy: must be one of eval/accu",
    ),
    (
        "task=text optim=airbench",
        "optim (trainer.tasks.cifar.Muon): takes parameters of 2 or more dimensions only",
    ),
]
REAL = [
    "task=cifar optim.lrr=1",
    "task=cifar dist.init=tcp",
    "task=cifar schedule.warmup_steps=-1",
    "task=text task.options.heads=3",
    "RANK=2 WORLD_SIZE=2 task=text",
    "sweep task=cifar strategy=single,ddp strategy.comm_hook=fp16",
    "run.resume={files}/run_bracket",
    "task=mine --config-dir {files}/no_dropout",
]
# Rows that two ranks under torchrun refuse with the same line as one process.
EVERYWHERE = [
    words
    for words in LINES
    if not re.search(r"^[A-Z]|^-|^sweep|--cfg|--info|--multirun|strategy=", words)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Create the folders that the rows refer to, and check that no row changes them."""
    root = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = tree(root)
    yield root
    assert tree(root) == before


def tree(root):
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def split(words, files):
    """Return (environment, arguments) of a row."""
    rest, environment = shlex.split(words.replace("{files}", str(files))), {}
    while rest and re.match(r"[A-Z_]+=", rest[0]):
        name, value = rest.pop(0).split("=", 1)
        environment[name] = value
    return environment, rest


def forked(words, files, command, before=(refuse_meeting, hide_gpus)):
    """Run the verb in a fork that has torch loaded; return (exit code, stdout, stderr)."""
    environment, arguments = split(words, files)
    verb, arguments = verb_of(arguments)
    told = {"environment": environment, "verb": verb}
    return command(*arguments, **told, before=lambda: [each() for each in before])


def verb_of(arguments):
    """Return (module, its words): a row that begins with sweep is of that verb."""
    is_sweep = arguments[:1] == ["sweep"]
    return ("trainer.sweep", arguments[1:]) if is_sweep else ("trainer", arguments)


def real(words, files, folder, *launcher):
    """Run a separate process; return (exit code, stdout, stderr, seconds)."""
    environment, arguments = split(words, files)
    verb, arguments = verb_of(arguments)
    told = environment_of_a_command(CUDA_VISIBLE_DEVICES="", **environment)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launcher, "-m", verb, *arguments],
        cwd=folder,
        env=told,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - begun


def check(words, line, files, folder, code, out, err):
    assert err.startswith(f"error: {line}".replace("{files}", str(files))), f"{words}\n{err}"
    assert err.count("\n") == 1 and err.endswith("\n"), f"{words}\n{err}"
    assert code == 2 and out == "", words
    assert list(folder.iterdir()) == [], words


def test_a_bad_file_that_a_run_does_not_use_is_not_read(files):
    assert load_config(["task=sound"], [str(files / "mark")]).task.name == "mine"


def test_corpus_is_large_and_no_row_is_defined_twice():
    assert len(LINES) == len(BAD) >= 130
    assert set(REAL) <= set(LINES)


ROWS = [
    pytest.param(*row, id=row[0] or "nothing", marks=([SLOW] if n % 3 > 0 else []))
    for n, row in enumerate(BAD)
]


@pytest.mark.parametrize(("words", "line"), ROWS)
def test_bad_setting_is_one_line_and_exit_code_2(words, line, files, command, tmp_path):
    check(words, line, files, tmp_path, *forked(words, files, command))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        pytest.param(*row, id=row[0], marks=([SLOW] if n != 1 else []))
        for n, row in enumerate(BAD_FOR_THE_DATA)
    ],
)
def test_error_that_only_the_data_can_show_is_one_line_and_no_directory(
    words, line, files, command, tmp_path
):
    check(words, line, files, tmp_path, *forked(words, files, command, before=(hide_gpus,)))


IN_A_PROCESS = dict.fromkeys([*REAL[1:], *[words for words, _ in BAD[::12]]])


@pytest.mark.parametrize("words", [REAL[0], *(pytest.param(w, marks=SLOW) for w in IN_A_PROCESS)])
def test_bad_setting_of_a_real_process(words, files, tmp_path):
    check(words, LINES[words], files, tmp_path, *real(words, files, tmp_path)[:3])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_bad_setting_under_torchrun_is_reported_once_and_soon(part, files, tmp_path):
    seconds = {}
    for words in EVERYWHERE[:: len(EVERYWHERE) // 20][part:20:4]:
        line = f"error: {LINES[words]}".replace("{files}", str(files))
        for _ in range(2):
            code, _, err, took = real(words, files, tmp_path, *TORCHRUN)
            said = [each.startswith(line) for each in err.splitlines()]
            assert said.count(True) == 1, f"{words}\n{err}"
            assert code != 0 and list(tmp_path.iterdir()) == [], words
            seconds[words] = min(took, seconds.get(words, took))
            if took < TORCHRUN_LIMIT_S:
                break
    median = statistics.median(seconds.values())
    slowest = max(seconds.values())
    print(f"\n{len(seconds)} rows on 2 ranks: median {median:.2f} s, slowest {slowest:.2f} s")
    limit_s = TORCHRUN_LIMIT_S * max(1.0, seconds_of_importing_torch() / QUIET_S)
    assert len(seconds) == 5 and slowest < limit_s


def test_rendezvous_is_understood_as_torch_writes_it(tmp_path):
    words = ["task=tiny", "dist=gloo"]
    tcp = load_config([*words, "dist.init=tcp://localhost:2950"], [CONF]).dist
    assert (tcp.backend, tcp.init, tcp.address) == ("gloo", "tcp", "localhost:2950")
    file = load_config([*words, f"dist.init=file://{tmp_path}/meet"], [CONF]).dist
    assert (file.init, file.path) == ("file", f"{tmp_path}/meet")
    assert load_config([*words, "dist.init=env://"], [CONF]).dist.init == "env"
