"""Pictures: in folders, a folder for each class, or drawn; scaled and cropped."""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch

from trainer import ConfigError, ResidentDataset
from trainer.base.errors import one_line
from trainer.shards.long_work import watched

SHAPES = ("circle", "square", "triangle")
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
CROP = (0.35, 1.0)  # share of a picture's area that a training crop has
SHARE_SHOWN = 7 / 8  # of the shorter side, in evaluation
MEAN = (0.485, 0.456, 0.406)  # of ImageNet, unless the model comes with its own
STD = (0.229, 0.224, 0.225)
BILINEAR = 2  # of Pillow


class ImageFolder(torch.utils.data.Dataset):
    """Pictures FOLDER/<class>/**, as the transform makes them, and the numbers of their classes.

    The transform may have a name, `by`, and a `digest` of what it does.
    """

    def __init__(self, folder: Path, classes: tuple[str, ...], transform: Any):
        try:
            import PIL  # noqa: F401
        except ModuleNotFoundError:
            raise ConfigError(f"task.options.data={folder}: needs Pillow; pip install it") from None
        self.transform = transform
        sizes_by_class: dict[int, dict[Path, int]] = {label: {} for label in range(len(classes))}
        every = ((n, path) for n, name in enumerate(classes) for path in (folder / name).rglob("*"))
        for label, path in watched(every, f"reading {folder}", "files"):
            if path.suffix.lower() in ENDINGS and path.is_file():
                sizes_by_class[label][path] = path.stat().st_size
        self.files = []
        for (label, sizes), name in zip(sizes_by_class.items(), classes, strict=True):
            if not sizes:
                raise ConfigError(f"task.options.data: {folder / name} has no image; add one")
            self.files += [(path, label) for path in sorted(sizes)]
        others = {path.name for path in folder.iterdir() if path.is_dir()} - {*classes}
        if others:
            raise ConfigError(f"""task.options.data: {folder / min(others)} is a class that
                train does not have; remove it, or add it there""")
        home = getattr(transform, "__module__", __name__).partition(".")[0]  # partial has none
        by = home if home == "torchvision" else getattr(transform, "by", "the task")
        own = [getattr(transform, "digest", "")]  # other pixels: resuming is refused
        facts = [
            (path.relative_to(folder).as_posix(), sizes_by_class[label][path])
            for path, label in self.files
        ]
        self.digest = hashlib.sha256(repr((by, *filter(None, own), facts)).encode()).hexdigest()
        self.source = f"{len(self.files):,} images in {folder}, scaled by {by}"

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        from PIL import Image, ImageOps

        path, label = self.files[index]
        try:
            with Image.open(path) as file:
                picture = ImageOps.exif_transpose(file).convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ConfigError(
                f"{path}: is not an image that Pillow reads ({error}); remove it"
            ) from None
        return self.transform(picture), label


def of_torchvision(size: int, is_train: bool, resample: int = BILINEAR) -> Any:
    """Return transforms of torchvision; None if it is not installed. `resample` is Pillow's number.

    Raises ConfigError if it is not the build for this torch.
    """
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError, OSError) as error:
        if getattr(error, "name", None) == "torchvision":
            return None
        raise ConfigError(f"""task.options.transforms: torchvision cannot be imported
            ({one_line(error)}); install its build for torch {torch.__version__}, or give
            task.options.transforms=own""") from None
    if is_train:
        crop = v2.RandomResizedCrop(size, scale=CROP, interpolation=resample)
        parts = [crop, v2.RandomHorizontalFlip()]
    else:
        parts = [v2.Resize(round(size / SHARE_SHOWN)), v2.CenterCrop(size)]
    return v2.Compose([v2.PILToTensor(), *parts])


def crop(picture: Any, size: int, is_train: bool, resample: int = BILINEAR) -> torch.Tensor:
    """Return a random part of a picture, mirrored or not; in evaluation the square in its middle.

    It is uint8 (3, size, size). Draws from torch's generator, which is seeded for each example.
    """
    import numpy

    width, height = picture.size
    across = down = SHARE_SHOWN * min(width, height)
    at_x = at_y = 0.5
    if is_train:
        share, shape, at_x, at_y = torch.rand(4).tolist()
        area = width * height * (CROP[0] + share * (CROP[1] - CROP[0]))
        ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
        across = min(width, math.sqrt(area * ratio))
        down = min(height, math.sqrt(area / ratio))
    left, top = at_x * (width - across), at_y * (height - down)
    part = picture.resize((size, size), resample, (left, top, left + across, top + down))
    pixels = torch.from_numpy(numpy.array(part)).permute(2, 0, 1)
    if is_train and torch.rand(()) < 0.5:
        pixels = pixels.flip(2)
    return pixels.contiguous()


def draw_shapes(count: int, size: int, is_train: bool) -> ResidentDataset:
    """Return pictures of one shape each, of any colour, size and place, under noise."""
    count = count if is_train else max(len(SHAPES), count // 4)
    random = torch.Generator().manual_seed(int(is_train))
    labels = torch.arange(count) % len(SHAPES)
    colours = torch.rand(2, count, 3, 1, 1, generator=random) * 100  # dark ones, and light ones
    colours[1] += 155
    is_light: torch.Tensor = torch.rand(count, 1, 1, 1, generator=random) < 0.5
    dark, light = colours
    fore = torch.where(is_light, light, dark)
    back = torch.where(is_light, dark, light)
    radius, at_x, at_y, turn = torch.rand(4, count, 1, 1, generator=random)
    radius = 0.2 + 0.15 * radius
    pixel_centres = (torch.arange(size) + 0.5) / size
    x = pixel_centres.view(1, 1, size) - (radius + at_x * (1 - 2 * radius))
    y = pixel_centres.view(1, size, 1) - (radius + at_y * (1 - 2 * radius))
    angle = torch.atan2(y, x) + turn * 2 * math.pi
    corners = torch.tensor([math.inf, 4.0, 3.0])[labels].view(-1, 1, 1)
    wedge = 2 * math.pi / corners
    within = torch.remainder(angle, wedge.clamp(min=1e-9)) - wedge / 2
    edge = torch.where(labels.view(-1, 1, 1) == 0, 1.0, torch.cos(wedge / 2) / torch.cos(within))
    is_inside = (torch.hypot(x, y) < radius * edge)[:, None]
    pictures = torch.where(is_inside, fore, back)
    pictures += torch.randn(pictures.shape, generator=random) * 10
    images = pictures.clamp(0, 255).to(torch.uint8)
    return ResidentDataset(images, labels, source="drawn circles, squares and triangles")
