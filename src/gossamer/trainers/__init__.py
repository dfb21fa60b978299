"""Trainers: one line for loops that belong to Accelerate, Hugging Face, Lightning, Fabric or torchtitan.

Each adapter imports its framework when it is imported itself.
"""
