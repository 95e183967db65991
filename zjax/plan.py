"""The Plan: where every leaf of the train state lies, in every role, and why. Nothing else decides placement.

A ZeRO stage is a choice of specs (Rajbhandari et al. 2020, section 5; FSDP, Zhao et al. 2023):

    stage              params at rest   params in compute   gradients   optimizer state
    0 (DDP)            replicated       replicated          replicated  replicated
    1 (ZeRO-1)         replicated       replicated          replicated  sharded
    2 (ZeRO-2)         replicated       replicated          sharded     sharded
    3 (ZeRO-3, FSDP)   sharded          a unit at a time    sharded     sharded
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zjax import describe
from zjax import rules as rules_lib
from zjax.config import AccumulationConfig, PrecisionConfig, Unit, ZeroConfig
from zjax.fields import ConfigError
from zjax.mesh import AnyMesh, data_axes, degree, physical_axes, shard_shape, spec_axes, zero_axes
from zjax.precision import LOSS_SCALE_DTYPES, compute_dtype
from zjax.tree import PyTree, Shape, leaf_bytes, matches, named_leaves, path_name, require_all_used

COUNTERS = (("step", jnp.dtype("int32")), ("skipped_steps", jnp.dtype("int32")), ("rng", jax.eval_shape(jax.random.key, 0).dtype))
"""Scalars of every train state beside parameters and optimizer state: (path, dtype)."""


@dataclass(frozen=True)
class Placement:
    """How one value lies: its spec on the mesh, its dtype, and the memory it is in."""

    spec: P
    dtype: Any
    memory_kind: str = "device"


@dataclass(frozen=True, kw_only=True)
class LeafPlan:
    """One leaf of the train state in each of its roles. Only parameters have roles beside `rest`."""

    path: str
    """Path in the train state: `params/layers/wq`, `opt_state/inner/0/mu/layers/wq`, `step`."""
    part: str
    """`params`, `master`, `optimizer` or `counter`."""
    shape: Shape
    """Of the whole leaf, a stacked layer dim included."""
    rest: Placement
    """Between steps."""
    forward: Placement | None = None
    """What the unit computes with."""
    backward: Placement | None = None
    """What is kept from the forward for the backward, to be gathered again where it is sharded."""
    accumulator: Placement | None = None
    """The gradient; None for a frozen parameter."""
    optimizer: Placement | None = None
    """What the optimizer updates: the master weight, or the parameter itself; moments follow it. None for a frozen one."""
    unit: str = ""
    """The unit the parameter is gathered with; empty for the root unit."""
    stacked: bool = False
    """Whether dim 0 counts layers; each layer is then a unit of its own."""
    reduce: Any = None
    """Dtype in which the gradient travels (FSDP2 MixedPrecisionPolicy.reduce_dtype)."""
    zero_axes: tuple[str, ...] = ()
    """Mesh axes over which ZeRO shards this leaf in one role at least."""
    partial: tuple[str, ...] = ()
    """Mesh axes over which the gradient is still unreduced between micro-batches."""
    reason: str | None = None
    """Why a role that the stage would shard is not sharded."""

    @property
    def name(self) -> str:
        """The path inside its own tree (`layers/wq`): what patterns and `fully_shard(at=...)` refer to."""
        return self.path.removeprefix("params/").removeprefix("opt_state/master/")

    @property
    def kept_gathered(self) -> bool:
        """Whether the gathered parameter is kept from the forward to the backward (FSDP2 reshard_after_forward=False)."""
        return self.forward is not None and self.rest.spec != self.forward.spec and self.backward == self.forward

    @property
    def moves_by_layer(self) -> bool:
        """Whether a unit's forward gathers the parameter, or its backward scatters the gradient."""
        assert self.forward is not None
        scatters = self.accumulator is not None and self.forward.spec != self.accumulator.spec
        return self.forward.spec != self.rest.spec or scatters

    @property
    def trained(self) -> bool:
        """Whether the parameter has a gradient (torch requires_grad); a frozen one has no moments and no master either."""
        return self.optimizer is not None

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates an fp32 master weight of the parameter, and not the parameter itself."""
        return self.optimizer is not None and self.rest.dtype != self.optimizer.dtype

    def bytes_on(self, mesh: AnyMesh, role: str = "rest") -> int:
        """Bytes one device holds of the leaf in a role."""
        placed: Placement | None = getattr(self, role)
        return leaf_bytes(shard_shape(mesh, placed.spec, self.shape), placed.dtype) if placed else 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The arguments of `build_plan` but for the mesh."""

    zero: ZeroConfig
    init_fn: Callable[[jax.Array], PyTree]
    tx: optax.GradientTransformation
    precision: PrecisionConfig
    accumulation: AccumulationConfig
    units: tuple[Unit, ...]
    rules: tuple[rules_lib.Rule, ...]
    shard_placement: Callable[[str, Shape], int | None] | None
    frozen: tuple[str, ...]
    trainable: tuple[str, ...]

    def build(self, mesh: AnyMesh) -> Plan:
        """The plan on a mesh."""
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return build_plan(arguments.pop("zero"), arguments.pop("init_fn"), arguments.pop("tx"), mesh, **arguments)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of the whole train state on a mesh. Hashable: the unit marks of a traced step look it up."""

    mesh: AnyMesh
    zero: ZeroConfig
    precision: PrecisionConfig
    accumulation: AccumulationConfig
    engine: str
    engine_reason: str
    units: tuple[Unit, ...]
    leaves: tuple[LeafPlan, ...]
    """One per leaf of the train state, in its order."""
    batch_spec: P
    """Dim 0 of every batch leaf, over the data axes."""
    residual_spec: P
    """Activations between units: dim 0 like the batch, the other dims left to XLA."""
    params_treedef: Any
    inner_treedef: Any
    recipe: Recipe = field(compare=False)
    """What the plan was built from: it builds the plan for another mesh."""

    def part(self, part: str) -> tuple[LeafPlan, ...]:
        """The leaves of one part, in tree order."""
        return tuple(leaf for leaf in self.leaves if leaf.part == part)

    @functools.cached_property
    def params(self) -> dict[str, LeafPlan]:
        """Parameters by name (`layers/wq`)."""
        return {leaf.name: leaf for leaf in self.part("params")}

    @functools.cached_property
    def trained(self) -> tuple[LeafPlan, ...]:
        """The parameters that have gradients, in tree order."""
        return tuple(leaf for leaf in self.part("params") if leaf.trained)

    def trained_tree(self, values: Iterable[Any]) -> PyTree:
        """A pytree like the parameters, of one value for each of `trained` and None (no leaf) for each frozen one."""
        supply = iter(values)
        return jax.tree.unflatten(self.params_treedef, [next(supply) if leaf.trained else None for leaf in self.part("params")])

    @property
    def units_at_once(self) -> int:
        """How many units that stand one after the other are whole at once at most; 0 where XLA decides."""
        if self.engine == "partitioner" or physical_axes(self.mesh, "tensor"):
            return 0
        return self.zero.prefetch + 1 if self.zero.max_gathered_units is None else self.zero.max_gathered_units

    @property
    def data_degree(self) -> int:
        """Over how many devices the batch is split."""
        return degree(self.mesh, data_axes(self.mesh))

    def sharding(self, placed: Placement) -> NamedSharding:
        """The placement as a jax sharding on this plan's mesh."""
        return NamedSharding(self.mesh, placed.spec, memory_kind=None if placed.memory_kind == "device" else placed.memory_kind)

    def params_tree(self, role: str) -> PyTree:
        """A pytree like the parameters, of their shardings in a role; None where a frozen parameter has no such role."""
        placed = [getattr(leaf, role) for leaf in self.part("params")]
        return jax.tree.unflatten(self.params_treedef, [self.sharding(place) if place else None for place in placed])

    def table(self) -> str:
        """Every leaf: shape, dtype, spec in each role, bytes a device, and why it is not sharded."""
        return describe.table(self)

    def diff(self, other: Plan) -> str:
        """The leaves and roles in which `other` differs, one a line; empty where none does."""
        return "\n".join(describe.differences(self, other))


