"""What can be used before, or without, torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["scripted", "memory", "host", "device", "philox"])
def test_no_torch(module):
    code = f"import sys, deepinfer.runtime.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
