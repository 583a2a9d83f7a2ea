"""The CIFAR-10 images (A. Krizhevsky, 2009): the bundled part, or the full set as published."""

import zlib
from functools import cache
from pathlib import Path

import torch

from trainer import ConfigError
from trainer.tasks.data.download import fetch

BUNDLED = Path(__file__).parent / "cifar10-5000-1000.z"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = {  # of the files in the archive, so that another archive of them is accepted too
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


@cache
def load(split: str, data: str, root: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return uint8 images (N, 3, 32, 32), int64 labels (N,), and their source as a string.

    The eval split, also named test, is CIFAR-10's test set.
    """
    if split not in ("train", "eval", "test"):
        raise ValueError("there are train, eval and test")
    files = [Path(root) / name for name in SHA256]
    missing = [file.name for file in files if not file.is_file()]
    if missing and data == "download":
        fetch(URL, root, SHA256, "task.options.data=download")
        missing = []
    if missing and data == "full":
        advice = "give task.options.data=download or task.options.data=bundled"
        raise ConfigError(f"task.options.root={root}: has no {missing[0]}; {advice}")
    if missing or data == "bundled":
        raw = torch.frombuffer(bytearray(zlib.decompress(BUNDLED.read_bytes())), dtype=torch.uint8)
        images = (
            raw[6000:]
            .view(6, 1000, 3, 32, 32)
            .cumsum(3, dtype=torch.uint8)
            .cumsum(4, dtype=torch.uint8)
        )
        images[:, :, 1:] += images[:, :, :1].clone()
        labels, source = raw[:6000].view(6, 1000), "the bundled part of CIFAR-10"
    else:
        raw = torch.frombuffer(
            bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
        )
        raw, source = raw.view(6, 10000, 3073), f"the full CIFAR-10 in {root}"
        labels, images = raw[..., 0], raw[..., 1:].unflatten(2, (3, 32, 32))
    part = slice(-1) if split == "train" else slice(-1, None)
    return images[part].flatten(0, 1), labels[part].flatten().long(), source