def build_plan(
    zero: ZeroConfig,
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    mesh: AnyMesh,
    *,
    precision: PrecisionConfig = PrecisionConfig(compute="float32"),  # noqa: B008  (frozen)
    accumulation: AccumulationConfig = AccumulationConfig(),  # noqa: B008
    units: Sequence[str | Unit] = (),
    rules: Sequence[rules_lib.Rule] = (),
    shard_placement: Callable[[str, Shape], int | None] | None = None,
    frozen: Sequence[str] = (),
    trainable: Sequence[str] = (),
) -> Plan:
    """Plans the train state of `init_fn` and `tx` on `mesh`, from shapes alone: nothing is allocated.

    Args:
      zero: the stage and its knobs.
      init_fn: `init_fn(key) -> params`, a pytree of floating arrays.
      tx: any optax optimizer. Its state's specs follow from structure and shapes, not from field names.
      mesh: from `make_mesh`, or `abstract_mesh` to plan for devices that are not there.
      precision: compute dtype, and with it whether there is an fp32 master.
      accumulation: micro-batches per step; above 1 gradients are held in float32.
      units: path prefixes gathered together, or `Unit`s where one has a policy of its own. `"layers[*]"`: leaves below
        `layers` are stacked, their dim 0 counts layers, ZeRO never shards it, and each layer is a unit. Leaves of no
        unit belong to the root unit.
      rules: the user's rules, applied before ZeRO's (`zjax.rules`).
      shard_placement: FSDP2's shard_placement_fn, `(path, shape) -> dim` or None for ZeRO's choice.
      frozen: patterns of parameters that are not trained (torch requires_grad=False): no gradient, moments or master; `tx`
        sees None in their place. At stage 3 they are sharded and gathered as the others.
      trainable: patterns of the only parameters that are trained (LoRA); empty for all but the frozen ones.

    Raises:
      ValueError: a pattern or unit that names no leaf; a rule whose dim does not divide; a parameter that is not
        floating; with `zero.strict`, a leaf that has no dim that divides; `optax.MultiSteps` beside micro-batches.
    """
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    named, treedef = named_leaves(shapes), jax.tree.structure(shapes)
    names = [name for name, _ in named]
    require_all_used(zero.ignored, names, "zero.ignored")
    require_all_used(frozen, names, "frozen")
    require_all_used(trainable, names, "trainable")
    require_all_used(precision.keep_float32, names, "precision.keep_float32")
    for rule in rules:
        require_all_used(getattr(rule, "patterns", ()), names, "rules")
    declared = tuple(unit if isinstance(unit, Unit) else Unit(unit) for unit in units)
    require_all_used([unit.prefix for unit in declared], names, "units")
    for name, leaf in named:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"params/{name} is {leaf.dtype}{list(leaf.shape)}: parameters are trained, so they must be floating")
    if degree(mesh, zero_axes(mesh)) == 1 and zero.stage:
        warnings.warn(f"zero.stage={zero.stage} on a mesh with one device to shard over: nothing is sharded", stacklevel=2)

    chain = [*rules, *([rules_lib.placement(shard_placement)] if shard_placement else [])]
    _reject_idle_knobs(zero, precision, accumulation, declared)
    engine, engine_reason = _choose_engine(zero, precision, accumulation, declared, mesh)
    params = [_plan_param(name, leaf.shape, zero, precision, accumulation, mesh, engine, chain, declared) for name, leaf in named]
    params = [_plan_frozen(leaf) if _is_frozen(leaf.name, frozen, trainable) else leaf for leaf in params]
    if not any(leaf.trained for leaf in params):
        raise ValueError(f"frozen={list(frozen)}, trainable={list(trainable)}: no parameter is left to train")
    _warn_of_whole(params, zero, mesh)
    master = [_plan_master(leaf) for leaf in params if leaf.has_master]

    optimized = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) if leaf.trained else None for leaf in params]
    inner_shapes = jax.eval_shape(tx.init, jax.tree.unflatten(treedef, optimized))
    _reject_double_accumulation(inner_shapes, accumulation)
    inner = _plan_optimizer(tx, inner_shapes, jax.tree.unflatten(treedef, [leaf if leaf.trained else None for leaf in params]), zero, mesh)
    step, skipped_steps, rng = (_plan_counter(path, dtype) for path, dtype in COUNTERS)
    scaled = precision.compute == "float16"
    loss_scale = [_plan_counter(f"loss_scale/{name}", jnp.dtype(dtype)) for name, dtype in LOSS_SCALE_DTYPES.items() if scaled]
    axes = data_axes(mesh)
    return Plan(
        mesh=mesh,
        zero=zero,
        precision=precision,
        accumulation=accumulation,
        engine=engine,
        engine_reason=engine_reason,
        units=declared,
        leaves=(step, *params, *master, *inner, rng, skipped_steps, *loss_scale),
        batch_spec=rules_lib.at_dim(0, axes) if axes else P(),
        residual_spec=rules_lib.at_dim(0, axes) if axes else P(),
        params_treedef=treedef,
        inner_treedef=jax.tree.structure(inner_shapes),
        recipe=Recipe(
            zero=zero,
            init_fn=init_fn,
            tx=tx,
            precision=precision,
            accumulation=accumulation,
            units=declared,
            rules=tuple(rules),
            shard_placement=shard_placement,
            frozen=tuple(frozen),
            trainable=tuple(trainable),
        ),
    )


