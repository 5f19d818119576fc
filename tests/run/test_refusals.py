"""What cannot be done with servers says why, and what to do instead."""

from typing import get_args

import pytest

from evenstep.core.errors import UnsupportedError
from evenstep.engine.updates import Feature
from evenstep.run.refusals import WITH_SERVERS, refuse


def test_what_has_a_reason_is_refused_with_it():
    for feature, reason in WITH_SERVERS.items():
        with pytest.raises(UnsupportedError) as caught:
            refuse(feature, WITH_SERVERS)
        assert str(caught.value) == reason


def test_what_has_none_is_not():
    for feature in set(get_args(Feature)) - WITH_SERVERS.keys():
        refuse(feature, WITH_SERVERS)


def test_reasons_are_for_features_there_are():
    assert WITH_SERVERS.keys() <= set(get_args(Feature))
