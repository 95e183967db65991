"""Units: what is gathered and scattered together, marked by `fully_shard`.

The mark finds its plan in a jax user context that the train step enters. A user context is part of jax's trace cache
key, so one block under two plans is traced twice; a contextvar would silently reuse the first trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from flax import linen, nnx

from zjax.collectives import constrain_rows, gather, is_local, local_shape, zero_after
from zjax.plan import Plan
from zjax.remat import NamedPolicy, RematPolicy, but_gathered, names_in, remat_policy, require_named
from zjax.tree import PyTree, matches, named_leaves

plan_context = jax.make_user_context(default_value=None)
"""`with plan_context(Tracing(plan, owners)):` makes the unit marks traced inside it obey the plan."""


@dataclass(frozen=True)
class Tracing:
    """What the marks of a step that is being traced go by."""

    plan: Plan
    owners: frozenset[tuple[str, str]] = frozenset()
    """(parameter, the `at` of the one mark that gathers it)."""
    recording: int | None = None
    """Set while the marks only say what they would gather. Unique, so that no earlier trace is used in its place."""


def current_plan() -> Plan | None:
    """The plan of the step being traced, None outside of one (and while marks are recorded)."""
    tracing: Tracing | None = plan_context.value
    return None if tracing is None or tracing.recording is not None else tracing.plan


def fully_shard(block: Any, *, at: str | None = None, remat: str | RematPolicy | None = None) -> Any:
    """Marks a unit: its parameters are gathered for its forward and again for its backward, its gradient scattered.

    FSDP2 `fully_shard(module)`, FSDP1 auto-wrapping, a DeepSpeed ZeRO-3 sub-module. Outside a train step the mark does
    nothing. Units nest: an inner unit gathers its own parameters, the outer one what is left (FSDP2). A parameter that
    several units use (tied weights) is gathered once a step, with the root unit, and its gradients are summed before they
    are scattered. Several small modules make one unit as the parameters of one function, or by marking what holds them
    (FSDP2 `fully_shard([a, b])`; `wrap_by_size` does it by size). What FSDP2 gives as arguments of each call
    (`reshard_after_forward`, `mp_policy`) are fields of `Unit` in `build_plan(units=...)`, `ignored_params` is
    `ZeroConfig.ignored`, and `shard_placement_fn` an argument of `build_plan`.

    Args:
      block: a function `block(params, x, ...)`; a `flax.nnx` or `flax.linen` module class (a subclass is returned) or
        instance (changed in place and returned, as FSDP2 does). `x`, its first argument, is the residual stream or the token ids, rows in dim 0; it and every output
        with as many rows are kept on the data axes.
      at: path of the parameters in the params pytree (`layers`, `decoder/embed`, or "" for the whole). Leaves below it
        must have the plan's shapes; those of a stacked unit (`units=("layers[*]",)`) come one layer at a time. A linen
        module knows its path, and needs none.
      remat: recompute the block in the backward: `"full"` (all but its inputs), `"dots"` (keep matrix products without
        batch dims), `zjax.save_names(...)`, `zjax.offload_names(...)`, a `jax.checkpoint` policy, or None. Gathered
        parameters are never saved by it. Give it here rather than wrapping the block in `jax.checkpoint`: what is
        recomputed and what is gathered again is one decision, and with `reshard_after_forward=False` gathered
        parameters are kept outside the recomputed part.

    Raises:
      ValueError: `at` is missing or `remat` is unknown; when a step is traced: a leaf whose path or shape differs from the
        plan's, a name to save that the block (but for a linen module) gives to nothing.
    """
    policy = remat_policy(remat)
    if isinstance(block, type) and issubclass(block, linen.Module):
        return _linen_class(block, at, policy)
    if isinstance(block, linen.Module):
        object.__setattr__(block, "__class__", _linen_class(type(block), at, policy))
        return block
    if at is None:
        raise ValueError("fully_shard: at=... is missing: the path of the unit's parameters in the params pytree")
    if isinstance(block, type) and issubclass(block, nnx.Module):
        return _nnx_class(block, at, policy)
    if isinstance(block, nnx.Module):
        # As FSDP2 does: the instance gets a class of its own, its parameters stay where they are.
        block.__class__ = _nnx_class(type(block), at, policy)
        return block

    @functools.wraps(block)
    def unit(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        return _run(on_rows_of(block, at), at, policy, params, args, kwargs)

    return unit


def wrap_by_size(module: nnx.Module, min_parameters: int, *, at: str = "", remat: str | RematPolicy | None = None) -> tuple[str, ...]:
    """Marks the submodules of an nnx module as units of at least so many parameters, bottom-up, in place.

    FSDP's `size_based_auto_wrap_policy`: a module becomes a unit once what its own units leave over reaches
    `min_parameters` elements; smaller modules are gathered with the unit that holds them. Lists and other modules that
    are not called are not units, and the module itself is left to the root unit.

    Returns the units' paths, for `build_plan(units=...)`.
    """
    wrapped: list[str] = []

    def visit(node: Any, path: str) -> int:
        """Elements below the node that no unit of its own gathers."""
        if isinstance(node, nnx.Variable):
            return node.get_value().size if isinstance(node, nnx.Param) else 0
        left = sum(visit(child, join(path, str(name))) for name, child in nnx.iter_children(node))
        if path == at or not callable(node) or left < min_parameters:
            return left
        fully_shard(node, at=path, remat=remat)
        wrapped.append(path)
        return 0

    visit(module, at)
    return tuple(wrapped)


def _run(
    block: Callable[..., Any], at: str, policy: RematPolicy | None, params: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tracing: Tracing | None = plan_context.value
    if tracing is None:
        return jax.checkpoint(lambda p: block(p, *args, **kwargs), policy=policy)(params) if policy else block(params, *args, **kwargs)
    check_shapes(tracing.plan, at, params)
    if tracing.recording is not None:
        with _noted([join(at, name) for name, _ in named_leaves(params)], at):
            if isinstance(policy, NamedPolicy):
                require_named(policy, names_in(lambda p: block(p, *args, **kwargs), params), f"fully_shard(at={at!r})")
            return block(params, *args, **kwargs)
    params, args, wait = _entered(tracing.plan, params, args)
    gathered, kept = _gather_of(tracing, at, params, wait)
    # Arguments are closed over, so that static ones (strings, booleans) stay static under jax.checkpoint.
    if not kept:
        return jax.checkpoint(lambda p: block(gathered(p), *args, **kwargs), policy=but_gathered(policy))(params)
    params = gathered(params)
    return jax.checkpoint(lambda p: block(p, *args, **kwargs), policy=policy)(params) if policy else block(params, *args, **kwargs)


def _entered(plan: Plan, params: PyTree, args: tuple[Any, ...]) -> tuple[PyTree, tuple[Any, ...], jax.Array | None]:
    """Parameters and arguments of a unit that is called, and what its gather waits for."""
    if not args:
        return params, args, None
    params, x, wait = take_turn(plan, params, args[0])
    return params, (x, *args[1:]), wait


def _gather_of(tracing: Tracing, at: str, params: PyTree, wait: jax.Array | None) -> tuple[Callable[[PyTree], PyTree], bool]:
    """What gathers a unit's parameters, and whether they are kept for the backward; other units' stay as they are."""
    plan, named = tracing.plan, named_leaves(params, is_leaf=is_local)
    paths = [join(at, name) for name, _ in named]
    mine = [(path, at) in tracing.owners for path in paths]
    leaves = [plan.params[path] for path in paths]
    if not plan.units and plan.zero.stage and plan.zero.engine == "auto":
        warnings.warn(
            f"fully_shard marks a unit at {at!r}, and the plan declares none: without build_plan(units=...) the partitioner engine takes it",
            stacklevel=2,
        )
    record_gathered([path for path, owned in zip(paths, mine, strict=True) if owned], at)

    def gathered(params: PyTree) -> PyTree:
        given = jax.tree.leaves(params, is_leaf=is_local)
        whole = [gather(plan, leaf, x, wait) if owned else x for leaf, x, owned in zip(leaves, given, mine, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_local), whole)

    return gathered, any(leaf.kept_gathered for leaf, owned in zip(leaves, mine, strict=True) if owned)


def cast_stream(plan: Plan, at: str, x: PyTree) -> PyTree:
    """A unit's input in the unit's dtype, where units have dtypes of their own (MixedPrecisionPolicy.cast_forward_inputs)."""
    if not any(unit.compute or unit.output for unit in plan.units):
        return x
    dtypes = {leaf.rest.dtype for name, leaf in plan.params.items() if not at or matches(at, name)}
    return _cast_floats(x, dtypes.pop()) if len(dtypes) == 1 else x


def cast_carry(plan: Plan, at: str, x: PyTree) -> PyTree:
    """The input of a loop of units in the dtype they hand on: a loop's carry keeps its dtype."""
    output = _output_dtype(plan, at)
    return cast_stream(plan, at, x) if output is None else _cast_floats(x, output)


