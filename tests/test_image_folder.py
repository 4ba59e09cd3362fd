"""Folders of images as users have them: what is no class, what is read right, and what is refused
by its name.
"""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conf_option import conf_option
from PIL import Image

from ashl.data.dataset import Data
from ashl.data.image_folder import Decoder
from ashl.errors import AshlError, DataMissingError

GREY = np.full((16, 16), 128, np.uint8)


def fill(root: Path, classes=("cat", "dog")) -> Path:
    for half in ("train", "test"):
        for name in classes:
            (root / half / name).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(GREY).save(root / half / name / f"{i}.png")
    return root


def load(root: Path) -> Data:
    return conf_option("dataset", "image_folder", root=str(root), image_size=8).load()


def pixels(data: Data, number: int) -> torch.Tensor:
    return data.train.inputs[torch.tensor([number])][0]


def test_what_programs_leave_is_neither_a_class_nor_an_image(tmp_path) -> None:
    root = fill(tmp_path)
    for hidden in (".ipynb_checkpoints", "__MACOSX", "@eaDir", "cat/.ipynb_checkpoints"):
        (root / "train" / hidden).mkdir()
    for file in (
        ".DS_Store",
        "cat/.DS_Store",
        "cat/._0.png",
        "cat/.ipynb_checkpoints/0-checkpoint.png",
        "cat/notes.txt",
    ):
        (root / "train" / file).write_bytes(b"no image")
    data = load(root)
    assert (data.num_classes, len(data.train), len(data.test)) == (2, 4, 4)


@pytest.mark.parametrize("cache_mb", [0, 1])
def test_pixels_are_normalised_when_decoded_and_from_memory(tmp_path, cache_mb) -> None:
    root = str(fill(tmp_path))
    fields = {"root": root, "image_size": 8, "cache_mb": cache_mb}
    data = conf_option("dataset", "image_folder", **fields).load()
    assert (data.sample_shape, data.train.labels.tolist()) == ((3, 8, 8), [0, 0, 1, 1])
    for _ in range(2):
        inputs, targets = data.train.batch(np.array([3, 0]))
        assert targets.tolist() == [1, 0]
        red = (128 / 255 - 0.485) / 0.229
        torch.testing.assert_close(inputs[:, 0], torch.full((2, 8, 8), red))


def test_decoder_keeps_what_fits_and_decodes_the_rest_again(tmp_path, monkeypatch) -> None:
    paths = sorted(str(path) for path in (fill(tmp_path) / "train").rglob("*.png"))
    size = 400  # 480 kB an image: two fit into a megabyte
    decoder, opened = Decoder(paths, size, cache_mb=1), []
    decode = Decoder._decode
    monkeypatch.setattr(
        Decoder, "_decode", lambda self, path: opened.append(path) or decode(self, path)
    )
    everything = torch.arange(4)
    assert torch.equal(decoder[everything], decoder[everything])
    assert opened == paths + paths[2:]


def test_classes_must_agree(tmp_path) -> None:
    root = fill(tmp_path)
    (root / "test" / "dog").rename(root / "test" / "wolf")
    with pytest.raises(DataMissingError, match=r"dog, wolf"):
        load(root)


def test_a_class_without_an_image_is_named(tmp_path) -> None:
    root = fill(tmp_path)
    (root / "test/dog/0.png").rename(root / "test/dog/0.heic")
    (root / "test/dog/1.png").unlink()
    with pytest.raises(DataMissingError, match=r"test: .* classes dog.*; images are \.jpg"):
        load(root)


IMAGES = {
    "grey.png": Image.fromarray(GREY),
    "palette.png": Image.fromarray(np.stack([GREY] * 3, 2)).convert(
        "P", palette=Image.Palette.ADAPTIVE
    ),
    "alpha.png": Image.fromarray(np.stack([GREY] * 4, 2)),
    "grey_alpha.png": Image.fromarray(np.stack([GREY] * 2, 2), "LA"),
    "cmyk.jpg": Image.fromarray(np.stack([GREY] * 3, 2)).convert("CMYK"),
    "long.png": Image.fromarray(np.full((1, 400), 128, np.uint8)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_of_any_kind_is_read_right(name, tmp_path) -> None:
    root = fill(tmp_path)
    IMAGES[name].save(
        root / "train/cat" / f"0_{name}", format="JPEG" if name.endswith("jpg") else None
    )
    data, place = load(root), sorted(["0.png", "1.png", f"0_{name}"]).index(f"0_{name}")
    found = pixels(data, place)
    assert found.dtype == torch.uint8
    assert (found.float() - 128).abs().max() <= 2


def huge_png() -> bytes:
    """The head of an image of 10¹⁰ pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", 10**5, 10**5, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def cut_image(suffix: str) -> bytes:
    content = io.BytesIO()
    Image.effect_noise((64, 64), 80).save(content, suffix)
    return content.getvalue()[: content.tell() // 2]


def deep_image() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((16, 16), 128 << 8, np.uint16)).save(content, "png")
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [cut_image("png"), huge_png(), b"", deep_image()],
    ids=["cut", "huge", "empty", "sixteen bits"],
)
def test_an_image_that_cannot_be_read_is_named(content: bytes, tmp_path) -> None:
    root = fill(tmp_path)
    file = root / "train/dog/bad.png"
    file.write_bytes(content)
    with pytest.raises(AshlError, match=str(file)):
        pixels(load(root), 4)
