"""Optimizers by name, the global gradient norm, and clipping by it.

Every optimizer is a chain of optax transformations, initialised on the fp32 master weights: moments are float32 whatever
the compute dtype, but for the first moment where `moment_dtype="bfloat16"` asks for less. 8-bit moments are not
offered: optax has no such transformation, and no well-kept package adds one (bitsandbytes is torch's; flashoptim-jax has
had one release).

What lies stacked is treated as if it did not: where an update depends on a whole matrix (muon's orthogonalisation,
lamb's trust ratio, adafactor's factors and root mean squares), each layer of a stacked leaf is a matrix of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.config import Unit
from zjax.fields import require
from zjax.optimizer_config import OptimizerConfig, ParamGroup
from zjax.schedules import follows_learning_rate, make_momentum, make_schedule
from zjax.tree import PyTree, matches, named_leaves, require_all_used

_WEIGHT_DECAY = {"adamw": 1e-4, "lion": 1e-3}
"""optax's default weight decay, where it is not 0."""
_BY_LAYER = ("adafactor", "lamb")
"""The optimizers whose update depends on whole leaves. Muon's does on the last two dims, and takes the others as layers."""
_CYCLES_MOMENTUM = ("adamw", "adam", "lamb", "lion")


def make_optimizer(
    config: OptimizerConfig, steps: int, *, units: Sequence[str | Unit] = (), embeddings: Sequence[str] = ()
) -> optax.GradientTransformation:
    """The optax optimizer that a config names, for a run of `steps` optimizer steps.

    Args:
      config: name, knobs, schedule and groups. The first group that names a parameter has it.
      steps: what the schedule ends with.
      units: as in `build_plan`: below `layers[*]` dim 0 counts layers, and each layer has its own trust ratio (lamb),
        factors and clipping (adafactor).
      embeddings: patterns of matrices that muon leaves to adamw beside all that is no matrix: embeddings and the head
        (Jordan et al. 2024). Weights are [..., in, out], as `x @ w` has them.

    Raises:
      ConfigError: knobs that the schedule or the optimizer makes idle; a schedule's argument that is wrong.
      ValueError (from `init`): a pattern of a group that names no parameter; muon where nothing is a matrix.
    """
    stacked = [unit.prefix for unit in (Unit(u) if isinstance(u, str) else u for u in units) if unit.stacked]
    groups = (*config.groups, ParamGroup(patterns=("*",)))
    momentum, rates = _cycled_momentum(config, steps), _rates(config, steps)

    def label(kind: str, unit: str, group: int) -> str:
        return "_".join([kind, *([unit] if unit else []), *([f"group{group}"] if group < len(config.groups) else [])])

    transformations = {
        label(kind, unit, index): _transformation(kind, config, rates[kind], momentum, group, by_layer=bool(unit))
        for kind in rates
        for unit in ("", *(stacked if kind in _BY_LAYER else ()))
        for index, group in enumerate(groups)
    }
    if len(transformations) == 1:
        return next(iter(transformations.values()))

    def label_of(name: str, leaf: jax.Array) -> str:
        unit = next((prefix for prefix in stacked if matches(prefix, name)), "")
        kind = config.name
        if kind == "muon" and (leaf.ndim - bool(unit) != 2 or any(matches(pattern, name) for pattern in embeddings)):
            kind = "adamw"
        group = next(i for i, group in enumerate(groups) if any(matches(pattern, name) for pattern in group.patterns))
        return label(kind, unit if kind in _BY_LAYER else "", group)

    def labels(params: PyTree) -> PyTree:
        found = [label_of(name, leaf) for name, leaf in named_leaves(params)]
        if found:  # optax also asks with a tree without leaves, to learn the state's structure
            names = [name for name, _ in named_leaves(params, is_leaf=lambda x: x is None)]  # None: a frozen parameter
            require_all_used([pattern for group in config.groups for pattern in group.patterns], names, "optimizer.groups")
            if config.name == "muon" and not any(each.startswith("muon") for each in found):
                raise ValueError(f"optimizer.name='muon': no parameter is a matrix outside {tuple(embeddings)}: {', '.join(names[:12])}")
        return jax.tree.unflatten(jax.tree.structure(params), found)

    return optax.partition(transformations, labels)


def _rates(config: OptimizerConfig, steps: int) -> dict[str, optax.Schedule]:
    """The learning rate of each kind of update: one, or with muon two."""
    rate = make_schedule(config, steps)
    if config.name != "muon":
        return {config.name: rate}
    if config.adam_learning_rate is None:
        return {"muon": rate, "adamw": rate}
    require(
        follows_learning_rate(config),
        "optimizer.adam_learning_rate",
        config.adam_learning_rate,
        f"{config.schedule} takes its rates from optimizer.schedule_arguments, not from a peak; leave it None",
    )
    return {"muon": rate, "adamw": make_schedule(dataclasses.replace(config, learning_rate=config.adam_learning_rate), steps)}


