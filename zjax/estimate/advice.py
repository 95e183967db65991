"""Which mode to run: every candidate planned and estimated, what does not fit dropped, the rest ranked by predicted time.

There is no table of models or modes here: a candidate is a config, `build_plan` says what it places where, and
`memory_of` and `step_time` what that costs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zjax.config import AccumulationConfig, MeshConfig, TrainConfig, ZeroConfig
from zjax.describe import mode_name
from zjax.estimate.cluster import Cluster
from zjax.estimate.decoder import Decoder
from zjax.estimate.memory import MARGIN, Memory, Work, memory_of
from zjax.estimate.timing import StepTime, step_time
from zjax.estimate.traffic import traffic_per_step
from zjax.fields import ConfigError
from zjax.mesh import abstract_mesh, resolve_degrees
from zjax.plan import Plan, Recipe

STAGES: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "reshard_after_forward": False},
    {"stage": 3, "reshard_after_backward": False},
)
REMATS: Mapping[str, tuple[str, ...]] = {"full": (), "names": ("attention", "attention_out"), "dots": (), "none": ()}
"""Remat policies that are tried, from what keeps least, with the values that are kept by name."""
TIE = 0.01
"""Predicted times that differ by less are a tie: the smaller peak wins."""
MOST_MICRO_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained, and on what."""

    config: TrainConfig
    """The run: model, precision, optimizer, batch. Its zero, mesh.replica, mesh.fsdp, remat and accumulation are what is asked."""
    recipe: Recipe
    """Of the run's plan, whatever its mode."""
    cluster: Cluster
    decoder: Decoder | None = None
    only_read: tuple[str, ...] = ()
    """As in `Work`."""
    scores_in_memory: bool = False
    """As in `Work`."""
    margin: float = MARGIN
    """Share of a device's memory that a candidate must leave free."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.data.global_batch * self.config.data.sequence_length


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One mode, and what is predicted of it."""

    config: TrainConfig
    plan: Plan
    memory: Memory
    work: Work
    cluster: Cluster

    @functools.cached_property
    def time(self) -> StepTime:
        """Predicted; worked out where it is asked for, since most candidates of a large model do not fit."""
        return step_time(self.plan, self.work, self.cluster)

    @property
    def mode(self) -> str:
        """In words: stage, split, remat, accumulation."""
        parts = [mode_name(self.config.zero, self.plan.mesh), f"remat {self.config.remat}"]
        if not self.config.zero.reshard_after_backward:
            parts.append("gathered once a step")
        micro = self.config.accumulation.micro_batches
        if micro > 1:
            parts.append(f"{micro} micro-batches" + (", accumulated locally" if self.config.accumulation.mode == "local" else ""))
        return ", ".join(parts)

    @property
    def family(self) -> str:
        """Stage and split alone: what the field calls the mode."""
        return mode_name(self.config.zero, self.plan.mesh) + ("" if self.config.zero.reshard_after_backward else ", gathered once a step")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The candidates of a question."""

    question: Question
    ranked: tuple[Candidate, ...]
    """Those that fit, the fastest first."""
    too_large: tuple[Candidate, ...]
    """Those that do not, the smallest first."""
    refused: Mapping[str, int]
    """What a config or plan refused, and how many candidates for that reason."""

    @property
    def first(self) -> Candidate | None:
        """The one to run."""
        return self.ranked[0] if self.ranked else None

    def families(self) -> list[Candidate]:
        """The fastest candidate of each family that fits, in order, then the smallest of each that does not."""
        best: dict[str, Candidate] = {}
        for candidate in (*self.ranked, *self.too_large):
            best.setdefault(candidate.family, candidate)
        return list(best.values())

    def mfu(self, candidate: Candidate) -> float:
        """Predicted model FLOP utilisation of the chips' peak: 6 operations a parameter and token, embedding included."""
        question = self.question
        return 6 * parameters_of(candidate.plan) * question.tokens / (
            question.cluster.devices * question.cluster.chip.flops * candidate.time.seconds
        )  # fmt: skip

    def dollars_per_million_tokens(self, candidate: Candidate, price: float) -> float:
        """At a price in dollars a device and hour."""
        return price * self.question.cluster.devices * candidate.time.seconds / 3600 / self.question.tokens * 1e6


def advise(question: Question) -> Advice:
    """Plans and estimates every candidate of a question.

    Raises:
      ConfigError: no candidate can be planned; the message has the reasons.
    """
    memory = question.cluster.chip.memory
    made: list[Candidate] = []
    refused: dict[str, int] = {}
    plan_of = _planner(question)
    for stage, accumulation in _modes(question):
        # A split holds more than one group, and a policy that keeps more holds more: what comes after the first that does
        # not fit would not either.
        for mesh in _meshes(question, stage):
            tried: list[Candidate] = []
            for remat, names in REMATS.items():
                chosen = {"remat": remat, "remat_names": names, "remat_every": 1}
                try:
                    tried.append(
                        _estimated(
                            question, _configured(question.config, zero=stage, mesh=mesh, accumulation=accumulation, **chosen), plan_of
                        )
                    )
                except ConfigError as error:
                    refused[str(error)] = refused.get(str(error), 0) + 1
                if tried and not tried[-1].memory.fits(memory):
                    break
            made += tried
            if not any(candidate.memory.fits(memory) for candidate in tried):
                break
    if not made:
        raise ConfigError("no mode can be planned: " + "; ".join(refused))
    fitting = [candidate for candidate in made if candidate.memory.fits(memory)]
    too_large = [candidate for candidate in made if not candidate.memory.fits(memory)]
    return Advice(
        question=question,
        ranked=tuple(sorted(fitting, key=lambda each: (round(math.log(each.time.seconds) / TIE), each.memory.peak))),
        too_large=tuple(sorted(too_large, key=lambda each: each.memory.peak)),
        refused=refused,
    )


