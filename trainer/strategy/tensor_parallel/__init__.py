"""Matrices divided over ranks, by the tensor_plan of a task."""
