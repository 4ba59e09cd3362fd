"""Image data sets on disk: read, decoded, and missing in clear words."""

import urllib.error
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conf_option import conf_option

from ashl.data.vision import load_torchvision
from ashl.errors import AshlError, DataMissingError


def test_torchvision_imports_beside_this_torch():
    assert load_torchvision() is load_torchvision()


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100", "image_folder"])
def test_missing_data_says_what_where_and_every_way_out(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = conf_option("dataset", name, root="elsewhere")
    with pytest.raises(DataMissingError) as caught:
        option.load()
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert str(tmp_path / "elsewhere") in text
    assert all(way in text for way in ("ASHL_DATA=", "dataset.root=", "dataset=digits"))
    assert ("dataset.download=true" in text) == (name != "image_folder")
    assert text.count("\n") == 0
    assert {"mnist": "MNIST/raw", "cifar10": "cifar-10-batches-py"}.get(name, "train") in text


def test_no_network_is_missing_data_too(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(load_torchvision().datasets, "CIFAR10", unreachable)
    with pytest.raises(
        DataMissingError,
        match=r"could not be fetched into .*Name or service not known.*dataset=digits",
    ):
        conf_option("dataset", "cifar10", root=str(tmp_path), download=True).load()


def test_download_into_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AshlError, match=r"cannot be written .*dataset\.root=DIR"):
        conf_option("dataset", "mnist", root=str(tmp_path / "file" / "data"), download=True).load()


def write_idx(path, array):
    """LeCun's format: a magic number that holds the rank, the sizes, the bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def test_mnist_is_read_in_its_own_layout(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    for half, count in (("train", 20), ("t10k", 5)):
        write_idx(raw / f"{half}-images-idx3-ubyte", pixels[:count])
        write_idx(raw / f"{half}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    data = conf_option("dataset", "mnist", root=str(tmp_path)).load()
    assert (len(data.train), len(data.test), data.sample_shape, data.num_classes) == (
        20,
        5,
        (1, 28, 28),
        10,
    )
    inputs, targets = data.train.batch(np.array([3, 11]))
    expected = (pixels[[3, 11], None].astype(np.float64) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert targets.tolist() == [3, 1]
    assert data.train.inputs.dtype == torch.uint8
    (raw / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03 cut short")
    with pytest.raises(DataMissingError, match="missing or incomplete"):
        conf_option("dataset", "mnist", root=str(tmp_path)).load()


def test_cifar_s_colours_come_first(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    half = SimpleNamespace(data=pixels, targets=[1, 0, 1, 0], classes=["cat", "dog"])
    monkeypatch.setattr(load_torchvision().datasets, "CIFAR10", lambda root, train, download: half)
    data = conf_option("dataset", "cifar10", root=str(tmp_path)).load()
    assert (data.sample_shape, data.num_classes, data.augment) == ((3, 32, 32), 2, "crop_flip")
    inputs, _ = data.test.batch(np.array([2]))
    green = (pixels[2, :, :, 1] / 255 - 0.4822) / 0.2435
    np.testing.assert_allclose(inputs[0, 1].numpy(), green, rtol=1e-4, atol=1e-5)
