"""Graphs as pictures, and tables for terminals."""
