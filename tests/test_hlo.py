"""The audit's reading of compiled programs, held against programs that are known by construction, and against hand-written text."""

import dataclasses
import fcntl
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hlo_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_programs import CPU, GPU, GPU_HOSTS, PROGRAMS, TARGETS, V5E, V5P
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.audit.collectives import Place
from zjax.audit.cost import cost_of
from zjax.audit.groups import axes_of, parse_groups
from zjax.audit.hlo import HloParseError, Module, Shape, parse, parse_shape
from zjax.audit.schedule import Timeline, follow
from zjax.audit.targets import child_environment, parse_target
from zjax.cli import audit_run, load_config
from zjax.estimate.hardware import CHIPS, Chip

REPO = Path(__file__).parent.parent
MIB = 2**20


# Programs compiled for targets that are not there


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first of pytest's workers makes, and the others wait for."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / name).exists():
            make(root / f"{name}.unfinished")
            (root / f"{name}.unfinished").rename(root / name)
    return root / name


def compile_programs(folder: Path) -> None:
    """Compiles everything, the platforms side by side."""
    children = []
    for targets in ((V5E, V5P), (GPU, GPU_HOSTS), (CPU,)):
        environment = child_environment(parse_target(targets[0])) | {"PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
        command = [sys.executable, hlo_programs.__file__, str(folder), *targets]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for child in children:
        printed, _ = child.communicate(timeout=300)
        assert child.returncode == 0, printed[-3000:]


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """(module, timeline) of a program on a target."""
    folder = made_once(tmp_path_factory, "hlo", compile_programs)

    @functools.cache
    def read(target: str, name: str) -> tuple[Module, Timeline]:
        into = folder / target.replace(":", "-")
        place = json.loads((into / "places.json").read_text())[name]
        module = parse((into / f"{name}.txt").read_text())
        where = Place(place["mesh"], tuple(place["hosts"]), tuple(map(tuple, place["coords"])))
        return module, follow(module, where, parse_target(target).chip)

    return read


COLLECTIVES = {
    # program: kind, axes, operand MiB, wire MiB, torus dims on v5e 2x4 and v5p 2x2x2, whether it crosses the hosts of 2x4
    "gather": ("all-gather", ("fsdp",), 1, 3, (2, 2), False),
    "gather_replica": ("all-gather", ("replica",), 1, 1, (1, 1), True),
    "gather_everywhere": ("all-gather", ("replica", "fsdp"), 1, 7, (2, 3), True),
    "scatter": ("reduce-scatter", ("fsdp",), 4, 3, (2, 2), False),
    "reduce": ("all-reduce", ("replica",), 1, 1, (1, 1), True),
    "reduce_everywhere": ("all-reduce", ("replica", "fsdp"), 1, 1.75, (2, 3), True),
    "exchange": ("all-to-all", ("fsdp",), 1, 0.75, (2, 2), False),
    "permute": ("collective-permute", ("fsdp",), 1, 1, None, False),
    "permute_some": ("collective-permute", ("fsdp",), 1, 0.5, None, False),
    "gather_of_two": ("all-gather", ("fsdp",), 1, 1, (1, 1), False),
    "gather_transposed": ("all-gather", ("fsdp",), 1, 1, (1, 1), True),
    "reduce_transposed": ("all-reduce", ("replica",), 1, 1.5, (2, 2), False),
    "gather_reversed": ("all-gather", ("fsdp",), 1, 3, (2, 2), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_lone_collective_is_read_as_written(programs, target, name):
    kind, axes, operand, wire, torus_dims, crosses = COLLECTIVES[name]
    _, timeline = programs(target, name)
    (run,) = timeline.runs
    c = run.collective
    assert (c.kind, run.times, c.axes, c.dtypes) == (kind, 1, axes, ("f32",))
    assert (c.operand_bytes, c.wire_bytes, run.wire_bytes) == (operand * MIB, wire * MIB, wire * MIB)
    assert c.between is (crosses and target == GPU_HOSTS)
    assert c.emulates == ""
    assert run.is_async is (kind == "collective-permute" and target.startswith("tpu"))
    assert not run.covered
    assert run.exposed_seconds == pytest.approx(run.seconds) and run.seconds > 0
    if torus_dims is not None:
        assert c.torus_dims == {V5E: torus_dims[0], V5P: torus_dims[1]}.get(target, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gather", "scatter", "reduce", "exchange", "permute"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_collective_names_its_line(programs, target, name):
    (run,) = programs(target, name)[1].runs
    lines = Path(hlo_programs.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith(f"# line: {name}"))
    assert run.collective.source.endswith(f"hlo_programs.py:{line}")
    written = {"gather": "outer/all_gather", "scatter": "reduce_scatter", "reduce": "psum", "exchange": "all_to_all", "permute": "ppermute"}
    assert run.collective.op_name.endswith(written[name])


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS["gather_bf16"].targets)
def test_dtypes_are_those_on_the_wire(programs, target):
    (run,) = programs(target, "gather_bf16")[1].runs
    assert (run.collective.dtypes, run.collective.operand_bytes, run.wire_bytes) == (("bf16",), MIB / 2, 1.5 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS["scan_of_seven"].targets)
def test_a_loop_multiplies_its_collectives(programs, target):
    _, timeline = programs(target, "scan_of_seven")
    assert [(run.collective.kind, run.times, run.wire_bytes) for run in timeline.runs] == [("all-gather", 7, 21 * MIB)]
    assert timeline.unknown_loops == []


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS["three_times_five"].targets)
def test_nested_loops_multiply(programs, target):
    _, timeline = programs(target, "three_times_five")
    counted = {(run.collective.kind, run.collective.axes): (run.times, run.wire_bytes) for run in timeline.runs}
    assert counted == {("all-reduce", ("replica",)): (3, 3 * MIB), ("all-reduce", ("fsdp",)): (15, 15 * 1.5 * MIB)}


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS["several"].targets)
def test_combined_collectives_keep_their_bytes(programs, target):
    _, timeline = programs(target, "several")
    operands, wire = Counter(), Counter()
    for run in timeline.runs:
        operands[run.collective.kind, run.collective.axes] += run.times * run.collective.operand_bytes / MIB
        wire[run.collective.kind, run.collective.axes] += run.wire_bytes / MIB
    assert operands == {("all-gather", ("fsdp",)): 2, ("reduce-scatter", ("fsdp",)): 8, ("all-reduce", ("replica",)): 2}
    assert wire == {("all-gather", ("fsdp",)): 6, ("reduce-scatter", ("fsdp",)): 6, ("all-reduce", ("replica",)): 2}


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS["beside_products"].targets)
def test_a_gather_beside_products_is_covered(programs, target):
    _, timeline = programs(target, "beside_products")
    (run,) = timeline.runs
    bits = 32 if target == CPU else 16  # XLA:CPU has no bf16 of its own
    assert (run.collective.kind, run.times, run.wire_bytes) == ("all-gather", 1, 3 * 512 * 2048 * bits // 8)
    assert (run.is_async, run.covered) == ((False, False) if target == CPU else (True, True))
    if target == CPU:
        assert run.exposed_seconds == pytest.approx(run.seconds)
    else:  # 6 MiB take less than one of the products
        assert run.exposed_seconds < run.seconds / 2


@pytest.mark.slow
@pytest.mark.parametrize("target", PROGRAMS["cube_scatter_all"].targets)
def test_torus_dims_and_what_the_compiler_makes_of_them(programs, target):
    tpu = target == V5P
    (gather,), (scatter,), (flat,) = (programs(target, f"cube_{name}")[1].runs for name in ("gather_xy", "scatter_z", "scatter_all"))
    assert (gather.collective.axes, gather.wire_bytes, gather.collective.torus_dims) == (("x", "y"), 3 * MIB, 2 if tpu else 1)
    assert (scatter.collective.kind, scatter.collective.axes, scatter.wire_bytes) == ("reduce-scatter", ("z",), 2 * MIB)
    assert flat.collective.axes == ("x", "y", "z")
    if tpu:  # a flat scatter over three torus dims becomes an all-reduce and a slice: twice the wire
        assert (flat.collective.kind, flat.collective.emulates, flat.wire_bytes) == ("all-reduce", "reduce-scatter", 7 * MIB)
        assert flat.collective.torus_dims == 3
    else:
        assert (flat.collective.kind, flat.collective.emulates, flat.wire_bytes) == ("reduce-scatter", "", 3.5 * MIB)


# What matrix products cost


def einsum_flops(formula: str, a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """2 x the sizes of all letters: one multiplication and one addition for each."""
    left, right = formula.split("->")[0].split(",")
    return 2 * math.prod({**dict(zip(left, a, strict=True)), **dict(zip(right, b, strict=True))}.values())


ATTENTION_FLOPS = 3 * 3 * (2 * 2 * 256 * 512 * 1536 + 2 * 2 * 2 * 4 * 256 * 256 * 128)
"""3 layers, forward and twice that backward: the projection to q, k, v, and two products of T x T scores."""
FLOPS = {name: einsum_flops(*written) for name, written in hlo_programs.EINSUMS.items()}
FLOPS |= {"product_scan": 6 * 2 * 512 * 1024 * 1024, "attention": ATTENTION_FLOPS}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOPS)
@pytest.mark.parametrize("target", hlo_programs.ONE_OF_EACH)
def test_products_cost_2mnk(programs, target, name):
    _, timeline = programs(target, name)
    flops = FLOPS[name]
    if target == CPU:
        flops *= 2  # XLA:CPU computes bf16 as f32, which counts twice
    elif target == GPU and name == "dot_odd":
        flops = 2 * 520 * 1008 * 1500  # and its GPU compiler pads k to a multiple of 16
    assert timeline.flops == flops
    assert timeline.unknown_kernels == {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "passes"), [("f32_default", 1), ("f32_high", 3), ("f32_highest", 6), ("int8", 0.5)])
