"""Tasks of lm-evaluation-harness over this project's models: its own evaluator, our log-likelihoods."""
