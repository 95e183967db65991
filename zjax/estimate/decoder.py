"""What a decoder's layer computes and keeps, by the sizes of the model: operations and bytes a token.

The family is Llama's: pre-norm attention with grouped key/value heads, a gated MLP of three matrices, untied or tied
head. Sizes below are of one layer and one token; D model width, K key/value width, F MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

from zjax.fields import ConfigError, nearest

QUERY_BLOCK = 256
"""Queries whose scores the chunked attention holds at once (`zjax.models.attention`)."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a Llama-like decoder."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    tensor: int = 1
    """Over how many devices heads and MLP width are split; what follows is one device's."""

    @property
    def kv_width(self) -> int:
        """Width of all keys, or all values, on one device."""
        return self.n_kv_heads * (self.d_model // self.n_heads) // self.tensor

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP on one device."""
        return self.d_ff // self.tensor

    @property
    def query_width(self) -> int:
        """Width of all queries on one device."""
        return self.d_model // self.tensor

    def widths(self) -> dict[str, int]:
        """Elements a token of the values that a remat policy may keep by name, in the order in which they are computed."""
        d, q, kv, f = self.d_model, self.query_width, self.kv_width, self.mlp_width
        return {
            "block_input": d, "query": q, "key": kv, "value": kv, "attention": q, "attention_out": d, "mlp_gate": f, "mlp_up": f,
        }  # fmt: skip

    def residual_bytes(self, itemsize: int = 2) -> int:
        """Bytes a token that one layer's backward finds of its forward where nothing is computed again.

        What `jax.vjp` of the block leaves. Of each norm two float32 forms of the stream; normalised streams and the inputs
        of the projections; queries, keys and values; gate, up and what silu and the product leave. No scores: the kernel
        keeps none.
        """
        in_float32 = 4 * 4 * self.d_model
        return in_float32 + itemsize * (4 * self.d_model + 2 * self.query_width + 2 * self.kv_width + 6 * self.mlp_width)

    def saved_bytes(self, remat: str, names: tuple[str, ...] = (), itemsize: int = 2) -> int:
        """Bytes a token and layer kept from the forward to the backward, under a remat policy.

        `none` keeps every residual, `dots` the layer's input and the products that are not batched, `names` the input and
        the values named, `offload` the values that are not named (those are on the host), `full` the input alone.
        """
        widths = self.widths()
        if remat == "none":
            return self.residual_bytes(itemsize)
        if remat == "full":
            return itemsize * widths["block_input"]
        if remat == "dots":
            return itemsize * (sum(widths.values()) - widths["attention"])
        if remat not in ("names", "offload"):
            raise ConfigError(f"remat={remat!r}: must be none, full, dots, names or offload")
        unknown = [name for name in names if name not in widths]
        if unknown:
            raise ConfigError(f"remat_names={unknown[0]!r}: {nearest(unknown[0], widths)}named are {', '.join(widths)}")
        kept = {"block_input", *names} if remat == "names" else {"block_input"} - set(names)
        return itemsize * sum(widths[name] for name in kept)

    def recomputed_share(self, remat: str, names: tuple[str, ...] = ()) -> float:
        """Share of a layer's matrix-product parameters that the backward multiplies by again."""
        if remat == "none":
            return 0.0
        costs = {name: width for name, width in self.widths().items() if name not in ("block_input", "attention")}
        costs["attention_out"] = self.query_width
        whole = sum(costs.values()) + self.mlp_width
        kept = set(costs) if remat == "dots" else set(names) if remat in ("names", "offload") else set()
        # All are D wide on the other side. A layer's last product is never needed again: nothing in the layer reads it.
        return sum(cost for name, cost in costs.items() if name not in kept) / whole

    def attention_flops(self, length: int) -> float:
        """Operations a token of one layer's scores and their product with the values, forward: 4 T D, the masked half counted."""
        return 4.0 * length * self.query_width

    @property
    def mlp_share(self) -> float:
        """Share of a layer's matrices that are the MLP's."""
        attention = 2 * self.query_width + 2 * self.kv_width
        return 3 * self.mlp_width / (3 * self.mlp_width + attention)

    def working_bytes(self, *, scores_in_memory: bool, itemsize: int = 2) -> dict[str, int]:
        """Bytes a token of one layer while it is computed again and differentiated, in each phase of its backward.

        `mlp`: gate, up and a gradient; the stream before and after each norm and its gradient; what attention's backward
        will need (queries, keys, values, output). `attention`: gate, up and their gradients, which wait for the products
        that give the weights' gradients; the streams; queries, keys, values, output and their gradients, and where
        `scores_in_memory`, attention in XLA, a block's scores and their gradient in float32, both once more in the dtype of
        the products, and float32 sums of the keys' and values' gradients. `gradients`: what those last products read.
        """
        d, q, kv, f = self.d_model, self.query_width, self.kv_width, self.mlp_width
        heads = self.n_heads // self.tensor
        scores = heads * QUERY_BLOCK * 2 * (4 + itemsize) + 4 * 2 * kv if scores_in_memory else 0
        return {
            "mlp": itemsize * (3 * f + 5 * d + 2 * q + 2 * kv),
            "attention": itemsize * (4 * f + 5 * d + 4 * q + 4 * kv) + scores,
            "gradients": itemsize * (4 * f + 2 * d + 2 * q + 2 * kv),
        }

    def head_bytes(self, itemsize: int = 2) -> int:
        """Bytes a token of the logits and their gradient. Their float32 form is never whole: XLA fuses it into the loss."""
        return 2 * itemsize * self.vocab_size // self.tensor
