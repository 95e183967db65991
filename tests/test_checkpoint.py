"""Checkpoints: what was saved under one plan comes back bit for bit under any other, or an error names the leaves."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from small import assert_same_state, leaves, snapshot

from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.config import MeshConfig, PrecisionConfig, ZeroConfig
from zjax.mesh import make_mesh
from zjax.plan import build_plan
from zjax.state import init_state, state_shardings, state_struct, unplanned
from zjax.tree import named_leaves

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing is sharded")  # a mesh of one device is one of the cases

MESHES = {
    "8": {"fsdp": 8},
    "4": {"fsdp": 4},
    "2": {"fsdp": 2},
    "1": {"fsdp": 1},
    "2x4": {"replica": 2, "fsdp": 4},
    "4x2": {"replica": 4, "fsdp": 2},
}
PLANS = list(itertools.product(MESHES, range(4)))
"""Every (mesh, stage)."""

SHAPES = {
    "embed": {"table": (64, 16)},
    "layers": {"w": (3, 16, 8), "scale": (3, 16), "nothing": (3, 0, 8)},
    "odd": (5, 7),
    "scalar": (),
    "empty": (0, 4),
}
"""Sharded leaves, a stacked one, one that nothing divides, a scalar, and two without elements."""


def init_shapes(key, shapes=SHAPES):
    named, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(named))
    return jax.tree.unflatten(treedef, [jax.random.normal(k, shape) for k, shape in zip(keys, named, strict=True)])


def plan_on(mesh="8", stage=3, *, init=init_shapes, tx=None, compute="bfloat16"):
    degrees = MESHES[mesh]
    return build_plan(
        ZeroConfig(stage=stage),
        init,
        tx or optax.adamw(1e-3),
        make_mesh(MeshConfig(**degrees), jax.devices()[: math.prod(degrees.values())]),
        precision=PrecisionConfig(compute=compute),
        units=("layers[*]",) if "layers" in jax.eval_shape(init, jax.random.key(0)) else (),
    )


def filled(plan, step=7):
    """A state whose every leaf is different from the initial one, placed by the plan: random bits, step number apart."""
    struct, drawn = state_struct(plan), np.random.default_rng(step)

    def leaf(path, x, sharding):
        if path == "step":
            return jax.device_put(np.int32(step), sharding)
        if path == "rng":
            return jax.jit(lambda: jax.random.key(step), out_shardings=sharding)()
        if np.dtype(x.dtype) == np.int32:
            return jax.device_put(drawn.integers(1, 100, x.shape, np.int32), sharding)
        return jax.device_put(drawn.normal(size=x.shape).astype(x.dtype), sharding)

    placed = [leaf(path, x, s) for (path, x), s in zip(named_leaves(struct), jax.tree.leaves(state_shardings(plan)), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(struct), placed)


def save(directory, state, meta=None, **knobs):
    with_close = Checkpointer(directory, **knobs)
    with_close.save(state, meta)
    with_close.close()


def restore(directory, plan, step=None):
    opened = Checkpointer(directory)
    try:
        return opened.restore(plan, step)
    finally:
        opened.close()


# --- any plan to any other ----------------------------------------------------------------------------------------------


def pairwise(*factors):
    """Rows in which every two values of every two factors meet, greedily chosen."""
    wanted = {((i, a), (j, b)) for i, j in itertools.combinations(range(len(factors)), 2) for a in factors[i] for b in factors[j]}
    rows = list(itertools.product(*factors))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    chosen = []
    while wanted:
        row = max(rows, key=lambda row: len(pairs[row] & wanted))
        chosen.append(row)
        wanted -= pairs[row]
    return chosen


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same state saved under every plan, when it is first asked for: (mesh, stage) -> (folder, state)."""
    made = {}

    def under(mesh, stage):
        if (mesh, stage) not in made:
            folder = tmp_path_factory.mktemp(f"saved-{mesh}-{stage}")
            state = filled(plan_on(mesh, stage))
            save(folder, state)
            made[mesh, stage] = folder, leaves(state)
        return made[mesh, stage]

    return under


def check_restored(saved, mesh, stage, other_mesh, other_stage):
    folder, expected = saved(mesh, stage)
    plan = plan_on(other_mesh, other_stage)
    restored = restore(folder, plan)
    found = leaves(restored)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
        assert found[path].tobytes() == value.tobytes(), path
    assert unplanned(plan, restored) == []


def row_name(row):
    return "stage {1} on {0} to stage {3} on {2}".format(*row)


PAIRWISE = pairwise(MESHES, range(4), MESHES, range(4))


@pytest.mark.parametrize("row", PAIRWISE, ids=row_name)
def test_saved_under_one_plan_comes_back_under_another(saved, row):
    check_restored(saved, *row)


@pytest.mark.full
@pytest.mark.parametrize("row", [(*one, *other) for one in PLANS for other in PLANS if (*one, *other) not in PAIRWISE], ids=row_name)
def test_saved_under_any_plan_comes_back_under_any_other(saved, row):
    check_restored(saved, *row)


