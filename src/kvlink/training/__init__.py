"""Rows to evaluate on and to learn from. Knows files and hub names; knows no engine."""
