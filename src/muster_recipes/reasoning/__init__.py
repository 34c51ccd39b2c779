"""Recipe ``reasoning``: verified step-by-step solutions of a data set of problems."""
