"""The architecture, held: which room may import which (ARCHITECTURE.md), and that the product needs no PyTorch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"torch", "diffusers", "torchao", "torchvision", "tensorflow"}
# rooms from the floor up; a module may import from its own row and the rows above
ORDER = [
    ("solrl_jax.numerics",),
    ("models",),
    ("solrl_jax.files", "solrl_jax.config", "solrl_jax.presets", "solrl_jax.keys", "solrl_jax.sharding", "solrl_jax.progress"),
    ("solrl_jax.backbone", "solrl_jax.prompts"),
    ("solrl_jax.flow",),
    ("solrl_jax.shapes", "solrl_jax.rewards", "solrl_jax.fidelity", "solrl_jax.testing"),
    ("solrl_jax.rollout", "solrl_jax.policy", "solrl_jax.state", "solrl_jax.experiment"),
    ("solrl_jax.train", "solrl_jax.evaluate", "solrl_jax.rank"),
    ("solrl_jax.checkpoint", "solrl_jax.ledger", "solrl_jax.metrics", "solrl_jax.pictures"),
    ("solrl_jax.trainer", "solrl_jax.sample"),
    ("solrl_jax.cli",),
]
# what only writes files may be used by whatever shows results
LEAVES = ("solrl_jax.pictures", "solrl_jax.files")
MODEL_USERS = {"solrl_jax.backbone", "solrl_jax.rewards"}


def modules() -> dict[str, Path]:
    files = [p for package in ("solrl_jax", "models") for p in (ROOT / package).rglob("*.py") if p.name != "__init__.py"]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in files}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def row(module: str) -> int | None:
    fits = [i for i, names in enumerate(ORDER) for name in names if module == name or module.startswith(name + ".")]
    return fits[0] if fits else None


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_one_way(module):
    mine = row(module)
    assert mine is not None, f"{module} has no room: give it one in ORDER and in ARCHITECTURE.md"
    known = modules()
    for name in imports(known[module]):
        assert name.split(".")[0] not in FORBIDDEN, f"{module} imports {name}"
        if name in known and name not in LEAVES:
            other = row(name)
            assert other is not None
            assert other <= mine, f"{module} imports {name}, which stands above it"
        if name.startswith("models.") and not module.startswith("models"):
            assert module in MODEL_USERS, f"{module} opens models/ ({name}); only {sorted(MODEL_USERS)} may"


def test_package_inits_are_empty():
    for path in ROOT.glob("solrl_jax/**/__init__.py"):
        assert path.read_text() == ""
