"""Degrees, their errors, and how devices lie on the axes."""

import itertools
import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zjax
from zjax.config import MeshConfig
from zjax.fields import ConfigError
from zjax.mesh import AXES, data_axes, degree, physical_axes, resolve_degrees, shard_shape, spec_axes, zero_axes


@dataclass(frozen=True)
class Chip:
    """What jax's mesh utilities read of a device."""

    id: int
    process_index: int
    platform: str
    device_kind: str


@dataclass(frozen=True)
class TpuChip(Chip):
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0


def hosts(n, chips=8, platform="gpu"):
    """Hosts of GPUs (or CPUs), which have no slices."""
    return [Chip(id=i, process_index=i // chips, platform=platform, device_kind="NVIDIA H100") for i in range(n * chips)]


def slices(n, shape=(2, 2, 2)):
    """TPU slices; coordinates start again in each. A host has 4 chips, so that hosts are not slices."""
    chips = []
    for index in range(n):
        for z, y, x in itertools.product(*map(range, reversed(shape))):
            chips.append(
                TpuChip(
                    id=len(chips), process_index=len(chips) // 4, platform="tpu", device_kind="TPU v5p", slice_index=index, coords=(x, y, z)
                )
            )
    return chips


def laid(devices, attribute, **degrees):
    """Where the mesh puts devices: an attribute of each, replica x fsdp x tensor."""
    mesh = zjax.make_mesh(MeshConfig(**degrees), devices)
    picked = np.vectorize(lambda device: getattr(device, attribute))(mesh.devices)
    return picked.reshape(mesh.shape["replica"], mesh.shape["fsdp"], mesh.shape["tensor"])


# --- degrees ----------------------------------------------------------------------------------------------------------------


def test_one_axis_takes_the_devices_that_the_others_leave():
    assert resolve_degrees(MeshConfig(), 8) == {"pipeline": 1, "replica": 1, "fsdp": 8, "expert": 1, "sequence": 1, "tensor": 1}
    assert resolve_degrees(MeshConfig(replica=2), 8)["fsdp"] == 4
    assert resolve_degrees(MeshConfig(fsdp=2, tensor=2, replica=-1), 8)["replica"] == 2
    assert resolve_degrees(MeshConfig(fsdp=2, replica=2, tensor=-1), 8)["tensor"] == 2
    assert resolve_degrees(MeshConfig(), 1)["fsdp"] == 1


EVERY_FACTOR = "pipeline 1 x replica 3 x fsdp {} x expert 1 x sequence 1 x tensor 1"


@pytest.mark.parametrize(
    ("config", "devices", "told"),
    [
        (MeshConfig(replica=3), 8, (EVERY_FACTOR.format(-1), "8 devices", "8 % 3 = 2")),
        (MeshConfig(replica=3, fsdp=3), 8, (EVERY_FACTOR.format(3), "= 9", "8 devices")),
        (MeshConfig(replica=3, fsdp=2), 8, (EVERY_FACTOR.format(2), "= 6", "8 devices")),
        (MeshConfig(replica=16), 8, ("replica 16", "8 devices", "8 % 16 = 8")),
    ],
)
def test_degrees_that_do_not_fit_name_every_factor_and_the_device_count(config, devices, told):
    for make in (resolve_degrees, zjax.abstract_mesh, lambda config, n: zjax.make_mesh(config, jax.devices()[:n])):
        with pytest.raises(ConfigError) as error:
            make(config, devices)
        for part in told:
            assert part in str(error.value)


@pytest.mark.parametrize(
    ("degrees", "told"),
    [
        ({"replica": -1}, ("mesh.replica", "mesh.fsdp", "only one")),
        ({"fsdp": 0}, ("mesh.fsdp=0", "positive")),
        ({"tensor": -2}, ("mesh.tensor=-2", "positive")),
        ({"pipeline": 2}, ("mesh.pipeline=2", "not available")),
        ({"sequence": 2}, ("mesh.sequence=2", "not available")),
    ],
)
def test_degrees_that_no_mesh_can_have_raise_where_the_config_is_made(degrees, told):
    with pytest.raises(ConfigError) as error:
        MeshConfig(**degrees)
    for part in told:
        assert part in str(error.value)


@given(st.lists(st.integers(1, 6), min_size=4, max_size=4), st.integers(0, 3))
def test_an_inferred_degree_completes_the_product(sizes, inferred):
    names = ("replica", "fsdp", "expert", "tensor")
    given_degrees = dict(zip(names, sizes, strict=True)) | {names[inferred]: -1}
    resolved = resolve_degrees(MeshConfig(**given_degrees), math.prod(sizes))
    assert [resolved[name] for name in names] == sizes


# --- where devices lie ------------------------------------------------------------------------------------------------------


def test_the_default_mesh_has_every_device_on_fsdp_with_automatic_axes():
    mesh = zjax.make_mesh(MeshConfig())
    assert mesh.axis_names == AXES == ("pipeline", "replica", "fsdp", "expert", "sequence", "tensor")
    assert dict(mesh.shape) == {name: 8 if name == "fsdp" else 1 for name in AXES}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(mesh.devices.flat) == set(jax.devices())


def test_a_mesh_may_take_some_of_the_devices():
    mesh = zjax.make_mesh(MeshConfig(replica=2), jax.devices()[4:])
    assert list(mesh.devices.flat) == jax.devices()[4:]
    assert (mesh.shape["replica"], mesh.shape["fsdp"]) == (2, 2)


def test_an_abstract_mesh_has_the_shape_of_the_real_one_and_no_devices():
    config = MeshConfig(replica=2, tensor=2)
    real, abstract = zjax.make_mesh(config), zjax.abstract_mesh(config, 8)
    assert isinstance(abstract, AbstractMesh)
    assert (abstract.shape, abstract.axis_types) == (real.shape, real.axis_types)
    assert zjax.abstract_mesh(MeshConfig(), 4096).shape["fsdp"] == 4096


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_replica_lies_between_hosts_and_fsdp_inside(platform):
    host = laid(hosts(4, platform=platform), "process_index", replica=4)
    np.testing.assert_array_equal(host[:, :, 0], np.repeat(np.arange(4), 8).reshape(4, 8))


def test_replica_lies_between_slices_and_fsdp_inside_however_hosts_are_numbered():
    chips = slices(2)
    assert len({chip.process_index for chip in chips}) == 4
    shuffled = [chips[i] for i in np.random.default_rng(0).permutation(16)]
    for devices in (chips, shuffled):
        index = laid(devices, "slice_index", replica=2)
        assert [set(row) for row in index[:, :, 0]] == [{0}, {1}]


def test_replica_beyond_the_number_of_slices_goes_on_inside_them():
    index = laid(slices(2), "slice_index", replica=4)
    assert [set(row.ravel()) for row in index] == [{0}, {0}, {1}, {1}]
    host = laid(hosts(2), "process_index", replica=8)
    assert [set(row.ravel()) for row in host] == [{0}] * 4 + [{1}] * 4


def test_tensor_lies_on_the_fastest_links_next_to_each_other():
    """Neighbours on the tensor axis are one hop apart on the torus of a slice."""
    coords = zjax.make_mesh(MeshConfig(replica=2, tensor=2), slices(2, (4, 2, 2))).devices
    for pair in coords.reshape(-1, 2):
        assert pair[0].slice_index == pair[1].slice_index
        assert sum(abs(a - b) for a, b in zip(pair[0].coords, pair[1].coords, strict=True)) == 1


def test_fsdp_across_hosts_keeps_the_devices_of_a_host_together():
    host = laid(hosts(4), "process_index", replica=2)
    np.testing.assert_array_equal(host[:, :, 0], [[0] * 8 + [1] * 8, [2] * 8 + [3] * 8])


@pytest.mark.parametrize(
    ("n", "degrees", "expected"),
    [(2, {}, [[0] * 8 + [1] * 8]), (4, {"replica": 2}, [[0] * 8 + [1] * 8, [2] * 8 + [3] * 8])],
    ids=["fsdp over two slices", "fsdp over two of four slices"],
)
def test_fsdp_across_slices_keeps_the_devices_of_a_slice_together(n, degrees, expected):
    index = laid(slices(n), "slice_index", **degrees)
    np.testing.assert_array_equal(index[:, :, 0], expected)


def test_slices_that_cannot_be_laid_out_raise_in_words_not_with_an_assertion_of_jax():
    """8 chips of one slice and 4 of another: no part of 3 x 4 is a whole slice."""
    with pytest.raises(ConfigError, match=r"replica 3 x fsdp 4 .*2 slices"):
        zjax.make_mesh(MeshConfig(replica=3, fsdp=4), slices(2)[:12])


# --- questions about a mesh -------------------------------------------------------------------------------------------------


def test_the_batch_lies_over_the_data_axes_and_state_over_the_zero_axes():
    mesh = zjax.abstract_mesh(MeshConfig(replica=2, fsdp=2, expert=2, tensor=2), 16)
    assert data_axes(mesh) == ("replica", "fsdp", "expert")
    assert zero_axes(mesh) == ("fsdp", "expert")
    assert degree(mesh, data_axes(mesh)) == 8 and degree(mesh, ()) == 1


def test_axes_of_one_device_are_left_out():
    mesh = zjax.abstract_mesh(MeshConfig(replica=2, fsdp=1, tensor=4), 8)
    assert (data_axes(mesh), zero_axes(mesh)) == (("replica",), ())


def test_a_logical_axis_may_lie_over_several_mesh_axes():
    torus = AbstractMesh((2, 2, 4, 1), ("replica", "fsdp_0", "fsdp_1", "tensor"))
    assert physical_axes(torus, "fsdp") == ("fsdp_0", "fsdp_1")
    assert zero_axes(torus) == ("fsdp_0", "fsdp_1") and data_axes(torus) == ("replica", "fsdp_0", "fsdp_1")


def test_spec_axes_are_all_axes_a_spec_uses():
    assert spec_axes(P(None, ("fsdp", "expert"), "tensor")) == ("fsdp", "expert", "tensor")
    assert spec_axes(P()) == ()


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "fsdp"), P(("replica", "fsdp"), "tensor"), P("tensor", None, "fsdp")])
def test_shard_shape_is_jaxs(spec):
    mesh = zjax.make_mesh(MeshConfig(replica=2, tensor=2))
    assert shard_shape(mesh, spec, (8, 4, 12)) == NamedSharding(mesh, spec).shard_shape((8, 4, 12))
