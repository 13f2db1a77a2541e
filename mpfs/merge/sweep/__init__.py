"""Sweeps: one recipe with many settings, planned together, read once, each result a commit of its own."""
