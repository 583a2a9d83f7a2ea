"""The Ray cluster of `launch=ray`: its resources, and places for ranks on them.

`python -m trainer.places.ray_cluster SETTINGS` prints what a start would find, for
`trainer.check`: Ray's threads and signal handlers then stay out of its process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError, RunError, counted, one_line
from trainer.core.api import LaunchSettings

TESTED = "2.60.0"  # Ray's version in constraints.txt, and the one that the tests run
ADDRESS = "RAY_ADDRESS"
CHECK_RAY = "check the cluster with: ray status"
PLACE_POLL_S = 1.0
PLACED_S = 10.0  # nodes that look free may be full, or leave
FREED_S = 5.0  # until Ray counts what ranks that have ended leave free
MOST_ADDRESS = 300  # bytes of an address in a file
CLUSTER_ANSWER_S = 10.0  # Ray itself waits 2 minutes for its cluster, and then ends this process
# In another process: a client in this one repeats and prints its failures for over 30 s.
PROBE_PROGRAM = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
PROBE_S = 20.0
OWN_LABEL = {"lockstep": "own"}  # the label of a cluster that ends with its run
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


class RankCounts:
    """The numbers of ranks that a run may have, from the smallest."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = sorted(numbers)

    @property
    def least(self) -> int:
        return self._numbers[0]

    @property
    def most(self) -> int:
        return self._numbers[-1]

    def largest_within(self, room: int) -> int:
        """Return the largest number that fits; the least one if none does."""
        return max((each for each in self._numbers if each <= room), default=self.least)

    def limited(self, most: int) -> RankCounts:
        return RankCounts(each for each in self._numbers if each <= most)

    def without(self, refused: int, former: int) -> RankCounts:
        """Leave out a number that the ranks have refused, which did not refuse the former one.

        If it was larger, so are the other larger ones: a run that works is moved for no trial.
        """
        if refused > former:
            return self.limited(former)
        return RankCounts(each for each in self._numbers if each != refused)


