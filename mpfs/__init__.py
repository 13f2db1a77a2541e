"""MPFS: a storage layer for model weights, with git's habits.

>>> import mpfs
>>> repo = mpfs.open("models.mpfs", create=True)
"""
