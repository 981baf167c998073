"""Make the environments of the peers, one each: python bench/peers/make.py [--into .bench-envs] [--peers pfl,flower].

An environment takes minutes and, with torch, about a gigabyte. One that is there is left alone; delete its folder to
have it made again. Beside it a file `made` says what was installed.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

INTO = Path(os.environ.get("BENCH_ENVS", Path(__file__).parent.parent.parent / ".bench-envs"))
TORCH = "torch>=2.6,<2.14"
"""As in our pyproject.toml: with the upper bound pip takes a CPU build where the index has one."""
REQUIREMENTS = {
    # pfl's own bound; newer releases of dp-accounting have no wheels that go with it.
    "pfl": ("pfl[pytorch]==0.6.0", "dp-accounting<0.6", TORCH),
    # The last release works with JAX of its time only.
    "fedjax": ("fedjax==0.0.17", "jax==0.4.25", "jaxlib==0.4.25", "numpy<2", "scipy<1.13", "dm-haiku==0.0.12"),
    "flower": ("flwr[simulation]==1.41.0", TORCH),
}
NAMES = {"pfl": ("pfl", "torch"), "fedjax": ("fedjax", "jax"), "flower": ("flwr", "ray", "torch")}
"""What the note says the versions of."""
IMPORTS = {"pfl": "pfl.model.pytorch", "fedjax": "fedjax, haiku", "flower": "flwr.simulation, ray, torch"}


def make(peer: str, folder: Path) -> None:
    """One environment, and the note once its packages import."""
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, *REQUIREMENTS[peer]], check=True)
    subprocess.run([python, "-c", f"import {IMPORTS[peer]}"], check=True)
    note = f"from importlib.metadata import version\nprint(', '.join(f'{{n}} {{version(n)}}' for n in {NAMES[peer]}))"
    said = subprocess.run([python, "-c", note], check=True, capture_output=True, text=True).stdout
    (folder / "made").write_text(said, encoding="utf-8")
    print(f"{peer}: {said.strip()} in {folder}")


def main() -> int:
    """Make those that are not there; 1 if one could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=INTO, help="the folder of the environments")
    parser.add_argument("--peers", default=",".join(REQUIREMENTS), help="which, separated by commas")
    given = parser.parse_args()
    failed = False
    for peer in given.peers.split(","):
        if peer not in REQUIREMENTS:
            parser.error(f"--peers: found '{peer}', allowed: {', '.join(REQUIREMENTS)}")
        folder = given.into / peer
        if (folder / "made").is_file():
            print(f"{peer}: there already, {(folder / 'made').read_text(encoding='utf-8').strip()}")
            continue
        if peer == "fedjax" and sys.version_info >= (3, 13):
            print("fedjax: needs Python 3.11 or 3.12, for which its JAX was built")
            failed = True
            continue
        try:
            make(peer, folder)
        except subprocess.CalledProcessError as error:
            print(f"{peer}: could not be made: {' '.join(error.cmd[:4])} ... ended with {error.returncode}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
