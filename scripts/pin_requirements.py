"""Writes requirements/*.txt: what those who deploy install, every package at one version and with its digests.

    make pins

Versions are the newest that pyproject.toml allows, for Python 3.11 and newer on every platform. Digests are of the
Python Package Index; pip refuses a file that has another one. No address of an index is written: pip asks its own.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "requirements"
COMPILE = (
    "uv", "pip", "compile", "pyproject.toml", "--extra", "deploy", "--universal", "--fork-strategy", "fewest",
    "--generate-hashes", "--no-annotate", "--no-header", "--no-config", "--no-emit-index-url", "--quiet", "--upgrade",
)  # fmt: skip
CUDA = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
"""What a CPU build of torch has in place of the index's torch, and does not need."""
HEADS = {
    "deploy.txt": """
# What Fedtide needs to deploy, with digests: pip install --require-hashes -r requirements/deploy.txt
# On Linux torch brings CUDA, some gigabytes. For a CPU build of torch there is deploy-cpu.txt.
# Made by: make pins
""",
    "deploy-cpu.txt": """
# The same without torch and CUDA: pip install --require-hashes -r requirements/deploy-cpu.txt
# Then torch {torch}, a CPU build of PyTorch's own index, whose digest is not here; install it with --no-deps.
# Made by: make pins
""",
}


def main() -> None:
    """Write both files."""
    python = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    made = subprocess.run(
        [sys.executable, "-m", *COMPILE, "--python-version", python.removeprefix(">=")],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    pins = re.split(r"\n(?=\S)", made.rstrip("\n"))
    torch = next(pin for pin in pins if pin.startswith("torch==")).split()[0].removeprefix("torch==")
    OUT.mkdir(exist_ok=True)
    for name, head in HEADS.items():
        kept = [pin for pin in pins if name == "deploy.txt" or not CUDA.match(pin)]
        text = head.lstrip("\n").format(torch=torch) + "\n".join(kept) + "\n"
        (OUT / name).write_text(text, encoding="utf-8")
        print(f"requirements/{name}: {len(kept)} packages")


if __name__ == "__main__":
    main()