class Cluster:
    """The cluster, seen as places for ranks that each need `needs`."""

    def __init__(self, config: LaunchSettings, sizes: Sequence[int] = ()) -> None:
        """`sizes`: the numbers of ranks that the layout allows, by default all in the range."""
        self.ray = load_ray()
        is_own = not _join(self.ray)
        if is_own:
            _start_own(self.ray)
        self._config = config
        self.needs = _needs_of(config, self.ray.cluster_resources())
        least, most = range_of(config)
        self._counts = RankCounts(sizes or range(least, most + 1))
        if is_own:  # it does not grow
            self._check_size()

    def _check_size(self) -> None:
        has = self.ray.cluster_resources()
        fits = _fits(self.needs, has)
        least = self._counts.least
        if least > fits:
            self.ray.shutdown()
            raise ConfigError(f"""launch.ranks={least}: must be at most {fits} on this machine:
                {_shortage(self._config, self.needs, has)}""")
        self._counts = self._counts.limited(fits)

    def has_room_for_more(self, size: int) -> bool:
        """Return True if there is room for a larger number of ranks that the layout allows."""
        return size < self._counts.most and self._counts.largest_within(size + self.room()) > size

    def refuse(self, size: int, former: int) -> None:
        """Move to this number of ranks no more: they have refused it, unlike the former one."""
        self._counts = self._counts.without(size, former)

    def room(self) -> int:
        """Return for how many more ranks there is room, on nodes that stay."""
        leaving = self.draining()
        free = _free_by_node(self.ray, self._config.labels)
        return sum(_fits(self.needs, has) for node, has in free.items() if node not in leaving)

    def draining(self) -> set[str]:
        """Return Ray's ids of the nodes that will end soon, such as spot machines."""
        return set(_state().get_draining_nodes())

    def place(self, kind: type, asked: Sequence[int]) -> tuple[Any, list[Any]]:
        """Wait for room, and return a placement group with its actors, of a kind.

        Takes as many ranks as there is room for, of the numbers that the layout allows. Raises
        RunError when asked to stop, by a signal in `asked`.
        """
        size = self._choose_number()
        least = self._counts.least
        since, is_told = time.monotonic(), False
        while True:
            group = self.ray.util.placement_group(
                [self.needs] * size,
                strategy="PACK",
                bundle_label_selector=[dict(self._config.labels)] * size,
            )
            while not group.wait(PLACE_POLL_S):
                if asked:
                    self.ray.util.remove_placement_group(group)
                    raise RunError("asked to stop before all ranks had a place")
                waited = time.monotonic() - since
                if waited > PLACED_S and size > least:
                    break
                if waited > PLACED_S and not is_told:
                    say(f"waits for places for {size} ranks: {self._has()}")
                    is_told = True
            else:
                return group, self._fill(kind, group, size)
            self.ray.util.remove_placement_group(group)
            size = self._counts.largest_within(size - 1)
            since = time.monotonic()

    def _choose_number(self) -> int:
        """Return the largest number of ranks that there is room for, the least one without."""
        size = self._counts.least
        end = time.monotonic() + FREED_S
        while size < self._counts.most and time.monotonic() < end:
            size = max(size, self._counts.largest_within(self.room()))
            time.sleep(0.2)
        return size

    def _fill(self, kind: type, group: Any, size: int) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self.ray.remote(kind).options(
            max_concurrency=4,  # a signal is sent while output is waited for
            num_cpus=self.needs.get("CPU", 0),
            num_gpus=self.needs.get("GPU", 0),
            memory=self.needs.get("memory"),
            resources={k: v for k, v in self.needs.items() if k not in ("CPU", "GPU", "memory")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        return [actor.remote() for _ in range(size)]

    def _has(self) -> str:
        free = self.ray.available_resources()
        each = [f"{n:g} {name} of {free.get(name, 0):g} free" for name, n in self.needs.items()]
        return f"each needs {', '.join(each)}"


def say(line: str) -> None:
    print(f"ray     {line}", file=sys.stderr, flush=True)


def load_ray() -> Any:
    """Return Ray, unconnected. Raises ConfigError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Lockstep sends nothing by itself
    try:
        import ray
        from ray._private import utils
    except ImportError:
        raise ConfigError(
            "launch=ray: Ray is not installed; pip install 'lockstep-trainer[ray]'"
        ) from None
    utils.set_sigterm_handler = lambda handler: None  # ray.init would replace ours
    return ray


def _join(ray: Any) -> bool:
    """Connect to the cluster of RAY_ADDRESS or of this machine; return False if there is none.

    Another run's own cluster, which Ray finds by its processes, is none, as it ends with that run.
    Raises ConfigError if RAY_ADDRESS does not answer, or the cluster does not take this process.
    """
    address = os.environ.get(ADDRESS, "")
    if address == "local":
        return False
    if address in ("", "auto"):
        current = _find_current()
        if not current:
            return False
    else:
        current = address
        _check_answer(address)
    try:
        ray.init(current, **QUIET)
    except ConnectionError:
        if address not in ("", "auto"):
            raise _no_answer(address) from None
        return False
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        # such as another version of Ray
        raise ConfigError(f"""launch=ray: the cluster refuses this process: {one_line(error)};
            check that Ray and Python have the versions of the cluster""") from None
    if address in ("", "auto") and any(_has_labels(n["Labels"], OWN_LABEL) for n in ray.nodes()):
        ray.shutdown()
        return False
    return True


def _start_own(ray: Any) -> None:
    """Start a cluster on this machine. Raises ConfigError with Ray's reason if that fails."""
    try:
        ray.init("local", include_dashboard=False, labels=OWN_LABEL, **QUIET)
    except Exception as error:  # Ray raises any, such as OSError for a folder that it cannot write
        raise ConfigError(f"""launch=ray: Ray cannot start a cluster on this machine:
            {one_line(error)}; set RAY_TMPDIR to a folder with a short path,
            such as /tmp""") from None


def _find_current() -> str:
    """Return the address of this machine's cluster; empty if there is none that answers.

    Ray keeps that of the last `ray start` in a file, also when its head is gone, and would wait for
    it for two minutes.
    """
    from ray._common.utils import get_ray_address_file
    from ray._private import services

    path = Path(get_ray_address_file(None))
    if path.exists():
        try:
            text = path.read_bytes()[:MOST_ADDRESS].decode().strip() if path.is_file() else ""
            _check_answer(text)
        except (OSError, ValueError, ConfigError):
            say(f"{path} has no cluster that answers; it is not used")
            running = sorted(services.find_gcs_addresses())
            return running[0] if running else ""
    try:
        return str(services.get_ray_address_from_environment("auto", None))
    except ConnectionError:
        return ""


def _check_answer(address: str) -> None:
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isascii() and port.isdecimal()):
        raise ConfigError(f"""{ADDRESS}={address}: must be the host and port of the cluster's head,
            as in node0:6379; start the run on a node of the cluster, or by ray job submit""")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_ANSWER_S).close()
        words = [sys.executable, "-c", PROBE_PROGRAM, address]
        probe = subprocess.run(words, capture_output=True, timeout=PROBE_S)  # noqa: S603
    except (OSError, OverflowError, ValueError, subprocess.TimeoutExpired):
        raise _no_answer(address) from None
    if probe.returncode and b"auth" not in probe.stderr.lower():  # a refusal: ray.init says why
        raise _no_answer(address)


def _no_answer(address: str) -> ConfigError:
    return ConfigError(f"""{ADDRESS}={address}: no cluster answers there;
        start it, or leave {ADDRESS} out for one on this machine""")


def _state() -> Any:
    from ray._private.state import state  # as Ray Train does: nothing public says it by node

    return state


def _free_by_node(ray: Any, labels: Mapping[str, str]) -> dict[str, Mapping[str, float]]:
    """Return the free resources of the nodes with these labels, by Ray's id."""
    takes = {n["NodeID"] for n in ray.nodes() if n["Alive"] and _has_labels(n["Labels"], labels)}
    free = _state().available_resources_per_node()
    return {node: has for node, has in free.items() if node in takes}