def _plan_param(
    name: str,
    shape: Shape,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    accumulation: AccumulationConfig,
    mesh: AnyMesh,
    engine: str,
    chain: Sequence[rules_lib.Rule],
    units: Sequence[Unit],
) -> LeafPlan:
    unit, stacked = _unit_of(name, units)
    if stacked and not shape:
        raise ValueError(f"params/{name}: unit {unit.prefix!r} is stacked, but this leaf is a scalar")
    spec = P()
    for rule in chain:
        spec = rule(spec, name, shape, mesh)
    if stacked and len(spec) and spec[0] is not None:
        raise ValueError(
            f"params/{name}: a rule shards dim 0 of shape {shape}, which counts the layers of unit {unit.prefix!r}; shard another dim"
        )
    axes = zero_axes(mesh)
    whole = _without(spec, axes)
    ignored = any(matches(pattern, name) for pattern in zero.ignored)
    sharded, reason = (whole, "ignored") if ignored else rules_lib.shard_largest(spec, name, shape, mesh, first_dim=int(stacked))
    if zero.strict and reason and reason.startswith("no dim divides"):
        raise ValueError(
            f"params/{name}: shape {shape} cannot be sharded over axes {axes} of size {degree(mesh, axes)}: {reason}. "
            "Change the shape or the mesh, list it in zero.ignored, or set zero.strict=False to keep it whole"
        )
    persistent = zero.stage == 3 and math.prod(shape[int(stacked) :]) < zero.persistence_threshold
    if persistent and reason is None:
        reason = f"parameter kept whole: {math.prod(shape[int(stacked) :])} < persistence_threshold {zero.persistence_threshold}"
    dtype = compute_dtype(precision, unit.compute, name)
    reduce = jnp.dtype(unit.reduce or precision.reduce or dtype)
    gradient_dtype = reduce if accumulation.micro_batches == 1 else jnp.dtype(precision.accumulate)
    reshard = zero.reshard_after_forward if unit.reshard_after_forward is None else unit.reshard_after_forward
    rest = sharded if zero.stage == 3 and not persistent else whole
    micro_batched = accumulation.micro_batches > 1
    scattered = zero.stage >= 2 and not (accumulation.mode == "local" and micro_batched)
    accumulator = sharded if scattered else whole
    partial = () if engine == "partitioner" else data_axes(mesh)
    if accumulator != whole and partial:
        # Scattered unit by unit in the backward; across replicas the shards are summed there too, or once a step.
        partial = tuple(axis for axis in partial if axis not in spec_axes(accumulator)) if micro_batched else ()
    return LeafPlan(
        path=f"params/{name}",
        part="params",
        shape=shape,
        rest=Placement(rest, dtype),
        forward=Placement(whole, dtype),
        backward=Placement(rest if reshard else whole, dtype),
        accumulator=Placement(accumulator, gradient_dtype),
        optimizer=Placement(sharded if zero.stage >= 1 else whole, jnp.dtype("float32")),
        unit=unit.prefix,
        stacked=stacked,
        reduce=reduce,
        zero_axes=tuple(axis for axis in axes if axis in spec_axes(sharded)) if zero.stage else (),
        partial=partial,
        reason=reason if zero.stage else "stage 0 shards nothing",
    )


