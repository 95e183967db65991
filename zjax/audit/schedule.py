"""Runs a compiled schedule on paper: when each transfer starts, what is computed beside it, and what waits for it.

Each computation is followed instruction by instruction. Arithmetic takes the larger of its operations over the chip's
peak and its bytes over the memory bandwidth. A transfer takes its wire bytes over its link's bandwidth, transfers of
one link one after another. Where an instruction needs a transfer that has not ended, the wait is exposed time. A
transfer is counted as covered if at least one matrix product runs between its start and its end.

The result is a prediction: a roofline without launch overheads or contention for memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zjax.audit.collectives import Collective, Place, base_kind, read_collective
from zjax.audit.cost import Cost, cost_of
from zjax.audit.hlo import Computation, Instruction, Module
from zjax.audit.trips import Scope, inner_scope, trip_count
from zjax.estimate.hardware import Chip


@dataclass
class Run:
    """One collective of the schedule, and how its runs in one step went."""

    collective: Collective
    computation: str
    times: int = 0
    is_async: bool = False
    covered: bool = False
    """Whether a matrix product runs between its start and its end."""
    exposed_seconds: float = 0.0
    """Of all its runs together."""
    seconds: float = 0.0

    @property
    def wire_bytes(self) -> float:
        """Of all its runs together."""
        return self.times * self.collective.wire_bytes


@dataclass
class Timeline:
    """One optimizer step of one device."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    flops: float = 0.0
    """Of matrix products, in bf16 equivalents."""
    runs: list[Run] = field(default_factory=list)
    unknown_kernels: dict[str, int] = field(default_factory=dict)
    """Kernels whose cost is not known, with how often they run."""
    unknown_loops: list[str] = field(default_factory=list)
    """Loops whose trip count the text does not tell; counted once."""
    unfollowed: list[str] = field(default_factory=list)
    """Collectives in computations that are called in a way this file does not know: missing from `runs`."""


def follow(module: Module, place: Place, chip: Chip) -> Timeline:
    """Follows the program's schedule on a chip."""
    follower = _Follower(module, place, chip)
    timeline = follower.timeline
    timeline.seconds = follower.follow(Scope(module.entry, {}), 1)
    timeline.unfollowed = follower.unfollowed()
    return timeline


@dataclass
class _Flight:
    run: Run
    ends: float
    times: int


