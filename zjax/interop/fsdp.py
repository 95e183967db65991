"""What PyTorch's FSDP1 and FSDP2 were told, as zjax's configs: their arguments by their names, without importing torch.

Enums may be given by name or as torch's own members, dtypes as `"bfloat16"` or `torch.bfloat16`, policies as dictionaries or as
torch's own objects. Modules have no counterpart: give the patterns of their parameters' paths.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zjax.config import DTYPES, AccumulationConfig, MeshConfig, PrecisionConfig, Unit, ZeroConfig
from zjax.fields import ConfigError, NotAvailableError, nearest

MIN_NUM_PARAMS = 1_000_000
"""`min_num_params` of FSDP1's size_based_auto_wrap_policy, of default 1e6 there (elements)."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"stage": 3},
    "SHARD_GRAD_OP": {"stage": 3, "reshard_after_forward": False},
    "NO_SHARD": {"stage": 0},
    "HYBRID_SHARD": {"stage": 3},
    "_HYBRID_SHARD_ZERO2": {"stage": 3, "reshard_after_forward": False},
}
"""FSDP1's ShardingStrategy as fields of `ZeroConfig`; the hybrid ones need a mesh of two dims."""

PREFETCH = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NONE": 0}
"""FSDP1's BackwardPrefetch as `zero.prefetch`: BACKWARD_POST gathers the next unit when the last one is done with, ahead of nothing."""

FSDP1_NO_MEANING = {
    "param_init_fn": "init_state runs init_fn so that every array is born in its shard; there is no meta device to leave",
    "device_id": "the mesh holds the devices",
    "sync_module_states": "the state is a function of the seed, the same on every process",
    "use_orig_params": "parameters keep their names and shapes; there is no FlatParameter",
}
"""Arguments of FSDP1 that change nothing, and why."""

MIXED_PRECISION_DEFAULTS = {
    "param_dtype": None, "reduce_dtype": None, "buffer_dtype": None, "keep_low_precision_grads": False,
    "cast_forward_inputs": False, "cast_root_forward_inputs": True, "_module_classes_to_ignore": (),
}  # fmt: skip
"""Fields of FSDP1's MixedPrecision."""

MP_POLICY_DEFAULTS = {"param_dtype": None, "reduce_dtype": None, "output_dtype": None, "cast_forward_inputs": True}
"""Fields of FSDP2's MixedPrecisionPolicy."""

FULLY_SHARD = ("mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params")
"""Arguments of FSDP2's fully_shard."""


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """What FSDP's arguments become: the arguments of `make_mesh` and `build_plan`."""

    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    zero: ZeroConfig = dataclasses.field(default_factory=ZeroConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=lambda: PrecisionConfig(compute="float32"))
    accumulation: AccumulationConfig = dataclasses.field(default_factory=AccumulationConfig)
    units: tuple[Unit, ...] = ()
    wrap_by_size: int | None = None
    """Elements from which a module is a unit of its own: `units=zjax.wrap_by_size(model, config.wrap_by_size)`."""
    shard_placement: Any = None
    """FSDP2's shard_placement_fn, `(path, shape) -> dim or None`, for `build_plan(shard_placement=...)`."""


