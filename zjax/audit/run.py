"""One audit, from a train step or its recipe to the report."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zjax.audit.child import Lower, Request, kernels_in, memory_figures
from zjax.audit.compile import Compiled, compile_for_target
from zjax.audit.findings import Evidence, find
from zjax.audit.hlo import parse
from zjax.audit.report import Audit
from zjax.audit.schedule import follow
from zjax.audit.targets import Target, parse_target, place_here, target_here
from zjax.config import MeshConfig
from zjax.estimate import Chip
from zjax.flags import xla_flags
from zjax.mesh import AXES, abstract_mesh, degree, physical_axes, resolve_degrees
from zjax.plan import Plan, Recipe, require_devices
from zjax.step import LossFn, TrainStep, check_batch, make_train_step
from zjax.tree import PyTree
from zjax.units import record_marked


def audit(step: TrainStep, batch: PyTree, *, target: str, mesh: MeshConfig | None = None, keep_hlo: str | Path | None = None) -> Audit:
    """Audits a train step as it compiles for a target, in a process of its own; nothing runs on the caller's devices.

    Args:
      step: from `make_train_step`, on whatever devices are here; its recipe is rebuilt for the target.
      batch: the global batch of the target: arrays or `jax.ShapeDtypeStruct`s.
      target: `cpu:8`, `gpu:h100:1x8` (hosts x GPUs a host), `tpu:v5p:4x4x4`.
      mesh: degrees on the target; by default the step's own, `fsdp` taking as many devices as are left.
      keep_hlo: a directory to save the compiled program's text in.

    Raises:
      ConfigError: an unknown target, a compiler that is not installed, degrees that do not fit the target.
      ValueError: a batch that does not divide on the target.
      AuditError: a step that cannot be pickled or compiled.
    """
    if mesh is None:
        here = step.plan.mesh
        degrees = {axis: degree(here, physical_axes(here, axis)) for axis in AXES}
        mesh = MeshConfig(**(degrees | {"fsdp": -1}))
    return audit_recipe(
        step.plan.recipe,
        step.loss_fn,
        batch,
        target=target,
        mesh=mesh,
        clip=step.clip,
        clip_value=step.clip_value,
        norm_groups=step.norm_groups,
        compiler_options=step.compiler_options,
        keep_hlo=keep_hlo,
    )


def audit_recipe(
    recipe: Recipe,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    target: str,
    mesh: MeshConfig,
    clip: float | None = None,
    clip_value: float | None = None,
    norm_groups: Sequence[str] = (),
    compiler_options: Mapping[str, str] | None = None,
    keep_hlo: str | Path | None = None,
    chip: Chip | None = None,
) -> Audit:
    """`audit` without a step: from the recipe of a plan. The same arguments and errors otherwise.

    What comes after `mesh` is as in `make_train_step`; `chip` as in `audit_program`.
    """
    goal = parse_target(target)
    resolve_degrees(mesh, goal.devices)
    plan = recipe.build(abstract_mesh(mesh, goal.devices))
    check_batch(plan, batch)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    knobs = {"clip": clip, "clip_value": clip_value, "norm_groups": tuple(norm_groups)}
    lower = functools.partial(_lower_step, recipe, loss_fn, knobs=knobs, batch=shapes)
    options = xla_flags(target, plan) if compiler_options is None else compiler_options
    return audit_program(lower, plan, shapes, target=target, mesh=mesh, compiler_options=options, keep_hlo=keep_hlo, chip=chip)


def _lower_step(
    recipe: Recipe, loss_fn: LossFn, mesh: Mesh, *, knobs: Mapping[str, Any], batch: PyTree
) -> tuple[jax.stages.Lowered, frozenset[str]]:
    with record_marked() as marked:
        # The compiler's options come with the request; those of this process's own backend would be others.
        lowered = make_train_step(recipe.build(mesh), loss_fn, **knobs, compiler_options={}).lower(batch)
    return lowered, frozenset(marked)


def audit_program(
    lower: Lower,
    plan: Plan,
    batch: PyTree,
    *,
    target: str,
    mesh: MeshConfig,
    compiler_options: Mapping[str, str] | None = None,
    keep_hlo: str | Path | None = None,
    chip: Chip | None = None,
) -> Audit:
    """Audits any program that does the work of a plan's step, a plain `jax.jit` step for instance.

    Args:
      lower: `lower(mesh) -> (lowered, marked)`: the lowered program and the names of the parameters that unit marks
        gather in it (none for a program without marks). It runs in another process, so it must be picklable.
      plan: what the program is held against; its mesh may be abstract.
      batch: the global batch, arrays or `jax.ShapeDtypeStruct`s.
      chip: with other speeds than the target's has in the catalogue, for the predicted times.
    """
    goal = parse_target(target)
    compiled = compile_for_target(Request(goal, mesh, lower, dict(compiler_options or {})))
    if keep_hlo is not None:
        folder = Path(keep_hlo)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{goal.text.replace(':', '-')}.{hashlib.sha256(compiled.hlo.encode()).hexdigest()[:12]}.hlo.txt").write_text(
            compiled.hlo
        )
    return _read(compiled, dataclasses.replace(goal, chip=chip or goal.chip), plan, batch, compiler_options)


def audit_here(step: TrainStep, batch: PyTree) -> Audit:
    """Audits the very program that `step` runs on the devices that are here; it is compiled once, for both.

    Every process of a run may call it. `batch` is the global one, arrays or `jax.ShapeDtypeStruct`s. ConfigError for
    devices that are not in the catalogue of chips.
    """
    devices = require_devices(step.plan).devices.ravel().tolist()
    goal = target_here(devices)
    with record_marked() as marked:
        lowered = step.lower(batch)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    options = xla_flags(goal.platform, step.plan) if step.compiler_options is None else step.compiler_options
    program = Compiled(
        hlo=compiled.as_text() or "",
        memory=memory_figures(compiled.memory_analysis(), goal.platform),
        compile_seconds=seconds,
        place=place_here(step.plan.mesh.shape, devices),
        marked=frozenset(marked),
        kernels=tuple(kernels_in(lowered.as_text())),
    )
    return _read(program, goal, step.plan, batch, options)


def _read(compiled: Compiled, goal: Target, plan: Plan, batch: PyTree, compiler_options: Mapping[str, str] | None) -> Audit:
    """What the compiled program says, held against the plan."""
    module = parse(compiled.hlo)
    timeline = follow(module, compiled.place, goal.chip)
    share = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(batch)) // plan.data_degree
    memory = compiled.memory | {"batch": share}
    findings = find(Evidence(plan, module, timeline, memory, goal, compiled.marked, compiled.kernels))
    return Audit(goal, plan, memory, timeline, tuple(findings), compiled.compile_seconds, _tokens(batch), compiler_options or {})


def _tokens(batch: PyTree) -> int | None:
    """Tokens of the batch: the largest leaf of integers, if there is one."""
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(batch) if jnp.issubdtype(x.dtype, jnp.integer) and len(x.shape) > 1]
    return max(sizes, default=None)
