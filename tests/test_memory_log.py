"""What devices hold over a run: counted by device, one line a step, also over a resume."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.config import MeshConfig
from zjax.memory_log import MemoryLog, held_bytes
from zjax.mesh import make_mesh


class Reporting:
    """A device whose runtime tells what it holds."""

    def __init__(self, number, process, stats):
        self.id, self.process_index, self.stats = number, process, stats

    def memory_stats(self):
        return self.stats


def test_arrays_that_are_alive_are_counted_where_their_shards_lie():
    mesh = make_mesh(MeshConfig(fsdp=8))
    before = held_bytes(jax.devices())
    shards = jax.device_put(jnp.zeros((64, 3)), NamedSharding(mesh, P("fsdp")))
    whole = jax.device_put(jnp.zeros(10, jnp.bfloat16), jax.devices()[5])
    after = held_bytes(jax.devices())
    grown = {device: after[device]["in_use"] - before[device]["in_use"] for device in after}
    assert grown == {device: 8 * 3 * 4 + 20 * (device == 5) for device in range(8)}
    assert shards.size and whole.size


def test_what_a_runtime_tells_is_taken_from_it():
    told = {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 9, "num_allocs": 3}
    assert held_bytes([Reporting(0, 0, told), Reporting(1, 0, {"bytes_in_use": 6})]) == {
        0: {"in_use": 5, "peak": 7, "limit": 9},
        1: {"in_use": 6},
    }


def test_a_line_a_step_and_a_picture_of_this_processes_devices(tmp_path):
    here, there = Reporting(0, 0, {"bytes_in_use": 5}), Reporting(1, 1, {"bytes_in_use": 6})
    log = MemoryLog(tmp_path / "memory", 0, [here, there])
    log.write(1)
    here.stats = {"bytes_in_use": 8}
    log.write(2)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "memory" / "process-0.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "devices": {"0": {"in_use": 5}}}, {"step": 2, "devices": {"0": {"in_use": 8}}}]
    assert (tmp_path / "memory" / "process-0.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("half", ["", '{"step": 4, "devi'])
def test_a_resume_takes_out_the_steps_that_are_done_again(tmp_path, half):
    path = tmp_path / "process-0.jsonl"
    path.write_text("".join(f'{{"step": {step}, "devices": {{}}}}\n' for step in (1, 2, 3)) + half)
    log = MemoryLog(tmp_path, 2, [Reporting(0, 0, {"bytes_in_use": 1})])
    log.write(3)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["devices"] == {"0": {"in_use": 1}}
