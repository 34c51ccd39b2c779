"""Recipe ``ssm``: Guess & Check against gradient descent on diagonal state-space models."""
