"""One process of a run over several, for tests/test_processes.py: `train_process.py PROCESS PROCESSES DEVICES PORT RUNS`.

RUNS is JSON: a list of {"corpus", "workdir", "sections"}. Prints one JSON line a run; exits as `zjax train` does.
"""

import json
import sys
from pathlib import Path

import jax

if __name__ == "__main__":
    process, processes, devices, port = map(int, sys.argv[1:5])
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

    from small import run_quietly, small_config

    for run in json.loads(sys.argv[5]):
        result = run_quietly(small_config(Path(run["corpus"]), **run["sections"]), Path(run["workdir"]))
        shards = [len(x.addressable_shards) for x in jax.tree.leaves(result.state.params)]
        line = {"process": process, "devices": jax.device_count(), "step": int(result.state.step), "stopped_by": result.stopped_by}
        print(json.dumps({**line, "losses": result.losses, "shards": max(shards)}), flush=True)
        if result.stopped_by:
            sys.exit(128 + result.stopped_by)