def _output_dtype(plan: Plan, at: str) -> str | None:
    return next((unit.output for unit in plan.units if unit.prefix == at), None)


def _cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    is_float = lambda leaf: isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


@dataclass(frozen=True)
class _Turn:
    """A unit that was called: its input, and a scalar whose cotangent is there once the unit's gradient is scattered."""

    trace: Any
    x: jax.Array
    scattered: jax.Array


_turns: contextvars.ContextVar[list[_Turn] | None] = contextvars.ContextVar("zjax_turns", default=None)


@contextlib.contextmanager
def counting_turns() -> Iterator[None]:
    """Around the tracing of one loss: units know those called before them, for `ZeroConfig.max_gathered_units`."""
    token = _turns.set([])
    try:
        yield
    finally:
        _turns.reset(token)


def take_turn(plan: Plan, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree, jax.Array | None]:
    """A unit takes its turn among those called one after the other; returns its parameters, its input, and what to wait for.

    With n = `max_gathered_units`, its parameters are gathered once the unit n before it is done, and in the backward the
    unit n before it begins once its gradient is scattered: XLA would gather as early and scatter as late as it can. Units
    are in turn only within one trace: in a loop or a recomputed function a new count begins.
    """
    turns, limit = _turns.get(), plan.units_at_once
    arrays = [leaf for leaf in jax.tree.leaves(x) if isinstance(leaf, jax.Array) and leaf.size]
    if turns is None or not limit or plan.zero.stage < 2 or not arrays:
        return params, x, None
    trace = jax.extend.core.get_opaque_trace_state()
    before = [turn for turn in turns if turn.trace == trace]
    last = before[1 - limit] if 1 < limit <= len(before) + 1 else None
    params, x, scattered = _order_backward(params, x, last.scattered if last else jnp.zeros(()), alone=limit == 1)
    turns.append(_Turn(trace, arrays[0], scattered))
    wait = arrays[0] if limit == 1 else last.x if last else None
    return params, x, wait if len(before) >= limit else None


