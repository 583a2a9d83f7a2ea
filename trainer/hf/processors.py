"""Image processors of transformers: what a model's pictures are made by, at the size of a run."""

import hashlib
import json
from typing import Any

import torch

from trainer import ConfigError
from trainer.hf import loading
from trainer.hf.hub import import_packages
from trainer.hf.library import quiet_transformers
from trainer.hf.lora import in_one_line
from trainer.hf.pictures import MEAN, SHARE_SHOWN, STD

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
SIZE_FIELDS = ("size", "crop_size", "pad_size")
TRIED_SHAPES = ((48, 32), (32, 48), (40, 40))  # width and height of the pictures that are tried
COLOURS = 8  # that are drawn to compare
BILINEAR = 2
COLOUR_TOLERANCE = 1e-5  # of values, relative to the largest


def load_processor(name: str, size: int, key: str = loading.MODEL_KEY) -> Any:
    """Return the processor of a model, which makes pictures of `size`; without one in its files, a
    new one with the mean and the deviation of ImageNet.

    Raises ConfigError if it makes pictures of several sizes, or cannot make these.
    """
    transformers = import_packages("transformers")
    folder = loading.find(name, key).folder
    with quiet_transformers(), in_one_line(f"{key}={name}: has no image processor to load"):
        if not any((folder / file).is_file() for file in PROCESSOR_FILES):
            return transformers.CLIPImageProcessor(
                size={"shortest_edge": round(size / SHARE_SHOWN)},
                crop_size={"height": size, "width": size},
                resample=BILINEAR,
                image_mean=list(MEAN),
                image_std=list(STD),
            )
        plain = {"local_files_only": True, "trust_remote_code": False}
        processor = transformers.AutoImageProcessor.from_pretrained(folder, **plain)
        sides = _sides(processor)
        if len(sides) == 1 and sides != {size}:
            processor = _scale(processor, size / min(sides))
            sides = _sides(processor)
    if sides != {size}:
        shown = ", ".join(map(str, sorted(sides))) or "several sides"
        raise ConfigError(f"""task.options.size={size}: the model's {type(processor).__name__} makes
            pictures of {shown} pixels a side; must make squares of one size, take another model""")
    return processor


def _sides(processor: Any) -> set[int]:
    """Return the heights and widths of what a processor makes of pictures of several shapes."""
    from PIL import Image

    sides: set[int] = set()
    for shape in TRIED_SHAPES:
        sides |= {*prepare(Image.new("RGB", shape), processor).shape[1:]}
    return sides


def _scale(processor: Any, factor: float) -> Any:
    """Return a processor whose sizes are `factor` times as large."""
    values = processor.to_dict()
    for name in SIZE_FIELDS:
        if isinstance(sizes := values.get(name), dict):
            values[name] = {side: round(n * factor) for side, n in sizes.items() if n}
    return type(processor).from_dict(values)


def prepare(picture: Any, processor: Any) -> torch.Tensor:
    """Return the pixels (3, height, width) that a processor makes of a picture of PIL."""
    pixels: torch.Tensor = processor(images=picture, return_tensors="pt")["pixel_values"][0]
    return pixels


class Processed:
    """Makes pictures into what a model takes, by its processor, as a pipeline does."""

    def __init__(self, processor: Any):
        self._processor = processor
        self.by = type(processor).__name__
        content = json.dumps(processor.to_dict(), sort_keys=True, default=str)
        self.digest = hashlib.sha256(content.encode()).hexdigest()

    def __call__(self, picture: Any) -> torch.Tensor:
        return prepare(picture, self._processor)


def find_values(
    processor: Any, key: str = loading.MODEL_KEY
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return how a processor makes values of a picture's, from 0 to 255: the channel that each of
    the model's is taken from, its factor and what is added, (3, 1, 1).

    They are read off pictures of one colour. Raises ConfigError if it does something else to them.
    """
    from PIL import Image

    def of(colour: list[int]) -> torch.Tensor:
        pixels = prepare(Image.new("RGB", TRIED_SHAPES[-1], tuple(colour)), processor)
        height, width = pixels.shape[1:]
        return pixels[:, height // 2, width // 2].double()

    added = of([0, 0, 0])
    matrix = torch.stack([(of([255 * (i == c) for i in range(3)]) - added) / 255 for c in range(3)])
    order = matrix.abs().argmax(0)
    factors = matrix.gather(0, order[None])[0]
    for colour in torch.randint(256, (COLOURS, 3), generator=torch.Generator().manual_seed(0)):
        wanted = of(colour.tolist())
        far = (colour[order] * factors + added - wanted).abs().max() / wanted.abs().max()
        if not far <= COLOUR_TOLERANCE:
            raise ConfigError(f"""{key}: its {type(processor).__name__} changes pictures by more
                than a factor for each channel, as training would have to; take another model""")
    shape = (3, 1, 1)
    return order.tolist(), factors.float().view(shape), added.float().view(shape)