def _is_frozen(name: str, frozen: Sequence[str], trainable: Sequence[str]) -> bool:
    named = lambda patterns: any(matches(pattern, name) for pattern in patterns)  # noqa: E731
    return named(frozen) or (bool(trainable) and not named(trainable))


def _plan_frozen(param: LeafPlan) -> LeafPlan:
    """The parameter without the roles of one that is trained."""
    axes = tuple(axis for axis in param.zero_axes if axis in spec_axes(param.rest.spec))
    reason = param.reason or (None if axes else "frozen: only what is trained has state to shard")
    return dataclasses.replace(param, accumulator=None, optimizer=None, reduce=None, partial=(), zero_axes=axes, reason=reason)


def _warn_of_whole(params: Sequence[LeafPlan], zero: ZeroConfig, mesh: AnyMesh) -> None:
    """A degree that divides next to nothing leaves a stage only in name."""
    axes = zero_axes(mesh)
    if not zero.stage or degree(mesh, axes) == 1:
        return
    whole = [leaf for leaf in params if leaf.trained and leaf.optimizer and not set(spec_axes(leaf.optimizer.spec)) & set(axes)]
    elements, total = (sum(math.prod(leaf.shape) for leaf in leaves) for leaves in (whole, params))
    if 2 * elements > total:
        degrees = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
        warnings.warn(
            f"zero.stage={zero.stage} over {degrees}: {len(whole)} of {len(params)} leaves, {elements / total:.0%} of the parameters, stay whole "
            f"({whole[0].path}: {whole[0].reason}); plan.table() has every reason",
            stacklevel=3,
        )


