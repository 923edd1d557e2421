"""Checkers and solutions of the chapters' exercises, one module per chapter."""
