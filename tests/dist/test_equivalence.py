"""A readable part of the matrix (make equivalence runs all of it): what is learned does not depend on the layout."""

import pytest
from equivalence import BF16_TOLERANCE, FAULTS, STRATEGIES, TOLERANCE, Matrix, within


class Cells(Matrix):
    """The matrix on the session's pools."""

    def __init__(self, folder, pools):
        super().__init__(folder, {world: pools(world) for world in (1, 2, 3)})


@pytest.fixture(scope="module")
def matrix(tiny_folder, pools):
    return Cells(tiny_folder, pools)


@pytest.fixture(scope="module")
def tied_matrix(tied_folder, pools):
    return Cells(tied_folder, pools)


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_learn_what_the_reference_learns(matrix, strategy, adapter):
    worst = matrix.cell(2, strategy, adapter, 2)
    assert within(worst, TOLERANCE), worst


@pytest.mark.parametrize("world, strategy, adapter, micro", [(1, "ddp", "full", 4), (1, "zero3", "lora", 1),
                                                             (3, "zero3", "full", 1), (3, "fsdp", "lora", 1)])
def test_any_number_of_ranks_and_any_micro_batch(matrix, world, strategy, adapter, micro):
    worst = matrix.cell(world, strategy, adapter, micro)
    assert within(worst, TOLERANCE), worst


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_tied_embeddings(tied_matrix, strategy):
    worst = tied_matrix.cell(2, strategy, "full", 2)
    assert within(worst, TOLERANCE), worst


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_bf16_stays_near_the_fp32_reference(matrix, strategy):
    worst = matrix.cell(2, strategy, "lora", 2, "bf16", optimizers=("sgd",))
    assert within(worst, BF16_TOLERANCE), worst


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(matrix, fault):
    assert not within(matrix.cell(2, "fsdp", "full", 2, fault=fault), TOLERANCE)
