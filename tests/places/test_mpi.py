"""dist.backend=mpi over Open MPI, compared with gloo.

The ranks run this file as a script: `test_mpi.py PORT BODY...`.
"""

import gc
import itertools
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.launch import PATHS, without_noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from trainer.base.errors import ConfigError, RunError
from trainer.core.strategy.ddp import open_hook
from trainer.core.strategy.modules.batchnorm import synchronize
from trainer.places import mpi

PYTHON = [
    sys.executable,
    "-W",
    "error",
    "-W",
    "ignore::DeprecationWarning",
]  # Python 3.12 warns of any fork
LIMIT_S = 180
FORMED = itertools.count()


def why_not():
    if not shutil.which("mpirun"):
        return "needs mpirun"
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if "Open MPI" not in version.stdout:
        return "needs the mpirun of Open MPI"
    return None if find_spec("mpi4py") else "needs mpi4py"


needs_mpi = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def mpirun(tmp_path_factory):
    """Return `mpirun(size, *bodies)`, which runs functions of this file on `size` ranks and
    returns (exit code, output)."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(size, *bodies):
        options = [
            "--oversubscribe",
            "--bind-to",
            "none",
            "--timeout",
            str(LIMIT_S),
            "-n",
            str(size),
        ]
        options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        for place in (
            "orte_tmpdir_base",
            "btl_vader_backing_directory",
        ):  # pytest removes the files that it leaves there
            options += ["--mca", place, str(tmp_path_factory.mktemp("mpi"))]
        names = [body.__name__ for body in bodies]
        done = subprocess.run(
            ["mpirun", *options, *PYTHON, __file__, str(server.port), *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": PATHS,
                "OMP_NUM_THREADS": "1",
            },
        )
        return done.returncode, without_noise(done.stdout)

    return run


@pytest.fixture(scope="module")
def compared(mpirun):
    """Return a function that gives (exit code, output) of the comparisons on `size` ranks.

    Launches are shared, because imports alone take 4 s per rank.
    """
    launches = {}

    def run(size):
        if size not in launches:
            bodies = [wrong_ranks, collectives, trainings]
            launches[size] = mpirun(size, *bodies, *([times_out] if size == 3 else []))
        return launches[size]

    return run


@contextmanager
def group(backend, rank, size, store):
    store = dist.PrefixStore(str(next(FORMED)), store)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    yield
    gc.collect()  # a DDP wrapper that outlives gloo's group hangs the exit
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_gives_the_result_of_gloo(compared, size):
    _, printed = compared(size)
    assert printed.count("collectives are equal") == size, printed


def collectives(*place):
    with group(mpi.register(), *place):
        assert dist.get_backend() == mpi.register() == "mpi4py"
        ours = {name: body() for name, body in cases(*place[:2])}
    with group("gloo", *place):
        for name, body in cases(*place[:2]):
            for got, wanted in zip(ours[name], body(), strict=True):
                assert torch.equal(got, wanted), f"{name}: {got}, and over gloo {wanted}"
    with group(mpi.register(), *place):  # a sweep opens one process group after the other
        ranks = [None] * place[1]
        dist.all_gather_object(ranks, place[0])
        assert ranks == [*range(place[1])]
    print("collectives are equal")


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool]
OPS = [
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.PRODUCT,
]
LAYOUTS = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "strided": lambda tensor: tensor[:, ::2],
    "scalar": lambda tensor: tensor[1, 2],
    "empty": lambda tensor: tensor[:0],
}


def cases(rank, size):
    """Yield (name, body) for each collective, operation, dtype and layout.

    Numbers are small integers, so sums are exact in any order.
    """
    plain, *others = LAYOUTS.items()
    for (layout, view), dtype in [(plain, d) for d in DTYPES] + [
        (o, torch.float16) for o in others
    ]:

        def made(add=rank, view=view, dtype=dtype):
            tensor = view(torch.arange(1, 13).add(add).remainder(5).reshape(3, 4).to(dtype))
            return (
                tensor if dist.get_backend() == "mpi4py" else tensor.contiguous()
            )  # gloo needs them contiguous

        for collective, op in itertools.product(REDUCTIONS, OPS):
            if dtype.is_floating_point or op != dist.ReduceOp.AVG:
                yield (
                    f"{collective.__name__} {op} {dtype} {layout}",
                    partial(collective, rank, size, made, op),
                )
        for collective in MOVES:
            yield f"{collective.__name__} {dtype} {layout}", partial(collective, rank, size, made)


def all_reduce(rank, size, made, op):
    tensor = made()
    dist.all_reduce(tensor, op)
    return [tensor]


def all_reduce_async(rank, size, made, op):
    tensors = [made(), made(rank + 1)]
    works = [dist.all_reduce(tensor, op, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


def all_reduce_future(rank, size, made, op):
    future = dist.all_reduce(made(), op, async_op=True).get_future()
    return future.then(lambda done: [*done.value(), *done.value()]).wait()


def reduce(rank, size, made, op):
    tensor = made()
    dist.reduce(tensor, size - 1, op)
    return [tensor] if rank == size - 1 else []


def reduce_scatter(rank, size, made, op):
    output = made()
    dist.reduce_scatter(output, [made(rank + number) for number in range(size)], op)
    return [output]


def reduce_scatter_single(rank, size, made, op):
    output = made().flatten()
    joined = torch.cat([made(rank + number).flatten() for number in range(size)])
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, joined, op)
    return [output]


def broadcast(rank, size, made):
    tensor = made()
    dist.broadcast(tensor, size - 1)
    return [tensor]


def all_gather(rank, size, made):
    outputs = [made() for _ in range(size)]
    dist.all_gather(outputs, made())
    return outputs


def all_gather_single(rank, size, made):
    output = torch.cat([made().flatten() for _ in range(size)])
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, made().flatten())
    return [output]


def gather(rank, size, made):
    outputs = [made() for _ in range(size)] if rank == 1 else None
    dist.gather(made(), outputs, 1)
    return outputs or []


def scatter(rank, size, made):
    output = made()
    dist.scatter(output, [made(number) for number in range(size)] if rank == 1 else None, 1)
    return [output]


def all_to_all(rank, size, made):
    if torch.__version__ < (2, 12):
        return []  # gloo has none to compare with
    outputs = [made() for _ in range(size)]
    dist.all_to_all(outputs, [made(rank * number) for number in range(size)])
    return outputs


def all_to_all_single(rank, size, made):
    """Exchange equal numbers of rows with every rank; then receive rank + 1 rows from each."""
    output = torch.cat([made().flatten() for _ in range(size)])
    dist.all_to_all_single(
        output, torch.cat([made(rank * number).flatten() for number in range(size)])
    )
    row = made().reshape(1, -1)
    rows = torch.cat([row] * sum(range(size + 1)))
    dist.all_to_all_single(
        rows, torch.cat([row] * size * (rank + 1)), list(range(1, size + 1)), [rank + 1] * size
    )
    return [output, rows]


def send_and_receive(rank, size, made):
    """Send around a ring, each rank sending first; then from rank 0 to rank 1."""
    received = made()
    ring = [(dist.isend, made(), (rank + 1) % size), (dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in ring]):
        work.wait()
    if rank == 0:
        dist.send(received, 1, tag=7)
    elif rank == 1:
        dist.recv(received, 0, tag=7)
    return [received]


REDUCTIONS = [
    all_reduce,
    all_reduce_async,
    all_reduce_future,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
]
MOVES = [
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    send_and_receive,
]


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("size", [2, 3])
def test_training_with_forked_workers_equals_gloos(compared, size):
    _, printed = compared(size)
    assert printed.count("trainings are equal") == size, printed


@pytest.mark.slow
@needs_mpi
def test_a_finished_run_exits_with_0_and_open_mpi_prints_nothing(compared):
    code, printed = compared(2)
    for said in ("wrong ranks are refused", "collectives are equal", "trainings are equal"):
        printed = printed.replace(said, "")
    assert (code, printed.strip()) == (0, "")


def trainings(rank, size, store):
    """Compare training with each comm hook over mpi and gloo. Gloo sums fp16 in fp16.

    PowerSGD over gloo starts its all-reduces in gloo's threads, in any order, so it hangs.
    """
    limits = {"none": 1e-12, "parameter_server": 1e-12, "fp16": 2e-3, "powersgd": 5e-2}
    with group(mpi.register(), rank, size, store):
        ours = {hook: train(hook, rank, size) for hook in limits}
        for hook, (_, weights) in ours.items():
            assert all(torch.equal(weights, other) for other in gathered(weights)), (
                f"{hook}: weights differ by rank"
            )
    with group("gloo", rank, size, store):
        theirs = {hook: train(hook, rank, size) for hook in limits if hook != "powersgd"}
    theirs["powersgd"] = theirs["fp16"]
    for hook, limit in limits.items():
        for got, wanted in zip(ours[hook], theirs[hook], strict=True):
            assert (got - wanted).norm() <= limit * wanted.norm(), (
                f"{hook}: {got}, and over gloo {wanted}"
            )
    print("trainings are equal")


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def train(hook, rank, size):
    """Train twelve steps with SyncBatchNorm, small buckets and rows from a forked worker; return
    this rank's losses and the state."""
    torch.manual_seed(0)
    dtype = torch.float64 if hook in ("none", "parameter_server") else torch.float32
    layers = [
        nn.Linear(4, 16),
        nn.BatchNorm1d(16),
        nn.GELU(),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    ]
    model = nn.Sequential(*layers).to(dtype)
    synchronize(model, None)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    if hook != "none":
        wrapped.register_comm_hook(*open_hook(hook))
    rows = torch.randn(12 * size * 8, 4, dtype=dtype)[rank::size]
    losses = []
    for batch in DataLoader(rows, batch_size=8, num_workers=1, multiprocessing_context="fork"):
        model.zero_grad()
        loss = (wrapped(batch) - batch[:, :3].square()).square().mean()
        loss.backward()
        for parameter in (
            model.parameters()
        ):  # torch.optim would import torch._dynamo, which takes three seconds on every rank
            parameter.data.sub_(parameter.grad, alpha=0.1)
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat(
        [tensor.flatten() for tensor in model.state_dict().values()]
    )