def test_a_tpu_multiplies_f32_as_bf16(programs, name, passes):
    assert programs(V5E, name)[1].flops == passes * 2 * 512 * 1024 * 2048


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windowed_scatter", "windowed_gather"])
def test_windowed_products_step_by_two(programs, name):
    """Each device multiplies an eighth, and sends seven eighths of the 8 MiB; the compiler's ring may go once round (8) and set out (1)."""
    module, timeline = programs(V5E, name)
    assert any(x.opcode == "while" for x in module.entry.schedule)
    assert timeline.unknown_loops == []
    assert timeline.flops == 2 * 8192 * 2048 * 2048 / 8
    assert {run.collective.kind for run in timeline.runs} == {"collective-permute"}
    assert 7 * MIB <= sum(run.wire_bytes for run in timeline.runs) <= 9 * MIB
    assert any(run.covered for run in timeline.runs)


@pytest.mark.slow
@pytest.mark.parametrize("target", hlo_programs.ONE_OF_EACH)
def test_a_layer_of_a_stacked_weight_is_read_alone(programs, target):
    module, _ = programs(target, "product_scan")
    stacked, layer = 6 * 1024 * 1024, 1024 * 1024 * (4 if target == CPU else 2)
    readers = 0
    for computation in module.computations.values():
        if any(x.opcode == "while" for x in computation.schedule) or computation.name in called_by_fusions(module):
            continue  # the entry may copy the whole stack once
        for x in computation.schedule:
            operands = computation.operands(x)
            if x.opcode in ("fusion", "dynamic-slice") and any(operand.shape.size == stacked for operand in operands):
                others = sum(operand.shape.bytes for operand in operands if operand.shape.size != stacked)
                assert cost_of(module, computation, x).bytes <= layer + others + x.shape.bytes
                readers += 1
    assert readers


