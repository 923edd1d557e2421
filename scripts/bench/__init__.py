"""Races against other programs, and where the time goes."""
