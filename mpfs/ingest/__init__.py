"""Import: a checkpoint on disk becomes blocks with statistics, then a snapshot.

Nothing is imported here: the facade inherits `facade.Imports`, and must not load torch before it is needed.
"""