def called_by_fusions(module: Module) -> set[str]:
    return {name for c in module.computations.values() for x in c.schedule if x.opcode == "fusion" for _, name in x.called}


# Text as XLA prints it


def test_replica_groups():
    fours = ((0, 1, 2, 3), (4, 5, 6, 7))
    strided = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert parse_groups("{}", 4) == ((0, 1, 2, 3),)
    assert parse_groups("{{0,1,2,3},{4,5,6,7}}", 8) == fours
    assert parse_groups("[2,4]<=[8]", 8) == fours
    assert parse_groups("[4,2]<=[2,4]T(1,0)", 8) == strided
    assert parse_groups("[2,4]<=[2,2,2]T(1,2,0)", 8) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert parse_groups("mesh['a'=2,'b'=4] {'b'}", 8) == fours
    assert parse_groups("mesh['a'=2,'b'=4] {'a'}", 8) == strided
    assert parse_groups("mesh['a'=2,'b'=4] {'a','b'}", 8) == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert parse_groups("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 8) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert parse_groups("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", 4) == ((3, 1), (2, 0))
    assert parse_groups("mesh['a'=4,'b'=2] {'a':(1)2}", 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert parse_groups("mesh['a'=4,'b'=2] {'a':(2)2}", 8) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert parse_groups("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_axes_of_groups():
    mesh = {"a": 2, "b": 2, "c": 2}
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), mesh) == ("c",)
    assert axes_of(((0, 2, 4, 6), (1, 3, 5, 7)), mesh) == ("a", "b")
    assert axes_of(((0,), (1,)), mesh) == ()


@given(st.permutations(range(3)), st.sets(st.integers(0, 2), min_size=1))
def test_iota_tiles_equal_the_lists_they_stand_for(order, used):
    shape = (2, 3, 4)
    array = np.arange(24).reshape(shape).transpose(order)
    size = math.prod(shape[i] for i in used)
    text = f"[{24 // size},{size}]<=[2,3,4]T({','.join(map(str, order))})"
    assert parse_groups(text, 24) == tuple(map(tuple, array.reshape(-1, size).tolist()))


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "{{0,1},{2,", "[2,4]", "[2,4]<=[4]", "[2,4]<=[2,4]T(1,1)", "[2]<=[2]", "mesh['a'=2] {'c'}", "mesh['a'=2]",
        "mesh['a'=4] {'a':(3)2}", "mesh['a'=2,'b'=2], device_ids=(0,1,2) {'a'}", "{{0,1}} trailing",
    ],
)  # fmt: skip
def test_malformed_groups(text):
    with pytest.raises(HloParseError):
        parse_groups(text, 8)


