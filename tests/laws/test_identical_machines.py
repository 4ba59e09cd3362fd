"""All workers of an all-reduce compute the same bits on machines whose libraries order matrix
products differently.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from ashl.compression.contract import Layer, size_of
from ashl.compression.power_sgd import orthonormalize
from ashl.compression.wrappers import codec_for_layers
from tests.laws.codecs import codec, vector

LAYOUT = (Layer("weight", (150, 130)), Layer("bias", (130,)), Layer("conv", (24, 3, 5, 5)))
CODECS = {
    "power_sgd": codec("power_sgd", rank=4),
    "atomo": codec("atomo", atoms="singular"),
    "demo": codec("demo", ratio=0.1),
    "rotated": codec("rotated", levels=16),
}
OLD = {
    "OPENBLAS_CORETYPE": "Prescott",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
}


def digests(folder: Path) -> dict[str, str]:
    """Return the bits of the decoded payloads, and of an orthonormal basis."""
    found = {"basis": orthonormalize(torch.from_numpy(np.load(folder / "p.npy"))).numpy()}
    for name, option in CODECS.items():
        body = torch.from_numpy(np.load(folder / f"{name}.npy"))
        found[name] = (
            codec_for_layers(option, LAYOUT).decode(None, body, size_of(LAYOUT))[1].numpy()
        )
    return {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in found.items()}


def test_what_is_decoded_does_not_hang_on_the_matrix_library(tmp_path: Path) -> None:
    """Replicas drifted apart bit by bit where one machine is older than another."""
    x = vector("normal", size_of(LAYOUT))
    np.save(tmp_path / "p.npy", x[: 150 * 4].view(150, 4).numpy())
    for name, option in CODECS.items():
        np.save(
            tmp_path / f"{name}.npy", codec_for_layers(option, LAYOUT).encode(None, x)[1].numpy()
        )
    elsewhere = subprocess.run(
        [sys.executable, "-m", "tests.laws.test_identical_machines", tmp_path],
        env=os.environ | OLD,
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.strip() == str(digests(tmp_path))


if __name__ == "__main__":
    print(digests(Path(sys.argv[1])))