def parameters_of(plan: Plan) -> int:
    """Elements of all parameters."""
    return sum(math.prod(leaf.shape) for leaf in plan.part("params"))


def asked(question: Question, **changes: Any) -> Question:
    """The question with another `cluster`, `sequence_length` or `global_batch`."""
    data = {name: changes.pop(name) for name in ("sequence_length", "global_batch") if name in changes}
    accumulation = AccumulationConfig()  # is among what is asked, and might not divide another batch
    config = dataclasses.replace(question.config, data=dataclasses.replace(question.config.data, **data), accumulation=accumulation)
    return dataclasses.replace(question, config=config, **changes)


def report(advice: Advice, price: float | None = None, count: int = 10) -> dict[str, Any]:
    """The advice as `zjax advise --json` prints it: bytes of a device, seconds of a step."""
    question = advice.question

    def described(candidate: Candidate) -> dict[str, Any]:
        zero, mesh = candidate.config.zero, candidate.config.mesh
        line: dict[str, Any] = {
            "mode": candidate.mode,
            "config": {
                "zero": {"stage": zero.stage, "reshard_after_forward": zero.reshard_after_forward, "reshard_after_backward": zero.reshard_after_backward},
                "mesh": {"replica": mesh.replica, "fsdp": mesh.fsdp},
                "remat": candidate.config.remat,
                "accumulation": dataclasses.asdict(candidate.config.accumulation),
            },
            "memory": {field.name: getattr(candidate.memory, field.name) for field in dataclasses.fields(Memory) if field.name != "not_covered"}
            | {"state": candidate.memory.state, "peak": candidate.memory.peak},
            "wire_bytes": traffic_per_step(candidate.plan)["total"],
            "seconds": candidate.time.seconds,
            "compute_seconds": candidate.time.compute,
            "exposed_seconds": candidate.time.exposed,
            "mfu": advice.mfu(candidate),
        }  # fmt: skip
        return line | ({"dollars_per_million_tokens": advice.dollars_per_million_tokens(candidate, price)} if price else {})

    return {
        "hardware": question.cluster.chip.name,
        "devices": question.cluster.devices,
        "groups": question.cluster.groups,
        "target": question.cluster.target,
        "tokens_per_step": question.tokens,
        "memory": question.cluster.chip.memory if math.isfinite(question.cluster.chip.memory) else None,
        "ranked": [described(candidate) for candidate in advice.ranked[:count]],
        "fits": len(advice.ranked),
        "too_large": len(advice.too_large),
        "refused": dict(advice.refused),
    }


def _modes(question: Question) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Stages with what belongs to them, and accumulation; on one device there is nothing to shard over."""
    rows = question.config.data.global_batch // _shards(question)
    for stage in STAGES if _shards(question) > 1 else STAGES[:1]:
        for micro in [count for count in _divisors(rows) if count <= MOST_MICRO_BATCHES] or [1]:
            for mode in ("sharded", "local") if micro > 1 and stage["stage"] >= 2 else ("sharded",):
                yield stage, {"micro_batches": micro, "mode": mode}


def _meshes(question: Question, stage: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Splits into groups of whole hosts or slices, the undivided first; stage 0 shards nothing that a split could change."""
    for replica in _divisors(question.cluster.groups) if stage["stage"] else [1]:
        fsdp = _shards(question) // replica
        if fsdp > 1 or replica == 1:
            yield {"replica": replica, "fsdp": fsdp}


def _shards(question: Question) -> int:
    """Devices over which `replica` and `fsdp` lie."""
    return question.cluster.devices // (question.config.mesh.expert * question.config.mesh.sequence * question.config.mesh.tensor)


def _configured(config: TrainConfig, **changes: Any) -> TrainConfig:
    for section in ("zero", "mesh", "accumulation"):
        changes[section] = dataclasses.replace(getattr(config, section), **changes[section])
    return dataclasses.replace(config, **changes)


def _planner(question: Question) -> Callable[[ZeroConfig, MeshConfig, AccumulationConfig], Plan]:
    """Plans by their configs, each built once: what remat changes is no part of a plan."""
    shapes = jax.eval_shape(question.recipe.init_fn, jax.random.key(0))
    traced = dataclasses.replace(question.recipe, init_fn=lambda key: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

    @functools.cache
    def plan_of(zero: ZeroConfig, mesh: MeshConfig, accumulation: AccumulationConfig) -> Plan:
        return dataclasses.replace(traced, zero=zero, accumulation=accumulation).build(abstract_mesh(mesh, question.cluster.devices))

    return plan_of


def _estimated(question: Question, config: TrainConfig, plan_of: Callable[..., Plan]) -> Candidate:
    resolve_degrees(config.mesh, question.cluster.devices)
    plan = plan_of(config.zero, config.mesh, config.accumulation)
    batch, micro = config.data.global_batch, config.accumulation.micro_batches
    if batch % (plan.data_degree * micro):
        raise ConfigError(f"data.global_batch={batch}: does not divide over {plan.data_degree} devices and {micro} micro-batches")
    work = Work(
        rows=batch // plan.data_degree // micro,
        length=config.data.sequence_length,
        remat=config.remat,
        remat_names=config.remat_names,
        decoder=question.decoder,
        only_read=question.only_read,
        scores_in_memory=question.scores_in_memory,
    )
    memory = memory_of(plan, work, memory=question.cluster.chip.memory, margin=question.margin)
    return Candidate(config=config, plan=plan, memory=memory, work=work, cluster=question.cluster)


def _divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]
