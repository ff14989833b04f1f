"""Cora: 2,708 papers on machine learning, 5,278 citations, 1,433 words, 7 classes; see ``_planetoid.py``."""

from hasten import Task
from hasten.workloads._planetoid import citation_task

FILES = {
    "ind.cora.allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "ind.cora.ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "ind.cora.tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "ind.cora.ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "ind.cora.graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "ind.cora.test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
}


def cora() -> Task:
    """The class of a paper (Cora), by a graph convolutional network on the full graph."""
    return citation_task("cora", FILES, target=0.8)
