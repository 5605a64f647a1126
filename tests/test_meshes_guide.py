"""docs/guide/meshes.md: its code runs as it stands, and its assertions hold."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/meshes.md").read_text(), re.DOTALL)
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def start(path: pathlib.Path, *args: str, devices: int) -> subprocess.Popen[str]:
    environment = {**ENVIRONMENT, "JAX_NUM_CPU_DEVICES": str(devices)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, path, *args], env=environment, cwd=path.parent, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    return out


def test_blocks_run_one_after_the_other(tmp_path):
    page = tmp_path / "page.py"
    page.write_text("\n".join(block for block in BLOCKS if "# hosts.py" not in block))
    out = finish(start(page, devices=8))
    assert "{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}" in out
    assert "float32[2@data,32@space,16,16,4]" in out


@pytest.mark.slow
def test_two_hosts_have_the_losses_of_one(tmp_path):
    (block,) = (block for block in BLOCKS if "# hosts.py" in block)
    script = tmp_path / "hosts.py"
    script.write_text(block)

    def losses(processes: int, devices: int) -> list[list[float]]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        started = [start(script, address, str(processes), str(i), devices=devices) for i in range(processes)]
        return [[float(v) for v in re.findall(r"loss (\S+)", finish(process))] for process in started]

    one, (first, second) = losses(1, 2), losses(2, 2)
    assert first == second and len(first) == 3
    # Printed with six digits behind the point; sums of 16 * 16 * 8 values of the size of 1 in another order.
    assert first == pytest.approx(one[0], abs=2e-6) and first[-1] < first[0]
