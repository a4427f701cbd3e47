"""Random chains mean what the documents say; more of them are on record."""

import fuzzing.library
import pytest
from fuzzing.cases import Case, draw
from fuzzing.compare import Difference, check, failure, fuzz, shrunk
from lanes import lanes

import boostax


# The quick draw each placement, reduction, optimizer, move and average of the first fourteen. The
# last has a scaler in a window of weighted gradients on a mesh.
@pytest.mark.parametrize("seed", lanes([*range(60), 70001], (2, 3, 4, 5, 7, 9, 10, 12, 13, 70001)))
def test_a_random_chain_equals_its_reference(seed):
    """Should it fail: the message ends in a program of the plainest case that does."""
    assert fuzz(seed) in ("equal", "refused")


def test_a_seed_draws_one_case():
    assert draw(11) == draw(11) != draw(12)


FAULTS = {
    "a scale that no gradient is divided by": lambda tx, **options: boostax.static_loss_scale(
        tx, 1.0, axis_name=options["axis_name"]
    ),
    "a scale that is lowered too late": lambda tx, **options: boostax.dynamic_loss_scale(
        tx, **options | {"hysteresis": options["hysteresis"] + 1}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_shrinks_to_a_program(fault, monkeypatch):
    """Of everything that has nothing to do with it nothing is left."""
    case = Case(
        seed=1, calls=4, gates=("scale", "window"), scale=8.0, bad=((1, 0, float("nan")),),
        clip=0.5, decay="coupled", optimizer="adam", every=(2,), moves=((2, "save", 0),),
    )  # fmt: skip
    assert check(case) == "equal"
    # The library's own is what the fault is made of.
    own = vars(fuzzing.library)["boostax"]
    broken = type("broken", (), {**vars(own), "dynamic_loss_scale": staticmethod(FAULTS[fault])})
    monkeypatch.setattr(fuzzing.library, "boostax", broken)
    found = failure(case)
    assert found is not None and found.startswith("Difference: call")
    plain, found = shrunk(case, found)
    assert (plain.optimizer, plain.decay, plain.clip, plain.moves) == ("sgd", "none", None, ())
    assert plain.gates == ("scale",) and plain.calls <= 2
    with pytest.raises(Difference):
        exec(plain.script(found), {})
