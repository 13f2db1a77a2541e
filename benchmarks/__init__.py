"""Benchmarks: what MPFS promises about speed, memory and fidelity, as ratios measured in one run."""