def _reject_idle_knobs(zero: ZeroConfig, precision: PrecisionConfig, accumulation: AccumulationConfig, units: Sequence[Unit]) -> None:
    """ConfigError for a knob of which nothing, or nothing good, would come."""
    if not zero.reshard_after_backward and accumulation.micro_batches == 1:
        raise ConfigError(
            "zero.reshard_after_backward=False: it keeps parameters gathered from one micro-batch to the next, and "
            "accumulation.micro_batches is 1; leave it True"
        )
    for unit in units:
        for knob in ("compute", "reduce"):
            if getattr(unit, knob) == "float16" and precision.compute != "float16":
                raise ConfigError(
                    f"Unit({unit.path!r}).{knob}='float16': its gradients overflow unless the loss is scaled; use "
                    "precision.compute='float16' and give the other units a compute dtype of their own, or 'bfloat16' here"
                )
        if unit.reshard_after_forward is not None and zero.stage < 3:
            raise ConfigError(
                f"Unit({unit.path!r}).reshard_after_forward={unit.reshard_after_forward}: only stage 3 gathers parameters; "
                f"with zero.stage={zero.stage} leave it None"
            )


def _choose_engine(
    zero: ZeroConfig, precision: PrecisionConfig, accumulation: AccumulationConfig, units: Sequence[Unit], mesh: AnyMesh
) -> tuple[str, str]:
    """The engine and why; ConfigError where the one asked for cannot do what the configs say."""
    needs_explicit = {
        "zero.max_gathered_units: the partitioner leaves to XLA how many units are gathered at once": bool(zero.max_gathered_units),
        "accumulation.mode='local': the partitioner reduces gradients in every micro-batch": accumulation.mode == "local"
        and accumulation.micro_batches > 1,
        "precision.reduce: the partitioner reduces gradients in the dtype they are computed in": any(
            (unit.reduce or precision.reduce) not in (None, unit.compute or precision.compute) for unit in (*units, Unit(""))
        ),
    }
    reasons = [reason for reason, needed in needs_explicit.items() if needed]
    if zero.engine == "partitioner" and reasons:
        raise ConfigError(
            f"{reasons[0]}; use zero.engine='explicit' (or 'auto'), or leave that knob at its default (accumulation.mode='sharded')"
        )
    if zero.max_gathered_units and physical_axes(mesh, "tensor"):
        raise ConfigError(f"zero.max_gathered_units={zero.max_gathered_units}: not available with mesh.tensor above 1; leave it None")
    if zero.engine != "auto":
        return zero.engine, "asked for"
    if reasons:
        return "explicit", f"auto, for {reasons[0]}"
    if degree(mesh, data_axes(mesh)) == 1:
        return "partitioner", "auto: one device has the whole batch, so there is nothing to move"
    if not units:
        return "partitioner", "auto: no units are declared, so XLA decides when parameters are gathered"
    return "explicit", "auto: every unit is gathered and scattered where the plan says, and nowhere else"


def _unit_of(name: str, units: Sequence[Unit]) -> tuple[Unit, bool]:
    """The most deeply nested unit the leaf lies in, and whether its layers are stacked."""
    containing = [unit for unit in units if matches(unit.prefix, name)]
    return max(containing, key=lambda unit: len(unit.prefix), default=Unit("")), any(unit.stacked for unit in containing)


