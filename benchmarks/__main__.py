"""`python -m benchmarks`: measure problems. `... train`: whole training steps. `... infer`: a model's answers.

`... fleet`: many models, whole training steps and answers, plain, with enable and with accelerate.

`... in_place`: models before and after their problems are timed while they compile.

`... passes`: what XLA does between the calls of a training step, compiled for a GPU that need not be here.

`... eight`: ResNet-50's convolutions in 8 bits, beside bfloat16 and PyTorch's products; `--dense`: dense layers.

`... report`: tables of what was recorded. `... tune`: the plan's table from it. `... fit`: the plan's model from it.
`... regret`: what the default choice loses to the best over random problems. `... cpu`: random layers on a CPU, plain
against enable and accelerate.
"""

import sys

if __name__ == "__main__":
    from jaxconv._plan import tuned

    # What is measured are the choices of a user who tuned nothing.
    tuned.activate(tuned.Results())
    if sys.argv[1:2] == ["report"]:
        from benchmarks import report

        sys.exit(report.main(sys.argv[2:]))
    if sys.argv[1:2] == ["train"]:
        from benchmarks import train

        sys.exit(train.main(sys.argv[2:]))
    if sys.argv[1:2] == ["fleet"]:
        from benchmarks import fleet

        sys.exit(fleet.main(sys.argv[2:]))
    if sys.argv[1:2] == ["in_place"]:
        from benchmarks import in_place

        sys.exit(in_place.main(sys.argv[2:]))
    if sys.argv[1:2] == ["passes"]:
        from benchmarks import passes

        sys.exit(passes.main(sys.argv[2:]))
    if sys.argv[1:2] == ["infer"]:
        from benchmarks import infer

        sys.exit(infer.main(sys.argv[2:]))
    if sys.argv[1:2] == ["eight"]:
        from benchmarks import eight

        sys.exit(eight.main(sys.argv[2:]))
    if sys.argv[1:2] == ["tune"]:
        from benchmarks import tune

        sys.exit(tune.main(sys.argv[2:]))
    if sys.argv[1:2] == ["regret"]:
        from benchmarks import regret

        sys.exit(regret.main(sys.argv[2:]))
    if sys.argv[1:2] == ["cpu"]:
        from benchmarks import cpu

        sys.exit(cpu.main(sys.argv[2:]))
    if sys.argv[1:2] == ["fit"]:
        from benchmarks import fit

        sys.exit(fit.main(sys.argv[2:]))
    from benchmarks import run

    sys.exit(run.main())