class _Follower:
    def __init__(self, module: Module, place: Place, chip: Chip):
        self.module, self.place, self.chip = module, place, chip
        self.timeline = Timeline()
        self._runs: dict[tuple[str, str], Run] = {}
        self._seen: set[str] = set()

    def follow(self, scope: Scope, times: int) -> float:
        """Follows one computation that runs `times` times in a step; returns the seconds of one run."""
        computation, now = scope.computation, 0.0
        self._seen.add(computation.name)
        free = {False: 0.0, True: 0.0}  # when the links inside and between are free
        flights: dict[str, _Flight] = {}

        def start(key: str, run: Run) -> None:
            begins = max(now, free[run.collective.between])
            ends = free[run.collective.between] = begins + self.transfer_seconds(run.collective)
            run.times, run.seconds = run.times + times, run.seconds + times * (ends - begins)
            flights[key] = _Flight(run, ends, times)

        def end(key: str) -> None:
            nonlocal now
            flight = flights.pop(key, None)
            if flight is not None:
                waited = max(0.0, flight.ends - now)
                flight.run.exposed_seconds += times * waited
                now += waited

        for x in computation.schedule:
            if x.opcode == "while":
                trips = trip_count(self.module, scope, x)
                if trips is None:
                    self.timeline.unknown_loops.append(x.name)
                    trips = 1
                before = self.timeline.flops
                now += trips * self.follow(inner_scope(self.module, scope, x, dict(x.called)["body"]), times * trips)
                self._cover(flights, self.timeline.flops > before)
                continue
            if x.opcode in ("call", "conditional"):
                before = self.timeline.flops
                inside = [self.follow(inner_scope(self.module, scope, x, name), times) for _, name in x.called]
                now += max(inside, default=0.0)
                self._cover(flights, self.timeline.flops > before)
                continue
            started, ended, blocking = self._collectives(computation, x)
            for key, run in started:
                start(key, run)
            cost = cost_of(self.module, computation, x) if not base_kind(x.opcode.removesuffix("-done")) else Cost()
            now += self._compute(cost, times)
            self._cover(flights, cost.flops > 0)
            for run in blocking:
                start(x.name, run)
                end(x.name)
            for key in ended:
                end(key)
        for key in list(flights):  # a transfer that outlives its computation ends with it
            end(key)
        return now

    def unfollowed(self) -> list[str]:
        """Collectives of computations that were never come to."""
        missed = (c for name, c in self.module.computations.items() if name not in self._seen)
        return [x.name for computation in missed for x in computation.schedule if base_kind(x.opcode)]

    def transfer_seconds(self, collective: Collective) -> float:
        """The time of one run alone on its link."""
        if collective.between:
            return collective.wire_bytes / self.chip.link_between
        links = 2 * collective.torus_dims if self.chip.platform == "tpu" else 1
        if collective.kind == "collective-permute" and self.chip.platform == "tpu":
            links = 1
        return collective.wire_bytes / (links * self.chip.link_inside)

    def _compute(self, cost: Cost, times: int) -> float:
        seconds = cost.seconds(self.chip.flops, self.chip.bandwidth)
        self.timeline.compute_seconds += times * seconds
        self.timeline.flops += times * cost.flops
        for kernel in cost.unknown:
            self.timeline.unknown_kernels[kernel] = self.timeline.unknown_kernels.get(kernel, 0) + times
        return seconds

    @staticmethod
    def _cover(flights: dict[str, _Flight], has_matrix_product: bool) -> None:
        if has_matrix_product:
            for flight in flights.values():
                flight.run.covered = True

    def _collectives(self, computation: Computation, x: Instruction) -> tuple[list[tuple[str, Run]], list[str], list[Run]]:
        """(started, ended, blocking): transfers that `x` starts and ends, by key, and those that run inside it alone."""
        started: list[tuple[str, Run]] = []
        ended: list[str] = []
        blocking: list[Run] = []
        if base_kind(x.opcode):
            run = self._run(computation, x)
            if x.opcode.endswith("-start"):
                run.is_async = not _is_synchronous(x)
                started.append((x.name, run))
            else:
                blocking.append(run)
        elif x.opcode.endswith("-done"):
            ended.append(_origin(computation, x))
        elif x.opcode.endswith("-start"):
            # SparseCore and other asynchronous wrappers: the collective is in the computation they call. Operands of a
            # SparseCore call arrive with its -update, so the transfer begins there.
            for inner, each in self._inside(x):
                run = self._run(inner, each)
                run.is_async = True
                if not any(user.opcode.endswith("-update") for user in computation.users.get(x.name, ())):
                    started.append((x.name, run))
        elif x.opcode.endswith("-update"):
            origin = computation.instructions[_origin(computation, x)]
            for inner, each in self._inside(origin):
                run = self._run(inner, each)
                run.is_async = True
                started.append((origin.name, run))
        elif x.opcode == "fusion":
            for inner, each in self._inside(x):
                targets = {call.target for call in inner.schedule if call.opcode == "custom-call"}
                chain = each.attributes.get("frontend_attributes", "")
                key = f"chain {each.attributes.get('channel_id')} {chain}"
                if "chain_id" not in chain:
                    blocking.append(self._run(inner, each))
                elif "AsyncCollectiveStart" in targets:  # the one printing that counts; its chain prints it again in each step
                    run = self._run(inner, each)
                    run.is_async = True
                    started.append((key, run))
                elif "AsyncCollectiveDone" in targets:
                    ended.append(key)
        return started, ended, blocking

    def _inside(self, x: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        for key, name in x.called:
            # What a collective applies is its sum; what a call applies is what it runs.
            if (key == "to_apply" and x.opcode != "call-start") or name not in self.module.computations:
                continue
            inner = self.module.computations[name]
            self._seen.add(name)
            for each in inner.schedule:
                if base_kind(each.opcode):
                    yield inner, each
                elif each.opcode == "fusion":
                    yield from self._inside(each)

    def _run(self, computation: Computation, x: Instruction) -> Run:
        key = computation.name, x.name
        if key not in self._runs:
            collective = read_collective(self.module, computation, x, self.place, fusion=computation.name)
            self._runs[key] = Run(collective, computation.name)
            self.timeline.runs.append(self._runs[key])
        return self._runs[key]


def _is_synchronous(x: Instruction) -> bool:
    """A GPU prints start and done for collectives that it runs in the order of its kernels too, and says so."""
    config = x.backend_config.get("collective_backend_config")
    return isinstance(config, dict) and config.get("is_sync") is True


def _origin(computation: Computation, x: Instruction) -> str:
    """The `-start` that a `-done` or `-update` belongs to."""
    while x.operands and not x.opcode.endswith("-start"):
        before = computation.instructions.get(x.operands[0])
        if before is None:
            break
        x = before
    return x.name
