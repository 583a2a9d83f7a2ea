"""`python -m trainer.new NAME`: create a project, from a recipe, for a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A project that runs right away: what it is and what it reaches (result, minutes, machine)."""

    about: str
    reaches: str
    before: tuple[str, ...] = ()  # commands that make its data
    extras: str = "report"  # of the package
    needs: tuple[str, ...] = ()  # other packages
    train: str = "python -m trainer task=__NAME__ -n 2"
    proof: str = "layouts=ranks-2,accumulation steps=4"  # words of prove in its test


RECIPES: dict[str, Recipe] = {
    "cifar": Recipe(
        about="classify the images of CIFAR-10, with an augmentation of your own",
        proof="layouts=ranks-2 steps=2 data.global_batch=40",
        reaches="82% accuracy within 4 minutes on 2 busy CPU cores",
    ),
    "gpt": Recipe(
        about="a small GPT, on Python's standard library or your text",
        reaches="2.5 bits per byte within 6 minutes on 2 busy CPU cores",
    ),
    "gan": Recipe(
        about="two networks, two optimizers, two updates in a step",
        reaches="8 of 8 modes, 79% of the points near one, within 2 minutes on 2 busy CPU cores",
    ),
    "finetune": Recipe(
        about="fine-tune a text classifier of transformers",
        reaches="68% accuracy over 8 classes within 5 minutes on 2 busy CPU cores",
        extras="report,hf",
    ),
    "lora": Recipe(
        about="adapters of a language model (LoRA), as a folder for peft",
        reaches="perplexity 6.0, the base 9.4, within 6 minutes on 2 busy CPU cores",
        extras="report,hf",
        before=(
            "python -m trainer task=lm -n 2 task.options.learn=all task.options.files=100 "
            "task.options.context=256 run.steps=150 run.name=base checkpoint.export=hf",
        ),
        proof="layouts=ranks-2,accumulation steps=2 data.global_batch=4",
    ),
    "chat": Recipe(
        about="a small model that learns chats, and answers your questions",
        reaches="perplexity 1.08 on held-out answers within 4 minutes on 2 busy CPU cores",
        extras="report,hf",
        before=("python make_chats.py",),
        proof="layouts=ranks-2,accumulation steps=2 data.global_batch=4",
    ),
    "images": Recipe(
        about="classify pictures in folders, a folder for each class",
        reaches="91% accuracy over 3 classes within 2 minutes on 2 busy CPU cores",
        before=("python draw_pictures.py",),
        needs=("pillow",),
    ),
    "shards": Recipe(
        about="write a data set in shards, and train from them",
        reaches="60% accuracy within 3 minutes on 2 busy CPU cores",
        before=tuple(
            "python -m trainer.shards write task=__NAME__ task.options.shards=null "
            f"split={split} to=data/shards/{split} shard_mb=1"
            for split in ("train", "eval")
        ),
    ),
    "notebook": Recipe(
        about="a task in a notebook's cell, on one rank and on two, with its curves",
        reaches="98% accuracy within 1 minute on 2 busy CPU cores",
        extras="report,notebook",
        needs=("jupyterlab",),
        train="jupyter lab __NAME__.ipynb",
    ),
}


@dataclass(frozen=True)
class ClusterFile:
    """A file of scripts/deploy that starts runs on a cluster, and how it is used."""

    source: str
    place: str  # in the project
    command: str
    extras: str = ""  # of the package
    files: tuple[str, ...] = ()  # of the template


CLUSTERS = {
    "ray": ClusterFile("ray.sh", "ray.sh", "bash ray.sh", "ray,bucket"),
    "slurm": ClusterFile("slurm.sbatch", "train.sbatch", "sbatch train.sbatch"),
    "kubernetes": ClusterFile(
        "kubernetes.yaml",
        "kubernetes.yaml",
        "kubectl apply -f kubernetes.yaml -l 'lockstep in (claim,trainjob)'",
        files=("dockerfile", "dockerignore"),
    ),
    "skypilot": ClusterFile(
        "skypilot.yaml", "skypilot.yaml", "sky jobs launch skypilot.yaml", "bucket"
    ),
}