def from_fsdp1(
    *,
    sharding_strategy: Any = None,
    cpu_offload: Any = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: Any = "BACKWARD_PRE",
    mixed_precision: Any = None,
    ignored_modules: Sequence[str] | str | None = None,
    param_init_fn: Any = None,
    device_id: Any = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    use_orig_params: bool = False,
    ignored_states: Sequence[str] | str | None = None,
    device_mesh: Any = None,
    process_group: Any = None,
    micro_batches: int = 1,
    no_sync: bool = False,
) -> FSDPConfig:
    """The constructor's arguments of FullyShardedDataParallel (FSDP1). Warns, once, of those that change nothing.

    Args:
      sharding_strategy: a name of `STRATEGIES`; None is FULL_SHARD.
      cpu_offload: None, a bool, or CPUOffload.
      auto_wrap_policy: None; a number of elements or {"min_num_params": n} (size_based_auto_wrap_policy, of default
        `MIN_NUM_PARAMS`); or the paths of the units, for transformer_auto_wrap_policy and ModuleWrapPolicy.
      backward_prefetch, forward_prefetch: a name of `PREFETCH`, and a bool. zjax gathers a unit ahead in both directions or
        in neither, so either asks for both.
      mixed_precision: fields of `MIXED_PRECISION_DEFAULTS`. reduce_dtype None is param_dtype. `_module_classes_to_ignore` are
        patterns of parameters that stay float32. cast_root_forward_inputs is up to the loss, which gets the batch as it is.
      ignored_modules, ignored_states: patterns of parameter paths, left whole. (Their gradients are reduced all the same.)
      limit_all_gathers: False lifts the bound on units that are whole at once.
      device_mesh: its shape: (shards,), or (replicas, shards) for the hybrid strategies.
      process_group: only None: the mesh says which devices take part.
      micro_batches: micro-batches a step, of which all but the last ran under no_sync() if `no_sync`.

    Raises:
      ConfigError: an argument that cannot be honoured, and what to use.
      NotAvailableError: CPU offload.
    """
    strategy = _name(sharding_strategy or "FULL_SHARD").upper()
    if strategy not in STRATEGIES:
        raise ConfigError(f"sharding_strategy={strategy!r}: {nearest(strategy, map(str.lower, STRATEGIES))}known: {', '.join(STRATEGIES)}")
    _refuse_offload("cpu_offload", _fields(cpu_offload, {"offload_params": False}, "cpu_offload")["offload_params"])
    if process_group is not None:
        raise ConfigError("process_group: a mesh of devices takes its place; give device_mesh=(shards,) or (replicas, shards)")
    prefetch = _name(backward_prefetch).upper()
    if prefetch not in PREFETCH:
        raise ConfigError(f"backward_prefetch={prefetch!r}: must be {', '.join(PREFETCH)}")
    zero = dict(STRATEGIES[strategy])
    if zero["stage"] == 3:
        zero |= {"prefetch": max(PREFETCH[prefetch], int(forward_prefetch)), "max_gathered_units": None if limit_all_gathers else 0}
        # Inside no_sync() SHARD_GRAD_OP does not reshard after a backward either.
        zero["reshard_after_backward"] = not (no_sync and "reshard_after_forward" in zero)
    wrap, units = _wrapping(auto_wrap_policy)
    precision, casts = _precision(mixed_precision)
    if casts and not units:
        raise ConfigError("mixed_precision.cast_forward_inputs=True: units cast their inputs; give their paths as auto_wrap_policy")
    config = FSDPConfig(
        mesh=_mesh(device_mesh, hybrid="HYBRID" in strategy, name="device_mesh"),
        zero=ZeroConfig(**zero, ignored=_patterns(ignored_modules, "ignored_modules") + _patterns(ignored_states, "ignored_states")),
        precision=precision,
        accumulation=AccumulationConfig(micro_batches=micro_batches, mode="local" if no_sync and zero["stage"] else "sharded"),
        units=tuple(dataclasses.replace(unit, compute=precision.compute) for unit in units) if casts else units,
        wrap_by_size=wrap,
    )
    given = {"param_init_fn": param_init_fn, "device_id": device_id, "sync_module_states": sync_module_states, "use_orig_params": use_orig_params}  # fmt: skip
    idle = [f"{name} ({FSDP1_NO_MEANING[name]})" for name, value in given.items() if value is not None and value is not False]
    if idle:
        warnings.warn("FSDP: accepted, and change nothing: " + "; ".join(idle), UserWarning, stacklevel=2)
    return config