def test_groups_of_another_mesh():
    with pytest.raises(HloParseError):
        axes_of(((0, 9),), {"a": 4})


def test_shapes():
    def shape(text):
        found, end = parse_shape(text)
        assert end == len(text)
        return found

    assert shape("f32[]") == Shape("f32") and shape("f32[]").bytes == 4
    assert shape("bf16[8,2048]{1,0:T(8,128)(2,1)S(5)}") == Shape("bf16", (8, 2048), 5)
    assert shape("f32[128]{0:T(128)S(1)}").memory_space == 1
    assert shape("f8e4m3fn[16,4]{1,0}").bytes == 64
    assert shape("s4[10,3]{1,0:E(4)}").bytes == 15
    assert shape("s4[3]").bytes == 2
    assert shape("pred[7]").bytes == 7
    assert shape("token[]").bytes == 0
    assert shape("f32[0,5]{1,0}").bytes == 0
    assert shape("f32[<=8,4]{1,0}").dims == (8, 4)
    nested = shape("((f32[2]{0}, s32[]), bf16[3]{0:S(5)}, /*index=3*/u8[5]{0})")
    assert [array.bytes for array in nested.arrays] == [8, 4, 6, 5] and nested.bytes == 23
    assert shape("()").arrays == ()


@pytest.mark.parametrize("text", ["", "(f32[2]", "(f32[2], /*index=1", "f31[2]", "f32[2", "2[3]", "f32[?]"])
def test_malformed_shapes(text):
    with pytest.raises(HloParseError):
        parse_shape(text)


def test_an_instruction_over_many_lines():
    """As Pallas prints: JSON with line breaks, lines that begin with a bracket, brackets and escaped quotes in strings."""
    text = r"""HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }, num_partitions=4

FileNames
1 "a/b.py"
FunctionNames
1 "f"
FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=34 end_line=34 column=4 end_column=9}
StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


ENTRY %main.1 (x: f32[4,8]) -> (f32[4,8], s32[]) {
  %x = f32[4,8]{1,0} parameter(0), metadata={op_name="state[\"w\"]" source_file="c.py" source_line=7}
  %kernel.2 = (f32[4,8]{1,0}, s32[]) custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
{
 "name": "say \"}{\" and \\"
}}}, metadata={op_name="jit(f)/while[cond]/kernel(a, b)" stack_frame_id=2}, backend_config={"custom_call_config": {"body": "({[\"",
"n": 3}}
  %got = f32[4,8]{1,0} get-tuple-element(%kernel.2), index=0
  ROOT %tuple.3 = (f32[4,8]{1,0}, /*index=1*/s32[]) tuple(%got, /*index=1*/%kernel.2)
}
"""
    module = parse(text)
    x, kernel, got, root = module.entry.schedule
    assert (module.devices, module.donated) == (4, 2)
    assert (kernel.opcode, kernel.target, kernel.operands) == ("custom-call", "tpu_custom_call", ("x",))
    assert kernel.backend_config == {"custom_call_config": {"body": '({["', "n": 3}}
    assert kernel.metadata["op_name"] == "jit(f)/while[cond]/kernel(a, b)"
    assert (module.source_of(kernel), module.source_of(x), module.source_of(got)) == ("a/b.py:34", "c.py:7", "")
    assert root.is_root and root.operands == ("got", "kernel.2")
    assert module.entry.users["x"] == (kernel,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not HLO", "HloModule"),
        ("HloModule m\n\n%f (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n", "ENTRY"),
        ("HloModule m\n\nENTRY %f (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n", "ENTRY"),
        ("HloModule m\n\nENTRY %f () -> f32[] {\n  ROOT %x = f99[2] constant(0)\n}\n", "dtype"),
        ("HloModule m\n\nENTRY %f () -> f32[] {\n  ROOT %x = f32[] add(%a, (%b\n}\n", "bracket"),
        ("HloModule m\n\nENTRY %f () -> f32[] {\n  ROOT %x = f32[] add(%a, %b]\n}\n", "unbalanced"),
        ('HloModule m\n\nENTRY %f () -> f32[] {\n  ROOT %x = f32[] add("%a)\n}\n', "unbalanced"),
        ("HloModule m\n\nENTRY %f () -> f32[] {\n  ROOT %x = f32[]\n}\n", "operands"),
    ],
)
def test_malformed_text(text, message):
    with pytest.raises(HloParseError, match=message):
        parse(text)


# Schedules by hand: a product of n x 1000 and 1000 x 1000 takes n microseconds, a gather of n million bytes n milliseconds


