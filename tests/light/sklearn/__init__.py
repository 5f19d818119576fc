"""Stands in for scikit-learn in processes of which every one would take a second to import it: its digits alone."""
