"""`import solrl_jax`: the public names, listed once, found lazily."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import solrl_jax as solrl


def test_every_public_name_is_there():
    assert len(solrl.__all__) == len(set(solrl.__all__)) <= 31
    for name in solrl.__all__:
        assert getattr(solrl, name) is not None
    assert set(dir(solrl)) == set(solrl.__all__)
    assert solrl.__version__ == importlib.metadata.version("solrl_jax")
    assert Path(solrl.__file__).with_name("py.typed").exists()


def test_type_checkers_see_the_same_names():
    source = Path(solrl.__file__).read_text()
    typed = {line.split(" as ")[1] for line in source.splitlines() if line.startswith("    from solrl_jax.")}
    assert typed | {"__version__"} == set(solrl.__all__)


def test_a_name_that_is_not_there_says_what_is():
    with pytest.raises(AttributeError, match=r"has no attribute 'lod'; it has .*load"):
        solrl.lod  # noqa: B018


def test_importing_it_is_quick():
    code = "import sys, solrl_jax; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_formats_that_do_not_exist_are_named():
    with pytest.raises(solrl.InputError, match="precision='fp5': accepted are fp8, nvfp4"):
        solrl.quantize(np.zeros((32, 2), np.float32), "fp5")
