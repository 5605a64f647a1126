"""`python -m benchmarks`: measure problems. `... train`: whole training steps. `... infer`: a model's answers.

`... fleet`: many models, whole training steps and answers, plain, with enable and with accelerate.

`... in_place`: models before and after their problems are timed while they compile.

`... passes`: what XLA does between the calls of a training step, compiled for a GPU that need not be here.

`... eight`: ResNet-50's convolutions in 8 bits, beside bfloat16 and PyTorch's products; `--dense`: dense layers.

`... report`: tables of what was recorded. `... tune`: the plan's table from it. `... fit`: the plan's model from it.
`... regret`: what the default choice loses to the best over random problems. `... cpu`: random layers on a CPU, plain
against enable and accelerate.
"""

import importlib
import sys

# Each is a module with `main`.
COMMANDS = ("report", "train", "fleet", "in_place", "passes", "infer", "eight", "tune", "regret", "cpu", "fit")

if __name__ == "__main__":
    from jaxconv._plan import tuned

    # What is measured are the choices of a user who tuned nothing.
    tuned.activate(tuned.Results())
    name = sys.argv[1] if sys.argv[1:] and sys.argv[1] in COMMANDS else "run"
    command = importlib.import_module(f"benchmarks.{name}")
    sys.exit(command.main(sys.argv[1 if name == "run" else 2 :]))
