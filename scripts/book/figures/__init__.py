"""Drawings of single chapters: functions that take numbers and return charts."""
