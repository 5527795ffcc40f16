"""Many evaluations: sweeps over configs, and the checkpoints of a training run as they appear."""
