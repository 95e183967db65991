"""The layer loop with its own derivative rule: the next layer's weights travel while this one computes.

Forward: layer i+1 is gathered beside layer i's arithmetic. Backward: only each layer's input was kept, and what its
remat policy saves; layer i-1 is gathered while the rest of layer i is computed again and differentiated, and in the
explicit engine the gradient of layer i+1 is scattered meanwhile. XLA does not prefetch across rematerialised layers by
itself. FSDP's forward_prefetch and BACKWARD_PRE, DeepSpeed's stage3_prefetch_bucket_size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.collectives import LocalParam, gather_value, is_local, reduce_gradient
from zjax.remat import RematPolicy, but_gathered, remat_policy
from zjax.tree import PyTree, named_leaves
from zjax.units import (
    Tracing,
    cast_carry,
    check_shapes,
    fully_shard,
    join,
    on_rows_of,
    plan_context,
    record_gathered,
    take_turn,
)

Block = Callable[..., Any]


def scan_layers(
    block: Block,
    stacked: PyTree,
    x: PyTree,
    *args: Any,
    at: str,
    per_layer: PyTree = None,
    has_aux: bool = False,
    prefetch: int | None = None,
    remat: str | RematPolicy | None = "full",
    every: int = 1,
) -> Any:
    """Runs `x = block(params, x, *args)` over stacked layers, each a unit like `fully_shard(block, at=at)`.

    Args:
      block: `block(params, x, *args) -> x`, with one layer's parameters; `(x, aux)` if `has_aux`; takes one more last
        argument, that layer's slice of `per_layer`, if there is one.
      stacked: the layers' parameters, dim 0 counting layers; a unit `at[*]` of the plan.
      x: the residual stream: an array or a pytree, rows in dim 0.
      args: given to every layer alike; arrays in them are differentiated, other values are static.
      at: path of `stacked` in the params pytree.
      per_layer: a pytree of arrays with a leading layer dim (keys, flags), or None.
      prefetch: 1 gathers one layer ahead, with this file's derivative rule; 0 is a plain scan over the marked block; by
        default the plan's `zero.prefetch`. Where the stage moves nothing layer by layer (0 and 1) there is nothing to do ahead.
        With `reshard_after_forward=False` and outside a step the loop is the plain one.
      remat: as in `fully_shard`.
      every: only the input of every so many layers is saved (Megatron recompute_num_layers); before the backward of so
        many, they are computed again as a group, and of each is then held what `remat` saves (Chen et al. 2016). That is
        one more forward, and one more gathering of each layer. It divides the number of layers.

    Raises:
      ValueError: layers of different number, a prefetch other than 0 and 1, an unknown `remat`, an `every` that does not
        divide the layers.
      TypeError: forward-mode differentiation through the derivative rule.

    Returns:
      x after the last layer; with `has_aux` also the layers' aux, stacked.
    """
    if prefetch not in (None, 0, 1):
        raise ValueError(f"scan_layers: prefetch={prefetch!r}: must be 0 or 1 layers")
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves((stacked, per_layer))}
    if len(lengths) != 1:
        raise ValueError(f"scan_layers(at={at!r}): every leaf needs the same number of layers in dim 0; got {sorted(lengths)}")
    n, policy = lengths.pop(), remat_policy(remat)
    if every < 1 or n % every:
        raise ValueError(f"scan_layers(at={at!r}): every={every}: must be a positive divisor of the {n} layers")
    tracing: Tracing | None = plan_context.value
    in_step, kept = tracing is not None and tracing.recording is None, False
    loop = functools.partial(_plain, fully_shard(block, at=at, remat=policy), args, has_aux)
    if tracing is not None and in_step:
        check_shapes(tracing.plan, at, stacked)
        x = cast_carry(tracing.plan, at, x)
        leaves = [tracing.plan.params[join(at, name)] for name, _ in named_leaves(stacked, is_leaf=is_local)]
        kept = any(leaf.kept_gathered for leaf in leaves)
        moves = any(leaf.moves_by_layer for leaf in leaves)
        if moves and not kept and (tracing.plan.zero.prefetch if prefetch is None else prefetch):
            loop = functools.partial(_prefetched, tracing, block, but_gathered(policy), args, has_aux, at)
    if every == 1 or (tracing is not None and not in_step):
        return loop(stacked, x, per_layer)
    policy = but_gathered(jax.checkpoint_policies.nothing_saveable, keep=kept)
    return _in_groups(loop, policy, stacked, x, per_layer, n // every, has_aux)


def _in_groups(loop: Any, policy: RematPolicy, stacked: PyTree, x: PyTree, per_layer: PyTree, groups: int, has_aux: bool) -> Any:
    """The loop over each group of layers, recomputed as one."""
    cut = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(groups, -1, *leaf.shape[1:]), tree)  # noqa: E731
    joined = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)  # noqa: E731

    def group(x: PyTree, layers: tuple[PyTree, PyTree]) -> tuple[PyTree, Any]:
        out = jax.checkpoint(lambda x, params, extra: loop(params, x, extra), policy=policy, prevent_cse=False)(x, *layers)
        return out if has_aux else (out, None)

    x, aux = jax.lax.scan(group, x, (cut(stacked), cut(per_layer)))
    return (x, joined(aux)) if has_aux else x


def _plain(unit: Block, args: tuple[Any, ...], has_aux: bool, stacked: PyTree, x: PyTree, per_layer: PyTree) -> Any:
    def body(x: PyTree, layer: tuple[PyTree, PyTree]) -> tuple[PyTree, Any]:
        params, extra = layer
        out = unit(params, x, *args, *(() if per_layer is None else (extra,)))
        return out if has_aux else (out, None)

    x, aux = jax.lax.scan(body, x, (stacked, per_layer))
    return (x, aux) if has_aux else x


def _prefetched(
    tracing: Tracing,
    block: Block,
    policy: RematPolicy,
    args: tuple[Any, ...],
    has_aux: bool,
    at: str,
    stacked: PyTree,
    x: PyTree,
    per_layer: PyTree,
) -> Any:
    plan = tracing.plan
    named = named_leaves(stacked, is_leaf=is_local)
    treedef = jax.tree.structure(stacked, is_leaf=is_local)
    leaves = [plan.params[join(at, name)] for name, _ in named]
    # What the root unit has gathered, because another unit uses it too, arrives whole and is left alone.
    mine = [(leaf.name, at) in tracing.owners for leaf in leaves]
    record_gathered([leaf.name for leaf, owned in zip(leaves, mine, strict=True) if owned], at)
    trained = [leaf.trained for leaf in leaves]
    values = [leaf.value if isinstance(leaf, LocalParam) else leaf for _, leaf in named]
    carriers = [leaf.gradient if isinstance(leaf, LocalParam) else leaf for (_, leaf), live in zip(named, trained, strict=True) if live]
    arrays, static = _split_arrays(args)
    unit = on_rows_of(block, at)

    def layer(weights: list[jax.Array], x: PyTree, arrays: list[Any], extra: PyTree) -> tuple[PyTree, Any]:
        weights = [w if live else jax.lax.stop_gradient(w) for w, live in zip(weights, trained, strict=True)]
        out = unit(jax.tree.unflatten(treedef, weights), x, *_merge_arrays(arrays, static), *(() if per_layer is None else (extra,)))
        return out if has_aux else (out, None)

    def weights_of(values: list[jax.Array], i: Any, wait: jax.Array | None = None) -> list[jax.Array]:
        sliced = [jax.lax.dynamic_index_in_dim(value, i, 0, keepdims=False) for value in values]
        return [gather_value(plan, leaf, x, wait) if owned else x for leaf, x, owned in zip(leaves, sliced, mine, strict=True)]

    def reduced(gradient: list[jax.Array]) -> list[jax.Array]:
        each = zip([pair for pair, live in zip(zip(leaves, mine, strict=True), trained, strict=True) if live], gradient, strict=True)
        return [reduce_gradient(plan, leaf, g, layer=True) if owned else g for (leaf, owned), g in each]

    run = _with_rule(layer, policy, weights_of, reduced, trained, values[0].shape[0])
    _, x, wait = take_turn(plan, {}, x)
    try:
        x, aux, last_input = run([jax.lax.stop_gradient(value) for value in values], carriers, x, arrays, per_layer, wait)
    except (TypeError, NotImplementedError) as error:
        if "forward-mode" not in str(error) and "custom_lin" not in str(error):
            raise
        raise TypeError(
            f"scan_layers(at={at!r}): its own derivative rule has no forward-mode (jax.jvp, jax.jacfwd, jax.hessian); "
            "use prefetch=0, the plain loop, for it"
        ) from error
    take_turn(plan, {}, last_input)  # what comes after may be gathered beside the last layer
    return (x, aux) if has_aux else x


def _with_rule(layer: Any, policy: RematPolicy, weights_of: Any, reduced: Any, trained: list[bool], n: int) -> Any:
    """The loop as a function with its derivative: (values, carriers, x, arrays, per_layer, wait) -> (x, aux, last input).

    Carriers, and gradients of weights, are those of the trained parameters alone.
    """
    at_layer = lambda tree, i: jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree)  # noqa: E731
    recomputed = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def loop(step: Any, values: Any, x: Any, arrays: Any, per_layer: Any, wait: Any) -> Any:
        """Outputs of the loop, and what `step` keeps of each layer: of all but the last, stacked; of the last; its weights."""

        def body(carry: Any, i: Any) -> Any:
            x, weights = carry
            ahead = weights_of(values, i + 1)
            (y, aux), kept = step(weights, x, arrays, at_layer(per_layer, i))
            return (y, ahead), (aux, kept)

        # The last layer stands outside the loop: inside, it would gather a layer too many.
        (x, weights), (aux, kept) = jax.lax.scan(body, (x, weights_of(values, 0, wait)), jnp.arange(n - 1))
        (y, last_aux), last_kept = step(weights, x, arrays, at_layer(per_layer, n - 1))
        aux = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), aux, last_aux)
        return (y, aux, x), (kept, last_kept, weights)

    @jax.custom_vjp
    def run(values: Any, carriers: Any, x: Any, arrays: Any, per_layer: Any, wait: Any) -> Any:
        return loop(lambda *inputs: (layer(*inputs), None), values, x, arrays, per_layer, wait)[0]

    def differentiable(*inputs: Any) -> Any:
        """A layer's outputs, and its derivative without what is at hand in the backward: weights, and what layers share."""
        vjp: Any  # jax's `VJP`: a pytree that holds the arguments it needs apart from all else that was saved
        out, vjp = jax.vjp(recomputed, *inputs)
        return out, dataclasses.replace(vjp, args_res=[None, vjp.args_res[1], None, None])

    def forward(values: Any, carriers: Any, x: Any, arrays: Any, per_layer: Any, wait: Any) -> Any:
        out, kept = loop(differentiable, values, x, arrays, per_layer, wait)
        return out, (values, carriers, arrays, per_layer, kept)  # the backward begins with the last layer's weights

    def backward(residuals: Any, gradient: Any) -> Any:
        values, carriers, arrays, per_layer, (inner_kept, last_kept, weights) = residuals
        gy, gaux, gafter = gradient

        def differentiate(kept: Any, weights: Any, i: Any, gy: Any) -> Any:
            arguments = [weights, kept.args_res[1], arrays, at_layer(per_layer, i)]
            late, gx, garrays, gextra = dataclasses.replace(kept, args_res=arguments)((gy, at_layer(gaux, i)))
            live = [g for g, each in zip(late, trained, strict=True) if each]
            return live, gx, _floats(garrays, arrays), _floats(gextra, per_layer)

        late, gx, gshared, glast = differentiate(last_kept, weights, n - 1, gy)
        # Zeros, but not before what comes after the loop is scattered: held through the loop, it would be a unit too many.
        gx = jax.tree.map(lambda g, after: g if g.dtype == jax.dtypes.float0 else g + after, gx, gafter)
        total = [jnp.zeros_like(carrier) for carrier in carriers]
        put = lambda total, g, i: [jax.lax.dynamic_update_index_in_dim(t, each, i, 0) for t, each in zip(total, g, strict=True)]  # noqa: E731

        def body(carry: Any, xs: Any) -> Any:
            gx, weights, late, total, gshared = carry
            i, kept = xs
            # The carried gradient is scattered, and the layer before gathered, while this layer is differentiated.
            total = put(total, reduced(late), i + 1)
            before = weights_of(values, jnp.maximum(i - 1, 0))
            late, gx, shared, extra = differentiate(kept, weights, i, gx)
            return (gx, before, late, total, jax.tree.map(jnp.add, gshared, shared)), extra

        start = (gx, weights_of(values, max(n - 2, 0)), late, total, gshared)
        (gx, _, late, total, gshared), gextra = jax.lax.scan(body, start, (jnp.arange(n - 1), inner_kept), reverse=True)
        total = put(total, reduced(late), 0)
        gextra = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), gextra, glast)
        return None, total, gx, _full_cotangent(arrays, gshared), _full_cotangent(per_layer, gextra), None

    run.defvjp(forward, backward)
    return run


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _floats(gradient: PyTree, tree: PyTree) -> list[Any]:
    """The gradients of the differentiable leaves of `tree`."""
    return [g for g, leaf in zip(jax.tree.leaves(gradient), jax.tree.leaves(tree), strict=True) if _is_float(leaf)]


def _full_cotangent(tree: PyTree, gfloats: list[Any]) -> PyTree:
    """A cotangent for the whole tree: float0 for leaves that are not differentiable."""
    supply = iter(gfloats)
    return jax.tree.map(lambda leaf: next(supply) if _is_float(leaf) else jnp.zeros(leaf.shape, jax.dtypes.float0), tree)


def _split_arrays(args: tuple[Any, ...]) -> tuple[list[jax.Array], tuple[Any, list[Any]]]:
    """The arrays among the arguments, and a template with everything else, which stays static."""
    leaves, treedef = jax.tree.flatten(args)
    is_array = lambda leaf: hasattr(leaf, "dtype") and hasattr(leaf, "shape")  # noqa: E731
    return [jnp.asarray(leaf) for leaf in leaves if is_array(leaf)], (treedef, [_ARRAY if is_array(leaf) else leaf for leaf in leaves])


def _merge_arrays(arrays: list[Any], static: tuple[Any, list[Any]]) -> tuple[Any, ...]:
    treedef, template = static
    supply = iter(arrays)
    return jax.tree.unflatten(treedef, [next(supply) if leaf is _ARRAY else leaf for leaf in template])


_ARRAY = object()
