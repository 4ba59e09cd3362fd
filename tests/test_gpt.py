"""The decoder of today: what it sees, how large it is; texts of bytes and of folders; ResNet-18 for
small images.
"""

import numpy as np
import pytest
import torch

from ashl.errors import DataMissingError, UsageError
from ashl.model.gpt import rotate_pairs, rotation_angles
from tests.conf_option import conf_option


def built(**fields):
    torch.manual_seed(0)
    return conf_option("model", "gpt", **fields).build((16,), 64).eval()


def test_it_looks_at_nothing_that_comes_later_and_knows_places():
    model = built(width=32)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = 0
    assert torch.allclose(model(tokens)[:, :9], model(changed)[:, :9], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 9:], model(changed)[:, 9:], atol=1e-6)
    assert model(tokens).shape == (2, 16, 64)
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_a_block_by_hand_and_first_weights():
    """Queries and keys are turned by their places, values are not; what joins the shortcuts begins
    smaller.
    """
    model, x = (
        built(width=32, heads=2, layers=2),
        torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(1)),
    )
    block = model.blocks[0]
    query, key, value = block.attend(block.norm1(x)).view(7, 3, 2, 16).permute(1, 2, 0, 3)
    scores = (
        rotate_pairs(query, rotation_angles(7, 16))
        @ rotate_pairs(key, rotation_angles(7, 16)).transpose(1, 2)
        / 4
    )
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    between = x + block.mix(seen.transpose(0, 1).reshape(1, 7, 32))
    whole = between + block.narrow(torch.nn.functional.gelu(block.widen(block.norm2(between))))
    torch.testing.assert_close(block(x, rotation_angles(7, 16)), whole)
    wide = built(width=256, layers=8).blocks[0]
    found = [
        float(part.weight.detach().std())
        for part in (wide.attend, wide.widen, wide.mix, wide.narrow)
    ]
    assert found == pytest.approx([0.02, 0.02, 0.005, 0.005], rel=0.05)


@pytest.mark.parametrize(
    ("fields", "millions"),
    [
        ({}, 0.82),
        ({"tie_embeddings": False}, 0.85),
        ({"width": 512, "heads": 8, "layers": 6}, 19.0),
    ],
)
def test_sizes(fields, millions):
    with torch.device("meta"):
        model = conf_option("model", "gpt", **fields).build((64,), 256)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.03)


def test_a_width_that_heads_cannot_turn_is_refused():
    with pytest.raises(UsageError, match="take a multiple of twice the heads"):
        conf_option("model", "gpt", width=36, heads=4, layers=1).build((8,), 9)
    with pytest.raises(UsageError, match="take dataset=text"):
        conf_option("model", "gpt").build((3, 8, 8), 9)


def test_a_folder_is_one_text_and_bytes_are_themselves(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in {
        "b.txt": "é" * 40,
        "a.txt": "ab" * 40,
        "sub/c.py": "x" * 50,
        ".hidden": "no",
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "z.bin").write_bytes(b"\xff\xfe\x00")
    chosen = {"path": str(tmp_path), "sequence_length": 3}
    whole = "ab" * 40 + "\n" + "é" * 40 + "\n" + "x" * 50
    data = conf_option("dataset", "text", **chosen, tokenizer="bytes").load()
    inputs, targets = data.train.batch(np.arange(len(data.train)))
    assert data.num_classes == 256
    assert bytes(inputs.flatten().tolist()) == whole.encode()[: inputs.numel()]
    assert bytes(targets.flatten().tolist()) == whole.encode()[1 : inputs.numel() + 1]
    assert conf_option("dataset", "text", **chosen).load().num_classes == len(set(whole))
    assert (
        len(conf_option("dataset", "text", **chosen, max_mb=0.0001).read()) == 99
    )  # half a character is none
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissingError, match="a folder without a file of UTF-8"):
        conf_option("dataset", "text", path=str(tmp_path / "empty")).load()


def test_the_standard_library_is_a_text_on_every_machine():
    text = conf_option("dataset", "text", path="stdlib", max_mb=10).read()
    assert len(text) >= 9_999_990
    assert b"import" in text


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet_18_of_small_images(norm):
    model = conf_option("model", "resnet18_small", norm=norm).build((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()) == (
        norm == "batch"
    )
    small = conf_option("model", "resnet8", norm=norm).build((3, 16, 16), 10)
    assert small(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    if norm == "group":  # a sample's answer does not hang on those beside it
        x = torch.randn(4, 3, 16, 16)
        torch.testing.assert_close(small(x)[:1], small(x[:1]), rtol=1e-4, atol=1e-5)
