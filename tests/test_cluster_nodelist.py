"""Slurm's node lists: acceptance cases N-01 to N-10."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight.cluster.nodelist import NodeListError, expand, split

GOOD = [
    ("N-01", "a800-[1-3,7]", "a800-1 a800-2 a800-3 a800-7"),
    ("N-02", "gpu[001-003],cpu5", "gpu001 gpu002 gpu003 cpu5"),
    ("N-03", "a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
    ("N-04", "n[09-11]", "n09 n10 n11"),
    ("N-05", "h20-[7,3,5]", "h20-7 h20-3 h20-5"),
    ("N-06-empty", "", ""),
    ("N-06-none", "None assigned", ""),
    ("N-06-null", "(null)", ""),
    ("N-07", "a800-[1-3,7]-ib", "a800-1-ib a800-2-ib a800-3-ib a800-7-ib"),
    ("N-10", "a800-[1-4]", "a800-1 a800-2 a800-3 a800-4"),
    ("one", "node7", "node7"),
]


@pytest.mark.parametrize(("text", "nodes"), [case[1:] for case in GOOD], ids=[case[0] for case in GOOD])
def test_expand(text: str, nodes: str) -> None:
    assert expand(text) == tuple(nodes.split())


BAD = {
    "N-08": "n[3-1]",
    "N-09": "n[1-3",
    "no-open": "n1-3]",
    "nested": "n[1-[2-3]]",
    "empty-range": "n[]",
    "words": "n[a-c]",
    "blank": "node 1",
    "comma": "a,,b",
    "huge": "n[1-99999999999]",
    "huge-product": "n[0-9999][0-9999][0-9999]",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_malformed_text_is_quoted(text: str) -> None:
    with pytest.raises(NodeListError) as error:
        expand(text)
    assert text in str(error.value)


@given(st.text(alphabet="an0123[]-, ", max_size=20))
def test_any_text_is_nodes_or_an_error(text: str) -> None:
    try:
        nodes = expand(text)
    except NodeListError:
        return
    assert all(nodes) and not {"[", "]", ",", " "} & set("".join(nodes))


def test_split_keeps_brackets_together() -> None:
    assert split("a[1,2],b,c[3,4]x") == ["a[1,2]", "b", "c[3,4]x"]


@pytest.mark.slurm
def test_same_as_slurm(cluster) -> None:
    for _, text, nodes in GOOD:
        if text and nodes and "-ib" not in text:
            assert cluster.run("scontrol", "show", "hostnames", text).split() == nodes.split()
