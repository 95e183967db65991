"""torch.distributed.checkpoint for bench_checkpoint.py: `dcp.py FOLDER LEAVES ELEMENTS`; saves and loads at every line it reads."""

import json
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def main() -> None:
    folder, leaves, elements = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    state = {f"w{i}": torch.randn(elements) for i in range(leaves)}
    print("ready", flush=True)
    for _ in sys.stdin:
        shutil.rmtree(folder, ignore_errors=True)
        start = time.perf_counter()
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
        saved = time.perf_counter()
        into = {name: torch.empty_like(x) for name, x in state.items()}
        ready = time.perf_counter()
        dcp.load(into, checkpoint_id=str(folder), no_dist=True)
        loaded = time.perf_counter() - ready
        assert all(torch.equal(into[name], x) for name, x in state.items())
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(json.dumps({"save": saved - start, "restore": loaded, "bytes": size}), flush=True)


if __name__ == "__main__":
    main()