SLOW = Chip(
    name="slow", platform="gpu", memory=1e9, flops=2e12, bandwidth=1e15, link_inside=1e9, link_between=1e9
)  # fmt: skip
PARAMETERS = (
    "%x = bf16[1500,1000] parameter(0)",
    "%w = bf16[1000,1000] parameter(1)",
    "%shard = u8[1000000] parameter(2)",
)
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def product(name: str, milliseconds: float) -> list[str]:
    rows = round(1000 * milliseconds)
    return [f"%{name}.x = bf16[{rows},1000] bitcast(%x)", f"%{name} = bf16[{rows},1000] dot(%{name}.x, %w), {DOT}"]


def started(name: str, milliseconds: int = 1, groups: str = "{{0,1},{2,3}}") -> str:
    """A gather in pairs: its wire bytes are its operand's."""
    size = milliseconds * 10**6
    return (
        f"%{name}.in = u8[{size}] bitcast(%shard)\n"
        f"  %{name} = (u8[{size}], u8[{2 * size}]) all-gather-start(%{name}.in), replica_groups={groups}, dimensions={{0}}"
    )


def done(name: str, milliseconds: int = 1) -> str:
    return f"%{name}.done = u8[{2 * milliseconds * 10**6}] all-gather-done(%{name})"


def timeline_of(*lines: str | list[str], before: str = "", hosts: tuple[int, ...] = (0, 0, 0, 0)) -> Timeline:
    flat = [line for each in lines for line in ([each] if isinstance(each, str) else each)]
    body = "\n".join(f"  {line}" for line in (*PARAMETERS, *flat, "ROOT %end = () tuple()"))
    text = f"HloModule hand, num_partitions=4\n\n{before}\nENTRY %main (x: bf16[1500,1000]) -> () {{\n{body}\n}}\n"
    return follow(parse(text), Place({"a": 2, "b": 2}, hosts, ()), SLOW)


def milliseconds(seconds: float) -> float:
    return pytest.approx(seconds * 1e3, abs=0.01)  # products also move bytes: a few microseconds less than nothing here


def exposed(timeline: Timeline) -> list[float]:
    return [round(run.exposed_seconds * 1e3, 3) for run in timeline.runs]


def test_a_product_that_covers_a_transfer():
    t = timeline_of(started("g"), product("p", 1.5), done("g"))
    (run,) = t.runs
    assert exposed(t) == [0] and run.covered and run.is_async
    assert (t.seconds * 1e3, t.compute_seconds * 1e3, run.seconds * 1e3) == (milliseconds(1.5e-3), milliseconds(1.5e-3), milliseconds(1e-3))
    assert t.flops == 2 * 1500 * 1000 * 1000


def test_a_product_that_covers_part_of_a_transfer():
    t = timeline_of(started("g", 3), product("p", 1), done("g", 3))
    assert exposed(t) == [2] and t.runs[0].covered
    assert t.seconds * 1e3 == milliseconds(3e-3)


def test_nothing_beside_a_transfer():
    t = timeline_of(started("g"), done("g"), product("p", 1.5))
    assert exposed(t) == [1] and not t.runs[0].covered
    assert t.seconds * 1e3 == milliseconds(2.5e-3)


def test_transfers_of_one_link_queue():
    t = timeline_of(started("g"), started("h"), product("p", 1.5), done("g"), done("h"))
    assert exposed(t) == [0, 0.5]
    assert t.seconds * 1e3 == milliseconds(2e-3)


def test_links_inside_and_between_do_not_wait_for_each_other():
    across = "{{0,2},{1,3}}"
    t = timeline_of(started("g"), started("h", 1, across), product("p", 1.5), done("g"), done("h"), hosts=(0, 0, 1, 1))
    assert exposed(t) == [0, 0] and [run.collective.between for run in t.runs] == [False, True]
    assert [run.collective.axes for run in t.runs] == [("b",), ("a",)]
    assert t.seconds * 1e3 == milliseconds(1.5e-3)


def test_a_done_in_a_later_position():
    """The second product runs while the first's gather is still under way; a wait for the one is not a wait for the other."""
    t = timeline_of(started("g", 3), product("p", 1), started("h", 1), product("q", 0.5), done("g", 3), product("r", 0.25), done("h"))
    assert exposed(t) == [1.5, 0.75]
    assert t.seconds * 1e3 == milliseconds(4e-3)


def test_a_transfer_that_nothing_waits_for_ends_with_its_computation():
    t = timeline_of(started("g", 3), product("p", 1))
    assert exposed(t) == [2] and t.seconds * 1e3 == milliseconds(3e-3)


def test_a_synchronous_collective_is_exposed_whole():
    t = timeline_of("%r = u8[1000000] all-reduce(%shard), replica_groups={{0,1,2,3}}", product("p", 1))
    (run,) = t.runs
    assert exposed(t) == [1.5] and not run.is_async and not run.covered  # 2 x 3/4 of a million bytes
    assert t.seconds * 1e3 == milliseconds(2.5e-3)