def _cycled_momentum(config: OptimizerConfig, steps: int) -> optax.Schedule | None:
    """The b1 that the schedule cycles, if it does; ConfigError where the optimizer has no b1, or the config sets another."""
    momentum = make_momentum(config, steps)
    if momentum is None:
        return None
    off = "or set optimizer.schedule_arguments.cycle_momentum to false"
    require(config.name in _CYCLES_MOMENTUM, "optimizer.name", config.name, f"OneCycle cycles the b1 of {_CYCLES_MOMENTUM}; use one, {off}")
    for knob in ("b1", "b2"):
        value = getattr(config, knob)
        require(value is None, f"optimizer.{knob}", value, f"OneCycle cycles b1, with DeepSpeed's b2 of 0.99; leave it None, {off}")
    return momentum


def _transformation(
    kind: str, config: OptimizerConfig, rate: optax.Schedule, momentum: optax.Schedule | None, group: ParamGroup, *, by_layer: bool
) -> optax.GradientTransformation:
    """The optimizer of one group of parameters."""
    decay = config.weight_decay if group.weight_decay is None else group.weight_decay
    if decay is None:
        decay = _WEIGHT_DECAY.get(config.name, 0.0)
    scale = group.learning_rate_scale
    scaled: optax.Schedule = rate if scale == 1 else lambda count: scale * rate(count)
    tx = _chain(kind, config, scaled, {} if momentum is None else {"b1": momentum, "b2": 0.99}, decay)
    return _by_layer(tx) if by_layer else tx


def _chain(kind: str, config: OptimizerConfig, rate: optax.Schedule, betas: dict[str, Any], decay: float) -> optax.GradientTransformation:
    """The optax chain of an optimizer; knobs that the config leaves None are not passed, so that optax's defaults hold."""

    def given(*knobs: str, **renamed: str) -> dict[str, Any]:
        names = {**{knob: knob for knob in knobs}, **renamed}
        return {name: getattr(config, knob) for name, knob in names.items() if getattr(config, knob) is not None} | betas

    decayed = (optax.add_decayed_weights(decay),) if decay else ()
    scaled = optax.scale_by_learning_rate(rate)
    adam = given("b1", "b2", "eps", "bias_correction", mu_dtype="moment_dtype")
    match kind:
        case "adamw":
            return optax.chain(_scale_by_adam(**adam), *decayed, scaled)
        case "adam":
            return optax.chain(*decayed, _scale_by_adam(**adam), scaled)
        case "lamb":
            bounds = _scale_by_trust_ratio(config.min_coeff, config.max_coeff)
            return optax.chain(_scale_by_adam(**{"eps": 1e-6, **adam}), *decayed, bounds, scaled)
        case "lion":
            return optax.chain(_scale_by_lion(**given("b1", "b2", mu_dtype="moment_dtype")), *decayed, scaled)
        case "adagrad":
            return optax.chain(*decayed, optax.scale_by_rss(**given("initial_accumulator_value", "eps")), scaled)
        case "sgd":
            trace = given("nesterov", decay="momentum", accumulator_dtype="moment_dtype")
            return optax.chain(*decayed, *([optax.trace(**trace)] if config.momentum else []), scaled)
        case "adafactor":
            return optax.adafactor(rate, weight_decay_rate=decay or None)
        case "muon":
            orthogonal = given("nesterov", beta="momentum", mu_dtype="moment_dtype")
            return optax.chain(_scale_by_muon(**orthogonal), _scale_by_shape(), *decayed, scaled)
        case "schedule_free_adamw":
            # Without momentum, which the averaging replaces. optax counts from 1 here, and from 0 in the learning rate.
            knobs = given(decay="b2", eps="eps")
            base = optax.chain(optax.scale_by_rms(**{"decay": 0.999, **knobs}, eps_in_sqrt=False, bias_correction=True), *decayed, scaled)
            return optax.contrib.schedule_free(base, lambda count: rate(count - 1), **given("b1"))
    raise AssertionError(kind)


