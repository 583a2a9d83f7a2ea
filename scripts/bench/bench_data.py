"""Data in shards beside mosaicml-streaming, litData and a bare DataLoader, on the same images.

    python scripts/bench/bench_data.py [--images 2000] [--rounds 3] [--workers 2] [--only NAME ...]
    python scripts/bench/bench_data.py --shuffle
    python scripts/bench/bench_data.py --packing

Makes JPEGs, writes them as MDS shards of 4 MB (litData needs its own format) into an S3 server on
this machine (moto), and reads an epoch with each loader in a process of its own, in turns:
seconds to the first batch with an empty cache, with a full one, and in the middle of an epoch with
an empty one, beside the seconds that one shard alone takes; images/s of an epoch with an empty and
a full cache; bytes fetched. `plain` is a bare DataLoader over the files of a folder.

--shuffle: how well the shards' order mixes, beside a full shuffle and py1e of mosaicml-streaming:
how many different shards a batch of 256 has, how far apart in the epoch the rows of a shard are,
and the loss of a small model on data that is sorted by class.

--packing: padding and tokens/s of a small transformer on the paragraphs of Python's standard
library, padded to the longest of a batch and packed by PackedDataset.

Needs mosaicml-streaming, litdata, moto[server] and s3fs; what is missing is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

BATCH = 64
SHARD_BYTES = 2**22
SIDE = 224
LOADERS = {"plain": "PIL", "lockstep": "s3fs", "mosaicml": "streaming", "litdata": "litdata"}
ACCESS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def jpeg(number: int) -> bytes:
    """Return an image of about 15 kB."""
    from PIL import Image

    draw = np.random.default_rng(number)
    small = draw.integers(0, 255, (28, 28, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    data = io.BytesIO()
    image.save(data, "jpeg", quality=88)
    return data.getvalue()


def decode(data: bytes) -> torch.Tensor:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Images(torch.utils.data.Dataset):
    """Files of a folder, or their bytes."""

    def __init__(self, folder: Path, is_decoded: bool = True):
        self.paths = sorted(folder.glob("*.jpg"))
        self.is_decoded = is_decoded

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        data = self.paths[index].read_bytes()
        return decode(data) if self.is_decoded else data, index % 10


def make_data(folder: Path, count: int, names: list[str]) -> None:
    """Write the images as files, as MDS shards, and in litData's format."""
    (folder / "files").mkdir(parents=True)
    for number in range(count):
        (folder / "files" / f"{number:06d}.jpg").write_bytes(jpeg(number))
    from trainer.shards.__main__ import write_shards

    write_shards(Images(folder / "files", False), str(folder / "mds"), SHARD_BYTES, 0)
    if "litdata" in names:
        run_one("litdata-write", folder, 0, 0)


def loop(batches: Any, first: int = 0) -> dict[str, float]:
    """Read batches to the end; return seconds to the first one, and images/s after it."""
    began = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    ready = time.perf_counter()
    count = 0
    for batch in iterator:
        count += len(batch[1])
    return {"first_s": ready - began, "rate": count / (time.perf_counter() - ready)}


def read_plain(folder: Path, cache: Path, workers: int, middle: bool) -> dict[str, float]:
    from torch.utils.data import DataLoader

    data = Images(folder / "files")
    return loop(DataLoader(data, BATCH, shuffle=True, num_workers=workers, drop_last=True))


def to_example(row: Any) -> tuple[torch.Tensor, int]:
    return decode(row[0]), int(row[1])