def _without(spec: P, axes: Sequence[str]) -> P:
    """The spec with some mesh axes taken out: what is left when they are gathered."""
    entries: list[Any] = []
    for entry in spec:
        kept = tuple(axis for axis in spec_axes(P(entry)) if axis not in axes)
        entries.append(kept[0] if len(kept) == 1 else kept or None)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def _plan_counter(path: str, dtype: Any) -> LeafPlan:
    return LeafPlan(path=path, part="counter", shape=(), rest=Placement(P(), dtype), reason="scalar")


def _plan_master(param: LeafPlan) -> LeafPlan:
    assert param.optimizer is not None
    return LeafPlan(
        path=f"opt_state/master/{param.name}",
        part="master",
        shape=param.shape,
        rest=param.optimizer,
        unit=param.unit,
        stacked=param.stacked,
        zero_axes=param.zero_axes,
        reason=None if spec_axes(param.optimizer.spec) else param.reason,
    )


def _plan_optimizer(tx: Any, shapes: PyTree, params: PyTree, zero: ZeroConfig, mesh: AnyMesh) -> list[LeafPlan]:
    """Leaf plans of the optax state, in its leaf order.

    optax labels each leaf with the parameter it belongs to, or none. A leaf of the parameter's shape lies as the
    master does; any other (adafactor's row and column factors, a preconditioner) gets ZeRO's rule on its own shape.
    """

    def owned(state: PyTree, params: PyTree) -> PyTree:
        # For each parameter the state may hold an array, a list of them (SM3) or nothing, and nothing for a whole subtree
        # (a label of optax.multi_transform for several parameters): the path says whose a leaf is.
        owners = dict(jax.tree_util.tree_flatten_with_path(params)[0])
        owner_of = lambda path: next(owners[path[:n]] for n in range(len(path), -1, -1) if path[:n] in owners)  # noqa: E731
        return jax.tree_util.tree_map_with_path(lambda path, _: owner_of(path), state)

    owners = optax.tree_map_params(tx, owned, shapes, params, transform_non_params=lambda _: _NO_OWNER, is_leaf=lambda _: True)
    flat_owners = jax.tree.leaves(owners, is_leaf=lambda x: isinstance(x, LeafPlan))
    flat = jax.tree_util.tree_flatten_with_path(shapes)[0]
    return [_plan_optimizer_leaf(path_name(path), leaf, owner, zero, mesh) for (path, leaf), owner in zip(flat, flat_owners, strict=True)]


_NO_OWNER = LeafPlan(path="", part="", shape=(-1,), rest=Placement(P(), None))


def _plan_optimizer_leaf(name: str, leaf: Any, owner: LeafPlan, zero: ZeroConfig, mesh: AnyMesh) -> LeafPlan:
    stacked = owner.stacked and leaf.shape[:1] == owner.shape[:1]
    if owner.optimizer is not None and leaf.shape == owner.shape:
        spec, reason = owner.optimizer.spec, None if spec_axes(owner.optimizer.spec) else owner.reason
    elif zero.stage == 0:
        spec, reason = P(), "stage 0 shards nothing"
    elif owner.reason == "ignored":
        spec, reason = P(), "ignored"
    else:
        spec, reason = rules_lib.shard_largest(P(), name, leaf.shape, mesh, first_dim=int(stacked))
    return LeafPlan(
        path=f"opt_state/inner/{name}",
        part="optimizer",
        shape=leaf.shape,
        rest=Placement(spec, leaf.dtype),
        unit=owner.unit,
        stacked=stacked,
        zero_axes=tuple(axis for axis in zero_axes(mesh) if axis in spec_axes(spec)),
        reason=reason,
    )


def _reject_double_accumulation(inner_shapes: PyTree, accumulation: AccumulationConfig) -> None:
    states = jax.tree.leaves(inner_shapes, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    if accumulation.micro_batches > 1 and any(isinstance(state, optax.MultiStepsState) for state in states):
        raise ValueError(
            f"optax.MultiSteps and accumulation.micro_batches={accumulation.micro_batches} both accumulate: "
            "set micro_batches to 1, or take MultiSteps out of the optimizer"
        )


def require_devices(plan: Plan) -> Mesh:
    """The plan's mesh, if it has devices; ValueError for one built on an abstract mesh."""
    if not isinstance(plan.mesh, Mesh):
        raise ValueError("this plan was built on an abstract mesh, which has no devices: build it on zjax.make_mesh(...) to run it")
    return plan.mesh
