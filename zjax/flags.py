"""XLA's settings for a step, as options of its own compilation: the environment stays as it is.

Each is here because an audit shows what it does: `zjax audit --no-xla-flags` has the figures without them.
"""

from __future__ import annotations

from collections import Counter

from zjax.mesh import shard_shape
from zjax.plan import Plan
from zjax.tree import leaf_bytes

SPARSE_CORE = ("all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
"""Collectives that a TPU's SparseCores (v5p, v6e) run beside the matrix units; without them nothing is asynchronous there,
and chips that have none ignore the options."""


def xla_flags(target: str, plan: Plan) -> dict[str, str]:
    """The options `make_train_step` and audits compile a plan's step with (`jax.jit(compiler_options=...)`).

    Args:
      target: a platform (`gpu`, `tpu`, `cpu`) or an audit's target (`gpu:h100:1x8`).
      plan: whose largest unit sets how much XLA may combine into one collective.

    Returns:
      Option names without the leading `--`, and their values as text; none for the CPU.
    """
    platform = target.partition(":")[0]
    if platform == "tpu":
        return {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in SPARSE_CORE}
    if platform != "gpu":
        return {}
    # One collective for all leaves of a unit, and none for two units: what is combined waits for its last part.
    unit = str(_largest_unit_bytes(plan))
    return {
        "xla_gpu_enable_latency_hiding_scheduler": "True",
        "xla_gpu_all_gather_combine_threshold_bytes": unit,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": unit,
    }


def _largest_unit_bytes(plan: Plan) -> int:
    """Bytes a device holds of the largest unit, gathered."""
    sizes: Counter[str] = Counter()
    for leaf in plan.part("params"):
        assert leaf.forward is not None
        whole = shard_shape(plan.mesh, leaf.forward.spec, leaf.shape)
        sizes[leaf.unit] += leaf_bytes(whole[int(leaf.stacked) :], leaf.forward.dtype)
    return max(sizes.values(), default=0)
