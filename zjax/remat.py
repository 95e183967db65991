"""What a block's backward recomputes and what it finds saved: activation checkpointing by name.

DeepSpeed `activation_checkpointing`, torch `checkpoint_wrapper` and selective activation checkpointing. A policy is what
`jax.checkpoint` takes: a function of an equation that says whether its outputs are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from zjax.collectives import GATHERED, is_gather
from zjax.fields import nearest

RematPolicy = Callable[..., Any]

POLICIES: dict[str, RematPolicy | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""The policies that need no names: recompute nothing; all but the inputs; all but matrix products without batch dims."""


@dataclass(frozen=True)
class NamedPolicy:
    """Saves the values that `jax.ad_checkpoint.checkpoint_name` names so, and recomputes all else."""

    names: frozenset[str]
    on_host: bool = False
    """Saved in the host's pinned memory, and fetched for the backward, instead of on the device."""

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> Any:
        """As `jax.checkpoint` asks."""
        return _by_name(self)(primitive, *args, **params)


@functools.cache
def _by_name(policy: NamedPolicy) -> RematPolicy:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=() if policy.on_host else policy.names,
        names_which_can_be_offloaded=policy.names if policy.on_host else (),
        offload_src="device",
        offload_dst="pinned_host",
    )


def save_names(*names: str) -> NamedPolicy:
    """A policy that saves these named values and recomputes all else (torch selective activation checkpointing).

    `fully_shard` and `scan_layers` raise for a name that the block gives to nothing.
    """
    return NamedPolicy(frozenset(names))


def offload_names(*names: str) -> NamedPolicy:
    """As `save_names`, but saved in the host's pinned memory (DeepSpeed cpu_checkpointing, torch save_on_cpu).

    To have a block's input there too, name it inside the block: an input that is only read under its name is not saved
    on the device.
    """
    return NamedPolicy(frozenset(names), on_host=True)


def remat_policy(remat: str | RematPolicy | None) -> RematPolicy | None:
    """The `jax.checkpoint` policy that a remat argument stands for; None recomputes nothing.

    Raises:
      ValueError: an unknown name.
    """
    if remat is None or callable(remat):
        return remat
    if remat not in POLICIES:
        raise ValueError(
            f"remat={remat!r}: {nearest(remat, POLICIES)}must be one of {', '.join(POLICIES)}, zjax.save_names(...), "
            "zjax.offload_names(...), a jax.checkpoint policy or None"
        )
    return POLICIES[remat]


@dataclass(frozen=True)
class GatheredRule:
    """A policy with a rule of its own for gathered parameters."""

    policy: RematPolicy | None
    """For all else; None saves it."""
    keep: bool
    """Whether gathered parameters are saved."""

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> Any:
        """As `jax.checkpoint` asks."""
        if is_gather(primitive, params):
            return self.keep and params.get("name") == GATHERED
        # A name is an identity: its input is saved already.
        return primitive.name != "name" if self.policy is None else self.policy(primitive, *args, **params)


def but_gathered(policy: RematPolicy | None, *, keep: bool = False) -> GatheredRule:
    """The policy with gathered parameters taken out of what it saves, or with `keep` added to it; None saves everything else."""
    return GatheredRule(policy, keep)


def require_named(policy: RematPolicy | None, known: Sequence[str] | frozenset[str], where: str) -> None:
    """ValueError, with the nearest known one, for a name of the policy that names no value of the block."""
    if not isinstance(policy, NamedPolicy):
        return
    for name in sorted(policy.names - set(known)):
        raise ValueError(
            f"{where}: remat saves {name!r}, but no value has that name: {nearest(name, known)}named are "
            f"{', '.join(sorted(known)) or 'none'}; name a value with jax.ad_checkpoint.checkpoint_name"
        )


def names_in(block: Callable[..., Any], *args: Any) -> frozenset[str]:
    """The names that values of `block(*args)` have when its derivative is taken; it is traced, not run.

    In the derivative, because a kernel with a derivative rule of its own may name what its forward leaves for its backward.
    """
    traced = jax.make_jaxpr(lambda *args: jax.vjp(block, *args)[0])(*args)
    return frozenset(_names(traced.jaxpr)) - {GATHERED}


def _names(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _names(inner)
