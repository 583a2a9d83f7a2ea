"""A classifier of images in folders, with a model of transformers, of timm, or a new small one.

Without `task.options.data` it draws circles, squares and triangles: nothing is downloaded.
"""

import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ConfigError, ResidentDataset, Trainer, limit
from trainer.hf import loading, task_exports
from trainer.hf.pictures import (
    BILINEAR,
    MEAN,
    SHAPES,
    STD,
    ImageFolder,
    crop,
    draw_shapes,
    of_torchvision,
)
from trainer.hf.processors import Processed, find_values, load_processor
from trainer.hf.timm_models import import_timm, is_of_timm, load_timm, repository_of_timm

EVAL_FOLDERS = ("val", "eval", "test")


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
        source = repository_of_timm(name) if is_of_timm(name) else name
        loading.fetch(source, beside=["config.json"])

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
        is_train = split == "train"
        if self.options.data is None:
            drawn = draw_shapes(self.options.shapes, self.options.size, is_train)
            return drawn if is_train or self.processor is None else self.process(drawn)
        return ImageFolder(self.folder(split), self.classes, self.build_transform(is_train))

    def build_transform(self, is_train: bool) -> Any:
        """Return a function of a picture of PIL that returns a tensor uint8 (3, size, size).

        Of a model of transformers, evaluation has what its processor makes: float32, and final.
        """
        size, kind = self.options.size, self.options.transforms
        if self.processor is not None and not is_train:
            return Processed(self.processor)
        resample = getattr(self.processor, "resample", None)
        resample = int(resample) if isinstance(resample, int) else BILINEAR
        if kind != "own" and (found := of_torchvision(size, is_train, resample)):
            return found
        if kind == "torchvision":
            raise ConfigError("""task.options.transforms=torchvision: is not installed;
                pip install torchvision, or give task.options.transforms=own""")
        return partial(crop, size=size, is_train=is_train, resample=resample)

    def process(self, drawn: ResidentDataset) -> ResidentDataset:
        """Return drawn pictures as the model's processor makes them."""
        from PIL import Image

        images, labels = drawn.tensors
        prepare = Processed(self.processor)
        pictures = (Image.fromarray(each.numpy()) for each in images.permute(0, 2, 3, 1))
        return ResidentDataset(torch.stack([*map(prepare, pictures)]), labels, source=drawn.source)

    @cached_property
    def processor(self) -> Any:
        """The processor of a model of transformers, at the run's size; None for other models."""
        name = self.options.model
        is_other = name is None or is_of_timm(name)
        return None if is_other else load_processor(name, self.options.size)

    def pipeline_calls(self):
        """Return what an export must answer as the run does: it is compared with that."""
        if self.processor is None:  # and nothing that can be exported
            return []
        if self.options.data is None:
            drawn = draw_shapes(self.options.shapes, self.options.size, is_train=False).tensors[0]
            pictures = [drawn[row].permute(1, 2, 0).contiguous() for row in (0, -1)]
            rows = self.build_dataset("eval").tensors[0][[0, -1]]
        else:
            folder = self.folder("eval" if self.config.eval.splits else "train")
            dataset = ImageFolder(folder, self.classes, self.build_transform(is_train=False))
            pictures = [str(dataset.files[row][0].absolute()) for row in (0, -1)]
            rows = torch.stack([dataset[row][0] for row in (0, -1)])
        pixels, _ = self.augment(rows, None, None, train=False)
        return task_exports.image_classification(pictures, pixels)

    def build_model(self):
        options = self.options
        if options.model is None:
            model = build_small(options.width, options.size, len(self.classes))
        elif is_of_timm(options.model):
            model = load_timm(options.model, len(self.classes))
        else:
            model = loading.load_model(
                "AutoModelForImageClassification",
                options.model,
                say=partial(print, file=sys.stderr) if self.world.rank == 0 else None,
                **task_exports.named_classes(self.classes),
            )
        if options.lora is None:
            return model
        return loading.adapt(model, options.lora, options.targets)

    def blocks(self, model):
        return loading.blocks_of(model)

    def tensor_plan(self):
        return "auto"

    @cached_property
    def scaling(self) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """The channels that the model takes, in order, and their factors and what is added."""
        if self.processor is not None:
            return find_values(self.processor)
        mean, std = MEAN, STD
        if self.options.model is not None:
            config = import_timm().get_pretrained_cfg(self.options.model)
            mean, std = (config.mean, config.std) if config else (mean, std)
        factors = 1 / (torch.tensor(std).view(3, 1, 1) * 255)
        return [0, 1, 2], factors, -torch.tensor(mean).view(3, 1, 1) * 255 * factors

    def augment(self, inputs, targets, random, train):
        if inputs.is_floating_point():  # as the processor has made them
            return inputs, targets
        order, factors, added = self.scaling
        if order != [0, 1, 2]:
            inputs = inputs[:, order]
        return inputs * factors.to(inputs.device) + added.to(inputs.device), targets

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
