"""A classifier of images in folders, with a model of transformers, of timm, or a new small one.

Without `task.options.data` it draws circles, squares and triangles: nothing is downloaded.
"""

import json
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ConfigError, Trainer, limit
from trainer.tasks import hf
from trainer.tasks.pictures import SHAPES, ImageFolder, crop, draw_shapes, of_torchvision
from trainer.tasks.timm_models import import_timm, is_of_timm, load_timm, repository_of_timm

EVAL_FOLDERS = ("val", "eval", "test")
MEAN = (0.485, 0.456, 0.406)  # of ImageNet, unless the model comes with its own
STD = (0.229, 0.224, 0.225)


@dataclass
class Options:
    data: str | None
    size: Annotated[int, limit(min=8)]
    model: str | None
    lora: Annotated[int, limit(min=1)] | None
    targets: str | list[str]
    transforms: str
    width: Annotated[int, limit(min=4)]
    shapes: Annotated[int, limit(min=len(SHAPES))]

    def __post_init__(self):
        if self.width % 4:
            raise ConfigError(f"task.options.width={self.width}: must be a multiple of 4")
        if self.transforms not in ("auto", "torchvision", "own"):
            raise ConfigError(f"""task.options.transforms={self.transforms}:
                must be auto, torchvision or own""")


class Images(Trainer):
    Options = Options

    def prepare(self):
        name = self.options.model
        hf.fetch(repository_of_timm(name) if is_of_timm(name) else name, beside=["config.json"])

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes: those of the folders, in their order."""
        if self.options.data is None:
            return SHAPES
        folder = self.folder("train")
        names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        if not names:
            raise ConfigError(f"""task.options.data={self.options.data}:
                {folder} must have a folder of images for each class""")
        return names

    def folder(self, split: str) -> Path:
        root = Path(str(self.options.data)).expanduser()
        names = ("train",) if split == "train" else EVAL_FOLDERS
        for name in names:
            if (root / name).is_dir():
                return root / name
        raise ConfigError(f"""task.options.data={self.options.data}: has no {" or ".join(names)};
            must be a folder with train/CLASS/*.jpg and val/CLASS/*.jpg""")

    def build_dataset(self, split):
        if split not in ("train", "eval"):
            raise ValueError("there are train and eval")
        size = self.options.size
        if self.options.data is None:
            return draw_shapes(self.options.shapes, size, is_train=split == "train")
        return ImageFolder(self.folder(split), self.classes, self.build_transform(split == "train"))

    def build_transform(self, is_train: bool) -> Any:
        """Return a function of a picture of PIL that returns a tensor uint8 (3, size, size)."""
        size, kind = self.options.size, self.options.transforms
        if kind != "own" and (found := of_torchvision(size, is_train)):
            return found
        if kind == "torchvision":
            raise ConfigError("""task.options.transforms=torchvision: is not installed;
                pip install torchvision, or give task.options.transforms=own""")
        return partial(crop, size=size, is_train=is_train)

    def build_model(self):
        options = self.options
        if options.model is None:
            model = build_small(options.width, options.size, len(self.classes))
        elif is_of_timm(options.model):
            model = load_timm(options.model, len(self.classes))
        else:
            model = hf.load_model(
                "AutoModelForImageClassification",
                options.model,
                say=partial(print, file=sys.stderr) if self.world.rank == 0 else None,
                id2label=dict(enumerate(self.classes)),
                ignore_mismatched_sizes=True,
            )
        if options.lora is None:
            return model
        return hf.adapt(model, options.lora, options.targets)

    def blocks(self, model):
        return hf.blocks_of(model)

    def tensor_plan(self):
        return "auto"

    @cached_property
    def pixels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each channel that the model was trained with."""
        mean, std = MEAN, STD
        name = self.options.model
        if is_of_timm(name):
            config = import_timm().get_pretrained_cfg(name)
            mean, std = (config.mean, config.std) if config else (mean, std)
        elif name is not None:
            file = hf.find(name).folder / "preprocessor_config.json"
            content = json.loads(file.read_bytes()) if file.is_file() else {}
            mean, std = content.get("image_mean", mean), content.get("image_std", std)
        return torch.tensor(mean).view(3, 1, 1) * 255, torch.tensor(std).view(3, 1, 1) * 255

    def augment(self, inputs, targets, random, train):
        mean, std = (part.to(inputs.device) for part in self.pixels)
        return (inputs - mean) / std, targets

    def loss(self, outputs, targets):
        return F.cross_entropy(logits_of(outputs), targets, reduction="none")

    def metrics(self, outputs, targets):
        return {"accuracy": (logits_of(outputs).argmax(1) == targets).float()}

    def predict(self, outputs):
        probabilities = logits_of(outputs).float().softmax(1)
        return {"class": probabilities.argmax(1), "probability": probabilities.amax(1)}


def logits_of(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def build_small(width: int, size: int, num_classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for wide in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.GroupNorm(4, wide)]
        layers += [nn.GELU(), nn.MaxPool2d(2)]
        channels = wide
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (size // 8) ** 2, num_classes))