def _has_labels(labels: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    """Return True if a node has the labels: a value, !value, in(value, ...) or !in(value, ...)."""
    for name, word in asked.items():
        is_not, rule = word.startswith("!"), word.removeprefix("!").strip()
        values = rule[3:-1].split(",") if rule.startswith("in(") else [rule]
        is_there = labels.get(name) in [value.strip() for value in values]
        if is_there == is_not:
            return False
    return True


def range_of(config: LaunchSettings) -> tuple[int, int]:
    """Return the least and the most ranks."""
    ranks = config.ranks if isinstance(config.ranks, list) else [config.ranks or 1]
    return ranks[0], ranks[-1]


def _needs_of(config: LaunchSettings, has: Mapping[str, float]) -> dict[str, float]:
    """Return what each rank needs of a cluster that has these resources."""
    gpus = config.gpus_per_rank
    if gpus is None:
        gpus = float(has.get("GPU", 0) > 0)
    needs = {"CPU": config.cpus_per_rank, "GPU": gpus, **config.resources}
    return {name: amount for name, amount in needs.items() if amount}


def _fits(needs: Mapping[str, float], has: Mapping[str, float]) -> int:
    return int(min(has.get(name, 0) / amount for name, amount in needs.items()))


def _shortage(config: LaunchSettings, needs: Mapping[str, float], has: Mapping[str, float]) -> str:
    """Return of which resource there is the least, and the setting that asks for it."""
    name = min(needs, key=lambda name: has.get(name, 0) / needs[name])
    own = {"CPU": "launch.cpus_per_rank", "GPU": "launch.gpus_per_rank"}
    key = f"launch.resources.{name}" if name in config.resources else own[name]
    taken = f"{needs[name]:g} {name} of {has.get(name, 0):g}"
    return f"each rank takes {taken}, by {key}; start a Ray cluster, or set a smaller {key}"


def describe(config: LaunchSettings) -> dict[str, str]:
    """Return what a start of `launch=ray` would find: result, found and advice of a check.

    Starts no cluster. Raises ConfigError.
    """
    ray = load_ray()
    where = "none yet, so the run starts one on this machine"
    if _join(ray):
        nodes = [n for n in ray.nodes() if n["Alive"] and _has_labels(n["Labels"], config.labels)]
        has = [node["Resources"] for node in nodes]
        free = [*_free_by_node(ray, config.labels).values()]
        needs = _needs_of(config, ray.cluster_resources())
        where = f"{counted(len(nodes), 'node')} at {ray.get_runtime_context().gcs_address}"
        where += f" with launch.labels={config.labels}" if config.labels else ""
        ray.shutdown()
    else:
        has = free = [_resources_here()]
        needs = _needs_of(config, has[0])
    sums = [f"{sum(n.get(name, 0) for n in has):g} {name}s" for name in ("CPU", "GPU")]
    each = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
    cluster_text = (
        f"Ray {ray.__version__}; cluster: {where}, {' and '.join(sums)}; a rank takes {each}"
    )
    room = [sum(_fits(needs, node) for node in nodes) for nodes in (has, free)]
    return _judge(config, ray.__version__, cluster_text, *room)


def _judge(
    config: LaunchSettings, version: str, cluster_text: str, room: int, free: int
) -> dict[str, str]:
    """Return the check for a cluster with room for so many ranks, and for so many at this time."""
    least = range_of(config)[0]
    asked = str(config.ranks).replace(" ", "")
    text = f"{cluster_text}: room for {counted(room, 'rank')}, {free} of them now"
    if least > room:
        advice = f"set launch.ranks={room}, " if room else ""
        advice += "reserve less by launch.cpus_per_rank and launch.gpus_per_rank, or add nodes"
        refusal = f"launch.ranks={asked}: does not fit; {text}"
        return {"result": "fail", "found": refusal, "advice": advice}
    text += f"; launch.ranks={asked} fits"
    if least > free:
        advice = "other jobs have the rest: the run will wait until they end"
        return {"result": "warn", "found": text, "advice": advice}
    if version != TESTED:
        advice = f"this version is not tested: pip install ray=={TESTED}"
        return {"result": "warn", "found": text, "advice": advice}
    return {"result": "ok", "found": text}


def _resources_here() -> dict[str, float]:
    """Return what Ray would count on this machine."""
    from ray._private.accelerators import get_accelerator_manager_for_resource
    from ray._private.utils import get_num_cpus

    manager: Any = get_accelerator_manager_for_resource("GPU")
    gpus = manager.get_current_node_num_accelerators()
    return {"CPU": float(get_num_cpus()), "GPU": float(gpus)}


def _answer(words: str) -> dict[str, str]:
    try:
        return describe(LaunchSettings(**json.loads(words)))
    except ConfigError as error:
        problem, _, advice = str(error).partition("; ")
        return {"result": "fail", "found": problem, "advice": advice or CHECK_RAY}


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1])))