def test_a_gpu_says_which_of_its_pairs_are_synchronous():
    line = started("g") + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    assert not timeline_of(line, done("g")).runs[0].is_async


SPARSE_CORE = """%gathering (part: u8[1000000], ready: token[]) -> u8[2000000] {
  %part = u8[1000000] parameter(0)
  %ready = token[] parameter(1)
  ROOT %inner = u8[2000000] all-gather(%part), replica_groups={{0,1},{2,3}}, dimensions={0}
}, execution_thread="sparsecore"
"""


def test_a_call_that_a_sparse_core_runs_is_its_collective():
    """As TPU v5p and v6e print gathers and scatters that their SparseCores run beside the matrix units."""
    start = (
        "%ready = token[] after-all()\n"
        '  %c = ((u8[1000000], token[]), u8[2000000]) call-start(%shard, %ready), async_execution_thread="sparsecore", to_apply=%gathering'
    )
    t = timeline_of(start, product("p", 0.75), "%c.done = u8[2000000] call-done(%c)", before=SPARSE_CORE)
    (run,) = t.runs
    assert (run.collective.kind, run.collective.wire_bytes, run.is_async, run.covered) == ("all-gather", 10**6, True, True)
    assert exposed(t) == [0.25] and not t.unfollowed


def test_a_collective_that_is_called_in_an_unknown_way_is_told():
    call = '%c = u8[2000000] custom-call(%shard), custom_call_target="Strange", called_computations={%gathering}'
    t = timeline_of(call, before=SPARSE_CORE)
    assert not t.runs and t.unfollowed == ["inner"]


LOOP = """%condition (s: (s32[], bf16[1500,1000], bf16[1000,1000], u8[1000000])) -> pred[] {
  %s = (s32[], bf16[1500,1000], bf16[1000,1000], u8[1000000]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(BOUND)
  ROOT %less = pred[] compare(%i, %n), direction=DIRECTION
}

%body (s: (s32[], bf16[1500,1000], bf16[1000,1000], u8[1000000])) -> (s32[], bf16[1500,1000], bf16[1000,1000], u8[1000000]) {
  %s = (s32[], bf16[1500,1000], bf16[1000,1000], u8[1000000]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[1500,1000] get-tuple-element(%s), index=1
  %w = bf16[1000,1000] get-tuple-element(%s), index=2
  %shard = u8[1000000] get-tuple-element(%s), index=3
  STARTED
  PRODUCT
  DONE
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  ROOT %t = (s32[], bf16[1500,1000], bf16[1000,1000], u8[1000000]) tuple(%next, %x, %w, %shard)
}
"""


def loop_timeline(attribute: str = "", first: str = "constant(0)", direction: str = "LT", bound: int = 5, step: int = 1) -> Timeline:
    before = LOOP.replace("STARTED", started("g", 3)).replace("PRODUCT", "\n  ".join(product("p", 1))).replace("DONE", done("g", 3))
    before = before.replace("DIRECTION", direction).replace("BOUND", str(bound)).replace("STEP", str(step))
    shape = "(s32[], bf16[1500,1000], bf16[1000,1000], u8[1000000])"
    return timeline_of(
        f"%zero = s32[] {first}",
        f"%before = {shape} tuple(%zero, %x, %w, %shard)",
        f"%loop = {shape} while(%before), condition=%condition, body=%body{attribute}",
        before=before,
    )


def test_a_loop_multiplies_what_it_exposes():
    t = loop_timeline(', backend_config={"known_trip_count":{"n":"7"}}')  # printed, it goes before what the condition says
    assert [(run.times, round(run.exposed_seconds * 1e3, 3)) for run in t.runs] == [(7, 14)]
    assert t.seconds * 1e3 == milliseconds(21e-3) and t.flops == 7 * 2e9 and t.unknown_loops == []


@pytest.mark.parametrize(
    ("first", "direction", "bound", "step", "trips"),
    [
        ("constant(0)", "LT", 5, 1, 5), ("constant(0)", "LT", 5, 2, 3), ("constant(1)", "LE", 5, 1, 5), ("constant(1)", "LE", 5, 3, 2),
        ("constant(9)", "GT", 5, -1, 4), ("constant(9)", "GE", 5, -2, 3), ("constant(0)", "NE", 6, 2, 3), ("constant(7)", "LT", 5, 1, 0),
        ("constant(0)", "LT", 5, -1, None), ("constant(0)", "NE", 5, 2, None), ("partition-id()", "LT", 5, 1, None),
    ],
)  # fmt: skip
def test_trips_are_traced_from_the_condition(first, direction, bound, step, trips):
    t = loop_timeline("", first, direction, bound, step)
    assert t.unknown_loops == ([] if trips is not None else ["loop"])
    assert t.runs[0].times == (1 if trips is None else trips)


