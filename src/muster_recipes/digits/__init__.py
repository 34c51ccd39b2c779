"""Recipe ``digits``: the smallest real training task, an image classifier."""
