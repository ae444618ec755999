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
    (
        "solrl_jax.files",
        "solrl_jax.consensus",
        "solrl_jax.hub",
        "solrl_jax.config",
        "solrl_jax.presets",
        "solrl_jax.keys",
        "solrl_jax.sharding",
        "solrl_jax.hosts",
        "solrl_jax.progress",
    ),
    ("solrl_jax.encodings", "solrl_jax.prompts"),
    ("solrl_jax.text_encoders",),
    ("solrl_jax.backbone",),
    ("solrl_jax.flow",),
    (
        "solrl_jax.shapes",
        "solrl_jax.rewards",
        "solrl_jax.fidelity",
        "solrl_jax.monitor",
        "solrl_jax.testing",
        "solrl_jax.watch",
    ),
    (
        "solrl_jax.rollout",
        "solrl_jax.policy",
        "solrl_jax.calibrate",
        "solrl_jax.linears",
        "solrl_jax.state",
        "solrl_jax.experiment",
    ),
    ("solrl_jax.train", "solrl_jax.evaluate", "solrl_jax.rank"),
    (
        "solrl_jax.checkpoint",
        "solrl_jax.saving",
        "solrl_jax.profiling",
        "solrl_jax.ledger",
        "solrl_jax.metrics",
        "solrl_jax.pictures",
    ),
    (
        "solrl_jax.identity",
        "solrl_jax.runs",
        "solrl_jax.trainer",
        "solrl_jax.sample",
        "solrl_jax.convert",
        "solrl_jax.plan",
        "solrl_jax.planning",
    ),
    ("solrl_jax.cli", "solrl_jax.cli_files", "solrl_jax.options"),
]
# what only writes files may be used by whatever shows results
LEAVES = ("solrl_jax.pictures", "solrl_jax.files")
MODEL_USERS = {"solrl_jax.text_encoders", "solrl_jax.backbone", "solrl_jax.convert"}
# reads pickles, once and on request: it imports PyTorch when it is called
LATE = {"solrl_jax.convert": {"torch"}}


def modules() -> dict[str, Path]:
    files = [p for package in ("solrl_jax", "models") for p in (ROOT / package).rglob("*.py") if p.name != "__init__.py"]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in files}


def imports(path: Path, late: bool = True) -> set[str]:
    """What a file imports; late: inside functions too."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if late else tree.body:
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
        assert name.split(".")[0] not in FORBIDDEN - LATE.get(module, set()), f"{module} imports {name}"
        if name in known and name not in LEAVES:
            other = row(name)
            assert other is not None
            assert other <= mine, f"{module} imports {name}, which stands above it"
        if name.startswith("models.") and not module.startswith("models"):
            user = module in MODEL_USERS or module.startswith("solrl_jax.rewards.")
            assert user, f"{module} opens models/ ({name}); only {sorted(MODEL_USERS)} may"


def test_what_may_be_imported_late_is_not_imported_at_once():
    for module, names in LATE.items():
        at_once = {name.split(".")[0] for name in imports(modules()[module], late=False)}
        assert not at_once & names, module


def test_package_inits_are_empty():
    for path in ROOT.glob("solrl_jax/**/__init__.py"):
        assert path.read_text() == ""