def from_fsdp2(calls: Mapping[str, Mapping[str, Any]], *, micro_batches: int = 1, gradient_sync: bool = True) -> FSDPConfig:
    """The calls of fully_shard (FSDP2): the path of each wrapped module, "" for the root, and the call's other arguments.

    `from_fsdp2({"layers[*]": {"mp_policy": policy}, "": {"mesh": (2, 4), "mp_policy": policy}})`. `reshard_after_forward` None
    is True, but for the root False, as there. What the units have in common is the run's; a `Unit` holds what is its own.

    Args:
      calls: arguments by name, of `FULLY_SHARD`. mesh is its shape, (shards,) or (replicas, shards); ignored_params are
        patterns of paths; shard_placement_fn is `(path, shape) -> dim or None`. An mp_policy's reduce_dtype None is param_dtype.
      micro_batches: micro-batches a step.
      gradient_sync: False if all but the last ran under set_requires_gradient_sync(False).

    Raises:
      ConfigError: an argument that cannot be honoured, and what to use.
      NotAvailableError: an integer reshard_after_forward (a secondary shard group), CPU offload.
    """
    if "" not in calls:
        raise ConfigError('from_fsdp2: the call on the root is missing; without it FSDP2 leaves other parameters whole. Add {"": {}}')
    for path, call in calls.items():
        for name in call:
            if name not in FULLY_SHARD:
                raise ConfigError(f"fully_shard at {path!r}: {name}: {nearest(name, FULLY_SHARD)}known: {', '.join(FULLY_SHARD)}")
        _refuse_offload(f"fully_shard at {path!r}: offload_policy", _name(call.get("offload_policy") or "").startswith("CPU"))
    root, policy = calls[""], _mp_policy(calls[""], "")
    mesh = _mesh(_common(calls, "mesh"), hybrid=None, name="mesh")
    reshard = {path: _reshard(call.get("reshard_after_forward"), path, mesh) for path, call in calls.items()}
    units = []
    for path, call in calls.items():
        own = _mp_policy(call, path)
        if path:
            unit = Unit(
                path,
                reshard_after_forward=reshard[path] if reshard[path] != reshard[""] else None,
                compute=own["param_dtype"],  # also where it is the run's: a unit that names its dtype casts its inputs
                reduce=own["reduce_dtype"] if own["reduce_dtype"] != policy["reduce_dtype"] else None,
                output=own["output_dtype"],
            )
            units.append(unit)
    if policy["output_dtype"] is not None:
        raise ConfigError(
            f"fully_shard at '': mp_policy.output_dtype={policy['output_dtype']!r}: the loss is float32; cast what the model returns"
        )
    ignored = tuple(pattern for call in calls.values() for pattern in _patterns(call.get("ignored_params"), "ignored_params"))
    return FSDPConfig(
        mesh=mesh,
        zero=ZeroConfig(stage=3, reshard_after_forward=reshard[""], ignored=tuple(dict.fromkeys(ignored))),
        precision=PrecisionConfig(compute=policy["param_dtype"] or "float32", reduce=policy["reduce_dtype"]),
        accumulation=AccumulationConfig(micro_batches=micro_batches, mode="sharded" if gradient_sync else "local"),
        units=tuple(units),
        shard_placement=root.get("shard_placement_fn"),
    )


def _name(value: Any) -> str:
    """The name of an enum's member, of a class or of an object's class, or the text itself."""
    if isinstance(value, str):
        return value.rpartition(".")[2]
    return "NONE" if value is None else getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__


def _fields(value: Any, defaults: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a policy that is None, a bool (of a policy with one field), a dictionary, or torch's own object."""
    if value is None:
        return dict(defaults)
    if isinstance(value, bool) and len(defaults) == 1:
        return dict.fromkeys(defaults, value)
    given = value if isinstance(value, Mapping) else {field: getattr(value, field) for field in defaults if hasattr(value, field)}
    for field in given:
        if field not in defaults:
            raise ConfigError(f"{name}.{field}: {nearest(field, defaults, name + '.')}known: {', '.join(defaults)}")
    if not given and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r}: must be a dictionary with keys {', '.join(defaults)}")
    return {**defaults, **given}


def _dtype(value: Any, name: str) -> str | None:
    text = None if value is None else str(value).removeprefix("torch.")
    if text not in (None, *DTYPES):
        raise ConfigError(f"{name}={text!r}: must be one of {', '.join(DTYPES)}, or None")
    return text


def _refuse_offload(name: str, asked: bool) -> None:
    if asked:
        raise NotAvailableError(f"{name}: offload of parameters and optimizer state to the host is not available yet; leave it out")


def _mesh(shape: Any, *, hybrid: bool | None, name: str) -> MeshConfig:
    """The mesh of a shape, or of a DeviceMesh that has one; `hybrid` None takes either number of dims."""
    sizes = tuple(getattr(shape, "shape", shape) or ())
    if hybrid and len(sizes) != 2:
        raise ConfigError(
            f"{name}={sizes or None}: a hybrid strategy needs (replicas, shards); torch takes a node's GPUs as shards by itself"
        )
    if hybrid is False and len(sizes) > 1:
        raise ConfigError(f"{name}={sizes}: has two dims; use HYBRID_SHARD or _HYBRID_SHARD_ZERO2")
    if len(sizes) > 2 or not all(isinstance(size, int) for size in sizes):
        raise ConfigError(f"{name}={shape!r}: must be (shards,) or (replicas, shards)")
    replica, fsdp = (1, -1) if not sizes else (1, *sizes) if len(sizes) == 1 else sizes
    return MeshConfig(replica=replica, fsdp=fsdp)


