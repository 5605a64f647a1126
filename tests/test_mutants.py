"""The defects of `make mutants` still fit the code, and name tests that there are."""

from __future__ import annotations

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_a_defect_fits_exactly_once_and_names_tests(mutant):
    right = (mutants.ROOT / mutant.file).read_text()
    assert mutant.applied(right) != right
    files = [word for word in mutant.tests.split() if word.startswith("tests/")]
    assert files and all((mutants.ROOT / file).is_file() for file in files)


def test_a_defect_that_no_longer_fits_is_said():
    gone = mutants.Mutant("gone", "cpu/gemm.cc", "no such text", "", "tests/test_dense.py")
    with pytest.raises(ValueError, match=r"cpu/gemm.cc has the text to replace 0 times"):
        gone.applied("some other text")


def test_there_are_some_in_every_room():
    assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS) == 64
    rooms = [m.file.partition("/")[0] for m in mutants.MUTANTS]
    assert all(rooms.count(room) >= 4 for room in ("cpu", "common", "ffi", "jaxconv"))
