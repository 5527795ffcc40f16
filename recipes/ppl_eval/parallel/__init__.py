"""Models and contexts over devices: mesh axes, FSDP, tensor and context parallelism."""