def _patterns(value: Any, name: str) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{name}: modules and tensors have no counterpart; give patterns of parameter paths, for instance '*norm*'")
    return patterns


def _wrapping(policy: Any) -> tuple[int | None, tuple[Unit, ...]]:
    """(`wrap_by_size`, units) of an auto-wrap policy."""
    if policy is None:
        return None, ()
    if policy == "size_based_auto_wrap_policy":
        return MIN_NUM_PARAMS, ()
    if isinstance(policy, (int, float)) and not isinstance(policy, bool):
        return int(policy), ()
    if isinstance(policy, Mapping):
        return int(_fields(policy, {"min_num_params": MIN_NUM_PARAMS}, "auto_wrap_policy")["min_num_params"]), ()
    if isinstance(policy, (list, tuple, set)) and all(isinstance(path, str) for path in policy):
        return None, tuple(Unit(path) for path in policy)
    raise ConfigError(
        f"auto_wrap_policy={policy!r}: classes and functions have no counterpart; mark each block with zjax.fully_shard(block, at=...) and give the units' paths, for instance ['embed', 'layers[*]', 'head'], or {{'min_num_params': n}}"
    )


def _precision(policy: Any) -> tuple[PrecisionConfig, bool]:
    """Of a MixedPrecision, and whether units cast their inputs to its param_dtype."""
    fields = _fields(policy, MIXED_PRECISION_DEFAULTS, "mixed_precision")
    compute = _dtype(fields["param_dtype"], "mixed_precision.param_dtype")
    buffers = _dtype(fields["buffer_dtype"], "mixed_precision.buffer_dtype")
    if buffers not in (None, compute):
        raise ConfigError(f"mixed_precision.buffer_dtype={buffers!r}: buffers keep the dtype the model gives them; cast them there")
    if fields["keep_low_precision_grads"]:
        raise ConfigError("mixed_precision.keep_low_precision_grads=True: the optimizer works in float32 on master weights; leave it False")
    # torch's own default: batch norms, of which a pytree of parameters knows nothing.
    ignored = [each for each in fields["_module_classes_to_ignore"] if _name(each) != "_BatchNorm"]
    reduce = _dtype(fields["reduce_dtype"], "mixed_precision.reduce_dtype")
    keep = _patterns(ignored, "mixed_precision._module_classes_to_ignore")
    precision = PrecisionConfig(compute=compute or "float32", reduce=reduce, keep_float32=keep)
    return precision, bool(fields["cast_forward_inputs"] and compute)


def _mp_policy(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    name = f"fully_shard at {path!r}: mp_policy"
    fields = _fields(call.get("mp_policy"), MP_POLICY_DEFAULTS, name)
    if not fields["cast_forward_inputs"] and fields["param_dtype"] is not None and path:
        raise ConfigError(f"{name}.cast_forward_inputs=False: a unit that names its dtype casts its inputs; leave it True")
    return {field: _dtype(fields[field], f"{name}.{field}") for field in ("param_dtype", "reduce_dtype", "output_dtype")}


def _common(calls: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    """The value that every call with the argument gives."""
    given = {path: getattr(call[name], "shape", call[name]) for path, call in calls.items() if call.get(name) is not None}
    if len({tuple(value) for value in given.values()}) > 1:
        raise ConfigError(f"fully_shard: {name} differs between calls: {given}; one plan has one mesh")
    return next(iter(given.values()), None)


def _reshard(value: Any, path: str, mesh: MeshConfig) -> bool:
    name = f"fully_shard at {path!r}: reshard_after_forward={value!r}"
    if value is None:
        return path != ""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int) or value <= 1 or (mesh.fsdp != -1 and (mesh.fsdp % value or value == mesh.fsdp)):
        raise ConfigError(f"{name}: must be True, False, None, or a divisor of the {mesh.fsdp} shards that is neither 1 nor all of them")
    raise NotAvailableError(f"{name}: a secondary shard group (ZeRO++ hpZ) is not available yet; use True or False")
