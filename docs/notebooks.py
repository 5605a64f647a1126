"""A notebook as Markdown, run where the documentation is built: each cell with what it prints and draws.

Notebooks are kept without outputs (tests/test_examples.py), so a page has those of one day and one machine.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pathlib
from typing import Any


def rendered(path: pathlib.Path) -> str:
    """The cells behind the title. A cell that raises ends the build."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, *others = json.loads(path.read_text())["cells"]
    title, _, text = "".join(first["source"]).partition("\n")
    assert first["cell_type"] == "markdown" and title.startswith("# "), f"{path} begins with no title"
    parts, names = [text], {"__name__": "__main__"}
    for number, cell in enumerate(others):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{path.name}, cell {number + 1}", "exec"), names)
        if printed.getvalue().strip():
            text = printed.getvalue().rstrip().replace(str(pathlib.Path.home()), "~")
            parts.append(f"```text\n{text}\n```")
        parts += [_image(plt.figure(n)) for n in plt.get_fignums()]
        plt.close("all")
    return "\n\n".join(parts)


def _image(figure: Any) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    text = base64.b64encode(drawn.getvalue()).decode()
    return f'<img alt="what the cell draws" src="data:image/svg+xml;base64,{text}">'