@pytest.mark.slow
@needs_mpi
def test_a_rank_that_raises_ends_the_others(mpirun):
    began = time.monotonic()
    code, printed = mpirun(2, raises)
    assert code == 1 and "RuntimeError: an exception" in printed, printed
    assert time.monotonic() - began < LIMIT_S / 2


@needs_mpi
@pytest.mark.slow
def test_a_rank_that_times_out_reports_it_and_ends_the_others(compared):
    code, printed = compared(3)
    assert code == 1 and "waited long enough" in printed, printed


def raises(*place):
    with group(mpi.register(), *place):
        dist.barrier()
        if place[0] == 1:
            raise RuntimeError("an exception")
        dist.barrier()


def times_out(rank, size, store):
    with group(mpi.register(), rank, size, store):
        model = DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        dist.barrier()
        if rank:
            dist.recv(torch.ones(1), 0)  # which never comes
        with pytest.raises(
            RunError, match=r"all_reduce .* the other ranks did not join within 0.1 s"
        ):
            dist.all_reduce(torch.ones(4), async_op=True).wait(timedelta(seconds=0.1))
        dist.group.WORLD.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(
            RunError, match=r"^all_reduce .* did not join within 0.3 s \(dist.timeout_s\)"
        ):
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RunError, match="barrier over MPI"):
            dist.barrier()
        print("waited long enough", flush=True)
        os._exit(1)  # as the command line does


