"""All kernels in plain torch operations: the readable definition, and the fallback on any device."""
