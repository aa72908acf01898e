"""Rules of the house that a reviewer would otherwise have to remember."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORDER = {"kernels": 0, "conversion": 1, "jetrl_megatron": 2, "recipes": 3}
NAMES = {"jetrl_kernels": 0, "jetrl_conversion": 1, "jetrl_megatron": 2, "jetrl_recipes": 3}
# One list of recipe names serves the commands, so these may look down the hall.
LOOKUPS = {"jetrl_recipes"}


def sources(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*.py") if not p.name.startswith(("test_", "bench"))]


def imports(path: Path) -> list[tuple[str, bool]]:
    """(top-level module, at module level) of each import of ours."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        found += [(name.split(".")[0], id(node) in top) for name in names if name.split(".")[0] in NAMES]
    return found


def test_imports_go_one_way():
    wrong = []
    for folder, level in ORDER.items():
        for path in sources(folder):
            for module, at_top in imports(path):
                if NAMES[module] > level and not (module in LOOKUPS and not at_top):
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_no_file_is_longer_than_500_lines():
    long = [
        p
        for folder in (*ORDER, "tests")
        for p in (ROOT / folder).rglob("*.py")
        if len(p.read_text().splitlines()) > 500
    ]
    assert long == []


def test_the_training_loop_reads_in_one_screen():
    assert len((ROOT / "jetrl_megatron" / "train.py").read_text().splitlines()) < 100