def test_a_bound_that_an_outer_loop_changes_is_not_known():
    """The inner loop runs 0, 1, 2... times: what its bound was at first says nothing."""
    pair = "(s32[], s32[])"
    text = f"""HloModule triangle, num_partitions=1

%inner_condition (s: {pair}) -> pred[] {{
  %s = {pair} parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %less = pred[] compare(%j, %n), direction=LT
}}

%inner_body (s: {pair}) -> {pair} {{
  %s = {pair} parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  ROOT %t = {pair} tuple(%next, %n)
}}

%condition (s: {pair}) -> pred[] {{
  %s = {pair} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%body (s: {pair}) -> {pair} {{
  %s = {pair} parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %zero = s32[] constant(0)
  %given = {pair} tuple(%zero, BOUND)
  %inner = {pair} while(%given), condition=%inner_condition, body=%inner_body
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = {pair} tuple(%next, %n)
}}

ENTRY %main () -> {pair} {{
  %zero = s32[] constant(0)
  %five = s32[] constant(5)
  %given = {pair} tuple(%zero, %five)
  ROOT %outer = {pair} while(%given), condition=%condition, body=%body
}}
"""
    place = Place({"a": 1}, (0,), ())
    assert follow(parse(text.replace("BOUND", "%i")), place, SLOW).unknown_loops == ["inner"]
    assert follow(parse(text.replace("BOUND", "%n")), place, SLOW).unknown_loops == []


def test_kernels_of_unknown_cost_are_named():
    t = timeline_of(
        '%k = bf16[1500,1000] custom-call(%x), custom_call_target="mystery"', '%p = u8[4] custom-call(), custom_call_target="Pin"'
    )
    assert t.unknown_kernels == {"mystery": 1} and t.flops == 0


def test_a_fusion_reads_the_slice_it_takes():
    fused = """%fused (stack: bf16[9,100,50], i: s32[]) -> bf16[100,50] {
  %stack = bf16[9,100,50] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = bf16[1,100,50] dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,100,50}
  %flat = bf16[100,50] bitcast(%layer)
  ROOT %twice = bf16[100,50] add(%flat, %flat)
}
"""
    text = f"""HloModule m

{fused}
ENTRY %main (stack: bf16[9,100,50], i: s32[]) -> bf16[100,50] {{
  %stack = bf16[9,100,50] parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = bf16[100,50] fusion(%stack, %i), kind=kLoop, calls=%fused
}}
"""
    module = parse(text)
    read = 100 * 50 * 2 + 4
    assert cost_of(module, module.entry, module.entry.root).bytes == read + 100 * 50 * 2
    whole = parse(text.replace("add(%flat, %flat)", "reduce(%stack, %i), dimensions={0}, to_apply=%fused"))
    assert cost_of(whole, whole.entry, whole.entry.root).bytes == 9 * 100 * 50 * 2 + 4 + 100 * 50 * 2


def test_a_fusion_writes_the_slice_it_updates():
    """The update sits in a fusion inside the fusion, as on a TPU; the stack is not read, the layer is."""
    text = """HloModule m

%update (stack: bf16[9,100,50], layer: bf16[1,100,50], i: s32[]) -> bf16[9,100,50] {
  %stack = bf16[9,100,50] parameter(0)
  %layer = bf16[1,100,50] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = bf16[9,100,50] dynamic-update-slice(%stack, %layer, %i, %zero, %zero)
}

%fused (stack: bf16[9,100,50], layer: bf16[100,50], i: s32[]) -> bf16[9,100,50] {
  %stack = bf16[9,100,50] parameter(0)
  %layer = bf16[100,50] parameter(1)
  %i = s32[] parameter(2)
  %flat = bf16[1,100,50] bitcast(%layer)
  ROOT %inner = bf16[9,100,50] fusion(%stack, %flat, %i), kind=kLoop, calls=%update
}

ENTRY %main (stack: bf16[9,100,50], layer: bf16[100,50], i: s32[]) -> bf16[9,100,50] {
  %stack = bf16[9,100,50] parameter(0)
  %layer = bf16[100,50] parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = bf16[9,100,50] fusion(%stack, %layer, %i), kind=kLoop, calls=%fused
}
"""
    module = parse(text)
    layer = 100 * 50 * 2
    assert cost_of(module, module.entry, module.entry.root).bytes == layer + 4 + layer


# Any program of collectives and loops


SIDE = 32
"""A device's array is 32 x 32 of f32: 4 KiB."""


@dataclasses.dataclass(frozen=True)
class Op:
    kind: str
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
    length: int
    body: tuple


