"""Triton programs for GPUs, bit-equal to the reference; what is missing here runs as torch operations.

Launches switch the fusion of multiply and add off: where a product is not exact, fusing would change its last bit.
"""