def read_lockstep(folder: Path, cache: Path, workers: int, middle: bool) -> dict[str, float]:
    """Read as a run does: order, cut, workers and fetcher of training."""
    import s3fs  # noqa: F401  # imports are not counted, of no loader
    from torch.utils.data import default_collate

    from trainer import ShardedDataset
    from trainer.core.config.compose import load_config
    from trainer.core.data.batches import Batches
    from trainer.core.data.order import BatchSplit
    from trainer.core.distributed.watch.heartbeat import Heartbeat
    from trainer.core.distributed.world import World

    words = [f"data.workers={workers}", f"data.global_batch={BATCH}", "data.timeout_s=0"]
    config = load_config(["task=text", *words])
    began = time.perf_counter()
    data = ShardedDataset("s3://bench/mds", decode=to_example, cache=cache)
    group: Any = SimpleNamespace(world=World())
    heartbeat = Heartbeat(memoryview(bytearray(4096)))
    ranks: Any = SimpleNamespace(group=group, heartbeat=heartbeat)
    prepare: Any = SimpleNamespace(seed=0, device=torch.device("cpu"), collate=default_collate)
    batches = Batches(data, data.sampling, config, BatchSplit(), 0, 1, prepare, ranks)
    steps = batches.steps_per_epoch
    opened = time.perf_counter() - began
    try:
        epoch = batches.take(steps // 2 if middle else 0, batches.steps_per_epoch, steps)
        found = loop(local.pieces[0][0] for local in epoch)
    finally:
        batches.close()
    return {**found, "first_s": found["first_s"] + opened}


def read_one_shard(folder: Path, cache: Path, workers: int, middle: bool) -> dict[str, float]:
    import s3fs  # noqa: F401  # imports are not counted, of no loader

    from trainer import ShardedDataset

    began = time.perf_counter()
    ShardedDataset("s3://bench/mds", decode=to_example, cache=cache)[0]
    return {"first_s": time.perf_counter() - began}


def read_mosaicml(folder: Path, cache: Path, workers: int, middle: bool) -> dict[str, float]:
    from streaming import StreamingDataLoader, StreamingDataset

    class Decoded(StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            row = super().__getitem__(index)
            return decode(row["0"]), int(row["1"])

    began = time.perf_counter()
    more = {"shuffle": True, "shuffle_algo": "py1e", "batch_size": BATCH}
    data = Decoded(remote="s3://bench/mds", local=str(cache), **more)
    loader = StreamingDataLoader(data, BATCH, num_workers=workers, drop_last=True)
    if middle:
        state = {"epoch": 0, "sample_in_epoch": len(data) // 2 // BATCH * BATCH}
        more = {
            "num_canonical_nodes": 1,
            "shuffle_seed": data.shuffle_seed,
            "initial_physical_nodes": 1,
        }
        loader.load_state_dict({**state, **more})
    opened = time.perf_counter() - began
    found = loop(loader)
    return {**found, "first_s": found["first_s"] + opened}


def read_litdata(folder: Path, cache: Path, workers: int, middle: bool) -> dict[str, float]:
    import litdata
    from litdata.streaming import downloader
    from litdata.streaming.dataset import Dir

    # its client refuses http://, which the server on this machine speaks
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True

    class Decoded(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return decode(row["image"]), row["label"]

    began = time.perf_counter()
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    place = Dir(path=str(cache), url="s3://bench/lit")
    data = Decoded(place, shuffle=True, drop_last=True, storage_options=options)
    loader = litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, drop_last=True, shuffle=True
    )
    opened = time.perf_counter() - began
    if middle:
        return {}
    found = loop(loader)
    return {**found, "first_s": found["first_s"] + opened}


def to_lit(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes(), "label": int(Path(path).stem) % 10}


def write_litdata(folder: Path) -> None:
    import litdata

    paths = [str(path) for path in sorted((folder / "files").glob("*.jpg"))]
    words: Any = {"chunk_bytes": SHARD_BYTES, "num_workers": 1}
    litdata.optimize(fn=to_lit, inputs=paths, output_dir=str(folder / "lit"), **words)


READ = {
    "plain": read_plain,
    "lockstep": read_lockstep,
    "one-shard": read_one_shard,
    "mosaicml": read_mosaicml,
    "litdata": read_litdata,
}


def run_one(name: str, folder: Path, workers: int, middle: int) -> dict[str, float]:
    """Run a loader in a process of its own; its last line of output is the result."""
    words = ["--one", name, str(folder), str(workers), str(middle)]
    command = [sys.executable, "-W", "ignore", __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}


def be_one(name: str, folder: Path, workers: int, middle: int) -> None:
    torch.set_num_threads(1)
    if name == "litdata-write":
        write_litdata(folder)
        print("{}")
        return
    cache = folder / f"cache-{name}"
    found = READ[name](folder, cache, workers, bool(middle))
    files = [path for path in cache.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files if path.suffix in (".mds", ".bin")]
    print(json.dumps({**found, "bytes": sum(sizes)}))
    sys.stdout.flush()
    os._exit(0)  # litData's threads would keep the process


def serve(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start an S3 server with the shards."""
    import s3fs

    port = 5000 + os.getpid() % 20_000
    code = f"from moto.server import main; main(['-p', '{port}'])"
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-c", code], stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}"
    os.environ |= {**ACCESS, "AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url}
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    for _ in range(100):
        try:
            system = s3fs.S3FileSystem()
            system.mkdir("bench")
            break
        except Exception:
            time.sleep(0.2)
    for name in ("mds", "lit"):
        if (folder / name).is_dir():
            system.put(str(folder / name), f"bench/{name}", recursive=True)
    return process, url


def compare(count: int, rounds: int, workers: int, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_data(folder, count, names)
        server, _ = serve(folder)
        try:
            found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
            for _ in range(rounds):
                for name in names:
                    measure(name, folder, workers, found[name])
        finally:
            server.kill()
            server.wait()
    show(found)


def measure(name: str, folder: Path, workers: int, into: dict[str, list[float]]) -> None:
    cache = folder / f"cache-{name}"
    shutil.rmtree(cache, ignore_errors=True)
    cold = run_one(name, folder, workers, 0)
    warm = run_one(name, folder, workers, 0)
    shutil.rmtree(cache, ignore_errors=True)
    middle = run_one(name, folder, workers, 1) if name != "plain" else {}
    one = run_one("one-shard", folder, 0, 0) if name == "lockstep" else {}
    rows = {
        "one shard, cold (s)": one.get("first_s"),
        "first batch, cold (s)": cold.get("first_s"),
        "first batch, warm (s)": warm.get("first_s"),
        "first batch in the middle, cold (s)": middle.get("first_s"),
        "images/s, cold": cold.get("rate"),
        "images/s, warm": warm.get("rate"),
        "MB fetched": cold.get("bytes", 0) / 1e6,
    }
    for row, value in rows.items():
        if value:
            into.setdefault(row, []).append(value)


def show(found: dict[str, dict[str, list[float]]]) -> None:
    rows = list(dict.fromkeys(row for each in found.values() for row in each))
    print(f"{'median':38}" + "".join(f"{name:>12}" for name in found))
    for row in rows:
        cells = []
        for each in found.values():
            value = statistics.median(each[row]) if row in each else None
            cells.append(f"{'-' if value is None else format(value, '.4g'):>12}")
        print(f"{row:38}" + "".join(cells))


# The quality of the shuffle -----------------------------------------------------------------------


def orders_of(num_shards: int, rows: int, batch: int) -> dict[str, torch.Tensor]:
    """Return an epoch of each shuffle."""
    from trainer.core.data.sampling.shard_order import ShardShuffle
    from trainer.core.rng.philox import Order

    size = num_shards * rows
    positions = torch.arange(size)
    found = {"full": Order(0, 0, size)(positions)}
    counts = torch.full((num_shards,), rows)
    for lanes, window in ((4, 2), (16, 1), (16, 4), (32, 4), (64, 2), (64, 4)):
        sampling = ShardShuffle(counts, lanes, window)
        found[f"{lanes} lanes, {window}"] = sampling.order(0, 0, batch)(positions)
    if importlib.util.find_spec("streaming"):
        from streaming.base.shuffle.py1e import get_shuffle_py1e

        for block in (4 * rows, 2**18):
            order = get_shuffle_py1e(counts.numpy(), 1, 0, 0, block)
            found[f"py1e, {block:,}"] = torch.from_numpy(order.astype(np.int64))
    return found


def compare_shuffles() -> None:
    """Print measures of the orders, and the loss of a model on data sorted by class."""
    num_shards, rows, batch = 512, 256, 256
    inputs, labels, tests, answers = sorted_classes(num_shards * rows)
    print(f"{num_shards} shards of {rows} rows, batches of {batch}; means")
    print(f"{'order':>16}{'shards of a batch':>20}{'spread of a shard':>20}{'train':>9}{'test':>9}")
    for name, order in orders_of(num_shards, rows, batch).items():
        shards = (order // rows)[: len(order) // batch * batch].view(-1, batch)
        different = statistics.mean(len(row.unique()) for row in shards)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        spread = float(place.view(num_shards, rows).double().std(1).mean()) / len(order)
        train, test = fit(inputs[order], labels[order], tests, answers, batch)
        print(f"{name:>16}{different:>20.1f}{spread:>20.3f}{train:>9.4f}{test:>9.4f}")


def sorted_classes(count: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(50, 32, generator=draw)
    labels = torch.randint(50, (count,), generator=draw).sort().values
    inputs = centres[labels] + 1.5 * torch.randn(count, 32, generator=draw)
    answers = torch.randint(50, (8192,), generator=draw)
    return inputs, labels, centres[answers] + 1.5 * torch.randn(8192, 32, generator=draw), answers


def fit(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    tests: torch.Tensor,
    answers: torch.Tensor,
    batch: int,
) -> tuple[float, float]:
    """Return the mean loss of the last tenth of an epoch, and that of the test data."""
    torch.manual_seed(0)
    wide = torch.nn.Linear(32, 256)
    model = torch.nn.Sequential(wide, torch.nn.ReLU(), torch.nn.Linear(256, 50))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    pairs = zip(inputs.split(batch), labels.split(batch), strict=True)
    for some, wanted in pairs:
        loss = torch.nn.functional.cross_entropy(model(some), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        test = torch.nn.functional.cross_entropy(model(tests), answers)
    return statistics.mean(losses[-len(losses) // 10 :]), float(test)


# Packed rows -----------------------------------------------------------------------------------


class Paragraphs(torch.utils.data.Dataset):
    """Paragraphs of Python's standard library as bytes, of at most `most`."""

    def __init__(self, most: int, files: int = 60):
        paths = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
        texts = [
            part for path in paths for part in path.read_bytes().split(b"\n\n") if part.strip()
        ]
        self.texts = [text[:most] for text in texts]
        self.lengths = [len(text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.texts[index]), dtype=torch.uint8).long()


class Encoder(torch.nn.Module):
    """Two layers of width 128 on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 128)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        size = tokens.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        mask = (segments[:, :, None] == segments[:, None, :]) & causal
        blocked = ~mask.repeat_interleave(4, 0)
        return self.head(self.layers(self.embed(tokens), mask=blocked))


def padded_batches(data: Paragraphs, budget: int, rows: int) -> list[tuple[torch.Tensor, ...]]:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    batches = []
    for first in range(0, len(order) - rows, rows):
        some = [data[index] for index in order[first : first + rows]]
        tokens = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        sizes = torch.tensor([len(each) for each in some])
        batches.append((tokens, (torch.arange(tokens.shape[1]) < sizes[:, None]).long()))
    return batches


def packed_batches(data: Paragraphs, budget: int, rows: int) -> list[tuple[torch.Tensor, ...]]:
    from trainer import PackedDataset

    packed = PackedDataset(data, data.lengths, budget)
    order = torch.randperm(len(packed), generator=torch.Generator().manual_seed(0)).tolist()
    batches = []
    for first in range(0, len(order) - rows, rows):
        some = [packed[index] for index in order[first : first + rows]]
        batches.append(tuple(torch.stack([row[n] for row in some]) for n in ("tokens", "segments")))
    return batches


def compare_packing(rounds: int) -> None:
    """Print the share of padding, and the tokens/s of 12 steps, medians of rounds in turns."""
    budget = 512
    data = Paragraphs(budget)
    print(
        f"{len(data):,} sequences, {statistics.mean(data.lengths):.0f} bytes each, at most {budget}"
    )
    made = {
        "padded": padded_batches(data, budget, 32),
        "packed": packed_batches(data, budget, 8),
    }
    model = Encoder()
    rates: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, batches in made.items():
            began = time.perf_counter()
            real = 0
            for tokens, segments in batches[:12]:
                logits = model(tokens, segments)
                values = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
                )
                weights = (segments[:, 1:] > 0).flatten()
                (values * weights).sum().div(weights.sum()).backward()
                real += int((segments > 0).sum())
            rates[name].append(real / (time.perf_counter() - began))
    for name, batches in made.items():
        real = sum(int((segments > 0).sum()) for _, segments in batches)
        padding = 1 - real / sum(tokens.numel() for tokens, _ in batches)
        print(f"{name:8} {padding:6.1%} padding, {statistics.median(rates[name]):,.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(LOADERS), choices=list(LOADERS))
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, folder, workers, middle = given.one
        be_one(name, Path(folder), int(workers), int(middle))
    elif given.shuffle:
        compare_shuffles()
    elif given.packing:
        compare_packing(given.rounds)
    else:
        names = [name for name in given.only if importlib.util.find_spec(LOADERS[name])]
        compare(given.images, given.rounds, given.workers, names)


if __name__ == "__main__":
    main()
