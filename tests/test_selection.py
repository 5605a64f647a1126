"""What `make test` leaves to `make test-all` (conftest.py)."""

from __future__ import annotations

import types

import conftest
import helpers
import pytest


class Item:
    def __init__(self, nodeid, slow=False, **params):
        self.nodeid, self.slow = nodeid, slow
        if params:
            self.callspec = types.SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return (name == "slow" and self.slow) or None


def selected(items, args=(), keyword="", markexpr="", everything=False):
    gone = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    option = types.SimpleNamespace(all=everything, keyword=keyword, markexpr=markexpr)
    left = list(items)
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(args=args, option=option, hook=hook), left)
    assert sorted(i.nodeid for i in (*left, *gone)) == sorted(i.nodeid for i in items)
    return [item.nodeid for item in left]


ITEMS = [
    Item("a.py::plain"),
    Item("a.py::dear", slow=True),
    Item("a.py::typed[float16-relu]", dtype="float16", f="relu"),
    Item("a.py::typed[bfloat16-relu]", dtype="bfloat16", f="relu"),
    Item("a.py::typed[float16-gelu]", dtype="float16", f="gelu"),  # no bfloat16 beside it
    Item("b.py::typed[float16-relu]", dtype="float16", f="relu"),  # another test
]
ALL = [item.nodeid for item in ITEMS]


def test_slow_tests_and_repeated_types_are_left_to_test_all():
    gone = {"a.py::dear"} | ({"a.py::typed[float16-relu]"} if helpers.PLATFORM == "cpu" else set())
    assert selected(ITEMS) == [nodeid for nodeid in ALL if nodeid not in gone]
    assert selected(ITEMS, everything=True) == ALL


@pytest.mark.parametrize("named", [dict(args=["a.py::dear"]), dict(keyword="dear"), dict(markexpr="slow")])
def test_who_names_tests_gets_them(named):
    assert selected(ITEMS, **named) == ALL
