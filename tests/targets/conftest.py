"""These tests need the compilers of devices (`make test-targets`): without those wheels, none is collected."""

import importlib.util

from solrl_jax.planning.topology import WHEELS

collect_ignore_glob = [] if any(map(importlib.util.find_spec, WHEELS["gpu"])) else ["test_*.py"]
