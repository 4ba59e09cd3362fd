"""Folders of images as users have them: what is no class, what is read right, and what is refused
by its name.
"""

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
    for hidden in (".ipynb_checkpoints", "__MACOSX", "cat/.ipynb_checkpoints", "@eaDir"):
        (root / "train" / hidden).mkdir()
        (root / "train" / hidden / "0.png").write_bytes(b"no image")
    for file in (
        ".DS_Store",
        "cat/.DS_Store",
        "cat/._0.png",
        "cat/Thumbs.db",
        "cat/notes.txt",
        "cat/a.HEIC",
    ):
        (root / "train" / file).write_bytes(b"no image")
    data = load(root)
    assert (data.num_classes, len(data.train), len(data.test)) == (2, 4, 4)
    assert data.notes == (
        "dataset: files in the folders of classes that are not used: 1 .heic, 1 .txt",
    )


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


def test_links_are_followed_once(tmp_path) -> None:
    root = fill(tmp_path / "here")
    (root / "train/cat/again").symlink_to(root / "train/cat")
    (root / "train/cow").symlink_to(root / "train/dog")
    (root / "test/cow").symlink_to(root / "test/dog")
    (root / "train/cat/more.png").symlink_to(root / "test/cat/0.png")
    (root / "train/cat/gone.txt").symlink_to(root / "nowhere")
    assert load(root).train.targets.bincount().tolist() == [3, 2, 2]


def test_a_class_without_an_image_is_named(tmp_path) -> None:
    root = fill(tmp_path)
    (root / "test/dog/0.png").rename(root / "test/dog/0.heic")
    (root / "test/dog/1.png").unlink()
    with pytest.raises(
        DataMissingError, match=r"test/dog has no image, only files of the kinds \.heic; images are"
    ):
        load(root)
    (root / "test/dog/0.heic").unlink()
    with pytest.raises(DataMissingError, match=r"test/dog has no image, and no other file"):
        load(root)


IMAGES = {
    "grey.png": Image.fromarray(GREY),
    "sixteen.png": Image.fromarray(np.full((16, 16), 128 << 8, np.uint16)),
    "sixteen.tif": Image.fromarray(np.full((16, 16), 128 << 8, np.uint16)),
    "sixteen.pgm": Image.fromarray(np.full((16, 16), 128 << 8, np.uint16)),
    "float.tiff": Image.fromarray(np.full((16, 16), 128 / 255, np.float32)),
    "palette.png": Image.fromarray(np.stack([GREY] * 3, 2)).convert(
        "P", palette=Image.Palette.ADAPTIVE
    ),
    "alpha.png": Image.fromarray(np.stack([GREY] * 4, 2)),
    "grey_alpha.png": Image.fromarray(np.stack([GREY] * 2, 2), "LA"),
    "cmyk.jfif": Image.fromarray(np.stack([GREY] * 3, 2)).convert("CMYK"),
    "long.png": Image.fromarray(np.full((1, 400), 128, np.uint8)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_of_any_kind_is_read_right(name, tmp_path) -> None:
    root = fill(tmp_path)
    IMAGES[name].save(
        root / "train/cat" / f"0_{name}", format="JPEG" if name.endswith("jfif") else None
    )
    data, place = load(root), sorted(["0.png", "1.png", f"0_{name}"]).index(f"0_{name}")
    found = pixels(data, place)
    assert found.dtype == torch.uint8
    assert (found.float() - 128).abs().max() <= 2


def huge_png() -> bytes:
    """The head of an image of 10¹⁰ pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", 10**5, 10**5, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def refused(kind: str, place: Path) -> Path:
    """An image that cannot be read."""
    file = place / f"bad.{kind.partition(' ')[0]}"
    image = Image.effect_noise((64, 64), 80)
    if kind == "png huge":
        file.write_bytes(huge_png())
    elif kind == "png empty":
        file.write_bytes(b"")
    elif kind == "tif float":
        Image.fromarray(np.full((16, 16), 300.0, np.float32)).save(file)
    elif kind == "tif nan":
        Image.fromarray(np.full((16, 16), np.nan, np.float32)).save(file)
    elif kind == "tif int32":
        Image.fromarray(np.full((16, 16), 7, np.int32)).save(file)
    else:
        image.save(file)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    return file


@pytest.mark.parametrize(
    "kind",
    [
        "jpg cut",
        "png cut",
        "gif cut",
        "png huge",
        "png empty",
        "tif float",
        "tif nan",
        "tif int32",
        "webp cut",
    ],
)
def test_an_image_that_cannot_be_read_is_named(kind, tmp_path) -> None:
    root = fill(tmp_path)
    file = refused(kind, root / "train/dog")
    with pytest.raises(AshlError, match=str(file)):
        pixels(load(root), 4)
