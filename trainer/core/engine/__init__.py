"""The update: objective, precision, means, moving averages, evaluation, diagnosis."""
