"""Units: what is gathered and scattered together, marked by `fully_shard`.

The mark finds its plan in a jax user context that the train step enters. A user context is part of jax's trace cache
key, so one block under two plans is traced twice; a contextvar would silently reuse the first trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from zjax.collectives import constrain_rows, gather, is_gather, is_local, local_shape
from zjax.plan import Plan
from zjax.tree import PyTree, named_leaves

plan_context = jax.make_user_context(default_value=None)
"""`with plan_context(Tracing(plan)):` makes the unit marks traced inside it obey the plan."""


@dataclass(frozen=True)
class Tracing:
    """What the marks of a step that is being traced go by."""

    plan: Plan
    owners: frozenset[tuple[str, str]] | None = None
    """(parameter, the `at` of the mark that gathers it); None: every mark gathers what it is given."""
    recording: int | None = None
    """Set while the marks only say what they would gather. Unique, so that no earlier trace is used in its place."""


def current_plan() -> Plan | None:
    """The plan of the step being traced, None outside of one (and while marks are recorded)."""
    tracing: Tracing | None = plan_context.value
    return None if tracing is None or tracing.recording is not None else tracing.plan


RematPolicy = Callable[..., Any]


def fully_shard(block: Any, *, at: str, remat: str | RematPolicy | None = None) -> Any:
    """Marks a unit: its parameters are gathered for its forward and again for its backward, its gradient scattered.

    FSDP2 `fully_shard(module)`, FSDP1 auto-wrapping, a DeepSpeed ZeRO-3 sub-module. Outside a train step the mark does
    nothing.

    Args:
      block: a function `block(params, x, ...)`, a `flax.nnx` module class (a subclass is returned) or a `flax.nnx`
        module instance (it is changed in place and returned, as FSDP2 does). `x`, its first argument, is the residual
        stream or the token ids, rows in dim 0; it and every output with as many rows are kept on the data axes.
      at: path of the parameters in the params pytree (`layers`, `decoder/embed`, or "" for the whole). Leaves below it
        must have the plan's shapes; those of a stacked unit (`units=("layers[*]",)`) come one layer at a time.
      remat: recompute the block in the backward: `"full"` (all but its inputs), `"dots"` (keep matrix products without
        batch dims), a `jax.checkpoint` policy, or None. Give it here rather than wrapping the block in
        `jax.checkpoint`: what is recomputed and what is gathered again is one decision, and with
        `reshard_after_forward=False` gathered parameters are kept outside the recomputed part.

    Raises (when a step is traced):
      ValueError: a leaf whose path or shape differs from the plan's.
    """
    policy = remat_policy(remat)
    if isinstance(block, type) and issubclass(block, nnx.Module):
        return _unit_class(block, at, policy)
    if isinstance(block, nnx.Module):
        # As FSDP2 does: the instance gets a class of its own, its parameters stay where they are.
        block.__class__ = _unit_class(type(block), at, policy)
        return block

    @functools.wraps(block)
    def unit(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        return _run(on_rows_of(block), at, policy, params, args, kwargs)

    return unit


def _run(
    block: Callable[..., Any], at: str, policy: RematPolicy | None, params: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tracing: Tracing | None = plan_context.value
    if tracing is None:
        return jax.checkpoint(lambda p: block(p, *args, **kwargs), policy=policy)(params) if policy else block(params, *args, **kwargs)
    plan = tracing.plan
    if tracing.recording is not None:
        check_shapes(plan, at, params)
        with _noted([join(at, name) for name, _ in named_leaves(params)], at):
            return block(params, *args, **kwargs)
    check_shapes(plan, at, params)
    # Arguments are closed over, so that static ones (strings, booleans) stay static under jax.checkpoint.
    if plan.zero.reshard_after_forward:
        return jax.checkpoint(lambda p: block(_gather_unit(plan, at, p), *args, **kwargs), policy=_but_gathered(policy))(params)
    gathered = _gather_unit(plan, at, params)
    return jax.checkpoint(lambda p: block(p, *args, **kwargs), policy=policy)(gathered) if policy else block(gathered, *args, **kwargs)


def _but_gathered(policy: RematPolicy | None) -> RematPolicy:
    """The policy with gathered parameters taken out of what it saves; None saves everything else."""

    def saved(primitive: Any, *args: Any, **params: Any) -> Any:
        if is_gather(primitive, params):
            return False
        # A name is an identity: its input is saved already.
        return primitive.name != "name" if policy is None else policy(primitive, *args, **params)

    return saved


def on_rows_of(block: Callable[..., Any]) -> Callable[..., Any]:
    """`block(params, x, ...)` with `x` and its outputs of as many rows kept on the data axes.

    One missing constraint on the residual stream makes XLA gather activations, at several times the traffic.
    """

    @functools.wraps(block)
    def on_rows(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        plan = current_plan()
        if plan is None or not args or not isinstance(args[0], jax.Array) or not args[0].ndim:
            return block(params, *args, **kwargs)
        rows = args[0].shape[0]
        return constrain_rows(plan, block(params, constrain_rows(plan, args[0], rows), *args[1:], **kwargs), rows)

    return on_rows


def remat_policy(remat: str | RematPolicy | None) -> RematPolicy | None:
    """The `jax.checkpoint` policy that a remat argument names; ValueError for an unknown name."""
    if remat is None or callable(remat):
        return remat
    named = {
        "none": None,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    if remat not in named:
        raise ValueError(f"fully_shard: remat={remat!r}: must be one of {', '.join(named)}, a jax.checkpoint policy or None")
    return named[remat]


def _gather_unit(plan: Plan, at: str, params: PyTree) -> PyTree:
    """The unit's parameters, gathered; those that another unit gathers, or has, stay as they are."""
    owners = plan_context.value.owners
    gathered = []
    for name, x in named_leaves(params, is_leaf=is_local):
        path = join(at, name)
        mine = owners is None or (path, at) in owners
        if mine:
            record_gathered([path], at)
        gathered.append(gather(plan, plan.params[path], x) if mine else x)
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_local), gathered)


