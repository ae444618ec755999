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
        "solrl_jax.storage.errors",
        "solrl_jax.storage.files",
        "solrl_jax.parallel.consensus",
        "solrl_jax.storage.hub",
        "solrl_jax.config.schema",
        "solrl_jax.config.presets",
        "solrl_jax.numerics.randomness",
        "solrl_jax.parallel.sharding",
        "solrl_jax.parallel.hosts",
        "solrl_jax.run.progress",
    ),
    ("solrl_jax.conditioning.cache", "solrl_jax.conditioning.prompts"),
    ("solrl_jax.conditioning.text_encoders",),
    ("solrl_jax.backbone.backbone",),
    ("solrl_jax.flow",),
    (
        "solrl_jax.shapes",
        "solrl_jax.rewards",
        "solrl_jax.rollout.fidelity",
        "solrl_jax.explore.monitor",
        "solrl_jax.testing",
        "solrl_jax.run.hacking",
    ),
    (
        "solrl_jax.rollout",
        "solrl_jax.policy",
        "solrl_jax.explore.calibrate",
        "solrl_jax.explore.linears",
        "solrl_jax.policy.state",
        "solrl_jax.training.experiment",
    ),
    ("solrl_jax.training.iteration", "solrl_jax.training.evaluate", "solrl_jax.training.rank"),
    (
        "solrl_jax.run.checkpoint",
        "solrl_jax.run.writer",
        "solrl_jax.run.profiling",
        "solrl_jax.run.ledger",
        "solrl_jax.run.metrics",
        "solrl_jax.run.pictures",
    ),
    (
        "solrl_jax.run.identity",
        "solrl_jax.run.directory",
        "solrl_jax.run.loop",
        "solrl_jax.commands.sample",
        "solrl_jax.commands.convert",
        "solrl_jax.planning.plan",
        "solrl_jax.planning",
    ),
    ("solrl_jax.commands.cli", "solrl_jax.commands.cli_files", "solrl_jax.commands.options"),
]
# what only writes files may be used by whatever shows results
LEAVES = ("solrl_jax.run.pictures", "solrl_jax.storage.errors", "solrl_jax.storage.files")
MODEL_USERS = {"solrl_jax.conditioning.text_encoders", "solrl_jax.backbone.backbone", "solrl_jax.commands.convert"}
# reads pickles, once and on request: it imports PyTorch when it is called
LATE = {"solrl_jax.commands.convert": {"torch"}}


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
