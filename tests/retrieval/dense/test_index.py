"""Which kind of index holds how many vectors, and that each kind finds what is near."""

from pathlib import Path

import numpy as np
import pytest

from retrieval_service.dense.embeddings import unit
from retrieval_service.dense.index import Kind, Sizes, VectorIndex


def clusters(rows: int, width: int = 16, seed: int = 0) -> np.ndarray:
    """Unit vectors in groups of about 20."""
    drawn = np.random.default_rng(seed)
    centres = drawn.standard_normal((max(1, rows // 20), width))
    spread = 0.3 * drawn.standard_normal((rows, width))
    return unit((centres[drawn.integers(0, len(centres), rows)] + spread).astype(np.float32))


def test_the_kind_follows_from_the_size() -> None:
    sizes = Sizes(flat=10, hnsw=20)
    assert [sizes.kind(n) for n in (0, 10, 11, 20, 21)] == ["flat", "flat", "hnsw", "hnsw", "ivfpq"]
    assert Sizes().kind(10_000) == "flat"
    assert Sizes().kind(200_000) == "hnsw"
    assert Sizes().kind(5_000_000) == "ivfpq"


@pytest.mark.parametrize(("kind", "least"), [("flat", 1.0), ("hnsw", 0.95), ("ivfpq", 0.9)])
def test_each_kind_finds_the_nearest_among_what_it_returns(kind: Kind, least: float, tmp_path: Path) -> None:
    vectors = clusters(3000)
    index = VectorIndex.build(vectors, kind)
    index.write(tmp_path / "index")
    again = VectorIndex.read(tmp_path / "index", kind)
    hits = 0
    for vector in vectors[::50]:
        nearest = set(np.argsort(-(vectors @ vector))[:5].tolist())
        found = index.search(vector, 80)
        hits += len(nearest & {row for row, _ in found})
        assert again.search(vector, 80) == found
    assert hits >= least * 5 * len(vectors[::50])


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivfpq"])
def test_rows_left_out_are_never_found(kind: Kind) -> None:
    vectors = clusters(500)
    index = VectorIndex.build(vectors, kind)
    without = np.arange(500) % 3 != 0
    for vector in vectors[:20]:
        rows = [row for row, _ in index.search(vector, 100, without)]
        assert rows
        assert all(row % 3 == 0 for row in rows)


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivfpq"])
def test_a_handful_of_vectors_is_enough_for_any_kind(kind: Kind) -> None:
    vectors = clusters(32)
    index = VectorIndex.build(vectors, kind)
    assert index.search(vectors[3], 1)[0][0] == 3


def test_a_disk_that_takes_no_more_is_an_error_of_the_disk() -> None:
    with pytest.raises(OSError, match="cannot be written"):
        VectorIndex.build(clusters(2000), "hnsw").write(Path("/dev/full"))
