import gc

from evenstep.core.importing import importing


def test_no_garbage_is_collected_while_importing_and_as_before_afterwards():
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled(), "as it was before"
    assert gc.isenabled()
