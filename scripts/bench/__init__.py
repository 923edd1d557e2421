"""Races against other programs, where the time goes, and what is owed on a GPU."""
