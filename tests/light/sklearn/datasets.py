"""The digits, as scikit-learn has them in its file."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).parents[1]


def load_digits() -> SimpleNamespace:
    """Their images and what they show."""
    really = PathFinder.find_spec("sklearn", [place for place in sys.path if Path(place) != HERE])
    assert really is not None
    assert really.origin is not None
    data = np.loadtxt(Path(really.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    return SimpleNamespace(images=data[:, :-1].reshape(-1, 8, 8), target=data[:, -1].astype(int))