def test_the_state_has_every_kind_of_leaf():
    kinds = {
        (np.dtype(x.dtype) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else "key")
        for _, x in named_leaves(state_struct(plan_on()))
    }
    assert kinds == {np.dtype("int32"), np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), "key"}
    sizes = {x.size for _, x in named_leaves(state_struct(plan_on()))}
    assert {0, 1} < sizes


@pytest.mark.parametrize(
    "tx",
    [optax.sgd(1.0), optax.lion(1.0), optax.adafactor(1.0, min_dim_size_to_factor=8), optax.chain(optax.clip(1.0), optax.ema(0.9))],
    ids=["sgd", "lion", "adafactor", "chain"],
)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_state_of_other_optimizers_comes_back(tmp_path, tx, compute):
    def init(key):  # adafactor divides by the number of elements
        return init_shapes(key, {"embed": SHAPES["embed"], "odd": SHAPES["odd"]})

    state = filled(plan_on("8", 3, init=init, tx=tx, compute=compute))
    save(tmp_path, state)
    assert_same_state(restore(tmp_path, plan_on("2x4", 1, init=init, tx=tx, compute=compute)), state)


def test_a_restored_state_trains_on(tmp_path):
    """The arrays can be donated, and the random stream goes on: a key is a key again."""
    plan, other = plan_on("8", 3), plan_on("4x2", 2)
    state = filled(plan)
    save(tmp_path, state)
    restored = restore(tmp_path, other)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(restored)] == [x.dtype for x in jax.tree.leaves(state)]
    draw = lambda state: jax.random.normal(jax.random.fold_in(state.rng, state.step), 4)  # noqa: E731
    np.testing.assert_array_equal(draw(restored), draw(state))
    moved = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0, out_shardings=state_shardings(other))(restored)
    assert_same_state(moved, state)


def test_values_that_are_not_finite_or_not_normal_come_back(tmp_path):
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-40, np.float32(3.4e38), 1], np.float32)
    plan = plan_on(init=lambda key: {"w": jnp.zeros(8)}, compute="float32")
    state = init_state(plan, jax.random.key(0))
    state = jax.tree.map(lambda x: jax.device_put(values, x.sharding) if x.shape == (8,) else x, state)
    save(tmp_path, state)
    assert_same_state(restore(tmp_path, plan), state)


# --- saving -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["8", "1", "2x4"])
def test_donating_right_after_save_is_safe(tmp_path, mesh):
    """`save` returns before the files are written; the arrays are the caller's again all the same."""

    def init(key):
        return {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (512, 512)) for i in range(8)}

    plan = plan_on(mesh, 3, init=init, compute="float32")
    overwrite = jax.jit(
        lambda s: jax.tree.map(lambda x: x * 0 - 1 if x.ndim else x, s), donate_argnums=0, out_shardings=state_shardings(plan)
    )
    state = filled(plan)
    expected = leaves(jax.tree.map(lambda x: x.copy(), state))
    opened = Checkpointer(tmp_path)
    opened.save(state)
    for _ in range(3):
        state = jax.block_until_ready(overwrite(state))
    opened.close()
    found = leaves(restore(tmp_path, plan))
    assert [path for path in expected if found[path].tobytes() != expected[path].tobytes()] == []


def test_the_newest_are_kept(tmp_path):
    plan = plan_on()
    opened = Checkpointer(tmp_path / "two", keep=2)
    for step in (1, 2, 10, 30):
        opened.save(filled(plan, step))
    opened.close()
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["10", "30"]
    assert_same_state(restore(tmp_path / "two", plan, 10), filled(plan, 10))
    assert_same_state(restore(tmp_path / "two", plan), filled(plan, 30))


def test_all_are_kept_where_nothing_is_said(tmp_path):
    plan = plan_on()
    opened = Checkpointer(tmp_path)
    for step in range(4):
        opened.save(filled(plan, step))
    assert opened.latest_step() == 3
    opened.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    assert Checkpointer(tmp_path).latest_step() == 3


@pytest.mark.parametrize("step", [10, 3], ids=["saved already", "older than the newest"])
def test_no_save_is_dropped_without_a_word(tmp_path, step):
    """As when step 3 of a run of 10 is restored, to go on from there another way: saved, or an error, not neither."""
    plan = plan_on()
    save(tmp_path, filled(plan, 10))
    state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.bfloat16 else x, filled(plan, step))
    try:
        save(tmp_path, state)
    except CheckpointError as error:
        assert str(step) in str(error)
    else:
        assert_same_state(restore(tmp_path, plan, step), state)


def test_meta_round_trip(tmp_path):
    meta = {
        "config": {"data": {"path": "dépôt/日本"}, "clip": None, "lr": 3e-4, "tied": False},
        "steps": [1, 2**40],
        "empty": {},
        "text": "",
    }
    opened = Checkpointer(tmp_path)
    opened.save(filled(plan_on(), 1), meta)
    opened.save(filled(plan_on(), 2))
    opened.wait()
    assert opened.meta(1) == json.loads(json.dumps(meta)) == meta
    assert opened.meta(2) == {}
    opened.close()
    assert Checkpointer(tmp_path).meta(1) == meta


