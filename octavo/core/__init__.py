"""Nouns and pure logic: no torch, no I/O, no clock."""
