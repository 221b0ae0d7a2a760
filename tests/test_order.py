"""A module calls only those below it and answers upwards with a value or a stream.

This file is the order, as a table: what each part of the package may import from the rest of it,
and which heavy or impure modules it must do without. Imports under `if TYPE_CHECKING:` name types
and run nothing, so the order of calls does not forbid them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "deepinfer"

ROOT = ("deepinfer",)  # the package's own __init__: the version and lazy names
VOCABULARY = ("errors", "types", "clock", "config", "step", "observe")

# Part of the package -> the parts that it may import; itself always.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "deepinfer": (),
    "errors": (),
    "clock": (),
    "types": ("errors",),
    "config": ("errors",),
    "step": ("types",),
    "observe": ("types",),
    "client": ("types", "observe"),
    "kernels": VOCABULARY,
    "models": (*VOCABULARY, "kernels"),
    "runtime": (*VOCABULARY, "kernels", "models"),
    "scheduler": ("errors", "types", "clock", "step", "observe"),
    "text": ("errors", "types"),
    "stream": ("errors", "types", "scheduler", "text"),
    "admission": ("errors", "types", "text"),
    "engine": (*VOCABULARY, "client", "scheduler", "runtime", "text", "stream", "admission"),
    "serve": (*ROOT, *VOCABULARY, "client", "text"),
    "logs": ("errors",),
    "offline": (*VOCABULARY, "client", "runtime", "engine", "text"),
    "bench": (
        *ROOT,
        *VOCABULARY,
        "client",
        "scheduler",
        "runtime",
        "text",
        "engine",
        "offline",
        "logs",
    ),
    "cli": (
        *ROOT,
        *VOCABULARY,
        "client",
        "runtime",
        "text",
        "engine",
        "serve",
        "offline",
        "logs",
        "bench",
    ),
    "__main__": ("cli",),
}

# Part -> what it must not import from outside the package. The longest match of a path decides.
MUST_NOT_IMPORT: dict[str, tuple[str, ...]] = {
    "scheduler": ("torch", "asyncio", "time", "random", "datetime", "threading", "socket"),
    "scheduler/loop.py": ("torch", "time", "random", "datetime", "threading", "socket"),
    "serve": ("torch", "signal"),
    "text": ("torch", "asyncio", "signal"),
    "engine.py": ("signal",),
    "runtime": ("signal", "aiohttp"),
    "offline.py": ("torch", "signal", "aiohttp"),
    "types.py": ("torch", "asyncio"),
    "step.py": ("torch", "asyncio"),
    "config.py": ("torch", "asyncio"),
}


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The row of the table that a file belongs to."""
    relative = path.relative_to(PACKAGE)
    if relative == Path("__init__.py"):
        return "deepinfer"
    return relative.parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import that runs, also of those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write absolute imports"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        yield from imported_modules(node)


def imported_part(module: str) -> str | None:
    """The row that an imported name belongs to; `None` for other packages."""
    if module != "deepinfer" and not module.startswith("deepinfer."):
        return None
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "deepinfer"


def forbidden_outside(path: Path) -> tuple[str, ...]:
    relative = path.relative_to(PACKAGE).as_posix()
    matches = [key for key in MUST_NOT_IMPORT if relative == key or relative.startswith(key + "/")]
    return MUST_NOT_IMPORT[max(matches, key=len)] if matches else ()


@pytest.mark.parametrize("path", source_files(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_no_import_climbs(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{path} is new: give it a row in MAY_IMPORT, low in the house"
    allowed = {part, *MAY_IMPORT[part]}
    forbidden = forbidden_outside(path)
    for line, module in imported_modules(ast.parse(path.read_text())):
        target = imported_part(module)
        if target is None:
            assert module.split(".")[0] not in forbidden, f"{path}:{line} imports {module}"
        else:
            assert target in allowed, f"{path}:{line}: {part} must not import {module}"


def test_the_order_has_no_cycle() -> None:
    settled: set[str] = set()
    while len(settled) < len(MAY_IMPORT):
        ready = {
            part
            for part, below in MAY_IMPORT.items()
            if part not in settled and settled.issuperset(below)
        }
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - settled)}"
        settled |= ready


def test_the_rules_notice_an_import_that_climbs() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def late():\n    from deepinfer.engine import Engine\n"
    )
    found = [module for _, module in imported_modules(tree)]
    assert found == ["typing.TYPE_CHECKING", "deepinfer.engine.Engine"]
    assert imported_part("deepinfer.engine.Engine") == "engine"
    assert imported_part("deepinfer.__version__") == "deepinfer"
    assert "torch" in forbidden_outside(PACKAGE / "scheduler" / "plan.py")
    assert "asyncio" not in forbidden_outside(PACKAGE / "scheduler" / "loop.py")


@pytest.mark.parametrize(
    "module",
    [
        "deepinfer",
        "deepinfer.cli",
        "deepinfer.cli.flags",
        "deepinfer.serve.app",
        "deepinfer.client",
    ],
)
def test_importing_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0
