"""What every test shares: the device it runs on, memory that holds no zeros by luck, several CPU devices for meshes.

The suite runs on JAX's default backend, so the same tests cover the CPU and a GPU; JAX_PLATFORMS=cpu forces the CPU,
JAX_NUM_CPU_DEVICES=8 gives it more devices.
64-bit types stay off, as for users: a test that needs them takes the fixture `x64` or enters `helpers.types_of(dtype)`.

What XLA compiled stays in the environment's folder (JAX_COMPILATION_CACHE_DIR names another one, or none where it is
empty). Its key is the program with every attribute of every custom call, XLA's flags and its version.
"""

import gc
import itertools
import os
import pathlib
import sys

# Before NumPy starts, here and in what inherits the environment: OpenBLAS's threads spin for each other where several
# workers share the cores. The products that choosing a plan takes cost 0.3 ms of processor time with one, 8 with two.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if os.environ.get("JAXCONV_TESTS") == "quick":  # set by make test: a tenth of the time
    os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")

import jax
import pytest

# Before any backend starts. Four: enough for a 2x2 mesh, and no more threads than needed.
if "JAX_NUM_CPU_DEVICES" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 4)

if os.environ.get("JAXCONV_TESTS") == "quick":  # set by make test: XLA need not optimise what runs once
    quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    quick.append("--xla_llvm_disable_expensive_passes=true")  # a tenth of the time
    # Half the time of fusion emitters, which newer XLA always uses. Without them jaxlib 0.10.0 rounds to float8
    # twice.
    if (0, 10, 1) <= jax.__version_info__ < (0, 11):
        quick.append("--xla_cpu_use_fusion_emitters=false")
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in quick if flag not in given)])

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # In the environment, too: tests that start Python share it.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(sys.prefix, "cache", "jax")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# What somebody tuned on this machine is none of the tests' business.
os.environ["JAXCONV_TUNING"] = os.path.join(sys.prefix, "cache", "no_tuning.json")

import jaxconv
from jaxconv import _enable
from jaxconv._core import native
from jaxconv._plan import in_place, tuned
from jaxconv._tools import timing
from jaxconv.accelerate import groupnorm as accelerated_groupnorm
from jaxconv.accelerate import rewrite as accelerated_rewrite
from jaxconv.accelerate import squeeze_excite as accelerated_squeeze_excite

# The cases of the benchmarks. At the end of the path: the source folder's jaxconv has no compiled modules.
sys.path.append(str(pathlib.Path(__file__).parent.parent))

import helpers
import tiers

profiled, _trace = False, jax.profiler.trace
LARGEST_CACHE = 1 << 30  # bytes
CASES = pytest.StashKey[list[tiers.Case]]()  # all that were collected
reporter = None  # pytest's terminal
STARTED, TOOK = pytest.StashKey[float](), "processor seconds"  # of this process and those it started
took = []  # (test, seconds) for each case


def pytest_configure(config):
    # The suite's items are millions of objects, none of them garbage: looking for garbage after every 700 new ones took
    # a third of the time in which pytest finds the tests.
    gc.set_threshold(50_000, 20, 20)
    if not hasattr(config, "workerinput"):
        forget_the_oldest(pathlib.Path(sys.prefix) / "cache" / "jax", LARGEST_CACHE)
    missing = native.missing(helpers.PLATFORM)
    if missing:
        raise pytest.UsageError(f"{missing}. JAX_PLATFORMS=cpu runs the suite on the CPU.")


def pytest_sessionstart(session):
    global reporter
    reporter = session.config.pluginmanager.getplugin("terminalreporter")


