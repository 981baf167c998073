"""Make the pictures that ship with the package: real digits by day, real letters by night.

    python scripts/make_characters.py DATA_DIR

DATA_DIR holds `mnist/` and `emnist-letters/` as published IDX files (gzipped or not). 700 of each digit and of each
letter A to J (600 to train, 100 to test), 280 of each letter K to Z (240 and 40), drawn with a fixed seed from the
published training and test sets; EMNIST's pictures are turned upright. Writes
`src/fedtide/data/bundled/characters.npz`: `images` (rows, 28, 28) uint8, `labels` (0-9 digits, 10-35 letters),
`test` (from the published test set).
"""

import sys
from pathlib import Path

import numpy as np

from fedtide.data.sources.published import read_idx

TARGET = Path(__file__).parents[1] / "src/fedtide/data/bundled/characters.npz"
FILES = {
    "digits": ("mnist/train-{}-idx{}-ubyte.gz", "mnist/t10k-{}-idx{}-ubyte.gz"),
    "letters": (
        "emnist-letters/emnist-letters-train-{}-idx{}-ubyte.gz",
        "emnist-letters/emnist-letters-test-{}-idx{}-ubyte.gz",
    ),
}


def rows_per_class(label: int) -> tuple[int, int]:
    """How many pictures of one label are kept: (to train, to test)."""
    return (600, 100) if label < 20 else (240, 40)


def main(folder: Path) -> None:
    """Draw the pictures from the published files in `folder` and write the bundled archive."""
    draw = np.random.Generator(np.random.PCG64(2022))
    images, labels, tests = [], [], []
    for kind, patterns in FILES.items():
        for is_test, pattern in enumerate(patterns):
            x = read_idx(folder / pattern.format("images", 3))
            y = read_idx(folder / pattern.format("labels", 1)).astype(np.int64)
            if kind == "letters":
                x, y = x.transpose(0, 2, 1), y + 9  # stored transposed, labels 1..26
            for label in np.unique(y):
                picked = draw.permutation(np.flatnonzero(y == label))[: rows_per_class(int(label))[is_test]]
                images.append(x[picked])
                labels.append(y[picked])
                tests.append(np.full(len(picked), bool(is_test)))
    y = np.concatenate(labels)
    order = np.argsort(y, kind="stable")
    np.savez_compressed(
        TARGET,
        images=np.ascontiguousarray(np.concatenate(images)[order]),
        labels=y[order].astype(np.uint8),
        test=np.concatenate(tests)[order],
    )
    print(f"{TARGET}: {len(y)} pictures, {TARGET.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
