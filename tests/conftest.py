"""Eight CPU devices for every test, set before JAX starts; compiled programs are shared between test processes."""

import gc
import os
from pathlib import Path

# much of the time goes into compiling: machine code is optimised a little, and not made by several threads, which only wait
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=1",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # PyTorch's threads wait by turning, which takes time from the other processes
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# the command line is tested in processes of its own: they need not compile what another one has
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# the source lines of operations help no test, and cost time at every lowering
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# no test, nor a process that it starts, writes encoded prompts where the user's own are
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "home")

import dataclasses
from typing import Any

import jax
import pytest
from jax._src import compiler
from jaxtyping import install_import_hook

import tests.checker  # noqa: F401 - found by its name below


def _register(cls: type, data_fields: Any = None, meta_fields: Any = (), **others: Any) -> type:
    """`jax.tree_util.register_dataclass`, but JAX does not call `__init__`, which the hook below checks.

    JAX builds such classes with whatever a tree holds: placements, shapes or axis numbers where the fields say arrays.
    """
    if not cls.__module__.startswith(("solrl_jax.", "tests.")):
        return _jax_register(
            cls, data_fields, None if data_fields is None else meta_fields, **others
        )

    def static(field):
        return field.metadata.get("static", field.name in meta_fields)

    data, meta = (
        [f.name for f in dataclasses.fields(cls) if static(f) == of_meta]
        for of_meta in (False, True)
    )

    def unflatten(meta_values: Any, values: Any) -> Any:
        new = object.__new__(cls)
        for name, value in (*zip(data, values, strict=True), *zip(meta, meta_values, strict=True)):
            object.__setattr__(new, name, value)
        return new

    def with_keys(x):
        return (
            [(jax.tree_util.GetAttrKey(n), getattr(x, n)) for n in data],
            tuple(getattr(x, n) for n in meta),
        )

    jax.tree_util.register_pytree_with_keys(cls, with_keys, unflatten)
    return cls


_jax_register = jax.tree_util.register_dataclass
jax.tree_util.register_dataclass = _register
# shapes and dtypes of every annotated function are checked while it is traced; in the tests alone
install_import_hook("solrl_jax", "tests.checker.check")


gc.set_threshold(200_000, 20, 100)  # tracing makes many objects and few cycles: a tenth of the time


# How programs are compiled in this process, by the room or the file of a test. Processes that tests start do not know of it.
# OPTIMISED as XLA_FLAGS says, because these tests run a program often, or compile it for a device that is not here; others not.
OPTIMISED = {"commands", "hostile", "run", "study", "training", "targets", "test_topology.py"}
OPTIMISED |= {"test_correction.py", "test_host_rewards.py", "test_verifier.py"}
# By XLA's older emitters, in half of the time. They make wrong code of float4: rooms that compute NVFP4 are not listed, and
# files that do are WITH_FLOAT4.
OLDER = {
    "backbone",
    "flow",
    "models",
    "policy",
    "rewards",
    "rollout",
    "test_gated_conv.py",
    "test_linear_attention.py",
}
WITH_FLOAT4 = {"test_host_rewards.py", "test_whole.py"}


def _compile_options(*args: Any, **options: Any) -> Any:
    """`jax._src.compiler.get_compile_options`, with the older emitters where `_older` says so."""
    made = _jax_compile_options(*args, **options)
    if _older:
        made.env_option_overrides = [
            *made.env_option_overrides,
            ("xla_cpu_use_fusion_emitters", False),
        ]
    return made


_older = False
_jax_compile_options = compiler.get_compile_options
compiler.get_compile_options = _compile_options


@pytest.fixture(autouse=True, scope="module")
def _programs(request: pytest.FixtureRequest):
    """Sets how a file's programs are compiled, and forgets them: they hold memory maps, of which a process has only so many."""
    global _older
    names = {request.path.name, request.path.parent.name}
    _older = not OLDER.isdisjoint(names) and WITH_FLOAT4.isdisjoint(names)
    jax.config.update("jax_disable_most_optimizations", OPTIMISED.isdisjoint(names))
    yield
    jax.clear_caches()
    gc.collect()


QUICK = 1  # configurations of each network that `make test` compares with PyTorch; `make test-all` has the others too
# What `pytest` without arguments runs, in two processes, for a quick verdict. The other rooms compile whole networks.
QUICK_ROOMS = {"config", "docs", "flow", "numerics", "policy", "rollout", "storage", "tests"}
# In those rooms: a wheel in a fresh environment, the site, the tutorial; kernels beside twins, whole updates and rollouts,
# which compile for more than half of the time that these rooms take.
SLOW_FILES = {
    "test_package.py",
    "test_site.py",
    "test_tutorial.py",
    "test_gated_conv.py",
    "test_linear_attention.py",
}
SLOW_FILES |= {
    "test_pending.py",
    "test_remat.py",
    "test_update.py",
    "test_whole.py",
    "test_generate.py",
}

# Files that take longest, to be started first: one that starts late keeps one process busy while the others have ended.
LONGEST = (
    "test_resume",
    "test_table",
    "test_mesh",
    "test_examples",
    "test_sample",
    "test_host_rewards",
    "test_remat",
)
LONGEST += (
    "test_train",
    "test_cli",
    "test_runs",
    "test_terms",
    "test_pending",
    "test_plan",
    "test_lowering",
)


def _quick(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr


@pytest.hookimpl(tryfirst=True)  # before xdist looks at its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    of_xdist = hasattr(
        config, "workerinput"
    )  # one of the two processes, which collects the same tests
    if _quick(config) and not of_xdist and config.option.numprocesses is None:
        config.option.numprocesses = 2
        config.option.dist = "loadfile"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the slow rooms out of a `pytest` without arguments, before anything is imported."""
    room = collection_path.parent.name if collection_path.suffix == ".py" else ""
    slow = collection_path.name in SLOW_FILES or (room and room not in QUICK_ROOMS)
    return True if _quick(config) and slow else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        indices = getattr(getattr(item, "callspec", None), "indices", {})
        if (
            item.path.parent.name == "models"
            and max(indices.get(name, 0) for name in ("case", "name")) >= QUICK
        ):
            item.add_marker(pytest.mark.exhaustive)
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)
        )
    )
    if _quick(config):
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
