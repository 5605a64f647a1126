"""examples/: notebooks run from top to bottom and are kept without outputs; the training on textures."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
NEEDS = ("flax", "optax", "matplotlib")
needs_flax = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDS), reason=f"needs {', '.join(NEEDS)}"
)


def code(path: pathlib.Path) -> str:
    """A notebook's cells as a program: they are plain Python, without magics."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path):
    """What they show is of one machine and one day; and a change of the code is all that a diff shows."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("code", "markdown") and isinstance(cell["source"], list)
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    assert path.stat().st_size < 20_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@needs_flax
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    program = tmp_path / "notebook.py"
    program.write_text(code(path) + "\n\nassert plt.get_fignums()\nplt.savefig('figure.png')\n")
    env = {**os.environ, "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "batchnorm (training) + residual + relu" in done.stdout and " 0 left" in done.stdout
    assert "times Flax's speed" in done.stdout
    assert (tmp_path / "figure.png").stat().st_size > 5000


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_page_of_a_notebook_has_what_its_cells_print_and_draw(tmp_path):
    rendered = runpy.run_path(str(EXAMPLES.parent / "docs" / "notebooks.py"))["rendered"]
    cells = [
        ("markdown", "# Title\n\nWords."),
        ("code", "x = 6\nprint(x * 7)"),
        ("markdown", "## More"),
        ("code", "x += 1"),
    ]
    cells.append(("code", "import matplotlib.pyplot as plt\nplt.plot([x, 2])\nplt.show()"))
    path = tmp_path / "tiny.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": kind, "source": [text]} for kind, text in cells]}))
    page = rendered(path)
    head, _, figure = page.partition('<img alt="what the cell draws" src="data:image/svg+xml;base64,')
    assert head.strip() == "\n\n".join(
        [
            "Words.",
            "```python\nx = 6\nprint(x * 7)\n```",
            "```text\n42\n```",
            "## More",
            "```python\nx += 1\n```",
            "```python\nimport matplotlib.pyplot as plt\nplt.plot([x, 2])\nplt.show()\n```",
        ]
    )
    assert b"</svg>" in base64.b64decode(figure.partition('"')[0])
    cells = [("markdown", "# Title"), ("code", "raise RuntimeError('a cell that fails')")]
    path.write_text(json.dumps({"cells": [{"cell_type": kind, "source": [text]} for kind, text in cells]}))
    with pytest.raises(RuntimeError, match="a cell that fails"):
        rendered(path)


@needs_flax
def test_textures_are_ten_classes_that_noise_does_not_hide():
    textures = runpy.run_path(str(EXAMPLES / "textures.py"))["textures"]
    images, labels = textures(400, seed=0)
    assert images.shape == (400, 32, 32, 3) and images.dtype == np.float32 and set(labels) == set(range(10))
    np.testing.assert_array_equal(images, textures(400, seed=0)[0])
    assert (images != textures(400, seed=1)[0]).any()
    # Power by frequency: the nearest mean of the class tells most of them.
    power = np.log(np.abs(np.fft.rfft2(images, axes=(1, 2))).max(-1)).reshape(400, -1)
    means = np.stack([power[:300][labels[:300] == c].mean(0) for c in range(10)])
    nearest = ((power[300:, None] - means) ** 2).sum(-1).argmin(1)
    assert np.mean(nearest == labels[300:]) > 0.8


@needs_flax
@pytest.mark.slow
def test_textures_are_learnt_with_and_without_jaxconv(capsys):
    main = runpy.run_path(str(EXAMPLES / "textures.py"))["main"]
    losses = []
    for way in ([], ["--plain"]):
        main(["--epochs", "1", "--examples", "256", *way])
        losses.append(float(capsys.readouterr().out.split("loss ")[1].split(",")[0]))
    assert losses[0] == pytest.approx(losses[1], abs=0.01)


def test_wavenet_learns(capsys):
    runpy.run_path(str(EXAMPLES / "wavenet.py"), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