def _scale_by_adam(
    b1: float | optax.Schedule = 0.9, b2: float = 0.999, eps: float = 1e-8, mu_dtype: Any = None, bias_correction: bool = True
) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, where b1 may be a schedule and the moments may stay uncorrected (DeepSpeed bias_correction)."""

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        decay = b1(state.count) if callable(b1) else b1
        if bias_correction:
            return optax.scale_by_adam(decay, b2, eps, mu_dtype=mu_dtype).update(grads, state, params)
        # With c1 and c2 the corrections: m / (sqrt(v) + eps) = c1 / sqrt(c2) (m / c1) / (sqrt(v / c2) + eps / sqrt(c2)).
        count = state.count + 1
        c1, root = 1 - decay**count, jnp.sqrt(1 - b2**count)
        corrected, state = optax.scale_by_adam(decay, b2, eps / root, mu_dtype=mu_dtype).update(grads, state, params)
        return jax.tree.map(lambda update: update * (c1 / root), corrected), state

    return optax.GradientTransformation(optax.scale_by_adam(b2=b2, mu_dtype=mu_dtype).init, update)


def _scale_by_lion(b1: float | optax.Schedule = 0.9, b2: float = 0.99, mu_dtype: Any = None) -> optax.GradientTransformation:
    """`optax.scale_by_lion`, where b1 may be a schedule."""

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        return optax.scale_by_lion(b1(state.count) if callable(b1) else b1, b2, mu_dtype).update(grads, state, params)

    return optax.GradientTransformation(optax.scale_by_lion(b2=b2, mu_dtype=mu_dtype).init, update)


def _scale_by_trust_ratio(least: float | None, most: float | None) -> optax.GradientTransformation:
    """Each leaf times |parameter| / |update|, within bounds (DeepSpeed's lamb); 1 where either norm is 0."""

    def scale(update: jax.Array, param: jax.Array) -> jax.Array:
        ours, theirs = (jnp.sqrt(jnp.sum(jnp.square(x))) for x in (param, update))
        zero = (ours == 0) | (theirs == 0)
        return update * jnp.where(zero, 1, jnp.clip(ours / jnp.where(zero, 1, theirs), least, most))

    return optax.stateless_with_tree_map(scale)


def _scale_by_muon(beta: float = 0.95, nesterov: bool = True, mu_dtype: Any = None) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon` of [in, out] or [layers, in, out] leaves, a layer at a time.

    optax takes all layers at once, and with sharded matrices each device would then hold the products X X^T of every layer.
    """

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            direction = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, optax.tree.bias_correction(grads, beta, count))
        else:
            direction = mu  # orthogonalising forgets the scale, and with it the bias
        one = functools.partial(_orthogonalize, coefficients=state.ns_coeffs)
        updates = jax.tree.map(lambda x: jax.lax.map(one, x) if x.ndim == 3 else one(x), direction)
        return updates, optax.contrib.MuonState(count, optax.tree.cast(mu, mu_dtype), state.ns_coeffs)

    return optax.GradientTransformation(optax.contrib.scale_by_muon(mu_dtype=mu_dtype).init, update)


def _orthogonalize(x: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Five steps of Newton-Schulz (Jordan et al. 2024): the matrix with its singular values brought near 1."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + 1e-8)
    a, b, c = coefficients.astype(x.dtype)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _scale_by_shape() -> optax.GradientTransformation:
    """Each [..., in, out] leaf times sqrt(max(1, out / in)) (Jordan et al. 2024)."""
    return optax.stateless_with_tree_map(lambda update, _: update * max(1.0, update.shape[-1] / update.shape[-2]) ** 0.5)


def _by_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` of each layer of stacked leaves, which all have the layers at dim 0: that of its state which is no parameter's
    (a step count) is common to the layers."""

    def axes(state: PyTree) -> PyTree:
        return optax.tree_map_params(tx, lambda _: 0, state, transform_non_params=lambda _: None)

    def init(params: PyTree) -> PyTree:
        if not jax.tree.leaves(params):
            return tx.init(params)
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        return jax.vmap(tx.init, out_axes=axes(jax.eval_shape(tx.init, layer)))(params)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        if not jax.tree.leaves(grads):
            return tx.update(grads, state, params)
        return jax.vmap(tx.update, in_axes=(0, axes(state), 0), out_axes=(0, axes(state)))(grads, state, params)

    return optax.GradientTransformation(init, update)


def schedule_free_eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The parameters to evaluate and export after `schedule_free_adamw` (optax.contrib.schedule_free_eval_params).

    Args:
      opt_state: the optax state, whatever it is nested in (groups): `state.opt_state.inner`.
      params: what the optimizer updates: the fp32 masters, or float32 parameters.

    Raises:
      ValueError: there is no schedule-free state in it.
    """
    is_ours = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)  # noqa: E731
    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_ours) if is_ours(x)]
    if not states:
        raise ValueError(
            "schedule_free_eval_params: the optimizer state is not one of schedule_free_adamw; evaluate the parameters themselves"
        )
    for state in states:
        # Another group's parameters are masked out of z; each parameter is in one z.
        params = jax.tree.map(
            lambda z, y, b1=state.b1: y if isinstance(z, optax.MaskedNode) else (y - (1 - b1) * z) / b1,
            state.z,
            params,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
    return params


def global_norm(grads: PyTree) -> jax.Array:
    """Euclidean norm over all leaves, float32 scalar. Squares are taken in float32 (fp16 leaves would overflow)."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def clip_factor(norm: jax.Array, clip: float | None) -> jax.Array:
    """What gradients of global norm `norm` are multiplied with: DeepSpeed's 1 / max(1, (norm + 1e-6) / clip)."""
    if clip is None:
        return jnp.ones((), jnp.float32)
    return 1 / jnp.maximum(1.0, (norm + 1e-6) / clip)