_recorded: contextvars.ContextVar[Any] = contextvars.ContextVar("zjax_marked", default=None)
_around: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("zjax_marks_around", default=())


def record_gathered(paths: list[str], at: str) -> None:
    """Notes, for `record_marked`, that the mark at `at` gathers these parameters."""
    if (seen := _recorded.get()) is not None:
        for path in paths:
            seen.setdefault(path, set()).add(at)


@contextlib.contextmanager
def record_marked() -> Iterator[dict[str, set[str]]]:
    """Collects, for each parameter that unit marks gather, the marks' `at`, in what is traced for the first time inside."""
    seen: dict[str, set[str]] = {}
    token = _recorded.set(seen)
    try:
        yield seen
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def _noted(paths: list[str], at: str) -> Iterator[None]:
    """Records the marks of a unit; of nested units the innermost gathers a parameter."""
    seen = _recorded.get()
    for path in paths:
        if seen is not None:
            seen.setdefault(path, set()).difference_update(_around.get())
            seen[path].add(at)
    token = _around.set((*_around.get(), at))
    try:
        yield
    finally:
        _around.reset(token)


_recordings = itertools.count()


def unit_owners(plan: Plan, loss: Callable[[], Any]) -> frozenset[tuple[str, str]]:
    """(parameter, `at`) of the one unit that gathers it, found by tracing `loss()` with marks that only record.

    Parameters outside every unit, and those that several units share, have none: they belong to the root unit.
    """
    with record_marked() as marked, plan_context(Tracing(plan, recording=next(_recordings))):
        jax.eval_shape(loss)
    return frozenset((path, next(iter(ats))) for path, ats in marked.items() if len(ats) == 1)


def check_shapes(plan: Plan, at: str, params: PyTree) -> None:
    """ValueError unless every parameter below `at` has a path and a shape of the plan (or of one of its layers)."""
    for name, x in named_leaves(params, is_leaf=is_local):
        path = join(at, name)
        leaf = plan.params.get(path)
        if leaf is None:
            raise ValueError(f"fully_shard(at={at!r}): the plan has no parameter {path!r}; it has {', '.join(list(plan.params)[:12])}")
        shape, whole = (x.value.shape, local_shape(plan, leaf)) if is_local(x) else (x.shape, leaf.shape)
        shapes = [whole, whole[1:]] if leaf.stacked else [whole]
        if shape not in shapes:
            hint = ""
            if shape == whole[1:]:
                hint = f'; if its dim 0 counts layers, say so: build_plan(..., units=("{at}[*]",))'
            raise ValueError(f"fully_shard(at={at!r}): {path} arrives with shape {shape}, but the plan has {whole}{hint}")


def join(at: str, name: str) -> str:
    """The path of a parameter in the whole pytree, from that of its unit and its own."""
    return "/".join(part for part in (at, name) if part)


def _unit_class(cls: type, at: str, policy: RematPolicy | None) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if plan_context.value is None:
            return cls.__call__(self, *args, **kwargs)
        graphdef, params, rest = nnx.split(self, nnx.Param, ...)

        def run(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            module = nnx.merge(graphdef, params, rest, copy=True)  # its variables are written in this trace
            out = on_rows_of(lambda _, *a, **k: cls.__call__(module, *a, **k))(params, *args, **kwargs)
            return out, nnx.split(module, nnx.Param, ...)[2]

        out, new_rest = _run(run, at, policy, nnx.to_pure_dict(params), args, kwargs)
        nnx.update(self, new_rest)
        return out

    return type(cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__, "__module__": cls.__module__})
