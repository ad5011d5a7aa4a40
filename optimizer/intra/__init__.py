"""Shardings inside a stage: what there is to choose, and three ways to choose it."""