def _order_backward(params: PyTree, x: PyTree, earlier: jax.Array, *, alone: bool) -> tuple[PyTree, PyTree, jax.Array]:
    """The same values, and a scalar; in the backward x's cotangent waits for the scalar's (if `alone`, for the parameters').

    The cotangent of `earlier` is 0, once those of the parameters are there.
    """

    @jax.custom_vjp
    def ordered(gradients: list[jax.Array], floats: list[jax.Array], earlier: jax.Array) -> Any:
        return gradients, floats, jnp.zeros(())

    def backward(_: None, cotangents: Any) -> Any:
        gradients, floats, scattered = cotangents
        done = sum((zero_after(g) for g in gradients if g is not None and g.size), start=jnp.zeros(()))
        late = done if alone else scattered
        return gradients, [g + late.astype(g.dtype) for g in floats], done

    ordered.defvjp(lambda *inputs: (ordered(*inputs), None), backward)
    given, treedef = jax.tree.flatten(params, is_leaf=is_local)
    values, in_x = jax.tree.flatten(x)
    where = [i for i, leaf in enumerate(values) if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)]
    gradients, floats, scattered = ordered([p.gradient if is_local(p) else p for p in given], [values[i] for i in where], earlier)
    given = [dataclasses.replace(p, gradient=g) if is_local(p) else g for p, g in zip(given, gradients, strict=True)]
    for i, leaf in zip(where, floats, strict=True):
        values[i] = leaf
    return jax.tree.unflatten(treedef, given), jax.tree.unflatten(in_x, values), scattered


