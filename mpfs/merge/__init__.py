"""Merging: recipe → fitted inputs → plan → streamed columns → operators → output tensors.

A recipe is parsed (`recipe`), its models are fitted together (`inputs`), the planner chooses what to read (`planner`,
`compile`), the engine runs the plan (`delta`, `engine`, `operators`) and its result is described as files (`output`).
"""
