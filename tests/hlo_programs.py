"""Programs whose collectives and matrix products are known by construction, compiled for targets that are not there.

`python hlo_programs.py FOLDER TARGET...` writes FOLDER/TARGET/PROGRAM.txt and places.json. It runs in a process of its
own for each platform, in `child_environment`. The tests look up lines of this file by their `# line:` comments.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.audit.targets import open_devices, parse_target, place_of

CPU, GPU, GPU_HOSTS, V5E, V5P = "cpu:8", "gpu:h100:1x8", "gpu:h100:2x4", "tpu:v5e:2x4", "tpu:v5p:2x2x2"
TARGETS = (CPU, GPU, GPU_HOSTS, V5E, V5P)
ONE_OF_EACH = (CPU, GPU, V5E)

TWO_BY_FOUR = ((2, 4), ("replica", "fsdp"), "given")
FOUR_BY_TWO = ((4, 2), ("replica", "fsdp"), "given")
TRANSPOSED = ((4, 2), ("replica", "fsdp"), "transposed")
"""Place (replica, fsdp) of the mesh is device 4 * fsdp + replica of the target: `fsdp` crosses the hosts of 2x4."""
REVERSED = ((2, 4), ("replica", "fsdp"), "reversed")
CUBE = ((2, 2, 2), ("x", "y", "z"), "given")
LINE = ((8,), ("fsdp",), "given")


class Program(NamedTuple):
    lower: Callable[[Mesh], Any]
    mesh: tuple[tuple[int, ...], tuple[str, ...], str]
    targets: tuple[str, ...]


PROGRAMS: dict[str, Program] = {}


def program(mesh, targets=TARGETS):
    def register(lower):
        PROGRAMS[lower.__name__] = Program(lower, mesh, targets)
        return lower

    return register


def mapped(mesh: Mesh, body, *shapes_and_specs, out):
    """Lowers a shard_map of `body`; shapes are those of one device, and arrays differ along every named axis."""
    arguments, specs = [], []
    for shape, dtype, spec in shapes_and_specs:
        whole = [
            size * int(np.prod([mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ())]))
            for size, axes in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True)
        ]
        arguments.append(jax.ShapeDtypeStruct(whole, dtype, sharding=NamedSharding(mesh, spec)))
        specs.append(spec)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=out, check_vma=False)).lower(*arguments)


F32, BF16 = jnp.float32, jnp.bfloat16
ALL = P(("replica", "fsdp"))
MIB = ((256, 1024), F32, ALL)  # 1 MiB a device


@program(TWO_BY_FOUR)
def gather(mesh):
    def body(x):
        with jax.named_scope("outer"):
            return lax.all_gather(x, "fsdp", tiled=True)  # line: gather

    return mapped(mesh, body, MIB, out=P("replica"))


@program(TWO_BY_FOUR, (GPU, V5E))
def gather_bf16(mesh):
    return mapped(mesh, lambda x: lax.all_gather(x, "fsdp", tiled=True), ((256, 1024), BF16, ALL), out=P("replica"))


@program(TWO_BY_FOUR)
def gather_replica(mesh):
    return mapped(mesh, lambda x: lax.all_gather(x, "replica", tiled=True), MIB, out=P("fsdp"))


@program(TWO_BY_FOUR)
def gather_everywhere(mesh):
    return mapped(mesh, lambda x: lax.all_gather(x, ("replica", "fsdp"), tiled=True), MIB, out=P())


@program(TWO_BY_FOUR)
def scatter(mesh):
    def body(x):
        return lax.psum_scatter(x, "fsdp", tiled=True)  # line: scatter

    return mapped(mesh, body, ((1024, 1024), F32, ALL), out=ALL)


@program(TWO_BY_FOUR)
def reduce(mesh):
    def body(x):
        return lax.psum(x, "replica")  # line: reduce

    return mapped(mesh, body, MIB, out=P("fsdp"))


@program(TWO_BY_FOUR)
def reduce_everywhere(mesh):
    return mapped(mesh, lambda x: lax.psum(x, ("replica", "fsdp")), MIB, out=P())


@program(TWO_BY_FOUR)
def exchange(mesh):
    def body(x):
        return lax.all_to_all(x, "fsdp", split_axis=1, concat_axis=0, tiled=True)  # line: exchange

    return mapped(mesh, body, MIB, out=P("replica", "fsdp"))


@program(TWO_BY_FOUR)
def permute(mesh):
    def body(x):
        return lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)])  # line: permute

    return mapped(mesh, body, MIB, out=ALL)


@program(TWO_BY_FOUR)
def permute_some(mesh):
    return mapped(mesh, lambda x: lax.ppermute(x, "fsdp", [(0, 1), (1, 2), (3, 3)]), MIB, out=ALL)


@program(FOUR_BY_TWO)
def gather_of_two(mesh):
    return mapped(mesh, lambda x: lax.all_gather(x, "fsdp", tiled=True), MIB, out=P("replica"))


@program(TRANSPOSED)
def gather_transposed(mesh):
    return mapped(mesh, lambda x: lax.all_gather(x, "fsdp", tiled=True), MIB, out=P("replica"))


@program(TRANSPOSED)
def reduce_transposed(mesh):
    return mapped(mesh, lambda x: lax.psum(x, "replica"), MIB, out=P("fsdp"))


@program(REVERSED)
def gather_reversed(mesh):
    return mapped(mesh, lambda x: lax.all_gather(x, "fsdp", tiled=True), MIB, out=P("replica"))


@program(TWO_BY_FOUR, ONE_OF_EACH)
def scan_of_seven(mesh):
    def body(x, layers):
        def layer(x, w):
            return jnp.sin(x + lax.all_gather(w, "fsdp", tiled=True)), None

        return lax.scan(layer, x, layers)[0]

    return mapped(mesh, body, ((1024, 1024), F32, ALL), ((7, 256, 1024), F32, P(None, "fsdp")), out=ALL)


@program(TWO_BY_FOUR, ONE_OF_EACH)
def three_times_five(mesh):
    def body(x):
        def inner(x, _):
            return jnp.sin(lax.psum(x, "fsdp")), None

        def outer(x, _):
            return jnp.cos(lax.scan(inner, lax.psum(x, "replica"), None, length=5)[0]), None

        return lax.scan(outer, x, None, length=3)[0]

    return mapped(mesh, body, MIB, out=ALL)


@program(TWO_BY_FOUR, (CPU, GPU, V5P))
def several(mesh):
    """Two gathers, two scatters and two sums over the replicas, which the compiler may combine to one each."""

    def body(x, v, w):
        v, w = lax.all_gather(v, "fsdp", tiled=True), lax.all_gather(w, "fsdp", tiled=True)
        g, h = lax.psum_scatter(jnp.sin(v * x), "fsdp", tiled=True), lax.psum_scatter(jnp.cos(w * x), "fsdp", tiled=True)
        return lax.psum(g, "replica"), lax.psum(h, "replica")

    shard = ((256, 1024), F32, P("fsdp"))
    return mapped(mesh, body, ((1024, 1024), F32, ALL), shard, shard, out=(P("fsdp"), P("fsdp")))


@program(TWO_BY_FOUR, ONE_OF_EACH)
def beside_products(mesh):
    """The gather of w does not need the products of x, so that they can run beside it."""

    def body(x, v, w):
        whole = lax.all_gather(w, "fsdp", tiled=True)
        for _ in range(3):
            x = jnp.tanh(x @ v)
        return x @ whole

    return mapped(mesh, body, ((2048, 2048), BF16, ALL), ((2048, 2048), BF16, P()), ((512, 2048), BF16, P("fsdp")), out=ALL)


@program(CUBE, (CPU, V5P))
def cube_gather_xy(mesh):
    return mapped(mesh, lambda x: lax.all_gather(x, ("x", "y"), tiled=True), ((256, 1024), F32, P(("x", "y", "z"))), out=P("z"))


@program(CUBE, (CPU, V5P))
def cube_scatter_z(mesh):
    return mapped(mesh, lambda x: lax.psum_scatter(x, "z", tiled=True), ((1024, 1024), F32, P(("x", "y", "z"))), out=P(("x", "y", "z")))


@program(CUBE, (CPU, V5P))
def cube_scatter_all(mesh):
    axes = ("x", "y", "z")
    return mapped(mesh, lambda x: lax.psum_scatter(x, axes, tiled=True), ((1024, 1024), F32, P(axes)), out=P(axes))


def local(function, *shapes, dtype=BF16):
    def lower(mesh):
        return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())) for shape in shapes))

    return lower


EINSUMS = {
    "dot": ("mk,kn->mn", (512, 1024), (1024, 2048)),
    "dot_odd": ("mk,kn->mn", (520, 1000), (1000, 1500)),
    "batched": ("bmk,bkn->bmn", (8, 512, 256), (8, 256, 384)),
    "scores": ("bthd,bshd->bhts", (2, 256, 8, 128), (2, 256, 8, 128)),
    "scores_small_heads": ("bthd,bshd->bhts", (4, 512, 16, 64), (4, 512, 16, 64)),
    "scores_one_batch": ("bthd,bshd->bhts", (1, 2048, 32, 128), (1, 2048, 32, 128)),
    "weighted": ("bhts,bshd->bthd", (2, 8, 256, 256), (2, 256, 8, 128)),
    "groups": ("btkgd,bskd->bkgts", (2, 256, 4, 2, 128), (2, 256, 4, 128)),
    "gradient": ("btd,btf->df", (4, 512, 1024), (4, 512, 2048)),
    "projection": ("btd,dhk->bthk", (4, 512, 1024), (1024, 8, 128)),
    "out_projection": ("bthk,hkd->btd", (4, 512, 8, 128), (8, 128, 1024)),
}
for _name, (_formula, *_shapes) in EINSUMS.items():
    _lower = local(lambda a, b, formula=_formula: jnp.einsum(formula, a, b), *_shapes)
    PROGRAMS[_name] = Program(_lower, LINE, ONE_OF_EACH)
for _precision in ("default", "high", "highest"):
    _lower = local(lambda a, b, precision=_precision: jnp.dot(a, b, precision=precision), (512, 1024), (1024, 2048), dtype=F32)
    PROGRAMS[f"f32_{_precision}"] = Program(_lower, LINE, (V5E,))
PROGRAMS["int8"] = Program(
    local(partial(lax.dot, preferred_element_type=jnp.int32), (512, 1024), (1024, 2048), dtype=jnp.int8), LINE, (V5E,)
)


@program(LINE, ONE_OF_EACH)
def product_scan(mesh):
    def function(x, layers):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]

    return local(function, (512, 1024), (6, 1024, 1024))(mesh)


@program(LINE, ONE_OF_EACH)
def attention(mesh):
    """Forward and backward of plain attention over a scan of 3 layers of 4 heads."""

    def layer(x, w):
        q, k, v = jnp.einsum("btd,zdhk->zbthk", x, w)
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k).astype(F32)).astype(BF16)
        return x + jnp.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape), None

    def loss(layers, x):
        return lax.scan(layer, x, layers)[0].astype(F32).sum()

    return local(jax.grad(loss), (3, 3, 512, 4, 128), (2, 256, 512))(mesh)


def sharded_product(formula):
    """A product of shards, and its shard: on a TPU a loop of ring permutes beside products, two shards an iteration."""

    def lower(mesh):
        shards = NamedSharding(mesh, P("fsdp"))
        a, b = (jax.ShapeDtypeStruct(shape, BF16, sharding=shards) for shape in ((8192, 2048), (8192 if formula[0] == "t" else 2048, 2048)))
        return jax.jit(partial(jnp.einsum, formula), out_shardings=shards).lower(a, b)

    return lower


PROGRAMS["windowed_scatter"] = Program(sharded_product("td,tf->df"), LINE, (V5E,))
PROGRAMS["windowed_gather"] = Program(sharded_product("bd,df->bf"), LINE, (V5E,))


def mesh_for(name: str, devices: list[Any]) -> Mesh:
    shape, names, order = PROGRAMS[name].mesh
    array = np.array(devices)
    if order == "transposed":
        array = array.reshape(shape[::-1]).T
    elif order == "reversed":
        array = array[::-1]
    return Mesh(array.reshape(shape), names)


def main(folder: str, *targets: str) -> None:
    for text in targets:
        target = parse_target(text)
        devices = open_devices(target)
        into = Path(folder) / text.replace(":", "-")
        into.mkdir(parents=True)
        places = {}
        for name in [name for name, program in PROGRAMS.items() if text in program.targets]:
            mesh = mesh_for(name, devices)
            place = place_of(target, mesh.shape, mesh.devices.ravel().tolist())
            places[name] = {"mesh": dict(mesh.shape), "hosts": place.hosts, "coords": place.coords}
            # Small programs would else be left with all-gathers as windowed products, or not, by their size.
            windowed = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"} if name.startswith("windowed") else None
            compiled = PROGRAMS[name].lower(mesh).compile(compiler_options=windowed)
            (into / f"{name}.txt").write_text(compiled.as_text())
        (into / "places.json").write_text(json.dumps(places))


if __name__ == "__main__":
    main(*sys.argv[1:])
