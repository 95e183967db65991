"""The peer of bench_step.py: PyTorch DDP and FSDP2 on the CPU, over gloo, one thread a process.

    pip install torch==2.13.0
    python scripts/peers/fsdp2.py --mode=fsdp2                # prints JSON; --no-remat, --rounds=N, --sizes=small

Modes: `ddp` (nothing sharded), `fsdp2` (`fully_shard` on each block and the root, FULL_SHARD), `fsdp2-keep` (with
reshard_after_forward=False, SHARD_GRAD_OP). Full float32, torch's AdamW as it comes, no clipping. bench_step.py starts
the same processes and gives them zjax's initial weights, so that their losses can be compared.
"""

import argparse
import json
import statistics
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ADAMW, ONE_THREAD, SIZES, Group, free_port, serve, tokens_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

MODES = ("ddp", "fsdp2", "fsdp2-keep")


def linear(rows: int, columns: int) -> nn.Linear:
    layer = nn.Linear(rows, columns, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Block(nn.Module):
    def __init__(self, sizes: dict[str, int]):
        super().__init__()
        d, f = sizes["d_model"], sizes["d_ff"]
        self.width = d // sizes["n_heads"]
        kv = sizes["n_kv_heads"] * self.width
        self.attn_norm, self.mlp_norm = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.wq, self.wk, self.wv, self.wo = linear(d, d), linear(d, kv), linear(d, kv), linear(d, d)
        self.w_gate, self.w_up, self.w_down = linear(d, f), linear(d, f), linear(f, d)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.attn_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        grouped = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=grouped)
        x = x + self.wo(o.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.w_down(F.silu(self.w_gate(h)) * self.w_up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Llama(nn.Module):
    def __init__(self, sizes: dict[str, int], remat: bool):
        super().__init__()
        self.remat = remat
        d, width = sizes["d_model"], sizes["d_model"] // sizes["n_heads"]
        self.embed = nn.Embedding(sizes["vocab_size"], d)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes["n_layers"]))
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.head = linear(d, sizes["vocab_size"])
        angle = torch.arange(sizes["sequence"])[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
        self.rotary = angle.cos(), angle.sin()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = checkpoint(block, x, *self.rotary, use_reentrant=False) if self.remat else block(x, *self.rotary)
        return self.head(self.norm(x))


@torch.no_grad()
def load_weights(model: Llama, path: str) -> None:
    """zjax's parameters from a .npz: matrices are [in, out] there, and layers are stacked."""
    weights = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    model.embed.weight.copy_(weights.pop("embed/table"))
    model.norm.weight.copy_(weights.pop("head/norm"))
    model.head.weight.copy_(weights.pop("head/kernel").T)
    for name, stacked in weights.items():
        for block, weight in zip(model.layers, stacked, strict=True):
            getattr(block, name.removeprefix("layers/")).weight.copy_(weight.mT if weight.ndim == 2 else weight)


def distribute(model: Llama, mode: str, processes: int) -> nn.Module:
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    knobs = {"mesh": init_device_mesh("cpu", (processes,)), "reshard_after_forward": mode == "fsdp2"}
    for block in model.layers:
        fully_shard(block, **knobs)
    return fully_shard(model, **knobs)


def build(spec: dict):
    """One process: see `common.serve`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, processes, sizes = spec["rank"], spec["processes"], spec["sizes"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{spec['port']}", rank=rank, world_size=processes)
    model = Llama(sizes, spec["remat"])
    if spec["weights"]:
        load_weights(model, spec["weights"])
    model = distribute(model, spec["mode"], processes)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=ADAMW["learning_rate"],
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
    )
    rows = sizes["batch"] // processes

    def prepare(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.from_numpy(tokens_of(sizes, index)[rank * rows : (rank + 1) * rows]).long()
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()

    def run(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return prepare, run, {"parameters": sum(p.numel() for p in model.parameters()), "version": f"torch {torch.__version__}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default="fsdp2")
    parser.add_argument("--sizes", choices=SIZES, default="peer")
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True, help="recompute each block in the backward")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return serve(lambda: build(json.loads(arguments.worker)))
    common = {"mode": arguments.mode, "sizes": SIZES[arguments.sizes], "remat": arguments.remat, "weights": None}
    common |= {"processes": 2, "port": free_port()}
    command = [sys.executable, __file__, "--worker"]
    with Group(arguments.mode, command, [{**common, "rank": rank} for rank in range(2)], ONE_THREAD) as group:
        for _ in range(arguments.warmup):
            group.step()
        group.reset()
        for _ in range(arguments.rounds):
            group.step()
        measured = group.steps[arguments.warmup :]
        report = {key: statistics.median(step[key] for step in measured) for key in ("seconds", "cpu_seconds")}
        print(json.dumps({**common, **group.about, **report, "loss": measured[-1]["loss"], "steps_peak_rss": group.steps_peak_rss}))


if __name__ == "__main__":
    main()
