"""Checkers and solutions of the chapters' exercises, a module a chapter."""
