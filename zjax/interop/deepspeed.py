"""A DeepSpeed config file as a `TrainConfig`: the same batch, optimizer, schedule, precision, clipping and sharding.

What the file does not speak of is DeepSpeed's default where DeepSpeed has one (no `fp16` or `bf16` is float32, no
`zero_optimization` is stage 0, no `gradient_clipping` is 1.0), and the config's own value where DeepSpeed would take it from
the training script (model, data, an optimizer or a scheduler that is not in the file).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from zjax.config import LossScaleConfig, MeshConfig, PrecisionConfig, TrainConfig, ZeroConfig
from zjax.ds_config import AUTO, KEYS, DeepSpeedFile, Fate, Row, Source, read, zero_knobs
from zjax.fields import ConfigError, nearest
from zjax.optimizer_config import OPTIMIZER_KNOBS, SCHEDULES, OptimizerConfig

Values = Mapping[str, Any]

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""DeepSpeed's names of dtypes."""

CLIP = 1.0
"""DeepSpeed's default of gradient_clipping."""

_ADAM = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adamw", _ADAM),
    "adamw": ("adamw", _ADAM),
    "lamb": ("lamb", {**_ADAM, "min_coeff": 0.01, "max_coeff": 10.0}),
    "lion": ("lion", {"learning_rate": 1e-4, "b1": 0.9, "b2": 0.99, "weight_decay": 0.0}),
    "adagrad": ("adagrad", {"learning_rate": 1e-2, "eps": 1e-20, "weight_decay": 0.0, "initial_accumulator_value": 0.0}),
    "sgd": ("sgd", {"learning_rate": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
    "muon": ("muon", {"learning_rate": 1e-3, "momentum": 0.95, "weight_decay": 0.0}),
}
"""DeepSpeed's `optimizer.type` in lower case: zjax's optimizer, and the defaults of DeepSpeed's (of torch's for sgd and adagrad)."""

_KNOB_OF = {
    "lr": "learning_rate", "eps": "eps", "weight_decay": "weight_decay", "momentum": "momentum", "nesterov": "nesterov",
    "bias_correction": "bias_correction", "min_coeff": "min_coeff", "max_coeff": "max_coeff",
    "initial_accumulator_value": "initial_accumulator_value", "muon_lr": "learning_rate", "adam_lr": "adam_learning_rate",
}  # fmt: skip
"""Knob by key of `optimizer.params`; of two keys for one knob the particular one comes later and wins."""

_LOSS_SCALE = {
    "fp16.loss_scale": "static", "fp16.initial_scale_power": "initial_power", "fp16.loss_scale_window": "window",
    "fp16.hysteresis": "hysteresis", "fp16.consecutive_hysteresis": "consecutive_hysteresis", "fp16.min_loss_scale": "minimum",
}  # fmt: skip

REQUIRED_ARGUMENTS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Arguments without a default, by `scheduler.type`."""


def from_deepspeed(
    source: Source, base: TrainConfig, *, devices: int, hidden_size: int | None = None, unit_elements: int | None = None
) -> TrainConfig:
    """`base` with what a DeepSpeed config says of mesh, zero, precision, optimizer, schedule, clipping, accumulation and batch.

    Warns of deprecated keys (DeprecationWarning) and, once, of those that change nothing (UserWarning).

    Args:
      source: path of a JSON file, or its dictionary.
      base: the run without the file. `auto` takes its values, and it has all that DeepSpeed's file does not.
      devices: the number of devices; the batch is split over devices / (tensor x sequence x pipeline).
      hidden_size: width of the model, for `auto`; `base.model.d_model` if that is set.
      unit_elements: elements of the model's largest unit, for stage3_max_live_parameters; see `zero_knobs`.

    Raises:
      ConfigError: a key that is unknown, rejected, contradicts another, or has a wrong value; all unknown and rejected ones are
        named at once.
      NotAvailableError: a key of a feature to come.
    """
    file = read(source)
    file.refuse()
    config = apply(file, base, devices=devices, hidden_size=hidden_size, unit_elements=unit_elements)
    file.announce()
    return config


def apply(
    file: DeepSpeedFile, base: TrainConfig, *, devices: int, hidden_size: int | None = None, unit_elements: int | None = None
) -> TrainConfig:
    """As `from_deepspeed`, of a file that is read and of whose keys none is refused; warns of nothing."""
    values = file.values
    with _naming_keys(values):
        _check_rules(values)
        mesh = _mesh(values, base.mesh)
        beside = mesh.tensor * mesh.sequence * mesh.pipeline
        if devices % beside:
            raise ConfigError(
                f"mesh.tensor={mesh.tensor}: {devices} devices / (tensor {mesh.tensor} x sequence {mesh.sequence} x pipeline {mesh.pipeline}) is not whole"
            )
        mesh = _with_mics(values, mesh, devices // beside)
        global_batch, micro_batches = _batch(values, base, devices // beside)
        zero = zero_knobs(values, hidden_size=base.model.d_model or hidden_size, unit_elements=unit_elements)
        clip = values.get("gradient_clipping", CLIP)
        return dataclasses.replace(
            base,
            mesh=mesh,
            zero=ZeroConfig(**zero, ignored=base.zero.ignored, strict=base.zero.strict, engine=base.zero.engine),
            precision=_precision(values, base.precision),
            optimizer=_with_schedule(values, _optimizer(values, base.optimizer), base),
            clip=base.clip if clip == AUTO else (clip or None),
            data=dataclasses.replace(base.data, global_batch=global_batch),
            accumulation=dataclasses.replace(base.accumulation, micro_batches=micro_batches),
        )


def outcomes(file: DeepSpeedFile, config: TrainConfig | None) -> tuple[Row, ...]:
    """The file's keys, each mapped one with the values that its knobs have in the config that was made of it."""
    return tuple(
        dataclasses.replace(row, text=", ".join(f"{knob}={_knob(config, knob)!r}" for knob in row.text.split(", ")))
        if config is not None and row.fate is Fate.MAPPED and not row.wrong
        else row
        for row in file.rows
    )


def batch_triangle(train: int | None, micro: int | None, steps: int | None, data_degree: int) -> tuple[int, int, int]:
    """DeepSpeed's train = micro x steps x data degree: (train, micro, steps), those that are None worked out.

    With one batch size alone `steps` is 1. Divisions are whole, as DeepSpeed's are; what they leave over is then an error.

    Args:
      train: train_batch_size, samples a step over all devices.
      micro: train_micro_batch_size_per_gpu, samples a device holds at once.
      steps: gradient_accumulation_steps.
      data_degree: devices that hold different samples.

    Raises:
      ConfigError: neither batch size is given, one is not positive, or they contradict each other.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, value in zip(names, (train, micro, steps), strict=True):
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}: must be positive")
    if train is None and micro is None:
        raise ConfigError("either train_batch_size or train_micro_batch_size_per_gpu must be given")
    if train is None:
        assert micro is not None
        steps = steps or 1
        train = micro * steps * data_degree
    elif micro is not None:
        steps = steps or train // micro // data_degree
    else:
        steps = steps or 1
        micro = train // data_degree // steps
    if train != micro * steps * data_degree:
        raise ConfigError(
            f"train_batch_size={train}: is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x data degree {data_degree}"
            f" = {micro * steps * data_degree} (what is not given is worked out by whole division; the data degree is devices / (tensor x sequence x pipeline));"
            " change one of them, or leave one out"
        )
    return train, micro, steps


def _batch(values: Values, base: TrainConfig, data_degree: int) -> tuple[int, int]:
    """`data.global_batch` and `accumulation.micro_batches`; `auto`, and a batch that the file has not, are those of `base`."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (None if values.get(name) == AUTO else values.get(name) for name in names)
    if steps is None and values.get(names[2]) == AUTO and not (train and micro):
        steps = base.accumulation.micro_batches
    if train is not None or micro is not None:
        train, _, steps = batch_triangle(train, micro, steps, data_degree)
        return train, steps
    steps = base.accumulation.micro_batches if steps is None else steps
    try:
        train, _, steps = batch_triangle(base.data.global_batch, None, steps, data_degree)
    except ConfigError as error:
        raise ConfigError(
            f"{error} (the file has no batch size, so train_batch_size is data.global_batch={base.data.global_batch})"
        ) from None
    return train, steps


def _check_rules(values: Values) -> None:
    """ConfigError for combinations that DeepSpeed refuses, and whose keys zjax would take one by one."""
    stage = values.get("zero_optimization.stage", 0)
    scatters = stage >= 2 and values.get("zero_optimization.reduce_scatter", True)
    if scatters and values.get("prescale_gradients", False):
        raise ConfigError(f"prescale_gradients=true: DeepSpeed refuses it with reduce_scatter at stage {stage}; leave it out")
    if scatters and values.get("gradient_predivide_factor", 1) != 1:
        raise ConfigError(
            f"gradient_predivide_factor={values['gradient_predivide_factor']}: DeepSpeed refuses it with reduce_scatter at stage {stage}; leave it out"
        )
    scale = values.get("fp16.loss_scale", 0)
    if scale and values.get("optimizer.type", "").lower() == "lamb":
        raise ConfigError(f"fp16.loss_scale={scale}: DeepSpeed's Lamb needs dynamic loss scaling; set it to 0")


def _mesh(values: Values, base: MeshConfig) -> MeshConfig:
    sizes = {key: values[key] for key in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size") if key in values}
    if len(set(sizes.values()) - {0}) > 1:
        raise ConfigError(", ".join(f"{key}={size}" for key, size in sizes.items()) + ": contradict each other; keep one")
    return dataclasses.replace(base, tensor=max(1, *sizes.values())) if len(sizes) else base


def _with_mics(values: Values, mesh: MeshConfig, data_degree: int) -> MeshConfig:
    """MiCS: state is sharded over groups of `mics_shard_size` devices, which are replicas of each other."""
    size, stage = values.get("zero_optimization.mics_shard_size", -1), values.get("zero_optimization.stage", 0)
    if size == -1:
        return mesh
    name = f"zero_optimization.mics_shard_size={size}"
    if stage != 3:
        raise ConfigError(f"{name}: MiCS shards parameters; it needs zero_optimization.stage=3, not {stage}")
    if size < 1 or data_degree % (size * mesh.expert):
        raise ConfigError(f"{name}: must divide the data degree, {data_degree}")
    return dataclasses.replace(mesh, replica=data_degree // (size * mesh.expert), fsdp=size)


def _precision(values: Values, base: PrecisionConfig) -> PrecisionConfig:
    enabled = [name for name in ("fp16", "bf16") if _enabled(values, name, base)]
    if len(enabled) > 1:
        raise ConfigError("fp16.enabled=true and bf16.enabled=true: enable one of them")
    compute = DTYPES[enabled[0]] if enabled else "float32"
    declared = _dtype(values, "data_types.param_dtype")
    if declared not in (None, compute):
        raise ConfigError(f"data_types.param_dtype={values['data_types.param_dtype']!r}: must be what fp16 and bf16 say, {compute}")
    scale = LossScaleConfig()
    if compute == "float16":
        knobs = {knob: values[path] for path, knob in _LOSS_SCALE.items() if path in values}
        scale = LossScaleConfig(**(knobs | {"static": knobs.get("static") or None}))  # 0 is dynamic
    return PrecisionConfig(
        compute=compute,
        reduce=_dtype(values, "communication_data_type"),
        accumulate=_dtype(values, "data_types.grad_accum_dtype") or base.accumulate,
        keep_float32=base.keep_float32,
        loss_scale=scale,
    )


def _enabled(values: Values, section: str, base: PrecisionConfig) -> bool:
    """Whether fp16 or bf16 is on; `auto` asks the config."""
    switch = values.get(f"{section}.enabled", False)
    return base.compute == DTYPES[section] if switch == AUTO else switch


def _dtype(values: Values, key: str) -> str | None:
    name = values.get(key)
    if name is not None and name.lower() not in DTYPES:
        raise ConfigError(f"{key}={name!r}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name.lower()] if name is not None else None


def _optimizer(values: Values, base: OptimizerConfig) -> OptimizerConfig:
    """The file's optimizer with DeepSpeed's defaults; `base`'s where the file has none. Schedule and groups are `base`'s."""
    kind = _type_of(values, "optimizer")
    if kind is None:
        return base
    if kind.lower() not in OPTIMIZERS:
        raise ConfigError(f"optimizer.type={kind!r}: {nearest(kind, OPTIMIZERS)}known: {', '.join(OPTIMIZERS)}")
    name, defaults = OPTIMIZERS[kind.lower()]
    params = {path.removeprefix("optimizer.params."): value for path, value in values.items() if path.startswith("optimizer.params.")}
    if kind.lower() == "adam" and not params.pop("adam_w_mode", True):
        name = "adam"
    knobs = dict(defaults)
    if params.pop("torch_adam", False) and name == "adamw":
        knobs["weight_decay"] = 0.01  # torch.optim.AdamW's own default
    if "betas" in params:
        betas = (base.b1, base.b2) if params["betas"] == AUTO else tuple(params["betas"])
        if len(betas) != 2:
            raise ConfigError(f"optimizer.params.betas={params['betas']!r}: must be two numbers")
        knobs |= {knob: beta for knob, beta in zip(("b1", "b2"), betas, strict=True) if beta is not None}
    for key, knob in _KNOB_OF.items():
        value = getattr(base, knob) if params.get(key) == AUTO else params.get(key)
        knobs |= {knob: value} if value is not None else {}
    if name == "adagrad" and params.get("eps", AUTO) != AUTO:
        knobs["eps"] = params["eps"] ** 2  # torch adds it to the root, optax below it
    kept = {"learning_rate", "moment_dtype"}
    reset = {knob: None for knobs_of in OPTIMIZER_KNOBS.values() for knob in knobs_of if knob not in kept}
    return dataclasses.replace(base, name=name, **(reset | knobs))


def _with_schedule(values: Values, optimizer: OptimizerConfig, base: TrainConfig) -> OptimizerConfig:
    """The optimizer with the file's scheduler; its own schedule where the file has none."""
    kind = _type_of(values, "scheduler")
    if kind is None:
        return optimizer
    known = {name for name, arguments in SCHEDULES.items() if arguments}
    if kind not in known:
        raise ConfigError(f"scheduler.type={kind!r}: {nearest(kind, known)}known: {', '.join(sorted(known))}")
    auto = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": optimizer.learning_rate,
        "warmup_num_steps": base.optimizer.warmup_steps,
        "total_num_steps": base.steps,
    }
    params = {path.removeprefix("scheduler.params."): value for path, value in values.items() if path.startswith("scheduler.params.")}
    params.pop("last_batch_iteration", None)
    arguments = {name: auto[name] if value == AUTO else _whole(value) for name, value in params.items()}
    if "warmup_num_steps" in arguments:
        arguments["warmup_num_steps"] = max(2, arguments["warmup_num_steps"])  # as DeepSpeed takes it
    for name in REQUIRED_ARGUMENTS.get(kind, ()):
        if name not in arguments:
            raise ConfigError(f"scheduler.params.{name}: {kind} needs it")
    if kind == "OneCycle" and arguments.get("cycle_momentum", True):
        # DeepSpeed's cycles the betas, whatever they are, of an optimizer that has them, and of no other.
        if "b1" in OPTIMIZER_KNOBS[optimizer.name] and "momentum" not in OPTIMIZER_KNOBS[optimizer.name]:
            optimizer = dataclasses.replace(optimizer, b1=None, b2=None)
        else:
            arguments["cycle_momentum"] = False
    return dataclasses.replace(optimizer, schedule=kind, schedule_arguments=arguments, warmup_steps=0, min_ratio=0.0)


def _type_of(values: Values, section: str) -> str | None:
    """The section's `type`; ConfigError where it has parameters for none."""
    kind = values.get(f"{section}.type")
    if kind is None and any(path.startswith(f"{section}.params.") for path in values):
        raise ConfigError(f"{section}.type: is missing, and {section}.params are given; name it, or leave the section out")
    return kind


def _whole(value: Any) -> Any:
    """1e3 steps are 1000."""
    return int(value) if isinstance(value, float) and value == value // 1 and value >= 1 else value


def _knob(config: TrainConfig, name: str) -> Any:
    """The value of a knob by its dotted name."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part)
    return value


@contextlib.contextmanager
def _naming_keys(values: Values) -> Iterator[None]:
    """A ConfigError about a knob also names the file's keys that set it."""
    try:
        yield
    except ConfigError as error:
        knob = str(error).partition("=")[0]
        keys = ", ".join(path for path in values if knob in KEYS[path].becomes)
        raise (ConfigError(f"{error} (DeepSpeed config: {keys})") if keys else error) from None
