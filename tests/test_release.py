"""What a release is made of: the files of the wheel and of the source distribution, the pins, and what cites it."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "from setuptools import build_meta as build; build.build_sdist('dist'); build.build_wheel('dist')"
DATA = (
    "py.typed", "config/study.toml", "data/bundled/*", "draw/*.html", "fields/synonyms.toml", "laws/*.toml",
    "recipes/*.toml",
)  # fmt: skip
ABOUT = {
    "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt",
    "licenses/LICENSE", "licenses/src/fedtide/data/bundled/LICENSES.md",
}  # fmt: skip
BESIDE = (
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml",
    "requirements/*.txt", "setup.cfg", "src/fedtide.egg-info/*.txt", "src/fedtide.egg-info/PKG-INFO",
)  # fmt: skip
LARGEST = 6_500_000
"""Bytes of a wheel or a source distribution: two thirds are the pictures that ship."""
PIN = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>[^\s;]+)(?: ; [^\\\n]+?)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the repository, in whose `dist` are a wheel and a source distribution."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    here = {line.strip("/") for line in lines if line.startswith("/")}
    anywhere = shutil.ignore_patterns(".git", *(line.rstrip("/") for line in lines if not line.startswith("/")))

    def ignored(folder: str, names: list[str]) -> set[str]:
        return anywhere(folder, names) | (here if Path(folder) == ROOT else set())

    made = tmp_path_factory.mktemp("release") / "clone"
    shutil.copytree(ROOT, made, symlinks=True, ignore=ignored)
    subprocess.run([sys.executable, "-c", BUILD], cwd=made, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def package(clone) -> set[str]:
    """The files of the package."""
    return {path.relative_to(clone / "src").as_posix() for path in (clone / "src/fedtide").rglob("*") if path.is_file()}


def is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name matches a pattern, with as many folders."""
    return any(fnmatch(name, each) and name.count("/") == each.count("/") for each in patterns)


def test_the_wheel_has_the_package_its_data_and_their_licenses_alone(clone, package):
    (wheel,) = (clone / "dist").glob("*.whl")
    names = ZipFile(wheel).namelist()
    code = {name for name in package if name.endswith(".py")}
    strange = {name for name in package - code if not is_one_of(name.removeprefix("fedtide/"), DATA)}
    assert not strange
    info = f"fedtide-{PROJECT['version']}.dist-info/"
    assert set(names) == package | {info + name for name in ABOUT}
    assert len(names) == len(set(names))
    assert wheel.stat().st_size < LARGEST


def test_the_source_distribution_has_no_more_than_a_wheel_is_made_of(clone, package):
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    beside = names - {f"src/{name}" for name in package}
    assert len(names - beside) == len(package)
    assert not {name for name in beside if not is_one_of(name, BESIDE)}
    assert sdist.stat().st_size < LARGEST


def test_the_license_of_all_data_that_ship_is_said():
    bundled = ROOT / "src/fedtide/data/bundled"
    said = (bundled / "LICENSES.md").read_text(encoding="utf-8")
    unsaid = {path.name for path in bundled.iterdir() if f"`{path.name}` holds" not in said}
    assert unsaid == {"LICENSES.md"}


# -- pins --------------------------------------------------------------------------------------------------------------


def pins(name: str) -> dict[str, str]:
    """The versions in a file of pins, each with digests, in which nothing else stands but remarks at the top."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    rest = PIN.sub("", text)
    assert all(line.startswith("# ") and "://" not in line for line in rest.splitlines())
    found = [(each["name"], each["version"]) for each in PIN.finditer(text)]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_what_deploying_needs_is_pinned_at_versions_that_are_allowed():
    found = pins("deploy.txt")
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["deploy"]:
        needed = Requirement(line)
        version = found.get(canonicalize_name(needed.name))
        assert version is not None, f"{line}: run: make pins"
        assert version in needed.specifier, f"{line}: pinned at {version}; run: make pins"


def test_pins_for_a_cpu_build_are_the_same_without_torch_and_cuda():
    found, without = pins("deploy.txt"), pins("deploy-cpu.txt")
    assert without.items() <= found.items()
    cuda = found.keys() - without
    assert "torch" in cuda
    assert all(re.match("torch$|triton$|nvidia-|cuda-", name) for name in cuda)


# -- what cites it -----------------------------------------------------------------------------------------------------


def test_the_citation_has_this_version_and_every_paper():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in text
    intros = re.findall(r"^## .+\n\n((?:.+\n)+)", (ROOT / "docs/papers.md").read_text(encoding="utf-8"), re.MULTILINE)
    papers = [" ".join(title.split()) for intro in intros for title in re.findall(r"\*([^*]+)\*", intro)]
    assert len(papers) == text.count("\n  - type:") > 4
    assert [title for title in papers if title not in text] == []