def test_a_relative_directory_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    opened = Checkpointer("check points/ü")
    monkeypatch.chdir(tmp_path / "b")
    opened.save(filled(plan_on()))
    opened.close()
    assert (tmp_path / "a" / "check points" / "ü" / "7").is_dir()
    assert list((tmp_path / "b").iterdir()) == []


# --- errors -------------------------------------------------------------------------------------------------------------


def test_looking_at_a_directory_that_is_not_there_creates_nothing(tmp_path):
    opened = Checkpointer(tmp_path / "no" / "where")
    assert opened.latest_step() is None
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*/no/where"):
        opened.restore(plan_on())
    opened.wait()
    opened.close()
    assert snapshot(tmp_path) == {}


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    opened = Checkpointer(tmp_path)
    assert opened.latest_step() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        opened.restore(plan_on())
    opened.close()
    assert snapshot(tmp_path) == {}


def test_looking_at_a_checkpoint_changes_no_byte(tmp_path):
    plan = plan_on()
    save(tmp_path, filled(plan), {"a": 1})
    before = snapshot(tmp_path)
    opened = Checkpointer(tmp_path)
    assert opened.latest_step() == 7 and opened.meta(7) == {"a": 1}
    opened.restore(plan)
    opened.close()
    assert snapshot(tmp_path) == before


def test_a_step_that_was_not_saved_is_an_error_that_says_so(tmp_path):
    save(tmp_path, filled(plan_on()))
    with pytest.raises(CheckpointError, match="6"):
        restore(tmp_path, plan_on(), 6)


def changed(**shapes):
    """`init_shapes` with other leaves; None takes one away."""
    merged = {name: shape for name, shape in {**SHAPES, **shapes}.items() if shape is not None}
    return lambda key: init_shapes(key, merged)


@pytest.mark.parametrize(
    ("init", "named", "unnamed"),
    [
        (
            changed(odd=(7, 5)),
            ["params/odd: bfloat16[5, 7] in the checkpoint, bfloat16[7, 5] in the plan", "opt_state/master/odd"],
            ["scalar", "embed"],
        ),
        (changed(odd=(35,)), ["params/odd: bfloat16[5, 7]", "opt_state/inner/0/mu/odd: float32[5, 7]"], ["scalar"]),
        (changed(extra=(4, 4)), ["params/extra: missing in the checkpoint", "opt_state/master/extra: missing"], ["odd"]),
        (
            changed(odd=None),
            ["params/odd: in the checkpoint, but not in the plan", "opt_state/inner/0/nu/odd: in the checkpoint"],
            ["scalar"],
        ),
        (changed(odd=None, strange=(5, 7)), ["params/odd: in the checkpoint", "params/strange: missing"], ["scalar"]),
        (changed(empty=(1, 4)), ["params/empty: bfloat16[0, 4] in the checkpoint, bfloat16[1, 4] in the plan"], ["odd"]),
    ],
    ids=["shape", "rank", "missing", "extra", "renamed", "no longer empty"],
)
def test_leaves_that_differ_are_named(tmp_path, init, named, unnamed):
    save(tmp_path, filled(plan_on()))
    with pytest.raises(CheckpointError) as error:
        restore(tmp_path, plan_on(init=init))
    assert str(tmp_path / "7") in str(error.value)
    for text in named:
        assert text in str(error.value)
    for text in unnamed:
        assert f"/{text}" not in str(error.value).replace(str(tmp_path), "")


def test_dtypes_that_differ_are_named_not_cast(tmp_path):
    """Orbax casts silently; float32 parameters of a run in bfloat16 would lose two thirds of their bits."""

    def init(key):
        return {"w": jnp.zeros((16, 8)), "odd": jnp.zeros((5, 7))}

    save(tmp_path, filled(plan_on(init=init, compute="float32", tx=optax.sgd(1.0))))
    with pytest.raises(CheckpointError) as error:
        restore(tmp_path, plan_on(init=init, compute="bfloat16", tx=optax.sgd(1.0)))
    for text in ("params/w: float32[16, 8] in the checkpoint, bfloat16[16, 8] in the plan", "opt_state/master/w: missing"):
        assert text in str(error.value)


def test_another_optimizer_is_refused(tmp_path):
    save(tmp_path, filled(plan_on(tx=optax.adamw(1e-3))))
    with pytest.raises(CheckpointError, match=r"opt_state/inner/0/nu/odd: in the checkpoint, but not in the plan"):
        restore(tmp_path, plan_on(tx=optax.sgd(1e-3)))


def test_a_long_list_of_leaves_is_cut(tmp_path):
    def init(key):
        return {f"w{i:02}": jnp.zeros((8, 2)) for i in range(40)}

    save(tmp_path, filled(plan_on(init=init, compute="float32", tx=optax.sgd(1.0))))
    with pytest.raises(CheckpointError, match="and 60 more") as error:
        restore(
            tmp_path, plan_on(init=lambda key: {f"v{i:02}": jnp.zeros((8, 2)) for i in range(40)}, compute="float32", tx=optax.sgd(1.0))
        )
    assert len(str(error.value).splitlines()) == 22
