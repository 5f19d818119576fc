from evenstep.core import errors


def test_every_kind_of_error_has_an_exit_code_of_its_own():
    kinds = [getattr(errors, name) for name in errors.__all__ if name != "Dismissed"]
    assert all(
        issubclass(kind, errors.EvenstepError) for kind in kinds if kind not in (errors.Stopped, errors.BeginsAgain)
    )
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 126 for code in codes)


def test_a_peers_error_knows_the_peer():
    assert errors.PeerError("text", 3).worker == 3