@pytest.mark.slow
@needs_mpi
def test_ranks_that_are_not_mpis_are_refused(compared):
    _, printed = compared(2)
    assert printed.count("wrong ranks are refused") == 2, printed


def wrong_ranks(rank, size, store):
    name = mpi.register()
    more, other = size + 1, (rank + 1) % size
    with pytest.raises(
        ConfigError,
        match=f"^dist.backend=mpi: MPI has {size} ranks but the run has {more}; .* -n {more}$",
    ):
        dist.init_process_group(name, store=store, rank=rank, world_size=more)
    with pytest.raises(
        ConfigError,
        match=f"^dist.backend=mpi: this is rank {rank} of MPI and rank {other} of the run;",
    ):
        dist.init_process_group(name, store=store, rank=other, world_size=size)
    with group(name, rank, size, store):
        with pytest.raises(ValueError, match=r"MPI has no AVG of torch.int64"):
            dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG)
        with pytest.raises(
            ConfigError, match="carries CPU tensors only, but one is on meta; use nccl"
        ):
            dist.broadcast(torch.ones(2, device="meta"), 0)
    print("wrong ranks are refused")


@pytest.mark.parametrize("missing", ["mpi4py", "MPI library", "one thread"])
def test_a_missing_mpi_is_one_line(monkeypatch, missing):
    assert mpi.MPI is None, "MPI runs in the process of the tests"
    monkeypatch.setitem(sys.modules, "mpi4py", None if missing == "mpi4py" else Mpi4py(missing))
    with pytest.raises(ConfigError, match=rf"^dist.backend=mpi: .*{missing}[^\n]*$"):
        mpi.register()


class Mpi4py:
    """Stand-in for mpi4py whose MPI library is missing or was built for one thread."""

    rc, THREAD_SERIALIZED = SimpleNamespace(), 2

    def __init__(self, missing):
        self._missing = missing

    @property
    def MPI(self):
        if self._missing == "MPI library":
            raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")
        return self

    def Query_thread(self):
        return 1


def main(port, *bodies):
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    for body in bodies:
        globals()[body](rank, size, dist.PrefixStore(f"{size}/{body}", store))


if __name__ == "__main__":
    main(*sys.argv[1:])