def pytest_collection_finish(session):
    """JAX's traces are millions of objects, too, and their garbage does not matter here. A test that asks what is kept
    alive collects garbage itself."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report):
    """Names a failure and its reason when it happens: a run that is cut short has no summary."""
    if report.failed and reporter is not None and not hasattr(reporter.config, "workerinput"):
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = "" if crash is None else f": {crash.message[:1000]}"
        reporter.write_line(f"\nfailed: {report.nodeid}{reason}")
    took.extend((report.nodeid.partition("[")[0], value) for name, value in report.user_properties if name == TOOK)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown" and item.config.option.record_costs:
        report.user_properties.append((TOOK, sum(os.times()[:4]) - item.stash[STARTED]))
    return report


def pytest_sessionfinish(session):
    if session.config.option.record_costs and not hasattr(session.config, "workerinput"):
        tiers.record(took)


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="all cases, slow ones too, and on a CPU float16 beside bfloat16"
    )
    parser.addoption("--rest", default="", metavar="K/N", help="part K of N of the cases that `make test` leaves out")
    parser.addoption("--record-costs", action="store_true", help="write what each test took into tests/costs.json")


def pytest_collection_modifyitems(config, items):
    """`make test` runs the cases that show most for their cost. Files and tests that are named are run (tiers.py)."""
    bfloat16 = {_but_for_dtype(item) for item in items if _dtype(item) == "bfloat16"}

    def case(item):
        file, _, name = item.nodeid.partition("::")
        # A CPU computes both in float32, by the same code, and rounds behind it.
        again = helpers.PLATFORM == "cpu" and _dtype(item) == "float16" and _but_for_dtype(item) in bfloat16
        values = {name: repr(value) for name, value in item.callspec.params.items()} if _parametrised(item) else {}
        marks = frozenset(mark.name for mark in item.iter_markers())
        return tiers.Case(file, name.partition("[")[0], values, marks, again)

    asked = tiers.Asked(
        everything=config.option.all,
        rest=config.option.rest,
        cases=bool(any("::" in name for name in config.args) or config.option.keyword or config.option.markexpr),
        files=any(name.endswith(".py") for name in config.args),
    )
    config.stash[CASES] = cases = [case(item) for item in items]
    try:
        keep = set(tiers.chosen(cases, asked))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i not in keep])
    items[:] = [item for i, item in enumerate(items) if i in keep]


def _parametrised(item):
    return hasattr(item, "callspec")


def _dtype(item):
    return item.callspec.params.get("dtype") if _parametrised(item) else None


def _but_for_dtype(item):
    others = {name: repr(value) for name, value in item.callspec.params.items() if name != "dtype"}
    return item.nodeid.partition("[")[0], tuple(sorted(others.items()))


def forget_the_oldest(folder: pathlib.Path, largest: int) -> None:
    """Programs for meshes hold a pointer, are never found again, and would fill the disk in the end."""
    files = sorted(((f.stat().st_mtime, f.stat().st_size, f) for f in folder.glob("*")), reverse=True)
    for total, (_, _, file) in zip(itertools.accumulate(size for _, size, _ in files), files, strict=True):
        if total > largest:
            file.unlink(missing_ok=True)


def pytest_report_header(config):
    return jaxconv.info().splitlines()


@pytest.fixture
def device() -> str:
    """The platform under test, as the plan names it: "cpu" or "cuda"."""
    return helpers.PLATFORM


@pytest.fixture
def code_for_gpus(monkeypatch):
    """Plans as where native code for every GPU is there, and nobody turned it off."""
    monkeypatch.setattr(native, "cuda_missing", "")
    monkeypatch.setattr(native, "runs_on", lambda capability: True)
    monkeypatch.delenv("JAXCONV_DISABLE", raising=False)


@pytest.fixture
def full_locations():
    """Programs that say where they are from as they do for users, for one test: `make test` asks for less."""
    given = jax.config.jax_include_full_tracebacks_in_locations
    jax.config.update("jax_include_full_tracebacks_in_locations", True)
    yield
    jax.config.update("jax_include_full_tracebacks_in_locations", given)


@pytest.fixture
def x64():
    """64-bit types, for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def stale_memory_is_nan():
    """Fills memory with NaN and frees it, so that an output element nobody wrote is seldom zero and hence noticed."""
    helpers.poison()


@pytest.fixture(autouse=True)
def enable_is_off():
    """A test that leaves `jaxconv.enable` on changes what every later test of its process compiles."""
    yield
    left_on = _enable.is_on()
    jaxconv.disable()
    assert not left_on, "the test left jaxconv.enable on"


@pytest.fixture(autouse=True)
def norms_and_excitations_are_replaced(request, monkeypatch):
    """By accelerate, on every device: which it takes there is the device's choice, what it recognises is not."""
    if not request.node.get_closest_marker("as_planned"):
        monkeypatch.setattr(accelerated_rewrite, "as_written_on_cpu", lambda: False)
    if helpers.PLATFORM == "cuda" and not request.node.get_closest_marker("as_planned"):
        monkeypatch.setattr(accelerated_groupnorm, "_left_to_xla", lambda n, dtype: None)
        monkeypatch.setattr(accelerated_squeeze_excite, "_left_to_xla", lambda e: None)


@pytest.fixture(autouse=True)
def one_profiler(monkeypatch):
    """CUPTI ends a process that asks it for kernels' times once jax.profiler has taken a trace there."""

    def trace(*args, **kwargs):
        global profiled
        profiled = True
        return _trace(*args, **kwargs)

    monkeypatch.setattr(jax.profiler, "trace", trace)
    if profiled and helpers.PLATFORM == "cuda":
        monkeypatch.setattr(timing, "cupti", lambda: None)


@pytest.fixture
def tuning_file(tmp_path, monkeypatch):
    """A user's tuning file of this test's own; the results that hold are as at a process's start, before and after."""
    path = tmp_path / "user" / "tuning.json"
    monkeypatch.setenv("JAXCONV_TUNING", str(path))

    def forget():
        tuned.forget()
        in_place.forget()
        tuned._warned.clear()
        tuned.activate(None)

    forget()
    yield path
    monkeypatch.undo()
    forget()