def on_rows_of(block: Callable[..., Any], at: str) -> Callable[..., Any]:
    """`block(params, x, ...)` with `x` and its outputs of as many rows kept on the data axes, and in the unit's dtypes.

    One missing constraint on the residual stream makes XLA gather activations, at several times the traffic.
    """

    @functools.wraps(block)
    def on_rows(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        plan = current_plan()
        if plan is None or not args:
            return block(params, *args, **kwargs)
        x, output = cast_stream(plan, at, args[0]), _output_dtype(plan, at)
        if not isinstance(x, jax.Array) or not x.ndim:
            return block(params, x, *args[1:], **kwargs)
        rows = x.shape[0]
        out = block(params, constrain_rows(plan, x, rows), *args[1:], **kwargs)
        if output is not None:
            has_rows = lambda leaf: isinstance(leaf, jax.Array) and leaf.shape[:1] == (rows,)  # noqa: E731
            out = jax.tree.map(lambda leaf: _cast_floats(leaf, output) if has_rows(leaf) else leaf, out)
        return constrain_rows(plan, out, rows)

    return on_rows


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


def recorded_marks(plan: Plan, trace: Callable[[], Any]) -> dict[str, set[str]]:
    """For each parameter of a unit the `at` of the marks that use it, found by `trace()`, which traces the loss.

    Parameters outside every unit, and those that several units share, belong to the root unit.
    """
    with record_marked() as marked, plan_context(Tracing(plan, recording=next(_recordings))):
        trace()
    return marked


def owners(marked: Mapping[str, set[str]]) -> frozenset[tuple[str, str]]:
    """(parameter, `at`) of those that one unit gathers."""
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


def _tracing() -> Tracing | None:
    """The step that is being traced. A function: the classes below are pickled by value, with the globals they name, this not."""
    return plan_context.value


def _nnx_class(cls: type, at: str, policy: RematPolicy | None) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _tracing() is None:
            return cls.__call__(self, *args, **kwargs)
        graphdef, params, rest = nnx.split(self, nnx.Param, ...)

        def run(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            module = nnx.merge(graphdef, params, rest, copy=True)  # its variables are written in this trace
            out = on_rows_of(lambda _, *a, **k: cls.__call__(module, *a, **k), at)(params, *args, **kwargs)
            return out, nnx.split(module, nnx.Param, ...)[2]

        out, new_rest = _run(run, at, policy, nnx.to_pure_dict(params), args, kwargs)
        nnx.update(self, new_rest)
        return out

    return _subclass(cls, call)


def _linen_class(cls: Any, at: str | None, policy: RematPolicy | None) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = _tracing()
        if (tracing is None and policy is None) or self.is_initializing():
            return cls.__call__(self, *args, **kwargs)
        path = "/".join(self.path) if at is None else at
        params = self.variables.get("params", {})
        if tracing is None:
            return linen.remat(lambda module: cls.__call__(module, *args, **kwargs), policy=policy)(self)
        check_shapes(tracing.plan, path, params)
        if tracing.recording is not None:
            with _noted([join(path, name) for name, _ in named_leaves(params)], path):
                return cls.__call__(self, *args, **kwargs)
        _, args, wait = _entered(tracing.plan, {}, args)
        gathered, kept = _gather_of(tracing, path, params, wait)
        run = lambda module: on_rows_of(lambda _, *a, **k: cls.__call__(module, *a, **k), path)(None, *args, **kwargs)  # noqa: E731
        in_trace = lambda collections: collections | {"params": gathered(collections["params"])}  # noqa: E731
        if not kept:
            return linen.remat(linen.map_variables(run, "params", in_trace), policy=but_gathered(policy))(self)
        inner = linen.remat(run, policy=policy) if policy else run
        return linen.map_variables(inner, "params", in_trace)(self)

    return _subclass(cls, call)


def _subclass(cls: type, call: Callable[..., Any]) -> type:
    """`cls` under its own name (linen names parameters after classes), called through the mark."""
    functools.update_wrapper(call, cls.__call__, updated=())
    return type(cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__, "__module__": cls.__module__})