@st.composite
def written_programs(draw):
    shape = draw(st.sampled_from([{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}]))
    axes = st.lists(st.sampled_from(list(shape)), min_size=1, unique=True).map(lambda names: tuple(n for n in shape if n in names))
    kinds = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
    ops = st.builds(Op, st.sampled_from(kinds), axes) | st.builds(
        Op, st.just("collective-permute"), st.sampled_from(list(shape)).map(lambda n: (n,))
    )
    loops = st.builds(Loop, st.integers(1, 5), st.lists(ops, min_size=1, max_size=2).map(tuple))
    nested = st.builds(Loop, st.integers(1, 5), st.lists(ops | loops, min_size=1, max_size=2).map(tuple))
    return shape, tuple(draw(st.lists(ops | loops | nested, min_size=1, max_size=4)))


def run_written(items, x, shape, counter):
    """Applies the operations one after the other, with something between them that no pass can move them through."""
    for item in items:
        counter[0] += 1
        if isinstance(item, Loop):
            seen = list(counter)

            def body(x, _, item=item, seen=seen):
                return run_written(item.body, x, shape, list(seen)), None

            x = lax.scan(body, x, None, length=item.length)[0]
            counter[0] += 100
            continue
        n = math.prod(shape[axis] for axis in item.axes)
        x = jnp.sin(x + counter[0])
        if item.kind == "all-reduce":
            x = lax.psum(x, item.axes)
        elif item.kind == "all-gather":
            x = jnp.sin(lax.all_gather(x, item.axes, tiled=True)).reshape(n, SIDE, SIDE).max(0)
        elif item.kind == "reduce-scatter":
            x = lax.psum_scatter(jnp.sin(jnp.arange(n)[:, None, None] * x).reshape(n * SIDE, SIDE), item.axes, tiled=True)
        elif item.kind == "all-to-all":
            x = lax.all_to_all(x, item.axes, split_axis=0, concat_axis=0, tiled=True)
        else:
            x = lax.ppermute(x, item.axes[0], [(i, (i + 1) % n) for i in range(n)])
    return jnp.cos(x)


def wire_written(items, shape, times=1) -> Counter:
    """Wire bytes by kind and axes, from what was written."""
    total: Counter = Counter()
    for item in items:
        if isinstance(item, Loop):
            total += wire_written(item.body, shape, times * item.length)
            continue
        n = math.prod(shape[axis] for axis in item.axes)
        share = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "reduce-scatter": n - 1, "all-to-all": (n - 1) / n}.get(item.kind, 1)
        total[item.kind, item.axes] += times * share * SIDE * SIDE * 4
    return total


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(written_programs())
def test_what_was_written_is_counted(written):
    shape, items = written
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(shape.values())), tuple(shape))
    spec = P(tuple(shape))
    body = jax.shard_map(lambda x: run_written(items, x, shape, [0]), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((8 * SIDE, SIDE), jnp.float32, sharding=NamedSharding(mesh, spec))
    timeline = follow(parse(jax.jit(body).lower(x).compile().as_text()), Place(shape, (0,) * 8, ()), CHIPS["cpu"])
    counted: Counter = Counter()
    for run in timeline.runs:
        counted[run.collective.kind, run.collective.axes] += run.wire_bytes
    assert counted == wire_written(items, shape)
    assert timeline.unknown_loops == []


# A whole step of 7e9 parameters


def compile_llama2_7b(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZJAX_CACHE_DIR", "")
        config = load_config(str(REPO / "configs" / "llama2_7b.py"), ["--config.data.global_batch=8"])
        audit_run(config, GPU, keep_hlo=str(folder))


@pytest.fixture(scope="session")
def llama2_7b(tmp_path_factory) -> str:
    """The step of Llama-2-7B on 8 H100, as compiled; compiled once a session."""
    (text,) = made_once(tmp_path_factory, "llama2_7b", compile_llama2_7b).glob("*.hlo.txt")
    return text.read_text()


@pytest.mark.slow
def test_a_7b_program_is_read_fast(llama2_7b):
    place = Place({"fsdp": 8}, (0,) * 8, ())
    seconds = []
    for _ in range(3):  # the best of three: other processes share the machine
        started = time.perf_counter()
        timeline = follow(parse(llama2_7b), place, CHIPS["h100"])
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 2
    assert timeline.unknown_loops == []


def test_the_flops_of_a_7b_step(llama2_7b):
    """One sequence of 2048 a device: forward, backward at twice that, and the recomputed forward without its last product."""
    tokens, width, hidden, layers, vocabulary = 2048, 4096, 11008, 32, 32000
    attention = 2 * 2 * tokens * tokens * width
    block = 2 * tokens * (4 * width * width + 3 * width * hidden)
    forward = layers * (block + attention) + 2 * tokens * width * vocabulary
    again = layers * (block + attention - 2 * tokens * width * hidden)
    timeline = follow(parse(llama2_7b), Place({"fsdp": 8}, (0,) * 8, ()), CHIPS["h100"])
    assert timeline.flops == pytest.approx(3 * forward + again, rel=0.03)
